"""Learning the Transformer Kernel: Tables 6 and 7 (Long Range Arena), App. E (sparsity); `kernels_on_glue` has Table 8.

Table 6 follows the code of Long Range Arena, so what it leaves open is taken from there: eps of Adam, gradients that
are never shortened, norms before each part, a classifier with a ReLU and the feed-forward part's width. What is said of
"its code" is in the repository that the paper names; Image and GLUE are not there.

Table 7 counts draws of noise, M of Eq. 5, which agrees with that code on ListOps and Retrieval. Smoothing s is relative
to K(x, x): there it is a constant feature of 1 where that is 2 for the mixtures, and 1 for the others.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from kernelformer_lab.recipes.papers import base
from kernelformer_lab.recipes.papers.base import Recipe, arena_rate, brief, network, pair, several, steps_of
from kernelformer_lab.training.config import Run


class Glue(NamedTuple):
    """A task of GLUE: its name, columns, number of labels and metric, its training samples, and what it asks."""

    name: str
    text: str
    other: str | None
    labels: int
    metric: str
    samples: int
    title: str

    @property
    def options(self) -> dict[str, Any]:
        """Options of the task ``sentences``."""
        columns = {"text": self.text, "other": self.other, "labels": self.labels, "glue": self.metric}
        return {"data": f"hub:nyu-mll/glue:{self.name}", **columns}


# Labels of the test splits are -1, which is to say secret. MNLI is validated on its matched half; the other by
# validation_split="validation_mismatched".
MNLI = "does a sentence follow from another, contradict it, or neither?"
WNLI = "does a sentence with a resolved pronoun follow from another?"
_GLUE = (
    Glue("cola", "sentence", None, 2, "matthews", 8_551, "is an English sentence acceptable?"),
    Glue("sst2", "sentence", None, 2, "accuracy", 67_349, "is a sentence of a film review positive?"),
    Glue("mrpc", "sentence1", "sentence2", 2, "f1", 3_668, "do two sentences say the same?"),
    Glue("qqp", "question1", "question2", 2, "f1", 363_846, "do two questions ask the same?"),
    Glue("stsb", "sentence1", "sentence2", 1, "pearson", 5_749, "how similar are two sentences? a number"),
    Glue("mnli", "premise", "hypothesis", 3, "accuracy", 392_702, MNLI),
    Glue("qnli", "question", "sentence", 2, "accuracy", 104_743, "does a sentence answer a question?"),
    Glue("rte", "sentence1", "sentence2", 2, "accuracy", 2_490, "does a sentence follow from another?"),
    Glue("wnli", "sentence1", "sentence2", 2, "accuracy", 635, WNLI),
)
GLUE = {x.name: x for x in _GLUE}
START = (
    "Without --set start=FOLDER of a pre-training run of the same size, and --set task.tokenizer=FOLDER for its "
    "vocabulary, all weights are new. The first token of the pooling is new in any case.",
    "Labels of GLUE's tests are secret: results are those of validation.",
)
MISMATCHED = (
    "Validation is the matched half; --set task.validation_split=validation_mismatched, a second run, has the other.",
)


# Both components of the mixtures have one covariance and opposite means (footnote 2); noise is iid (Eq. 5, 7, 10).
MIXTURE = "tied=True:draw=iid"
KERNELS = (
    f"gmm-rks:{MIXTURE}:smoothing=0.5",
    "fastfood-rks",
    "generative-rks:draw=iid",
    f"gmm-prf:{MIXTURE}",
    "fastfood-prf",
    "generative-prf:draw=iid",
)
TABLE_7 = {
    "listops": (256, 64, 256, 256, 64, 128),
    "text": (128, 64, 256, 256, 64, 128),
    "retrieval": (64, 32, 128, 128, 32, 64),
    "image": (128, 8, 128, 128, 8, 8),
}
ARENA: dict[str, Any] = {
    "beta1": 0.9,
    "beta2": 0.98,
    "eps": 1e-9,
    "max_grad_norm": None,
    "redraw": 100,  # Sec. 2.2
    "redraw_to_end": True,
    "eval_every": 500,
    "save_every": 1000,
}
# What the sizes for a CPU share: rates for a short run.
_short = partial(brief, batch_size=16, schedule="cosine", max_grad_norm=1.0, eval_batch_size=32, redraw_to_end=False)
SMALL = network(2, 2, 64, 128, head_dim=32, dropout=0.0, classifier_size=64)


ANY_KERNEL = (
    "full: noise is drawn iid, anew every 100 steps to the end; in its code at every forward pass, in evaluation too, "
    "and the same for all heads, which have their own here.",
    "M counts draws: the mixtures have twice as many frequencies; in its code GMM-PRF has one component.",
    "Kernel parameters are never decayed, in its code they are. Mixtures start at S = I with small means, there at "
    "Xavier's values. The generator has four hidden layers, as printed, there at most two.",
)
BASELINES = (
    "full: elu, favor+ and relu stand beside the kernels: the paper quotes LinearElu and Performer from Long Range "
    "Arena, whose Performer is relu without projection.",
    "The paper's accuracies are means over 100 runs: --seeds says how many; each has one draw in evaluation.",
)
SMOOTHING = "full: smoothing of GMM-RKS is half of K(x, x), as in its code; the paper has none."
DROPPED = "full: softmax drops 0.1 of its weights, as in its code."
CUT = (
    "a cosine of rates for a short run; draws are orthogonal, the last before the rate falls to a quarter, gradients "
    "are cut to norm 1, no dropout."
)


def kernels(task: str, dropout: float = 0.1) -> list[str]:
    """Softmax, the paper's methods with their numbers of samples (Table 7), and the other linear ones of Table 2.

    Args:
        task: of Table 7.
        dropout: of softmax's attention weights.
    """
    own = [f"{x}:num_features={m}" for x, m in zip(KERNELS, TABLE_7[task], strict=True)]
    linear = ["elu", "favor+:num_features=256", "relu:projection=False:eps=1e-3"]
    return [f"softmax:attention_dropout={dropout}", *own, *linear]


def _arena(layers: int, heads: int, width: int, feed: int, **more: Any) -> dict[str, Any]:
    """A model of Table 6."""
    own = {"hidden_act": "gelu", "positions": "sinusoidal", "pooling": "cls", "dropout": 0.1}
    return network(layers, heads, width, feed, **{**own, **more}, classifier_size=feed, classifier_act="relu")


def _printed(task: str, features: int, model: dict[str, Any], rate: dict[str, Any], **options: Any) -> partial[Run]:
    """A run of Table 6; ``options`` are those of the task."""
    attention = f"fastfood-prf:num_features={features}"
    own: dict[str, Any] = {"batch_size": 32, "weight_decay": 0.1, **rate, **ARENA}
    return partial(Run, task=task, attention=attention, task_options=options, model=model, **own)


LISTOPS = pair(
    "ListOps of Long Range Arena: nested operators over digits, lengths 500 to 2000",
    "Learning the Transformer Kernel, Tables 6 and 7",
    full=_printed("listops", 64, _arena(6, 8, 512, 2048, head_dim=64), arena_rate(5e-3, 1000, 10_000)),
    compared=kernels("listops"),
    cpu=_short(800, 2e-3, 200, batch_size=32, task_options=base.SHORT_LISTOPS, model=SMALL),
    note=(
        *ANY_KERNEL,
        *BASELINES,
        SMOOTHING,
        DROPPED,
        "cpu: expressions of 11 to 127 tokens, at most 6 deep, with up to 5 arguments; 2 layers of width 64; " + CUT,
    ),
)

IMDB = {"data": "hub:stanfordnlp/imdb", "length": 4000, "validation_split": "test"}
TEXT = pair(
    "Text of Long Range Arena: reviews of IMDb, positive or negative, byte by byte",
    "Learning the Transformer Kernel, Tables 6 and 7",
    full=_printed(
        "text",
        64,
        _arena(4, 4, 256, 1024, head_dim=64),
        arena_rate(5e-2, 8000, 20_000),
        data="hub:stanfordnlp/imdb",
        length=4000,
        validation_split="test",
    ),
    compared=[x.replace("smoothing=0.5", "smoothing=0.0648") for x in kernels("text")],
    cpu=_short(
        400, 3e-3, 100, task_options={"length": 512, "validation_samples": 500, "validation_split": None}, model=SMALL
    ),
    note=(
        *ANY_KERNEL,
        *BASELINES,
        "full: validation is IMDb's test split, as in Long Range Arena: accuracies are the test's, and nothing is held "
        "back from training.",
        "full: GMM-RKS has 128 draws, 512 features; in its code 32 draws, 128 features: --attention "
        f"gmm-rks:{MIXTURE}:smoothing=0.0648:num_features=32.",
        "full: smoothing of GMM-RKS is 0.0648 of K(x, x), as in its code (a constant feature of 0.36, whose square is "
        "added to a K(x, x) of 2); the paper has none.",
        DROPPED,
        "cpu: the first 512 bytes; validation is a share of the training reviews; 2 layers of width 64; " + CUT,
    ),
)

RETRIEVAL = pair(
    "Retrieval of Long Range Arena: does one paper cite the other? two texts, byte by byte",
    "Learning the Transformer Kernel, Tables 6 and 7",
    full=_printed("retrieval", 32, _arena(4, 4, 128, 512, head_dim=32), arena_rate(5e-2, 8000, 5000), length=4000),
    compared=kernels("retrieval"),
    cpu=_short(400, 2e-3, 100, task_options=base.SHORT_PAIRS, model=SMALL),
    note=(
        *ANY_KERNEL,
        *BASELINES,
        SMOOTHING,
        DROPPED,
        "full: 5,000 steps end before the warm-up of 8,000 does.",
        "The classifier has one hidden layer, in Long Range Arena two.",
        "cpu: halves of single texts, as of IMDb, of 256 bytes; 2 layers of width 64; " + CUT,
    ),
)

IMAGE = pair(
    "Image of Long Range Arena: CIFAR-10 as 1024 grey pixels",
    "Learning the Transformer Kernel, Tables 6 and 7 (App. C.2)",
    full=partial(
        Run,
        task="grey",
        attention=f"{KERNELS[0]}:num_features=128",
        task_options={"data": "hub:uoft-cs/cifar10"},
        model=_arena(1, 8, 128, 128, head_dim=8, dropout=0.3, positions="learned"),
        steps=steps_of(200, 45_000, 256),
        batch_size=256,
        learning_rate=5e-4,
        weight_decay=0.0,
        warmup_steps=175,
        schedule="cosine",
        **ARENA,
    ),
    compared=kernels("image", dropout=0.2),
    cpu=_short(
        300,
        2e-3,
        100,
        task_options={"validation_samples": 500},
        model=network(1, 2, 64, 128, head_dim=16, dropout=0.0, classifier_size=128),
    ),
    note=(
        *ANY_KERNEL,
        *BASELINES,
        SMOOTHING,
        "full: softmax drops 0.2 of its weights, as in Long Range Arena's code.",
        "full: 200 epochs of 45,000 images, a tenth being the validation.",
        "cpu: 1 layer of width 64, 2 heads of 16; " + CUT,
    ),
)

SPARSITY = pair(
    "sum of the values that are marked as relevant: which kernels learn to ignore?",
    "Learning the Transformer Kernel, App. E",
    full=partial(
        Run,
        task="sparsity",
        attention=f"gmm-prf:{MIXTURE}:num_features=64",
        task_options={"train_samples": 160_000, "validation_samples": 40_000, "relevance": 0.1, "length": 200},
        model=network(3, 4, 64, 64, head_dim=16, positions="learned", pooling="cls", classifier_size=64),
        steps=400_000,
        batch_size=400,
        learning_rate=5e-6,
        beta2=0.98,
        eps=1e-9,
        weight_decay=0.1,
        schedule="constant",
        max_grad_norm=None,
        redraw=100,
        redraw_to_end=True,
        eval_every=400,
        save_every=4000,
    ),
    compared=["softmax", *several((KERNELS[0], KERNELS[3]), (64,))],
    cpu=brief(
        800,
        1e-3,
        100,
        task_options={"length": 48, "train_samples": 16_000, "validation_samples": 2000, "test_samples": 2000},
        batch_size=32,
        warmup_steps=40,
        eval_batch_size=100,
        max_grad_norm=1.0,
        redraw_to_end=False,
    ),
    note=(
        *ANY_KERNEL,
        SMOOTHING,
        "The paper's three data sets: --set task.relevance=0.1, 0.5, 0.9; `kernelformer study sparsity` draws the "
        "learning curves of the three.",
        "full: it does not say how many steps: here 1,000 epochs.",
        "Heads are of 16, so 4. The answer is read off a learned token in front, in the paper off the first pair.",
        "cpu: 48 pairs, 800 steps with batches of 32; draws are orthogonal, gradients are cut to norm 1.",
    ),
)

LEARNED_KERNELS: dict[str, Recipe] = {
    "kl-listops": LISTOPS,
    "kl-text": TEXT,
    "kl-retrieval": RETRIEVAL,
    "kl-image": IMAGE,
    "kl-sparsity": SPARSITY,
}


TABLE_8: dict[str, Any] = {
    "beta1": 0.9,
    "beta2": 0.999,
    "weight_decay": 0.01,
    "batch_size": 64,
    "schedule": "linear",
    "max_grad_norm": None,
    "redraw": 100,
    "redraw_to_end": True,
    "eval_every": 1000,
    "save_every": 1000,
}
BERT_LIKE = network(3, 10, 300, 512, head_dim=64, dropout=0.1, hidden_act="gelu", positions="sinusoidal")
SENTENCE_MODEL = network(2, 4, 96, 192, head_dim=32, dropout=0.0)
WORDPIECE = {"kind": "wordpiece", "vocab_size": 30_522, "length": 512}
TRIED = ["softmax", *several(KERNELS, (64, 128))]
WORDS = 103_227_021  # of WikiText-103
PRETRAINING = steps_of(5, WORDS // 512, 64)

WIKITEXT = pair(
    "masked language modelling of WikiText-103, before fine-tuning",
    "Learning the Transformer Kernel, Table 8 and Sec. 3.3",
    full=partial(
        Run,
        task="masked",
        attention="fastfood-prf:num_features=64",
        task_options={"data": "hub:Salesforce/wikitext:wikitext-103-raw-v1", **WORDPIECE},
        model=BERT_LIKE,
        steps=PRETRAINING,
        learning_rate=5e-4,
        warmup_steps=10_000,
        **TABLE_8,
    ),
    compared=TRIED,
    cpu=_short(500, 3e-3, 100, task_options=base.SHORT_TEXTS, model=SENTENCE_MODEL),
    note=(
        *ANY_KERNEL,
        SMOOTHING,
        f"full: five epochs of {WORDS:,} words in windows of 512 are {PRETRAINING:,} steps; the paper's are of its "
        f"tokens, whose number it does not say, nor the vocabulary's: BERT's 30,522.",
        "cpu: 4,000 tokens, windows of 128, 2 layers of width 96; " + CUT,
    ),
)


def _fine_tuning(name: str) -> Recipe:
    steps = steps_of(10, GLUE[name].samples, 64)
    return pair(
        f"GLUE: {GLUE[name].title}",
        "Learning the Transformer Kernel, Table 8 and Sec. 3.3",
        full=partial(
            Run,
            task="sentences",
            attention="fastfood-prf:num_features=64",
            task_options={**GLUE[name].options, **WORDPIECE},
            model={**BERT_LIKE, "pooling": "cls", "classifier_size": 128, "classifier_act": "tanh"},
            steps=steps,
            learning_rate=1e-4,
            warmup_steps=steps // 10,
            **TABLE_8,
        ),
        compared=TRIED,
        cpu=_short(500, 1e-3, 100, task_options=base.SHORT_SENTENCES, model=SENTENCE_MODEL),
        note=(
            *ANY_KERNEL,
            SMOOTHING,
            "The paper tries the learning rates 2e-3, 5e-4, 1e-4, 2e-5, 5e-6, here 1e-4, and does not say how many "
            "seeds: --seeds.",
            f"full: 10 epochs of {GLUE[name].samples:,} samples.",
            "Table 13, what FastFood learns: --attention fastfood-rks:learn=none:num_features=64, and learn=S.",
            *START,
            *(MISMATCHED if name == "mnli" else ()),
            "cpu: 4,000 tokens, up to 128 a sample, 2 layers of width 96, as kl-wikitext; " + CUT,
        ),
    )


KERNELS_ON_GLUE: dict[str, Recipe] = {
    "kl-wikitext": WIKITEXT,
    **{f"kl-glue-{x}": _fine_tuning(x) for x in ("sst2", "mrpc", "qqp", "mnli", "qnli", "wnli", "rte", "cola")},
}
