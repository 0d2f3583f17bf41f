"""The target in a call: taps, forwards over trees or chains, committing paths, rolling back the rest.

It alone owns the cache while a call runs. Its forwards may be accelerated without changing the output: compiled on
GPUs, grouped and packed on CPUs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import torch

from ..core.cache_name import given_cache
from ..core.draft_tree import DraftTree, TreeBatch
from ..core.refusals import DraftingRefused
from ..core.tensors import device_of, on_device
from ..cpu.background import is_compiling
from ..cpu.compiled_layers import CompiledLayers
from ..cpu.gguf_blocks import file_of
from ..cpu.grouped_attention import grouped_attention
from ..cpu.packing import Packing, has_copies, prompt_rows
from ..gpu.fixed_shapes import CompiledCalls, compiled
from ..gpu.varying_shapes import varying_shapes
from . import tree_reading
from .cache_slots import CacheSlots, as_given, text_cache
from .chain_reading import catch_up, commit_chains, read_chains
from .ended_rows import EndedRows, can_leave, read_missing
from .module_hooks import experience_of
from .static_cache import slots_of_prompts
from .target_limits import GRADIENTS, check_cache, decoder_layers, refusal, text_config
from .target_parts import LastState, decoder_list, reads_last
from .tree_reading import TargetOutput


def target_output(
    target: Any, outputs: Any, states_name: str, tap_layers: Sequence[int], last: LastState | None = None
) -> TargetOutput:
    """Extracts logits and taps of a forward; taps are empty without `tap_layers`.

    Raises a DraftingRefused if hidden states are missing, or not one vector per position.
    """
    logits, states = outputs.logits, outputs.get(states_name)
    states = states if last is None else last.behind(states)
    if not tap_layers:
        return TargetOutput(logits, logits.new_empty(*logits.shape[:-1], 0))  # no view, which would hold the logits
    if states and len(states) <= tap_layers[-1]:
        returned = f"and it returns only {len(states)}"
        raise refusal(target, f"the drafter reads hidden state {tap_layers[-1]} of its layers, {returned}.")
    missing = [layer for layer in tap_layers if states and states[layer] is None]
    if missing:
        left_out = "which it leaves out when it is asked for"
        raise refusal(target, f"the drafter reads hidden state {missing[0]} of its layers, {left_out}.")
    shapes = {tuple(states[layer].shape[:-1]) for layer in tap_layers} if states else set()
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        found = " and ".join(map(str, sorted(shapes))) or "none"
        raise refusal(target, f"its hidden states have to be one vector for each position; found {found}.")
    return TargetOutput(logits, torch.cat([states[layer].to(logits.device) for layer in tap_layers], dim=-1))


class Acceleration:
    """Runs the forwards of one call.

    Attributes:
        compile_config: for forwards over trees; `None` if they are not compiled.
        copied: whether earlier calls packed the weights.
        packed: whether forwards multiply by packed copies of the weights.
        packs: whether the next forward makes such copies, and takes longer for it.
        programs: whether decoder layers run as compiled programs; before the first round, whether that is likely.
        off: whether forwards run transformers' operators alone, as in a call that does not draft.
    """

    def __init__(self, target: Any) -> None:
        self._target, self._experience = target, experience_of(target)
        self._compiled: CompiledCalls | None = None
        self._packing: Packing | None = None
        self._layers: CompiledLayers | None = None
        self.compile_config: Any = None
        self.copied = has_copies(target)
        self.packed = self.packs = self.programs = self.off = False

    @property
    def has_blocks(self) -> bool:
        """Whether the target's weights were dequantised from a GGUF file, whose blocks products may use."""
        return file_of(self._target) is not None

    @property
    def compiling(self) -> bool:
        """Whether something is compiled beside the call."""
        return is_compiling()

    def compile(self, model_kwargs: dict[str, Any], generation_config: Any, states: Sequence[torch.Tensor]) -> None:
        """Compiles forwards into a static cache where `generate()` would compile its decoding step."""
        if self._target._valid_auto_compile_criteria(model_kwargs, generation_config):
            self._compiled = CompiledCalls(self._target, generation_config.compile_config, states)
            self.compile_config = self._compiled.config

    def compiled(self, function: Callable[..., None]) -> Callable[..., None]:
        """Compiles a function of fixed shapes if forwards are compiled."""
        return function if self._compiled is None else compiled(function, self.compile_config)

    @contextlib.contextmanager
    def of_prompts(self, asked_for: bool | None, programs: bool | None, room: int, rows: int) -> Iterator[None]:
        """Within, the prompts' forward over so many `rows` runs as rounds do, if earlier calls have packed the weights.

        The others are as for `begin`.
        """
        if not self.copied or asked_for is False or rows > prompt_rows(self._target.dtype, room):
            yield
            return
        self.begin(asked_for, room, programs)
        with self._in_use():
            yield

    def begin(self, asked_for: bool | None, room: int, programs: bool | None = False) -> None:
        """Packs weights or reuses those of earlier calls. Not with compiled forwards: these would be compiled again.

        Args:
            asked_for: the option `packed_weights`.
            programs: the option `compiled_layers`.
            room: number of tokens that the call may emit.
        """
        if self._packing is not None and not self._compiled:  # for the prompts
            return
        self._layers = None
        self._packing = Packing(self._target, False if self._compiled else asked_for)
        self.packs = self._packing.begin(room)
        self.packed = self._packing.weights is not None
        if programs is not False and self._compiled is None and device_of(self._target).type == "cpu":
            with contextlib.suppress(ValueError):  # no list of layers
                name, layers = decoder_list(self._target)
                packing, model = self._packing, self._target.get_submodule(name.rpartition(".")[0])
                self._layers = CompiledLayers(list(layers), programs, lambda: packing.may_pack, self._target, model)
                # most likely again, so costs are known at once
                self.programs = self.packed and self._experience.programs
                if self._packing.weights is not None:
                    self.packs |= self._packing.weights.join(self._layers.new_groups())

    @property
    def compiled_layers(self) -> bool:
        """Whether rounds of this call ran layers as programs."""
        return self._layers is not None and self._layers.running

    def after_round(self, grown: int = 1) -> bool:
        """Counts a round that grew a text by `grown`; whether forwards became quicker: their costs change."""
        if self._packing is None or self.off:
            return False
        before = self.packed, self.programs
        self.packs = self._packing.after_round(grown)
        self.packed = self._packing.weights is not None
        if self._layers is not None:
            compiled = self._layers.after_forward()
            self.packs = self.packs or compiled  # the first forward compares them with the layers
            if self._packing.weights is not None and self._packing.weights.join(self._layers.new_groups()):
                self.packs = True
            self.programs = self._experience.programs = self._layers.running
        return (self.packed, self.programs) != before

    def of_rounds(self, slots: CacheSlots) -> contextlib.AbstractContextManager[None]:
        """What is in force after the prompts: shapes vary, unless the cache is static."""
        return varying_shapes(device_of(self._target)) if slots.size is None else contextlib.nullcontext()

    def forward(self, inputs: dict[str, Any], comes_again: bool, model: Any = None) -> Any:
        """Returns the target's outputs.

        Args:
            comes_again: whether many forwards have inputs of this shape, so that compiling pays off.
            model: runs instead of the target, and is made of its layers.
        """
        runs = self._target if model is None else model
        if self._compiled is not None and comes_again and model is None:
            return self._compiled.forward(inputs)
        with self._in_use(model is None):
            return runs(**inputs, return_dict=True)

    @contextlib.contextmanager
    def _in_use(self, whole: bool = True) -> Iterator[None]:
        """Within, forwards are accelerated; `whole` if the target's own run."""
        with contextlib.ExitStack() as stack:
            if not self.off:
                stack.enter_context(grouped_attention(device_of(self._target)))
            if self._packing is not None and not self.off:
                inside = self._layers.inside if self._layers and whole else ()
                place_rest = stack.enter_context(self._packing.in_use(inside))
                if self._layers:
                    stack.enter_context(self._layers.in_use(whole, place_rest))
            yield


