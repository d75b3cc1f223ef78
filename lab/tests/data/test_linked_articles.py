"""Pairs of articles that link to each other or not, from a dump of Wikipedia."""

from __future__ import annotations

import json

import pytest

from kernelformer_lab.evidence.queue import read_articles, write_pairs

BODY = "words of an article &amp; more " * 30


def page(title: str, *links: str) -> str:
    text = " ".join(f"[[{x}]]" for x in links)
    return f"<page><title>{title}</title><text xml:space='preserve'>{text} {BODY}</text></page>"


@pytest.fixture
def dump(tmp_path):
    pages = [page(f"A{i}", *(f"a{(i + j) % 200}|see A{(i + j) % 200}" for j in range(1, 31))) for i in range(200)]
    others = [
        page("Talk:A1", "A2"),
        "<page><title>Old</title><text>#REDIRECT [[A1]]" + BODY + "</text></page>",
        "<page><title>Short</title><text>[[A1]]</text></page>",
    ]
    path = tmp_path / "dump"
    path.write_text("\n".join([*pages, *others]))
    return path


def test_articles_are_read_without_markup_and_with_their_links(dump):
    articles = read_articles(dump)
    assert len(articles) == 200
    text, links = articles["A0"]
    assert links[:2] == ["A1", "A2"]
    assert "[[" not in text
    assert "see A1 see A2" in text
    assert "article & more" in text


def test_labels_say_whether_the_first_links_to_the_second_and_splits_share_no_article(dump, tmp_path):
    write_pairs(dump, tmp_path / "links", length=4000)
    articles = read_articles(dump)
    by_text = {text: title for title, (text, _) in articles.items()}
    assert len(by_text) == 200  # each article can be told by its text
    seen = {}
    for name in ("train", "validation", "test"):
        rows = [json.loads(x) for x in (tmp_path / "links" / f"{name}.jsonl").read_text().splitlines()]
        assert {x["label"] for x in rows} == {0, 1}
        for row in rows:
            first, second = by_text[row["text1"]], by_text[row["text2"]]
            assert first != second
            assert (second in articles[first][1]) == bool(row["label"])
            assert row["label"] or first not in articles[second][1]
        seen[name] = {by_text[row[key]] for row in rows for key in ("text1", "text2")}
    assert not seen["train"] & seen["test"]
    assert not seen["train"] & seen["validation"]
    assert not seen["validation"] & seen["test"]


def test_the_same_seed_gives_the_same_pairs(dump, tmp_path):
    write_pairs(dump, tmp_path / "a", seed=3)
    write_pairs(dump, tmp_path / "b", seed=3)
    write_pairs(dump, tmp_path / "c", seed=4)
    texts = [(tmp_path / x / "train.jsonl").read_text() for x in "abc"]
    assert texts[0] == texts[1] != texts[2]


def test_a_file_that_is_no_dump_is_named(tmp_path):
    (tmp_path / "plain.txt").write_text("no page at all")
    with pytest.raises(ValueError, match=r"plain\.txt has no articles; it must be a dump of Wikipedia"):
        write_pairs(tmp_path / "plain.txt", tmp_path / "links")
