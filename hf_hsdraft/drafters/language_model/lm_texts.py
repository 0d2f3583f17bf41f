"""The texts of a batch in the cache of a language model: what was accepted, and for a while what is drafted after it.

Every text fills the first slots of its row. Behind shorter texts lie slots that nobody sees, up to the end of the
longest one. What is drafted takes the slots after those, and is dropped when the draft is complete.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ...core.cache_name import CACHE
from ...core.tensors import device_of, on_device
from ...core.tuning import TUNING
from ...runtime.cache_slots import CacheSlots, move_slots
from ...runtime.target_limits import text_config
from ...runtime.target_outputs import TargetOutput, target_output
from ...trees.drafted_levels import DraftedLevels
from ...trees.tree_masks import AttentionKind, TreeBatch, as_attention_takes_it, tree_mask
from .lm_limits import empty_cache, most_tokens


class LMTexts:
    """Some texts as a language model has read them.

    Args:
        model: the language model; not changed, and not kept alive.
        rows: numbers of the texts.
        kinds: kinds of attention that need masks of their own, see `kinds_for_trees`; empty for a model that reads
            chains of a single text only.
        most_drafted: greatest number of drafted tokens of a text that are read in one draft.

    Attributes:
        kept: number of tokens of each text that are in the cache.
    """

    def __init__(self, model: Any, rows: Sequence[int], kinds: Sequence[AttentionKind], most_drafted: int) -> None:
        self.rows, self.kept = list(rows), [0] * len(rows)
        # A memory of these texts lies on the target's cache, which is not to keep the drafter alive.
        self._reference = weakref.ref(model)
        self._kinds, self._most_drafted = kinds, most_drafted
        self._slots = CacheSlots(empty_cache(model))
        self._slots.keep_past()
        self._slots.widen_windows(most_drafted)
        if text_config(model)._attn_implementation in ("sdpa", "eager"):
            self._slots.make_room()
        self._last_position = most_tokens(model) - 1
        self._takes = inspect.signature(model.forward).parameters.keys() & {"logits_to_keep", "position_ids"}
        self._drafted: DraftedLevels | None = None

    @property
    def _model(self) -> Any:
        return self._reference()

    def copied(self) -> LMTexts:
        """Returns the same texts, to be read on without a change of these."""
        other = copy.copy(self)
        other.rows, other.kept = list(self.rows), list(self.kept)
        other._slots = CacheSlots(copy.deepcopy(self._slots.cache))
        other._slots.windows = dict(self._slots.windows)  # of the configuration, without what they were widened by
        return other

    def fits(self, model: Any, most_drafted: int) -> bool:
        """Whether a model may read on here: it is the same one, where it was, and windows keep as much."""
        layers = [layer for layer in self._slots.layers_with_keys if layer.keys.numel()]
        alike = all(layer.keys.device == device_of(model) and layer.keys.dtype == model.dtype for layer in layers)
        return self._model is model and alike and self._most_drafted == most_drafted

    def room(self, place: int) -> int:
        """Returns how many further tokens of a text the model has positions for."""
        return self._last_position + 1 - self.kept[place]

    @torch.no_grad()
    def read(self, tokens: Sequence[Sequence[int]], wanted: int = 1) -> torch.Tensor:
        """Reads further accepted tokens of each text; they stay in the cache.

        Args:
            tokens: of each text, none for a text that stays as it is.
            wanted: number n of tokens whose logits are wanted. A text with fewer tokens has its own at the end.

        Returns:
            `[B, n, V]`, logits after the last tokens of each text that goes on; of the others anything.
        """
        return self.read_states(tokens, wanted).logits

    @torch.no_grad()
    def read_states(self, tokens: Sequence[Sequence[int]], wanted: int, taps: Sequence[int] = ()) -> TargetOutput:
        """As `read`; returns hidden states `[B, columns, taps * D]` too. Texts end with the last column."""
        states, logits = [], torch.empty(0)
        for part in _parts(tokens, max(map(len, tokens))):
            output = self._read_part(part, wanted, taps)
            logits = output.logits  # those of earlier parts are not wanted
            states += [output.taps] if taps else []
            del output
        return TargetOutput(logits, torch.cat(states, dim=1) if taps else logits.new_empty(len(tokens), 0, 0))

    def cut(self, lengths: Sequence[int]) -> None:
        """Drops what was read of each text behind so many tokens, no more than `most_drafted` at a time."""
        self.kept = list(lengths)
        if self._slots.length:
            self._drop_kept(self._slots.length - max(self.kept))

    def _drop_kept(self, count: int) -> None:
        """Drops the last slots of what was kept. A layer with a window holds so many fewer then, and has to know."""
        windows = self._slots.windows
        for index, width in list(windows.items())[:1]:  # all are widened alike
            self._slots.widen_windows(self._slots.layers[index].sliding_window - width - count)
        self._slots.drop(count)

    def _widen_windows(self, by: int, dropped: int) -> None:
        """Lets windows keep more than their own width, before slots are dropped, as far as they still hold it."""
        for index, width in self._slots.windows.items():
            layer = self._slots.layers[index]
            if layer.keys.shape[-2] < self._slots.length:
                by = min(by, layer.keys.shape[-2] - dropped + 1 - width)
        self._slots.widen_windows(by)

    @torch.no_grad()
    def read_nodes(self, tokens: torch.Tensor, paths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Reads drafted tokens after their ancestors, until `forget` drops them all.

        Args:
            tokens: `[B, n]`, int64, nodes of one depth; a child of the root has depth 1.
            paths: `[B, n, depth - 1]`, int64, the ancestors of each node below the root, as columns of the draft.

        Returns:
            The logits `[B, n, V]` after each node, and the columns `[B, n, depth]` of the nodes' paths, their own the
            last one.
        """
        drafted = self._drafted = (self._drafted or DraftedLevels.nothing(tokens)).with_level(tokens, paths)
        kept = on_device(self.kept, tokens.device)
        depth, count = paths.shape[2] + 1, tokens.shape[1]
        positions = (kept[:, None] + depth - 1).clamp(max=self._last_position).expand(-1, count)
        alone = len(tokens) == 1 and drafted.is_chain
        masks = None if alone else self._masks(drafted.batch, count)
        logits = self._forward(tokens, positions, masks, count, ()).logits
        return logits, torch.cat([paths, drafted.own_columns(count)], dim=-1)

    def forget(self) -> None:
        """Drops all that was drafted."""
        if self._drafted is not None:
            self._slots.drop(self._drafted.count)
            self._drafted = None

    def keep(self, rows: Sequence[int]) -> None:
        """From here on only these texts go on."""
        places = [place for place, row in enumerate(self.rows) if row in rows]
        if len(places) == len(self.rows):
            return
        self.rows, self.kept = ([each[place] for place in places] for each in (self.rows, self.kept))
        length = self._slots.length
        if not length or not places:
            return
        self._slots.cache.batch_select_indices(torch.tensor(places))
        self._drop_kept(length - max(self.kept))

    def _read_part(self, tokens: Sequence[Sequence[int]], wanted: int, taps: Sequence[int]) -> TargetOutput:
        """As `read`, in one forward. All texts end with its last column; columns before a shorter one see nothing."""
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
        self._compact([len(each) for each in tokens], columns)
        return output

    def _masks(self, batch: TreeBatch, columns: int) -> Any:
        """The masks of the last columns of a batch, whose other columns are in the cache; by kind of attention."""
        size, kept = batch.tokens.shape[1], on_device(self.kept, batch.tokens.device)
        before = self._slots.length - (size - columns)  # slots of the texts
        attention, masks = text_config(self._model)._attn_implementation, {}
        for kind in self._kinds:
            kv_length = self._slots.layers[kind.layer].get_mask_sizes(columns)[0]
            seen = tree_mask(batch, kind, None, kept, before, kv_length)[:, size - columns :]
            masks[kind.name] = as_attention_takes_it(seen, attention, self._model.dtype)
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, masks: Any, wanted: int, taps: Sequence[int]
    ) -> TargetOutput:
        """The logits of the last `wanted` columns; keys and values of all columns are in the cache afterwards."""
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

    def _compact(self, counts: Sequence[int], columns: int) -> None:
        """Moves what was read of each text to the end of it, and drops the slots behind the longest one."""
        start = self._slots.length - columns
        source, goal = [], []
        for kept, count in zip(self.kept, counts, strict=True):
            end = start + columns
            source.append([*range(end - count, end), *range(kept + count, kept + columns)])
            goal.append([*range(kept, kept + columns)])
        if source != goal:
            device = device_of(self._model)
            self._slots.move(on_device(source, device), on_device(goal, device), move_slots)
        self.kept = [kept + count for kept, count in zip(self.kept, counts, strict=True)]
        # The layers of a window keep what the text that is furthest behind still sees.
        dropped = start + columns - max(self.kept)
        self._widen_windows(max(self.kept) - min(self.kept) + self._most_drafted, dropped)
        self._slots.drop(dropped)


def groups_of_rows(rows: int, kinds: Sequence[AttentionKind]) -> list[list[int]]:
    """Returns the rows of a call in groups that are read together: all of them, or each alone without masks.

    Args:
        rows: number of texts.
        kinds: kinds of attention whose masks a model heeds.
    """
    return [list(range(rows))] if kinds else [[row] for row in range(rows)]


def _parts(tokens: Sequence[Sequence[int]], columns: int) -> Iterator[list[Sequence[int]]]:
    """Yields parts of texts that end together, so that no mask becomes large; a single text needs none."""
    most = columns if len(tokens) == 1 else TUNING.mask_rows
    for end in range(columns % most or most, columns + 1, most):
        left = columns - end  # columns of later parts
        yield [each[max(len(each) - left - most, 0) : max(len(each) - left, 0)] for each in tokens]


def shared_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns how many tokens two texts begin with that are the same."""
    least = min(len(one), len(other))
    if one[:least] == other[:least]:
        return least
    return next(place for place in range(least) if one[place] != other[place])
