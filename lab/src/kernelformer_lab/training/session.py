"""One training run, from its settings to its result."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed  # type: ignore[import-untyped]
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel, TrainerCallback
from transformers.integrations.integration_utils import is_tensorboard_available
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from kernelformer.cli.common import VisibleConsole
from kernelformer.conversion.readers import hash_files
from kernelformer.environment import environment
from kernelformer.errors import StoppedError, TrainingError, flag, positive_int, reason, shape
from kernelformer.files import check_hashes, write_hashes, write_json
from kernelformer.formatting import shortened
from kernelformer.models import MODELS, KernelformerConfig
from kernelformer.modules import RelativePositions, redraw
from kernelformer.modules.schedules import random_maps
from kernelformer.parallel.context import TIMEOUT
from kernelformer.weight_headers import saved_shapes, weight_files
from kernelformer_lab.data.tokenization import TOKENIZER, load_vocabulary
from kernelformer_lab.records import MODEL, RESULT, RUN, Result, read_head, read_object, resume_command
from kernelformer_lab.tasks import Task, make_task
from kernelformer_lab.training.callbacks import Bar, Board, LastDraw, Stop, rank_watchdog, silent_training
from kernelformer_lab.training.checkpoints import (
    STAGE,
    clear,
    cut_metrics,
    locked,
    main_does,
    metrics,
    publish,
    set_aside,
    writing,
)
from kernelformer_lab.training.config import Run, everywhere, extension
from kernelformer_lab.training.evaluation import judged, load_model
from kernelformer_lab.training.inspection import examine, saved_run
from kernelformer_lab.training.meter import Log, Meter, Recorder, score_text, split_errors
from kernelformer_lab.training.selection import FOLDER, Best, check_grouping, held_out_split, prune
from kernelformer_lab.training.trainer import RunTrainer, training_arguments


def take_best(folder: Path, task: Task, trainer: RunTrainer, data: Dataset[Any] | None) -> dict[str, float]:
    """Give the model its best weights, where they were selected, and return their scores on the test split.

    Args:
        trainer: that has made all steps, on every process.
        data: the test split; None: the last weights are the result.
    """
    if trainer.best is None or data is None or trainer.recorder.diverged:
        return {}
    # All of them, buffers too: the last draw of random features is not the one that these weights have learned.
    best = load_model(task.model, folder / f"{FOLDER}{trainer.best.step}")
    trainer.network.load_state_dict(best.state_dict())
    return trainer.score_split("test", data)


def finish(
    run: Run, folder: Path, task: Task, trainer: RunTrainer, test: dict[str, float], remarks: list[str], say: Log
) -> Result:
    """Write the model and the result of a run that is at its end.

    Args:
        trainer: whose model has the weights to keep.
        test: of `take_best`.
        remarks: of the task, that were said already.
    """
    result = _result(task, trainer, test, metrics(folder))
    for remark in task.remarks():
        if remark not in remarks:
            say(remark)
    if result.diverged:
        say(
            f"diverged: the loss is not finite at step {result.steps}; try a smaller learning_rate than "
            f"{run.learning_rate:g}, or a longer warm-up"
        )
    else:
        trainer.network.save_pretrained(folder / STAGE / MODEL)
        task.save_extra(folder / STAGE / MODEL)
        write_hashes(folder / STAGE / MODEL)
        publish(folder / STAGE / MODEL, folder / MODEL)
        said = score_text(result.value, result.value_error)
        say(f"finished: {task.metric} {said} after {result.steps} steps, {result.seconds:.0f} s{_selected(result)}")
    # In this order: whenever the process is killed, a folder with a result says that it is finished.
    write_json(folder / RUN, {**read_head(folder), "finished": True})
    write_json(folder / RESULT, result.as_json())
    return result


def _selected(result: Result) -> str:
    """Words on the best weights; empty if none were selected."""
    if result.best_step is None:
        return ""
    test = score_text(result.test[result.metric], result.test_error)
    return f"; the best weights are those of step {result.best_step}, {result.metric} on the test split {test}"


def _result(task: Task, trainer: RunTrainer, test: dict[str, float], lines: Sequence[dict[str, Any]]) -> Result:
    recorder, meter, best, metric = trainer.recorder, trainer.meter, trainer.best, task.metric
    scores: dict[str, float] = {}
    errors: dict[str, float] = {}
    tested: dict[str, float] = {}
    test_errors: dict[str, float] = {}
    if not recorder.diverged:
        data: Any = trainer.eval_dataset
        scores, errors = _all_scores(task, trainer, recorder.evaluation if best is None else best.scores, data)
        if best is not None:
            tested, test_errors = _all_scores(task, trainer, test, task.split("test"))
    return Result(
        metric=metric,
        value=scores.pop(metric, math.nan),
        value_error=errors.get(metric, math.nan),
        scores=scores,
        loss=scores.get("loss", math.nan),
        loss_error=errors.get("loss", math.nan),
        best_step=None if best is None or recorder.diverged else best.step,
        test=tested,
        test_error=test_errors.get(metric, math.nan),
        grad_norm=gradient_norms([*lines, {"grad_norms": meter.take_norms()}]),  # a run that diverged may have some
        tokens_per_second=speed(lines),
        peak_bytes=meter.peak,
        parameters=trainer.network.num_parameters(),
        seconds=round(meter.seconds, 6),
        input_seconds=round(meter.waited, 6),
        steps=trainer.state.global_step,
        diverged=recorder.diverged,
    )


def _all_scores(
    task: Task, trainer: RunTrainer, values: dict[str, float], data: Dataset[Any]
) -> tuple[dict[str, float], dict[str, float]]:
    """Scores of a split with what the task judges of it, and the errors of some, by their names."""
    values = values | judged(task, trainer.network, data, trainer.args.per_device_eval_batch_size)
    return split_errors({name.removeprefix("eval_"): x for name, x in values.items() if name.startswith("eval_")})


def speed(lines: Sequence[dict[str, Any]]) -> float:
    """Tokens per second: the median over intervals of ``metrics.jsonl`` after the first, or that one if it is alone."""
    points = [(float(line["seconds"]), int(line["tokens"])) for line in lines if "loss" in line]
    pairs = list(pairwise(points)) or [((0.0, 0), p) for p in points]
    return median([(b[1] - a[1]) / max(b[0] - a[0], 1e-9) for a, b in pairs] or [0.0])


def gradient_norms(lines: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median, 95th percentile and maximum of the finite norms in ``metrics.jsonl``; none where there are none.

    A line has those of all steps since the line before it, ``grad_norms``; of older runs that of its own step alone.
    """
    old = [[line["grad_norm"]] if "grad_norm" in line else [] for line in lines]
    norms = np.array([x for line, own in zip(lines, old, strict=True) for x in line.get("grad_norms", own)])
    norms = norms[np.isfinite(norms)]
    if not norms.size:
        return {}
    return {"median": float(np.median(norms)), "p95": float(np.percentile(norms, 95)), "max": float(norms.max())}


