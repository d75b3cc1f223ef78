"""Several attentions trained on the same data in the same order, and a report of what came of it."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from kernelformer.environment import environment
from kernelformer.errors import StoppedError, TrainingError, WorkerError, positive_int
from kernelformer.files import write_json, write_text
from kernelformer.formatting import shortened
from kernelformer.generation import room, sample_bytes
from kernelformer.models import MODELS, KernelformerForCausalLM
from kernelformer_lab.jobs import call_in_process, tell
from kernelformer_lab.recipes.catalogue import change
from kernelformer_lab.records import PLAN, RESULT, RUN, SAMPLE, Result, part, read_head, read_object, reading
from kernelformer_lab.reports.comparison import Comparison, conditions_of, read_run, write_report
from kernelformer_lab.tasks import TASKS, Task, make_task
from kernelformer_lab.training.config import Run, attention_settings
from kernelformer_lab.training.evaluation import load_run
from kernelformer_lab.training.inspection import check_same
from kernelformer_lab.training.selection import check_grouping, held_out_split
from kernelformer_lab.training.session import build_model, train

AGAIN = "the same call and resume=True"
REPORT = "report.html"
FIGURES = "comparison.json"
PROMPT = "def "
LENGTH = 300  # bytes of a sample


@dataclass(frozen=True)
class Plan:
    """Several runs, the folder that they go to, and what a reader should know of them.

    Args:
        about: more for the record, by name: "recipe", "source", "note".
    """

    title: str
    runs: Sequence[Run]
    folder: Path
    about: Mapping[str, str] = field(default_factory=dict)

    def folder_of(self, run: Run) -> Path:
        """The folder of one run: readable, and different for different attentions."""
        plain = re.sub(r"[^A-Za-z0-9+=.,-]", "_", run.label)
        if len(plain) > 80 or plain != run.label.replace(":", "_"):
            plain = f"{plain[:70]}-{hashlib.sha256(run.label.encode()).hexdigest()[:8]}"
        return self.folder / f"{plain}-seed{run.seed}"

    def save(self, threads: int) -> None:
        """Write it into its folder, where `read_plan` finds it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        runs = [run.as_json() for run in self.runs]
        write_json(
            self.folder / PLAN, {"title": self.title, "about": dict(self.about), "threads": threads, "runs": runs}
        )


def read_plan(folder: Path) -> tuple[Plan, int]:
    """The comparison that a folder holds, finished or not, and its threads."""
    record = read_object(folder / PLAN)
    with reading(folder / PLAN):
        runs = [Run.from_json(x) for x in part(record, "runs", list)]
        threads = positive_int("threads", record.get("threads"))
        return Plan(part(record, "title", str), runs, folder, part(record, "about", dict)), threads


def make_plan(
    title: str, run: Run, attentions: Sequence[str], seeds: int, folder: Path, about: Mapping[str, str] | None = None
) -> Plan:
    """Every attention with every seed, seed by seed, so that a stopped comparison has all attentions of a seed.

    Args:
        attentions: specs; ``A > B`` gives an encoder-decoder A in its encoder and B in its decoder.
    """
    positive_int("seeds", seeds)
    if len(set(attentions)) != len(attentions):
        raise ValueError(f"attentions to compare must differ, got {', '.join(attentions)}.")
    sides: dict[str, dict[str, Any]] = {x: attention_settings(x) for x in attentions}
    runs = [replace(run, **sides[x], seed=run.seed + i) for i in range(seeds) for x in attentions]
    return Plan(title, runs, folder, about or {})


def check(plan: Plan, resume: bool, again: str = AGAIN) -> None:
    """Find what cannot work before anything is trained: data, models without their numbers, folders.

    Args:
        resume: resume what is in the folder.
        again: how a user does that, for the error if it was not asked for.
    """
    started = [x for x in plan.runs if (plan.folder_of(x) / RUN).exists()]
    if started and not resume:
        raise TrainingError(
            f"{plan.folder_of(started[0])} is there already; go on with {again}, or take another folder."
        )
    first = plan.runs[0]
    task = make_task(first.task, **first.task_options)
    for split in ("train", "validation"):
        task.split(split)
    if any(run.group_by_length for run in plan.runs):
        check_grouping(first.task, task.split("train"))
    if any(run.select == "best" for run in plan.runs):
        held_out_split(task)
    with torch.device("meta"):
        for run in plan.runs:
            if run.seed == first.seed:
                build_model(run, task)
    data = task.fingerprint() if started else None
    for run in started:
        check_same(run, plan.folder_of(run), data)


