"""Without acceleration every text is the same: it makes forwards faster, and nothing else."""

import re
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import hf_hsdraft
from hf_hsdraft import HSDrafter
from hf_hsdraft.cpu import packed_weights, private_operators
from hf_hsdraft.cpu.products import Product
from hf_hsdraft.drafters.hidden_state.draft_session import HSDraftSession
from hf_hsdraft.runtime.target_runtime import Acceleration

PACKAGE = Path(hf_hsdraft.__file__).parent


def test_two_modules_of_the_runtime_know_of_acceleration():
    modules = [path for room in ("runtime", "engine") for path in (PACKAGE / room).glob("*.py")]
    asking = [path.stem for path in modules if re.search(r"^from \.\.(cpu|gpu)\.", path.read_text(), re.M)]
    assert sorted(asking) == ["target_loading", "target_runtime"]  # where it runs, and where files are known


def plain_session(drafter, call):
    """A session by the drafter's modules as they are."""
    weights = drafter.borrow(call.target.get_input_embeddings(), call.target.get_output_embeddings())
    return HSDraftSession(drafter, weights, call)


@pytest.fixture
def unaccelerated(monkeypatch):
    """The target's forwards as they are; whatever would pack, compile or round raises."""

    def forbidden(*args, **kwargs):
        raise AssertionError("something was accelerated")

    monkeypatch.setattr(Acceleration, "compile", lambda *_: None)
    monkeypatch.setattr(Acceleration, "begin", lambda *_: None)
    monkeypatch.setattr(
        Acceleration, "forward", lambda self, inputs, comes_again, model=None: (model or self._target)(**inputs)
    )
    monkeypatch.setattr(HSDrafter, "session", plain_session)
    monkeypatch.setattr(Product, "__init__", forbidden)
    monkeypatch.setattr(packed_weights.PackedWeight, "__call__", forbidden)
    for name in ("packed_product", "product_in_8_bits"):
        monkeypatch.setattr(private_operators, name, forbidden)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}], ids=["growing", "static"])
def test_without_acceleration_every_text_is_the_same(unaccelerated, monkeypatch, rows, do_sample, cache):
    target = make_target(seed=4)
    drafter = make_drafter(target)
    ids = torch.randint(5, VOCAB, (rows, 9), generator=torch.Generator().manual_seed(rows))
    sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def text(**kwargs):
        torch.manual_seed(1)
        return target.generate(ids, max_new_tokens=16, do_sample=do_sample, **cache, **kwargs).tolist()

    without = text(assistant_model=drafter)
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is sdpa
    monkeypatch.undo()
    assert text(assistant_model=drafter) == without
    if rows == 1 or not do_sample:  # rows of a sampled batch draw from generators of their own
        assert text() == without
