"""Stages of distillation: what serves again, held-out looks, starts, LoRA, window dropout, going on after a stop."""

from __future__ import annotations

import copy
import itertools
import math
import signal

import pytest
import torch
from test_distillation import by_definition, decoder, encoder, endless, inputs

import kernelformer as kf
from kernelformer.conversion.distill import Lora, lora_targets
from kernelformer.conversion.losses import ROWS, attention_loss
from kernelformer.conversion.tune import (
    CENTRES,
    PATIENCE,
    SAME,
    Progress,
    ReusePolicy,
    Stage,
    best_rate,
    key_centres,
    learned,
    start_maps,
    transfer,
    tune,
)
from kernelformer.hf import convert, cores
from kernelformer.hf.find import AttentionCall, attention_calls
from tiny_models import tiny

NEAR = {"window": 4, "sinks": 1}


def test_what_was_seen_serves_again_and_each_pass_of_the_original_counts_once():
    passes = []

    def watched(batch):
        passes.append(batch["number"])
        return [batch["number"]]

    def batches(first=0):
        return ({"number": i, "input_ids": torch.zeros(1, 3)} for i in itertools.count(first))

    reuse = ReusePolicy(block=3, times=2)
    turns = list(reuse.steps(watched, batches(), 0, 14))
    assert passes == [0, 1, 2, 3, 4, 5, 6, 7]  # the last block is not whole, and takes no batch that nobody uses
    assert sorted(x.seed for x in turns[:6]) == [0, 0, 1, 1, 2, 2]
    assert all(x.calls == [x.seed] for x in turns)
    assert [x.turn for x in turns[:6]] == [0, 0, 0, 1, 1, 1]
    assert reuse.batches_of(14) == 8
    for stop in range(14):  # a run that was stopped sees the same from there on
        rest = reuse.steps(watched, batches(reuse.first_batch(stop)), stop, 14)
        assert [(x.step, x.calls, x.seed, x.turn) for x in rest] == [
            (x.step, x.calls, x.seed, x.turn) for x in turns[stop:]
        ]


def test_each_turn_has_other_rows_until_all_have_been_there():
    torch.manual_seed(0)
    length = 2 * ROWS
    q, k, v = (torch.randn(1, 2, length, 4, dtype=torch.float64) for _ in range(3))
    core = kf.build_attention("loglinear", head_dim=4, num_heads=2, num_features=8).double()
    halves = [float(attention_loss(core, q, k, v, seed=5, turn=i)) for i in range(3)]
    whole = by_definition(core, q, k, torch.ones(1, 1, length, length, dtype=torch.bool), 0.5).mean()
    assert halves[0] != halves[1]
    assert halves[2] == halves[0]
    assert (halves[0] + halves[1]) / 2 == pytest.approx(float(whole), rel=1e-6)


@pytest.mark.parametrize("causal", [False, True])
def test_without_its_window_a_row_has_the_weights_of_the_map_alone(causal):
    q, k, v = inputs()
    near = kf.build_attention("loglinear", head_dim=8, num_heads=4, num_features=16, **NEAR).double()
    alone = kf.build_attention("loglinear", head_dim=8, num_heads=4, num_features=16).double()
    with_window, kernel = (float(attention_loss(x, q, k, v, None, causal)) for x in (near, alone))
    assert float(attention_loss(near, q, k, v, None, causal, window_dropout=1.0)) == pytest.approx(kernel, rel=1e-8)
    some = float(attention_loss(near, q, k, v, None, causal, window_dropout=0.5))
    assert min(with_window, kernel) < some < max(with_window, kernel)


def test_centres_are_those_of_clusters():
    gen = torch.Generator().manual_seed(0)
    means = 10 * torch.randn(4, 3, generator=gen)
    keys = (means.repeat(50, 1) + 0.01 * torch.randn(200, 3, generator=gen))[torch.randperm(200, generator=gen)]
    first = torch.Generator().manual_seed(3)
    centres = key_centres(keys, 12, first)  # more than there are clusters, so that each has one
    assert torch.cdist(means, centres).amin(1).max() < 0.05
    assert key_centres(keys[:2], 6, first).shape == (6, 3)
    assert key_centres(keys[:1], 3, first).isfinite().all()


