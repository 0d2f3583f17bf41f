"""Parity of FlashMap drafters with their authors' package, `flashmap`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from oracles.block_parity import SLOTS, TAPS, BlockReference, parity
from oracles.format_parity import HIDDEN, VOCABULARY, Case, randomise

WIDTH = 48  # of the network, unlike the target's
GRIDS = {"1": [0.0, 1.0], "2": [0.0, 0.7, 1.0], "3": [0.0, 0.5, 0.8, 1.0]}
FIELDS: dict[str, Any] = {
    "target_model": "", "target_hidden_size": HIDDEN, "vocab_size": VOCABULARY,
    "target_layer_ids": [tap - 1 for tap in TAPS], "block_size": SLOTS, "hidden_size": WIDTH, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 64, "cond_dim": 16, "time_embed_dim": 8, "rope_theta": 400.0,
    "jump_grids": GRIDS,
}  # fmt: skip


def of_flashmap(target: Any, **fields: Any) -> BlockReference:
    """Returns a drafter as the authors' class saves it."""
    from flashmap import FlashMapConfig, FlashMapDraftModel
    from flashmap.modeling_flashmap import FlashMapCache

    model = FlashMapDraftModel(FlashMapConfig(**{**FIELDS, **fields})).eval()
    randomise(model, std=0.2)
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    noise = torch.randn(SLOTS, VOCABULARY, generator=torch.Generator().manual_seed(0))

    def slots(taps: torch.Tensor, text: Sequence[int], anchor: int) -> torch.Tensor:
        cache = FlashMapCache(model.config, 1, anchor + 1, dtype=torch.float32)
        model.extend_context(cache, taps[None, :anchor])
        return model.draft(torch.tensor([text[anchor]]), cache, embedding, head, noise=noise[None])[0]

    return BlockReference(type(model).__name__, model.save_pretrained, slots)


CASES = tuple(
    Case(name, partial(of_flashmap, **fields))
    for name, fields in (
        ("FlashMap", {}),
        ("FlashMap, three jumps", {"num_steps": 3}),
        ("FlashMap, two jumps, constant gate", {"num_steps": 2, "noise_gate": "constant"}),
    )
)

__all__ = ["CASES", "parity"]
