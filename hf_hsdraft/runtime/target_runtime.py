"""The target in a call: taps, forwards over trees or chains, committing paths, rolling back the rest.

It alone owns the cache while a call runs. `target_limits` has what model and cache tell about themselves, and
`findings` tries the rest.

Chains are drafts without branches, read as ordinary text. They need no mask, so every target may be able to read them.
Recurrent layers cannot drop tokens. After a rejection their state from before the draft is restored, and the accepted
tokens are read again with the next draft: `unread` counts them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from transformers.generation.candidate_generator import (
    _prepare_attention_mask,
    _prepare_position_ids,
    _prepare_token_type_ids,
)

from ..core.cache_name import given_cache, returned_cache
from ..core.draft_tree import DraftTree
from ..core.refusals import DraftingRefused
from ..core.tensors import device_of
from ..core.tuning import TUNING
from .cache_slots import as_given, text_cache
from .ended_rows import EndedRows, can_leave, read_missing
from .static_cache import slots_of_prompts
from .target_forwards import TOKEN_TYPES, TargetCall, TargetOutput, dropped, target_output
from .target_limits import GRADIENTS, check_cache, decoder_layers, refusal, text_config
from .target_parts import LastState, final_norm
from .tree_reading import (
    AttentionKind,
    TreeBatch,
    close_gaps,
    commit_trees,
    kinds_of_attention,
    read_batch,
    read_roots,
    tokens_kept,
)


def read_chains(
    call: TargetCall, trees: Sequence[DraftTree], input_ids: torch.Tensor, columns: int, padding: int = 0
) -> Any:
    """The target's outputs for a chain of each row; `call.unread` columns of tokens read again come first.

    Args:
        input_ids: `[B, length]`, the texts up to and with the roots.
        columns: of the drafts; shorter ones end with tokens `padding`, which rows that have ended keep.
    """
    if any(list(tree.parents) != list(range(-1, len(tree) - 1)) for tree in trees):
        raise ValueError("a tree that branches was drafted for a target that reads chains only")
    if call.unread > TUNING.most_unread:
        catch_up(call, input_ids[:, :-1])
        call.entered = None
    call.marked = (call.entered or call.slots.mark()) if call.slots.recurrent else None
    drafted = [[*tree.tokens[1:], *[padding] * (columns - len(tree))] for tree in trees]
    ids = torch.tensor(drafted, dtype=input_ids.dtype, device=input_ids.device).view(len(trees), columns - 1)
    return _read_on(call, torch.cat([input_ids, ids], dim=1), call.unread + columns)


def commit_chains(call: TargetCall, length: int, outputs: Any, columns: int) -> None:
    """Keeps the first `length` of the columns read last, in every row."""
    call.rows = call.rows.keeping([length] * len(call.rows.kept))
    if length:
        call.go_on(outputs, length)
    if call.marked is None:
        call.slots.drop(columns - length)
        return
    if length == columns:
        call.unread = 0
    else:
        call.slots.roll_back(call.marked)
        call.unread += length
    call.slots.forget_past()


def catch_up(call: TargetCall, input_ids: torch.Tensor) -> None:
    """Reads the `call.unread` last tokens of `input_ids` `[B, length]` again, into the recurrent layers, for good."""
    _read_on(call, input_ids, call.unread)
    call.unread = 0


def _read_on(call: TargetCall, input_ids: torch.Tensor, size: int) -> Any:
    """Reads the last `size` tokens of each text `[B, length]` after the cached ones."""
    end, decoder = call.rows.kept[0] - call.unread + size, call.target.config.is_encoder_decoder
    # Inputs along the text continue from the caller's, as in plain decoding; they may not start where the text does.
    ends = {name: end + further for name, further in call.further.items()}
    kwargs = dict(call.kwargs)
    for name in (call.names.positions, *TOKEN_TYPES):  # may have several axes, and reach further
        if kwargs.get(name) is not None:
            kwargs[name] = kwargs[name][..., : ends[name]]
    kwargs = _prepare_attention_mask(kwargs, ends.get(call.names.mask, end), decoder)
    kwargs = _prepare_token_type_ids(kwargs, ends.get("token_type_ids", end))
    kwargs = _prepare_position_ids(kwargs, ends.get(call.names.positions, end), decoder)
    inputs = call.inputs(input_ids, size, kwargs.get(call.names.mask), kwargs=kwargs)
    outputs = call.forward(inputs, size)
    if given_cache(inputs) is None:  # some models rebuild their cache where their frequencies change
        call.slots.cache = returned_cache(outputs)
        call.slots.cache.activate_past_recording()
    return outputs


class TargetRuntime(TargetCall):
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
        batch: the trees read last, on the device; `None` if they were read as chains or ahead.
        ahead: verifies trees instead by `verify(trees, columns)`, unless that returns `None`; set by methods that read
            nodes before. `None` for most calls.
        reused_share: share of the layers' work in verifying trees that `ahead` had done before.
    """

    def __init__(self, target: Any, tap_layers: Sequence[int], model_kwargs: dict[str, Any]) -> None:
        super().__init__(target, model_kwargs)
        self.trees, self.kinds, self.reused_share = True, list[AttentionKind](), 0.0
        self.ahead: Any = None
        self.num_texts = self.cached_before = self._prompt_length = 0
        self.tap_layers = list(tap_layers)
        layers = decoder_layers(text_config(target)) if tap_layers else 0
        asked = [tap for tap in tap_layers if tap <= layers]
        norm = final_norm(target) if len(asked) < len(tap_layers) else None
        self._last_state = None if norm is None else LastState(norm, layers)
        if asked and not self.kwargs.get("output_hidden_states"):
            # transformers drops indices beyond the encoder's layers, so an encoder-decoder returns all states.
            self.kwargs["output_hidden_states"] = True if target.config.is_encoder_decoder else asked
        self._outputs: Any = None  # of the last forward
        self.batch: TreeBatch | None = None
        self._columns = self._again = 0  # the drafts' columns in it, and the columns before them that were read again
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
            self._outputs = self.target._prefill(input_ids, generation_config, self.kwargs)
            self.hold(self._outputs, self.num_texts)
            read = self._output()
            if read.logits.requires_grad:  # by something that `why_gradients` does not see, such as a hook
                raise DraftingRefused(GRADIENTS)
            states = self._outputs[self.names.states] if self.records and self.names.states in self._recorded else ()
            if any(each.dim() != 3 for each in states):
                raise refusal(self.target, "hidden states that the call returns are not one vector for each position.")
        expected = slots_of_prompts(self.target, input_ids, generation_config, self.kwargs, self.cached_before)
        self.drops = not self.slots.hold(expected)
        self.slots.keep_past()  # not earlier: a sliding layer would keep the whole prompt
        self.go_on(self._outputs, 1)
        return read

    def prepare_trees(self) -> str:
        """Prepares for trees; returns why they are not possible, or an empty string."""
        try:
            self.kinds = kinds_of_attention(self)
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
        self._outputs = self.batch = None  # a compiled forward reuses that memory
        self._columns = max(map(len, trees))
        plain_step = len(trees) == 1 and self._columns == 1  # runs plain decoding's forward, which is compiled too
        if self.slots.left >= self.fixed and not plain_step:
            self._columns = max(self._columns, self.fixed)
        # `input_ids` and the model's inputs still have rows that have left.
        with self._last_state_kept():
            if self.trees and (self._columns > 1 or len(trees) > 1 or self.ended is not None):
                self._outputs, self._again = self._read_trees(trees), 0
            else:
                self._outputs, self._again = read_chains(self, trees, input_ids, self._columns, padding), self.unread
        return self._output().last(self._columns)

    def _read_trees(self, trees: Sequence[DraftTree]) -> Any:
        kept = self.rows.kept
        if self.ahead is not None and (outputs := self.ahead.verify(trees, self._columns)) is not None:
            return outputs
        if self._columns == 1 and self.slots.static is None and min(kept) == max(kept) == self.length:
            return read_roots(self, trees, self.kinds)
        self.batch = TreeBatch.of(trees, device_of(self.target), self._columns)
        return read_batch(self, self.batch, self.kinds)

    def _last_state_kept(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._last_state is None else self._last_state.kept()

    def _output(self) -> TargetOutput:
        return target_output(self.target, self._outputs, self.names.states, self.tap_layers, self._last_state)

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Keeps root and accepted path of the trees read last in every cache layer, and drops the other nodes.

        Paths are `None` for rows that have ended. Where rows are `in_step`, all paths are equally long.
        """
        if self.trees and not self.drops:  # otherwise only roots were read, and slots no longer match positions
            commit_trees(self, paths, self._columns)
        else:
            commit_chains(self, max(map(tokens_kept, paths)), self._outputs, self._columns)

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
        close_gaps(self)
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
        self._outputs = self.batch = None
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
        trial.ahead = trial._outputs = None  # these belong to the call itself
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
            close_gaps(self)
        self.rows = self.ended.take_out(self.cache, places, self.rows)
        self.slots.drop(self.length - max(self.rows.kept))

    @property
    def records(self) -> bool:
        """Whether the call returns attentions or hidden states of each token."""
        wanted = self._generation_config
        return bool(wanted.return_dict_in_generate and (wanted.output_hidden_states or wanted.output_attentions))

    def prompt_outputs(self, row: int) -> list[dict[str, tuple[torch.Tensor, ...]]]:
        """Hidden states and attentions of the prompts' forward, for one row; empty if the call returns none."""
        if not self.records:
            return []
        return [{name: tuple(layer[row : row + 1] for layer in self._outputs[name]) for name in self._recorded}]

    def path_outputs(self, row: int, path: Sequence[int]) -> list[dict[str, tuple[torch.Tensor, ...]]]:
        """Hidden states and attentions of root and path, for each node as plain decoding returns them for one token."""
        if not self.records:
            return []
        nodes = [0, *path]
        return [_node_outputs(self, row, nodes[: index + 1]) for index in range(len(nodes))]

    @property
    def _recorded(self) -> list[str]:
        """Which of the requested hidden states and attentions the last outputs contain; some models have none."""
        config, names, outputs = self._generation_config, self.names, self._outputs
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
        return dropped(self.target) if self.drops else None

    @property
    def in_step(self) -> bool:
        """Whether all rows must accept equally many tokens: only a tree's mask can separate rows."""
        return not self.trees and len(self.rows.kept) > 1


def _node_outputs(call: TargetRuntime, row: int, path: Sequence[int]) -> dict[str, tuple[torch.Tensor, ...]]:
    """Outputs for the last node of `path`, from the root on."""
    found, place = {}, call._again + path[-1]
    for name in call._recorded:
        layers = call._outputs[name]
        if name == call.names.states:
            found[name] = tuple(layer[row : row + 1, place : place + 1].clone() for layer in layers)
        else:
            weights = [layer[row : row + 1, :, place : place + 1] for layer in layers]
            own = name != "cross_attentions"
            found[name] = tuple(_weights_of_text(call, weights, row, path) if own else weights)
    return found


def _weights_of_text(
    call: TargetRuntime, weights: Sequence[torch.Tensor], row: int, path: Sequence[int]
) -> Iterator[torch.Tensor]:
    """Reduces each layer's weights `[1, heads, 1, kv]` over the cache and all nodes to the row's text."""
    slots, read = call.slots, call._again + call._columns
    static = slots.static is not None
    path = [*range(call._again), *(call._again + node for node in path)]
    left_over = slots.length - read - (call.rows.kept[row] - call._again)  # slots of other rows' longer paths
    for index, layer in zip(slots.attending(len(weights)), weights, strict=True):
        empty = layer.shape[-1] - slots.length if static else 0  # slots beyond the nodes
        cached = layer.shape[-1] - empty - read
        text = torch.cat([layer[..., : cached - left_over], layer[..., [cached + node for node in path]]], dim=-1)
        if static:
            text = F.pad(text, (0, layer.shape[-1] - text.shape[-1]))
        yield text[..., -slots.windows[index] :] if index in slots.windows else text
