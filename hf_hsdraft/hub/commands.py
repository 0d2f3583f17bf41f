"""`hsdraft push`, `pull`, `info`, `list` and `card`. The token is the one of `hf auth login`, or HF_TOKEN."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

console = Console()

RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit; default: main.")]
OfflineOption = Annotated[bool, typer.Option("--offline", help="Look into the cache only.")]


def push(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a drafter.")],
    name: Annotated[str, typer.Argument(help="Repository, as user/name; created if there is none.")],
    private: Annotated[bool, typer.Option("--private", help="Create it as a private one.")] = False,
    revision: Annotated[str | None, typer.Option(help="Branch; created if there is none. Default: main.")] = None,
    message: Annotated[str, typer.Option(help="Of the commit.")] = "Upload drafter",
) -> None:
    """Checks a drafter and sends it to the Hub: weights, code, card, recipe and figures, nothing else."""
    from ..modeling_hsdraft import HSDrafter

    drafter = HSDrafter.from_pretrained(folder)
    commit = drafter.push_to_hub(name, private=private or None, revision=revision, commit_message=message)
    console.print(f"{commit.repo_url.repo_id} is at commit {commit.oid}", highlight=False, soft_wrap=True)


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

    from ..drafter_files import CODE, LOADED, find_folder
    from ..modeling_hsdraft import HSDrafter

    folder = find_folder(name, (*LOADED, *CODE), revision=revision, force_download=force)
    HSDrafter.from_pretrained(name, revision=revision)
    if to is not None:
        shutil.copytree(folder, to, dirs_exist_ok=True)
    console.print(str(to or folder), highlight=False, soft_wrap=True)


def info(
    name: Annotated[str, typer.Argument(help="Folder or Hub name of a drafter.")],
    revision: RevisionOption = None,
    target: Annotated[
        str | None, typer.Option(help="Also measure how well it fits this target: Hub name, folder or .gguf file.")
    ] = None,
    offline: OfflineOption = False,
) -> None:
    """Says what a drafter is: its target, sizes, format, recipe and figures. Runs no code of it."""
    from .describe import describe

    hub: dict[str, Any] = {"revision": revision, "local_files_only": offline}
    table = Table(show_header=False, box=None)
    for section, lines in describe(name, with_weights=target is not None or Path(name).is_dir(), **hub).items():
        table.add_row(f"[bold]{section}[/]")
        for title, value in lines.items():
            table.add_row(f"  {escape(title)}", escape(value))
    console.print(table, highlight=False)
    if target is not None:
        _print_match(name, target, hub)


def _print_match(name: str, target: str, hub: dict[str, Any]) -> None:
    import torch

    from ..decoding import check_target
    from ..modeling_hsdraft import HSDrafter
    from ..target_loading import load_target
    from ..target_match import explain_mismatch

    drafter = HSDrafter.from_pretrained(name, dtype=torch.float32, **hub)
    model, tokenizer = load_target(target, torch.float32)
    check_target(model, drafter)
    fits = f"{target} fits: it is the target that this drafter was made for, or very close to it"
    if drafter.config.target_reference is None:
        fits = "this drafter does not record what its target writes; `hsdraft card --target` does"
    console.print(explain_mismatch(model, drafter, tokenizer) or fits, highlight=False, soft_wrap=True)


def list_cached() -> None:
    """Lists the drafters in the cache of the Hub."""
    from .describe import cached_drafters

    table = Table("name", "commit", "refs", "target", "format", "size")
    for each in cached_drafters():
        size = f"{each.bytes / 1e6:.1f} MB" if not each.problem else f"[red]{escape(each.problem)}[/]"
        refs = ", ".join(each.refs)
        table.add_row(each.name, each.commit[:8], refs, escape(each.target), str(each.format_version), size)
    console.print(table if table.row_count else "no drafters in the cache", highlight=False)


def card(
    folder: Annotated[Path, typer.Argument(exists=True, file_okay=False, help="Folder of a drafter.")],
    bench: Annotated[
        list[Path] | None,
        typer.Option("--bench", exists=True, dir_okay=False, help="Report of `bench --json`; repeat."),
    ] = None,
    target: Annotated[
        str | None, typer.Option(help="Record what this target is and writes: Hub name, folder or .gguf file.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the drafter in the card; default: the folder's.")] = None,
) -> None:
    """Enters measurements into a drafter's figures, records its target, and writes its card anew."""
    from ..model_card import write_card
    from ..modeling_hsdraft import HSDrafter
    from .measured import enter_benchmarks

    drafter = HSDrafter.from_pretrained(folder)
    if target is not None:
        import torch

        from ..target_loading import load_target
        from ..training.identity import record_target

        record_target(drafter, *load_target(target, torch.float32))
        drafter.save_pretrained(folder)
    if bench:
        enter_benchmarks(folder, bench)
    write_card(folder, name or folder.resolve().name)
    console.print(str(folder / "README.md"), highlight=False, soft_wrap=True)
