"""Convolutions over the slots of a block, with slot-dependent kernels (DFlash2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class BlockConvolution(nn.Module):
    """Two convolutions over a block's slots, before and after a part of a layer.

    Slot i becomes the sum over tau of (base[tau] + delta[i, tau]) * x[i - tau], with zeros before the block. Channels
    of a group share one delta. Both deltas are computed from the input of the first convolution. Kernels span
    `kernel_size` slots, groups `group_size` channels.
    """

    def __init__(self, hidden_size: int, kernel_size: int, group_size: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, kernel_size, hidden_size))
        self.kernel_projection = nn.Linear(hidden_size, 2 * kernel_size * (hidden_size // group_size), bias=False)
        self.group_size = group_size
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Makes both convolutions the identity."""
        with torch.no_grad():
            self.base_kernel.zero_()
            self.base_kernel[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def before(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the convolved input `[..., slots, D]` of the part, and the kernels for `after`."""
        size = self.base_kernel.shape[1]
        deltas = self.kernel_projection(x).unflatten(-1, (2, size, -1)).repeat_interleave(self.group_size, dim=-1)
        kernels = self.base_kernel + deltas
        return _convolved(x, kernels[..., 0, :, :]), kernels[..., 1, :, :]

    def after(self, x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
        """Returns the convolved output `[..., slots, D]` of the part."""
        return _convolved(x, kernels)


def _convolved(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
    """Convolves blocks `[..., slots, D]` by kernels `[..., slots, K, D]`."""
    slots = x.shape[-2]
    parts = (F.pad(x, (0, 0, back, 0))[..., :slots, :] * kernels[..., back, :] for back in range(kernels.shape[-2]))
    return torch.stack(list(parts)).sum(dim=0)