@pytest.mark.parametrize("options", [{}, NEAR, {"per_head": False}, {"num_key_heads": 4}])
@pytest.mark.parametrize("make", [encoder, decoder])
def test_maps_start_at_the_keys_where_that_is_nearer(make, options):
    teacher = make()
    student = convert(copy.deepcopy(teacher), "loglinear", num_features=24, **options)
    rows = endless(padded=make is encoder)
    seen = [attention_calls(teacher, next(rows), outputs=False, only=learned(student)) for _ in range(3)]

    def loss():
        with torch.no_grad():
            return [float(attention_loss(cores(student)[x.name], *x.inputs)) for x in seen[-1]]

    before = loss()
    chosen = start_maps(cores(student), seen)
    assert list(chosen) == list(cores(student))
    for old, new, which in zip(before, loss(), chosen.values(), strict=True):
        assert new < old if which == CENTRES else new == old
    assert CENTRES in chosen.values()


def test_as_many_centres_as_keys_are_exact_attention():
    """Every key its own feature, sharp enough to be told apart: the map is the softmax kernel at these keys."""
    gen = torch.Generator().manual_seed(0)
    keys = 6 * torch.nn.functional.normalize(torch.randn(1, 1, 12, 8, generator=gen), dim=-1)
    query = torch.randn(1, 1, 12, 8, generator=gen)
    core = kf.build_attention("loglinear", head_dim=8, num_heads=1, num_features=12, scale=1.0)
    call = AttentionCall("a", 0, torch.nn.Identity(), query, keys, keys, None, {"scaling": 1.0}, None)
    assert start_maps({"a": core}, [[call]]) == {"a": CENTRES}
    want = torch.nn.functional.scaled_dot_product_attention(query, keys, keys, scale=1.0)
    torch.testing.assert_close(core(query, keys, keys), want, rtol=1e-3, atol=1e-3)


def test_a_map_that_is_nearer_stays_as_it_was():
    teacher = encoder()
    student = convert(copy.deepcopy(teacher), "loglinear", num_features=4)
    rows = endless()
    transfer(student, teacher, rows, steps=150, lr=3e-2)
    before = copy.deepcopy(student.state_dict())
    chosen = start_maps(cores(student), [attention_calls(teacher, next(rows), outputs=False, only=learned(student))])
    assert set(chosen.values()) == {SAME}
    assert all(torch.equal(x, before[name]) for name, x in student.state_dict().items())


@pytest.mark.parametrize("make", [encoder, decoder])
def test_lora_trains_beside_the_weights_and_is_merged_into_them(make):
    teacher = make()
    student = convert(copy.deepcopy(teacher), "loglinear", num_features=8, **NEAR)
    names, flags = set(student.state_dict()), {x: y.requires_grad for x, y in student.named_parameters()}
    before = copy.deepcopy(student.state_dict())
    targets = lora_targets(student)
    assert len(targets) == 4  # values and outputs of two layers
    lora = Lora(student, targets, 2)
    rows = endless(padded=make is encoder)
    losses = tune(student, teacher, rows, steps=40, lr=2e-2)
    assert sum(losses[-4:]) < 0.9 * sum(losses[:4])
    batch = next(endless(padded=False))
    student.eval()
    with torch.no_grad():
        want = student(**batch)[0]
        lora.merge()
        torch.testing.assert_close(student(**batch)[0], want, rtol=1e-4, atol=1e-5)
    assert set(student.state_dict()) == names
    assert {x: y.requires_grad for x, y in student.named_parameters()} == flags
    changed = {name for name, x in student.state_dict().items() if not torch.equal(x, before[name])}
    assert {f"{x}.weight" for x in targets} <= changed
    assert all(".kernel." in x for x in changed - {f"{x}.weight" for x in targets})


def test_lora_draws_by_its_seed_and_leaves_the_generator_alone():
    def matrices(seed):
        student = convert(decoder(), "loglinear", num_features=4)
        torch.manual_seed(7)
        Lora(student, lora_targets(student), 2, seed)
        return torch.cat([x.flatten() for n, x in student.named_parameters() if "lora_A" in n]), torch.rand(1)

    (a, x), (b, y), (c, _) = matrices(0), matrices(0), matrices(1)
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(x, y)


def test_a_head_that_shares_its_weight_gets_no_lora():
    student = convert(tiny("LlamaForCausalLM", torch.float32, tie_word_embeddings=True), "loglinear", num_features=4)
    assert "lm_head" not in lora_targets(student, "*")
    with pytest.raises(ValueError, match=r"fits 'lm_head', whose weight is another layer's too"):
        lora_targets(student, "lm_head")


