"""Gemma 4's assistants: drafters that attend to the target's own keys and values, as transformers runs them.

The assistant reads, for each token, the target's embedding of it and a state: the target's last one before the root,
and its own output for the parent of a node. All its layers attend to what the target's last layers of the same type
keep of the text up to there, from the root's position. So nodes do not see each other, and nothing is kept of them.

Letters in the shapes: B texts, n nodes each, P cached positions, D the target's hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..core.checks import printable
from ..core.draft_tree import Expansion, TreeBatch
from ..core.refusals import DraftingRefused
from ..core.tensors import on_device
from ..drafters.base.draft_options import DraftOptions
from ..drafters.base.protocol import Accepted, Ask, Call, weights_of
from ..drafters.base.registry import TREES, Fit, TargetInfo
from ..drafters.base.target_weights import borrow
from ..drafters.base.tree_session import TreeSession
from ..runtime.target_limits import decoder_layers, text_config
from ..runtime.tree_reading import AttentionKind, as_attention_takes_it, tree_mask
from .estimate.reads import Read
from .language_model.lm_drafter import ModelDrafter
from .language_model.lm_files import read_config
from .published.checkpoint import AnyCheckpoint
from .published.formats import IN_TURN, Format, fields_told, register_format
from .published.levels import LevelExpansion
from .published.target_sizes import TargetSizes, fit_by_sizes, misfit

_TYPES = ("gemma4_assistant", "gemma4_unified_assistant")


def _sizes(config: Any) -> TargetSizes:
    """The sizes of the target, by transformers' configuration of an assistant."""
    return TargetSizes(vocab_size=config.get_text_config().vocab_size, target_hidden_size=config.backbone_hidden_size)


@dataclass(frozen=True)
class SharedStates:
    """What the target keeps of some texts, by the type of the layers that attend to it."""

    states: dict[str, tuple[torch.Tensor, torch.Tensor]]  # keys and values `[B, kv_heads, P, head_dim]`
    masks: dict[str, torch.Tensor]  # `[B, 1, 1, P]`, as attention takes them
    positions: torch.Tensor  # `[B, 1]`, int64, of the roots


