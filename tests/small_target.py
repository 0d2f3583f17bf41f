"""A target of so few tokens that the distribution of whole texts is known exactly."""

from __future__ import annotations

import itertools

import torch
from conftest import make_target

SMALL = 6  # tokens of the target


def small_target(**fields):
    """A target of six tokens."""
    target = make_target(vocab_size=SMALL, pad_token_id=None, bos_token_id=None, initializer_range=0.2, **fields)
    target.generation_config.pad_token_id = 0
    return target


def exact_distribution(target, prompt: torch.Tensor, temperature: float) -> torch.Tensor:
    """The probability of all texts of three tokens after a prompt, `[6, 6, 6]`."""
    texts = torch.tensor(list(itertools.product(range(SMALL), repeat=3)))
    with torch.no_grad():
        logits = target(torch.cat([prompt.expand(len(texts), -1), texts], dim=1)).logits[:, -4:-1] / temperature
    chosen = logits.double().log_softmax(-1).gather(2, texts[..., None]).sum(dim=(1, 2))
    return chosen.exp().reshape(SMALL, SMALL, SMALL)
