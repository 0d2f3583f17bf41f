"""`hsdraft demo`."""

from __future__ import annotations

from typing import Annotated

import typer

from ._shared import DeviceOption, DrafterOption, Dtype, DtypeOption, TargetOption, console, load_pair

app = typer.Typer()


@app.command(short_help="Answer a prompt, drafted tokens coloured.")
def demo(
    prompt: Annotated[str, typer.Argument(help="What to ask.")] = (
        "Natalia sold clips to 48 friends in April, and half as many in May. How many clips did she sell altogether?"
    ),
    target: TargetOption = None,
    drafter: DrafterOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Answers a prompt with and without the drafter, drafted tokens coloured."""
    from ..serve.demo import run_demo

    model, tokenizer, loaded = load_pair(target, drafter, dtype, device)
    run_demo(model, tokenizer, loaded, prompt, max_new_tokens, console)
