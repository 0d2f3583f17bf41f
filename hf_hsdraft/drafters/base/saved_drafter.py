"""Loading and saving of drafters: their options, where their weights go, and the whole folder or repository."""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.utils import logging

from ...core.checks import FORMAT_VERSION, few, printable, typo_of
from ...hub.checkpoint import reader
from ...hub.drafter_files import (
    CONFIG,
    DOCUMENTS,
    OPTIONS,
    check_is_drafter,
    loading,
    read_json,
    taken_for_hub,
)
from ...hub.model_card import write_card
from ...hub.publication import bring_known, complete_folder, files_in, link_written, push, push_as_it_is
from ...verify.registry import free_options, is_lossy, rule_options
from .draft_options import option_names
from .protocol import Drafter

logger = logging.get_logger(__name__)

OF_A_PUSH = {"repo_id", "private", "revision", "token", "create_pr", "commit_message", "commit_description"}
_OF_PROCESS = ("history", "adapter_name")  # options that are not saved: a private folder, and what no folder contains

PLACEMENT = ("dtype", "device_map", "attn_implementation")  # accepted by every family, beside options


@dataclass(frozen=True)
class Placement:
    """Where a drafter's weights go."""

    dtype: torch.dtype | None  # None for the dtype of the files
    device: torch.device | None  # None for the CPU. `generate()` moves a drafter to its target anyway.

    @classmethod
    def taken_from(cls, given: MutableMapping[str, Any]) -> Placement:
        """Pops dtype (also `torch_dtype`), device and attention from `given`; raises a ValueError if one is invalid."""
        dtypes = {name: dtype_of(given[name]) for name in ("dtype", "torch_dtype") if given.get(name) is not None}
        if len(set(dtypes.values())) > 1:
            raise ValueError(f"dtype={given['dtype']!r} contradicts torch_dtype={given['torch_dtype']!r}: pass one")
        for name in ("dtype", "torch_dtype"):
            given.pop(name, None)
        attention = given.pop("attn_implementation", None)
        if attention not in (None, "eager", "sdpa"):
            raise ValueError(
                f"attn_implementation={attention!r} is invalid: this drafter computes attention by itself; leave it "
                "out, or pass 'sdpa' or 'eager', which change nothing"
            )
        return cls(next(iter(dtypes.values()), None), _device_of(given.pop("device_map", None)))

    def place(self, drafter: Any) -> Any:
        """Moves a drafter to the device, if it has weights, and returns it."""
        return drafter.to(self.device) if self.device is not None and isinstance(drafter, nn.Module) else drafter


def _device_of(device_map: Any) -> torch.device | None:
    if isinstance(device_map, Mapping) and len(set(device_map.values())) == 1:
        [device_map] = set(device_map.values())
    if device_map is None or device_map == "auto":  # it will follow its target
        return None
    try:
        return torch.device(device_map)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device_map={device_map!r} is invalid: expected one device, such as 'cuda:0', as a drafter is not divided"
        ) from error


def dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Returns a floating-point dtype, given by name or itself; None and `"auto"` give None, the dtype of the files."""
    if dtype is None or dtype == "auto":
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r} is invalid: expected one such as torch.bfloat16, or 'auto'")
    return found


def take_options(drafter: Any, folder: Path, given: Mapping[str, Any], file: str = OPTIONS) -> None:
    """As `give_options`, with the options saved in a folder's `file`. The drafter may be on the meta device."""
    give_options(drafter, stored_options(folder / file), given)


