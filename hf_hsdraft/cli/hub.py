"""`hsdraft push`, `pull`, `info`, `list` and `card`: drafters on the Hub.

The token is the one of `hf auth login`, or HF_TOKEN.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from ._shared import check_hidden_state, console, hidden_state_drafter

app = typer.Typer()

RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit; default: main.")]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Look into the cache only.")]


@app.command(short_help="Send a drafter to the Hub.")
def push(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a drafter.")],
    name: Annotated[str, typer.Argument(help="Repository, as user/name; created if there is none.")],
    private: Annotated[bool, typer.Option("--private", help="Create it as a private one.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; created if there is none. Default: main.")] = None,
    message: Annotated[str, typer.Option(help="Of the commit.")] = "Upload drafter",
) -> None:
    """Checks a drafter and sends it to the Hub: weights, code, card, recipe and figures, nothing else."""
    from ..drafters.base.auto_drafter import AutoDrafter

    drafter = AutoDrafter.from_pretrained(folder)
    commit = drafter.push_to_hub(name, private=private or None, revision=revision, commit_message=message)
    console.print(f"{commit.repo_url} is at commit {commit.oid}", highlight=False, soft_wrap=True)


@app.command(short_help="Fetch a drafter from the Hub.")
def pull(
    name: Annotated[str, typer.Argument(help="Repository, as user/name.")],
    revision: RevisionOption = None,
    to: Annotated[
        Path | None, typer.Option(file_okay=False, help="Copy it into this folder; default: cache only.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Download again what is in the cache.")] = False,
) -> None:
    """Fetches a drafter from the Hub with its code and documents, and checks that it is whole."""
    import shutil

    from huggingface_hub import HfApi

    from ..drafters.base.auto_drafter import AutoDrafter
    from ..hub.drafter_files import CODE
    from ..hub.fetching import find_folder, loading

    if to is not None and to.is_dir() and any(to.iterdir()):
        raise typer.BadParameter(f"{to} is not empty: name a new folder", param_hint="--to")
    if Path(name).exists():
        raise typer.BadParameter(f"{name} is a folder here: pull from another place", param_hint="name")
    with loading(name):
        find_folder(name, ("README.md",), revision=revision)  # gives a clear error for a wrong name
    commit = HfApi().model_info(name, revision=revision).sha  # not the cache's idea of the latest
    AutoDrafter.from_pretrained(name, revision=commit, force_download=force)
    with loading(name):
        folder = find_folder(name, CODE, revision=commit, force_download=force)
    if to is not None:
        shutil.copytree(folder, to, dirs_exist_ok=True)
    console.print(str(to or folder), highlight=False, soft_wrap=True)


@app.command(short_help="Say what a drafter is.")
def info(
    name: Annotated[str, typer.Argument(help="Folder or Hub name of a drafter.")],
    revision: RevisionOption = None,
    target: Annotated[
        str | None, typer.Option(help="Also measure how well it fits this target: Hub name, folder or .gguf file.")
    ] = None,
    offline: OfflineOption = False,
) -> None:
    """Describes a drafter: its target, sizes, format, recipe and figures. Runs none of its code."""
    from ._describe import describe

    hub: dict[str, Any] = {"revision": revision, "local_files_only": offline}
    for section, lines in describe(name, with_weights=target is not None or Path(name).is_dir(), **hub).items():
        console.print(f"[bold]{section}[/]")
        for title, value in lines.items():
            console.print(f"  {escape(title)}: {escape(value)}", highlight=False, soft_wrap=True)
    if target is not None:
        _print_match(name, target, hub)


def _print_match(name: str, target: str, hub: dict[str, Any]) -> None:
    import torch

    from ..drafters.eagle.feedback_trial import try_on
    from ..drafters.eagle.modeling_eagle import EagleDrafter
    from ..drafters.hidden_state.target_match import explain_mismatch
    from ..generate.by_name import load_drafter
    from ..runtime.target_loading import load_target

    drafter = load_drafter(name, torch.float32, **hub)
    is_eagle = isinstance(drafter, EagleDrafter)
    if not is_eagle:
        check_hidden_state(drafter, name, "`hsdraft info --target`")
    model, tokenizer = load_target(target, torch.float32)
    drafter.check(model)
    if is_eagle:
        console.print(f"state fed back: {try_on(drafter, model, tokenizer)}", highlight=False, soft_wrap=True)
        return
    fits = f"{target} fits: this drafter guesses as much of what it says as of its own target's words"
    if drafter.config.target_reference is None:
        fits = "this drafter does not record what its target writes; `hsdraft card --target` does"
    console.print(explain_mismatch(model, drafter, tokenizer) or fits, highlight=False, soft_wrap=True)


@app.command("list", short_help="List the drafters in the cache of the Hub.")
def list_cached() -> None:
    """Lists the drafters in the cache of the Hub."""
    from ._describe import cached_drafters

    found = list(cached_drafters())
    for each in found:
        size = f"{each.bytes / 1e6:.1f} MB" if each.bytes else "weights not fetched"
        refs = f" ({', '.join(each.refs)})" if each.refs else ""
        line = f"{each.name} {each.commit}{refs}: for {each.target or 'a target without name'}, format "
        line += f"{each.format}, {size}"
        console.print(escape(line), highlight=False, soft_wrap=True)
        if each.problem:
            console.print(f"  [red]{escape(each.problem)}[/]", highlight=False, soft_wrap=True)
    if not found:
        console.print("no drafters in the cache")


@app.command(short_help="Enter measurements, and write the card anew.")
def card(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a drafter.")],
    bench: Annotated[
        list[Path] | None,
        typer.Option(
            "--bench", exists=True, dir_okay=False, help="Reports of `bench --json`, instead of earlier ones."
        ),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep earlier reports, except of the same command.")] = False,
    target: Annotated[
        str | None, typer.Option(help="Record what this target is and writes: Hub name, folder or .gguf file.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the drafter in the card; default: the folder's.")] = None,
    license: Annotated[str | None, typer.Option(help="Of the drafter, as the Hub names it: apache-2.0.")] = None,
    language: Annotated[list[str] | None, typer.Option(help="That it was trained on, as en; repeat.")] = None,
) -> None:
    """Enters measurements into a drafter's figures, records its target, and rewrites its card."""
    from ..hub.drafter_files import CARD, RECIPE, read_json
    from ..hub.model_card import is_generated, write_card
    from ..training.files import write_json
    from ._measured import enter_benchmarks

    drafter = hidden_state_drafter(str(folder), "`hsdraft card`")
    if target is not None:
        import torch

        from ..runtime.target_loading import load_target
        from ..training.families.identity import record_target

        record_target(drafter, *load_target(target, torch.float32), name=target)
        drafter.save_pretrained(folder)
    if bench:
        enter_benchmarks(folder, bench, keep)
    stated = {name: value for name, value in (("license", license), ("language", language)) if value}
    if stated:
        recipe = read_json(folder / RECIPE) if (folder / RECIPE).is_file() else {}
        write_json(folder / RECIPE, {**recipe, **stated})
    readme = folder / CARD
    if readme.is_file() and not is_generated(readme):
        console.print(f"{readme} is somebody's own and was left as it is", highlight=False, soft_wrap=True)
        return
    write_card(folder, name or folder.resolve().name)
    console.print(str(readme), highlight=False, soft_wrap=True)
