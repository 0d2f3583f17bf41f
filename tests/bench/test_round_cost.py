"""`benchmarks/round_cost.py`: what it counts, and the law."""

from __future__ import annotations

import json

import pytest
import round_cost
import torch
from conftest import make_drafter, make_target
from round_cost import Cost, Machine


@pytest.fixture(scope="module")
def target():
    return make_target(num_hidden_layers=4, hidden_size=64, intermediate_size=256)


@pytest.fixture(scope="module")
def inputs():
    ids = torch.arange(1, 9)[None]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@pytest.fixture(scope="module")
def step(target, inputs):
    return round_cost.cost_of(target, inputs)["step"]


def test_a_step_reads_all_weights_once(target, step):
    """Of the embeddings one row; the keys and values of a short text are small beside them."""
    weights = sum(each.numel() for each in target.parameters()) - target.model.embed_tokens.weight.numel()
    assert 1.0 <= step.read_bytes / (4 * weights) < 1.2
    matrices = sum(each.numel() for each in target.parameters() if each.dim() > 1)
    products = 2 * (matrices - target.model.embed_tokens.weight.numel())
    assert 1.0 <= step.operations / products < 1.2
    assert 100 < step.operators < 400


@pytest.mark.slow
def test_a_round_reads_the_weights_once_for_all_its_rows(target, inputs, step):
    for rows, fixed in round_cost.drafters_of(target, make_drafter(target), [5, 9], packed=False):
        costs = round_cost.cost_of(target, inputs, fixed)
        assert costs.keys() == set(round_cost.PARTS)
        assert costs["verify"].read_bytes == pytest.approx(step.read_bytes, rel=0.2)
        assert costs["verify"].operations == pytest.approx(rows * step.operations, rel=0.2)


def test_the_law_adds_operators_bytes_and_operations():
    machine, cost = Machine(1e-5, 1e10, 1e12), Cost(100, 2e7, 4e9, 0.0)
    assert cost.predicted(machine) == pytest.approx(1e-3 + 2e-3 + 4e-3)
    more = Cost(150, 3e7, 6e9, 1.0)
    assert cost.with_layers(more, (2, 3), 32) == Cost(1600, 3.2e8, 6.4e10, 30.0)


@pytest.mark.slow
def test_a_small_target_is_measured_and_scaled(tmp_path):
    out = tmp_path / "cost.json"
    round_cost.main(["--tiny", "--targets", "8b", "--rows", "9", "--dtype", "float32", "--json", str(out)])
    report = json.loads(out.read_text())
    assert report["probes"].keys() == {"stored", "packed"} and report["probes"]["stored"]["bandwidth"] > 0
    parts = ["plain step", "round, 9 rows", "verify, 9 rows"]
    assert [row["part"] for row in report["rows"]] == parts * 2
    assert {row["target"] for row in report["rows"]} == {"8b, 2 layers", "8b, 4 layers, scaled"}
    few, many = report["rows"][0], report["rows"][3]
    assert many["operators"] > 1.5 * few["operators"] and few["seconds"] > 0
    assert all(row["left"] == pytest.approx(1 - row["limit"] / row["seconds"]) for row in report["rows"])
