"""The benchmark with a relative position bias: one for all contenders, each its definition, refusals with reasons."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from typer.testing import CliRunner

from kernelformer.cli.app import app
from kernelformer.modules import build_attention
from kernelformer_lab.bench import attention as contenders
from kernelformer_lab.bench.attention import Case, contender, yardsticks
from kernelformer_lab.bench.benchmark import measure_memory

SIZES = {"heads": 2, "head_dim": 8, "features": 16, "window": 5}
OURS = ["nprf", "favor+", "softmax", "nprf:algorithm=direct", "nprf:algorithm=fft"]


def explicit(bias, q, k, v, causal, phi=None):
    """sum_j w_ij v_j / sum_j w_ij with w_ij = exp(q.k / sqrt(D) + b_{j-i}), or phi(q).phi(k) exp(b_{j-i})."""
    length = q.shape[2]
    index = torch.arange(length)
    weights = torch.exp(q @ k.mT / q.shape[-1] ** 0.5) if phi is None else phi(q) @ phi(k).mT
    weights = weights * bias[:, index - index[:, None] + length - 1].exp()
    weights = weights.tril() if causal else weights
    return weights @ v / weights.sum(-1, keepdim=True)


def test_all_contenders_get_the_same_bias():
    case = Case("causal", 40, bias="full", **SIZES)
    table = case.bias_table()
    assert table.shape == (2, 79)
    assert table.is_contiguous()
    assert torch.equal(table, case.bias_table())
    assert table.abs().max() <= 1
    assert table.unique().numel() > 150
    assert torch.equal(case.past_bias(), table[:, :40].flip(1))
    matrix = case.bias_matrix(40)
    assert matrix.dtype == torch.float64
    for i, j in ((0, 0), (3, 20), (39, 0), (0, 39)):
        assert torch.equal(matrix[:, i, j].float(), table[:, j - i + 39])


@pytest.mark.parametrize("length", [1, 4, 6, 40])
def test_a_window_is_constant_beyond_its_distance_and_the_same_at_every_length(length):
    case = Case("causal", length, bias="window", **SIZES)
    table, reach = case.bias_table(), case.bias_table(6)  # distances -5 to 5
    assert table.shape == (2, 2 * length - 1)
    for t in range(2 * length - 1):
        distance = max(-5, min(5, t - (length - 1)))
        assert torch.equal(table[:, t], reach[:, distance + 5])
    assert torch.equal(case.past_bias(), reach[:, :6].flip(1))


def test_a_case_says_what_bias_it_has():
    assert Case("causal", 8).title == "causal forward, L = 8"
    assert Case("causal", 8, bias="full").title == "causal forward, L = 8, bias over all distances"
    assert Case("decode", 8, bias="window", window=3).title == "decode one token, context 8, bias within 3"
    with pytest.raises(ValueError, match="unknown bias 'windows'; did you mean 'window'"):
        Case("causal", 8, bias="windows")
    with pytest.raises(ValueError, match="window must be an integer of at least 1, got 0"):
        Case("causal", 8, bias="window", window=0)
    with pytest.raises(ValueError, match="has no bias"):
        Case("causal", 8).bias_table()


@pytest.mark.parametrize("name", ["sdpa", "sdpa-fixed", "algorithm-1", *OURS])
@pytest.mark.parametrize("bias", ["full", "window"])
@pytest.mark.parametrize("task", ["bidirectional", "causal"])
def test_every_contender_is_its_definition(name, bias, task):
    one = contender(name)
    assert one.error(Case(task, 64, bias=bias, **SIZES)) < one.tolerance


@pytest.mark.parametrize("task", ["bidirectional", "causal"])
def test_the_windowed_algorithm_is_its_definition_too(task):
    one = contender("nprf:algorithm=windowed")
    assert one.error(Case(task, 64, bias="window", **SIZES)) < one.tolerance
    assert one.error(Case(task, 64, bias="window", backward=True, **SIZES)) < one.tolerance


@pytest.mark.parametrize("name", ["sdpa", "algorithm-1"])
@pytest.mark.parametrize("task", ["bidirectional", "causal"])
def test_definitions_are_the_explicit_sum(name, task):
    case = Case(task, 64, bias="full", **SIZES)
    one = contender(name)
    one.build(case)
    q, k, v = (x.double() for x in case.inputs(23))
    omega = build_attention("favor+", head_dim=8, num_heads=2, num_features=16).feature_map.omega[0].double()

    def positive(x):
        return torch.exp(F.normalize(x, dim=-1) @ omega.T - 0.5) / 4

    phi = positive if name == "algorithm-1" else None
    want = explicit(case.bias_table(23).double(), q, k, v, case.causal, phi)
    torch.testing.assert_close(one.definition(case, q, k, v), want)


@pytest.mark.parametrize(("name", "twin"), [("sdpa", None), ("softmax", "sdpa"), ("nprf", "algorithm-1")])
@pytest.mark.parametrize("bias", ["full", "window"])
@pytest.mark.parametrize("task", ["bidirectional", "causal"])
def test_training_gives_the_gradient_of_the_bias_too(name, twin, bias, task):
    case = Case(task, 37, bias=bias, backward=True, **SIZES)
    result = contender(name).runner(case)()
    assert [x.shape for x in result] == [(1, 2, 37, 8)] * 4 + [(2, 73)]
    if twin:
        want = contender(twin).runner(case)()
    else:
        leaves = [x.double().requires_grad_() for x in (*case.inputs(), case.bias_table())]
        out = explicit(leaves[3], *leaves[:3], case.causal)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        want = (out, *torch.autograd.grad(out, leaves, grad.double()))
    for index, (x, y) in enumerate(zip(result, want, strict=True)):
        x, y = x.detach().double(), y.detach().double()
        if index == 4 and bias == "window":  # a clipped entry may take the gradients of all that are clipped to it
            distance = torch.arange(-36, 37).clamp(-5, 5) + 5
            x, y = (torch.zeros(2, 11, dtype=torch.float64).index_add(1, distance, z) for z in (x, y))
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


def test_sdpa_without_the_gradient_of_its_bias_gives_the_others():
    case = Case("causal", 37, bias="full", backward=True, **SIZES)
    result, want = (contender(name).runner(case)() for name in ("sdpa-fixed", "sdpa"))
    assert len(result) == 4
    for x, y in zip(result, want[:4], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_the_mask_of_sdpa_is_a_view(monkeypatch):
    seen = []
    real = F.scaled_dot_product_attention

    def watch(*args, **more):
        seen.append(more["attn_mask"])
        return real(*args, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    for task in ("bidirectional", "causal"):
        contender("sdpa").runner(Case(task, 64, bias="full", batch=3, **SIZES))()
        assert seen[-1].shape == (3, 2, 64, 64)
        assert seen[-1].untyped_storage().nbytes() == 4 * 2 * 127


@pytest.mark.parametrize("length", [3, 40])
@pytest.mark.parametrize("bias", ["full", "window"])
def test_sdpa_decodes_the_last_token_of_the_context(bias, length):
    case = Case("decode", length, bias=bias, **SIZES)
    q, k, v = case.inputs()
    q[:, :, -1:] = case.inputs(1)[0]
    want = explicit(case.bias_table(), q, k, v, causal=True)[:, :, -1:]
    torch.testing.assert_close(contender("sdpa").runner(case)(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [3, 20])
@pytest.mark.parametrize("bias", ["full", "window"])
def test_our_decoding_starts_with_its_window_full(bias, length):
    case = Case("decode", length, bias=bias, **SIZES)
    one = contender("nprf")
    out = one.runner(case)()
    past = case.past_bias()
    filled = min(length, past.shape[1] + 1)
    q, k, v = (torch.cat([x, x[:, :, -1:]], 2) for x in case.inputs(filled))  # the last token once more
    ago = torch.arange(filled, -1, -1).clamp(max=past.shape[1] - 1)
    table = F.pad(past[:, ago], (0, filled))  # the future is not seen
    want = one.core(q, k, v, is_causal=True, bias=table)[:, :, -1:]
    torch.testing.assert_close(out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "case", "reason"),
    [
        ("performer-pytorch", {}, "takes no relative position bias"),
        ("fast-transformers", {}, "takes no relative position bias"),
        ("nystrom-attention", {"task": "bidirectional"}, "takes no relative position bias"),
        ("gaussian", {}, "only softmax and normalized positive maps are defined with a bias here"),
        ("nystromformer", {}, "only softmax and normalized positive maps are defined with a bias here"),
        ("trigonometric", {}, "only softmax and normalized positive maps are defined with a bias here"),
        ("favor+:normalize=False", {}, "only softmax and normalized positive maps are defined with a bias here"),
        ("softmax:algorithm=fft", {}, "has no algorithms to choose from"),
        ("favor+:algorithm=fft", {"task": "decode", "bias": "window"}, "has no algorithms to choose from"),
        ("favor+:algorithm=fft", {"bias": None}, "algorithm=fft is for a bias only"),
        ("favor+", {"task": "decode", "length": 5000}, "would keep all keys; contexts up to 4096"),
        ("softmax", {"task": "decode"}, "keeps all keys; the peer 'sdpa' is timed with them"),
        ("sdpa", {"length": 2**20, "backward": True}, "needs about 32768 GiB"),
        ("sdpa-fixed", {}, "is sdpa where no bias is trained"),
        ("algorithm-1", {"bias": None}, "is made for a bias"),
        ("algorithm-1", {"task": "decode"}, "decodes by recomputing"),
        ("algorithm-1", {"length": 2**30}, "needs about 7168 GiB"),
        ("favor+", {"task": "decode", "length": 5000, "bias": "window"}, None),
        ("sdpa", {"length": 2**20}, None),
        ("sdpa-fixed", {"length": 2**20, "backward": True}, None),
        ("softmax", {}, None),
        ("algorithm-1", {}, None),
    ],
)
def test_who_refuses_what(name, case, reason):
    assert contender(name).refuses(Case(**{"task": "causal", "length": 64, "bias": "full", **SIZES, **case})) == reason


def test_what_a_run_is_compared_with():
    assert yardsticks(bias=True, backward=False) == ["sdpa", "algorithm-1"]
    assert yardsticks(bias=True, backward=True) == ["sdpa", "sdpa-fixed", "algorithm-1"]
    assert yardsticks(bias=False, backward=True)[0] == "sdpa"
    assert "algorithm-1" not in yardsticks(bias=False, backward=True)


def test_an_algorithm_is_an_option_of_the_call():
    one = contender("favor+:draw=iid:algorithm=direct")
    assert (one.method, one.options, one.algorithm) == ("favor+", {"draw": "iid"}, "direct")
    assert contender("favor+").algorithm is None
    with pytest.raises(ValueError, match="unknown algorithm 'directly'; did you mean 'direct'"):
        contender("favor+:algorithm=directly")
    with pytest.raises(ValueError, match="unknown option for method 'favor\\+', 'algorithms'"):
        contender("favor+:algorithms=direct")


@pytest.mark.parametrize("task", ["bidirectional", "decode"])
def test_a_contender_may_go_without_the_bias(task):
    case, plain = (Case(task, 64, bias=bias, **SIZES) for bias in ("window", None))
    one = contender("favor+:bias=none")
    assert one.refuses(case) is None
    assert torch.equal(one.runner(case)(), contender("favor+").runner(plain)())
    with pytest.raises(ValueError, match="unknown bias 'full'"):
        contender("favor+:bias=full")
    if task == "bidirectional":
        assert one.error(case) < one.tolerance
        assert len(one.runner(replace(case, backward=True))()) == 4


@pytest.mark.parametrize(
    ("name", "bias", "backward", "more"),
    [
        ("favor+", None, True, {}),
        ("favor+", "full", True, {}),
        ("favor+", "window", False, {}),
        ("favor+", "window", True, {"max_distance": 5}),
        ("favor+:algorithm=windowed", "window", True, {"max_distance": 5, "algorithm": "windowed"}),
        ("favor+:algorithm=fft", "window", True, {"algorithm": "fft"}),
    ],
)
def test_what_a_core_is_called_with(monkeypatch, name, bias, backward, more):
    calls = []

    class Core(torch.nn.Module):
        def forward(self, q, k, v, **given):
            calls.append(given)
            return v

    monkeypatch.setattr(contenders, "build_attention", lambda *a, **k: Core())
    case = Case("causal", 16, bias=bias, backward=backward, **SIZES)
    given = (*case.inputs(), case.bias_table()) if bias else case.inputs()
    contender(name).build(case)(*given)
    (result,) = calls
    assert result.pop("is_causal") is True
    if bias:
        assert torch.equal(result.pop("bias"), case.bias_table())
    assert result == more


def test_memory_is_weighed_with_a_bias():
    result = measure_memory(Case("causal", 64, bias="full", backward=True, **SIZES), "sdpa")
    assert result["results"] == 4 * (4 * 2 * 64 * 8 + 2 * 127)


@pytest.mark.slow
def test_the_command_takes_a_bias(tmp_path):
    options = ["--lengths", "64", "--modes", "causal", "--passes", "forward", "--heaps", "default", "--no-memory"]
    sizes = ["--heads", "2", "--head-dim", "8", "--features", "16", "--budget", "0.02", "--threads", "1"]
    bias = ["--bias", "window", "--max-distance", "5", "--attention", "nprf,nprf:algorithm=direct,linformer"]
    result = CliRunner().invoke(app, ["bench", *options, *sizes, *bias, "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "causal forward, L = 64, bias within 5" in result.output
    rows = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert [x["name"] for x in rows[:5]] == ["nprf", "nprf:algorithm=direct", "linformer", "sdpa", "algorithm-1"]
    assert all(x["case"]["bias"] == "window" and x["case"]["window"] == 5 for x in rows)
    assert [x["name"] for x in rows if x["seconds"]] == ["nprf", "nprf:algorithm=direct", "sdpa", "algorithm-1"]
    assert rows[2]["note"].startswith("only softmax and")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bias", "ring"], "unknown bias 'ring'; choose from full, none, window"),
        (["--bias", "full", "--attention", "nprf:algorithm=x"], "unknown algorithm 'x'"),
    ],
)
def test_the_command_refuses_what_it_does_not_know(options, message):
    result = CliRunner().invoke(app, ["bench", *options])
    assert result.exit_code == 2
    assert message in result.output.replace("\n", " ")
