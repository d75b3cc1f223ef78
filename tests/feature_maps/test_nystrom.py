"""Nystrom features: exact with all tokens, better with more landmarks, and never NaN."""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

import kernelformer as kf
from definition import close, inputs
from kernelformer.feature_maps import NystromMap
from kernelformer.feature_maps.landmarks import inverse_root, iterated_inverse, landmark_gram
from kernelformer_lab.analysis.spectra import kernel_profile

SIZES = {"head_dim": 8, "num_heads": 4}
WHOLE = ("uniform", "leverage", "segments")


def gaussian(**options):
    return kf.build_attention("gaussian", **SIZES, **options)


def skyformer(**options):
    return kf.build_attention("skyformer", **SIZES, **options)


@pytest.mark.parametrize("landmarks", WHOLE)
@pytest.mark.parametrize("inverse", ["cholesky", "iterative"])
@pytest.mark.parametrize(("L", "S"), [(13, 13), (5, 17), (17, 5)])
def test_all_tokens_as_landmarks_and_no_ridge_are_exact(landmarks, inverse, L, S):
    q, k, v = inputs(L, S)
    core = skyformer(num_landmarks=64, gamma=1e-9, landmarks=landmarks, inverse=inverse)
    close(core(q, k, v), gaussian()(q, k, v), 1e-6)
    close(skyformer(num_landmarks=64, gamma=1e-9, normalize=True)(q, k, v), gaussian(normalize=True)(q, k, v), 1e-6)
    softmax = skyformer(num_landmarks=64, gamma=1e-9, kernel="softmax", landmarks=landmarks, inverse=inverse)
    close(softmax(q, k, v), kf.build_attention("softmax", **SIZES)(q, k, v), 1e-6)


@pytest.mark.parametrize("landmarks", WHOLE)
def test_the_spectral_error_falls_with_the_number_of_landmarks(landmarks):
    q, k, _ = inputs(200, B=1, seed=2)
    want = gaussian().attention_matrix(q, k)
    errors = []
    for s in (8, 32, 128, 400):
        core = skyformer(num_landmarks=s, gamma=1e-6, landmarks=landmarks)
        ratios = []
        for draw in range(3 if core.feature_map.is_random else 1):
            core.resample(draw)
            gap = torch.linalg.matrix_norm(core.attention_matrix(q, k) - want, 2)
            ratios.append(float((gap / torch.linalg.matrix_norm(want, 2)).mean()))
        errors.append(sum(ratios) / len(ratios))
    assert errors[0] > errors[1] > errors[2] > errors[3]
    assert errors[3] < 1e-4


def test_the_approximation_never_exceeds_the_kernel():
    """Theorem 2's Loewner order, for the completed matrix: what is left is positive semidefinite."""
    x = torch.randn(1, 4, 60, 8, dtype=torch.float64)
    core = skyformer(num_landmarks=20, gamma=1e-8)
    gap = gaussian().attention_matrix(x, x) - core.attention_matrix(x, x)
    assert torch.linalg.eigvalsh(0.5 * (gap + gap.transpose(-1, -2))).min() > -1e-6


