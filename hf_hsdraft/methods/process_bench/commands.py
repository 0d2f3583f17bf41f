"""`hsdraft measure first-call` and `memory`: calls in fresh processes."""

from __future__ import annotations

from typing import Annotated

import typer

from ...cli._shared import (
    QUESTION,
    DeviceOption,
    DrafterOption,
    Dtype,
    DtypeOption,
    PromptFileOption,
    TargetOption,
    console,
    drafter_of,
    numbers,
    prompt_texts,
)
from ...core.progress import working

app = typer.Typer()


@app.command("first-calls", short_help="Time the first call of a process.")
def first_calls(
    lengths: Annotated[str, typer.Option(help="Numbers of new tokens, comma-separated.")] = "8,32,128",
    repeats: Annotated[int, typer.Option(min=1, help="Processes per length, plain and drafted.")] = 3,
    prompt: Annotated[str, typer.Option(help="The prompt.")] = QUESTION,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Times the first call of a process, plain and with the drafter, each in a fresh process."""
    from .processes import Pair, print_first_calls, run_first_calls

    counts = numbers(lengths, "--lengths", "1,2,4")
    pair = Pair(target, drafter_of(target, drafter), dtype.torch, device)
    with working("timing first calls"):
        found = run_first_calls(pair, prompt, counts, repeats)
    print_first_calls(found, console)


@app.command(short_help="Measure the memory of several calls at once.")
def concurrent(
    calls: Annotated[str, typer.Option(help="Numbers of concurrent calls, comma-separated.")] = "1,2,4,8",
    prompts: PromptFileOption = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Maximum number of new tokens per prompt.")] = 128,
    packed_weights: Annotated[
        bool | None, typer.Option(help="Pack weights in the first round, or never; default: the drafter's setting.")
    ] = None,
    dtype: DtypeOption = Dtype.float32,
) -> None:
    """Measures the memory of concurrent calls, each number of calls in a fresh process."""
    from .processes import Pair, print_concurrent, run_concurrent

    counts = numbers(calls, "--calls", "1,2,4")
    pair = Pair(target, drafter_of(target, drafter), dtype.torch, packed_weights=packed_weights)
    with working("measuring memory"):
        found = run_concurrent(pair, prompt_texts(prompts), counts, max_new_tokens)
    print_concurrent(found, console)
