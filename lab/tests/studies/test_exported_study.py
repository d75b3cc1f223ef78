"""The study of exported encoders: its rows, its table, and how it goes on."""

from __future__ import annotations

import pytest

from kernelformer_lab.studies import STUDIES, exported
from kernelformer_lab.studies.exported import Result, Row, read_rows, record, tables, ways
from kernelformer_lab.studies.settings import ExportedSettings

SETTINGS = ExportedSettings(attention=("elu",), lengths=(16, 24), rounds=1, budget=0.01)


def test_the_original_is_read_by_both_runtimes_and_by_the_own_attention_of_one():
    assert ways(SETTINGS) == [
        "sdpa in torch",
        "sdpa in onnxruntime",
        "MultiHeadAttention in onnxruntime",
        "elu in torch",
        "elu in onnxruntime",
    ]


def test_a_record_is_read_again_and_never_taken_for_that_of_another_machine(tmp_path):
    rows = [
        Row(16, "sdpa in torch", 2.0, 3),
        Row(16, "sdpa in onnxruntime", note="needs about 24 GiB"),
        Row(16, "elu in onnxruntime", 0.5, 3, 1e-7),
    ]
    result = Result({"model": "a model"}, rows=rows)
    exported.write_record(tmp_path, "exported", SETTINGS, record(result))
    assert read_rows(tmp_path, {"model": "a model"}) == rows
    with pytest.raises(ValueError, match="another model or machine"):
        read_rows(tmp_path, {"model": "another"})
    (table,) = tables(result)
    assert [list(column.cells) for column in table.columns][1] == ["2 s", "not run", "500 ms (4.00x)"]
    assert "needs about 24 GiB" in str(table.caption)


@pytest.mark.slow
def test_every_way_reads_the_same_vectors_and_a_second_call_measures_nothing(tmp_path, monkeypatch):
    study = STUDIES["exported"]
    result = study.run(SETTINGS, tmp_path)
    assert [row.note for row in result.rows] == [""] * 10
    assert all(row.seconds is not None and row.seconds > 0 for row in result.rows)
    assert all(row.difference <= 1e-4 for row in result.rows if "onnxruntime" in row.way)
    monkeypatch.setattr(exported, "_job", lambda *_, **__: pytest.fail("measured again"))
    assert study.run(SETTINGS, tmp_path).rows == result.rows
