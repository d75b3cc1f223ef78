"""Configuration of the models: plain values that are saved with them."""

from __future__ import annotations

from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from kernelformer.errors import choice, flag, fraction, integer, number, positive_int, unknown
from kernelformer.files import check_counts
from kernelformer.modules.spec import default_cross_attention, for_cross_attention, parse_attention

POSITIONS = ("auto", "sinusoidal", "learned", "image", "none")
POOLING = ("mean", "cls")
AUTO = "auto"  # cross-attention that goes with the decoder's attention
# Fields of every Hugging Face configuration that come as keyword arguments without being fields.
_COMMON = {"num_labels", "name_or_path", "torch_dtype", "output_attentions", "attn_implementation", "model_type"}
_COMMON |= {"_commit_hash", "experts_implementation", "per_layer_config", "tie_last_hidden_states"}


@strict
class KernelformerConfig(PreTrainedConfig):
    """Configuration of all models.

    An attention is said by a string ``method:option=value:...``; the options are those of the method and those of
    `KernelAttention`'s relative and rotary positions, so that ``nprf:relative=1d:max_distance=64`` or
    ``favor+:rotary=True`` is a whole layer.

    Args:
        vocab_size: number of tokens.
        hidden_size: d, width of the residual stream.
        num_hidden_layers: blocks of the encoder, or of a model without one.
        num_decoder_layers: blocks of the decoder of an encoder-decoder; None means as many.
        num_attention_heads: H.
        head_dim: width of a head; None means d / H.
        intermediate_size: width of the feed-forward part; None means 4 d.
        hidden_act: its activation, a name of transformers.
        attention: of every block, or a list with one for each.
        decoder_attention: self-attention of an encoder-decoder's decoder; None means as ``attention``.
        cross_attention: from its decoder to its encoder; None means as ``decoder_attention``, without relative
            and rotary positions, window and sinks (``softmax`` for ``local``, which is nothing else). ``auto``, the
            default, is the same, but for ``nprf`` it is ``favor+``: unit vectors have logits in [-1, 1], so that
            without a bias no source token can stand out (results/comparisons has the figures). Models that were saved
            before this default have None, and stay what they were.
        positions: ``sinusoidal``, ``learned``, ``image`` (learned rows, columns and channels), ``none``, or ``auto``:
            none where all self-attention has relative or rotary positions, else the model's own (learned for images,
            row and column for pixels, sinusoidal for text).
        max_position_embeddings: the longest sequence, for what has a table: learned positions, relative ones without
            ``max_distance``, linformer. Sinusoidal positions have no end.
        share_bias: one table of relative positions for all blocks (of the encoder, of the decoder) that ask for the
            same kind.
        norm_first: layer norm before each part (and at the end), else after it.
        dropout: of the embeddings and of each part's output.
        pooling: of classifiers: ``mean`` over the tokens, or ``cls``, a learned token in front.
        classifier_size: width of the layer between the pooled vector and the classes; None means d.
        classifier_act: its activation, a name of transformers.
        num_labels: classes; 1 is a regression, with the squared error as loss.
        image_size: (rows, columns) of images and pixels.
        patch_size: of images; the grid of relative positions is image_size / patch_size.
        num_channels: of images and pixels.
        initializer_range: standard deviation of weights; None means 1 / sqrt(inputs), and less on the residual stream
            the deeper the model.
        position_range: standard deviation of learned positions; None means that of tokens. Language is learned sooner
            with a smaller one, such as 0.02 (results/twins).
        embedding_scale: factor of tokens and learned positions; None means sqrt(d). Language is learned sooner with 1
            (results/twins).
        seed: of the random features; every attention of the model draws others.
        use_cache: whether `generate` keeps states.
        sparse_prediction: in training a masked language model predicts hidden tokens alone, instead of all: the same
            loss without the other six sevenths of the vocabulary's product.
    """

    model_type = "kernelformer"

    vocab_size: int = 256
    hidden_size: int = 256
    num_hidden_layers: int = 4
    num_decoder_layers: int | None = None
    num_attention_heads: int = 4
    head_dim: int | None = None
    intermediate_size: int | None = None
    hidden_act: str = "gelu"
    attention: str | list[str] = "favor+"
    decoder_attention: str | list[str] | None = None
    cross_attention: str | list[str] | None = AUTO
    positions: str = "auto"
    max_position_embeddings: int = 1024
    share_bias: bool = False
    norm_first: bool = True
    layer_norm_eps: float = 1e-5
    dropout: float | int = 0.0
    pooling: str = "mean"
    classifier_size: int | None = None
    classifier_act: str = "gelu"
    image_size: list[int] | tuple[int, int] | None = None
    patch_size: int = 4
    num_channels: int = 3
    initializer_range: float | None = None
    position_range: float | None = None
    embedding_scale: float | None = None
    seed: int = 0
    use_cache: bool = True
    sparse_prediction: bool = False
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    decoder_start_token_id: int | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in _COMMON and not name.startswith("_"):
                raise unknown("setting of KernelformerConfig,", name, OWN_SETTINGS)
        sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size", "num_channels")
        for name in (*sizes, "max_position_embeddings"):
            positive_int(name, getattr(self, name))
        for name in ("intermediate_size", "num_decoder_layers", "head_dim", "classifier_size"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name))
        counts = {x: getattr(self, x) for x in ("num_hidden_layers", "num_decoder_layers")}
        check_counts("the configuration", {**counts, "num_labels": kwargs.get("num_labels")})
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size must be a multiple of num_attention_heads, got {self.hidden_size} and "
                f"{self.num_attention_heads}; or give head_dim."
            )
        choice("positions", self.positions, POSITIONS)
        choice("pooling", self.pooling, POOLING)
        integer("seed", self.seed)
        for name in ("share_bias", "norm_first", "use_cache", "sparse_prediction", "tie_word_embeddings"):
            flag(name, getattr(self, name))
        choice("hidden_act", self.hidden_act, ACT2FN)
        choice("classifier_act", self.classifier_act, ACT2FN)
        number("layer_norm_eps", self.layer_norm_eps, above=0)
        for name in ("initializer_range", "position_range", "embedding_scale"):
            if getattr(self, name) is not None:
                number(name, getattr(self, name), above=0)
        if self.problem_type not in (None, "single_label_classification", "regression"):
            raise ValueError(
                f"the models classify by one label, or tell a number, got problem_type={self.problem_type!r}; leave it "
                f"out."
            )
        fraction("dropout", self.dropout)
        if self.image_size is not None:
            if len(self.image_size) != 2:
                raise ValueError(f"image_size must be (rows, columns), got {self.image_size!r}.")
            self.image_size = [positive_int("image_size", x) for x in self.image_size]
        self.encoder_specs, self.decoder_specs, self.cross_specs  # noqa: B018  (wrong ones are found here)
        try:
            super().__post_init__(**kwargs)  # type: ignore[no-untyped-call]
        except (AttributeError, TypeError) as problem:
            raise ValueError(
                f"the configuration has a value of another kind than transformers takes: {problem}."
            ) from None
        positive_int("num_labels", self.num_labels)
        names = self.architectures
        if names is not None and not (isinstance(names, list) and all(isinstance(x, str) for x in names)):
            raise ValueError(f"architectures must be names of classes, got {names!r:.60}.")

    def with_attention(self, spec: str) -> KernelformerConfig:
        """The same model with one attention everywhere, and absolute positions where it has some."""
        others = {"attention": spec, "decoder_attention": None, "cross_attention": None}
        return type(self).from_dict({**self.to_dict(), **others})

    @property
    def feed_forward(self) -> int:
        """Width of the feed-forward part."""
        return self.intermediate_size or 4 * self.hidden_size

    @property
    def decoder_layers(self) -> int:
        """Blocks of an encoder-decoder's decoder."""
        return self.num_decoder_layers or self.num_hidden_layers

    @property
    def encoder_specs(self) -> list[str]:
        """One attention for each block."""
        return _per_layer("attention", self.attention, self.num_hidden_layers)

    @property
    def decoder_specs(self) -> list[str]:
        """One attention for each block of an encoder-decoder's decoder."""
        if self.decoder_attention is None and isinstance(self.attention, str):
            return _per_layer("attention", self.attention, self.decoder_layers)
        return _per_layer("decoder_attention", self.decoder_attention or self.attention, self.decoder_layers)

    @property
    def cross_specs(self) -> list[str]:
        """One attention from decoder to encoder for each of its blocks."""
        if self.cross_attention is None:
            return [for_cross_attention(x) for x in self.decoder_specs]
        if self.cross_attention == AUTO:
            return [default_cross_attention(x) for x in self.decoder_specs]
        specs = _per_layer("cross_attention", self.cross_attention, self.decoder_layers)
        for spec in specs:
            if spec != for_cross_attention(spec):
                raise ValueError(
                    f"cross_attention has no relative positions, rotary ones, window or sinks, got {spec!r}; give "
                    f"{for_cross_attention(spec)!r}."
                )
        return specs


# What the class itself declares: Hugging Face's own fields are nothing to choose from.
OWN_SETTINGS = (*(x for x in KernelformerConfig.__annotations__ if x != "model_type"), "num_labels")


def _per_layer(what: str, specs: str | list[str], layers: int) -> list[str]:
    if not isinstance(specs, str | list | tuple):
        raise ValueError(f"{what} must be a string such as 'favor+', or a list of them, got {specs!r:.60}.")
    each = [specs] * layers if isinstance(specs, str) else list(specs)
    if len(each) != layers:
        raise ValueError(f"{what} must be one spec or one for each of {layers} blocks, got {len(each)}: {each}.")
    for spec in each:
        parse_attention(spec)
    return each
