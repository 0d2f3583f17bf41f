"""The files of a drafter's folder: found or fetched from the Hub, and checked before anything is allocated."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    HTTPError,
)
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from ..core.checks import few, is_path, printable
from ..core.methods import offered

CONFIG, OPTIONS, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
ADAPTER_CONFIG = "adapter_config.json"
CARD, RECIPE, FIGURES = "README.md", "training_recipe.json", "figures.json"
PICTURES = ("speed_up.png", "learning_curves.png", "acceptance.png", "calibration.png")
METHOD_FILES = tuple(offered("file"))  # kept beside a drafter's weights
DOCUMENTS = (CARD, RECIPE, FIGURES, *PICTURES)
DESCRIBED = (CONFIG, OPTIONS, INDEX, *DOCUMENTS)  # all but weights, code and files of methods
CODE = ("*.py", "custom_generate/*.py", "custom_generate/requirements.txt")  # of all versions
SPECULATOR = "speculator_model"  # type of all drafters in speculators' format

_LARGEST_JSON, _LARGEST_INDEX = 8 * 2**20, 64 * 2**20  # bytes; a million token ids take most of the former
_MOST_LISTS = 140_000  # and objects: enough for texts of one token each, of which a drafter takes 131,072
_DEEPEST_JSON = 32  # levels; what transformers does with a configuration recurses
_STRINGS, _BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL), re.compile(r"[\[\]{}]")
# Dtypes of weights, as headers name them.
DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_POINTER = b"version https://git-lfs.github.com/spec/"  # the beginning of such a file
_NOT_OF_A_CONFIG = {"configuration_files", "self", "cls"}  # names with a meaning for the file's reader

Shape = tuple[int, ...]


class DamagedFile(ValueError):
    """A file is not what it should be; `paths` are the files that may be damaged."""

    def __init__(self, message: str, *paths: Path) -> None:
        super().__init__(message)
        self.paths = paths


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object of a drafter's folder. Raises an OSError if it is missing, and a DamagedFile."""
    if not path.is_file():
        raise OSError(f"{path.parent} has no {path.name}: it is no drafter's folder, or not all of one")
    largest = _LARGEST_INDEX if path.name == INDEX else _LARGEST_JSON
    if path.stat().st_size > largest:
        raise DamagedFile(f"{path} has {path.stat().st_size:,} bytes: expected at most {largest:,}", path)
    try:
        text = path.read_text(encoding="utf-8")
        if sum(map(text.count, "[{")) > _MOST_LISTS:  # they take the time, and memory too
            raise ValueError(f"expected at most {_MOST_LISTS:,} lists and objects")
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged ({type(error).__name__}: {printable(error)})", path) from error
    if not isinstance(document, dict):
        raise DamagedFile(f"{path} is damaged: expected a JSON object", path)
    if _depth(text) > _DEEPEST_JSON:
        raise DamagedFile(f"{path} is damaged: expected at most {_DEEPEST_JSON} levels of lists and objects", path)
    return document


def read_document(path: Path) -> dict[str, Any]:
    """Returns a JSON object as `read_json`; an empty one if the file is missing or damaged."""
    try:
        return read_json(path)
    except (OSError, ValueError):
        return {}


def _depth(text: str) -> int:
    """Levels of lists and objects of a valid JSON text."""
    steps = {"[": 1, "{": 1, "]": -1, "}": -1}
    brackets = _BRACKETS.findall(_STRINGS.sub("", text))
    return max(accumulate(map(steps.__getitem__, brackets)), default=0)


