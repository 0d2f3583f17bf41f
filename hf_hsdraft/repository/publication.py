"""The repository a drafter becomes: what is in it, how it is written, and how it is sent.

    config.json, generation_config.json     sizes, target, digests, the map to the code; drafting options
    model.safetensors                       weights
    *.py, custom_generate/                  the code, for those who have not installed it
    training_recipe.json, figures.json      how it was trained, what was measured
    README.md, *.png                        the card, made of those

Nothing else is ever sent: no optimizer's state, no path and no user name of this machine.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from transformers.utils import logging

from ..common.checks import is_code_file, public_name
from .code_files import write_flat
from .drafter_files import (
    CONFIG,
    DOCUMENTS,
    FORMAT_VERSION,
    INDEX,
    WEIGHTS,
    check_is_drafter,
    digests,
    read_json,
    tensors,
)
from .generate_recipe import generate
from .model_card import RECIPE, is_generated, write_card

logger = logging.get_logger(__name__)

REQUIREMENTS = "transformers>=5.23\ntorch>=2.6\n"  # of the code that travels
OF_AN_ADAPTER = ("adapter_config.json", "adapter_model.safetensors", *DOCUMENTS)
# All the code that was ever saved with a drafter before `code_files` said so; not to be added to.
_BEFORE_CODE_FILES = (
    "cacheback", "call_output", "candidate_generator", "configuration_hsdraft", "decoded_texts", "decoding",
    "draft_options", "draft_tree", "drafter_files", "ended_rows", "expansion", "foresight", "generate_hook",
    "generate_recipe", "grouped_attention", "growing_cache", "model_card", "modeling_hsdraft", "ngram_cache",
    "pacing", "packed_weights", "pretrained_drafter", "publication", "roll_out", "round_costs", "sampled_trees",
    "static_cache", "static_roll_out", "target_limits", "target_match", "target_probe", "target_runtime",
    "tree_masks", "verification", "working_weights",
)  # fmt: skip
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into; its files replace those in `folder` one by one when all are written.

    A process that has the old files open or mapped goes on with the old ones. Files of a former drafter that the new
    one has not are deleted, its code among them; those of anybody else stay.
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
        former = _is_drafter(folder, str(read_json(partial / CONFIG).get("model_type")))
        code = former_code(folder) if former else ()
        for path in sorted(written, key=lambda path: path.name == CONFIG):  # the digests last
            (folder / path).parent.mkdir(exist_ok=True)
            os.replace(partial / path, folder / path)
        for path in folder.iterdir() if former else []:
            if path.relative_to(folder) not in written and is_ours(path.name, code) and path.is_file():
                path.unlink(missing_ok=True)
        for one, other in ((WEIGHTS, INDEX), (INDEX, WEIGHTS)):  # either would be read instead of the other
            if Path(one) in written:
                (folder / other).unlink(missing_ok=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if new and not any(folder.iterdir()):  # nothing came of it
            folder.rmdir()


def is_ours(name: str, code: Collection[str]) -> bool:
    """Whether a file at the top of a repository is one that a drafter brings: weights, documents, or its `code`."""
    return name in (WEIGHTS, INDEX, *DOCUMENTS) or name in code or bool(_SHARD.fullmatch(name))


def former_code(folder: Path) -> set[str]:
    """Names of the code files that the drafter in a folder was saved with.

    Raises:
        OSError, DamagedFile: its configuration cannot be read.
    """
    listed = read_json(folder / CONFIG).get("code_files")
    if listed is None:
        return {f"{stem}.py" for stem in _BEFORE_CODE_FILES}
    return set(filter(is_code_file, listed)) if isinstance(listed, list) else set()


def complete(
    config: Any, partial: Path, folder: Path, source: Path | None, auto_map: Mapping[str, str], entries: Sequence[Path]
) -> None:
    """Adds to saved weights what else belongs into the repository.

    Args:
        config: of the drafter; gets the digests of the weights and the names of the code files.
        partial: holds configuration, options and weights.
        folder: where they will go. A card that somebody wrote stays.
        source: folder that the drafter was loaded from. Its recipe comes along, its figures if these are its weights.
        auto_map: which classes transformers takes from the code; entries: the files of those classes.
    """
    config.weights_digest = digests(partial)
    config.format_version = FORMAT_VERSION
    config.target_name = public_name(config.target_name)
    config.auto_map = dict(auto_map)  # whatever another repository's file said
    config.code_files = write_flat([*entries, Path(inspect.getfile(generate))], partial)
    config.save_pretrained(partial)
    (partial / "custom_generate").mkdir(exist_ok=True)
    shutil.copyfile(inspect.getfile(generate), partial / "custom_generate" / "generate.py")
    (partial / "custom_generate" / "requirements.txt").write_text(REQUIREMENTS, encoding="utf-8")
    if source is not None and _is_drafter(source, config.model_type):
        _bring_documents(source, partial)
    elif _is_drafter(folder, config.model_type) and _same_weights(folder, partial):
        _bring_documents(folder, partial)
    card = folder / "README.md"
    if card.is_file() and not is_generated(card):  # somebody's own words stay, whatever the weights
        shutil.copyfile(card, partial / "README.md")
    write_card(partial, folder.resolve().name)


def push(folder: Path, repo_id: str, **options: Any) -> CommitInfo:
    """Sends a complete folder to the Hub, in one commit.

    Of what is there, files of a former version of the drafter are deleted and a card that somebody wrote is kept; other
    files are not touched.

    Args:
        repo_id: name of the repository, created if there is none.
        options: `private`, `revision` (a branch, created if there is none), `token`, `create_pr`, `commit_message`,
            `commit_description`.

    Raises:
        OSError: the Hub refuses or cannot be reached. The same call may be repeated.
        ValueError: a private repository was asked for, and there is a public one; or it holds another model.
    """
    with _told(repo_id):
        api, repo_id, there = _prepare(repo_id, options)
        revision = options.pop("revision", None)
        former, code = CONFIG in there, set[str]()
        if former:
            with tempfile.TemporaryDirectory() as place:
                api.hf_hub_download(repo_id, CONFIG, revision=revision, local_dir=place)
                try:
                    check_is_drafter(Path(place), str(read_json(folder / CONFIG).get("model_type")))
                except ValueError as error:
                    message = f"{repo_id} holds something else than a drafter, nothing was sent ({error})"
                    raise ValueError(message.replace(place, repo_id)) from None
                code = former_code(Path(place))
        write_card(folder, repo_id)
        _leave_foreign_card(api, repo_id, revision, there, folder)
        sent = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        stale = sorted(name for name in there - sent if former and is_ours(name, code) and name != "README.md")
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            delete_patterns=stale or None,
            **{"commit_message": "Upload drafter", **options},
        )


def push_adapter(folder: Path, repo_id: str, **options: Any) -> CommitInfo:
    """Sends an adapter of a drafter and its documents, and no path of this machine; deletes nothing on the Hub.

    Raises:
        OSError, ValueError: as `push`.
    """
    with _told(repo_id), tempfile.TemporaryDirectory() as place:
        for name in OF_AN_ADAPTER:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, Path(place) / name)
        settings = Path(place) / "adapter_config.json"
        adapter = read_json(settings)
        adapter["base_model_name_or_path"] = public_name(str(adapter.get("base_model_name_or_path") or ""))
        settings.write_text(json.dumps(adapter, indent=2) + "\n", encoding="utf-8")
        api, repo_id, there = _prepare(repo_id, options)
        revision = options.pop("revision", None)
        write_card(Path(place), repo_id)
        _leave_foreign_card(api, repo_id, revision, there, Path(place))
        commit = {"commit_message": "Upload adapter", **options}
        return api.upload_folder(repo_id=repo_id, folder_path=place, revision=revision, **commit)


def _prepare(repo_id: str, options: dict[str, Any]) -> tuple[HfApi, str, set[str]]:
    """Makes sure of repository and branch; returns its full name and the files that are there. Takes from `options`."""
    api, private, revision = (
        HfApi(token=options.pop("token", None)),
        options.pop("private", None),
        options.get("revision"),
    )
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    if private and not api.repo_info(repo_id).private:
        raise ValueError(f"{repo_id} exists and is public: nothing was sent; choose another name, or hide it first")
    if revision is not None and not options.get("create_pr"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return api, repo_id, set(api.list_repo_files(repo_id, revision=revision))


def _leave_foreign_card(api: HfApi, repo_id: str, revision: str | None, there: set[str], folder: Path) -> None:
    """Takes a generated card out of what is sent, where the repository has one that somebody wrote."""
    if "README.md" not in there or not is_generated(folder / "README.md"):
        return
    with tempfile.TemporaryDirectory() as place:
        card = Path(api.hf_hub_download(repo_id, "README.md", revision=revision, local_dir=place))
        if card.read_text(encoding="utf-8", errors="replace").strip() and not is_generated(card):
            (folder / "README.md").unlink()


@contextmanager
def _told(repo_id: str) -> Iterator[None]:
    """Says what to do about what the Hub or the way to it refuses."""
    try:
        yield
    except RuntimeError as error:  # the client wraps what went wrong with one of the files
        raise OSError(f"{error} ({error.__cause__}); nothing was committed, repeat the call") from error
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code in (401, 403):
            raise OSError(
                f"the Hub does not let this token write to {repo_id} ({error.response.status_code}): log in "
                "(`hf auth login`, or HF_TOKEN) with a token that may write there"
            ) from error
        raise
    except HTTPError as error:  # a connection that broke
        raise OSError(f"{repo_id}: {type(error).__name__}: {error}; repeat the call") from error


def _bring_documents(source: Path, partial: Path) -> None:
    """Copies what is known of a drafter; after a change of its weights, only where it comes from."""
    documents = [source / name for name in DOCUMENTS if (source / name).is_file()]
    if _same_weights(source, partial):
        for document in documents:
            shutil.copyfile(document, partial / document.name)
        return
    left = [document.name for document in documents if document.name not in ("README.md", RECIPE)]
    if left:
        logger.warning(f"the weights are not those of {source}: its {', '.join(left)} are about others and stay behind")
    if (source / RECIPE).is_file():
        recipe = {**read_json(source / RECIPE), "changed_since": True}
        (partial / RECIPE).write_text(json.dumps(recipe, indent=2) + "\n", encoding="utf-8")


def _same_weights(one: Path, other: Path) -> bool:
    """Whether two folders hold the same values, in whatever files and dtypes."""
    try:
        first, second = tensors(one), tensors(other)
    except (OSError, ValueError):
        return False
    return first.keys() == second.keys() and all(
        torch.equal(tensor.float(), second[name].float()) for name, tensor in first.items()
    )


def _is_drafter(folder: Path, model_type: str) -> bool:
    try:
        check_is_drafter(folder, model_type)
    except (OSError, ValueError):
        return False
    return True
