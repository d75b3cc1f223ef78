"""Parts of HTML pages and of Markdown: templates, figures in the page's own colours, tables, and records to publish."""

from __future__ import annotations

import html
import io
import json
import re
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from rich.table import Table

from kernelformer.formatting import visible

INK = "#1b1e23"  # becomes the page's own text colour, so that figures follow light and dark
COLOURS = ("#1a7fc3", "#d55e00", "#009e73", "#c2679a", "#b87d00", "#8a63c9", "#808080")  # 3:1 on light and dark cards
MARKERS = "osD^vP<*"
STYLES = len(COLOURS) * len(MARKERS)  # 7 and 8 have no common divisor, so that all pairs come
LINES = ("-", "--", "-.", ":")


def style(index: int) -> dict[str, Any]:
    """Colour, marker and line of a label by its place."""
    return {"color": COLOURS[index % 7], "marker": MARKERS[index % 8], "linestyle": LINES[index % 4]}


def svg(name: str, alt: str, draw: Callable[[Any], None], size: tuple[float, float]) -> Markup:
    """Draw an element of a page; ``name`` keeps its references apart from those of other figures."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
    rc: dict[Any, Any] = {**dict.fromkeys(inked, INK), "axes.facecolor": "none", "axes.grid": True, "grid.alpha": 0.14}
    rc |= {"axes.spines.top": False, "axes.spines.right": False, "lines.markersize": 4.5, "lines.linewidth": 1.7}
    rc |= {"font.size": 11.5}  # on a narrow screen a figure is shown smaller than it is drawn
    rc |= {"text.parse_math": False, "svg.fonttype": "none", "svg.hashsalt": name}  # a $ in a label is a $
    buffer = io.BytesIO()
    with mpl.rc_context(rc), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing")  # the browser's font has it, or shows a box
        figure = Figure(figsize=size, layout="constrained", facecolor="none")
        axes = figure.subplots()
        draw(axes)
        _plain_numbers(axes.xaxis, axes.get_xlim())
        _plain_numbers(axes.yaxis, axes.get_ylim())
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})

    def own(key: str, value: str) -> str:
        if key in ("id", "href"):
            return f"{name}-{value}" if key == "id" else f"#{name}-{value[1:]}"
        return value.replace("url(#", f"url(#{name}-").replace(INK, "currentColor")

    root = ElementTree.fromstring(buffer.getvalue())
    for node in root.iter():
        for child in [c for c in node if c.tag.endswith(("}metadata", "}style"))]:
            node.remove(child)
        plain = ((key.rpartition("}")[2], value) for key, value in node.attrib.items())  # without their name spaces
        node.tag, node.attrib = node.tag.rpartition("}")[2], {key: own(key, value) for key, value in plain}
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": visible(alt)}
    return Markup(ElementTree.tostring(root, encoding="unicode"))


def _plain_numbers(axis: Any, limits: tuple[float, float]) -> None:
    """Write the numbers of a logarithmic axis as numbers: by default they are formulas, which pages do not read."""
    from matplotlib.ticker import LogFormatter

    if axis.get_scale() == "log":
        low, high = sorted(limits)
        narrow = low > 0 and high / low < 100  # fewer than two powers of ten: those between them are needed too
        if isinstance(axis.get_major_formatter(), LogFormatter):
            axis.set_major_formatter(lambda x, _: f"{x:,g}")
            axis.set_minor_formatter(lambda x, _: f"{x:,g}" if narrow and f"{x:.0e}"[0] in "25" else "")


def legend_key(name: str, index: int) -> Markup:
    """The line and the marker of a label, for legends."""
    return Markup(_key(index).replace("@-", f"{name}-"))


@cache
def _key(index: int) -> str:
    def draw(axis: Any) -> None:
        axis.plot([0, 1, 2], [0, 0, 0], markevery=[1], **style(index))
        axis.axis("off")

    return str(svg("@", "", draw, (0.6, 0.2))).replace('role="img" aria-label=""', 'class="key" aria-hidden="true"', 1)


class Drawing(NamedTuple):
    """A figure of a page."""

    title: str
    svg: Markup
    legend: Sequence[tuple[Markup, str]] = ()


def figure(
    name: str,
    title: str,
    told: str,
    draw: Callable[[Any], None],
    height: float = 3.3,
    legend: Sequence[tuple[Markup, str]] = (),
) -> Drawing:
    """Draw a figure of a page; ``name`` keeps its references apart, and ``told`` are its figures for screen readers."""
    return Drawing(title, svg(name, f"{title}: {told}", draw, (5.2, height)), legend)


def safe(value: object) -> Markup:
    """Escape any value; markup stays as it is."""
    return value if isinstance(value, Markup) else escape(visible(value))


def safe_label(value: object) -> Markup:
    """Escape a label, which may break between its options where it is long; markup stays as it is."""
    return value if isinstance(value, Markup) else safe(value).replace(":", Markup(":<wbr>"))


def coded(value: object) -> Markup:
    """Escape a text whose parts between backticks are code."""
    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(safe(value))))


def small(value: object) -> Markup:
    """Mark up a remark below or behind a value; empty for an empty one."""
    return Markup("<small>{}</small>").format(safe(value)) if value else Markup()


def render(template: Path, title: str, about: str, kind: str = "", **values: Any) -> str:
    """Make an HTML page from a template that extends ``page.html``; every value is escaped."""
    environment = _environment(template, autoescape=True, finalize=safe)
    environment.filters |= {"label": safe_label, "coded": coded}
    environment.filters["lines"] = lambda x: escape(visible(x, keep="\n\t"))
    return environment.get_template(template.name).render(title=title, about=about, kind=kind, **values)


def render_markdown(template: Path, **values: Any) -> str:
    """Make Markdown from a template; every value is escaped by `plain` but what has the filter ``safe``."""
    environment = _environment(template, finalize=lambda x: x if isinstance(x, Markup) else plain(x))
    environment.filters |= {"code": lambda x: Markup(code(x)), "quoted": lambda x: Markup(quoted(x))}
    return environment.get_template(template.name).render(**values)


def _environment(template: Path, **options: Any) -> Environment:
    return Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        **options,
    )


def plain(text: object) -> str:
    """Escape a text for Markdown, in one line: nothing in it is markup, neither for Markdown nor for a browser."""
    line = " ".join(visible(text).split())
    escaped = re.sub(r"([\\`*_{}\[\]#|])", r"\\\1", html.escape(line, quote=False))
    return re.sub(r"[~$@]|:(?=\S)", lambda x: f"&#{ord(x[0])};", escaped)  # no renderer but GitHub's knows "\:"


def code(text: str) -> str:
    """Write a text as a string of Python inside a fenced block, which three backticks would end."""
    return json.dumps(visible(text)).replace("`", "\\u0060")


def quoted(text: str) -> str:
    """Quote a text of others, line by line."""
    return "\n>\n".join(f"> {plain(x)}" for x in text.splitlines() if x.strip()) or "> (nothing)"


def text_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> Table:
    """A table for the terminal; the first ``left`` columns stand on the left."""
    made = Table(title=title)
    for i, name in enumerate(head):
        made.add_column(name, justify="left" if i < left else "right", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of Markdown; its cells are Markdown, those of the first column stand on the left."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join(f"| {' | '.join(x)} |" for x in lines)


def put_section(page: str, section: str, before: str = "") -> str:
    """Put a section into a page in place of the one with its heading, else before another heading or at the end."""
    section = section.strip() + "\n"
    heading = section.split("\n", 1)[0]
    parts = re.split(r"^(?=## )", page, flags=re.MULTILINE)
    names = [x.split("\n", 1)[0].rstrip() for x in parts]
    if heading in names:
        place = names.index(heading)
        parts[place] = section + ("\n" if place + 1 < len(parts) else "")
    elif before in names:
        parts.insert(names.index(before), section + "\n")
    else:
        parts.append(("\n" if page and not page.endswith("\n\n") else "") + section)
    return "".join(parts)
