"""The care for a drafter's repository beyond loading and saving it. The package registers more than travels."""

from __future__ import annotations

import fnmatch
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi

from ..core.checks import is_code_file, public_name
from .drafter_files import (
    CARD,
    CONFIG,
    DOCUMENTS,
    INDEX,
    METHOD_FILES,
    WEIGHTS,
    check_is_drafter,
    read_json,
    type_in,
)

ENTRY = "hub_entry"  # of the code that travels
ADAPTER_CONFIG = "adapter_config.json"


class RepositoryCare:
    """The care of a drafter that runs by the code it brought.

    What it saves or sends is complete: its code and its documents are copied as they are. Only the package writes
    cards, says what to do when the Hub refuses, takes damaged files out of the cache, deletes code of versions that
    kept no list of it, and replaces its own card on the Hub.
    """

    @contextmanager
    def loading(self, name: Any, offline: bool = False) -> Iterator[None]:
        """Surrounds the loading of the folder or repository `name`, to say what to do about errors."""
        yield

    def write_code(self, family: Any, folder: Path) -> str:
        """Writes the code of a family of drafters into a folder; returns the module that its class is loaded by."""
        for path in Path(__file__).parent.glob("[!_]*.py"):
            shutil.copyfile(path, folder / path.name)
        return ENTRY

    def write_card(self, folder: Path, name: str) -> None:
        """Writes the card of a drafter that is loaded by `name`."""

    def former_code(self, folder: Path) -> set[str]:
        """Returns the names of the code files that the drafter in a folder was saved with."""
        listed = read_json(folder / CONFIG).get("code_files")
        return set(filter(is_code_file, listed)) if isinstance(listed, list) else set()

    def push(self, folder: Path, repo_id: str, **options: Any) -> CommitInfo:
        """Sends the folder of a drafter or an adapter to the Hub, in one commit.

        Raises:
            ValueError: The repository holds something else than a drafter, or is public and `private` was asked for.
        """
        api, repo_id, there = prepare_repository(repo_id, options)
        stale: list[str] = []
        with tempfile.TemporaryDirectory() as place:
            if (folder / ADAPTER_CONFIG).is_file():
                folder = stage_adapter(folder, Path(place))
            elif CONFIG in there:
                api.hf_hub_download(repo_id, CONFIG, revision=options.get("revision"), local_dir=place)
                check_is_drafter(Path(place), type_in(read_json(folder / CONFIG)))
                ours = [WEIGHTS, INDEX, "model-?????-of-?????.safetensors"]
                ours += [*sorted(set(DOCUMENTS) - {CARD}), *METHOD_FILES]
                former = {name for pattern in ours for name in fnmatch.filter(there, pattern)}
                former |= there & self.former_code(Path(place))
                stale = sorted(name for name in former if not (folder / name).is_file())
            foreign = [CARD] if CARD in there else []  # a card that is there may be somebody's
            chosen: dict[str, Any] = {"delete_patterns": stale or None, "ignore_patterns": foreign}
            return api.upload_folder(repo_id=repo_id, folder_path=folder, **chosen, **options)


def push_saved(drafter: Any, repo_id: str, **options: Any) -> CommitInfo:
    """Sends what a drafter's `save_pretrained` writes to the Hub as it is, in one commit.

    Args:
        drafter: the drafter.
        repo_id: `"user/name"`, created if there is none.
        options: `private`, `revision`, `token`, `create_pr`, `commit_message`, `commit_description`.

    Raises:
        OSError: The Hub refuses or cannot be reached.
        ValueError: A private repository was asked for, and there is a public one.
    """
    with tempfile.TemporaryDirectory() as folder:
        drafter.save_pretrained(folder)
        api, repo_id, _ = prepare_repository(repo_id, options)
        return api.upload_folder(repo_id=repo_id, folder_path=folder, **options)


def stage_adapter(folder: Path, staged: Path) -> Path:
    """Copies an adapter and its documents into a folder, without paths of this machine; returns that folder."""
    for name in (ADAPTER_CONFIG, "adapter_model.safetensors", *DOCUMENTS):
        if (folder / name).is_file():
            shutil.copyfile(folder / name, staged / name)
    adapter = read_json(staged / ADAPTER_CONFIG)
    adapter["base_model_name_or_path"] = public_name(str(adapter.get("base_model_name_or_path") or ""))
    (staged / ADAPTER_CONFIG).write_text(json.dumps(adapter, indent=2) + "\n", encoding="utf-8")
    return staged


def prepare_repository(
    repo_id: str, options: dict[str, Any], repo_type: str | None = None
) -> tuple[HfApi, str, set[str]]:
    """Makes sure that a repository of the Hub and the branch to write to exist.

    Args:
        repo_id: Name of the repository.
        options: Of a push. `token` and `private` are taken out of them.
        repo_type: `"dataset"` for a data set; `None` for a model.

    Returns:
        The client to send with, the full name of the repository, and the names of the files that are there.

    Raises:
        ValueError: `private` was asked for, and the repository is public.
    """
    api, private = HfApi(token=options.pop("token", None)), options.pop("private", None)
    revision = options.get("revision")
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True, repo_type=repo_type).repo_id
    if private and not api.repo_info(repo_id, repo_type=repo_type).private:
        raise ValueError(f"{repo_id} exists and is public: nothing was sent; choose another name, or hide it first")
    if revision is not None and not options.get("create_pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return api, repo_id, set(api.list_repo_files(repo_id, revision=revision, repo_type=repo_type))


_registered = [RepositoryCare()]


def care() -> RepositoryCare:
    """Returns the care that is registered."""
    return _registered[-1]


def register_care(better: RepositoryCare) -> None:
    """Puts another care in the place of this one."""
    _registered.append(better)
