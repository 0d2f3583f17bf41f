"""Rows of a batch in a language model's cache: accepted tokens, followed for a while by drafted ones.

Each row fills its first slots. Masked slots follow shorter rows, up to the end of the longest one. Drafted tokens take
the slots after that, and are dropped after the draft. A trial tells whether a model can do this.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from ...core.cache_name import CACHE
from ...core.checks import few, printable
from ...core.draft_tree import TreeBatch
from ...core.kept import kept_with
from ...core.tensors import device_of, embedded_tokens, on_device, shared_length
from ...core.tuning import MASK_ROWS
from ...runtime.cache_slots import CacheSlots, cache_layers, move_slots
from ...runtime.misreading import same_but_rounding
from ...runtime.module_hooks import fingerprint
from ...runtime.target_limits import furthest_position, text_config, why_no_trees, why_refused
from ...runtime.target_runtime import target_output
from ...runtime.tree_reading import AttentionKind, TargetOutput, as_attention_takes_it, attention_kinds, tree_mask
from ..published.levels import further_nodes


class LMTexts:
    """Rows as read by a language model.

    Args:
        model: not changed, and referenced weakly.
        rows: row numbers in the call.
        kinds: attention types that need separate masks, see `LMAbility`.
        most_drafted: greatest number of drafted tokens per row that one draft reads.
    """

    def __init__(self, model: Any, rows: Sequence[int], kinds: Sequence[AttentionKind], most_drafted: int) -> None:
        self.rows, self.tokens = list(rows), [list[int]() for _ in rows]  # `tokens`: those of each row in the cache
        # Memories on the target's cache must not keep the drafter alive.
        self._reference = weakref.ref(model)
        self._kinds, self._most_drafted = kinds, most_drafted
        self._slots = CacheSlots(DynamicCache(config=text_config(model)))
        self._slots.keep_past()
        self._slots.widen_windows(most_drafted)
        if text_config(model)._attn_implementation in ("sdpa", "eager"):
            self._slots.make_room()
        self._last_position = furthest_position(model) - 1
        self._takes = inspect.signature(model.forward).parameters.keys() & {"logits_to_keep", "position_ids"}
        self._drafted: TreeBatch | None = None  # in the order of reading; nodes of depth 1 have depth 0

    @property
    def _model(self) -> Any:
        return self._reference()

    @property
    def kept(self) -> list[int]:
        """Number of cached tokens of each row."""
        return [len(each) for each in self.tokens]

    def copied(self) -> LMTexts:
        other = copy.copy(self)
        other.rows, other.tokens = list(self.rows), [list(each) for each in self.tokens]
        other._slots = CacheSlots(copy.deepcopy(self._slots.cache))
        other._slots.windows = dict(self._slots.windows)  # configured widths, before widening
        return other

    def fits(self, model: Any, most_drafted: int) -> bool:
        """Whether this model may continue here: same model and device, and windows keep as much."""
        layers = [layer for layer in self._slots.layers_with_keys if layer.keys.numel()]
        alike = all(layer.keys.device == device_of(model) and layer.keys.dtype == model.dtype for layer in layers)
        return self._model is model and alike and self._most_drafted == most_drafted

    def room(self, place: int) -> int:
        """Returns how many more tokens of a row the model has positions for."""
        return self._last_position + 1 - len(self.tokens[place])

    @torch.no_grad()
    def read(self, tokens: Sequence[Sequence[int]], wanted: int = 1) -> torch.Tensor:
        """Reads further tokens of rows; returns logits `[B, wanted, V]` of the last, undefined for rows without any."""
        return self.read_states(tokens, wanted).logits

    @torch.no_grad()
    def read_states(self, tokens: Sequence[Sequence[int]], wanted: int, taps: Sequence[int] = ()) -> TargetOutput:
        """As `read`, with hidden states `[B, columns, taps * D]`. All rows end in the last column."""
        states, logits = [], torch.empty(0)
        for part in _parts(tokens, max(map(len, tokens))):
            output = self._read_part(part, wanted, taps)
            logits = output.logits  # only the last part's are wanted
            states += [output.taps] if taps else []
            del output
        return TargetOutput(logits, torch.cat(states, dim=1) if taps else logits.new_empty(len(tokens), 0, 0))

    def take_back(self, texts: Sequence[Sequence[int] | None], again: Sequence[int]) -> None:
        """Drops cached tokens that no text has, at most `most_drafted` at a time.

        `texts` are by place; None keeps what is cached. The last `again` tokens of each are to be read in any case.
        """
        lengths = [
            len(read) if text is None else max(min(shared_length(read, text), len(text) - count), 0)
            for read, text, count in zip(self.tokens, texts, again, strict=True)
        ]
        if lengths != self.kept:
            self.tokens = [read[:length] for read, length in zip(self.tokens, lengths, strict=True)]
            if self._slots.length:
                self._drop_kept(self._slots.length - max(lengths))

    def _drop_kept(self, count: int) -> None:
        """Drops the last `count` slots. Sliding layers then hold fewer, and must know it."""
        windows = self._slots.windows
        for index, width in list(windows.items())[:1]:  # all are widened equally
            self._slots.widen_windows(self._slots.layers[index].sliding_window - width - count)
        self._slots.drop(count)

    def _widen_windows(self, by: int, dropped: int) -> None:
        """Lets sliding layers keep more than their window, as far as they still hold it, before slots are dropped."""
        for index, width in self._slots.windows.items():
            layer = self._slots.layers[index]
            if layer.keys.shape[-2] < self._slots.length:
                by = min(by, layer.keys.shape[-2] - dropped + 1 - width)
        self._slots.widen_windows(by)

    @torch.no_grad()
    def read_nodes(
        self, depth: int, tokens: torch.Tensor, parents: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads drafted tokens after their ancestors; `forget` drops them.

        tokens `[B, n]`, int64, are nodes of one depth, 1 for children of the root; parents, likewise, their columns in
        the draft, None for the root. Returns logits `[B, n, V]` after each node, and the nodes' columns `[B, n]`.
        """
        rows, count = tokens.shape
        drafted, nodes = further_nodes(self._drafted, tokens, torch.full_like(tokens, depth - 1), parents)
        self._drafted = drafted
        kept = on_device(self.kept, tokens.device)
        positions = (kept[:, None] + depth - 1).clamp(max=self._last_position).expand(-1, count)
        alone = rows == 1 and drafted.tokens.shape[1] == depth  # a chain
        masks = None if alone else self._masks(drafted, count)
        return self._forward(tokens, positions, masks, count, ()).logits, nodes

    def forget(self) -> None:
        if self._drafted is not None:
            self._slots.drop(self._drafted.tokens.shape[1])
            self._drafted = None

    def keep(self, rows: Sequence[int]) -> None:
        places = [place for place, row in enumerate(self.rows) if row in rows]
        if len(places) == len(self.rows):
            return
        self.rows, self.tokens = [self.rows[place] for place in places], [self.tokens[place] for place in places]
        length = self._slots.length
        if not length or not places:
            return
        self._slots.cache.batch_select_indices(torch.tensor(places))
        self._drop_kept(length - max(self.kept))

    def _read_part(self, tokens: Sequence[Sequence[int]], wanted: int, taps: Sequence[int]) -> TargetOutput:
        """As `read`, in one forward. Rows are aligned at the last column; the padding before shorter ones is masked."""
        device, columns = device_of(self._model), max(map(len, tokens))
        counts = on_device([len(each) for each in tokens], device)
        ids = on_device([[0] * (columns - len(each)) + list(each) for each in tokens], device)
        depths = torch.arange(columns, device=device)[None] - (columns - counts)[:, None]
        real = depths >= 0
        positions = (on_device(self.kept, device)[:, None] + depths).clamp(min=0)
        masks = None
        if len(tokens) > 1:
            ancestors = torch.ones(columns, columns, dtype=torch.bool, device=device).tril()
            ancestors = ancestors & real[:, None, :] & real[:, :, None]
            ancestors = ancestors | torch.eye(columns, dtype=torch.bool, device=device)
            masks = self._masks(TreeBatch(ids, depths, ancestors), columns)
        output = self._forward(ids, positions, masks, min(wanted, columns), taps)
        self._compact(tokens, columns)
        return output

    def _masks(self, batch: TreeBatch, columns: int) -> Any:
        """Masks of a batch's last `columns`, the others being cached; by attention type."""
        size, kept = batch.tokens.shape[1], on_device(self.kept, batch.tokens.device)
        before = self._slots.length - (size - columns)  # slots of accepted tokens
        attention, masks = text_config(self._model)._attn_implementation, {}
        for kind in self._kinds:
            kv_length = self._slots.layers[kind.layer].get_mask_sizes(columns)[0]
            seen = tree_mask(batch, kind, None, kept, before, kv_length)[:, size - columns :]
            masks[kind.name] = as_attention_takes_it(seen, attention, self._model.dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, masks: Any, wanted: int, taps: Sequence[int]
    ) -> TargetOutput:
        """Returns outputs of the last `wanted` columns; all columns are cached."""
        before = self._slots.length
        further: dict[str, Any] = {"logits_to_keep": wanted, "position_ids": positions}
        further = {name: value for name, value in further.items() if name in self._takes}
        further |= {"output_hidden_states": list(taps), "return_dict": True} if taps else {}
        further |= {CACHE: self._slots.cache, "use_cache": True}
        outputs = self._model(input_ids=ids, attention_mask=masks, **further)
        if self._slots.length != before + ids.shape[1]:
            raise ValueError(f"its cache holds {self._slots.length} tokens where {before + ids.shape[1]} were read")
        output = target_output(self._model, outputs, "hidden_states", taps)
        return TargetOutput(output.logits[:, -wanted:], output.taps)

    def _compact(self, tokens: Sequence[Sequence[int]], columns: int) -> None:
        """Moves newly read tokens behind each row's earlier ones, and drops the slots after the longest row."""
        start = self._slots.length - columns
        source, goal = [], []
        for kept, count in zip(self.kept, map(len, tokens), strict=True):
            end = start + columns
            source.append([*range(end - count, end), *range(kept + count, kept + columns)])
            goal.append([*range(kept, kept + columns)])
        if source != goal:
            device = device_of(self._model)
            self._slots.move(on_device(source, device), on_device(goal, device), move_slots)
        for read, new in zip(self.tokens, tokens, strict=True):
            read += new
        # Sliding layers keep what the shortest row still sees.
        dropped = start + columns - max(self.kept)
        self._widen_windows(max(self.kept) - min(self.kept) + self._most_drafted, dropped)
        self._slots.drop(dropped)


