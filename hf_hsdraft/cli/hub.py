"""`hsdraft find`, `info` and `hub`: drafters as files, here and on the Hub (token: `hf auth login` or HF_TOKEN)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ..core.methods import load, offered
from . import _shared as shared
from ._shared import check_empty, check_fit, console, in_bytes, loaded_target, option, say

if TYPE_CHECKING:
    from ..drafters.base.auto_drafter import Found

app = typer.Typer()

RevisionOption = Annotated[str | None, option("Branch, tag or commit; default: main.")]


@app.command("push", short_help="Upload a drafter or an adapter to the Hub.")
def push_folder(
    folder: shared.DrafterFolderArgument,
    name: Annotated[str, typer.Argument(help="Repository, as user/name; created if there is none.")],
    private: Annotated[bool, option("Create a private repository.", "--private")] = False,
    revision: Annotated[str | None, option("Branch; created if there is none. Default: main.")] = None,
    message: Annotated[str | None, option("Commit message; default: what is uploaded.")] = None,
) -> None:
    """Checks a drafter and uploads its weights, code, card, recipe and figures to the Hub, and nothing else.

    An adapter with a name, as RUN/code of `hsdraft train --adapter-name code`, goes into a subfolder of its name.
    """
    from ..drafters.base.auto_drafter import AutoDrafter
    from ..hub.drafter_files import is_adapter
    from ..hub.publication import push

    options: dict[str, Any] = {"private": private or None, "revision": revision}
    options |= {"commit_message": message} if message else {}
    if is_adapter(folder):
        commit = push(folder, name, **options)
    else:
        commit = AutoDrafter.from_pretrained(folder).push_to_hub(name, **options)
    say(f"{commit.repo_url} is at commit {commit.oid}")


@app.command(short_help="Download a drafter from the Hub.")
def pull(
    name: Annotated[str, typer.Argument(help="Repository, as user/name.")],
    revision: RevisionOption = None,
    to: Annotated[
        Path | None, option("Copy the drafter into this folder; default: the cache only.", file_okay=False)
    ] = None,
    force: Annotated[bool, option("Download even if it is in the cache.", "--force")] = False,
) -> None:
    """Downloads a drafter from the Hub with its code and documents, and checks that it is complete."""
    import shutil

    from huggingface_hub import HfApi

    from ..drafters.base.auto_drafter import AutoDrafter
    from ..hub.drafter_files import CODE, find_folder, loading

    if to is not None:
        check_empty(to, "--to")
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
    say(str(to or folder))


@app.command(short_help="Describe a drafter.")
def info(
    name: shared.SavedDrafterArgument,
    revision: RevisionOption = None,
    target: Annotated[
        str | None,
        option(
            "Check how well the drafter fits this target too: Hub name, folder or .gguf file.",
            callback=shared.present,
        ),
    ] = None,
    offline: Annotated[bool, option("Use the cache only.", "--offline")] = False,
) -> None:
    """Describes a drafter: its target, sizes, format, recipe and figures. Runs none of its code."""
    from ._describe import describe

    hub: dict[str, Any] = {"revision": revision, "local_files_only": offline}
    for section, lines in describe(name, with_weights=target is not None or Path(name).is_dir(), **hub).items():
        console.print(f"[bold]{section}[/]")
        for title, value in lines.items():
            say(f"  {title}: {value}")
    if target is not None:
        _print_match(name, target, hub)


def _print_match(name: str, target: str, hub: dict[str, Any]) -> None:
    import torch

    from ..generate.by_name import load_drafter

    drafter = load_drafter(name, torch.float32, **hub)
    model, tokenizer = loaded_target(target, torch.float32)
    lines = drafter.match_told(model, tokenizer, target)
    if not lines:
        check_fit(drafter, model, tokenizer)
        fits = f"it has all that this {type(drafter).__name__} needs; `hsdraft try` measures its speed"
        if getattr(drafter, "tokenizer", tokenizer) is None:
            fits = "as far as is known: the drafter comes without a tokenizer, which has to be the target's"
        lines = [f"{target} fits: {fits}"]
    for line in lines:
        say(line)


@app.command("list", short_help="List the drafters in the Hub cache.")
def list_cached() -> None:
    """Lists the drafters in the Hub cache."""
    from ._describe import cached_drafters

    found = list(cached_drafters())
    for each in found:
        size = in_bytes(each.bytes) if each.bytes else "weights not fetched"
        refs = f" ({', '.join(each.refs)})" if each.refs else ""
        made_for = each.target or "a target without name"
        say(f"{each.name} {each.commit}{refs}: for {made_for}, format {each.format}, {size}")
        if each.problem:
            console.print(f"  [red]{escape(each.problem)}[/]", highlight=False, soft_wrap=True)
    if not found:
        console.print("no drafters in the cache")


@app.command(short_help="Add measurements and rewrite the card.")
def card(
    folder: shared.DrafterFolderArgument,
    bench: Annotated[
        list[Path] | None,
        option("Report of `bench --json`; replaces earlier ones; repeat.", "--bench", exists=True, dir_okay=False),
    ] = None,
    keep: Annotated[bool, option("Keep earlier reports of other commands.", "--keep")] = False,
    target: Annotated[
        str | None,
        option(
            "Record the identity and the output of this target: Hub name, folder or .gguf file.",
            callback=shared.present,
        ),
    ] = None,
    name: Annotated[str | None, option("Name of the drafter in the card; default: the folder's.")] = None,
    license: Annotated[str | None, option("Licence, as the Hub names it, e.g. apache-2.0.")] = None,
    language: Annotated[list[str] | None, option("Language of the training data, e.g. en; repeat.")] = None,
) -> None:
    """Adds measurements to a drafter's figures, records its target, and rewrites its card."""
    from ..drafters.hidden_state.modeling_hsdraft import HSDrafter
    from ..generate.by_name import load_drafter
    from ..hub.drafter_files import CARD, RECIPE, read_json
    from ..hub.model_card import is_generated, write_card
    from ..training.files import write_json

    drafter = load_drafter(str(folder))
    if not isinstance(drafter, HSDrafter):
        raise ValueError(f"`hsdraft hub card` needs a hidden-state drafter: {folder} is a {type(drafter).__name__}")
    if target is not None:
        import torch

        from ..training.families.hidden_state import record_target

        record_target(drafter, *loaded_target(target, torch.float32), name=target)
        drafter.save_pretrained(folder)
    if bench:
        enter_benchmarks(folder, bench, keep)
    stated = {name: value for name, value in (("license", license), ("language", language)) if value}
    if stated:
        recipe = read_json(folder / RECIPE) if (folder / RECIPE).is_file() else {}
        write_json(folder / RECIPE, {**recipe, **stated})
    readme = folder / CARD
    if readme.is_file() and not is_generated(readme):
        say(f"{readme} is somebody's own and was left as it is")
        return
    write_card(folder, name or folder.resolve().name)
    say(str(readme))


