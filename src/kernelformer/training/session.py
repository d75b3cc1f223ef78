"""One training run, from its settings to its result."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed  # type: ignore[import-untyped]
from transformers import PreTrainedModel, TrainerCallback
from transformers.integrations.integration_utils import is_tensorboard_available
from transformers.utils import CONFIG_NAME

from kernelformer.commands import resume_command
from kernelformer.environment import environment
from kernelformer.errors import StoppedError, flag, positive_int
from kernelformer.files import write_json
from kernelformer.formatting import shortened
from kernelformer.models import MODELS, KernelformerConfig
from kernelformer.modules import redraw
from kernelformer.modules.redraw import random_maps
from kernelformer.parallel.group import TIMEOUT
from kernelformer.quiet import silent_libraries
from kernelformer.records import RUN, Result, read_head, read_object
from kernelformer.tasks import Task, make_task
from kernelformer.terminal import VisibleConsole
from kernelformer.training.absent import presence
from kernelformer.training.callbacks import Bar, Board, LastDraw, Stop
from kernelformer.training.checkpoints import clear, cut_metrics, locked, main_does, set_aside, writing
from kernelformer.training.config import Run, everywhere, extension
from kernelformer.training.finish import finish, take_best
from kernelformer.training.first_weights import check_vocabulary, start_from, weights_hash
from kernelformer.training.inspection import examine, saved_run
from kernelformer.training.meter import Log, Meter, Recorder
from kernelformer.training.order import check_grouping
from kernelformer.training.selection import Best, held_out_split, prune
from kernelformer.training.trainer import RunTrainer, training_arguments


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
    under ``torchrun --max-restarts N`` with ``resume`` the run then goes on by itself from its last checkpoint.

    Args:
        run: the settings.
        folder: of the run; it may not hold a run yet, except with ``resume``.
        resume: go on from the last checkpoint that is whole, or start if there is none. A finished run only gives its
            result, unless ``run`` has more steps than it had: then it goes on, by the rule of `run.extension`, and its
            model and result stay until the new ones are there.
        command: what the user typed, for the record.
        quiet: no progress bar and no sentences.
        log: called with the sentences; default: they are printed.
        callbacks: further ones for Hugging Face's trainer.
        timeout: seconds that a process waits for the others; more than the first of them ever works alone, as in
            judging at the end.

    Raises:
        StoppedError: Ctrl-C or SIGTERM; the run was saved before.
        AbsentError: another process has ended, or has not answered in time; it is named.
        TrainingError: the folder holds another run, or one on other data, is damaged, in use, or cannot be written.
        ValueError: settings that do not fit one another, the task, the model or the number of processes.
    """
    flag("resume", resume)
    folder = Path(folder)
    with silent_libraries(), ExitStack() as stack:
        args = training_arguments(run, folder, positive_int("timeout", timeout))
        main = args.process_index == 0
        present = presence(args, folder, timeout)
        if present is not None:
            stack.enter_context(present.watching())
            callbacks = [present, *callbacks]
        console = VisibleConsole(soft_wrap=True)  # a path stays in one piece
        say = _voice(console, log) if main and not quiet else _nothing
        bar = main and not quiet and console.is_terminal
        data = functools.cache(lambda: make_task(run.task, **run.task_options).fingerprint())
        start = functools.cache(lambda: None if run.start is None else weights_hash(Path(run.start)))
        finished, checkpoint, step, damage = main_does(
            main, folder, lambda: _enter(run, folder, resume, data, start, stack)
        )
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
        checkpoint: that the run goes on from: its cross-attention stays what the default was when it was started.
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


def _nothing(text: str) -> None:
    pass


def _voice(console: VisibleConsole, log: Log | None) -> Log:
    return log if log is not None else console.print


def _enter(
    run: Run,
    folder: Path,
    resume: bool,
    data: Callable[[], str],
    start: Callable[[], str | None],
    stack: ExitStack,
) -> tuple[Result | None, Path | None, int, list[str]]:
    stack.enter_context(locked(folder))
    return examine(run, folder, resume, data, start)


def _begin(
    run: Run, folder: Path, step: int, command: str, processes: int, data: str, start: Callable[[], str | None]
) -> None:
    """Leave only what the run can go on from; the record of a resumed run tells of its start and of what came later."""
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
