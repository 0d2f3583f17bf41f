"""What the commands `quality` and `train-verifier` share."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from ...cli._shared import console

TasksOption = Annotated[
    str,
    typer.Option(
        help="Comma-separated: copying, addition, sentiment, choosing, extraction, counting, explaining, writing."
    ),
]
QuestionsOption = Annotated[
    list[Path] | None,
    typer.Option(exists=True, dir_okay=False, help="JSONL with `turns` and `answer`, and `labels` if it is one."),
]
TASKS = "copying,addition,sentiment,choosing,extraction,counting,explaining,writing"


def names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def check_files(*paths: Path | None, picture: Path | None = None) -> None:
    """Raises an error if a file cannot be written where wanted, before anything is measured."""
    for path in (*paths, picture):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"no such folder: {path.parent}")
    if picture is not None and picture.suffix != ".png":
        raise ValueError(f"--picture {picture} is invalid: expected a file that ends in .png")
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--picture needs matplotlib: pip install -e '.[bench]' in a checkout")


@contextlib.contextmanager
def going_on_from(kept: Path | None) -> Iterator[None]:
    """Says on Ctrl-C that the run can resume from a file."""
    try:
        yield
    except KeyboardInterrupt:
        if kept is not None and kept.is_file():
            console.print(f"stopped; the same command goes on from {kept}", highlight=False, soft_wrap=True)
        raise
