"""BLEU of a corpus from what each of its sentences adds, so that some of them alone can be scored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sacrebleu.metrics.bleu import BLEU

ORDER = 4  # of the longest n-grams


class SentenceCounts:
    """N-grams of translations that their references have too, sentence by sentence.

        BLEU = 100 min(1, e^(1 - r/c)) (prod_n p_n)^(1/4),   p_n = sum_i matches_in / sum_i total_in,   n = 1, ..., 4

    with c and r the tokens of all translations and of all references (Papineni et al. 2002), as sacrebleu has it.

    Args:
        written: (N) translations.
        wanted: (N) references.
        lowercase: capital letters are not seen.
    """

    def __init__(self, written: Sequence[str], wanted: Sequence[str], *, lowercase: bool = False) -> None:
        metric = BLEU(lowercase=lowercase, effective_order=True)  # counts are the same; without it sacrebleu warns
        each = [metric.sentence_score(text, [right]) for text, right in zip(written, wanted, strict=True)]
        rows = [[*x.counts, *x.totals, x.sys_len, x.ref_len] for x in each]
        self.rows = np.array(rows, dtype=np.int64).reshape(len(each), 2 * ORDER + 2)
        self.smoothing = metric.smooth_method

    def __len__(self) -> int:
        return len(self.rows)

    def bleu(self, chosen: NDArray[Any] | slice = slice(None)) -> float:
        """BLEU of some sentences, from 0 to 100."""
        *sums, length, wanted = self.rows[chosen].sum(0).tolist()
        made = BLEU.compute_bleu(sums[:ORDER], sums[ORDER:], length, wanted, smooth_method=self.smoothing)
        return float(made.score)