def kind_of(model: Any) -> tuple[Any, ...]:
    """Returns what the time of a model's forwards depends on: type, size, dtype and device."""
    weights = sum(weight.numel() for weight in model.parameters())
    return text_config(model).model_type, weights, model.dtype, model.device


def groups_of_rows(rows: int, kinds: Sequence[AttentionKind]) -> list[list[int]]:
    """Returns groups of rows that are read together: all rows, or each alone if the model respects no masks."""
    return [list(range(rows))] if kinds else [[row] for row in range(rows)]


def _parts(tokens: Sequence[Sequence[int]], columns: int) -> Iterator[list[Sequence[int]]]:
    """Yields aligned parts that keep masks small; a single row needs no parts."""
    most = columns if len(tokens) == 1 else MASK_ROWS
    for end in range(columns % most or most, columns + 1, most):
        left = columns - end
        yield [each[max(len(each) - left - most, 0) : max(len(each) - left, 0)] for each in tokens]


_TEXTS = ((5, 6, 7), (8, 9))  # different lengths
_NODES = (10, 11)  # at each of two depths
_NAMED = 3  # differences between tokenizers shown in a message


@dataclass(frozen=True)
class LMAbility:
    """What a model can do."""

    kinds: Sequence[AttentionKind] = ()  # attention types whose masks it respects; empty for chains of single rows only
    reason: str = ""  # why it cannot draft at all; empty if it can


