"""Drafters that are heads over the target's last hidden state, and their session; parameters as in published files.

From h_{t-1}, the state that the last accepted token x_t was predicted from, head d predicts x_{t+d}. Medusa's heads
read that state alone, so all depths are drafted at once. The others read the path's tokens too, one depth after the
other: a node has a state, from which its children are predicted.

Letters in the shapes: B texts, n nodes, H width of the target, S size of a node's state, V' draft vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import nn

from ...core.checks import POSITIVE, integer, public_name, setting
from ...core.draft_tree import Expansion
from ...drafters.base.draft_options import DraftOptions
from ...drafters.base.plain_config import described
from ...drafters.base.protocol import Accepted, Ask, Call, weights_of
from ...drafters.base.target_weights import TargetWeights, borrow
from ...drafters.base.tree_session import Columns
from ...hub.drafter_files import Shape
from ..estimate.reads import Read
from ..published.checkpoint import AnyCheckpoint
from ..published.context import ParallelContextSession, Slots
from ..published.levels import LevelExpansion
from ..published.network import TOKEN_MAP, PublishedNetwork, SpeculatorsFiles, offsets_listed
from ..published.nodes import ends_of
from ..published.target_sizes import FLAG, TargetSizes


class HeadsSession(ParallelContextSession):
    """Drafts trees (or chains) for a batch from the last hidden state of each row."""

    reading_layers = 0  # that attend to the text

    def __init__(self, drafter: Any, weights: TargetWeights, call: Call) -> None:
        super().__init__(drafter, weights, call, self.reading_layers)
        config = drafter.config
        sizes = config.target_hidden_size, config.draft_vocab_size, config.num_draft_steps
        self.kind = type(drafter).__name__, *sizes, drafter.dtype, drafter.device

    def columns(self, news: Accepted) -> Columns:
        taps, positions = super().columns(news)
        return taps[-1:], positions[-1:]  # the others are never read

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        self._left.update(zip(counts, columns[0][ends_of(counts, columns[0].device)], strict=True))  # `[H]` each

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        network, rows, depth = self.drafter, [ask.row for ask in asks], min(depth, self.drafter.num_draft_steps)
        self.read_pending(rows)
        started = network.start(torch.stack([self._left[row] for row in rows])[:, None])

        def levels(level: int, tokens: torch.Tensor, states: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            states = network.advance(level, started if states is None else states, tokens, self.weights)
            return network.logits_at(level, states, self.weights), states

        if network.reads_tokens:
            return LevelExpansion(levels, depth, options.temperature, self.race(rows, depth))
        logits = [network.logits_at(level, started, self.weights) for level in range(1, depth + 1)]
        return self.expanded(asks, started, options, torch.cat(logits, dim=1), None)


MOST_HEADS = 32
_EPSILON = 1e-6  # of the norms of MLP and LSTM speculators


@described
@dataclass(frozen=True, kw_only=True)
class HeadsConfig(TargetSizes):
    """What the configurations of these drafters share; as `TargetSizes`."""

    model_type: ClassVar[str] = "heads"
    mask_token_id: ClassVar[None] = None
    target_tap_layers: ClassVar[None] = None

    num_draft_steps: int = setting("number of heads, the greatest depth of a draft", limit=integer(MOST_HEADS))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_drafted()

    @property
    def last_tap_is_normed(self) -> bool:
        return True

    def taps_of(self, num_hidden_layers: int) -> tuple[int, ...]:
        """Returns the hidden states that it reads of a target with so many layers."""
        return (num_hidden_layers,)


class HeadsDrafter(PublishedNetwork):
    """What these drafters share. `AutoDrafter` loads published ones; they are saved in their authors' format."""

    config_class: Any = HeadsConfig
    saved_as = ()
    reads_tokens = True  # whether heads read the tokens of a path

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what `advance` reads at the roots, `[B, 1, S']`, of hidden states `[B, 1, H]`."""
        return hidden

    def advance(self, level: int, states: torch.Tensor, tokens: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        """Returns the states `[B, n, S]` of nodes with `tokens` `[B, n]`, int64, whose children are at depth `level`.

        `states` are those of their parents; of roots, at level 1, what `start` returned.
        """
        return states

    def logits_at(self, level: int, states: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        """Returns the logits `[B, n, V']` of the children, at depth `level`, of nodes in `states`."""
        raise NotImplementedError

    def document(self) -> dict[str, Any]:
        """Returns config.json of its files, without sizes and the target's name."""
        raise NotImplementedError

    def in_files(self, target_name: str = "") -> SpeculatorsFiles:
        target = public_name(target_name or self.config.target_name) or None
        sizes = {"vocab_size": self.config.vocab_size, "base_model_name_or_path": target}
        document = {**self.document(), **sizes, "dtype": str(self.dtype).removeprefix("torch.")}
        return SpeculatorsFiles(document, self.state_dict())

    def may_hold(self) -> dict[str, Shape]:
        return {}

    @classmethod
    def at_once(cls, config: Any) -> bool:
        return not cls.reads_tokens

    def borrow(self, embedding: nn.Module, output_head: nn.Module | None = None) -> TargetWeights:
        """Collects the target's embedding, and its output rows if the drafter has no output layers."""
        tokens = len(cast(torch.Tensor, embedding.weight)) if self.config.vocab_size is None else None
        head = None if tokens is None else output_head
        return borrow(embedding, head, self.draft_vocab_ids(tokens), self.device, self.dtype)

    def session(self, call: Call) -> HeadsSession:
        embedding, head = call.target.get_input_embeddings(), call.target.get_output_embeddings()
        return HeadsSession(self, self.borrow(embedding, head), call)

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        tables = (weights_of(each) for each in self.modules() if isinstance(each, nn.Embedding))
        each = (weights_of(self) - sum(tables)) // self.config.num_draft_steps
        return (Read("heads", each, depth, width if self.reads_tokens else 1),)


