"""The repository a drafter becomes: what is in it, how it is written, and how it is sent.

    config.json, generation_config.json     sizes, target, digests, the map to the code; drafting options
    model.safetensors                       weights
    *.py, custom_generate/                  the code, for those who have not installed it
    training_recipe.json, figures.json      how it was trained, what was measured
    README.md, *.png                        the card, made of those

Nothing else is ever sent: no optimizer's state, no path and no user name of this machine.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError

from .configuration_hsdraft import FORMAT_VERSION, HSDraftConfig, public_name
from .drafter_files import DOCUMENTS, PICTURES, digests, find_folder
from .generate_recipe import generate
from .model_card import is_generated, write_card

REQUIREMENTS = "transformers>=5.23\ntorch>=2.6\n"  # of the code that travels


@contextmanager
def complete_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into; its files replace those in `folder` one by one when all are written.

    A process that has the old files open or mapped goes on with the old ones.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"{folder} is a file; a drafter is saved into a folder")
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".saving-", dir=folder))
    try:
        yield partial
        written = [path.relative_to(partial) for path in partial.rglob("*") if path.is_file()]
        for path in sorted(written, key=lambda path: path.name == "config.json"):  # the digests last
            (folder / path).parent.mkdir(exist_ok=True)
            os.replace(partial / path, folder / path)
        of_before = {*folder.glob("model*.safetensors*"), *_documents(folder)}
        for stale in of_before - {folder / path for path in written}:
            stale.unlink()
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def complete(config: HSDraftConfig, partial: Path, folder: Path) -> None:
    """Adds to saved weights what else belongs into the repository.

    Args:
        config: of the drafter; gets the digests of the weights.
        partial: holds configuration, options, weights and code.
        folder: where they will go. Documents already there stay if they are about these weights; otherwise those of the
            place that the drafter was loaded from are taken, on the same condition.
    """
    config.weights_digest = digests(partial)
    config.format_version = FORMAT_VERSION
    config.target_name = public_name(config.target_name)
    config.save_pretrained(partial)
    (partial / "custom_generate").mkdir(exist_ok=True)
    shutil.copyfile(inspect.getfile(generate), partial / "custom_generate" / "generate.py")
    (partial / "custom_generate" / "requirements.txt").write_text(REQUIREMENTS, encoding="utf-8")
    source = next((place for place in _places(config, folder) if _same_weights(place, config)), None)
    for document in _documents(source) if source is not None else []:
        shutil.copyfile(document, partial / document.name)
    card = folder / "README.md"
    if card.is_file() and not is_generated(card):  # somebody's own words stay, whatever the weights
        shutil.copyfile(card, partial / "README.md")
    write_card(partial, folder.resolve().name)


def push(folder: Path, repo_id: str, **options: Any) -> CommitInfo:
    """Sends a complete folder to the Hub.

    Args:
        repo_id: name of the repository, created if there is none.
        options: `private`, `revision` (a branch, created if there is none), `token`, `create_pr`, `commit_message`,
            `commit_description`.

    Raises:
        OSError: the Hub refuses or cannot be reached; nothing is committed then, and the same call may be repeated.
    """
    token, revision, private = (options.pop(name, None) for name in ("token", "revision", "private"))
    api = HfApi(token=token)
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not options.get("create_pr"):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        write_card(folder, repo_id)
        return api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            delete_patterns=["*.py", "custom_generate/*", "model*.safetensors*", *PICTURES],  # of a former version
            **{"commit_message": "Upload drafter", **options},
        )
    except RuntimeError as error:  # the client wraps what went wrong with one of the files
        raise OSError(f"{error} ({error.__cause__}); nothing was committed, repeat the call") from error
    except HfHubHTTPError:
        raise
    except HTTPError as error:  # a connection that broke
        raise OSError(f"{repo_id}: {type(error).__name__}: {error}; repeat the call") from error


def _places(config: HSDraftConfig, folder: Path) -> Iterator[Path]:
    """Where documents about these weights may lie."""
    yield folder
    if config.name_or_path:
        with contextlib.suppress(OSError, ValueError):
            yield find_folder(config.name_or_path)


def _same_weights(folder: Path, config: HSDraftConfig) -> bool:
    try:
        return digests(folder) == config.weights_digest
    except (OSError, ValueError):
        return False


def _documents(folder: Path) -> list[Path]:
    return [folder / name for name in DOCUMENTS if (folder / name).is_file()]