def grams(gamma, s=40, count=3):
    z = torch.randn(count, s, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return landmark_gram(z, None, gamma)


@pytest.mark.parametrize("gamma", [10.0, 1e-2, 1e-4])
@pytest.mark.parametrize("spread", [1.0, 1e-2, 0.0])  # equal tokens have the largest condition number of all
def test_the_iteration_gives_the_inverse_without_a_factorization(gamma, spread, monkeypatch):
    for name in ("cholesky", "cholesky_ex", "eigh", "inv", "solve", "solve_triangular"):
        monkeypatch.setattr(torch.linalg, name, None)
    z = torch.randn(2, 100, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix = landmark_gram(spread * z, None, gamma)  # condition numbers to 1e6
    inverse = iterated_inverse(matrix, gamma)
    close(inverse, inverse.transpose(-1, -2), 1e-8)
    # Rounding grows with the square of the condition number, about 100 / gamma for equal tokens.
    assert (inverse @ matrix - torch.eye(100)).abs().max() < 1e-8 * max(1, (1e-3 / gamma) ** 2)


def published_iteration(matrix, rounds):
    """Skyformer, Sec. 4.4, with V = I at the start: one matrix, line by line."""
    eye = torch.eye(len(matrix), dtype=matrix.dtype)
    d = torch.diag(1 / matrix.sum(1).sqrt())
    a, v = d @ matrix @ d, eye
    for _ in range(rounds):
        v = v / 4 @ (13 * eye - a @ v @ (15 * eye - a @ v @ (7 * eye - a @ v)))
    return d @ v @ d


@pytest.mark.parametrize("kernel", ["gaussian", "softmax"])
def test_attention_is_that_of_the_papers_iteration_with_the_inverse_on_one_side(kernel):
    q, k, v = inputs(30, B=1, H=1, G=1)
    core = kf.build_attention(
        "skyformer", head_dim=8, num_heads=1, num_landmarks=12, kernel=kernel, inverse="iterative", gamma=1e-2
    )
    x, y, values = q[0, 0] * 8**-0.25, k[0, 0] * 8**-0.25, v[0, 0]
    points, _, _, centre = (t[0, 0] for t in core.feature_map.prepare(q, k, None, core.scale))
    z = points + centre * 8**-0.25

    def kappa(a, b):
        return (-0.5 * (a.unsqueeze(1) - b).square().sum(-1)).exp()

    inverse = published_iteration(kappa(z, z) + 1e-2 * torch.eye(12, dtype=z.dtype), 30)
    weights = kappa(x, z) @ inverse @ kappa(z, y)
    if kernel == "softmax":
        weights = weights * (0.5 * y.square().sum(1)).exp()
        weights = weights / weights.sum(1, keepdim=True)
    close(core(q, k, v)[0, 0], weights @ values, 1e-10)


@pytest.mark.parametrize("gamma", [0.1, 1e-5])
def test_both_inverses_are_one_function_with_one_gradient(gamma):
    leaves = [x.requires_grad_() for x in inputs(30, B=1)]
    results = []
    for inverse in ("cholesky", "iterative"):
        out = skyformer(num_landmarks=24, gamma=gamma, inverse=inverse)(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for want, got in zip(*results, strict=True):
        close(got, want, 1e-8)


def test_lemma_3_as_corrected():
    matrix = grams(1e-2)
    root = matrix.sum(-1).rsqrt()
    values = torch.linalg.eigvalsh(root.unsqueeze(-1) * matrix * root.unsqueeze(-2))
    assert values.min() > 0
    close(values.max(-1).values, torch.ones(3, dtype=torch.float64))  # 1 is attained: the printed interval is open


def test_one_matrix_does_not_change_another():
    matrix = grams(1e-2)
    alone = iterated_inverse(matrix[:1], 1e-2)
    other = torch.cat([matrix[:1], 100 * matrix[1:]])
    assert torch.equal(iterated_inverse(other, 1e-2)[:1], alone)


@pytest.mark.parametrize("landmarks", WHOLE)
def test_padding_on_either_side_chooses_the_same_tokens(landmarks):
    core = skyformer(num_landmarks=6, landmarks=landmarks)
    q, k, v = inputs(11)
    want = core(q, k, v)
    key_mask = torch.zeros(2, 16, dtype=torch.bool)
    key_mask[:, 3:14] = True
    padded = [torch.full((2, 4, 16, x.shape[-1]), float("nan"), dtype=x.dtype) for x in (q, k, v)]
    for x, y in zip(padded, (q, k, v), strict=True):
        x[:, :, 3:14] = y
    padded[0] = padded[0].nan_to_num(7.0)  # a query at a padded place has an output, which nobody reads
    close(core(*padded, key_mask=key_mask)[:, :, 3:14], want)


def test_draws_are_functions_of_seed_and_number():
    q, k, v = inputs(40, dtype=torch.float32)
    core, other = skyformer(num_landmarks=6), skyformer(num_landmarks=6, seed=1)
    first = core(q, k, v)
    assert torch.equal(core(q, k, v), first)
    assert (other(q, k, v) - first).abs().max() > 1e-4
    core.resample()
    assert (core(q, k, v) - first).abs().max() > 1e-4
    core.resample(0)
    assert torch.equal(core(q, k, v), first)
    model = torch.nn.ModuleList([core])
    kf.redraw(model, every=1)
    assert not skyformer(landmarks="segments").feature_map.is_random


def test_landmarks_are_tokens_without_replacement_half_from_each():
    phi = NystromMap(**SIZES, num_landmarks=10)
    q, k, _ = inputs(30, B=1)

    def same(x):
        landmarks, _, _, centre = phi.prepare(q, k, None, 1.0)
        return (landmarks[0, 0][:, None] + centre[0, 0] - x[0, 0][None]).abs().amax(-1) < 1e-12

    from_q, from_k = same(q), same(k)
    assert from_q.any(1).sum() == from_k.any(1).sum() == 5
    assert from_q.sum(0).max() == from_k.sum(0).max() == 1
    counts = torch.zeros(30)
    for draw in range(400):
        phi.resample(draw)
        counts += same(q).any(0)
    spread = math.sqrt(400 * (5 / 30) * (25 / 30))
    assert (counts - 400 * 5 / 30).abs().max() < 5 * spread  # every token is as likely


def test_equal_tokens_masks_that_hide_all_and_bad_options():
    q = torch.ones(1, 4, 12, 8)
    v = torch.randn(1, 4, 12, 3)
    for inverse in ("cholesky", "iterative"):
        core = skyformer(num_landmarks=8, inverse=inverse)
        got = core(q, q, v)
        close(got, v.sum(2, keepdim=True).expand_as(got) / (1 + 1e-3 / 8), 1e-3)  # every weight 1, up to the ridge
        hidden = torch.zeros(1, 12, dtype=torch.bool)
        assert torch.equal(core(q, q, v, key_mask=hidden), torch.zeros_like(v))
    for options, message in [
        ({"gamma": 0.0}, "gamma must be a finite number above 0, got 0.0"),
        ({"gamma": -1}, "gamma must be a finite number above 0, got -1"),
        ({"num_landmarks": 0}, "num_landmarks must be an integer of at least 1, got 0"),
        ({"num_landmarks": 1}, "from queries and from keys, got num_landmarks=1; use at least 2"),
        ({"inverse": "lu"}, "unknown inverse 'lu'; choose from cholesky, iterative"),
        (
            {"landmarks": "random"},
            "unknown landmarks 'random'; choose from learned, leverage, pivoted",
        ),
        ({"kernel": "laplace"}, "unknown kernel 'laplace'"),
    ]:
        with pytest.raises(ValueError, match=message):
            skyformer(**options)


@pytest.mark.parametrize("landmarks", WHOLE)
def test_whole_sequence_landmarks_refuse_causality_and_name_the_way_out(landmarks):
    core = skyformer(landmarks=landmarks)
    q, k, v = inputs(5, dtype=torch.float32)
    with pytest.raises(ValueError, match="is_causal=True was asked for; use landmarks='learned'"):
        core(q, k, v, is_causal=True)
    with pytest.raises(ValueError, match="step was asked for; use landmarks='learned'"):
        core.step(*(x[:, :, :1] for x in (q, k, v)))


def test_learned_landmarks_learn():
    torch.manual_seed(0)
    core = skyformer(num_landmarks=16, landmarks="learned")
    centres = torch.randn(8, 8)
    optimizer = torch.optim.Adam(core.parameters(), lr=0.05)
    errors = []
    for _ in range(60):
        q, k = (centres[torch.randint(8, (1, 4, 50))] + 0.1 * torch.randn(1, 4, 50, 8) for _ in range(2))
        want = gaussian().attention_matrix(q, k)
        loss = (core.attention_matrix(q, k) - want).square().mean() / want.square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(float(loss.detach()))
    assert sum(errors[-5:]) < 0.2 * sum(errors[:5])


def test_alignment_leaves_softmax_attention_and_lowers_the_error():
    """Keys far from all queries: the Gaussian kernel between them is below the ridge until they are moved."""
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 4, 40, 8, generator=gen, dtype=torch.float64) for _ in range(3))
    q, k = 0.7 * q, 0.7 * k + 3
    want = kf.build_attention("softmax", head_dim=8, num_heads=4)(q, k, v)
    errors = {}
    for align in (False, True):
        for number in (16, 80):
            core = kf.build_attention(
                "skyformer", head_dim=8, num_heads=4, num_landmarks=number, kernel="softmax", gamma=1e-9, align=align
            )
            errors[align, number] = float((core(q, k, v) - want).norm() / want.norm())
    assert errors[True, 80] < 1e-6
    assert errors[True, 16] < 0.5 * errors[False, 16]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"align": True}, "got kernel='gaussian' and landmarks='uniform'"),
        ({"align": True, "kernel": "softmax", "landmarks": "learned"}, "landmarks='learned'. Leave it out"),
        ({"align": True, "kernel": "softmax", "normalize": False}, "got normalize=False"),
        ({"align": 1}, "align"),
    ],
)
def test_alignment_needs_normalized_softmax_over_the_whole_sequence(options, message):
    with pytest.raises(ValueError, match=message):
        kf.build_attention("skyformer", head_dim=8, num_heads=4, **options)


