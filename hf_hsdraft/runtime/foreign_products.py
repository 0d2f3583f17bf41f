"""Products of other libraries, as of quantised weights: whose inputs they round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_EXACT = ("torch", "transformers", "peft", __name__.partition(".")[0])
_STEP = 2.0**-12  # relative change of inputs: half of float16's precision, 2,000 times float32's
_LINEAR = 0.1  # relative error of the change of outputs: float32 comes to some 0.003, rounded inputs to 0.3 and more


def foreign_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that are another library's, or have weights of one; one for each kind."""
    seen: set[Any] = set()
    for module in model.modules():
        weights = tuple(type(weight) for weight in module._parameters.values() if weight is not None)
        kind = type(module), weights
        foreign = type(module).__module__.partition(".")[0] not in _EXACT or any(w is not nn.Parameter for w in weights)
        if foreign and kind not in seen:
            seen.add(kind)
            yield module


def rounds_inputs(model: nn.Module) -> bool:
    """Whether a float32 model has linear layers of other libraries that round what they multiply.

    Such layers turn differences of 1e-7, which reading one token or several makes, into steps of a coarser grid. Tells
    them apart by linearity: f(x + d) - f(x) = f(d) - f(0) for a small d holds up to rounding in float32 only.
    """
    return any(map(_rounds, foreign_modules(model)))


@torch.no_grad()
def _rounds(module: nn.Module) -> bool:
    width = getattr(module, "in_features", None) or getattr(module, "infeatures", None)
    if not isinstance(width, int):
        return False
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu"))
    waves = torch.arange(1, width + 1, device=device, dtype=torch.float32)[None, None]
    x = (waves * 12.9898).sin() + (waves * 78.233).cos()
    step = _STEP * x * (waves * 2.399963).sin().sign()
    try:  # without the hooks of others; accelerate's, which load weights, are part of `forward`
        alone = module.forward(step) - module.forward(torch.zeros_like(x))
        error = (module.forward(x + step) - module.forward(x) - alone).norm() / alone.norm()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it takes something else: the trial tells
        return False
    return not bool(error <= _LINEAR)
