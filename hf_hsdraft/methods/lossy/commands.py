"""`hsdraft measure quality`: what lossy rules cost and gain. `hsdraft make verifier`: the classifier of `pivot`."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...cli._shared import (
    DeviceOption,
    DrafterOption,
    Dtype,
    DtypeOption,
    JsonOption,
    NewTokensOption,
    SavedDrafterOption,
    TargetOption,
    console,
    drafter_of,
    load_pair,
    numbers,
    say,
)
from ...core.progress import errors

if TYPE_CHECKING:
    from .quality import Answer

app = typer.Typer()
TASKS = "copying,addition,sentiment,choosing,extraction,counting,explaining,writing"
TasksOption = Annotated[str, typer.Option(help=f"Tasks, comma-separated: {TASKS.replace(',', ', ')}.")]
QuestionsOption = Annotated[
    list[Path] | None,
    typer.Option(
        exists=True, dir_okay=False, help="JSONL with `turns` and `answer`, and `labels` if the answer is one of these."
    ),
]
RulesOption = Annotated[
    str,
    typer.Option(
        help="Comma-separated: fly, typical, pivot, each with options, as fly+fly_window=2; ngram_continuation, "
        "num_assistant_tokens and tree_size are such options too."
    ),
]
SpeedOption = Annotated[
    bool,
    typer.Option(help="Measure speed too; --no-speed suits a busy machine, and fixes the size of drafts."),
]
AnswersOption = Annotated[
    Path | None,
    typer.Option(dir_okay=False, help="File that keeps answers as they come; an interrupted run resumes from it."),
]


def names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def check_files(*paths: Path | None, picture: Path | None = None) -> None:
    """Raises an error if a file cannot be written where wanted, before anything is measured."""
    for path in (*paths, picture):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"no such folder: {path.parent}")
    if picture is not None and picture.suffix != ".png":
        raise ValueError(f"--picture {picture} is invalid: expected a file that ends in .png")
    if picture is not None and importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--picture needs matplotlib: pip install -e '.[bench]' in a checkout")


@contextlib.contextmanager
def going_on_from(kept: Path | None) -> Iterator[None]:
    """Says on Ctrl-C that the run can resume from a file."""
    try:
        yield
    except KeyboardInterrupt:
        if kept is not None and kept.is_file():
            say(f"stopped; the same command resumes from {kept}")
        raise


@app.command(short_help="Measure what lossy verification costs and gains.")
def quality(
    rules: RulesOption = "fly,typical",
    thresholds: Annotated[
        str,
        typer.Option(help="Measure each rule with these thresholds too, e.g. 0.1,0.3,0.5; all must be in its range."),
    ] = "",
    tasks: TasksOption = TASKS,
    questions: QuestionsOption = None,
    items: Annotated[int, typer.Option(min=1, help="Questions per task.")] = 200,
    max_new_tokens: NewTokensOption = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="Temperature of sampled answers; 0 omits them.")] = 0.7,
    greedy: Annotated[bool, typer.Option(help="Measure greedy answers too.")] = True,
    seed: Annotated[int, typer.Option(help="Seed for choosing questions and sampling answers.")] = 0,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
    answers: AnswersOption = None,
    speed: SpeedOption = True,
    json_out: JsonOption = None,
    picture: Annotated[Path | None, typer.Option(help="PNG file for the curve of accuracy against speed.")] = None,
) -> None:
    """Compares lossy rules with plain decoding and exact drafting, by answers that can be checked."""
    from ...bench.calls import Settings, processor
    from ...bench.plan import reporter
    from ...bench.report import define
    from ...core.checks import public_name
    from ...training.files import write_json
    from .checked_tasks import items_of
    from .kept_answers import kept_answers
    from .quality import GREEDY, SAMPLED, Quality, measure_quality, rules_of, systems_of, trained_with
    from .quality_figures import as_document, draw_quality, tables_of

    try:
        wanted = rules_of(names_in(rules), numbers(thresholds, "--thresholds", "0.1,0.3", float) if thresholds else [])
        asked = items_of(names_in(tasks), questions or [], items, seed)
        if temperature == 0 and not greedy:
            raise ValueError("--no-greedy and --temperature 0 leave nothing to decode: give one of them up")
        if not wanted:
            raise ValueError("--rules names no rule: expected some of fly, typical, pivot")
        check_files(answers, json_out, picture=picture)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    drafter = drafter_of(target, drafter)
    model, tokenizer, loaded = load_pair(target, drafter, dtype, device)
    asked = items_of(names_in(tasks), questions or [], items, seed, trained_with(loaded, wanted))
    settings = {
        "target": public_name(getattr(model, "name_or_path", "")),
        "dtype": dtype.value,
        "device": device,
        "processor": processor(model.device),
        "questions": len(asked),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
    }
    found = Quality(settings, {rule.text: rule for rule in wanted}, timed=speed, drafter=public_name(drafter))
    systems = systems_of(loaded, wanted, speed)
    log = kept_answers(answers, {**settings, "timed": speed}, asked, systems, model)
    modes = {**({GREEDY: 0.0} if greedy else {}), **({SAMPLED: temperature} if temperature else {})}
    with going_on_from(answers), reporter(errors).stage("answers", "questions", len(asked) * len(modes)) as stage:
        for mode, heat in modes.items():

            def kept(place: int, ask: Callable[[], dict[str, Answer]], mode: str = mode) -> dict[str, Answer]:
                own = log.of((mode, place), ask)
                stage.advance(stage.done + 1)
                return own

            how = Settings(max_new_tokens, heat, seed)
            found.answers[mode] = measure_quality(model, tokenizer, systems, asked, how, kept)
            if json_out is not None:
                write_json(json_out, as_document(found))
    for table in tables_of(found):
        console.print(table)
    define(console, as_document(found)["definitions"])
    if picture is not None:
        say(f"picture: {draw_quality(found, picture).name}")


@app.command("train-verifier", short_help="Train the classifier of pivot-aware verification.")
def train_verifier(
    out: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Folder of the drafter to write to; default: the given drafter's."),
    ] = None,
    tasks: TasksOption = TASKS,
    questions: QuestionsOption = None,
    items: Annotated[int, typer.Option(min=1, help="Questions per task.")] = 100,
    places: Annotated[int, typer.Option(min=1, help="Maximum number of mismatches to label per question.")] = 2,
    roll_outs: Annotated[int, typer.Option(min=1, help="Answers to sample from each of the two tokens.")] = 20,
    temperature: Annotated[float, typer.Option(min=0.01, help="Temperature of these answers.")] = 0.7,
    max_new_tokens: NewTokensOption = 64,
    seed: Annotated[int, typer.Option(help="Seed for all random choices.")] = 0,
    labels: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="File that keeps labels as they come; an interrupted run resumes from it."),
    ] = None,
    target: TargetOption = None,
    drafter: SavedDrafterOption = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Trains the classifier that verification="pivot" needs, by answers that can be checked, and saves it.

    It is saved beside the drafter's weights. Train on the tasks that you will use it for: it does not generalise.
    """
    from ...bench.plan import reporter
    from . import pivot_training
    from .checked_tasks import items_of
    from .kept_answers import kept_labels, key_of

    try:
        asked = items_of(names_in(tasks), questions or [], items, seed)
        check_files(labels)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    model, tokenizer, loaded = load_pair(target, drafter, dtype, device)
    plan = pivot_training.Plan(places, roll_outs, temperature, max_new_tokens, seed)
    folder, report = plan.folder_for(loaded, out), reporter(errors)
    kept, found, known = kept_labels(labels, model, plan), list[pivot_training.Place](), list[int]()
    with going_on_from(labels):
        with report.stage("decoding", "questions", len(asked)) as stage:
            for item in asked:
                found += pivot_training.collect(model, tokenizer, loaded, item, plan)
                stage.advance(stage.done + 1)
        with report.stage("rolling out", "places", len(found)) as stage:
            for place in found:
                label = functools.partial(pivot_training.label, model, tokenizer, place, plan)
                known.append(kept.of(key_of(place), label))
                stage.advance(stage.done + 1)
    classifier, figures = pivot_training.fit(found, known, plan)
    pivot_training.save_beside(loaded, classifier, folder, model)
    for name, value in classifier.recipe.items():
        say(f"{name}: {value}")
    say(f"saved in {folder}; held-out figures: {figures}")
