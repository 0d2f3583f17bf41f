"""Roll-out and session whose drafts are in tensors of fixed size and address, so that each compiles into one graph.

On a GPU a draft launches some hundred kernels that take longer to launch than to run. Here the accepted positions are
padded to a fixed number; the true number and the end of the sequence are values on the device. A draft always has K
depths, and is read back once. Shallower trees are cut from it.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import ModuleType
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from ..core.draft_tree import DraftTree, FoundNodes, TreeBatch, TreeLimits, searched
from ..core.forks import new_lock
from ..core.tensors import on_device, shared_attention
from ..drafters.base.draft_options import DraftOptions
from ..drafters.base.protocol import Accepted, Ask, Call
from ..drafters.base.target_weights import TargetWeights
from ..drafters.base.tree_session import ParallelExpansion
from ..drafters.hidden_state.draft_session import HSDraftSession, KeyValues, Pairs, RollOut, bias_of
from ..drafters.hidden_state.network import HSDraftNetwork, WorkingWeights
from ..drafters.hidden_state.quick_weights import QuickWeights
from ..drafters.hidden_state.trunk import read, roll
from ..gpu.fixed_shapes import compiled

# They hold a multiple of so many positions - by hand: few sizes to compile, masks in whole vectors.
STATIC_POSITIONS = 256
SPARE_ROLL_OUTS = 4  # number of compiled roll-outs that a drafter's weights keep - by hand


@dataclass(frozen=True)
class Verified:
    """A greedy text's forward over a tree, root first and padded, on the device: nothing of it has been read back."""

    tokens: torch.Tensor  # `[N]`, int64, of the nodes
    depths: torch.Tensor  # `[N]`, int64, of the nodes
    ancestors: torch.Tensor  # `[N, N]`, bool, True where the row's node may see the column's: its ancestors and itself
    choices: torch.Tensor  # `[N]`, int64, the target's choices
    taps: torch.Tensor  # `[N, taps * D]`, the hidden states that the drafter reads
    position: int  # the root's

    @classmethod
    def of(cls, batch: TreeBatch, choices: torch.Tensor, taps: torch.Tensor, position: int) -> Verified:
        return cls(batch.tokens[0], batch.depths[0], batch.ancestors[0], choices, taps, position)

    def to(self, device: torch.device, dtype: torch.dtype) -> Verified:
        """Moves all to a device, and casts the taps."""
        tokens, depths, ancestors = self.tokens.to(device), self.depths.to(device), self.ancestors.to(device)
        return Verified(tokens, depths, ancestors, self.choices.to(device), self.taps.to(device, dtype), self.position)


