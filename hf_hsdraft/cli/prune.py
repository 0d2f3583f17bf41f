"""`hsdraft prune` and `hsdraft skip-layers`: drafters out of a target's own layers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ._shared import DeviceOption, Dtype, DtypeOption, TargetOption, console

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

    The target's name is written into the recipe beside it, and is published with it; of a path, only the last part.
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


@app.command(short_help="Search which layers a target can leave out when it drafts.")
def skip_layers(
    out: Annotated[Path, typer.Option(help="New folder of the drafter.")],
    prompts: Annotated[
        Path | None, typer.Option("--prompts", exists=True, dir_okay=False, help="JSONL, `turns`; default: a few.")
    ] = None,
    target: TargetOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts in all, evenly from all categories.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 48,
    most: Annotated[int | None, typer.Option(min=1, help="Layers to leave out at most; default: all but two.")] = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Searches the layers by acceptance per cost, on texts that the target writes, and saves the list as a drafter.

    The drafter drafts chains of the length that was best.
    """
    from ..bench.run import spread
    from ..runtime.prompt_inputs import encode_prompts
    from ..runtime.target_loading import DEFAULT_TARGET, load_target
    from ..training.data.conversations import read_prompts
    from ..training.evaluate.parity import PROMPTS
    from ..training.loop.layer_search import as_drafter, check_target, search, written_texts
    from ..training.loop.progress import Reporter
    from ..training.loop.pruning import check_empty

    check_empty(out)
    found = None if prompts is None else spread(read_prompts(prompts), limit)
    texts = list(PROMPTS[:limit]) if found is None else [prompt.turns[0] for prompt in found]
    if not texts:
        raise typer.BadParameter(f"no prompts: {prompts} holds no line with `turns`", param_hint="--prompts")
    model, tokenizer = load_target(target, dtype.torch, device)
    check_target(model)

    def say(line: str) -> None:
        console.print(line, highlight=False, soft_wrap=True, markup=False)

    report = Reporter(say, console=console if console.is_terminal else None)
    inputs = encode_prompts(model, tokenizer, texts)
    best = search(model, written_texts(model, inputs, max_new_tokens, report), most, report)
    as_drafter(model, best, target or DEFAULT_TARGET).save_pretrained(out)
    say(f"best {best}; saved in {out}")
    if best.speed <= 1.0:
        say(f"this does not pay here: {best.speed:.2f} x plain. Plain decoding is faster than this drafter")
