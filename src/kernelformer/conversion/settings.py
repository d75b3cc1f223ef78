"""Settings of a conversion, which are also the options of ``kernelformer convert``; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernelformer.errors import choice
from kernelformer.settings import KIND, PICKLE, SEED, TEXTS, Settings, option, parse_layers

FEATURES = 128  # default number of features or landmarks, or the rank


@dataclass(frozen=True, kw_only=True)
class JudgeSettings(Settings):
    """Settings for judging a converted model beside its original.

    Args:
        text: texts to measure on; None: random tokens.
        length: tokens of a text; None: that of the conversion.
        samples: texts to measure on; windows of ``length`` tokens of joined texts for causal models.
        batch: texts, or windows, of a step.
        allow_pickle: see `load_source`.
        seed: of draws and of the order of texts.
        passkeys: numbers hidden in texts of each length, which a causal model is asked for; 0: none, see `judge`.
        passkey_lengths: tokens of those texts; empty: 512 and 1024, as far as the model has positions.
        sample_tokens: that original and converted decoder write after the same beginnings; 0: none; None: 64.
        probe: labelled texts of ``text``, half of them to fit a linear classifier of embeddings and half to try it on.
        judge_minutes: of judging; what there was no time for is named; None: as long as it takes.
    """

    text: Path | None = option(None, "texts to measure on; default: random tokens")
    length: int | None = option(None, "tokens of a text; default: as in the conversion", least=2)
    samples: int = option(8, "texts to measure on; causal: windows", least=1)
    batch: int = option(4, "texts, or windows, at once", least=1)
    allow_pickle: bool = option(False, PICKLE, switch=True)
    seed: int = option(0, f"{SEED} of draws and of the order of texts", least=0)
    passkeys: int = option(4, "numbers hidden in long texts that a decoder is asked for, of each length", least=0)
    passkey_lengths: tuple[int, ...] = option((), "tokens of these texts; default: 512,1024", least=1)
    sample_tokens: int | None = option(None, "tokens that both decoders write, side by side; default: 64", least=0)
    probe: int = option(0, "labelled texts of --text for a linear probe of an encoder", least=0)
    judge_minutes: float | None = option(None, "of judging, at most; default: as long as it takes", least=0)


# Settings of a conversion that change no weight.
JUDGED = ("passkeys", "passkey_lengths", "sample_tokens", "probe", "judge_minutes", "no_judge")


@dataclass(frozen=True, kw_only=True)
class ConvertSettings(JudgeSettings):
    """Settings of a conversion, and for judging what it made.

    Args:
        attention: ``method:option=value:...``; ``softmax`` changes nothing, which is a check of all the rest. Empty:
            the result of `proposal`: ``wildcat`` with a window for encoders that are not distilled, ``local`` or
            ``favor+`` with one for such decoders, ``loglinear`` with one where it is distilled.
        features: number of features, landmarks or the rank, whichever the method has; None: 128, or 64 for the
            ``loglinear`` with a window that is the default of a distillation.
        layers: which attentions, ``0-3,5`` or patterns of names; empty: all.
        keep: so many attentions stay exact: those that the model's output needs most, see `choose_exact`.
        keep_heads: so many heads with the largest errors, of all other attentions, stay exact.
        recall_heads: so many heads of a decoder that find again what stands far back stay exact, see `recall_scores`.
        distill: texts to learn from.
        steps: of attention transfer; None: 300 if there are texts and the method learns.
        tune: steps of tuning after that, of all weights or by LoRA; None: none, or what ``minutes`` leave.
        minutes: of the whole distillation, instead of steps: a third for transfer, the rest for tuning, rates found by
            a few steps each.
        lora: rank of LoRA on values and outputs in tuning; 0: all weights but the word embeddings learn.
        lora_layers: patterns of the names of other layers for LoRA.
        window_dropout: share of the rows that are fitted without near tokens, so that the kernel learns those too.
        repeats: share of a decoder's rows to learn from in which passages come again beyond the window, so that it
            learns to find them, see `Repeats`; None: half of them.
        text: texts to measure on; None: some of ``distill`` that are left out there, or random tokens.
        length: tokens of a text; None: 256, or what the model has.
        task: see `load_source`.
        no_judge: write the model without judging it beside its original.
    """

    attention: str = option("", "method, or method:option=value; default: by the kind of model, with the reason")
    features: int | None = option(
        None, "features, landmarks or rank; default: 128; 64 beside the window that --distill takes", least=1
    )
    layers: str = option("", "0-3,5 or patterns of names; default: all")
    keep: int = option(0, "attentions that stay exact: those that the output needs most", least=0)
    keep_heads: int = option(0, "heads with the largest errors that stay exact", least=0)
    recall_heads: int = option(0, "heads of a decoder that stay exact: those that find again what is far", least=0)
    distill: Path | None = option(None, f"texts to learn from: {TEXTS}")
    steps: int | None = option(None, "of attention transfer; default: 300 with --distill", least=0)
    tune: int | None = option(None, "steps of tuning after that; default: none, or by --minutes", least=0)
    minutes: float | None = option(None, "of the whole distillation, instead of steps")
    lora: int = option(0, "rank of LoRA in tuning; 0: all weights", least=0)
    lora_layers: str = option("", "patterns of names for LoRA; default: values and outputs")
    window_dropout: float = option(0.05, "share of rows fitted without their near tokens")
    repeats: float | None = option(None, "share of a decoder's rows in which passages come again; default: 0.5")
    text: Path | None = option(None, "texts to measure on; default: some of --distill")
    length: int | None = option(None, "tokens of a text; default: 256", least=2)
    task: str = option(
        "auto",
        "what the model is: auto, encoder, masked, causal or seq2seq",
        choices=("auto", "encoder", "masked", "causal", "seq2seq"),
    )
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
        from kernelformer.errors import positive_int
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
    """Settings for advice on a model before it is converted.

    Args:
        text: texts of the kind that the model is for.
        length: tokens of a text; None: 256, or what the model has.
        use_length: tokens of a text in use, at which times are compared.
        tolerance: a figure that is near enough; None: a perplexity ratio of 1.25, or a cosine of 0.98.
        budget: minutes in all, with reading the model; what there was no time for is named.
        samples: texts to measure on, and as many others to fit and calibrate on; fewer where a pass takes long.
        steps: of the quick fit of `loglinear`.
        check: convert really afterwards and measure on other texts; takes longer than the budget.
        task: see `load_source`.
        allow_pickle: see `load_source`.
        seed: of the choice of texts.
    """

    text: Path | None = option(None, f"texts to measure on, of the kind that the model is for: {TEXTS}")
    length: int | None = option(None, "tokens of a text; default: 256", least=2)
    use_length: int = option(4096, "tokens of a text in use, at which times are compared", least=2)
    tolerance: float | None = option(None, "near enough; default: perplexity ratio 1.25, or cosine 0.98", least=0)
    budget: float = option(10.0, "minutes in all", least=0, name="minutes")
    samples: int = option(8, "texts to measure on, and as many others to fit on", least=1)
    steps: int = option(60, "of the quick fit of loglinear", least=1)
    check: bool = option(False, "convert afterwards and measure on other texts", switch=True)
    task: str = option("auto", KIND, choices=("auto", "encoder", "masked", "causal", "seq2seq"))
    allow_pickle: bool = option(False, PICKLE, switch=True)
    seed: int = option(0, f"{SEED} of the choice of texts", least=0)


LOGITS = ("last", "all")


@dataclass(frozen=True, kw_only=True)
class ExportSettings(Settings):
    """Settings of an export.

    Args:
        logits: of a causal model's prompt: those of its last token, which a generation needs, or of all of them.
        prompt_only: whether a causal model gets no graph for one token after a state.
        growing: whether that graph may have states that keep every key, as exact attention does.
        steps: tokens that are generated to compare the graph with torch.
    """

    logits: str = option("last", "of a prompt's last token, or of all of them: last or all")
    prompt_only: bool = option(False, "no decode.onnx for a causal model", switch=True)
    growing: bool = option(False, "allow states that keep every key, and grow with the text", switch=True)
    steps: int = option(100, "tokens that are generated to compare with torch", least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("logits", self.logits, LOGITS)
