"""What drafters of other projects share: how they are loaded and saved, and what calls learn of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import make_drafter, make_target

from hf_hsdraft import AutoDrafter, BlockDrafter, EagleConfig, EagleDrafter
from hf_hsdraft.drafters.draft_memory import DraftMemory
from hf_hsdraft.drafters.draft_options import DraftOptions
from hf_hsdraft.drafters.protocol import DraftCall
from hf_hsdraft.training.trainable import can_be_trained


def block(target, **fields) -> BlockDrafter:
    return BlockDrafter.for_target(target, num_draft_steps=4, num_hidden_layers=2, markov_rank=4, **fields)


def eagle(target, **fields) -> EagleDrafter:
    return EagleDrafter(EagleConfig.for_target(target, **fields))


@pytest.mark.parametrize("make", [block, eagle])
def test_a_dtype_and_options_are_given_by_name(make, tmp_path):
    make(make_target()).save_pretrained(tmp_path)
    assert AutoDrafter.from_pretrained(tmp_path, dtype="auto").dtype == torch.float32
    drafter = AutoDrafter.from_pretrained(tmp_path, dtype="bfloat16", tree_size=9)
    assert drafter.dtype == torch.bfloat16 and drafter.generation_config.tree_size == 9
    with pytest.raises(ValueError, match="dtype='nine' is invalid"):
        AutoDrafter.from_pretrained(tmp_path, dtype="nine")
    with pytest.raises(TypeError, match="without tree_sise"):
        AutoDrafter.from_pretrained(tmp_path, tree_sise=9)
    with pytest.raises(ValueError, match="tree_size=0 is invalid"):
        AutoDrafter.from_pretrained(tmp_path, tree_size=0)


def test_what_the_format_of_speculators_cannot_say_is_not_written(tmp_path):
    """It takes the output of the last layer before the norm, transformers gives it after."""
    drafter = block(make_target(), target_tap_layers=[1, 3])
    drafter.config = replace(drafter.config, last_tap_is_normed=True)
    with pytest.raises(ValueError, match="last layer after its norm"):
        drafter.save_pretrained(tmp_path / "drafter")
    assert not (tmp_path / "drafter" / "config.json").exists()


def test_costs_of_one_kind_are_no_costs_of_another():
    target = make_target()
    parallel = replace(EagleConfig.for_target(target), mask_token_id=3)
    drafters = [eagle(target), EagleDrafter(parallel), block(target), block(target, markov_head_type="gated")]
    kinds = {each.session(DraftCall(target, 1, DraftOptions.of(each))).kind for each in drafters}
    assert len(kinds) == len(drafters)


def test_drafters_that_can_only_draft_are_known():
    target = make_target()
    assert can_be_trained(make_drafter(target)) and can_be_trained(block(target)) and can_be_trained(eagle(target))
    assert not can_be_trained(block(target, markov_head_type="rnn", sample_from_anchor=False))


def test_a_memory_does_not_fit_a_drafter_of_another_dtype():
    drafter = make_drafter(make_target())
    memory = DraftMemory.of(drafter, 5, None, ())
    assert memory.fits(drafter, 5)
    assert not memory.fits(drafter.to(torch.bfloat16), 5)


@pytest.mark.parametrize("make", [block, eagle])
def test_a_saved_drafter_names_no_path_of_this_machine(make, tmp_path):
    drafter = make(make_target(), target_name="/home/somebody/models/a-target")
    drafter.save_pretrained(tmp_path)
    for name in ("config.json", "README.md"):
        text = (tmp_path / name).read_text()
        assert "a-target" in text and "somebody" not in text
