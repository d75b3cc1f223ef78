"""Pairs of Wikipedia articles of which one links to the other or not, from a dump such as enwik8.

They stand for the pairs of papers of Long Range Arena's Retrieval, of which one cites the other or not.
"""

from __future__ import annotations

import html
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from kernelformer.files import replacing

PAGE = re.compile(r"<title>([^<]*)</title>.*?<text[^>]*>([^<]*)</text>", re.DOTALL)
LINK = re.compile(r"\[\[([^]|#]+)[^]]*\]\]")
MARKUP = re.compile(r"\{\{[^}]*\}\}|<[^>]*>|'{2,}|={2,}|\[\[(?:[^]|]*\|)?([^]]*)\]\]")
SPLITS = (("train", 0.7), ("validation", 0.15), ("test", 0.15))  # of the articles; pairs are within a split
LEAST = 500  # characters of an article that says something


def read_articles(dump: Path) -> dict[str, tuple[str, list[str]]]:
    """Articles of a dump in XML by title: their text without markup, and the titles that they link to.

    Redirections, pages about pages (with a colon in the title) and articles of less than 500 characters are left out.
    """
    raw = dump.read_bytes().decode("utf-8", errors="replace")
    articles = {}
    for title, source in PAGE.findall(raw):
        text = html.unescape(source)
        if ":" in title or text.lower().startswith("#redirect"):
            continue
        links = [_title(x) for x in LINK.findall(text)]
        plain = " ".join(MARKUP.sub(r"\1", text).split())
        if len(plain) >= LEAST:
            articles[html.unescape(title)] = (plain, links)
    return articles


def _title(link: str) -> str:
    """The title that a link means: its first letter is a capital, and underscores are blanks."""
    name = " ".join(link.replace("_", " ").split())
    return name[:1].upper() + name[1:]


def linked_pairs(
    articles: dict[str, tuple[str, list[str]]], titles: Sequence[str], seed: int
) -> Iterator[dict[str, str | int]]:
    """A linked and an unlinked pair for each article that links to another one of these titles.

    The unlinked partner is the linked partner of another article, so that partners are drawn alike for both labels.
    """
    draw = random.Random(seed)
    known = set(titles)
    linked = []
    for title in titles:
        choices = [x for x in dict.fromkeys(articles[title][1]) if x in known and x != title]
        if choices:
            linked.append((title, draw.choice(choices)))
    partners = [partner for _, partner in linked]
    draw.shuffle(partners)
    for (title, partner), other in zip(linked, partners, strict=True):
        yield {"text1": articles[title][0], "text2": articles[partner][0], "label": 1}
        if other != title and other not in articles[title][1] and title not in articles[other][1]:
            yield {"text1": articles[title][0], "text2": articles[other][0], "label": 0}


def write_pairs(dump: Path, folder: Path, *, length: int = 4000, seed: int = 0) -> None:
    """Write ``train.jsonl``, ``validation.jsonl`` and ``test.jsonl`` for the task ``retrieval``.

    No article is in two splits, so that nothing can be learned by heart.

    Args:
        dump: enwik8 or another dump in its form.
        folder: of the files.
        length: characters of a text that are kept.
        seed: of the division and of the pairs.
    """
    articles = read_articles(dump)
    if not articles:
        raise ValueError(f"{dump} has no articles; it must be a dump of Wikipedia in XML, such as enwik8.")
    titles = sorted(articles)
    random.Random(seed).shuffle(titles)
    folder.mkdir(parents=True, exist_ok=True)
    start = 0
    for name, share in SPLITS:
        count = round(share * len(titles))
        mine, start = titles[start : start + count], start + count
        with replacing(folder / f"{name}.jsonl") as part, part.open("w", encoding="utf-8") as out:
            for pair in linked_pairs(articles, mine, seed):
                short = {key: x[:length] if isinstance(x, str) else x for key, x in pair.items()}
                out.write(json.dumps(short, ensure_ascii=False) + "\n")
