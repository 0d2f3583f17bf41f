"""Loading and saving of drafters: their options, where their weights go, and the whole folder or repository."""

from __future__ import annotations

import copy
import inspect
import json
import os
import shutil
import tempfile
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import find_adapter_config_file, logging

from ...core.checks import FORMAT_VERSION, demand, few, is_misspelt, nearest_option, printable, settings
from ...hub.checkpoint import Checkpoint
from ...hub.code_files import ENTRY, PLACE
from ...hub.drafter_files import (
    CONFIG,
    DESCRIBED,
    OPTIONS,
    check_is_drafter,
    check_weights,
    fetch,
    find_folder,
    loading,
    read_json,
    taken_for_hub,
    tensors,
)
from ...hub.model_card import write_card
from ...hub.publication import bring_known, complete, complete_folder, push, push_as_it_is
from ...verify.registry import COMMON_OPTIONS, free_options, is_lossy, rule_options
from .draft_options import DraftOptions, check_refiners, default_options, option_names
from .protocol import Drafter, check_sizes

logger = logging.get_logger(__name__)

_OF_A_PUSH = {"repo_id", "private", "revision", "token", "create_pr", "commit_message", "commit_description"}
_OF_PROCESS = ("history", "adapter_name")  # options that are not saved: a private folder, and what no folder contains
_ALSO_OVERRIDDEN = {"bos_token_id", "eos_token_id", "pad_token_id"}

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
        near = nearest_option(name, names)
        hint = f"expected {', '.join(PLACEMENT)}, or one of {', '.join(sorted(names))}"
        if is_misspelt(name, near):
            hint = f"the nearest option is {near}"
        elif others:
            continue
        raise TypeError(f"{kind} has no drafting option {printable(name)}: {hint}")


def _name_nearest(kind: str, error: TypeError, given: Collection[str], fields: Collection[str]) -> None:
    """Raises a TypeError about an unknown argument, for the one of Python, which names no other."""
    name = next((name for name in given if f"unexpected keyword argument '{name}'" in str(error)), None)
    if name is None:
        return
    if name in COMMON_OPTIONS:
        hint = f"it is a drafting option: set drafter.generation_config.{name}, or call AutoDrafter.from_pretrained"
    else:
        near = nearest_option(name, {*fields, *COMMON_OPTIONS})
        hint = f"the nearest is {near}" if is_misspelt(name, near) else "expected one of transformers' from_pretrained"
    raise TypeError(f"{kind}.from_pretrained has no argument {printable(name)}: {hint}") from error


def fields_of(config_class: Any) -> set[str]:
    own = {each.name for each in settings(config_class)} | set(inspect.signature(config_class.__init__).parameters)
    return own - {"self", "kwargs"}


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
    has_card = True  # whether a card is written, as a push checks and renews it

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, **kwargs: Any) -> Any:
        """Loads a drafter of this family from its files; see `from_pretrained`."""
        raise NotImplementedError

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Loads a drafter of this family from a folder or the Hub, without running code of its repository.

        Arguments and errors as in `AutoDrafter.from_pretrained`, which loads it too.
        """
        name, (hub, subfolder) = pretrained_model_name_or_path, taken_for_hub(kwargs)
        with loading(name, bool(hub.get("local_files_only"))):
            return cls.of_checkpoint(Checkpoint.open(name, subfolder, **hub), **kwargs)

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
        folder, hub = Path(save_directory), {name: kwargs.pop(name) for name in _OF_A_PUSH if name in kwargs}
        self.save_files(folder, **kwargs)
        if push_to_hub:
            self._push(repo_id or folder.resolve().name, kwargs, hub)

    def save_files(self, folder: Path, **kwargs: Any) -> None:
        """Writes what `save_pretrained` does; `kwargs` are its arguments without those of a push."""
        self.check_options()
        with complete_folder(folder, self.subfolders(folder)) as partial:
            self.write(partial, **kwargs)
            write_options(self.generation_config, partial)
            if self.loaded_from is not None:
                bring_known(self.loaded_from, partial)
            if self.has_card:
                write_card(partial, folder.resolve().name)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Uploads what `save_pretrained` writes to the Hub in one commit; arguments and errors as `publication.push`.

        Without a card, other files of the repository are ignored.
        """
        return self._push(repo_id, {}, kwargs)

    def _push(self, repo_id: str, saving: Mapping[str, Any], hub: Mapping[str, Any]) -> Any:
        with tempfile.TemporaryDirectory() as stage:  # a folder may hold other files
            self.save_files(Path(stage), **saving)
            return (push if self.has_card else push_as_it_is)(Path(stage), repo_id, **hub)


