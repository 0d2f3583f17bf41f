"""The blocks of the GGUF file that a target's weights were dequantised from.

transformers multiplies by the dequantised weights. Products by the blocks multiply by the same numbers, and read a
third of the bytes; each weight is compared with its blocks before they are used.
"""

from __future__ import annotations

import functools
import math
import os
import struct
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .small_weights import INPUTS, KERNEL, SmallCopy, fits, in_blocks

_TYPES = {2: "Q4_0", 3: "Q4_1", 8: "Q8_0"}
_NONE: tuple[str, int, list[int]] = ("", 0, [])
_STRING, _ARRAY = 8, 9  # kinds of fields; the others are numbers
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_SIZES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}  # bytes of a block of 32 weights
_sources: Any = WeakIdKeyDictionary()  # of weights: file, name of the parameter, model type, number of layers


def remember_file(target: nn.Module, file: Path) -> None:
    """Notes that a target's weights were dequantised from a GGUF file, which is read when they are packed."""
    config: Any = target.config
    for name, weight in target.named_parameters():
        if weight.dim() == 2:
            _sources[weight] = file, name, config.model_type, getattr(config, "num_hidden_layers", 0)


def copy_of_blocks(weight: torch.Tensor) -> SmallCopy | None:
    """A copy of a weight by its blocks; `None` where it has none, they differ from it, or a packed copy is quicker."""
    found = KERNEL.operators() if weight in _sources and fits(weight) else None
    if found is None or not found.has_tiles():
        return None
    try:
        raw = _raw_blocks(*_sources[weight])
    except (ImportError, OSError, ValueError, struct.error, KeyError):
        return None
    return None if raw is None or len(raw[1]) != len(weight) else _in_order(found, *raw, weight)


def _in_order(found: Any, kind: str, raw: torch.Tensor, weight: torch.Tensor) -> SmallCopy | None:
    if weight.dtype != torch.bfloat16 or raw.shape[1] != weight.shape[1] // INPUTS * _SIZES[kind]:
        return None
    weight = weight.detach().contiguous()
    if (copy := in_blocks(found, kind, raw, weight)) is not None:
        return copy
    # llama.cpp reorders rows of queries and keys.
    values, order = dequantised(kind, raw.view(len(raw), -1, _SIZES[kind])), torch.empty(len(weight), dtype=torch.int64)
    order[_digests(weight).argsort()] = _digests(values).argsort()
    return in_blocks(found, kind, raw, weight, order)


def dequantised(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """`[out, in]`, bfloat16, of blocks `[out, in / 32, bytes]`."""

    def half(place: int) -> torch.Tensor:
        return blocks[..., place : place + 2].contiguous().view(torch.float16).float()

    if kind == "Q8_0":
        return (blocks[..., 2:].view(torch.int8) * half(0)).bfloat16().flatten(1)
    nibbles = blocks[..., -INPUTS // 2 :]
    numbers = torch.cat([nibbles & 15, nibbles >> 4], dim=-1)
    return (numbers * half(0) + (half(2) if kind == "Q4_1" else -8 * half(0))).bfloat16().flatten(1)


def _digests(rows: torch.Tensor) -> torch.Tensor:
    """A number for each row, int64, that depends on the order of its bits."""
    factors = torch.arange(1, 2 * rows.shape[1], 2) * 0x9E3779B97F4A7C15 % 2**31
    return (rows.detach().contiguous().view(torch.int16).long() * factors).sum(1)


def _raw_blocks(file: Path, name: str, model_type: str, layers: int) -> tuple[str, torch.Tensor] | None:
    known = _names(model_type, layers).get_name(name, try_suffixes=(".weight",)) or ""
    kind, place, sizes = _tensors(file, file.stat().st_mtime_ns).get(known, _NONE)
    if kind not in _SIZES:
        return None
    size = math.prod(sizes) // INPUTS * _SIZES[kind]
    with file.open("rb") as opened:
        opened.seek(place)
        return kind, torch.frombuffer(bytearray(opened.read(size)), dtype=torch.uint8).view(sizes[-1], -1)


@lru_cache(maxsize=4)
def _names(model_type: str, layers: int) -> Any:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kinds = [arch for arch, title in MODEL_ARCH_NAMES.items() if title == model_type]
    if not kinds:
        raise ValueError(f"the package gguf knows no {model_type}")
    return get_tensor_name_map(kinds[0], layers)


@lru_cache(maxsize=1)
def _tensors(file: Path, _changed: int) -> dict[str, tuple[str, int, list[int]]]:
    """Each tensor's type, place in the file, and sizes, innermost first. The package gguf takes seconds for this."""
    with file.open("rb") as opened:
        read = functools.partial(_read, opened)
        if opened.read(4) != b"GGUF" or read("I") < 2:
            raise ValueError(f"{file} is no GGUF file that is known here")
        count, fields, alignment = read("Q"), read("Q"), 32
        for _ in range(fields):
            key, value = opened.read(read("Q")), _value(opened, read("I"))
            alignment = value or 32 if key == b"general.alignment" else alignment
        found = {}
        for _ in range(count):
            name = opened.read(read("Q")).decode()
            sizes = [read("Q") for _ in range(read("I"))]
            found[name] = _TYPES.get(read("I"), ""), read("Q"), sizes
        start = -(-opened.tell() // alignment) * alignment
    return {name: (kind, start + offset, sizes) for name, (kind, offset, sizes) in found.items()}


def _read(opened: BinaryIO, form: str) -> int:
    return struct.unpack(f"<{form}", opened.read(struct.calcsize(f"<{form}")))[0]


def _value(opened: BinaryIO, kind: int) -> int | None:
    """Reads over a field; returns its value if that is a whole number."""
    if kind == _STRING:
        opened.seek(_read(opened, "Q"), os.SEEK_CUR)
    elif kind == _ARRAY:
        of, length = _read(opened, "I"), _read(opened, "Q")
        if of in _NUMBERS:
            opened.seek(length * struct.calcsize(f"<{_NUMBERS[of]}"), os.SEEK_CUR)
        else:
            for _ in range(length):
                _value(opened, of)
    else:
        return _read(opened, _NUMBERS[kind])
    return None
