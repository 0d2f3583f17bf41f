"""`hsdraft info` and `hsdraft hub list`: describes drafters by their files, without building or running any."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.checks import printable
from ..drafters.base.registry import FAMILIES, load_families, recognise
from ..drafters.base.saved_drafter import stored_options
from ..drafters.hidden_state.configuration_hsdraft import HSDraftConfig
from ..hub.checkpoint import Checkpoint, cached_models, reader, target_of
from ..hub.drafter_files import (
    CONFIG,
    DESCRIBED,
    OPTIONS,
    check_is_drafter,
    digests,
    fetch,
    find_folder,
    loading,
    read_json,
)
from ..hub.model_card import (
    GAP,
    chain_length,
    circumstances,
    facts,
    is_chain,
    parameters_and_bytes,
    read_figures,
    read_recipe,
    shown_figure,
)

load_families()


@dataclass(frozen=True)
class CachedDrafter:
    """A drafter in the Hub's cache: one commit of one repository, and the branches and tags that point to it."""

    name: str
    commit: str
    refs: tuple[str, ...]
    target: str  # Name of the target it was made for
    format: str  # A version of our format, or the name of another project's
    bytes: int  # Size of its weights, 0 if they are not fetched yet
    problem: str  # Why it cannot be loaded; empty if nothing is known


def cached_drafters(cache_dir: str | None = None) -> Iterator[CachedDrafter]:
    """Yields the drafters in the cache, by name.

    Drafters in other projects' formats need their weights, since only tensor names identify them.
    """
    for model in cached_models(cache_dir):
        checkpoint, config = model.checkpoint, model.checkpoint.config
        is_ours = str(config.get("model_type")) in FAMILIES
        form = None if is_ours else _format_in(checkpoint)
        if not is_ours and form is None:
            continue
        named = target_of(config)[0] if form else config.get("target_name")
        yield CachedDrafter(
            name=checkpoint.name,
            commit=model.commit,
            refs=model.refs,
            target=printable(named or ""),
            format=form.name if form else printable(config.get("format_version", 1)),
            bytes=_bytes(checkpoint),
            problem=_problem(config),
        )


def describe(name: str, with_weights: bool = False, **hub: Any) -> dict[str, dict[str, str]]:
    """Describes a drafter as sections of lines.

    Args:
        name: Folder or Hub name.
        with_weights: Whether to fetch the weights too and compare them with their digests. For other projects' formats
            only the part that names the tensors is fetched, or the whole file if it is pickled.
        hub: What to ask the Hub with, see `find_folder`.

    Raises:
        OSError: It cannot be found.
        ValueError: It is no drafter that this version reads.
    """
    with loading(name, bool(hub.get("local_files_only"))):
        folder = find_folder(name, DESCRIBED, **hub)
        family = str(read_json(folder / CONFIG).get("model_type")) if (folder / CONFIG).is_file() else ""
        if family and family not in FAMILIES:
            checkpoint = reader().open(name, **hub)
            return recognise(checkpoint).section(checkpoint)
        check_is_drafter(folder, family or HSDraftConfig.model_type)
        if with_weights and family == HSDraftConfig.model_type:
            folder = fetch(name, family, **hub)
    if family != HSDraftConfig.model_type:
        return _briefly(name, family, folder)
    config = HSDraftConfig.from_dict(read_json(folder / CONFIG))
    recipe, figures = read_recipe(folder), read_figures(folder)
    found = {
        "drafter": {
            "name": name,
            **({} if os.path.isdir(name) else {"commit": folder.name}),
            **{title: printable(text, 400) for title, text in facts(folder, config.to_dict()).items()},
            "weights": _weights(folder, config, with_weights),
            "injector and head": f"{config.injector}, {config.head}",
        },
        "training recipe": {printable(title): printable(line, 400) for title, line in recipe["training"].items()}
        or {"recipe": "none recorded"},
        "figures": _measured(figures["benchmarks"]) or {"speed": GAP},
    }
    if figures["training"] is not None:
        last: dict[str, Any] = next(
            (entry for entry in reversed(figures["training"]["history"]) if "eval_tau" in entry), {}
        )
        found["figures"]["tau on held-out conversations"] = shown_figure(last, "eval_tau", ".2f")
    return found


def _measured(benchmarks: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """The figures of each variant of each report, by description; equal descriptions are numbered."""
    found, seen = dict[str, str](), Counter[str]()
    for benchmark in benchmarks:
        settings = benchmark["settings"]
        drawn = f"seed {settings.get('seed')}" if settings.get("do_sample") else "greedy"
        prompts = f"{settings['questions']} prompts of {settings.get('prompts') or 'a file that is not named'}"
        for variant in sorted(benchmark["ours"], key=chain_length):  # trees first, as they are
            row = benchmark["summary"][variant]
            title = printable(", ".join([variant, *circumstances(settings), drawn, prompts]), 400)
            seen[title] += 1
            if is_chain(variant) and row.get("acceptance_length") is not None:
                figure = f"acceptance length {row['acceptance_length']:.2f}"
            else:
                figure = f"tau {row['tau']:.2f}, speed-up {row['speed_up']:.2f}"
            machine = printable(f"{settings['processor']}, threads: {settings['threads']}")
            found[title if seen[title] == 1 else f"{title} ({seen[title]})"] = f"{figure} ({machine})"
    return found


def _briefly(name: str, family: str, folder: Path) -> dict[str, dict[str, str]]:
    options, drafter, document = stored_options(folder / OPTIONS), FAMILIES[family].drafter, read_json(folder / CONFIG)
    shown = {field: document[field] for field in getattr(drafter, "shown_fields", ()) if field in document}
    return {
        "drafter": {
            "name": name,
            "family": f"{family}, {drafter.__name__}",
            **{field: printable(value, 400) for field, value in shown.items()},
        },
        "options": {printable(option): printable(value) for option, value in options.items()},
    }


def _weights(folder: Path, config: HSDraftConfig, check: bool) -> str:
    try:
        parameters, size = parameters_and_bytes(folder)
    except OSError:
        return "not fetched"
    text = f"{parameters / 1e6:.1f}M parameters, {size / 1e6:.1f} MB"
    if check and config.weights_digest is not None:
        text += ", whole" if digests(folder) == config.weights_digest else ", DAMAGED: not as they were saved"
    return text


def _format_in(checkpoint: Checkpoint) -> Any:
    """Returns another project's format; None if a checkpoint has no known one."""
    try:
        form = recognise(checkpoint)
    except (OSError, ValueError):
        return None
    return form if form.listed(checkpoint) else None


def _problem(config: Mapping[str, Any]) -> str:
    if config.get("model_type") == HSDraftConfig.model_type:
        try:
            HSDraftConfig.from_dict(dict(config))
        except (TypeError, ValueError) as error:
            return printable(error, 400)
    return ""


def _bytes(checkpoint: Checkpoint) -> int:
    try:
        return checkpoint.bytes
    except (OSError, ValueError):
        return 0
