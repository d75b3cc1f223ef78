"""Base of all models: first weights, saving, loading."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME

from kernelformer.cache import StateCache
from kernelformer.errors import unknown
from kernelformer.feature_maps import FeatureMap
from kernelformer.files import WEIGHTS, check_hashes, naming_full_disk, read_json, write_hashes
from kernelformer.models.config import KernelformerConfig
from kernelformer.modules import KernelAttention, RelativePositions
from kernelformer.modules.context import active_ranks, share_of_mean, share_of_same
from kernelformer.modules.core import AttentionCore
from kernelformer.modules.spec import parse_attention
from kernelformer.parallel.context import IGNORED
from kernelformer.weight_headers import SizeError, check_shapes, check_sizes, saved_shapes, weight_files


class KernelformerPreTrainedModel(PreTrainedModel):
    """Base of all models: `save_pretrained` writes safetensors, `from_pretrained` reads them."""

    config_class = KernelformerConfig
    config: KernelformerConfig
    base_model_prefix = "model"
    _input_embed_layer = "tokens"
    supports_gradient_checkpointing = True
    _no_split_modules = ["Block"]  # noqa: RUF012  (transformers' own name)
    _is_stateful = True  # a state cannot go back, so no assisted decoding
    family = "encoder"  # models of one family can take each other's weights

    def post_init(self) -> None:
        """Keep transformers from initializing what attention cores and positions have drawn or chosen."""
        for module in self.modules():
            if isinstance(module, AttentionCore | RelativePositions):
                for part in module.modules():
                    part._is_hf_initialized = True  # type: ignore[assignment]
            elif isinstance(module, KernelAttention) and module.gate is not None:
                module.gate._is_hf_initialized = True  # type: ignore[assignment]
        self._tied_weights_keys = {**(type(self)._tied_weights_keys or {}), **self._shared_tables()}
        super().post_init()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Normal weights of size 1 / sqrt(inputs), smaller where they feed the residual stream of a deep model."""
        std = self.config.initializer_range
        if isinstance(module, nn.Linear | nn.Conv2d):
            size = module.weight[0].numel() ** -0.5 if std is None else std
            if getattr(module, "feeds_residual", False):
                size *= (2 * self.config.num_hidden_layers) ** -0.5
            init.normal_(module.weight, std=size)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            if getattr(module, "of_positions", False) and self.config.position_range is not None:
                std = self.config.position_range
            init.normal_(module.weight, std=module.embedding_dim**-0.5 if std is None else std)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, FirstToken):
            init.normal_(module.vector, std=1.0 if std is None else std)
        elif hasattr(module, "reset_constants"):  # buffers of a registered layer that are not saved
            module.reset_constants()  # type: ignore[operator]

    def save_pretrained(self, save_directory: Any, is_main_process: bool = True, **kwargs: Any) -> None:  # type: ignore[override]
        """Save as Hugging Face's does; beside the files come their hashes."""
        with naming_full_disk(Path(save_directory)):
            super().save_pretrained(save_directory, is_main_process=is_main_process, **kwargs)
        if is_main_process:
            write_hashes(Path(save_directory), WEIGHTS)

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """Load as Hugging Face's does; seeds and draws of feature maps are restored.

        A folder is checked before anything of it is built, see `kernelformer.weight_headers`. Weights are safetensors;
        pickled ones by a name on the hub need ``use_safetensors=False``.

        Raises:
            ValueError: weights of a model of another family, or of a map with other settings; files of a folder that
                are not those that were saved, are pickled or lie outside of it; a configuration that does not fit them.
        """
        _check_files(cls, *args, **kwargs)
        kwargs = {"use_safetensors": True, **kwargs}
        whole, any_shape = (kwargs.pop(x, False) for x in ("output_loading_info", "ignore_mismatched_sizes"))
        loaded: Any = super().from_pretrained(*args, **kwargs, output_loading_info=True, ignore_mismatched_sizes=True)
        model, loading = loaded
        where = f"{Path(model.name_or_path) / CONFIG_NAME} cannot be used: it asks for"
        for name, there, here in [] if any_shape else sorted(loading["mismatched_keys"]):
            raise SizeError(
                f"{where} {name} of shape {tuple(here)}, its weights have {tuple(there)}; put it right, or start these "
                f"weights anew by ignore_mismatched_sizes=True."
            )
        for name in sorted(x for x in loading["missing_keys"] if x.endswith(".settings")):
            raise SizeError(
                f"{where} {name}, which {SAFE_WEIGHTS_NAME} has not; put it right."
            )  # a map without its numbers
        for name in model.config.architectures or ():
            saved = next((x for x in _descendants(KernelformerPreTrainedModel) if x.__name__ == name), cls)
            if saved.family != cls.family:
                raise ValueError(
                    f"these are weights of {name}, of the family {saved.family!r}, which {cls.__name__} "
                    f"({cls.family!r}) would use otherwise than they were trained; load them with {name}."
                )
        for module in model.modules():
            if isinstance(module, FeatureMap):
                module.take_numbers()
        return loaded if whole else model

    def get_correct_attn_implementation(self, requested_attention: str | None, is_init_check: bool = False) -> str:
        """Refuse an implementation of transformers: these models attend by layers of their own."""
        if requested_attention not in (None, "eager"):
            raise ValueError(
                f"{type(self).__name__} attends by layers of its own, got attn_implementation={requested_attention!r}; "
                f"leave it out, and choose a method by attention= of the KernelformerConfig."
            )
        return "eager"

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Name tied weights: transformers' own, and tables that blocks share, which are always tied."""
        tied: dict[str, str] = super().get_expanded_tied_weights_keys(all_submodels)
        return {**tied, **self._shared_tables()}

    def _shared_tables(self) -> dict[str, str]:
        """Parameters of relative positions that several blocks share, by the name that owns them."""
        tied: dict[str, str] = {}
        first: dict[int, str] = {}
        for name, module in self.named_modules(remove_duplicate=False):
            if isinstance(module, RelativePositions):
                owner = first.setdefault(id(module), name)
                if owner != name:
                    tied |= {f"{name}.{x}": f"{owner}.{x}" for x, _ in module.named_parameters()}
        return tied

    def _prepare_cache_for_generation(self, generation_config: Any, model_kwargs: dict[str, Any], *_: Any) -> None:
        """Give `generate` a cache of states instead of keys and values."""
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"this model keeps states, got cache_implementation={generation_config.cache_implementation!r}; leave "
                f"it out."
            )
        given = model_kwargs.get("past_key_values")
        if given is None and generation_config.use_cache:
            model_kwargs["past_key_values"] = self.new_cache()
        elif given is not None and not isinstance(given, StateCache):
            raise ValueError(f"past_key_values must be a StateCache, got {type(given).__name__}; leave it out.")

    def new_cache(self) -> StateCache:
        """Make an empty cache for the decoder."""
        raise ValueError(f"{type(self).__name__} does not generate.")


