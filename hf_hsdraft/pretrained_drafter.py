"""A drafter is loaded, saved and sent by transformers' own methods: checked before, a whole repository after."""

from __future__ import annotations

import inspect
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from .drafter_files import HUB_ARGUMENTS, check_is_drafter, check_weights, find_folder, forgetting_damaged, read_json
from .publication import complete, complete_folder, push

_OF_A_PUSH = {"repo_id", "private", "revision", "token", "create_pr", "commit_message", "commit_description"}


class PretrainedDrafter(PreTrainedModel):
    """A model whose folder is a repository of the Hub."""

    @classmethod
    def can_generate(cls) -> bool:
        """True, so that the drafting options in `generation_config` are saved and loaded with the weights."""
        return True

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
    ) -> Any:
        """Loads a drafter as every model of transformers is loaded, from safetensors only, checked before it is built.

        Raises:
            OSError: there is no such folder or repository, or it holds no configuration or no weights.
            ValueError: it is something else than a drafter, of a newer format, damaged, or its weights do not cover the
                configuration.
        """
        if pretrained_model_name_or_path is None:
            return super().from_pretrained(None, *args, **kwargs)
        hub = {name: value for name in HUB_ARGUMENTS if (value := kwargs.pop(name, None)) is not None}
        kwargs.pop("proxies", None)  # the Hub's client takes them from the environment
        name = os.fspath(pretrained_model_name_or_path)
        folder = find_folder(name, **hub) / (kwargs.pop("subfolder", None) or "")
        config = kwargs.pop("config", None)
        with forgetting_damaged(name):
            check_is_drafter(folder, cls.config_class.model_type)
            if not isinstance(config, PreTrainedConfig):
                fields = inspect.signature(cls.config_class.__init__).parameters
                overrides = {field: kwargs.pop(field) for field in list(kwargs) if field in fields}
                config = cls.config_class.from_pretrained(config or folder, **overrides)
            with torch.device("meta"):
                shapes = {key: tuple(tensor.shape) for key, tensor in cls(config).state_dict().items()}
            check_weights(folder, shapes, config.weights_digest)
            options = folder / "generation_config.json"
            if options.is_file():
                read_json(options)
        kwargs["use_safetensors"] = True
        loaded = super().from_pretrained(folder, *args, config=config, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        model.config.name_or_path = model.name_or_path = name
        return loaded

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Any] | None = None,
        push_to_hub: bool = False,
        **kwargs: Any,
    ) -> None:
        """Writes the whole repository of a drafter: see `publication`. With an adapter loaded, the adapter only.

        Args:
            save_directory: created if missing. Its files are replaced when all are written; a card that somebody
                wrote stays.
            push_to_hub: send it to the Hub too, as `repo_id` or by the folder's name; see `push_to_hub`.
        """
        hub = {name: kwargs.pop(name) for name in _OF_A_PUSH if name in kwargs}
        name = hub.pop("repo_id", None) or Path(save_directory).resolve().name
        kwargs = {"is_main_process": is_main_process, "state_dict": state_dict, **kwargs}
        if getattr(self, "_hf_peft_config_loaded", False) or not is_main_process:
            super().save_pretrained(save_directory, **kwargs)
        else:
            folder = Path(save_directory)
            with complete_folder(folder) as partial:
                super().save_pretrained(partial, **kwargs)
                complete(self.config, partial, folder)
        if push_to_hub and is_main_process:
            self.push_to_hub(name, **hub)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Sends the whole repository of a drafter to the Hub, or an adapter if one is loaded.

        Args:
            repo_id: `"user/name"`, created if there is none.
            kwargs: `private`, `revision` (a branch, created if there is none), `token`, `create_pr`, `commit_message`,
                `commit_description`; `max_shard_size` as in `save_pretrained`.

        Returns:
            what the Hub says of the commit, a `huggingface_hub.CommitInfo`.

        Raises:
            OSError: the Hub refuses or cannot be reached; nothing is committed then.
        """
        saving = {name: kwargs.pop(name) for name in ("max_shard_size",) if name in kwargs}
        unknown = sorted(kwargs.keys() - _OF_A_PUSH)
        if unknown:
            raise TypeError(f"push_to_hub has no argument {', '.join(unknown)}")
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, **saving)
            return push(Path(folder), repo_id, **kwargs)

    def adjust_generation_fn(
        self,
        generation_config: GenerationConfig | None,
        from_auto_class: bool,
        from_pipeline: Any,
        pretrained_model_name_or_path: str | os.PathLike[str],
        trust_remote_code: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Loads the drafting options stored beside the weights; called by `PreTrainedModel.from_pretrained`."""
        if generation_config is not None:
            self.generation_config = generation_config
            return
        path = Path(pretrained_model_name_or_path) / "generation_config.json"
        if path.is_file():  # saved without options: those of the configuration stand
            self.generation_config = GenerationConfig.from_dict(read_json(path))
