"""Tables of one sequence over several ranks: what was measured here, and what follows for many more ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kernelformer.formatting import human_bytes, human_time
from kernelformer_lab.analysis.scaling import Exchange, LinearCost, Link, RingAttention, ring_least_tokens
from pages.records import ABSENT, Records, grid, table

RANKS = "speed/ranks/ranks.json"
LENGTH = 32768  # tokens of a rank; shorter runs are trials
LATENCY = 2e-5  # seconds of a message, about that of Ethernet in a data centre
LINKS = {f"{x} Gbit/s": Link(x * 1e9, LATENCY) for x in (10, 100, 400)}
MIDDLE = "100 Gbit/s"
COUNTS = (8, 64, 512)
TOKENS = {f"{x}M": x << 20 for x in (1, 4, 16, 64)}
SPEEDS = {"the measured core": 1, "100 times as fast": 100, "10,000 times as fast": 10_000}
Row = Mapping[str, Any]


class Plan:
    """Measurements of one rank, as the formulas take them.

    Args:
        record: of the study `ranks`.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        self.times: Sequence[Row] = record.get("times", [])
        self.peaks: Sequence[Row] = record.get("peaks", [])
        self.softmax: Mapping[str, Any] = record.get("softmax", {})
        fewest = min((x["ranks"] for x in self.times), default=0)
        # Of the fewest ranks: each has a core to itself.
        self.rows = [x for x in self.times if x["ranks"] == fewest]

    def costs(self, causal: bool) -> dict[str, LinearCost]:
        """Costs of the attentions of the record, by their specs."""
        rows = [x for x in self.rows if x["causal"] == causal]
        return {
            x["attention"]: LinearCost(Exchange(**x["exchange"]), x["work"] / x["length"], x["merge"]) for x in rows
        }

    def ring(self, causal: bool) -> RingAttention:
        """Ring attention with the sizes of the record."""
        one = Exchange(**self.rows[0]["exchange"])
        return RingAttention(one.heads, one.heads, one.head_dim, batch=one.batch, item=one.item, causal=causal)

    def flops(self, causal: bool) -> float:
        """Operations per second of exact attention on one core."""
        seconds: float = self.softmax[_kind(causal)]
        return self.ring(causal).flops(self.softmax["length"], 1) / seconds

    def peak(self, attention: str, causal: bool) -> Row | None:
        """The memory of an attention over the most ranks on record."""
        some = [x for x in self.peaks if (x["attention"], x["causal"]) == (attention, causal)]
        return max(some, key=lambda x: x["ranks"], default=None)


def _kind(causal: bool) -> str:
    return "causal" if causal else "bidirectional"


@table
def ranks_efficiency(records: Records) -> str:
    """Times of ranks and of independent processes that run at the same time; a trial run says that it is one."""
    rows, longest = [], 0
    for x in Plan(records.get(RANKS)).times:
        times = [human_time(x["alone"]), human_time(x["split"]), f"{x['efficiency']:.2f}", f"{x['expected']:.2f}"]
        rows.append([f"`{x['attention']}`, {_kind(x['causal'])}", f"{x['ranks']} x {x['length']}", *times])
        longest = max(longest, x["length"])
    head = ["forward + backward, one thread a rank", "ranks x tokens", "independent", "over ranks", "efficiency"]
    made = grid([*head, "without exchange"], rows or [["", "", "", "", ABSENT, ""]])
    trial = f"\n\nA trial run with {longest} tokens of a rank: its times, and all that follow from them, are no record."
    return made + trial if 0 < longest < LENGTH else made


@table
def ranks_bytes(records: Records) -> str:
    """Bytes that a rank was seen to give to the others, beside the formula."""
    rows = []
    for x in Plan(records.get(RANKS)).times:
        lengths = ", ".join(x["sent"])
        seen = sorted({tuple(y) for y in x["sent"].values()})
        counted = "; ".join(f"{forward:,} + {backward:,}" for forward, backward in seen)
        formula = f"{x['formula'][0]:,} + {x['formula'][1]:,}"
        rows.append([f"`{x['attention']}`, {_kind(x['causal'])}", str(x["ranks"]), counted, formula, lengths])
    head = ["attention", "ranks", "bytes sent by a rank, forward + backward", "formula", "counted at tokens of a rank"]
    return grid(head, rows or [["", "", ABSENT, "", ""]])


@table
def ranks_memory(records: Records) -> str:
    """Peak memory of a rank when ranks and tokens grow together."""
    peaks = Plan(records.get(RANKS)).peaks
    counts = sorted({x["ranks"] for x in peaks})
    by = {(x["attention"], x["causal"], x["ranks"]): x for x in peaks}
    rows = []
    for attention, causal in dict.fromkeys((x["attention"], x["causal"]) for x in peaks):
        some = [by[attention, causal, n] for n in counts]
        cells = [f"{x['peak'] / 2**20:.0f} MiB" for x in some]
        rows.append([f"`{attention}`, {_kind(causal)}", f"{some[0]['inputs'] / 2**20:.0f} MiB", *cells])
    head = ["attention", "inputs", *(f"{n} rank{'s' * (n > 1)}" for n in counts)]
    return grid(head, rows) if rows else grid(["peak beyond the inputs", ""], [["", ABSENT]])


