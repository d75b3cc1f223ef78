"""Passages of a text that come again farther on."""

from __future__ import annotations

import pytest
import torch

from kernelformer.conversion.texts import LONGEST, SHORTEST, Repeats, TextRows

NUMBERS = [[900, 901, 902], [903, 904]]


class Words:
    """A tokenizer of numbers as words."""

    eos_token_id = None
    pad_token_id = 0

    def __call__(self, texts, **options):
        return {"input_ids": [[int(x) for x in text.split()] for text in texts]}


@pytest.mark.parametrize("length", [200, 512, 1031])
@pytest.mark.parametrize("numbers", [(), NUMBERS])
def test_passages_come_again_beyond_the_gap_and_the_rest_stays(length, numbers):
    counts = []
    for seed in range(30):
        row = torch.arange(length) + 1000
        ids, copies = Repeats(1.0, 64, numbers).row(row, seed)
        assert ids.shape == row.shape
        assert torch.equal(row, torch.arange(length) + 1000)  # the row that was given stays as it was
        touched = torch.zeros(length, dtype=torch.bool)
        for copy in copies:
            assert SHORTEST <= copy.length <= LONGEST
            assert copy.second - (copy.first + copy.length) >= 64
            first, second = (slice(x, x + copy.length) for x in copy.places)
            assert torch.equal(ids[first], ids[second])
            assert not (touched[first] | touched[second]).any()  # passages and copies do not overlap
            touched[first] = touched[second] = True
        assert torch.equal(ids[~touched], row[~touched])
        counts.append(len(copies))
        inside = {int(x) for x in ids[touched] if x < 1000}
        assert inside <= {x for number in numbers for x in number}
    assert max(counts) == max(1, length // 128)
    assert sum(counts) > 0.7 * len(counts) * max(counts)


def test_numbers_stand_in_about_half_of_the_passages_and_in_both_copies():
    found = total = 0
    for seed in range(200):
        ids, copies = Repeats(1.0, 64, NUMBERS).row(torch.arange(512) + 1000, seed)
        total += len(copies)
        for copy in copies:
            passage = ids[copy.first : copy.first + copy.length].tolist()
            whole = [n for n in NUMBERS if any(passage[i : i + len(n)] == n for i in range(len(passage)))]
            assert len(whole) == any(x < 1000 for x in passage)
            found += len(whole)
    assert abs(found - total / 2) < 5 * (total / 4) ** 0.5


def test_a_row_without_room_stays_as_it_is():
    row = torch.arange(64 + 2 * SHORTEST - 1)
    for seed in range(20):
        ids, copies = Repeats(1.0, 64).row(row, seed)
        assert torch.equal(ids, row)
        assert not copies
    assert all(Repeats(1.0, 64).row(torch.arange(64 + 2 * SHORTEST), seed)[1] for seed in range(20))


@pytest.mark.parametrize(("options", "message"), [((1.0, 0), "gap must be"), ((1.5, 4), "0 to 1, got 1.5")])
def test_what_cannot_be_is_said(options, message):
    with pytest.raises(ValueError, match=message):
        Repeats(*options)


@pytest.mark.parametrize("share", [0.0, 0.3])
def test_a_share_of_the_rows_gets_passages(share):
    repeats = Repeats(share, 16)
    count = sum(bool(repeats.row(torch.arange(256), seed)[1]) for seed in range(400))
    assert abs(count - 400 * share) <= 5 * (400 * share * (1 - share)) ** 0.5


def test_batches_with_repeats_go_on_after_a_stop_with_the_same_rows():
    rows = TextRows([" ".join(str(i) for i in range(1000))], Words(), 200, "causal")
    whole, later = rows.batches(2, 3, repeats=Repeats(0.5, 32)), rows.batches(2, 3, skip=4, repeats=Repeats(0.5, 32))
    first = [next(whole)["input_ids"] for _ in range(8)]
    assert all(torch.equal(x, next(later)["input_ids"]) for x in first[4:])
    plain = rows.batches(2, 3)
    changed = [bool((x != next(plain)["input_ids"]).any(1)[i]) for x in first for i in range(2)]
    assert 0 < sum(changed) < 16
