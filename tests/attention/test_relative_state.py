"""A call with a relative bias as a part of a longer sequence: sums of keys on both sides, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

from definition import build, close, count_rescues, inputs
from kernelformer.attention import blocks
from kernelformer.attention.dispatch import attend_biased
from kernelformer.attention.plain import pairs
from kernelformer.attention.plain.attend import make_map
from kernelformer.attention.positive import EMPTY
from kernelformer.attention.relative.call import Layout, RelativeCall, sums_of_state
from kernelformer.attention.relative.operator import relative_attention
from kernelformer.contract import PositiveSpec, lookup

H, SCALE = 2, 0.5


@pytest.fixture(autouse=True)
def _short_tiles(monkeypatch):
    """Tiles of 16 tokens and segments of two chunks, so that short sequences have several."""
    monkeypatch.setattr(pairs, "CHUNK", 16)
    monkeypatch.setattr(blocks, "BUFFER", 5000)


@dataclass
class Case:
    """A whole sequence of L tokens, with its leaves."""

    variant: str
    L: int = 150
    cuts: tuple[int, ...] = (40, 110)
    window: int = 9
    sloped: bool = False
    causal: bool = False
    masked: bool = False
    hidden: tuple[int, ...] = ()  # distances with a bias of -inf

    def __post_init__(self):
        gen = torch.Generator().manual_seed(1)
        self.core = build(self.variant)
        phi = self.core.feature_map
        self.q, self.k, self.v = inputs(self.L, B=2, H=H, G=H, E=3, seed=2, size=0.7)
        self.tensors = [x[:, :H].detach().clone() for x in phi.prepare(self.q, self.k, None, SCALE)]
        self.spec_id, self.spec = phi.spec_id, lookup(phi.spec_id)
        self.mask = None
        if self.masked:
            self.mask = torch.rand(2, self.L, generator=gen) > 0.3
            self.mask[0, :60], self.mask[1, 100:] = False, False
        self.slope = torch.tensor([0.3, 0.02], dtype=torch.float64) if self.sloped else None
        self.own = torch.randn(H, 2 * self.window + 1, generator=gen, dtype=torch.float64)
        for x in self.hidden:
            self.own[:, self.window + x] = -torch.inf
        for x in self.leaves:
            x.requires_grad_()
        self.gradient = torch.randn(2, H, self.L, 3, generator=gen, dtype=torch.float64)

    @property
    def leaves(self):
        return [self.q, self.k, self.v, self.own, *self.tensors]

    def table(self, first, last):
        """The bias at distances first to last - 1."""
        distance = torch.arange(first, last)
        bias = self.own[:, distance.clamp(-self.window, self.window) + self.window]
        if self.slope is None:
            return bias
        return bias - self.slope[:, None] * (distance.abs() - self.window).clamp_min(0)

    def call(self, **settings):
        shared = {"spec": self.spec_id, "tensors": self.tensors, "scale": SCALE, "is_causal": self.causal}
        return RelativeCall(**shared, **settings)

    def whole(self):
        """All at once, pair by pair: without a window there are no sums."""
        bias, layout = self.table(1 - self.L, self.L), Layout(self.L, self.L)
        call = self.call(query=self.q, key=self.k, value=self.v, bias=bias, layout=layout, key_mask=self.mask)
        return relative_attention(call)[0]

    def part(self, begin, end, outer=None, empty=False):
        """Queries begin to end with halos, and sums of all other keys."""
        outer = self.sums if outer is None else outer
        low, high = max(0, begin - self.window), end if self.causal else min(self.L, end + self.window)
        right = () if self.causal or (high == self.L and not empty) else outer(high, self.L, end - 1)
        call = self.call(
            query=self.q[:, :, begin:end],
            key=self.k[:, :, low:high],
            value=self.v[:, :, low:high],
            bias=self.table(low - end + 1, high - begin),
            layout=Layout(end - begin, high - low, begin - low),
            key_mask=None if self.mask is None else self.mask[:, low:high],
            window=self.window,
            slope=self.slope,
            state=() if low == 0 and not empty else outer(0, low, begin),
            right_state=right,
        )
        return relative_attention(call)[0]

    def fades(self, first, last, edge):
        """-slope (d - window), (H, n, 1), of keys first to last."""
        distance = (torch.arange(first, last) - edge).abs() - self.window
        return 0 if self.slope is None else -(self.slope[:, None] * distance).unsqueeze(2)

    def logs(self, first, last, edge):
        """Log features of a positive map, or features and log factors of a signed one."""
        k = self.k[:, :, first:last]
        hidden = torch.zeros(2, 1, last - first, 1, dtype=torch.bool)
        if self.mask is not None:
            hidden = ~self.mask[:, None, first:last, None]
        fades = self.fades(first, last, edge)
        if isinstance(self.spec, PositiveSpec):
            return (self.spec.log_shares(k, self.tensors, SCALE, "key") + fades).masked_fill(hidden, -torch.inf)
        phi, factor = self.spec.features(k, self.tensors, SCALE, "key", True)
        factor = (0 if factor is None else factor) + fades + torch.zeros_like(phi[..., :1])
        return phi, factor.masked_fill(hidden, -torch.inf)

    def sums(self, first, last, edge):
        """The tensors of a state over keys first to last, by their definition."""
        v, empty = self.v[:, :, first:last], torch.full((2, H, 1, 1), EMPTY, dtype=torch.float64)
        if isinstance(self.spec, PositiveSpec):
            logs = self.logs(first, last, edge)
            shift = torch.cat([empty.expand(-1, -1, -1, logs.shape[3]), logs.detach()], 2).amax(2, keepdim=True)
            phi = (logs - shift).exp()
            return [shift, phi.mT @ v, phi.sum(2).unsqueeze(3), torch.zeros_like(empty)]
        phi, factor = self.logs(first, last, edge)
        shift = torch.cat([empty, factor.detach()], 2).amax(2, keepdim=True)
        size, length = (factor - shift).exp(), self.spec.length(True)
        lengths = phi.norm(dim=-1, keepdim=True) if length is None else torch.full_like(size, length)
        phi = phi * size
        return [shift, phi.mT @ v, phi.sum(2).unsqueeze(3), (lengths * size).sum(2, keepdim=True)]

    def engine_sums(self, first, last, edge):
        """The same from the state of an engine, as its operators would give it to autograd."""
        v, empty = self.v[:, :, first:last], torch.full((2, H, 1, 1), EMPTY, dtype=torch.float64)
        if not isinstance(self.spec, PositiveSpec):
            shift, *rest = self.sums(first, last, edge)
            return sums_of_state([shift, *rest], False)
        logs = self.logs(first, last, edge)
        mass = torch.cat([empty.expand(-1, -1, -1, logs.shape[3]), logs], 2).logsumexp(2).unsqueeze(3)
        return sums_of_state([mass, (logs.mT - mass).exp() @ v], True)

    def check(self, out, want, rows=slice(None), tolerance=1e-9):
        """Compare outputs and all gradients."""
        close(out[:, :, rows], want[:, :, rows], tolerance)
        grads = []
        for y in (out, want):
            loss = (y * self.gradient)[:, :, rows].sum()
            grads.append(torch.autograd.grad(loss, self.leaves, retain_graph=True, allow_unused=True))
        for x, y in zip(*grads, strict=True):
            close(x, y, 100 * tolerance)


def parts(case, **options):
    places = [0, *case.cuts, case.L]
    return torch.cat([case.part(a, b, **options) for a, b in pairwise(places)], 2)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("sloped", [False, True], ids=["level", "slope"])
@pytest.mark.parametrize("variant", ["favor+", "gmm-prf", "trigonometric", "relu", "tanh"])
def test_three_parts_are_the_whole_with_all_gradients(variant, sloped, causal):
    case = Case(variant, sloped=sloped, causal=causal, masked=variant != "gmm-prf")
    case.check(parts(case), case.whole())


@pytest.mark.parametrize("sloped", [False, True], ids=["level", "slope"])
@pytest.mark.parametrize("variant", ["favor+", "trigonometric"])
def test_parts_shorter_than_the_window_and_sides_without_keys(variant, sloped):
    """Empty sides as tensors: EMPTY and zeros, alone (with every key hidden) or beside none at all."""
    case = Case(variant, L=60, cuts=(3, 20, 22, 58), window=17, sloped=sloped)
    case.check(parts(case, empty=True), case.whole())
    case = Case(variant, L=40, cuts=(1, 39), window=0, sloped=sloped)
    case.check(parts(case), case.whole())
    case = Case(variant, L=80, cuts=(70,), window=4, sloped=sloped, masked=True)
    case.mask[0, :] = False  # a sample without any key
    case.check(parts(case, empty=True), case.whole())
    for x in torch.autograd.grad((parts(case) * case.gradient)[0].sum(), case.leaves[:3]):
        assert (x[0] == 0).all()


@pytest.mark.parametrize("variant", ["favor+", "trigonometric", "relu"])
def test_a_hidden_tail_gives_nothing_to_the_sums(variant):
    """The bias hides all keys on the left beyond the window, and some within."""
    case = Case(variant, hidden=(-9, -3, 2))
    case.check(parts(case), case.whole())
    state = [x.detach().requires_grad_() for x in case.sums(0, 31, 40)]
    out = case.part(40, 110, lambda first, last, edge: case.sums(first, last, edge) if first else state)
    grads = torch.autograd.grad(out.sum(), state, allow_unused=True)
    assert grads[0] is None  # the shift is a gauge
    assert all(x is None or (x == 0).all() for x in grads[1:])


@pytest.mark.parametrize("sloped", [False, True], ids=["level", "slope"])
@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("alone", [False, True], ids=["with keys", "with states only"])
@pytest.mark.parametrize("variant", ["favor+", "trigonometric"])
def test_rows_that_a_huge_key_dwarfs_see_the_states(variant, alone, causal, sloped, monkeypatch):
    """A key that some rows cannot see (a later one, or one that the bias hides) is e^100 times the others or more."""
    case = Case(variant, causal=causal, sloped=sloped, window=12, hidden=() if causal else tuple(range(1, 12)))
    done, huge = count_rescues(monkeypatch), 70
    if causal:
        monkeypatch.setattr(blocks, "BUFFER", 1)  # a block for every sample
        monkeypatch.setattr(pairs, "PAIRS", 1)
    with torch.no_grad():
        if variant == "favor+":  # long keys have small features, which queries on the other side weigh alike
            case.q[..., 0], case.k[..., 0] = -30, 30
            case.k[:, :, huge, 0] = 0
        else:
            case.k[:, :, huge] *= 12
    if alone:  # all other keys of the middle part and of its halos are masked
        case.mask = torch.ones(2, case.L, dtype=torch.bool)
        case.mask[:, 28:122] = torch.arange(28, 122) == huge
    rows = slice(40, huge) if causal else slice(huge - 11, huge)  # the others see nothing else
    out = parts(case)
    assert (sum(done) > 0) == (variant == "favor+")  # a signed row is relative to what it sees
    case.check(out, case.whole(), rows, 1e-8)
    far = torch.autograd.grad(out[:, :, rows].sum(), case.v, retain_graph=True)[0][:, :, :28]
    assert (far.abs().amax((2, 3)) > 1e-4).all()  # the state counts


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("variant", ["favor+", "trigonometric", "tanh"])
def test_states_of_engines_become_sums_with_their_gradients(variant, causal):
    """log_mass has a gradient, and what is made of it has none for the shift."""
    for sloped in (False, True):
        case = Case(variant, causal=causal, sloped=sloped, masked=True)
        case.check(parts(case, outer=case.engine_sums, empty=True), case.whole())


@pytest.mark.parametrize("sloped", [False, True], ids=["level", "slope"])
@pytest.mark.parametrize("variant", ["favor+", "trigonometric", "relu", "tanh"])
def test_what_plain_maps_take_in_equals_the_keys_themselves(variant, sloped):
    """As they stand, or with the log factors of a slope; in two chunks; and of nothing."""
    case = Case(variant, sloped=sloped)

    def absorbed(first, last, edge):
        phi = make_map(case.spec, case.tensors, SCALE, True, fades=sloped)
        kept, fades = None, case.fades(first, last, edge)
        for part in (slice(0, 5), slice(5, None)):
            keys = phi.keys(case.k[:, :, first:last][:, :, part], case.v[:, :, first:last][:, :, part], None)
            if sloped:
                keys = phi.faded(keys, fades[:, part].expand(2, -1, -1, -1).flatten(0, 1))
            kept = phi.absorb(keys, kept)
        return sums_of_state(phi.store(kept, H), isinstance(case.spec, PositiveSpec))

    with torch.no_grad():
        close(parts(case, outer=absorbed, empty=True), case.whole())


@pytest.mark.parametrize("variant", ["favor+", "trigonometric", "tanh"])
def test_a_state_of_no_keys_makes_sums_of_none(variant):
    """Whatever stands for nothing, no output changes, and no gradient is NaN or reaches it."""
    case = Case(variant, L=30, cuts=())
    positive = isinstance(case.spec, PositiveSpec)
    features = case.spec.feature_dim(case.tensors, 8)
    shapes = [(features, 1), (features, 3)] if positive else [(1, 1), (features, 3), (features, 1), (1, 1)]
    for log in (EMPTY, 2 * EMPTY, -torch.inf):
        state = [torch.zeros(2, H, *x, dtype=torch.float64) for x in shapes]
        state[0].fill_(log)
        for x in state:
            x.requires_grad_()
        made = sums_of_state(state, positive)
        out = case.part(0, 30, lambda *_, made=made: made, empty=True)
        case.check(out, case.whole())
        for x in torch.autograd.grad((out * case.gradient).sum(), state, allow_unused=True):
            assert x is None or (x == 0).all()


@pytest.mark.parametrize("sloped", [False, True], ids=["level", "slope"])
@pytest.mark.parametrize("variant", ["favor+", "trigonometric", "tanh"])
def test_gradients_flow_through_the_sums_that_a_call_returns(variant, sloped):
    """Causal, two calls after a state: each hands its sums to the next, and all but the last ones to itself."""
    case = Case(variant, sloped=sloped, causal=True, masked=True)
    if sloped:
        case.slope = torch.tensor([9.0, 0.02], dtype=torch.float64)  # e^-1000 over a part
    state, out = case.sums(0, 31, 40), []
    for begin, end in ((40, 110), (110, 150)):
        low = begin - case.window
        call = case.call(
            query=case.q[:, :, begin:end],
            key=case.k[:, :, low:end],
            value=case.v[:, :, low:end],
            bias=case.table(low - end + 1, end - begin),
            layout=Layout(end - begin, end - low, begin - low),
            key_mask=case.mask[:, low:end],
            window=case.window,
            slope=case.slope,
            state=state,
        )
        y, state = relative_attention(call, keep=case.window)
        out.append(y)
    case.check(torch.cat([case.q[:, :, :40, :3] * 0, *out], 2), case.whole(), slice(40, None))
    close(state[0].exp() * state[2].mT, case.sums(0, 141, 150)[0].exp() * case.sums(0, 141, 150)[2].mT)
    own, same = (
        torch.autograd.grad(
            sum(((x[0].mT.exp() if i < 3 else x[0].exp()) * x[i]).sum() for i in (1, 2)), case.leaves[1:3]
        )
        for x in (state, case.sums(0, 141, 150))
    )
    for x, y in zip(own, same, strict=True):  # without any gradient of the outputs
        close(x, y)


def tiny(variant, right):
    """A call of 3 queries and 5 keys, and its leaves, those of the states with it."""
    case = Case(variant, L=9, cuts=(), window=1)
    state = [x[:1].detach() for x in case.sums(0, 2, 3)]
    other = [x[:1].detach() for x in case.sums(7, 9, 5)] if right else []
    leaves = [case.q[:1, :, 3:6], case.k[:1, :, 2:7], case.v[:1, :, 2:7], case.table(-3, 4), *state[1:], *other[1:]]

    def attend(q, k, v, bias, *rest):
        call = case.call(query=q, key=k, value=v, bias=bias, layout=Layout(3, 5, 1), window=1)
        given = [[x[0], *y] if x else [] for x, y in ((state, rest[:3]), (other, rest[3:]))]
        return replace(call, state=given[0], right_state=given[1])

    return attend, [x.detach().clone().requires_grad_() for x in leaves]


@pytest.mark.parametrize("variant", ["favor+", "trigonometric", "tanh"])
def test_gradients_through_both_states_pass_gradcheck(variant):
    attend, leaves = tiny(variant, right=True)
    torch.autograd.gradcheck(lambda *x: relative_attention(attend(*x))[0], leaves, fast_mode=True)
    attend, leaves = tiny(variant, right=False)

    def kept(*x):
        shift, kv, ks, _ = relative_attention(attend(*x), keep=1)[1]
        return shift.mT.exp() * kv, shift.mT.exp() * ks  # what the shift is depends on the keys, but counts for nothing

    torch.autograd.gradcheck(kept, leaves, fast_mode=True)


@pytest.mark.parametrize("variant", ["favor+", "trigonometric"])
def test_the_operator_and_its_compiled_form_know_the_states(variant):
    attend, leaves = tiny(variant, right=True)
    call = attend(*leaves)
    operator = torch.ops.kernelformer.relative_attention.default
    torch.library.opcheck(operator, (*call.tensor_arguments, *call.settings, -1))
    torch.library.opcheck(operator, (*call.tensor_arguments, *call.settings, 1))
    grads = []
    for run in (torch.compile(lambda *x: relative_attention(attend(*x))[0], fullgraph=True, backend="aot_eager"),
                lambda *x: relative_attention(attend(*x))[0]):  # fmt: skip
        grads.append(torch.autograd.grad(run(*leaves).square().sum(), leaves, materialize_grads=True))
    for x, y in zip(*grads, strict=True):
        close(x, y)


def test_half_precision_calls_have_sums_and_gradients_of_them_in_float32():
    case = Case("favor+")
    with torch.no_grad():
        want = case.part(40, 110)
        for name in ("q", "k", "v"):
            setattr(case, name, getattr(case, name).bfloat16())
        case.own, case.tensors = case.own.float(), [x.float() for x in case.tensors]

    def single(first, last, edge):
        return [x.detach().float().requires_grad_() for x in Case("favor+").sums(first, last, edge)]

    states = {}
    out = case.part(40, 110, lambda *place: states.setdefault(place, single(*place)))
    close(out, want, 2e-2)
    for x in torch.autograd.grad(out.sum(), [y for state in states.values() for y in state[1:3]]):
        assert x.dtype == torch.float32
        assert x.isfinite().all()


def test_states_that_mean_nothing_are_refused():
    attend, leaves = tiny("favor+", right=True)
    call = attend(*leaves)
    with pytest.raises(ValueError, match="right_state holds keys that a causal call does not see"):
        relative_attention(replace(call, is_causal=True))
    with pytest.raises(ValueError, match="window=None; give window="):
        relative_attention(replace(call, window=None))
    with pytest.raises(ValueError, match="algorithm='windowed' or None, got window=1 and algorithm='fft'"):
        attend_biased(call, features=24, algorithm="fft")
    close(attend_biased(call, features=24), relative_attention(call)[0])
