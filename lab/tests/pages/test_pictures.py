"""Pictures of README.md and docs/: made by a command, and those of records have their numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from pages import speed
from pages.pictures import (
    LENGTH,
    LENGTHS,
    PICTURES,
    SINKS,
    WINDOW,
    kept_bytes,
    near_parts,
    overview,
    overview_numbers,
    overview_words,
    write_pictures,
)
from pages.records import Records

ROOT = Path(__file__).parents[3]
IMAGES, RESULTS = ROOT / "docs" / "images", ROOT / "results"
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"


def described(path: Path) -> str:
    return next(ElementTree.parse(path).getroot().iter(DESCRIPTION)).text


def test_the_numbers_of_the_picture_on_file_are_those_of_the_records():
    words = overview_words(*overview_numbers(Records(RESULTS)))
    assert described(IMAGES / "overview.svg") == words, "draw it by `make pictures`"
    assert "favor+" in words
    assert "SmolLM2" in words


def test_every_picture_is_on_file_is_shown_on_a_page_and_is_small():
    assert {x.stem for x in IMAGES.iterdir()} == PICTURES.keys()
    pages = "".join(x.read_text() for x in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    for name in PICTURES:
        assert re.search(rf"!\[[^\]]{{10,}}\]\(\S*images/{name}\.svg\)", pages), name
        assert (IMAGES / f"{name}.svg").stat().st_size < 120_000


def test_the_letters_of_the_overview_can_be_read_at_the_width_of_a_phone(tmp_path):
    overview(Records(tmp_path), tmp_path / "overview.svg")
    width = float(ElementTree.parse(tmp_path / "overview.svg").getroot().attrib["viewBox"].split()[2])
    assert 12.5 * 328 / width > 10  # pixels of a letter, on a screen of 360 with margins of 16


def test_all_of_them_are_drawn_twice_alike_and_with_a_description(tmp_path):
    folder = tmp_path / "results"
    (folder / speed.ATTENTION).parent.mkdir(parents=True)
    case = {"task": "bidirectional", "length": 1024, "backward": True}
    rows = [{"name": x, "case": case, "seconds": {"default": 2.5}, "note": ""} for x in ("favor+", "sdpa")]
    (folder / speed.ATTENTION).write_text(json.dumps({"rows": rows}))
    paths = [tmp_path / "docs" / "images" / f"{name}.svg" for name in PICTURES]
    assert write_pictures(folder) == paths
    assert all(described(path) for path in paths)
    assert "favor+: 1024: 2.5 s" in described(paths[0])
    first = [path.read_text() for path in paths]
    assert write_pictures(folder) == paths
    assert [path.read_text() for path in paths] == first


def test_pictures_go_beside_a_folder_that_is_there(tmp_path):
    with pytest.raises(ValueError, match="is not a folder; name the one with the records"):
        write_pictures(tmp_path / "absent")


@pytest.mark.parametrize("causal", [True, False])
def test_near_and_far_are_drawn_by_their_definition(causal):
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    visible = (j <= i) if causal else torch.ones(LENGTH, LENGTH, dtype=torch.bool)
    near = visible & (((i - j).abs() < WINDOW) | (j < SINKS))
    assert torch.equal(near_parts(causal), visible.int() + near.int())


def test_a_stream_of_features_keeps_the_same_and_one_of_keys_more():
    sizes = kept_bytes()
    assert len(set(sizes["favor+"])) == 1
    assert [x // sizes["softmax"][0] for x in sizes["softmax"]] == [n // LENGTHS[0] for n in LENGTHS]
