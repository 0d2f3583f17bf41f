"""All we need of a target: taps, a forward over trees or chains, committing paths, rolling back the rest.

The only owner of a cache while a call runs. `target_limits` says what model and cache tell of themselves, `tree_masks`
makes the masks, and `target_probe` tries what cannot be asked.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    StaticCache,
)
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)

from ..acceleration.cpu.grouped_attention import grouped_attention
from ..acceleration.cpu.packed_weights import PackedWeights
from ..common.tensors import on_device
from ..trees.draft_tree import DraftTree
from ..trees.tree_masks import TreeBatch, as_attention_takes_it, attention_kinds, tree_mask
from .ended_rows import EndedRows, can_leave
from .growing_cache import GrowingLayer, give_room_back, make_room
from .static_cache import CompiledCalls, StaticSlots, move_slots
from .target_limits import cache_layers, recurrent_layers, text_config, why_no_trees, why_refused


@dataclass(frozen=True)
class TargetOutput:
    """One target forward over B sequences.

    Attributes:
        logits: `[B, rows, V]`, of the prompt's last position, or of each node of a tree.
        taps: `[B, rows, taps * D]`, the tapped hidden states side by side; for a prompt, of the positions it read.
    """

    logits: torch.Tensor
    taps: torch.Tensor


_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")

# Tokens that recurrent layers may have to read again before they are read in a forward of their own.
_MOST_UNREAD = 12


@dataclass(frozen=True)
class Mark:
    """Where a cache stands.

    Attributes:
        slots: that are filled.
        copies: of the layers that cannot drop tokens, by index.
        held: what the other layers hold, by index and attribute; see `_held_by`.
    """

    slots: int
    copies: dict[int, Any]
    held: dict[int, dict[str, Any]]


class TargetRuntime:
    """A target in one `generate()` call: the only owner of its cache and of its model inputs.

    Args:
        target: the model being decoded.
        tap_layers: indices into its `hidden_states`.
        model_kwargs: what `generate()` would pass to its decoding method.
    """

    def __init__(self, target: Any, tap_layers: Sequence[int], model_kwargs: dict[str, Any]) -> None:
        self.target = target
        self.cache: Any = None
        self.trees = True  # what `target_probe` found; chains otherwise
        self._tap_layers = self.tap_layers = list(tap_layers)
        self._kwargs = dict(model_kwargs)
        self._is_encoder_decoder = target.config.is_encoder_decoder
        prefix = "decoder_" if self._is_encoder_decoder else ""
        self._mask_key, self._position_key = f"{prefix}attention_mask", f"{prefix}position_ids"
        self._states_key = f"{prefix}hidden_states"
        if self._tap_layers and not self._kwargs.get("output_hidden_states"):
            self._kwargs["output_hidden_states"] = self._tap_layers
        self._kept: list[int] = []  # slots that hold the text of each row
        self.num_texts = 0  # rows of the call; `num_rows` are those that are still read
        self._prompt_slots = self._prompt_length = 0
        self._attended: torch.Tensor | None = None
        self._last_positions: torch.Tensor | None = None
        self._kinds: list[Any] = []
        self._raw: Any = None  # what the last forward returned
        self._read = self._columns = 0  # the columns it read, and those of the drafts among them
        self._recurrent = False
        self._windows: dict[int, int] = {}  # widths of the layers that keep a window, by index
        self._entered: Mark | None = None  # where the cache stood before the round
        self._unread = 0  # accepted tokens that recurrent layers have been put back before
        self._mark: Mark | None = None  # before the drafts read last, where layers are recurrent
        self._static: StaticSlots | None = None  # of a static cache
        self._fixed = 0  # columns of every forward over trees there
        self._compiled: CompiledCalls | None = None
        self._ended: EndedRows | None = None  # where rows may leave the batch
        self._packed: PackedWeights | None = None
        self.forwards = 0
        self.cached_before = 0  # slots the cache of the call came with
        if self._kwargs.get("past_key_values") is not None:
            self._refuse_unless_possible(self._kwargs["past_key_values"])

    def prefill(self, input_ids: torch.Tensor, generation_config: Any) -> TargetOutput:
        """Reads the prompts `[B, length]`, less what the cache already holds, as plain decoding does.

        The taps are those of the last positions read, padding among them included. With `prefill_chunk_size` they are
        the last chunk's: the drafter then starts with that much context.

        Raises:
            ValueError: the target cannot take back what was rejected; the message says what is missing.
        """
        before = self._kwargs.get("past_key_values")
        self.cached_before = 0 if before is None else int(before.get_seq_length())
        outputs = self._raw = self.target._prefill(input_ids, generation_config, self._kwargs)
        self.forwards += 1
        self.cache = getattr(outputs, "past_key_values", None)
        self._refuse_unless_possible(self.cache)
        if isinstance(self.cache, StaticCache):
            self._static = StaticSlots(self.cache)
        self._generation_config = generation_config
        # Not before: a window's layer would keep the whole prompt.
        for layer in cache_layers(self.cache):
            if layer.is_croppable and hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        self._recurrent = bool(recurrent_layers(self.cache))
        self._prompt_slots = self.length
        held = {
            int(layer.get_seq_length())
            for layer in cache_layers(self.cache)
            if getattr(layer, "keys", None) is not None
        }
        if held - {self._prompt_slots}:
            raise ValueError(
                f"{type(self.target).__name__} cannot be drafted for: some layers of its cache hold more than "
                "the text, which cannot be told from what was rejected."
            )
        self._windows = {
            index: int(layer.sliding_window)
            for index, layer in enumerate(cache_layers(self.cache))
            if isinstance(layer, DynamicSlidingWindowLayer)
        }
        self.num_texts = input_ids.shape[0]
        self._kept = [self._prompt_slots] * self.num_texts
        self._prompt_length = input_ids.shape[1]
        mask = self._kwargs.get(self._mask_key)
        if mask is not None:
            self._attended = mask[:, -self._prompt_slots :].bool().to(self.target.device)
        positions = self._kwargs.get(self._position_key)
        if positions is not None:
            self._last_positions = positions[..., -1].to(self.target.device)
        self._kwargs = self._updated(outputs, 1)
        return self._output(outputs)

    def _refuse_unless_possible(self, cache: Any) -> None:
        reason = why_refused(self.target, cache)
        if reason:
            raise ValueError(f"{type(self.target).__name__} cannot be drafted for: {reason}.")

    @property
    def attended(self) -> torch.Tensor | None:
        """`[B, slots of the prompt]`, bool, which of them are no padding; `None` if there is none."""
        return self._attended

    @property
    def next_positions(self) -> list[int] | None:
        """After the prompt's forward, the target's own position of each row's next token; `None` if it is given none.

        Of several axes the greatest.
        """
        if self._last_positions is None:
            return None
        last = self._last_positions.reshape(-1, self._last_positions.shape[-1]).amax(dim=0)
        return (last.expand(self.num_rows) + 1).tolist()

    @property
    def num_rows(self) -> int:
        return len(self._kept)

    @property
    def recurrent(self) -> bool:
        """Whether layers of the target keep a state that cannot drop tokens."""
        return self._recurrent

    @property
    def in_step(self) -> bool:
        """Whether all rows have to accept equally many tokens: only a tree's mask can tell rows apart."""
        return not self.trees and len(self._kept) > 1

    def apart(self) -> TargetRuntime:
        """A runtime for trials: it shares target and cache, which a mark puts back, and nothing else that changes."""
        trial = copy.copy(self)
        trial._kwargs, trial._kept, trial._entered = dict(self._kwargs), list(self._kept), None
        return trial

    def read_chains(self) -> None:
        """From here on drafts are chains; only where one text is read, as rows of a batch may be at odds by now."""
        self.trees, self._fixed = False, 0

    def prepare_trees(self) -> str:
        """Gets ready for trees; returns why there can be none, or nothing."""
        reason = why_no_trees(self.target, self.cache)
        if not reason and self._last_positions is None:
            reason = "no position_ids reach it, and siblings in a tree share a position"
        if reason:
            return reason
        own = [getattr(layer, "keys", None) is not None for layer in cache_layers(self.cache)]
        try:
            self._kinds = attention_kinds(text_config(self.target), own)
        except ValueError as error:
            return str(error)
        return ""

    def make_room(self, columns: int) -> None:
        """From here on the cache grows in place, where its layers can and attention takes views of any strides.

        A static one does not grow: there every forward over trees has as many columns, padding included, and is
        compiled where `generate()` would compile its decoding step.

        Args:
            columns: of the greatest tree that will be drafted, the root's included.
        """
        if self._static is not None:
            if self.trees:
                self._fixed = columns
                if self.target._valid_auto_compile_criteria(self._kwargs, self._generation_config):
                    compile_config = self._generation_config.compile_config
                    self._compiled = CompiledCalls(self.target, compile_config, self._static)
        elif text_config(self.target)._attn_implementation in ("sdpa", "eager"):
            make_room(self._text_cache)

    @property
    def can_pack(self) -> bool:
        """Whether forwards may multiply by packed copies of the weights: compiled ones would be compiled anew."""
        return self._compiled is None

    def multiply_by(self, packed: PackedWeights | None) -> None:
        """From here on forwards multiply by these copies of the weights."""
        self._packed = packed

    @property
    def packed(self) -> bool:
        return self._packed is not None

    def let_rows_leave(self, keep: bool) -> bool:
        """Prepares for `read_only`; returns whether that is possible with this cache and what the target is given.

        Args:
            keep: the cache is for more than this call.
        """
        known = (self._mask_key, self._position_key, "inputs_embeds", "output_hidden_states")
        if self.trees and not self._is_encoder_decoder and can_leave(self.target, self._kwargs, known, self.cache):
            self._ended = EndedRows(self.num_rows, keep)
        return self._ended is not None

    def read_only(self, staying: Sequence[int]) -> None:
        """From here on forwards are of some rows alone, in this order; the others have ended, and their end was read.

        Args:
            staying: their places in the batch as it is read now.
        """
        assert self._ended is not None
        before = self.num_rows
        self._ended.take_out(self.cache, staying, self._kept)
        self._kept = [self._kept[place] for place in staying]
        places = on_device(staying, self.target.device)
        if self._attended is not None and len(self._attended) == before:
            self._attended = self._attended[places]
        if self._last_positions is not None and self._last_positions.shape[-1] == before:
            self._last_positions = self._last_positions[..., places]
        self._drop(self.length - max(self._kept))

    @property
    def length(self) -> int:
        """Slots that the cache has filled."""
        return self.cache.get_seq_length() if self._static is None else self._static.filled

    @property
    def compile_config(self) -> Any:
        """By which forwards over trees are compiled; `None` if they are not."""
        return None if self._compiled is None else self._compiled.config

    @property
    def slots(self) -> int | None:
        """Of a static cache, filled or not; `None` of one that grows."""
        return None if self._static is None else self._static.size

    @property
    def deepest(self) -> int:
        """How deep a draft may be for the room that is left in the cache."""
        if self._static is None:
            return sys.maxsize
        left = self._static.left - 1
        return left if left + 1 >= self._fixed else 0

    @property
    def _text_cache(self) -> Any:
        return getattr(self.cache, "self_attention_cache", self.cache)

    def verify(self, trees: Sequence[DraftTree], input_ids: torch.Tensor) -> TargetOutput:
        """Reads a tree for each row in one forward; column i of the output belongs to node i.

        Args:
            input_ids: `[B, length]`, the texts of all rows of the call up to and with the roots, left of them anything.
        """
        self._raw = None  # a compiled forward writes there again
        self._columns = max(map(len, trees))
        plain_step = len(trees) == 1 and self._columns == 1  # as plain decoding takes it, whose forward is compiled too
        if self._static is not None and self._static.left >= self._fixed and not plain_step:
            self._columns = max(self._columns, self._fixed)
        # Of rows that have left, `input_ids` and the model's inputs still tell.
        if self.trees and (self._columns > 1 or len(trees) > 1 or self._ended is not None):
            self._read = self._columns
            self._raw = self._read_trees(trees)
            return self._output(self._raw)
        if any(list(tree.parents) != list(range(-1, len(tree) - 1)) for tree in trees):
            raise ValueError("a tree that branches was drafted for a target that reads chains only")
        if self._unread > _MOST_UNREAD:
            self._catch_up(input_ids[:, :-1])
            self._entered = None
        self._mark = (self._entered or self.mark()) if self._recurrent else None
        size = self._columns
        rows = [[*tree.tokens[1:], *[tree.tokens[0]] * (size - len(tree))] for tree in trees]
        drafted = torch.tensor(rows, dtype=input_ids.dtype, device=input_ids.device).view(len(rows), size - 1)
        self._read = self._unread + size
        self._raw = self._read_on(torch.cat([input_ids, drafted], dim=1), self._read)
        return self._output(self._raw, size)

    def commit(self, trees: Sequence[DraftTree], paths: Sequence[Sequence[int] | None]) -> None:
        """Keeps root and accepted path of the trees read last in every cache layer, and drops the other nodes.

        Args:
            paths: `None` for rows that have ended, of which nothing is kept. Where the rows are `in_step`, all paths
                are equally long.
        """
        if self.trees:
            self._commit_trees(paths)
            return
        length, size = max(_kept_of(path) for path in paths), self._columns
        self._kept = [slots + length for slots in self._kept]
        if length:
            self._kwargs = self._updated(self._raw, length)
        if self._mark is None:
            self._drop(size - length)
            return
        if length == size:
            self._unread = 0
        else:
            self.roll_back(self._mark)
            self._unread += length
        self._forget_past()

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Whatever is read inside is taken out of the cache again if an exception, also an interrupt, comes through."""
        mark, unread = self.mark(), self._unread
        self._entered = mark
        try:
            yield
        except BaseException:
            self.roll_back(mark)
            self._unread = unread
            raise

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """The cache is the caller's again, and works as before, if an exception ends the call."""
        try:
            yield
        except BaseException:
            if self.cache is not None:
                self._release()
            raise

    def mark(self, before_commit: bool = False) -> Mark:
        """Where the cache stands.

        Args:
            before_commit: also copy layers that a commit makes forget what came before, windows and convolutions.
        """
        copies, held = {}, {}
        for index, layer in enumerate(cache_layers(self.cache)):
            forgets = index in self._windows or isinstance(layer, LinearAttentionCacheLayerMixin)
            if (self._recurrent and not layer.is_croppable) or (before_commit and forgets):
                copies[index] = copy.deepcopy(layer)
            elif self._static is None:
                held[index] = _held_by(layer)
        return Mark(self.length, copies, held)

    def restore(self, mark: Mark) -> None:
        """As `roll_back`, also after a commit, if the mark was made for that."""
        for index, width in self._windows.items():
            cache_layers(self.cache)[index].sliding_window = width
        self.roll_back(mark)

    def roll_back(self, mark: Mark) -> None:
        """Puts the cache back to a mark, once.

        A forward may have stopped between two layers, or between the keys and the values of one. So nothing is
        concluded from what one tensor has grown by to another.
        """
        if self._static is not None:
            self._static.fill(mark.slots)
            return
        layers = cache_layers(self.cache)
        for index, layer in enumerate(layers):
            if index in mark.copies:
                layers[index] = mark.copies[index]
            else:
                vars(layer).update(mark.held[index])
                _cut(layer, mark.slots)

    def finish(self, input_ids: torch.Tensor) -> None:
        """Leaves the cache as plain decoding would.

        Args:
            input_ids: `[B, length]`, the finished texts, of which the last token is never read.
        """
        new_tokens = input_ids.shape[1] - self._prompt_length
        end = self._prompt_slots + new_tokens - 1
        with self.undone_on_error():
            if self._unread:
                self._catch_up(input_ids[:, :-1])
            if self._ended is not None:
                self._ended.put_back(self.cache, end)
            if not self._recurrent:
                self._drop(max(self.length - end, 0))
        self._release()

    def _drop(self, count: int) -> None:
        """Takes the last `count` slots out of the cache."""
        if self._static is None:
            self.cache.crop(-count)
        else:
            self._static.fill(self._static.filled - count)

    def _release(self) -> None:
        """Makes the layers of the cache work as they did before the call."""
        give_room_back(self._text_cache)
        layers = cache_layers(self.cache)
        for index, width in self._windows.items():
            layers[index].sliding_window = width
        self._forget_past()
        for layer in layers:
            if getattr(layer, "record_past", False):
                layer.record_past = False

    def _forget_past(self) -> None:
        """Lets windows and convolutions drop what no later forward reads."""
        for layer in cache_layers(self.cache):
            if getattr(layer, "record_past", False):
                layer.crop(0)

    def prompt_outputs(self, row: int, states: bool, attentions: bool) -> dict[str, tuple[torch.Tensor, ...]]:
        """Hidden states and attentions of the prompt's forward, of one row."""
        return {
            name: tuple(layer[row : row + 1] for layer in self._raw[name]) for name in self._names(states, attentions)
        }

    def node_outputs(
        self, row: int, path: Sequence[int], states: bool, attentions: bool
    ) -> dict[str, tuple[torch.Tensor, ...]]:
        """Those of the last node of `path`, from the root on, as plain decoding returns them for one token."""
        outputs = {}
        first = self._read - self._columns  # before it stand tokens that were read again
        path = [first + node for node in path]
        for name in self._names(states, attentions):
            layers = self._raw[name]
            if name == self._states_key:
                outputs[name] = tuple(layer[row : row + 1, path[-1] : path[-1] + 1].clone() for layer in layers)
            else:
                weights = [layer[row : row + 1, :, path[-1] : path[-1] + 1] for layer in layers]
                own = name != "cross_attentions"
                outputs[name] = tuple(self._of_text(weights, row, path) if own else weights)
        return outputs

    def _names(self, states: bool, attentions: bool) -> list[str]:
        names = [self._states_key] if states else []
        if attentions:
            names += ["decoder_attentions", "cross_attentions"] if self._is_encoder_decoder else ["attentions"]
        # Some models never return attentions.
        return [name for name in names if self._raw.get(name) and self._raw[name][0] is not None]

    def _of_text(self, weights: Sequence[torch.Tensor], row: int, path: Sequence[int]) -> Iterator[torch.Tensor]:
        """Of each layer's weights `[1, heads, 1, kv]` over the cache and all nodes, those of the row's own text."""
        first = self._read - self._columns
        path = [*range(first), *path]
        # Slots of other rows' longer paths.
        left_over = self.length - self._read - (self._kept[row] - first)
        for index, layer in enumerate(weights):
            empty = 0 if self._static is None else layer.shape[-1] - self.length  # slots beyond the nodes
            cached = layer.shape[-1] - empty - self._read
            text = torch.cat([layer[..., : cached - left_over], layer[..., [cached + node for node in path]]], dim=-1)
            if self._static is not None:
                text = F.pad(text, (0, layer.shape[-1] - text.shape[-1]))
            yield text[..., -self._windows[index] :] if index in self._windows else text

    def _read_trees(self, trees: Sequence[DraftTree]) -> Any:
        device = self.target.device
        batch, size, slots = TreeBatch.of(trees, device, self._columns), self._columns, self.length
        kept = on_device(self._kept, device)
        assert self._last_positions is not None
        ahead = (kept - self._prompt_slots + 1)[:, None] + batch.depths
        layers, beyond = cache_layers(self.cache), 0 if self._static is None else self._static.left - size
        attention = text_config(self.target)._attn_implementation
        masks = {}
        for kind in self._kinds:
            kv_length = layers[kind.layer].get_mask_sizes(size)[0] - beyond
            seen = F.pad(tree_mask(batch, kind, self._attended, kept, slots, kv_length), (0, beyond))
            masks[kind.name] = as_attention_takes_it(seen, attention, layers[kind.layer].keys.dtype)
        mask: Any = masks if len(masks) > 1 else next(iter(masks.values()))
        # For a static cache a causal one would be made here, and its length read back.
        known = mask if self._static is not None and isinstance(mask, torch.Tensor) else None
        inputs = self._inputs(batch.tokens, size, known, positions=self._last_positions[..., None] + ahead)
        inputs[self._mask_key] = mask
        return self._forward(inputs, size)

    def _forward(self, inputs: dict[str, Any], size: int) -> Any:
        """Outputs of the target for `size` columns, compiled where they are of a shape that comes again."""
        self.forwards += 1
        if self._compiled is not None and size in (1, self._fixed):
            outputs = self._compiled.forward(inputs)
        else:
            with (
                grouped_attention(self.target.device),
                self._packed.in_use() if self._packed else contextlib.nullcontext(),
            ):
                outputs = self.target(**inputs, return_dict=True)
        if self._static is not None:
            self._static.filled += size
        return outputs

    def _read_on(self, input_ids: torch.Tensor, size: int) -> Any:
        """Reads the last `size` tokens of each text `[B, length]` after what is cached."""
        total = self.length + size
        kwargs = dict(self._kwargs)
        for name in (self._position_key, *_TOKEN_TYPES):  # may have several axes, and reach further
            if kwargs.get(name) is not None:
                kwargs[name] = kwargs[name][..., :total]
        kwargs = _prepare_attention_mask(kwargs, total, self._is_encoder_decoder)
        kwargs = _prepare_token_type_ids(kwargs, total)
        kwargs = _prepare_position_ids(kwargs, total, self._is_encoder_decoder)
        inputs = self._inputs(input_ids, size, kwargs.get(self._mask_key), None, kwargs)
        outputs = self._forward(inputs, size)
        if inputs.get("past_key_values") is None:  # a model that computes its cache anew where its frequencies change
            self.cache = outputs.past_key_values
            self.cache.activate_past_recording()
        return outputs

    def _catch_up(self, input_ids: torch.Tensor) -> None:
        """Reads the accepted tokens that recurrent layers were put back before, for good."""
        self._read_on(input_ids, self._unread)
        self._unread = 0

    def _inputs(
        self,
        ids: torch.Tensor,
        size: int,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
        kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        kwargs = dict(self._kwargs if kwargs is None else kwargs)
        kwargs["past_key_values"] = self.cache
        kwargs[self._mask_key] = mask
        if positions is not None:
            kwargs[self._position_key] = positions
            for name in _TOKEN_TYPES:
                if kwargs.get(name) is not None:
                    kwargs[name] = kwargs[name][:, -1:].expand(-1, size)
        inputs = self.target.prepare_inputs_for_generation(
            ids, next_sequence_length=size, is_first_iteration=False, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = size
        return inputs

    def _commit_trees(self, paths: Sequence[Sequence[int] | None]) -> None:
        total = self.length
        start = total - self._columns
        # Of a compiled move there is one shape only.
        longest = self._columns if self._compiled is not None else max(_kept_of(path) for path in paths)
        source, goal = [], []
        for kept, path in zip(self._kept, paths, strict=True):
            spare = [*range(start + _kept_of(path), start + longest)]  # moved onto themselves
            source.append([*([] if path is None else [start, *(start + node for node in path)]), *spare])
            goal.append([*range(kept, kept + _kept_of(path)), *spare])
        self._kept = [kept + _kept_of(path) for kept, path in zip(self._kept, paths, strict=True)]
        if source != goal:
            self._wait_for_offloading()
            self._move(source, goal, total)
        growing = [kept for kept, path in zip(self._kept, paths, strict=True) if path is not None]
        # The layers of a window keep what the row that is furthest behind still sees.
        spread = max(self._kept) - min(growing, default=max(self._kept))
        for index, width in self._windows.items():
            cache_layers(self.cache)[index].sliding_window = width + spread
        self._drop(total - max(self._kept))

    def _move(self, source: list[list[int]], goal: list[list[int]], total: int) -> None:
        """Copies slots `source[row]` to slots `goal[row]` in every layer; the cache counts `total` of them."""
        device = self.target.device
        if self._static is not None and self._compiled is not None:
            self._compiled.move(self._static.states, on_device(source, device), on_device(goal, device))
            return
        columns = range(len(source[0]))
        first = next(i for i in columns if any(s[i] != g[i] for s, g in zip(source, goal, strict=True)))
        picked = on_device([row[first:] for row in source], device)
        placed = on_device([row[first:] for row in goal], device)
        for layer in cache_layers(self.cache):
            if getattr(layer, "keys", None) is None:
                continue
            # A window's layer has dropped its first slots, and a static one has empty ones behind.
            gone = total - layer.keys.shape[-2] if self._static is None else 0
            move_slots([layer.keys, layer.values], picked - gone, placed - gone)

    def _wait_for_offloading(self) -> None:
        """An offloaded cache fetches layers beside the computation; none may arrive after it was changed."""
        stream = getattr(self.cache, "prefetch_stream", None)
        if stream is not None:
            torch.cuda.current_stream().wait_stream(stream)

    def _updated(self, outputs: Any, new_tokens: int) -> dict[str, Any]:
        return self.target._update_model_kwargs_for_generation(
            outputs, self._kwargs, is_encoder_decoder=self._is_encoder_decoder, num_new_tokens=new_tokens
        )

    def _output(self, outputs: Any, columns: int | None = None) -> TargetOutput:
        """Logits and taps of a forward, of its last `columns` only if given."""
        states, device = outputs.get(self._states_key), outputs.logits.device
        if not self._tap_layers:
            return _last(outputs.logits, outputs.logits[..., :0], columns)
        if states and len(states) <= self._tap_layers[-1]:
            raise ValueError(
                f"{type(self.target).__name__} cannot be drafted for: the drafter reads hidden state "
                f"{self._tap_layers[-1]} of its layers, and it returns only {len(states)}."
            )
        shapes = {tuple(states[layer].shape[:-1]) for layer in self._tap_layers} if states else set()
        if len(shapes) > 1 or any(len(shape) != 2 for shape in shapes) or not states:
            found = "none" if not states else " and ".join(map(str, sorted(shapes)))
            raise ValueError(
                f"{type(self.target).__name__} cannot be drafted for: its hidden states have to be one vector for each "
                f"position; found {found}."
            )
        taps = torch.cat([states[layer].to(device) for layer in self._tap_layers], dim=-1)
        return _last(outputs.logits, taps, columns)


def _last(logits: torch.Tensor, taps: torch.Tensor, columns: int | None) -> TargetOutput:
    return TargetOutput(logits, taps) if columns is None else TargetOutput(logits[:, -columns:], taps[:, -columns:])


def _held_by(layer: Any) -> dict[str, Any]:
    """What a cache layer that can drop tokens holds, by attribute, without a copy.

    A forward and a commit put other tensors in the place of these, and never write into them. Not of keys and values
    that only grow at their end: their beginning stays, and two of them would take twice the memory.
    """
    if type(layer) in (DynamicLayer, GrowingLayer):
        return {}
    grows = () if getattr(layer, "is_sliding", False) else ("keys", "values")
    copied = (dict, list)  # states by their number or name
    return {
        name: copy.copy(value) if isinstance(value, copied) else value
        for name, value in vars(layer).items()
        if name not in grows
    }


def _cut(layer: Any, slots: int) -> None:
    """Leaves at most the first `slots` of keys and values, of each by itself; a window never holds more than that."""
    for name in ("keys", "values"):
        states = getattr(layer, name, None)
        if states is not None and states.dim() > 1 and states.shape[-2] > slots:
            setattr(layer, name, states[..., :slots, :])


def _kept_of(path: Sequence[int] | None) -> int:
    """Tokens that a commit keeps: the root and its path, or nothing."""
    return 0 if path is None else 1 + len(path)
