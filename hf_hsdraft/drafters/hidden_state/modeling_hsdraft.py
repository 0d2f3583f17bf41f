"""The hidden-state drafter as users know it: loaded, saved, and handed to `generate()`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import GenerationConfig

from ...core.tensors import device_of
from ...hub.pretrained_drafter import PretrainedDrafter
from ..base.draft_options import DraftOptions, default_options
from ..base.draft_reads import Read, weights_of
from ..base.drafter_output import DrafterOutput
from ..base.packed_texts import DraftContext, PackedTexts
from ..base.protocol import Call, Drafter
from ..base.refiners import REFINER_OPTIONS, check_refiners
from ..base.target_sizes import check_sizes
from .candidate_generator import ChainDrafter
from .configuration_hsdraft import HSDraftConfig
from .draft_session import HSDraftSession
from .network import HSDraftNetwork
from .quick_weights import QuickWeights, quick_weights
from .reuse import REUSE_OPTIONS, reuse_of
from .roll_out import RollOut
from .static_roll_out import static_roll_out
from .target_match import has_other_tokens, warn_of_mismatch
from .trunk import read, roll

_LEAST_WINDOW = 256  # a narrower one could drop what is behind tokens that are taken back


class HSDrafter(HSDraftNetwork, PretrainedDrafter, Drafter):
    """A hidden-state drafter ("Make Every Draft Count", system Lyanna).

    Holds weights, configuration and, in `generation_config`, the drafting options; never the state of a call, so one
    drafter may serve several threads. Options, by the library's names where those exist:

    - `num_assistant_tokens`: depth of the draft, at most `num_draft_steps`;
    - `tree_size`, `beam_width`: nodes in all and nodes expanded per depth; a width of 1 drafts a chain;
    - `assistant_confidence_threshold`: nodes whose path is less probable than this are not drafted (0 keeps all);
    - `reuse`: what becomes of rejected drafts, `"none"`, `"ensemble"` or `"resample"`;
    - `reuse_weight`: weight of the old logits in `"ensemble"`;
    - `refinement`: share of the refiner, if one was trained, in the logits of drafted tokens; 0 for none;
    - `ngram_length`: nodes out of the text itself join the tree, found by leaders of up to so many tokens; 0 for none;
    - `ngram_continuation`: at most so many nodes of n-grams go on from the most probable drafted path; 0 for none;
    - `tree_sizing`: `"cost"` drafts and verifies what pays here, up to the sizes above, `"fixed"` always all of it;
    - `node_cost`, `depth_cost`: what a verified node and a drafted depth cost, in forwards of one token; measured in
      the first rounds if not given;
    - `packed_weights`: whether rounds on a CPU multiply by copies of the target's weights that are laid out for it; by
      default once a call has saved the time for that, if they take no more than 2 GiB;
    - `tree_builder`: `"beam"`, `"p_best"` for the best whole paths, or `"gumbel"` and `"stochastic_beam"`, which draw
      nodes instead of taking the best;
    - `verification`: `"walk"`, or `"rejection"` for drawn nodes, which accepts more at high temperature.
    """

    travels_as = ChainDrafter
    takes_tree_builders = True
    why_not_refined = ""
    own_options = (*REUSE_OPTIONS, *REFINER_OPTIONS)
    settled_options = tuple(option.name for option in own_options)  # not in a cascade, which takes tokens back
    why_not_exported = (
        "its states roll on from one depth to the next without tokens, and no format of another project has a trunk "
        "that does so"
    )

    def __init__(self, config: HSDraftConfig) -> None:
        super().__init__(config)
        self.generation_config = self.default_generation_config()

    def forward(
        self,
        taps: torch.Tensor,
        embeds: torch.Tensor,
        position_ids: torch.Tensor,
        starts: torch.Tensor | None = None,
        document_ids: torch.Tensor | None = None,
        context: DraftContext | None = None,
        num_draft_steps: int | None = None,
        num_rolled: int | None = None,
        labels: Any = None,
    ) -> DrafterOutput:
        """Reads accepted positions, then rolls hidden states forward without tokens (Lyanna, drafting phase).

        Args:
            taps: `[T, taps * D]`, the target's hidden states h_i at the tapped layers, side by side.
            embeds: `[T, D]`, embeddings of the accepted next tokens x_{i+1}.
            position_ids: `[T]`, int64, position i of each pair; those of a document follow one another.
            starts: `[S]`, int64, the pairs at which a chain starts; `None` for the last one only.
            document_ids: `[T]`, int64; pairs of other documents are not seen. `None` if all belong together. What
                the context holds belongs to them too, unless it says to which.
            context: what earlier calls read; `None` for nothing. Not changed.
            num_draft_steps: K of this call, the configuration's by default.
            num_rolled: chains rolled beyond g_0, the first ones of `starts`; `None` for all.
            labels: for training, what `loss_function(drafter, hidden_states, labels)` compares with. Computed in here,
                so that wrappers of the forward (data parallel, sharded, mixed precision) see all that is trained.
        """
        steps = self.config.num_draft_steps if num_draft_steps is None else num_draft_steps
        past = DraftContext() if context is None else context
        texts = PackedTexts(past, position_ids, document_ids, starts, self.config.sliding_window, steps)
        trunk = self.trunk()
        x, ropes = read(trunk, taps, embeds, position_ids, texts, steps - 1)
        states = roll(trunk, x, ropes, texts, num_rolled)
        loss = None if labels is None else self.loss_function(self, states, labels)
        return DrafterOutput(loss=loss, hidden_states=tuple(states), context=texts.context)

    @property
    def taps(self) -> Sequence[int]:  # type: ignore[override]
        return tuple(self.config.target_tap_layers)

    @property
    def num_draft_steps(self) -> int:  # type: ignore[override]
        return self.config.num_draft_steps

    @property
    def supposes(self) -> bool:
        """Whether its sessions can take back what they were told."""
        return self.config.sliding_window is None or self.config.sliding_window > _LEAST_WINDOW

    def default_generation_config(self) -> GenerationConfig:
        """The drafting options of a drafter that was saved without any."""
        config = self.config
        return default_options(config.num_draft_steps, config.tree_size, config.beam_width, self.own_options)

    def check_together(self, options: DraftOptions) -> None:
        check_refiners(self, options)
        reuse, _ = reuse_of(options.own)
        if options.tree_builder != "beam" and reuse != "none":
            raise ValueError(
                f"reuse={reuse!r} is invalid with tree_builder={options.tree_builder!r}: only beams can be merged"
            )

    def check(self, target: Any) -> None:
        check_sizes(self.config, target)

    def warn_of_misfit(self, target: Any, tokenizer: Any, all_processes: bool) -> None:
        if all_processes or has_other_tokens(self, tokenizer):
            warn_of_mismatch(target, self, tokenizer)  # that reads a text: all processes do so, or none

    def session(self, call: Call) -> HSDraftSession:
        modules = call.target.get_input_embeddings(), call.target.get_output_embeddings()
        working = quick_weights(self, *modules)
        return HSDraftSession(
            self,
            self.borrow(*modules, with_head=False),
            call.options,
            batch_size=call.rows,
            working=working,
            foresight=call.foresight,
            roll_out=self._compiled_roll_out(call, working),
            target=call.target,
        )

    def _compiled_roll_out(self, call: Call, working: QuickWeights) -> RollOut | None:
        """A compiled roll-out where the target's forwards are compiled, and the next call will find it again."""
        if working.spare is None or call.compile_config is None or call.slots is None:
            return None
        if self.device.type != device_of(call.target).type or call.rows > 1 or call.options.depth == 0:
            return None
        made = static_roll_out(self, working, call.slots, call.options.depth, call.compile_config)
        return call.stack.enter_context(made)

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        head = self.config.draft_vocab_size * self.config.hidden_size
        bias = weights_of(self.injector.up)
        return (
            Read("fusion", weights_of(self.fuse), 1, 1),
            *self._trunk_reads(depth),
            Read("head", head, 1, depth, borrowed=self.lm_head is None),
            Read("injector", weights_of(self.injector) - bias, depth, width),
            Read("token bias", bias, depth - 1, width),
        )

    def _trunk_reads(self, depth: int) -> Iterator[Read]:
        """The layers, each set of parameters as often as a draft runs it: `Trunk.step` says which step has which."""
        config, layers = self.config, [*self.layers]
        context, modules = config.num_hidden_layers - config.num_roll_layers, [*self.step_modules]
        if context:
            yield Read("context layers", weights_of(*layers[:context]), 1, 1)
        yield Read("trunk layers", weights_of(*layers[context:]), 1 if modules else depth, 1)
        for step, module in enumerate(modules, 1):
            times = max(depth - step, 0) if step == len(modules) else int(step < depth)
            yield Read(f"step module {step}", weights_of(module), times, 1)


__all__ = ["HSDrafter"]
