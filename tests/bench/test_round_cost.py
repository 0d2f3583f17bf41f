"""`benchmarks/round_cost.py`: what it counts, and the limit of a round's operators."""

from __future__ import annotations

import json

import pytest
import round_cost
import torch
from conftest import make_drafter, make_target
from oracles.forced_drafter import ForcedDrafter, let_count

from hf_hsdraft.core.tuning import LIKELY_COLUMNS
from hf_hsdraft.cpu.small_weights import KERNEL


def test_a_round_runs_few_operators_beyond_a_plain_step():
    """In float32: a draft of depth 6, 24 nodes, and the move of a path that is not in order, in all layers."""
    torch.manual_seed(0)
    target = let_count(make_target(hidden_size=128, num_hidden_layers=30, vocab_size=2 * LIKELY_COLUMNS))
    sizes = {"injector_rank": 64, "injector_hidden_size": 64}  # which the kernel's operators take
    drafter = make_drafter(target, num_draft_steps=6, tree_size=24, draft_vocab_size=None, **sizes)
    forced = ForcedDrafter(drafter, [3])
    forced.generation_config.compiled_layers = False
    ids = torch.arange(1, 9)[None]
    costs = round_cost.costs_of(target, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, {"forced": forced})
    draft, whole = (580, 830) if KERNEL.operators(wait=True) is None else (50, 300)
    assert costs["draft, forced"].operators <= draft and costs["rest, forced"].operators <= 150
    assert costs["round, forced"].operators - costs["plain step"].operators <= whole


@pytest.mark.slow
def test_a_small_target_is_measured(tmp_path):
    out = tmp_path / "cost.json"
    round_cost.main(["--tiny", "--rows", "9", "--dtype", "float32", "--json", str(out)])
    step, draft, verify, rest, whole = json.loads(out.read_text())["rows"]
    assert [step["part"], whole["part"]] == ["plain step", "round, 9 rows"] and step["seconds"] > 0
    assert whole["operators"] == sum(part["operators"] for part in (draft, verify, rest))
    assert whole["beyond"] == whole["operators"] - step["operators"] > 0
