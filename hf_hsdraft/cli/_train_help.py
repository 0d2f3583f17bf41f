"""The options of `hsdraft train`, declared in `train_panels.json`: their help, and the check for unknown ones.

Options of the loss and of transformers' `TrainingArguments` are parsed by `training.loop.arguments`, which loads torch.
The table says what they are without it, and the source of transformers names the rest.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from importlib import resources
from importlib.util import find_spec
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperCommand

from ..core.methods import offered
from ._shared import Dtype, checked_device

# By the name of each panel, options as `[name, type, default, sentence]`. Typer parses `options`: their types may name
# a least value, and end in `*` for several values or `!` if the option is required. Flags in `fields` have no type.
PANELS: dict[str, dict[str, list[Any]]] = json.loads(
    resources.files(__package__).joinpath("train_panels.json").read_text(encoding="utf-8")
)
FAMILIES = ("hidden-state", "block", "eagle3", *offered("family"))
_TYPE = re.compile(r"([^>*!]+)(?:>=(\d+))?([*!]?)")
_TYPES: dict[str, Any] = {
    "str": str, "int": int, "float": float, "folder": Path, "file": Path, "flag": bool, "switch": bool, "dtype": Dtype,
    "device": str, "family": Literal[FAMILIES],
}  # fmt: skip


def _own_or(device: str | None) -> str | None:
    return device if device in (None, "auto") else checked_device(device)


def _parameter(name: str, kind: str, default: Any, sentence: str) -> Parameter:
    """Returns a parameter that typer makes an option of."""
    match = _TYPE.fullmatch(kind)
    assert match is not None
    base, least, suffix = match.groups()
    form = _TYPES[base] if base in _TYPES else Literal[tuple(base.split("|"))]
    form = list[form] if suffix == "*" else form  # type: ignore[valid-type]
    limits: dict[str, Any] = {} if least is None else {"min": float(least) if "float" in kind else int(least)}
    limits |= {"exists": True, "dir_okay": False} if base == "file" else {}
    limits |= {"callback": _own_or} if base == "device" else {}
    names = [_flag(name)] if base in ("file", "flag") else []
    form = form if default is not None or suffix == "!" else form | None
    option = typer.Option(*names, help=sentence, **limits)
    default = Parameter.empty if suffix == "!" else default
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[form, option])


def with_options(body: Callable[..., None]) -> Callable[..., None]:
    """Gives a command, which takes a context and further keywords, the options of the table."""
    rows = [row for panel in PANELS.values() for row in panel["options"]]
    context = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    body.__signature__ = Signature([context, *(_parameter(*row) for row in rows)])  # type: ignore[attr-defined]
    return body


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
            names = [name for name, *_ in rows["options"]] + ["help"] * (panel == "Running")
            shown = [record for name in names if (record := records[name])]
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
