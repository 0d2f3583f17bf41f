"""The weights that a draft reads, for estimates. Drafters of methods have a method `reads(depth, width)` for it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...drafters.base.protocol import weights_of
from ...runtime.target_limits import decoder_layers, text_config


@dataclass(frozen=True)
class Read:
    """Weights that a draft multiplies by."""

    part: str
    weights: int
    times: int  # reads per draft
    rows: int  # rows multiplied per read
    borrowed: bool = False  # whether the weights are the target's and take no extra memory


def reads_of(drafter: Any, depth: int, width: int) -> Sequence[Read]:
    """Weights read by a draft of one sequence, expanding `width` nodes per depth; () if the time is negligible."""
    from ...drafters.hidden_state.modeling_hsdraft import HSDrafter
    from ...drafters.language_model.lm_drafter import CausalLMDrafter

    kinds = {HSDrafter: _of_states, CausalLMDrafter: reads_of_lm}
    if hasattr(drafter, "reads"):
        return tuple(drafter.reads(depth, width))
    return next((tuple(reads(drafter, depth, width)) for kind, reads in kinds.items() if isinstance(drafter, kind)), ())


def _of_states(drafter: Any, depth: int, width: int) -> Iterator[Read]:
    """`Trunk.step` says which parameters each step uses."""
    config, layers, modules = drafter.config, [*drafter.layers], [*drafter.step_modules]
    context, bias = config.num_hidden_layers - config.num_roll_layers, weights_of(drafter.injector.up)
    yield Read("fusion", weights_of(drafter.fuse), 1, 1)
    if context:
        yield Read("context layers", weights_of(*layers[:context]), 1, 1)
    yield Read("trunk layers", weights_of(*layers[context:]), 1 if modules else depth, 1)
    for step, module in enumerate(modules, 1):
        times = max(depth - step, 0) if step == len(modules) else int(step < depth)
        yield Read(f"step module {step}", weights_of(module), times, 1)
    yield Read("head", config.draft_vocab_size * config.hidden_size, 1, depth, borrowed=drafter.lm_head is None)
    yield Read("injector", weights_of(drafter.injector) - bias, depth, width)
    yield Read("token bias", bias, depth - 1, width)


def reads_of_lm(drafter: Any, depth: int, width: int) -> Iterator[Read]:
    """Weights that a language model reads."""
    model = drafter.model
    table, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    untied = 0 if head is table else table.numel()
    times, rows = (depth, width) if drafter.mask_token_id is None else (1, depth)
    yield Read("layers", weights_of(model) - head.numel() - untied, times, rows)
    yield Read("head", head.numel(), times, rows)
    if untied:  # in memory, but only a few rows are read
        yield Read("embedding", untied, 0, 1)


def numbers_kept(drafter: Any, length: int) -> int:
    """Number of keys and values that a drafter keeps of a whole text of `length` tokens; 0 if no language model."""
    from ...drafters.language_model.lm_drafter import CausalLMDrafter

    if not isinstance(drafter, CausalLMDrafter):
        return 0
    config = text_config(drafter.model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * decoder_layers(config) * heads * head_dim * length)
