"""A small language model as drafter: loading, saving, and use in `generate()`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

from ...core.checks import is_integer, printable, short
from ...core.refusals import DraftingRefused
from ...core.tensors import device_of
from ...hub.checkpoint import Checkpoint
from ...hub.drafter_files import loading, taken_for_hub
from ...hub.pretrained_drafter import write_options
from ...hub.publication import push_saved
from ...runtime.target_limits import decoder_layers, text_config
from ..base.draft_options import default_options, option_names
from ..base.plain_config import PlainConfig
from ..base.protocol import Call, Drafter, Read, weights_of
from ..base.registry import Format, register_format
from ..base.saved_drafter import refuse_unknown, take_options
from ..base.travelling_config import ANY
from .lm_files import (
    DRAFTING_OPTIONS,
    describe,
    empty_model,
    fit,
    load_model,
    load_tokenizer,
    why_no_causal_lm,
    why_not_by_config,
)  # fmt: skip
from .lm_session import CausalLMSession, ParallelLMSession
from .lm_texts import ability_of, shared_tokens, what_differs


@dataclass(frozen=True)
class CausalLMDrafterConfig(PlainConfig):
    """The configuration that transformers expects of an assistant."""

    vocab_size: Any = ANY  # equal to any target's: only ids in both vocabularies are drafted
    is_encoder_decoder: bool = False


class ModelDrafter(nn.Module, Drafter):
    """A drafter that is a model of transformers in files that transformers reads too."""

    num_draft_steps = 32
    takes_tree_builders = True

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"model={type(model).__name__} is invalid: expected a causal language model; "
                "CausalLMDrafter.from_pretrained(name) loads one"
            )
        self.model: Any = model
        self.tokenizer = tokenizer
        self.config: Any = CausalLMDrafterConfig()
        self.generation_config = self.default_generation_config()

    @classmethod
    def why_not(cls, checkpoint: Checkpoint) -> str:
        """Returns what a checkpoint is not; "" if it is such a drafter."""
        reason = why_no_causal_lm(checkpoint)
        return f"no causal language model: {reason}" if reason else ""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Loads a model as a drafter, without running code of its repository.

        Args:
            pretrained_model_name_or_path: folder or Hub name.
            kwargs: drafting options; Hub arguments such as `revision` and `subfolder`; arguments of
                `AutoModelForCausalLM.from_pretrained`, such as `dtype`.

        Raises:
            OSError: no such folder or repository, or it has no model.
            ValueError: not a causal language model of transformers, or an option is invalid.
        """
        name, (hub, subfolder) = pretrained_model_name_or_path, taken_for_hub(kwargs)
        with loading(name, bool(hub.get("local_files_only"))):
            checkpoint = Checkpoint.open(name, subfolder, **hub)
            if reason := cls.why_not(checkpoint):
                raise ValueError(f"{printable(name)} holds {reason}")
            return cls.of_checkpoint(checkpoint, **kwargs)

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, **kwargs: Any) -> Any:
        """Loads a checkpoint that is known to be a language model; see `from_pretrained`."""
        known = option_names() | {option.name for option in cls.own_options}
        refuse_unknown(cls.__name__, kwargs, known, others=True)  # others go to transformers
        own = {name: kwargs.pop(name) for name in known & kwargs.keys()}
        drafter = cls(empty_model(checkpoint, **kwargs), load_tokenizer(checkpoint))
        take_options(drafter, checkpoint.also(DRAFTING_OPTIONS), own, DRAFTING_OPTIONS)
        drafter.check_options()
        drafter.model = load_model(checkpoint, **kwargs)
        return drafter

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Saves the model, its tokenizer, and the drafting options in a separate file.

        `AutoModelForCausalLM` can load the folder too. `kwargs` go to the model; an invalid option raises a ValueError.
        """
        self.check_options()
        self.model.save_pretrained(save_directory, **kwargs)
        if self.tokenizer is not None:
            self.tokenizer.save_pretrained(save_directory)
        write_options(self.generation_config, save_directory, DRAFTING_OPTIONS)

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """Uploads what `save_pretrained` writes to the Hub in one commit; arguments and errors as `push_saved`."""
        return push_saved(self, repo_id, **kwargs)

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def default_generation_config(self) -> GenerationConfig:
        return default_options(num_assistant_tokens=5, tree_size=16, beam_width=4, own=self.own_options)

    def check_mode(self) -> None:
        """Raises DraftingRefused if the model is in training mode."""
        if self.model.training:
            raise DraftingRefused(
                "this model is in training mode, where dropout changes its drafts and takes the call's random numbers: "
                "call drafter.eval()"
            )

    def warn_of_misfit(self, target: Any, tokenizer: Any, all_processes: bool) -> None:
        """Raises DraftingRefused if both tokenizers are known and their ids stand for different tokens."""
        if self.tokenizer is None or tokenizer is None:
            return
        reason = what_differs(self.tokenizer, tokenizer)
        if reason:
            raise DraftingRefused(
                f"this drafter's tokenizer is not the target's: {reason}. Use a drafter with the target's tokenizer."
            )


class CausalLMDrafter(ModelDrafter):
    """Drafts trees ("SpecInfer") with a smaller language model that has the target's tokenizer ("Fast Inference from
    Transformers via Speculative Decoding").

        out = model.generate(**inputs, assistant_model=CausalLMDrafter(small_model))

    Passing the bare model, `assistant_model=small_model`, is transformers' assisted decoding. A model whose
    configuration names a mask token (`pard_token`) drafts all depths in one forward ("PARD").

    Args:
        model: a causal language model, used as it is. It may serve as a target too.
        tokenizer: the model's; compared with the target's if a call has that.

    Raises:
        TypeError: `model` is not a module.
        ValueError: the mask token is none of the model's.
    """

    why_not_exported = (
        "its folder is that of the language model itself, which other programs take as their draft model as it is"
    )

    @property
    def mask_token_id(self) -> int | None:
        """The token that stands for tokens not drafted yet (PARD); None for models that draft one after another."""
        return _mask_token_of(self.model)

    def default_generation_config(self) -> GenerationConfig:
        if self.mask_token_id is None:
            return super().default_generation_config()
        return default_options(num_assistant_tokens=8, tree_size=24, beam_width=8, own=self.own_options)

    def check(self, target: Any) -> None:
        self.check_mode()
        reason = ability_of(self.model).reason
        if reason:
            raise DraftingRefused(f"this model cannot draft: {reason}")

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        table, head = (part.weight for part in (self.model.get_input_embeddings(), self.model.get_output_embeddings()))
        untied = 0 if head is table else table.numel()
        body = weights_of(self.model) - head.numel() - untied
        looked_up = () if not untied else (Read("embedding", untied, 0, 1),)  # in memory, but only a few rows are read
        times, rows = (depth, width) if self.mask_token_id is None else (1, depth)
        return Read("layers", body, times, rows), Read("head", head.numel(), times, rows), *looked_up

    def numbers_kept(self, length: int) -> int:
        """Returns the number of cached values (keys and values) for a sequence of `length` tokens."""
        config = text_config(self.model)
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * decoder_layers(config) * heads * head_dim * length)

    def session(self, call: Call) -> CausalLMSession:
        shared, kinds = shared_tokens(self.model, call.target), ability_of(self.model).kinds
        if self.mask_token_id is None:
            return CausalLMSession(self.model, call, shared, kinds)
        return ParallelLMSession(self.model, call, shared, kinds, self.mask_token_id)


def _mask_token_of(model: Any) -> int | None:
    """Returns `pard_token` of a model's configuration; a ValueError if it is no token of the model."""
    is_known = hasattr(getattr(model, "config", None), "get_text_config")
    config: Any = text_config(model) if is_known else None
    mask = getattr(config, "pard_token", None)
    if mask is not None and not (is_integer(mask) and 0 <= mask < config.vocab_size):
        raise ValueError(
            f"pard_token={short(mask)} in the model's configuration is invalid: expected a token id below "
            f"vocab_size={config.vocab_size}"
        )
    return mask


# Matched last: it is recognised only by not being another format.
register_format(
    Format(
        name="causal language model",
        rank=1000,
        matches=lambda checkpoint: not why_no_causal_lm(checkpoint),
        load=CausalLMDrafter.of_checkpoint,
        describe=describe,
        drafter=CausalLMDrafter,
        possible=lambda config: not why_not_by_config(config),
        listed=lambda checkpoint: (checkpoint.folder / DRAFTING_OPTIONS).is_file(),  # most models are not drafters
        fit=fit,
    )
)
