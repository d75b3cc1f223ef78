"""A pretrained model and its converted copies as contenders of a measurement over the length of the input."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernelformer.measure.harness import clean_model, peak_memory, run_pass
from kernelformer.timing import Figures, Step, time_rounds

BASELINES = ("sdpa", "eager")  # implementations of the original
TOKEN = "one token"
TASKS = ("auto", "encoder", "causal")
TINY = 16  # tokens of the pass after which libraries, threads and their buffers are there
CHUNK = 1024  # tokens of a context that go through the model at once
SPARE = 128  # positions for tokens after a context: more than are ever timed


@dataclass(frozen=True)
class Subject:
    """The pretrained model that is measured.

    Args:
        folder: of a transformers model.
        task: one of `TASKS`; ``auto``: what the model is. With random weights BERT and its kin can be ``causal``.
        random: whether its weights are drawn, and only its configuration is read.
        allow_pickle: whether weights may be read from a pickle.
        batch: sequences of a pass.
    """

    folder: str
    task: str = "auto"
    random: bool = False
    allow_pickle: bool = False
    batch: int = 1

    def build(self, length: int, head: bool = False) -> tuple[Any, list[str]]:
        """Build the model in evaluation mode with positions for ``length`` tokens; return it and what was stretched.

        Args:
            length: tokens.
            head: whether it predicts tokens, for generating; without one there are no numbers over the vocabulary,
                which would be as many for every attention.
        """
        model = self._drawn(head) if self.random else self._loaded(head)
        if model.config.is_encoder_decoder or model.main_input_name != "input_ids":
            raise ValueError(
                f"{self.folder} is a {type(model).__name__}; lengths are measured of encoders and decoders of one text."
            )
        model, stretched = stretch(model, length)
        model.config.use_cache = False
        return model.eval(), stretched

    def _drawn(self, head: bool) -> Any:
        from transformers import AutoModel, AutoModelForCausalLM

        from kernelformer.hf.load import load_config

        config: Any = load_config(self.folder)
        if self.task == "causal" and hasattr(config, "is_decoder"):
            config.is_decoder = True  # BERT and its kin attend causally then
        torch.manual_seed(0)
        kind: Any = AutoModelForCausalLM if head else AutoModel
        return kind.from_config(config, trust_remote_code=False)

    def _loaded(self, head: bool) -> Any:
        from kernelformer.hf.load import load_source

        task = "causal" if head else "auto"
        model = load_source(self.folder, task=task, allow_pickle=self.allow_pickle).model
        # Weights are mapped from their file: a pass would pay for the pages that it is the first to read.
        for x in (*model.parameters(), *model.buffers()):
            x.data = x.data.clone()
        return model if head else model.base_model

    def tokens(self, model: Any, length: int, seed: int = 0) -> Tensor:
        """Return random tokens (B, L), the same for every attention."""
        gen = torch.Generator().manual_seed(seed)
        return torch.randint(model.config.get_text_config().vocab_size, (self.batch, length), generator=gen)


def room(model: Any) -> int | None:
    """Return how many tokens a model's table of positions has rows for; None without a table, as rotary models."""
    count = getattr(model.config, "max_position_embeddings", None)
    if count is None:
        return None
    rooms = []
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding) or not ("pos" in name.lower() or name.endswith("wpe")):
            continue
        if count <= module.num_embeddings <= count + 2:  # OPT and its kin have two rows more
            first = 0 if module.padding_idx is None or module.num_embeddings > count else module.padding_idx + 1
            rooms.append(count - first)
    return min(rooms, default=None)


