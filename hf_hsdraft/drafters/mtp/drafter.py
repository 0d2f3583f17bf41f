"""Drafters made of a target's layers for multi-token prediction, and their session."""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import CONFIG_MAPPING, GenerationConfig
from transformers.modeling_layers import MtpModel

from ...core.checks import few, setting
from ...core.draft_tree import Expansion
from ...core.refusals import DraftingRefused
from ...core.tensors import on_device
from ...core.tuning import MASK_ROWS
from ...hub.checkpoint import Checkpoint
from ...hub.drafter_files import INDEX, read_json
from ...runtime.target_limits import text_config
from ...runtime.target_parts import before_norm, check_last_state, decoding_model
from ..base.auto_drafter import Found, register_finder
from ..base.draft_options import DraftOptions, default_options
from ..base.plain_config import FLAG, TargetSizes, described
from ..base.protocol import Ask, Call, Drafter, Read, weights_of
from ..base.reading_session import Columns, DraftedNodes, LevelSession, RowContext, Slots
from ..base.readings import settle, settled_by
from ..base.registry import IN_TURN, TREES, TargetInfo, empty_model, register_refusal, with_fields
from ..base.target_weights import TargetWeights
from ..base.tree_session import DraftMemory, LevelExpansion
from .kinds import UNABLE, described_target, layers_in, renamed
from .layers import MtpLayers, layer_numbers


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
        every, block = [column.split(list(counts.values())) for column in (*columns, slots.slots)], MASK_ROWS
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


@described
@dataclass(frozen=True, kw_only=True)
class MtpConfig(TargetSizes):
    """What an [`MtpDrafter`] knows of its target, and how its layers are read."""

    last_tap_is_normed: bool = setting("whether the first layer reads the state after the final norm", True, FLAG)
    hands_on_normed: bool = setting("whether a layer reads the one before after its norm", True, FLAG)
    untold: Sequence[str] = setting("fields that the files leave open; a trial on the target decides", ())

    def taps_of(self, num_hidden_layers: int) -> tuple[int, ...]:
        """Returns the hidden states that are read of a target with so many layers."""
        return (num_hidden_layers,)


LEAST_STEPS = 5  # greatest depth of a draft where there are fewer layers: they are used again


