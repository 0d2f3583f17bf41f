"""The hidden-state drafter: loading, saving, and use in `generate()`."""

from __future__ import annotations

from typing import Any

import torch

from ...core.checks import demand
from ...core.methods import load, offered
from ...core.tensors import device_of, is_unhooked, joined
from ..base.draft_options import DraftOptions
from ..base.packed_texts import PackedTexts
from ..base.pretrained_drafter import StateDrafter
from ..base.protocol import Call
from ..base.registry import register_drafter
from ..base.target_weights import DrafterOutput
from .candidate_generator import ChainDrafter
from .configuration_hsdraft import HSDraftConfig
from .draft_session import REUSE_OPTIONS, HSDraftSession, reuse_of
from .network import HSDraftLayer, HSDraftNetwork
from .quick_weights import QuickWeights, quick_weights
from .target_match import explain_mismatch, has_other_tokens, warn_of_mismatch
from .trunk import Layer, read, roll


class HSDrafter(HSDraftNetwork, StateDrafter):
    """A hidden-state drafter ("Make Every Draft Count", system Lyanna).

    Its drafting options, with transformers' names where they exist:

    - `num_assistant_tokens`: depth of the draft, at most `num_draft_steps`;
    - `tree_size`, `beam_width`: total nodes, and nodes expanded per depth; a width of 1 drafts a chain;
    - `assistant_confidence_threshold`: least probability of a node's path (0 keeps all);
    - `reuse`: of rejected drafts, `"none"`, `"ensemble"` or `"resample"`;
    - `reuse_weight`: weight of the old logits in `"ensemble"`;
    - `refinement`: share of the refiner, if one was trained, in the draft logits; 0 for none;
    - `ngram_length`: longest n-gram leader, in tokens, by which nodes from the text itself join the tree; 0 for none;
    - `ngram_continuation`: most n-gram nodes appended to the most probable drafted path; 0 for none;
    - `tree_sizing`: `"cost"` drafts and verifies what pays, up to the sizes above; `"fixed"` always uses these sizes;
    - `node_cost`, `depth_cost`: of a verified node and a drafted depth, in forwards of one token; measured in the first
      rounds by default;
    - `packed_weights`: use copies of the target's weights laid out for small products on a CPU; by default once a call
      has saved the time for that, if they take at most 2 GiB;
    - `compiled_layers`: run the target's decoder layers as compiled programs on a CPU; by default from some hundred
      forwards on, when another process has compiled them, or at once where they are on disk; `True` waits for them;
    - `adapter_name`: LoRA adapter used in a call; `""` for none, by default the active ones;
    - `tree_builder`: `"beam"`, `"p_best"` (best whole paths), or `"gumbel"` and `"stochastic_beam"`, which draw nodes;
    - `verification`: `"walk"`, or `"rejection"` for drawn nodes, which accepts more at high temperature.
    """

    travels_as = ChainDrafter
    why_not_refined = ""
    own_options = REUSE_OPTIONS

    def forward(
        self,
        taps: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        starts: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        num_draft_steps: int | None = None,
        num_rolled: int | None = None,
        labels: Any = None,
    ) -> DrafterOutput:
        """Reads accepted positions, then rolls hidden states forward without tokens (Lyanna, drafting phase).

        Args:
            taps: `[T, taps * D]`, the target's hidden states h_i at the tapped layers, concatenated.
            embeds: `[T, D]`, embeddings of the accepted next tokens x_{i+1}.
            position_ids: `[T]`, int64, position i of each pair, consecutive within a document.
            starts: `[S]`, int64, pairs at which chains start; None for the last one only.
            document_ids: `[T]`, int64; attention stays within a document. None for a single document.
            num_draft_steps: K, the configuration's by default.
            num_rolled: roll only the first so many of `starts` beyond g_0; None for all.
            labels: for `loss_function(drafter, hidden_states, labels)`, computed here so that wrappers of the forward
                (data parallel, sharded, mixed precision) cover all trained weights.
        """
        steps = self.config.num_draft_steps if num_draft_steps is None else num_draft_steps
        texts = PackedTexts(position_ids, document_ids, starts, self.config.sliding_window, steps)
        trunk = self.trunk(of_layer=_with_joined_weights)
        x, ropes = read(trunk, taps, embeds, position_ids, texts, steps - 1)
        states = roll(trunk, x, ropes, texts, num_rolled)
        loss = None if labels is None else self.loss_function(self, states, labels)
        return DrafterOutput(loss=loss, hidden_states=tuple(states))

    def check_together(self, options: DraftOptions) -> None:
        super().check_together(options)
        reuse, _ = reuse_of(options.own)
        builder = options.tree_builder
        valid = builder == "beam" or reuse == "none"
        demand(valid, "reuse", reuse, f"only beams can be merged, not trees of tree_builder={builder!r}")

    def warn_of_misfit(self, target: Any, tokenizer: Any, all_processes: bool) -> None:
        if all_processes or has_other_tokens(self, tokenizer):
            warn_of_mismatch(target, self, tokenizer)  # runs a forward: all processes must do so, or none

    def match_told(self, target: Any, tokenizer: Any, name: str) -> list[str]:
        self.check(target)
        fits = f"{name} fits: this drafter predicts it as well as its own target"
        if self.config.target_reference is None:
            fits = "this drafter does not record what its target writes; `hsdraft hub card --target` does"
        return [explain_mismatch(target, self, tokenizer) or fits]

    def session(self, call: Call) -> HSDraftSession:
        modules = call.target.get_input_embeddings(), call.target.get_output_embeddings()
        if call.options.depth == 0:  # nothing will be drafted, and making quick weights takes as long as two forwards
            return HSDraftSession(self, self.borrow(*modules), call)
        working, weights = quick_weights(self, *modules), self.borrow(*modules, with_head=False)
        if not self._compiles(call, working):
            return HSDraftSession(self, weights, call, working)
        return load("drafts", "compiled").session_of(self, weights, call, working)

    def _compiles(self, call: Call, working: QuickWeights) -> bool:
        """Whether drafts are compiled: the target's forwards are, and later calls can use the graphs again."""
        target, alone = call.runtime, call.rows == 1 and call.options.depth > 0 and "compiled" in offered("drafts")
        if target is None or target.slots.size is None or target.acceleration.compile_config is None:
            return False
        return alone and working.spare is not None and self.device.type == device_of(call.target).type


def _with_joined_weights(layer: Any) -> Layer:
    """The products of a layer; the layer itself where its forward is wrapped, as for activation checkpointing."""
    return layer.products(joined) if type(layer) is HSDraftLayer and is_unhooked(layer) else layer


__all__ = ["HSDrafter"]


register_drafter(HSDraftConfig.model_type, HSDraftConfig, HSDrafter)