def off(core, qkv) -> list[float]:
    """Relative errors of the output and the gradients in float32 against float64."""
    g = torch.randn(qkv[2].shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    results = []
    for dtype in (torch.float64, torch.float32):
        leaves = [x.float().to(dtype).requires_grad_() for x in qkv]
        out = core(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, g.to(dtype))])
    return [float(((b - a).norm() / a.norm()).detach()) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("gamma", [1e-3, 1e-6])
@pytest.mark.parametrize("shift", [0.0, 30.0])
def test_float32_does_not_multiply_rounding_by_the_inverse(gamma, shift):
    """Tokens near each other, where M is almost singular; far from 0 just as well."""
    out, dq, dk, dv = off(*nearly_equal_tokens("cholesky", gamma, shift))
    assert max(out, dv) < 2e-6
    assert max(dq, dk) < 5e-4


@pytest.mark.parametrize("gamma", [1e-3, 1e-6])
def test_the_iteration_keeps_three_digits_in_float32(gamma):
    """Its whole inverse is on one side."""
    out, _, _, dv = off(*nearly_equal_tokens("iterative", gamma, 0.0))
    assert max(out, dv) < 5e-4


def nearly_equal_tokens(inverse, gamma, shift):
    gen = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 256, 64, generator=gen, dtype=torch.float64) for _ in range(3))
    core = kf.build_attention("skyformer", head_dim=64, num_heads=1, gamma=gamma, inverse=inverse)
    return core, (0.1 * q + shift, 0.1 * k + shift, v)


