"""Pushes drafters, adapters and data sets to the Hub."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from ..core.checks import is_code_file, printable, public_name
from .code_files import former_code
from .drafter_files import (
    ADAPTER_CONFIG,
    CARD,
    CONFIG,
    DOCUMENTS,
    check_is_drafter,
    checked_numbers,
    opened,
    read_json,
    type_in,
)
from .model_card import is_generated, read_recipe, write_card
from .publication import is_ours
from .speculators_format import target_of


@dataclass(frozen=True)
class Repository:
    """A repository of the Hub to write to, and the names of the files in it."""

    api: HfApi
    name: str  # as user/name
    kind: str | None  # "dataset", or None for a model
    revision: str | None
    files: frozenset[str]

    @classmethod
    def open(cls, name: str, options: dict[str, Any], kind: str | None = None) -> Repository:
        """Creates the repository and the branch to write to, if missing; pops `token`, `private` and `revision`.

        Raises a ValueError if `private` was asked for, and the repository is public.
        """
        api = HfApi(token=options.pop("token", None))
        private, revision = options.pop("private", None), options.pop("revision", None)
        name = api.create_repo(name, private=private, exist_ok=True, repo_type=kind).repo_id
        if private and not api.repo_info(name, repo_type=kind).private:
            raise ValueError(f"{name} exists and is public: nothing was sent; choose another name, or hide it first")
        if revision is not None and not options.get("create_pr"):
            api.create_branch(name, branch=revision, exist_ok=True)
        return cls(api, name, kind, revision, frozenset(api.list_repo_files(name, revision=revision, repo_type=kind)))

    def fetch(self, file: str, folder: str | Path) -> Path:
        """Downloads a file into a folder and returns its path."""
        where: dict[str, Any] = {"revision": self.revision, "repo_type": self.kind, "local_dir": folder}
        return Path(self.api.hf_hub_download(self.name, file, **where))

    def send(self, folder: Path, stale: Iterable[str] = (), **options: Any) -> CommitInfo:
        """Sends a folder in one commit that deletes `stale` files; `options` are those of `HfApi.upload_folder`."""
        where: dict[str, Any] = {"repo_id": self.name, "repo_type": self.kind, "revision": self.revision}
        return self.api.upload_folder(**where, folder_path=folder, delete_patterns=sorted(stale) or None, **options)


def push(folder: Path, repo_id: str, **options: Any) -> CommitInfo:
    """Pushes the folder of a drafter or an adapter to the Hub, in one commit.

    In the repository, files of a former version of the drafter are deleted, a hand-written card is kept, and other
    files are not touched. An adapter deletes nothing; one that its recipe names goes into a subfolder of that name. The
    card in a drafter's folder is written again.

    Args:
        repo_id: Created if there is none.
        options: `private`, `revision` (a branch, created if there is none), `token`, `create_pr`, `commit_message`,
            `commit_description`.

    Raises:
        OSError: The Hub refuses or cannot be reached. The same call may be repeated.
        ValueError: A private repository was asked for, and there is a public one; or it holds another model.
    """
    with told(repo_id), tempfile.TemporaryDirectory() as place:
        adapter = (folder / ADAPTER_CONFIG).is_file()
        staged = stage_adapter(folder, Path(place)) if adapter else folder
        subfolder = read_recipe(staged).get("adapter_name", "") if adapter else ""
        repository = Repository.open(repo_id, options)
        if adapter and not subfolder and CONFIG in repository.files:
            raise ValueError(
                f"{repository.name} holds a model, which an adapter without a name would hide from transformers; "
                "nothing was sent. Push to another repository, or train with --adapter-name"
            )
        stale = [] if adapter else _stale(repository, staged)
        write_card(staged, repository.name)
        leave_foreign_card(repository, staged, subfolder)
        options.setdefault("commit_message", "Upload adapter" if adapter else "Upload drafter")
        return repository.send(staged, stale, path_in_repo=subfolder or None, **options)


def _stale(repository: Repository, folder: Path) -> list[str]:
    """Files of a former version that a folder does not replace."""
    if CONFIG not in repository.files:
        return []
    with tempfile.TemporaryDirectory() as place:
        former, config = read_json(repository.fetch(CONFIG, place)), read_json(folder / CONFIG)
        try:
            check_is_drafter(Path(place), type_in(config))
        except ValueError as error:
            message = f"{repository.name} holds something else than a drafter, nothing was sent ({error})"
            raise ValueError(message.replace(place, repository.name)) from None
        _check_target(repository.name, former, config)
        if former.get("code_files") is None:
            for name in filter(is_code_file, repository.files):
                repository.fetch(name, place)
        code = former_code(Path(place))
    ours = (name for name in repository.files if is_ours(name, code) and name != CARD)
    return [name for name in ours if not (folder / name).is_file()]


def _check_target(repo_id: str, former: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises a ValueError if a repository holds the drafter of another target, which a push would replace."""
    names = [str(each.get("target_name") or "") or target_of(each)[0] for each in (former, new)]
    sizes = "vocab_size", "target_hidden_size", "target_num_hidden_layers"
    parts = [name.rsplit("/", 1)[-1] if not all("/" in each for each in names) else name for name in names]
    told = [f"{name} {former[name]} instead of {new[name]}" for name in sizes
            if None not in (former.get(name), new.get(name)) and former[name] != new[name]]  # fmt: skip
    if all(names) and parts[0] != parts[1]:
        told.insert(0, f"{printable(names[0])} instead of {printable(names[1])}")
    if told:
        raise ValueError(
            f"{repo_id} holds a drafter for another target ({printable(', '.join(told))}), nothing was sent: push to "
            "another repository or revision, or delete that drafter first"
        )


