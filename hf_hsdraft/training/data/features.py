"""What training reads of the target, taps and final hidden states: computed in every step, or once and kept on disk.

The disk pays from the second epoch on where the target's forward costs more than a training step, as on CPUs. A
position takes (taps + 1) x hidden size x 2 bytes.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from ...core.progress import Reporter
from ...gpu.varying_shapes import varying_shapes
from ...runtime.target_loading import is_sharded
from ..files import write_complete
from .conversations import TokenizedConversation

_SHARD = 32  # conversations per file; a killed run loses at most one file
_DIGITS = 24  # of a conversation's key
_UNREAD = 8  # most positions behind what was read while an answer was written
# Positions per forward, padding included. On CPUs a layer's activations should fit the caches: 16 chats, 3,270
# positions in all, took 12.4 s instead of 16.7 by hand (SmolLM2, float32, 2 cores with AVX2).
_READ_AT_ONCE, _READ_AT_ONCE_ON_CPU = 16384, 512
_ROWS = 512  # of final states whose most probable tokens are computed at a time
_FIELDS = ("input_ids", "answer_mask", "taps", "final")  # of `Features`, in a shard


@dataclass(frozen=True)
class Features:
    """One conversation as the trainer reads it."""

    input_ids: torch.Tensor  # `[length]`, int64
    answer_mask: torch.Tensor  # `[length]`, bool, True where the assistant wrote the token
    taps: torch.Tensor  # `[length, num_taps * hidden]`, bfloat16, the tapped hidden states side by side
    # `[length, hidden]`, bfloat16, hidden states after the target's last norm, the input of its head
    final: torch.Tensor
    # `[length, n]`, int32, columns of the draft vocabulary that hold the target's most probable tokens after each
    # position, see `likely_columns`; `None` where they are not kept
    likely: torch.Tensor | None = None


class FeatureCache:
    """Features of a target on disk, in shards: a conversation's are computed once, whatever it comes with.

    Keys are digests of the target's `identity`, of the taps (ascending indices into `hidden_states`) and of tokens.
    Processes share the work. What a damaged file held is computed again.
    """

    def __init__(
        self,
        target: Any,
        tap_layers: Sequence[int],
        folder: str | os.PathLike[str],
        identity: str = "",
        report: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._report = Reporter.of(report)
        self._target, self._taps, self._identity, self._folder = target, list(tap_layers), identity, Path(folder)
        self._shards: dict[str, Path] = {}  # of each key
        self._seen: set[Path] = set()

    @torch.inference_mode()
    def dataset(
        self, conversations: Sequence[TokenizedConversation], likely: LikelyTokens | None = None
    ) -> FeatureDataset:
        """Returns the features of conversations, after those that are missing have been computed.

        If the disk lacks room for them, an OSError is raised and nothing is written.
        """
        state, tokens = PartialState(), sum(len(chat.input_ids) for chat in conversations)
        self._report(f"taps of {tokens:,} tokens: {self._bytes(tokens) / 1e9:,.2f} GB on disk")
        self._look()
        state.wait_for_everyone()  # until all processes know which are there
        keys = [self._key(conversation) for conversation in conversations]
        missing = {key: chat for key, chat in zip(keys, conversations, strict=True) if key not in self._shards}
        self._check_room(sum(len(chat.input_ids) for chat in missing.values()))
        order = list(missing)
        shards = [order[start : start + _SHARD] for start in range(0, len(order), _SHARD)]
        with self._report.stage("taps", "files", len(shards)) as stage:
            for begin in range(0, len(shards), state.num_processes):
                # Every process runs equally many forwards, since a forward of a sharded target needs all processes.
                shard = shards[min(begin + state.process_index, len(shards) - 1)]
                self._write(shard, read_by_length(self._target, self._taps, [missing[key] for key in shard]))
                stage.advance(min(begin + state.num_processes, len(shards)))
        state.wait_for_everyone()
        self._shards |= {key: self._path(shard) for shard in shards for key in shard}
        return FeatureDataset([(self._shards[key], key) for key in keys], likely)

    @property
    def layers(self) -> list[int]:
        """The hidden states that are kept, by their indices: the tapped ones and the final ones."""
        return sorted({*self._taps, self._target.config.get_text_config().num_hidden_layers})

    def keep(self, read: Iterable[tuple[TokenizedConversation, torch.Tensor, torch.Tensor]]) -> None:
        """Keeps features of conversations that the target has read, where it read the same tokens.

        Args:
            read: conversations, each with the tokens `[n]` read, and their hidden states `[n, layers * D]` of `layers`.
        """
        self._look()
        found = {self._key(chat): self._of_states(chat, ids, states) for chat, ids, states in read}
        kept = {key: features for key, features in found.items() if features is not None and key not in self._shards}
        if kept:
            self._check_room(sum(len(features.input_ids) for features in kept.values()))
            self._write(list(kept), list(kept.values()))
            self._shards |= dict.fromkeys(kept, self._path(list(kept)))

    def _of_states(self, chat: TokenizedConversation, ids: torch.Tensor, states: torch.Tensor) -> Features | None:
        """Features of a conversation whose tokens were read but for the last few; `None` if others were.

        The last token of an answer is not read as it is written, nor what the template puts behind it. Their states are
        0. What comes after the first of them is not learned.
        """
        length = min(len(chat.input_ids), len(ids))
        unread = len(chat.input_ids) - length
        if unread > _UNREAD or not torch.equal(chat.input_ids[:length], ids[:length].cpu()):
            return None
        width = self._target.config.get_text_config().hidden_size
        known = states[:length].to("cpu", torch.bfloat16).unflatten(-1, (-1, width))
        known = torch.cat([known, known.new_zeros(unread, *known.shape[1:])])
        taps = known[:, [self.layers.index(layer) for layer in self._taps]].flatten(1)
        learned = chat.answer_mask.clone()
        learned[length + 1 :] = False
        return Features(chat.input_ids, learned, taps, known[:, -1].contiguous())

    def _look(self) -> None:
        """Looks for shards that are not known yet."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for path in sorted({*self._folder.glob("features-*.safetensors")} - self._seen):
            self._seen.add(path)
            keys = [name.removesuffix(".input_ids") for name in _names(path, self._report) if "input_ids" in name]
            self._shards |= dict.fromkeys((key for key in keys if len(key) == _DIGITS), path)  # once they were numbers

    def _key(self, conversation: TokenizedConversation) -> str:
        digest = hashlib.sha256(repr((self._identity, self._taps)).encode())
        digest.update(conversation.input_ids.numpy().tobytes())
        digest.update(conversation.answer_mask.numpy().tobytes())
        return digest.hexdigest()[:_DIGITS]

    def _path(self, keys: Sequence[str]) -> Path:
        digest = hashlib.sha256(" ".join(keys).encode()).hexdigest()[:24]
        return self._folder / f"features-{digest}.safetensors"

    def _bytes(self, tokens: int) -> int:
        """The bytes that the features of `tokens` positions take on disk."""
        return tokens * (len(self._taps) + 1) * self._target.config.get_text_config().hidden_size * 2

    def _check_room(self, tokens: int) -> None:
        needed = self._bytes(tokens)
        if needed > (free := shutil.disk_usage(self._folder).free):
            raise OSError(
                errno.ENOSPC,
                f"the taps still to be written take {needed / 1e9:,.2f} GB, {self._folder} has {free / 1e9:,.2f} GB "
                "left; free some space, or train with --no-cache-taps",
            )

    def _write(self, keys: Sequence[str], read: Sequence[Features]) -> None:
        pairs = zip(keys, read, strict=True)
        tensors = {f"{key}.{name}": getattr(features, name) for key, features in pairs for name in _FIELDS}
        write_complete(self._path(keys), lambda temporary: save_file(tensors, temporary))


