"""Drafters that are models of transformers, loaded and saved as these, with everything else that a repository holds."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from ...core.checks import demand, printable, settings, typo_of
from ...core.methods import load, offered
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
from ...hub.publication import complete
from .draft_options import default_options, option_names
from .protocol import check_sizes
from .saved_drafter import Placement, SavedDrafter, give_options, refuse_unknown, stored_options

_ALSO_OVERRIDDEN = {"bos_token_id", "eos_token_id", "pad_token_id"}


def _name_nearest(kind: str, error: TypeError, given: Collection[str], fields: Collection[str]) -> None:
    """Raises a TypeError about an unknown argument, for the one of Python, which names no other."""
    name = next((name for name in given if f"unexpected keyword argument '{name}'" in str(error)), None)
    if name is None:
        return
    near = typo_of(name, fields)
    hint = f"the nearest is {near}" if near else "expected one of transformers' from_pretrained"
    raise TypeError(f"{kind}.from_pretrained has no argument {printable(name)}: {hint}") from error


def fields_of(config_class: Any) -> set[str]:
    own = {each.name for each in settings(config_class)} | set(inspect.signature(config_class.__init__).parameters)
    return own - {"self", "kwargs"}


class PretrainedDrafter(PreTrainedModel, SavedDrafter):
    """A drafter that is a model of transformers, whose folder is a repository of the Hub."""

    _supports_sdpa = True  # so that transformers lets this name pass: attention is computed here all the same
    travels_as: ClassVar[Any] = None  # the class that drafts where the package is not installed, if one does

    @classmethod
    def family(cls) -> Any:
        """Returns the class whose code travels: the most basic one with this configuration."""
        able = [each for each in cls.__mro__ if issubclass(each, PretrainedDrafter)]
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
                from. Fields of the configuration may be given by name too, and override it. The rest as in
                `AutoDrafter.from_pretrained`, drafting options included.

        Raises:
            OSError: There is no such folder or repository, or it holds no configuration or no weights.
            TypeError: There is no such argument; the message names the nearest.
            ValueError: It is no drafter, of a newer format, or damaged; or weights and configuration do not match.
        """
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(None, *args, **kwargs)  # type: ignore[arg-type]
        for name in ("variant", "state_dict"):
            if kwargs.pop(name, None) is not None:
                raise ValueError(f"a drafter is loaded from its own weights: leave `{name}` out")
        hub, subfolder = taken_for_hub(kwargs)
        kwargs.pop("proxies", None)  # the Hub's client takes them from the environment
        name, placement = os.fspath(pretrained_model_name_or_path), Placement.taken_from(kwargs)
        fields = {*fields_of(cls.config_class), *_ALSO_OVERRIDDEN}
        known = option_names() | {option.name for option in cls.own_options}
        given = {option: kwargs.pop(option) for option in (known - fields) & kwargs.keys()}
        refuse_unknown(cls.__name__, kwargs.keys() - fields, known, others=True)
        overrides = {field: kwargs.pop(field) for field in list(kwargs) if field in fields}
        with loading(name, bool(hub.get("local_files_only"))):
            folder = fetch(name, cls.config_class.model_type, subfolder, **hub)
            config = cls._configuration(kwargs.pop("config", None), folder, subfolder, hub, overrides)
            with torch.device("meta"):
                shapes = {key: tuple(tensor.shape) for key, tensor in cls(config).state_dict().items()}
            check_weights(folder, shapes, getattr(config, "weights_digest", None))
            options = stored_options(folder / OPTIONS)
        kwargs |= {} if placement.dtype is None else {"dtype": placement.dtype}
        # Pass tensors, not the folder, where transformers would look for adapters and other weights.
        of_transformers: Any = super()
        try:
            loaded = of_transformers.from_pretrained(None, *args, config=config, state_dict=tensors(folder), **kwargs)
        except TypeError as error:
            _name_nearest(cls.__name__, error, kwargs, fields)
            raise
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.config.name_or_path = model.name_or_path = name
        model.loaded_from = folder
        options = {} if kwargs.get("generation_config") is not None else options
        shape = {name: value for name, value in overrides.items() if name in ("tree_size", "beam_width")}
        for option, value in {**options, **shape}.items():
            setattr(model.generation_config, option, value)
        give_options(model, {}, given)
        placement.place(model)
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
        Placement.taken_from({"attn_implementation": given._attn_implementation})  # from AutoModel
        config = copy.deepcopy(given)
        for field, value in overrides.items():
            setattr(config, field, value)
        return config

    def adjust_generation_fn(self, generation_config: GenerationConfig | None, *args: Any, **kwargs: Any) -> None:
        """Sets given drafting options; `from_pretrained` reads those beside the weights."""
        if generation_config is not None:
            self.generation_config = copy.deepcopy(generation_config)

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
        if peft_model_id is not None and adapter_name is not None and offered("adapting"):
            kwargs = load("adapting", "peft").in_subfolder(peft_model_id, adapter_name, kwargs)
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
        push_to_hub = push_to_hub and self.should_save_on_this_rank(is_main_process)
        kwargs |= {"is_main_process": is_main_process, "state_dict": state_dict}
        SavedDrafter.save_pretrained(self, save_directory, push_to_hub=push_to_hub, **kwargs)

    push_to_hub = SavedDrafter.push_to_hub

    def save_files(self, folder: Path, is_main_process: bool = True, **kwargs: Any) -> None:
        kwargs["is_main_process"] = is_main_process
        if getattr(self, "_hf_peft_config_loaded", False) or not self.should_save_on_this_rank(is_main_process):
            self.check_options()
            self.write(folder, **kwargs)
        else:
            super().save_files(folder, **kwargs)

    def write(self, folder: Path, **kwargs: Any) -> None:
        PreTrainedModel.save_pretrained(self, folder, **kwargs)

    def complete(self, partial: Path, folder: Path) -> None:
        complete(self, partial, folder)


class StateDrafter(PretrainedDrafter):
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

    def check(self, target: Any) -> None:
        check_sizes(self.config, target)