def enter_benchmarks(folder: Path, reports: Sequence[Path], keep: bool = False) -> list[dict[str, Any]]:
    """Replaces the benchmarks in a drafter's figures by reports of `hsdraft bench --json`; returns their entries.

    With `keep`, earlier entries stay, except those of the same command. Raises a ValueError if a file is no such
    report, or is about other weights.
    """
    from ..hub.drafter_files import FIGURES, digests, read_json
    from ..hub.model_card import is_chain, read_figures
    from ..training.files import write_json

    weights = digests(folder)
    entered = [_entry(path, read_json(path), weights) for path in reports]
    before = read_figures(folder)
    training = before["training"]
    if keep:  # the figures in a folder are always of its weights
        commands = {entry["settings"]["command"] for entry in entered}
        entered = [each for each in before["benchmarks"] if each["settings"]["command"] not in commands] + entered
    write_json(folder / FIGURES, {**({} if training is None else {"training": training}), "benchmarks": entered})
    (folder / "speed_up.png").unlink(missing_ok=True)  # drawn from other figures
    if offered("drawing"):
        load("drawing", "training").draw_speed_up([each for each in entered if not is_chain(each["ours"][0])], folder)
    return entered


def _entry(path: Path, report: Mapping[str, Any], weights: Mapping[str, str]) -> dict[str, Any]:
    from ..core.checks import printable
    from ..hub.model_card import is_benchmark, is_chain

    measured, summary = report.get("weights"), report.get("summary")
    if not isinstance(measured, dict) or not isinstance(summary, dict):
        raise ValueError(f"{path} is no report of `hsdraft bench --json`: it names no weights or has no summary")
    ours = [variant for variant in measured if measured[variant] == weights and variant in summary]
    if not ours:
        raise ValueError(
            f"{path} is about other weights than this drafter's, by their SHA-256 (it measured "
            f"{printable(', '.join(measured))}): run `hsdraft bench --drafter` with this folder"
        )
    entry = {
        "settings": report.get("settings"),
        "ours": ours,
        "summary": {name: row for name, row in summary.items() if name != "plain"},
        "round": report.get("round", {}),
        "by_category": report.get("by_category"),
    }
    if not is_benchmark(entry):
        raise ValueError(f"{path} is no complete report of `hsdraft bench --json`: something a card shows is missing")
    ours.sort(key=lambda variant: (is_chain(variant), -summary[variant]["speed_up"]))
    return entry


