"""A target's forwards in a call: their inputs, and trees: their masks, and committing them to the cache.

Slots and positions differ here. Each node of a tree takes one slot, after the longest text, while siblings share a
position. Rows may differ in length: slots behind a shorter text are left over, and its nodes may not see them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F

from ..core.cache_name import CACHE, returned_cache
from ..core.draft_tree import DraftTree, TreeBatch
from ..core.refusals import DraftingRefused
from ..core.stand_ins import StandIn
from ..core.tensors import device_of, on_device
from .cache_slots import CacheSlots, Mark, move_slots
from .target_limits import check_cache, check_mask, refusal, text_config, why_no_trees

TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")

_WIDTHS = {"full_attention": "", "sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_NO_ATTENTION = ("moe", "mlp")  # layer types that never see a mask


@dataclass(frozen=True)
class TargetOutput:
    """One target forward over B sequences."""

    logits: torch.Tensor  # `[B, rows, V]`, of the prompt's last position, or of each node of a tree
    # `[B, rows, taps * D]`, the tapped hidden states, concatenated; for a prompt, of the positions it read
    taps: torch.Tensor

    def last(self, columns: int) -> TargetOutput:
        """The last columns; raises a DraftingRefused if there are fewer."""
        if (found := self.logits.shape[1]) < columns:
            raise DraftingRefused(f"its forward over {columns} tokens returns logits of {found}: expected one of each")
        return TargetOutput(self.logits[:, -columns:], self.taps[:, -columns:])


def picked_taps(taps: torch.Tensor, layers: Sequence[int], wanted: Sequence[int]) -> torch.Tensor:
    """Selects hidden states of the layers `wanted`, in that order, from those `[..., len(layers) * D]` of `layers`."""
    if tuple(layers) == tuple(wanted):
        return taps
    places = [layers.index(layer) for layer in wanted]
    return taps.unflatten(-1, (len(layers), -1))[..., places, :].flatten(-2) if places else taps[..., :0]


@dataclass(frozen=True)
class AttentionKind:
    """One kind of attention among a target's layers."""

    name: str  # transformers' name of the layer type
    width: int  # positions of a window or a chunk; 0 for full attention
    layer: int  # index of the first layer of this kind with its own cache
    attention: str = "sdpa"  # transformers' name of the implementation

    def sees(self, queries: torch.Tensor, keys: torch.Tensor, padding: torch.Tensor) -> torch.Tensor | None:
        """Returns `[B, n, m]`, True where a query is near enough to see a key; `None` where distance does not matter.

        Args:
            queries: `[B, n]`, int64, indices of the queries in their row.
            keys: `[B, m]`, int64, indices of the keys in their row.
            padding: `[B]`, int64, number of masked slots before each text. Chunks are counted from its first token.
        """
        if self.name == "sliding_attention":
            return queries[:, :, None] - keys[:, None, :] < self.width
        if self.name == "chunked_attention":
            chunks = [(index - padding[:, None]).div(self.width, rounding_mode="floor") for index in (queries, keys)]
            return chunks[0][:, :, None] == chunks[1][:, None, :]
        return None


def attention_kinds(config: Any, has_cache: Sequence[bool]) -> list[AttentionKind]:
    """Returns the kinds of attention of a text configuration.

    `has_cache` says for each layer whether it has its own keys and values. Raises a ValueError that names the layer
    type if its mask is unknown.
    """
    types = getattr(config, "layer_types", None)
    if types is None:
        windows = [name for name, width in _WIDTHS.items() if width and getattr(config, width, None)]
        types = [windows[0] if windows else "full_attention"] * len(has_cache)
    kinds: dict[str, AttentionKind] = {}
    for layer, name in enumerate(types):
        if name in _NO_ATTENTION:
            continue
        if name not in _WIDTHS:
            raise ValueError(f"it has layers of type {name!r}, which do not take a tree's mask")
        if name not in kinds and layer < len(has_cache) and has_cache[layer]:
            layer_config = config.per_layer_config[layer]
            width = getattr(layer_config, _WIDTHS[name], 0) if _WIDTHS[name] else 0
            kinds[name] = AttentionKind(name, width or 0, layer, config._attn_implementation)
    return list(kinds.values())


