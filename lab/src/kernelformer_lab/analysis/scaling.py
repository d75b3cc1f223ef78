"""Bytes, memory and time of attention over several ranks: by sums of constant size, and by ring attention.

Sizes in numbers and bytes are exact for `kernelformer.parallel.context_parallel`; times are computed from what one
rank was measured to take and from the speed of a link. Nothing here runs anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernelformer.errors import integer, number

INTEGER = 8  # bytes
SOFTMAX_FLOPS = 14  # per query, key, head and dimension: 2 products forward; 5 backward, scores computed again


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank gives to all others in one layer.

    Args:
        rounds: exchanges in both directions, in each of which a rank has R - 1 messages one after the other.
    """

    forward: int
    backward: int
    rounds: int

    @property
    def total(self) -> int:
        """Bytes in both directions."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Link:
    """Connection of a rank with the others.

    Args:
        bits: per second, in each direction at once.
        latency: seconds of a message of no size.
    """

    bits: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        number("bits", self.bits, above=0)
        number("latency", self.latency, at_least=0)

    def seconds(self, traffic: Traffic, ranks: int) -> float:
        """Time of a rank's exchanges, `rounds` of R - 1 messages each."""
        return traffic.rounds * (ranks - 1) * self.latency + 8 * traffic.total / self.bits


@dataclass(frozen=True)
class Exchange:
    """Tensors that the ranks of `context_parallel` exchange in one attention layer.

        state  = M (E + 1)                                  numbers a head; 2 more of a map with signs
        causal = B G (state + [w > 0] state + (w + s) (D + E)) + [marked] 2 B w
        both   = B G (state + [w > 0] 2 state + (2 w + s) (D + E)) + [marked] 4 B w

    numbers forward, and as many backward: sums of all far tokens of a rank; of all but those next to a neighbour; the w
    tokens next to it; s candidates for sinks; which of the w tokens count, where there are masks, sinks or packed rows.
    With a slope both directions have sums of their own; with packed rows all, twice the causal numbers. Before them go
    integers: facts that have to agree and, with sinks or packed rows, B (4 + 2 s) on where those are. Each rank gives
    R - 1 copies. The length is in none of it.

    Args:
        heads: G of the sums: those of the keys, or of a map that differs from head to head.
        head_dim: D.
        value_dim: E.
        features: M; 0 without a map, as of `local`.
        facts: integers that ranks compare before each exchange.
        window: w, tokens on each side that are attended to as they are.
        sinks: s.
        batch: B.
        item: bytes of a number in the arithmetic: 4, of float64 8.
        signed: whether the map has values of both signs.
        causal: whether only ranks before count.
        masked: whether any rank has a key mask.
        packed: whether rows hold several sequences.
        slope: whether far weights fall with the distance.
    """

    heads: int
    head_dim: int
    value_dim: int
    features: int
    facts: int
    window: int = 0
    sinks: int = 0
    batch: int = 1
    item: int = 4
    signed: bool = False
    causal: bool = False
    masked: bool = False
    packed: bool = False
    slope: bool = False

    def __post_init__(self) -> None:
        for name in ("heads", "head_dim", "value_dim", "batch", "item"):
            integer(name, getattr(self, name), at_least=1)
        for name in ("features", "facts", "window", "sinks"):
            integer(name, getattr(self, name), at_least=0)

    @property
    def state(self) -> int:
        """Numbers of the sums of one head."""
        return 0 if not self.features else self.features * (self.value_dim + 1) + 2 * self.signed

    @property
    def numbers(self) -> int:
        """Numbers that a rank gives to each other one, in each direction."""
        width, w = self.head_dim + self.value_dim, self.window
        near = self.heads * (bool(w) * self.state + w * width)
        near += 2 * w * (self.masked or self.packed or bool(self.sinks))
        alike = self.heads * (self.state + self.sinks * width)  # serves both directions
        if self.causal:
            return self.batch * (alike + near)
        if self.packed:
            return self.batch * 2 * (alike + near)
        return self.batch * (alike + self.slope * self.heads * self.state + 2 * near)

    @property
    def integers(self) -> int:
        """Integers that a rank gives to each other one."""
        located = self.batch * (4 + 2 * self.sinks) if self.sinks or self.packed else 0
        return self.facts + located

    def traffic(self, ranks: int) -> Traffic:
        """Bytes that one of so many ranks gives to all others in a layer, forward and backward."""
        copies = integer("ranks", ranks, at_least=1) - 1
        payload = self.numbers * self.item
        rounds = 1 + bool(self.sinks or self.packed) + 2 * bool(payload)
        return Traffic(copies * (payload + self.integers * INTEGER), copies * payload, rounds)


