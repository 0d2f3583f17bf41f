"""`hsdraft prune`: a small language model from a target's layers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._shared import Dtype, DtypeOption, console

app = typer.Typer()


@app.command(short_help="Make a small language model of some layers of a target.")
def prune(
    out: Annotated[Path, typer.Option(help="New folder.")],
    target: Annotated[
        str | None, typer.Argument(help="Hub name, folder or .gguf file; default: SmolLM2-135M-Instruct.")
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers to keep, from 0 on, as 0,1,15,28,29.")] = None,
    num_layers: Annotated[
        int | None, typer.Option(min=1, help="Or their number: spread evenly, with the first and the last.")
    ] = None,
    dtype: DtypeOption = Dtype.float32,
) -> None:
    """Saves an ordinary model with some of the target's layers, for `hsdraft train --family lm --init-from`.

    The target's name is written into the recipe beside it and published with it; of a path, only the last part.
    """
    from ..drafters.language_model.layer_subset import checked_layers, evenly, layers_of
    from ..runtime.target_loading import DEFAULT_TARGET, load_target
    from ..training.loop.pruning import check_empty
    from ..training.loop.pruning import prune as save_pruned

    if (layers is None) == (num_layers is None):
        raise typer.BadParameter("name the layers to keep, or their number: one of --layers and --num-layers")
    try:
        named = None if layers is None else [int(part) for part in layers.split(",")]
    except ValueError:
        raise typer.BadParameter(f"expected layer numbers such as 0,1,15, found {layers!r}") from None
    check_empty(out)
    model, tokenizer = load_target(target, dtype.torch)
    count = len(layers_of(model)[1])
    kept = checked_layers(model, evenly(count, num_layers or count) if named is None else named)
    small = save_pruned(model, tokenizer, kept, out, target or DEFAULT_TARGET)
    size = sum(weight.numel() for weight in small.parameters())
    told = f"{len(kept)} of {count} layers ({', '.join(map(str, kept))}), {size / 1e6:.1f}M parameters"
    console.print(f"{told}, saved in {out}", highlight=False, soft_wrap=True)
