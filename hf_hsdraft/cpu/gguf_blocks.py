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

from .small_weights import BLOCKS, KERNEL, SmallCopy, fits, in_blocks

_NONE: tuple[int, int, list[int]] = (-1, 0, [])
_STRING, _ARRAY = 8, 9  # kinds of fields; the others are numbers
_NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_sources: Any = WeakIdKeyDictionary()  # of weights: file, name of the parameter, number of layers


def remember_file(target: nn.Module, file: Path) -> None:
    """Notes that a target's weights were dequantised from a GGUF file, which is read when they are packed."""
    config: Any = target.config
    for name, weight in target.named_parameters():
        if weight.dim() == 2:
            _sources[weight] = file, name, getattr(config, "num_hidden_layers", 0)


def file_of(target: nn.Module) -> Path | None:
    """The GGUF file that a target's weights were dequantised from; `None` if there is none."""
    return next((_sources[weight][0] for weight in target.parameters() if weight in _sources), None)


def has_blocks(weight: torch.Tensor) -> bool:
    """Whether a weight was dequantised from a GGUF file, to a shape that the kernel takes."""
    return weight in _sources and fits(weight)


def copy_of_blocks(weight: torch.Tensor) -> SmallCopy | None:
    """A copy of a weight by its blocks; `None` where it has none, they differ from it, or a packed copy is quicker."""
    found = KERNEL.operators() if has_blocks(weight) else None
    if found is None or (weight.dtype == torch.bfloat16 and not found.is_quick()):
        return None
    try:
        raw = _raw_blocks(*_sources[weight])
    except Exception:  # gguf is not installed, or another file has taken this one's place
        return None
    return None if raw is None else _in_order(found, *raw, weight.detach().contiguous())


def _in_order(found: Any, kind: Any, raw: torch.Tensor, weight: torch.Tensor) -> SmallCopy | None:
    import gguf

    size, of_bytes = gguf.GGML_QUANT_SIZES[kind]
    rows, inputs = weight.shape
    if (
        weight.dtype not in (torch.bfloat16, torch.float32)
        or inputs % size
        or tuple(raw.shape) != (rows, inputs // size * of_bytes)
    ):
        return None
    if (copy := in_blocks(found, kind.name, raw, weight)) is not None:
        return copy
    # llama.cpp reorders rows of queries and keys.
    values = torch.from_numpy(gguf.dequantize(raw.numpy(), kind)).to(weight.dtype)
    order = torch.empty(rows, dtype=torch.int64)
    order[_digests(weight).argsort()] = _digests(values).argsort()
    return in_blocks(found, kind.name, raw, weight, order)


def _digests(rows: torch.Tensor) -> torch.Tensor:
    """A number for each row, int64, that depends on the order of its bits."""
    factors = torch.arange(1, 2 * rows.shape[1], 2) * 0x9E3779B97F4A7C15 % 2**31
    bits = torch.int16 if rows.dtype == torch.bfloat16 else torch.int32
    return (rows.detach().contiguous().view(bits).long() * factors).sum(1)


def _raw_blocks(file: Path, name: str, layers: int) -> tuple[Any, torch.Tensor] | None:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    architecture, tensors = _contents(file, file.stat().st_mtime_ns)
    known = _names(architecture, layers).get_name(name, try_suffixes=(".weight",)) or ""
    number, place, sizes = tensors.get(known, _NONE)
    if number not in set(GGMLQuantizationType) or GGMLQuantizationType(number).name not in BLOCKS:
        return None
    kind = GGMLQuantizationType(number)
    size, of_bytes = GGML_QUANT_SIZES[kind]
    with file.open("rb") as opened:
        opened.seek(place)
        read = bytearray(opened.read(math.prod(sizes) // size * of_bytes))
        return kind, torch.frombuffer(read, dtype=torch.uint8).view(sizes[-1], -1)


@lru_cache(maxsize=4)
def _names(architecture: str, layers: int) -> Any:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kinds = [arch for arch, title in MODEL_ARCH_NAMES.items() if title == architecture]
    if not kinds:
        raise ValueError(f"the package gguf knows no {architecture}")
    return get_tensor_name_map(kinds[0], layers)


@lru_cache(maxsize=1)
def _contents(file: Path, _changed: int) -> tuple[str, dict[str, tuple[int, int, list[int]]]]:
    """The architecture, and each tensor's type, a number, place in the file, and sizes, innermost first.

    The package gguf takes seconds for this.
    """
    with file.open("rb") as opened:
        read = functools.partial(_read, opened)
        if opened.read(4) != b"GGUF" or read("I") < 2:
            raise ValueError(f"{file} is no GGUF file that is known here")
        count, known, found = read("Q"), {}, {}
        for _ in range(read("Q")):
            key = opened.read(read("Q"))
            known[key] = _value(opened, read("I"))
        alignment, architecture = known.get(b"general.alignment") or 32, known.get(b"general.architecture")
        for _ in range(count):
            name = opened.read(read("Q")).decode()
            sizes = [read("Q") for _ in range(read("I"))]
            found[name] = read("I"), read("Q"), sizes
        start = -(-opened.tell() // alignment) * alignment
    tensors = {name: (kind, start + offset, sizes) for name, (kind, offset, sizes) in found.items()}
    return bytes(architecture or b"").decode(), tensors


def _read(opened: BinaryIO, form: str) -> int:
    return struct.unpack(f"<{form}", opened.read(struct.calcsize(f"<{form}")))[0]


def _value(opened: BinaryIO, kind: int) -> Any:
    """The value of a field; `None` for an array, which is only read over."""
    if kind == _STRING:
        return opened.read(_read(opened, "Q"))
    elif kind == _ARRAY:
        of, length = _read(opened, "I"), _read(opened, "Q")
        if of in _NUMBERS:
            opened.seek(length * struct.calcsize(f"<{_NUMBERS[of]}"), os.SEEK_CUR)
        else:
            for _ in range(length):
                _value(opened, of)
        return None
    return _read(opened, _NUMBERS[kind])
