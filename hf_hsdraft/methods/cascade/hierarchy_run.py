"""Output of `hsdraft make plan`: the arithmetic of a plan, and measured beside expected figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ...bench.calls import Run, Settings
from ...bench.prompts import Inputs
from ...bench.run import Measured, measure
from ...bench.systems import PLAIN, System, Variant, drafted_system
from ...drafters.base.protocol import Drafter
from .cascade_drafter import CascadeDrafter
from .hierarchy import Levels, Plan, best_cascade, recommended, singles

_FEW = 20  # rounds below which a figure is rough
CONDITION = (
    "each drafter alone is calculated with drafts of fixed sizes, without n-grams in front and without packed weights; "
    "with its own defaults it may be faster, and --measure decodes with those too"
)


@dataclass(frozen=True)
class Plans:
    """All plans for some levels: the best of each drafter alone, the best hierarchy if any, and the recommended one."""

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
        lines += [
            f"left out: {pair[0]} for {pair[1]}: {why.split('. ')[0]}" for pair, why in self.levels.left_out.items()
        ]
        lines += self._rounds()
        for plan in self.all:
            lines += ["", f"{plan.title}:", *(f"  {line}" for line in plan.lines)]
        if self.cascade is None:
            lines += ["", "no hierarchy: no model here is quicker than the target and can verify another drafter"]
        lines += ["", f"recommended: {self.chosen.title}, speed-up {self.chosen.speed_up:.3f}"]
        if self.cascade is not None and self.chosen is not self.cascade:
            difference = f"{self.cascade.speed_up:.3f} against {self.chosen.speed_up:.3f}"
            lines.append(f"the best hierarchy, {self.cascade.title}, is not expected to be faster: {difference}")
        return [*lines, CONDITION]

    def _rounds(self) -> list[str]:
        rounds = self.levels.rounds
        if not rounds:
            return []
        lines = ["rounds measured: " + ", ".join(f"{count} of {name}" for name, count in rounds.items())]
        few = [name for name, count in rounds.items() if count < _FEW]
        if few:
            lines.append(
                f"fewer than {_FEW} rounds of {', '.join(few)}: figures from these are rough, and so is the rest of a "
                "round, a small difference of large times; more prompts (--limit) or tokens (--max-new-tokens) help"
            )
        return lines


def cascade_of(plan: Plan, drafters: Mapping[str, Drafter]) -> CascadeDrafter:
    """Returns the drafter of a hierarchical plan with its default options: it drafts what pays, up to the plan."""
    return CascadeDrafter([drafters[name] for name in plan.names], plan.tokens).eval()


def system_of(plan: Plan, drafters: Mapping[str, Drafter]) -> System:
    """Returns how `hsdraft bench` decodes by a plan: exactly as calculated, with fixed numbers of tokens."""
    unpacked = {"packed_weights": False}
    if len(plan.names) > 1:
        cascade = cascade_of(plan, drafters)
        fixed = {**unpacked, "tree_sizing": "fixed"}
        return System(plan.title, {"assistant_model": cascade}, cascade, fixed, ours=True)
    kind, count = ("chain", plan.tokens[0]) if plan.tokens else ("tree", None)
    return drafted_system(Variant(plan.title, kind, count, options=unpacked), drafters[plan.names[0]])


def own_defaults(plans: Plans, drafters: Mapping[str, Drafter]) -> list[System]:
    """Returns the systems of a user who sets no option: each drafter alone, and the best hierarchy as saved."""
    names = [plan.names[0] for plan in plans.singles]
    found = [drafted_system(Variant(f"{name}, own defaults", "default"), drafters[name]) for name in names]
    if plans.cascade is not None:
        cascade = cascade_of(plans.cascade, drafters)
        found.append(System(_saved(plans.cascade), {"assistant_model": cascade}, cascade, ours=True))
    return found


def _saved(plan: Plan) -> str:
    return f"{plan.title}, as saved"


@dataclass(frozen=True)
class Compared:
    """Measured beside expected figures, and the verdict.

    `faster` is the name and speed-up of the fastest system if it beat the recommended plan: a drafter alone with its
    default options, or plain decoding.
    """

    measured: Measured
    table: Table
    faster: tuple[str, float] | None
    verdict: str


def compare(
    plans: Plans, target: Any, drafters: Mapping[str, Drafter], inputs: Sequence[Inputs], new_tokens: int, repeats: int
) -> Compared:
    """Decodes by all plans, with the drafters' default options and plainly, in changing order.

    The recommended system is a hierarchy as saved, or a single drafter as calculated.
    """
    planned, defaults = [system_of(plan, drafters) for plan in plans.all], own_defaults(plans, drafters)
    measured = measure(target, [*planned, *defaults], inputs, Settings(new_tokens), repeats)
    speed_ups = {name: _per_second(runs) / _per_second(measured.plain) for name, runs in measured.runs.items()}
    table = Table(title="expected and measured")
    for column in ("plan", "tokens a round, expected", "measured", "speed-up, expected", "measured", "same text"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    expected: dict[str, Plan] = {plan.title: plan for plan in plans.all}
    for system in (*planned, *defaults):
        runs, plan = measured.runs[system.name], expected.get(system.name)
        tau, speed_up = (f"{plan.emitted:.2f}", f"{plan.speed_up:.3f}") if plan else ("", "")
        marked = f"{system.name} *" if plan is plans.chosen else system.name
        same = f"{sum(run.same_rows == 1 for run in runs)} of {len(runs)}"
        table.add_row(marked, tau, f"{_tau(runs):.2f}", speed_up, f"{speed_ups[system.name]:.3f}", same)
    table.caption = "* recommended. Measured speed-ups are of tokens/s of generate(), the prompt's forward included."
    return Compared(measured, table, *judged(plans.chosen, speed_ups))


def judged(chosen: Plan, speed_ups: Mapping[str, float]) -> tuple[tuple[str, float] | None, str]:
    """Returns the system measured faster than the recommended plan, if any, and the verdict in words."""
    name = _saved(chosen) if len(chosen.names) > 1 else chosen.title if chosen.names else PLAIN
    others = {each: value for each, value in speed_ups.items() if each == PLAIN or each.endswith(", own defaults")}
    best = max(others, key=lambda each: others[each])
    if best == name or others[best] < speed_ups[name]:
        return None, f"measured: {name} was the fastest, {speed_ups[name]:.3f} x plain"
    return (best, others[best]), (
        f"measured: {best}, was faster than what is recommended, {name}: {others[best]:.3f} against "
        f"{speed_ups[name]:.3f} x plain. Use that instead"
    )


def _per_second(runs: Sequence[Run]) -> float:
    return sum(run.tokens for run in runs) / sum(run.seconds for run in runs)


def _tau(runs: Sequence[Run]) -> float:
    rounds = [length for run in runs if run.statistics is not None for length in run.statistics.accepted_lengths]
    return 1 + sum(rounds) / max(len(rounds), 1)