class StaticText:
    """A context of a trunk for one forward, over buffers that outlive it. Nothing is read back from the device.

    Args:
        keys, values: for each layer, `[kv_heads, room, head_dim]`; written to.
        window: positions attended to, the own one included; `None` for all.
        columns: pairs that are read, more than are real.
        place: `[2]`, int64, on the device: how many positions have been read, and how many columns are real.

    Attributes:
        starts: `[1]`, the last real column.
    """

    def __init__(
        self,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        window: int | None,
        columns: int,
        place: torch.Tensor,
    ) -> None:
        self._keys, self._values, self._window = keys, values, window
        held, count = place.split(1)
        self._places = held + torch.arange(columns, device=place.device)
        self.starts, self._last = count - 1, held + count - 1

    def reading(self) -> Any:
        return partial(self._attend, self._places)

    def rolling(self, step: int, chains: int) -> Any:
        return partial(self._attend, self._last + step)

    def _attend(
        self,
        places: torch.Tensor,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Writes keys and values at `places` `[n]`, and attends with their queries, or those of `rows`."""
        held_keys, held_values = self._keys[layer], self._values[layer]
        held_keys.index_copy_(1, places, keys.to(held_keys.dtype))  # autocast may have changed the dtype
        held_values.index_copy_(1, places, values.to(held_values.dtype))
        at = (places if rows is None else places[rows])[:, None]
        columns = torch.arange(held_keys.shape[1], device=places.device)
        seen = columns <= at
        if self._window is not None:
            seen = seen & (columns > at - self._window)
        return shared_attention(queries, held_keys, held_values, seen)


def keep_in_place(*parts: Any) -> None:
    """Tells the compiler that all tensors in these structures stay in place: a recorded graph reads them there."""
    for tensor in _tensors(parts):
        torch._dynamo.mark_static_address(tensor, guard=False)


def _tensors(part: Any) -> Iterator[torch.Tensor]:
    """All tensors in a plain structure, closures included, and namespaces of operators, which are cyclic, excluded."""
    if isinstance(part, torch.Tensor):
        yield part
    elif isinstance(part, tuple | list):
        for each in part:
            yield from _tensors(each)
    elif callable(part) and getattr(part, "__closure__", None):
        yield from _tensors([cell.cell_contents for cell in part.__closure__])
    elif hasattr(part, "__dict__") and not isinstance(part, type | nn.Module | ModuleType):
        yield from _tensors(list(vars(part).values()))


class DeviceTime(AbstractContextManager["DeviceTime"]):
    """The time that a device takes for what is queued within, without waiting for it; elsewhere the host's time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._ends: list[Any] = []

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def __enter__(self) -> Self:
        self._ends = [self._now()]
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.append(self._now())

    @property
    def seconds(self) -> float:
        """To be read once the device has finished."""
        begin, end = self._ends
        return begin.elapsed_time(end) / 1000 if self._is_cuda else end - begin


@dataclass(frozen=True)
class Followed:
    """What a draft has read back."""

    choices: list[int]  # the target's choice at each node of the tree before
    # The choices at its root and accepted path; too few of them if more were accepted than a draft reads
    tokens: list[int]
    found: FoundNodes  # the draft, from the last of these tokens
    seconds: float  # time that the device took


class StaticRollOut(RollOut):
    """A [`RollOut`] of fixed shape for a single sequence, which always rolls K steps. Prompts are read as there."""

    def __init__(
        self,
        working: WorkingWeights,
        drafter: HSDraftNetwork,
        room: int,  # capacity in positions
        num_draft_steps: int,
        compile_config: Any = None,  # of transformers; None compiles nothing
    ) -> None:
        super().__init__(working, drafter)
        config, device, dtype = drafter.config, drafter.device, drafter.dtype
        self.made_for = room, num_draft_steps, copy.copy(compile_config)
        self._steps, self._config, self._compile_config = num_draft_steps, config, compile_config
        self._no_trees: dict[int, Verified] = {}
        self._columns = num_draft_steps + 1  # usual maximum per round; more are read like a prompt
        shape, text = (config.num_key_value_heads, room, config.head_dim), self._text
        text.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in text.keys]
        text.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in text.values]
        self._parts = _Parts(working, None, text.keys, text.values, self._window)
        if compile_config is not None:
            used = [each for name, each in vars(working).items() if name != "spare"]
            keep_in_place(used, list(vars(working.injector).values()), text.keys, text.values)

    def begin(self, weights: TargetWeights | None = None) -> None:
        """Empties the context, for a call with a target of these weights; trees need its embeddings."""
        self._parts = replace(self._parts, weights=weights)
        if weights is not None and self._compile_config is not None:
            keep_in_place(weights.embed, weights.vocab_ids)
        self._text.length = 0
        for states in (*self._text.keys, *self._text.values):  # masked values must be finite
            states.zero_()

    def restore(self, saved: Sequence[KeyValues]) -> None:
        self._text.length = saved[0][0].shape[1]
        for index, (keys, values) in enumerate(saved):
            self._text.keys[index][:, : self._text.length] = keys
            self._text.values[index][:, : self._text.length] = values

    def __call__(self, counts: Mapping[int, int], pairs: Pairs, num_draft_steps: int) -> torch.Tensor:
        assert len(counts) == 1 and num_draft_steps <= self._steps
        padded, place = self._padded(pairs)
        states = self._compiled(roll_out)(self._parts, *padded, place, self._steps)
        return states[None, :num_draft_steps].clone()  # the next run may overwrite them

    def beam(self, pairs: Pairs, root: int, tree_size: int, beam_width: int) -> FoundNodes:
        """Reads accepted positions, as `__call__`, and searches the tree after `root`. Reads back once."""
        padded, place = self._padded(pairs, root, 0, 0)
        return self._drafted(self._no_tree(tree_size + 1), padded, place, tree_size, beam_width).found

    def follow(self, forward: Verified, tree_size: int, beam_width: int) -> Followed:
        """Accepts by the target's own choices, reads the accepted positions, and drafts on. Reads back once.

        The positions count as read only after `advance`, as the text may have ended before the last of them.
        """
        place = on_device([self._text.length, 0, 0, 1, forward.position], forward.choices.device)
        return self._drafted(forward, self._no_pairs, place, tree_size, beam_width)

    def _drafted(self, forward: Verified, pairs: Sequence[torch.Tensor], place: torch.Tensor, *sizes: int) -> Followed:
        tree = forward.tokens, forward.depths, forward.ancestors, forward.choices
        with DeviceTime(place.device) as time:
            launched = self._compiled(draft)(self._parts, *tree, forward.taps, *pairs, place, self._steps, *sizes)
        result, found_sizes = launched[0].cpu(), launched[1]
        parts = result.split([1, self._columns, len(forward.tokens), 3 * sum(found_sizes)])
        tokens = parts[1][: int(parts[0])].tolist()
        return Followed(parts[2].tolist(), tokens, FoundNodes.of(parts[3].view(3, 1, -1), found_sizes), time.seconds)

    @cached_property
    def _no_pairs(self) -> list[torch.Tensor]:
        """Padding alone."""
        like, config = self._text.keys[0], self._config
        taps = like.new_zeros(self._columns, len(config.target_tap_layers) * config.target_hidden_size)
        embeds = like.new_zeros(self._columns, config.target_hidden_size)
        return [taps, embeds, torch.zeros(self._columns, dtype=torch.int64, device=like.device)]

    def _no_tree(self, nodes: int) -> Verified:
        if nodes not in self._no_trees:
            taps = self._no_pairs[0].new_zeros(nodes, self._no_pairs[0].shape[1])
            # Not one tensor for all: a graph knows which of its inputs are the same.
            tokens, depths, choices = torch.zeros(3, nodes, dtype=torch.int64, device=taps.device).unbind()
            ancestors = tokens.new_zeros(nodes, nodes, dtype=torch.bool)
            self._no_trees[nodes] = Verified(tokens, depths, ancestors, choices, taps, 0)
        return self._no_trees[nodes]

    def advance(self, count: int) -> None:
        """Counts positions that `follow` has read."""
        self._text.length += count

    def _compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self._compile_config is None else compiled(function, self._compile_config)

    def _padded(self, pairs: Pairs, *further: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The last pairs, padded, and their place: the end of the sequence before, their number, and `further`."""
        early = max(len(pairs[0]) - self._columns, 0)
        if early:
            self.read({0: early}, tuple(each[:early] for each in pairs))
        last = [each[early:] for each in pairs]
        count, held = len(last[0]), self._text.length
        padded = [F.pad(each, (0, 0) * (each.dim() - 1) + (0, self._columns - count)) for each in last]
        self._text.length += count
        return padded, on_device([held, count, *further], padded[0].device)


@dataclass(frozen=True)
class _Parts:
    """What drafts of a text share. For keys, values and window see `StaticText`."""

    working: WorkingWeights
    weights: TargetWeights | None
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    window: int | None


def roll_out(
    parts: _Parts,
    taps: torch.Tensor,
    embeds: torch.Tensor,
    position_ids: torch.Tensor,
    place: torch.Tensor,
    num_draft_steps: int,
) -> torch.Tensor:
    """As [`RollOut`] with padded `[columns, ...]` inputs: `[K, D]`, g_0 .. g_{K-1}, always by the same operations.

    `place` is `[2]`, int64: the end of the sequence before, and how many columns are real.
    """
    text = StaticText(parts.keys, parts.values, parts.window, len(taps), place)
    x, ropes = read(parts.working, taps, embeds, position_ids, text, num_draft_steps - 1)
    return torch.cat(roll(parts.working, x, ropes, text))


def draft(
    parts: _Parts,
    tokens: torch.Tensor,
    depths: torch.Tensor,
    ancestors: torch.Tensor,
    choices: torch.Tensor,
    tree_taps: torch.Tensor,
    taps: torch.Tensor,
    embeds: torch.Tensor,
    position_ids: torch.Tensor,
    place: torch.Tensor,
    num_draft_steps: int,
    tree_size: int,
    beam_width: int,
) -> tuple[torch.Tensor, list[int]]:
    """Reads accepted positions and drafts a tree; always by the same operations.

    The positions are either of the path that is accepted of a tree, see [`Verified`], or the padded pairs
    `[columns, ...]`. `place` is `[5]`, int64: the end of the sequence before, the number of pairs, the root's token,
    and 1 for the path, with the position of the tree's root; where that is 0, the tree has no meaning.

    Returns one int32 tensor and the sizes of `searched`: the number of positions; the tokens that follow the path
    `[columns]`; the choices `[N]`; and the result of `searched`.
    """
    assert parts.weights is not None
    held, count, root, by_path, begin = place.split(1)
    accepted, columns = by_path > 0, len(taps)
    path, path_length = chosen_path(choices, tokens, depths, ancestors, columns)
    emitted = choices[path]
    count = torch.where(accepted, path_length, count)
    root = torch.where(accepted, emitted[count - 1], root)
    states = roll_out(
        parts,
        torch.where(accepted, tree_taps[path], taps),
        torch.where(accepted, parts.weights.embed(emitted), embeds),
        torch.where(accepted, begin + torch.arange(columns, device=begin.device), position_ids),
        torch.cat([held, count]),
        num_draft_steps,
    )
    hidden = states[None]
    logits = parts.working.logits(hidden)
    expansion = ParallelExpansion(logits, bias_of(parts.working, parts.weights, hidden, logits))
    limits = TreeLimits(tree_size, beam_width, 0.0, (num_draft_steps,))
    found, sizes = searched(expansion, root, parts.weights.vocab_ids, limits)
    return torch.cat([count.int(), emitted.int(), choices.int(), found.flatten()]), sizes


def chosen_path(
    choices: torch.Tensor, tokens: torch.Tensor, depths: torch.Tensor, ancestors: torch.Tensor, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`walk` of given choices, in tensors of fixed shapes: nothing is read back from the device.

    Args:
        choices, tokens, depths: `[N]`, int64, of the nodes, root first: the token that follows there, the node's own
            token, and its distance from the root. Further columns of depth 0 that no node sees are padding.
        ancestors: `[N, N]`, bool, True where the row's node may see the column's: its ancestors and itself.
        columns: number of nodes to return, the root included.

    Returns:
        The root and the accepted nodes, `[columns]`, then the root again; and their number `[1]`, at most `columns`.
    """
    parents = ancestors & (depths[:, None] - 1 == depths)
    chosen = (parents & (choices == tokens[:, None])).any(dim=1)
    root = torch.arange(len(tokens), device=tokens.device) == 0
    accepted = ~(ancestors & ~(chosen | root)).any(dim=1)
    at = accepted & (torch.arange(columns, device=tokens.device)[:, None] == depths)  # one node of each depth at most
    return at.int().argmax(dim=1), at.sum(dtype=torch.int64)[None]


_lock = new_lock()


@contextmanager
def static_roll_out(
    drafter: HSDraftNetwork,
    working: QuickWeights,  # with `spare`
    weights: TargetWeights,
    slots: int,  # greatest length of the sequence
    num_draft_steps: int,
    compile_config: Any,
) -> Iterator[StaticRollOut]:
    """Yields an empty [`StaticRollOut`] for one call, and keeps it for the next: a graph is bound to its tensors."""
    needed, spare = slots + num_draft_steps + 1, working.spare
    sizes = needed + -needed % STATIC_POSITIONS, num_draft_steps, compile_config
    assert spare is not None
    with _lock:
        found = next((each for each in spare if each.made_for == sizes), None)
        if found is not None:
            spare.remove(found)
    if found is None:
        with torch.inference_mode(False):  # calls in and outside inference mode may use it
            found = StaticRollOut(working, drafter, *sizes)
    try:
        found.begin(weights)
        yield found
    finally:
        with _lock:
            spare.append(found)
            del spare[:-SPARE_ROLL_OUTS]


class StaticSession(HSDraftSession):
    """Drafts beams for one text by a [`StaticRollOut`], which then need no operator outside one compiled function.

    Where a draft follows a draft, acceptance, the accepted positions and the next draft are one function behind the
    target's forward, and a round reads back once. Foreseen draws, refinement, reuse and other trees take the states of
    a compiled roll-out, then continue as in [`HSDraftSession`].
    """

    _roll_out: StaticRollOut

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        with_states = self._foresight is not None or self._reuse != "none"
        self._beams = not with_states and self._options.tree_builder == "beam"
        self._sizes: tuple[int, int] | None = None  # `tree_size` and `beam_width` of this round's draft
        self._followed: Followed | None = None  # the next draft, if the target accepts as it assumes
        self._found: tuple[FoundNodes, tuple[int, int]] | None = None  # the next draft, and its sizes

    def trees(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> list[DraftTree]:
        [ask] = asks
        if not self._beams or self.on_expansion is not None or self.revise is not None:
            return super().trees(asks, depth, options)
        sizes = options.tree_size, options.beam_width
        if self._found is None:
            self._found = self._roll_out.beam(self.taken([0])[1], ask.root, *sizes), sizes
        found, of_sizes = self._found
        if of_sizes != sizes:  # the target reads other trees from here on
            return [DraftTree.root(ask.root)]
        self._sizes = sizes
        return [found.best_tree(0, options.tree_size, depth, options.threshold)]

    def follow(self, batch: TreeBatch, choices: torch.Tensor, taps: torch.Tensor, position: int) -> list[int] | None:
        """See [`Session`]; a text that drafted nothing in this round does not draft now."""
        if self._sizes is None:
            return None
        forward = Verified.of(batch, choices, taps, position)
        self._followed = self._roll_out.follow(forward.to(self.drafter.device, self.drafter.dtype), *self._sizes)
        self.followed = self._followed.seconds
        return self._followed.choices

    def observe(self, news: Sequence[Accepted]) -> None:
        followed, sizes = self._followed, self._sizes
        self._followed = self._found = self._sizes = None
        self.followed = 0.0
        if followed is None or sizes is None or [each.tokens for each in news] != [followed.tokens]:
            super().observe(news)
            return
        self._take_tokens(news[0])
        self._guessed = {}
        self._roll_out.advance(len(followed.tokens))
        self._found = followed.found, sizes


def session_of(drafter: HSDraftNetwork, weights: TargetWeights, call: Call, working: QuickWeights) -> StaticSession:
    """What drafts in a call whose target runs compiled, for one text."""
    sizes = call.runtime.slots.size, call.options.depth, call.runtime.acceleration.compile_config
    roll_out = call.stack.enter_context(static_roll_out(drafter, working, weights, *sizes))
    return StaticSession(drafter, weights, call, working, roll_out)
