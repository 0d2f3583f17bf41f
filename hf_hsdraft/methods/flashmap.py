"""FlashMap drafters: a diffusion transformer jumps from noise to a block of tokens.

Parameters have the names of the authors' class. Letters in the shapes: B rows, T context positions, K slots of a block,
D width of the network, E that of the target, V vocabulary.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ..core.checks import (
    POSITIVE,
    Limit,
    are_ascending,
    check_fields,
    choice,
    demand,
    integer,
    is_integer,
    is_number,
    setting,
    settings,
)
from ..core.options import Option
from ..core.tensors import RMSNorm, batched_attention, on_device
from ..drafters.base.draft_options import DraftOptions
from ..drafters.base.plain_config import PlainConfig, described
from ..drafters.base.protocol import Ask, Call, weights_of
from ..drafters.base.target_weights import TargetWeights, borrow
from .estimate.reads import Read
from .published.context import ParallelContextSession
from .published.decoder_layer import Attention, LayerSizes, Rope, rotary_of, rotate
from .published.format_table import OURS, Files, PublishedFormat, told
from .published.network import MOST_LAYERS, PublishedNetwork, SpeculatorsFiles

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


Modulation = tuple[torch.Tensor, ...]  # scale, shift and gate, `[1, 1, D]` each
Jump = Sequence[Modulation]  # of all norms in order of computation: three a layer, and the last
Look = Callable[
    [int, torch.Tensor], torch.Tensor
]  # attention of a layer's queries `[B, K, heads, size]` to the context

FLOW_STEPS = Option(
    "flow_steps",
    None,
    Limit(
        lambda value: value is None or (is_integer(value) and value > 0),
        "a number of jumps above 0, or None for that in the drafter's files",
    ),
    "Number of jumps from noise to tokens in a draft of a FlashMap drafter.",
)
_ROWS_AT_ONCE = 2**14  # of the embedding, as its copy may be in another dtype


class PairedAttention(Attention):
    """Attention whose rotary embedding turns channels 2i and 2i + 1 together.

    They are moved to the two halves of a head, in queries and keys alike, which changes no score.
    """

    def _turned(self, x: torch.Tensor, norm: nn.Module | None, rope: Rope) -> torch.Tensor:
        heads = cast(nn.Module, norm)(x.unflatten(-1, (-1, self.head_dim)))
        return rotate(heads.unflatten(-1, (-1, 2)).mT.flatten(-2), rope)


class TimeEmbedding(nn.Module):
    """Embeds a time from 0 to 1: waves of it, and two products."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.count, self.scale = config.time_embed_dim // 2, config.time_scale
        self.linear_1 = nn.Linear(config.time_embed_dim, config.cond_dim)
        self.linear_2 = nn.Linear(config.cond_dim, config.cond_dim)

    def forward(self, time: float) -> torch.Tensor:
        """Returns `[1, 1, C]`."""
        weight = self.linear_1.weight
        frequencies = torch.exp(torch.arange(self.count, device=weight.device) * (-math.log(10000.0) / self.count))
        waves = time * self.scale * frequencies
        return self.linear_2(F.silu(self.linear_1(torch.cat([waves.cos(), waves.sin()])[None, None].to(weight.dtype))))


