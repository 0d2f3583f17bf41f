"""Language models with a mask token draft all depths in one forward (PARD)."""

from __future__ import annotations

import json

import pytest
import torch
from conftest import VOCAB, make_target
from family_helpers import near
from lm_helpers import padded, tiny, with_fixed
from oracles import pard_parity

from hf_hsdraft import AutoDrafter, CausalLMDrafter
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call

MASK, DEPTH = 3, 4
KINDS = {
    "plain": lambda target: near(target),
    "sliding": lambda target: tiny("gemma3_text"),
    "chains": lambda target: tiny("gptj"),
}


@pytest.fixture(scope="module")
def target():
    return make_target()


def pard(model, **options):
    model.config.pard_token = MASK
    return with_fixed(CausalLMDrafter(model.eval()), num_assistant_tokens=DEPTH, **options)


@torch.no_grad()
def expected(model, text, vocabulary, depth=DEPTH):
    """Log-probabilities of each depth by a plain forward over the text and mask tokens."""
    logits = model(torch.tensor([[*text, *[MASK] * (depth - 1)]]), use_cache=False).logits[0, -depth:, :vocabulary]
    return logits.log_softmax(dim=-1)


@pytest.mark.parametrize("kind", KINDS)
def test_each_depth_has_the_probabilities_of_a_plain_forward(target, kind):
    """For rows of different lengths that go on by different numbers of tokens, with different depths."""
    drafter, found = pard(KINDS[kind](target)), {}
    rows = 3
    session = drafter.session(Call(target, rows, DraftOptions.of(drafter)))

    def note(at, expansion):
        log_probs = torch.cat(
            [expansion(level, torch.tensor([[1]] * len(at)), None)[0] for level in range(1, DEPTH + 1)], 1
        )
        found.update(zip(at, log_probs, strict=True))

    session.on_expansion = note
    vocabulary = min(VOCAB, drafter.model.config.vocab_size)
    texts = [list(range(1, 9)), list(range(4, 7)), list(range(2, 14))]
    depths = {0: DEPTH, 1: 2, 2: DEPTH}
    for news in ([[], [], []], [[5, 6], [7], []], [[8], [], [9, 10, 11, 12]]):
        for row, new in enumerate(news):
            texts[row] += new
            session.observe([Accepted.of_tokens(row, new or texts[row] if not found else new)])
        found.clear()
        session.draft([Ask(row, texts[row][-1], depth, 16) for row, depth in depths.items()])
        for row, depth in depths.items():
            right = expected(drafter.model, texts[row], vocabulary, depth)
            torch.testing.assert_close(found[row][:depth], right, atol=1e-4, rtol=1e-4)


def test_drafts_of_a_call_are_those_of_plain_forwards():
    found = pard_parity.parity(pard_parity.CASES[0])
    assert found.difference < 1e-4 and found.rounds > 20


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "do_sample"), [(1, False), (1, True), (3, False)])
def test_texts_are_the_targets_own(target, kind, rows, do_sample):
    call = {**padded(rows), "max_new_tokens": 12, "do_sample": do_sample}
    torch.manual_seed(7)
    plain = target.generate(**call)
    for options in ({"beam_width": 1}, {"beam_width": 4, "tree_size": 12}):
        drafter = pard(KINDS[kind](target), **options)
        torch.manual_seed(7)
        assert torch.equal(target.generate(**call, assistant_model=drafter), plain)


def test_a_draft_is_one_forward(target):
    drafter, forwards = pard(near(target)), []
    session = drafter.session(Call(target, 1, DraftOptions.of(drafter)))  # tries the model once
    drafter.model.model.register_forward_hook(lambda *_: forwards.append(1))
    session.observe([Accepted.of_tokens(0, [1, 2, 3])])
    [tree] = session.draft([Ask(0, 3, DEPTH, 16)])
    assert len(forwards) == 1 and len(tree.tokens) > DEPTH


def test_a_folder_with_a_mask_token_is_such_a_drafter(target, tmp_path):
    drafter = pard(near(target))
    drafter.save_pretrained(tmp_path)
    again = AutoDrafter.from_pretrained(tmp_path)
    assert again.mask_token_id == MASK
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pard_token": VOCAB}))
    with pytest.raises(ValueError, match=f"pard_token={VOCAB} .*expected a token id below vocab_size={VOCAB}"):
        AutoDrafter.from_pretrained(tmp_path)
