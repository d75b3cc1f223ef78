"""Numbers of the distance between query and key as a tile, for all chunks alike."""

from __future__ import annotations

from torch import Tensor


def by_distance(entries: Tensor, rows: int, columns: int) -> Tensor:
    """A tile whose entry at row i and column j is ``entries[:, j - i + rows]``.

    Copies of the entries, one after the other, are read in rows that are one number shorter than they: each begins one
    entry earlier than the last.

    Args:
        entries: (H, rows + columns); the first one is not used.
        rows: of the tile.
        columns: of the tile.

    Returns:
        (H, rows, columns), a view of the copies.
    """
    heads, count = entries.shape
    copies = entries.unsqueeze(1).expand(-1, rows + 1, -1).flatten(1)
    return copies[:, rows : rows + rows * (count - 1)].view(heads, rows, count - 1)[:, :, :columns]