def tree_mask(
    batch: TreeBatch, kind: AttentionKind, attended: torch.Tensor | None, kept: torch.Tensor, slots: int, kv_length: int
) -> torch.Tensor:
    """Returns `[B, N, kv_length]`, bool, True where a node may see a slot of the cache or a node of its own tree.

    Args:
        attended: `[B, prompt]`, bool, the prompts' attention mask; `None` if nothing is masked.
        kept: `[B]`, int64, number of slots that hold the text of each row. Further slots, up to `slots`, hold what
            longer paths of other rows have left behind.
        slots: number of slots in the cache before the trees.
        kv_length: number of slots that attention sees: the last ones, the trees' included.
    """
    size, device = batch.tokens.shape[1], batch.tokens.device
    indices = torch.arange(slots - (kv_length - size), slots, device=device)
    prefix = indices[None, :] < kept[:, None]
    padding = torch.zeros_like(kept)
    if attended is not None:
        known = indices < attended.shape[1]
        prefix &= torch.where(known[None, :], attended[:, indices.clamp(max=attended.shape[1] - 1)], True)
        padding = attended.int().argmax(dim=1)
    mask = torch.cat([prefix[:, None, :].expand(-1, size, -1), batch.ancestors], dim=2)
    nodes = kept[:, None] + batch.depths
    seen = kind.sees(nodes, torch.cat([indices.expand(len(kept), -1), nodes], dim=1), padding)
    return mask if seen is None else mask & seen


def as_attention_takes_it(mask: torch.Tensor, attention: str, dtype: torch.dtype) -> Any:
    """Returns a mask `[B, N, KV]`, bool, in the form that an attention implementation takes.

    Flex attention takes a block mask. The others take an additive mask: eager would silently add a bool, and sdpa would
    convert it to an additive mask again in each layer.
    """
    if attention == "flex_attention":
        from torch.nn.attention.flex_attention import create_block_mask

        def visible(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return mask[batch, query, key]

        batch_size, queries, keys = mask.shape
        return create_block_mask(visible, batch_size, None, queries, keys, device=str(mask.device), _compile=False)
    hidden = float("-inf") if attention == "sdpa" else torch.finfo(dtype).min
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, hidden)[:, None]


