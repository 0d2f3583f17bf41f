"""Milliseconds of all products of a forward, for weights of 16, 8 and 4 bits, by number of rows, in one table.

    python benchmarks/small_products.py [--rows 1,9,17,25] [--dtype bfloat16]

The weights are random, in SmolLM2-135M's shapes: 30 layers, with queries, keys and values in one product, gate and up
in one, and the head. Each way multiplies by all of them in turn, so each weight comes from memory; the ways alternate,
and the table has medians. ATen's products by small weights round no inputs either. Needs an idle machine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from runner import counts, dtype_of, options, print_by_rows

if TYPE_CHECKING:
    import torch

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)]
_GROUP = 32  # weights of a block


def ways(dtype: torch.dtype) -> dict[str, list[Callable[[torch.Tensor], Any]]]:
    """Returns the products of each way, by its name."""
    import torch

    from hf_hsdraft.cpu.private_operators import packed_copy
    from hf_hsdraft.cpu.small_weights import KERNEL, in_int8

    numbers = [torch.randint(-128, 128, shape, dtype=torch.int8) for shape in SHAPES]
    scales = [torch.rand(rows) * 1e-3 for rows, _ in SHAPES]
    groups = [torch.rand(rows, inputs // _GROUP) * 1e-3 for rows, inputs in SHAPES]
    packed = [packed_copy(each.to(dtype), 16) for each in numbers]
    found: dict[str, list[Callable[[torch.Tensor], Any]]] = {
        f"packed {dtype}".replace("torch.", ""): [functools.partial(_packed, each) for each in packed]
    }
    operators = KERNEL.operators(wait=True)
    if operators is not None:
        made = {
            "int8": [in_int8(operators, *each) for each in zip(numbers, scales, strict=True)],
            "Q8_0": [_in_blocks(operators, "Q8_0", 34, *shape) for shape in SHAPES],
            "Q4_1": [_in_blocks(operators, "Q4_1", 20, *shape) for shape in SHAPES],
        }
        found |= {name: list(copies) for name, copies in made.items()}
        if dtype == torch.bfloat16:
            without = {name: [functools.partial(each, by_tiles=False) for each in made[name]] for name in made}
            found |= {f"{name} without AMX": products for name, products in without.items()}
    if dtype == torch.bfloat16:
        found["ATen int8"] = [
            functools.partial(_eight_bits, each, scale.to(dtype)) for each, scale in zip(numbers, scales, strict=True)
        ]
        found["ATen int4"] = [
            functools.partial(_four_bits, *_in_fours(*each)) for each in zip(numbers, groups, strict=True)
        ]
    return found


def _in_blocks(operators: Any, kind: str, size: int, outputs: int, inputs: int) -> Any:
    """A copy of random blocks of `size` bytes: a scale, for some kinds a least number, and the weights."""
    import torch

    from hf_hsdraft.cpu.gguf_blocks import dequantised
    from hf_hsdraft.cpu.small_weights import in_blocks

    raw = torch.randint(0, 256, (outputs, inputs // _GROUP, size), dtype=torch.uint8)
    halves = torch.rand(outputs, inputs // _GROUP, size % 16 // 2) * 1e-3
    raw[..., : size % 16] = halves.half().view(torch.uint8)
    return in_blocks(operators, kind, raw.flatten(1), dequantised(kind, raw))


def _packed(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    from hf_hsdraft.cpu.private_operators import packed_product

    return packed_product(x, weight, None)


def _eight_bits(weight: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    import torch

    return torch._weight_int8pack_mm(x, weight, scales)


def _in_fours(numbers: torch.Tensor, groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    both = torch.stack([groups, groups], dim=-1).transpose(0, 1).bfloat16().contiguous()
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu((numbers & 15).int(), 1), both


def _four_bits(weight: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.ops.aten._weight_int4pack_mm_for_cpu(x, weight, _GROUP, scales)


def milliseconds(products: Sequence[Callable[[torch.Tensor], Any]], inputs: Sequence[torch.Tensor]) -> float:
    """The time of one pass over all products."""
    begin = time.perf_counter()
    for product, x in zip(products, inputs, strict=True):
        product(x)
    return 1000 * (time.perf_counter() - begin)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options(__doc__, dtype="bfloat16", repeats=5, json=None)
    parser.add_argument("--rows", type=counts, default=[1, 9, 17, 25], help="default: 1,9,17,25")
    given = parser.parse_args(arguments)
    import torch

    dtype = dtype_of(given)
    with torch.no_grad():
        made = ways(dtype)

        def calls_of(rows: int) -> dict[str, Callable[[], float]]:
            inputs = [torch.randn(rows, inputs).to(dtype) for _, inputs in SHAPES]
            return {name: functools.partial(milliseconds, products, inputs) for name, products in made.items()}

        print_by_rows(given, calls_of, "weights", "row")


if __name__ == "__main__":
    main()
