"""Parity of layers for multi-token prediction that the package speculators trains, with its class.

Its files hold the layer alone. Drafts deeper than the first are those of serving: the layer reads its own outputs
behind what it has read of the text.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from hf_hsdraft.drafters.base.auto_drafter import AutoDrafter
from oracles.format_parity import (
    Case,
    NotingDrafter,
    Parity,
    Reference,
    Round,
    compared,
    randomise,
    taps_of,
    texts_of,
)
from oracles.mtp_targets import GENERATING
from oracles.tiny import tiny_config, tiny_model

DEPTH = 3


@cache
def target_of(model_type: str) -> Any:
    """Returns a small random target of attention alone: rounding of delta rules would be most of a difference."""
    config = tiny_config(type(AutoConfig.for_model(model_type)), "full")
    return tiny_model(GENERATING[type(config)], config)


def model_of(target: Any) -> Any:
    """Returns a layer of random weights by speculators' class, with the target's embedding and head."""
    import speculators as package
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layers = type(target.config)(**target.config.to_dict())
    layers._attn_implementation = "eager"
    proposals = package.SpeculatorsConfig(
        algorithm="mtp",
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=DEPTH)],
        default_proposal_method="greedy",
        verifier=package.VerifierConfig(name_or_path=None, architectures=[type(target).__name__]),
    )
    config = package.MTPSpeculatorConfig(transformer_layer_config=layers, speculators_config=proposals)
    model = package.MTPDraftModel(config).eval()
    randomise(model, 0.2)
    with torch.no_grad():
        model.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        model.lm_head.weight.copy_(target.get_output_embeddings().weight)
    return model


def chain(model: Any, taps: torch.Tensor, tokens: Sequence[int], path: Sequence[int]) -> torch.Tensor:
    """Returns the logits `[n + 1, V]` after tokens x_1 .. x_t, with taps `[t, D]` of x_0 .. x_{t-1}, and a path."""
    states, found, ids = taps[None], [], list(tokens)
    for token in [None, *path]:
        ids = ids if token is None else [*ids, token]
        at = torch.arange(len(ids))[None]
        axes = at.expand(3, -1, -1) if "qwen3_5" in model.config.transformer_layer_config.model_type else at
        y = model.mtp_layers[0](
            hidden_states=states,
            token_embeddings=model.embed_tokens(torch.tensor([ids])),
            attention_mask=torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None],
            position_ids=at,
            position_embeddings=model.rotary_emb(states, axes),
        )
        states = torch.cat([states, y[:, -1:]], dim=1)
        found.append(model.lm_head(y[0, -1]))
    return torch.stack(found)


def of_speculators(target: Any, normed: bool) -> Reference:
    model, layers = model_of(target), target.config.num_hidden_layers
    given = {"last_tap_is_normed": normed}
    return Reference(
        "MTPDraftModel", model.save_pretrained, partial(chain, model), (layers + (not normed),), given=given
    )


def parity(case: Case, every: int = 1) -> Parity:
    """Compares the drafts of a call on a batch of padded prompts with those of speculators' class."""
    target = target_of(case.target["model_type"])
    reference = case.make(target)
    with tempfile.TemporaryDirectory() as folder:
        reference.save(Path(folder))
        drafter = AutoDrafter.from_pretrained(folder, **reference.given)
        read_taps = tuple(drafter.taps_of(target))  # reads the weights
    assert read_taps == tuple(reference.taps), "other hidden states are read"
    noting = NotingDrafter(drafter, num_assistant_tokens=DEPTH, tree_size=24, beam_width=3)
    texts, _ = texts_of(target, noting)
    read = [taps_of(target, text, reference.taps) for text in texts]

    def distance(each: Round, text: Sequence[int]) -> float:
        path = [*text[each.length - 1 :], 11, 12, 13][: each.expansion.depth]
        wanted = reference.logits(read[each.row][: each.length - 1], text[1 : each.length], path[1:])
        return float((each.log_probs(path) - wanted.log_softmax(dim=-1)).abs().max())

    with torch.no_grad():
        return compared(case.name, reference.name, noting.rounds, texts, distance, every)


CASES = tuple(
    Case(f"speculators mtp, {model_type}{'' if normed else ', before the norm'}",
         partial(of_speculators, normed=normed), {"model_type": model_type})
    for model_type in ("qwen3", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
    for normed in (True, False)
)  # fmt: skip