@torch.no_grad()
def stretch(model: Any, length: int) -> tuple[Any, list[str]]:
    """Return a model with positions for ``length`` tokens, for measuring its speed.

    Its tables of positions are stretched: between two rows the new ones lie on a line. What it predicts at positions
    that it was not trained on means nothing. A model with enough positions, or without a table, is returned as it is.

    Returns:
        The model, and a line for each table that was stretched.
    """
    fits = room(model)
    if fits is None or length <= fits:
        return model, []
    config = copy.deepcopy(model.config)
    config.max_position_embeddings += length - fits
    longer = type(model)(config)
    old, new, lines = model.state_dict(), longer.state_dict(), []
    for name, x in new.items():
        was = old[name]
        if was.shape == x.shape:
            x.copy_(was)
            continue
        if was.dim() != 2 or was.shape[1:] != x.shape[1:]:
            raise ValueError(f"{name} of {type(model).__name__} cannot be stretched to {length} tokens.")
        x.copy_(F.interpolate(was.T[None], size=x.shape[0], mode="linear", align_corners=True)[0].T)
        lines.append(f"{name}: {was.shape[0]} rows stretched to {x.shape[0]}")
    return longer.to(next(model.parameters()).dtype), lines


def contender(model: Any, name: str) -> Any:
    """Return a copy that attends in another way: one of `BASELINES`, or converted to ``method:option=value``.

    All copies share the tensors of the weights; cores are their own.
    """
    from kernelformer.hf import convert
    from kernelformer.modules.spec import parse_method

    other = copy.deepcopy(model, {id(x): x for x in (*model.parameters(), *model.buffers())})
    if name in BASELINES:
        other.set_attn_implementation(name)
        return other
    method, options = parse_method(name)
    return convert(other, method, **options)


def step(model: Any, tokens: Tensor, kind: str) -> None:
    """Run one of `PASSES` of a model on tokens (B, L), without dropout."""
    run_pass(lambda: model(input_ids=tokens).last_hidden_state, kind)


def measure(
    what: str, subject: Mapping[str, Any], kind: str, length: int, names: Sequence[str], rounds: int, budget: float
) -> dict[str, Figures]:
    """Measure contenders in this process: {contender: figures}.

    Args:
        what: ``time``, or ``memory`` of one contender.
        subject: fields of `Subject`.
        kind: one of `PASSES`, or `TOKEN`.
        length: tokens of a pass, or of the context.
        names: of the contenders, see `contender`.
        rounds: at least so many runs of each are timed.
        budget: seconds for timing all of them.
    """
    this = Subject(**subject)
    if kind == TOKEN:
        return measure_generation(this, length, names, rounds, budget)
    model, _ = this.build(length)
    tokens = this.tokens(model, length)
    if what == "memory":
        other = contender(model, names[0])
        step(other, this.tokens(model, min(TINY, length)), kind)
        clean_model(other)
        return {name: {"peak": count} for name, count in peak_memory({names[0]: _step(other, tokens, kind)}).items()}
    return time_rounds({name: _step(contender(model, name), tokens, kind) for name in names}, rounds, budget)


def _step(model: Any, tokens: Tensor, kind: str) -> Step:
    return Step(lambda: step(model, tokens, kind), lambda: clean_model(model))


@torch.no_grad()
def measure_generation(
    subject: Subject, context: int, names: Sequence[str], rounds: int, budget: float
) -> dict[str, Figures]:
    """Return the median seconds of a token after a context, and the bytes of each contender's cache then."""
    from transformers import DynamicCache

    from kernelformer.hf import new_cache

    model, _ = subject.build(context + SPARE, head=True)
    tokens, one = subject.tokens(model, context), subject.tokens(model, 1, seed=1)
    steps, sizes = dict[str, Step](), dict[str, int]()
    for name in names:
        other = contender(model, name)
        cache: Any = DynamicCache() if name in BASELINES else new_cache(other)
        feed = partial(other, past_key_values=cache, use_cache=True, logits_to_keep=1)
        for part in tokens.split(CHUNK, 1):
            feed(input_ids=part)
        sizes[name] = cache_bytes(cache)
        steps[name] = Step(partial(feed, input_ids=one))
    figures = time_rounds(steps, rounds, budget)
    return {name: {**x, "peak": sizes[name]} for name, x in figures.items()}


def cache_bytes(cache: Any) -> int:
    """Return the bytes of a cache: of its states, or of all keys and values."""
    own = getattr(cache, "nbytes", None)
    return own if own is not None else sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