@pytest.mark.parametrize("landmarks", ["segments", "learned"])
def test_a_kernel_never_exceeds_one_however_long_the_tokens(landmarks):
    core = skyformer(num_landmarks=16, landmarks=landmarks, gamma=1e-6)
    x = 30 * torch.randn(1, 4, 16, 8, generator=torch.Generator().manual_seed(1))
    if landmarks == "learned":
        with torch.no_grad():
            core.feature_map.Z.copy_(x[0] * core.scale**0.5)
    weights = core.attention_matrix(x, x)
    assert weights.max() <= 1 + 1e-5
    close(weights, core.attention_matrix(x.double(), x.double()).float(), 1e-2)  # squares of norms are 1e4 here


@pytest.mark.parametrize("value", [1.0, 100.3])
def test_equal_tokens_in_float32_are_right_or_refused(value):
    x = torch.full((1, 4, 40, 8), value)
    v = torch.randn(1, 4, 40, 3, generator=torch.Generator().manual_seed(0))
    for gamma in (1e-3, 1e-6):
        got = skyformer(num_landmarks=32, gamma=gamma)(x, x, v)
        close(got, v.sum(2, keepdim=True).expand_as(got) / (1 + gamma / 32), 1e-4)
    small = skyformer(num_landmarks=32, gamma=1e-9)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=r"at least 1e-06 in float32 arithmetic.*got 1e-09; raise it"):
            small(x.to(dtype), x.to(dtype), v.to(dtype))
    wide = v.double()
    close(small(x.double(), x.double(), wide), wide.sum(2, keepdim=True).expand_as(wide), 1e-6)
    with pytest.raises(ValueError, match="at least 1e-10 in float64 arithmetic"):
        skyformer(num_landmarks=32, gamma=1e-12)(x.double(), x.double(), wide)


