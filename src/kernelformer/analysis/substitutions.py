"""Similarity of amino acids: BLOSUM62, and what attention makes of them (Performer, C.4; Vig et al., 2006.15222)."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from kernelformer.errors import shape

AMINO_ACIDS = "ARNDCQEGHILKMFPSTWYV"
_SCORES = """
 4
-1  5
-2  0  6
-2 -2  1  6
 0 -3 -3 -3  9
-1  1  0  0 -3  5
-1  0  0  2 -4  2  5
 0 -2  0 -1 -3 -2 -2  6
-2  0  1 -1 -3  0  0 -2  8
-1 -3 -3 -3 -1 -3 -3 -4 -3  4
-1 -2 -3 -4 -1 -2 -3 -4 -3  2  4
-1  2  0 -1 -3  1  1 -2 -1 -3 -2  5
-1 -1 -2 -3 -1  0 -2 -3 -2  1  2 -1  5
-2 -3 -3 -3 -2 -3 -3 -3 -1  0  0 -3  0  6
-1 -2 -2 -1 -3 -1 -1 -2 -2 -3 -3 -1 -2 -4  7
 1 -1  1  0 -1  0  0  0 -1 -2 -2  0 -1 -2 -1  4
 0 -1  0 -1 -1 -1 -1 -2 -2 -1 -1 -1 -1 -2 -1  1  5
-3 -3 -4 -4 -2 -2 -3 -2 -2 -3 -2 -3 -1  1 -4 -3 -2 11
-2 -2 -2 -3 -2 -1 -2 -3  2 -1 -1 -2 -1  3 -3 -2 -2  2  7
 0 -3 -3 -3 -1 -2 -2 -3 -3  3  1 -2  1 -1 -2 -2  0 -3 -1  4
"""


def blosum62() -> Tensor:
    """Scores of BLOSUM62 (Henikoff and Henikoff, 1992), (20, 20) in float64, in the order of `AMINO_ACIDS`."""
    matrix = torch.zeros(20, 20, dtype=torch.float64)
    for row, line in enumerate(_SCORES.split("\n")[1:-1]):
        matrix[row, : row + 1] = torch.tensor([float(x) for x in line.split()], dtype=torch.float64)
    return matrix + matrix.tril(-1).T


def attention_similarity(received: Tensor) -> Tensor:
    """Similarity of amino acids by the attention that they receive: Pearson correlation over all heads.

        p_ha = received_ha / sum_b received_hb        s_ab = corr_h(p_ha, p_hb)

    Args:
        received: (*, H, A), attention of each head to each amino acid, summed over queries, keys and sequences.

    Returns:
        (*, A, A), from -1 to 1.
    """
    if received.dim() < 2 or received.shape[-2] < 2:
        raise ValueError(f"received must be (heads, amino acids) of at least two heads, got {shape(received)}.")
    share = received.double() / received.double().sum(-1, keepdim=True)
    centred = share - share.mean(-2, keepdim=True)
    unit = centred / centred.norm(dim=-2, keepdim=True).clamp_min(1e-300)
    similarity: Tensor = unit.mT @ unit
    return similarity


def pairs_of(matrix: Tensor) -> Tensor:
    """The entries above the diagonal of symmetric matrices, (*, A, A) -> (*, A (A - 1) / 2)."""
    row, column = torch.triu_indices(matrix.shape[-1], matrix.shape[-1], 1)
    return matrix[..., row, column]


def pearson(x: Tensor, y: Tensor) -> Tensor:
    """Pearson's correlation over the last dimension, (*, N) and (*, N) -> (*)."""
    x, y = (z.double() - z.double().mean(-1, keepdim=True) for z in (x, y))
    correlation: Tensor = (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1)).clamp_min(1e-300)
    return correlation


def ranks(x: Tensor) -> Tensor:
    """Ranks over the last dimension from 1, equal values having the mean of theirs, (*, N) in float64."""
    below = (x.unsqueeze(-1) > x.unsqueeze(-2)).double().sum(-1)
    same = (x.unsqueeze(-1) == x.unsqueeze(-2)).double().sum(-1)
    return below + 0.5 * (same + 1)


def spearman(x: Tensor, y: Tensor) -> Tensor:
    """Spearman's correlation over the last dimension, (*, N) and (*, N) -> (*)."""
    return pearson(ranks(x), ranks(y))


def renamed_correlations(similarity: Tensor, scores: Tensor, count: int, gen: Generator) -> Tensor:
    """Pearson's correlation of the pairs of two matrices after random renamings of one's amino acids, (count).

    Pairs that share an amino acid are not independent, so that chance is told by such renamings (Mantel's test) and not
    by the number of pairs.
    """
    wanted = pairs_of(scores)
    values = []
    for _ in range(count):
        order = torch.randperm(similarity.shape[-1], generator=gen)
        values.append(pearson(pairs_of(similarity[order][:, order]), wanted))
    return torch.stack(values)
