"""What is written to a terminal: file names, data and texts are shown, never obeyed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import TextColumn
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from kernelformer.formatting import visible

UNLIMITED = 100_000  # characters of a line
NARROW = 8  # characters that a column of text needs to be read


class VisibleConsole(Console):
    """Console on which control characters are seen, and brackets and colons are what they are.

    A text may hold what a terminal would obey: escape sequences, carriage returns, marks that turn the direction of
    writing. Whatever is printed here, tables, titles and bars too, shows them as ``<U+001B>``. Nothing in it counts as
    rich's markup (``[red]``) or as the name of an emoji (``:bomb:``).

    Args:
        settings: further ones of rich's console.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, highlight=False, **settings)

    def render_str(self, text: str, **settings: Any) -> Text:
        """The text as it is laid out: its control characters have a width here."""
        return super().render_str(visible(text, keep="\n\t"), **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """What was no plain text before; rich's own control codes stay, and a table has room for all it says."""
        if isinstance(renderable, Table):
            self._make_room(renderable, options or self.options)
        for part in super().render(renderable, options):
            yield part if part.control else part._replace(text=visible(part.text, keep="\n"))

    def _make_room(self, table: Table, options: ConsoleOptions) -> None:
        """Let cells go on in a further line where rich would cut them off: no number loses its end.

        Columns that are not to be broken are, if together they leave too little room for the others.
        """
        whole = options.update(max_width=UNLIMITED)
        fixed = [
            max(self.measure(x, options=whole).maximum for x in (column.header, *column.cells))
            for column in table.columns
            if column.no_wrap
        ]
        others = len(table.columns) - len(fixed)
        narrow = sum(fixed) + NARROW * others + 3 * len(table.columns) + 1 > options.max_width
        for column in table.columns:
            column.overflow = "fold"
            column.no_wrap = column.no_wrap and not narrow


def text_column(template: str) -> TextColumn:
    """Column of a progress bar whose text has no markup."""
    return TextColumn(template, markup=False)