HEADS = ("head.", "lm_head.")
CORE = ".core."  # what belongs to a method: draws and what a kernel has learned


def start_from(model: PreTrainedModel, folder: Path) -> str:
    """Take over all weights that the two models share, and say which are new; a head may have another size.

    What belongs to the method itself is taken only by the same attention: another one keeps its own draws and kernels,
    so that weights trained with one attention can start a model with another. A table of relative positions may be of
    another length: a distance means the same in both, and those beyond the saved ones start as the farthest of them.

    Args:
        folder: of `save_pretrained`, or of a finished run.
    """
    source = _place(folder)
    try:
        check_hashes(source)
        files = weight_files(source)
        saved_shapes(files)
        config = KernelformerConfig.from_pretrained(source)
        weights = {name: x for file in files for name, x in load_file(file).items()}
    except (OSError, ValueError, RuntimeError, SafetensorError) as problem:
        raise TrainingError(
            f"{source} cannot start a run: {reason(problem).rstrip('.')}; give the folder of a finished run, or one "
            f"with {CONFIG_NAME} and {SAFE_WEIGHTS_NAME} of this library."
        ) from None
    own = model.state_dict()
    same = config.attention == model.config.attention
    shared = {name: x for name, x in weights.items() if name in own and (same or CORE not in name)}
    fits = {name: x for name, x in shared.items() if own[name].shape == x.shape}
    buckets = "scheme=t5" in f"{config.attention} {config.decoder_attention}"  # the saved numbers are of no distances
    tables = {f"{name}.weight": x for name, x in model.named_modules() if isinstance(x, RelativePositions)}
    others = [name for name in shared if name not in fits and name in tables and not buckets]
    stretched = {name: _stretched(tables[name], shared[name]) for name in others}
    fits |= {name: x for name, x in stretched.items() if x.shape == own[name].shape}
    for name in shared:
        if name not in fits and not name.startswith(HEADS):
            raise TrainingError(
                f"{name} of {source} is {shape(weights[name])}, this model's is {shape(own[name])}; build it with the "
                f"same sizes and vocabulary."
            )
    if not fits:
        raise TrainingError(f"{source} has none of this model's weights; give a model of the same kind.")
    model.load_state_dict(fits, strict=False)
    new = [name for name, _ in model.named_parameters() if name not in fits]
    said = [f"{name} from {weights[name].shape[1]} to {own[name].shape[1]} distances" for name in stretched]
    rest = f"; of another length: {_few(said)}" if said else ""
    rest += f"; new: {_few(new)}" if new else ""
    return f"starting from {folder}: {len(fits)} of {len(weights)} saved tensors taken{rest}"