def give_options(drafter: Any, stored: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Applies saved options that are known, then the caller's: a TypeError if unknown, a ValueError if wrong."""
    names = option_names(drafter)
    refuse_unknown(type(drafter).__name__, given, names)
    for name, value in {**stored, **given}.items():
        if name in names:
            setattr(drafter.generation_config, name, value)
    if given:
        drafter.check_options()


def refuse_unknown(kind: str, given: Collection[str], names: Collection[str], others: bool = False) -> None:
    """Raises a TypeError if an argument is not a drafting option; with `others`, only if it is a typo of one."""
    for name in sorted(set(given) - set(names)):
        near = typo_of(name, names)
        if others and not near:
            continue
        expected = f"expected {', '.join(PLACEMENT)}, or one of {', '.join(sorted(names))}"
        hint = f"the nearest option is {near}" if near else expected
        raise TypeError(f"{kind} has no drafting option {printable(name)}: {hint}")


def write_options(config: GenerationConfig, folder: str | os.PathLike[str], name: str = OPTIONS) -> None:
    """Writes drafting options that any process can use: no private `history` folder, no `adapter_name`."""
    public = copy.copy(config)
    for name_of_option in _OF_PROCESS:
        vars(public).pop(name_of_option, None)
    public.save_pretrained(folder, config_file_name=name)


def stored_options(path: Path) -> dict[str, Any]:
    """Returns the drafting options in a file, if it exists, also unknown ones, so that they can be reported.

    What needs the user's consent, as `COMMON_OPTIONS` declares, is left out with a warning. Raises a DamagedFile if the
    file is no JSON object.
    """
    if not path.is_file():
        return {}
    general = vars(GenerationConfig()).keys() - {"num_assistant_tokens", "assistant_confidence_threshold"}
    stored = read_json(path).items()
    options = {name: value for name, value in stored if not name.startswith("_") and name not in general}
    free, told = free_options(options, path.parent)
    if told:
        lossy = is_lossy(options.get("verification"))
        logger.warning(f"{told}{_unpublished(options) if lossy else ''}")
    return free


def _unpublished(options: dict[str, Any]) -> str:
    """The part of a warning about saved options of lossy rules that are not the published ones."""
    published = {option.name: option.default for option in rule_options(options, lossy=True)}
    told = [f"{name}={options[name]!r}, not {default!r}" for name, default in published.items()
            if options.get(name, default) not in (None, default)]  # fmt: skip
    return f". It would then be used with saved options that are not the published ones: {few(told)}" if told else ""


class SavedDrafter(Drafter):
    """A drafter that is saved with its options and a card; families implement `write` for the rest."""

    loaded_from: Path | None = None  # may hold the recipe, figures and files of methods
    unsaved = ""
    has_card = True  # whether a card is written, as a push checks and renews it

    @classmethod
    def of_checkpoint(cls, checkpoint: Any, **kwargs: Any) -> Any:
        """Loads a drafter of this family from its files; see `from_pretrained`."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Loads a drafter of this family from a folder or the Hub, without running code of its repository.

        Arguments and errors as in `AutoDrafter.from_pretrained`, which loads it too.
        """
        name, (hub, subfolder) = pretrained_model_name_or_path, taken_for_hub(kwargs)
        with loading(name, bool(hub.get("local_files_only"))):
            return cls.of_checkpoint(reader().open(name, subfolder, **hub), **kwargs)

    def write(self, folder: Path, **kwargs: Any) -> None:
        """Writes configuration and weights, if any; `kwargs` as in `save_pretrained`."""
        raise NotImplementedError

    def subfolders(self, folder: Path) -> Collection[str]:
        """Returns the subfolders that it, or a former drafter in a folder, fills alone."""
        return ()

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes configuration, weights if any, drafting options and a card; raises a ValueError for an invalid option.

        An existing folder's files are replaced once all are written. With `push_to_hub` they are pushed too, as
        `repo_id` or by the folder's name, with the arguments of that method. Others of transformers are ignored.
        """
        folder, hub = Path(save_directory), {name: kwargs.pop(name) for name in OF_A_PUSH if name in kwargs}
        former = files_in(folder) if push_to_hub else {}
        self.save_files(folder, **kwargs)
        if push_to_hub:
            with tempfile.TemporaryDirectory(prefix=".pushing-", dir=folder) as stage:  # there may be other files
                link_written(folder, former, Path(stage), DOCUMENTS if self.has_card else ())
                self._push(Path(stage), repo_id or folder.resolve().name, hub)

    def save_files(self, folder: Path, **kwargs: Any) -> None:
        """Writes what `save_pretrained` does, with its arguments but those of a push."""
        self.check_options()
        with complete_folder(folder, self.subfolders(folder)) as partial:
            self.write(partial, **kwargs)
            write_options(self.generation_config, partial)
            self.complete(partial, folder)

    def complete(self, partial: Path, folder: Path) -> None:
        """Adds the rest to configuration, weights and options in `partial`, which will be those in `folder`."""
        if self.loaded_from is not None:
            bring_known(self.loaded_from, partial)
        if self.has_card:
            write_card(partial, folder.resolve().name)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Pushes what `save_pretrained` writes to the Hub in one commit; see `hub.publication.push`.

        Without a card, other files of the repository are ignored.

        Args:
            repo_id: `"user/name"`, created if there is none.
            kwargs: `private`, `revision` (a branch, created if there is none), `token`, `create_pr`, `commit_message`,
                `commit_description`; `max_shard_size` as in transformers.

        Returns the commit, a `huggingface_hub.CommitInfo`.

        Raises:
            OSError: The Hub refuses or cannot be reached.
            ValueError: A private repository was asked for, and there is a public one; or it holds something else.
        """
        saving = {name: kwargs.pop(name) for name in ("max_shard_size",) if name in kwargs}
        if unknown := sorted(kwargs.keys() - OF_A_PUSH):
            raise TypeError(f"push_to_hub has no argument {', '.join(unknown)}")
        with tempfile.TemporaryDirectory() as stage:
            self.save_files(Path(stage), **saving)
            return self._push(Path(stage), repo_id, kwargs)

    def _push(self, stage: Path, repo_id: str, hub: Mapping[str, Any]) -> Any:
        return (push if self.has_card else push_as_it_is)(stage, repo_id, **hub)


class WeightlessDrafter(SavedDrafter):
    """A drafter saved as a configuration and options."""

    config_class: Any  # its configuration, with the family's `model_type`
    shown_fields: Sequence[str] = ()  # fields of config.json that `hsdraft info` shows

    @classmethod
    def of_document(cls, document: Mapping[str, Any], where: Path) -> Any:
        """Builds a drafter from its config.json, at the path `where`; raises a ValueError if a field is invalid."""
        raise NotImplementedError

    def document(self) -> dict[str, Any]:
        """Returns its config.json, except type and version."""
        raise NotImplementedError

    @classmethod
    def of_checkpoint(cls, checkpoint: Any, **kwargs: Any) -> Any:
        """As in `SavedDrafter`; dtype and device are ignored."""
        Placement.taken_from(kwargs)
        check_is_drafter(checkpoint.folder, cls.config_class.model_type)
        drafter = cls.of_document(checkpoint.config, checkpoint.folder / CONFIG)
        take_options(drafter, checkpoint.folder, kwargs)
        return drafter

    def write(self, folder: Path, **kwargs: Any) -> None:
        head = {"model_type": self.config_class.model_type, "format_version": FORMAT_VERSION}
        (folder / CONFIG).write_text(json.dumps({**head, **self.document()}) + "\n", encoding="utf-8")
