"""Weights that other projects have quantised, as the numbers that they stand for.

| `quant_method` | tensors of `X.weight` | numbers |
|---|---|---|
| fp8 (block scales), fbgemm_fp8, quark, compressed-tensors (float, w8a8), modelopt (FP8) | `weight` in 8 bits, `weight_scale_inv` or `weight_scale`, perhaps `weight_zero_point` | (w - zero) * scale |
| none: a plain cast | `weight` in 8 bits | w |
| modelopt (NVFP4) | `weight`, `weight_scale`, `weight_scale_2` | w * scale * scale_2 |
| compressed-tensors (NVFP4) | `weight_packed`, `weight_scale`, `weight_global_scale` | w * scale / global_scale |
| compressed-tensors (MXFP4) | `weight_packed`, `weight_scale` | w * 2^(scale - 127) |
| compressed-tensors (w4a16, w8a16) | `weight_packed`, `weight_scale`, perhaps `weight_zero_point`, `weight_g_idx` | (w - zero) * scale |
| awq, gptq | `qweight`, `qzeros`, `scales`, of gptq also `g_idx` | (w - zero) * scale, transposed |

The tensors decide: files often carry a copy of their target's `quantization_config`. It only tells sizes. Letters in the
shapes: N outputs, K inputs, G groups of inputs.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..core.checks import few, printable
from ..hub.drafter_files import DTYPES, DamagedFile, Shape

_INTEGERS = ("I32", "I64", "BOOL")  # of maps of a vocabulary and others that are not weights
_EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8")
_BLOCK = 128  # rows and columns that share a scale, where the configuration does not tell
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # E2M1
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # place in a packed number of each of eight columns

Parts = Mapping[str, torch.Tensor]  # by suffix


@dataclass(frozen=True)
class Settings:
    """What a configuration tells of its quantisation."""

    method: str
    bits: int  # of packed integers
    blocks: tuple[int, int]  # rows and columns that share a scale
    zeros_lack_one: bool  # whether GPTQ's zero points are stored less one

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        tables = (config, *(each for each in config.values() if isinstance(each, Mapping)))
        named = (each.get(name) for each in tables for name in ("quantization_config", "compression_config"))
        table = next((each for each in named if isinstance(each, Mapping)), {})
        groups = table.get("config_groups")
        first: Any = next(iter(groups.values()), {}) if isinstance(groups, Mapping) else {}
        weights = first.get("weights") if isinstance(first, Mapping) else None
        weights = {**table, **(weights if isinstance(weights, Mapping) else {})}
        bits = next((weights[name] for name in ("num_bits", "bits", "w_bit") if isinstance(weights.get(name), int)), 4)
        block = next((weights[name] for name in ("weight_block_size", "block_structure") if weights.get(name)), None)
        valid = isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block)
        blocks = (block[0], block[1]) if isinstance(block, list) and valid else (_BLOCK, _BLOCK)
        method = table.get("quant_method")
        return cls(method if isinstance(method, str) else "", bits, blocks, table.get("checkpoint_format") != "gptq_v2")


def _same(shape: Shape, settings: Settings) -> Shape:
    return shape


def _wider(shape: Shape, count: int) -> Shape:
    return *shape[:-1], shape[-1] * count


def _scaled(parts: Parts, settings: Settings) -> torch.Tensor:
    numbers = parts[""].float()
    if "_zero_point" in parts:
        numbers = numbers - _spread(parts["_zero_point"].float(), numbers.shape, settings)
    scale = parts.get("_scale_inv", parts.get("_scale"))
    return numbers if scale is None else numbers * _spread(_exponents(scale), numbers.shape, settings)


def _exponents(scale: torch.Tensor) -> torch.Tensor:
    """Returns scales in float32, also where each byte is the exponent of a power of two (E8M0)."""
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def _spread(scale: torch.Tensor, shape: torch.Size, settings: Settings) -> torch.Tensor:
    """Returns a scale of all numbers, of each row, or of each block, so that it multiplies numbers of a shape."""
    if scale.numel() == 1:
        return scale.reshape(())
    if scale.dim() < len(shape):
        scale = scale[..., None]
    for axis, given in ((-2, settings.blocks[0]), (-1, settings.blocks[1])):
        size, count = shape[axis], scale.shape[axis]
        block = given if -(-size // given) == count else size // count
        if -(-size // max(block, 1)) != count:
            raise ValueError(f"scales of shape {list(scale.shape)} do not divide weights of shape {list(shape)}")
        scale = scale.repeat_interleave(block, dim=axis).narrow(axis, 0, size)
    return scale


def _fp4(packed: torch.Tensor) -> torch.Tensor:
    table = torch.tensor(_FP4)
    return torch.stack([table[(packed & 15).int()], table[(packed >> 4).int()]], dim=-1).flatten(-2)


def _nvfp4(parts: Parts, settings: Settings) -> torch.Tensor:
    numbers = _fp4(parts["_packed"] if "_packed" in parts else parts[""])
    numbers = numbers * _spread(_exponents(parts["_scale"]), numbers.shape, settings)
    if "_global_scale" in parts:
        return numbers / parts["_global_scale"].float()
    return numbers * parts["_scale_2"].float() if "_scale_2" in parts else numbers


def _unpacked(packed: torch.Tensor, bits: int, axis: int = -1) -> torch.Tensor:
    """Returns unsigned integers of some bits, of which each number along an axis holds several, the lowest first."""
    shifts = torch.arange(0, 32, bits)
    packed = packed.transpose(axis, -1)
    return ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2).transpose(axis, -1)


def _packed_integers(parts: Parts, settings: Settings) -> torch.Tensor:
    half, zeros = 2 ** (settings.bits - 1), parts.get("_zero_point")
    numbers = (_unpacked(parts["_packed"], settings.bits) - half).float()  # [N, K]
    scale, groups = parts["_scale"].float(), parts.get("_g_idx")  # [N, G], [K]
    if zeros is not None and zeros.dtype == torch.int32:  # packed along N
        zeros = _unpacked(zeros, settings.bits, axis=0)[: len(scale)] - half
    if groups is not None and int(groups.min()) >= 0:
        numbers = numbers if zeros is None else numbers - zeros.float()[:, groups.long()]
        return numbers * scale[:, groups.long()]
    numbers = numbers if zeros is None else numbers - _spread(zeros.float(), numbers.shape, settings)
    return numbers * _spread(scale, numbers.shape, settings)


def _awq(parts: Parts, settings: Settings) -> torch.Tensor:
    def ordered(packed: torch.Tensor) -> torch.Tensor:
        return _unpacked(packed, 4).unflatten(-1, (-1, 8))[..., list(_AWQ_ORDER)].flatten(-2)

    scale = parts["scales"].float()  # [G, N]
    size = len(parts["qweight"]) // len(scale)
    numbers, zeros = ordered(parts["qweight"]), ordered(parts["qzeros"])
    return ((numbers - zeros.repeat_interleave(size, dim=0)) * scale.repeat_interleave(size, dim=0)).T


def _gptq(parts: Parts, settings: Settings) -> torch.Tensor:
    bits, scale = settings.bits, parts["scales"].float()  # [G, N]
    numbers, zeros = _unpacked(parts["qweight"], bits, axis=0), _unpacked(parts["qzeros"], bits)
    zeros = (zeros + int(settings.zeros_lack_one)) & (2**bits - 1)
    groups = parts["g_idx"].long()
    return ((numbers - zeros[groups]) * scale[groups]).T


@dataclass(frozen=True)
class Scheme:
    """How a weight is stored. Its tensors' names have a common stem, which the suffix of the numbers follows."""

    name: str
    main: str  # suffix of the numbers; `qweight` stands for `weight`
    dtypes: tuple[str, ...]  # of the numbers, as headers name them
    needed: tuple[str, ...]  # further suffixes
    possible: tuple[str, ...]
    shape: Callable[[Shape, Settings], Shape]  # of the weight, by that of the numbers
    numbers: Callable[[Parts, Settings], torch.Tensor]


