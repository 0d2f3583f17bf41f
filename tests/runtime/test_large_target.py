"""What drafters take beside a large target, on a tiny one."""

import pytest
import torch
from large_target import TINY, at_full_depth, measure_drafter, random_target

from hf_hsdraft.training.families.trainable import TRAINABLE


@pytest.mark.parametrize("family", TRAINABLE)
def test_own_and_borrowed_weights_are_counted(family):
    target = random_target(TINY, 4, torch.float32)
    taken = measure_drafter(family, target, nodes=8)
    kind = TRAINABLE[family]
    drafter = kind.untrained(target, {"draft_vocab_size": TINY.vocab_size})
    assert taken.own == 4 * sum(parameter.numel() for parameter in drafter.parameters())
    head = 4 * TINY.vocab_size * TINY.hidden_size
    borrowed = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings()).head
    first = target.model.layers[: getattr(drafter.config, "draft_layers", 0)]  # which self-speculation drafts by
    layers = 4 * sum(parameter.numel() for parameter in first.parameters())
    assert taken.borrowed == layers + (0 if borrowed is None else head)
    assert taken.draft > 0.0


def test_all_layers_follow_from_two_depths():
    assert at_full_depth((0.5, 0.9), (2, 4), 36) == pytest.approx(0.5 + 0.2 * 34)
