"""Decodes random calls of `generate()` with and without drafts, and compares what they return; exits with 1 if wrong.

    python benchmarks/random_calls.py --count 2000 --seed 0
    python benchmarks/random_calls.py --seed 0 --only 17

A configuration is one to four calls on one tiny random model: its type (any of transformers that `generate()` decodes),
prompts, arguments, caches, drafters and drafting options, and changes of the model between the calls. Its number and
the seed decide all of it. Each call runs plainly on one copy of the model, and with drafts on another. The tests'
packages have to be installed (`pip install -e '.[test]'`).
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from runner import options, print_table

if TYPE_CHECKING:
    from oracles.random_calls import Case, Played, Run

OUTCOMES = ("same", "refused", "both raise", "only plain raises", "plain varies", "tie", "WRONG")
_NOISE = 1e-5  # a text that plain decoding changes by itself with this much noise is a tie


@dataclass(frozen=True)
class Outcome:
    """What came of a configuration; `accepted` and `rejected` say whether any drafted token was."""

    case: Case
    group: str
    result: str  # one of OUTCOMES
    reason: str = ""
    accepted: bool = False
    rejected: bool = False


def check(seed: int, number: int) -> Outcome:
    """Decodes one configuration in both ways."""
    from oracles.random_calls import Run
    from oracles.random_cases import case_of, group_of

    case = case_of(seed, number)
    runs, result, reason, found = [Run(case), Run(case)], "same", "", [False, False]
    group = group_of(case, runs[0].model)
    for index, step in enumerate(case.steps):
        one, reason_here, counted = _compared(case, index, *runs)
        found = [before or now for before, now in zip(found, counted, strict=True)]
        if one != "same":
            result, reason = one, f"call {index + 1} of {len(case.steps)} ({step.way}): {reason_here}"
        if one not in ("same", "refused", "both raise"):
            break
    for run in runs:
        run.close()
    return Outcome(case, group, result, reason, *found)


def _compared(case: Case, index: int, plain_run: Run, drafted_run: Run) -> tuple[str, str, tuple[bool, bool]]:
    """Plays a step in both runs. Returns the outcome, its reason, and whether drafts were accepted and rejected."""
    from oracles.random_calls import Played, brief
    from oracles.random_cases import DRAWN

    step = case.steps[index]
    plain = plain_run.play(step, by_row=step.by_row)
    try:
        drafted = drafted_run.play(step, truth=plain.new if plain.error is None else [[]] * 16)
    except Exception as error:  # of making the drafter
        drafted = Played(error=error)
    counted = _counted(drafted)
    if plain.error is not None:
        again = drafted.error or (ValueError(drafted.refused) if drafted.refused else None)
        if again is None:
            return "only plain raises", brief(plain.error), counted
        alike = drafted.refused or type(again) is type(plain.error)
        return ("both raise" if alike else "WRONG"), f"{brief(plain.error)}; drafted: {brief(again)}", counted
    if drafted.error is not None:
        return "WRONG", f"raises {brief(drafted.error)}", counted
    refused = drafted.refused
    spent = any(found in refused for found in ("several tokens at once", "while it is read"))  # found with the cache
    if spent and step.cache != "default":
        plain_run.last = drafted_run.last = None
        return "refused", refused, counted
    if refused:
        drafted = drafted_run.call(step, drafting=False, by_row=step.by_row)
    drawn = case.options.get("tree_builder") in DRAWN
    differs, by_row = difference(plain, drafted, not drawn or refused != ""), step.by_row
    stepped_aside = step.by_row and not refused and not drafted.drafted  # before the rows drew by themselves
    if differs and stepped_aside and step.cache != "default":
        return "refused", "it stepped aside, and its cache is spent: rows drew from one generator", counted
    if differs and stepped_aside:
        plain, by_row = plain_run.call(step, drafting=False), False
        differs = difference(plain, drafted)
    if not differs:
        return ("refused", refused, counted) if refused else ("same", "", counted)
    if step.cache == "default" and difference(plain, plain_run.call(step, drafting=False, by_row=by_row)):
        return "plain varies", differs, counted  # a model that keeps states from call to call
    tie = differs.startswith("text") and _is_tie(case, index, plain, drafted)
    return ("tie" if tie else "WRONG"), differs + (f" after the refusal {refused}" if refused else ""), counted


def difference(plain: Played, drafted: Played, drawn_alike: bool = True) -> str:
    """Returns in what a drafted call differs from a plain one, or "".

    `drawn_alike` says whether the random numbers have to go on from the same state.
    """
    import torch

    if drafted.error is not None:
        return f"raises {drafted.error!r}"
    if not torch.equal(plain.texts, drafted.texts):
        row, place = first_difference(plain, drafted)
        return f"text, row {row}, new token {place}: {_around(drafted, row, place)}, not {_around(plain, row, place)}"
    if plain.streamed != drafted.streamed:
        return f"streamed {drafted.streamed}, not {plain.streamed}"
    if drawn_alike and len(plain.texts) == 1 and not torch.equal(plain.random_state, drafted.random_state):
        return "state of the random numbers"
    live = torch.tensor(plain.new)[:, :, None] != 0  # what an ended row returns is documented as zeros
    real = plain.inputs.get("attention_mask") if "static" in str(plain.cache_implementation) else None
    for name in ("scores", "logits", "hidden_states", "attentions", "decoder_hidden_states", "decoder_attentions"):
        if where := _differing(getattr(plain.output, name, None), getattr(drafted.output, name, None), live, real):
            return f"{name}: {where}"
    if len(plain.kept) != len(drafted.kept):
        return f"cache: {len(drafted.kept)} tensors, not {len(plain.kept)}"
    for layer, ((windowed, one), (_, other)) in enumerate(zip(plain.kept, drafted.kept, strict=True)):
        slots = min(one.shape[2], other.shape[2]) if windowed else None
        where = _apart(one if slots is None else one[:, :, -slots:], other if slots is None else other[:, :, -slots:])
        if where:
            return f"cache, tensor {layer} of {len(plain.kept)}: {where}"
    return ""


def _differing(plain: Any, drafted: Any, live: Any, real: Any) -> str:
    """Where outputs differ. With the mask `real` the cache is static: drafts make it longer, and padding sees all."""
    from torch.utils._pytree import tree_leaves

    if plain is None or drafted is None:
        none = not any(plain or drafted or ())  # ((), (), ...) or (None, None, ...) of an attention that gives none
        return "" if none else f"{type(drafted)}, not {type(plain)}"
    if len(plain) != len(drafted):
        return f"{len(drafted)} steps, not {len(plain)}"
    for step, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        layers, others = tree_leaves(one), tree_leaves(other)  # XLNet's are tuples of tuples
        if not layers:  # BigBird exchanges its attention in a forward, and with it what transformers records
            continue
        if len(layers) != len(others):
            return f"{len(others)} layers, not {len(layers)}"
        rows = live[:, min(step, live.shape[1] - 1), 0]  # a call may return more steps than tokens
        for one, other in zip(layers, others, strict=True):
            if one is None or other is None or one.shape[0] != len(rows):
                continue
            if real is not None:
                one, other = _of_static_cache(one, other, real)
            if where := _apart(one[rows], other[rows] if other.shape[0] == len(rows) else other):
                return f"step {step}: {where}"
    return ""


def _of_static_cache(one: Any, other: Any, real: Any) -> tuple[Any, Any]:
    """What two outputs of static caches of different lengths have in common; 0 at padding."""
    if one.dim() == 4 and one.shape[:3] == other.shape[:3]:  # attentions
        slots = min(one.shape[3], other.shape[3])
        one, other = one[..., :slots], other[..., :slots]
    queries = one.shape[-2]
    if queries != real.shape[1] or one.shape[0] % len(real):
        return one, other
    hidden = (real == 0).repeat_interleave(one.shape[0] // len(real), dim=0)
    hidden = hidden[:, None, :, None] if one.dim() == 4 else hidden[:, :, None]
    return one.masked_fill(hidden, 0), other.masked_fill(hidden, 0)


def _apart(one: Any, other: Any) -> str:
    """Whether two tensors are further apart than rounding; masked numbers are equal."""
    import torch

    if one.shape != other.shape:
        return f"shape {tuple(other.shape)}, not {tuple(one.shape)}"
    one, other = one.double(), other.double()
    hidden = ~one.isfinite() | (one < -1e30)
    if not torch.equal(hidden, ~other.isfinite() | (other < -1e30)):
        return "other numbers are masked"
    gap = (one - other).abs().masked_fill(hidden, 0)
    size = one.masked_fill(hidden, 0).abs().amax() if one.numel() else gap.new_zeros(())
    # Norms of almost nothing amplify rounding: delta rules over chunks and single steps came to 3.2e-4 apart once.
    if not gap.numel() or bool((gap <= 5e-4 * size + 1e-5).all()):
        return ""
    place = [int(each) for each in torch.unravel_index(gap.argmax(), gap.shape)]
    return f"apart by {float(gap.max()):.2g} of {float(size):.2g} at {place} of {list(gap.shape)}"


def first_difference(plain: Played, drafted: Played) -> tuple[int, int]:
    """Returns the row and the new token of the first difference of two texts, of all rows the earliest."""
    places = []
    for row, (one, other) in enumerate(zip(plain.new, drafted.new, strict=False)):
        place = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
        if place is None and len(one) != len(other):
            place = min(len(one), len(other))
        places += [] if place is None else [(place, row)]
    return min(places, default=(0, 0))[::-1]


def _around(played: Played, row: int, place: int) -> list[int]:
    return played.new[row][max(place - 1, 0) : place + 3] if row < len(played.new) else []


def _is_tie(case: Case, index: int, plain: Played, drafted: Played) -> bool:
    """Whether plain decoding leaves its own text at the same place with a little noise on embeddings and logits."""
    import torch
    from oracles.random_calls import Run

    where = first_difference(plain, drafted)
    for seed in range(4):
        run, generator = Run(case), torch.Generator().manual_seed(seed)

        def noisy(module: Any, inputs: Any, output: Any, generator: Any = generator) -> Any:
            if not isinstance(output, torch.Tensor):
                return output
            return output + _NOISE * output.detach().std() * torch.randn(output.shape, generator=generator)

        for module in (run.model.get_input_embeddings(), run.model.get_output_embeddings()):
            if module is not None:
                module.register_forward_hook(noisy)
        for step in case.steps[: index + 1]:
            again = run.play(step, by_row=step.by_row)
        run.close()
        if again.error is None and first_difference(plain, again) == where and again.new != plain.new:
            return True
    return False


def _counted(drafted: Played) -> tuple[bool, bool]:
    """Whether drafted tokens were accepted, and rejected."""
    found = drafted.statistics
    if found is None:
        return False, False
    return any(found.accepted_lengths), sum(found.drafted_nodes) > sum(found.accepted_lengths)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = options(__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of all configurations; default: 0")
    parser.add_argument("--count", type=int, default=2000, help="configurations; default: 2000")
    parser.add_argument("--first", type=int, default=0, help="number of the first one; default: 0")
    parser.add_argument("--minutes", type=float, help="stop after this long")
    parser.add_argument("--only", type=int, help="number of the one configuration to decode, and to show")
    given = parser.parse_args(arguments)
    numbers = range(given.first, given.first + given.count) if given.only is None else [given.only]
    _quieten()
    begin, found = time.monotonic(), []
    for number in numbers:
        if given.minutes is not None and time.monotonic() - begin > 60 * given.minutes:
            break
        found.append(outcome := check(given.seed, number))
        if number % 20 == 0:
            gc.collect()
        if outcome.result in ("WRONG", "only plain raises", "tie") or given.only is not None:
            replay = f"python benchmarks/random_calls.py --seed {given.seed} --only {number}"
            print(f"{outcome.result} ({outcome.case.model_type}): {outcome.reason}\n    {replay}", flush=True)
        if given.only is not None:
            print(outcome.case)
    _print_summary(found, (time.monotonic() - begin) / 60)
    return int(any(outcome.result == "WRONG" for outcome in found))


def _quieten() -> None:
    import torch
    from transformers.utils import logging

    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.disable()  # collecting is slow beside so many modules


def _print_summary(found: Sequence[Outcome], minutes: float) -> None:
    counts = Counter((outcome.group, outcome.result) for outcome in found)
    groups = sorted({outcome.group for outcome in found})
    rows: list[list[Any]] = [[group, *(counts[group, result] for result in OUTCOMES)] for group in groups]
    print_table(
        ("architecture", *OUTCOMES),
        [*rows, ["all", *(sum(row[i] for row in rows) for i in range(1, len(OUTCOMES) + 1))]],
    )
    for result in ("refused", "both raise"):
        reasons = Counter(outcome.reason.partition(": ")[2][:110] for outcome in found if outcome.result == result)
        for reason, count in reasons.most_common(12):
            print(f"{result}, {count}: {reason}")
    types = len({outcome.case.model_type for outcome in found})
    accepted, rejected = (sum(getattr(o, name) for o in found) for name in ("accepted", "rejected"))
    print(
        f"\n{len(found)} configurations of {types} model types, {len(found) / max(minutes, 1e-9):.0f} a minute; drafts "
        f"were accepted in {accepted / max(len(found), 1):.0%} and rejected in {rejected / max(len(found), 1):.0%}"
    )


if __name__ == "__main__":
    sys.exit(main())
