"""``kernelformer advise``: what it measures, what it says, and what can be wrong with its inputs."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

from kernelformer.cli.app import app  # noqa: E402
from kernelformer.conversion import advise as advise_pipeline  # noqa: E402
from kernelformer.conversion import advise as advise_search  # noqa: E402
from kernelformer.conversion import keep as convert_keep  # noqa: E402
from kernelformer.conversion import trials as attention_times  # noqa: E402
from kernelformer.conversion import trials as candidates  # noqa: E402
from kernelformer.conversion import trials as trials_module  # noqa: E402
from kernelformer.conversion.advice_report import (  # noqa: E402  # noqa: E402
    Kept,
    number_ranges,
    page,
    paste_lines,
    record,
    tables,
    trial_table,
    verdict,
)
from kernelformer.conversion.advise import advise, check  # noqa: E402
from kernelformer.conversion.losses import Figure, value_of_loss  # noqa: E402
from kernelformer.conversion.measure import attention_profile, attention_weights  # noqa: E402
from kernelformer.conversion.trials import (  # noqa: E402  # noqa: E402
    Candidate,
    LossFit,
    Timing,
    Trials,
    coarse_grid,
    crossover,
    neighbours,
)
from kernelformer.hf.find import attention_calls  # noqa: E402
from page_checks import check_page  # noqa: E402
from tiny_models import VOCAB, tiny, write_sentences  # noqa: E402


def batches(count, length=64, seed=0):
    gen = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, VOCAB, (1, length), generator=gen)} for _ in range(count)]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(advise_search, "LENGTHS", (32, 64))
    monkeypatch.setattr(attention_times, "ROUNDS", 1)


@pytest.fixture(scope="module")
def advices():
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("LENGTHS", (32, 64)), ("BEST", 0), ("RUN", 5)):
            patch.setattr(advise_search, name, value)
        for name, value in (("RECALL_GAP", 16), ("RECALLS", 0.01)):  # the texts are short and the weights random
            patch.setattr(advise_pipeline, name, value)
        models = {x: tiny(x, torch.float32) for x in ("BertModel", "LlamaForCausalLM")}
        return {
            name: (model, advise(model, batches(2), use_length=64, steps=2, minutes=5))
            for name, model in models.items()
        }


@pytest.mark.parametrize("kind", ["BertModel", "LlamaForCausalLM"])
def test_an_advice_has_a_verdict_tables_a_page_and_a_line_that_convert_takes(advices, kind):
    _, advice = advices[kind]
    assert advice.kind == ("cosine" if kind == "BertModel" else "perplexity ratio")
    methods = {x.candidate.name for x in advice.trials}
    assert {"local", "favor+", "favor#", "favor+hyperbolic", "loglinear"} <= methods
    assert ({"wildcat", "skyformer"} <= methods) == (kind == "BertModel")
    assert all(x.timing is not None for x in advice.trials)
    assert advice.trial(advice.chosen).figure is not None
    assert advice.trial(advice.distilled).steps == 2
    assert len(verdict(advice)) == 3
    for line in paste_lines(advice):
        assert line.startswith("kernelformer convert SRC DST --attention ")
    assert len(tables(advice)) == 2
    check_page(page(advice), hostile="<script")
    check_page(page(replace(advice, model="<script>alert(1)</script>")), hostile="<script")
    read = json.loads(json.dumps(record(advice)))
    assert read["verdict"] == verdict(advice)
    assert len(read["profiles"]) == len(advice.attentions) == 2


FIRST = {"BertModel": "wildcat:window=32:sinks=1 (32)", "LlamaForCausalLM": "loglinear:window=32:sinks=4 (32)"}
EXACT = {"BertModel": 0.9999999, "LlamaForCausalLM": 1.0}


@pytest.mark.parametrize("kind", list(FIRST))
def test_with_little_time_the_most_promising_candidate_is_run_timed_and_not_advised_where_it_is_not_near_enough(
    kind, advices, monkeypatch
):
    assert advices[kind][1].trials[0].label == FIRST[kind]
    monkeypatch.setattr(advise_search.Clock, "left", lambda clock, _: -1.0 if clock.before else 60.0)
    advice = advise(tiny(kind, torch.float32), batches(4), use_length=64, tolerance=EXACT[kind])
    assert [x.label for x in advice.trials] == [FIRST[kind]]
    assert advice.chosen == FIRST[kind]
    chosen = advice.trial(advice.chosen)
    assert chosen.timing is not None
    assert advice.left_out
    worse = replace(chosen.figure, value=1.73 if kind == "LlamaForCausalLM" else 0.5)
    advice.trials[0].figure = worse
    assert paste_lines(advice) == []
    assert verdict(advice)[0].endswith("asked for; more --minutes may find one.")
    advice.trials[0].figure = replace(worse, value=1.0)
    assert len(paste_lines(advice)) == 1


def test_reading_the_model_is_a_part_of_the_budget():
    with pytest.raises(ValueError, match="a budget of 1 minutes was over before one candidate was measured"):
        advise(tiny("BertModel", torch.float32), batches(2), minutes=1, since=time.monotonic() - 61)


@pytest.mark.parametrize("kind", list(FIRST))
def test_a_verdict_counts_the_rows_that_were_measured_and_offers_to_keep_what_improves_alone(kind, advices):
    advice = replace(advices[kind][1], trials=[replace(x) for x in advices[kind][1].trials], exact=None)
    chosen = advice.trial(advice.chosen)
    chosen.figure = replace(chosen.figure, value=1.1 if kind == "LlamaForCausalLM" else 0.9886)
    measured = [x[0] for x in trial_table(advice)[1] if x[-1] == "measured"]
    fitted = [x for x in measured if x.endswith("fitted")]
    assert f"of {len(measured) - len(fitted)} run untrained and {len(fitted)} fitted: " in verdict(advice)[0]
    for better, value in ((False, chosen.figure.value), (True, 1.0)):
        kept = Kept((), {0: (0, 1)}, replace(chosen.figure, value=value), chosen.label)
        advice.kept = [kept]
        assert ("2 heads of largest error exact would give" in verdict(advice)[1]) == better


def test_the_line_that_distills_does_not_learn_from_the_texts_to_measure_on(advices):
    advice = replace(advices["LlamaForCausalLM"][1], command={"--text": "test.jsonl"})
    line = advice.convert_line(advice.distilled, distill=True)
    assert "--distill TEXTS" in line
    assert line.endswith("--text test.jsonl")
    assert "(TEXTS)" in verdict(advice)[2]


def test_maps_beside_exact_heads_start_at_the_keys_too(monkeypatch):
    trials = Trials(tiny("LlamaForCausalLM", torch.float32), batches(1), batches(2, seed=1), True)
    candidate, started = Candidate("loglinear", 16, 32, 4), []
    plain = trials_module.start_maps
    monkeypatch.setattr(trials_module, "start_maps", lambda *x: started.append(plain(*x)))
    trials.errors(candidate)
    trials.figure(candidate)  # as it was started
    trials.figure(candidate, exact_heads={0: (0,)})
    assert [len(x) for x in started] == [2, 2]


def test_heads_that_find_what_is_far_are_named_for_decoders(advices):
    model, advice = advices["LlamaForCausalLM"]
    scores = [x for _, _, x in advice.recall]
    assert scores
    assert scores == sorted(scores, reverse=True)
    assert min(scores) >= 0.01
    heads = range(model.config.num_attention_heads)
    assert all(i < len(advice.attentions) and head in heads for i, head, _ in advice.recall)
    assert f"found again by {len(scores)} head" in verdict(advice)[1]
    assert f"--recall-heads {len(scores)} keeps" in verdict(advice)[1]
    assert advices["BertModel"][1].recall == []
    assert "recall" not in verdict(advices["BertModel"][1])[1]


def test_padding_on_either_side_does_not_change_which_heads_recall():
    gen = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (1, 50), generator=gen)
    pad, none, real = torch.zeros(1, 9, dtype=torch.long), torch.zeros(1, 9), torch.ones(1, 50)
    batches = [
        {"input_ids": torch.cat([pad, ids], 1), "attention_mask": torch.cat([none, real], 1)},
        {"input_ids": torch.cat([ids, pad], 1), "attention_mask": torch.cat([real, none], 1)},
        {"input_ids": ids},
    ]
    assert all(torch.equal(convert_keep.whole_rows([x])[0], ids[0]) for x in batches)
    assert [len(x) for x in convert_keep.whole_rows([{"input_ids": ids[:, :7]}, *batches])] == [50, 50, 50, 7]


def test_an_advice_leaves_the_model_as_it_was(advices):
    model, _ = advices["LlamaForCausalLM"]
    fresh = tiny("LlamaForCausalLM", torch.float32)
    assert {name: x.tolist() for name, x in model.state_dict().items()} == {
        name: x.tolist() for name, x in fresh.state_dict().items()
    }
    assert model.config._attn_implementation == fresh.config._attn_implementation


def test_what_was_measured_is_what_the_same_conversion_gives(advices, monkeypatch):
    model, advice = advices["BertModel"]
    monkeypatch.setattr(advise_pipeline, "CHECKED", 2)
    check(advice, model, batches(2)[:1], batches(2)[1:])  # the same texts again
    measured = [x for x in advice.checks if x.way == "measured"]
    assert measured
    for x in measured:
        assert x.got.value == pytest.approx(x.expected, abs=1e-5)
    assert len(tables(advice)) == 3


def test_a_captured_call_repeats_what_the_model_did():
    model = tiny("BertModel")
    ids = batches(2)
    mask = torch.ones(2, 64, dtype=torch.long)
    mask[1, 50:] = 0
    both = {"input_ids": torch.cat([x["input_ids"] for x in ids]), "attention_mask": mask}
    for call in attention_calls(model, both):
        keys, causal = call.visible()
        weights = attention_weights(call.query, call.key, scale=call.scale, causal=causal, key_mask=keys)
        torch.testing.assert_close((weights @ call.value).transpose(1, 2), call.output)


def test_a_profile_is_the_mass_of_the_weights():
    gen = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, n, 150, 8, generator=gen, dtype=torch.float64) for n in (4, 2))
    mask = torch.ones(2, 150, dtype=torch.bool)
    mask[1, :40] = False
    profile = attention_profile(q, k, scale=0.5, causal=True, key_mask=mask)
    logits = 0.5 * q @ k.repeat_interleave(2, 1).mT
    i = torch.arange(150)
    seen = (i <= i[:, None]) & mask[:, None, None]
    weights = logits.masked_fill(~seen, -math.inf).softmax(-1).nan_to_num()
    first = torch.zeros_like(mask)
    first[0, :4] = first[1, 40:44] = True
    near = (i - i[:, None]).abs() < 64
    for name, where in (("near", near.expand(2, 1, 150, 150)), ("first", first[:, None, None])):
        want = (weights * where).sum(-1).movedim(1, 2)[mask].mean(0)
        torch.testing.assert_close(torch.tensor(getattr(profile, name)[{"near": 64, "first": 4}[name]]).double(), want)
    far = (weights * ~(near | first[:, None, None])).sum(-1).movedim(1, 2)[mask].mean(0)
    torch.testing.assert_close(torch.tensor(profile.far).double(), far, rtol=1e-5, atol=1e-6)
    norm = (0.5 * q.square().sum(-1)).movedim(1, 2)[mask].mean(0).sqrt()
    torch.testing.assert_close(torch.tensor(profile.query).double(), norm, rtol=1e-5, atol=1e-6)


def test_errors_are_those_of_the_definition_and_a_window_over_all_is_exact():
    model = tiny("LlamaForCausalLM")
    trials = Trials(model, batches(2), batches(2, seed=1), True)
    assert max(trials.errors(Candidate("local", None, 64, 4)).layers) < 1e-6
    assert trials.figure(Candidate("local", None, 64, 4)).value == pytest.approx(1, abs=1e-5)
    errors = trials.errors(Candidate("favor+", 32))
    assert errors.predicted is not None
    call = trials.calls[0][0]
    with trials.converted(Candidate("favor+", 32)) as student:
        from kernelformer.hf import cores

        off = call.attend(cores(student)[call.name]) - call.output
    assert errors.layers[0] == pytest.approx(float(off.norm() / call.output.norm()), rel=1e-6)


def test_a_fit_lowers_the_error_on_other_texts():
    trials = Trials(tiny("BertModel", torch.float32), batches(1), batches(2, seed=1), False)
    candidate = Candidate("loglinear", 16, 32, 1)
    before = trials.errors(candidate).mean
    assert trials.fit(candidate, steps=12) == 12
    assert trials.errors(candidate).mean < before


def test_the_loss_of_others_is_expected_within_what_was_measured_alone():
    points = [("a", x, 0.5 * x**2) for x in (0.1, 0.2, 0.4)] + [("b", 0.5, 2 * 0.5**2)]
    fit = LossFit.of(points)
    assert fit.b == pytest.approx(2)
    assert fit.expected("a", 0.3).loss == pytest.approx(0.5 * 0.3**2)
    assert fit.expected("b", 0.4).loss == pytest.approx(2 * 0.4**2)  # the slope of the others, a factor of its own
    assert fit.expected("a", 2.0) is None
    assert fit.expected("b", 0.01) is None
    assert fit.expected("c", 0.3) is None
    assert LossFit.of(points[:3]) is None
    assert LossFit.of([("a", 0.1, 1.0)] * 4) is None


@pytest.mark.parametrize(("kind", "value"), [("perplexity ratio", 1.2), ("cosine", 0.97)])
def test_a_figure_and_its_loss_say_the_same(kind, value):
    assert value_of_loss(kind, Figure(kind, value).loss) == pytest.approx(value)
    assert Figure(kind, value).within(value)
    assert not Figure(kind, value).within(1.0)


def test_the_crossover_is_where_the_ratio_is_one():
    rows = [Timing(x, 100.0 * x, 0.1 * x * x) for x in (256, 512, 2048, 4096)]  # equal at 1000 tokens
    assert crossover(rows) == pytest.approx(1000)
    assert crossover(rows[:2]) is None
    assert crossover(rows[2:]) == 0
    assert crossover([]) is None


def test_the_grid_has_what_streams_for_decoders_and_neighbours_are_new():
    decoders = coarse_grid(causal=True, length=512, first="loglinear:window=64:sinks=4")
    assert not {"wildcat", "skyformer"} & {x.name for x in decoders}
    assert {x.sinks for x in decoders if x.window} == {4}
    best = Candidate("favor+", 128, 64, 4)
    new = neighbours([best], decoders, length=512)
    assert not set(new) & set(decoders)
    assert {(x.size, x.window) for x in new} == {(64, 64), (256, 64), (128, 32), (128, 128)}
    assert number_ranges([0, 1, 2, 5, 7, 8]) == "0-2,5,7-8"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batches": batches(1)}, "at least two batches"),
        ({"batches": batches(2, length=40)}, "about 40 tokens, and the smallest window, 32"),
        ({"batches": [{"input_ids": torch.full((1, 64), VOCAB)}] * 2}, f"up to {VOCAB}.*vocabulary of {VOCAB}"),
        ({"tolerance": 1.2}, "judged by its cosine, of which 1.2 is no tolerance"),
        ({"minutes": 1e-6}, "over before one candidate was measured"),
        ({"model": "BartForConditionalGeneration"}, "reads two sequences"),
    ],
)
def test_inputs_that_cannot_be_are_named(change, message):
    given = {"model": "BertModel", "batches": batches(2), **change}
    model = tiny(given.pop("model"), torch.float32)
    with pytest.raises(ValueError, match=message):
        advise(model, given.pop("batches"), **given)


def test_the_command_writes_a_page_and_a_record(tiny_folder, tmp_path, monkeypatch):
    source = tiny_folder("BertForMaskedLM")
    for name, value in (("RUN", 2), ("BEST", 0)):
        monkeypatch.setattr(advise_search, name, value)
    monkeypatch.setattr(candidates, "UNTRAINED", ("favor+",))
    monkeypatch.setattr(advise_pipeline, "CHECKED", 1)
    times = []
    load = advise_pipeline.load_source
    monkeypatch.setattr(
        advise_pipeline, "load_source", lambda *x, **y: (times.append(time.monotonic()), load(*x, **y))[1]
    )
    monkeypatch.setattr(advise_pipeline, "advise", lambda *x, **y: (times.append(y["since"]), advise(*x, **y))[1])
    text = write_sentences(tmp_path / "some.jsonl", [70] * 6)
    call = ["advise", source, "--length", 64, "--threads", 1, "--use-length", 64, "--steps", 2, "--samples", 2]
    done = CliRunner().invoke(app, [*map(str, call), "--text", str(text), "--out", str(tmp_path / "out"), "--check"])
    assert done.exit_code == 0, done.output
    assert times[1] <= times[0]  # the budget begins before the model is read
    said = " ".join(done.output.split())
    assert "Without training: " in said
    assert "kernelformer convert " in said
    read = json.loads((tmp_path / "out" / "advice.json").read_text())
    assert read["checks"]
    assert str(tmp_path) not in json.dumps(read)
    assert "<svg" in (tmp_path / "out" / "advice.html").read_text()
    done = CliRunner().invoke(app, ["advise", str(source)])
    assert done.exit_code == 2
    assert "there are no texts to look at" in done.output


def test_advice_looks_at_what_can_be_converted_alone():
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    kinds = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    model = Gemma3ForCausalLM(Gemma3TextConfig(vocab_size=60, head_dim=8, **sizes, **kinds)).eval()
    rows = [{"input_ids": torch.randint(5, 60, (1, 20))} for _ in range(2)]
    trials = Trials(model, rows[:1], rows[1:], predicts=True)
    assert [x.name for x in trials.calls[0]] == ["model.layers.1.self_attn"]
    assert trials.errors(Candidate("local", None, 4, 1)).layers[0] > 0
    assert trials.figure(Candidate("local", None, 30)).value == pytest.approx(1, abs=1e-4)