@pytest.mark.parametrize("landmarks", WHOLE)
@pytest.mark.parametrize("inverse", ["cholesky", "iterative"])
def test_a_sample_of_nan_spares_the_others(landmarks, inverse):
    core = skyformer(num_landmarks=8, landmarks=landmarks, inverse=inverse)
    clean = inputs(20, B=3, dtype=torch.float32)
    broken = [x.clone() for x in clean]
    broken[1][1] = float("nan")
    results = []
    for qkv in (clean, broken):
        leaves = [x.requires_grad_() for x in qkv]
        out = core(*leaves)
        results.append([out, *torch.autograd.grad(out[[0, 2]].square().sum() + out[1].sum(), leaves)])
    for want, got in zip(*results, strict=True):
        assert torch.equal(got[[0, 2]], want[[0, 2]])
    assert results[1][0][1].isnan().any()


@pytest.mark.parametrize("invert", [inverse_root, lambda x: iterated_inverse(x, 1e-2)])
def test_inverses_have_exact_gradients_and_fail_one_matrix_at_a_time(invert):
    z = torch.randn(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert gradcheck(lambda z: invert(landmark_gram(z, None, 0.1)), [z])
    matrix = grams(1e-2)
    alone = invert(matrix)
    matrix[1] = -matrix[1]
    with_another = invert(matrix)
    assert torch.equal(with_another[[0, 2]], alone[[0, 2]])
    assert with_another[1].isnan().any()


@pytest.mark.parametrize("inverse", ["cholesky", "iterative"])
def test_learned_landmarks_step_by_step_equal_all_at_once(inverse):
    q, k, v = inputs(12)
    core = skyformer(num_landmarks=6, landmarks="learned", gamma=0.1, inverse=inverse).double()
    want, state, parts = core(q, k, v, is_causal=True), None, []
    for t in range(12):
        out, state = core.step(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1], state)
        parts.append(out)
    close(torch.cat(parts, 2), want)


def test_a_state_of_one_inverse_is_refused_by_the_other():
    q, k, v = inputs(3)
    cores = [skyformer(num_landmarks=6, landmarks="learned", inverse=x) for x in ("cholesky", "iterative")]
    _, state = cores[0](q, k, v, is_causal=True, return_state=True)
    with pytest.raises(ValueError, match="inverse"):
        cores[1](q, k, v, is_causal=True, state=state)


