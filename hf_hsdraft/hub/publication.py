"""The repository that a saved drafter becomes, and pushing it, adapters and data sets to the Hub.

    config.json, generation_config.json     sizes, target, digests, the map to the code; drafting options
    model.safetensors                       weights
    refiner/ and others                     files of methods, see `METHOD_FILES`
    custom_generate/                        the code, for use without the package
    training_recipe.json, figures.json      how it was trained, what was measured
    README.md, *.png                        the card, made of those

Nothing else is pushed: no training state, local path or user name.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HTTPError
from transformers.utils import logging

from ..core.checks import FORMAT_VERSION, is_code_file, printable, public_name
from .checkpoint import LOOSE_MASK, target_of
from .code_files import PLACE, former_code, stands_alone, write_code
from .code_files import RECIPE as GENERATE
from .drafter_files import (
    ADAPTER_CONFIG,
    CARD,
    CONFIG,
    DOCUMENTS,
    INDEX,
    METHOD_FILES,
    RECIPE,
    WEIGHTS,
    check_is_drafter,
    checked_numbers,
    digests,
    opened,
    read_json,
    tensors,
    type_in,
)
from .model_card import is_generated, read_recipe, write_card

logger = logging.get_logger(__name__)

REQUIREMENTS = "transformers>=5.23\ntorch>=2.6\n"  # of travelling code
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@contextmanager
def complete_folder(folder: Path, subfolders: Collection[str] = ()) -> Iterator[Path]:
    """Yields a folder to write into; its files replace those in `folder` when all are written, the configuration last.

    A process that has old files open or mapped keeps them. Files of a former drafter, code included, that the new one
    lacks are deleted, and all that was in `subfolders` before; all other files stay.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; a drafter is saved into a folder")
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        yield partial
        written = [path.relative_to(partial) for path in partial.rglob("*") if path.is_file()]
        for path in written:
            if (folder / path).is_dir() or (folder / path).parent.is_file():
                raise OSError(f"{folder / path} cannot be written: something of that name is in the way")
        former = _is_drafter(folder, type_in(read_json(partial / CONFIG)))
        code = former_code(folder) if former else ()
        for path in sorted(written, key=lambda path: path.name == CONFIG):  # the digests last
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / path, folder / path)
        places = (*folder.iterdir(), *(folder / PLACE).glob("*.py"), *(folder / name for name in METHOD_FILES))
        for path in places if former else ():
            name = path.relative_to(folder)
            if name not in written and is_ours(name.as_posix(), code) and path.is_file():
                path.unlink(missing_ok=True)
                if path.parent != folder and not any(path.parent.iterdir()):
                    path.parent.rmdir()
        for one, other in ((WEIGHTS, INDEX), (INDEX, WEIGHTS), (WEIGHTS, LOOSE_MASK)):  # a leftover would be read
            if Path(one) in written and Path(other) not in written:
                (folder / other).unlink(missing_ok=True)
        for place in (folder / name for name in subfolders):
            for path in [*sorted(place.rglob("*"), reverse=True), place]:  # contents before their folder
                if path.is_dir() and not any(path.iterdir()):
                    path.rmdir()
                elif path.is_file() and path.relative_to(folder) not in written:
                    path.unlink()
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if new and not any(folder.iterdir()):  # nothing was written
            folder.rmdir()


def is_ours(name: str, code: Collection[str]) -> bool:
    """Whether a file of a repository belongs to a drafter: weights, files of methods, documents, or its `code`."""
    ours = (WEIGHTS, INDEX, *METHOD_FILES, *DOCUMENTS)
    return name in ours or name in code or bool(_SHARD.fullmatch(name))


