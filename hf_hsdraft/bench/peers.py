"""transformers' drafters as systems to compare with: a draft model, multi-token prediction, DFlash."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from transformers import AutoModel, AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

NAMES = {"draft-model": "draft model", "mtp": "multi-token prediction", "dflash": "DFlash"}
LOADED = ("draft-model", "dflash")  # these need separate weights
_OF_DFLASH = ("target_layer_ids", "block_size", "mask_token_id", "hidden_size")


def check_name(kind: str, name: str | None) -> None:
    """Raises a ValueError if a peer lacks the weights it needs, or is given weights it does not take.

    `kind` is one of `NAMES`, `name` a folder or Hub name.
    """
    if (name is None) == (kind in LOADED):
        raise ValueError(
            f"variant {kind!r}: write {kind}=FOLDER, or the name of a model on the Hub"
            if name is None
            else f"variant {kind!r} has no folder: its layers are the target's own"
        )
    if name is not None and not os.path.isdir(name) and (name.startswith(("/", ".", "~")) or name.count("/") > 1):
        raise ValueError(f"variant {kind!r}: no such folder: {name}")


def generate_kwargs(kind: str, target: Any, name: str | None) -> dict[str, Any]:
    """Returns the arguments of `generate()` for a peer of `NAMES`; `name` is the folder or Hub name of its weights.

    Raises an OSError if they are missing, a ValueError if they do not fit the target or the target has none for it.
    """
    return _KWARGS[kind](target, name)


def _draft_model(target: Any, name: str) -> dict[str, Any]:
    """A smaller model ("Fast Inference from Transformers via Speculative Decoding"), with the target's tokenizer."""
    drafter = AutoModelForCausalLM.from_pretrained(name, dtype=target.dtype).to(target.device).eval()
    own, other = (model.config.get_text_config().vocab_size for model in (target, drafter))
    if own != other:
        raise ValueError(
            f"variant 'draft-model': the model has a vocabulary of {other:,} tokens, the target one of {own:,}; "
            "expected a draft model with the target's own tokenizer"
        )
    return {"assistant_model": drafter}


def _mtp(target: Any, name: None) -> dict[str, Any]:
    """Extra layers of the target's checkpoint, each of which predicts one more token (DeepSeek-V3, section 2.2).

    transformers reads them in every call. Here they are read once and dropped, to say what is missing.
    """
    if not getattr(target.config.get_text_config(), "num_mtp_layers", None):
        raise ValueError(
            "variant 'mtp': the target's configuration has no `num_mtp_layers`, or 0: its checkpoint brings no layers "
            "for multi-token prediction"
        )
    try:
        MtpModel.from_pretrained(target)
    except (OSError, ValueError, RuntimeError, AttributeError, TypeError) as error:
        raise ValueError(f"variant 'mtp': the target's layers for it cannot be read: {error}") from error
    return {"use_mtp": True}


def _dflash(target: Any, name: str) -> dict[str, Any]:
    """A model that fills a block of tokens in one forward, from hidden states of the target."""
    drafter = AutoModel.from_pretrained(name, dtype=target.dtype).to(target.device).eval()
    config, own = drafter.config, target.config.get_text_config()
    missing = [field for field in _OF_DFLASH if getattr(config, field, None) is None]
    if missing:
        raise ValueError(
            f"variant 'dflash': {type(drafter).__name__} is no DFlash drafter: its configuration has no "
            f"{', '.join(missing)}"
        )
    wrong = [
        f"hidden_size {config.hidden_size} instead of {own.hidden_size}" * (config.hidden_size != own.hidden_size),
        f"layer {max(config.target_layer_ids)} of {own.num_hidden_layers}"
        * (max(config.target_layer_ids) >= own.num_hidden_layers),
        f"mask_token_id {config.mask_token_id} beyond the vocabulary of {own.vocab_size:,}"
        * (config.mask_token_id >= own.vocab_size),
    ]
    if any(wrong):
        raise ValueError(f"variant 'dflash': the drafter is for another target: {'; '.join(filter(None, wrong))}")
    return {"assistant_model": drafter, "speculation_type": "dflash"}


_KWARGS: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "draft-model": _draft_model,
    "mtp": _mtp,
    "dflash": _dflash,
}