def _stretched(positions: RelativePositions, saved: Tensor) -> Tensor:
    """A saved table (H, n) at this one's distances, or as it is where it says something else.

    Entries are over -reach..reach, of causal ones over 0..reach. One that many distances share is in no longer table.
    """
    if positions.grid is not None or positions.scheme != "table" or saved.dim() != 2:
        return saved
    size, there = positions.weight.shape[1], saved.shape[1]
    if positions.max_distance is not None and there > size:
        return saved
    middle = 0 if positions.causal else (there - size) // 2
    return saved[:, (torch.arange(size) + middle).clamp(0, there - 1)]


def _few(names: list[str]) -> str:
    return f"{', '.join(names[:6])}{', ...' if len(names) > 6 else ''}"


def check_vocabulary(task: Task, folder: Path) -> None:
    """Raise if a saved model was trained with another vocabulary: its embeddings would go to other tokens.

    Args:
        folder: of `save_pretrained`, or of a finished run.
    """
    file, make = _place(folder) / TOKENIZER, getattr(task, "vocabulary", None)
    if make is None or not file.is_file():
        return
    mine, saved = make(), load_vocabulary(str(file))
    if mine.fingerprint() != saved.fingerprint():
        own = "one of bytes" if mine.tokenizer is None else f"another one, of {mine.size} tokens"
        raise TrainingError(
            f"{file} is the vocabulary of the weights to start from, of {saved.size} tokens; task {task.name!r} has "
            f"{own}. Embeddings would go to other tokens: take the saved one by --set task.tokenizer={folder}."
        )


def weights_hash(folder: Path) -> str:
    """Name, size and hash of the weights of a saved model, or of a finished run."""
    return hash_files(weight_files(_place(folder)))


def _place(folder: Path) -> Path:
    return folder / MODEL if (folder / RUN).exists() else folder


