"""Drafter checkpoints on the Hub or local, inspected before anything is allocated.

Only configuration and weights are fetched, never code. Weights on the Hub are fetched when they are read; their size
comes before that, from the headers of the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from huggingface_hub import CacheNotFound, HfApi, scan_cache_dir
from huggingface_hub.errors import HTTPError, SafetensorsParsingError
from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils import SafetensorsFileMetadata

from ..core.checks import few, public_name
from ..core.methods import load, offered
from .drafter_files import (
    CARD,
    CONFIG,
    INDEX,
    METHOD_FILES,
    OPTIONS,
    RECIPE,
    WEIGHTS,
    find_folder,
    listed_files,
    read_document,
    read_json,
    weight_files,
)

LOOSE_MASK = "mask_embedding.pt"  # mask embedding of some block drafters


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a configuration and weights."""

    single: ClassVar[tuple[str, ...]] = (WEIGHTS,)  # names of one file of weights; the first that is there
    pickled: ClassVar[tuple[str, ...]] = ()  # the same for files of PyTorch

    name: str  # folder or Hub name that was asked for
    folder: Path
    config: Mapping[str, Any]  # contents of config.json
    subfolder: str = ""  # of the repository
    hub: Mapping[str, Any] = field(default_factory=dict)  # arguments for the Hub; empty for a local folder

    @classmethod
    def open(cls, name: str | os.PathLike[str], subfolder: str = "", **hub: Any) -> Self:
        """Finds a checkpoint. From the Hub it fetches all but the weights; `hub` are arguments of `HUB_ARGUMENTS`.

        Raises an OSError if there is no such folder, repository or configuration, and a DamagedFile.
        """
        wanted = (CONFIG, OPTIONS, LOOSE_MASK, INDEX, *METHOD_FILES)
        folder = find_folder(name, wanted, subfolder, **hub)
        if os.path.isdir(name):
            return cls(os.fspath(name), folder, read_json(folder / CONFIG))
        commit = folder.parents[len(Path(subfolder).parts) - 1].name if subfolder else folder.name
        hub = {**hub, "revision": commit}  # so that later fetches get the same state
        return cls(os.fspath(name), folder, read_json(folder / CONFIG), subfolder, hub)

    def also(self, *names: str) -> Path:
        """Fetches further files that exist and returns their folder. Raises an OSError if the Hub cannot be reached."""
        return find_folder(self.name, names, self.subfolder, **self.hub) if self.hub else self.folder

    @cached_property
    def _files(self) -> list[Path]:
        """The files of weights, fetched if missing."""
        if self.hub:
            listed = listed_files(self.folder)
            self.also(*(listed or self.single))
            if not listed and not self._local:
                self.also(*self.pickled)
        others = f", nor {few(self.pickled)}" if self.pickled else ""
        return self._local or weight_files(self.folder, others)  # which says what is missing

    @property
    def _local(self) -> list[Path]:
        """The files of weights that are here; none if one is missing. Pickled ones count where there are no others."""
        for name in self.single:
            if (self.folder / name).is_file():
                return [self.folder / name]
        listed = listed_files(self.folder)
        groups = [listed] if listed else [[name] for name in self.pickled]
        places = [[self.folder / name for name in names] for names in groups]
        return next((paths for paths in places if all(path.is_file() for path in paths)), [])

    @cached_property
    def _headers(self) -> list[SafetensorsFileMetadata]:
        """Headers of the files on the Hub; none if the files are local, or the Hub serves no parts of them."""
        if not self.hub or self.hub.get("local_files_only") or self._local:
            return []
        place, api = f"{self.subfolder}/" if self.subfolder else "", HfApi(token=self.hub.get("token"))
        listed = listed_files(self.folder)
        for names in [listed] if listed else [[name] for name in self.single]:
            with suppress(OSError, HTTPError, SafetensorsParsingError):  # fetching the files will raise the error
                return [
                    api.parse_safetensors_file_metadata(self.name, place + name, revision=self.hub["revision"])
                    for name in names
                ]
        return []

    @property
    def is_described(self) -> bool:
        """Whether names and shapes of the tensors are known without fetching weights."""
        return bool(self._headers) or bool(self._local)

    @property
    def bytes(self) -> int:
        """Size of the weights. Raises an OSError if there are none."""
        if self._headers:
            parts = (each.data_offsets for header in self._headers for each in header.tensors.values())
            return sum(end - start for start, end in parts)
        return sum(path.stat().st_size for path in self._files)


def reader() -> type[Checkpoint]:
    """Returns the class that reads checkpoints: that of `methods/published` where it is here, for all formats."""
    return load("reading", "checkpoints").AnyCheckpoint if "checkpoints" in offered("reading") else Checkpoint


_LARGEST_CARD = 2**20  # bytes


def target_of(config: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Returns the target's publishable name and its class names in a config.json, as far as named."""
    found: Any = config
    for name in ("speculators_config", "verifier"):
        found = found.get(name) if isinstance(found, Mapping) else None
    found = found if isinstance(found, Mapping) else {}
    name, architectures = found.get("name_or_path"), found.get("architectures")
    return (
        public_name(name) if isinstance(name, str) else "",
        tuple(map(str, architectures)) if isinstance(architectures, list) else (),
    )


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
    kind, models = reader(), [each for each in repositories if each.repo_type == "model"]
    for repository in sorted(models, key=lambda each: each.repo_id):
        for revision in sorted(repository.revisions, key=lambda each: -each.last_modified):
            folder = revision.snapshot_path
            checkpoint = kind(repository.repo_id, folder, read_document(folder / CONFIG))
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
