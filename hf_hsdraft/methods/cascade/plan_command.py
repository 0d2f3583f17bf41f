"""`hsdraft make plan`: the best hierarchy of drafters for a target on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ...cli._shared import DeviceOption, Dtype, DtypeOption, TargetOption, console, loaded_target, option, say

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
    prompts: Annotated[
        list[Path] | None,
        option("JSONL with `turns`; default: 6 that come with the package.", exists=True, dir_okay=False),
    ] = None,
    target: TargetOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of prompts, taken evenly from all categories.")] = 6,
    max_new_tokens: Annotated[int, typer.Option(min=16)] = 64,
    measure: Annotated[bool, typer.Option("--measure", help="Decode by the hierarchy too, and compare.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="How often --measure decodes all prompts.")] = 1,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the recommended plan, if that is a hierarchy.")
    ] = None,
) -> None:
    """Calculates the best hierarchy of n-grams, the drafters named and the target, from costs and acceptances.

    Both are measured here, and every figure is printed with its arithmetic. A hierarchy is recommended if it is
    expected to be faster than plain decoding and than each drafter alone with its own defaults, as measured; with
    --measure, if it was faster.
    """
    from ...bench.calls import NOTE, Settings, read_questions
    from ...bench.calls import measure as measured_by
    from ...bench.report import BenchResult, print_report
    from ...drafters.lookup.cacheback import CachebackDrafter
    from ...runtime.prompt_inputs import encode_prompts
    from ...training.files import check_empty
    from . import planning
    from .hierarchy import best_cascade

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
    levels, remarks = planning.measured_levels(
        model, drafters, inputs, max_new_tokens, tokenizer, lambda words: say(f"measuring: {words}")
    )
    cascade = best_cascade(levels)
    for line in (*remarks, *planning.arithmetic(levels, cascade)):
        say(line)
    systems = planning.systems_of(drafters, model, cascade if measure else None)
    repeats = repeats if measure else 1
    result = BenchResult({"max_new_tokens": max_new_tokens, "repeats": repeats}, {}, questions)
    result.measured = measured_by(model, systems, inputs, Settings(max_new_tokens), repeats)
    print_report(result, console)
    summaries = result.summaries()
    if cascade is not None and measure:
        found = summaries[cascade.title]
        say(
            f"{cascade.title}, expected and measured: {cascade.emitted:.2f} and {found.acceptance_length:.2f} tokens a "
            f"round, speed-up {cascade.speed_up:.3f} and {found.speed_up:.3f}"
        )
    best = planning.recommended({name: row.speed_up for name, row in summaries.items()}, cascade)
    say(f"recommended: {best}")
    if out is None:
        return
    if cascade is None or best != planning.saved_title(cascade):
        say("not saved: what is recommended is no hierarchy of drafters")
        return
    planning.cascade_of(cascade, drafters).save_pretrained(out)
    advice = "" if measure else " Its speed is calculated: --measure decodes with it."
    say(f"saved: {out}. It drafts what pays, up to what is planned (tree_sizing='cost').{advice}")


def _loaded(names: list[str], dtype: Dtype, device: str) -> dict[str, Any]:
    """Loads drafters by their public names. Raises a ValueError if two have the same name."""
    from ...core.checks import public_name
    from ...generate.by_name import load_drafter

    shown = [public_name(name) for name in names]
    if len({*shown, NGRAMS, "target"}) < len(shown) + 2:
        raise ValueError(f"two drafters have one name: {', '.join(shown)}; expected folders of different names")
    return {short: load_drafter(name, dtype.torch, device) for short, name in zip(shown, names, strict=True)}