def train(
    run: Run,
    folder: str | Path,
    *,
    resume: bool = False,
    command: str = "",
    quiet: bool = False,
    log: Log | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    timeout: int = TIMEOUT,
) -> Result:
    """Train a model, evaluate it, and leave everything in a folder.

    The folder gets ``run.json`` (settings, environment, command, hashes of the data and of weights to start from, and
    whether it is ``finished``), ``metrics.jsonl`` (a line per interval and evaluation), ``checkpoint-N/``,
    ``tensorboard/``, and at the end ``model/`` and ``result.json``; `records.standing` says how far it is. Every file
    is whole or not there, whenever the process is killed. A resumed run gives the numbers it would have given without
    the interruption, to the last bit on as many processes and threads. With ``select="best"`` the weights of the best
    evaluations are in ``best-N/``, as many as the checkpoints need; ``model/`` is the best of all.

    Started by ``torchrun`` or ``accelerate launch``, the processes share the batch; they see one folder, and only the
    first writes and talks. If one of them ends or hangs, so do the others, after ``timeout`` seconds at the latest;
    under ``torchrun --max-restarts N`` with ``resume`` the run then resumes by itself from its last checkpoint.

    Args:
        run: the settings.
        folder: of the run; it may not hold a run yet, except with ``resume``.
        resume: start from the last checkpoint that is whole, or anew if there is none. A finished run only gives its
            result, unless ``run`` has more steps than it had: then it is resumed, by the rule of `config.extension`,
            and its model and result stay until the new ones are there.
        command: what the user typed, for the record.
        quiet: no progress bar and no sentences.
        log: called with the sentences; default: they are printed.
        callbacks: further ones for Hugging Face's trainer.
        timeout: seconds that a process waits for the others; more than the first of them ever works alone, as in
            judging at the end.

    Raises:
        StoppedError: Ctrl-C or SIGTERM; the run was saved before.
        RankLostError: another process has ended, or has not answered in time; it is named.
        TrainingError: the folder holds another run, or one on other data, is damaged, in use, or cannot be written.
        ValueError: settings that do not fit one another, the task, the model or the number of processes.
    """
    flag("resume", resume)
    folder = Path(folder)
    with silent_training(), ExitStack() as stack:
        args = training_arguments(run, folder, positive_int("timeout", timeout))
        main = args.process_index == 0
        if (watchdog := rank_watchdog(args, folder, timeout)) is not None:
            stack.enter_context(watchdog.watching())
            callbacks = [watchdog, *callbacks]
        console = VisibleConsole(soft_wrap=True)  # a path stays in one piece
        say: Log = (log or console.print) if main and not quiet else lambda _: None
        bar = main and not quiet and console.is_terminal
        data = functools.cache(lambda: make_task(run.task, **run.task_options).fingerprint())
        start = functools.cache(lambda: None if run.start is None else weights_hash(Path(run.start)))

        def enter() -> tuple[Result | None, Path | None, int, list[str]]:
            stack.enter_context(locked(folder))
            return examine(run, folder, resume, data, start)

        finished, checkpoint, step, damage = main_does(main, folder, enter)
        if finished is not None:
            say(f"{folder} is finished, after {finished.steps} steps; nothing is left to do unless --steps says more")
            return finished
        for remark in damage:
            say(remark)
        if resume:
            say(f"going on from step {step}" if checkpoint else "there is no checkpoint yet: starting from step 0")
            if main and checkpoint is not None and (rule := extension(run, saved_run(folder)[0])):
                say(rule)
        say(f"writing to {folder}")
        task = make_task(run.task, **run.task_options)
        splits = {"train_dataset": task.split("train"), "eval_dataset": task.split("validation")}
        if run.group_by_length:
            check_grouping(run.task, splits["train_dataset"])
        best = Best(task) if run.select == "best" else None
        held_out = None if best is None else held_out_split(task)  # now: a split that is missing is no end of a run
        remarks = task.remarks()
        for remark in remarks:
            say(remark)
        meter = Meter(args.device, args.gradient_accumulation_steps)
        model = build_model(run, task, checkpoint)
        say(f"model: {model.num_parameters():,} parameters, attention {run.label}")
        if run.start is not None and checkpoint is None:
            check_vocabulary(task, Path(run.start))
            say(start_from(model, Path(run.start)))
        main_does(main, folder, lambda: _begin(run, folder, step, command, args.world_size, data(), start))
        recorder = Recorder(folder if main else None, meter, say, each=not bar)
        stack.callback(recorder.close)
        others: list[TrainerCallback] = [meter, recorder, *([] if best is None else [best]), *callbacks]
        if main and is_tensorboard_available():
            with writing(folder):
                others.append(stack.enter_context(Board(folder / "tensorboard", step)))
        if bar:
            others.append(stack.enter_context(Bar(console, recorder, shortened(run.label))))
        trainer = RunTrainer(
            run, task, model, args, meter=meter, recorder=recorder, best=best, callbacks=others, **splits
        )
        _learn(run, folder, trainer, checkpoint, say)
        test = take_best(folder, task, trainer, held_out)
        return main_does(main, folder, lambda: finish(run, folder, task, trainer, test, remarks, say))


