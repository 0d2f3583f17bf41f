"""Finding a drafter's files, here or on the Hub, and checking them before anything is allocated for them."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import SafetensorError, safe_open

from ..common.checks import few, printable

# 1: what decoding needs. 2: also which target and which weights belong to it. A drafter of a newer format is refused.
FORMAT_VERSION = 2

CONFIG, OPTIONS, WEIGHTS, INDEX = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
)
PICTURES = ("speed_up.png", "learning_curves.png", "acceptance.png", "calibration.png")
DOCUMENTS = ("README.md", "training_recipe.json", "figures.json", *PICTURES)
DESCRIBED = (CONFIG, OPTIONS, INDEX, *DOCUMENTS)  # all but weights and code
CODE = ("*.py", "custom_generate/generate.py", "custom_generate/requirements.txt")
HUB_ARGUMENTS = ("revision", "token", "cache_dir", "local_files_only", "force_download")

_LARGEST_JSON = 64 * 2**20  # bytes; a million token ids take a tenth of it
_DTYPES = {"F64", "F32", "F16", "BF16"}
_NOT_OF_A_CONFIG = {"configuration_files", "self", "cls"}  # names that mean something to whoever reads the file


class DamagedFile(ValueError):
    """A file is not what it should be.

    Attributes:
        paths: of the files that may be damaged.
    """

    def __init__(self, message: str, *paths: Path) -> None:
        super().__init__(message)
        self.paths = paths


@contextmanager
def forgetting_damaged(name: str | os.PathLike[str], offline: bool = False) -> Iterator[None]:
    """What turns out to be damaged is deleted from the Hub's cache, so that the next call fetches it anew."""
    try:
        yield
    except DamagedFile as error:
        if os.path.isdir(name):
            raise ValueError(f"{error}; copy it again, or download it again") from error
        damaged = [path for path in error.paths if _is_damaged(path)]
        if not damaged:
            raise ValueError(f"{error}; the cache holds what the Hub sent") from error
        if offline or constants.is_offline_mode():
            raise ValueError(f"{error}; the copy in the cache is damaged: repeat the call online") from error
        with suppress(OSError):  # a cache that may only be read
            for path in damaged:
                path.resolve().unlink(missing_ok=True)  # the cache's snapshots are links, where the system has them
                path.unlink(missing_ok=True)
            raise ValueError(f"{error}; it was removed from the cache: repeat the call to download it again") from error
        raise ValueError(f"{error}; delete it from the cache") from error


def find_folder(name: str | os.PathLike[str], patterns: Sequence[str], subfolder: str = "", **hub: Any) -> Path:
    """The folder that holds a drafter's files: `name` itself, or a snapshot of a repository of the Hub.

    Args:
        patterns: files to fetch from the Hub.
        subfolder: where in the repository they are.
        hub: of `HUB_ARGUMENTS`, what the Hub is to be asked with.

    Raises:
        OSError: there is no such folder or repository, or the Hub cannot be reached and nothing complete is cached.
    """
    name = os.fspath(name)
    if os.path.isdir(name):
        return Path(name) / subfolder
    # A Hub name has at most one slash, and is not a folder here.
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or os.path.isdir(name.partition("/")[0]):
        raise OSError(f"no such drafter folder: {os.path.abspath(name)}")
    elsewhere = f"there is no drafter folder {os.path.abspath(name)}, and"
    revision = hub.get("revision") or "main"
    wanted = [f"{subfolder}/{pattern}" if subfolder else pattern for pattern in patterns]
    try:
        return Path(snapshot_download(name, allow_patterns=wanted, **hub)) / subfolder
    except HFValidationError as error:
        raise OSError(f"{elsewhere} as a Hub name: {error}") from error
    except GatedRepoError as error:
        raise OSError(f"{elsewhere} {name} on the Hub is gated: ask for access there, then log in") from error
    except RepositoryNotFoundError as error:
        raise OSError(
            f"{elsewhere} no repository {name} on the Hub that may be read without logging in, or with the token in "
            "use: look for a typing error (a name is user/name), or log in (`hf auth login`)"
        ) from error
    except RevisionNotFoundError as error:
        raise OSError(f"the repository {name} has no revision {revision!r}") from error
    except LocalEntryNotFoundError as error:
        raise OSError(
            f"{elsewhere} {name} at {revision!r} is not complete in the cache, while the Hub cannot be reached, has no "
            f"such repository (a name is user/name), or offline mode is on: {error}"
        ) from error
    except (HTTPError, OSError) as error:
        kind = "" if isinstance(error, HfHubHTTPError) else f"{type(error).__name__}: "
        raise OSError(
            f"{name} at {revision!r} could not be fetched: {kind}{error}. Only complete files are in the cache; repeat "
            "the call"
        ) from error


