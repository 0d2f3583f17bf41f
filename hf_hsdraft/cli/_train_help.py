"""The help of `hsdraft train`: all its options, by what they are about.

Options of the loss and of transformers' `TrainingArguments` are parsed by `training.loop.arguments`, which loads torch.
`train_panels.json` says what they are without it.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from typer.core import TyperCommand

from ..core.methods import offered

# By the name of each panel: `options` of the function, and `fields` as `[name, type, default, sentence]`; flags have no
# type.
PANELS: dict[str, dict[str, list[Any]]] = json.loads(
    resources.files(__package__).joinpath("train_panels.json").read_text(encoding="utf-8")
)


class TrainCommand(TyperCommand):
    """Shows the options of the function, and the fields, in panels."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records = {option.name: option.get_help_record(ctx) for option in self.get_params(ctx)}
        for panel, rows in PANELS.items():
            shown = [record for name in rows["options"] if (record := records[name])]
            with formatter.section(panel):
                formatter.write_dl([*shown, *(_record(*row) for row in rows["fields"])])
        of_methods = [name for kind in ("training_option", "drafter_option") for name in offered(kind)]
        if of_methods:
            with formatter.section("Of methods"):
                formatter.write_text(", ".join(_flag(name) for name in of_methods))


def _record(name: str, kind: str, default: str, sentence: str) -> tuple[str, str]:
    return f"{_flag(name)} <{kind}>" if kind else _flag(name), sentence + (f"  [default: {default}]" if default else "")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
