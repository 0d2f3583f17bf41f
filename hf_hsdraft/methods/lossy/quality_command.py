"""`hsdraft quality`: what lossy verification costs and gains."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...cli._shared import DeviceOption, DrafterOption, Dtype, DtypeOption, TargetOption, console, drafter_of, load_pair
from .command_parts import TASKS, QuestionsOption, TasksOption, check_files, going_on_from, names_in

if TYPE_CHECKING:
    from .checked_tasks import Item
    from .quality import Quality

app = typer.Typer()
RulesOption = Annotated[
    str,
    typer.Option(
        help="Comma-separated: fly, typical, pivot, each with options, as fly+fly_window=2; ngram_continuation, "
        "num_assistant_tokens and tree_size are such options too."
    ),
]
SpeedOption = Annotated[
    bool,
    typer.Option(help="Speeds too; --no-speed where the machine does something else: drafts have a fixed size then."),
]
AnswersOption = Annotated[
    Path | None,
    typer.Option(dir_okay=False, help="Keep the answers here as they come. A run that was stopped goes on from it."),
]


def _numbers(text: str) -> list[float]:
    """Reads `--thresholds`. Raises a ValueError for anything but numbers."""
    try:
        return [float(value) for value in names_in(text)]
    except ValueError:
        raise ValueError(f"--thresholds {text} is invalid: expected numbers, as in 0.1,0.3") from None


@app.command(short_help="Measure what lossy verification costs and gains.")
def quality(
    rules: RulesOption = "fly,typical",
    thresholds: Annotated[
        str, typer.Option(help="Also each rule with these thresholds, as 0.1,0.3,0.5; all have to be in its range.")
    ] = "",
    tasks: TasksOption = TASKS,
    questions: QuestionsOption = None,
    items: Annotated[int, typer.Option(min=1, help="Questions of each task.")] = 200,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="Of the sampled answers; 0 leaves them out.")] = 0.7,
    greedy: Annotated[bool, typer.Option(help="Also greedy answers.")] = True,
    seed: Annotated[int, typer.Option(help="Of the questions and of the sampled answers.")] = 0,
    target: TargetOption = None,
    drafter: DrafterOption = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
    answers: AnswersOption = None,
    speed: SpeedOption = True,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write all figures here as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Write the curve of accuracy against speed here, a PNG.")] = None,
) -> None:
    """Compares lossy rules with plain decoding and exact drafting, by answers that can be checked."""
    from ...bench.machine import processor
    from ...core.checks import public_name
    from .checked_tasks import items_of
    from .quality import Quality, rules_of, trained_with

    try:
        wanted = rules_of(names_in(rules), _numbers(thresholds))
        asked = items_of(names_in(tasks), questions or [], items, seed)
        if temperature == 0 and not greedy:
            raise ValueError("--no-greedy and --temperature 0 leave nothing to decode: give one of them up")
        if not wanted:
            raise ValueError("--rules names no rule: expected some of fly, typical, pivot")
        check_files(answers, json_out, picture=picture)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    pair = load_pair(target, drafter, dtype, device)
    asked = items_of(names_in(tasks), questions or [], items, seed, trained_with(pair[2], wanted))
    settings = {
        "target": public_name(getattr(pair[0], "name_or_path", "")),
        "dtype": dtype.value,
        "device": device,
        "processor": processor(pair[0].device),
        "questions": len(asked),
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "seed": seed,
    }
    named = public_name(drafter_of(target, drafter))
    found = Quality(settings, {rule.text: rule for rule in wanted}, timed=speed, drafter=named)
    with going_on_from(answers):
        _answer(found, pair, asked, greedy, answers, json_out)
    _show(found, picture)


def _answer(
    found: Quality, pair: tuple[Any, Any, Any], asked: list[Item], greedy: bool, answers: Path | None, out: Path | None
) -> None:
    """Runs all systems, greedily if wanted and at the settings' temperature if there is one; adds the answers to
    `found`.

    `pair` is target, tokenizer and drafter, `answers` the file of kept answers, `out` that of the figures so far.
    """
    from rich.progress import Progress

    from ...bench.calls import Settings
    from .quality import GREEDY, SAMPLED, Answer, measure_quality, systems_of
    from .quality_figures import write_quality
    from .quality_log import AnswerLog, run_of

    model, tokenizer, drafter = pair
    systems = systems_of(drafter, list(found.rules.values()), found.timed)
    run = {} if answers is None else run_of({**found.settings, "timed": found.timed}, asked, systems, model)
    log = AnswerLog(answers, run)
    heat, new, seed = (found.settings[name] for name in ("temperature", "max_new_tokens", "seed"))
    modes = {**({GREEDY: 0.0} if greedy else {}), **({SAMPLED: heat} if heat else {})}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("questions", total=len(asked) * len(modes))
        for mode, temperature in modes.items():

            def tell(place: int, each: dict[str, Answer], mode: str = mode) -> None:
                log.add(mode, place, each)
                progress.advance(task)

            how, known = Settings(new, temperature, seed), log.known.get(mode)
            found.answers[mode] = measure_quality(model, tokenizer, systems, asked, how, known, tell)
            if out is not None:
                write_quality(found, out)


def _show(found: Quality, picture: Path | None) -> None:
    from .quality_figures import as_document, draw_quality, tables_of

    for table in tables_of(found):
        console.print(table)
    for name, text in as_document(found)["definitions"].items():
        console.print(f"{name}: {text}.", style="dim", highlight=False, markup=False)
    if picture is not None:
        console.print(f"picture: {draw_quality(found, picture).name}", highlight=False, markup=False)
