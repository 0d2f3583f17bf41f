"""`hsdraft estimate`."""

from __future__ import annotations

from typing import Annotated

import typer

from ._shared import console

app = typer.Typer()


@app.command(short_help="Say what training a drafter would take.")
def estimate(
    target: Annotated[str, typer.Argument(help="Hub name or folder of the target, or a config.json.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the training conversations.")] = 1_000_000,
    epochs: Annotated[float, typer.Option(min=0.0, help="Passes over them.")] = 3.0,
    flops_per_second: Annotated[float | None, typer.Option(min=1.0, help="Of the machine, as reached.")] = None,
    chains_per_token: Annotated[float, typer.Option(min=0.0, max=1.0, help="Chain starts per token.")] = 0.5,
    rolled_fraction: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share followed to depth K.")] = 0.5,
    tokens_per_step: Annotated[int, typer.Option(min=1, help="Tokens packed into a step.")] = 1024,
    cache_taps: Annotated[bool, typer.Option(help="With the target's hidden states on disk.")] = False,
    world_size: Annotated[int, typer.Option(min=1, help="Devices.")] = 1,
    sharded: Annotated[bool, typer.Option(help="Target sharded over the devices (FSDP, ZeRO 3).")] = False,
    num_draft_steps: Annotated[int, typer.Option(min=1, help="K.")] = 6,
) -> None:
    """Says what training a drafter for a target would take, with the arithmetic; runs nothing."""
    from transformers import AutoConfig

    from ..drafters.hidden_state.configuration_hsdraft import HSDraftConfig
    from ..training.estimate import estimate as run
    from ..training.estimate import explain

    config = AutoConfig.from_pretrained(target)
    figures = run(
        config,
        HSDraftConfig.for_target_config(config, num_draft_steps=num_draft_steps),
        tokens=tokens,
        epochs=epochs,
        flops_per_second=flops_per_second,
        chains_per_token=chains_per_token,
        rolled_fraction=rolled_fraction,
        conversations_tokens_per_step=tokens_per_step,
        cached=cache_taps,
        world_size=world_size,
        sharded=sharded,
    )
    for line in explain(figures):
        console.print(line, highlight=False, soft_wrap=True)
