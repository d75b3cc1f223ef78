"""Parts of HTML pages without network and scripts, for the screen (light and dark, wide and narrow) and for paper."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

from kernelformer.formatting import visible
from kernelformer.reports.figures import svg

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
CSS = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1e23; --soft: #5b6270; --line: #dde1e7; --card: #f8f9fb;
  --mark: #e8f1f9; --font: system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif }
@media screen and (prefers-color-scheme: dark) {
  :root { --paper: #14161a; --ink: #e4e7ec; --soft: #a2a9b5; --line: #333943; --card: #1b1e24; --mark: #1b2b39 } }
body { box-sizing: border-box; margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 1100px; overflow-wrap: anywhere;
  background: var(--paper); color: var(--ink); font: 1rem/1.55 var(--font) }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .4rem }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .8rem; padding-bottom: .3rem; border-bottom: 1px solid var(--line) }
h3 { font-size: 1rem; margin: 1.2rem 0 .4rem } p { margin: .7rem 0; max-width: 54rem }
.soft, small { color: var(--soft); font-size: .875em; font-weight: 400 }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; overflow-wrap: normal }
th, td { padding: .45rem .7rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
th { font-weight: 500; min-width: 8rem; overflow-wrap: break-word }
thead th { color: var(--soft); font-weight: 600; min-width: 0; vertical-align: bottom }
.results { width: 100% } .results td, .results thead th + th { text-align: right }
.results td { white-space: nowrap } .results small { display: block; text-indent: 0 }
.results tbody th { min-width: min(14rem, 45vw); padding-left: 3.7rem; text-indent: -3rem }
.best tbody > :first-child { background: var(--mark) } .best tbody > :first-child > :nth-child(-n+2) {font-weight: 700}
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); gap: 1rem }
figure, pre { padding: .8rem; background: var(--card); border: 1px solid var(--line); border-radius: .5rem }
figure { margin: 0; break-inside: avoid } figcaption { font-weight: 600; margin-bottom: .5rem }
svg { display: block; width: 100%; height: auto; stroke-linejoin: round }
svg text { font-family: var(--font) !important }
svg.key { display: inline-block; width: 2.5rem; height: .85rem; vertical-align: -.1rem; margin-right: .5rem }
.legend { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; list-style: none; margin: 0 0 .8rem; padding: 0 }
pre { font-size: .85rem; white-space: pre-wrap; margin: .3rem 0 1rem }
summary { cursor: pointer; font-weight: 600; padding: .4rem 0 }
@media print {
  body { max-width: none; padding: 0; font-size: 9.5pt }
  .figures { grid-template-columns: 1fr 1fr }
  table { font-size: 7.5pt; overflow-wrap: anywhere }
  th, td { padding: .3em .5em }
  .results td { white-space: normal }
  details::details-content { content-visibility: visible; display: block }
  section { break-inside: avoid } }
"""


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
        f"<thead><tr>{top}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def figure(name: str, title: str, alt: str, draw: Callable[[Any], None], height: float = 3.3, below: str = "") -> str:
    """A drawing with its title, and HTML below it; ``name`` keeps its references apart from those of other figures."""
    return f"<figure><figcaption>{safe(title)}</figcaption>{svg(name, alt, draw, (5.2, height))}{below}</figure>"


def section(title: str, *parts: str, anchor: str = "") -> str:
    """A section of a page: a title and its parts."""
    name = f' id="{safe(anchor)}"' if anchor else ""
    return f"<section{name}><h2>{safe(title)}</h2>\n{''.join(parts)}</section>"


def whole_page(title: str, about: str, main: str, css: str = "") -> str:
    """The page.

    Args:
        title: of the page, as it is.
        about: one paragraph, as it is.
        main: HTML.
        css: beyond what all pages share.
    """
    return f"""<!DOCTYPE html>
<html lang="en"><head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{safe(title)}</title>
<style>{CSS}{css}</style>
</head><body>
<header><h1>{safe(title)}</h1>
<p class="soft">{safe(about)}</p></header>
<main>
{main}
</main>
</body></html>
"""