@dataclass(frozen=True)
class TextRows:
    """The texts of the rows that are read."""

    kept: list[int]  # number of text slots of each row. Slots behind are left over from longer rows.
    prompt_slots: int  # number of slots of the prompts
    attended: torch.Tensor | None  # `[B or 1, prompt_slots]`, bool, False for padding; `None` if there is none
    # `[..., B or 1]`, position ids of the prompts' ends, on several axes for some targets; `None` without position ids
    last_positions: torch.Tensor | None
    gapless: TextRows | None = None  # these rows without the slots that `with_gaps` has left over; `None` if it has not

    @classmethod
    def of_slots(cls, kept: list[int], device: torch.device) -> TextRows:
        """Rows without padding whose tokens are in the slots of their positions."""
        return cls(kept, 0, None, torch.full((len(kept),), -1, device=device))

    @property
    def next_positions(self) -> list[int] | None:
        """Position id of each row's first token after the prompt; the maximum over several axes."""
        if self.last_positions is None:
            return None
        last = self.last_positions.reshape(-1, self.last_positions.shape[-1]).amax(dim=0)
        return (last.expand(len(self.kept)) + 1).tolist()

    @property
    def lengths(self) -> list[int]:
        """Number of cached tokens of each row, without padding."""
        if self.attended is None:
            return list(self.kept)
        real = self.attended.sum(dim=1).expand(len(self.kept)).tolist()
        return [kept - self.prompt_slots + count for kept, count in zip(self.kept, real, strict=True)]

    def keeping(self, counts: Sequence[int]) -> TextRows:
        kept = [kept + count for kept, count in zip(self.kept, counts, strict=True)]
        gapless = None if self.gapless is None else self.gapless.keeping(counts)
        return replace(self, kept=kept, gapless=gapless)

    def with_gaps(self, read: Sequence[bool], device: torch.device) -> TextRows:
        """The rows after each has read a token into the last slot, of equal length.

        Slots left before it in shorter rows are masked like padding, so nothing is moved: rounds are 1.17 times as fast
        (8 rows of SmolLM2-135M, float32, one thread of Zen 3, by hand). Not for windows, which need tokens in place.

        Args:
            read: for each row, whether its token is kept.
            device: of the masks.
        """
        assert self.last_positions is not None
        longest = max(self.kept)
        kept = on_device(self.kept, device)[:, None]
        seen = torch.arange(longest, device=device) < kept
        if self.attended is not None:
            seen[:, : self.prompt_slots] &= self.attended
        last = on_device([[each] for each in read], device, dtype=torch.bool)
        tokens = kept[:, 0] + last[:, 0] - self.prompt_slots
        gapless = (self.gapless or self).keeping([int(each) for each in read])
        attended, slots = torch.cat([seen, last], dim=1), longest + 1
        return TextRows([slots] * len(read), slots, attended, self.last_positions + tokens, gapless)

    @property
    def padded(self) -> bool:
        """Whether the prompts are."""
        return (self.gapless or self).attended is not None

    def of(self, places: Sequence[int]) -> TextRows:
        attended, positions, before = self.attended, self.last_positions, len(self.kept)
        if attended is not None and len(attended) == before:
            attended = attended[on_device(places, attended.device)]
        if positions is not None and positions.shape[-1] == before:
            positions = positions[..., on_device(places, positions.device)]
        gapless = None if self.gapless is None else self.gapless.of(places)
        return TextRows([self.kept[place] for place in places], self.prompt_slots, attended, positions, gapless)


class Names:
    """Names of a target's text inputs and outputs; for an encoder-decoder, its decoder's."""

    def __init__(self, target: Any) -> None:
        decoder = target.config.is_encoder_decoder
        prefix = "decoder_" if decoder else ""
        self.mask, self.positions = f"{prefix}attention_mask", f"{prefix}position_ids"
        self.states = f"{prefix}hidden_states"
        self.attentions = ("decoder_attentions", "cross_attentions") if decoder else ("attentions",)

    @property
    def by_rows(self) -> tuple[str, ...]:
        """Inputs that can be sliced by row."""
        return self.mask, self.positions, "inputs_embeds", "output_hidden_states"


