"""The help of `hsdraft train`: all its options, by what they are about; and its check for unknown ones.

Options of the loss and of transformers' `TrainingArguments` are parsed by `training.loop.arguments`, which loads torch.
`train_panels.json` says what they are without it, and the source of transformers names the rest.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from difflib import get_close_matches
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

from ..core.methods import offered

# By the name of each panel: `options` of the function, and `fields` as `[name, type, default, sentence]`; flags have no
# type.
PANELS: dict[str, dict[str, list[Any]]] = json.loads(
    resources.files(__package__).joinpath("train_panels.json").read_text(encoding="utf-8")
)


class TrainCommand(TyperCommand):
    """Shows the options of the function, and the fields, in panels. Refuses an option that is neither."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, further, _ = self.make_parser(ctx).parse_args(list(args))
        given = [each.partition("=")[0] for each in further if re.match(r"--?[^\W\d]", each)]
        fields = {_flag(name) for name in _fields()}
        for option in given:
            if option.replace("_", "-").replace("--no-", "--", 1) not in fields:
                known = [*fields, *(name for each in self.get_params(ctx) for name in each.opts)]
                near = get_close_matches(option, known, n=1)
                ctx.fail(f"No such option: {option}" + (f". Did you mean {near[0]}?" if near else ""))
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        records = {option.name: option.get_help_record(ctx) for option in self.get_params(ctx)}
        for panel, rows in PANELS.items():
            shown = [record for name in rows["options"] if (record := records[name])]
            with formatter.section(panel):
                formatter.write_dl([*shown, *(_record(*row) for row in rows["fields"])])
        if of_methods := _of_methods():
            with formatter.section("Of methods"):
                formatter.write_text(", ".join(_flag(name) for name in of_methods))


def _of_methods() -> list[str]:
    return [name for kind in ("training_option", "drafter_option") for name in offered(kind)]


def _fields() -> Iterator[str]:
    """Yields the names of all options but the function's."""
    yield from (name for panel in PANELS.values() for name, *_ in panel["fields"])
    yield from _of_methods()
    found = find_spec("transformers")  # is not imported
    assert found is not None and found.origin is not None
    code = Path(found.origin).with_name("training_args.py").read_text(encoding="utf-8")
    for node in ast.parse(code).body:
        if isinstance(node, ast.ClassDef) and node.name == "TrainingArguments":
            yield from (each.target.id for each in node.body if isinstance(each, ast.AnnAssign))  # type: ignore[union-attr]


def _record(name: str, kind: str, default: str, sentence: str) -> tuple[str, str]:
    return f"{_flag(name)} <{kind}>" if kind else _flag(name), sentence + (f"  [default: {default}]" if default else "")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
