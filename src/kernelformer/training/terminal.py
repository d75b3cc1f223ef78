"""What is written to a terminal: file names, data and texts are shown, never obeyed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import TextColumn
from rich.segment import Segment
from rich.text import Text

from kernelformer.units import visible


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
        """What was no plain text before; rich's own control codes stay."""
        for part in super().render(renderable, options):
            yield part if part.control else part._replace(text=visible(part.text, keep="\n"))


def text_column(template: str) -> TextColumn:
    """Column of a progress bar whose text has no markup."""
    return TextColumn(template, markup=False)
