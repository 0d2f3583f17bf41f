"""Parameters of a hidden-state drafter; `trunk` has the computation.

There is no batch axis. Training packs documents into one row and rolls many chains at once. Decoding passes
`WorkingWeights`, made of the same parameters, to the same trunk; the package may round these to 8 bits.
`hsdraft check` compares training and decoding, apart from this rounding.

Letters in the shapes: T pairs, S chains, K draft steps, D hidden size, V' draft vocabulary, N nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import nn

from ...core.tensors import Attend, RMSNorm, Transform, side_by_side
from ..base.target_weights import StateNetwork
from .configuration_hsdraft import HSDraftConfig
from .injectors import INJECTORS, Injector
from .trunk import Layer, LayerProducts, Rope, StepProducts, Trunk, rotary_frequencies


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
