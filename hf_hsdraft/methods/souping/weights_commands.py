"""`hsdraft make average` and `prune`: new weights from old ones, without training."""

from __future__ import annotations

from typing import Annotated

import typer

from ...cli._shared import (
    DeviceOption,
    Dtype,
    DtypeOption,
    OutOption,
    TargetArgument,
    TargetOption,
    loaded_target,
    numbers,
    say,
)

app = typer.Typer()


@app.command(short_help="Average the weights of drafters that share a starting point.")
def average(
    drafters: Annotated[
        list[str], typer.Argument(help="Folders or Hub names of drafters that share a starting point.")
    ],
    out: OutOption,
    shares: Annotated[str, typer.Option(help="Weight of each drafter, e.g. 0.35,0.65; default: equal.")] = "",
    target: TargetOption = None,
    target_name: Annotated[str | None, typer.Option(help="Name of the target to store; default: unchanged.")] = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Averages the weights of drafters that share a starting point. Everything else is copied from the first."""
    from .average import average_folders, check_shares

    parts = numbers(shares, "--shares", "0.35,0.65", float) if shares else [1.0] * len(drafters)
    check_shares(len(drafters), parts)
    model, tokenizer = loaded_target(target, dtype.torch, device)
    average_folders(drafters, parts, out, model, tokenizer, target_name)
    say(f"drafter saved in {out}")


@app.command(short_help="Make a small language model from some layers of a target.")
def prune(
    out: OutOption,
    target: TargetArgument = None,
    layers: Annotated[str | None, typer.Option(help="Layers to keep, counted from 0, e.g. 0,1,15,28,29.")] = None,
    num_layers: Annotated[
        int | None,
        typer.Option(min=1, help="Number of layers to keep, spread evenly from first to last, instead of --layers."),
    ] = None,
    dtype: DtypeOption = Dtype.float32,
) -> None:
    """Saves an ordinary model with some of the target's layers, for `hsdraft train --family lm --init-from`.

    The target's name is written into the recipe beside it and published with it; of a path, only the last part.
    """
    from ...runtime.target_loading import DEFAULT_TARGET
    from ...training.files import check_empty
    from ..distillation.layer_subset import checked_layers, evenly, layers_of
    from .pruning import prune as save_pruned

    if (layers is None) == (num_layers is None):
        raise typer.BadParameter("name the layers to keep, or their number: one of --layers and --num-layers")
    named = None if layers is None else numbers(layers, "--layers", "0,1,15")
    check_empty(out)
    model, tokenizer = loaded_target(target, dtype.torch)
    count = len(layers_of(model)[1])
    kept = checked_layers(model, evenly(count, num_layers or count) if named is None else named)
    small = save_pruned(model, tokenizer, kept, out, target or DEFAULT_TARGET)
    size = sum(weight.numel() for weight in small.parameters())
    say(f"{len(kept)} of {count} layers ({', '.join(map(str, kept))}), {size / 1e6:.1f}M parameters, saved in {out}")