class TargetRuntime(tree_reading.TargetCall):
    """A target in one `generate()` call: sole owner of its cache and model inputs.

    Args:
        tap_layers: indices into its `hidden_states`, of which taps are made.
        model_kwargs: what `generate()` would pass to its decoding method.

    Attributes:
        trees: whether drafts are read as trees; chains otherwise. `findings` finds out.
        kinds: kinds of attention that need separate masks, once trees are prepared.
        num_texts: number of rows of the call; `rows` has those that are still read.
        cached_before: number of slots that the call's cache had filled at first.
        ended: where rows may leave the batch, what tracks them; `None` elsewhere.
        outputs: of the last forward.
        columns, read_again: the drafts' columns in it, and the columns before them that were read again.
        batch: the trees read last, on the device; `None` if they were read as chains or ahead.
        ahead: set by methods that read nodes before: `verify(trees, columns)` verifies unless it returns `None`.
        reused_share: share of the layers' work in verifying trees that `ahead` had done before.
    """

    def __init__(self, target: Any, tap_layers: Sequence[int], model_kwargs: dict[str, Any]) -> None:
        super().__init__(target, model_kwargs, Acceleration(target))
        self.trees, self.kinds, self.reused_share = True, list[tree_reading.AttentionKind](), 0.0
        self.ahead: Any = None
        self.num_texts = self.cached_before = self._prompt_length = 0
        self.tap_layers = list(tap_layers)
        layers = decoder_layers(text_config(target)) if tap_layers else 0
        asked = [tap for tap in tap_layers if tap <= layers]
        norm = reads_last(target) if len(asked) < len(tap_layers) else None
        self._last_state = None if norm is None else LastState(norm, layers)
        if asked and not self.kwargs.get("output_hidden_states"):
            # transformers drops indices beyond the encoder's layers, so an encoder-decoder returns all states.
            self.kwargs["output_hidden_states"] = True if target.config.is_encoder_decoder else asked
        self.outputs: Any = None
        self.batch: TreeBatch | None = None
        self.columns = self.read_again = 0
        self.ended: EndedRows | None = None
        self._keeps_slots = True
        if (cache := given_cache(self.kwargs)) is not None:
            check_cache(target, cache)

    def prefill(self, input_ids: torch.Tensor, generation_config: Any) -> TargetOutput:
        """Reads the prompts `[B, length]`, except for what the cache already holds, as plain decoding does.

        The taps are of the positions read last, padding included. With `prefill_chunk_size` they are the last chunk's:
        the drafter then starts with that much context. Raises a DraftingRefused if the cache cannot roll back.
        """
        self.num_texts, self._prompt_length = input_ids.shape
        self._generation_config = generation_config
        before = given_cache(self.kwargs)
        self.cached_before = 0 if before is None else int(before.get_seq_length())
        with as_given(before), self._last_state_kept():
            self.outputs = self.target._prefill(input_ids, generation_config, self.kwargs)
            self.hold(self.outputs, self.num_texts)
            read = self._output()
            if read.logits.requires_grad:  # by something that `why_gradients` does not see, such as a hook
                raise DraftingRefused(GRADIENTS)
            states = self.outputs[self.names.states] if self.records and self.names.states in self.recorded else ()
            if any(each.dim() != 3 for each in states):
                raise refusal(self.target, "hidden states that the call returns are not one vector for each position.")
        expected = slots_of_prompts(self.target, input_ids, generation_config, self.kwargs, self.cached_before)
        self.drops = not self.slots.hold(expected)
        self.slots.keep_past()  # not earlier: a sliding layer would keep the whole prompt
        self.go_on(self.outputs, 1)
        return read

    def prepare_trees(self) -> str:
        """Prepares for trees; returns why they are not possible, or an empty string."""
        try:
            self.kinds = tree_reading.kinds_of_attention(self)
        except ValueError as error:
            return str(error)
        return ""

    def read_chains(self) -> None:
        """Switches to chains; only with one text, as rows of a batch may differ in length by now."""
        self.trees, self.fixed = False, 0

    @property
    def can_read_ahead(self) -> bool:
        """Whether nodes can be read after the texts and dropped again: the cache grows, and attention takes masks."""
        return self.trees and bool(self.kinds) and self.slots.static is None and not self.recurrent

    def make_room(self, columns: int) -> None:
        """Makes the cache grow in place, where its layers can and attention takes views of any strides.

        A static cache does not grow: there every forward over trees has as many columns as the largest tree, and is
        compiled where `generate()` would compile its decoding step.
        """
        if self.slots.static is not None:
            if self.trees:
                self.fixed = columns
                self.acceleration.compile(self.kwargs, self._generation_config, self.slots.static.states)
        elif text_config(self.target)._attn_implementation in ("sdpa", "eager"):
            self.slots.make_room()

    def verify(self, trees: Sequence[DraftTree], input_ids: torch.Tensor, padding: int = 0) -> TargetOutput:
        """Reads a tree for each row in one forward; column i of the output belongs to node i.

        `input_ids` `[B, length]` are the texts of the whole call up to the roots; arbitrary for rows that have left.
        Chains that are shorter than others end with tokens `padding`.
        """
        self.outputs = self.batch = None  # a compiled forward reuses that memory
        self.columns = max(map(len, trees))
        plain_step = len(trees) == 1 and self.columns == 1  # runs plain decoding's forward, which is compiled too
        if self.slots.left >= self.fixed and not plain_step:
            self.columns = max(self.columns, self.fixed)
        # `input_ids` and the model's inputs still have rows that have left.
        with self._last_state_kept():
            if self.trees and (self.columns > 1 or len(trees) > 1 or self.ended is not None):
                self.outputs, self.read_again = self._read_trees(trees), 0
            else:
                self.outputs, self.read_again = read_chains(self, trees, input_ids, self.columns, padding), self.unread
        return self._output().last(self.columns)

    def _read_trees(self, trees: Sequence[DraftTree]) -> Any:
        kept = self.rows.kept
        if self.ahead is not None and (outputs := self.ahead.verify(trees, self.columns)) is not None:
            return outputs
        if self.columns == 1 and self.slots.static is None and min(kept) == max(kept) == self.length:
            return tree_reading.read_roots(self, trees, self.kinds)
        self.batch = TreeBatch.of(trees, device_of(self.target), self.columns)
        return tree_reading.read_batch(self, self.batch, self.kinds)

    def _last_state_kept(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._last_state is None else self._last_state.kept()

    def _output(self) -> TargetOutput:
        return target_output(self.target, self.outputs, self.names.states, self.tap_layers, self._last_state)

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Keeps root and accepted path of the trees read last in every cache layer, and drops the other nodes.

        Paths are `None` for rows that have ended. Where rows are `in_step`, all paths are equally long.
        """
        if self.trees and not self.drops:  # otherwise only roots were read, and slots no longer match positions
            tree_reading.commit_trees(self, paths, self.columns)
        else:
            commit_chains(self, max(map(tree_reading.tokens_kept, paths)), self.outputs, self.columns)

    def finish(self, input_ids: torch.Tensor) -> None:
        """Leaves the cache as plain decoding of the texts `[B, length]` would, whose last token is never read."""
        end = self._end(input_ids.shape[1])
        with self.undone_on_error():
            if self.unread:
                catch_up(self, input_ids[:, :-1])
            if not self.recurrent:
                self.slots.drop(max(self.length - end, 0))
        self.slots.clear_rest()
        self._release()

    def _end(self, length: int) -> int:
        """Number of slots that plain decoding of texts of `length` tokens fills."""
        return (self.rows.gapless or self.rows).prompt_slots + length - self._prompt_length - 1

    def rejoin(self, new_tokens: Sequence[int]) -> None:
        """Brings all rows back, in order, into a cache that outlives the call.

        `new_tokens` are their numbers of tokens after the prompt. Slots beyond these hold no text. Chains have read
        padding already.
        """
        if not self.trees:
            return
        tree_reading.close_gaps(self)
        self.leaves_gaps = False
        if self.ended is not None:
            self.rows = self.ended.put_back(self.cache, self.rows)
        slots = (self.rows.prompt_slots + count for count in new_tokens)
        self.rows = replace(self.rows, kept=[min(pair) for pair in zip(self.rows.kept, slots, strict=True)])

    def lacks(self, length: int) -> bool:
        """Whether the cache lacks tokens that plain decoding of texts of `length` tokens has read in some row."""
        return self.trees and not self.drops and min(self.rows.kept) < self._end(length)

    def read_missing(self, input_ids: torch.Tensor) -> None:
        """Reads some of these tokens of the texts `[B, length]`, padding included, in one forward."""
        self.outputs = self.batch = None
        with self.undone_on_error():
            read_missing(self, input_ids[:, self._prompt_length :].tolist(), self._end(input_ids.shape[1]), self.kinds)

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Rolls the cache back if an exception, including an interrupt, is raised inside."""
        self.entered, unread = self.slots.mark(), self.unread
        entered = self.entered
        try:
            yield
        except BaseException:
            self.slots.roll_back(entered)
            self.unread = unread
            raise

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Restores the normal behaviour of the caller's cache if an exception ends the call."""
        try:
            yield
        except BaseException:
            if hasattr(self, "slots"):
                self._release()
            raise

    def _release(self) -> None:
        self.slots.release()
        self.ahead = None  # it refers to this call

    def apart(self) -> Self:
        trial = super().apart()
        trial.ahead = trial.outputs = None  # these belong to the call itself
        return trial

    def apart_of(self, places: Sequence[int]) -> Self:
        """As `apart`, for some rows of the batch only, with a copy of their cache."""
        trial, before, names = self.apart(), len(self.rows.kept), self.names
        rows = on_device(places, device_of(self.target))
        for name, axis in ((names.mask, 0), (names.positions, -2), ("inputs_embeds", 0)):
            value = trial.kwargs.get(name)
            if value is not None and value.shape[axis] == before:
                trial.kwargs[name] = value.index_select(axis, rows.to(value.device))
        trial.slots, trial.rows = self.slots.of_rows(places), self.rows.of(places)
        return trial

    def let_rows_leave(self, keep: bool) -> bool:
        """Prepares for `keep_rows`, with `keep` if the cache outlives the call; returns whether that is possible."""
        if self.trees and self.rows_can_be_apart:
            self.ended = EndedRows(len(self.rows.kept), keep)
        return self.ended is not None

    def leave_gaps(self, keep: bool) -> None:
        """Lets rounds without drafts leave gaps between tokens, where slots need no order; closed with `keep`.

        Not in a cache of the caller's, which has to be in order after an interrupt too.
        """
        in_place = self.slots.static is None and not text_cache(self.cache).offloading
        alike = self.trees and in_place and not any(kind.width for kind in self.kinds)
        self.leaves_gaps = alike and not getattr(self.cache, "_is_user_defined", False)
        self._keeps_slots = keep

    @property
    def rows_can_be_apart(self) -> bool:
        """Whether cache and inputs allow reading some rows without the others."""
        decoder = self.target.config.is_encoder_decoder
        return not decoder and can_leave(self.target, self.kwargs, self.names.by_rows, self.cache)

    def keep_rows(self, places: Sequence[int]) -> None:
        """Restricts forwards to rows by their places in the current batch, after the others' last tokens were read."""
        assert self.ended is not None
        if self._keeps_slots:
            tree_reading.close_gaps(self)
        self.rows = self.ended.take_out(self.cache, places, self.rows)
        self.slots.drop(self.length - max(self.rows.kept))

    @property
    def records(self) -> bool:
        """Whether the call returns attentions or hidden states of each token."""
        wanted = self._generation_config
        return bool(wanted.return_dict_in_generate and (wanted.output_hidden_states or wanted.output_attentions))

    @property
    def recorded(self) -> list[str]:
        """Which of the requested hidden states and attentions the last outputs contain; some models have none."""
        config, names, outputs = self._generation_config, self.names, self.outputs
        wanted = [names.states] if config.output_hidden_states else []
        wanted += names.attentions if config.output_attentions else ()
        return [name for name in wanted if outputs.get(name) and outputs[name][0] is not None]

    @property
    def cache(self) -> Any:
        return self.slots.cache

    @property
    def length(self) -> int:
        return self.slots.length

    @property
    def deepest(self) -> int:
        """Maximum depth of a draft for the room left in the cache."""
        return self.slots.left - 1 if self.slots.left >= self.fixed else 0

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the target's inputs in a forward, but for those that ask for outputs."""
        names = (name for name, value in self.kwargs.items() if value is not None)
        return tuple(sorted(name for name in names if not name.startswith("output_")))

    @property
    def recurrent(self) -> bool:
        """Whether layers of the target keep a state that cannot drop tokens."""
        return self.slots.recurrent

    @property
    def refusal(self) -> DraftingRefused | None:
        """The refusal if forwards so far have lost slots of the cache."""
        return tree_reading.dropped(self.target) if self.drops else None

    @property
    def in_step(self) -> bool:
        """Whether all rows must accept equally many tokens: only a tree's mask can separate rows."""
        return not self.trees and len(self.rows.kept) > 1
