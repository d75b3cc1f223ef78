"""Items of the papers that are not in the queue: where else they stand, or why they were not attempted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outside:
    """An item of a paper that the queue does not measure.

    Args:
        paper: a key of `evidence.base.PAPERS`.
        where: table, figure or theorem.
        reason: the study or test that has it, or why nobody has tried.
    """

    paper: str
    where: str
    reason: str


P, K, S, N = "Performer", "KL-Transformer", "Skyformer", "NPRF with RPE"
GPU = "Not attempted: needs GPUs"
RECIPE = "the settings are recipes"

OUTSIDE: tuple[Outside, ...] = (
    Outside(P, "Eq. 1 to 8, 11, Lemma 1, 2, Algorithm 1", "Tests, against definitions and closed forms in float64."),
    Outside(
        P,
        "Theorem 1 to 4, 7, Lemma 4, Fig. 2, Fig. 4",
        "`kernelformer study estimators` (results/performer): positive features lose to trigonometric ones for short "
        "queries and keys (norms 0.5 and 1), and beat them for long ones (2), by less where denominators are clamped; "
        "for Fig. 4 the paper does not say its norms. Theorem 2 has a misprint.",
    ),
    Outside(P, "Theorem 5, 6", "The general forms of Theorem 3 and 2, which are measured."),
    Outside(P, "Fig. 1, Fig. 8, Lemma 3, 5, 6", "Nothing to measure: diagrams, and steps of proofs."),
    Outside(P, "Fig. 5, 6: Linformer, Reformer", "Not attempted: on ListOps Reformer is in the item listops."),
    Outside(
        P, "Fig. 3, Fig. 20", "`kernelformer study encoder`: time and memory of whole encoders, 2 cores for a GPU."
    ),
    Outside(P, "Fig. 7 left (ImageNet64, 12,288 tokens)", f"{GPU}; {RECIPE} (`performer-imagenet64`)."),
    Outside(P, "Fig. 7 right (proteins of 8,192 tokens)", f"{GPU}; {RECIPE} (`performer-protein-long`)."),
    Outside(
        P, "Table 1, Fig. 9 (statistics of TrEMBL)", "Not attempted: TrEMBL of January 2019 is not to be had here."
    ),
    Outside(P, "Table 2, out of distribution", "Not attempted: the held-out families of Pfam are not to be had here."),
    Outside(
        P,
        "Fig. 10 to 12 (attention matrices)",
        "`kernelformer attention` draws them for any model; the patterns that are described are not judged.",
    ),
    Outside(
        P,
        "Fig. 13 (amino acids and BLOSUM)",
        "`kernelformer study amino-acids` (results/performer) on AntiBERTy, trained with exact attention, not on a "
        "Performer: correlation 0.341 ± 0.005 against 0.058 ± 0.004 with random weights.",
    ),
    Outside(
        P,
        "Fig. 14 (error over layers)",
        "`kernelformer study depth` on MiniLM (results/performer): errors are largest after the last layer.",
    ),
    Outside(
        P,
        "Fig. 16, 17 (eight kernels)",
        "Not attempted: 16 models at a size where they would differ; a recipe has them (`performer-protein-kernels`).",
    ),
    Outside(
        P,
        "Fig. 18 (the Linear Transformer diverges)",
        f"{GPU}: it is about 36 layers; with 2 and 3 layers `elu` is stable in every run on record.",
    ),
    Outside(
        P,
        "Fig. 19 (Long Range Arena)",
        "Its tasks are the items listops, text, image, retrieval and pathfinder; the mean score over all of them is "
        "not judged, and Path-X not attempted.",
    ),
    Outside(P, "App. D.2 (ImageNet64 in bits per dimension)", f"{GPU}; {RECIPE} (`performer-imagenet64`)."),
    Outside(
        K,
        "Eq. 1 to 12, Lemma S.2, Theorem 3",
        "Tests, against definitions and simulation; misprints are in docs/papers.",
    ),
    Outside(K, "Theorem 1, 2, Lemma S.1, S.3, Fig. 2", "Nothing to measure: Turing completeness, a diagram."),
    Outside(
        K,
        "Fig. 9, 10 (RSD, PI and AGV go together)",
        "`kernelformer study redraws` has the correlations; the six kernels of the item variance have all three.",
    ),
    Outside(
        K, "Table 1 (complexities)", "`kernelformer bench`: time over length; formulas in docs/reference/methods.md."
    ),
    Outside(
        K, "Table 2, Table 5 at full size", f"{GPU}; {RECIPE} (`kl-listops`, `kl-text`, `kl-retrieval`, `kl-image`)."
    ),
    Outside(
        K,
        "Fig. 1, 3, 8 (accuracy, memory, speed)",
        "Not attempted at full size; comparisons on record show all three at the size of a CPU.",
    ),
    Outside(K, "Fig. 4, 7 (memory)", "`kernelformer bench` and `kernelformer study encoder`."),
    Outside(
        K,
        "Table 3 after pre-training on WikiText-103",
        f"{GPU}; {RECIPE} (`kl-wikitext`, `kl-glue-*`); in small the items snli and sentences.",
    ),
    Outside(K, "Table 6, 7, 8", "Settings: the recipes have them, number for number, with departures in their notes."),
    Outside(K, "Sec. 4.3 (which model to use)", "Advice, not a measurement; README has ours."),
    Outside(S, "Lemma 1, 3, Eq. 1 to 6, the iteration", "Tests; Lemma 3's open interval is a misprint."),
    Outside(
        S,
        "Fig. 1, Theorem 2, App. F",
        "`kernelformer study approximation`; on pretrained weights the condition numbers come out the other way round.",
    ),
    Outside(
        S,
        "Table 1: BigBird, Reformer, Informer",
        "Trained in the item listops, through transformers' own modules; time and memory in results/speed/sparse.",
    ),
    Outside(
        S, "Table 1: Linformer", "In the recipes `sky-*`; not trained here: it mixes positions of one fixed length."
    ),
    Outside(
        S,
        "Table 2 (time and memory of training)",
        "`kernelformer study encoder` with all of its methods (results/speed/sparse): times and peaks of a CPU.",
    ),
    Outside(S, "Fig. 2 (accuracy over time)", "The comparisons on record; seeds and rates in the item stability."),
    Outside(N, "Eq. 1 to 13, Lemma 2, Theorem 3, Algorithm 1", "Tests, against the direct sum in float64."),
    Outside(N, "Proposition 1", "Nothing to measure."),
    Outside(
        N,
        "Fig. 1a, 1b",
        "`kernelformer study positions`: errors over norms, and time; at 1024 to 16384 tokens of a CPU the FFT is not "
        "the fastest.",
    ),
    Outside(N, "Table 1 (GLUE after pre-training on 160 GB)", f"{GPU}; {RECIPE} (`rpe-pretrain`, `rpe-glue-*`)."),
    Outside(
        N,
        "Table 1: Linformer, Nystromformer, SMYRF, FCA",
        "Not attempted: the paper quotes their figures from elsewhere.",
    ),
    Outside(N, "Table 2 at full size (WikiText-103)", f"{GPU}; {RECIPE} (`rpe-wikitext`)."),
    Outside(N, "Table 2: random feature attention with a gate", "`rfa-gate` is a method; not trained here."),
    Outside(N, "Table 3 at full size (IWSLT14)", f"{GPU}; {RECIPE} (`rpe-translation`)."),
    Outside(N, "Table 4 at full size, fine-tuned row", f"{GPU}; {RECIPE} (`rpe-imagenet`, `rpe-imagenet-finetune`)."),
    Outside(N, "Table 5, App. A", "Settings: in the recipes."),
    Outside(N, "Table 6 (ImageNet32)", f"{GPU}; {RECIPE} (`rpe-imagenet32`)."),
)
