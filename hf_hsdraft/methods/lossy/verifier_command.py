"""`hsdraft train-verifier`: the classifier of pivot-aware verification."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...cli._shared import DeviceOption, DrafterOption, Dtype, DtypeOption, TargetOption, console, load_pair
from .command_parts import TASKS, QuestionsOption, TasksOption, check_files, going_on_from, names_in

if TYPE_CHECKING:
    from .checked_tasks import Item
    from .pivot_labels import Labels
    from .pivot_training import Place, Plan

app = typer.Typer()


@app.command("train-verifier", short_help="Train the classifier of pivot-aware verification.")
def train_verifier(
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder of a drafter to write; default: the drafter's own.")
    ] = None,
    tasks: TasksOption = TASKS,
    questions: QuestionsOption = None,
    items: Annotated[int, typer.Option(min=1, help="Questions of each task.")] = 100,
    places: Annotated[int, typer.Option(min=1, help="Mismatches that are labelled, at most, of each question.")] = 2,
    roll_outs: Annotated[int, typer.Option(min=1, help="Answers sampled from each of the two tokens.")] = 20,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of these answers.")] = 0.7,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 0,
    labels: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Keep the labels here as they come. A run that was stopped goes on from it."),
    ] = None,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Trains the classifier that verification="pivot" needs, by answers that can be checked, and saves it.

    It is saved beside the drafter's weights. Train on the tasks that you will use it for: it does not generalise.
    """
    from .checked_tasks import items_of
    from .pivot_labels import Labels, run_of
    from .pivot_training import Plan, fit, save_beside

    try:
        asked = items_of(names_in(tasks), questions or [], items, seed)
        check_files(labels)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    model, tokenizer, loaded = load_pair(target, drafter, dtype, device)
    plan = Plan(places, roll_outs, temperature, max_new_tokens, seed)
    folder = plan.folder_for(loaded, out)
    kept = Labels.read(labels, {} if labels is None else run_of(model, plan))
    with going_on_from(labels):
        found = _labelled((model, tokenizer, loaded), asked, plan, kept)
    classifier, figures = fit([place for place, _ in found], [label for _, label in found], plan)
    save_beside(loaded, classifier, folder, model)
    for name, value in classifier.recipe.items():
        console.print(f"{name}: {value}", highlight=False, markup=False, soft_wrap=True)
    console.print(f"saved in {folder}; held-out figures: {figures}", highlight=False, markup=False, soft_wrap=True)


def _labelled(pair: tuple[Any, Any, Any], asked: list[Item], plan: Plan, kept: Labels) -> list[tuple[Place, int]]:
    """Returns a sample of mismatches of the answers, each with its label: 1 for a pivot. Adds new labels to `kept`.

    `pair` is target, tokenizer and drafter.
    """
    from rich.progress import Progress

    from . import pivot_training

    model, tokenizer, drafter = pair
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("decoding", total=len(asked))
        places: list[Place] = []
        for item in asked:
            places += pivot_training.collect(model, tokenizer, drafter, item, plan)
            progress.advance(task)
        task = progress.add_task("rolling out", total=len(places))
        found: list[tuple[Place, int]] = []
        for place in places:
            label = kept.of(place)
            if label is None:
                label = pivot_training.label(model, tokenizer, place, plan)
                kept.add(place, label)
            found.append((place, label))
            progress.advance(task)
    return found
