"""`hsdraft measure lm-eval`."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ...cli._shared import (
    DeviceOption,
    DrafterOption,
    Dtype,
    DtypeOption,
    PlainOption,
    TargetOption,
    load_plain_or_pair,
    say,
)

app = typer.Typer()


@app.command("lm-eval", short_help="Evaluate a target on lm_eval's tasks.")
def lm_eval(
    tasks: Annotated[str, typer.Option(help="Names of lm_eval's tasks or YAML files, comma-separated.")],
    target: TargetOption = None,
    drafter: DrafterOption = None,
    batch_size: Annotated[str, typer.Option(help="Texts per call, or `auto`.")] = "1",
    max_batch_size: Annotated[
        int | None, typer.Option(min=1, help="Largest batch that `auto` tries; default: 64.")
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option(exists=True, file_okay=False, help="Folder with your tasks.")
    ] = None,
    limit: Annotated[float | None, typer.Option(min=1e-6, help="Documents per task; below 1, a share of them.")] = None,
    num_fewshot: Annotated[int | None, typer.Option(min=0, help="Examples per prompt; default: the task's.")] = None,
    gen_kwargs: Annotated[
        str | None, typer.Option(help="Arguments for generate(), e.g. do_sample=True,temperature=0.7.")
    ] = None,
    apply_chat_template: Annotated[
        bool, typer.Option("--apply-chat-template", help="Format prompts as chats.")
    ] = False,
    plain: PlainOption = False,
    compare: Annotated[bool, typer.Option("--compare", help="Run both without and with the drafter.")] = False,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="File for lm_eval's results; with --compare, of both runs.")
    ] = None,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Evaluates a target on tasks of lm-evaluation-harness, with drafting."""
    if find_spec("lm_eval") is None:
        raise ImportError("`hsdraft measure lm-eval` needs lm_eval: pip install -e '.[lm-eval]' in a checkout")
    if plain and compare:
        raise typer.BadParameter("--compare runs with the drafter too: leave --plain out", param_hint="--plain")
    if not re.fullmatch(r"[1-9]\d*|auto(:[1-9]\d*)?", batch_size):
        raise typer.BadParameter(f"expected a number or auto, found {batch_size}", param_hint="--batch-size")
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import handle_non_serializable

    from .model import Comparison, run_tasks

    if json_out is not None and (json_out.is_dir() or not json_out.parent.is_dir()):
        raise typer.BadParameter(f"{json_out} cannot be written: expected a file in a folder", param_hint="--json")
    manager = TaskManager(include_path=include_path)
    names = [name for name in tasks.split(",") if name]
    _check_tasks(names, manager)
    model, tokenizer, loaded = load_plain_or_pair(target, drafter, dtype, device, plain)
    options: dict[str, Any] = {
        "limit": limit, "num_fewshot": num_fewshot, "gen_kwargs": gen_kwargs, "max_batch_size": max_batch_size,
        "apply_chat_template": apply_chat_template, "task_manager": manager,
    }  # fmt: skip
    runs = []
    for drafts in [None, loaded] if compare else [loaded]:
        runs.append(run_tasks(model, tokenizer, drafts, names, batch_size, **options))
        say(str(runs[-1]))
    if compare:
        say(str(Comparison(*runs)))
    if json_out is not None:
        results = [run.results_with_drafting() for run in runs]
        document = dict(zip(("plain", "drafted"), results, strict=True)) if compare else results[0]
        written = json.dumps(document, indent=2, default=handle_non_serializable)
        json_out.write_text(written, encoding="utf-8")


def _check_tasks(names: list[str], manager: Any) -> None:
    unknown = [name for name in names if not manager.match_tasks([name]) and not Path(name).is_file()]
    if unknown:
        said = f"lm_eval has no task {', '.join(unknown)}; a task of your own needs --include-path FOLDER"
        raise typer.BadParameter(said, param_hint="--tasks")
    if not names:
        raise typer.BadParameter("expected the name of a task", param_hint="--tasks")