class TargetCall:
    """A target in one call: its cache, the texts' places there, and forwards that read on.

    Attributes:
        acceleration: the `Acceleration` that runs its forwards.
        kwargs: model inputs that `generate()` passes from forward to forward.
        fixed: number of columns of every forward over trees into a static cache, padding included; 0 if it varies.
        unread: number of accepted tokens that recurrent layers have to read again; see `read_chains`.
        marked: state of the cache before the last chains, with recurrent layers.
        entered: its state before the round.
        stepping: what runs in place of layers that read several tokens otherwise than one by one; None until needed.
        keeps_ended: whether windows keep what rows that have ended still see, as padding is read for them at the end.
        leaves_gaps: whether rounds without drafts leave slots between tokens; see `TextRows.with_gaps`.
        drops: whether a forward has lost slots of the cache, for example by a hook; then no draft can be rolled back.
        further: number of columns of each input along the text beyond the cache after the prompts; negative where the
            caller gave only the new tokens' columns.
    """

    slots: CacheSlots  # from the prompts' forward on
    rows: TextRows
    trees: bool

    def __init__(self, target: Any, kwargs: dict[str, Any], acceleration: Any) -> None:
        self.target, self.kwargs, self.names = target, dict(kwargs), Names(target)
        self.acceleration = acceleration
        self.fixed = self.forwards = self.unread = 0
        self.marked: Mark | None = None
        self.entered: Mark | None = None
        self.stepping: Mapping[Any, StandIn] | None = None
        self.keeps_ended = self.leaves_gaps = self.drops = False
        self.further = dict[str, int]()

    def hold(self, outputs: Any, num_texts: int) -> None:
        """Takes over the cache from the prompts' forward; raises a DraftingRefused if it cannot roll back."""
        cache = returned_cache(outputs)
        check_cache(self.target, cache)
        slots = CacheSlots(cache)
        if slots.hold_more_than_the_text:
            more = "some layers of its cache hold more than the text, which cannot be told from what was rejected."
            raise refusal(self.target, more)
        device, length = device_of(self.target), slots.length
        mask, positions = self.kwargs.get(self.names.mask), self.kwargs.get(self.names.positions)
        check_mask(self.target, mask, length)
        attended = None if mask is None else mask[:, :length].bool().to(device)
        if attended is not None and bool(attended.all()):
            attended = None
        last = None if positions is None else positions[..., -1].to(device)
        self.slots, self.rows, self.forwards = slots, TextRows([length] * num_texts, length, attended, last), 1
        given = {name: self.kwargs.get(name) for name in (self.names.mask, self.names.positions, *TOKEN_TYPES)}
        self.further = {name: value.shape[-1] - length for name, value in given.items() if value is not None}

    def apart(self) -> Self:
        """Copy for trials: it reads into the same cache, which a mark restores, and changes nothing else here."""
        trial = copy.copy(self)
        trial.kwargs, trial.slots, trial.entered = dict(self.kwargs), copy.copy(self.slots), None
        return trial

    def inputs(
        self,
        ids: torch.Tensor,
        size: int,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None = None,
        kwargs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The inputs of a forward over the last `size` tokens of `ids` `[B, n]`.

        Args:
            mask: as `generate()` would pass it.
            positions: of these tokens, if they do not follow from the text.
            kwargs: instead of the call's.
        """
        kwargs = dict(self.kwargs if kwargs is None else kwargs)
        kwargs[CACHE] = self.slots.cache
        kwargs[self.names.mask] = mask
        if positions is not None:
            kwargs[self.names.positions] = positions
            for name in TOKEN_TYPES:
                if kwargs.get(name) is not None:
                    kwargs[name] = kwargs[name][:, -1:].expand(-1, size)
        inputs = self.target.prepare_inputs_for_generation(
            ids, next_sequence_length=size, is_first_iteration=False, **kwargs
        )
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = size
        return inputs

    def forward(self, inputs: dict[str, Any], size: int, model: Any = None) -> Any:
        """The outputs for `size` columns, which the cache then holds, of the target or a `model` made of its layers."""
        self.forwards += 1
        own = model is None and any(value is self.slots.cache for value in inputs.values())
        length = self.slots.length + size
        outputs = self.acceleration.forward(inputs, comes_again=size in (1, self.fixed), model=model)
        self.slots.count(size)
        if own and not self.drops and not self.slots.hold(length):
            self._drop(size)
        return outputs

    def _drop(self, size: int) -> None:
        """Notes that slots were lost; raises a DraftingRefused if plain decoding would not have lost them there."""
        self.drops = True
        in_a_round = self.entered is not None  # and not in a trial
        if size > 1 or (len(self.rows.kept) > 1 and self.trees) or not in_a_round:
            raise dropped(self.target)

    def go_on(self, outputs: Any, new_tokens: int) -> None:
        """Updates `kwargs` for the next forward."""
        decoder = self.target.config.is_encoder_decoder
        self.kwargs = self.target._update_model_kwargs_for_generation(
            outputs, self.kwargs, is_encoder_decoder=decoder, num_new_tokens=new_tokens
        )


def dropped(target: Any) -> DraftingRefused:
    return refusal(
        target, "its cache loses tokens while it is read, which could not be brought back after a rejection."
    )


def kinds_of_attention(call: TargetCall) -> list[AttentionKind]:
    """The kinds of attention that need separate masks; raises a ValueError if the target cannot read trees."""
    reason = why_no_trees(call.target, call.slots.cache)
    if not reason and call.rows.last_positions is None:
        reason = "no position_ids reach it, and siblings in a tree share a position"
    if reason:
        raise ValueError(reason)
    own = [getattr(layer, "keys", None) is not None for layer in call.slots.layers]
    return attention_kinds(text_config(call.target), own)


def read_trees(call: TargetCall, trees: Sequence[DraftTree], columns: int, kinds: Sequence[AttentionKind]) -> Any:
    """The target's outputs for a tree of each row; column i is node i. See `read_batch`."""
    return read_batch(call, TreeBatch.of(trees, device_of(call.target), columns), kinds)


def read_batch(call: TargetCall, batch: TreeBatch, kinds: Sequence[AttentionKind]) -> Any:
    """The target's outputs for a batch of trees, all nodes of which are new to the cache."""
    columns = batch.tokens.shape[1]
    return call.forward(node_inputs(call, batch, columns, kinds), columns)


def read_roots(call: TargetCall, roots: Sequence[DraftTree], kinds: Sequence[AttentionKind]) -> Any:
    """The target's outputs for lone roots of rows of equal length, read as in plain decoding; see `read_trees`."""
    rows, device = call.rows, device_of(call.target)
    assert rows.last_positions is not None
    slots, depths = rows.kept[0] + 1, [tree.depths for tree in roots]
    ahead = slots - rows.prompt_slots  # of the prompt's last position
    # Only idle nodes have another depth than 0.
    further = on_device(depths, device) + ahead if any(depth for [depth] in depths) else ahead
    tokens = on_device([tree.tokens for tree in roots], device)
    if rows.attended is None:
        mask = torch.ones(len(roots), slots, dtype=torch.int64, device=device)
    else:
        mask = F.pad(rows.attended, (0, slots - rows.prompt_slots), value=True).expand(len(roots), -1)
        if [(kind.width, kind.attention) for kind in kinds] == [(0, "sdpa")]:
            mask = as_attention_takes_it(mask[:, None], "sdpa", call.slots.layers[kinds[0].layer].keys.dtype)
    inputs = call.inputs(tokens, 1, None, positions=rows.last_positions[..., None] + further)
    inputs[call.names.mask] = mask
    return call.forward(inputs, 1)


def node_inputs(call: TargetCall, batch: TreeBatch, columns: int, kinds: Sequence[AttentionKind]) -> dict[str, Any]:
    """The inputs of a forward over the last `columns` nodes of a batch of trees, whose other nodes are in the cache."""
    rows, device = call.rows, device_of(call.target)
    assert rows.last_positions is not None
    kept = on_device(rows.kept, device)
    ahead = (kept - rows.prompt_slots + 1)[:, None] + batch.depths[:, -columns:]  # of the prompt's last position
    mask = _masks(call, batch, columns, kept, kinds)
    # Without a mask, a static cache would get a causal one, whose length is read back from the device.
    known = mask if call.slots.static is not None and isinstance(mask, torch.Tensor) else None
    positions = rows.last_positions[..., None] + ahead
    inputs = call.inputs(batch.tokens[:, -columns:], columns, known, positions=positions)
    inputs[call.names.mask] = mask
    return inputs


def _masks(call: TargetCall, batch: TreeBatch, columns: int, kept: torch.Tensor, kinds: Sequence[AttentionKind]) -> Any:
    """The masks of the last columns of a batch of trees, by kind of attention if there are several; see `tree_mask`."""
    slots, size = call.slots, batch.tokens.shape[1]
    before = slots.length - (size - columns)  # slots of the texts
    beyond = 0 if slots.static is None else slots.left - size  # empty slots behind the nodes
    masks: dict[str, Any] = {}
    for kind in kinds:
        layer = slots.layers[kind.layer]
        kv_length = layer.get_mask_sizes(columns)[0] - beyond
        seen = tree_mask(batch, kind, call.rows.attended, kept, before, kv_length)[:, size - columns :]
        masks[kind.name] = as_attention_takes_it(F.pad(seen, (0, beyond)), kind.attention, layer.keys.dtype)
    return masks if len(masks) > 1 else next(iter(masks.values()))


def commit_trees(call: TargetCall, paths: Sequence[Sequence[int] | None], columns: int) -> None:
    """Moves root and accepted path of each row to the end of its text, and drops everything behind.

    Args:
        paths: nodes after the root, by row; `None` for rows of which nothing is kept.
        columns: of the forward that read the trees.
    """
    slots, total = call.slots, call.slots.length
    longest = max(call.rows.kept)
    apart = None in paths or min(call.rows.kept) < longest
    if columns == 1 and call.leaves_gaps and apart and longest == total - 1:
        call.rows = call.rows.with_gaps([path is not None for path in paths], device_of(call.target))
        return
    fixed_shape = call.acceleration.compile_config is not None  # a compiled move has one shape only
    source, goal = slots_to_move(call.rows.kept, paths, total - columns, columns if fixed_shape else 0)
    call.rows = call.rows.keeping([tokens_kept(path) for path in paths])
    moved = [i for i in range(len(source[0])) if any(s[i] != g[i] for s, g in zip(source, goal, strict=True))]
    if moved:
        first = 0 if fixed_shape else moved[0]
        picked, placed = (on_device([row[first:] for row in each], device_of(call.target)) for each in (source, goal))
        slots.move(picked, placed, call.acceleration.compiled(move_slots))
    kept = call.rows.kept
    growing = [length for length, path in zip(kept, paths, strict=True) if path is not None or call.keeps_ended]
    # Sliding layers keep what the shortest row still sees.
    slots.widen_windows(max(kept) - min(growing, default=max(kept)))
    slots.drop(total - max(kept))


def close_gaps(call: TargetCall) -> None:
    """Moves the tokens of rows with gaps to where they are without; see `TextRows.with_gaps`."""
    rows, slots = call.rows, call.slots
    if rows.gapless is None or rows.attended is None:
        return
    real = F.pad(rows.attended, (0, slots.length - rows.prompt_slots), value=True)
    real[:, : rows.gapless.prompt_slots] = True
    order = (~real).int().argsort(dim=1, stable=True)[:, None, :, None]
    for layer in slots.layers_with_keys:
        layer.keys, layer.values = (
            states.gather(2, order.to(states.device).expand_as(states)) for states in (layer.keys, layer.values)
        )
    call.rows = rows.gapless
    slots.drop(slots.length - max(call.rows.kept))


def slots_to_move(
    kept: Sequence[int], paths: Sequence[Sequence[int] | None], start: int, columns: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Source and destination slots of each row's root and path; rows are padded by moving slots onto themselves.

    Args:
        kept: number of text slots of each row.
        start: slot of the roots.
        columns: minimum number of slots to move.
    """
    longest = max(columns, *map(tokens_kept, paths))
    source, goal = [], []
    for end, path in zip(kept, paths, strict=True):
        count = tokens_kept(path)
        spare = [*range(start + count, start + longest)]
        source.append([*([] if path is None else [start, *(start + node for node in path)]), *spare])
        goal.append([*range(end, end + count), *spare])
    return source, goal


def tokens_kept(path: Sequence[int] | None) -> int:
    """Number of tokens that a commit keeps: the root and its path, or nothing."""
    return 0 if path is None else 1 + len(path)
