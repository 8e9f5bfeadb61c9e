"""Figures of several policies as tables that fit the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table

# On both sides of a cell, and the line beside it.
_CELL_FRAME = 3
_SHORTEST_NAME = 10


def print_figures(
    console: Console, title: str, names: Sequence[str], columns: Mapping[str, Sequence[str]]
) -> None:
    """Print a row for each figure and a column for each policy, in several tables where one is too wide.

    Args:
        names: of the figures.
        columns: cells of each policy, as many as there are names. A row without any cell is left out.
    """
    for part in _parts(console.width, names, columns):
        table = Table(title=title)
        table.add_column("")
        for column in part:
            table.add_column(column, justify="right", overflow="fold")
        for index, name in enumerate(names):
            cells = [columns[column][index] for column in part]
            if any(cells):
                table.add_row(name, *cells)
        console.print(table)


def _parts(width: int, names: Sequence[str], columns: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """The policies, as many at a time as fit; a long name takes several lines, a figure takes one."""
    left = width - 1 - _CELL_FRAME - max(map(len, names))
    part: list[str] = []
    taken = 0
    for column, cells in columns.items():
        needed = _CELL_FRAME + max(min(len(column), _SHORTEST_NAME), *map(len, cells))
        if part and taken + needed > left:
            yield part
            part, taken = [], 0
        part.append(column)
        taken += needed
    if part:
        yield part
