"""`hsdraft info` and `hsdraft list`: what a drafter is, by its files; nothing is built and no code of it is run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CacheNotFound, scan_cache_dir

from ..configuration_hsdraft import HSDraftConfig
from ..drafter_files import CONFIG, DOCUMENTS, check_is_drafter, digests, find_folder, read_json, weight_files
from ..model_card import FIGURES, GAP, RECIPE, parameters_and_bytes


@dataclass(frozen=True)
class CachedDrafter:
    """A drafter in the Hub's cache: one commit of one repository.

    Attributes:
        name, commit, refs: of the repository, of this state of it, and what branches and tags point to it.
        target: it was made for, by name; format_version: of its files; bytes: of its weights, 0 where they are missing.
        problem: why it cannot be loaded, empty if nothing is known.
    """

    name: str
    commit: str
    refs: tuple[str, ...]
    target: str
    format_version: int
    bytes: int
    problem: str


def cached_drafters(cache_dir: str | None = None) -> Iterator[CachedDrafter]:
    """Drafters in the cache, by name; models of other types are passed over."""
    try:
        repositories = scan_cache_dir(cache_dir).repos
    except CacheNotFound:
        return
    for repository in sorted(repositories, key=lambda each: each.repo_id):
        for revision in sorted(repository.revisions, key=lambda each: -each.last_modified):
            config = _config_of_drafter(revision.snapshot_path)
            if config is None:
                continue
            problem = _problem(revision.snapshot_path, config)
            yield CachedDrafter(
                name=repository.repo_id,
                commit=revision.commit_hash,
                refs=tuple(sorted(revision.refs)),
                target=_printable(config.get("target_name")),
                format_version=_whole(config.get("format_version", 1)),
                bytes=0 if problem else sum(path.stat().st_size for path in weight_files(revision.snapshot_path)),
                problem=problem,
            )


def describe(name: str, with_weights: bool = False, **hub: Any) -> dict[str, dict[str, str]]:
    """What is known of a drafter, as sections of lines.

    Args:
        name: folder or Hub name.
        with_weights: fetch the weights too, and compare them with their digests.
        hub: see `find_folder`.

    Raises:
        OSError, ValueError: it cannot be found, or is no drafter that this version reads.
    """
    patterns = (CONFIG, "generation_config.json", *DOCUMENTS, *(("model*.safetensors*",) if with_weights else ()))
    folder = find_folder(name, patterns, **hub)
    check_is_drafter(folder, HSDraftConfig.model_type)
    config = HSDraftConfig.from_pretrained(folder)
    recipe, figures = (read_json(folder / file) if (folder / file).is_file() else {} for file in (RECIPE, FIGURES))
    found = {
        "drafter": {
            "name": name,
            **({"commit": folder.name} if str(folder) != name else {}),
            "target": config.target_name or "not named",
            "its revision": config.target_revision or "not recorded",
            "its tokenizer's digest": config.target_tokenizer_hash or "not recorded",
            "its sizes": f"hidden size {config.target_hidden_size}, {config.target_num_hidden_layers} layers, "
            f"vocabulary {config.vocab_size:,}",
            "weights": _weights(folder, config, with_weights),
            "format": f"{config.format_version}",
            "draft": f"{config.num_draft_steps} deep, {config.tree_size} nodes, {config.draft_vocab_size:,} tokens, "
            f"taps {', '.join(map(str, config.target_tap_layers))}, {config.injector} injector, {config.head} head",
        },
        "training recipe": _lines(recipe.get("training")) or {"recipe": "none recorded"},
        "figures": {},
    }
    for benchmark in figures.get("benchmarks", []):
        settings = benchmark["settings"]
        for variant in benchmark["ours"]:
            row = benchmark["summary"][variant]
            title = f"{variant}, {settings['dtype']}, {settings['questions']} prompts of {settings['prompts']}"
            found["figures"][title] = f"tau {row['tau']:.2f}, speed-up {row['speed_up']:.2f} ({settings['processor']})"
    found["figures"] = found["figures"] or {"speed": GAP}
    return found


def _weights(folder: Path, config: HSDraftConfig, check: bool) -> str:
    try:
        parameters, size = parameters_and_bytes(folder)
    except OSError:
        return "not fetched"
    text = f"{parameters / 1e6:.1f}M parameters, {size / 1e6:.1f} MB"
    if check and config.weights_digest is not None:
        text += ", as saved" if digests(folder) == config.weights_digest else ", DAMAGED: not as saved"
    return text


def _config_of_drafter(folder: Path) -> dict[str, Any] | None:
    try:
        config = read_json(folder / CONFIG)
    except (OSError, ValueError):
        return None  # whatever it is, it does not say that it is a drafter
    return config if config.get("model_type") == HSDraftConfig.model_type else None


def _problem(folder: Path, config: dict[str, Any]) -> str:
    try:
        HSDraftConfig.from_dict(config)
        weight_files(folder)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _lines(table: Any) -> dict[str, str]:
    return {_printable(name): _printable(value) for name, value in table.items()} if isinstance(table, dict) else {}


def _printable(value: Any) -> str:
    """Text of a file as it may go to a terminal."""
    return "".join(character if character.isprintable() else " " for character in str(value or ""))


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0
