"""Norms of few operators, compared with torch's in float32."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hf_hsdraft.core.tensors import RMSNorm
from hf_hsdraft.cpu.products import Norm, NormedProduct

EPS, SIZE = 1e-5, 96


def norm_of(dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(SIZE, EPS).to(dtype)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm


@torch.no_grad()
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-6), (torch.bfloat16, 2**-6), (torch.float16, 2**-9)])
def test_norms_are_those_of_torch(dtype, close):
    """Also of vectors that `eps` makes shorter, of zeros, and of vectors that are long for float16."""
    torch.manual_seed(0)
    norms = [norm_of(dtype) for _ in range(3)]
    product = nn.Linear(3 * SIZE, 8, bias=False).to(dtype)
    for scale in (1.0, 1e-3, 0.0, 1e4):
        x = (scale * torch.randn(5, 3 * SIZE)).to(dtype)
        parts = [
            F.rms_norm(part.float(), (SIZE,), norm.weight.float(), EPS)
            for part, norm in zip(x.chunk(3, dim=-1), norms, strict=True)
        ]
        torch.testing.assert_close(Norm(norms[0])(x[:, :SIZE]).float(), parts[0], rtol=close, atol=close)
        expected = F.linear(torch.cat(parts, dim=-1), product.weight.float())
        found = NormedProduct(norms, product)(x[:, :SIZE], x[:, SIZE:])
        torch.testing.assert_close(found.float(), expected, rtol=4 * close, atol=4 * close)
