"""Parameters of a hidden-state drafter, and its token information; `trunk` has the computation.

There is no batch axis. Training packs documents into one row and rolls many chains at once. Decoding passes
`WorkingWeights`, made of the same parameters, to the same trunk; the package may round these to 8 bits.
`hsdraft check` compares training and decoding, apart from this rounding.

Token information is a low-rank logit bias computed from the tokens of a path. An injector's *state* summarises a path
up to its last token. Rejected states can be reused ("Make Every Draft Count", resampling). After a accepted tokens and
the bonus token, g_d with d > a still predicts the token at depth index d - a - 1 of the next round. It was drafted
without the tokens accepted since, so the injector supplies them.

Letters in the shapes: T pairs, S chains, K draft steps, D hidden size, V' draft vocabulary, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import nn

from ...core.tensors import Attend, RMSNorm, Transform, best_of, biased, side_by_side
from ..base.target_weights import StateNetwork, TokenHead
from .configuration_hsdraft import HSDraftConfig
from .trunk import Layer, LayerProducts, Rope, StepProducts, Trunk, rotary_frequencies


class Injector(TokenHead):
    """Base of injectors. States drafted from a root need no bias of the root's."""

    def among(self, columns: torch.Tensor) -> Transform | None:
        of_outputs = getattr(self.up, "of", None)  # of packed weights
        return None if of_outputs is None or len(columns) > 1 else of_outputs(columns[0])

    def reach(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Where the bias changes draft logits `[..., V']`: bool of the same shape; None for everywhere."""
        return None

    def told(self, logits: torch.Tensor, hidden: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Logits `[N, V']` of drafted states `[N, D]` plus the bias of the paths in `states` `[N, ...]`."""
        return biased(logits, self(hidden, states), self.reach(logits))


class LowRankInjector(Injector):
    """The bias W2 W1 e(parent) ("Make Every Draft Count", token injection)."""

    def __init__(self, config: HSDraftConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.target_hidden_size, config.rms_norm_eps)
        self.down = nn.Linear(config.target_hidden_size, config.injector_rank, bias=False)
        self.up = nn.Linear(config.injector_rank, config.draft_vocab_size, bias=False)

    def advance(self, inputs: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        return self.down(self.norm(inputs))

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return states


class PathInjector(Injector):
    """A gated network on hidden state, parent token and the path from the root.

    A small recurrent state reads the path; a gated layer combines it with the drafted state and the parent's embedding
    into a rank-r bias, so a node costs as little as in `LowRankInjector`.
    """

    def __init__(self, config: HSDraftConfig) -> None:
        super().__init__()
        size = config.injector_hidden_size
        self.token_norm = RMSNorm(config.target_hidden_size, config.rms_norm_eps)
        self.token_proj = nn.Linear(config.target_hidden_size, size, bias=False)
        self.update = nn.Linear(2 * size, 2 * size)
        self.hidden_proj = nn.Linear(config.hidden_size, 4 * size, bias=False)
        self.state_proj = nn.Linear(2 * size, 4 * size, bias=False)
        self.down = nn.Linear(2 * size, config.injector_rank, bias=False)
        self.up = nn.Linear(config.injector_rank, config.draft_vocab_size, bias=False)

    def advance(self, inputs: torch.Tensor, states: torch.Tensor | None) -> torch.Tensor:
        tokens = self.token_proj(self.token_norm(inputs))
        size = tokens.shape[-1]
        path = torch.zeros_like(tokens) if states is None else states[..., size:]
        gate, candidate = self.update(torch.cat([tokens, path], dim=-1)).chunk(2, dim=-1)
        path = torch.lerp(path, candidate.tanh(), gate.sigmoid())
        return torch.cat([tokens, path], dim=-1)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.hidden_proj(hidden)

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        gate, value = (projected + self.state_proj(states)).chunk(2, dim=-1)
        return self.down(F.silu(gate) * value)


class SelectorInjector(LowRankInjector):
    """Bias for the best candidates of a depth only, by pairs of tokens (DFlash2, candidate selector).

    With A = W1 e(parent), candidate c gets the sum over the rank of A * (P g) * B[c], g the drafted state. DFlash2
    looks A up in a table over the vocabulary and only allows candidates. Here A comes from the embedding, and other
    tokens keep their logits, so divergences from the target stay finite.
    """

    def __init__(self, config: HSDraftConfig) -> None:
        super().__init__(config)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_proj = nn.Linear(config.hidden_size, config.injector_rank, bias=False)
        self.top_k = min(config.injector_top_k, config.draft_vocab_size)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.hidden_proj(self.hidden_norm(hidden))

    def code(self, projected: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        return projected * states

    def reach(self, logits: torch.Tensor) -> torch.Tensor | None:
        return best_of(logits, self.top_k)


INJECTORS: dict[str, type[Injector]] = {
    "low_rank": LowRankInjector,
    "path": PathInjector,
    "selector": SelectorInjector,
}


@dataclass(frozen=True)
class Leftover:
    """Drafted states of one row that still predict future positions."""

    hidden: torch.Tensor  # `[K', D]`, g_{a+1} .. g_{K-1}
    path: tuple[int, ...]  # tokens accepted since these were drafted, beginning with their root

    @classmethod
    def of(cls, drafted: torch.Tensor | None, root: int, accepted: Sequence[int]) -> Leftover | None:
        """What is left of states `[K, D]` drafted from `root`, after `accepted` tokens."""
        if drafted is None or len(drafted) <= len(accepted) + 1:
            return None
        return cls(drafted[len(accepted) + 1 :], (root, *accepted))


class HSDraftAttention(nn.Module):
    def __init__(self, config: HSDraftConfig) -> None:
        super().__init__()
        query_size = config.num_attention_heads * config.head_dim
        key_size = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)


class HSDraftLayer(nn.Module):
    """Parameters of a trunk layer, computed by `LayerProducts`."""

    def __init__(self, config: HSDraftConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = HSDraftAttention(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def products(self, made_of: Callable[..., Transform]) -> LayerProducts:
        """Builds `LayerProducts`; `made_of` fuses modules that share an input."""
        attention = self.attention
        return LayerProducts(
            made_of(self.input_norm),
            made_of(attention.q_proj, attention.k_proj, attention.v_proj),
            made_of(attention.o_proj),
            made_of(self.mlp_norm),
            made_of(self.gate_proj, self.up_proj),
            made_of(self.down_proj),
            self.heads,
            self.kv_heads,
        )

    def forward(self, x: torch.Tensor, rope: Rope, attend: Attend, rows: torch.Tensor | None = None) -> torch.Tensor:
        return self.products(side_by_side)(x, rope, attend, rows)


class HSDraftStep(nn.Module):
    """Parameters of roll-out steps with separate layers (PRISM, a processing module)."""

    def __init__(self, config: HSDraftConfig) -> None:
        super().__init__()
        self.roll_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.roll_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList(HSDraftLayer(config) for _ in range(config.num_roll_layers))


class HSDraftNetwork(StateNetwork):
    """The network of a hidden-state drafter."""

    config_class = HSDraftConfig
    config: HSDraftConfig
    main_input_name = "taps"
    token_norm: RMSNorm
    _no_split_modules = ["HSDraftLayer"]  # noqa: RUF012

    def __init__(self, config: HSDraftConfig) -> None:
        config.check()  # fields may have changed since construction
        super().__init__(config)
        size, eps = config.hidden_size, config.rms_norm_eps
        self.add_fusion(reads_tokens=True)
        own_steps = config.num_step_modules > 1
        self.roll_norm = None if own_steps else RMSNorm(size, eps)
        self.roll_proj = None if own_steps else nn.Linear(size, size, bias=False)
        self.layers = nn.ModuleList(HSDraftLayer(config) for _ in range(config.num_hidden_layers))
        self.step_modules = nn.ModuleList(HSDraftStep(config) for _ in range(config.num_step_modules - 1))
        self.norm = RMSNorm(size, eps)
        self.injector = INJECTORS[config.injector](config)
        self.add_head()
        self.post_init()

    def steps(self) -> list[tuple[RMSNorm, nn.Linear, Sequence[HSDraftLayer]]]:
        """Norm, projection and layers of each parameter set, in the order of `Trunk.steps`."""
        if self.step_modules:
            return [(step.roll_norm, step.roll_proj, [*step.layers]) for step in self.step_modules]  # type: ignore
        assert self.roll_norm is not None and self.roll_proj is not None
        return [(self.roll_norm, self.roll_proj, [*self.layers][-self.config.num_roll_layers :])]

    def trunk(
        self,
        made_of: Callable[[nn.Module], Transform] = side_by_side,
        of_layer: Callable[[HSDraftLayer], Layer] = lambda layer: layer,
        fuse_inputs: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
    ) -> Trunk:
        """Builds the trunk; by default from the modules as they are.

        `made_of` converts norms and projections, `of_layer` layers; steps that share a layer share its conversion.
        `fuse_inputs` replaces the method.
        """
        of_layer = cache(of_layer)
        steps = tuple(
            StepProducts(made_of(norm), made_of(project), tuple(map(of_layer, layers)))
            for norm, project, layers in self.steps()
        )
        layers = tuple(map(of_layer, self.layers))
        return Trunk(fuse_inputs or self.fuse_inputs, layers, steps, self.frequencies())

    def frequencies(self) -> torch.Tensor:
        return rotary_frequencies(self.config.head_dim, self.config.rope_theta, self.device)


@dataclass(frozen=True)
class WorkingWeights(Trunk):
    """All weights that decoding uses; `norm` and `head` map drafted states to draft logits."""

    norm: Transform
    head: Transform
    injector: Injector

    @classmethod
    def of(cls, drafter: HSDraftNetwork, head: torch.Tensor | None) -> WorkingWeights:
        trunk = drafter.trunk(of_layer=lambda layer: layer.products(side_by_side))
        return cls(
            **vars(trunk),
            norm=drafter.norm,
            head=partial(F.linear, weight=head) if drafter.lm_head is None else drafter.lm_head,  # type: ignore[arg-type]
            injector=drafter.injector,
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Draft logits `[..., V']` of drafted states `[..., D]`, before any token information."""
        return self.head(self.norm(hidden))

    def after(self, tokens: Sequence[int], embed: Transform, state: torch.Tensor | None = None) -> torch.Tensor:
        """The injector's state `[1, S]` after tokens, from that before them; None at the start of a path."""
        for token in tokens:
            state = self.injector.advance(embed(torch.tensor([token])), state)
        assert state is not None
        return state

    def ensemble(self, logits: torch.Tensor, leftover: Leftover, root: int, weight: float, embed: Transform) -> None:
        """Form A: adds old logits to the new ones `[depth, V']` in place, matched by position and weighted by `weight`.

        The first new state has read the last accepted token `root`; the old one gets it from the injector.
        """
        hidden = leftover.hidden[: len(logits)]
        old = self.logits(hidden)
        told = self.injector.told(old[:1], hidden[:1], self.after((*leftover.path, root), embed))
        old = torch.cat([told, old[1:]])
        logits[: len(old)] = (logits[: len(old)] + weight * old) / (1.0 + weight)
