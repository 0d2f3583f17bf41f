"""A stand-in for targets of float32 whose products round what they multiply, as bitsandbytes 4 bit does on CPUs.

A product of several rows is bitwise that of each row. But attention and norms in float32 round differently for several
tokens, by 1e-7. That moves some inputs over an edge of the coarser grid, and logits change by a step.
"""

from __future__ import annotations

import torch
from conftest import make_target

from hf_hsdraft import harmless


class RoundingLinear(torch.nn.Module):
    """Multiplies inputs of `bits` bits: 8 are bfloat16's. Each row is multiplied alone.

    Small models have few inputs, so that few of them are near an edge; with more bits there are more edges.
    """

    def __init__(self, linear: torch.nn.Linear, bits: int) -> None:
        super().__init__()
        self.weight, self.bits = torch.nn.Parameter(linear.weight.detach().clone(), False), bits

    @harmless
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mantissa, exponent = torch.frexp(x)
        rounded = torch.ldexp((mantissa * 2**self.bits).round() / 2**self.bits, exponent)
        return torch.stack([self.weight @ row for row in rounded.flatten(0, -2)]).view(*x.shape[:-1], -1)


def rounded_target(bits: int = 12, layers: int = 12):
    target = make_target(num_hidden_layers=layers)
    for layer in target.model.layers:
        for part in (layer.self_attn, layer.mlp):
            for name, linear in list(part.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    setattr(part, name, RoundingLinear(linear, bits))
    return target
