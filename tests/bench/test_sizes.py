"""`benchmarks/sizes.py`: blocks as llama.cpp's own code reads them, and rounds that accept what was asked for."""

from __future__ import annotations

import json

import gguf
import pytest
import sizes
import torch

from hf_hsdraft.cpu.gguf_blocks import copy_of_blocks
from hf_hsdraft.cpu.small_weights import KERNEL


@pytest.mark.parametrize("kind", sizes.QUANTISED)
def test_blocks_hold_the_weights_that_are_multiplied_by(kind):
    weight = torch.randn(48, 512, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[0], weight[1, :32] = 0.0, 0.5
    blocks, held = sizes.QUANTISED[kind](weight)
    read = gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind])
    assert torch.equal(torch.from_numpy(read), held)
    assert (held - weight)[2:].abs().max() < {"Q8_0": 0.001, "Q4_K": 0.01}[kind]


def test_a_target_is_kept_and_known_by_the_blocks_of_its_file(tmp_path):
    with torch.no_grad():
        made, kept = (sizes.target_of("tiny", "Q4_K", tmp_path) for _ in range(2))
        assert torch.equal(made(torch.tensor([[5, 6]])).logits, kept(torch.tensor([[5, 6]])).logits)
    copies = [copy_of_blocks(weight) for weight in sizes.products(kept).values()]
    operators = KERNEL.operators(wait=True)
    if operators is not None and operators.is_quick():
        formats = {copy.format for copy in copies if copy is not None}
        assert formats <= {3, 7} and copies[0] is not None, "4 bits with long scales, in pairs or in words"


@pytest.mark.slow
def test_every_way_of_a_small_target_is_in_the_table(tmp_path, capsys):
    out = tmp_path / "sizes.json"
    sizes.main(["--shapes", "tiny", "--weights", "bfloat16,Q4_K", "--repeats", "1", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["weights"] for row in rows] == ["bfloat16"] * 4 + ["Q4_K"] * 4
    for plain, packed, few, more in (rows[:4], rows[4:]):
        assert plain["tau"] == packed["tau"] == 1.0 < few["tau"] < more["tau"]
        assert plain["over plain"] == 1.0 and all(row["tokens/s"] > 0 for row in (packed, few, more))
    assert "| tiny | Q4_K | drafted, acceptance 0.8 |" in capsys.readouterr().out
