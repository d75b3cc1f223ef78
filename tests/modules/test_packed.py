"""Packed sequences: what is in one row with others equals what is alone."""

from __future__ import annotations

import io
import itertools

import pytest
import torch

import kernelformer as kf
from definition import STREAMING, VARIANTS, WHOLE, build, close, inputs, padding
from kernelformer.modules.mixed import MixedCore
from kernelformer.modules.packed import Segments

# Rows of 24 tokens: ten segments of four lengths, one of them a single token.
IDS = torch.tensor([[0] * 5 + [1] * 6 + [4] * 1 + [7] * 12, [2] * 11 + [3] * 2 + [5] * 11, [-1] * 24])
B, L = IDS.shape

# Gradients where a kind of core, a family of maps or a switch is of its own; outputs of everything.
LEARNING = [
    "softmax",
    "gaussian",
    "favor+",
    "favor+ unit",
    "trigonometric",
    "elu",
    "gmm-rks",
    "skyformer learned",
    "favor+ near",
]


def mixed() -> MixedCore:
    exact = kf.build_attention("softmax", head_dim=8, num_heads=1)
    return MixedCore(exact, kf.build_attention("favor+", head_dim=8, num_heads=3, num_features=24), [2]).double()


def table(core, tokens: int = L, past: int = 0) -> torch.Tensor:
    """A bias that is constant beyond distance 3, over all distances of so many tokens after others."""
    values = torch.randn(core.num_heads, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    distance = torch.arange(-(past + tokens - 1), tokens).clamp(-3, 3)
    return values[:, distance + 3]


def apart(core, qkv, ids=IDS, *, key_mask=None, bias=None, **how) -> torch.Tensor:
    """The definition: a call of its own for every segment."""
    out = qkv[0].new_zeros(*qkv[0].shape[:3], qkv[2].shape[3])
    for row, start, length in zip(*(x.tolist() for x in Segments.of(ids)), strict=True):
        part = (slice(row, row + 1), slice(None), slice(start, start + length))
        extra = dict(how)
        if key_mask is not None:
            extra["key_mask"] = key_mask[row : row + 1, start : start + length]
        if bias is not None:
            middle = ids.shape[1] - 1
            extra["bias"] = bias[:, middle - length + 1 : middle + length]
        out[part] = core(*(x[part] for x in qkv), **extra)
    return out


def check(core, how, *, G=4, bias=None):
    """Outputs and all gradients of a packed call are those of calls apart."""
    qkv = inputs(L, B=B, G=G, grad=True)
    bias = None if bias is None else bias.requires_grad_()
    leaves = [*qkv, *core.parameters(), *([] if bias is None else [bias])]
    got = core(*qkv, segment_ids=IDS, bias=bias, **how)
    want = apart(core, qkv, bias=bias, **how)
    close(got, want)
    g = torch.randn(got.shape, dtype=got.dtype, generator=torch.Generator().manual_seed(1))
    for a, b in zip(torch.autograd.grad(got, leaves, g), torch.autograd.grad(want, leaves, g), strict=True):
        close(a, b)


@pytest.mark.parametrize("variant", LEARNING)
def test_gradients_of_a_packed_call_are_those_of_its_segments_alone(variant):
    check(build(variant), {})


@pytest.mark.parametrize("variant", STREAMING)
def test_a_packed_call_is_that_of_its_segments_alone(variant):
    core, qkv = build(variant), inputs(L, B=1)
    with torch.no_grad():
        close(core(*qkv, is_causal=True, segment_ids=IDS[:1]), apart(core, qkv, IDS[:1], is_causal=True))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("variant", ["softmax", "gaussian", "favor+", "trigonometric", "mixed"])
def test_packed_sequences_may_be_padded_and_have_groups_of_queries(variant, is_causal):
    key_mask = padding(B, L)
    key_mask[1, 11:13] = False  # a whole segment
    core = mixed() if variant == "mixed" else build(variant)
    for mask in (key_mask, IDS != 5, IDS < -1):  # parts of segments, a whole one alone, all of them
        check(core, {"is_causal": is_causal, "key_mask": mask}, G=2)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("variant", ["softmax", "nprf", "trigonometric", "mixed"])
def test_a_bias_is_over_the_distances_within_a_segment(variant, is_causal):
    core = mixed() if variant == "mixed" else build(variant)
    for known in ({}, {"max_distance": 3}):
        check(core, {"is_causal": is_causal, **known}, bias=table(core))


def test_gates_of_packed_sequences_go_with_their_tokens():
    core = build("rfa-gate")
    qkv, gate = inputs(L, B=B), torch.rand(B, 4, L, dtype=torch.float64)
    got = core(*qkv, is_causal=True, segment_ids=IDS, gate=gate)
    want = [core(*(x[:, :, a:b] for x in qkv), is_causal=True, gate=gate[:, :, a:b]) for a, b in ((0, 5), (5, 11))]
    close(got[0, :, :11], torch.cat(want, 2)[0])


def test_weights_are_zero_between_segments_and_nan_stays_in_its_own():
    for variant in ("softmax", "favor+"):
        core, (q, k, v) = build(variant), inputs(L, B=B)
        weights = core.attention_matrix(q, k, segment_ids=IDS)
        assert weights[:, 0].count_nonzero() == (IDS.unsqueeze(1) == IDS.unsqueeze(2)).sum()
        for is_causal in (False, True):
            want = core(q, k, v, segment_ids=IDS, is_causal=is_causal)
            for x in (q, k, v):
                bad = x.clone()
                bad[0, :, 5:11] = torch.nan
                given = [bad if y is x else y for y in (q, k, v)]
                got = core(*given, segment_ids=IDS, is_causal=is_causal)
                close(got[0, :, IDS[0] != 1], want[0, :, IDS[0] != 1])


STREAMS = ["softmax", "gaussian", "favor+", "trigonometric", "rfa-gate", "loglinear", "mixed", "favor+ near", "local"]


def stream(core, qkv, cuts, ids=IDS, *, key_mask=None, bias=None) -> tuple[torch.Tensor, object]:
    """A row in several calls, single tokens by steps; the state goes through a file after each."""
    state, outs = None, []
    for a, b in itertools.pairwise(cuts):
        part = [x[:, :, a:b] for x in qkv]
        how = {"segment_ids": ids[:, a:b], "key_mask": None if key_mask is None else key_mask[:, a:b]}
        if b - a == 1:
            extra = {} if bias is None else {"bias": table(core, 4)[:, :4].flip(1)}
            out, state = core.step(*part, state, **how, **extra)
        else:
            extra = {} if bias is None else {"bias": table(core, b - a, a), "max_distance": 3}
            out, state = core(*part, is_causal=True, state=state, return_state=True, **how, **extra)
        outs.append(out)
        file = io.BytesIO()
        torch.save(state.detach().to("cpu").reorder(range(B)), file)
        state = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    return torch.cat(outs, 2), state


@pytest.mark.parametrize("cuts", [[0, 24], [0, 7, 12, 24], [0, 5, 20, 21, 22, 24]])
@pytest.mark.parametrize("variant", STREAMS)
def test_a_stream_goes_on_within_a_segment_and_starts_anew_with_the_next(variant, cuts):
    core = mixed() if variant == "mixed" else build(variant)
    qkv = inputs(L, B=B)
    with torch.no_grad():
        key_mask = padding(B, L) if len(cuts) == 4 else None
        out, state = stream(core, qkv, cuts, key_mask=key_mask)
        close(out, core(*qkv, is_causal=True, segment_ids=IDS, key_mask=key_mask))
    assert state.last_id.tolist() == [7, 5, -1]
    assert state.length == L


@pytest.mark.parametrize("cuts", [[0, 7, 12, 24], [0, 5, 20, 21, 22, 24]])
@pytest.mark.parametrize("variant", ["softmax", "nprf", "trigonometric", "mixed"])
def test_a_stream_with_a_bias_knows_the_distances_within_a_segment(variant, cuts):
    core = mixed() if variant == "mixed" else build(variant)
    qkv = inputs(L, B=B)
    with torch.no_grad():
        want = core(*qkv, is_causal=True, segment_ids=IDS, bias=table(core), max_distance=3)
        close(stream(core, qkv, cuts, bias=True)[0], want)


@pytest.mark.parametrize("scheme", [{"scheme": "alibi"}, {"max_distance": 4}, {"max_length": L}])
@pytest.mark.parametrize("method", ["softmax", "nprf"])
def test_a_layer_with_positions_takes_packed_sequences_at_once_and_as_a_stream(method, scheme):
    layer = kf.KernelAttention(32, 4, method, causal=True, relative="1d", **scheme).double()
    for x in layer.positions.parameters():
        torch.nn.init.normal_(x)
    x, state, parts = torch.randn(B, L, 32, dtype=torch.float64), None, []
    with torch.no_grad():
        whole = layer(x, segment_ids=IDS)
        for row, start, length in zip(*(y.tolist() for y in Segments.of(IDS)), strict=True):
            here = (slice(row, row + 1), slice(start, start + length))
            close(whole[here], layer(x[here]))
        for a, b in ((0, 9), (9, 10), (10, 11), (11, 24)):
            go = layer.step if b == a + 1 else lambda *y, **z: layer(y[0], state=y[1], return_state=True, **z)
            y, state = go(x[:, a:b], state, segment_ids=IDS[:, a:b])
            parts.append(y)
    close(torch.cat(parts, 1), whole)


def test_gradients_go_through_a_state_to_its_own_segment():
    core, qkv = build("favor+"), inputs(L, B=B, grad=True)
    first, rest = ([x[:, :, part] for x in qkv] for part in (slice(0, 7), slice(7, None)))
    _, state = core(*first, is_causal=True, segment_ids=IDS[:, :7], return_state=True)
    out = core(*rest, is_causal=True, segment_ids=IDS[:, 7:], state=state)
    g = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    whole = core(*qkv, is_causal=True, segment_ids=IDS)[:, :, 7:]
    for a, b in zip(torch.autograd.grad(out, qkv, g), torch.autograd.grad(whole, qkv, g), strict=True):
        close(a, b)


def test_samples_of_a_state_keep_their_segment_when_they_are_reordered():
    core, qkv = build("favor+"), inputs(L, B=B)
    _, state = core(*qkv, is_causal=True, segment_ids=IDS, return_state=True)
    assert state.reorder([2, 0]).last_id.tolist() == [-1, 7]
    step = [x[:2, :, :1] for x in qkv]
    out, after = core.step(*step, state.reorder([2, 0]), segment_ids=torch.tensor([[-1], [8]]))
    close(out[1:], core.step(*(x[1:] for x in step))[0])
    close(out[:1], core.step(*(x[:1] for x in step), state.reorder([2]), segment_ids=torch.tensor([[-1]]))[0])
    assert after.last_id.tolist() == [-1, 8]


def test_an_id_that_comes_again_after_another_one_is_a_new_segment():
    core, qkv = build("favor+"), inputs(6, B=1)
    _, state = core(*qkv, is_causal=True, segment_ids=torch.full((1, 6), 5), return_state=True)
    out, after = core(
        *qkv, is_causal=True, segment_ids=torch.tensor([[3, 3, 5, 5, 5, 5]]), state=state, return_state=True
    )
    want, alone = core(*(x[:, :, 2:] for x in qkv), is_causal=True, return_state=True)
    close(out[:, :, 2:], want)
    for a, b in zip(after.tensors, alone.tensors, strict=True):
        close(a, b)


def test_batches_of_segments_are_less_than_half_padding():
    lengths = torch.tensor([1, 1, 2, 3, 5, 8, 9, 16, 17, 49, 65, 75, 76, 100, 750, 1000])
    ids = torch.arange(len(lengths)).repeat_interleave(lengths).unsqueeze(0)
    segments = Segments.of(ids)
    assert segments.length.tolist() == lengths.tolist()
    parts = segments.buckets()
    assert sorted(n for x in parts for n in x.length.tolist()) == sorted(lengths.tolist())
    for part in parts:
        assert part.length.max() < 2 * part.length.min()
        assert part.length.max() <= 64 or 3 * part.length.max() <= 4 * part.length.min()


def test_a_compiled_call_and_step_are_those_of_eager_mode():
    core, qkv = build("favor+"), inputs(L, B=B)
    with torch.no_grad():
        want, state = core(*qkv, is_causal=True, segment_ids=IDS, return_state=True)
        close(torch.compile(core, backend="eager")(*qkv, is_causal=True, segment_ids=IDS), want)
        one, ids = [x[:, :, :1] for x in qkv], torch.tensor([[7], [6], [-1]])
        step = torch.compile(core.step, backend="eager", fullgraph=True)
        close(step(*one, state, segment_ids=ids)[0], core.step(*one, state, segment_ids=ids)[0])


def test_empty_rows_and_rows_without_tokens_are_packed_too():
    core = build("favor+")
    q, k, v = inputs(0, B=2)
    out, state = core(q, k, v, is_causal=True, segment_ids=IDS[:2, :0], return_state=True)
    assert out.shape == core(q, k, v, segment_ids=IDS[:2, :0]).shape == (2, 4, 0, 6)
    q, k, v = inputs(3, B=2)
    got, state = core(q, k, v, is_causal=True, segment_ids=IDS[:2, :3], state=state, return_state=True)
    close(got, core(q, k, v, is_causal=True))
    assert core(q[:0], k[:0], v[:0], segment_ids=IDS[:0, :3]).shape == (0, 4, 3, 6)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (IDS.flip(1), "must not decrease along a row, got 7 before 4 at token 12 of row 0"),
        (IDS[:, 1:], r"must be \(batch, length\) = \(3, 24\), got \(3, 23\)"),
        (IDS[0], r"must be \(batch, length\) = \(3, 24\), got \(24,\)"),
        (IDS.double(), "must be integers, got torch.float64"),
        (IDS > 1, "must be integers, got torch.bool"),
        (IDS.tolist(), "must be a tensor, got list"),
    ],
)
def test_wrong_segment_ids_are_refused(ids, words):
    with pytest.raises(ValueError, match=words):
        build("favor+")(*inputs(L, B=B), segment_ids=ids)


