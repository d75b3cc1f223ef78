"""Parts of HTML pages without network and scripts, for the screen (light and dark, wide and narrow) and for paper."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from kernelformer.formatting import visible
from kernelformer.reports.figures import svg

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


@cache
def style_sheet() -> str:
    """The one style sheet of all pages."""
    return Path(__file__).with_name("page.css").read_text("utf-8")


def safe(value: object) -> str:
    """Any value as text that is never markup."""
    return html.escape(visible(value), quote=True)


def safe_label(value: str) -> str:
    """A label; a long one breaks between its options."""
    return safe(value).replace(":", ":<wbr>")


def pre(value: str) -> str:
    """Preformatted text as HTML."""
    shown = html.escape(visible(value, keep="\n\t"), quote=True)
    return f"<pre>\n{shown}</pre>"  # the first line break is not shown


def table(name: str, head: Sequence[str], lines: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table in a box of its own that scrolls; cells are HTML, the first of a line is its heading."""
    top = "".join(f'<th scope="col">{x}</th>' for x in head)
    rows = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{x}</td>" for x in others)}</tr>' for first, *others in lines
    )
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{safe(name)}"><table class="{kind}">'
        f"<caption>{safe(name)}</caption><thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def figure(name: str, title: str, alt: str, draw: Callable[[Any], None], height: float = 3.3, below: str = "") -> str:
    """A drawing with its title, and HTML below it; ``name`` keeps its references apart from those of other figures."""
    return f"<figure><figcaption>{safe(title)}</figcaption>{svg(name, alt, draw, (5.2, height))}{below}</figure>"


def section(title: str, *parts: str, anchor: str = "") -> str:
    """A section of a page: a title and its parts."""
    name = f' id="{safe(anchor)}"' if anchor else ""
    return f"<section{name}><h2>{safe(title)}</h2>\n{''.join(parts)}</section>"


def whole_page(title: str, about: str, main: str, kind: str = "") -> str:
    """The page.

    Args:
        title: of the page, as it is.
        about: one paragraph, as it is.
        main: HTML.
        kind: of the page, a class of the style sheet.
    """
    return f"""<!DOCTYPE html>
<html lang="en"><head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{safe(title)}</title>
<style>{style_sheet()}</style>
</head><body class="{kind}">
<a class="skip" href="#main_content">Skip to the content</a>
<header><h1>{safe(title)}</h1>
<p class="soft">{safe(about)}</p></header>
<main id="main_content" tabindex="-1">
{main}
</main>
</body></html>
"""
