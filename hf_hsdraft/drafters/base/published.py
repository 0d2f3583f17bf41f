"""What drafters of published architectures share: their networks, the target that they were made for, their files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from ...core.checks import printable, public_name
from ...core.refusals import DraftingRefused
from ...core.tensors import RMSNorm
from ...hub.speculators_format import speculators_fields
from ...runtime.target_limits import decoder_layers, text_config
from ...runtime.target_parts import before_norm, check_last_state
from .decoder_layer import LayerSizes
from .protocol import Drafter
from .target_info import misfit

AttendByLayer = Callable[..., torch.Tensor]  # as `Attend`, preceded by the layer index
_LAYER_FIELDS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "attention_bias",
)  # fmt: skip


class PublishedNetwork(nn.Module, Drafter):
    """A network that fuses hidden states of the target by `fc`.

    Its configuration has `num_draft_steps`, `taps_of(num_hidden_layers)`, and fields about its target:
    `vocab_size`, `target_hidden_size`, `target_num_hidden_layers` (each None for any), `target_name`, and
    `last_tap_is_normed`.

    For training, its `forward` reads packed sequences and drafts from many positions at once. All networks take:

    - taps: `[T, taps * D]`, the target's hidden states h_i at the tapped layers, concatenated;
    - embeds: `[T, D]`, embeddings of the next tokens x_{i+1}, by `borrow(...).embed`;
    - position_ids: `[T]`, int64, position i of each pair, consecutive within a document;
    - starts: `[S]`, int64, pairs at which chains or blocks start; None for the last one only;
    - document_ids: `[T]`, int64; attention stays within a document. None for a single document;
    - num_rolled: number of chains, the first of `starts`, that go beyond the first depth; None for all;
    - labels: for `loss_function(drafter, hidden_states, labels)`; None for no loss.
    """

    config: Any
    fc: nn.Linear
    loss_function: Any = None

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    @property
    def num_draft_steps(self) -> int:  # type: ignore[override]
        return int(self.config.num_draft_steps)

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        """Initialises products and embeddings normally distributed, norms as 1."""
        for module in self.modules():
            if isinstance(module, RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=std)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def taps_of(self, target: Any) -> Sequence[int]:
        layers = decoder_layers(text_config(target))
        taps: Sequence[int] = self.config.taps_of(layers)
        return taps if self.config.last_tap_is_normed else before_norm(taps, layers)

    def check(self, target: Any) -> None:
        if wrong := misfit(self.config, target):
            self.refuse(wrong)
        layers = decoder_layers(text_config(target))
        if self.config.taps_of(layers)[-1] == layers and not self.config.last_tap_is_normed:
            check_last_state(target)

    def refuse(self, wrong: str) -> NoReturn:
        made_for = printable(self.config.target_name) or "another target"
        raise DraftingRefused(
            f"{wrong}: this drafter was made for {made_for}. Use a drafter of this target, or train one."
        )


def fresh_rope(target_config: Any) -> dict[str, Any]:
    """Returns the rotary embedding of a fresh drafter as `rotary_of` takes it: plain, with the target's base."""
    rope = getattr(target_config, "rope_parameters", None) or {}
    return {
        "rope_parameters": {"rope_theta": rope.get("rope_theta") or 10000.0, "rope_type": "default"},
        "max_position_embeddings": getattr(target_config, "max_position_embeddings", None) or 2048,
    }


def speculators_document(
    config: Any,
    kind: str,  # type of drafter in that format
    architecture: str,  # class name that engines use
    dtype: torch.dtype,
    model_type: str,  # transformers' type of the layers
    sizes: LayerSizes,
    windows: Sequence[int | None],  # sliding window of each layer; empty if the files need not tell
    **fields: Any,  # of the type
) -> dict[str, Any]:
    """Returns a drafter's config.json in the speculators format, with all switches: readers have different defaults."""
    sliding = {
        "layer_types": ["full_attention" if window is None else "sliding_attention" for window in windows],
        "sliding_window": next((window for window in windows if window is not None), None),
        "use_sliding_window": any(windows),
    }
    layers = {
        "model_type": model_type,
        "vocab_size": config.vocab_size,
        "num_hidden_layers": config.num_hidden_layers,
        **{name: getattr(sizes, name) for name in _LAYER_FIELDS},
        "mlp_bias": False,
        "tie_word_embeddings": False,
        **(sliding if windows else {}),
        **{name: value for name, value in config.rope.items() if value is not None},
    }
    target = public_name(config.target_name)
    return {
        **speculators_fields(kind, config.num_draft_steps, target, config.target_architectures),
        "architectures": [architecture],
        "dtype": str(dtype).removeprefix("torch."),
        "transformer_layer_config": layers,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **fields,
    }
