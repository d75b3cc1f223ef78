"""Settings of the studies, which are also their options on the command line; nothing here needs torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kernelformer.settings import (
    KIND,
    MAX_SECONDS,
    MEMORY,
    MODEL,
    PICKLE,
    SEED,
    TEXTS,
    Settings,
    integers,
    numbers,
    option,
    parse_layers,
    split_names,
)
from kernelformer_lab.bench.settings import BOUNDS

ENCODER_ATTENTIONS = ("softmax", "favor+:num_features=256", *BOUNDS)
SHORT_SIZES = ("512x8", "256x16", "128x32", "64x64", "32x128", "16x256", "8x512", "4x1024", "1x1024")
SPECS = "name or name:option=value, separated by commas"


@dataclass(frozen=True, kw_only=True)
class NoSettings(Settings):
    """Settings of a study that has none."""


@dataclass(frozen=True, kw_only=True)
class SparsitySettings(Settings):
    """Settings of `studies.sparsity`; all others are those of the recipe ``kl-sparsity``."""

    attention: tuple[str, ...] = option((), SPECS)
    relevances: tuple[float, ...] = option((0.1, 0.5, 0.9), "probabilities that a position counts")
    seeds: int = option(1, "runs of each, with as many seeds", least=1)
    steps: int = option(800, "updates", least=1)
    length: int = option(48, "tokens of a sample", least=4)
    features: int = option(64, "number of features", least=1)


@dataclass(frozen=True, kw_only=True)
class RedrawsSettings(Settings):
    """Settings of `studies.redraws`."""

    runs: tuple[str, ...] = option(help="of finished runs, or of comparisons", argument=True, path=True, shown="FOLDER")
    draws: int = option(100, "of the random features of each model", least=2)
    samples: int = option(200, "of the validation split, at most", least=2)
    first_draw: int | None = option(None, "number of the first draw; default: after the one a model has", least=0)
    gradients: int = option(50, "draws and samples of the gradients at the classifier; 0: none", least=0)


@dataclass(frozen=True, kw_only=True)
class ApproximationSettings(Settings):
    """Settings of `studies.approximation`."""

    encoder: str = option(help=MODEL, path=True, name="model")
    text: Path = option(help=TEXTS)
    lengths: tuple[int, ...] = option((128, 256, 512), "tokens", least=1)
    features: tuple[int, ...] = option((16, 32, 64, 128, 256), "landmarks, features or rank", least=1)
    texts: int = option(2, "texts to measure on, of each length", least=1, name="samples")


@dataclass(frozen=True, kw_only=True)
class PositionsSettings(Settings):
    """Settings of `studies.positions`."""

    lengths: tuple[int, ...] = option((1024, 2048, 4096, 8192, 16384), "tokens; the paper goes to 40960", least=1)
    draws: int = option(16, "of frequencies, queries and keys", least=2)
    repeats: int = option(5, "timed calls of each forward", least=1, name="rounds")


@dataclass(frozen=True, kw_only=True)
class EncoderSettings(Settings):
    """Settings of `studies.encoder`."""

    sizes: tuple[str, ...] = option(
        ("regular", "small"), "of regular, small, arena", choices=("regular", "small", "arena")
    )
    lengths: tuple[int, ...] | None = option(None, "tokens; default: each size's own", least=1)
    layers: int = option(6, "of the model", least=1)
    depths: tuple[int, ...] = option(
        (12, 20),
        "further numbers of layers; 'none' for none",
        least=1,
        parse=lambda name, text: () if text in ("", "none") else integers(name, text),
    )
    deep_lengths: tuple[int, ...] | None = option(
        None, "tokens for those; default: the shortest and the middle one", least=1
    )
    attention: tuple[str, ...] = option(ENCODER_ATTENTIONS, f"{SPECS}; opt, opt+qk are the bounds")
    heap: str = option("default", "default or kept: the allocator's settings", choices=("default", "kept"))
    budget: float = option(20.0, "seconds per case and pass", least=0.01)
    limit: float = option(60.0, MAX_SECONDS, least=0.01, name="max_seconds")
    memory: bool = option(True, MEMORY)
    rounds: int = 5  # steps of each attention, interleaved; at least so many


@dataclass(frozen=True, kw_only=True)
class OverheadSettings(Settings):
    """Settings of `studies.overhead`."""

    recipe: str = option("demo", "a recipe of `kernelformer list`", argument=True, shown="RECIPE")
    attention: tuple[str, ...] = option((), f"{SPECS}; default: the recipe's")


@dataclass(frozen=True, kw_only=True)
class TwinsSettings(Settings):
    """Settings of `studies.twins`."""

    images: Path | None = option(
        None, "folder with train.npz and test.npz, as the task images reads; default: no images"
    )
    tasks: tuple[str, ...] = option(("images", "listops", "bytes"), "what the models are trained on")
    image_size: int = option(8, "rows and columns that images are made", least=2)
    patch: int = option(2, "rows and columns of a patch", least=1)
    width: int = option(64, "of the models", least=1)
    layers: int = option(2, "of the models", least=1)
    heads: int = option(4, "of an attention", least=1)
    steps: int = option(400, "of each training", least=1)
    batch: int = option(64, "samples of a step", least=1)
    learning_rate: float = option(1e-3, "the largest")
    seeds: int = option(1, "runs of each, with as many seeds", least=1)


@dataclass(frozen=True, kw_only=True)
class PackingSettings(Settings):
    """Settings of `studies.packing`."""

    attention: tuple[str, ...] = option(("softmax", "favor+:num_features=64", "elu"), SPECS)
    length: int = option(1024, "tokens of a packed row", least=2)
    median: int = option(290, "tokens of a sequence", least=2)
    batch: int = option(8, "rows of a step", least=1)
    width: int = option(128, "of the model: its hidden size", least=1)
    layers: int = option(2, "of the model", least=1)
    heads: int = option(4, "of the attention", least=1)
    rounds: int = option(5, "passes of each, interleaved", least=1)
    seed: int = option(0, SEED, least=0)


@dataclass(frozen=True, kw_only=True)
class ShortSettings(Settings):
    """Settings of `studies.short`."""

    sizes: tuple[str, ...] = option(SHORT_SIZES, "sequences x tokens of a batch")
    features: tuple[int, ...] = option((64, 256), "random features of a head", least=1)
    heads: int = option(8, "of an attention", least=1)
    head_dim: int = option(64, "width of a head", least=1)
    step_heads: int = option(9, "heads of the step", least=1)
    step_features: int = option(64, "features of the step", least=1)
    contexts: tuple[int, ...] = option((256, 1024, 4096), "tokens in SDPA's cache beside the step", least=1)
    compiled: bool = option(False, "time the step compiled too, which needs a C++ compiler")
    budget: float = option(0.6, "seconds per contender and case", least=0.001)


@dataclass(frozen=True, kw_only=True)
class ByteModelSettings(Settings):
    """Settings of studies that train small language models over bytes."""

    data: Path | None = option(None, "file or folder of text; default: Python's own sources")
    steps: int = option(600, "of training, for each model", least=1)
    length: int = option(256, "bytes of a sample", least=2)
    layers: int = option(2, "of the model", least=1)
    width: int = option(128, "of the model: its hidden size", least=1)
    heads: int = option(4, "of the attention", least=1)
    batch: int = option(8, "samples per step", least=1)
    lr: float = option(5e-3, "the largest; ten times that for position tables", name="learning_rate")
    samples: int = option(64, "validation windows", least=1)
    seed: int = option(0, SEED, least=0)


@dataclass(frozen=True, kw_only=True)
class NormalizedSettings(ByteModelSettings):
    """Settings of `studies.normalized`.

    ``scale`` is that of normalized attention: the kernel sees vectors of length sqrt(scale), so that a larger one can
    attend more sharply, and needs more features.
    """

    scale: float = option(1.0, "of normalized attention; the paper's is 1")
    features: tuple[int, ...] = option((16, 32, 64, 128, 256), "numbers of random features", least=1)
    draws: int = option(5, "of the features", least=2)
    draw: str = option("iid", "how they are drawn: iid as in the paper, orthogonal, ...")


@dataclass(frozen=True, kw_only=True)
class TransferSettings(ByteModelSettings):
    """Settings of `studies.transfer`."""

    attention: tuple[str, ...] = option(("favor+:num_features=64", "trigonometric:num_features=32"), SPECS)
    tuning: int = option(100, "steps of fine-tuning", least=1)
    tuning_lr: float = option(1e-3, "the largest one of fine-tuning", name="tuning_learning_rate")
    draws: int = option(3, "of the features, without fine-tuning", least=1)


@dataclass(frozen=True, kw_only=True)
class ConversionSettings(Settings):
    """Settings of `studies.conversion`."""

    model: str = option(help=MODEL, argument=True, path=True, shown="MODEL")
    text: Path = option(help=f"texts to learn from: {TEXTS}", name="distill")
    held_out: Path = option(help=f"texts to measure on: {TEXTS}", name="text")
    attention: tuple[str, ...] = option((), SPECS)
    features: int = option(128, "of each method, where --attention does not say", least=2)
    seconds: float = option(300.0, "of distillation for each method", least=0)
    length: int = option(256, "tokens of a text", least=2)
    batch: int = option(4, "texts of a step", least=1)
    samples: int = option(128, "texts to measure on", least=1)
    probe: int = option(0, "labelled texts for a linear probe; 0: none", least=0)
    layers: tuple[int | str, ...] | None = option(
        None, "0-3,5 or patterns of names; default: all", parse=lambda _, text: tuple(parse_layers(text))
    )
    task: str = option("auto", KIND, choices=("auto", "encoder", "masked", "causal", "seq2seq"))
    allow_pickle: bool = option(False, PICKLE, switch=True)
    save: Path | None = option(None, "folder that distilled models go to")
    seed: int = option(0, SEED, least=0)


@dataclass(frozen=True, kw_only=True)
class LengthsSettings(Settings):
    """Settings of `studies.lengths`."""

    model: Path = option(
        help="folder of transformers; --random needs its config.json alone", argument=True, shown="MODEL"
    )
    attention: tuple[str, ...] = option(
        ("loglinear:num_features=128", "favor+:num_features=128"), f"what it is converted to: {SPECS}"
    )
    baselines: tuple[str, ...] = option(("sdpa", "eager"), "of the original: sdpa, eager", choices=("sdpa", "eager"))
    lengths: tuple[int, ...] = option((256, 512, 1024, 2048, 4096, 8192), "tokens", least=1)
    task: str = option("auto", "what the model is: auto, encoder or causal", choices=("auto", "encoder", "causal"))
    random: bool = option(False, "draw the weights", switch=True)
    backward: bool = option(False, "measure forward + backward too", switch=True)
    generate: int = option(0, "the longest context to generate after; 0: none", least=0)
    batch: int = option(1, "sequences of a pass", least=1)
    budget: float = option(10.0, "seconds for each length and pass", least=0.01)
    limit: float = option(60.0, MAX_SECONDS, least=0.01, name="max_seconds")
    memory: bool = option(True, MEMORY)
    allow_pickle: bool = option(False, PICKLE, switch=True)
    rounds: int = 5  # passes of each, interleaved; at least so many


@dataclass(frozen=True, kw_only=True)
class ServingSettings(Settings):
    """Settings of `studies.serving`."""

    model: str = option("", "folder or .gguf of a decoder; default: random weights, SmolLM2-135M's sizes", path=True)
    attention: tuple[str, ...] = option(
        ("loglinear:num_features=64:window=64:sinks=4",), f"what it is converted to: {SPECS}"
    )
    lengths: tuple[int, ...] = option((1024, 4096, 16384, 65536), "tokens of the prompt", least=1)
    chunk: int = option(4096, "tokens of the prompt that a converted model reads at once", least=1)
    batch: int = option(1, "prompts at once", least=1)
    rounds: int = option(2, "timed prefills and tokens of each, at least", least=1)
    budget: float = option(20.0, "seconds for all prefills of a length, and for all tokens", least=0.01)
    limit: float = option(900.0, MAX_SECONDS, least=0.01, name="max_seconds")
    memory: bool = option(True, MEMORY)
    allow_pickle: bool = option(False, PICKLE, switch=True)


@dataclass(frozen=True, kw_only=True)
class ExportedSettings(Settings):
    """Settings of `studies.exported`."""

    model: str = option("", "folder of an encoder; default: random weights, MiniLM-L6's sizes", path=True)
    attention: tuple[str, ...] = option(
        ("loglinear:num_features=64", "favor+:num_features=64:window=64:sinks=4"),
        "what it is converted to, separated by commas",
    )
    lengths: tuple[int, ...] = option((1024, 4096, 16384), "tokens", least=2)
    batch: int = option(1, "sequences at once", least=1)
    rounds: int = option(2, "timed passes of each, at least", least=1)
    budget: float = option(20.0, "seconds for all passes of a length", least=0.01)
    allow_pickle: bool = option(False, PICKLE, switch=True)


def _windows(name: str, text: str) -> tuple[int, ...]:
    """Integers of at least 0 between commas."""
    parts = split_names(text)
    if not all(x.isdecimal() for x in parts):
        raise ValueError(f"{name} takes integers of at least 0, separated by commas, got {text!r}; say 0,32.")
    return tuple(int(x) for x in parts)


@dataclass(frozen=True, kw_only=True)
class FeaturesSettings(Settings):
    """Settings of `studies.features`."""

    attention: tuple[str, ...] = option((), f"{SPECS}; default: all that stand for softmax without training")
    features: tuple[int, ...] = option((16, 32, 64, 128, 256), "numbers of features or landmarks", least=2)
    norms: tuple[float, ...] = option(
        (0.5, 1.0, 2.0, 3.0, 4.0),
        "of synthetic queries and keys, times sqrt(scale); 'none' for none",
        least=0.01,
        parse=lambda name, text: () if text in ("", "none") else numbers(name, text),
    )
    model: tuple[str, ...] = option((), "pretrained models, folders or names, separated by commas", path=True)
    text: tuple[str, ...] = option((), "held-out text, a file for all models or one for each", path=True)
    texts: int = option(1, "texts of a model to measure on, and as many to calibrate on", least=1)
    length: int = option(512, "tokens, at most, of a text", least=2)
    heads: int = option(8, "heads of a model, spread over its layers, and of a timed forward", least=1)
    samples: int = option(3, "of synthetic queries, keys and values", least=1)
    head_dim: int = option(64, "of synthetic queries and keys", least=2)
    window: tuple[int, ...] = option((0, 32), "tokens nearby that are exact; 0: none", least=0, parse=_windows)
    sinks: int = option(1, "first tokens that are exact, with a window", least=0)
    draws: int = option(3, "of each map", least=3)
    errors: tuple[float, ...] = option((0.5, 0.2, 0.1), "of the output, for the time at equal error", least=1e-6)
    time_length: int = option(4096, "tokens of a timed forward", least=1)
    rounds: int = option(3, "timed forwards of each, interleaved", least=1)
    allow_pickle: bool = option(False, PICKLE, switch=True)
    seed: int = option(0, SEED, least=0)


@dataclass(frozen=True, kw_only=True)
class EstimatorsSettings(Settings):
    """Settings of `studies.estimators`; defaults are those of Performer, Fig. 4."""

    length: int = option(4096, "queries, and keys, of Fig. 4", least=2)
    head_dim: int = option(16, "of Fig. 4 and 2", least=2)
    features: tuple[int, ...] = option((16, 32, 64, 128, 256), "numbers of frequencies of Fig. 4", least=1)
    norms: tuple[float, ...] = option((0.5, 1.0, 2.0), "of queries and keys of Fig. 4, times sqrt(scale)", least=0.01)
    samples: int = option(15, "of inputs and frequencies of Fig. 4 and Theorem 4", least=2)
    dims: tuple[int, ...] = option((1, 4, 16, 64), "d of Theorems 1, 3 and 4", least=1)
    draws: int = option(100_000, "of frequencies, for single pairs of vectors", least=2)
    tokens: int = option(1024, "queries, and keys, of Theorem 4", least=1)
    seed: int = option(0, SEED, least=0)


@dataclass(frozen=True, kw_only=True)
class DepthSettings(Settings):
    """Settings of `studies.depth`."""

    model: str = option(help=MODEL, argument=True, path=True, shown="MODEL")
    text: Path = option(help=TEXTS)
    attention: tuple[str, ...] = option((), SPECS)
    draws: int = option(3, "of each map that is random", least=2)
    texts: int = option(16, "texts to measure on", least=1, name="samples")
    length: int = option(256, "tokens of a text, at most", least=2)
    batch: int = option(4, "texts at once", least=1)
    task: str = option("auto", KIND, choices=("auto", "encoder", "masked", "causal", "seq2seq"))
    allow_pickle: bool = option(False, PICKLE, switch=True)
    seed: int = option(0, SEED, least=0)


@dataclass(frozen=True, kw_only=True)
class AminoAcidsSettings(Settings):
    """Settings of `studies.amino_acids`."""

    model: str = option(help=f"a protein language model: {MODEL}", argument=True, path=True, shown="MODEL")
    text: Path = option(help="sequences, one a line")
    attention: tuple[str, ...] = option((), SPECS)
    sequences: int = option(800, "sequences to measure on, as in the paper", least=2, name="samples")
    length: int = option(128, "residues of a sequence, at most", least=2)
    batch: int = option(8, "sequences at once", least=1)
    resamples: int = option(1000, "of the sequences and of the amino acids' names", least=2)
    allow_pickle: bool = option(False, PICKLE, switch=True)
    seed: int = option(0, SEED, least=0)


@dataclass(frozen=True, kw_only=True)
class RanksSettings(Settings):
    """Settings of `studies.ranks`."""

    attention: tuple[str, ...] = option(("favor+:num_features=64", "favor+:num_features=64:window=64:sinks=4"), SPECS)
    ranks: tuple[int, ...] = option((2, 4), "numbers of ranks, a process of one thread each", least=2)
    length: int = option(32768, "tokens of each rank", least=1)
    crowded_length: int = option(4096, "tokens of each rank that are timed where ranks outnumber the cores", least=1)
    batch: int = option(1, "sequences at once", least=1)
    heads: int = option(8, "of the attention", least=1)
    head_dim: int = option(64, "width of a head", least=1)
    rounds: int = option(5, "timed repeats of each, interleaved, after one that warms up", least=1)
    softmax: int = option(4096, "tokens that exact attention is timed with, for the plan", least=1)
    memory: bool = option(True, "measure peak memory too, of one rank alone as well")
