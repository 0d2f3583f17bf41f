"""The Uno drafter: the target drafts for itself, with a LoRA adapter for the rows of noise tokens (Uno)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn
from transformers import GenerationConfig
from transformers.utils import logging

from ..core.checks import check_fields, few, integer, printable, setting
from ..core.draft_tree import DraftTree, TreeBatch
from ..core.refusals import DraftingRefused
from ..core.tensors import device_of, on_device
from ..drafters.base.draft_options import DraftOptions, default_options
from ..drafters.base.plain_config import AnyTarget
from ..drafters.base.protocol import Ask, Call, Drafter, weights_of
from ..drafters.base.saved_drafter import Placement, take_options
from ..drafters.base.tree_session import ParallelExpansion, TreeSession
from ..hub.drafter_files import OPTIONS, find_folder, loading, read_json, taken_for_hub
from ..runtime.target_limits import text_config
from ..runtime.tree_reading import node_inputs
from .estimate.reads import Read
from .published.fields import Fields
from .published.target_copies import InPlaceOf, refuse_sharded, why_not_replaced, with_modules

logger = logging.get_logger(__name__)

Pair = tuple[torch.Tensor, torch.Tensor]  # the products of an adapter, `[r, inputs]` and `[outputs, r]`, scaled
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."  # PEFT's, of all tensors
_ENDS = (".lora_A.weight", ".lora_B.weight")
_PLAIN = ("use_dora", "use_rslora", "fan_in_fan_out", "lora_bias", "modules_to_save", "rank_pattern", "alpha_pattern")


@dataclass(frozen=True)
class UnoConfig(AnyTarget):
    """What a Uno drafter knows beside its weights."""

    target_name: str = ""  # as the adapter names its base model
    mask_token_id: int | None = setting(
        "noise tokens are from 1 to below it; None for all tokens but the first", None, integer(2**22, 2), optional=True
    )

    def __post_init__(self) -> None:
        check_fields(self)


class UnoDrafter(nn.Module, Drafter):
    """The target drafts for itself: noise tokens are read after the text, with a LoRA adapter for their rows (Uno).

    The row of the last accepted token has no adapter, so the first drafted token is the target's own; noise row k
    predicts the token k + 1 places later. A draft takes one forward of the target over as many rows as it is deep, so
    two forwards emit up to that many tokens and one more. Noise is drawn once a call, by a fixed seed. See
    arXiv:2609.04010.

        drafter = UnoDrafter.from_pretrained("s-sahoo/uno-qwen3-8B", subfolder="adapter", mask_token_id=151669)
        out = model.generate(**inputs, assistant_model=drafter)

    Args:
        pairs: scaled products of the adapter by the name of the target's linear layer: `[r, inputs]`, `[outputs, r]`.
        config: name of the target, and the mask token of the adapter's training.
    """

    num_draft_steps = 32
    takes_tree_builders = True

    def __init__(self, pairs: Mapping[str, Pair], config: UnoConfig) -> None:
        super().__init__()
        self.config, self.names = config, list(pairs)
        self.downs, self.ups = (nn.ParameterList(pair[side] for pair in pairs.values()) for side in range(2))
        self.requires_grad_(False)
        self.generation_config = self.default_generation_config()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], mask_token_id: int | None = None, **kwargs: Any
    ) -> UnoDrafter:
        """Loads an adapter in PEFT's format.

        Args:
            pretrained_model_name_or_path: folder or Hub name.
            mask_token_id: the mask token of its training: noise tokens are drawn below it. The files do not name it. By
                default they are drawn from the whole vocabulary.
            kwargs: as for `AutoDrafter.from_pretrained`.

        Raises:
            OSError: no such folder or repository, or a file is missing.
            TypeError: an argument is unknown; the message names it.
            ValueError: it is no plain LoRA adapter of linear layers, or `mask_token_id` is invalid.
        """
        name, (hub, subfolder) = pretrained_model_name_or_path, taken_for_hub(kwargs)
        placement = Placement.taken_from(kwargs)
        with loading(name, bool(hub.get("local_files_only"))):
            folder = find_folder(name, (CONFIG, WEIGHTS, OPTIONS), subfolder, **hub)
            if missing := [each for each in (CONFIG, WEIGHTS) if not (folder / each).is_file()]:
                raise OSError(
                    f"{folder} has no {few(missing)}: expected the files of a LoRA adapter, as PEFT saves them"
                )
            fields = Fields(read_json(folder / CONFIG), CONFIG)
            config = UnoConfig(str(fields.values.get("base_model_name_or_path") or ""), mask_token_id)
            drafter = cls(_pairs(load_file(folder / WEIGHTS), _scaling(fields)), config)
        take_options(drafter, folder, kwargs)
        return placement.place(drafter.to(placement.dtype) if placement.dtype else drafter)

    @property
    def pairs(self) -> dict[str, Pair]:
        return {name: (down, up) for name, down, up in zip(self.names, self.downs, self.ups, strict=True)}

    @property
    def device(self) -> torch.device:
        return self.downs[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.downs[0].dtype

    def default_generation_config(self) -> GenerationConfig:
        return default_options(8, tree_size=24, beam_width=8)

    def check(self, target: Any) -> None:
        mask, size, modules = self.config.mask_token_id, text_config(target).vocab_size, dict(target.named_modules())
        if mask is not None and mask >= size:
            raise DraftingRefused(
                f"mask_token_id={mask} is invalid: the target has {size} tokens, expected one of them"
            )
        if routed := [name for name in self.names if "experts" in name.split(".")]:
            raise DraftingRefused(
                f"this adapter is also for experts ({few(routed, 1)}): they read the rows that are routed to them, "
                "without knowing which are noise. Use an adapter of other layers."
            )
        for name, (down, up) in self.pairs.items():
            shape, module = (up.shape[0], down.shape[1]), modules.get(name)
            found = (getattr(module, "out_features", None), getattr(module, "in_features", None))
            if found != shape:
                told = "no such layer" if module is None else f"{found[1]} inputs and {found[0]} outputs"
                made_for = printable(self.config.target_name) or "another target"
                raise DraftingRefused(
                    f"this adapter is for {made_for}: {name} has {shape[1]} inputs and {shape[0]} outputs there, the "
                    f"target has {told}. Use an adapter of this target."
                )
        if reason := why_not_replaced(target, self.names):
            raise DraftingRefused(f"the target cannot draft with an adapter: {reason}. Leave assistant_model out.")

    def reads(self, depth: int, width: int) -> Sequence[Read]:
        return (Read("adapter", weights_of(self), 1, depth),)

    def warn_of_misfit(self, target: Any, tokenizer: Any, all_processes: bool) -> None:
        refuse_sharded("the target with an adapter", all_processes)

    def session(self, call: Call) -> UnoSession:
        return UnoSession(self, call)


class UnoSession(TreeSession):
    """Drafts trees (or chains), all depths of all texts in one forward of the target. Its cache is restored."""

    def __init__(self, drafter: UnoDrafter, call: Call) -> None:
        target, runtime = call.target, call.runtime
        device, size = device_of(target), text_config(target).vocab_size
        super().__init__(call.options, torch.arange(size, device=device), call.foresight)
        self._rows, end = list(range(call.rows)), drafter.config.mask_token_id or size
        noise = torch.randint(1, end, (drafter.num_draft_steps,), generator=torch.Generator().manual_seed(0))
        self._noise, self._columns = noise.to(device), 1  # rows of each text in the forward that runs
        self.kind = len(drafter.names), drafter.dtype, drafter.device
        self._runtime = runtime if runtime is not None and runtime.can_read_ahead else None
        layers = {name: target.get_submodule(name) for name in drafter.names}
        pairs = {name: (down.to(device), up.to(device)) for name, (down, up) in drafter.pairs.items()}
        runs = {name: InPlaceOf(each, partial(self._adapted, each, pairs[name])) for name, each in layers.items()}
        self._model = with_modules(target, runs)
        if self._runtime is None and call.options.depth > 0:
            logger.warning_once(
                f"{type(target).__name__} is decoded without drafts by its adapter: they need a cache that grows, "
                "and attention that takes masks"
            )

    def keep(self, rows: Sequence[int]) -> None:
        self._rows = list(rows)

    def trees(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> list[DraftTree]:
        if self._runtime is None:
            return [DraftTree.root(ask.root) for ask in asks]
        return super().trees(asks, depth, options)

    def expansion(self, asks: Sequence[Ask], depth: int, options: DraftOptions) -> ParallelExpansion:
        """All rows that the target reads are in the forward; those without an ask are idle."""
        rows, roots = [ask.row for ask in asks], {ask.row: ask.root for ask in asks}
        first = on_device([[roots.get(row, 0)] for row in self._rows], self._noise.device)
        tokens = torch.cat([first, self._noise[: depth - 1].expand(len(first), -1)], dim=1)
        logits = self.read(tokens, [depth if row in roots else 0 for row in self._rows])
        places = [self._rows.index(row) for row in rows]
        return ParallelExpansion(logits[places], None, options.temperature, self.race(rows, depth))

    def read(self, tokens: torch.Tensor, depths: Sequence[int]) -> torch.Tensor:
        """Returns the logits `[B, n, V]` of the tokens after each of `tokens` `[B, n]`, int64: a root, and noise.

        `depths` are of each row; tokens from that depth on are read as idle nodes, and their logits mean nothing.
        """
        call, device = self._runtime, tokens.device
        assert call is not None
        self._columns = count = tokens.shape[1]
        steps = torch.arange(count, device=device)
        places = steps.where(steps < on_device(list(depths), device)[:, None], -1)
        before = (steps[:, None] >= steps).expand(len(tokens), -1, -1)
        start = call.slots.mark()
        try:
            inputs = node_inputs(call, TreeBatch(tokens, places, before), count, call.kinds)
            inputs |= dict.fromkeys(("output_hidden_states", "output_attentions"), False)
            found = call.acceleration.forward(inputs, comes_again=False, model=self._model)
            return found.logits[:, -count:].float().clone()
        finally:
            call.slots.roll_back(start)

    def _adapted(self, layer: nn.Module, pair: Pair, x: torch.Tensor) -> torch.Tensor:
        """Returns a linear layer's outputs with an adapter for all rows of a text but the first."""
        down, up = pair
        made: torch.Tensor = layer(x)
        noise = x.reshape(-1, self._columns, x.shape[-1])[:, 1:]
        more = F.linear(F.linear(noise.to(down.dtype), down), up).to(made.dtype)
        return made + F.pad(more, (0, 0, 1, 0)).view_as(made)