def _names(path: Path, report: Callable[[str], object]) -> list[str]:
    """Returns the names of the tensors in a file, none if it is missing. A damaged one is reported and removed."""
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except FileNotFoundError:
        return []
    except (SafetensorError, OSError) as error:
        report(f"{path} is damaged ({error}): what it held is computed again")
        path.unlink(missing_ok=True)
        return []


def read_by_length(
    target: Any,
    tap_layers: Sequence[int],
    conversations: Sequence[TokenizedConversation],
    device: torch.device | str = "cpu",
) -> list[Features]:
    """Reads conversations as `read_features` does, grouped by length to keep padding small."""
    at_once = _READ_AT_ONCE_ON_CPU if target.device.type == "cpu" else _READ_AT_ONCE
    most = math.inf if is_sharded(target) else at_once  # its processes must run the same number of forwards
    lengths, groups = [len(chat.input_ids) for chat in conversations], list[list[int]]()
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if not groups or (len(groups[-1]) + 1) * lengths[index] > most:
            groups.append([])
        groups[-1].append(index)
    found: dict[int, Features] = {}
    for indices in groups:
        read = read_features(target, tap_layers, [conversations[index] for index in indices], device)
        found |= dict(zip(indices, read, strict=True))
    return [found[index] for index in range(len(conversations))]


