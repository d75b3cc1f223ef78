"""Models in Hugging Face's conventions: configuration, `from_pretrained`, `save_pretrained`, `generate`."""

from __future__ import annotations

from kernelformer.lazy import require_extra

require_extra(__name__)

from kernelformer.models.base import KernelformerPreTrainedModel
from kernelformer.models.config import KernelformerConfig
from kernelformer.models.decoder import (
    KernelformerForCausalLM,
    KernelformerForConditionalGeneration,
    KernelformerForPixels,
)
from kernelformer.models.encoder import (
    KernelformerForImageClassification,
    KernelformerForMaskedLM,
    KernelformerForMatching,
    KernelformerForSequenceClassification,
    KernelformerForSeries,
    KernelformerModel,
)

MODELS: dict[str, type[KernelformerPreTrainedModel]] = {
    "encoder": KernelformerModel,
    "classifier": KernelformerForSequenceClassification,
    "dual": KernelformerForMatching,
    "masked-lm": KernelformerForMaskedLM,
    "causal-lm": KernelformerForCausalLM,
    "seq2seq": KernelformerForConditionalGeneration,
    "image": KernelformerForImageClassification,
    "series": KernelformerForSeries,
    "pixel-lm": KernelformerForPixels,
}


def register() -> None:
    """Make the Auto classes of transformers know these models; calling it again changes nothing."""
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForImageClassification,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
    )

    AutoConfig.register("kernelformer", KernelformerConfig, exist_ok=True)
    for auto, model in (
        (AutoModel, KernelformerModel),
        (AutoModelForSequenceClassification, KernelformerForSequenceClassification),
        (AutoModelForMaskedLM, KernelformerForMaskedLM),
        (AutoModelForCausalLM, KernelformerForCausalLM),
        (AutoModelForSeq2SeqLM, KernelformerForConditionalGeneration),
        (AutoModelForImageClassification, KernelformerForImageClassification),
    ):
        auto.register(KernelformerConfig, model, exist_ok=True)


__all__ = [
    "MODELS",
    "KernelformerConfig",
    "KernelformerForCausalLM",
    "KernelformerForConditionalGeneration",
    "KernelformerForImageClassification",
    "KernelformerForMaskedLM",
    "KernelformerForMatching",
    "KernelformerForPixels",
    "KernelformerForSequenceClassification",
    "KernelformerForSeries",
    "KernelformerModel",
    "KernelformerPreTrainedModel",
    "register",
]
