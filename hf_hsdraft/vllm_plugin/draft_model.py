"""A hidden-state drafter as a draft model of vLLM, in place of an EAGLE-3 drafter.

vLLM calls the model once for the accepted positions, then once for each further depth of a chain, with the token
drafted before. Keys and values are vLLM's, one slot per position. The state between steps is in the vector that vLLM
passes on: `[g | injector's state | number of the step]`. In the first call the joined taps are in place of g.

Letters in the shapes: n positions, D hidden size, S size of the injector's state, r its rank, V' draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM
from vllm.model_executor.models.utils import maybe_prefix

from ..drafters.hidden_state.configuration_hsdraft import HSDraftConfig
from ..drafters.hidden_state.network import HSDraftNetwork
from ..drafters.hidden_state.trunk import rotary_embedding
from .speculation import state_width


class DraftTrunk(nn.Module):
    """The drafter's network, with attention to vLLM's keys and values.

    `first_layer` is vLLM's number of the first layer; the target's layers come before.
    """

    def __init__(self, vllm_config: Any, config: HSDraftConfig, first_layer: int, prefix: str) -> None:
        super().__init__()
        self.network = HSDraftNetwork(config)
        self.embed_tokens = VocabParallelEmbedding(
            config.vocab_size, config.target_hidden_size
        )  # vLLM replaces it by the target's
        self.attention = nn.ModuleList(
            Attention(
                config.num_attention_heads,
                config.head_dim,
                config.head_dim**-0.5,
                config.num_key_value_heads,
                cache_config=vllm_config.cache_config,
                per_layer_sliding_window=config.sliding_window,
                prefix=maybe_prefix(prefix, f"layers.{first_layer + number}.self_attn.attn"),
            )
            for number in range(config.num_hidden_layers)
        )

    def joined(self, taps: torch.Tensor) -> torch.Tensor:
        """Returns the contribution of taps `[n, taps * D]` to the inputs of the trunk, `[n, D]`."""
        norms = self.network.tap_norms
        parts = [norm(tap) for norm, tap in zip(norms, taps.chunk(len(norms), dim=-1), strict=True)]
        return F.linear(torch.cat(parts, dim=-1), self.network.fuse.weight[:, : taps.shape[-1]])

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads accepted positions, or runs one draft step.

        Args:
            tokens: `[n]`, in the first call the token after each position, then the token drafted before.
            positions: `[n]`, int64.
            before: `[n, D + S + 1]`, passed on by the previous call, or from `combine_hidden_states`.

        Returns:
            `[n, D + r]`, the normed state and the code of the token information; and what is passed on.
        """
        network = self.network
        size = network.config.hidden_size
        state, injected, number = before[:, :size], before[:, size:-1], before[:, -1:]
        embeds, reads = self.embed_tokens(tokens), number == 0
        own = embeds.shape[-1]
        read = state + F.linear(network.token_norm(embeds), network.fuse.weight[:, -own:])
        [(norm, project, _)] = network.steps()
        x = torch.where(reads, read, project(norm(state)))
        rope = rotary_embedding(positions, network.frequencies(), x.dtype)
        for layer, attention in zip(network.layers, self.attention, strict=True):
            x = layer(x, rope, _attending(attention))
        injected = network.injector.advance(embeds, injected)
        code = network.injector.code(network.injector.project(x), injected)
        code = code.masked_fill(reads, 0)  # the first state already contains the last accepted token
        return torch.cat([network.norm(x), code], dim=-1), torch.cat([x, injected, number + 1], dim=-1)


class HSDraftForVllm(Eagle3LlamaForCausalLM):
    """The interface of vLLM's proposer for EAGLE-3 drafters. It uses none of the base class's layers.

    Raises a ValueError if the target is sharded over several devices, or is not the drafter's.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        nn.Module.__init__(self)
        self.config = vllm_config.speculative_config.draft_model_config.hf_config
        drafter = HSDraftConfig.from_dict(self.config.drafter)
        _check_target(vllm_config, drafter)
        self.width = state_width(drafter)
        layers = vllm_config.model_config.get_total_num_hidden_layers()
        self.model = DraftTrunk(vllm_config, drafter, layers, maybe_prefix(prefix, "model"))
        self.register_buffer("vocab_ids", self.model.network.draft_vocab_ids(), persistent=False)

    def embed_input_ids(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self.model.embed_tokens(input_ids)

    def combine_hidden_states(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns the input of the first call, `[n, D + S + 1]`, from taps `[n, taps * D]`."""
        joined = self.model.joined(hidden_states)
        return F.pad(joined, (0, self.width - joined.shape[-1]))

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        hidden_states: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.model(input_ids, positions, hidden_states)

    @cached_property
    def head(self) -> torch.Tensor:
        """`[V', D]`, the target's output rows of the draft vocabulary. vLLM has set `lm_head` by now."""
        return self.lm_head.weight[self.vocab_ids]

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Returns logits `[n, V]`; -inf for tokens outside the draft vocabulary."""
        size = self.head.shape[-1]
        logits = F.linear(hidden_states[:, :size], self.head)
        logits = logits + self.model.network.injector.up(hidden_states[:, size:])
        every = logits.new_full((len(logits), self.config.vocab_size), float("-inf"))
        return every.index_copy_(1, self.vocab_ids, logits)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.model.network.load_state_dict(dict(weights))


def _attending(attention: Attention) -> Any:
    """A layer's attention in the form of `LayerProducts`: keys and values are `[kv_heads, n, head_dim]`."""

    def attend(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rows: Any = None) -> torch.Tensor:
        turned = (side.transpose(0, 1).flatten(1).contiguous() for side in (keys, values))
        return attention(queries.flatten(1).contiguous(), *turned)

    return attend


def _check_target(vllm_config: Any, drafter: HSDraftConfig) -> None:
    target, parallel = vllm_config.model_config, vllm_config.parallel_config
    if parallel.tensor_parallel_size > 1 or parallel.pipeline_parallel_size > 1:
        raise ValueError("a hidden-state drafter needs the target whole on one device: leave tensor_parallel_size at 1")
    for name, found, expected in (
        ("vocab_size", target.get_vocab_size(), drafter.vocab_size),
        ("hidden_size", target.get_hidden_size(), drafter.target_hidden_size),
        ("num_hidden_layers", target.get_total_num_hidden_layers(), drafter.target_num_hidden_layers),
    ):
        if found != expected:
            raise ValueError(
                f"the target has {name}={found}, the drafter expects {expected}: it was trained for "
                f"{drafter.target_name or 'another target'}. Use a drafter of this target."
            )
