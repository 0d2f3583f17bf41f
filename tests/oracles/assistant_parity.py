"""Parity of Gemma 4's assistants with transformers' class and with its own assisted decoding.

A case makes a tiny random target and assistant. The drafts of a real call are computed again by the assistant's forward
over what a plain forward of the target returns as `shared_kv_states`: all of full attention, and of windows what a
cache keeps of them. transformers' loop itself is recorded too, in rounds without keys and values of rejected tokens,
which it does not cut off.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma4TextConfig
from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

from hf_hsdraft.drafters.base.auto_drafter import AutoDrafter
from hf_hsdraft.drafters.base.protocol import Call, Session
from oracles.format_parity import (
    HIDDEN,
    PROMPTS,
    VOCABULARY,
    NotingDrafter,
    Parity,
    Round,
    compared,
    randomise,
    texts_of,
)

STEPS = 4
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
}


@dataclass(frozen=True)
class Case:
    """An assistant, with what is special in this case."""

    name: str
    target: dict[str, Any] = field(default_factory=dict)  # fields of the target's text configuration
    assistant: dict[str, Any] = field(default_factory=dict)  # fields of the assistant's configuration
    model_type: str = "gemma4_assistant"


def text_fields(types: str, **fields: Any) -> dict[str, Any]:
    """Fields of a tiny configuration with layers of the types `s`liding and `f`ull; full ones have wider heads."""
    names = {"s": "sliding_attention", "f": "full_attention"}
    wide = {f"{index:02d}": {"head_dim": 16} for index, kind in enumerate(types) if kind == "f"}
    return {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 64, "num_hidden_layers": len(types),
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "layer_types": [names[each] for each in types],
        "per_layer_config": wide, "rope_parameters": _ROPE, "sliding_window": 64, "max_position_embeddings": 256,
        "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "eos_token_id": None, "pad_token_id": 0,
        "initializer_range": 0.3, **fields,
    }  # fmt: skip


def made(case: Case) -> tuple[Any, Any]:
    """Returns a target and an assistant of random weights; the assistant's output depends on all of them."""
    torch.manual_seed(3)
    target = AutoModelForCausalLM.from_config(Gemma4TextConfig(**text_fields("sfssff", **case.target))).eval()
    own = text_fields("ssf", hidden_size=24, tie_word_embeddings=True)
    own |= {name: getattr(target.config, name) for name in ("vocab_size", "sliding_window")}
    own |= {name: case.target[name] for name in ("num_key_value_heads",) if name in case.target}
    own["model_type"] = case.model_type.replace("_assistant", "_text")
    config = AutoConfig.for_model(case.model_type, text_config=own, backbone_hidden_size=HIDDEN, **case.assistant)
    assistant = AutoModelForCausalLM.from_config(config).eval()
    randomise(assistant, std=0.2)
    if assistant.masked_embedding is not None:
        assistant.masked_embedding.token_ordering.copy_(torch.randperm(own["vocab_size"]))
    return target, assistant


CASES = (
    Case("Gemma 4 assistant"),
    Case("Gemma 4 assistant, sliding window of 6", {"sliding_window": 6}),
    Case("Gemma 4 assistant, target that shares keys", {
        "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY,
    }),
    Case("Gemma 4 assistant, keys used as values", {"attention_k_eq_v": True}),
    Case("Gemma 4 assistant, ordered embeddings", {"vocab_size": 96}, {
        "use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 5,
    }),
    Case("Gemma 4 unified assistant", model_type="gemma4_unified_assistant"),
)  # fmt: skip


def loaded(assistant: Any, **options: Any) -> Any:
    """Returns the drafter that an assistant's files are read as, with options that do not depend on the machine."""
    with tempfile.TemporaryDirectory() as folder:
        assistant.save_pretrained(folder)
        drafter = AutoDrafter.from_pretrained(Path(folder), dtype=torch.float32)
    fixed = {"tree_sizing": "fixed", "ngram_length": 0, "num_assistant_tokens": STEPS}
    drafter.generation_config.update(**{**fixed, **options})
    return drafter


class _Noting(NotingDrafter):
    """Notes drafts of calls on `PROMPTS`."""

    def session(self, call: Call) -> Session:
        session = self._drafter.session(call)

        def note(rows: Sequence[int], expansion: Any) -> None:
            for place, row in enumerate(rows):
                length = len(PROMPTS[row]) + call.texts.new_tokens(row)
                self.rounds.append(Round(row, length, place, len(rows), expansion))

        session.on_expansion = note
        return session


@torch.no_grad()
def parity(case: Case) -> Parity:
    """Compares the drafts of a call on a batch of padded prompts with those of the assistant's class."""
    target, assistant = made(case)
    noting = _Noting(loaded(assistant, tree_size=60, beam_width=40))
    texts, _ = texts_of(target, noting)

    def distance(each: Round, text: Sequence[int]) -> float:
        path = [*text, 11, 12][each.length - 1 :][:STEPS]
        found = each.log_probs(path)
        wanted = reference(target, assistant, text[: each.length], path[1:])[: len(found)]
        can = ~found.isinf()
        wanted = wanted.where(can, torch.tensor(-torch.inf)).log_softmax(-1)
        return float((found - wanted)[can].abs().max())

    return compared(case.name, type(assistant).__name__, noting.rounds, texts, distance)


@torch.no_grad()
def reference(target: Any, assistant: Any, text: Sequence[int], after: Sequence[int]) -> torch.Tensor:
    """Returns the logits `[1 + n, V]` after a text, of which the target has not read the last token, and n tokens."""
    read = target(torch.tensor([list(text[:-1])]), output_hidden_states=True, return_shared_kv_states=True)
    shared, window = dict(read.shared_kv_states), target.config.sliding_window - 1
    shared["sliding_attention"] = tuple(each[:, :, -window:] for each in shared["sliding_attention"])
    state, found = read.hidden_states[-1][:, -1:], []
    for token in [text[-1], *after]:
        embeds = torch.cat([target.get_input_embeddings()(torch.tensor([[token]])), state], dim=-1)
        at = torch.tensor([[len(text) - 1]])
        output = assistant(inputs_embeds=embeds, position_ids=at, shared_kv_states=shared)
        state = output.last_hidden_state
        found.append(output.logits[0, 0])
    return torch.stack(found)


@dataclass(frozen=True)
class Drafted:
    """A draft of transformers' loop."""

    text: list[int]  # up to the root
    tokens: list[int]
    logits: torch.Tensor  # `[n, V]`
    stale: bool  # whether keys and values of rejected tokens were seen


@torch.no_grad()
def drafts_of_transformers(target: Any, assistant: Any, ids: torch.Tensor, new_tokens: int) -> list[Drafted]:
    """Runs transformers' assisted decoding of a single text, and returns its drafts."""
    found: list[Drafted] = []
    candidates = SinglePositionMultiTokenCandidateGenerator.get_candidates

    def noted(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        longer, logits = candidates(self, input_ids, *args, **kwargs)
        if logits is not None:
            read = kwargs["model_outputs"].shared_kv_states["full_attention"][0].shape[2]
            tokens = longer[0, input_ids.shape[1] :].tolist()
            found.append(Drafted(input_ids[0].tolist(), tokens, logits[0], read >= input_ids.shape[1]))
        return longer, logits

    assistant.generation_config.num_assistant_tokens = STEPS
    with mock.patch.object(SinglePositionMultiTokenCandidateGenerator, "get_candidates", noted):
        target.generate(ids, assistant_model=assistant, max_new_tokens=new_tokens, do_sample=False)
    return found
