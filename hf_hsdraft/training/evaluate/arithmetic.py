"""Calculated figures, each with a line that shows its arithmetic."""

from __future__ import annotations

import functools
import math
import operator
from dataclasses import dataclass, field

_JOINED = {"x": operator.mul, "+": operator.add, "/": operator.truediv}


@dataclass
class Arithmetic:
    """A calculation in progress: the value of each figure, and a line with its formula and numbers."""

    figures: dict[str, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    def add(self, name: str, unit: str, formula: str, *numbers: float, sign: str = "x") -> float:
        """Adds a figure that combines the numbers from left to right by `sign`: `"x"`, `"+"` or `"/"`.

        Without numbers it is 0, and the formula says why. Units are `""` for a plain number, `"s"`, `"B"` or `"FLOP"`.
        """
        self.figures[name] = functools.reduce(_JOINED[sign], numbers) if numbers else 0
        shown = f" {sign} ".join(readable(number, unit if sign == "+" else "") for number in numbers)
        result = f" = {shown} = {readable(self.figures[name], unit)}" if numbers else ""
        self.lines.append(f"{name}: {formula}{result}")
        return self.figures[name]

    def total(self, name: str, unit: str, first: str) -> float:
        """Adds the sum of all figures from `first` on."""
        names = list(self.figures)[list(self.figures).index(first) :]
        return self.add(name, unit, " + ".join(names), *(self.figures[part] for part in names), sign="+")


def readable(value: float, unit: str) -> str:
    """Formats a number: in full without a unit, otherwise with a prefix that fits. Units are as in `Arithmetic.add`."""
    if unit in ("", "s"):
        if unit and 0 < value < 1:
            return f"{1e3 * value:.4g} ms"
        plain = f"{value:,.0f}" if value == int(value) or 1e4 < value < 1e15 else f"{value:.6g}"
        return f"{plain} s ({value / 3600:,.3g} hours)" if unit else plain
    power = max(0, min(6, int(math.log10(value) // 3))) if value else 0
    return f"{float(f'{value / 1000**power:.3g}'):g} {' kMGTPE'[power].strip()}{unit}"