def type_in(config: Mapping[str, Any]) -> str | None:
    """Returns the model type of a config.json, or `None`. All speculators files, which name none, share one."""
    return SPECULATOR if "speculators_model_type" in config else config.get("model_type")


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter of PEFT alone."""
    return not (folder / CONFIG).is_file() and (folder / ADAPTER_CONFIG).is_file()


def check_is_drafter(folder: Path, model_type: str | None) -> None:
    """Raises a ValueError or OSError for another kind of folder, such as a target's or an adapter's."""
    if is_adapter(folder):
        raise ValueError(f"{folder} is an adapter: load the drafter it adapts, then drafter.load_adapter() with this")
    config = read_json(folder / CONFIG)
    found = type_in(config)
    if found != model_type:
        hint = "; AutoDrafter.from_pretrained() loads it" if found == SPECULATOR else ""
        raise ValueError(
            f"{folder} holds a model of type {printable(found)!r}, not a drafter of type {model_type!r}{hint}"
        )
    if wrong := sorted(_NOT_OF_A_CONFIG & config.keys()):
        raise ValueError(f"{', '.join(wrong)} must not be in a drafter's configuration: remove it")


def weight_files(folder: Path, others: str = "; weights are read from safetensors files only") -> list[Path]:
    """Returns the files of weights in a folder. Raises an OSError if any is missing, and a DamagedFile.

    `others` says what else was looked for.
    """
    names = [WEIGHTS] if (folder / WEIGHTS).is_file() else listed_files(folder) or [WEIGHTS]
    if missing := [name for name in names if not (folder / name).is_file()]:
        if (folder / INDEX).is_file():
            raise OSError(f"{folder} has no {few(missing)}: {INDEX} lists this shard: download it beside the others")
        raise OSError(f"{folder} has no {few(missing)}{others}: download the weights beside {CONFIG} (`hf download`)")
    return [folder / name for name in names]


def listed_files(folder: Path) -> list[str]:
    """The files of weights that an index names; none without an index."""
    if not (folder / INDEX).is_file():
        return []
    listed = read_json(folder / INDEX).get("weight_map")
    names = {str(name) for name in listed.values()} if isinstance(listed, dict) else set()
    if not names or any(not re.fullmatch(r"model-\d{5}-of-\d{5}\.safetensors", name) for name in names):
        message = f"{folder / INDEX} is damaged: expected names such as model-00001-of-00002.safetensors beside it"
        raise DamagedFile(message, folder / INDEX)
    return sorted(names)


def digests(folder: Path) -> dict[str, str]:
    """Returns the SHA-256 of each file of weights, by name."""
    return {path.name: sha256(path) for path in weight_files(folder)}


def check_weights(
    folder: Path,
    shapes: Mapping[str, Shape],
    expected: Mapping[str, str] | None,
    made_by: str = "save_pretrained or `hsdraft train`",
) -> None:
    """Checks the files of weights by their headers, and by their SHA-256 digests where those are known.

    Raises an OSError if files are missing, a DamagedFile, and a ValueError if they hold other tensors; `made_by` is
    what wrote such files. This is no warning: a partly random drafter decodes correctly, only slowly.
    """
    found: dict[str, Shape] = {}
    for path in weight_files(folder):
        for name, (shape, dtype) in header(path).items():
            if dtype not in DTYPES.values():
                raise ValueError(f"{printable(name)} in {path} has dtype {dtype}: expected floating point")
            found[name] = shape
    if told := mismatch(found, shapes):
        raise ValueError(
            f"the weights in {folder} do not match its configuration ({told}); expected the folder that {made_by} wrote"
        )
    if expected is not None and digests(folder) != dict(expected):
        raise DamagedFile(
            f"the weights in {folder} are damaged: their SHA-256 is not the one in {CONFIG}; expected the folder that "
            f"{made_by} wrote",
            folder / CONFIG,
            *weight_files(folder),
        )


def mismatch(
    found: Mapping[str, Shape], expected: Mapping[str, Shape], optional: Mapping[str, Shape] | None = None
) -> str:
    """Returns which tensors are missing, unknown or of other shapes; an empty string if none is."""
    known = {**(optional or {}), **expected}
    wrong = {
        "missing": sorted(expected.keys() - found.keys()),
        "unknown": sorted(found.keys() - known.keys()),
        "of other shapes": [
            f"{name} {list(shape)} instead of {list(known[name])}"
            for name, shape in sorted(found.items())
            if name in known and shape != tuple(known[name])
        ],
    }
    return "; ".join(f"{kind}: {few(names)}" for kind, names in wrong.items() if names)


def check_fetched(path: Path) -> None:
    """Raises an OSError for what Git LFS leaves in place of a file that it has not fetched."""
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            raise OSError(f"{path} is a pointer of Git LFS, not the weights: run `git lfs pull` in {path.parent}")


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a safetensors file. Raises a DamagedFile."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        check_fetched(path)
        message = f"{path} is damaged ({printable(error)}): it is truncated or no safetensors file"
        raise DamagedFile(message, path) from error


def header(path: Path) -> dict[str, tuple[Shape, str]]:
    """Returns shape and dtype, as `DTYPES` names it, of each tensor in a safetensors file. Raises a DamagedFile."""
    with opened(path) as file:
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights in a folder, by name. Raises a DamagedFile for NaN or infinity."""
    return {
        name: checked_numbers(path, name, tensor)
        for path in weight_files(folder)
        for name, tensor in load_file(path).items()
    }