def _check_files(
    cls: type[KernelformerPreTrainedModel], name: Any = None, *args: Any, subfolder: str = "", **kwargs: Any
) -> None:
    """Check files, hashes and sizes of a local folder before anything is built.

    The arguments are those of `from_pretrained`. The folder's own configuration is checked also where another is given:
    transformers' Auto classes give what they have read from the folder.
    """
    name = kwargs.get("pretrained_model_name_or_path", name)
    if name is None or not (folder := Path(name) / (subfolder or "")).is_dir():
        return
    files, path = weight_files(folder), folder / CONFIG_NAME
    check_hashes(folder)
    if not (path.is_file() and all(x.is_file() for x in files)):
        return
    kind = next(x for x in cls.__mro__ if x.__module__.startswith("kernelformer."))  # not a user's, with an own call
    try:
        record = read_json(path)
        if not isinstance(record, dict):
            raise ValueError(f"it is not a JSON object but {record!r:.60}")
        config = KernelformerConfig.from_dict(record)
        check_shapes(lambda: kind(config.with_attention("softmax")), saved_shapes(files))  # cores would draw
        for specs in (config.encoder_specs, config.decoder_specs, config.cross_specs):
            check_sizes([parse_attention(x)[1] for x in specs], files)
    except ValueError as problem:
        raise SizeError(f"{path} cannot be used: {str(problem).rstrip('.')}; put it right.") from None


def _descendants(kind: type[KernelformerPreTrainedModel]) -> Iterator[type[KernelformerPreTrainedModel]]:
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)


def refuse_unknown(model: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Raise for arguments that a model does not take.

    What transformers passes along is allowed: None, False, and the tokenizer that `generate` stops at strings by.
    """
    asked = [x for x, value in keywords.items() if value is not None and value is not False and x != "tokenizer"]
    if asked:
        known = [x for x in inspect.signature(model.forward).parameters if x != "kwargs"]
        raise unknown(f"argument of {type(model).__name__},", asked[0], known)


class FirstToken(nn.Module):
    """A learned vector in front of every sequence, whose output stands for the whole of it.

    Where sequences are split over ranks the first one has it.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Prepend the vector, (B, L, d) and mask (B, L) -> (B, 1 + L, d) and (B, 1 + L)."""
        ranks = active_ranks()
        count = 0 if ranks is not None and ranks.rank else 1
        first = self.vector.to(x.dtype).expand(x.shape[0], count, -1)
        if key_mask is not None:
            key_mask = torch.cat([key_mask.new_ones(key_mask.shape[0], count), key_mask], 1)
        return torch.cat([first, x], 1), key_mask


def mean_loss(
    logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | int | None = None, *, per_token: bool = False
) -> Tensor:
    """Cross-entropy over all labels but -100, or the squared error of numbers: logits (..., classes), labels (...).

    Where sequences are split over ranks it is the same number on all of them, and its gradient is a rank's share, so
    that the gradients of all ranks add up to those of the whole; the labels are ``per_token`` those of each rank's own
    tokens, else those of whole sequences on all. ``num_items_in_batch`` are the labels that the mean is over, on all
    ranks, where the batch is a part of a larger one.
    """
    splits = active_ranks() is not None
    if labels.is_floating_point():
        if logits.shape[-1] != 1:
            raise ValueError(
                f"labels in {labels.dtype} are a regression, which has num_labels=1, got {logits.shape[-1]}."
            )
        error = nn.functional.mse_loss(logits.squeeze(-1).float(), labels.to(logits.device).float())
        return share_of_same(error) if splits else error
    if logits.shape[-1] == 1:
        raise ValueError(f"num_labels=1 is a regression, whose labels are floating point, got {labels.dtype}.")
    flat, wanted = logits.flatten(0, -2).float(), labels.flatten().to(logits.device)
    if splits and per_token:
        total = nn.functional.cross_entropy(flat, wanted, reduction="sum")
        return share_of_mean(total, (wanted != IGNORED).sum(), num_items_in_batch)
    if num_items_in_batch is None:
        loss = nn.functional.cross_entropy(flat, wanted)
    else:
        loss = nn.functional.cross_entropy(flat, wanted, reduction="sum") / num_items_in_batch
    return share_of_same(loss) if splits else loss
