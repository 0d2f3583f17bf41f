"""The figures of `gpu.py` as one page of Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from runner import table_head, table_row

from .counts import FIGURES
from .plan import COMPILED, PLAIN, TARGETS, TRAINING, WAYS, Part

_COLUMNS = (
    "target", "texts", "way", "tau", "tokens/s", "over plain eager", "over plain compiled", "first token, ms",
    "step, ms", "peak GB", *FIGURES, "same",
)  # fmt: skip
_MEANING = """\
tokens/s: of all texts, after their first tokens, which are apart. A step of plain decoding is a forward; of the others
a round. The columns from reads to operators are counts a step by torch.profiler: copies from the device (on a CPU,
values that Python reads), waits of the host, launched kernels, launched graphs, kernels that ran, and dispatched
operators. Same: texts that equal those of plain eager decoding; bfloat16 rounds a forward over a tree otherwise."""


def page(document: Mapping[str, Any]) -> str:
    """Returns the page for a document as `gpu.py` writes it."""
    machine, settings, parts = (document[name] for name in ("machine", "settings", "parts"))
    lines = ["# Decoding and training on one device", ""]
    lines += [f"- {name}: {value}" for name, value in machine.items()]
    lines += [f"- settings: {', '.join(f'{name} {value}' for name, value in settings.items())}", "", _MEANING, ""]
    rows = list(_decoding(parts, settings["batches"]))
    lines += ["## Decoding", "", table_head(_COLUMNS), *map(table_row, rows), ""]
    training = [row for target in TARGETS for row in _training(target, parts)]
    columns = ("target", "target's hidden states", "drafter, million weights", "tokens/s", "peak GB", "steps")
    lines += ["## Training a drafter", "", table_head(columns), *map(table_row, training), ""]
    missing = [
        f"- {name}: {part.get('error') or 'skipped, ' + part['skipped']}"
        for name, part in parts.items()
        if "rows" not in part
    ]
    return "\n".join([*lines, *(["## Not measured", "", *missing, ""] if missing else [])])


def _decoding(parts: Mapping[str, Any], batches: list[int]) -> Iterator[list[Any]]:
    for target in TARGETS:
        for texts in batches:
            found = {way: parts.get(Part(target, texts, way).name, {}).get("rows", []) for way in WAYS}
            plain, par = (next(iter(found[way]), None) for way in (PLAIN, COMPILED))
            for way, rows in found.items():
                for row in rows:
                    yield [target, texts, _named(way, row), *_figures(row, plain, par)]


def _named(way: str, row: Mapping[str, Any]) -> str:
    nodes = "" if row["nodes"] is None else f", {row['kind']}s of {row['nodes']:.0f} nodes"
    return f"{way} ({row['drafter']}{nodes})" if row["drafter"] else way


def _figures(row: Mapping[str, Any], plain: Any, par: Any) -> list[Any]:
    speed = row["decode_tokens_per_second"]
    ratios = [None if each is None else speed / each["decode_tokens_per_second"] for each in (plain, par)]
    same = None
    if plain is not None:
        equal = sum(a == b for a, b in zip(row["texts"], plain["texts"], strict=True))
        same = f"{equal} of {len(plain['texts'])}"
    counts = [_short(row["per_step"][name]) for name in FIGURES]
    first, step = _short(row["first_token_ms"]), float(row["step_ms"])
    return [float(row["tau"]), _short(speed), *ratios, first, step, _gigabytes(row), *counts, same]


def _training(target: str, parts: Mapping[str, Any]) -> Iterator[list[Any]]:
    for row in parts.get(Part(target, 0, TRAINING).name, {}).get("rows", []):
        weights, speed = row["parameters"] / 1e6, row["tokens_per_second"]
        yield [target, row["drafter"], _short(weights), f"{speed:,.0f}", _gigabytes(row), row["steps"]]


def _gigabytes(row: Mapping[str, Any]) -> float | None:
    return None if row["peak_bytes"] is None else row["peak_bytes"] / 1e9


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.1f}"
