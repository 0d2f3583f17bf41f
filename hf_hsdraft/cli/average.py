"""`hsdraft average`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._shared import DeviceOption, Dtype, DtypeOption, TargetOption, console

app = typer.Typer()


@app.command(short_help="Average the weights of drafters that began as one.")
def average(
    drafters: Annotated[list[str], typer.Argument(help="Folders or Hub names, of drafters with one beginning.")],
    out: Annotated[Path, typer.Option(help="New folder.")],
    shares: Annotated[str, typer.Option(help="Of each, as 0.35,0.65; default: equal ones.")] = "",
    target: TargetOption = None,
    target_name: Annotated[str | None, typer.Option(help="Name of the target to store; default: as before.")] = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Averages the weights of drafters that share a starting point. Everything else is copied from the first."""
    from ..runtime.target_loading import load_target
    from ..training.loop.average import average_folders, check_shares

    try:
        parts = [float(share) for share in shares.split(",")] if shares else [1.0] * len(drafters)
    except ValueError:
        raise typer.BadParameter(f"expected numbers such as 0.35,0.65, found {shares!r}") from None
    check_shares(len(drafters), parts)
    model, tokenizer = load_target(target, dtype.torch, device)
    average_folders(drafters, parts, out, model, tokenizer, target_name)
    console.print(f"drafter saved in {out}", highlight=False, soft_wrap=True)
