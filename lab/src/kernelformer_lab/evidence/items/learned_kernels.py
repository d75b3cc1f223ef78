"""KL-Transformer (2110.08323): variance over redraws, learned covariances, sparse sums, sentences."""

from __future__ import annotations

from typing import Any

from kernelformer_lab.evidence.base import MAIN, Claim, Item, Training
from kernelformer_lab.evidence.rules import SAMPLES, Above, Alike, All, AtLeast, Later, Level

PAPER = "KL-Transformer"
# Each 64 features wide: two components of 16 frequencies with a cosine and a sine, 32 with both, and so on.
GMM_RKS, GMM_PRF = "gmm-rks:tied=True:draw=iid:num_features=16", "gmm-prf:tied=True:draw=iid:num_features=32"
KERNELS = (
    GMM_RKS,
    "fastfood-rks:num_features=32",
    "generative-rks:num_features=32",
    GMM_PRF,
    "fastfood-prf:num_features=64",
    "generative-prf:num_features=64",
)
REVIEWS: dict[str, Any] = {
    "task.data": "data:imdb",
    "task.length": 256,
    "task.validation_samples": 1000,
    "batch_size": 32,
    "model.pooling": "mean",
    "steps": 400,
    "learning_rate": 4e-3,
    "warmup_steps": 50,
    "schedule": "inverse_sqrt",  # the rate never falls to a quarter, so redraws continue to the end, as in the paper
    "eval_every": 100,
}
REVIEWS_SIZE = (
    "IMDb by the first 256 bytes of 4000, 2 layers of 64 instead of 4 of 256, 400 steps of 32 instead of 20,000, all "
    "kernels 64 features wide, the mean of all positions instead of a first token; 200 reviews with 100 draws each"
)


INCONSISTENT = "probes.redraws.pi"


def _lower_variance(*pairs: tuple[str, str]) -> All:
    return All([Above(a, b, path=INCONSISTENT, name="PI, in percent", below=True) for a, b in pairs])


VARIANCE = Item(
    "variance",
    PAPER,
    "Fig. 5, Table 2 (Text)",
    "How much the output of a trained classifier depends on the draw: relative standard deviation (RSD), inconsistent "
    "predictions (PI) and what voting over the draws gains (AGV), six kernels",
    REVIEWS_SIZE,
    (Training("main", "kl-text", KERNELS, REVIEWS, probes=("redraws", "eigenvalues")),),
    (
        Claim(
            "RKS kernels have in general lower variance than PRF kernels",
            "Fig. 5, without figures in the text",
            _lower_variance(*zip(KERNELS[:3], KERNELS[3:], strict=True)),
            "'in general' was added with the runs on record; the rule asks for all three pairs, as before",
        ),
        Claim(
            "FastFood has lower variance than the mixtures",
            "Fig. 5",
            _lower_variance((KERNELS[1], GMM_RKS), (KERNELS[4], GMM_PRF)),
        ),
        Claim(
            "Generative kernels have lower variance than the mixtures",
            "Fig. 5",
            _lower_variance((KERNELS[2], GMM_RKS), (KERNELS[5], GMM_PRF)),
        ),
        Claim(
            "On Text RKS is more accurate than PRF",
            "GMM 63.95 against 62.64% (Table 2, 4000 bytes)",
            Above(GMM_RKS, GMM_PRF, name="accuracy", scale=100),
        ),
    ),
    0.8,
    value=INCONSISTENT,
    unit="inconsistent predictions, %",
)

