"""Parity of language models with a mask token (PARD) with a plain forward over the text and masks."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache

import torch

from hf_hsdraft.drafters.base.auto_drafter import AutoDrafter
from oracles.assistant_parity import _Noting
from oracles.format_parity import Case, Parity, Round, compared, texts_of, tiny_target

MASK, DEPTH = 3, 4
_target = cache(tiny_target)


def parity(case: Case) -> Parity:
    """Compares the drafts of a call on a batch of padded prompts."""
    target, model = _target(), tiny_target(num_hidden_layers=2, intermediate_size=40)
    model.config.pard_token = MASK
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        drafter = AutoDrafter.from_pretrained(folder, dtype=torch.float32)
    noting = _Noting(drafter, num_assistant_tokens=DEPTH, tree_size=24, beam_width=3)
    texts, _ = texts_of(target, noting)

    def distance(each: Round, text: Sequence[int]) -> float:
        useful = len(text) - each.length - 1  # a row's draft may be shallower than the batch's, at its end empty
        if useful < 1:
            return 0.0
        path = [*text[each.length - 1 :], *[11] * DEPTH][: min(each.expansion.depth, useful)]
        ids = torch.tensor([[*text[: each.length], *[MASK] * (len(path) - 1)]])
        wanted = model(ids, use_cache=False).logits[0, -len(path) :].log_softmax(dim=-1)
        return float((each.log_probs(path) - wanted).abs().max())

    with torch.no_grad():
        return compared(case.name, type(model).__name__, noting.rounds, texts, distance)


CASES = (Case("PARD", tiny_target),)
