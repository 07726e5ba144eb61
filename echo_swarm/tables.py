"""Tables that fit the terminal they are shown on: columns that can be spared are left out, words are never cut."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = 1
"""Cells between two columns."""
_READABLE = 18
"""Cells in which sentences can be wrapped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column. Numbers stand to the right; sentences may be wrapped, anything else stays in one line."""

    title: str
    number: bool = False
    sentence: bool = False
    spare: int = 0
    """Above 0: may be left out, the highest first."""

    def width(self, cells: Sequence[Text]) -> int:
        """Return the cells that it needs to be read."""
        most = max((cell.cell_len for cell in cells), default=0)
        return max(len(self.title), min(most, _READABLE) if self.sentence else most)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTable:
    """Rows of texts under columns."""

    columns: Sequence[Column]
    rows: Sequence[tuple[Sequence[Text], str]]
    """Cells, one a column, and the row's style."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render as many columns as fit."""
        shown = self.fitting(options.max_width)
        table = Table(box=None, pad_edge=False, header_style="bold")
        for place in shown:
            column = self.columns[place]
            table.add_column(
                column.title,
                justify="right" if column.number else "left",
                no_wrap=not column.sentence,
                min_width=len(column.title),
                overflow="fold",
            )
        for cells, style in self.rows:
            table.add_row(*(cells[place] for place in shown), style=style)
        yield table

    def fitting(self, width: int) -> list[int]:
        """Return the places of the columns that fit into `width` cells, in order."""
        needs = [column.width([cells[i] for cells, _ in self.rows]) for i, column in enumerate(self.columns)]
        shown = list(range(len(self.columns)))
        for place in sorted(shown, key=lambda i: -self.columns[i].spare):
            if sum(needs[i] + _GAP for i in shown) - _GAP <= width or not self.columns[place].spare:
                break
            shown.remove(place)
        return shown