def test_a_step_and_its_count_are_one(monkeypatch):
    """Ctrl-C within a step comes after it, and what breaks a step leaves it marked as half done."""
    x, optimizer = quadratic()
    stage = Stage(optimizer, 5, None, None, None, None)
    x.grad = torch.ones(1)
    step = optimizer.step
    monkeypatch.setattr(optimizer, "step", lambda: (signal.raise_signal(signal.SIGINT), step()))
    with pytest.raises(KeyboardInterrupt):
        stage.update(1.0, 3)
    assert stage.progress.losses == [1.0]
    assert stage.progress.whole
    assert float(x.detach()) < 4

    def broken():
        raise KeyboardInterrupt

    monkeypatch.setattr(optimizer, "step", broken)
    with pytest.raises(KeyboardInterrupt):
        stage.update(1.0, 3)
    assert stage.progress.losses == [1.0]
    assert not stage.progress.whole


def test_layers_that_do_not_exist_are_named():
    student = convert(decoder(), "loglinear", num_features=4)
    with pytest.raises(ValueError, match=r"no linear layer of LlamaForCausalLM fits '\*\.w'; it has .*v_proj"):
        lora_targets(student, "*.v_proj,*.w")
    assert len(lora_targets(student, "*.v_proj, *.0.mlp.up_proj")) == 3


def quadratic():
    x = torch.nn.Parameter(torch.tensor([4.0]))
    return x, torch.optim.SGD([x], lr=0.1)


def test_the_best_look_is_what_stays_and_patience_ends_a_stage():
    x, optimizer = quadratic()
    values = iter([5.0, 3.0, *[4.0] * 50])
    seen = []

    def look():
        seen.append(float(x.detach()))
        return next(values)

    stage = Stage(optimizer, 200, None, None, look, None)
    for step in stage:
        with torch.no_grad():
            x -= 0.01
        stage.update(float(step), 10)
    progress = stage.progress
    assert progress.ended
    assert progress.over
    assert len(progress.curve) == 2 + PATIENCE
    assert len(progress.losses) < 200
    assert progress.tokens == 10 * len(progress.losses)
    assert float(x.detach()) == seen[1]


def test_the_clock_ends_a_stage_and_its_schedule_goes_on_after_a_stop(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("kernelformer.conversion.tune.time.monotonic", lambda: now[0])

    def run(progress, until):
        _, optimizer = quadratic()
        stage = Stage(optimizer, 10**9, 10.0, progress, None, None)
        rates = []
        for _ in stage:
            if now[0] >= until:
                return progress.state(), rates
            rates.append(optimizer.param_groups[0]["lr"])
            now[0] += 1
            stage.update(1.0, 1)
        return progress.state(), rates

    whole, rates = run(Progress(), math.inf)
    assert len(rates) == 10
    assert whole["over"]
    now[0] = 500.0
    progress = Progress()
    state, first = run(progress, 504.0)
    now[0] = 900.0
    _, rest = run(Progress(progress.losses, state), math.inf)
    assert first + rest == rates


def test_a_rate_is_found_and_everything_put_back():
    x = torch.ones(3)

    def trial(rate):
        x.mul_(rate)
        return math.nan if rate == 3 else abs(float(x[0]) - 0.5)

    rate, losses = best_rate([x], [1.0, 0.5, 3.0], trial)
    assert rate == 0.5
    assert losses == {1.0: 0.5, 0.5: 0.0, 3.0: math.inf}
    assert torch.equal(x, torch.ones(3))


@pytest.mark.parametrize("stop", [3, 9])
def test_transfer_goes_on_to_the_last_bit_where_batches_serve_again(stop):
    teacher = decoder()
    options = {"steps": 12, "lr": 1e-2, "reuse": ReusePolicy(2, 3), "window_dropout": 0.3}
    held = [next(endless(padded=False))]

    def start():
        return convert(copy.deepcopy(teacher), "loglinear", num_features=8, **NEAR)

    def rows(first=0):
        gen = torch.Generator().manual_seed(1)
        every = ({"input_ids": torch.randint(5, 60, (2, 20), generator=gen)} for _ in itertools.count())
        return itertools.islice(every, first, None)

    whole, student = start(), start()
    losses = transfer(whole, teacher, rows(), held_out=held, **options)
    progress = Progress()

    def interrupt(step, _):
        if step == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        transfer(student, teacher, rows(), held_out=held, progress=progress, log=interrupt, **options)
    state, weights = copy.deepcopy(progress.state()), copy.deepcopy(student.state_dict())
    again = start()
    again.load_state_dict(weights)
    progress = Progress(progress.losses[:], state)
    first = options["reuse"].first_batch(stop)
    assert transfer(again, teacher, rows(first), held_out=held, progress=progress, **options) == losses
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in whole.state_dict().items())
