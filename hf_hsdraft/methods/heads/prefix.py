"""Hydra's heads behind a layer that reads the whole text (Hydra++, "Hydra", section 4.3), and their session.

The layer is one of the target's class over its last hidden states, so heads, rotary embedding and epsilon are the
target's; the files tell none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ...core.checks import integer, setting
from ...core.refusals import DraftingRefused
from ...core.tensors import RMSNorm
from ...drafters.base.plain_config import described
from ...drafters.base.protocol import Accepted, Call
from ...drafters.base.target_weights import TargetWeights
from ...drafters.base.travelling_config import heads_of
from ...drafters.base.tree_session import Columns
from ...hub.drafter_files import Shape
from ...runtime.target_limits import text_config
from ..published.context import ParallelContextSession, Slots
from ..published.decoder_layer import AttendByLayer, DecoderLayer, LayerSizes, rotary_of
from ..published.network import SpeculatorsFiles
from ..published.nodes import ends_of, reading_attention
from ..published.target_sizes import FLAG
from .drafter import HeadsSession, HydraConfig, HydraDrafter


@described
@dataclass(frozen=True, kw_only=True)
class PrefixHydraConfig(HydraConfig):
    """Configuration of a [`PrefixHydraDrafter`]."""

    query_size: int = setting("width of the layer's queries, of all heads together", limit=integer(2**20))
    key_size: int = setting("width of its keys", limit=integer(2**20))
    intermediate_size: int = setting("inner width of its feed-forward block", limit=integer(2**20))
    attention_bias: bool = setting("whether its products for queries, keys and values have a bias", False, FLAG)


class PrefixLayer(nn.Module):
    """A decoder layer and a norm. It runs as the layer that `like` returns, which has a target's heads."""

    def __init__(self, sizes: LayerSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DecoderLayer(sizes)])
        self.norm = RMSNorm(sizes.hidden_size, sizes.rms_norm_eps)
        self._sizes, self._rotary = sizes, rotary_of({}, sizes)

    def like(self, target: Any) -> PrefixLayer:
        """Returns a layer with the same weights and a target's heads, rotary embedding and epsilon."""
        config: Any = text_config(target)
        of_target: dict[str, Any] = {**heads_of(config), "rms_norm_eps": config.rms_norm_eps}
        sizes = replace(self._sizes, **of_target)
        with torch.device("meta"):
            made = PrefixLayer(sizes)
        made.load_state_dict(self.state_dict(), assign=True)
        made._rotary = rotary_of({"rope_parameters": config.rope_parameters}, sizes)
        return made

    def forward(self, x: torch.Tensor, positions: torch.Tensor, attend: AttendByLayer, rows: Any) -> torch.Tensor:
        """Returns states `[B, H]` of `rows`, of hidden states `[n, H]` at `positions` `[n]`."""
        layer: Any = self.layers[0]
        return self.norm(layer(x, self._rotary(positions, x.dtype), partial(attend, 0), rows))


class PrefixHydraSession(HeadsSession):
    """As `HeadsSession`, but the heads read what a layer makes of all hidden states up to the last."""

    reading_layers = 1

    def __init__(self, drafter: Any, weights: TargetWeights, call: Call) -> None:
        super().__init__(drafter, weights, call)
        self._layer = drafter.prefix_embeding_layer.like(call.target)

    def columns(self, news: Accepted) -> Columns:
        return ParallelContextSession.columns(self, news)

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        taps, positions = columns
        attend = reading_attention(self._context, slots, counts, positions, (None,))
        made = self._layer(taps, positions, attend, ends_of(counts, positions.device))
        self._left.update(zip(counts, made, strict=True))


class PrefixHydraDrafter(HydraDrafter):
    """Hydra++: Hydra's heads over the output of a layer that reads the text (`prefix-mlp`)."""

    config_class = PrefixHydraConfig

    def __init__(self, config: PrefixHydraConfig) -> None:
        super().__init__(config)
        sizes = LayerSizes(
            hidden_size=config.target_hidden_size,
            intermediate_size=config.intermediate_size,
            num_attention_heads=config.query_size // config.key_size,
            num_key_value_heads=1,
            head_dim=config.key_size,
            attention_bias=config.attention_bias,
        )
        self.prefix_embeding_layer = PrefixLayer(sizes)

    def check(self, target: Any) -> None:
        super().check(target)
        config, heads = self.config, heads_of(text_config(target))
        found = tuple(heads["head_dim"] * heads[f"num_{kind}_heads"] for kind in ("attention", "key_value"))
        if found != (config.query_size, config.key_size):
            raise DraftingRefused(
                f"the target's heads make queries and keys of {found[0]} and {found[1]} numbers, this drafter's layer "
                f"{config.query_size} and {config.key_size}: it was trained for another target"
            )

    def session(self, call: Call) -> HeadsSession:
        embedding, head = call.target.get_input_embeddings(), call.target.get_output_embeddings()
        return PrefixHydraSession(self, self.borrow(embedding, head), call)

    def may_hold(self) -> dict[str, Shape]:
        [table] = super().may_hold().values()
        return {**super().may_hold(), "prefix_embeding_layer.embed_tokens.weight": table}

    def in_files(self, target_name: str = "") -> SpeculatorsFiles:
        """Returns the files with the published names, which count the layers of dropout too."""
        files = super().in_files(target_name)

        def named(name: str) -> str:
            part, _, rest = name.partition(".")
            head, *inner = rest.split(".")
            if part == "hydra_mlp":
                return ".".join([part, head, str(2 * int(inner[0]) + 1), *inner[1:]])
            return ".".join([part, head, "1", *inner]) if part == "hydra_lm_head" else name

        tensors = {named(name): each for name, each in files.tensors.items()}
        return SpeculatorsFiles(files.document, tensors)

    def document(self) -> dict[str, Any]:
        return {**super().document(), "hydra_head_arch": "prefix-mlp"}