def fit_steps(run: Run, attentions: Sequence[str], seconds: float, least: int = 20) -> Run:
    """Shorten runs that would take more than so many seconds on this machine, by timing their first steps.

    Args:
        run: the settings that all attentions share.
        attentions: what is compared, one after the other.
        seconds: that the runs may take together, evaluations included.

    Returns:
        ``run``, or a copy with fewer steps and fewer, smaller evaluations.
    """
    task = make_task(run.task, **run.task_options)
    data: Any = task.split("train")
    validation: Any = task.split("validation")
    batch = task.collate([data[i] for i in range(run.batch_size)])
    sides: list[dict[str, Any]] = [attention_settings(x) for x in attentions]
    round_seconds = sum(_step_seconds(replace(run, **side), task, batch) for side in sides)
    # An evaluation has no backward pass, a third of a step's time.
    evaluations = run.steps // (run.eval_every or run.steps) * len(validation) / run.batch_size / 3
    if round_seconds * (run.steps + evaluations) <= seconds:
        return run
    steps = max(least, int(seconds / round_seconds * run.steps / (run.steps + evaluations)))
    if steps >= run.steps:
        return run
    samples = max(8, len(validation) * steps // run.steps)
    settings = {"steps": steps, "warmup_steps": steps // 10, "task.validation_samples": samples}
    return change(run, {**settings, "eval_every": -(-steps // 4), "save_every": -(-steps // 4)})


def _step_seconds(run: Run, task: Task, batch: dict[str, Any], repeats: int = 3) -> float:
    """Time a training step, the shortest of a few after one that warms up."""
    model, times = build_model(run, task), []
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(1 + repeats):
        start = time.perf_counter()
        model(**batch).loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def run_comparison(
    plan: Plan,
    *,
    resume: bool,
    threads: int,
    command: str,
    again: str = AGAIN,
    log: Callable[[str], None] = lambda _: None,
    progress: Callable[[], None] = lambda: None,
) -> Comparison:
    """Train what is not trained yet, each run in a process of its own, and write the report.

    Args:
        plan: what to train.
        resume: resume what is in the folder; otherwise it must not hold these runs yet.
        threads: of each process.
        command: what the user typed, for the record.
        again: how to resume a comparison that was stopped, for the message.
        log: takes one line at a time.
        progress: called after each run.
    """
    check(plan, resume, again)
    plan.save(threads)
    _log_conditions(plan, threads, log)
    for run in plan.runs:
        log(_short(run))
        _train(run, plan.folder_of(run), threads, command, again, log)
        progress()
    return report(plan)


def _log_conditions(plan: Plan, threads: int, log: Callable[[str], None]) -> None:
    """Say at once that speeds will not be comparable: a run that is there was made under other conditions."""
    now = conditions_of(environment(threads))
    for folder in (plan.folder_of(x) for x in plan.runs if (plan.folder_of(x) / RUN).exists()):
        before = read_head(folder)["environment"]
        other = [f"{key} {before[key]}, now {x}" for key, x in now.items() if key in before and before[key] != x]
        if other:
            log(f"{folder} was made under other conditions ({'; '.join(other)}): speeds will not be compared")
            return


def _name(run: Run) -> str:
    return f"{run.label}, seed {run.seed}"


def _short(run: Run) -> str:
    return f"{shortened(run.label)}, seed {run.seed}"


def _train(run: Run, folder: Path, threads: int, command: str, again: str, log: Callable[[str], None]) -> None:
    """Train a run in a process of its own, so that its memory and its threads are its own."""
    arguments = {"run": run.as_json(), "folder": str(folder), "command": command, "resume": (folder / RUN).exists()}
    try:
        call_in_process(
            train_and_decode,
            arguments,
            threads=threads,
            env={"HF_HUB_OFFLINE": "1"},
            log=lambda line: log(f"{_short(run)}: {line}"),
        )
    except (KeyboardInterrupt, StoppedError):
        raise StoppedError(f"stopped in {folder}; go on with {again}.") from None
    except WorkerError as problem:
        raise TrainingError(f"{_name(run)}: {problem}") from None


CONTEXTS = (128, 512, 2048, 8192)
CHUNK = 2048  # tokens of a prefill that go through the model at once


@torch.inference_mode()
def decode_costs(
    model: KernelformerForCausalLM, contexts: Sequence[int] = CONTEXTS, repeats: int = 30
) -> tuple[tuple[int, float, int], ...]:
    """Measure the median seconds of a token and the bytes of the state after some contexts, in this order.

    Contexts that a model has no positions for are left out.
    """
    model.train(False)
    cache, seen, rows = model.new_cache(), 0, list[tuple[int, float, int]]()
    gen = torch.Generator().manual_seed(0)

    def feed(count: int) -> None:
        tokens = torch.randint(model.config.vocab_size, (1, count), generator=gen).to(model.device)
        model(tokens, past_key_values=cache, logits_to_keep=1)

    for context in sorted(contexts):
        if model.longest is not None and context + repeats + 1 > model.longest:
            break
        while seen < context:
            count = min(CHUNK, context - seen)
            feed(count)
            seen += count
        feed(1)  # a warm-up
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            feed(1)
            times.append(time.perf_counter() - start)
        seen += repeats + 1
        rows.append((context, median(times), cache.nbytes))
    return tuple(rows)


def train_and_decode(run: dict[str, Any], folder: str, command: str, resume: bool) -> None:
    """Train a run, or resume it, and measure how a language model decodes."""
    settings, place = Run.from_json(run), Path(folder)
    result = train(settings, place, resume=resume, command=command, log=tell)
    if not result.diverged and issubclass(MODELS[TASKS[settings.task].model], KernelformerForCausalLM):
        measure_decoding(settings, place, result)


def measure_decoding(run: Run, folder: Path, result: Result) -> None:
    """Add what decoding costs to the result of a language model, and a text of one over bytes; once."""
    sample = folder / SAMPLE if run.task == "bytes" else None
    if sample is not None and sample.exists() and result.decode is None:
        sample.unlink()  # of the model before the run was made longer
    if result.decode is not None and (sample is None or sample.exists()):
        return
    _, model = load_run(folder)
    assert isinstance(model, KernelformerForCausalLM)
    if result.decode is None:
        write_json(folder / RESULT, {**read_object(folder / RESULT), "decode": decode_costs(model)})
    if sample is not None and not sample.exists():
        fits = room(model, PROMPT)
        length = LENGTH if fits is None else min(LENGTH, fits)
        write_text(sample, PROMPT + sample_bytes(model, PROMPT, tokens=length).text if length > 0 else "")


def report(plan: Plan) -> Comparison:
    """Write the report of what is in the folders."""
    first = plan.runs[0]
    task = make_task(first.task, **first.task_options)
    records = [replace(read_run(plan.folder_of(run)), label=run.label) for run in plan.runs]
    comparison = Comparison(plan.title, task.metric, task.higher_is_better, task.about, records, task.extra_metrics())
    plan.folder.mkdir(parents=True, exist_ok=True)
    write_report(comparison, plan.folder / REPORT, samples=_samples(plan))
    about = {**plan.about, "task": task.name, "about": task.about, "baselines": task.baselines("validation")}
    write_json(plan.folder / FIGURES, {**_figures(comparison), **about})
    return comparison


def _figures(comparison: Comparison) -> dict[str, Any]:
    """The numbers of a report, for further use."""
    runs = [
        {
            "label": run.label,
            "seed": run.seed,
            "settings": run.settings,
            "evaluation": [[p.step, p.seconds, p.values.get(comparison.curve)] for p in run.evaluation],
            "result": None if run.result is None else asdict(run.result),
            **({"conditions": run.conditions} if comparison.unequal else {}),
        }
        for run in comparison.runs
    ]
    first = comparison.runs[0]
    head = {"title": comparison.title, "metric": comparison.metric, "higher_is_better": comparison.higher_is_better}
    extra = {"extra_metrics": list(comparison.extra_metrics)} if comparison.extra_metrics else {}
    origin = {
        "curve": comparison.curve,
        "date": first.started,
        "command": first.command,
        "environment": first.environment,
    }
    return {**head, **extra, **origin, "runs": runs}


def _samples(plan: Plan) -> dict[str, str]:
    """Samples written by the models of the first seed."""
    texts = {}
    for run in plan.runs:
        file = plan.folder_of(run) / SAMPLE
        if run.seed == plan.runs[0].seed and file.exists():
            texts[run.label] = file.read_bytes().decode(errors="replace")
    return {label: text for label, text in texts.items() if text}
