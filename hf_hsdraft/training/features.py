"""What training reads of the target, computed once: taps and final hidden states, kept on disk.

The target's forward costs more than a drafter's training step, and its outputs never change; a cached position costs
(taps + 1) x hidden size x 2 bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.data import Dataset

from .conversations import TokenizedConversation

_SHARD = 32  # conversations per file: a kill loses at most this much work


@dataclass(frozen=True)
class Features:
    """One conversation as the trainer sees it.

    Attributes:
        input_ids: `[length]`, int64.
        answer_mask: `[length]`, bool, True where the assistant wrote the token.
        taps: `[length, num_taps * hidden]`, bfloat16, the tapped hidden states side by side.
        final: `[length, hidden]`, bfloat16, hidden states after the target's last norm; the teacher's logits are one
            product away.
    """

    input_ids: torch.Tensor
    answer_mask: torch.Tensor
    taps: torch.Tensor
    final: torch.Tensor


def feature_bytes(tokens: int, num_taps: int, hidden_size: int) -> int:
    """Disk space that the features of `tokens` positions take, in bytes."""
    return tokens * (num_taps + 1) * hidden_size * 2


@torch.inference_mode()
def cache_features(
    target: Any,
    tap_layers: Sequence[int],
    conversations: Sequence[TokenizedConversation],
    folder: str | os.PathLike[str],
    on_shard: Callable[[int, int], None] | None = None,
) -> FeatureDataset:
    """Runs the target over all conversations and stores what training needs; shards already there are kept.

    Args:
        tap_layers: indices into `hidden_states`, ascending.
        folder: created if missing. A shard's name carries a digest of its tokens and taps, so stale shards of other
            data are never picked up.
        on_shard: called with (shards done, shards in all).
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    shards = [conversations[start : start + _SHARD] for start in range(0, len(conversations), _SHARD)]
    paths = []
    for number, shard in enumerate(shards):
        path = folder / f"features-{number:05d}-{_digest(shard, tap_layers)}.safetensors"
        if not path.exists():
            _write_shard(target, tap_layers, shard, path)
        paths.append(path)
        if on_shard is not None:
            on_shard(number + 1, len(shards))
    return FeatureDataset(paths)


def _digest(shard: Sequence[TokenizedConversation], tap_layers: Sequence[int]) -> str:
    digest = hashlib.sha256(repr(list(tap_layers)).encode())
    for conversation in shard:
        digest.update(conversation.input_ids.numpy().tobytes())
        digest.update(conversation.answer_mask.numpy().tobytes())
    return digest.hexdigest()[:12]


def _write_shard(target: Any, tap_layers: Sequence[int], shard: Sequence[TokenizedConversation], path: Path) -> None:
    last = target.config.get_text_config().num_hidden_layers
    wanted = sorted({*tap_layers, last})
    tensors = {}
    for index, conversation in enumerate(shard):
        output = target(
            conversation.input_ids[None].to(target.device),
            output_hidden_states=wanted,
            logits_to_keep=1,
            use_cache=False,
        )
        states = {layer: output.hidden_states[layer][0].to("cpu", torch.bfloat16) for layer in wanted}
        tensors[f"{index}.input_ids"] = conversation.input_ids
        tensors[f"{index}.answer_mask"] = conversation.answer_mask
        tensors[f"{index}.taps"] = torch.cat([states[layer] for layer in tap_layers], dim=-1)
        tensors[f"{index}.final"] = states[last].contiguous()
    temporary = path.with_suffix(".partial")
    save_file(tensors, temporary)
    temporary.replace(path)


class FeatureDataset(Dataset[Features]):
    """Conversations of cached features, read from their shards on demand."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._entries = []
        for path in paths:
            with safe_open(path, framework="pt") as file:
                count = sum(1 for key in file.keys() if key.endswith(".input_ids"))  # noqa: SIM118
            self._entries += [(path, index) for index in range(count)]

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Features:
        path, number = self._entries[index]
        with safe_open(path, framework="pt") as file:
            return Features(
                *(file.get_tensor(f"{number}.{name}") for name in ("input_ids", "answer_mask", "taps", "final"))
            )
