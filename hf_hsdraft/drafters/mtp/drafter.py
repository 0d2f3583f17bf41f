"""Drafters made of layers for multi-token prediction, the target's own or published without it, and their session."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig
from transformers.modeling_layers import MtpModel

from ...core.checks import is_integer
from ...core.draft_tree import Expansion
from ...core.refusals import DraftingRefused
from ...core.tensors import on_device
from ...core.tuning import TUNING
from ...hub.checkpoint import Checkpoint
from ...hub.drafter_files import CONFIG, INDEX, DamagedFile, read_json
from ...runtime.target_limits import decoder_layers, text_config
from ...runtime.target_parts import decoding_model
from ..base.auto_drafter import Found, register_finder
from ..base.draft_options import DraftOptions, default_options
from ..base.plain_config import TargetSizes
from ..base.protocol import Ask, Call, Drafter, Read, weights_of
from ..base.reading_session import Columns, DraftedNodes, LevelSession, RowContext, Slots
from ..base.registry import Fit, Format, TargetInfo, empty_model, fit_of, misfit, register_format
from ..base.saved_drafter import Placement, take_options
from ..base.target_weights import TargetWeights
from ..base.tree_session import DraftMemory, LevelExpansion
from .layers import MtpLayers, described_target, layers_in, renamed


class DraftedColumns(DraftedNodes):
    """Columns of nodes drafted in one round, and of the roots, which have number 0.

    The target has not read the tokens before a node of depth m, so its column begins with layer m, which predicts its
    children. Deeper than there are layers, they are used again in turn, one for each depth.

    Args:
        outputs: `[B, L, D]`, outputs of the roots' columns.
        roots: `[B, 1]`, int64, their positions.
        begins: `[B, 1]`, int64, the first position read of each text.
        depth: greatest depth of a node's child.
    """

    def __init__(
        self,
        layers: MtpLayers,
        context: RowContext,
        rows: Sequence[int],
        outputs: torch.Tensor,
        roots: torch.Tensor,
        begins: torch.Tensor,
        depth: int,
    ) -> None:
        super().__init__(context, rows, outputs.device)
        self._layers, self._depth, self._roots, self._begins = layers, depth, roots, begins
        self._used = outputs.shape[1]
        self._outputs = list(outputs.split(1, dim=1))  # by layer, `[B, 1 + m, D]`; zeros where a column lacks it
        self._held: list[tuple[range, int]] = []  # layers in the columns of each depth, and number of these columns

    def _held_at(self, depth: int) -> range:
        """The layers in the columns of nodes of a depth; the first one predicts their children."""
        if depth < self._used:
            return range(depth, min(self._used, self._depth))
        return range(depth % self._used, depth % self._used + 1)

    def of_roots(self) -> torch.Tensor:
        return self._layers.logits(self._outputs[0][:, :1], 0)

    def of_nodes(self, level: int, tokens: torch.Tensor, parents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (batch, count), depth, numbers = tokens.shape, level - 1, self.add(parents)
        held = self._held_at(depth)
        self._held.append((held, count))
        embeds, positions = self._layers.embed(tokens), (self._roots + depth).expand(-1, count)

        def write(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.written(layer, keys.transpose(1, 2), values.transpose(1, 2))

        below = self._outputs[(depth - 1) % self._used]
        made = []
        for layer in held:
            states = below.gather(1, parents[..., None].expand(-1, -1, below.shape[-1]))
            near = _near(self._layers.windows[layer], self._roots - 1, self._begins + layer, depth)
            there = torch.cat([tokens.new_full((size,), layer in layers) for layers, size in self._held]).bool()
            mask = self.seen(self._roots - 1, near, there)
            made.append(self._layers.run(layer, embeds, states, positions, mask, write))
            below = self._outputs[layer]
        for layer, outputs in enumerate(self._outputs):
            added = made[layer - held.start] if layer in held else outputs.new_zeros(batch, count, outputs.shape[-1])
            self._outputs[layer] = torch.cat([outputs, added], dim=1)
        return self._layers.logits(made[0], held.start), numbers


class MtpSession(LevelSession):
    """Drafts trees (or chains), a depth of all rows per forward. A column of x_p is queued with position p - 1."""

    def __init__(self, drafter: Any, layers: MtpLayers, call: Call) -> None:
        self._layers, self._used = layers, min(layers.count, call.options.depth)
        ids = torch.arange(layers.vocab_size, device=layers.device)
        super().__init__(drafter, TargetWeights(layers.embed, None, ids), call, layers.num_stored)
        self.kind = (layers.count, self._used, layers.dtype, layers.device)

    def read(self, slots: Slots, counts: Mapping[int, int], columns: Columns) -> None:
        every, block = [column.split(list(counts.values())) for column in (*columns, slots.slots)], TUNING.mask_rows
        for start in range(0, max(counts.values()), block):  # a mask of a whole prompt would grow quadratically
            rows = [row for row, count in counts.items() if count > start]
            places = [place for place, count in enumerate(counts.values()) if count > start]
            parts = [[column[place][start : start + block] for place in places] for column in every]
            self._read(rows, *parts)

    def _read(
        self,
        rows: Sequence[int],
        taps: list[torch.Tensor],
        embeds: list[torch.Tensor],
        positions: list[torch.Tensor],
        slots: list[torch.Tensor],
    ) -> None:
        """Reads columns of rows, padded; keeps outputs `[L, D]` of the last, and first position `[1]`, of each."""
        device, lengths = self._layers.device, [len(each) for each in positions]
        width, known = max(lengths), [self._left.get(row) for row in rows]
        real = torch.arange(width, device=device) < on_device(lengths, device)[:, None]
        at = torch.stack([torch.cat([each, each[-1:].expand(width - len(each))]) for each in positions])
        texts = on_device(list(rows), device).repeat_interleave(on_device(lengths, device))
        places, context = Slots(texts, torch.cat(slots)), self._context

        def write(layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            context.write(layer, places, *(each.transpose(1, 2)[real] for each in (keys, values)))
            return context.view(layer, rows)

        below, tokens = pad_sequence(taps, batch_first=True), pad_sequence(embeds, batch_first=True)
        firsts = [each[:1] if left is None else left[1] for left, each in zip(known, positions, strict=True)]
        begins, ends = torch.stack(firsts), on_device(lengths, device) - 1
        none = below.new_zeros(self._used, below.shape[-1])
        last = [none if left is None else left[0] for left in known]
        kept = []
        for layer in range(self._used):
            seen = context.seen(rows, at, _near(self._layers.windows[layer], at, begins + layer))
            made = self._layers.run(layer, tokens, below, at + 1, seen, write)
            kept.append(made[torch.arange(len(rows), device=device), ends])
            below = torch.cat([torch.stack([each[layer : layer + 1] for each in last]), made[:, :-1]], dim=1)
        self._left.update(zip(rows, zip(torch.stack(kept, dim=1), firsts, strict=True), strict=True))

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> Expansion:
        rows = [ask.row for ask in asks]
        self.read_pending(rows)
        outputs, begins = (torch.stack(each) for each in zip(*(self._left[row] for row in rows), strict=True))
        drafted = DraftedColumns(self._layers, self._context, rows, outputs, self.anchors(rows), begins, depth)
        return LevelExpansion(drafted, depth, options.temperature, self.race(rows, depth))

    def memory(self, length: int) -> DraftMemory | None:
        return super().memory(length) if 0 in self._left else None

    def resume(self, memory: Any, cached: int) -> None:
        fits = isinstance(memory, DraftMemory) and memory.fits(self.drafter, cached + 1)
        if fits and len(memory.context[1][0]) == self._used:
            super().resume(memory, cached)


def _near(window: int | None, last: torch.Tensor, first: torch.Tensor, depth: int = 0) -> torch.Tensor:
    """Returns how many positions up to `last` a query may see, from `first` on; `depth` is its distance from `last`."""
    near = last - first + 1
    return near if window is None else near.clamp(max=window - depth)


LEAST_STEPS = 5  # greatest depth of a draft where there are fewer layers: they are used again


class MtpDrafter(Drafter):
    """Drafts with the layers for multi-token prediction that a target's checkpoint holds (DeepSeek-V3, section 2.2).

        drafter = MtpDrafter.for_target(model)
        out = model.generate(**inputs, assistant_model=drafter)  # or assistant_model="mtp"

    It drafts trees for batches, greedy and sampled texts. The layers of depths 1, 2, ... are used in turn, so a single
    layer drafts deeper too. They are read once for each target, and belong to it: there is nothing to save.
    """

    takes_tree_builders = True
    why_not_exported = "its layers are in the target's checkpoint, where other programs find them"

    def __init__(self, target: Any, layers: MtpLayers) -> None:
        self._target, self.layers = weakref.ref(target), layers
        name, text = str(getattr(target.config, "name_or_path", "") or ""), text_config(target)
        self.config = TargetSizes(vocab_size=text.vocab_size, target_hidden_size=text.hidden_size, target_name=name)
        self.num_draft_steps = max(layers.count, LEAST_STEPS)
        self.taps = (decoder_layers(text),)  # after the final norm
        self.generation_config = self.default_generation_config()

    @classmethod
    def for_target(
        cls, target: Any, cache_dir: str | os.PathLike[str] | None = None, revision: str | None = None
    ) -> MtpDrafter:
        """Returns the drafter of a loaded target, also inside a PEFT model or `torch.compile`.

        A target of the Hub must have been loaded with the same `cache_dir` (by default `HF_HUB_CACHE`) and `revision`.
        Raises a DraftingRefused if the checkpoint holds no such layers, or layers that cannot draft here.
        """
        target = decoding_model(target)
        return cls(target, MtpLayers.of(target, cache_dir=cache_dir, revision=revision))

    @property
    def device(self) -> Any:
        return self.layers.device

    @property
    def dtype(self) -> Any:
        return self.layers.dtype

    def default_generation_config(self) -> GenerationConfig:
        return default_options(self.num_draft_steps, tree_size=16, beam_width=4)

    def check(self, target: Any) -> None:
        if decoding_model(target) is not self._target():
            raise DraftingRefused(
                "this drafter is made of another model's layers: make one with MtpDrafter.for_target(model)"
            )

    def session(self, call: Call) -> MtpSession:
        self.layers.follow(call.target)
        return MtpSession(self, self.layers, call)

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        weights, model = weights_of(*self.layers.model.layers), self.layers.model
        own, each, head = self.layers.heads, weights // self.layers.count, weights_of(model.shared_head)
        return Read("layers", each, depth, width), Read("head", head, depth, width, borrowed=own is None)


def _found(target: TargetInfo, local_files_only: bool) -> Iterator[Found]:
    """The target's layers for multi-token prediction, if they can draft."""
    count = layers_in(target.config)
    if count and target.place and _can_be_read(target, count, local_files_only):
        yield Found(
            "the target's own layers",
            "MtpDrafter",
            f"{count} layer{'s' * (count > 1)} for multi-token prediction in the checkpoint",
            None,
            'model.generate(**inputs, assistant_model="mtp")',
            made=MtpDrafter.for_target,
        )


