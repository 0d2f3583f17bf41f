"""Models in the Hub's cache, and the targets that their cards name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CacheNotFound, scan_cache_dir
from huggingface_hub.repocard import metadata_load

from .checkpoint import Checkpoint
from .drafter_files import CARD, CONFIG, RECIPE, read_document

_LARGEST_CARD = 2**20  # bytes


@dataclass(frozen=True)
class CachedModel:
    """One commit of a model in the cache."""

    commit: str
    refs: tuple[str, ...]  # branches and tags that point to it
    checkpoint: Checkpoint  # with an empty `config` if config.json is missing or damaged


def cached_models(cache_dir: str | None = None) -> Iterator[CachedModel]:
    """Yields all commits of the models in the cache, by name, the latest first."""
    try:
        repositories = scan_cache_dir(cache_dir).repos
    except CacheNotFound:
        return
    models = [each for each in repositories if each.repo_type == "model"]
    for repository in sorted(models, key=lambda each: each.repo_id):
        for revision in sorted(repository.revisions, key=lambda each: -each.last_modified):
            folder = revision.snapshot_path
            checkpoint = Checkpoint(repository.repo_id, folder, read_document(folder / CONFIG))
            yield CachedModel(revision.commit_hash, tuple(sorted(revision.refs)), checkpoint)


def named_targets(folder: Path) -> set[str]:
    """Returns the names of targets that a card's `base_model` and a training recipe give."""
    named = [read_document(folder / RECIPE).get("target")]
    try:
        small = (folder / CARD).stat().st_size <= _LARGEST_CARD
        metadata: Mapping[str, Any] = (metadata_load(folder / CARD) if small else None) or {}
    except Exception:  # no card, or one whose metadata is damaged in any way
        metadata = {}
    bases = metadata.get("base_model")
    named += bases if isinstance(bases, list) else [bases]
    return {name for name in named if isinstance(name, str) and name}
