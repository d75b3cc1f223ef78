"""Exact softmax on near keys and sinks where every key is visible: self-attention without a mask and a bias.

Every row sees a key of its window, so that nothing has to be hidden before the first key and after the last: such
places hold the first and the last key again, whose scores are in the row anyway, and values of zero, with 0 in the
place of the 1 that counts. Sinks have columns of their own for all rows, and values of zero in the windows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernelformer.attention.near import near_blocks
from kernelformer.attention.near_far_call import NearFarCall
from kernelformer.attention.parallel.layout import in_chunks
from kernelformer.attention.parallel.near import near_block
from kernelformer.attention.parallel.tiles import by_distance
from kernelformer.contract import compute_dtype


class PlainRows:
    """All queries of a call with their near keys and the sinks; the interface is that of `near.NearRows`.

    Args:
        call: queries and keys are the same tokens, all visible, without a bias, and the window is not empty.
        value: (N, L, E + 1), with ones.
        leading: number of sinks, the first keys.
    """

    sees_keys = True

    def __init__(self, call: NearFarCall, value: Tensor, leading: int) -> None:
        self.call, self.leading, self.size = call, leading, near_block(call.window)
        self.left, self.right = near_blocks(call.window, self.size, call.is_causal)
        batch, heads, self.length, width = call.query.shape
        groups, dtype = call.key.shape[1], compute_dtype(call.query.dtype)
        rows = call.query.to(dtype).reshape(batch * groups, heads // groups, self.length, width)
        queries = in_chunks(rows.transpose(1, 2) * call.scale, self.size)  # (N, n, C, R, D)
        self.chunks, self.repeats = queries.shape[1], queries.shape[3]
        key = call.key.to(dtype).flatten(0, 1)
        self.value = self._values(value)
        self.scores = (queries.flatten(2, 3) @ self._keys(key)).unflatten(2, (self.size, self.repeats))
        self._hide()
        self.log = self.scores.detach().amax(-1).flatten(1, 2)[:, : self.length]  # (N, L, R)

    def sums(self, log: Tensor) -> Tensor:
        """What the rows sum up relative to ``log`` (N, L, R), which is no smaller than their own: (N, L, R, E + 1)."""
        weights = (self.scores - in_chunks(log, self.size).unsqueeze(-1)).exp_()
        sums: Tensor = weights.flatten(2, 3) @ self.value
        return sums.view(len(sums), self.chunks * self.size, self.repeats, -1)[:, : self.length]

    @property
    def _width(self) -> int:
        return (self.left + 1 + self.right) * self.size

    def _ends(self) -> tuple[int, int]:
        """Places before the first key and after the last one."""
        return self.left * self.size, (self.chunks + self.right) * self.size - self.length

    def _keys(self, key: Tensor) -> Tensor:
        """(N, n, D, K + s)."""
        before, after = self._ends()
        ends = [x.expand(-1, count, -1) for x, count in ((key[:, :1], before), (key[:, -1:], after))]
        windows = torch.cat([ends[0], key, ends[1]], 1).unfold(1, self._width, self.size)
        return self._with_sinks(windows, key[:, : self.leading])

    def _values(self, value: Tensor) -> Tensor:
        """(N, n, K + s, E + 1)."""
        before, after = self._ends()
        before += self.leading
        zeros = value.new_zeros(len(value), max(before, after), value.shape[2])
        whole = torch.cat([zeros[:, :before], value[:, self.leading :], zeros[:, :after]], 1)
        return self._with_sinks(whole.unfold(1, self._width, self.size), value[:, : self.leading]).mT

    def _with_sinks(self, windows: Tensor, sinks: Tensor) -> Tensor:
        if not self.leading:
            return windows
        return torch.cat([windows, sinks.mT.unsqueeze(1).expand(-1, self.chunks, -1, -1)], 3)

    def _hide(self) -> None:
        """Hide what is not in the window, and sinks from earlier rows, in place."""
        call, width = self.call, self._width
        own, reach = self.left * self.size, 0 if call.is_causal else call.window - 1
        far = self.scores.new_full((1, self.size + width), -torch.inf)
        middle = own + self.size  # the entry of distance 0
        far[:, middle - call.window + 1 : middle + reach + 1].fill_(0)
        self.scores[..., :width].add_(by_distance(far, self.size, width).unsqueeze(2))
        if self.leading and call.is_causal:
            count = self.leading
            later = self.scores.new_full((count, count), -torch.inf).triu_(1).unsqueeze(1)
            rows = self.scores.flatten(1, 2)[:, :count]
            rows[..., width:].add_(later[: rows.shape[1]])
