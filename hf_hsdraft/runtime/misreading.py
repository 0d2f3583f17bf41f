"""Rounding: logits compared up to it, and layers that round their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# Greatest distance of logits that are the same, relative to their spread: in float32, and with reduced precision of
# its products - by hand.
SAME_FLOAT32 = 1e-4
SAME_REDUCED = 1e-2
SAME_HALF = 0.25  # in half precision at most, and where the model's own noise cannot be measured - by hand
# Where it can: a multiple of that noise, and number of times the least step of the dtype that it is at least;
# products by quantised blocks are the same for any number of rows, which hides the noise of the rest
# - measured in bfloat16, SmolLM2-135M, 26 prompts: trees and chains come to 0.09, 4.7 times the noise, at most; a
# target deaf to masks to 0.38 to 1.5.
OF_NOISE = 6.0
LEAST_EPS = 4.0
LEAST_EPS_OF_BLOCKS = 16.0


_FULL = (torch.float32, torch.float64)


def computing_dtype(logits: torch.Tensor, weights: torch.dtype = torch.float64) -> torch.dtype:
    """The coarsest dtype involved in computing logits `[..., V]` with `weights`, as far as can be told.

    Models may return float32 that was computed in half precision: under autocast, as accelerate's `mixed_precision`
    sets it up within the forward, or by a final cast. Then every number is representable in the coarser dtype.
    """
    device = logits.device.type
    dtypes = [logits.dtype, weights]
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    seen = logits[logits.abs() < torch.finfo(torch.bfloat16).max / 2]  # beyond that tokens are ruled out
    dtypes += [coarse for coarse in (torch.float16, torch.bfloat16) if torch.equal(seen.to(coarse).to(seen), seen)]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def usual_tolerance(dtype: torch.dtype) -> float:
    """The distance that rounding explains in a dtype, without measurements of the model."""
    if dtype not in _FULL:
        return SAME_HALF
    return SAME_FLOAT32 if torch.get_float32_matmul_precision() == "highest" else SAME_REDUCED


def measured_tolerance(dtype: torch.dtype, noise: float, blocks: bool = False) -> float:
    """The distance that rounding explains, given the distance between two exact ways of reading the same tokens.

    `blocks` tells that the target may multiply by quantised blocks.
    """
    least = (LEAST_EPS_OF_BLOCKS if blocks else LEAST_EPS) * torch.finfo(dtype).eps
    return min(max(OF_NOISE * noise, least), SAME_HALF)


def is_full(dtype: torch.dtype) -> bool:
    """Whether a dtype's rounding is too small to be mistaken for a misreading."""
    return dtype in _FULL


def same_but_rounding(logits: torch.Tensor, expected: torch.Tensor, tolerance: float | None = None) -> bool:
    """Whether logits `[..., V]` agree up to rounding; another token, mask or position exceeds it by far."""
    dtype = computing_dtype(expected)
    return in_tolerances(logits, expected, dtype, usual_tolerance(dtype) if tolerance is None else tolerance) <= 1.0


def in_tolerances(logits: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, tolerance: float) -> float:
    """The distance of logits `[..., V]`, in units of the tolerance; see `same_but_rounding`."""
    distances = distances_of(logits, expected)
    # In half precision a near tie of an expert router may change one position.
    return float(distances.max() if is_full(dtype) else distances.median()) / tolerance


