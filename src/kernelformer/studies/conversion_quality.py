"""Quality of a model on held-out texts, by what the model is for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kernelformer.data.labelled_texts import read_labelled
from kernelformer.data.texts import batches, inputs_for, mask_tokens, packed_rows, read_texts
from kernelformer.distill.probe import embeddings, probe_accuracy
from kernelformer.hf.load import Source
from kernelformer.studies.settings import ConversionSettings as Settings


class Quality:
    """Scores of a model on held-out texts.

    encoder: mean cosine of the mean-pooled outputs to the original's; accuracy of a linear probe on them.
    masked: share of masked tokens that are the model's likeliest, and their perplexity.
    causal: perplexity of the next token at ``length`` tokens.
    """

    def __init__(self, source: Source, settings: Settings) -> None:
        self.source, self.settings = source, settings
        self.batches = list(self._batches(read_texts(settings.held_out), settings.samples))
        with torch.no_grad():
            self.reference = self._embed(source.model, self.batches) if source.task == "encoder" else None
        self.labelled = None
        if settings.probe:
            if source.task != "encoder":
                raise ValueError(f"a probe is for encoders, {source.path} is one for {source.task!r}; leave it out.")
            self.labelled = [
                read_labelled(x, settings.probe, settings.seed) for x in (settings.text, settings.held_out)
            ]

    def _batches(self, texts: Sequence[str], count: int) -> Iterator[dict[str, Tensor]]:
        """Batches with each text once; of masked models again with other tokens hidden, if they are too few."""
        task, size = self.source.task, self.settings
        inputs_for(self.source, texts, size.length, size.batch, size.seed)  # checks the tokenizer
        if task == "causal":
            rows = packed_rows(texts, self.source.tokenizer, size.length)
            if len(rows[0]) < size.length:
                raise ValueError(f"the held-out text has {len(rows[0])} tokens, length is {size.length}; give more.")
            count = min(count, len(rows))
        elif task == "encoder":
            count = min(count, len(texts))
        plain = "encoder" if task == "masked" else task
        rows_of_texts = batches(texts, self.source.tokenizer, size.length, size.batch, size.seed, task=plain)
        for first in range(0, count, size.batch):
            yield {name: x[: count - first] for name, x in next(rows_of_texts).items()}

    @torch.no_grad()
    def __call__(self, model: Any) -> dict[str, float]:
        """Scores of a model by name."""
        kind = {"encoder": self._encoder, "masked": self._masked, "causal": self._causal}.get(self.source.task)
        if kind is None:
            raise ValueError(f"{self.source.path} is for {self.source.task!r}, which this study does not measure.")
        return kind(model)

    def _embed(self, model: Any, batches: Sequence[dict[str, Tensor]]) -> Tensor:
        from kernelformer.distill.losses import pooled

        vectors = (pooled(model(**x)[0], x["attention_mask"]) for x in batches)
        return torch.cat([F.normalize(x, dim=-1) for x in vectors])

    def _encoder(self, model: Any) -> dict[str, float]:
        assert self.reference is not None
        cosines = (self._embed(model, self.batches) * self.reference).sum(-1)
        scores = {"cosine": float(cosines.mean()), "least cosine": float(cosines.min())}
        if self.labelled is not None:
            scores["probe"] = self._probe(model)
        return scores

    def _probe(self, model: Any) -> float:
        """Accuracy on held-out texts of a linear classifier of the embeddings."""
        assert self.labelled is not None
        size = self.settings
        both = [
            (embeddings(model, self.source.tokenizer, texts, size.length, size.batch * 4), torch.tensor(labels))
            for texts, labels in self.labelled
        ]
        return probe_accuracy(both[0], both[1])

    def _masked(self, model: Any) -> dict[str, float]:
        right = count = 0
        loss = 0.0
        for number, batch in enumerate(self.batches):
            ids = batch["input_ids"]
            hidden, chosen = mask_tokens(ids, self.source.tokenizer, self.settings.seed + number)
            logits = model(input_ids=hidden, attention_mask=batch["attention_mask"]).logits
            picked, wanted = logits[chosen], ids[chosen]
            right += int((picked.argmax(-1) == wanted).sum())
            loss += float(F.cross_entropy(picked, wanted, reduction="sum"))
            count += len(wanted)
        return {"accuracy": right / max(1, count), "perplexity": float(torch.tensor(loss / max(1, count)).exp())}

    def _causal(self, model: Any) -> dict[str, float]:
        total = count = 0.0
        for batch in self.batches:
            logits = model(**batch, use_cache=False).logits[:, :-1].flatten(0, 1)
            wanted = batch["input_ids"][:, 1:].flatten()
            total += float(F.cross_entropy(logits, wanted, reduction="sum"))
            count += len(wanted)
        return {"perplexity": float(torch.tensor(total / count).exp())}