def fetch(name: str | os.PathLike[str], model_type: str, subfolder: str = "", **hub: Any) -> Path:
    """The folder of a drafter, fetched as far as loading needs it: what it is first, its weights if it is a drafter.

    Raises:
        OSError, DamagedFile, ValueError: see `find_folder` and `check_is_drafter`.
    """
    folder = find_folder(name, DESCRIBED, subfolder, **hub)
    check_is_drafter(folder, model_type)
    if not os.path.isdir(name):
        commit = folder.parents[len(Path(subfolder).parts) - 1].name if subfolder else folder.name
        names = _listed(folder) or [WEIGHTS]
        folder = find_folder(name, names, subfolder, **{**hub, "revision": commit})  # of the same state
    return folder


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a drafter's folder.

    Raises:
        OSError: the file is missing.
        DamagedFile: it is too large, or no JSON object.
    """
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


def check_is_drafter(folder: Path, model_type: str) -> None:
    """Raises a ValueError or OSError for a folder of something else, such as a target's or an adapter's."""
    if not (folder / CONFIG).is_file() and (folder / "adapter_config.json").is_file():
        raise ValueError(f"{folder} is an adapter: load the drafter it adapts, then drafter.load_adapter() with this")
    config = read_json(folder / CONFIG)
    found = config.get("model_type")
    if found != model_type:
        raise ValueError(f"{folder} holds a model of type {printable(found)!r}, not a drafter (of type {model_type!r})")
    wrong = sorted(_NOT_OF_A_CONFIG & config.keys())
    if wrong:
        raise ValueError(f"{', '.join(wrong)} must not be in a drafter's configuration: remove it")


def weight_files(folder: Path) -> list[Path]:
    """The files of weights in a folder.

    Raises:
        OSError: there are none, or some that the index names are missing.
        DamagedFile: the index names files elsewhere.
    """
    names = [WEIGHTS] if (folder / WEIGHTS).is_file() else _listed(folder) or [WEIGHTS]
    missing = sorted(name for name in names if not (folder / name).is_file())
    if missing:
        raise OSError(f"{folder} has no {few(missing)}; weights are read from safetensors files only")
    return [folder / name for name in sorted(names)]


def _listed(folder: Path) -> list[str]:
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
    """SHA-256 of each file of weights, by name."""
    return {path.name: _sha256(path) for path in weight_files(folder)}


def check_weights(folder: Path, shapes: Mapping[str, Sequence[int]], expected: Mapping[str, str] | None) -> None:
    """Checks the files of weights against the configuration, by their headers, and against their digests.

    Args:
        shapes: of every tensor that the configuration describes.
        expected: digests by file name, where the drafter has any.

    Raises:
        OSError: files are missing.
        DamagedFile: they are damaged.
        ValueError: they hold other tensors. A drafter that is partly random would still decode
            correctly, only slowly, so this is not left to a warning.
    """
    found: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    part = file.get_slice(name)
                    if part.get_dtype() not in _DTYPES:
                        raise ValueError(
                            f"{printable(name)} in {path} has dtype {part.get_dtype()}: expected floating point"
                        )
                    found[name] = tuple(part.get_shape())
        except SafetensorError as error:
            message = f"{path} is damaged ({printable(error)}): it is truncated or was not written by save_pretrained"
            raise DamagedFile(message, path) from error
    wrong = {
        "missing": sorted(shapes.keys() - found.keys()),
        "unexpected": sorted(found.keys() - shapes.keys()),
        "of other shapes": sorted(
            f"{name} {list(found[name])} instead of {list(shape)}"
            for name, shape in shapes.items()
            if name in found and found[name] != tuple(shape)
        ),
    }
    told = "; ".join(f"{kind}: {few(names)}" for kind, names in wrong.items() if names)
    if told:
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


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The weights in a folder, by name."""
    found: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def _is_damaged(path: Path) -> bool:
    """Whether a file of the cache is not what it is named by there: its SHA-256, or as a blob of git its SHA-1."""
    name = path.resolve().name
    if not path.is_file() or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", name):
        return path.is_file()  # a cache without links does not tell
    if len(name) == 64:
        return _sha256(path) != name
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() != name


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
