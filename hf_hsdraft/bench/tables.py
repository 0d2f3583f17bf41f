"""Tables of figures on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.table import Table


def figures_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table()
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table
