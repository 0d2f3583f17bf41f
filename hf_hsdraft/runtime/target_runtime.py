"""The target in a call: taps, forwards over trees or chains, committing paths, rolling back the rest.

It alone owns the cache while a call runs. `target_limits` has what model and cache tell about themselves, and
`target_probe` tries the rest.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F

from ..core.cache_name import given_cache
from ..core.draft_tree import DraftTree
from ..core.refusals import DraftingRefused
from ..core.tensors import device_of, on_device
from .cache_slots import CacheSlots, as_given
from .chain_reading import catch_up, commit_chains, read_chains
from .ended_rows import EndedRows, can_leave
from .static_cache import slots_of_prompts
from .target_forwards import Acceleration, Names, TargetCall, TargetOutput, TextRows, dropped, target_output
from .target_limits import check_cache, text_config
from .target_parts import LastState
from .tree_reading import (
    AheadReader,
    AttentionKind,
    commit_trees,
    kinds_of_attention,
    noise_of,
    read_trees,
    tokens_kept,
)

Reader = TypeVar("Reader", bound=AheadReader)


class TargetRuntime:
    """A target in one `generate()` call: sole owner of its cache and model inputs.

    Args:
        tap_layers: indices into its `hidden_states`, of which taps are made.
        model_kwargs: what `generate()` would pass to its decoding method.

    Attributes:
        trees: whether drafts are read as trees; chains otherwise. `target_probe` finds out.
        num_texts: number of rows of the call; `rows` has those that are still read.
        cached_before: number of slots that the call's cache had filled at first.
    """

    _call: TargetCall  # from the prompts' forward on

    def __init__(self, target: Any, tap_layers: Sequence[int], model_kwargs: dict[str, Any]) -> None:
        self.target, self.trees, self._names = target, True, Names(target)
        self.num_texts = self.cached_before = self._prompt_length = 0
        self.tap_layers, self._last_state = list(tap_layers), LastState(target, tap_layers)
        self._kwargs = dict(model_kwargs)  # of the prompts' forward
        if (asked := self._last_state.asked) and not self._kwargs.get("output_hidden_states"):
            # transformers drops indices beyond the encoder's layers, so an encoder-decoder returns all states.
            self._kwargs["output_hidden_states"] = True if target.config.is_encoder_decoder else asked
        self._kinds: list[AttentionKind] = []
        self._outputs: Any = None  # of the last forward
        self._columns = self._again = 0  # the drafts' columns in it, and the columns before them that were read again
        self._ended: EndedRows | None = None  # where rows may leave the batch
        self._ahead: AheadReader | None = None
        if (cache := given_cache(self._kwargs)) is not None:
            check_cache(target, cache)

    def prefill(self, input_ids: torch.Tensor, generation_config: Any) -> TargetOutput:
        """Reads the prompts `[B, length]`, except for what the cache already holds, as plain decoding does.

        The taps are of the positions read last, padding included. With `prefill_chunk_size` they are the last chunk's:
        the drafter then starts with that much context. Raises a DraftingRefused if the cache cannot roll back.
        """
        self.num_texts, self._prompt_length = input_ids.shape
        self._generation_config = generation_config
        before = given_cache(self._kwargs)
        self.cached_before = 0 if before is None else int(before.get_seq_length())
        with as_given(before), self._last_state.kept():
            outputs = self._outputs = self.target._prefill(input_ids, generation_config, self._kwargs)
            self._call = TargetCall.after_prompts(self.target, self._names, self._kwargs, outputs, self.num_texts)
            read = self._output()
        expected = slots_of_prompts(self.target, input_ids, generation_config, self._kwargs, self.cached_before)
        self._call.drops = not self._call.slots.hold(expected)
        self._call.slots.keep_past()  # not earlier: a sliding layer would keep the whole prompt
        self._call.go_on(outputs, 1)
        return read

    def prepare_trees(self) -> str:
        """Prepares for trees; returns why they are not possible, or an empty string."""
        try:
            self._kinds = kinds_of_attention(self._call)
        except ValueError as error:
            return str(error)
        return ""

    def read_chains(self) -> None:
        """Switches to chains; only with one text, as rows of a batch may differ in length by now."""
        self.trees, self._call.fixed = False, 0

    def read_ahead(self, made: Callable[[TargetCall, Sequence[AttentionKind]], Reader]) -> Reader | None:
        """Lets what `made` returns verify trees from here on; `None` without trees or with a static cache."""
        able = self.trees and self._kinds and self._call.slots.static is None and not self.recurrent
        self._ahead = reader = made(self._call, self._kinds) if able else None
        return reader

    def make_room(self, columns: int) -> None:
        """Makes the cache grow in place, where its layers can and attention takes views of any strides.

        A static cache does not grow: there every forward over trees has as many columns as the largest tree, and is
        compiled where `generate()` would compile its decoding step.
        """
        call = self._call
        if call.slots.static is not None:
            if self.trees:
                call.fixed = columns
                call.acceleration.compile(call.kwargs, self._generation_config, call.slots.static.states)
        elif text_config(self.target)._attn_implementation in ("sdpa", "eager"):
            call.slots.make_room()

    def verify(self, trees: Sequence[DraftTree], input_ids: torch.Tensor) -> TargetOutput:
        """Reads a tree for each row in one forward; column i of the output belongs to node i.

        `input_ids` `[B, length]` are the texts of the whole call up to the roots; arbitrary for rows that have left.
        """
        call, self._outputs = self._call, None  # a compiled forward reuses that memory
        self._columns = max(map(len, trees))
        plain_step = len(trees) == 1 and self._columns == 1  # runs plain decoding's forward, which is compiled too
        if call.slots.left >= call.fixed and not plain_step:
            self._columns = max(self._columns, call.fixed)
        # `input_ids` and the model's inputs still have rows that have left.
        with self._last_state.kept():
            if self.trees and (self._columns > 1 or len(trees) > 1 or self._ended is not None):
                ahead = None if self._ahead is None else self._ahead.verify(trees, self._columns)
                self._outputs, self._again = ahead or read_trees(call, trees, self._columns, self._kinds), 0
            else:
                self._outputs, self._again = read_chains(call, trees, input_ids, self._columns), call.unread
        return self._output().last(self._columns)

    def _output(self) -> TargetOutput:
        return target_output(self.target, self._outputs, self._names.states, self.tap_layers, self._last_state)

    def noise_of(self, tokens: Sequence[int], alone: torch.Tensor, columns: int) -> float:
        """See `tree_reading.noise_of`; trees are prepared."""
        return noise_of(self._call, on_device(tokens, device_of(self.target)), alone, columns, self._kinds)

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Keeps root and accepted path of the trees read last in every cache layer, and drops the other nodes.

        Paths are `None` for rows that have ended. Where rows are `in_step`, all paths are equally long.
        """
        if self.trees and not self._call.drops:  # otherwise only roots were read, and slots no longer match positions
            commit_trees(self._call, paths, self._columns)
        else:
            commit_chains(self._call, max(map(tokens_kept, paths)), self._outputs, self._columns)

    def finish(self, input_ids: torch.Tensor) -> None:
        """Leaves the cache as plain decoding of the texts `[B, length]` would, whose last token is never read."""
        call, slots = self._call, self._call.slots
        end = call.rows.prompt_slots + input_ids.shape[1] - self._prompt_length - 1
        with self.undone_on_error():
            if call.unread:
                catch_up(call, input_ids[:, :-1])
            if self._ended is not None:
                self._ended.put_back(slots.cache, end)
            if not slots.recurrent:
                slots.drop(max(slots.length - end, 0))
        slots.release()

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Rolls the cache back if an exception, including an interrupt, is raised inside."""
        entered, unread = self.slots.mark(), self._call.unread
        self._call.entered = entered
        try:
            yield
        except BaseException:
            self.slots.roll_back(entered)
            self._call.unread = unread
            raise

    @contextlib.contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Restores the normal behaviour of the caller's cache if an exception ends the call."""
        try:
            yield
        except BaseException:
            if hasattr(self, "_call"):
                self._call.slots.release()
            raise

    def apart(self) -> TargetRuntime:
        """A runtime for trials: it shares only the target and the cache, which a mark restores."""
        return self._with_call(self._call.apart())

    def apart_of(self, places: Sequence[int]) -> TargetRuntime:
        """As `apart`, for some rows of the batch only; `rows_can_be_apart` holds."""
        return self._with_call(self._call.apart_of(places))

    def _with_call(self, call: TargetCall) -> TargetRuntime:
        trial = copy.copy(self)
        trial._call, trial._ahead = call, None  # reading ahead belongs to the call itself
        return trial

    def let_rows_leave(self, keep: bool) -> bool:
        """Prepares for `keep_rows`, with `keep` if the cache outlives the call; returns whether that is possible."""
        if self.trees and self.rows_can_be_apart:
            self._ended = EndedRows(len(self.rows.kept), keep)
        return self._ended is not None

    @property
    def rows_can_be_apart(self) -> bool:
        """Whether cache and inputs allow reading some rows without the others."""
        call = self._call
        decoder = self.target.config.is_encoder_decoder
        return not decoder and can_leave(self.target, call.kwargs, self._names.by_rows, self.cache)

    def keep_rows(self, places: Sequence[int]) -> None:
        """Restricts forwards to rows by their places in the current batch, after the others' last tokens were read."""
        assert self._ended is not None
        call = self._call
        self._ended.take_out(self.cache, places, call.rows.kept)
        call.rows = call.rows.of(places)
        call.slots.drop(self.length - max(call.rows.kept))

    @property
    def records(self) -> bool:
        """Whether the call returns attentions or hidden states of each token."""
        wanted = self._generation_config
        return bool(wanted.return_dict_in_generate and (wanted.output_hidden_states or wanted.output_attentions))

    def prompt_outputs(self, row: int) -> list[dict[str, tuple[torch.Tensor, ...]]]:
        """Hidden states and attentions of the prompts' forward, for one row; empty if the call returns none."""
        return [prompt_outputs(self._outputs, self._recorded, row)] if self.records else []

    def path_outputs(self, row: int, path: Sequence[int]) -> list[dict[str, tuple[torch.Tensor, ...]]]:
        """Hidden states and attentions of root and path, for each node as plain decoding returns them for one token."""
        if not self.records:
            return []
        nodes, read = [0, *path], NodeOutputs(self._call, self._outputs, self._recorded, self._again, self._columns)
        return [read.of(row, nodes[: index + 1]) for index in range(len(nodes))]

    @property
    def _recorded(self) -> list[str]:
        wanted = self._generation_config
        return names_of(self._outputs, self._names, wanted.output_hidden_states, wanted.output_attentions)

    @property
    def reused_share(self) -> float:
        """Share of the layers' work in verifying trees that was done ahead; 0 without reading ahead."""
        return 0.0 if self._ahead is None else self._ahead.reused_share

    @property
    def cache(self) -> Any:
        return self._call.slots.cache

    @property
    def length(self) -> int:
        return self._call.slots.length

    @property
    def slots(self) -> CacheSlots:
        return self._call.slots

    @property
    def deepest(self) -> int:
        """Maximum depth of a draft for the room left in the cache."""
        left = self._call.slots.left
        return left - 1 if left >= self._call.fixed else 0

    @property
    def forwards(self) -> int:
        return self._call.forwards

    @property
    def given(self) -> tuple[str, ...]:
        """Names of the target's inputs in a forward."""
        return tuple(sorted(name for name, value in self._call.kwargs.items() if value is not None))

    @property
    def rows(self) -> TextRows:
        return self._call.rows

    @property
    def recurrent(self) -> bool:
        """Whether layers of the target keep a state that cannot drop tokens."""
        return self._call.slots.recurrent

    @property
    def refusal(self) -> DraftingRefused | None:
        """The refusal if forwards so far have lost slots of the cache."""
        return dropped(self.target) if self._call.drops else None

    @property
    def in_step(self) -> bool:
        """Whether all rows must accept equally many tokens: only a tree's mask can separate rows."""
        return not self.trees and len(self.rows.kept) > 1

    @property
    def acceleration(self) -> Acceleration:
        return self._call.acceleration