def distances_of(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Distance of each row of logits, relative to the spread of the expected ones; infinite if not comparable."""
    floor = torch.finfo(logits.dtype).min / 2  # some models mask tokens by the minimum of the dtype, or -inf
    logits, expected = logits.float(), expected.float()
    ruled_out = [~(x > floor) for x in (logits, expected)]
    count = (~ruled_out[1]).sum(dim=-1, keepdim=True).clamp(min=1)
    kept = expected.masked_fill(ruled_out[1], 0.0)
    spread = (kept - kept.sum(dim=-1, keepdim=True) / count).masked_fill(ruled_out[1], 0.0).norm(dim=-1)
    distance = (logits.masked_fill(ruled_out[0], 0.0) - kept).norm(dim=-1) / spread.clamp(min=1e-12)
    same = (ruled_out[0] == ruled_out[1]).all(dim=-1) & distance.isfinite()
    return distance.masked_fill(~same, float("inf")).flatten()


_EXACT = ("torch", "transformers", "peft", __name__.partition(".")[0])
_STEP = 2.0**-12  # relative change of inputs: half of float16's precision, 2,000 times float32's
_LINEAR = 0.1  # relative error of a change of outputs: about 0.003 in float32, 0.3 and more with rounded inputs


def foreign_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Modules from other libraries, or with their weight classes; one of each kind."""
    seen: set[Any] = set()
    for module in model.modules():
        weights = tuple(type(weight) for weight in module._parameters.values() if weight is not None)
        kind = type(module), weights
        foreign = type(module).__module__.partition(".")[0] not in _EXACT or any(w is not nn.Parameter for w in weights)
        if foreign and kind not in seen:
            seen.add(kind)
            yield module


def rounds_inputs(model: nn.Module) -> bool:
    """Whether a float32 model has linear layers of other libraries that round their inputs.

    Such layers amplify differences of 1e-7, which arise between reading one token and several, into steps of a coarser
    grid. The test is linearity: f(x + d) - f(x) = f(d) - f(0) for a small d, up to rounding, holds in float32 only. A
    layer that is no product, such as a gate with a softmax, is smooth at least: f(x + 2d) - f(x + d) = f(x + d) - f(x).
    """
    return any(map(_rounds, foreign_modules(model)))


def _rounds(module: nn.Module) -> bool:
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu"))
    widths = {getattr(module, "in_features", None) or getattr(module, "infeatures", None)} - {None}
    widths = widths or {size for tensor in tensors if tensor.dim() == 2 for size in tensor.shape}
    return any(_rounds_inputs_of(module, width, device) for width in widths if isinstance(width, int))


@torch.no_grad()
def _rounds_inputs_of(module: nn.Module, width: int, device: torch.device) -> bool:
    waves = torch.arange(1, width + 1, device=device, dtype=torch.float32)[None, None]
    x = (waves * 12.9898).sin() + (waves * 78.233).cos()
    step = _STEP * x * (waves * 2.399963).sin().sign()
    try:  # skips hooks, but not accelerate's, which load weights: they are part of `forward`
        origin, start, middle, end = (module.forward(each) for each in (0 * x, x, x + step, x + 2 * step))
        if torch.equal(start, origin):  # whatever the inputs
            return False
        alone, change = module.forward(step) - origin, middle - start
        errors = (change - alone).norm() / alone.norm(), (end - middle - change).norm() / change.norm()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # other inputs are expected: left to the trial
        return False
    return not any(bool(error <= _LINEAR) for error in errors)


def tie_margin(dtype: torch.dtype) -> float:
    """The greatest top-1/top-2 logit difference that rounding may turn round.

    In half precision two spacings of numbers from 16 to 32, as large as logits are: 0.25 in bfloat16.
    """
    return max(1e-3, 32 * torch.finfo(dtype).eps)


@dataclass(frozen=True)
class Divergence:
    """The first difference between two texts."""

    step: int  # index of the first new token that differs
    margin: float | None  # the target's top-1/top-2 logit difference there, in one plain forward; None if sampled
    near: float = tie_margin(torch.float32)  # `tie_margin` of the dtype in which the logits were computed

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains it."""
        return self.margin is not None and self.margin <= self.near

    def __str__(self) -> str:
        if self.margin is None:
            return f"no: differs from new token {self.step}"
        margin = f"the target's top-1/top-2 margin is {self.margin:.1e}"
        return f"no: differs from new token {self.step}, where {margin}{', a tie' if self.is_tie else ''}"


@torch.inference_mode()
def first_divergence(target: Any, prompt_length: int, plain: torch.Tensor, other: torch.Tensor) -> Divergence | None:
    """Compares two outputs of `generate()`, each `[1, length]`. Returns `None` if they are equal."""
    shared = min(plain.shape[1], other.shape[1])
    differing = torch.nonzero(plain[0, :shared] != other[0, :shared]).flatten().tolist()
    if not differing and plain.shape[1] == other.shape[1]:
        return None
    first = differing[0] if differing else shared
    logits = target(plain[:, :first], logits_to_keep=1, use_cache=False).logits[0, -1]
    best = logits.float().topk(2).values
    near = tie_margin(computing_dtype(logits, target.dtype))
    return Divergence(first - prompt_length, float(best[0] - best[1]), near)
