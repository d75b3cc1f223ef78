"""The window of positive maps by bands: its definition and gradients, over several segments, and streams in buffers."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import kernelformer as kf
from kernelformer.attention import blocks
from reference import reference_attention

H, D, E = 2, 5, 3


def core(method="favor+"):
    return kf.build_attention(method, head_dim=D, num_heads=H, num_features=6, seed=0).double()


def inputs(L, S, B=1):
    gen = torch.Generator().manual_seed(L + S)
    sizes = ((L, D), (S, D), (S, E))
    return [2 * torch.randn(B, H, n, width, generator=gen, dtype=torch.float64) for n, width in sizes]


def bias_within(window, L, S):
    """(H, L + S - 1), and which entry of the (H, 2 window + 1) each is."""
    table = torch.randn(H, 2 * window + 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    index = torch.arange(1 - L, S).clamp(-window, window) + window
    return table[:, index].contiguous(), index


def folded(grad, index):
    """Gradients of all entries that are one: how they are shared among them is free."""
    return torch.zeros(H, int(index.max()) + 1, dtype=grad.dtype).index_add(1, index, grad)


@pytest.mark.parametrize(
    ("L", "S", "window", "causal", "masked"),
    [
        (1, 1, 3, False, False),
        (70, 70, 64, False, False),
        (63, 330, 5, False, True),
        (330, 260, 70, True, True),
        (330, 330, 1, True, False),
        (260, 330, 129, False, True),
        (65, 65, 0, False, False),
    ],
)
@pytest.mark.parametrize("room", [blocks.BUFFER, 2000], ids=["one segment", "segments of two chunks"])
def test_bands_are_their_definition_with_all_gradients(monkeypatch, L, S, window, causal, masked, room):
    monkeypatch.setattr(blocks, "BUFFER", room)
    attention, leaves = core("nprf" if causal else "favor+"), [x.requires_grad_() for x in inputs(L, S)]
    table, index = bias_within(window, L, S)
    bias, same = table.clone().requires_grad_(), table.clone().requires_grad_()
    mask = (torch.arange(S) % 5 > 0).unsqueeze(0) & (torch.arange(S) >= S // 4) if masked else None
    out = attention(*leaves, is_causal=causal, bias=bias, max_distance=window, key_mask=mask)
    matrix = same[:, torch.arange(S) - torch.arange(L).unsqueeze(1) + L - 1]
    want = reference_attention(copy.deepcopy(attention), *leaves, is_causal=causal, bias=matrix, key_mask=mask)
    torch.testing.assert_close(out, want)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2), dtype=out.dtype)
    *got, d_bias = torch.autograd.grad(out, [*leaves, bias], grad)
    *wanted, d_same = torch.autograd.grad(want, [*leaves, same], grad)
    for x, y in zip([*got, folded(d_bias, index)], [*wanted, folded(d_same, index)], strict=True):
        torch.testing.assert_close(x, y)


def test_rows_that_a_later_key_dwarfs_are_done_again():
    q, k, v = inputs(140, 140)
    k[:, :, 100:] *= 40  # in the chunks of earlier queries, which do not see them
    table, _ = bias_within(3, 140, 140)
    attention = core()
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    out = attention.float()(*leaves, is_causal=True, bias=table.float(), max_distance=3)
    matrix = table[:, torch.arange(140) - torch.arange(140).unsqueeze(1) + 139]
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    want = reference_attention(copy.deepcopy(attention).double(), *doubles, is_causal=True, bias=matrix)
    torch.testing.assert_close(out[:, :, :100].double(), want[:, :, :100], rtol=1e-3, atol=1e-4)
    grads = torch.autograd.grad(out[:, :, :100].sum(), leaves)
    wanted = torch.autograd.grad(want[:, :, :100].sum(), doubles)
    for x, y in zip(grads, wanted, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-3, atol=1e-3)


def test_a_stream_with_a_window_may_be_continued_twice_copied_and_reordered():
    attention, window = core(), 4
    q, k, v = (x[:, :, :90] for x in inputs(90, 90, B=2))
    past = torch.randn(H, window + 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    table = torch.cat([past[:, torch.arange(89, 0, -1).clamp(max=window)], past[:, :1], torch.zeros(H, 89)], 1)
    want = attention(q, k, v, is_causal=True, bias=table)

    def go_on(state, t, order=slice(None)):
        token = [x[order, :, t : t + 1] for x in (q, k, v)]
        return attention.step(*token, state, bias=past)

    with torch.no_grad():
        state, states = None, []
        for t in range(90):
            states.append(state)
            out, state = go_on(state, t)
            torch.testing.assert_close(out, want[:, :, t : t + 1])
        for t in (1, 30, 71, 89):  # states of long ago, while the buffers went on
            other = states[t].reorder([1, 0])
            for given, order in ((states[t], [0, 1]), (pickle.loads(pickle.dumps(states[t])), [0, 1]), (other, [1, 0])):
                out, after = go_on(given, t, order)
                torch.testing.assert_close(out, want[order, :, t : t + 1])
                if t < 89:
                    torch.testing.assert_close(go_on(after, t + 1, order)[0], want[order, :, t + 1 : t + 2])
    assert states[80].near.buffers is states[79].near.buffers
    assert copy.deepcopy(states[80]).near is None


@pytest.mark.parametrize("window", [1, 70])
def test_a_bias_of_later_keys_does_not_overflow_a_causal_call(window):
    attention, (q, k, v) = core().float(), (x.float() for x in inputs(200, 200))
    table = torch.zeros(H, 399)
    table[:, 200:] = 120.0  # e^120 is beyond float32, and no causal query sees these keys
    out = attention(q, k, v, is_causal=True, bias=table, max_distance=window)
    close_to = attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, close_to, rtol=1e-4, atol=1e-5)


def test_a_window_wider_than_the_sequence_has_gradients_of_its_bias():
    attention = kf.build_attention("elu", head_dim=D, num_heads=H, window=40, sinks=2).double()
    leaves = [x.requires_grad_() for x in inputs(5, 5)]
    table, index = bias_within(0, 5, 5)
    bias, same = table.clone().requires_grad_(), table.clone().requires_grad_()
    out = attention(*leaves, bias=bias, max_distance=0)
    matrix = same[:, torch.arange(5) - torch.arange(5).unsqueeze(1) + 4]
    want = reference_attention(attention, *leaves, bias=matrix)
    torch.testing.assert_close(out, want)
    for got, wanted in zip(
        *(torch.autograd.grad(x.square().sum(), [*leaves, y]) for x, y in ((out, bias), (want, same))), strict=True
    ):
        if got.shape == bias.shape:
            got, wanted = folded(got, index), folded(wanted, index)
        torch.testing.assert_close(got, wanted)
