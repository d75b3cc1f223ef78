"""Settings of a training run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeVar

from kernelformer.errors import choice, flag, integer, number, positive_int, unknown

if TYPE_CHECKING:
    from kernelformer.modules import AttentionSpec

# "constant" alone would leave out the warm-up without a word.
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant_with_warmup", "inverse_sqrt": "inverse_sqrt"}
DECAYING = ("linear", "cosine")  # to 0, at the last step
PRECISIONS = ("float32", "bf16")
SELECT = ("last", "best")
# Settings of a model that the run itself has, or that are fixed.
OWN = ("attention", "decoder_attention", "seed", "model_type")
# Another value gives the same result; but where the best evaluation is selected, it depends on when they are.
FREE = ("eval_every", "eval_batch_size", "save_every", "keep", "log_every", "context_parallel", "workers")

# Models whose sequences can be split over ranks.
SPLIT_MODELS = ("causal-lm", "masked-lm", "classifier", "series", "pixel-lm")

Problem = TypeVar("Problem", bound=Exception)


def everywhere(problem: Problem) -> Problem:
    """Mark an error that all processes raise: one of them says it for all."""
    vars(problem)["everywhere"] = True
    return problem


@dataclass(frozen=True)
class Run:
    """One training run: everything its result depends on, as plain values that JSON can carry.

    Args:
        task: a name of `tasks.TASKS`.
        attention: ``method:option=value:...``, or a list with one for each block; of an encoder-decoder the encoder's.
        decoder_attention: of an encoder-decoder's decoder, with its cross-attention; None: as the encoder's.
        task_options: of the task.
        model: further settings of `KernelformerConfig`; they win over those the task asks for.
        start: folder of a saved model, or of a finished run, whose weights are the first ones where names and shapes
            agree; None: all weights are new. A head for another task always is.
        steps: updates of the weights.
        batch_size: samples of one update, over all processes and micro-batches.
        group_by_length: batches are of samples of about one length, which saves padding; the task must know lengths.
        micro_batch: samples that go through the model at once on one process; None: the process's whole share.
        learning_rate: the largest; ``schedule`` says what it does after ``warmup_steps`` (linear from 0).
        kernel_lr: of what the kernels learn, where they learn; None: the same. They are not decayed, unless
            ``decay_kernels`` says so: decay pulls a scale to zero, where a kernel sees nothing.
        bias_lr: of tables of relative positions, where there are some; None: the same. An entry has to move by several
            units, which takes Adam that many times 1 / learning rate steps. They are never decayed.
        weight_decay: of AdamW, not for biases and norms.
        beta1: of AdamW.
        beta2: of AdamW.
        eps: of AdamW.
        warmup_steps: updates until ``learning_rate`` is reached.
        schedule: "linear" (to 0), "cosine" (to 0), "constant", "inverse_sqrt".
        max_grad_norm: gradients are shortened to it; None: never.
        label_smoothing: of the training loss; evaluation has none.
        redraw: updates per draw of the random features, where the model has some; None: one draw for all. The last draw
            comes before the learning rate falls to a quarter of its largest: a later one could not be learned.
        redraw_to_end: let redraws continue to the last update, as the papers' code does.
        precision: "float32", or "bf16" for autocast.
        gradient_checkpointing: recompute activations instead of keeping them.
        seed: of the first weights, of the draws, of dropout and of the order of the samples.
        select: which weights are the result: "last", or "best", those of the evaluation with the best value of the
            task's metric on the validation split (the earliest of equals; of translation the smallest loss, since BLEU
            is measured at the end), which are then scored on the test split (Skyformer's protocol). With
            ``eval_every=None`` there is one evaluation, of the last weights.
        eval_every: updates between evaluations; None: only at the end.
        eval_batch_size: samples per forward in evaluation, over all processes; None: as many as in training.
        save_every: updates between checkpoints; None: only at the end.
        keep: how many checkpoints stay.
        log_every: updates between lines of ``metrics.jsonl``.
        context_parallel: ranks that each sequence is split over; the number of processes is a multiple of it. The batch
            is divided among the groups of so many. Without dropout another number changes the result by rounding only.
            0: all processes.
        workers: processes that get batches ready beside training; 0: training itself does, which is enough unless
            images are decoded on the way.
        decay_kernels: apply ``weight_decay`` to what kernels learn, as the code of KL-Transformer (2110.08323) does.
    """

    task: str
    attention: str | list[str]
    decoder_attention: str | list[str] | None = None
    task_options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    start: str | None = None
    steps: int = 1000
    batch_size: int = 32
    group_by_length: bool = False
    micro_batch: int | None = None
    learning_rate: float = 1e-3
    kernel_lr: float | None = None
    bias_lr: float | None = None
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8
    warmup_steps: int = 0
    schedule: str = "linear"
    max_grad_norm: float | None = 1.0
    label_smoothing: float = 0.0
    redraw: int | None = None
    redraw_to_end: bool = False
    precision: str = "float32"
    gradient_checkpointing: bool = False
    seed: int = 0
    select: str = "last"
    eval_every: int | None = None
    eval_batch_size: int | None = None
    save_every: int | None = None
    keep: int = 2
    log_every: int = 10
    context_parallel: int = 1
    workers: int = 0
    decay_kernels: bool = False

    def __post_init__(self) -> None:
        def take(name: str, value: object) -> None:  # as a plain number: it may have been one of another library
            object.__setattr__(self, name, value)

        for name in ("steps", "batch_size", "keep", "log_every"):
            take(name, positive_int(name, getattr(self, name)))
        for name in ("micro_batch", "redraw", "eval_every", "eval_batch_size", "save_every"):
            if getattr(self, name) is not None:
                take(name, positive_int(name, getattr(self, name)))
        for name in ("learning_rate", "eps", "kernel_lr", "bias_lr", "max_grad_norm"):
            if name in ("learning_rate", "eps") or getattr(self, name) is not None:
                take(name, number(name, getattr(self, name), above=0))
        take("weight_decay", number("weight_decay", self.weight_decay, at_least=0))
        for name in ("beta1", "beta2", "label_smoothing"):
            take(name, number(name, getattr(self, name), at_least=0))
            if getattr(self, name) >= 1:
                raise ValueError(f"{name} must be at least 0 and below 1, got {getattr(self, name)!r}.")
        take("warmup_steps", integer("warmup_steps", self.warmup_steps, at_least=0))
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps must be at most steps, got {self.warmup_steps} and {self.steps}: the learning rate "
                f"would never be reached."
            )
        for name in ("context_parallel", "workers"):
            take(name, integer(name, getattr(self, name), at_least=0))
        take("seed", integer("seed", self.seed, at_least=0))
        if self.seed >= 1 << 32:
            raise ValueError(f"seed must be below 2^32, which is what numpy takes, got {self.seed}.")
        for name in ("decay_kernels", "group_by_length", "gradient_checkpointing", "redraw_to_end"):
            flag(name, getattr(self, name))
        if self.redraw_to_end and self.redraw is None:
            raise ValueError("redraw_to_end=True needs redraw, the number of updates per draw, got redraw=None.")
        choice("select", self.select, SELECT)
        choice("schedule", self.schedule, SCHEDULES)
        choice("precision", self.precision, PRECISIONS)
        if self.batch_size % (self.micro_batch or 1):
            raise ValueError(
                f"batch_size must be a multiple of micro_batch, got {self.batch_size} and {self.micro_batch}."
            )
        self._check_names()

    def _check_names(self) -> None:
        from kernelformer.modules.spec import parse_attention  # with torch: settings alone take no time
        from kernelformer_lab.tasks import TASKS, task_options

        for name in ("task_options", "model"):
            object.__setattr__(self, name, _plain(name, getattr(self, name)))  # a copy, so that it cannot change later
        known = task_options(choice("task", self.task, TASKS))
        splits = self.context_parallel != 1
        if splits and TASKS[self.task].model not in SPLIT_MODELS:
            raise ValueError(
                f"context_parallel={self.context_parallel} splits one sequence over ranks, and task {self.task!r} has "
                f"pairs of them or images; leave it out."
            )
        if splits and self.label_smoothing:
            raise ValueError(
                f"label_smoothing={self.label_smoothing:g} is not there for sequences over ranks, got "
                f"context_parallel={self.context_parallel}; leave one of them out."
            )
        for name in self.task_options:
            if name not in known:
                raise unknown(f"option for task {self.task!r},", name, known)
        for name in ("attention", "decoder_attention"):
            given = getattr(self, name)
            if not isinstance(given, str) and (name == "attention" or given is not None):
                if not isinstance(given, list | tuple) or not given:
                    raise ValueError(f"{name} must be a spec or a list with one for each block, got {given!r}.")
                object.__setattr__(self, name, list(given))
        if self.decoder_attention is not None and TASKS[self.task].model != "seq2seq":
            raise ValueError(
                f"decoder_attention is for encoder-decoders, got {self.decoder_attention!r} and task {self.task!r}; "
                f"leave it out."
            )
        for spec in self.specs:
            parse_attention(spec)
        if self.start is not None and not isinstance(self.start, str):
            raise ValueError(f"start must be the path of a folder, got {self.start!r}.")
        for name in OWN:
            if name in self.model:
                raise ValueError(f"{name} is not a setting of model, got {self.model[name]!r}; give it to the run.")

    @property
    def specs(self) -> list[str]:
        """The attentions, one for all blocks or one for each; then the decoder's."""
        return [*_listed(self.attention), *_listed(self.decoder_attention)]

    @property
    def label(self) -> str:
        """The attention as people say it: ``favor+:num_features=64``, ``2 x softmax, 4 x elu``, ``softmax > elu``."""
        decoder = None if self.decoder_attention is None else join_blocks(self.decoder_attention)
        return join_sides(join_blocks(self.attention), decoder)

    def as_json(self) -> dict[str, Any]:
        """Return the settings as plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Run:
        """Build a run from what `as_json` returned, also that of older versions."""
        known, record = [x.name for x in fields(cls)], dict(record)
        if record.pop("parallel", "data") == "context" and record.get("context_parallel", 1) == 1:
            record["context_parallel"] = 0
        for name in record:
            if name not in known:
                raise unknown("setting of a run,", name, known)
        for x in fields(cls):
            if x.name not in record and x.default is MISSING and x.default_factory is MISSING:
                raise ValueError(f"a run needs the setting {x.name!r}, got {', '.join(record) or 'none'}.")
        return cls(**record)

    def differences(self, other: Run) -> list[str]:
        """Settings of another result, as ``name=here, there``; those that change nothing do not count."""
        mine, theirs = self.as_json(), other.as_json()
        free = FREE if self.select == "last" else tuple(name for name in FREE if name != "eval_every")
        return [
            f"{name} {mine[name]!r} and {theirs[name]!r}"
            for name in mine
            if name not in free and mine[name] != theirs[name]
        ]


def extension(run: Run, before: Run) -> str | None:
    """A sentence on the learning rate of a run that is made longer; None if it is not.

    The rate of step s is that of a run of the new number of steps at s, whatever came before: so a run that is made
    longer and then stopped resumes to the same numbers. Without decay to 0 ("constant", "inverse_sqrt") it is the run
    that would have been longer from the start, to the last bit.
    """
    if run.steps <= before.steps:
        return None
    rule = f"what it was: the {run.schedule} schedule does not depend on the number of steps"
    if run.schedule in DECAYING:
        rule = f"that of a run of {run.steps} steps: the {run.schedule} schedule is laid out anew over all of them"
    return f"{run.steps} steps instead of {before.steps}; from here on the learning rate is {rule}"


BETWEEN_SIDES = ">"
_COMMA = re.compile(r",\s+(?![^(\[]*[)\]])")  # those within brackets belong to a value
_COUNT = re.compile(r"(?:(\d+) x )?(.*)", re.DOTALL)


def parse_blocks(text: str) -> list[AttentionSpec]:
    """Read ``2 x A, 4 x B``: the attentions of one side, block after block; ``A`` alone has no count."""
    from kernelformer.modules import AttentionSpec

    blocks = []
    for part in _COMMA.split(text):
        match = _COUNT.fullmatch(part.strip())
        assert match is not None  # it matches anything
        count = None if match[1] is None else int(match[1])
        blocks.append(replace(AttentionSpec.parse(match[2]), count=count))
    return blocks


def join_blocks(attentions: str | Sequence[str]) -> str:
    """Write one attention for all blocks, or a list with one for each: ``2 x A, 4 x B``."""
    if isinstance(attentions, str):
        return attentions
    return ", ".join(f"{len(list(same))} x {spec}" for spec, same in groupby(attentions))


def parse_sides(text: str) -> tuple[str, str | None]:
    """Read ``A > B``: the encoder's attention and the decoder's; the second is None where there is only one."""
    first, *rest = (x.strip() for x in text.split(BETWEEN_SIDES))
    if not rest:
        return first, None
    if len(rest) > 1 or not (first and rest[0]):
        raise ValueError(f"{BETWEEN_SIDES} stands between the encoder's attention and the decoder's, got {text!r}.")
    return first, rest[0]


def join_sides(encoder: str, decoder: str | None) -> str:
    """Write ``A > B``, or ``A`` where there is only one."""
    return encoder if decoder is None else f"{encoder} {BETWEEN_SIDES} {decoder}"


def attention_settings(text: str) -> dict[str, str | None]:
    """Settings of a run for ``A``, or ``A > B`` for an encoder by A and a decoder by B; A alone is for both."""
    encoder, decoder = parse_sides(text)
    return {"attention": encoder, "decoder_attention": decoder}


def _listed(specs: str | list[str] | None) -> list[str]:
    return [] if specs is None else [specs] if isinstance(specs, str) else specs


def _plain(what: str, value: object) -> dict[str, Any]:
    """JSON round trip of a dict; rejects values that are not plain."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{what} must be a dict, got {value!r}.")
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(value), allow_nan=False))
    except (TypeError, ValueError):
        raise ValueError(
            f"{what} must hold plain values (numbers, texts, lists), so that a run can be saved, got {value!r}."
        ) from None
    return plain