@pytest.mark.parametrize("options", [{"landmarks": x} for x in WHOLE] + [{"kernel": "softmax", "align": True}])
def test_a_layer_never_drops_queries_for_what_its_key_mask_hides(options):
    layer = kf.KernelAttention(32, 4, "skyformer", num_landmarks=8, dtype=torch.float64, **options)
    x, context = torch.randn(2, 2, 12, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    key_mask = torch.arange(12).expand(2, -1) < 5
    close(layer(x, context, key_mask), layer(x, context[:, :5]))
    own = layer(x, key_mask=key_mask)[:, :5]  # of itself, it says which tokens are there
    close(own, layer(x[:, :5]))


def test_a_query_mask_is_checked():
    core, (q, k, v) = skyformer(), inputs(5, 7, dtype=torch.float32)
    for mask, message in [
        ([True] * 5, "query_mask must be a tensor, got list"),
        (torch.ones(2, 5), "query_mask must be bool with True = a real query, got torch.float32"),
        (torch.ones(2, 7, dtype=torch.bool), r"query_mask must be \(batch, query length\) = \(2, 5\), got \(2, 7\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            core(q, k, v, query_mask=mask)


@pytest.mark.parametrize("landmarks", WHOLE)
def test_features_of_x_alone_need_landmarks_that_do_not_see_the_sequence(landmarks):
    core = skyformer(landmarks=landmarks)
    with pytest.raises(ValueError, match="no features of x alone; use the core's attention_matrix, or landmarks="):
        core.feature_map(torch.randn(1, 4, 3, 8))
    with pytest.raises(ValueError, match="'skyformer' takes its landmarks from the queries and keys of a call"):
        kernel_profile(core, [0.0, 1.0])


def test_the_profile_of_learned_landmarks_is_their_kernel():
    core = skyformer(num_landmarks=400, landmarks="learned", gamma=1e-4)
    profile = kernel_profile(core, [0.0, 0.5, 1.0])
    close(profile, torch.exp(-0.5 * torch.tensor([0.0, 0.25, 1.0])).expand(4, -1), 0.1)


def clusters(n=96, B=2):
    """Queries and keys (B, 4, n, 8) in clusters of unequal sizes: rare tokens are the ones that need landmarks."""
    gen = torch.Generator().manual_seed(0)
    centres = torch.randn(B, 4, 8, 8, generator=gen, dtype=torch.float64)
    which = (8 * torch.rand(B, 4, n, generator=gen, dtype=torch.float64) ** 3).long()
    x = centres.gather(2, which.unsqueeze(-1).expand(-1, -1, -1, 8))
    x = x + 0.1 * torch.randn(x.shape, generator=gen, dtype=torch.float64)
    return x[:, :, ::2], x[:, :, 1::2]


def ranks_agree(a, b):
    """Spearman's correlation."""
    return float(torch.corrcoef(torch.stack([x.argsort().argsort().double() for x in (a, b)]))[0, 1])


def isotropic(n=96, B=2):
    return torch.randn(2, B, 4, n // 2, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 3


@pytest.mark.parametrize("tokens", [clusters, isotropic])
def test_leverage_keeps_the_first_landmarks_and_scores_other_tokens_as_they_deserve(tokens):
    q, k = tokens()
    few = NystromMap(**SIZES, num_landmarks=12)
    phi = NystromMap(**SIZES, num_landmarks=24, landmarks="leverage")
    first, points = (z + centre.unsqueeze(2) for z, _, _, centre in (x.prepare(q, k, None, 1.0) for x in (few, phi)))
    assert torch.cdist(first, points).amin(-1).max() < 1e-12  # they are the uniform ones of half the number
    x = torch.cat([q, k], 2)
    scores = phi._scores(x, first, None, 1.0)
    values, vectors = torch.linalg.eigh(gaussian().attention_matrix(x, x, scale=1.0))
    ridge = values[..., :-24].sum(-1, keepdim=True) / 24  # what the best 24 features leave
    true = (vectors.square() @ (values / (values + ridge)).unsqueeze(-1)).squeeze(-1)
    is_first = torch.cdist(x, first).amin(-1) < 1e-12
    among_others, among_all = (
        sum(ranks_agree(a[m], b[m]) for a, b, m in zip(*(y.flatten(0, 1) for y in (scores, true, mask)), strict=True))
        for mask in (~is_first, is_first | ~is_first)
    )
    assert among_others / 8 > 0.65
    assert among_others / 8 > among_all / 8 + 0.1  # among all, those that are there already would come last


def test_leverage_landmarks_are_better_than_uniform_ones_where_tokens_are_in_clusters():
    q, k = clusters()
    want = gaussian().attention_matrix(q, k)
    errors = {}
    for landmarks in ("uniform", "leverage"):
        core = skyformer(num_landmarks=24, landmarks=landmarks)
        errors[landmarks] = []
        for draw in range(3):
            core.resample(draw)
            errors[landmarks].append(float((core.attention_matrix(q, k) - want).norm()))
    assert max(errors["leverage"]) < 0.5 * min(errors["uniform"])