XAVIER = tuple(f"{x}:start=xavier" for x in (GMM_RKS, GMM_PRF))
_EIGEN = "probes.eigenvalues"
EIGENVALUES = Item(
    "eigenvalues",
    PAPER,
    "Table 4, 9 to 12",
    "Eigenvalues of the covariances of Gaussian mixtures at the start and at the end of training, from the identity "
    "and from the start of the authors' code",
    REVIEWS_SIZE,
    (
        Training("main", "kl-text", (GMM_RKS, GMM_PRF), REVIEWS, probes=("redraws", "eigenvalues")),
        Training("xavier", "kl-text", XAVIER, REVIEWS, probes=("redraws", "eigenvalues")),
    ),
    (
        Claim(
            "Training makes the eigenvalues much smaller than 1, from the identity",
            "means 0.031 (RKS) and 0.025 (PRF) after training",
            All([Level(x, f"{_EIGEN}.change", level=0.5, name="end / start of the mean") for x in (GMM_RKS, GMM_PRF)]),
        ),
        Claim(
            "The small eigenvalues are learned, not those of the authors' start",
            "0.031 (RKS) after training; the start of their code has 0.0295 at that width, 0.055 at that of these runs",
            All(
                [Level(x, f"{_EIGEN}.change", part="xavier", level=0.8, name="end / start of the mean") for x in XAVIER]
            ),
        ),
        Claim(
            "Smaller eigenvalues go with lower variance",
            "Theorem 3 and Sec. 4.1",
            Above(XAVIER[0], GMM_RKS, "xavier", "main", INCONSISTENT, name="PI, in percent", below=True),
        ),
    ),
    1.0,
    value=f"{_EIGEN}.end_mean",
    unit="mean eigenvalue at the end",
)

SUMS = {"eval_every": 50, "task.length": 48, "steps": 800}
RELEVANCES = (0.1, 0.5, 0.9)
TRIED = ("gmm-rks:tied=True:draw=iid:num_features=64", "gmm-prf:tied=True:draw=iid:num_features=64", "softmax")
REACHED = "reach.0.8"
BY_RANKS = "by ranks since the runs are on record: two that never came to 80% had left it open by means"


def _relevance(p: float) -> str:
    return f"relevance {p:g}"


SPARSITY = Item(
    "sparsity",
    PAPER,
    "Fig. 6, App. E",
    "After how many steps 80% of the sums of relevant values are right, for few, half and most positions relevant",
    "48 pairs instead of 200, 16,000 samples instead of 160,000, 800 steps of 32 instead of 400 samples at a rate of "
    "1e-3 instead of 5e-6",
    tuple(
        Training(_relevance(p), "kl-sparsity", TRIED, {**SUMS, "task.relevance": p}, seeds=5, by_curve=True)
        for p in RELEVANCES
    ),
    (
        Claim(
            "GMM-PRF converges more slowly the more positions are relevant",
            "Fig. 6",
            Later(TRIED[1], TRIED[1], _relevance(0.9), _relevance(0.1), REACHED, "the steps to 80%"),
            BY_RANKS,
        ),
        Claim(
            "The convergence of GMM-RKS hardly depends on how many positions are relevant",
            "Fig. 6",
            Alike(TRIED[0], TRIED[0], _relevance(0.9), _relevance(0.1), REACHED, "the steps to 80%", margin=200),
        ),
        Claim(
            "With most positions relevant GMM-RKS is faster than GMM-PRF",
            "Fig. 6",
            Later(TRIED[0], TRIED[1], _relevance(0.9), path=REACHED, name="the steps to 80%", below=True),
            BY_RANKS,
        ),
    ),
    0.7,
    value=REACHED,
    unit="steps to 80%",
)

DEVIATION, MEAN_SIZE = "probes.gradients.at_60.absolute_deviation", "probes.gradients.at_60.absolute_mean"


def _larger_for_prf(path: str, name: str) -> All:
    return All([Above(TRIED[1], TRIED[0], _relevance(p), path=path, name=f"{name} at 60%") for p in RELEVANCES[1:]])


