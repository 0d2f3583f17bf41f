"""All options that are accepted together draft without an error."""

import itertools

import pytest
import torch
from conftest import make_drafter, make_target

from hf_hsdraft import CachebackDrafter
from hf_hsdraft.drafters.base.draft_options import DraftOptions

VALUES = {
    "tree_size": (1, 24),
    "beam_width": (1, 4),
    "num_assistant_tokens": (4,),
    "ngram_length": (4,),
    "ngram_continuation": (0, 3, 8),
    "tree_builder": ("beam", "gumbel"),
}


@pytest.mark.parametrize("family", ["ngrams", "hidden states"])
def test_accepted_options_never_fail_in_a_text(family):
    target, tried = make_target(), 0
    ids = torch.tensor([[5, 6, 7, 8, 5, 6, 7, 8, 5, 6]])
    for number, values in enumerate(itertools.product(*VALUES.values())):
        drafter = CachebackDrafter() if family == "ngrams" else make_drafter(target)
        drafter.generation_config.tree_sizing = "fixed"
        for name, value in zip(VALUES, values, strict=True):
            setattr(drafter.generation_config, name, value)
        try:
            DraftOptions.of(drafter)
        except ValueError:
            continue
        tried += 1
        rows = ids.expand((1, 8)[number % 2], -1)
        call = {"attention_mask": torch.ones_like(rows), "do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
        target.generate(rows, **call, assistant_model=drafter)
    assert tried > 10
