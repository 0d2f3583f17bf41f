"""Milliseconds of all products of a forward, for weights of 16, 8 and 4 bits, by number of rows, in one table.

    python benchmarks/small_products.py [--rows 1,9,17,25] [--dtype bfloat16] [--shapes llama]

The weights are random, in SmolLM2-135M's shapes, or in those of four of Llama-3.2-1B's layers: queries, keys and values
in one product, gate and up in one, and the head. K-quants have blocks of 256 weights, which only the latter fill. Each
way multiplies by all of them in turn, so each weight comes from memory; the ways alternate, and the table has medians.
"As it lies" is what transformers multiplies by. ATen's products by small weights round no inputs either. `--only`
takes the beginnings of ways' names. Needs an idle machine.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from runner import counts, dtype_of, names, options, print_by_rows

if TYPE_CHECKING:
    import torch

SHAPES = {
    "smollm2": [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)],
    "llama": [(3072, 2048), (2048, 2048), (16384, 2048), (2048, 8192)] * 4 + [(128256, 2048)],
}
_KINDS = {"smollm2": ("Q8_0", "Q4_1"), "llama": ("Q8_0", "Q4_1", "Q4_K", "Q5_K", "Q6_K")}
_GROUP = 32  # weights of a block


def ways(dtype: torch.dtype, name: str) -> dict[str, list[Callable[[torch.Tensor], Any]]]:
    """Returns the products of each way, by its name."""
    import torch

    from hf_hsdraft.cpu.private_operators import packed_copy
    from hf_hsdraft.cpu.small_weights import KERNEL, in_int8

    shapes = SHAPES[name]
    numbers = [torch.randint(-128, 128, shape, dtype=torch.int8) for shape in shapes]
    scales = [torch.rand(rows) * 1e-3 for rows, _ in shapes]
    groups = [torch.rand(rows, inputs // _GROUP) * 1e-3 for rows, inputs in shapes]
    plain, kind = [each.to(dtype) for each in numbers], str(dtype).removeprefix("torch.")
    found: dict[str, list[Callable[[torch.Tensor], Any]]] = {
        f"{kind} as it lies": [functools.partial(torch.nn.functional.linear, weight=each) for each in plain],
        f"packed {kind}": [functools.partial(_packed, packed_copy(each, 16)) for each in plain],
    }
    operators = KERNEL.operators(wait=True)
    if operators is not None:
        made = {
            "int8": [in_int8(operators, *each) for each in zip(numbers, scales, strict=True)],
            **{each: [_in_blocks(operators, each, *shape, dtype) for shape in shapes] for each in _KINDS[name]},
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


def _in_blocks(operators: Any, kind: str, outputs: int, inputs: int, dtype: Any) -> Any:
    """A copy of blocks that are zero but for their scales; the time does not depend on the weights."""
    import gguf
    import torch

    from hf_hsdraft.cpu.small_weights import in_blocks

    size, of_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = torch.zeros(outputs, inputs // size * of_bytes, dtype=torch.uint8)
    return in_blocks(operators, kind, raw, torch.zeros(outputs, inputs, dtype=dtype))


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
    parser.add_argument("--shapes", choices=SHAPES, default="smollm2", help="default: smollm2")
    parser.add_argument("--only", type=names, default=[""], help="comma-separated beginnings of names of the table")
    given = parser.parse_args(arguments)
    import torch

    dtype = dtype_of(given)
    with torch.no_grad():
        made = ways(dtype, given.shapes)

        def calls_of(rows: int) -> dict[str, Callable[[], float]]:
            inputs = [torch.randn(rows, inputs).to(dtype) for _, inputs in SHAPES[given.shapes]]
            wanted = {name: products for name, products in made.items() if name.startswith(tuple(given.only))}
            return {name: functools.partial(milliseconds, products, inputs) for name, products in wanted.items()}

        print_by_rows(given, calls_of, "weights", "row")


if __name__ == "__main__":
    main()
