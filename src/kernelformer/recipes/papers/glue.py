"""The tasks of GLUE, on which two of the papers fine-tune."""

from __future__ import annotations

# Training samples of each.
SAMPLES = {
    "cola": 8_551,
    "sst2": 67_349,
    "mrpc": 3_668,
    "qqp": 363_846,
    "stsb": 5_749,
    "mnli": 392_702,
    "qnli": 104_743,
    "rte": 2_490,
    "wnli": 635,
}
TITLES = {
    "cola": "is an English sentence acceptable?",
    "sst2": "is a sentence of a film review positive?",
    "mrpc": "do two sentences say the same?",
    "qqp": "do two questions ask the same?",
    "stsb": "how similar are two sentences? a number",
    "mnli": "does a sentence follow from another, contradict it, or neither?",
    "qnli": "does a sentence answer a question?",
    "rte": "does a sentence follow from another?",
    "wnli": "does a sentence with a resolved pronoun follow from another?",
}
START = (
    "Without --set start=FOLDER of a pre-training run of the same size, and --set task.tokenizer=FOLDER for its "
    "vocabulary, all weights are new. The first token of the pooling is new in any case.",
    "Labels of GLUE's tests are secret: results are those of validation.",
)
MISMATCHED = (
    "Validation is the matched half; --set task.validation_split=validation_mismatched, a second run, has the other.",
)