def push_saved(drafter: Any, repo_id: str, **options: Any) -> CommitInfo:
    """Pushes what a drafter's `save_pretrained` writes as it is, in one commit.

    Options and errors are as in `push`, but other files of the repository are ignored.
    """
    with tempfile.TemporaryDirectory() as folder:
        drafter.save_pretrained(folder)
        return Repository.open(repo_id, options).send(Path(folder), **options)


def stage_adapter(folder: Path, staged: Path) -> Path:
    """Copies an adapter and its documents without local paths; returns `staged`.

    Raises an OSError if weights are missing, and a DamagedFile if they cannot be read, or hold NaN or infinity.
    """
    needed = ADAPTER_CONFIG, "adapter_model.safetensors"
    if (weights := folder / needed[1]).is_file():
        with opened(weights) as file:
            for name in file.keys():  # noqa: SIM118
                checked_numbers(weights, name, file.get_tensor(name))
    for name in (*needed, *DOCUMENTS):
        if name in needed or (folder / name).is_file():
            shutil.copyfile(folder / name, staged / name)
    adapter = read_json(staged / ADAPTER_CONFIG)
    adapter["base_model_name_or_path"] = public_name(str(adapter.get("base_model_name_or_path") or ""))
    (staged / ADAPTER_CONFIG).write_text(json.dumps(adapter, indent=2) + "\n", encoding="utf-8")
    return staged


def leave_foreign_card(repository: Repository, folder: Path, subfolder: str = "") -> None:
    """Drops a generated card from what is pushed, where the repository has a hand-written one."""
    name = f"{subfolder}/{CARD}".lstrip("/")
    if name not in repository.files or not is_generated(folder / CARD):
        return
    with tempfile.TemporaryDirectory() as place:
        card = repository.fetch(name, place)
        if card.read_text(encoding="utf-8", errors="replace").strip() and not is_generated(card):
            (folder / CARD).unlink()


@contextmanager
def told(repo_id: str) -> Iterator[None]:
    """Adds remedies to errors of the Hub or the connection."""
    try:
        yield
    except RuntimeError as error:  # the client wraps errors of single files
        raise OSError(f"{error} ({error.__cause__}); nothing was committed, repeat the call") from error
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403):
            raise OSError(
                f"the Hub does not let this token write to {repo_id} ({error.response.status_code}): log in "
                "(`hf auth login`, or HF_TOKEN) with a token that may write there"
            ) from error
        raise
    except HTTPError as error:  # a broken connection
        raise OSError(f"{repo_id}: {type(error).__name__}: {error}; repeat the call") from error
