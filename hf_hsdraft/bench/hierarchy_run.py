"""What `hsdraft plan` prints: the arithmetic of a plan, and what was measured beside what was expected."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ..drafters.cascade.cascade_drafter import CascadeDrafter
from ..drafters.protocol import Drafter
from .calls import Run, Settings
from .hierarchy import Levels, Plan, best_cascade, recommended, singles
from .run import Inputs, Measured, measure
from .systems import PLAIN, System, Variant, drafted_system


@dataclass(frozen=True)
class Plans:
    """All plans of some levels.

    Attributes:
        levels: what they are calculated from.
        singles: the best of each drafter alone.
        cascade: the best hierarchy; `None` if there can be none.
        chosen: the recommended one.
    """

    levels: Levels
    singles: Sequence[Plan]
    cascade: Plan | None
    chosen: Plan

    @classmethod
    def of(cls, levels: Levels) -> Plans:
        return cls(levels, singles(levels), best_cascade(levels), recommended(levels))

    @property
    def all(self) -> list[Plan]:
        return [*self.singles, *([self.cascade] if self.cascade else [])]

    def lines(self) -> list[str]:
        """Returns the arithmetic, line by line."""
        lines = [f"a plain step: {1000 * self.levels.plain:.4g} ms"]
        for name, forward in self.levels.forwards.items():
            points = ", ".join(f"{count}: {1000 * seconds:.4g}" for count, seconds in forward.points)
            lines.append(f"forward of {name}, ms by tokens: {points}")
        for name, drafting in self.levels.first.items():
            points = ", ".join(f"{count}: {1000 * seconds:.4g}" for count, seconds in drafting.seconds.points)
            lines.append(f"draft of {name}, ms by tokens: {points}")
        for (lower, upper), acceptance in self.levels.acceptances.items():
            shares = ", ".join(f"{share:.2f}" for share in acceptance.reached)
            lines.append(f"{upper} accepts at least 1, 2, ... tokens of {lower} in shares of: {shares}")
        for plan in self.all:
            lines += ["", f"{plan.title}:", *(f"  {line}" for line in plan.lines)]
        if self.cascade is None:
            lines += ["", "no hierarchy: no model here is quicker than the target and can verify another drafter"]
        lines += ["", f"recommended: {self.chosen.title}, speed-up {self.chosen.speed_up:.3f}"]
        if self.cascade is not None and self.chosen is not self.cascade:
            difference = f"{self.cascade.speed_up:.3f} against {self.chosen.speed_up:.3f}"
            lines.append(f"the best hierarchy, {self.cascade.title}, is not expected to be faster: {difference}")
        return lines


def cascade_of(plan: Plan, drafters: Mapping[str, Drafter]) -> CascadeDrafter:
    """Returns the drafter of a plan with several levels, which always drafts as much as planned."""
    cascade = CascadeDrafter([drafters[name] for name in plan.names], plan.tokens).eval()
    cascade.generation_config.tree_sizing = "fixed"
    return cascade


def system_of(plan: Plan, drafters: Mapping[str, Drafter]) -> System:
    """Returns how `hsdraft bench` decodes by a plan."""
    unpacked = {"packed_weights": False}
    if len(plan.names) > 1:
        cascade = cascade_of(plan, drafters)
        return System(plan.title, {"assistant_model": cascade}, cascade, unpacked, ours=True)
    drafter = drafters[plan.names[0]]
    count = plan.tokens[0] if plan.tokens else None
    named = (
        Variant(plan.title, "chain", count, options=unpacked)
        if count
        else Variant(plan.title, "tree", options=unpacked)
    )
    return drafted_system(named, drafter)


def compare(
    plans: Plans, target: Any, drafters: Mapping[str, Drafter], inputs: Sequence[Inputs], new_tokens: int, repeats: int
) -> tuple[Measured, Table]:
    """Decodes by all plans and plainly, in changing order, and puts what was expected beside what was measured."""
    systems = [system_of(plan, drafters) for plan in plans.all]
    measured = measure(target, systems, inputs, Settings(new_tokens), repeats)
    table = Table(title="expected and measured")
    for column in ("plan", "tokens a round, expected", "measured", "speed-up, expected", "measured", "same text"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for plan, system in zip(plans.all, systems, strict=True):
        runs = measured.runs[system.name]
        speed_up = _per_second(runs) / _per_second(measured.runs[PLAIN])
        same = sum(run.same_rows == 1 for run in runs)
        figures = (f"{plan.emitted:.2f}", f"{_tau(runs):.2f}", f"{plan.speed_up:.3f}", f"{speed_up:.3f}")
        marked = f"{plan.title} *" if plan is plans.chosen else plan.title
        table.add_row(marked, *figures, f"{same} of {len(runs)}")
    table.caption = "* recommended. Measured speed-ups are of tokens/s of generate(), the prompt's forward included."
    return measured, table


def _per_second(runs: Sequence[Run]) -> float:
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def _tau(runs: Sequence[Run]) -> float:
    rounds = [length for run in runs if run.statistics is not None for length in run.statistics.accepted_lengths]
    return 1 + sum(rounds) / max(len(rounds), 1)
