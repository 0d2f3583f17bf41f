"""Configuration of a hidden-state drafter: what its target must be, and how large its own parts are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedConfig

INJECTORS = ("low_rank", "path")
HEADS = ("target", "trained")


class HSDraftConfig(PreTrainedConfig):
    """Configuration of an [`HSDrafter`].

    Every field is checked when the configuration is built, so a drafter that loads is one that fits together. Prefer
    [`HSDraftConfig.for_target`], which derives the target's side from a loaded model.

    Args:
        vocab_size: vocabulary size of the target; `generate()` compares it with the target's own.
        target_hidden_size: width of the target's hidden states.
        target_num_hidden_layers: number of decoder layers of the target.
        target_tap_layers: indices into the target's `hidden_states` (0 = embeddings, i = output of layer i) that the
            drafter reads, ascending. `None` picks one low, one middle and one high layer (EAGLE-3, section 3.1).
        target_name: name or path of the target, for messages and cards.
        hidden_size: width of the drafted hidden states; equal to `target_hidden_size` unless `head="trained"`.
        num_hidden_layers: layers of the trunk.
        num_attention_heads: attention heads of a trunk layer.
        num_key_value_heads: key/value heads of a trunk layer (grouped-query attention).
        head_dim: width of one head; `None` means `hidden_size // num_attention_heads`.
        intermediate_size: inner width of the trunk's feed-forward blocks.
        num_draft_steps: K, the hidden states rolled out per round and so the depth of the draft tree.
        rms_norm_eps: epsilon of all RMS norms.
        rope_theta: base of the rotary position embedding.
        injector: how token information joins the hidden states: `"low_rank"` is the paper's bias W2 W1 e(parent),
            `"path"` a gated network on hidden state, parent and the path from the root.
        injector_rank: r, the rank through which token information reaches the logits.
        injector_hidden_size: inner width of the path injector.
        head: `"target"` uses the target's own output rows (none are stored), `"trained"` its own.
        draft_vocab_size: V', the number of tokens the drafter can propose; `None` means all of them.
        draft_vocab_ids: the token ids behind the V' rows, ascending; `None` means the first V'.
        tree_size: nodes of the draft tree, the root not counted.
        beam_width: nodes of one depth that are expanded to the next; 1 drafts a chain.
        initializer_range: standard deviation of the weight initialisation.

    Raises:
        ValueError: a field is out of range or contradicts another; the message names field, value and remedy.
    """

    model_type = "hsdraft"

    def __init__(
        self,
        vocab_size: int = 32000,
        target_hidden_size: int = 2048,
        target_num_hidden_layers: int = 24,
        target_tap_layers: Sequence[int] | None = None,
        target_name: str = "",
        hidden_size: int | None = None,
        num_hidden_layers: int = 1,
        num_attention_heads: int = 16,
        num_key_value_heads: int | None = None,
        head_dim: int | None = None,
        intermediate_size: int | None = None,
        num_draft_steps: int = 6,
        rms_norm_eps: float = 1e-5,
        rope_theta: float = 10000.0,
        injector: str = "path",
        injector_rank: int = 128,
        injector_hidden_size: int = 256,
        head: str = "target",
        draft_vocab_size: int | None = None,
        draft_vocab_ids: Sequence[int] | None = None,
        tree_size: int = 24,
        beam_width: int = 8,
        initializer_range: float = 0.02,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.target_hidden_size = target_hidden_size
        self.target_num_hidden_layers = target_num_hidden_layers
        self.target_tap_layers = (
            default_tap_layers(target_num_hidden_layers) if target_tap_layers is None else list(target_tap_layers)
        )
        self.target_name = target_name
        self.hidden_size = target_hidden_size if hidden_size is None else hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_attention_heads if num_key_value_heads is None else num_key_value_heads
        self.head_dim = self.hidden_size // max(num_attention_heads, 1) if head_dim is None else head_dim
        self.intermediate_size = 4 * self.hidden_size if intermediate_size is None else intermediate_size
        self.num_draft_steps = num_draft_steps
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.injector = injector
        self.injector_rank = injector_rank
        self.injector_hidden_size = injector_hidden_size
        self.head = head
        self.draft_vocab_size = vocab_size if draft_vocab_size is None else draft_vocab_size
        self.draft_vocab_ids = None if draft_vocab_ids is None else list(draft_vocab_ids)
        self.tree_size = tree_size
        self.beam_width = beam_width
        self.initializer_range = initializer_range
        self.check()
        super().__init__(**kwargs)

    @classmethod
    def for_target(cls, target: Any, **overrides: Any) -> HSDraftConfig:
        """Derives the configuration of a drafter from a loaded target.

        Args:
            target: a model of transformers that generates text; of an encoder-decoder, the decoder is meant.
            overrides: fields to set otherwise, by the names of the constructor.

        Raises:
            ValueError: an override is invalid.
        """
        return cls.for_target_config(target.config, **{"target_name": getattr(target, "name_or_path", ""), **overrides})

    @classmethod
    def for_target_config(cls, target_config: Any, **overrides: Any) -> HSDraftConfig:
        """As [`for_target`], from the target's configuration alone."""
        config = target_config.get_text_config(decoder=True)
        rope = getattr(config, "rope_parameters", None) or {}
        heads = _integer(config, "num_attention_heads") or 1
        key_value_heads = _integer(config, "num_key_value_heads") or heads
        fields: dict[str, Any] = {
            "vocab_size": config.vocab_size,
            "target_hidden_size": config.hidden_size,
            "target_num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": key_value_heads if heads % key_value_heads == 0 else heads,
            "head_dim": max(config.hidden_size // heads // 2 * 2, 2),  # rotary embeddings need an even number
            "intermediate_size": _integer(config, "intermediate_size"),
            "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-5,
            "rope_theta": rope.get("rope_theta") or 10000.0,
            "draft_vocab_size": max(1, config.vocab_size // 4),
        }
        if overrides.get("draft_vocab_ids") is not None and "draft_vocab_size" not in overrides:
            fields["draft_vocab_size"] = len(overrides["draft_vocab_ids"])
        return cls(**{**fields, **overrides})

    def check(self) -> None:
        """Raises a ValueError that names the first field that is wrong, its value, and what would be right."""
        for name in (
            "vocab_size",
            "target_hidden_size",
            "target_num_hidden_layers",
            "hidden_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "intermediate_size",
            "num_draft_steps",
            "injector_rank",
            "injector_hidden_size",
            "draft_vocab_size",
            "tree_size",
            "beam_width",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} is invalid: expected an integer of 1 or more")
        for name in ("rms_norm_eps", "rope_theta", "initializer_range"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0.0 < value < math.inf:
                raise ValueError(f"{name}={value!r} is invalid: expected a positive number")
        for name, allowed in (("injector", INJECTORS), ("head", HEADS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} is invalid: expected one of {', '.join(allowed)}")
        self._check_taps()
        self._check_vocabulary()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_key_value_heads={self.num_key_value_heads} is invalid: it must divide "
                f"num_attention_heads={self.num_attention_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is invalid: rotary embeddings need an even number")
        if self.head == "target" and self.hidden_size != self.target_hidden_size:
            raise ValueError(
                f"hidden_size={self.hidden_size} is invalid with head='target': the target's output rows need "
                f"target_hidden_size={self.target_hidden_size}; set them equal or choose head='trained'"
            )
        if self.tree_size < self.num_draft_steps:
            raise ValueError(
                f"tree_size={self.tree_size} is invalid: a tree of depth num_draft_steps={self.num_draft_steps} needs "
                "at least as many nodes"
            )

    def _check_taps(self) -> None:
        taps = self.target_tap_layers
        in_range = all(isinstance(tap, int) and 0 <= tap <= self.target_num_hidden_layers for tap in taps)
        if not taps or not in_range or sorted(set(taps)) != taps:
            raise ValueError(
                f"target_tap_layers={taps} is invalid: expected ascending indices between 0 (embeddings) and "
                f"target_num_hidden_layers={self.target_num_hidden_layers}, each once"
            )

    def _check_vocabulary(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} is invalid: the target has only vocab_size="
                f"{self.vocab_size} tokens"
            )
        ids = self.draft_vocab_ids
        if ids is None:
            return
        if len(ids) != self.draft_vocab_size:
            raise ValueError(
                f"draft_vocab_ids holds {len(ids)} ids but draft_vocab_size={self.draft_vocab_size}: they must agree"
            )
        integers = all(isinstance(token, int) and not isinstance(token, bool) for token in ids)
        ascending = integers and all(low < high for low, high in itertools.pairwise(ids))
        if not ascending or ids[0] < 0 or ids[-1] >= self.vocab_size:
            raise ValueError(
                f"draft_vocab_ids is invalid: expected ascending, distinct token ids from 0 to {self.vocab_size - 1}"
            )


def _integer(config: Any, name: str) -> int | None:
    """A field where it is one number for all layers."""
    value = getattr(config, name, None)
    return value if isinstance(value, int) else None


def default_tap_layers(num_hidden_layers: int) -> list[int]:
    """One low, one middle and one high layer, as indices into `hidden_states` (EAGLE-3, section 3.1)."""
    wanted = (3, num_hidden_layers // 2 + 1, num_hidden_layers - 2)
    return sorted({min(max(layer, 1), num_hidden_layers) for layer in wanted})


__all__ = ["HSDraftConfig"]