class ResBlock(nn.Module):
    """A product with SiLU beside a residual, which is a product too where the input is wider than the output."""

    def __init__(self, size: int, parts: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(parts * size, size, bias=bias)
        self.res_connection = nn.Linear(parts * size, size) if parts > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rest = x if self.res_connection is None else self.res_connection(x)
        return rest + F.silu(self.linear(x))


@described
@dataclass(frozen=True, kw_only=True)
class MedusaConfig(HeadsConfig):
    """Configuration of a [`MedusaDrafter`]."""

    num_layers: int = setting("number of blocks before each output layer", 1, limit=integer(8))
    block_bias: bool = setting("whether the products of the blocks have a bias", True, FLAG)
    one_head: bool = setting("whether all heads share an output layer", False, FLAG)
    logit_scale: float = setting("factor of the logits", 1.0, limit=POSITIVE)


class MedusaDrafter(HeadsDrafter):
    """Medusa's heads, each of the hidden state alone ("Medusa", section 2.1.1): drafts all depths at once.

    Without output layers, as TGI trains it, it uses the target's. It is saved in the layout that vLLM reads.
    """

    config_class = MedusaConfig
    reads_tokens = False
    why_not_refined = "its heads have no width that a refiner was trained for"

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        size, count = config.target_hidden_size, config.num_draft_steps
        make = lambda: nn.ModuleList(nn.Linear(size, size, config.block_bias) for _ in range(config.num_layers))  # noqa: E731
        self.blocks = nn.ModuleList(nn.ModuleDict({"layers": make()}) for _ in range(count))
        tokens, outputs = config.draft_vocab_size or 0, 1 if config.one_head else count
        self.lm_heads = nn.ModuleList(nn.Linear(size, tokens, bias=False) for _ in range(outputs if tokens else 0))
        self.add_vocabulary()

    def logits_at(self, level: int, states: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        for layer in cast(nn.ModuleDict, self.blocks[level - 1])["layers"]:  # type: ignore[attr-defined]
            states = states + F.silu(layer(states))
        if not self.lm_heads:
            logits = F.linear(states, cast(torch.Tensor, weights.head))
        else:
            logits = self.lm_heads[0 if self.config.one_head else level - 1](states)
        return logits if self.config.logit_scale == 1.0 else logits * self.config.logit_scale

    def not_among_weights(self, checkpoint: AnyCheckpoint) -> Mapping[str, Callable[[Mapping[str, Any]], torch.Tensor]]:
        """See `PublishedNetwork`. vLLM's files name the drafted tokens themselves."""
        is_reduced, size = self.config.is_reduced, self.config.vocab_size or 0
        return {"d2t": lambda _: offsets_listed(checkpoint, size)} if is_reduced else {}

    def may_hold(self) -> dict[str, Shape]:
        return {TOKEN_MAP: (self.config.draft_vocab_size or 0,)}

    def in_files(self, target_name: str = "") -> SpeculatorsFiles:
        files = super().in_files(target_name)
        tensors = dict(files.tensors)
        if tensors.pop("d2t", None) is not None:
            tensors[TOKEN_MAP] = self.draft_vocab_ids()
        return replace(files, tensors=tensors)

    def document(self) -> dict[str, Any]:
        config = self.config
        return {
            "model_type": "medusa", "architectures": ["MedusaModel"], "hidden_size": config.target_hidden_size,
            "num_heads": config.num_draft_steps, "num_hidden_layers": config.num_layers,
            "truncated_vocab_size": config.draft_vocab_size, "medusa_fc_bias": config.block_bias,
            "original_lm_head": config.one_head, "logit_scale": config.logit_scale,
        }  # fmt: skip


@described
@dataclass(frozen=True, kw_only=True)
class HydraConfig(HeadsConfig):
    """Configuration of a [`HydraDrafter`]."""

    num_layers: int = setting("number of blocks before each output layer", 1, limit=integer(8))
    grounded: bool = setting("whether heads read the tokens of the path", True, FLAG)
    offset: int = setting("number of the target's last layers whose outputs are not read", 0, limit=integer(2**12, 0))

    @property
    def last_tap_is_normed(self) -> bool:
        return self.offset == 0

    def taps_of(self, num_hidden_layers: int) -> tuple[int, ...]:
        return (num_hidden_layers - self.offset,)


class HydraDrafter(HeadsDrafter):
    """Hydra's heads ("Hydra", section 3): head d reads the hidden state and the embeddings of the d tokens after it."""

    config_class = HydraConfig

    def __init__(self, config: HydraConfig) -> None:
        super().__init__(config)
        size, count = config.target_hidden_size, config.num_draft_steps
        self.hydra_mlp = nn.ModuleList(
            nn.ModuleList(
                ResBlock(size, index + 2 if config.grounded and not layer else 1) for layer in range(config.num_layers)
            )
            for index in range(count)
        )
        self.hydra_lm_head = nn.ModuleList(nn.Linear(size, config.draft_vocab_size or 0) for _ in range(count))
        self.reads_tokens = config.grounded

    @classmethod
    def at_once(cls, config: Any) -> bool:
        return not config.grounded

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        room = self.config.num_draft_steps * hidden.shape[-1] if self.reads_tokens else 0
        return F.pad(hidden, (0, room))

    def advance(self, level: int, states: torch.Tensor, tokens: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        size, states = self.config.target_hidden_size, states.clone()
        states[..., level * size : (level + 1) * size] = weights.embed(tokens)
        return states

    def logits_at(self, level: int, states: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        x = states[..., : (level + 1) * self.config.target_hidden_size] if self.reads_tokens else states
        for block in cast(nn.ModuleList, self.hydra_mlp[level - 1]):
            x = block(x)
        return self.hydra_lm_head[level - 1](x)

    def may_hold(self) -> dict[str, Shape]:
        return {"input_embed_fn.weight": (self.config.vocab_size, self.config.target_hidden_size)}  # the target's

    def document(self) -> dict[str, Any]:
        config = self.config
        return {
            "hydra_num_heads": config.num_draft_steps, "hydra_num_layers": config.num_layers,
            "hydra_head_arch": "mlp", "grounded_heads": config.grounded, "hidden_state_offset": config.offset,
        }  # fmt: skip


@described
@dataclass(frozen=True, kw_only=True)
class MLPSpeculatorConfig(HeadsConfig):
    """Configuration of an [`MLPSpeculatorDrafter`] or an [`LSTMSpeculatorDrafter`]."""

    inner_size: int = setting("S, width of a node's state", limit=integer(2**17))
    tied: bool = setting("whether the heads share their weights, but for the first projection", False, FLAG)
    scale_input: bool = setting("whether the hidden state is normed first", False, FLAG)

    @property
    def token_weight(self) -> float:
        """Weight of a token's embedding beside the projected state, which it is to change by a part of all heads."""
        state = 0.5 ** (0.5 / self.num_draft_steps)
        return math.sqrt((1 - state**2) * (self.inner_size / 2)) / state


class ShiftedNorm(nn.Module):
    """An RMSNorm with a bias."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(size)), nn.Parameter(torch.zeros(size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + _EPSILON) * self.weight + self.bias


class MLPSpeculatorDrafter(HeadsDrafter):
    """IBM's MLP speculator ("Accelerating Production LLMs with Combined Token/Embedding Speculators")."""

    config_class = MLPSpeculatorConfig
    architecture = "MLPSpeculatorPreTrainedModel"

    def __init__(self, config: MLPSpeculatorConfig) -> None:
        super().__init__(config)
        size, inner, vocabulary = config.target_hidden_size, config.inner_size, config.vocab_size or 0
        count = 1 if config.tied else config.num_draft_steps
        self.emb = nn.ModuleList(nn.Embedding(vocabulary, inner) for _ in range(count))
        widths = [size, *[inner] * (min(config.num_draft_steps, 2) - 1 if config.tied else count - 1)]
        self.proj = nn.ModuleList(nn.Linear(width, inner, bias=False) for width in widths)
        self.ln = nn.ModuleList(ShiftedNorm(inner) for _ in range(count))
        self.head = nn.ModuleList(nn.Linear(inner, vocabulary, bias=False) for _ in range(count))

    def start(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.config.scale_input:
            return hidden
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + _EPSILON) / 2**0.5

    def advance(self, level: int, states: torch.Tensor, tokens: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        projected = self.proj[min(level, len(self.proj)) - 1](states)
        embeds = self.emb[self._place(level)](tokens.to(self.device))
        return F.gelu(self.ln[self._place(level)](projected + self.config.token_weight * embeds))

    def logits_at(self, level: int, states: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        return self.head[self._place(level)](states)

    def _place(self, level: int) -> int:
        return 0 if self.config.tied else level - 1

    def may_hold(self) -> dict[str, Shape]:
        """Tied weights may be stored several times."""
        config, again = self.config, range(self.config.num_draft_steps)
        table, norm = (config.vocab_size, config.inner_size), (config.inner_size,)
        shapes: dict[str, Shape] = {}
        for index in again if config.tied else ():
            shapes |= {f"emb.{index}.weight": table, f"head.{index}.weight": table}
            shapes |= {f"ln.{index}.weight": norm, f"ln.{index}.bias": norm}
            shapes |= {f"proj.{index}.weight": (config.inner_size, config.inner_size)} if index else {}
        return shapes | {f"speculator.{name}": shape for name, shape in shapes.items()}

    def document(self) -> dict[str, Any]:
        config = self.config
        return {
            "model_type": "mlp_speculator", "architectures": [self.architecture],
            "emb_dim": config.target_hidden_size, "inner_dim": config.inner_size,
            "n_predict": config.num_draft_steps, "tie_weights": config.tied, "scale_input": config.scale_input,
        }  # fmt: skip


_GATES = ("forget", "input", "output", "cell")


class LSTMSpeculatorDrafter(MLPSpeculatorDrafter):
    """Snowflake's LSTM speculator (Arctic Speculator): states and cells; all depths but the first share weights."""

    architecture = "ArcticLSTMSpeculatorPreTrainedModel"

    def __init__(self, config: MLPSpeculatorConfig) -> None:
        HeadsDrafter.__init__(self, config)
        inner, widths = config.inner_size, (config.target_hidden_size, config.inner_size)
        self.forget_emb = nn.ModuleList([nn.Embedding(config.vocab_size or 0, inner)])
        for gate in _GATES:
            setattr(self, f"{gate}_proj", nn.ModuleList(nn.Linear(width, inner, bias=False) for width in widths))
        self.cell_ln, self.state_ln = nn.ModuleList([ShiftedNorm(inner)]), nn.ModuleList([ShiftedNorm(inner)])
        self.head = nn.ModuleList([nn.Linear(inner, config.vocab_size or 0, bias=False)])

    def advance(self, level: int, states: torch.Tensor, tokens: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        inner = self.config.inner_size
        states, cells = (states, 0.0) if level == 1 else (states[..., :inner], states[..., inner:])
        token = self.config.token_weight * self.forget_emb[0](tokens.to(self.device))
        added = [getattr(self, f"{gate}_proj")[min(level, 2) - 1](states) + token for gate in _GATES]
        forget, taken, out = (gate.sigmoid() for gate in added[:3])
        cells = cells * forget + F.gelu(self.cell_ln[0](added[3])) * taken
        return torch.cat([F.gelu(self.state_ln[0](cells)) * out, cells], dim=-1)

    def logits_at(self, level: int, states: torch.Tensor, weights: TargetWeights) -> torch.Tensor:
        return self.head[0](states[..., : self.config.inner_size])

    def may_hold(self) -> dict[str, Shape]:
        """The other gates' embeddings, which are tied, and heads that are stored again."""
        table, again = (self.config.vocab_size, self.config.inner_size), range(self.config.num_draft_steps)
        names = [f"{gate}_emb.0.weight" for gate in _GATES] + [f"head.{index}.weight" for index in again]
        return {prefix + name: table for name in names for prefix in ("", "speculator.")}

    def document(self) -> dict[str, Any]:
        size, inner = self.config.target_hidden_size, self.config.inner_size
        dims = {"input_hidden_dim": size, "inner_dim": inner, "proj_dim": inner, "emb_dim": inner}
        return {**super().document(), **dims, "method": "sum_lstm", "tie_lstm_embs": True}
