"""`hsdraft plan`: the best hierarchy of drafters for a target on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ._shared import DeviceOption, Dtype, DtypeOption, TargetOption, check_fit, console

app = typer.Typer()
NGRAMS = "n-grams"


@app.command(short_help="Find the best hierarchy of drafters for a target.")
def plan(
    drafter: Annotated[
        list[str] | None,
        typer.Option("--drafter", help="Hub name or folder; repeat for several. Language models may stand in between."),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option("--prompts", exists=True, dir_okay=False, help="JSONL with `turns`; default: 6 of its own."),
    ] = None,
    target: TargetOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts in all, taken evenly from all categories.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(min=16)] = 64,
    measure: Annotated[bool, typer.Option("--measure", help="Also decode by the plans, and compare.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="With --measure: how often all prompts are decoded.")] = 1,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Save the recommended hierarchy here, if it is one.")
    ] = None,
) -> None:
    """Calculates the best hierarchy of n-grams, the drafters named and the target, from costs and acceptances.

    Both are measured here. All figures are printed with their arithmetic. What is recommended is never expected to be
    slower than the best drafter alone.
    """
    from ..bench.default_prompts import DEFAULT_PROMPTS, NOTE
    from ..bench.hierarchy_costs import Measuring
    from ..bench.hierarchy_run import Plans, cascade_of, compare
    from ..bench.measure import encode_prompt
    from ..bench.run import spread
    from ..drafters.ngrams.cacheback import CachebackDrafter
    from ..target.target_loading import load_target
    from ..training.conversations import read_prompts
    from ..training.pruning import check_empty

    if out is not None:
        check_empty(out)
    if not prompts:
        console.print(NOTE, highlight=False, soft_wrap=True)
    found = [prompt for path in prompts for prompt in read_prompts(path)] if prompts else DEFAULT_PROMPTS
    questions = spread(found, limit)
    if not questions:
        raise typer.BadParameter("no questions: the prompt files hold no line with `turns`", param_hint="--prompts")
    drafters: dict[str, Any] = {NGRAMS: CachebackDrafter(), **_loaded(drafter or [], dtype, device)}
    model, tokenizer = load_target(target, dtype.torch, device)
    for each in drafters.values():
        check_fit(each, model, tokenizer)
    inputs = [encode_prompt(tokenizer, question.turns[0], model.device) for question in questions]

    def tell(words: str) -> None:
        console.print(f"measuring: {words}", highlight=False, soft_wrap=True)

    plans = Plans.of(Measuring(model, drafters, inputs, max_new_tokens, tell).levels())
    for line in plans.lines():
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if measure:
        _, table = compare(plans, model, drafters, inputs, max_new_tokens, repeats)
        console.print(table)
    if out is not None:
        told = f"not saved: what is recommended, {plans.chosen.title}, is no hierarchy of drafters"
        if len(plans.chosen.names) > 1:
            cascade_of(plans.chosen, drafters).save_pretrained(out)
            told = f"saved: {out}"
        console.print(told, highlight=False, soft_wrap=True)


def _loaded(names: list[str], dtype: Dtype, device: str) -> dict[str, Any]:
    """The drafters of some names, by names of their own.

    Raises:
        ValueError: two have the same name.
    """
    from ..by_name import load_drafter
    from ..common.checks import public_name

    shown = [public_name(name) for name in names]
    if len({*shown, NGRAMS, "target"}) < len(shown) + 2:
        raise ValueError(f"two drafters have one name: {', '.join(shown)}; expected folders of different names")
    return {short: load_drafter(name, dtype.torch, device) for short, name in zip(shown, names, strict=True)}
