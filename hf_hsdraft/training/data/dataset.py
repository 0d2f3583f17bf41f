"""Rows on disk, in a folder that `datasets.load_dataset(folder)` reads: parquet files, and the recipe beside them.

A file gets its name when it is complete, so a killed run loses at most one file. Rows have keys, so none is made twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...core.checks import short
from ..files import read_kept, write_complete, write_json

# No `configs` block in the card, and no ending of the recipe that `datasets` reads: it then finds the data files by
# itself, and only then does its cache tell folders of the same name apart.
_CARD = "{title}\n\nHow these rows were made is in `recipe.yaml`.\n"
RECIPE = "recipe.yaml"  # it holds JSON, which is YAML too


class RowFolder:
    """A growing folder of rows, created with the first rows.

    Args:
        title: a line for its card.
        recipe: everything that decides the rows. Another recipe than the folder's, `made_with` excepted, is a
            ValueError.
        writer: index of this process among those that add rows at the same time; `None` where another one writes the
            same rows.
    """

    def __init__(
        self, folder: Path, title: str = "", recipe: dict[str, Any] | None = None, writer: int | None = 0
    ) -> None:
        self.folder = folder
        self._title = title
        self._recipe = None if recipe is None else json.loads(json.dumps(recipe))
        self._writer = writer
        path = folder / RECIPE
        if self._recipe is not None and path.exists():
            stored = read_kept(path, f"delete {folder}, and its rows are made again")
            changes = differences(stored, self._recipe)
            if changes:
                raise ValueError(
                    f"{folder} was made with other settings ({'; '.join(changes)}); use the same, or another folder"
                )

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yields all rows in the order of the files, each key once."""
        seen = set()
        for part in self._parts():
            for row in _read(part):
                if row["key"] not in seen:
                    seen.add(row["key"])
                    yield row

    def keys(self) -> set[str]:
        return {row["key"] for part in self._parts() for row in _read(part, ["key"])}

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Adds rows as one file. Each row has a `key`, and all have the same columns."""
        if not rows or self._writer is None:
            return
        from datasets import Dataset
        from pyarrow import parquet

        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        if self._recipe is not None and not (self.folder / RECIPE).exists():
            write_json(self.folder / RECIPE, self._recipe)
        if not (self.folder / "README.md").exists():
            card = _CARD.format(title=self._title)
            write_complete(self.folder / "README.md", lambda path: path.write_text(card, encoding="utf-8"))
        own = (self.folder / "data").glob(f"part-{self._writer:03d}-*.parquet")
        number = 1 + max((int(path.stem.rsplit("-", 1)[1]) for path in own), default=-1)
        part = self.folder / "data" / f"part-{self._writer:03d}-{number:05d}.parquet"
        table = Dataset.from_list(list(rows)).with_format("arrow")[:]
        write_complete(part, lambda path: parquet.write_table(table, path))

    def _parts(self) -> list[Path]:
        return sorted((self.folder / "data").glob("*.parquet"))


def _read(part: Path, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    from pyarrow import ArrowException, parquet

    try:
        rows: list[dict[str, Any]] = parquet.read_table(part, columns=columns).to_pylist()
    except (ArrowException, OSError) as error:
        told = f"{part} is damaged ({type(error).__name__}): delete it, and the same command makes its rows again"
        raise ValueError(told) from error
    return rows


def differences(stored: Mapping[str, Any], recipe: Mapping[str, Any]) -> list[str]:
    """Describes where two recipes differ, `made_with` excepted."""
    pairs = {name: (stored.get(name), recipe.get(name)) for name in sorted({*stored, *recipe} - {"made_with"})}
    return [f"{name}: {short(old)} -> {short(new)}" for name, (old, new) in pairs.items() if old != new]
