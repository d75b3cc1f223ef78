"""Padded and packed rows of the same sequences, timed."""

from __future__ import annotations

from kernelformer_lab.studies import STUDIES, packing
from kernelformer_lab.studies.settings import PackingSettings


def test_both_ways_have_the_same_tokens_and_are_timed_and_shown(tmp_path):
    settings = PackingSettings(
        attention=("softmax", "elu"), length=48, median=12, batch=3, width=16, layers=1, heads=2, rounds=1
    )
    both = packing.batches(settings)
    tokens = {name: sum(int(x["attention_mask"].sum()) for x in parts) for name, parts in both.items()}
    assert tokens["padded"] == tokens["packed"] == sum(packing.lengths(settings))
    assert len(both["packed"]) < len(both["padded"])
    result = STUDIES["packing"].run(settings, tmp_path)
    assert [x.attention for x in result] == ["softmax", "elu"]
    assert all(x.padded > 0 and x.packed > 0 for x in result)
    (table,) = packing.tables(result)
    assert table.row_count == 2
    assert packing.record(result)["rates"][0]["attention"] == "softmax"
    packing.picture(result, tmp_path / "packing.png")
    assert (tmp_path / "packing.png").read_bytes().startswith(b"\x89PNG")