def _can_be_read(target: TargetInfo, count: int, local_files_only: bool) -> bool:
    """Whether these layers can be built, and the checkpoint names tensors for them."""
    model = target.model if target.model is not None else empty_model(target.config)
    if model is None:
        return False
    try:
        with torch.device("meta"):
            MtpLayers(MtpModel(described_target(model, count), count))
        checkpoint = Checkpoint.open(target.place, local_files_only=local_files_only)
        return bool(renamed(_tensor_names(checkpoint), target.config))
    except Exception:  # any error of building them means that it cannot
        return False


def _tensor_names(checkpoint: Checkpoint) -> Collection[str]:
    if (checkpoint.folder / INDEX).is_file():
        return read_json(checkpoint.folder / INDEX).get("weight_map", {}).keys()
    return checkpoint.shapes if checkpoint.is_described else ()


register_finder("mtp", _found)


_MARK = "model.layers.0.eh_proj.weight"


def _sizes(checkpoint: Checkpoint) -> TargetSizes:
    """The sizes of the target; raises a DamagedFile if config.json does not tell them."""
    vocab_size, hidden_size = (checkpoint.config.get(name) for name in ("vocab_size", "hidden_size"))
    if not (is_integer(vocab_size) and is_integer(hidden_size)):
        place = checkpoint.folder / CONFIG
        raise DamagedFile(f"{place} is damaged: expected numbers vocab_size and hidden_size", place)
    return TargetSizes(vocab_size=vocab_size, target_hidden_size=hidden_size)  # type: ignore[arg-type]