def names_of(outputs: Any, names: Names, states: bool, attentions: bool) -> list[str]:
    """Which of the requested hidden states and attentions the outputs contain."""
    wanted = [*([names.states] if states else []), *(names.attentions if attentions else ())]
    return [name for name in wanted if outputs.get(name) and outputs[name][0] is not None]  # some models have none


def prompt_outputs(outputs: Any, names: Sequence[str], row: int) -> dict[str, tuple[torch.Tensor, ...]]:
    return {name: tuple(layer[row : row + 1] for layer in outputs[name]) for name in names}


@dataclass(frozen=True)
class NodeOutputs:
    """Extracts outputs of single nodes from a forward over drafts; `again` counts the columns before, see
    `chain_reading`.
    """

    call: TargetCall
    outputs: Any
    names: Sequence[str]
    again: int
    columns: int

    def of(self, row: int, path: Sequence[int]) -> dict[str, tuple[torch.Tensor, ...]]:
        """Outputs for the last node of `path`, from the root on, as plain decoding returns them for one token."""
        found = {}
        place = self.again + path[-1]
        for name in self.names:
            layers = self.outputs[name]
            if name == self.call.names.states:
                found[name] = tuple(layer[row : row + 1, place : place + 1].clone() for layer in layers)
            else:
                weights = [layer[row : row + 1, :, place : place + 1] for layer in layers]
                own = name != "cross_attentions"
                found[name] = tuple(self._of_text(weights, row, path) if own else weights)
        return found

    def _of_text(self, weights: Sequence[torch.Tensor], row: int, path: Sequence[int]) -> Iterator[torch.Tensor]:
        """Reduces each layer's weights `[1, heads, 1, kv]` over the cache and all nodes to the row's text."""
        slots, read = self.call.slots, self.again + self.columns
        static = slots.static is not None
        path = [*range(self.again), *(self.again + node for node in path)]
        left_over = slots.length - read - (self.call.rows.kept[row] - self.again)  # slots of other rows' longer paths
        for index, layer in enumerate(weights):
            empty = layer.shape[-1] - slots.length if static else 0  # slots beyond the nodes
            cached = layer.shape[-1] - empty - read
            text = torch.cat([layer[..., : cached - left_over], layer[..., [cached + node for node in path]]], dim=-1)
            if static:
                text = F.pad(text, (0, layer.shape[-1] - text.shape[-1]))
            yield text[..., -slots.windows[index] :] if index in slots.windows else text