@app.command(short_help="Convert a drafter for other programs.")
def export(
    drafter: shared.SavedDrafterArgument,
    out: Annotated[Path, option("New folder.", "--out", file_okay=False)],
    to: Annotated[str, option("Format to write; vLLM loads speculators.", "--to")] = "speculators",
    target: Annotated[str, option("Hub name of the target to record; default: the one in the files.")] = "",
) -> None:
    """Writes a drafter in the format of another project, or says why that format cannot express it."""
    from ..generate.by_name import load_drafter

    check_empty(out, "--out")
    load_drafter(drafter).export(to, out, target)
    say(f"{out} holds the drafter in the format of {to}")


@app.command("find", short_help="Say which drafters there are for a target.")
def find(
    target: shared.TargetArgument = None,
    target_name: Annotated[str, option("Name of the target on the Hub, where TARGET is a folder or file.")] = "",
    offline: Annotated[bool, option("Look into the cache only.", "--offline")] = False,
) -> None:
    """Lists what drafts for a target right now, the best first. Reads its configuration and tokenizer, no weights.

    Looks at layers for multi-token prediction in the checkpoint, drafters in the cache, published drafters whose cards
    name the target as base model, smaller language models of the same tokenizer in the cache, and n-grams.
    """
    from ..drafters.base.auto_drafter import find as found_for
    from ..drafters.base.auto_drafter import train_command
    from ..drafters.base.registry import TargetInfo

    info = TargetInfo.of_name(target, target_name, offline)
    found, note = found_for(info, offline)
    _print(found)
    if note:
        say(note)
    if not any(each.trained and not each.problem for each in found):
        say(f"nothing was trained for it; this trains a drafter: {train_command(target or '', info.tokenizer)}")


def _print(found: list[Found]) -> None:
    """Prints a table, and the line of code of each row below it, which a table would break."""
    from rich.table import Table

    table = Table("")
    for title in ("name", "kind", "drafts", "size", "why"):
        table.add_column(title, overflow="fold")
    for number, each in enumerate(found, 1):
        drafts = "not here" if each.problem else each.drafts
        row = (each.name, each.kind, drafts, _size(each.bytes), each.why)
        table.add_row(f"{number}", *(escape(text) for text in row))
    console.print(table)
    for number, each in enumerate(found, 1):
        say(f"{number}: {each.use}")


def _size(size: int | None) -> str:
    if size is None:
        return "unknown"
    return in_bytes(size) if size else "none"
