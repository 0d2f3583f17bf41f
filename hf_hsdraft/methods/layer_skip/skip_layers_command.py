"""`hsdraft make skip-layers`: the layers that a target can leave out when it drafts."""

from __future__ import annotations

from typing import Annotated

import typer

from ...cli._shared import (
    DeviceOption,
    Dtype,
    DtypeOption,
    OutOption,
    PromptFileOption,
    TargetOption,
    console,
    loaded_target,
    say,
)

app = typer.Typer()


@app.command(short_help="Search for layers that a target can skip when it drafts.")
def skip_layers(
    out: OutOption,
    prompts: PromptFileOption = None,
    target: TargetOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of prompts, taken evenly from all categories.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 48,
    most: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of layers to skip; default: all but two.")
    ] = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Searches the layers by acceptance per cost on texts that the target writes, and saves the list as a drafter.

    It drafts chains of the length judged best.
    """
    from ...bench.calls import spread
    from ...core.progress import Reporter
    from ...runtime.prompt_inputs import encode_prompts
    from ...runtime.target_loading import DEFAULT_TARGET
    from ...training.data.conversations import read_prompts
    from ...training.evaluate.parity import PROMPTS
    from ...training.files import check_empty
    from .layer_skip import as_drafter, check_target, search, written_texts

    check_empty(out)
    found = None if prompts is None else spread(read_prompts(prompts), limit)
    texts = list(PROMPTS[:limit]) if found is None else [prompt.turns[0] for prompt in found]
    if not texts:
        raise typer.BadParameter(f"no prompts: {prompts} holds no line with `turns`", param_hint="--prompts")
    model, tokenizer = loaded_target(target, dtype.torch, device)
    check_target(model)
    report = Reporter(say, console=console if console.is_terminal else None)
    inputs = encode_prompts(model, tokenizer, texts)
    best = search(model, written_texts(model, inputs, max_new_tokens, report), most, report)
    as_drafter(model, best, target or DEFAULT_TARGET).save_pretrained(out)
    say(f"best {best}; saved in {out}")
    if best.speed <= 1.0:
        say(f"this does not pay here: {best.speed:.2f} x plain. Plain decoding is faster than this drafter")