class ModulatedNorm(nn.Module):
    """A layer norm whose scale and shift come from the times of a jump, as does the gate of what follows."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.linear, self.eps = nn.Linear(config.cond_dim, 3 * config.hidden_size), config.layer_norm_eps

    def modulation(self, times: torch.Tensor) -> Modulation:
        return self.linear(F.silu(times)).chunk(3, dim=-1)

    def forward(self, x: torch.Tensor, modulation: Modulation) -> torch.Tensor:
        scale, shift, _ = modulation
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * (1 + scale) + shift


class FlowLayer(nn.Module):
    """Attention among the slots of a block, attention to the context, and a feed-forward block."""

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__()
        self.self_attn_adaln, self.self_attn = ModulatedNorm(config), PairedAttention(config.sizes)
        self.cross_attn_adaln, self.cross_attn = ModulatedNorm(config), PairedAttention(config.sizes)
        self.mlp_adaln = ModulatedNorm(config)
        inner, width = config.intermediate_size, config.hidden_size
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(width, inner), "fc2": nn.Linear(inner, width)})

    @property
    def norms(self) -> Sequence[ModulatedNorm]:
        return self.self_attn_adaln, self.cross_attn_adaln, self.mlp_adaln

    def forward(self, x: torch.Tensor, jump: Jump, rope: Rope, look: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Returns the slots `[B, K, D]` after this layer; `look` attends to its context."""
        first, second, third = jump

        def among(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, _: Any) -> torch.Tensor:
            return batched_attention(queries, keys.transpose(1, 2), values.transpose(1, 2))

        x = x + first[2] * self.self_attn(self.self_attn_adaln(x, first), rope, among)
        mixed = look(self.cross_attn.queries(self.cross_attn_adaln(x, second), rope))
        x = x + second[2] * self.cross_attn.o_proj(mixed)
        return x + third[2] * self.mlp["fc2"](F.gelu(self.mlp["fc1"](self.mlp_adaln(x, third))))


