"""Small studies of the papers, at a size for a CPU: one file each, with its settings and, as ``STUDY``, its `Study`."""

from __future__ import annotations

from importlib import import_module

from kernelformer_lab.studies.base import Study

__all__ = ["STUDIES", "Study", "find_study"]

# Names with a line of help, which need no import of what measures.
STUDIES = {
    "conversion": "Compare methods that convert a pretrained model, as it is and after distillation.",
    "normalized": "Make standard and normalized models linear without fine-tuning; trained models are kept.",
    "transfer": "Move weights of a softmax model to random features: at once, fine-tuned, and beside a fresh start.",
    "lengths": "Find the length from which on a converted model is faster and leaner than the original.",
    "serving": "Measure what a converted decoder saves: prefill, decoding and the cache over the length of the prompt.",
    "sparsity": "Draw learning curves of kernels on sums of relevant values: which learn to ignore the others.",
    "redraws": "Measure how redraws of random features change trained classifiers, and what kernels have learned.",
    "features": "Measure errors by number of features, and time at equal error, of all maps that stand for softmax.",
    "approximation": "Measure spectral errors inside a real encoder, condition numbers and the statistical dimension.",
    "instability": "Measure the instability score of training steps: change of outputs over that of weights.",
    "estimators": "Measure errors of trigonometric, positive and orthogonal features, and check the theorems on them.",
    "depth": "Measure how errors of approximate attention grow over the layers of a pretrained model.",
    "amino-acids": "Compare similarities of amino acids in the attention of a protein model with BLOSUM62.",
    "positions": "Measure errors over the norm of queries and keys, and the time with relative positions.",
    "encoder": "Measure speed and memory of whole encoders against SDPA and the upper bound.",
    "ranks": "Split a sequence over processes: time against independent ones, bytes exchanged, memory of each.",
}


def find_study(name: str) -> Study:
    """A study by its name."""
    study: Study = import_module(f"kernelformer_lab.studies.{name.replace('-', '_')}").STUDY
    return study