def complete(drafter: Any, partial: Path, folder: Path) -> None:
    """Adds the rest of the repository to configuration, options and weights that were saved in `partial`.

    The recipe of the folder that a drafter was loaded from comes along, and its figures if the weights are the same. A
    hand-written card in `folder`, the destination, stays. The drafter's configuration gets the digests of the weights
    and the names of the code files.
    """
    config, source = drafter.config, drafter.loaded_from
    config.weights_digest = digests(partial)
    config.format_version = FORMAT_VERSION
    config.target_name = public_name(getattr(config, "target_name", ""))
    place = partial / PLACE
    place.mkdir(exist_ok=True)
    for path in partial.glob("*.py"):  # of a derived class, saved by transformers
        path.rename(place / path.name)
    entry = write_code(drafter.family(), place)
    config.auto_map = drafter.code_map(entry)  # replaces another repository's
    if drafter.taps and not hasattr(config, "target_tap_layers"):
        config.reads_states = True  # for the card
    config.code_files = sorted(path.name for path in place.glob("*.py"))
    config.save_pretrained(partial)
    needed = REQUIREMENTS + ("" if stands_alone(config.auto_map) else "hf-hsdraft\n")
    if (place / "generate.py").exists():
        raise ImportError(
            "code that travels with a drafter needs another file name than generate.py: that is a recipe's"
        )
    shutil.copyfile(GENERATE, place / "generate.py")
    (place / "requirements.txt").write_text(needed, encoding="utf-8")
    if source is not None and _is_drafter(source, config.model_type):
        bring_known(source, partial)
    elif _is_drafter(folder, config.model_type) and _same_weights(folder, partial):
        bring_known(folder, partial)
    card = folder / CARD
    if card.is_file() and not is_generated(card):  # a hand-written card stays, whatever the weights
        shutil.copyfile(card, partial / CARD)
    write_card(partial, folder.resolve().name)


def files_in(folder: Path) -> dict[Path, tuple[int, int]]:
    """Returns the paths of a folder's files, each with what tells it from a later one of its name."""
    stats = {path.relative_to(folder): path.stat() for path in folder.rglob("*") if path.is_file()}
    return {path: (stat.st_ino, stat.st_mtime_ns) for path, stat in stats.items()}


def link_written(folder: Path, former: Mapping[Path, Any], stage: Path, documents: Iterable[str]) -> None:
    """Links a folder's files into another where they are not `former` ones, to be pushed from there.

    Of an adapter, former documents too: its recipe may name its place on the Hub.
    """
    files = files_in(folder)
    names = [path for path in files if files[path] != former.get(path)]
    if Path(ADAPTER_CONFIG) in names:
        names += [path for path in map(Path, documents) if path in files and path not in names]
    for path in names:
        (stage / path).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(folder / path, stage / path)
        except OSError:  # no links there
            shutil.copyfile(folder / path, stage / path)


def bring_known(source: Path, partial: Path) -> None:
    """Copies a drafter's documents and files of methods.

    After a change of its weights, only the recipe of its documents comes along, and all files of methods: these fit the
    vocabulary, or belong to the target.
    """
    documents = [name for name in DOCUMENTS if (source / name).is_file()]
    if not _same_weights(source, partial):
        if left := [name for name in documents if name not in (CARD, RECIPE)]:
            about = f"its {', '.join(left)} are about others and stay behind"
            logger.warning(f"the weights are not those of {source}: {about}")
        if RECIPE in documents:
            recipe = {**read_json(source / RECIPE), "changed_since": True}
            (partial / RECIPE).write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")
        documents = []
    for name in (*documents, *METHOD_FILES):
        if (source / name).is_file():
            (partial / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, partial / name)


def _same_weights(one: Path, other: Path) -> bool:
    """Whether two folders hold the same values, in any files and dtypes."""
    try:
        first, second = tensors(one), tensors(other)
    except (OSError, ValueError):
        return False
    return first.keys() == second.keys() and all(
        torch.equal(tensor.float(), second[name].float()) for name, tensor in first.items()
    )


def _is_drafter(folder: Path, model_type: str | None) -> bool:
    try:
        check_is_drafter(folder, model_type)
    except (OSError, ValueError):
        return False
    return True


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


def push_as_it_is(folder: Path, repo_id: str, **options: Any) -> CommitInfo:
    """Pushes a folder as it is; options and errors are as in `push`, but other files of the repository are ignored."""
    return Repository.open(repo_id, options).send(folder, **options)


def stage_adapter(folder: Path, staged: Path) -> Path:
    """Copies an adapter without local paths; an OSError if weights are missing, a DamagedFile if they are damaged."""
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
    except HTTPError as error:  # a refusal, or a broken connection
        told = f"{repo_id}: {type(error).__name__}: {error}"
        remedy = "log in (`hf auth login`, or HF_TOKEN) with a token that may write there, or repeat the call"
        raise OSError(f"{told}; {remedy}") from error
