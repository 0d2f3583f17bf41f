"""Drafter checkpoints in any format, on the Hub or local, inspected and checked before anything is allocated.

Only configuration and weights are fetched, never code. Weights on the Hub are fetched when they are read; names and
shapes come before that, from the headers of the files. Older files, which are pickled, have no such headers.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import torch
from huggingface_hub import CacheNotFound, HfApi, scan_cache_dir
from huggingface_hub.errors import HTTPError, SafetensorsParsingError
from huggingface_hub.repocard import metadata_load
from huggingface_hub.utils import SafetensorsFileMetadata

from ..core.checks import few, printable, public_name
from ..core.methods import load, offered
from .drafter_files import (
    CARD,
    CONFIG,
    DTYPES,
    INDEX,
    METHOD_FILES,
    OPTIONS,
    RECIPE,
    WEIGHTS,
    DamagedFile,
    Shape,
    check_fetched,
    checked_numbers,
    find_folder,
    header,
    listed_files,
    mismatch,
    opened,
    read_document,
    read_json,
    weight_files,
)

# Further dtypes, as headers name them: of quantised weights, and of what is no weight
_OTHER_DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int8: "I8", torch.uint8: "U8",
    torch.int32: "I32", torch.int64: "I64", torch.bool: "BOOL",
}  # fmt: skip
# Scales of inputs, and of keys and values, which change nothing where inputs are not quantised; and sizes.
_OF_INPUTS = (
    ".input_scale", ".input_zero_point", ".input_global_scale", ".activation_scale", ".output_scale", ".k_scale",
    ".v_scale", ".q_scale", ".weight_shape", ".bias_scale",
)  # fmt: skip
_SINGLE = (WEIGHTS, "medusa_lm_head.safetensors")  # names of one file of weights; the first that is there
_PICKLED = ("pytorch_model.bin", "medusa_lm_head.pt", "hydra_lm_head.pt")  # the first that is there
LOOSE_MASK = "mask_embedding.pt"  # mask embedding of some block drafters
_MAPS = frozenset({"d2t", "t2d"})  # of a vocabulary
_MOST_NUMBERS = 2**40  # of a tensor; a header that says more is damaged
_PREFIX = "model."  # NeMo AutoModel's prefix of all tensors but the head's


@dataclass(frozen=True)
class Checkpoint:
    """A folder with a configuration and weights, in any format."""

    name: str  # folder or Hub name that was asked for
    folder: Path
    config: Mapping[str, Any]  # contents of config.json
    subfolder: str = ""  # of the repository
    hub: Mapping[str, Any] = field(default_factory=dict)  # arguments for the Hub; empty for a local folder

    @classmethod
    def open(cls, name: str | os.PathLike[str], subfolder: str = "", **hub: Any) -> Checkpoint:
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

    def with_weights(self) -> Path:
        """Fetches missing weights and returns their folder. Raises an OSError if that fails, and a DamagedFile."""
        _ = self._files
        return self.folder

    @cached_property
    def _files(self) -> list[Path]:
        """The files of weights, fetched if missing."""
        if self.hub:
            listed = listed_files(self.folder)
            self.also(*(listed or _SINGLE))
            if not listed and not self._local:
                self.also(*_PICKLED)
        return self._local or weight_files(self.folder, f", nor {few(_PICKLED)}")  # which says what is missing

    @property
    def _local(self) -> list[Path]:
        """The files of weights that are here; none if one is missing. Pickled ones count where there are no others."""
        for name in _SINGLE:
            if (self.folder / name).is_file():
                return [self.folder / name]
        listed = listed_files(self.folder)
        groups = [listed] if listed else [[name] for name in _PICKLED]
        places = [[self.folder / name for name in names] for names in groups]
        return next((paths for paths in places if all(path.is_file() for path in paths)), [])

    @cached_property
    def _headers(self) -> list[SafetensorsFileMetadata]:
        """Headers of the files on the Hub; none if the files are local, or the Hub serves no parts of them."""
        if not self.hub or self.hub.get("local_files_only") or self._local:
            return []
        place, api = f"{self.subfolder}/" if self.subfolder else "", HfApi(token=self.hub.get("token"))
        listed = listed_files(self.folder)
        for names in [listed] if listed else [[name] for name in _SINGLE]:
            with suppress(OSError, HTTPError, SafetensorsParsingError):  # fetching the files will raise the error
                return [
                    api.parse_safetensors_file_metadata(self.name, place + name, revision=self.hub["revision"])
                    for name in names
                ]
        return []

    @cached_property
    def _found(self) -> Mapping[str, tuple[Shape, str]]:
        """Shape and dtype of each tensor by its name in the files."""
        found = {
            name: (tuple(each.shape), str(each.dtype))
            for header in self._headers
            for name, each in header.tensors.items()
        }
        files = [] if self._headers else self._files
        if files and files[0].name in _PICKLED:
            pickled = self._unpickled(files[0]).items()
            names = {**DTYPES, **_OTHER_DTYPES}
            return {name: (tuple(each.shape), names.get(each.dtype, str(each.dtype))) for name, each in pickled}
        for path in files:
            found |= header(path)
        for name, (shape, _) in found.items():
            if torch.Size(shape).numel() > _MOST_NUMBERS:
                raise DamagedFile(f"{self.folder}: tensor {printable(name)} has shape {list(shape)}", self.folder)
        return found

    @cached_property
    def _quantised(self) -> Any:
        """What reads quantised weights, `methods/quantised.py`; None where all tensors are plain numbers."""
        plain = all(dtype in DTYPES.values() for name, (_, dtype) in self._found.items() if name not in _MAPS)
        return None if plain or not offered("reading") else load("reading", "quantised")

    @cached_property
    def _packed(self) -> Mapping[str, Any]:
        """Quantised weights, by the stored name that they would have otherwise."""
        return {} if self._quantised is None else self._quantised.packed_weights(self._found, self.config)

    @cached_property
    def _weights(self) -> Mapping[str, tuple[Shape, str]]:
        """As `_found`, with quantised weights as they are dequantised, in place of their parts."""
        parts = {name for each in self._packed.values() for name in each.stored.values()}
        plain = {
            name: each for name, each in self._found.items() if name not in parts and not name.endswith(_OF_INPUTS)
        }
        return plain | {name: (each.shape, DTYPES[self.dtype]) for name, each in self._packed.items()}

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that quantised weights had, as config.json tells; bfloat16 if it does not."""
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        return next((dtype for dtype in DTYPES if str(dtype) == f"torch.{named}"), torch.bfloat16)

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """Public name of each stored name: without a prefix that a drafter's tensors may have."""
        prefix = _PREFIX if f"{_PREFIX}fc.weight" in self._weights else ""
        names = {name: name.removeprefix(prefix) for name in self._weights}
        return names if len(set(names.values())) == len(names) else {name: name for name in names}

    @cached_property
    def shapes(self) -> Mapping[str, Shape]:
        """Shape of each tensor by name, of quantised ones as they are dequantised.

        Raises an OSError if there are no weights, and a DamagedFile.
        """
        return {self._names[name]: shape for name, (shape, _) in self._weights.items()}

    @property
    def quantisation(self) -> str:
        """How the weights are quantised; empty if they are not."""
        return ", ".join(dict.fromkeys(each.scheme.name for each in self._packed.values()))

    @property
    def quantisation_unread(self) -> str:
        """Says how weights are quantised that cannot be read; empty if all can."""
        dtypes = {name: dtype for name, (_, dtype) in self._weights.items() if name not in _MAPS}
        if self._quantised is not None:
            return self._quantised.unread(dtypes, self.config)
        others = sorted(set(dtypes.values()) - {*DTYPES.values(), "I32", "I64", "BOOL"})  # these may be no weights
        return (
            f"quantised ({few(others)}), and hf_hsdraft/methods/quantised.py is not here to read it" if others else ""
        )

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

    def tensors(
        self, names: Collection[str] | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields tensors by name, only those in `names` if given.

        Quantised ones are dequantised to `dtype`, by default that of the checkpoint. Raises the errors of `shapes`, and
        a ValueError if the parts of a quantised one do not fit.
        """
        with self._readable() as read:
            for stored in self._weights:
                name = self._names[stored]
                if names is None or name in names:
                    packed = self._packed.get(stored)
                    yield name, read(stored) if packed is None else packed.restored(read, dtype or self.dtype)

    @contextmanager
    def _readable(self) -> Iterator[Callable[[str], torch.Tensor]]:
        """Gives a function that returns a stored tensor by name, or raises a DamagedFile."""
        files = self._files
        if files and files[0].name in _PICKLED:
            pickled = self._unpickled(files[0])
            yield lambda name: checked_numbers(files[0], name, pickled[name])
            return
        with ExitStack() as stack:
            places: dict[str, tuple[Path, Any]] = {}
            for path in files:
                file = stack.enter_context(opened(path))
                places |= dict.fromkeys(file.keys(), (path, file))

            def read(name: str) -> torch.Tensor:
                path, file = places[name]
                return checked_numbers(path, name, file.get_tensor(name))

            yield read

    def check_shapes(self, expected: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None) -> None:
        """Compares the tensors with the shapes that a configuration describes, and their dtypes with those of weights.

        Maps of a vocabulary may have any dtype. Raises a ValueError that names tensors that are missing, unknown or
        wrong.
        """
        dtypes = {self._names[name]: dtype for name, (_, dtype) in self._weights.items()}
        if told := self.quantisation_unread:
            raise ValueError(f"{printable(self.name)} is {told}")
        if told := mismatch(self.shapes, expected, optional):
            raise ValueError(
                f"the weights of {printable(self.name)} do not match its {CONFIG} ({told}): expected the files as "
                "they were published"
            )
        weights = sorted(expected.keys() - _MAPS)
        if wrong := [f"{name} of {dtypes[name]}" for name in weights if dtypes[name] not in DTYPES.values()]:
            raise ValueError(
                f"{printable(self.name)} has weights that are no floating-point numbers ({few(wrong)}): expected the "
                "files as they were published"
            )

    def loose_tensor(self, name: str) -> tuple[torch.Tensor, Mapping[str, Any]]:
        """Returns the one tensor of a file beside the weights, and what that says of it; a DamagedFile if none."""
        path = self.folder / name
        found = _unpickled(path)
        about = found if isinstance(found, dict) else {}
        tensor = about.get("embedding") if about else found
        if not isinstance(tensor, torch.Tensor):
            raise DamagedFile(f"{path} is damaged: expected one tensor", path)
        return tensor, about

    def _unpickled(self, path: Path) -> dict[str, torch.Tensor]:
        found = _unpickled(path)
        if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise DamagedFile(f"{path} is damaged: expected tensors by name", path)
        return found


def _unpickled(path: Path) -> Any:
    """Contents of a PyTorch file, read without running code from it.

    Files in today's layout, a zip archive, are memory-mapped; PyTorch maps no older ones.
    """
    check_fetched(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except MemoryError:
        raise
    except Exception as error:  # a damaged pickle may raise anything, even errors of seeking beyond its end
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        told = printable(error) or type(error).__name__
        raise DamagedFile(f"{path} is damaged ({told}): it is truncated or no file of PyTorch", path) from error


_LARGEST_CARD = 2**20  # bytes


def speculators_type(checkpoint: Checkpoint) -> str:
    """Returns the kind of drafter that a checkpoint in this format names; empty for other formats."""
    kind = checkpoint.config.get("speculators_model_type")
    return kind if isinstance(kind, str) else ""


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