def ability_of(model: Any) -> LMAbility:
    """Returns what a model can do; tested once per model and device."""
    known: dict[Any, LMAbility] = kept_with(model, "abilities", dict)
    key: tuple[Any, ...] = ()
    if hasattr(model, "config"):
        key = fingerprint(model), device_of(model), text_config(model)._attn_implementation
    if key not in known:
        known[key] = _found(model)
    return known[key]


def _found(model: Any) -> LMAbility:
    reason = _why_it_cannot_draft(model)
    if reason:
        return LMAbility(reason=reason)
    cache, kinds = _empty_cache(model), []
    if not why_no_trees(model, cache):
        with contextlib.suppress(ValueError):  # some layers take no tree's mask
            kinds = attention_kinds(text_config(model), [True] * len(cache_layers(cache)))
    if kinds and not _fault(model, kinds):
        return LMAbility(kinds)
    reason = _fault(model, [])
    return LMAbility(reason=f"{type(model).__name__} {reason}" if reason else "")


def _why_it_cannot_draft(model: Any) -> str:
    """Returns why a model cannot draft at all by its class, configuration and cache; "" if it may."""
    name = type(model).__name__
    if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
        return f"{name} has no output layer: expected a causal language model"
    if model.config.is_encoder_decoder:
        return f"{name} is an encoder-decoder: a drafter has only the text to read"
    cache = _empty_cache(model)
    if getattr(model, "_is_stateful", False) or CacheSlots(cache).recurrent:
        return f"{name} has recurrent layers: they cannot take back the tokens that the target rejects"
    if CACHE not in inspect.signature(model.forward).parameters:
        return f"{name} keeps no keys and values: it would read the whole text for every drafted token"
    reason = why_refused(model, cache)
    return f"{name}: {reason}" if reason else ""


