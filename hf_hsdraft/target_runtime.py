"""All we need of a target: taps, a forward over a tree, committing a path, rolling back the rest.

The only code that knows about caches, masks and attention implementations.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import DynamicCache, DynamicLayer

from .draft_tree import DraftTree

_MASKED_ATTENTION = ("sdpa", "eager")


@dataclass(frozen=True)
class TargetOutput:
    """One target forward, without a batch axis.

    Attributes:
        logits: `[rows, V]`, of the prompt's last position or of each node of a tree.
        taps: `[rows, taps * D]`, the tapped hidden states side by side; for a prompt, of the positions it read.
        positions: `[rows]`, int64, position ids of the taps.
    """

    logits: torch.Tensor
    taps: torch.Tensor
    positions: torch.Tensor


def why_no_trees(target: Any, cache: Any) -> str:
    """Why this target cannot verify a tree, as far as model and cache tell; empty if it can."""
    config = target.config.get_text_config()
    attention = config._attn_implementation
    rope = getattr(config, "rope_parameters", None) or {}
    if target.config.is_encoder_decoder:
        return "it is an encoder-decoder; only decoder-only targets are supported"
    if attention not in _MASKED_ATTENTION:
        return (
            f"its attention implementation is {attention!r}, which does not take a tree's mask; load it with "
            f"attn_implementation={' or '.join(map(repr, _MASKED_ATTENTION))}"
        )
    if type(cache) is not DynamicCache:
        return f"its cache is a {type(cache).__name__}; only DynamicCache can give back a tree's rejected branches"
    # A cache that the caller made may not know yet which layers the model wants.
    layers = [*cache.layers, *DynamicCache(config=target.config).layers]
    kinds = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if kinds:
        return (
            f"its cache has layers of type {', '.join(kinds)}; only full-attention layers (DynamicLayer) are "
            "supported so far"
        )
    if getattr(config, "alibi", False) or "position_ids" not in inspect.signature(target.forward).parameters:
        return "its positions follow from cache slots (no position_ids), and siblings in a tree share a position"
    if "local" in (getattr(config, "attention_layers", None) or ()):
        return "some of its layers attend locally by cache slot, which a tree's slots do not follow"
    rope_types = {rope.get("rope_type"), *(part.get("rope_type") for part in rope.values() if isinstance(part, dict))}
    if rope_types & {"dynamic", "longrope"}:
        return (
            "its rotary frequencies follow the furthest position of a forward (rope_type 'dynamic' or 'longrope'), and "
            "a tree reaches further than the token being decoded"
        )
    if "mrope_section" in rope:
        return "its rotary embedding has several position axes (mrope), which are not supported so far"
    return ""


class TargetRuntime:
    """A target in one `generate()` call.

    Args:
        target: the model being decoded.
        tap_layers: indices into its `hidden_states`.
        cache: the cache of the call.

    Raises:
        ValueError: the target cannot verify trees; the message says what is missing.
    """

    def __init__(self, target: Any, tap_layers: Sequence[int], cache: Any) -> None:
        reason = why_no_trees(target, cache)
        if reason:
            raise ValueError(f"{type(target).__name__} cannot be drafted for: {reason}.")
        self.target = target
        self.cache = cache
        self._tap_layers = list(tap_layers)
        self._additive = target.config.get_text_config()._attn_implementation == "eager"
        self._attended: torch.Tensor | None = None  # [prompt slots], bool; None without a mask

    def prefill(self, input_ids: torch.Tensor, generation_config: Any, model_kwargs: dict[str, Any]) -> TargetOutput:
        """Reads the prompt `[1, length]`, less what the cache already holds, as plain decoding does.

        The taps are those of the last positions read, padding among them included; `real_rows` leaves it out. With
        `prefill_chunk_size` they are the last chunk's: the drafter then starts with that much context.
        """
        outputs = self.target._prefill(
            input_ids, generation_config, {**model_kwargs, "output_hidden_states": self._tap_layers}
        )
        slots = self.cache.get_seq_length()
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            self._attended = mask[0, -slots:].bool()
        positions = model_kwargs.get("position_ids")
        positions = torch.arange(slots, device=input_ids.device) if positions is None else positions[0]
        taps = self._taps(outputs)
        return TargetOutput(outputs.logits[0], taps, positions[-len(taps) :])

    def real_rows(self, output: TargetOutput) -> torch.Tensor:
        """Indices of the rows of a `prefill` that are not padding."""
        rows = torch.arange(len(output.taps), device=output.positions.device)
        return rows if self._attended is None else rows[self._attended[-len(rows) :]]

    def verify(self, tree: DraftTree, position: int) -> TargetOutput:
        """Reads the whole tree in one forward; row i of the output belongs to node i.

        Args:
            position: position id of the root in the text.
        """
        device = self.target.device
        positions = torch.tensor(tree.depths, device=device) + position
        outputs = self.target(
            input_ids=torch.tensor([tree.tokens], device=device),
            attention_mask=self._mask(tree),
            position_ids=positions[None],
            past_key_values=self.cache,
            use_cache=True,
            output_hidden_states=self._tap_layers,
            return_dict=True,
        )
        return TargetOutput(outputs.logits[0], self._taps(outputs), positions)

    def commit(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Keeps the root and an accepted path of the tree read last in every cache layer, drops the other nodes."""
        length = 1 + len(path)
        moved = [(to, node) for to, node in enumerate(path, 1) if to != node]
        if moved:
            first = moved[0][0]
            start = self.cache.get_seq_length() - len(tree)
            picked = torch.tensor(path[first - 1 :], device=self.target.device) + start
            kept = slice(start + first, start + length)
            for layer in self.cache.layers:
                picked = picked.to(layer.keys.device)
                layer.keys[..., kept, :] = layer.keys[..., picked, :]
                layer.values[..., kept, :] = layer.values[..., picked, :]
        self.cache.crop(-(len(tree) - length))

    @contextlib.contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Whatever is read inside is taken out of the cache again if an exception, also an interrupt, comes through."""
        length = self.cache.get_seq_length()
        try:
            yield
        except BaseException:
            for layer in self.cache.layers:
                layer.crop(-max(layer.get_seq_length() - length, 0))
            raise

    def _mask(self, tree: DraftTree) -> torch.Tensor:
        """`[1, 1, nodes, cached + nodes]`: bool for sdpa; additive for eager, where a bool is silently added."""
        device = self.target.device
        prefix = torch.ones(len(tree), self.cache.get_seq_length(), dtype=torch.bool, device=device)
        if self._attended is not None:
            prefix[:, : len(self._attended)] = self._attended
        mask = torch.cat([prefix, tree.ancestor_mask().to(device)], dim=1)[None, None]
        if not self._additive:
            return mask
        dtype = self.target.dtype
        return torch.zeros(mask.shape, dtype=dtype, device=device).masked_fill(~mask, torch.finfo(dtype).min)

    def _taps(self, outputs: Any) -> torch.Tensor:
        device = outputs.logits.device
        return torch.cat([outputs.hidden_states[layer][0].to(device) for layer in self._tap_layers], dim=-1)