@dataclass(frozen=True)
class RingAttention:
    """Exact attention over ranks whose keys and values go around in a ring, block by block.

    In its favour: the work is balanced between ranks under a causal mask, halved by it, and hides all exchange that is
    shorter; gradients of keys and values travel R - 1 steps.

    Args:
        heads: H.
        key_heads: G.
        head_dim: D, of values too.
        batch: B.
        item: bytes of a number.
        causal: whether a query sees only what came before it.
    """

    heads: int
    key_heads: int
    head_dim: int
    batch: int = 1
    item: int = 4
    causal: bool = False

    def traffic(self, tokens: int, ranks: int) -> Traffic:
        """Bytes that one of so many ranks gives to the next, with ``tokens`` on each: the length is in all of it."""
        block = 2 * tokens * self.batch * self.key_heads * self.head_dim * self.item
        steps = ranks - 1
        return Traffic(steps * block, 2 * steps * block, 2)

    def flops(self, tokens: int, ranks: int) -> float:
        """Operations of one rank, forward and backward."""
        pairs = tokens * tokens * ranks * (0.5 if self.causal else 1.0)
        return SOFTMAX_FLOPS * self.batch * self.heads * self.head_dim * pairs

    def seconds(self, tokens: int, ranks: int, flops_per_second: float, link: Link) -> float:
        """Time of a layer, forward and backward: the work or the exchange, whichever is longer."""
        work = self.flops(tokens, ranks) / flops_per_second
        return max(work, link.seconds(self.traffic(tokens, ranks), ranks))


@dataclass(frozen=True)
class LinearCost:
    """Measured time and memory of a rank of `context_parallel` for one layer, forward and backward.

    Args:
        exchange: what goes around.
        token: seconds of the work on one token.
        merge: seconds that the state of one more rank takes.
    """

    exchange: Exchange
    token: float
    merge: float = 0.0

    def work(self, tokens: int, ranks: int, speed: float = 1.0) -> float:
        """Seconds of the work of a rank that is ``speed`` times as fast as the measured one."""
        return (tokens * self.token + ranks * self.merge) / speed

    def seconds(self, tokens: int, ranks: int, link: Link, speed: float = 1.0) -> float:
        """Time of a layer: work, then exchange; nothing is hidden."""
        return self.work(tokens, ranks, speed) + link.seconds(self.exchange.traffic(ranks), ranks)

    def least_tokens(self, ranks: int, link: Link, share: float = 0.1, speed: float = 1.0) -> float:
        """Tokens on each rank from which exchange and merging are at most ``share`` of the work on the tokens."""
        other = self.seconds(0, ranks, link, speed)
        return other * speed / (share * self.token)


def ring_least_tokens(ring: RingAttention, link: Link, flops_per_second: float) -> float:
    """Tokens on each rank from which the work of ring attention hides its exchange, but for latencies.

    A block goes around while the one before it is worked on: the exchange grows with the tokens of a block, the work
    with their square.
    """
    traffic, flops = ring.traffic(1, 2), ring.flops(1, 1)
    return 8 * traffic.total / link.bits * flops_per_second / flops