@pytest.mark.parametrize("variant", WHOLE)
def test_methods_that_mix_a_whole_row_refuse_segments_by_name(variant):
    with pytest.raises(ValueError, match=f"{VARIANTS[variant][0]!r} mixes the tokens of a whole row"):
        build(variant)(*inputs(L, B=B), segment_ids=IDS)


def test_what_is_over_whole_rows_refuses_segments():
    core, qkv = build("nprf"), inputs(L, B=B)
    with pytest.raises(ValueError, match="algorithm='fft' is over whole rows"):
        core(*qkv, segment_ids=IDS, bias=table(core), algorithm="fft")
    with pytest.raises(ValueError, match="a bias on a grid is over whole rows"):
        core(*qkv, segment_ids=IDS, bias=torch.zeros(4, 7, 11, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"segment_ids are for self-attention.*24 queries and 13 keys"):
        core(*inputs(L, 13, B=B), segment_ids=IDS)
    x = torch.zeros(B, L, 32)
    with pytest.raises(ValueError, match="context"):
        kf.KernelAttention(32, 4, num_features=8)(x, x, segment_ids=IDS)


def test_a_stream_has_segments_from_its_start_or_never():
    core, qkv = build("favor+"), inputs(L, B=B)
    one = [x[:, :, :1] for x in qkv]
    _, packed = core(*qkv, is_causal=True, segment_ids=IDS, return_state=True)
    _, plain = core(*qkv, is_causal=True, return_state=True)
    for state, ids, words in ((packed, None, "with segment_ids, this call has none"), (plain, IDS, "without")):
        with pytest.raises(ValueError, match=words):
            core(*qkv, is_causal=True, state=state, segment_ids=ids)
        with pytest.raises(ValueError, match=words):
            core.step(*one, state, segment_ids=None if ids is None else ids[:, :1])
