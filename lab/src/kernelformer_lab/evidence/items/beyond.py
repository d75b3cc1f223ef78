"""Questions that the papers do not measure: recall at a distance, for all methods and near/far attention."""

from __future__ import annotations

from kernelformer_lab.evidence.base import Claim, Item, Training
from kernelformer_lab.evidence.rules import LearnedBy

ROTARY = ":rotary=True"
EXACT = "by an exact test since the runs, of which each has learned the task or not, are on record"
NEAR_FAR = f"favor+:num_features=64:window=8{ROTARY}"
LOCAL = f"local:window=8:sinks=0{ROTARY}"
FAR = "result.scores.accuracy_to_30"  # of distances from 17 on
RECALL = Item(
    "recall",
    "this library",
    "Sec. 9 of the methods; the task of Zoology (2312.04927)",
    "Which value stood beside a key, up to 30 tokens before: exact, linear, near/far and landmark attention",
    "a question of our own: rows of 32 tokens, 4 pairs, 2 layers of 64, 600 steps of 64, 64 features, rate "
    "of the recipe",
    (
        Training(
            "main",
            "recall",
            (
                f"softmax{ROTARY}",
                f"favor+:num_features=64{ROTARY}",
                f"elu{ROTARY}",
                NEAR_FAR,
                LOCAL,
                f"loglinear:num_features=64:window=8{ROTARY}",
                f"gmm-prf:num_features=32{ROTARY}",
            ),
            {"steps": 600, "eval_every": 100, "save_every": 200},
            seeds=6,
        ),
    ),
    (
        Claim(
            "A kernel on what is far recalls what a window alone cannot",
            "not in the papers",
            LearnedBy(NEAR_FAR, LOCAL, path=FAR, name="accuracy at distances of 17 to 30", scale=100, level=0.5),
            EXACT,
            ours=True,
        ),
        Claim(
            "Fewer runs of FAVOR+ than of softmax learn to recall",
            "not in the papers; Zoology finds that linear attention falls behind",
            LearnedBy(
                f"favor+:num_features=64{ROTARY}", f"softmax{ROTARY}", name="accuracy", scale=100, level=0.9, below=True
            ),
            f"was said of linear attention as a whole, and the other way round; {EXACT}",
            ours=True,
        ),
        Claim(
            "Fewer runs of the Linear Transformer than of softmax learn to recall",
            "not in the papers; Zoology finds that linear attention falls behind",
            LearnedBy(f"elu{ROTARY}", f"softmax{ROTARY}", name="accuracy", scale=100, level=0.9, below=True),
            f"added when the runs were on record; {EXACT}",
            ours=True,
        ),
    ),
    0.7,
    unit="accuracy",
    history="six seeds, three of them added when the first three had left both claims open",
)
