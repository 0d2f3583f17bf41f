"""`hsdraft make refiner`: trains a tiny model of the target's answers that refines a drafter's drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...cli._shared import DeviceOption, SavedDrafterOption, TargetOption, check_fit, drafter_of, loaded_target, say

app = typer.Typer()


@app.command("train-refiner", short_help="Train a refiner of a drafter's drafts.")
def train_refiner(
    train: Annotated[
        list[Path],
        typer.Option("--train", exists=True, help="Answers of the target: JSONL, or the folder of a run; repeat."),
    ],
    drafter: SavedDrafterOption = None,
    target: TargetOption = None,
    out: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder for the drafter with the refiner; default: beside its weights."),
    ] = None,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the answers.")] = 1,
    held_out: Annotated[int, typer.Option(min=2, help="Hold out one chat in this many.")] = 20,
    max_length: Annotated[int, typer.Option(min=8, help="Maximum tokens per chat; the rest is cut.")] = 1024,
    seed: int = 0,
    device: DeviceOption = "cpu",
) -> None:
    """Trains a refiner on answers of the target and saves it beside a drafter, whose weights do not change.

    The drafter's option `refinement` sets its weight; it is 0 until you set it.
    """
    from ...generate.by_name import load_drafter
    from ...training.data.conversations import Conversation, read_chats, tokenize_conversation
    from ...training.files import check_place
    from .refinement import CONFIG, PathLMSizes, save_refiner, why_not_refined
    from .refiner_training import examples_of
    from .refiner_training import train_refiner as run

    name = drafter_of(target, drafter, trained=True)
    if out is None and not Path(name).is_dir():
        raise typer.BadParameter(f"{name} is no folder: say where to save it with its refiner", param_hint="--out")
    loaded = load_drafter(name, None, device)
    if why := why_not_refined(loaded):
        raise ValueError(f"this {type(loaded).__name__} cannot be refined: {why}")
    folder = Path(name) if out is None else out
    if out is None:
        check_place(folder / CONFIG)
    chats = [chat for path in train for chat in read_chats(path) if isinstance(chat, Conversation)]
    if len(chats) < held_out:
        raise ValueError(f"{len(chats)} chats are too few: expected {held_out} at least, of which one is held out")
    model, tokenizer = loaded_target(target, loaded.dtype, device)
    check_fit(loaded, model, tokenizer)
    weights = loaded.borrow(model.get_input_embeddings(), model.get_output_embeddings())
    tokenized = [tokenize_conversation(tokenizer, chat, max_length) for chat in chats]
    width = weights.embed(weights.vocab_ids[:1]).shape[-1]
    sizes = PathLMSizes(width, len(weights.vocab_ids))
    judges = examples_of(tokenized[::held_out], weights.vocab_ids, sizes.length)
    learned = [chat for index, chat in enumerate(tokenized) if index % held_out]
    examples = examples_of(learned, weights.vocab_ids, sizes.length)
    say(f"{len(examples):,} tokens to learn from, {len(judges):,} held out")

    def report(done: int, steps: int, loss: float) -> None:
        if done % 500 == 0 or done == steps:
            say(f"step {done:,} of {steps:,}: loss {loss:.3f}")

    if out is not None:  # before the work: the folder may not be writable
        loaded.save_pretrained(out)
        check_place(out / CONFIG)
    trained, figures = run(examples, judges, sizes, weights, epochs, seed, report)
    save_refiner(trained.to(loaded.dtype), folder, weights.vocab_ids, {**figures, "seed": seed})
    say(
        f"held-out perplexity {figures['perplexity_before']:.1f} before, {figures['perplexity_after']:.1f} after, "
        f"{figures['seconds']:.0f} seconds; saved in {folder}. Refine by "
        "drafter.generation_config.refinement = 0.2, for instance"
    )
