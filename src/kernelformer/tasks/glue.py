"""The nine tasks of GLUE as options of the task "sentences"."""

from __future__ import annotations

from typing import Any


def _glue(name: str, text: str, other: str | None, labels: int, metric: str) -> dict[str, Any]:
    return {"data": f"hub:nyu-mll/glue:{name}", "text": text, "other": other, "labels": labels, "glue": metric}


# Labels of the test splits are -1, which is to say secret. MNLI is validated on its matched half; the other by
# validation_split="validation_mismatched".
GLUE: dict[str, dict[str, Any]] = {
    "cola": _glue("cola", "sentence", None, 2, "matthews"),
    "sst2": _glue("sst2", "sentence", None, 2, "accuracy"),
    "mrpc": _glue("mrpc", "sentence1", "sentence2", 2, "f1"),
    "qqp": _glue("qqp", "question1", "question2", 2, "f1"),
    "stsb": _glue("stsb", "sentence1", "sentence2", 1, "pearson"),
    "mnli": _glue("mnli", "premise", "hypothesis", 3, "accuracy"),
    "qnli": _glue("qnli", "question", "sentence", 2, "accuracy"),
    "rte": _glue("rte", "sentence1", "sentence2", 2, "accuracy"),
    "wnli": _glue("wnli", "sentence1", "sentence2", 2, "accuracy"),
}
