"""Questions that the papers do not measure: recall at a distance, for all methods and near/far attention."""

from __future__ import annotations

from kernelformer_lab.evidence.base import Claim, Item, Training
from kernelformer_lab.evidence.rules import Above, AtLeast

ROTARY = ":rotary=True"
NEAR_FAR = f"favor+:num_features=64:window=8{ROTARY}"
LOCAL = f"local:window=8:sinks=0{ROTARY}"
FAR = "result.scores.accuracy_to_30"  # of distances from 17 on
RECALL = Item(
    "recall",
    "this library",
    "Sec. 9 of the methods; the task of Zoology (2312.04927)",
    "Which value stood beside a key, up to 30 tokens before: exact, linear, near/far and landmark attention",
    "rows of 32 tokens, 4 pairs, 2 layers of 64, 600 steps of 64; six seeds, since runs either learn it or do not, "
    "three of them added when the first three had left both claims open",
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
            Above(NEAR_FAR, LOCAL, path=FAR, name="accuracy at distances of 17 to 30", scale=100),
        ),
        Claim(
            "FAVOR+ recalls as softmax does",
            "not in the papers; Zoology finds that linear attention does not",
            AtLeast(f"favor+:num_features=64{ROTARY}", f"softmax{ROTARY}", name="accuracy", scale=100, margin=0.1),
            "was said of linear attention as a whole, before runs showed that not all of it is alike",
        ),
        Claim(
            "The Linear Transformer recalls as softmax does",
            "not in the papers; Zoology finds that linear attention does not",
            AtLeast(f"elu{ROTARY}", f"softmax{ROTARY}", name="accuracy", scale=100, margin=0.1),
            "added when the runs were on record",
        ),
    ),
    0.7,
    unit="accuracy",
)
