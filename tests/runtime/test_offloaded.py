"""Targets that accelerate offloads, whole or in part: every family drafts for them, with plain decoding's text."""

import copy

import accelerate
import pytest
import torch
from conftest import make_drafter, make_target
from family_helpers import make_block_drafter, make_eagle
from lm_helpers import layered_target, steered, with_fixed
from session_helpers import padded
from test_cascade import cascade_of
from test_self_speculation import make_self
from test_specformer import make_specformer
from test_targets import PackedLinear

from hf_hsdraft import CachebackDrafter, CausalLMDrafter, LayerSkipDrafter, attach
from hf_hsdraft.core.tensors import device_of, hooks_of
from hf_hsdraft.drafters.hidden_state.target_match import measure_match
from hf_hsdraft.generate.by_name import drafter_of
from hf_hsdraft.methods.layer_skip.layer_skip import drafting_part

CPU, CALL = torch.device("cpu"), {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
HOW = ["memory", "disk", "embedding"]  # all weights, and the embedding alone
FAMILIES = {
    "hidden states": make_drafter,
    "part of the vocabulary": lambda target: make_drafter(target, draft_vocab_size=40),
    "n-grams": lambda target: CachebackDrafter(),
    "block": make_block_drafter,
    "EAGLE": make_eagle,
    "P-EAGLE": lambda target: make_eagle(target, mask_token_id=3, own_embedding=True),
    "SpecFormer": make_specformer,
    "language model": lambda target: CausalLMDrafter(copy.deepcopy(target)),
    "steered": steered,
    "cascade": lambda target: cascade_of(target, "states"),
    "skipped layers": lambda target: LayerSkipDrafter.for_target(target, [1, 3]),
}


def offloaded(target, how: str, folder):
    if how == "memory":
        return accelerate.cpu_offload(target, CPU)
    if how == "disk":
        return accelerate.disk_offload(target, str(folder), CPU)
    places = {"model.embed_tokens": "disk", "model.layers": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
    places |= {"lm_head": "disk"}
    return accelerate.dispatch_model(target, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)


@pytest.fixture(scope="module")
def as_it_was():
    """What the offloaded targets of the next test were before; and its texts of one row and of three."""
    target = layered_target()
    return target, [target.generate(**padded(rows), **CALL).tolist() for rows in (1, 3)]


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory):
    return offloaded(layered_target(), "memory", tmp_path_factory.mktemp("weights"))


@pytest.mark.parametrize(
    ("family", "how"), [*((family, "memory") for family in FAMILIES), *(("hidden states", how) for how in HOW[1:])]
)
def test_the_text_is_that_of_plain_decoding(family, how, as_it_was, in_memory, tmp_path):
    before, expected = as_it_was
    drafter = FAMILIES[family](before)
    target = in_memory if how == "memory" else offloaded(layered_target(), how, tmp_path)
    assert target.device.type == "meta" and device_of(target) == CPU
    drafted = target.generate(**padded(1), **CALL, assistant_model=drafter, return_dict_in_generate=True)
    assert drafted.sequences.tolist() == expected[0] and drafted.statistics.drafted_nodes
    with attach(target, drafter) as attachment:
        assert target.generate(**padded(3), **CALL).tolist() == expected[1]
    assert attachment.statistics.calls == 1


def test_layers_that_accelerate_has_hooked_cannot_be_taken_apart(tmp_path):
    target = layered_target()
    drafter, target = make_self(target), offloaded(target, "memory", tmp_path)
    with pytest.raises(ValueError, match="hooks of accelerate"):
        target.generate(**padded(1), **CALL, assistant_model=drafter)
    with pytest.raises(ValueError, match="hooks of accelerate"):
        attach(target, drafter)


def test_an_offloaded_language_model_drafts_what_it_drafts_otherwise(tmp_path):
    target = make_target()
    expected = target.generate(**padded(3), **CALL).tolist()
    models = copy.deepcopy(target), offloaded(copy.deepcopy(target), "memory", tmp_path)
    drafters = [with_fixed(CausalLMDrafter(model)) for model in models]
    assert drafters[1].device == CPU
    calls = [
        target.generate(**padded(3), **CALL, assistant_model=drafter, return_dict_in_generate=True)
        for drafter in drafters
    ]
    assert [call.sequences.tolist() for call in calls] == [expected] * 2
    assert calls[0].statistics.accepted_lengths == calls[1].statistics.accepted_lengths


@pytest.mark.parametrize("how", HOW)
def test_output_rows_of_an_offloaded_quantised_head(how, tmp_path):
    target = make_target()
    target.lm_head = PackedLinear(target.lm_head, "qweight")
    drafter = make_drafter(target, draft_vocab_size=40)
    rows = target.lm_head.unpacked().detach().clone()
    expected = target.generate(**padded(1), **CALL).tolist()
    target = offloaded(target, how, tmp_path)
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    torch.testing.assert_close(weights.head, rows[weights.vocab_ids], atol=1e-5, rtol=1e-5)
    assert target.generate(**padded(1), **CALL, assistant_model=drafter).tolist() == expected


def test_a_part_of_an_offloaded_target_shares_its_weights(tmp_path):
    target = offloaded(layered_target(), "memory", tmp_path)
    part = drafting_part(target, LayerSkipDrafter.for_target(target, [1, 3]).config)
    held, shared = ({id(hook.weights_map) for hook in hooks_of(model) if hook.offload} for model in (target, part))
    assert shared < held


def test_a_drafter_that_a_call_names_follows_to_where_the_target_computes(tmp_path):
    target = make_target()
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    target = offloaded(target, "memory", tmp_path).double()
    drafter = drafter_of(target, tmp_path / "drafter")
    assert (drafter.device, drafter.dtype) == (CPU, torch.float64)


def test_whether_a_drafter_fits_an_offloaded_target_is_measured(tmp_path):
    target = make_target()
    drafter, text = make_drafter(target), padded(1)["input_ids"][0].tolist()
    expected = measure_match(target, drafter, text, 4)
    assert measure_match(offloaded(target, "disk", tmp_path), drafter, text, 4) == expected