class FlashMapDrafter(PublishedNetwork):
    """Drafts a whole block of tokens from noise, in one jump or a few (FlashMap).

    Reads hidden states of the target, and borrows its embedding and output layer. Drafting options are in
    `generation_config`, as for every drafter. `AutoDrafter` loads published drafters unchanged, and they are saved as
    they were published.
    """

    config_class = FlashMapConfig
    why_not_refined = ""
    own_options = (FLOW_STEPS,)
    saved_as = ()

    def __init__(self, config: FlashMapConfig) -> None:
        super().__init__(config)
        width, target = config.hidden_size, config.target_hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * target, width, bias=False)
        self.hidden_norm = RMSNorm(width, config.rms_norm_eps)
        self.anchor_proj, self.anchor_norm = nn.Linear(target, width), RMSNorm(width, config.rms_norm_eps)
        self.state_norm, self.noise_norm = (RMSNorm(target, config.rms_norm_eps) for _ in range(2))
        self.noise_gate = nn.Parameter(torch.ones(1))
        self.x_embed = nn.Linear(target, width)
        self.time_embed, self.jump_embed = TimeEmbedding(config), TimeEmbedding(config)
        self.layers = nn.ModuleList(FlowLayer(config) for _ in range(config.num_hidden_layers))
        self.final_adaln = ModulatedNorm(config)
        self.head = nn.Linear(width, target)
        rope = {"rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"}}
        self.rotary = rotary_of(rope, config.sizes)

    @classmethod
    def at_once(cls, config: Any) -> bool:
        return True

    @torch.no_grad()
    def jump(self, start: float, end: float) -> Jump:
        """Returns what the times of a jump make of all norms."""
        times = self.time_embed(start) + self.jump_embed(end)
        norms = [norm for layer in self.layers for norm in cast(FlowLayer, layer).norms]
        return [norm.modulation(times) for norm in (*norms, self.final_adaln)]

    def read(self, taps: torch.Tensor) -> torch.Tensor:
        """Returns context states `[T, D]` from the target's hidden states `[T, taps * E]`."""
        return self.hidden_norm(self.fc(taps))

    def read_anchors(self, embeds: torch.Tensor) -> torch.Tensor:
        """Returns context states `[..., D]` of last accepted tokens, which the target has not read, `[..., E]`."""
        return self.anchor_norm(self.anchor_proj(embeds))

    def context_keys(self, index: int, states: torch.Tensor, rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns a layer's keys and values `[..., heads, head_dim]` of context states `[..., D]`."""
        attention = cast(FlowLayer, self.layers[index]).cross_attn
        return attention.keys(states, rope), attention.values(states)

    def inputs(self, likely: torch.Tensor, noise: torch.Tensor, start: float, end: float) -> torch.Tensor:
        """Returns inputs `[B, K, E]` of a jump from embeddings of the likely tokens and of the noisy state."""
        length = 1.0 if self.config.noise_gate == "constant" else end - start
        return self.state_norm(likely) + (self.noise_gate * length) * self.noise_norm(noise)

    def run(self, inputs: torch.Tensor, jump: Jump, positions: torch.Tensor, look: Look) -> torch.Tensor:
        """Returns the states `[B, K, E]` that the target's head reads, of slots at positions `[B, K]`."""
        x, rope = self.x_embed(inputs), self.rotary(positions, inputs.dtype)
        for index, layer in enumerate(self.layers):
            x = layer(x, jump[3 * index : 3 * index + 3], rope, lambda queries, index=index: look(index, queries))
        return self.head(self.final_adaln(x, jump[-1]))

    def borrow(self, embedding: nn.Module, output_head: nn.Module | None, scaled: bool = True) -> TargetWeights:
        """Collects the target's embedding and output rows; arguments as those of `target_weights.borrow`."""
        ids = self.draft_vocab_ids()
        return borrow(cast(nn.Embedding, embedding), output_head, ids, self.device, self.dtype, scaled)

    def in_files(self, target_name: str = "") -> SpeculatorsFiles:
        """Returns the contents of its files, in the format of its authors."""
        config = replace(self.config, target_model=target_name or self.config.target_model)
        return SpeculatorsFiles(config.document(), self.state_dict())

    def check_together(self, options: DraftOptions) -> None:
        super().check_together(options)
        self.config.times(options.own.get(FLOW_STEPS.name))

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        config, steps = self.config, getattr(self.generation_config, FLOW_STEPS.name, None) or self.config.num_steps
        head = config.vocab_size * config.target_hidden_size
        layers = weights_of(self.layers, self.x_embed, self.head)
        return (
            Read("fusion", weights_of(self.fc), 1, 1),
            Read("layers", layers, steps, config.block_size),
            Read("head", head, steps, config.block_size, borrowed=True),
        )

    def session(self, call: Call) -> FlashMapSession:
        embedding, head = call.target.get_input_embeddings(), call.target.get_output_embeddings()
        return FlashMapSession(self, self.borrow(embedding, head), embedding, call)


def embedded(states: torch.Tensor, embed: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns weighted sums `[..., E]` of the embeddings of all tokens, by weights `[..., V]`."""
    size, total = states.shape[-1], None
    for begin in range(0, size, _ROWS_AT_ONCE):
        rows = embed(torch.arange(begin, min(begin + _ROWS_AT_ONCE, size), device=states.device))
        part = states[..., begin : begin + _ROWS_AT_ONCE].to(rows.dtype) @ rows
        total = part if total is None else total + part
    assert total is not None
    return total


class FlashMapSession(ParallelContextSession):
    """Drafts trees (or chains) for a batch, a block of each row from the same noise.

    The noise is drawn once, by a fixed seed, so it depends on no random number of the call. Given the noise, the slots
    of a block are independent, and their probabilities are known.
    """

    def __init__(self, drafter: FlashMapDrafter, weights: TargetWeights, embedding: Any, call: Call) -> None:
        super().__init__(drafter, weights, call, drafter.config.num_hidden_layers)
        config = drafter.config
        steps = self._options.own.get(FLOW_STEPS.name)
        self._embed = drafter.borrow(embedding, None, scaled=False).embed
        self._times = list(itertools.pairwise(config.times(steps)))
        self._jumps = [drafter.jump(*times) for times in self._times]
        self._noise, self._first = self._begin(embedding)
        self._slots = torch.arange(1, config.block_size + 1, device=drafter.device)
        self.kind = config.sizes, config.num_hidden_layers, config.block_size, len(self._times), drafter.dtype

    def _begin(self, embedding: Any) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Returns the noise `[K, V]`, and sums of embeddings `[1, K, E]` by it and `[1, 1, E]` by equal weights.

        They read the whole embedding, so they are kept until it changes.
        """
        config, place = self.drafter.config, (self.drafter.dtype, self.drafter.device)
        weight = getattr(embedding, "weight", embedding)  # a module of the user's own may have none
        plain = type(weight) in (torch.Tensor, nn.Parameter) and not (weight.is_meta or weight.is_inference())
        form = (weight.data_ptr(), weight._version, config.block_size, *place) if plain else None
        made = _begun.get(embedding)
        if form is None or made is None or made[0]() is not weight or made[1] != form:
            generator = torch.Generator().manual_seed(0)
            noise = torch.randn(config.block_size, config.vocab_size, generator=generator).to(self.drafter.device)
            even = noise.new_full((1, config.vocab_size), 1.0 / config.vocab_size)
            with torch.inference_mode(False), torch.no_grad():
                sums = embedded(torch.cat([noise, even]), self._embed)[None].split([config.block_size, 1], dim=1)
            made = _begun[embedding] = weakref.ref(weight), form, noise, sums
        return made[2], made[3]

    def predicted(self, hidden: torch.Tensor, depth: int) -> tuple[torch.Tensor, None]:
        assert self.weights.head is not None
        return F.linear(hidden[:, :depth], self.weights.head), None

    def drafted(self, asks: Sequence[Ask], depth: int) -> torch.Tensor:
        """Returns all slots of a block, whatever the depth: they see each other."""
        rows, drafter = [ask.row for ask in asks], self.drafter
        self.read_pending(rows)
        anchors = self.anchors(rows)
        look, positions = self._look(rows, asks, anchors), anchors + self._slots
        noise, even = self._first
        inputs, state = drafter.inputs(even, noise, *self._times[0]).expand(len(rows), -1, -1), self._noise
        for index, (start, end) in enumerate(self._times):
            hidden = drafter.run(inputs, self._jumps[index], positions, look)
            if end < 1:
                likely = self.predicted(hidden, len(self._slots))[0].float().softmax(dim=-1)
                state = ((1 - end) * state + (end - start) * likely) / (1 - start)
                inputs = self._inputs(state, *self._times[index + 1])
        return hidden

    def _inputs(self, state: torch.Tensor, start: float, end: float) -> torch.Tensor:
        """Returns inputs `[B, K, E]` of a later jump from a state `[B, K, V]`."""
        likely = (state * (start / max(1 - start, 1e-3) ** 2)).softmax(dim=-1)
        return self.drafter.inputs(embedded(likely, self._embed), embedded(state, self._embed), start, end)

    def _look(self, rows: Sequence[int], asks: Sequence[Ask], anchors: torch.Tensor) -> Look:
        """Returns the attention to the accepted positions and to the anchors, whose positions are `[B, 1]`."""
        drafter, context = self.drafter, self._context
        embeds = self.weights.embed(on_device([[ask.root] for ask in asks], drafter.device))
        states, rope = drafter.read_anchors(embeds), drafter.rotary(anchors, embeds.dtype)
        seen = context.seen(rows, anchors)
        mask = None if seen is None else F.pad(seen, (0, 1), value=True).expand(-1, len(self._slots), -1)

        def look(index: int, queries: torch.Tensor) -> torch.Tensor:
            own = drafter.context_keys(index, states, rope)
            sides = zip(context.view(index, rows), own, strict=True)
            keys, values = (torch.cat([before, each.transpose(1, 2)], dim=2) for before, each in sides)
            return batched_attention(queries, keys, values, mask)

        return look


# By embedding: what the noise and sums were made of, and these
_begun: weakref.WeakKeyDictionary[nn.Module, tuple[Any, Any, torch.Tensor, Sequence[torch.Tensor]]] = (
    weakref.WeakKeyDictionary()
)


PublishedFormat(
    "FlashMap", 30, lambda checkpoint: checkpoint.config.get("model_type") == "flashmap", FlashMapDrafter, ROWS
).register()
