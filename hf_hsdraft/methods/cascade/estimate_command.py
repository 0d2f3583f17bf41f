"""`hsdraft estimate hierarchy`."""

from __future__ import annotations

from typing import Annotated

import typer

from ...cli._shared import numbers, say
from ..estimate.estimate_commands import (
    H100_BYTES,
    H100_FLOPS,
    BandwidthOption,
    LengthOption,
    ReachedOption,
    TargetConfigArgument,
)

app = typer.Typer()
_SHARES = "0.4,0.4,0.8"


@app.command("estimate-hierarchy", short_help="Say whether a middle model would pay.")
def hierarchy(
    target: TargetConfigArgument,
    middle: Annotated[str, typer.Argument(help="The same of a smaller model with the target's tokenizer.")],
    shares: Annotated[
        str, typer.Option(help="Tokens accepted of n-grams by the target, by the model, and of the model.")
    ] = _SHARES,
    speed_up: Annotated[float, typer.Option(min=0.0, help="Of another drafter that the hierarchy has to beat.")] = 0.0,
    length: LengthOption = 1024,
    bytes_per_second: BandwidthOption = H100_BYTES,
    flops_per_second: ReachedOption = H100_FLOPS,
) -> None:
    """Says whether n-grams, a middle model and the target would be faster than a drafter alone; runs nothing."""
    from ...runtime.target_loading import load_config
    from ..estimate.decoding_estimate import Device
    from .hierarchy_estimate import SAME_TOKENS, check_vocabularies, estimate_cascade, estimated_levels

    config, other = load_config(target), load_config(middle)
    found = numbers(shares, "--shares", _SHARES, float)
    check_vocabularies(config, other)
    try:
        levels = estimated_levels(config, other, found, Device(bytes_per_second, flops_per_second), length)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shares") from None
    for line in (*estimate_cascade(levels, speed_up), SAME_TOKENS):
        say(line)