_INT32, _TO_WIDER = ("I32",), lambda shape, settings: _wider(shape, 32 // settings.bits)
SCHEMES = (
    Scheme("fp8 with scales of blocks", "", _EIGHT_BITS, ("_scale_inv",), (), _same, _scaled),
    Scheme("8 bits with scales", "", _EIGHT_BITS, ("_scale",), ("_zero_point",), _same, _scaled),
    Scheme("fp8", "", _EIGHT_BITS[:2], (), (), _same, _scaled),
    Scheme("NVFP4", "", ("U8",), ("_scale", "_scale_2"), (), lambda shape, _: _wider(shape, 2), _nvfp4),
    Scheme("NVFP4", "_packed", ("U8",), ("_scale", "_global_scale"), (), lambda shape, _: _wider(shape, 2), _nvfp4),
    Scheme("MXFP4", "_packed", ("U8",), ("_scale",), (), lambda shape, _: _wider(shape, 2), _nvfp4),
    Scheme("packed integers", "_packed", _INT32, ("_scale",), ("_zero_point", "_g_idx"), _TO_WIDER, _packed_integers),
    Scheme(
        "GPTQ", "qweight", _INT32, ("qzeros", "scales", "g_idx"), (),
        lambda shape, settings: (shape[1], shape[0] * 32 // settings.bits), _gptq,
    ),
    Scheme("AWQ", "qweight", _INT32, ("qzeros", "scales"), (), lambda shape, _: (shape[1] * 8, shape[0]), _awq),
)  # fmt: skip


@dataclass(frozen=True)
class Packed:
    """A quantised weight."""

    scheme: Scheme
    settings: Settings
    stored: Mapping[str, str]  # names of its tensors by suffix
    shape: Shape  # of the weight

    def restored(self, read: Callable[[str], torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Returns the weight in a dtype; `read` returns a tensor by name. Raises a ValueError if they do not fit."""
        try:
            numbers = self.scheme.numbers({part: read(name) for part, name in self.stored.items()}, self.settings)
        except DamagedFile:
            raise
        except (ValueError, RuntimeError, IndexError, ZeroDivisionError) as error:
            told = f"{printable(self.stored[self.scheme.main])} cannot be dequantised as {self.scheme.name}"
            raise ValueError(f"{told}: {printable(error)}") from error
        if tuple(numbers.shape) != self.shape or not bool(numbers.isfinite().all()):
            wrong = f"{printable(self.stored[self.scheme.main])}, quantised as {self.scheme.name}, gives numbers of "
            raise ValueError(f"{wrong}shape {list(numbers.shape)}: expected {list(self.shape)}, all finite")
        return numbers.to(dtype).contiguous()


def packed_weights(found: Mapping[str, tuple[Shape, str]], config: Mapping[str, Any]) -> dict[str, Packed]:
    """Returns quantised weights by name, from tensors' shapes and dtypes, and sizes in the `quantization_config`."""
    settings, made = Settings.of(config), {}
    for name, (shape, dtype) in found.items():
        if dtype in ("U8", *_EIGHT_BITS, *_INT32) and (scheme := _scheme_of(name, shape, dtype, found)) is not None:
            if dtype in _INT32 and settings.bits not in (2, 4, 8):
                continue
            stem = name.removesuffix(scheme.main)
            there = [part for part in (*scheme.needed, *scheme.possible) if stem + part in found]
            weight = stem + ("weight" if scheme.main == "qweight" else "")
            stored = {scheme.main: name} | {part: stem + part for part in there}
            made[weight] = Packed(scheme, settings, stored, tuple(scheme.shape(shape, settings)))
    parts = {each for packed in made.values() for suffix, each in packed.stored.items() if suffix != packed.scheme.main}
    return {name: packed for name, packed in made.items() if name not in parts}  # scales may be of 8 bits too


def _scheme_of(name: str, shape: Shape, dtype: str, found: Mapping[str, Any]) -> Scheme | None:
    for scheme in SCHEMES:
        stem = name.removesuffix(scheme.main)
        fits = name.endswith(scheme.main) and dtype in scheme.dtypes and bool(shape)
        if fits and all(stem + part in found for part in scheme.needed):
            return scheme
    return None


_OF_BITS_AND_BYTES = ".SCB", ".absmax"


def unread(tensors: Mapping[str, str], config: Mapping[str, Any]) -> str:
    """Returns how the remaining tensors, by dtype, are quantised that `packed_weights` does not know, or ""."""
    packed = [name for name, dtype in tensors.items() if dtype not in DTYPES.values() and dtype not in _INTEGERS]
    marks = "qweight", "weight_packed", "_scale_inv", *_OF_BITS_AND_BYTES
    packed += [name for name in tensors if name.endswith(marks)]
    if not packed:
        return ""
    of_bits_and_bytes = any("bitsandbytes" in name or name.endswith(_OF_BITS_AND_BYTES) for name in tensors)
    method = "bitsandbytes" if of_bits_and_bytes else Settings.of(config).method
    known, names = ", ".join(dict.fromkeys(scheme.name for scheme in SCHEMES)), few(sorted(set(packed)))
    return (
        f"quantised by {printable(method) or 'an unknown method'} ({names}): expected one of {known}, or no "
        "quantisation; use the drafter as it was before quantisation"
    )
