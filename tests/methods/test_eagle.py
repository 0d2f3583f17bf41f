"""EAGLE-3 drafters: their network, session and configuration. `test_family_contract` has what all families promise."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, as_plain, make_target
from family_helpers import assert_same_tree, drafts, make_eagle, session_of
from oracles.scripted import ScriptedDrafter
from session_helpers import news, padded
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from hf_hsdraft import AutoDrafter, EagleConfig, EagleDrafter
from hf_hsdraft.methods.eagle import drafter as session_module
from hf_hsdraft.methods.published.context import RowContext

TEXT = list(range(5, 15))


@pytest.fixture(scope="module")
def target():
    return make_target(num_hidden_layers=8)


def test_right_drafts_are_accepted(target):
    """A drafter that knows the text: what it says is written over, all else is as ever."""
    drafter, ids = make_eagle(target), padded(1)["input_ids"]
    plain = target.generate(ids, max_new_tokens=40, do_sample=False)
    scripted = ScriptedDrafter(drafter, [plain[0, 12:].tolist()], 0)
    assert as_plain(target, scripted, ids, max_new_tokens=40).statistics.tau > 1.2


def test_long_prompts_are_read_in_blocks(target, monkeypatch, tuned):
    drafter = make_eagle(target, num_hidden_layers=2, windows=(None, None))
    text = torch.randint(5, VOCAB, (151,), generator=torch.Generator().manual_seed(0)).tolist()
    whole, blocks = (session_of(drafter, target) for _ in range(2))
    for session in (whole, blocks):
        session.observe([news(drafter, target, text, 0, 150)])
    expected = drafts(whole, {0: text[-1]})[0]
    sizes, attention = [], session_module.batched_attention

    def noting(queries, keys, values, seen=None):
        sizes.append(queries.shape[1] * keys.shape[2])
        return attention(queries, keys, values, seen)

    monkeypatch.setattr(session_module, "batched_attention", noting)
    tuned(mask_rows=16)
    assert_same_tree(expected, drafts(blocks, {0: text[-1]})[0])
    assert max(sizes) <= 16 * 150


def test_embeddings_of_another_width_are_left_out(target):
    layer = EagleConfig.for_target(target).sizes
    small = type(layer)(**{**vars(layer), "hidden_size": 16})
    drafter = make_eagle(target, sizes=small, own_embedding=True)
    embeds = target.get_input_embeddings()(padded(1)["input_ids"]).detach()
    as_plain(target, drafter, {"inputs_embeds": embeds}, max_new_tokens=12)


def test_the_head_is_multiplied_for_expanded_nodes_only(target):
    drafter, rows = make_eagle(target), []
    drafter.lm_head.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[:-1].numel()))
    session = session_of(drafter, target)
    session.observe([news(drafter, target, TEXT, 0, 9)])
    drafts(session, {0: TEXT[-1]})
    assert rows == [1, 5, 5, 5]


def test_training_without_the_paths_embeddings_is_an_error(target):
    told = news(make_eagle(target), target, TEXT, 0, 9)
    with pytest.raises(ValueError, match="path_embeds=None is invalid with 4 draft steps"):
        make_eagle(target)(told.taps, torch.zeros(9, 32), told.positions)


def test_a_fresh_drafter_is_like_a_layer_of_its_target(target, tmp_path):
    config = EagleConfig.for_target(target, num_draft_steps=5, draft_vocab_ids=[3, 5, 9])
    assert (config.target_tap_layers, config.draft_vocab_size, config.num_draft_steps) == ((2, 4, 5), 3, 5)
    assert config.sizes.num_key_value_heads == target.config.num_key_value_heads
    drafter = EagleDrafter(config)
    drafter.save_pretrained(tmp_path)
    assert AutoDrafter.from_pretrained(tmp_path).draft_vocab_ids().tolist() == [3, 5, 9]
    for fields, message in (
        ({"draft_vocab_ids": [3, 3]}, "draft_vocab_ids"),
        ({"draft_vocab_size": VOCAB + 1}, f"draft_vocab_size={VOCAB + 1} is invalid: the target has only"),
        ({"target_tap_layers": [4, 2]}, r"target_tap_layers=\[4, 2\] is invalid: expected ascending"),
        ({"num_draft_steps": 0}, "num_draft_steps=0 is invalid"),
        ({"windows": (3,)}, r"windows=\(3,\) is invalid"),
        ({"rope": {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}}, "rope=.* is invalid"),
    ):
        with pytest.raises(ValueError, match=message):
            EagleDrafter(EagleConfig.for_target(target, **fields))


@pytest.mark.parametrize("hooked", [False, True])
def test_rows_are_borrowed_without_the_factor_of_the_target(target, hooked):
    """As the projects train them: on a copy of the table."""
    embedding, tokens = Gemma3TextScaledWordEmbedding(VOCAB, 32, 0, embed_scale=7.0), torch.tensor([[3, 9]])
    if hooked:  # as an offloaded module
        embedding.register_forward_hook(lambda *_: None)
    found = make_eagle(target).borrow(embedding).embed(tokens)
    torch.testing.assert_close(found, embedding.weight.detach()[tokens])


def test_what_texts_see_is_told_without_waiting_for_a_device():
    """A tensor on the meta device has no values that could be waited for."""
    device = torch.device("meta")
    context = RowContext(1, 1, device)
    context.reserve({0: 3}, torch.arange(3))
    assert context.seen([0], torch.tensor([[5]], device=device)).shape == (1, 1, 3)