def checked_numbers(path: Path, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor. Raises a DamagedFile if it holds NaN or infinity, with which nothing is drafted."""
    if tensor.is_floating_point() and tensor.element_size() > 1 and not bool(tensor.isfinite().all()):
        raise DamagedFile(
            f"{path} is damaged: {printable(name)} holds values that are NaN or infinite. Load an earlier state, or "
            "train again with a smaller learning rate",
            path,
        )
    return tensor


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download")


def taken_for_hub(kwargs: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Pops the Hub's arguments and the subfolder from the arguments of a load."""
    hub = {name: value for name in HUB_ARGUMENTS if (value := kwargs.pop(name, None)) is not None}
    return hub, kwargs.pop("subfolder", None) or ""


def find_folder(name: str | os.PathLike[str], patterns: Sequence[str], subfolder: str = "", **hub: Any) -> Path:
    """Returns the folder of a drafter's files: `name` itself, or a snapshot of a repository of the Hub.

    `patterns` are fetched from the Hub, with arguments of `HUB_ARGUMENTS`. Raises an OSError if there is no such folder
    or repository, or the Hub cannot be reached and nothing complete is cached.
    """
    name = os.fspath(name)
    if os.path.isdir(name):
        return Path(name) / subfolder
    if is_path(name):
        raise OSError(f"no such drafter folder: {os.path.abspath(name)}")
    wanted = [f"{subfolder}/{pattern}" if subfolder else pattern for pattern in patterns]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, **hub)) / subfolder
    except (HFValidationError, HTTPError, OSError) as error:
        told = f"there is no drafter folder {os.path.abspath(name)}, and {name} could not be fetched from the Hub"
        remedy = "correct the name (user/name), log in if it is not public (`hf auth login`), or repeat the call"
        raise OSError(f"{told} ({error}): {remedy}; offline, only complete copies in the cache are found") from error


def fetch(name: str | os.PathLike[str], model_type: str, subfolder: str = "", **hub: Any) -> Path:
    """Returns a drafter's folder with all that loading needs; errors as `find_folder` and `check_is_drafter`."""
    folder = find_folder(name, DESCRIBED, subfolder, **hub)
    check_is_drafter(folder, model_type)
    if not os.path.isdir(name):
        commit = folder.parents[len(Path(subfolder).parts) - 1].name if subfolder else folder.name
        names = [*(listed_files(folder) or [WEIGHTS]), *METHOD_FILES]
        folder = find_folder(name, names, subfolder, **{**hub, "revision": commit})  # of the same state
    return folder


@contextmanager
def loading(name: Any, offline: bool = False) -> Iterator[None]:
    """Deletes damaged files from the Hub's cache, to be fetched by the next call, and raises a ValueError for them."""
    try:
        yield
    except DamagedFile as error:
        if os.path.isdir(name):
            remedy = "copy it again, or download it again"
        elif not (damaged := [path for path in error.paths if _is_damaged(path)]):
            remedy = "the cache holds what the Hub sent"
        elif offline or constants.is_offline_mode():
            remedy = "the copy in the cache is damaged: repeat the call online"
        else:
            remedy = _forget(damaged)
        raise ValueError(f"{error}; {remedy}") from error


def _is_damaged(path: Path) -> bool:
    """Whether a cached file does not match its name: its SHA-256, or as a git blob its SHA-1."""
    name = path.resolve().name
    if not path.is_file() or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", name):
        return path.is_file()  # unknown in a cache without links
    if len(name) == 64:
        return sha256(path) != name
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() != name


def _forget(damaged: Sequence[Path]) -> str:
    """Deletes files of the cache; returns what to do next."""
    try:
        for path in damaged:
            path.resolve().unlink(missing_ok=True)  # snapshots are links, where the system has them
            path.unlink(missing_ok=True)
    except OSError:  # a read-only cache
        return "delete it from the cache"
    return "it was removed from the cache: repeat the call to download it again"
