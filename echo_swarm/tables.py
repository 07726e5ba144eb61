"""Tables that fit the terminal they are shown on; words are never cut.

Titles of figures are wrapped first; then columns that can be spared become part of the row's last sentence.
"""

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
    """Above 0: may move into the last sentence of the row, the highest first; out, where there is none."""

    def heading(self, wrapped: bool) -> str:
        """Return the title, one word a line when `wrapped`."""
        return self.title.replace(" ", "\n") if wrapped and not self.sentence else self.title

    def width(self, cells: Sequence[Text], *, wrapped: bool = False) -> int:
        """Return the cells that it needs to be read."""
        most = max((cell.cell_len for cell in cells), default=0)
        title = max(map(len, self.heading(wrapped).split("\n")))
        return max(title, min(most, _READABLE) if self.sentence else most)


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedTable:
    """Rows of texts under columns."""

    columns: Sequence[Column]
    rows: Sequence[tuple[Sequence[Text], str]]
    """Cells, one a column, and the row's style."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render all of it, as wide as there is room."""
        wrapped = not self._fits(range(len(self.columns)), options.max_width, wrapped=False)
        shown = self.fitting(options.max_width)
        table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
        for place in shown:
            column = self.columns[place]
            table.add_column(
                column.heading(wrapped),
                justify="right" if column.number else "left",
                no_wrap=not column.sentence,
                min_width=max(map(len, column.heading(wrapped).split("\n"))),
                overflow="fold",
            )
        for cells, style in self.rows:
            table.add_row(*self._row(cells, shown), style=style)
        yield table

    def _row(self, cells: Sequence[Text], shown: Sequence[int]) -> list[Text]:
        row = [cells[place] for place in shown]
        moved = [
            place for place in range(len(self.columns)) if place not in shown and cells[place].plain not in ("", "-")
        ]
        if row and self.columns[shown[-1]].sentence and moved:
            words = ", ".join(f"{self.columns[place].title} {cells[place].plain}" for place in moved)
            row[-1] = Text.assemble(row[-1], "; " if row[-1].plain else "", words)
        return row

    def fitting(self, width: int) -> list[int]:
        """Return the places of the columns that fit into `width` cells, in order."""
        shown = list(range(len(self.columns)))
        for place in sorted(shown, key=lambda i: -self.columns[i].spare):
            if self._fits(shown, width, wrapped=True) or not self.columns[place].spare:
                break
            shown.remove(place)
        return shown

    def _fits(self, places: Sequence[int], width: int, *, wrapped: bool) -> bool:
        needs = [self.columns[i].width([cells[i] for cells, _ in self.rows], wrapped=wrapped) for i in places]
        return sum(need + _GAP for need in needs) - _GAP <= width
