"""Finds a drafter's files, local or on the Hub, and checks them before anything is allocated."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, HTTPError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from ..core.checks import few, printable
from ..core.methods import offered

CONFIG, OPTIONS, WEIGHTS = "config.json", "generation_config.json", "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
CARD, RECIPE, FIGURES = "README.md", "training_recipe.json", "figures.json"
PICTURES = ("speed_up.png", "learning_curves.png", "acceptance.png", "calibration.png")
METHOD_FILES = tuple(offered("file"))  # kept beside a drafter's weights
DOCUMENTS = (CARD, RECIPE, FIGURES, *PICTURES)
DESCRIBED = (CONFIG, OPTIONS, INDEX, *DOCUMENTS)  # all but weights, code and files of methods
CODE = ("*.py", "custom_generate/generate.py", "custom_generate/requirements.txt")
HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download")

SPECULATOR = "speculator_model"  # type of all drafters in speculators' format

_LARGEST_JSON = 64 * 2**20  # bytes; a million token ids take a tenth of it
_DTYPES = {"F64", "F32", "F16", "BF16"}
_NOT_OF_A_CONFIG = {"configuration_files", "self", "cls"}  # names with a meaning for the file's reader


class DamagedFile(ValueError):
    """A file is not what it should be; `paths` are the files that may be damaged."""

    def __init__(self, message: str, *paths: Path) -> None:
        super().__init__(message)
        self.paths = paths


class NotFetched(OSError):
    """A repository could not be fetched; `__cause__` is the Hub client's error."""

    def __init__(self, name: str, revision: str, error: Exception) -> None:
        super().__init__(f"{name} at {revision!r} could not be fetched: {error}")
        self.name, self.revision = name, revision


def taken_for_hub(kwargs: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Pops the Hub's arguments and the subfolder from the arguments of a load."""
    hub = {name: value for name in HUB_ARGUMENTS if (value := kwargs.pop(name, None)) is not None}
    return hub, kwargs.pop("subfolder", None) or ""


def find_folder(name: str | os.PathLike[str], patterns: Sequence[str], subfolder: str = "", **hub: Any) -> Path:
    """Returns the folder of a drafter's files: `name` itself, or a snapshot of a repository of the Hub.

    Args:
        patterns: Files to fetch from the Hub.
        hub: Arguments for the Hub, of `HUB_ARGUMENTS`.

    Raises:
        OSError: There is no such folder or repository, or the Hub cannot be reached and nothing complete is cached.
    """
    name = os.fspath(name)
    if os.path.isdir(name):
        return Path(name) / subfolder
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:  # a Hub name has at most one slash
        raise OSError(f"no such drafter folder: {os.path.abspath(name)}")
    wanted = [f"{subfolder}/{pattern}" if subfolder else pattern for pattern in patterns]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, **hub)) / subfolder
    except (HFValidationError, HTTPError, OSError) as error:
        raise NotFetched(name, hub.get("revision") or "main", error) from error


def fetch(name: str | os.PathLike[str], model_type: str, subfolder: str = "", **hub: Any) -> Path:
    """Returns a drafter's folder with all that loading needs; weights are fetched only if it is a drafter.

    Raises the errors of `find_folder` and `check_is_drafter`.
    """
    folder = find_folder(name, DESCRIBED, subfolder, **hub)
    check_is_drafter(folder, model_type)
    if not os.path.isdir(name):
        commit = folder.parents[len(Path(subfolder).parts) - 1].name if subfolder else folder.name
        names = [*(listed_files(folder) or [WEIGHTS]), *METHOD_FILES]
        folder = find_folder(name, names, subfolder, **{**hub, "revision": commit})  # of the same state
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """Returns a JSON object of a drafter's folder. Raises an OSError if it is missing, and a DamagedFile."""
    if not path.is_file():
        raise OSError(f"{path.parent} has no {path.name}: it is no drafter's folder, or not all of one")
    if path.stat().st_size > _LARGEST_JSON:
        raise DamagedFile(f"{path} has {path.stat().st_size:,} bytes: expected at most {_LARGEST_JSON:,}", path)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{path} is damaged ({type(error).__name__}: {printable(error)})", path) from error
    if not isinstance(document, dict):
        raise DamagedFile(f"{path} is damaged: expected a JSON object", path)
    return document


def type_in(config: Mapping[str, Any]) -> str | None:
    """Returns the model type of a config.json, or `None`. All speculators files, which name none, share one."""
    return SPECULATOR if "speculators_model_type" in config else config.get("model_type")


def check_is_drafter(folder: Path, model_type: str | None) -> None:
    """Raises a ValueError or OSError for another kind of folder, such as a target's or an adapter's."""
    if not (folder / CONFIG).is_file() and (folder / "adapter_config.json").is_file():
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


def weight_files(folder: Path) -> list[Path]:
    """Returns the files of weights in a folder. Raises an OSError if any is missing, and a DamagedFile."""
    names = [WEIGHTS] if (folder / WEIGHTS).is_file() else listed_files(folder) or [WEIGHTS]
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise OSError(f"{folder} has no {few(missing)}; weights are read from safetensors files only")
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


def check_weights(folder: Path, shapes: Mapping[str, Sequence[int]], expected: Mapping[str, str] | None) -> None:
    """Checks the files of weights by their headers, and by their SHA-256 digests where those are known.

    Raises:
        OSError: Files are missing.
        DamagedFile: They are damaged.
        ValueError: They hold other tensors. This is no warning: a partly random drafter decodes correctly, only slowly.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        found |= _shapes_in(path)
    wrong = {
        "missing": sorted(shapes.keys() - found.keys()),
        "unexpected": sorted(found.keys() - shapes.keys()),
        "of other shapes": [
            f"{name} {list(found[name])} instead of {list(shapes[name])}"
            for name in sorted(shapes.keys() & found.keys())
            if found[name] != tuple(shapes[name])
        ],
    }
    if told := "; ".join(f"{kind}: {few(names)}" for kind, names in wrong.items() if names):
        raise ValueError(
            f"the weights in {folder} do not match its configuration ({told}); expected the folder that "
            "save_pretrained or `hsdraft train` wrote"
        )
    if expected is not None and digests(folder) != dict(expected):
        raise DamagedFile(
            f"the weights in {folder} are damaged: their SHA-256 is not the one in {CONFIG} (if they were changed on "
            "purpose, save them by save_pretrained)",
            folder / CONFIG,
            *weight_files(folder),
        )


def _shapes_in(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a file's tensors, from its header."""
    shapes = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                if part.get_dtype() not in _DTYPES:
                    raise ValueError(
                        f"{printable(name)} in {path} has dtype {part.get_dtype()}: expected floating point"
                    )
                shapes[name] = tuple(part.get_shape())
    except SafetensorError as error:
        message = f"{path} is damaged ({printable(error)}): it is truncated or was not written by save_pretrained"
        raise DamagedFile(message, path) from error
    return shapes


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
            f"{path} is damaged: {printable(name)} holds values that are NaN or infinite. Load an earlier state of the "
            "drafter, or train it anew with a smaller learning rate",
            path,
        )
    return tensor


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