@torch.inference_mode()
def read_features(
    target: Any,
    tap_layers: Sequence[int],
    conversations: Sequence[TokenizedConversation],
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    inputs: Mapping[str, torch.Tensor] | None = None,
) -> list[Features]:
    """Reads conversations in one forward of the target, padded on the right.

    `device` and `dtype` are the features'; `inputs` are further inputs of the forward, such as `pixel_values`.
    """
    last = target.config.get_text_config().num_hidden_layers
    wanted = sorted({*tap_layers, last})
    ids = pad_sequence([conversation.input_ids for conversation in conversations], batch_first=True)
    mask = pad_sequence([torch.ones_like(conversation.input_ids) for conversation in conversations], batch_first=True)
    padded = {"attention_mask": mask.to(target.device)} if len(conversations) > 1 else {}
    with varying_shapes(target.device):
        states = target(
            ids.to(target.device),
            **padded,
            **(inputs or {}),
            output_hidden_states=wanted,
            logits_to_keep=1,
            use_cache=False,
        ).hidden_states
    features = []
    for row, conversation in enumerate(conversations):
        length = len(conversation.input_ids)
        kept = {layer: states[layer][row, :length].to(device, dtype) for layer in wanted}
        taps = torch.cat([kept[last][:, :0], *(kept[layer] for layer in tap_layers)], dim=-1)
        ids, answers = conversation.input_ids.to(device), conversation.answer_mask.to(device)
        features.append(Features(ids, answers, taps, kept[last].contiguous()))
    return features


@torch.no_grad()
def likely_columns(states: torch.Tensor, head: torch.Tensor, count: int) -> torch.Tensor:
    """Returns the columns of the target's most probable tokens: `[N, count]`, int32.

    Args:
        states: `[N, D]`, final hidden states of the target.
        head: `[V', D]`, its output rows of the draft vocabulary.
    """
    count = min(count, len(head))
    parts = [F.linear(part.to(head.dtype), head).topk(count, sorted=False).indices for part in states.split(_ROWS)]
    return torch.cat(parts).to(torch.int32)


class LikelyTokens:
    """The target's `count` most probable tokens, kept beside each shard, so that no further epoch computes its head.

    `head` `[V', D]` are its output rows of the draft vocabulary, `vocab_ids` `[V']`, int64, their token ids.
    """

    def __init__(
        self,
        head: torch.Tensor,
        vocab_ids: torch.Tensor,
        count: int,
        report: Callable[[str], object] = lambda line: None,
    ) -> None:
        self._head, self._count, self._report, self._known = head, count, report, set[Path]()
        told = repr((count, head.dtype)).encode() + vocab_ids.cpu().numpy().tobytes()
        self._digest = hashlib.sha256(told).hexdigest()[:12]

    @torch.inference_mode()
    def of(self, shard: Path, key: str) -> torch.Tensor:
        """Returns the columns of a conversation in a shard, see `Features.likely`."""
        path = shard.with_name(f"likely-{shard.stem}-{self._digest}.safetensors")
        if path not in self._known and not _names(path, self._report):
            with safe_open(shard, framework="pt") as file:
                finals = {name: file.get_tensor(name) for name in file.keys() if name.endswith(".final")}  # noqa: SIM118
            found = {
                name.replace("final", "likely"): likely_columns(final.to(self._head.device), self._head, self._count)
                for name, final in finals.items()
            }
            found = {name: columns.cpu() for name, columns in found.items()}
            write_complete(path, functools.partial(save_file, found))
        self._known.add(path)
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(f"{key}.likely")


class FeatureDataset(Dataset[Features]):
    """Features in shards, read on access. `entries` are shards and keys."""

    def __init__(self, entries: Sequence[tuple[Path, str]], likely: LikelyTokens | None = None) -> None:
        self._entries, self._likely = list(entries), likely

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Features:
        path, key = self._entries[index]
        with safe_open(path, framework="pt") as file:
            features = Features(*(file.get_tensor(f"{key}.{name}") for name in _FIELDS))
        return features if self._likely is None else replace(features, likely=self._likely.of(path, key))