GRADIENTS = Item(
    "gradients",
    PAPER,
    "Table 14, App. E.3",
    "Gradients at the classifier when 60% of the sums of relevant values are right, for half and most positions "
    "relevant: 50 draws on 50 samples",
    "trained anew with the settings of the item sparsity, three seeds; the first of the checkpoints, one every 50 "
    "steps, that has 60%: they have 61 to 81%",
    tuple(
        Training(
            _relevance(p),
            "kl-sparsity",
            TRIED[:2],
            {**SUMS, "task.relevance": p, "save_every": SUMS["eval_every"], "keep": 16},
            probes=("gradients",),
            by_curve=True,
        )
        for p in RELEVANCES[1:]
    ),
    (
        Claim(
            "The gradients of GMM-PRF spread more than those of GMM-RKS",
            "at 60%: 26 times (half relevant), 1.06 times (most)",
            _larger_for_prf(DEVIATION, "the deviation of gradients"),
        ),
        Claim(
            "The gradients of GMM-PRF are larger than those of GMM-RKS",
            "at 60%: 24 times (half relevant), 1.05 times (most)",
            _larger_for_prf(MEAN_SIZE, "the mean size of gradients"),
        ),
    ),
    0.4,
    value=DEVIATION,
    unit="deviation of gradients at 60%",
)

VARIANTS = ("none", "S", "SGB")  # what FastFood learns
FASTFOOD = tuple(f"fastfood-prf:num_features=64:learn={x}" for x in VARIANTS)
FASTFOOD_RKS = tuple(f"fastfood-rks:num_features=32:learn={x}" for x in VARIANTS)
RKS = "FastFood-RKS"
SENTENCES = ("softmax", "gmm-rks:tied=True:draw=iid:num_features=32", *FASTFOOD, "generative-prf:num_features=64")
SHORT = {
    "steps": 400,
    "batch_size": 32,
    "group_by_length": True,
    "task.length": 48,
    "task.vocab_size": 4000,
    "task.validation_samples": 2000,
    "eval_every": 200,
}


def _sentence_parts(recipe: str, **data: str) -> tuple[Training, ...]:
    settings = {**SHORT, **{f"task.{name}": x for name, x in data.items()}}
    return (
        Training(MAIN, recipe, SENTENCES, settings),
        Training(RKS, recipe, FASTFOOD_RKS, settings, probes=(SAMPLES,)),
    )


def _sentence_claims(column: str) -> tuple[Claim, ...]:
    """Claims on short texts; ``column`` has the paper's figures of the task that is like it."""
    return (
        Claim(
            "FastFood-RKS with all of S, G, B learned is at least as good as with S alone or nothing learned",
            "Table 13: best or close to it on 6 of 8 tasks of GLUE",
            All([AtLeast(FASTFOOD_RKS[2], x, RKS, name="accuracy", scale=100, margin=0.04) for x in FASTFOOD_RKS[:2]]),
        ),
        Claim(
            "FastFood-PRF with all of S, G, B learned is at least as good as with S alone or nothing learned",
            "not in the paper",
            All([AtLeast(FASTFOOD[2], x, name="accuracy", scale=100, margin=0.05) for x in FASTFOOD[:2]]),
            "taken for Table 13 before the runs; that one is of FastFood-RKS",
        ),
        Claim(
            "FastFood-PRF is competitive with softmax on short texts",
            f"Table 3: 2.5 points below softmax in the mean of its columns; {column}",
            AtLeast(FASTFOOD[2], "softmax", name="accuracy", scale=100, margin=0.05),
            "was said of learned kernels as a whole; the rule has always been about this one",
        ),
    )


SNLI = Item(
    "snli",
    PAPER,
    "Table 3 and 13 in small",
    "Entailment of pairs of sentences, with softmax, learned kernels and three variants of FastFood, without "
    "pre-training",
    "SNLI (99,890 pairs) instead of eight tasks of GLUE, trained from scratch: 2 layers of 96, 400 steps of 32",
    _sentence_parts("kl-glue-mnli", data="data:snli"),
    _sentence_claims("MNLI 56 and 57 against 64%"),
    0.3,
    unit="accuracy",
)
REVIEW_SENTENCES = Item(
    "sentences",
    PAPER,
    "Table 3 and 13 in small",
    "Positive and negative sentences of film reviews, the same methods",
    "rotten-tomatoes (8,530 sentences), as SST-2 of GLUE, trained from scratch: 2 layers of 96, 400 steps of 32",
    _sentence_parts("kl-glue-sst2", data="data:rotten-tomatoes/train.jsonl", text="text"),
    _sentence_claims("SST-2 81 against 81%"),
    0.3,
    unit="accuracy",
)
