"""Linear layers of other libraries, such as quantised ones: detects those that round their inputs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_EXACT = ("torch", "transformers", "peft", __name__.partition(".")[0])
_STEP = 2.0**-12  # relative change of inputs: half of float16's precision, 2,000 times float32's
_LINEAR = 0.1  # relative error of the change of outputs: about 0.003 in float32, 0.3 and more with rounded inputs


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
    grid. The test is linearity: f(x + d) - f(x) = f(d) - f(0) for a small d, up to rounding, holds in float32 only.
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
    try:  # skips hooks, but not accelerate's, which load weights: they are part of `forward`
        alone = module.forward(step) - module.forward(torch.zeros_like(x))
        error = (module.forward(x + step) - module.forward(x) - alone).norm() / alone.norm()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # other inputs are expected: left to the trial
        return False
    return not bool(error <= _LINEAR)