class Gemma4AssistantDrafter(ModelDrafter):
    """Drafts with an assistant of Gemma 4 (`google/gemma-4-*-it-assistant`): trees and batches.

        drafter = AutoDrafter.from_pretrained("google/gemma-4-E2B-it-assistant", dtype=model.dtype)
        out = model.generate(**inputs, assistant_model=drafter)

    Passing the bare model, `assistant_model=assistant`, is transformers' assisted decoding: chains of a single text.

    Args:
        model: a `Gemma4AssistantForCausalLM`, or a unified one, used as it is.
        tokenizer: the model's; compared with the target's if a call has that.
    """

    def __init__(self, model: Any, tokenizer: Any = None) -> None:
        super().__init__(model, tokenizer)
        if not hasattr(model, "pre_projection") or not text_config(model).model_type.startswith("gemma4"):
            raise ValueError(f"model={type(model).__name__} is invalid: expected an assistant of Gemma 4's layers")
        self.config = _sizes(model.config)
        text_config(model)._attn_implementation = "sdpa"  # takes any mask

    @classmethod
    def why_not(cls, checkpoint: AnyCheckpoint) -> str:
        is_one = checkpoint.config.get("model_type") in _TYPES and "pre_projection.weight" in checkpoint.shapes
        return "" if is_one else "no assistant of Gemma 4"

    @classmethod
    def of_checkpoint(cls, checkpoint: AnyCheckpoint, **kwargs: Any) -> Gemma4AssistantDrafter:
        """As `ModelDrafter.of_checkpoint`; raises a ValueError if clusters do not divide the vocabulary."""
        drafter: Any = super().of_checkpoint(checkpoint, **kwargs)
        ordered = drafter.model.masked_embedding
        if ordered is not None:
            tokens, clusters = ordered.token_ordering, ordered.num_centroids
            whole = torch.equal(tokens.sort().values.cpu(), torch.arange(ordered.vocab_size))
            best = ordered.centroid_intermediate_top_k
            if not whole or ordered.vocab_size % clusters or not 0 < best <= clusters:
                raise ValueError(
                    f"{printable(checkpoint.name)} divides its {ordered.vocab_size} tokens into {clusters} clusters, "
                    f"and drafts from {best} of them: expected equal clusters, and each token once"
                )
        return drafter

    def taps_of(self, target: Any) -> Sequence[int]:
        return (decoder_layers(text_config(target)),)  # after the final norm

    def check(self, target: Any) -> None:
        self.check_mode()
        wrong = misfit(self.config, target) or why_not_shared(text_config(self.model), text_config(target))
        if wrong:
            raise DraftingRefused(f"{wrong}: this assistant was made for another target. Use one of this target.")

    def session(self, call: Call) -> AssistantSession:
        if call.runtime is None:
            raise DraftingRefused(
                "this assistant attends to the target's keys and values, which are elsewhere: run the target in this "
                "process, or use another drafter"
            )
        return AssistantSession(self, call)

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        model, head = self.model, self.model.lm_head.weight.numel()
        shared = 0 if model.model.embed_tokens.weight is not model.lm_head.weight else head
        body = weights_of(model) - head - (0 if shared else model.model.embed_tokens.weight.numel())
        if model.masked_embedding is not None:
            head = head * model.masked_embedding.centroid_intermediate_top_k // model.masked_embedding.num_centroids
        return Read("layers", body, depth, width), Read("head", head, depth, width)

    def advance(
        self, embeds: torch.Tensor, states: torch.Tensor, shared: SharedStates
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the logits `[B, n, V]` after tokens, and their states `[B, n, D]`.

        `embeds` `[B, n, D]` are the target's embeddings of the tokens, `states` `[B, n, D]` those before them.
        """
        inputs = self.model.pre_projection(torch.cat([embeds, states], dim=-1))
        count = inputs.shape[1]
        hidden = self.model.model(
            inputs_embeds=inputs,
            attention_mask={kind: mask.expand(-1, -1, count, -1) for kind, mask in shared.masks.items()},
            position_ids=shared.positions.expand(-1, count),
            shared_kv_states=dict(shared.states),
            use_cache=False,
            logits_to_keep=torch.arange(count),  # with a number, transformers would leave out all nodes but the last
        ).last_hidden_state
        return self._logits(hidden), self.model.post_projection(hidden)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """With ordered embeddings, tokens of the clusters that score best; the others cannot be drafted."""
        head, ordered = self.model.lm_head, self.model.masked_embedding
        if ordered is None:
            return head(hidden)
        best = ordered.centroids(hidden).topk(ordered.centroid_intermediate_top_k, dim=-1).indices
        tokens = ordered.token_ordering.long().view(ordered.num_centroids, -1)[best].flatten(-2)
        logits = (head.weight[tokens] @ hidden[..., None])[..., 0]
        return logits.new_full((*hidden.shape[:-1], len(head.weight)), -torch.inf).scatter(-1, tokens, logits)


def layers_read(target: Any, kinds: Collection[str]) -> dict[str, int]:
    """Returns the last layer of each type that computes keys and values, by a target's text configuration."""
    own = decoder_layers(target) - (getattr(target, "num_kv_shared_layers", None) or 0)
    types = (getattr(target, "layer_types", None) or [])[:own]
    return {kind: len(types) - 1 - types[::-1].index(kind) for kind in kinds if kind in types}


def why_not_shared(own: Any, target: Any) -> str:
    """Returns why an assistant cannot attend to a target's keys and values, by their text configurations; else ""."""
    found = layers_read(target, own.layer_types)
    for index, kind in enumerate(own.layer_types):
        if kind not in found:
            return f"the target has no layer of the type {kind} with its own keys and values"
        for name in ("num_key_value_heads", "head_dim"):
            theirs, ours = (
                getattr(target.per_layer_config[found[kind]], name),
                getattr(own.per_layer_config[index], name),
            )
            if theirs != ours:
                return f"the target's layers of the type {kind} have {name}={theirs}, the assistant expects {ours}"
    return ""


class AssistantSession(TreeSession):
    """Drafts trees (or chains) for a batch, one depth of all rows per forward."""

    def __init__(self, drafter: Gemma4AssistantDrafter, call: Call) -> None:
        ids = torch.arange(drafter.config.vocab_size, device=drafter.device)
        super().__init__(call.options, ids, call.foresight)
        self.drafter, self._runtime = drafter, call.runtime
        own = text_config(drafter.model)
        self.kind = own.hidden_size, own.num_hidden_layers, own.vocab_size, drafter.dtype, drafter.device
        self._rows = list(range(call.rows))  # in the target's cache
        self._last: dict[int, torch.Tensor] = {}  # `[D]`, the target's state before each row's root
        self.embed = borrow(call.target.get_input_embeddings(), None, ids, drafter.device, drafter.dtype).embed
        self._layers = layers_read(text_config(call.target), own.layer_types)
        self._windows = {kind: own.sliding_window if kind == "sliding_attention" else 0 for kind in self._layers}

    def observe(self, news: Sequence[Accepted]) -> None:
        for each in news:
            self._last[each.row] = each.taps[-1].to(self.drafter.device, self.drafter.dtype)

    def keep(self, rows: Sequence[int]) -> None:
        self._rows = list(rows)

    def shared(self, rows: Sequence[int]) -> SharedStates:
        """Returns what the target keeps of rows, and may be seen from their roots."""
        places, slots, drafter = [self._rows.index(row) for row in rows], self._runtime.slots, self.drafter
        texts, device, length = self._runtime.rows.of(places), drafter.device, slots.length
        picked = slice(None) if places == list(range(len(self._rows))) else places  # no copy of all rows
        kept, nothing = on_device(texts.kept, device), torch.zeros(len(rows), 1, dtype=torch.int64, device=device)
        root = TreeBatch(nothing, nothing, nothing.bool()[..., None])
        attended = None if texts.attended is None else texts.attended.to(device).expand(len(rows), -1)
        states, masks = {}, {}
        for kind, index in self._layers.items():
            layer = slots.layers[index]
            keys, values = (each[picked, :, :length].to(device, drafter.dtype) for each in (layer.keys, layer.values))
            sight = AttentionKind(kind, self._windows[kind], index)
            seen = tree_mask(root, sight, attended, kept, length, keys.shape[2] + 1)[..., :-1]
            states[kind], masks[kind] = (keys, values), as_attention_takes_it(seen, "sdpa", drafter.dtype)
        first = texts.next_positions
        at = texts.lengths if first is None else [
            place + count - texts.prompt_slots for place, count in zip(first, texts.kept, strict=True)
        ]  # fmt: skip
        return SharedStates(states, masks, on_device(at, device)[:, None])

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        rows = [ask.row for ask in asks]
        shared, before = self.shared(rows), torch.stack([self._last[row] for row in rows])[:, None]

        def levels(level: int, tokens: torch.Tensor, states: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
            return self.drafter.advance(self.embed(tokens), before if states is None else states, shared)

        return LevelExpansion(levels, depth, options.temperature, self.race(rows, depth))


def _fit(checkpoint: AnyCheckpoint, target: TargetInfo, named: Collection[str]) -> Fit | None:
    own = read_config(checkpoint.folder)
    if why_not_shared(own.get_text_config(), target.config.get_text_config(decoder=True)):
        return None
    return fit_by_sizes(_sizes(own), target, named)


def _describe(checkpoint: AnyCheckpoint) -> dict[str, str]:
    reads = "the target's last hidden state, and the keys and values of its last layers"
    return {
        "drafts": f"{TREES}, {IN_TURN}",
        "architecture": printable(checkpoint.config.get("architectures")),
        "reads": reads,
        **fields_told(checkpoint),
    }


register_format(
    Format(
        name="transformers (Gemma 4 assistant)",
        rank=10,
        matches=lambda checkpoint: not Gemma4AssistantDrafter.why_not(checkpoint),
        load=Gemma4AssistantDrafter.of_checkpoint,
        describe=_describe,
        drafter=Gemma4AssistantDrafter,
        possible=lambda config: config.get("model_type") in _TYPES,
        fit=_fit,
    )
)
