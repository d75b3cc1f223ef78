"""Checks that every HTML page serves keyboards and screen readers, whatever its kind."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from itertools import pairwise


class _Outline(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))


def check_page(text: str, hostile: str = "") -> None:
    """Language, title, order of headings, skip link, captions and scopes, words for pictures, no colour of its own."""
    tags = _Outline(text).tags
    named = [tag for tag, _ in tags]
    assert ("html", {"lang": "en"}) in tags
    assert named.count("title") == named.count("h1") == named.count("main") == named.count("style") == 1
    levels = [int(tag[1]) for tag in named if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert all(b <= a + 1 for a, b in pairwise(levels)), levels
    links = [attrs for tag, attrs in tags if tag == "a"]
    assert links[0] == {"class": "skip", "href": "#main_content"}
    assert next(attrs for tag, attrs in tags if tag == "main")["id"] == "main_content"
    assert named.count("caption") == named.count("table")
    assert all(attrs.get("scope") in ("row", "col") for tag, attrs in tags if tag == "th")
    boxes = [attrs for _, attrs in tags if attrs.get("class") == "scroll"]
    assert len(boxes) == named.count("table")
    assert all(x["tabindex"] == "0" and x["role"] == "region" and x["aria-label"] for x in boxes)
    for attrs in (attrs for tag, attrs in tags if tag == "svg"):
        assert attrs.get("aria-hidden") == "true" or (attrs["role"] == "img" and attrs["aria-label"])
    style = text[text.index("<style>") : text.index("</style>")]
    assert "prefers-color-scheme: dark" in style
    assert ":focus-visible" in style
    assert "mathdefault" not in text  # numbers of an axis, not the formula that would draw them
    assert "script" not in named
    assert not hostile or hostile not in text
