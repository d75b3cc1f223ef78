"""Token shards as they are read: windows over borders, documents, damaged files, more tokens than memory."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from kernelformer_lab.data.shards import (
    INDEX,
    Shard,
    ShardIndex,
    ShardSplit,
    ShardWindows,
    ShardWriter,
    TokenShards,
    dtype_for,
    read_index,
    verify,
)
from kernelformer_lab.data.sources import SPLITS
from kernelformer_lab.memory import peak, reset_peak

BYTES = {"name": "bytes", "file": None, "sha256": "", "end": None}


def write(folder, counts, *, whole=50, dtype="uint16", seed=0):
    """A folder whose training documents have so many random tokens; gives the index and the tokens."""
    rng = np.random.default_rng(seed)
    size = 250 if dtype == "uint8" else 1000
    tokens = rng.integers(0, size, sum(counts))
    writers = {x: ShardWriter(folder, x, np.dtype(dtype).newbyteorder("<"), whole, lambda _: None) for x in SPLITS}
    for part in np.split(tokens, np.cumsum(counts)[:-1]):
        half = len(part) // 2
        writers["train"].add(part[:half], 0, ends=False)
        writers["train"].add(part[half:], len(part), ends=True)
    splits = {name: ShardSplit(x.close(), x.text_bytes) for name, x in writers.items()}
    index = ShardIndex(dtype, size, BYTES, whole, splits, {})
    index.write(folder)
    return index, tokens


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_any_part_reads_what_was_written_also_over_borders(tmp_path, dtype):
    index, tokens = write(tmp_path, [30, 70, 1, 120, 6], dtype=dtype)
    assert read_index(tmp_path) == index
    assert [x.tokens for x in index.splits["train"].shards] == [50, 50, 50, 50, 27]
    data = TokenShards(tmp_path, index, "train")
    for start, stop in [(0, 227), (0, 1), (49, 51), (50, 100), (99, 201), (226, 227), (100, 100)]:
        part = data.read(start, stop)
        assert part.dtype == np.dtype(dtype)
        assert part.tolist() == tokens[start:stop].tolist()
    assert data.document_ends(0, 227).tolist() == [30, 100, 101, 221]
    assert data.document_ends(30, 101).tolist() == [100]
    assert data.document_ends(100, 222).tolist() == [101, 221]
    for start, stop in [(-1, 3), (0, 228), (5, 4)]:
        with pytest.raises(IndexError, match="tokens are numbered from 0 to 226"):
            data.read(start, stop)


def test_windows_predict_every_token_once_and_a_part_is_what_it_is_in_the_whole(tmp_path):
    index, tokens = write(tmp_path, [30, 70, 1, 120, 6])
    data = TokenShards(tmp_path, index, "train")
    for length in (2, 7, 50, 227):
        windows = ShardWindows(data, length)
        assert len(windows) == 226 // (length - 1)
        rows = torch.stack([x["input_ids"] for x in windows.__getitems__(range(len(windows)))])
        assert rows[:, 1:].flatten().tolist() == tokens[1 : 1 + len(windows) * (length - 1)].tolist()
        assert rows[:, 0].tolist() == tokens[: len(windows) * (length - 1) : length - 1].tolist()
    with pytest.raises(IndexError):
        windows[1]
    assert len(ShardWindows(data, 228)) == 0
    windows = ShardWindows(data, 60, documents=True)
    for index_ in range(len(windows)):
        whole = windows[index_]
        for start, stop in [(0, 31), (31, 60), (59, 60)]:
            part = windows.sample(index_, start, stop)
            assert {name: x.tolist() for name, x in part.items()} == {
                name: x[start:stop].tolist() for name, x in whole.items()
            }
    spread = ShardWindows(data, 7, 4)
    assert [spread.start(i) // 6 for i in range(4)] == [0, 9, 18, 27]


def test_documents_are_segments_whose_first_tokens_are_no_labels(tmp_path):
    index, _ = write(tmp_path, [30, 70, 1, 120, 6])
    row = ShardWindows(TokenShards(tmp_path, index, "train"), 120, documents=True)[0]
    numbers = np.repeat(np.arange(4), [30, 70, 1, 19])
    assert row["segment_ids"].tolist() == numbers.tolist()
    ignored = (row["labels"] == -100).nonzero().flatten().tolist()
    assert ignored == [30, 100, 101]
    kept = row["labels"] != -100
    assert torch.equal(row["labels"][kept], row["input_ids"][kept])


def test_workers_read_what_one_process_reads_in_the_same_order(tmp_path):
    index, _ = write(tmp_path, [400] * 4, whole=300)
    data = ShardWindows(TokenShards(tmp_path, index, "train"), 17)
    assert pickle.loads(pickle.dumps(data))[3]["input_ids"].equal(data[3]["input_ids"])
    runs = [
        [x["input_ids"] for x in DataLoader(data, batch_size=6, sampler=data.sampler(30, 1), num_workers=n)]
        for n in (0, 2)
    ]
    assert len(runs[0]) == 5
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize(("ranks", "share"), [(1, 12), (2, 6), (4, 3), (3, 2)])
def test_ranks_share_the_global_order_and_any_number_goes_on_from_a_step(ranks, share):
    """As accelerate divides batches of a sampler among processes: step t has places 12 t to 12 t + 11 of the order."""
    from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
    from torch.utils.data import BatchSampler

    from kernelformer_lab.data.shards import PermutedOrder, order_at

    size, steps, rounds = 100, 20, 12 // (ranks * share)
    seen = []
    for rank in range(ranks):
        batches = BatchSampler(PermutedOrder(size, 12 * steps, 5), share, drop_last=False)
        seen.append(list(SkipBatchSampler(BatchSamplerShard(batches, ranks, rank), 7 * rounds)))
    for step in range(7, steps):
        mine = [x for r in range(rounds) for rank in seen for x in rank[(step - 7) * rounds + r]]
        assert mine == order_at(np.arange(12 * step, 12 * step + 12), size, 5).tolist()


def test_a_corpus_larger_than_memory_takes_no_more_memory(tmp_path):
    """64 GiB of tokens in sparse files, with marks at some places; the pages that are read are let go of."""
    count, each = 8, 1 << 32  # of 2 bytes
    shards = [Shard(f"train-{i:05d}.bin", each, "") for i in range(count)]
    for shard in shards:
        with open(tmp_path / shard.file, "wb") as file:
            file.truncate(2 * each)
    if sum((tmp_path / x.file).stat().st_blocks * 512 for x in shards) > 1 << 20:
        pytest.skip("this file system has no sparse files")
    splits = {"train": ShardSplit(tuple(shards), 1), "validation": ShardSplit(), "test": ShardSplit()}
    ShardIndex("uint16", 1 << 16, BYTES, each, splits, {}).write(tmp_path)
    index = read_index(tmp_path)
    data = ShardWindows(TokenShards(tmp_path, index, "train"), 4097)
    assert len(data) == (count * each - 1) // 4096
    border = 3 * each // 4096  # its last token is the first of a shard
    marks = {data.start(border) - 4096 + 4095: 7, data.start(border): 9, data.start(border) + 5: 11}
    for place, value in marks.items():
        with open(tmp_path / shards[place // each].file, "r+b") as file:
            file.seek(place % each * 2)
            file.write(np.array([value], "<u2").tobytes())
    before = data[border - 1]["input_ids"]
    assert before[-2:].tolist() == [7, 9]
    assert data[border]["input_ids"][[0, 5]].tolist() == [9, 11]
    start, total = reset_peak(), 0
    for index_ in iter(data.sampler(4000, 0)):  # 32 MiB of tokens
        total += int(data[index_]["input_ids"].sum())
    assert total == 0
    assert peak() - start < 8 << 20


# Damage


def broken(folder, **changes):
    record = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({**record, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "its format is 2, this version reads 1"),
        ({"dtype": "int64"}, "unknown dtype 'int64'; .*choose from uint16, uint32, uint8"),
        ({"dtype": "uint8"}, "vocabulary_size=1000 does not fit into its dtype uint8"),
        ({"shard_tokens": 49}, "train-00000.bin has 50 tokens, a shard has shard_tokens=49"),
        ({"splits": {}}, "it has no 'train'"),
        ({"splits": []}, "cannot be used"),
    ],
)
def test_an_index_that_contradicts_itself_is_refused(tmp_path, changes, message):
    write(tmp_path, [120])
    broken(tmp_path, **changes)
    with pytest.raises(ValueError, match=f"index.json cannot be used: .*{message}|{message}"):
        read_index(tmp_path)


def test_an_index_that_is_missing_or_leads_elsewhere_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"there is no such file; data must be a folder that `kernelformer prepare`"):
        read_index(tmp_path)
    index, _ = write(tmp_path, [20])
    shard = replace(index.splits["train"].shards[0], file="../train-00000.bin")
    replace(index, splits={**index.splits, "train": ShardSplit((shard,), 1)}).write(tmp_path)
    with pytest.raises(ValueError, match=r"'../train-00000.bin' is not the name of a file"):
        read_index(tmp_path)


def test_a_missing_cut_or_changed_shard_is_named_with_the_way_out(tmp_path):
    index, _ = write(tmp_path, [30, 90])
    verify(tmp_path, index)
    path = tmp_path / "train-00001.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    TokenShards(tmp_path, index, "train")  # sizes alone do not tell
    with pytest.raises(ValueError, match=r"train-00001.bin cannot be used: its sha256 is .*; bring the file back, or"):
        verify(tmp_path, index)
    path.write_bytes(content[:-2])
    with pytest.raises(ValueError, match=r"it has 98 bytes, the index says 50 integers of type uint16, 100 bytes"):
        TokenShards(tmp_path, index, "train")
    with pytest.raises(ValueError, match="it has 100 bytes, the index says 50 integers of type uint32, 200 bytes"):
        TokenShards(tmp_path, replace(index, dtype="uint32"), "train")
    path.write_bytes(content)
    data = TokenShards(tmp_path, index, "train")
    os.truncate(path, 60)  # while it is in use
    with pytest.raises(ValueError, match=r"train-00001.bin cannot be used: mmap length is greater"):
        data.read(60, 100)
    path.unlink()
    for use in (lambda: TokenShards(tmp_path, index, "train"), lambda: verify(tmp_path, index)):
        with pytest.raises(ValueError, match=r"train-00001.bin cannot be used: it is missing; bring the file back"):
            use()


def test_integers_are_the_smallest_that_hold_the_vocabulary():
    assert [dtype_for(x) for x in (1, 256, 257, 65536, 65537)] == ["uint8", "uint8", "uint16", "uint16", "uint32"]


def test_a_document_without_tokens_is_none(tmp_path):
    index, _ = write(tmp_path, [0, 5, 0, 0, 45, 0, 3])
    assert index.splits["train"].documents == 3
    assert TokenShards(tmp_path, index, "train").document_ends(0, 53).tolist() == [5, 50]
