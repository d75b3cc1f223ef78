"""Settings of a conversion, which are also the options of ``kernelformer convert``; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelformer.errors import choice, positive_int
from kernelformer.settings import KIND, PICKLE, SEED, TEXTS, Settings, option, parse_layers

FEATURES = 128  # default number of features or landmarks, or the rank


TASKS = ("auto", "encoder", "masked", "causal", "seq2seq")


@dataclass(frozen=True, kw_only=True)
class JudgeSettings(Settings):
    """Settings for judging a converted model beside its original, see `judge`; each option's help describes it.

    ``length`` is by default that of the conversion; texts of ``probe`` come from ``text``, half of them to fit a linear
    classifier of embeddings and half to test it. What exceeds ``judge_minutes`` is left out and named.
    """

    text: Path | None = option(None, "texts to measure on; default: random tokens")
    length: int | None = option(None, "tokens of a text; default: as in the conversion", least=2)
    samples: int = option(8, "texts to measure on; causal: windows", least=1)
    batch: int = option(4, "texts, or windows, at once", least=1)
    allow_pickle: bool = option(False, PICKLE, switch=True)
    seed: int = option(0, f"{SEED} of draws and of the order of texts", least=0)
    passkeys: int = option(4, "passkey retrieval of a decoder: numbers hidden in long texts, for each length", least=0)
    passkey_lengths: tuple[int, ...] = option((), "tokens of texts for passkey retrieval; default: 512,1024", least=1)
    sample_tokens: int | None = option(None, "tokens that both decoders write, side by side; default: 64", least=0)
    probe: int = option(0, "labelled texts of --text for a linear probe of an encoder", least=0)
    judge_minutes: float | None = option(None, "minutes of judging, at most; default: no limit", least=0)


# Settings of a conversion that change no weight.
JUDGED = ("passkeys", "passkey_lengths", "sample_tokens", "probe", "judge_minutes", "no_judge")


@dataclass(frozen=True, kw_only=True)
class ConvertSettings(JudgeSettings):
    """Settings of a conversion, and for judging what it made; each option's help describes it.

    - ``attention`` is ``method:option=value:...``; ``softmax`` changes nothing, which checks all the rest. By default
      `proposal` chooses.
    - ``keep`` is decided by `choose_exact`, ``recall_heads`` by `recall_scores`; ``keep_heads`` are those of all other
      attentions with the largest errors.
    - ``minutes`` stand in place of ``steps`` and ``tune``: a third for transfer, the rest for tuning, and learning
      rates are found by a few steps each.
    - ``lora=0`` trains all weights but the word embeddings in tuning; ``repeats`` are described by `Repeats`.
    """

    attention: str = option("", "method, or method:option=value; default: by the kind of model, with the reason")
    features: int | None = option(
        None, "features, landmarks or rank; default: 128; 64 beside the window that --distill takes", least=1
    )
    layers: str = option("", "0-3,5 or patterns of names; default: all")
    keep: int = option(0, "attentions that stay exact: those that the output needs most", least=0)
    keep_heads: int = option(0, "heads with the largest errors that stay exact", least=0)
    recall_heads: int = option(0, "heads of a decoder that stay exact: those of long-range recall", least=0)
    distill: Path | None = option(None, f"texts to distill (fine-tune) on: {TEXTS}")
    steps: int | None = option(None, "steps of attention transfer; default: 300 with --distill", least=0)
    tune: int | None = option(None, "steps of fine-tuning after that; default: none, or by --minutes", least=0)
    minutes: float | None = option(None, "minutes of the whole distillation, instead of steps")
    lora: int = option(0, "rank of LoRA in fine-tuning; 0: all weights", least=0)
    lora_layers: str = option("", "patterns of names for LoRA; default: values and outputs")
    window_dropout: float = option(0.05, "share of rows fitted without their near tokens")
    repeats: float | None = option(None, "share of a decoder's rows with repeated passages; default: 0.5")
    text: Path | None = option(None, "texts to measure on; default: some of --distill")
    length: int | None = option(None, "tokens of a text; default: 256", least=2)
    task: str = option("auto", f"what the model is: {', '.join(TASKS[:-1])} or {TASKS[-1]}", choices=TASKS)
    no_judge: bool = option(False, "do not judge the model beside its original", switch=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distill is None and (self.steps or self.tune):
            raise ValueError(
                f"steps={self.steps or 0} and tune={self.tune or 0} need texts to learn from; give them by --distill."
            )
        for name in ("passkey_lengths", "sample_tokens", "probe", "judge_minutes"):
            if self.no_judge and getattr(self, name):
                raise ValueError(f"no_judge and {name}={getattr(self, name)} contradict each other; leave one out.")
        if self.minutes is not None:
            self._check_minutes(self.minutes)
        if self.lora_layers and not self.lora:
            raise ValueError(f"lora_layers={self.lora_layers!r} without LoRA; give its rank by --lora, such as 8.")
        if self.lora and not self.tune and (self.minutes is None or self.tune == 0):
            raise ValueError(f"lora={self.lora} is for tuning, of which there is none; give --tune or --minutes.")
        for name in ("window_dropout", "repeats"):
            share = getattr(self, name)
            if share is not None and not 0 <= share <= 1:
                raise ValueError(f"{name} is a share, 0 to 1, got {share:g}.")
        if self.repeats and self.distill is None:
            raise ValueError(f"repeats={self.repeats:g} need texts to learn from; give them by --distill.")

    def _check_minutes(self, minutes: float) -> None:
        if not minutes > 0 or minutes == float("inf"):
            raise ValueError(f"minutes must be above 0, got {minutes:g}; leave it out for a number of steps.")
        if self.distill is None:
            raise ValueError(f"minutes={minutes:g} need texts to learn from; give them by --distill.")
        if self.steps or self.tune:
            raise ValueError(
                f"minutes={minutes:g} and steps={self.steps or 0}, tune={self.tune or 0} say the same thing; give "
                f"one of them (0 leaves a stage out)."
            )

    def method(self) -> tuple[str, dict[str, Any]]:
        """The method that ``attention`` names, and all its options."""
        from kernelformer.modules import METHODS, method_options, parse_method

        method, options = parse_method(self.attention)
        size = METHODS[method].size
        if self.features is not None and size is None:
            raise ValueError(f"{method!r} has no number of features, got {self.features}; leave --features out.")
        if self.features is not None and size in options:
            raise ValueError(
                f"--features {self.features} and {size}={options[size]} of {self.attention!r} say the same thing; "
                f"leave one out."
            )
        if size is not None and size not in options:
            options[size] = FEATURES if self.features is None else positive_int("features", self.features)
        if self.seed and "seed" in method_options(method):
            options.setdefault("seed", self.seed)
        return method, options

    def chosen(self) -> list[int | str] | None:
        """Attentions that ``layers`` names; None for all."""
        return parse_layers(self.layers) if self.layers else None


@dataclass(frozen=True, kw_only=True)
class AdviseSettings(Settings):
    """Settings for advice on a model before it is converted, see `advise`; each option's help describes it.

    As many texts as ``samples`` are measured on, and as many others fitted and calibrated on; fewer where a pass takes
    long. What exceeds ``budget`` is left out and named; ``check`` takes longer than that.
    """

    text: Path | None = option(None, f"texts to measure on, of the kind that the model is for: {TEXTS}")
    length: int | None = option(None, "tokens of a text; default: 256", least=2)
    use_length: int = option(4096, "tokens of a text in use, at which times are compared", least=2)
    tolerance: float | None = option(None, "near enough; default: perplexity ratio 1.25, or cosine 0.98", least=0)
    budget: float = option(10.0, "minutes in all", least=0, name="minutes")
    samples: int = option(8, "texts to measure on, and as many others to fit on", least=1)
    steps: int = option(60, "of the quick fit of loglinear", least=1)
    check: bool = option(False, "convert afterwards and measure on other texts", switch=True)
    task: str = option("auto", KIND, choices=TASKS)
    allow_pickle: bool = option(False, PICKLE, switch=True)
    seed: int = option(0, f"{SEED} of the choice of texts", least=0)


LOGITS = ("last", "all")


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Settings):
    """Settings of an export; each option's help describes it."""

    logits: str = option("last", "of a prompt's last token, or of all of them: last or all")
    prompt_only: bool = option(False, "no decode.onnx for a causal model", switch=True)
    growing: bool = option(False, "allow states that keep every key, and grow with the text", switch=True)
    steps: int = option(100, "tokens that are generated to compare with torch", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("logits", self.logits, LOGITS)