def _empty_cache(model: Any) -> DynamicCache:
    return DynamicCache(config=text_config(model))


@torch.no_grad()
def _fault(model: Any, kinds: Sequence[AttentionKind]) -> str:
    """Returns what goes wrong when drafted tokens are read; "" if the logits match plain forwards."""
    size = text_config(model).vocab_size
    texts = [[token % size for token in text] for text in (_TEXTS if kinds else _TEXTS[:1])]
    nodes = [token % size for token in (_NODES if kinds else _NODES[:1])]
    try:
        read = LMTexts(model, range(len(texts)), kinds, len(nodes) ** 2 + len(nodes))
        read.read(texts)
        first = torch.tensor([nodes] * len(texts), device=device_of(model))
        _, columns = read.read_nodes(1, first, None)
        twice = first.repeat_interleave(len(nodes), dim=1)
        logits, _ = read.read_nodes(2, first.repeat(1, len(nodes)), columns.repeat_interleave(len(nodes), dim=1))
        for row, text in enumerate(texts):
            both = zip(twice[row].tolist(), first.repeat(1, len(nodes))[row].tolist(), strict=True)
            ids = torch.tensor([[*text, *pair] for pair in both], device=device_of(model))
            plain = model(input_ids=ids, use_cache=False).logits[:, -1]
            if not same_but_rounding(logits[row], plain.to(logits.device)):
                return "reads drafted tokens otherwise than those of a text"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # any error of the model's code means that it cannot
        lines = str(error).strip().splitlines()
        return f"cannot read drafted tokens ({type(error).__name__}: {lines[0][:160] if lines else 'no message'})"
    return ""


def what_differs(own: Any, targets: Any) -> str:
    """Returns how two tokenizers differ; "" if every id in both stands for the same token. Either may have more."""
    known: weakref.WeakKeyDictionary[Any, str] = kept_with(own, "differences", weakref.WeakKeyDictionary)
    if targets not in known:
        known[targets] = _difference(own.get_vocab(), targets.get_vocab())
    return known[targets]


def shared_tokens(model: Any, target: Any) -> int:
    """Returns the number of tokens that model and target share: the first ids."""
    rows = embedded_tokens(model)
    return min(text_config(model).vocab_size, text_config(target).vocab_size, rows)


def _difference(own: dict[str, int], targets: dict[str, int]) -> str:
    by_id = {index: token for token, index in targets.items()}
    other = {index: token for token, index in own.items() if by_id.get(index, token) != token}
    if not other:
        return ""
    told = [
        f"{index} is {printable(other[index])!r}, the target's {printable(by_id[index])!r}" for index in sorted(other)
    ]
    return f"{len(other):,} of {len(own):,} token ids stand for other tokens: {few(told, _NAMED)}"
