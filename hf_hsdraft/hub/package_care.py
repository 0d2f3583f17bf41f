"""The care that only the package takes of a drafter's repository; this module does not travel."""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .care import ADAPTER_CONFIG, ENTRY, RepositoryCare, prepare_repository, stage_adapter
from .code_files import write_flat
from .drafter_files import CARD, CONFIG, DamagedFile, NotFetched, check_is_drafter, read_json, sha256, type_in
from .generate_recipe import generate
from .model_card import write_card
from .publication import is_generated, is_ours

# All the code that was ever saved with a drafter before `code_files` said so; not to be added to.
_BEFORE_CODE_FILES = (
    "cacheback", "call_output", "candidate_generator", "configuration_hsdraft", "decoded_texts", "decoding",
    "draft_options", "draft_tree", "drafter_files", "ended_rows", "expansion", "foresight", "generate_hook",
    "generate_recipe", "grouped_attention", "growing_cache", "model_card", "modeling_hsdraft", "ngram_cache",
    "pacing", "packed_weights", "pretrained_drafter", "publication", "roll_out", "round_costs", "sampled_trees",
    "static_cache", "static_roll_out", "target_limits", "target_match", "target_probe", "target_runtime",
    "tree_masks", "verification", "working_weights",
)  # fmt: skip
_PACKAGE = Path(__file__).resolve().parents[1]
_ENTRY = '''"""The entry of a drafter's code, as `auto_map` in config.json names it.

Whoever loads a drafter by `AutoModel` and `trust_remote_code=True` gets the class from here, and with it the hook that
lets `generate(assistant_model=drafter)` take it.
"""

from __future__ import annotations

from .generate_hook import install
from .{module} import {name}

install()

__all__ = ["{name}"]
'''


class PackageCare(RepositoryCare):
    """All the care there is: see [`RepositoryCare`] for what a drafter does without it."""

    @contextmanager
    def loading(self, name: Any, offline: bool = False) -> Iterator[None]:
        """Says why the Hub gave nothing, and deletes damaged files from its cache, so that the next call fetches anew.

        Raises:
            OSError: There is no such repository, or the Hub cannot be reached.
            ValueError: A file is damaged.
        """
        try:
            yield
        except NotFetched as error:
            raise OSError(_why_not_fetched(error)) from error.__cause__
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

    def write_code(self, family: Any, folder: Path) -> str:
        """Writes the files of the family's class and of its configuration with all that they import, flattened.

        A family of this package brings the hook of `generate()` and an entry that installs it. One from elsewhere
        imports this package, which installs the hook.
        """
        files = [Path(inspect.getfile(each)).resolve() for each in (family, family.config_class)]
        own = files[0]
        if not own.is_relative_to(_PACKAGE):
            write_flat(files, folder)
            return own.stem
        write_flat([*files, _PACKAGE / "generate/generate_hook.py", Path(inspect.getfile(generate))], folder)
        entry = _ENTRY.format(module=own.stem, name=family.__name__)
        (folder / f"{ENTRY}.py").write_text(entry, encoding="utf-8")
        return ENTRY

    def write_card(self, folder: Path, name: str) -> None:
        """Makes the card of the files beside it, unless somebody wrote it."""
        write_card(folder, name)

    def former_code(self, folder: Path) -> set[str]:
        """As [`RepositoryCare`], also for drafters of versions that kept no list."""
        if read_json(folder / CONFIG).get("code_files") is None:
            return {f"{stem}.py" for stem in _BEFORE_CODE_FILES}
        return super().former_code(folder)

    def push(self, folder: Path, repo_id: str, **options: Any) -> CommitInfo:
        """Sends the folder of a drafter or an adapter to the Hub, in one commit.

        Of what is there, files of a former version of the drafter are deleted and a card that somebody wrote is kept;
        other files are not touched. An adapter deletes nothing. The card in a drafter's folder is written anew.

        Args:
            repo_id: Name of the repository, created if there is none.
            options: `private`, `revision` (a branch, created if there is none), `token`, `create_pr`, `commit_message`,
                `commit_description`.

        Raises:
            OSError: The Hub refuses or cannot be reached. The same call may be repeated.
            ValueError: A private repository was asked for, and there is a public one; or it holds another model.
        """
        with told(repo_id), tempfile.TemporaryDirectory() as place:
            adapter = (folder / ADAPTER_CONFIG).is_file()
            staged = stage_adapter(folder, Path(place)) if adapter else folder
            api, repo_id, there = prepare_repository(repo_id, options)
            revision = options.pop("revision", None)
            stale = [] if adapter else self._stale(api, repo_id, revision, there, staged)
            write_card(staged, repo_id)
            leave_foreign_card(api, repo_id, revision, there, staged)
            options.setdefault("commit_message", "Upload adapter" if adapter else "Upload drafter")
            return api.upload_folder(
                repo_id=repo_id, folder_path=staged, revision=revision, delete_patterns=stale or None, **options
            )

    def _stale(self, api: HfApi, repo_id: str, revision: str | None, there: set[str], folder: Path) -> list[str]:
        """Files of a former version that a folder does not replace."""
        if CONFIG not in there:
            return []
        with tempfile.TemporaryDirectory() as place:
            api.hf_hub_download(repo_id, CONFIG, revision=revision, local_dir=place)
            try:
                check_is_drafter(Path(place), type_in(read_json(folder / CONFIG)))
            except ValueError as error:
                message = f"{repo_id} holds something else than a drafter, nothing was sent ({error})"
                raise ValueError(message.replace(place, repo_id)) from None
            code = self.former_code(Path(place))
        return sorted(name for name in there if is_ours(name, code) and name != CARD and not (folder / name).is_file())