def _learn(run: Run, folder: Path, trainer: RunTrainer, checkpoint: Path | None, say: Log) -> None:
    """All steps, or those up to a signal or a loss that is not finite."""
    if run.redraw is not None and random_maps(trainer.network):
        # Hung on the model itself: its forward is called once per micro-batch, whatever it is wrapped in.
        schedule = redraw(trainer.network, every=run.redraw * trainer.args.gradient_accumulation_steps)
        if not run.redraw_to_end:
            trainer.add_callback(LastDraw(schedule))
    set_seed(run.seed, device_specific=True)  # dropout differs between processes
    stop = Stop(say)
    trainer.add_callback(stop)
    with stop.listening():
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    reached = trainer.state.global_step
    if reached < run.steps and not trainer.recorder.diverged:
        where = folder / f"checkpoint-{reached}"
        raise everywhere(
            StoppedError(
                f"stopped after step {reached} of {run.steps}, saved in {where}; go on with {resume_command(folder)}."
            )
        )


def build_model(run: Run, task: Task, checkpoint: Path | None = None) -> PreTrainedModel:
    """The model with its first weights, a function of the run alone.

    Args:
        run: the settings.
        task: whose model it is.
        checkpoint: that the run resumes from: its cross-attention stays what the default was when it was started.
    """
    set_seed(run.seed)
    name = "cross_attention"
    saved = {} if checkpoint is None else {name: read_object(checkpoint / CONFIG_NAME).get(name)}
    settings = {**saved, **task.settings(), **run.model}
    if run.label_smoothing and settings.get("num_labels") == 1:
        raise ValueError(
            f"label_smoothing is for classes, got {run.label_smoothing:g} and task {task.name!r} with num_labels=1, "
            f"which is a regression; leave it out."
        )
    if settings.get("sparse_prediction") and (run.label_smoothing or task.model != "masked-lm"):
        raise ValueError(
            f"sparse_prediction is for masked language models without label_smoothing, got task {task.name!r} with a "
            f"model {task.model!r} and label_smoothing={run.label_smoothing:g}; leave it out."
        )
    if run.decoder_attention is not None:
        settings["decoder_attention"] = run.decoder_attention
    return MODELS[task.model](KernelformerConfig(**settings, attention=run.attention, seed=run.seed))


def _begin(
    run: Run, folder: Path, step: int, command: str, processes: int, data: str, start: Callable[[], str | None]
) -> None:
    """Remove what the run cannot resume from, and write its record, with its start and each resume."""
    clear(folder)
    set_aside(folder, step)
    if run.select == "best":
        prune(folder)
    cut_metrics(folder, step)
    here: dict[str, Any] = {
        "environment": {**environment(torch.get_num_threads()), "processes": processes},
        "command": command,
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    record: dict[str, Any] = {"run": run.as_json(), **here, "data": data}
    if step:
        before = read_head(folder)
        longer = before["run"].get("steps", 0) < run.steps
        resumed = [*before.get("resumed", []), {"step": step, **({"steps": run.steps} if longer else {}), **here}]
        record = {**record, **before, "run": run.as_json(), "resumed": resumed}
    elif run.start is not None:
        record["start"] = start()
    write_json(folder / RUN, {**record, "finished": False})
