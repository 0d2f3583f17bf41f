"""Configuration of a FlashMap drafter: sizes of its network, hidden states that it reads, and times of its jumps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ...core.checks import POSITIVE, are_ascending, check_fields, choice, demand, integer, is_number, setting, settings
from ...drafters.base.decoder_layer import LayerSizes
from ...drafters.base.plain_config import PlainConfig, described
from ...drafters.base.published_config import MOST_LAYERS
from ...drafters.base.published_format import OURS, Files, told

_MOST_STEPS = 64


@described
@dataclass(frozen=True)
class FlashMapConfig(PlainConfig):
    """Configuration of a [`FlashMapDrafter`], with the field names of its files. Fields are checked on construction."""

    vocab_size: int = setting("of the target", limit=integer(2**22))
    target_hidden_size: int = setting("width of the target's hidden states and embeddings", limit=integer(2**17))
    target_layer_ids: tuple[int, ...] = setting("layers of the target, from 0, whose outputs are read; ascending")
    block_size: int = setting("number of tokens drafted at once", limit=integer(256))
    hidden_size: int = setting("width of the network", limit=integer(2**17))
    num_hidden_layers: int = setting("number of its layers", limit=integer(MOST_LAYERS))
    num_attention_heads: int = setting("number of heads of its attentions", limit=integer(2**12))
    intermediate_size: int = setting("inner width of its feed-forward blocks", limit=integer(2**20))
    jump_grids: Mapping[str, Sequence[float]] = setting("times of the jumps from 0 to 1, by the number of jumps")
    num_steps: int = setting("number of jumps of a draft", 1, integer(_MOST_STEPS))
    cond_dim: int = setting("width of embedded times", 256, integer(2**16))
    time_embed_dim: int = setting("number of waves and phases of a time", 256, integer(2**16))
    time_scale: float = setting("factor of times", 1000.0, POSITIVE)
    rope_theta: float = setting("base of the rotary embedding, which rotates neighbouring channels", 10000.0, POSITIVE)
    rms_norm_eps: float = setting("epsilon of the norms of inputs", 1e-6, POSITIVE)
    qk_norm_eps: float = setting("epsilon of the norms of queries and keys", 1e-5, POSITIVE)
    layer_norm_eps: float = setting("epsilon of the norms that times modulate", 1e-6, POSITIVE)
    noise_gate: str = setting(
        'whether noise is weighted by the length of a jump (`"jump"`)', "jump", choice("jump", "constant")
    )
    target_model: str = setting("name of the target, where it is known", "")

    last_tap_is_normed = False  # a layer's output is read, before the final norm
    target_num_hidden_layers = None
    is_reduced = False

    def __post_init__(self) -> None:
        check_fields(self)
        width, heads, layers = self.hidden_size, self.num_attention_heads, self.target_layer_ids
        demand(
            width % (2 * heads) == 0, "num_attention_heads", heads, f"pairs of hidden_size={width} must divide by it"
        )
        demand(self.time_embed_dim % 2 == 0, "time_embed_dim", self.time_embed_dim, "expected an even number")
        valid = bool(layers) and are_ascending(layers, 0, 4096)
        demand(valid, "target_layer_ids", list(layers), "expected ascending layers from 0, each once")
        for steps, grid in self.jump_grids.items():
            valid = str(len(grid) - 1) == steps and all(map(is_number, grid)) and [grid[0], grid[-1]] == [0, 1]
            valid = valid and all(before < after for before, after in itertools.pairwise(grid))
            demand(valid, "jump_grids", {steps: list(grid)}, f"expected {steps} jumps over ascending times from 0 to 1")
        self.times()

    def times(self, steps: int | None = None) -> Sequence[float]:
        """Returns the times of `steps` jumps, by default `num_steps`; a ValueError if no grid has so many.

        `steps` is the option `flow_steps`.
        """
        name, count = ("num_steps", self.num_steps) if steps is None else ("flow_steps", steps)
        known = ", ".join(sorted(self.jump_grids)) or "none"
        demand(str(count) in self.jump_grids, name, count, f"jump_grids has times for {known}")
        return self.jump_grids[str(count)]

    @property
    def num_draft_steps(self) -> int:
        return self.block_size

    @property
    def draft_vocab_size(self) -> int:
        return self.vocab_size

    @property
    def target_name(self) -> str:
        return self.target_model

    @property
    def target_tap_layers(self) -> tuple[int, ...]:
        return tuple(layer + 1 for layer in self.target_layer_ids)

    def taps_of(self, num_hidden_layers: int) -> tuple[int, ...]:
        return self.target_tap_layers

    @property
    def sizes(self) -> LayerSizes:
        heads = self.num_attention_heads
        return LayerSizes(
            self.hidden_size,
            self.intermediate_size,
            heads,
            heads,
            self.hidden_size // heads,
            self.qk_norm_eps,
            qk_norm=True,
        )

    def document(self) -> dict[str, Any]:
        """Returns the config.json as the authors' class reads it."""
        head = {"model_type": "flashmap", "architectures": ["FlashMapDraftModel"]}
        return {**head, **asdict(self)}


def _grids(files: Files, _: Any) -> Any:
    grids = files.top.table("jump_grids").values
    demand(all(isinstance(each, list) for each in grids.values()), "jump_grids", grids, "expected lists of times")
    return grids


ROWS = {
    **{each.name: told(each.name, default=OURS) for each in settings(FlashMapConfig) if each.metadata["limit"]},
    "target_layer_ids": lambda files, _: tuple(files.top.integers("target_layer_ids", most=4096)),
    "jump_grids": _grids,
    "target_model": lambda files, _: str(files.top.values.get("target_model") or ""),
}