def _why_not_fetched(failure: NotFetched) -> str:
    error, name, revision = failure.__cause__, failure.name, failure.revision
    elsewhere = f"there is no drafter folder {os.path.abspath(name)}, and"
    if isinstance(error, HFValidationError):
        return f"{elsewhere} as a Hub name: {error}"
    if isinstance(error, GatedRepoError):
        return f"{elsewhere} {name} on the Hub is gated: ask for access there, then log in"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{elsewhere} no repository {name} on the Hub that may be read without logging in, or with the token in "
            "use: look for a typing error (a name is user/name), or log in (`hf auth login`)"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"the repository {name} has no revision {revision!r}"
    if isinstance(error, LocalEntryNotFoundError):
        return (
            f"{elsewhere} {name} at {revision!r} is not complete in the cache, while the Hub cannot be reached, has no "
            "such repository (a name is user/name), or offline mode is on"
        )
    kind = "" if isinstance(error, HfHubHTTPError) else f"{type(error).__name__}: "
    return (
        f"{elsewhere} {name} at {revision!r} could not be fetched: {kind}{error}. Only complete files are in the "
        "cache; repeat the call"
    )


def _is_damaged(path: Path) -> bool:
    """Whether a file of the cache is not what it is named by there: its SHA-256, or as a blob of git its SHA-1."""
    name = path.resolve().name
    if not path.is_file() or not re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", name):
        return path.is_file()  # a cache without links does not tell
    if len(name) == 64:
        return sha256(path) != name
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest() != name


def _forget(damaged: Sequence[Path]) -> str:
    """Deletes files of the cache; returns what to do then."""
    try:
        for path in damaged:
            path.resolve().unlink(missing_ok=True)  # the cache's snapshots are links, where the system has them
            path.unlink(missing_ok=True)
    except OSError:  # a cache that may only be read
        return "delete it from the cache"
    return "it was removed from the cache: repeat the call to download it again"


def leave_foreign_card(
    api: HfApi, repo_id: str, revision: str | None, there: set[str], folder: Path, repo_type: str | None = None
) -> None:
    """Takes a generated card out of what is sent, where the repository has one that somebody wrote."""
    if CARD not in there or not is_generated(folder / CARD):
        return
    with tempfile.TemporaryDirectory() as place:
        card = Path(api.hf_hub_download(repo_id, CARD, revision=revision, repo_type=repo_type, local_dir=place))
        if card.read_text(encoding="utf-8", errors="replace").strip() and not is_generated(card):
            (folder / CARD).unlink()


@contextmanager
def told(repo_id: str) -> Iterator[None]:
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
