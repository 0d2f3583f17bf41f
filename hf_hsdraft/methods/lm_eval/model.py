"""The lm-evaluation-harness model `hsdraft`, which decodes with a drafter, and comparisons of runs with and without.

`import hf_hsdraft.methods.lm_eval.model` registers it. lm_eval finds models of other packages only once they are
imported, so this file run as a program is lm_eval's command with the model known:

    python -m hf_hsdraft.methods.lm_eval.model --model hsdraft --model_args pretrained=NAME,drafter=NAME --tasks gsm8k
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from lm_eval import simple_evaluate
from lm_eval.api.model import CacheHook
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import make_table
from transformers.utils.logging import tqdm

from ...batching.generate_many import generate_many
from ...core.checks import few
from ...core.statistics import DraftStatistics
from ...drafters.base.protocol import Drafter
from ...generate.attachment import Attachment, attach

logger = logging.getLogger("lm_eval.hsdraft")  # shown like lm_eval's messages


@register_model("hsdraft")
class HSDraftLM(HFLM):
    """lm_eval's model `hf` with drafted generation. Likelihoods never call `generate()`, so they do not change.

    With a `batch_size` above 1 so many texts are decoded together by `generate_many`, each with its own length and end.
    lm_eval's padded batches are drafted instead where the first request cannot be decoded beside others.

    `pretrained` and `arguments` are those of `HFLM`; `drafter` is a drafter, or its Hub name or folder, and `None`
    decodes plainly. `seconds` is the wall-clock time of each call of `generate()`, or of each list decoded together.
    """

    _model: Any
    batch_size_per_gpu: Any
    cache_hook: Any

    def __init__(
        self, pretrained: Any, drafter: Drafter | str | os.PathLike[str] | None = None, **arguments: Any
    ) -> None:
        super().__init__(pretrained, **arguments)
        self.attachment: Attachment | None = None if drafter is None else attach(self.model, drafter)
        self.seconds: list[float] = []

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        texts = self._together(requests, disable_tqdm)
        if texts is None:
            texts = super().generate_until(requests, disable_tqdm)
        if self.attachment is not None:
            logger.info(what_drafting_did(self.attachment.statistics))
        return texts

    def _together(self, requests: list[Any], disable_tqdm: bool) -> list[str] | None:
        """What `generate_until` returns, decoded together; None if that cannot be.

        lm_eval makes the calls of `generate()`, one for each request, and answers of what has been decoded by them.
        """
        if self.attachment is None or self.batch_size == 1 or self.backend != "causal":
            return None
        size = self._detect_batch_size() if self.batch_size == "auto" else self.batch_size
        calls, own = _Calls(self.model), (self._model, self.batch_size_per_gpu, self.cache_hook)
        self._model, self.batch_size_per_gpu, self.cache_hook = calls, 1, CacheHook(None)
        try:
            super().generate_until(requests, disable_tqdm=True)
            if not self._go_together(calls):
                return None
            calls.texts, self.cache_hook = iter(self._decoded(calls, size, disable_tqdm)), own[2]
            return super().generate_until(requests, disable_tqdm=True)
        finally:
            self._model, self.batch_size_per_gpu, self.cache_hook = own

    def _go_together(self, calls: _Calls) -> bool:
        """Whether the first call, cut to its first token, can be decoded beside others."""
        assert self.attachment is not None
        call = {name: value for name, value in calls.made[0].items() if name != "stopping_criteria"}
        call["max_length"] = call["input_ids"].shape[1] + 1
        running = generate_many(calls.model, [call], self.attachment.drafter)
        return all(done.error is None for done in running) and not running.alone

    def _decoded(self, calls: _Calls, size: int, quiet: bool) -> list[torch.Tensor]:
        """What the calls return, decoded together."""
        found, began = dict[int, torch.Tensor](), time.perf_counter()
        running = generate_many(calls.model, calls.made, max_batch_size=size)
        kind = {"device_type": self.device.type, "dtype": self.mixed_precision_dtype}
        with torch.autocast(**kind, enabled=self.mixed_precision_dtype is not None):
            for done in tqdm(running, "generate_many", len(calls.made), disable=quiet or self.rank != 0):
                if done.error is not None:
                    raise done.error
                found[done.index] = done.output
        self.seconds.append(time.perf_counter() - began)
        return [found[index] for index in range(len(found))]

    def _model_generate(self, *args: Any, **kwargs: Any) -> Any:
        if isinstance(self._model, _Calls):
            return super()._model_generate(*args, **kwargs)
        began = time.perf_counter()
        tokens = super()._model_generate(*args, **kwargs)
        self.seconds.append(time.perf_counter() - began)
        return tokens

    def get_model_info(self) -> dict[str, Any]:
        """Adds drafting statistics to what lm_eval writes about the model."""
        info = super().get_model_info()
        if self.attachment is not None:
            info["drafting"] = as_fields(self.attachment.statistics)
        return info


class _Calls:
    """Stands in for a model: notes calls of `generate()`, and later returns what was decoded by them, the `texts`."""

    def __init__(self, model: Any) -> None:
        self.model, self.made = model, list[dict[str, Any]]()
        self.texts: Iterator[torch.Tensor] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def generate(self, **call: Any) -> torch.Tensor:
        if self.texts is not None:
            return next(self.texts)
        self.made.append(call)
        ids: torch.Tensor = call["input_ids"]
        return ids


def as_fields(statistics: DraftStatistics) -> dict[str, Any]:
    return {"tau": statistics.tau, **statistics.totals()}


def what_drafting_did(statistics: DraftStatistics) -> str:
    """One sentence, a line for each reason to step aside, and why drafting was fast or slow."""
    said = f"{statistics.calls} calls of generate() drafted"
    if statistics.calls:
        said += f", tau {statistics.tau:.2f}, {statistics.new_tokens} tokens in {statistics.total_seconds:.1f} s"
    aside = statistics.stepped_aside
    said += f"; {sum(aside.values())} stepped aside"
    said += "".join(f"\n  {count} because {reason}" for reason, count in aside.items())
    return f"{said}\n{statistics.explain()}" if statistics.calls else said


@dataclass(frozen=True)
class Evaluation:
    """Results of `lm_eval.simple_evaluate`, samples included, and seconds of each call of `generate()`, in order."""

    results: dict[str, Any]
    seconds: Sequence[float]
    drafting: DraftStatistics | None

    def results_with_drafting(self) -> dict[str, Any]:
        return {**self.results, "drafting": None if self.drafting is None else as_fields(self.drafting)}

    def answers(self) -> dict[tuple[str, int], Any]:
        """The texts, or the likelihoods, of each document by task and number."""
        samples = self.results["samples"]
        return {(task, sample["doc_id"]): sample["resps"] for task in samples for sample in samples[task]}

    def scores(self) -> dict[tuple[str, str], Any]:
        """The scores by task and metric, without standard errors."""
        table = self.results["results"]
        return {(task, name): table[task][name] for task in table for name in table[task] if "_stderr" not in name}

    def __str__(self) -> str:
        said = [make_table(self.results)]
        said += [make_table(self.results, "groups")] if self.results.get("groups") else []
        return "\n".join([*said, "without a drafter" if self.drafting is None else what_drafting_did(self.drafting)])


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


@dataclass(frozen=True)
class Comparison:
    """A drafted run beside a plain one."""

    plain: Evaluation
    drafted: Evaluation

    @property
    def other_answers(self) -> list[tuple[str, int]]:
        """Task and number of the documents whose answers differ."""
        first, second = self.plain.answers(), self.drafted.answers()
        return [key for key in first if first[key] != second.get(key)]

    @property
    def same_scores(self) -> bool:
        return self.plain.scores() == self.drafted.scores()

    def __str__(self) -> str:
        count, others = len(self.plain.answers()), self.other_answers
        said = f"same answers: {count - len(others)} of {count}"
        if others:
            said += f"; not those of {few([f'{task} {number}' for task, number in others])}"
        said += f"\nsame scores: {'yes' if self.same_scores else 'no'}"
        seconds = self.plain.seconds, self.drafted.seconds
        plain, drafted = map(sum, seconds)
        if not (plain and drafted):
            return f"{said}\nnothing was generated"
        said += f"\nseconds of generate(): {plain:.1f} plain, {drafted:.1f} drafted; speed-up {plain / drafted:.2f}"
        if len(seconds[0]) == len(seconds[1]):  # `batch_size="auto"` may find different sizes
            ratios = [one / other for one, other in zip(*seconds, strict=True)]
            said += f"; of single calls {median(ratios):.2f}, the median of {len(ratios)}"
        return said


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
