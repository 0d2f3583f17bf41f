"""The comparison with vLLM: what it counts of `generate()`, against drafts that are counted by hand."""

from __future__ import annotations

import pytest
import torch
import vllm_parity
from conftest import make_target
from vllm_parity import all_columns, by_generate

from hf_hsdraft.drafters.lookup.cacheback import CachebackDrafter
from hf_hsdraft.drafters.lookup.ngrams import NgramCache

LENGTH, NEW = 3, 24


def greedy(target, prompt):
    """The most probable tokens after a prompt, each by a forward over the whole text."""
    text = list(prompt)
    with torch.no_grad():
        for _ in range(NEW):
            text.append(int(target(torch.tensor([text])).logits[0, -1].argmax()))
    return text[len(prompt) :]


def counted(prompt, tokens):
    """Chains that n-grams draft on the way to some tokens, and how many had their first, second, ... token accepted."""
    chains, accepted, place = 0, [0] * LENGTH, 1  # the prompt's own forward gives the first token
    while place < len(tokens):
        cache = NgramCache(4, vocab_size=97)
        cache.extend([*prompt, *tokens[:place]])
        depth = min(LENGTH, len(tokens) - place - 1)  # a chain ends where the text does
        draft = list(cache.draft(depth, depth, width=1).tokens[1:]) if depth else []
        right = 0
        while right < len(draft) and draft[right] == tokens[place + right]:
            accepted[right] += 1
            right += 1
        chains += bool(draft)
        place += right + 1
    return chains, accepted


def test_chains_of_generate_are_counted():
    target = make_target(initializer_range=0.1)  # its texts repeat themselves
    prompts = [[5, 6, 7, 5, 6, 7, 5], [9, 8, 9, 8, 9]]
    with all_columns():
        found = by_generate(target, CachebackDrafter(), prompts, NEW, LENGTH)
    expected = [greedy(target, prompt) for prompt in prompts]
    assert found.tokens == expected
    each = [counted(prompt, tokens) for prompt, tokens in zip(prompts, expected, strict=True)]
    assert found.chains == sum(chains for chains, _ in each) > 0
    assert found.accepted == [sum(column) for column in zip(*(accepted for _, accepted in each), strict=True)]
    assert found.accepted[0] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--at-once", "many"], "expected whole numbers"),
        (["--dtype", "float8"], "choose from float32, bfloat16, float16"),
        (["--dtype", "nn"], "choose from float32"),
        (["--num-speculative-tokens", "25"], "expected 1 to 24"),
    ],
)
def test_wrong_options_are_named_before_anything_is_loaded(monkeypatch, capsys, options, said):
    monkeypatch.setattr(vllm_parity, "loaded_target", lambda *_: pytest.fail("a target was loaded"))
    with pytest.raises((SystemExit, ValueError)) as ended:
        vllm_parity.main(["--vllm-python", "python", "--prompts", "none.jsonl", "--drafter", "ngrams", *options])
    assert said in f"{capsys.readouterr().err} {ended.value}".replace("'", "")
