"""Runs tasks of lm-evaluation-harness with and without a drafter, and compares the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.utils import make_table
from rich.console import Console

from ..core.checks import few
from ..generate.attachment import AttachmentStatistics
from .lm_eval_model import HSDraftLM, as_fields, what_drafting_did


@dataclass(frozen=True)
class Evaluation:
    """Results of `lm_eval.simple_evaluate`, samples included, and seconds of each call of `generate()`, in order."""

    results: dict[str, Any]
    seconds: Sequence[float]
    drafting: AttachmentStatistics | None

    def results_with_drafting(self) -> dict[str, Any]:
        return {**self.results, "drafting": None if self.drafting is None else as_fields(self.drafting)}

    def answers(self) -> dict[tuple[str, int], Any]:
        """The texts, or the likelihoods, of each document by task and number."""
        samples = self.results["samples"]
        return {(task, sample["doc_id"]): sample["resps"] for task in samples for sample in samples[task]}

    def scores(self) -> dict[tuple[str, str], Any]:
        """The scores by task and metric, without standard errors."""
        table: Mapping[str, Mapping[str, Any]] = self.results["results"]
        return {(task, name): table[task][name] for task in table for name in table[task] if "_stderr" not in name}


@dataclass(frozen=True)
class Comparison:
    """A drafted run beside a plain one.

    Attributes:
        answers: number of documents.
        other_answers: task and number of the documents whose answers differ.
        seconds: of all calls of `generate()`, plain and drafted.
        call_ratios: plain over drafted seconds for each call of `generate()`; empty where `batch_size="auto"` found
            different sizes.
    """

    answers: int
    other_answers: Sequence[tuple[str, int]]
    same_scores: bool
    seconds: tuple[float, float]
    call_ratios: Sequence[float] = field(repr=False)

    @property
    def speed_up(self) -> float | None:
        """Plain over drafted seconds of all calls; `None` where nothing was generated."""
        plain, drafted = self.seconds
        return plain / drafted if plain and drafted else None


def run_tasks(
    model: Any, tokenizer: Any, drafter: Any, tasks: Sequence[Any], batch_size: int | str = 1, **options: Any
) -> Evaluation:
    """Evaluates a target on tasks, with its generated texts drafted, or plainly if `drafter` is None.

    `tasks` and `options` are those of `simple_evaluate`; `max_batch_size` is the most that a `batch_size` of `"auto"`
    tries. Raises a ValueError if lm_eval does not know a task, or the drafter was made for another target.
    """
    batches = {"batch_size": batch_size, "max_batch_size": options.pop("max_batch_size", None) or 64}
    lm = HSDraftLM(model, drafter, tokenizer=tokenizer, **batches)
    try:
        results = simple_evaluate(lm, tasks=list(tasks), batch_size=batch_size, **options)
    finally:
        if lm.attachment is not None:
            lm.attachment.detach()
    return Evaluation(results, lm.seconds, None if lm.attachment is None else lm.attachment.statistics)


def compare(plain: Evaluation, drafted: Evaluation) -> Comparison:
    first, second = plain.answers(), drafted.answers()
    ratios: list[float] = []
    if len(plain.seconds) == len(drafted.seconds):
        ratios = [one / other for one, other in zip(plain.seconds, drafted.seconds, strict=True)]
    return Comparison(
        answers=len(first),
        other_answers=[key for key in first if first[key] != second.get(key)],
        same_scores=plain.scores() == drafted.scores(),
        seconds=(sum(plain.seconds), sum(drafted.seconds)),
        call_ratios=ratios,
    )


def print_evaluation(run: Evaluation, console: Console) -> None:
    said = [make_table(run.results)]
    if run.results.get("groups"):
        said.append(make_table(run.results, "groups"))
    said.append("without a drafter" if run.drafting is None else what_drafting_did(run.drafting))
    _print("\n".join(said), console)


def print_comparison(found: Comparison, console: Console) -> None:
    said = f"same answers: {found.answers - len(found.other_answers)} of {found.answers}"
    if found.other_answers:
        said += f"; not those of {few([f'{task} {number}' for task, number in found.other_answers])}"
    said += f"\nsame scores: {'yes' if found.same_scores else 'no'}"
    if found.speed_up is None:
        said += "\nnothing was generated"
    else:
        plain, drafted = found.seconds
        said += f"\nseconds of generate(): {plain:.1f} plain, {drafted:.1f} drafted; speed-up {found.speed_up:.2f}"
    if found.call_ratios:
        said += f"; of single calls {median(found.call_ratios):.2f}, the median of {len(found.call_ratios)}"
    _print(said, console)


def _print(text: str, console: Console) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