class WeightlessDrafter(SavedDrafter):
    """A drafter saved as a configuration and options."""

    config_class: Any  # its configuration, with the family's `model_type`
    shown_fields: Sequence[str] = ()  # fields of config.json that `hsdraft info` shows

    @classmethod
    def of_document(
        cls, document: Mapping[str, Any], stored: Mapping[str, Any], given: Mapping[str, Any], where: Path
    ) -> Any:
        """Builds a drafter from its config.json and saved options; raises a ValueError if one is invalid.

        Args:
            given: options from the caller; they override the saved ones.
            where: path of config.json, for messages.
        """
        raise NotImplementedError

    def document(self) -> dict[str, Any]:
        """Returns its config.json, except type and version."""
        raise NotImplementedError

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, **kwargs: Any) -> Any:
        """As in `SavedDrafter`; dtype and device are ignored."""
        Placement.taken_from(kwargs)
        check_is_drafter(checkpoint.folder, cls.config_class.model_type)
        stored = stored_options(checkpoint.folder / OPTIONS)
        return cls.of_document(checkpoint.config, stored, kwargs, checkpoint.folder / CONFIG)

    def write(self, folder: Path, **kwargs: Any) -> None:
        head = {"model_type": self.config_class.model_type, "format_version": FORMAT_VERSION}
        (folder / CONFIG).write_text(json.dumps({**head, **self.document()}) + "\n", encoding="utf-8")