@table
def scale_bytes(records: Records) -> str:
    """Bytes that a rank of many sends in one layer, beside those of ring attention."""
    plan = Plan(records.get(RANKS))
    if not plan.rows:
        return grid(["ranks", "bytes sent by a rank"], [["", ABSENT]])
    ours = {
        f"`{name}`, {_kind(causal)}": cost.exchange
        for causal in (False, True)
        for name, cost in plan.costs(causal).items()
    }
    rows = []
    for count in COUNTS:
        ring = [plan.ring(True).traffic(n // count, count).total for n in TOKENS.values()]
        own = [human_bytes(x.traffic(count).total) for x in ours.values()]
        rows.append([str(count), *own, " / ".join(human_bytes(x) for x in ring)])
    return grid(["ranks", *ours, f"ring attention, {' / '.join(TOKENS)} tokens"], rows)


@table
def scale_memory(records: Records) -> str:
    """Memory of a rank for one causal attention layer, forward and backward, for each attention on record."""
    plan = Plan(records.get(RANKS))
    rows = []
    for attention in plan.costs(causal=True):
        peak = plan.peak(attention, True)
        if peak is None:
            continue
        token = (peak["inputs"] + peak["peak"]) / peak["length"]
        for count in COUNTS:
            states = count * peak["merge"]
            cells = [human_bytes(n // count * token + states) for n in TOKENS.values()]
            rows.append([f"`{attention}`", str(count), human_bytes(states), *cells])
    head = ["causal", "ranks", "of that states", *(f"{x} tokens" for x in TOKENS)]
    return grid(head, rows or [["", "", ABSENT, *[""] * len(TOKENS)]])


@table
def scale_plain(records: Records) -> str:
    """Time of one layer of the first attention of the record, and of ring attention."""
    return _layer_times(records, 0)


@table
def scale_near(records: Records) -> str:
    """Time of one layer of the second attention of the record, which has a window, and of ring attention."""
    return _layer_times(records, 1)


def _layer_times(records: Records, number: int) -> str:
    plan, rows = Plan(records.get(RANKS)), []
    costs = plan.costs(causal=True)
    name = [*costs, "", ""][number]
    for label, tokens in TOKENS.items() if name and plan.softmax else ():
        rows += [[f"{label}, {count}", *_layer(plan, costs[name], tokens // count, count)] for count in COUNTS]
    what = f"`{name}`" if name else "attention"
    head = [f"tokens, ranks: {what}, causal", "tokens of a rank", "work", f"exchange, {' / '.join(LINKS)}"]
    head += ["ring attention: work", "its exchange", f"takes, {MIDDLE}"]
    return grid(head, rows or [[ABSENT, *[""] * (len(head) - 1)]])


def _layer(plan: Plan, cost: LinearCost, tokens: int, count: int) -> list[str]:
    ring, rate = plan.ring(True), plan.flops(True)
    around = [x.seconds(cost.exchange.traffic(count), count) for x in LINKS.values()]
    blocks = [x.seconds(ring.traffic(tokens, count), count) for x in LINKS.values()]
    ratio = ring.seconds(tokens, count, rate, LINKS[MIDDLE]) / cost.seconds(tokens, count, LINKS[MIDDLE])
    return [
        f"{tokens:,}",
        human_time(cost.work(tokens, count)),
        " / ".join(map(human_time, around)),
        _long_time(ring.flops(tokens, count) / rate),
        " / ".join(map(human_time, blocks)),
        f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.1f}x",
    ]


def _long_time(seconds: float) -> str:
    return human_time(seconds) if seconds < 360_000 else f"{seconds / 3600:,.0f} h"


@table
def scale_limits(records: Records) -> str:
    """Tokens of a rank from which the exchange no longer matters, by the speed of a rank and of its link."""
    plan, rows = Plan(records.get(RANKS)), []
    if plan.rows and plan.softmax:
        for said, speed in SPEEDS.items():
            for name, cost in plan.costs(causal=True).items():
                for count in COUNTS:
                    least = [cost.least_tokens(count, x, speed=speed) for x in LINKS.values()]
                    rows.append([said, f"`{name}`, {count} ranks", *(f"{x:,.0f}" for x in least)])
            ring = [ring_least_tokens(plan.ring(True), x, plan.flops(True) * speed) for x in LINKS.values()]
            rows.append([said, "ring attention, any number", *(f"{x:,.0f}" for x in ring)])
    return grid(["a rank is", "causal", *LINKS], rows or [["", "", *[ABSENT] * len(LINKS)]])


@table
def scale_speeds(records: Records) -> str:
    """Measurements that the tables of the plan are computed from."""
    plan, rows = Plan(records.get(RANKS)), []
    for causal in (False, True):
        for name, cost in plan.costs(causal).items():
            each = f"{human_time(cost.token)} a token, {human_time(cost.merge)} for the state of another rank"
            rows.append([f"`{name}`, {_kind(causal)}", each])
        if plan.softmax and plan.rows:
            rows.append([f"exact attention, {_kind(causal)}", f"{plan.flops(causal) / 1e9:.3g} GFLOP/s"])
    return grid(["one layer, one core, forward + backward", "measured"], rows or [["", ABSENT]])
