"""Weights quantised as other projects store them, and the numbers that they stand for, computed number by number.

Each case of `CASES` returns fields of config.json, the parts of a weight `[N, K]` by their names' ends, and the weight.
"""

from __future__ import annotations

import math

import torch

N, K = 32, 48  # outputs and inputs of the weight
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GENERATOR = torch.Generator()


def integers(below, *shape):
    return torch.randint(0, below, shape, generator=GENERATOR)


def scales(*shape):
    return torch.rand(shape, generator=GENERATOR) + 0.5


def packed_along(numbers, bits):
    """Packs unsigned integers of rows, the lowest first, as an unsigned number that wraps to int32."""
    each = 32 // bits
    words = [
        [sum(int(row[start + i]) << (bits * i) for i in range(each)) for start in range(0, len(row), each)]
        for row in numbers
    ]
    return torch.tensor([[word - 2**32 if word >= 2**31 else word for word in row] for row in words]).int()


def table(make):
    return torch.tensor([[make(n, k) for k in range(K)] for n in range(N)])


def fp8_blocks():
    numbers, scale = (integers(9, N, K) - 4.0).to(torch.float8_e4m3fn), scales(math.ceil(N / 16), math.ceil(K / 24))
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 24]}}
    return (
        config,
        {"": numbers, "_scale_inv": scale},
        table(lambda n, k: float(numbers[n, k]) * scale[n // 16, k // 24]),
    )


def fp8_rows():
    numbers, scale = (integers(9, N, K) - 4.0).to(torch.float8_e4m3fn), scales(N, 1)
    return {}, {"": numbers, "_scale": scale}, table(lambda n, k: float(numbers[n, k]) * scale[n, 0])


def fp8_tensor():
    numbers, scale = (integers(9, N, K) - 4.0).to(torch.float8_e5m2), torch.tensor(0.75)
    return {}, {"": numbers, "_scale": scale}, table(lambda n, k: float(numbers[n, k]) * 0.75)


def fp8_cast():
    numbers = (integers(9, N, K) - 4.0).to(torch.float8_e4m3fn)
    return {}, {"": numbers}, numbers.float()


def w8a8():
    numbers, scale, zeros = (integers(256, N, K) - 128).char(), scales(N, 1), (integers(9, N, 1) - 4).char()
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": "int-quantized"}}
    right = table(lambda n, k: (int(numbers[n, k]) - int(zeros[n])) * scale[n, 0])
    return config, {"": numbers, "_scale": scale, "_zero_point": zeros}, right


def packed(bits, group, zeros=False, order=False):
    def make():
        numbers, scale = integers(2**bits, N, K), scales(N, K // group)
        zero = integers(2**bits, N, K // group) if zeros else torch.full((N, K // group), 2 ** (bits - 1))
        places = torch.arange(K) // group
        places = places[torch.randperm(K, generator=GENERATOR)] if order else places
        weights = {"num_bits": bits, "group_size": group, "symmetric": not zeros}
        config = {"quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": weights}},
        }}  # fmt: skip
        parts = {"_packed": packed_along(numbers, bits), "_scale": scale, "_shape": torch.tensor([N, K])}
        parts |= {"_zero_point": packed_along(zero.T, bits).T.contiguous()} if zeros else {}
        parts |= {"_g_idx": places.int()} if order else {}
        at = places.tolist()
        return config, parts, table(lambda n, k: (int(numbers[n, k]) - int(zero[n, at[k]])) * scale[n, at[k]])

    return make


def fp4(of_modelopt):
    def make():
        numbers, scale = integers(16, N, K), (scales(N, K // 16) * 8).to(torch.float8_e4m3fn)
        last = torch.tensor(0.25)
        halves = (numbers[:, 0::2] + 16 * numbers[:, 1::2]).to(torch.uint8)
        value = lambda n, k: FP4[numbers[n, k] % 8] * (-1 if numbers[n, k] >= 8 else 1) * float(scale[n, k // 16])  # noqa: E731
        if of_modelopt:
            return {}, {"": halves, "_scale": scale, "_scale_2": last}, table(lambda n, k: value(n, k) * 0.25)
        parts = {"_packed": halves, "_scale": scale, "_global_scale": last}
        return {}, parts, table(lambda n, k: value(n, k) / 0.25)

    return make


def mxfp4():
    numbers, powers = integers(16, N, K), integers(5, N, 1) + 125
    halves = (numbers[:, 0::2] + 16 * numbers[:, 1::2]).to(torch.uint8)
    sign = lambda n, k: -1.0 if numbers[n, k] >= 8 else 1.0  # noqa: E731
    right = table(lambda n, k: FP4[numbers[n, k] % 8] * sign(n, k) * 2.0 ** (int(powers[n]) - 127))
    return {}, {"_packed": halves, "_scale": powers.to(torch.uint8)}, right


def awq():
    numbers, zeros, scale = integers(16, K, N), integers(16, K // 16, N), scales(K // 16, N)
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # the column in each place of a packed number
    mixed = [start + place for start in range(0, N, 8) for place in order]
    parts = {"qweight": packed_along(numbers[:, mixed], 4), "qzeros": packed_along(zeros[:, mixed], 4)}
    right = table(lambda n, k: (int(numbers[k, n]) - int(zeros[k // 16, n])) * scale[k // 16, n])
    return {"quantization_config": {"quant_method": "awq", "bits": 4}}, {**parts, "scales": scale}, right


def gptq(bits, version="gptq"):
    def make():
        numbers, scale = integers(2**bits, K, N), scales(K // 8, N)
        zeros = integers(2**bits - 1, K // 8, N) + 1
        groups = (torch.arange(K) // 8)[torch.randperm(K, generator=GENERATOR)].int()
        config = {"quantization_config": {"quant_method": "gptq", "bits": bits, "checkpoint_format": version}}
        stored = zeros - 1 if version == "gptq" else zeros
        parts = {"qweight": packed_along(numbers.T, bits).T.contiguous(), "qzeros": packed_along(stored, bits)}
        right = table(lambda n, k: (int(numbers[k, n]) - int(zeros[groups[k], n])) * scale[groups[k], n])
        return config, {**parts, "scales": scale, "g_idx": groups}, right

    return make


CASES = {
    "fp8, blocks": fp8_blocks, "fp8, a scale a row": fp8_rows, "fp8, one scale": fp8_tensor, "fp8, a cast": fp8_cast,
    "compressed-tensors w8a8": w8a8,
    "compressed-tensors w4a16": packed(4, 8), "compressed-tensors w4a16, channels": packed(4, K),
    "compressed-tensors w8a16": packed(8, 16), "compressed-tensors w4a16, zero points": packed(4, 8, zeros=True),
    "compressed-tensors w4a16, ordered": packed(4, 8, zeros=True, order=True),
    "compressed-tensors NVFP4": fp4(False), "ModelOpt NVFP4": fp4(True), "MXFP4": mxfp4,
    "AWQ": awq, "GPTQ": gptq(4), "GPTQ, 8 bits": gptq(8), "GPTQ, 2 bits, version 2": gptq(2, "gptq_v2"),
}  # fmt: skip