class PretrainedDrafter(PreTrainedModel):
    """A model whose folder is a repository of the Hub."""

    loaded_from: Path | None = None  # whose documents come along when it is saved
    travels_as: ClassVar[Any] = None  # the class that drafts where the package is not installed, if one does

    @classmethod
    def family(cls) -> Any:
        """Returns the class whose code travels: the most basic one with this configuration; a TypeError if none."""
        able = [each for each in cls.__mro__ if issubclass(each, PretrainedDrafter) and hasattr(each, "check_options")]
        if not able:
            raise TypeError(f"{cls.__name__} cannot draft: expected a class derived from Drafter too")
        return [each for each in able if each.config_class is cls.config_class][-1]

    @classmethod
    def code_map(cls, entry: str) -> dict[str, str]:
        """Returns the `auto_map` to save, with a registered derived class; `entry` is the travelling module."""
        family = cls.family()
        config = family.config_class
        of_config = entry if entry == ENTRY else config.__module__.rpartition(".")[2]
        code = {
            "AutoConfig": f"{PLACE}/{of_config}.{config.__name__}",
            "AutoModel": f"{PLACE}/{entry}.{family.__name__}",
        }
        if cls._auto_class is None or cls.__module__ == "__main__":  # transformers warns of the latter
            return code
        return {**code, cls._auto_class: f"{PLACE}/{cls.__module__.rpartition('.')[2]}.{cls.__name__}"}

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoModel") -> None:
        """Makes the code of a derived class travel with it; a family's always does. Refuses other auto classes."""
        name = auto_class if isinstance(auto_class, str) else auto_class.__name__  # transformers passes the class
        demand(name == "AutoModel", "auto_class", name, "a drafter is loaded by 'AutoModel'")
        if cls is not cls.family():
            super().register_for_auto_class(name)

    @classmethod
    def can_generate(cls) -> bool:
        """True, so that the drafting options in `generation_config` are saved with the weights."""
        return True

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
    ) -> Any:
        """Loads a drafter like any model of transformers, but from safetensors only, and checked before it is built.

        Args:
            pretrained_model_name_or_path: Folder or Hub name of a drafter.
            kwargs: As in transformers. `config` is a configuration, or the folder or Hub name of a drafter to read it
                from. Fields of the configuration may be given by name too, and override it.

        Raises:
            OSError: There is no such folder or repository, or it holds no configuration or no weights.
            TypeError: There is no such argument; the message names the nearest.
            ValueError: It is no drafter, of a newer format, or damaged; or weights and configuration do not match.
        """
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(None, *args, **kwargs)
        for name in ("variant", "state_dict"):
            if kwargs.pop(name, None) is not None:
                raise ValueError(f"a drafter is loaded from its own weights: leave `{name}` out")
        hub, subfolder = taken_for_hub(kwargs)
        kwargs.pop("proxies", None)  # the Hub's client takes them from the environment
        name = os.fspath(pretrained_model_name_or_path)
        fields = {*fields_of(cls.config_class), *_ALSO_OVERRIDDEN}
        overrides = {field: kwargs.pop(field) for field in list(kwargs) if field in fields}
        with loading(name, bool(hub.get("local_files_only"))):
            folder = fetch(name, cls.config_class.model_type, subfolder, **hub)
            config = cls._configuration(kwargs.pop("config", None), folder, subfolder, hub, overrides)
            with torch.device("meta"):
                shapes = {key: tuple(tensor.shape) for key, tensor in cls(config).state_dict().items()}
            check_weights(folder, shapes, getattr(config, "weights_digest", None))
            options = stored_options(folder / OPTIONS)
        # Pass tensors, not the folder, where transformers would look for adapters and other weights.
        try:
            loaded = super().from_pretrained(None, *args, config=config, state_dict=tensors(folder), **kwargs)
        except TypeError as error:
            _name_nearest(cls.__name__, error, kwargs, fields)
            raise
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.config.name_or_path = model.name_or_path = name
        model.loaded_from = folder
        if kwargs.get("generation_config") is None:
            shape = {name: value for name, value in overrides.items() if name in ("tree_size", "beam_width")}
            for option, value in {**options, **shape}.items():
                setattr(model.generation_config, option, value)
        return loaded

    @classmethod
    def _configuration(
        cls, given: Any, folder: Path, subfolder: str, hub: dict[str, Any], overrides: dict[str, Any]
    ) -> Any:
        """Returns the configuration to build with: `given`, or read from there, or from the weights' folder."""
        kind = cls.config_class
        if given is None:
            return kind.from_dict(read_json(folder / CONFIG), **overrides)
        if isinstance(given, str | os.PathLike):
            with loading(given, bool(hub.get("local_files_only"))):
                source = find_folder(given, DESCRIBED, subfolder, **hub)
                check_is_drafter(source, kind.model_type)
                config = kind.from_dict(read_json(source / CONFIG), **overrides)
            # The source's digests are of its own weights, and other weights are loaded here.
            config.weights_digest = read_json(folder / CONFIG).get("weights_digest")
            return config
        if not isinstance(given, PreTrainedConfig) or given.model_type != kind.model_type:
            raise ValueError(
                f"config={type(given).__name__} is invalid: expected an {kind.__name__}, or the folder or Hub name "
                "of a drafter to read one from"
            )
        config = copy.deepcopy(given)
        for field, value in overrides.items():
            setattr(config, field, value)
        return config

    def adjust_generation_fn(self, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any) -> None:
        """Sets given drafting options; `from_pretrained` reads those beside the weights."""
        if generation_config is not None:
            self.generation_config = generation_config

    def load_adapter(
        self, peft_model_id: str | None = None, adapter_name: str | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Loads an adapter of PEFT by transformers' method; the option `adapter_name` then chooses it for a call.

        Args:
            peft_model_id: Folder or Hub name of an adapter, or of several, each in a subfolder of its name.
            adapter_name: Its name from now on, and that of the subfolder if there is one; "default" by default.
            kwargs: As in transformers. `adapter_kwargs` may hold `revision`, `token`, and so on.

        Raises:
            OSError, ValueError: There is no such adapter, or one of that name has been loaded.
        """
        hub = dict(kwargs.get("adapter_kwargs") or {})
        if peft_model_id is not None and adapter_name is not None and "subfolder" not in hub:
            local = bool(kwargs.get("local_files_only") or hub.get("local_files_only"))
            place = {name: hub[name] for name in ("cache_dir", "revision", "token") if name in hub}
            subfolder = {"subfolder": adapter_name}
            if find_adapter_config_file(peft_model_id, local_files_only=local, **place, **subfolder):
                kwargs["adapter_kwargs"] = hub | subfolder
        return super().load_adapter(peft_model_id, adapter_name, *args, **kwargs)

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Writes the whole repository of a drafter: see `publication`. With an adapter loaded, only the adapter.

        Args:
            save_directory: Created if missing. Its files are replaced when all are written.
            push_to_hub: Whether to push it to the Hub too, as `repo_id` or by the folder's name.

        Raises:
            ValueError: A drafting option is out of range.
        """
        if kwargs.get("variant"):
            raise ValueError("a drafter's weights have no variants: leave `variant` out")
        self.family()
        cast(Any, self).check_options()
        hub = {name: kwargs.pop(name) for name in _OF_A_PUSH if name in kwargs}
        folder = Path(save_directory)
        name = hub.pop("repo_id", None) or folder.resolve().name
        saving = {"is_main_process": is_main_process, "state_dict": state_dict, **kwargs}
        adapted = getattr(self, "_hf_peft_config_loaded", False)
        if adapted or not self.should_save_on_this_rank(is_main_process):
            super().save_pretrained(folder, **saving)
            if push_to_hub and self.should_save_on_this_rank(is_main_process):
                push(folder, name, **hub)
            return
        with tempfile.TemporaryDirectory() as stage:  # the folder may hold other files
            with complete_folder(folder) as partial:
                super().save_pretrained(partial, **saving)
                write_options(self.generation_config, partial)
                complete(self, partial, folder)
                if push_to_hub:
                    shutil.copytree(partial, stage, dirs_exist_ok=True)
            if push_to_hub:
                push(Path(stage), name, **hub)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Pushes a drafter's whole repository to the Hub, or only a loaded adapter; see `hub.publication.push`.

        Args:
            repo_id: `"user/name"`, created if there is none.
            kwargs: `private`, `revision` (a branch, created if there is none), `token`, `create_pr`, `commit_message`,
                `commit_description`; `max_shard_size` as in `save_pretrained`.

        Returns the commit, a `huggingface_hub.CommitInfo`.

        Raises:
            OSError: The Hub refuses or cannot be reached.
            ValueError: A private repository was asked for, and there is a public one; or it holds something else.
        """
        saving = {name: kwargs.pop(name) for name in ("max_shard_size",) if name in kwargs}
        if unknown := sorted(kwargs.keys() - _OF_A_PUSH):
            raise TypeError(f"push_to_hub has no argument {', '.join(unknown)}")
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, **saving)
            return push(Path(folder), repo_id, **kwargs)


class StateDrafter(PretrainedDrafter, Drafter):
    """What drafters share that read hidden states of the target, with a `TravellingConfig` and a `StateNetwork`.

    They hold weights, configuration and, in `generation_config`, the drafting options, but no state of a call, so
    several threads may share one.
    """

    takes_tree_builders = True
    loss_function: Any = None

    def post_init(self) -> None:
        super().post_init()
        self.generation_config = self.default_generation_config()

    @property
    def taps(self) -> Sequence[int]:  # type: ignore[override]
        return tuple(self.config.target_tap_layers)

    @property
    def num_draft_steps(self) -> int:  # type: ignore[override]
        return self.config.num_draft_steps

    def default_generation_config(self) -> GenerationConfig:
        config = self.config
        return default_options(config.num_draft_steps, config.tree_size, config.beam_width, self.own_options)

    def check_together(self, options: DraftOptions) -> None:
        check_refiners(self, options)

    def check(self, target: Any) -> None:
        check_sizes(self.config, target)
