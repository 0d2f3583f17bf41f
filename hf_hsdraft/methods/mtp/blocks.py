"""Decoder layers for multi-token prediction that differ from the target's own, made of its modules.

| type | its own layers | these layers |
|---|---|---|
| `longcat_flash` | two attentions, three feed-forward blocks | one attention, one feed-forward block |
| `hy_v4` | one of each, between which several streams of states are mixed | one of each, on one stream |
| `glm5_next` | linear attention or attention to groups of keys, on several streams | the second, on one stream |
| `qwen4_exp` | linear attention or attention to groups of keys, on several streams | the second, likewise on several |
| `nemotron_h` | one part (Mamba, attention, experts), behind a norm | several parts, by default attention and experts |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...core.checks import demand

PARTS = "mtp_layers_block_type"  # field of Nemotron-H: types of the parts of a layer


def single_attention(decoder: Any) -> type[nn.Module]:
    """Returns the class of a layer with one attention and plain residuals, for `MtpModel`."""
    own = next(each for each in reversed(decoder.layers) if getattr(each, "block_type", "") != "linear_attention")
    parts = own.self_attn, getattr(own, "mlps", own.mlp), own.input_layernorm
    attention, feed_forward, norm = (type(each[0] if isinstance(each, nn.ModuleList) else each) for each in parts)

    class SingleAttention(nn.Module):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__()
            self.self_attn, self.mlp = attention(config=config, layer_idx=layer_idx), feed_forward(config)
            self.input_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)
            self.post_attention_layernorm = norm(config.hidden_size, eps=config.rms_norm_eps)

        def forward(self, x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            x = x + self.self_attn(hidden_states=self.input_layernorm(x), **kwargs)[0]
            return x + self.mlp(self.post_attention_layernorm(x))

    return SingleAttention


def several_streams(decoder: Any) -> type[nn.Module]:
    """Returns the class of a layer on several streams (Qwen4-Exp), side by side, for `MtpModel`."""
    return type(decoder.layers[-1])


class _StreamsProjection(nn.Module):
    """Adds the projected embedding `[..., D]` to each of the projected streams `[..., streams * D]` behind it."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.fc_embedding, self.fc_hidden = (nn.Linear(size, size, bias=False) for _ in range(2))

    def forward(self, pair: torch.Tensor) -> torch.Tensor:
        embed, *streams = pair.split(self.fc_hidden.in_features, dim=-1)
        return (self.fc_hidden(torch.stack(streams, dim=-2)) + self.fc_embedding(embed).unsqueeze(-2)).flatten(-2)


def around_streams(layer: Any, decoder: Any) -> None:
    """Replaces what `MtpModel` has around a layer: one norm of all streams, a projection, and a mixer as last norm."""
    config, mixer = layer.config, decoder.hyper_connection_mixer
    layer.hnorm = type(layer.hnorm)(config.hc_count * config.hidden_size, eps=config.rms_norm_eps)
    layer.eh_proj = _StreamsProjection(config.hidden_size)
    layer.post_norm = type(mixer)(config, use_combine=False)


def parts_in_turn(decoder: Any) -> type[nn.Module]:
    """Returns the class of a layer of several parts (Nemotron-H), for `MtpModel`."""
    part = type(decoder.layers[0])

    class PartsInTurn(nn.Module):
        def __init__(self, config: Any, layer_idx: int) -> None:
            super().__init__()
            kinds, types = config.layer_types, getattr(config, PARTS)
            whole = types.count("full_attention") == 1 and "linear_attention" not in types
            demand(whole, PARTS, types, "expected one attention and no Mamba, whose states are not kept by node")
            config.layer_types = types
            self.parts = nn.ModuleList(part(config, index) for index in range(len(types)))
            config.layer_types = kinds
            mixers: list[Any] = [each.mixer for each in self.parts]
            for mixer in mixers:
                mixer.layer_idx = layer_idx  # its place in the cache

        def forward(self, x: torch.Tensor, position_embeddings: Any = None, **kwargs: Any) -> torch.Tensor:
            for each in self.parts:
                x = each(x, **kwargs)
            return x

    return PartsInTurn


class DecoderOf:
    """A decoder as `MtpModel` takes it: the class of its last layer is that of these layers."""

    def __init__(self, decoder: Any, config: Any, make: Any) -> None:
        self._decoder = decoder
        with torch.device("meta"):
            self.layers = [make(decoder)(config, 0)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._decoder, name)


def place_of_part(config: Any, number: int, rest: str, outer: tuple[str, ...]) -> tuple[int, str]:
    """Returns the layer of a part by its published number, and the name of a tensor within it."""
    count = len(getattr(config, PARTS))
    return number // count, rest if rest.startswith(outer) else f"parts.{number % count}.{rest}"