class MtpDrafter(Drafter):
    """Drafts with the layers for multi-token prediction that a target's checkpoint holds (DeepSeek-V3, section 2.2).

        drafter = MtpDrafter.for_target(model)
        out = model.generate(**inputs, assistant_model=drafter)  # or assistant_model="mtp"

    It drafts trees for batches, greedy and sampled texts. The layers of depths 1, 2, ... are used in turn, so a single
    layer drafts deeper too. They are read once for each target, and belong to it: there is nothing to save.
    """

    takes_tree_builders = True

    rows_of_trial = 4

    def __init__(
        self, target: Any, layers: MtpLayers, config: MtpConfig | None = None, loaded_from: Any = None
    ) -> None:
        self._target, self.loaded_from, kind = weakref.ref(target), loaded_from, layers.kind
        name, text = str(getattr(target.config, "name_or_path", "") or ""), text_config(target)
        self.config = config or MtpConfig(
            vocab_size=text.vocab_size,
            target_hidden_size=text.hidden_size,
            target_name=name,
            hands_on_normed=kind.hands_on_normed,
            untold=kind.untold,
        )
        self.layers, self.tried, self.trials = layers.handing_on(self.config.hands_on_normed), dict[str, str](), 0
        self.num_draft_steps = max(layers.count, LEAST_STEPS)
        self._last = len(target.get_decoder().layers)  # hidden state
        self.generation_config = self.default_generation_config()

    @classmethod
    def for_target(
        cls,
        target: Any,
        cache_dir: str | os.PathLike[str] | None = None,
        revision: str | None = None,
        hands_on_normed: bool | None = None,
    ) -> MtpDrafter:
        """Returns the drafter of a loaded target, also inside a PEFT model or `torch.compile`.

        A target of the Hub must have been loaded with the same `cache_dir` (by default `HF_HUB_CACHE`) and `revision`.
        `hands_on_normed` tells whether each layer reads the one before after its norm; None for what is known of the
        type, which for GLM's a trial finds.
        Raises a DraftingRefused if the checkpoint holds no such layers, or layers that cannot draft here.
        """
        target = decoding_model(target)
        layers = MtpLayers.of(target, cache_dir=cache_dir, revision=revision)
        drafter = cls(target, layers, loaded_from=layers.folder)
        given = {} if hands_on_normed is None else {"hands_on_normed": hands_on_normed}
        drafter.reread(**vars(settled_by(drafter.config, **given)))
        return drafter

    @property
    def taps(self) -> Sequence[int]:  # type: ignore[override]
        last = (self._last,)
        return last if self.config.last_tap_is_normed else before_norm(last, self._last)

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
        if not self.config.last_tap_is_normed:
            check_last_state(target)

    def session(self, call: Call) -> MtpSession:
        self.layers.follow(call.target)
        return MtpSession(self, self.layers, call)

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        weights, model = weights_of(*self.layers.model.layers), self.layers.model
        own, each, head = self.layers.heads, weights // self.layers.count, weights_of(model.shared_head)
        return Read("layers", each, depth, width), Read("head", head, depth, width, borrowed=own is None)

    @property
    def can_be_tried(self) -> bool:
        return self.layers.num_stored == 1

    def settle(self, target: Any, tokens: Sequence[int]) -> None:
        if self.config.untold:
            self.layers.follow(target)
            settle(self, target, tokens)

    def reread(self, **fields: Any) -> None:
        self.config = replace(self.config, **fields)
        self.layers = self.layers.handing_on(self.config.hands_on_normed)

    def borrow(self, *_: Any) -> TargetWeights:
        ids = torch.arange(self.layers.vocab_size, device=self.device)
        return TargetWeights(self.layers.embed, None, ids)

    def logits(self, states: torch.Tensor, _: Any) -> torch.Tensor:
        return self.layers.logits(states, 0)

    def trial_states(
        self, taps: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor, depth: int, weights: TargetWeights
    ) -> Sequence[torch.Tensor]:
        """See `PublishedNetwork`. Chains follow the text's tokens, and do not see each other."""
        stored: list[tuple[torch.Tensor, torch.Tensor]] = []

        def write(_: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            stored.append((keys, values))
            keys, values = (torch.cat(each, dim=2) for each in zip(*stored, strict=True))
            return keys, values

        def run(embeds: torch.Tensor, states: torch.Tensor, at: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
            return self.layers.run(0, embeds[None], states[None], at[None] + 1, seen[None], write)[0]

        every, found = torch.arange(len(taps), device=taps.device), list[torch.Tensor]()
        own = torch.eye(len(starts), dtype=torch.bool, device=taps.device)
        for step in range(depth):
            at = starts + step if step else every
            seen = every <= (starts if step else every)[:, None]
            seen &= at[:, None] - every < (self.layers.windows[0] or 2**31)
            seen = torch.cat([seen, *[own] * step], dim=1)
            made = run(weights.embed(tokens[at + 1]), found[-1] if step else taps, at, seen)
            found.append(made if step else made[starts])
        return found


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
            drafts=f"{TREES}, {IN_TURN}",
        )


def _can_be_read(target: TargetInfo, count: int, local_files_only: bool) -> bool:
    """Whether these layers can be built, and the checkpoint has tensors of each of them, in files that are there."""
    model = target.model if target.model is not None else empty_model(target.config)
    if model is None:
        return False
    try:
        with torch.device("meta"):
            MtpLayers(MtpModel(described_target(model, count), count))
        checkpoint = Checkpoint.open(target.place, local_files_only=local_files_only)
        names = renamed(_tensor_names(checkpoint), target.config)
        numbers = layer_numbers(names, target.config)
        return bool(numbers) and numbers == set(range(len(numbers)))
    except Exception:  # any error of building them means that it cannot
        return False


def _tensor_names(checkpoint: Checkpoint) -> Collection[str]:
    if (checkpoint.folder / INDEX).is_file():
        files: dict[str, str] = read_json(checkpoint.folder / INDEX).get("weight_map", {})
        local = os.path.isdir(checkpoint.name)
        return [name for name, file in files.items() if not local or (checkpoint.folder / file).is_file()]
    return checkpoint.shapes if checkpoint.is_described else ()


def _why_refused(checkpoint: Checkpoint) -> str:
    """Why files are no drafter that hold a target together with its layers; empty for others."""
    if not any("mtp" in name or "eh_proj" in name for name in checkpoint.shapes):
        return ""
    fields = {name: value for name, value in checkpoint.config.items() if name != "num_labels"}  # of any size
    try:
        config = CONFIG_MAPPING[str(fields["model_type"])].from_dict(fields)
        names = list(renamed(checkpoint.shapes, config)) if layers_in(config) else []
    except Exception:  # a type or fields that transformers does not read
        return ""
    if not names or config.model_type in UNABLE:
        return ""
    return (
        f"holds a target's own prediction heads ({few(names, 2)}), which draft for that target alone: load it as the "
        'target, and pass assistant_model="mtp" to generate, or `--drafter mtp` to commands'
    )


register_refusal(
    "target with layers for multi-token prediction", 71, _why_refused, with_fields("hidden_size", "vocab_size")
)
register_finder("mtp", _found)
