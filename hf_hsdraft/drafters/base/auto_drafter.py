"""Loads a drafter of any family, by the `model_type` in its config.json or by its format."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from transformers.utils import logging

from ...core.checks import printable
from ...hub.checkpoint import Checkpoint
from ...hub.drafter_files import CONFIG, read_json
from ...hub.fetching import HUB_ARGUMENTS, find_folder, loading
from ...hub.pretrained_drafter import PretrainedDrafter, fields_of
from .draft_options import option_names
from .finding import Found, find, train_command
from .registry import FAMILIES, Family, Format, load_families, recognise
from .saved_drafter import Placement, give_options, refuse_unknown
from .target_info import TargetInfo

logger = logging.get_logger(__name__)


class AutoDrafter:
    """Loads drafters of all families. Other projects' drafters load unchanged, without running their code.

    drafter = AutoDrafter.from_pretrained("user/SmolLM2-135M-Instruct-hsdraft")
    drafter = AutoDrafter.for_target(model)  # the best that can be found
    """

    def __init__(self) -> None:
        raise TypeError(
            "AutoDrafter is not made by itself: call AutoDrafter.from_pretrained(name) or AutoDrafter.for_target(model)"
        )

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Loads a drafter.

        Args:
            pretrained_model_name_or_path: folder or Hub name.
            args, kwargs: for all families:
                - `revision`, `subfolder`, `token`, `cache_dir`, `local_files_only`, `force_download`: for the Hub;
                - `dtype` (or `torch_dtype`): of the weights; by default the dtype of the files;
                - `device_map`: one device, or "auto": a drafter follows its target anyway;
                - `attn_implementation`: for language models; other drafters accept "sdpa" and "eager" and ignore them;
                - drafting options by name.
                Language models also take what `AutoModelForCausalLM.from_pretrained` takes, drafters of `hsdraft train`
                fields of their configuration, and P-EAGLE drafters `mask_token_id` if their files lack it.

        Raises:
            OSError: no such folder or repository, or it has no configuration.
            TypeError: an argument is unknown; the message names it.
            ValueError: the family or format is unknown, or the files contradict each other.
        """
        load_families()
        name, subfolder = pretrained_model_name_or_path, kwargs.get("subfolder") or ""
        hub = {argument: kwargs[argument] for argument in HUB_ARGUMENTS if kwargs.get(argument) is not None}
        with loading(name, offline=bool(hub.get("local_files_only"))):
            config = read_json(find_folder(name, (CONFIG,), subfolder, **hub) / CONFIG)
            model_type = config.get("model_type")
            family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
            if family is None:
                checkpoint = Checkpoint.open(name, subfolder, **hub)
                of_hub = {*HUB_ARGUMENTS, "subfolder"}
                others = {argument: value for argument, value in kwargs.items() if argument not in of_hub}
                return _format_of(checkpoint).load(checkpoint, **others)
        if not issubclass(family.drafter, PretrainedDrafter):
            return family.drafter.from_pretrained(name, *args, **kwargs)
        return _load_of_transformers(family, name, args, kwargs)

    @classmethod
    def for_target(cls, model: Any, tokenizer: Any = None, local_files_only: bool = False) -> Any:
        """Returns the best drafter that `hsdraft find` lists for a loaded target, and logs in a line which it is.

        Where nothing else drafts, that is a `CachebackDrafter`, and the line says how to train a drafter. What cannot
        be loaded is logged too. Layers for multi-token prediction in the target's checkpoint come first.

        Args:
            model: the target.
            tokenizer: the target's; by default the one beside its weights.
            local_files_only: whether to look into the cache only, instead of on the Hub too.
        """
        return cls.chosen_for(model, tokenizer, local_files_only)[1]

    @classmethod
    def chosen_for(cls, model: Any, tokenizer: Any = None, local_files_only: bool = False) -> tuple[Found, Any]:
        """Returns what `for_target` does, behind the row of `hsdraft find` that it is."""
        target = TargetInfo.of_model(model, tokenizer, local_files_only)
        (*found, ngrams), note = find(target, local_files_only)
        assert ngrams.made is not None
        for each in found:
            if each.problem or (local_files_only and not each.here):
                continue
            loading = {"dtype": model.dtype, "local_files_only": each.here, **each.loading}
            try:
                made = each.made
                drafter = cls.from_pretrained(each.name, **loading) if made is None else made(model)
                drafter.check(model)
            except Exception as error:  # its files may hold anything
                logger.warning(f"{each.name} is not used, although it fits: {error}")
                continue
            logger.warning(f"drafting with {each.name} ({each.kind}): {each.why}")
            return each, drafter
        named = printable(target.name) or type(model).__name__
        logger.warning(
            f"nothing that was trained for {named} is at hand{f' ({note})' if note else ''}: drafting with n-grams; "
            f"`{train_command(target.place or 'path/or/name')}` trains a drafter"
        )
        return ngrams, ngrams.made(model)


def _load_of_transformers(
    family: Family, name: str | os.PathLike[str], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Loads a transformers model, which does not accept drafting options or `attn_implementation` by itself."""
    kind, placement = family.drafter, Placement.taken_from(kwargs)
    fields = fields_of(family.config)
    options = {option: kwargs.pop(option) for option in (option_names() - fields) & kwargs.keys()}
    refuse_unknown(kind.__name__, kwargs.keys() - fields, option_names(), others=True)
    dtype = {} if placement.dtype is None else {"dtype": placement.dtype}
    loaded = kind.from_pretrained(name, *args, **dtype, **kwargs)
    drafter = loaded[0] if isinstance(loaded, tuple) else loaded  # with `output_loading_info`
    give_options(drafter, {}, options)
    placement.place(drafter)
    return loaded


def _format_of(checkpoint: Checkpoint) -> Format:
    try:
        return recognise(checkpoint)
    except ValueError as error:
        if "auto_map" not in checkpoint.config:
            raise
        advice = "import the module that registers its family, or use AutoModel and trust_remote_code=True"
        raise ValueError(f"{error}; {advice}") from None
