"""`hsdraft make plan`: the best hierarchy of drafters for a target on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...cli._shared import DeviceOption, Dtype, DtypeOption, PromptsOption, TargetOption, console, loaded_target, say

if TYPE_CHECKING:
    from .hierarchy import Plan
    from .hierarchy_run import Compared

app = typer.Typer()
NGRAMS = "n-grams"


@app.command(short_help="Find the best hierarchy of drafters for a target.")
def plan(
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            "--drafter",
            help="Hub name or folder of a drafter; repeat for several. Language models may be intermediate levels.",
        ),
    ] = None,
    prompts: PromptsOption = None,
    target: TargetOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of prompts, taken evenly from all categories.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(min=16)] = 64,
    measure: Annotated[bool, typer.Option("--measure", help="Decode by the plans too, and compare.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="How often --measure decodes all prompts.")] = 1,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the recommended plan, if that is a hierarchy.")
    ] = None,
) -> None:
    """Calculates the best hierarchy of n-grams, the drafters named and the target, from costs and acceptances.

    Both are measured here, and every figure is printed with its arithmetic. The recommendation is never expected to be
    slower than the best drafter alone with drafts of fixed sizes. With --measure, nothing is saved that was slower than
    a drafter alone with its own defaults.
    """
    from ...bench.prompts import NOTE, read_questions
    from ...drafters.ngrams.cacheback import CachebackDrafter
    from ...runtime.prompt_inputs import encode_prompts
    from ...training.files import check_empty
    from .hierarchy_costs import Measuring
    from .hierarchy_run import Plans, compare

    if out is not None:
        check_empty(out)
    if not drafter:
        say("no --drafter is named: only n-grams are planned, and no hierarchy")
    if not prompts:
        say(NOTE)
    try:
        questions = read_questions(prompts or [], limit)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--prompts") from None
    drafters: dict[str, Any] = {NGRAMS: CachebackDrafter(), **_loaded(drafter or [], dtype, device)}
    model, tokenizer = loaded_target(target, dtype.torch, device)
    inputs = encode_prompts(model, tokenizer, [question.turns[0] for question in questions])
    measuring = Measuring(
        model, drafters, inputs, max_new_tokens, lambda words: say(f"measuring: {words}"), tokenizer=tokenizer
    )
    plans, compared = Plans.of(measuring.levels()), None
    for line in plans.lines():
        say(line)
    if measure:
        compared = compare(plans, model, drafters, inputs, max_new_tokens, repeats)
        console.print(compared.table)
        say(compared.verdict)
    if out is not None:
        say(_saved(plans.chosen, drafters, compared, out))


def _saved(chosen: Plan, drafters: dict[str, Any], compared: Compared | None, out: Path) -> str:
    """Saves the recommended hierarchy unless a single drafter is recommended or was faster; returns the message."""
    from .hierarchy_run import cascade_of

    if len(chosen.names) < 2:
        return f"not saved: what is recommended, {chosen.title}, is no hierarchy of drafters"
    if compared is not None and compared.faster is not None:
        return f"not saved: {compared.faster[0]}, was faster"
    cascade_of(chosen, drafters).save_pretrained(out)
    advice = "" if compared else " It was not compared with each drafter's own defaults: --measure does that."
    return f"saved: {out}. It drafts what pays, up to what is planned (tree_sizing='cost').{advice}"


def _loaded(names: list[str], dtype: Dtype, device: str) -> dict[str, Any]:
    """Loads drafters by their public names. Raises a ValueError if two have the same name."""
    from ...core.checks import public_name
    from ...generate.by_name import load_drafter

    shown = [public_name(name) for name in names]
    if len({*shown, NGRAMS, "target"}) < len(shown) + 2:
        raise ValueError(f"two drafters have one name: {', '.join(shown)}; expected folders of different names")
    return {short: load_drafter(name, dtype.torch, device) for short, name in zip(shown, names, strict=True)}