class NextnDrafter(Drafter):
    """Drafts with layers for multi-token prediction that are published without their target; see `MtpDrafter`.

        drafter = AutoDrafter.from_pretrained("lmsys/DeepSeek-V3-NextN")
        out = model.generate(**inputs, assistant_model=drafter)

    The layers are of the target's class, so their weights are read for the first call, once for each target.
    """

    takes_tree_builders = True
    why_not_exported = "its layers are in a checkpoint that other programs read as it is"
    num_draft_steps = LEAST_STEPS

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint, self.config = checkpoint, _sizes(checkpoint)
        self.name_or_path = checkpoint.name
        self.generation_config = self.default_generation_config()
        self._drafters: weakref.WeakKeyDictionary[Any, MtpDrafter] = weakref.WeakKeyDictionary()

    @classmethod
    def of_checkpoint(cls, checkpoint: Checkpoint, **kwargs: Any) -> NextnDrafter:
        """Loads a drafter, as `AutoDrafter.from_pretrained`. Weights have the dtype and device of the target."""
        Placement.taken_from(kwargs)
        drafter = cls(checkpoint)
        take_options(drafter, checkpoint.folder, kwargs)
        return drafter

    def default_generation_config(self) -> GenerationConfig:
        return default_options(self.num_draft_steps, tree_size=16, beam_width=4)

    def check(self, target: Any) -> None:
        if wrong := misfit(self.config, target):
            raise DraftingRefused(f"{wrong}: these layers were made for another target. Use those of this target.")
        self._of(target)

    def taps_of(self, target: Any) -> Sequence[int]:
        return self._of(target).taps

    def session(self, call: Call) -> MtpSession:
        return self._of(call.target).session(call)

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        shapes = self._checkpoint.shapes
        layers = sum(math.prod(shape) for name, shape in shapes.items() if ".layers." in name and ".head." not in name)
        head = (self.config.vocab_size or 0) * self.config.target_hidden_size
        return Read("layers", layers, depth, width), Read("head", head, depth, width, borrowed=True)

    def _of(self, target: Any) -> MtpDrafter:
        if target not in self._drafters:
            self._drafters[target] = MtpDrafter(target, MtpLayers.apart(target, self._checkpoint))
        return self._drafters[target]


def _fit(checkpoint: Checkpoint, target: TargetInfo, named: Collection[str]) -> Fit | None:
    same = checkpoint.config.get("model_type") == target.config.get_text_config().model_type
    return fit_of(_sizes(checkpoint), target, named) if same else None


register_format(
    Format(
        name="layers for multi-token prediction alone (NextN)",
        rank=69,  # before formats that refuse the layers inside a target
        matches=lambda checkpoint: _MARK in checkpoint.shapes,
        load=NextnDrafter.of_checkpoint,
        drafter=NextnDrafter,
        possible=lambda config: {"hidden_size", "vocab_size"} <= config.keys(),
        fit=_fit,
    )
)
