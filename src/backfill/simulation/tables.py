"""Figures of several policies as tables that fit the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

# On both sides of a cell, and the line beside it.
_CELL_FRAME = 3
_SHORTEST_NAME = 10

# Name in a table and format of each figure, by its key in a result.
_FIGURES = {
    "ttft_p50_s": ("TTFT P50 s", ".3f"),
    "ttft_p99_s": ("TTFT P99 s", ".3f"),
    "ttft_p99_over_online_only": ("/ online-only", ".2f"),
    "itl_p50_s": ("ITL P50 s", ".3f"),
    "itl_p99_s": ("ITL P99 s", ".3f"),
    "ttft_attainment": ("TTFT met", ".1%"),
    "tpot_attainment": ("TPOT met", ".1%"),
    "itl_attainment": ("ITL met", ".1%"),
    "attainment": ("both met", ".1%"),
    "goodput_rps": ("goodput req/s", ".2f"),
    "normalized_latency_s": ("latency/token s", ".3f"),
    "total_tok_s": ("total tok/s", ".0f"),
    "total_tok_s_over_fcfs": ("/ fcfs", ".2f"),
    "online_tok_s": ("online tok/s", ".0f"),
    "offline_tok_s": ("offline tok/s", ".0f"),
    "offline_rps": ("offline req/s", ".2f"),
    "recomputed_token_share": ("recomputed", ".2%"),
    "restored_token_share": ("restored", ".1%"),
    "scheduling_time_share": ("scheduling", ".2%"),
    "discarded_token_share": ("discarded", ".1%"),
    "failed": ("failed", "d"),
    "unfinished": ("unfinished", "d"),
}


def print_figures(
    console: Console, title: str, figures: str, policies: Mapping[str, Mapping[str, Any]]
) -> None:
    """Print a row for each figure and a column for each policy, in several tables where one is too wide.

    Args:
        figures: keys of the figures to print, separated by spaces. A figure that no policy has is left out.
        policies: figures of each policy by key; None or missing where it has none. A tuple is a median, the
            least and the most value.
    """
    print_rows(console, title, {key: _FIGURES[key] for key in figures.split()}, policies)


def print_rows(
    console: Console,
    title: str,
    rows: Mapping[str, tuple[str, str]],
    columns: Mapping[str, Mapping[str, Any]],
    corner: str = "",
) -> None:
    """The same, with rows that are not figures of a policy.

    Args:
        rows: name and format of each row, by its key in the columns.
        corner: heading of the names.
    """
    names = [name for name, _ in rows.values()]
    cells_of = {
        column: [cell(known.get(key), kind) for key, (_, kind) in rows.items()]
        for column, known in columns.items()
    }
    for part in _parts(console.width, [corner, *names], cells_of):
        table = Table(title=title)
        table.add_column(corner)
        for column in part:
            table.add_column(column, justify="right", overflow="fold")
        for index, name in enumerate(names):
            cells = [cells_of[column][index] for column in part]
            if any(cells):
                table.add_row(name, *cells)
        console.print(table)


def table_of(title: str, *headings: str, left: Sequence[str] = (), caption: str | None = None) -> Table:
    """A narrow table; the columns in ``left`` hold names, the others numbers."""
    table = Table(title=title, caption=caption, pad_edge=False, padding=0)
    for heading in headings:
        is_name = heading in left
        table.add_column(heading, justify="left" if is_name else "right", no_wrap=is_name)
    return table


def cell(value: object, form: str) -> str:
    """A figure of a table, empty where there is none. A tuple is a median, the least and the most value."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        median, least, most = (format(each, form) for each in value)
        return median if least == most else f"{median} ({least} to {most})"
    return format(value, form)


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