def _scaling(fields: Fields) -> float:
    """Reads the factor of an adapter; raises a ValueError unless it is plain LoRA."""
    fields.choice("peft_type", ("LORA",))
    fields.choice("bias", ("none",), "none")
    for name in _PLAIN:
        fields.expect(name, False, {}, [])
    return float(fields.number("lora_alpha")) / int(fields.integer("r"))


def _pairs(tensors: Mapping[str, torch.Tensor], scaling: float) -> dict[str, Pair]:
    """Returns the scaled products by layer; raises a ValueError for other tensors than those of LoRA."""
    sides: list[dict[str, torch.Tensor]] = [{}, {}]
    unknown = []
    for name, tensor in tensors.items():
        side = next((side for side, end in enumerate(_ENDS) if name.endswith(end)), None)
        if side is None or tensor.dim() != 2 or not tensor.is_floating_point():
            unknown.append(printable(name))
        else:
            sides[side][name.removeprefix(_PREFIX).removesuffix(_ENDS[side])] = tensor
    lone = [printable(name) for name in sides[0].keys() ^ sides[1].keys()]
    if unknown or lone or not tensors:
        found = few(sorted([*unknown, *lone])) or "nothing"
        raise ValueError(f"{WEIGHTS} holds {found}: expected {' and '.join(_ENDS)} of linear layers")
    return {name: (down, sides[1][name] * scaling) for name, down in sides[0].items()}


__all__ = ["UnoDrafter"]
