"""Managers of transformers' continuous batching: with an attached drafter their texts are those of `generate()`."""

import contextlib
from typing import Any

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from transformers import ContinuousBatchingConfig, GenerationConfig

from hf_hsdraft import CachebackDrafter, attach, detach

GREEDY = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": -1}
PROMPTS = [
    torch.randint(6, VOCAB, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (3, 40, 7, 12, 5)
]


ROOM = {"page_size": 32, "num_blocks": 8, "max_batch_tokens": 64, "max_requests_per_batch": 4}


def plain(target: Any, prompt: list[int], **options: Any) -> list[int]:
    return target.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_generate_batch_drafts(attention: str) -> None:
    """With transformers' own outputs: names, prompts, texts and states; also from a manager that stays."""
    target = make_target(attention)
    texts = [plain(target, prompt, **GREEDY) for prompt in PROMPTS]
    config = GenerationConfig(**GREEDY)
    with attach(target, make_drafter(target)) as attachment:
        found = target.generate_batch(PROMPTS, config)
        failed = target.generate_batch([PROMPTS[0], []], config)
        kept = target.generate_batch(PROMPTS, config, persistent_manager=True, record_timestamps=True)
        total = attachment.statistics
    assert list(found) == [f"req_{index}" for index in range(5)]
    for each in (found, kept):
        assert [one.generated_tokens for one in each.values()] == texts
        assert [one.prompt_ids for one in each.values()] == PROMPTS and all(one.is_finished() for one in each.values())
    assert all(one.timestamps == sorted(one.timestamps) and len(one.timestamps) == 20 for one in kept.values())
    assert failed["req_1"].error and failed["req_0"].generated_tokens == texts[0]
    assert total.calls == 11 and total.stepped_aside == {} and total.accepted_tokens > 0
    assert total.target_forwards < total.row_forwards and target.config._attn_implementation == attention
    target.destroy_cached_continuous_batching_manager()


def test_draws_are_those_of_the_configuration_given() -> None:
    """Processors that `generate()` would add, as its 50 most probable tokens, or those of the model, are not added."""
    target = make_target()
    target.generation_config.update(repetition_penalty=1.5, top_p=0.5)
    config = GenerationConfig(
        do_sample=True, temperature=0.9, max_new_tokens=12, num_return_sequences=3, eos_token_id=4
    )
    alike = {"do_sample": True, "temperature": 0.9, "max_new_tokens": 12, "eos_token_id": 4, "top_k": 0}
    alike |= {"top_p": 1.0, "repetition_penalty": 1.0}
    with attach(target, CachebackDrafter()) as attachment:
        found = target.generate_batch(PROMPTS[:2], config, ContinuousBatchingConfig(seed=7, max_requests_per_batch=2))
    assert list(found) == [f"req_{one}{end}" for one in (0, 1) for end in ("__child#0", "__child#1", "")]
    assert attachment.statistics.calls == 6 and not attachment.statistics.stepped_aside
    texts = []
    for seed in range(7, 13):
        torch.manual_seed(seed)
        texts.append(plain(target, sorted(PROMPTS[:2], reverse=True)[seed > 9], **alike))
    assert sorted(each.generated_tokens for each in found.values()) == sorted(texts)


def test_requests_are_streamed_cancelled_and_paused_for() -> None:
    target = make_target()
    text = plain(target, PROMPTS[1], **{**GREEDY, "max_new_tokens": 60})
    attachment = attach(target, make_drafter(target))
    manager = target.init_continuous_batching(GenerationConfig(**GREEDY))
    manager.start()
    try:
        name = manager.add_request(PROMPTS[1], max_new_tokens=60, streaming=True)
        parts = [manager.get_result(name, timeout=60).generated_tokens]
        with manager.pause():
            assert torch.isfinite(target(torch.tensor([PROMPTS[0]])).logits).all()
        while len(parts[-1]) < 60:
            parts.append(manager.get_result(name, timeout=60).generated_tokens)
        cancelled = manager.add_request(PROMPTS[0], max_new_tokens=400, streaming=True)
        assert manager.get_result(cancelled, timeout=60).generated_tokens
        manager.cancel_request(cancelled)
        last = manager.add_request(PROMPTS[2])
        results = []
        while not results or results[-1].request_id != last:
            results.append(manager.get_result(timeout=60))
    finally:
        manager.stop(block=True)
    assert len(parts) > 2 and all(text[: len(part)] == part for part in parts) and parts[-1] == text
    assert len(results[-2].generated_tokens if len(results) > 1 else []) < 400
    assert results[-1].generated_tokens == plain(target, PROMPTS[2], **GREEDY)
    assert attachment.statistics.accepted_tokens > 0 and not attachment.statistics.stepped_aside
    detach(target)


@pytest.mark.slow
def test_what_transformers_has_to_decode_is_counted_and_its_own() -> None:
    target = make_target()
    config = GenerationConfig(**{**GREEDY, "max_new_tokens": 4})
    asked = ContinuousBatchingConfig(**ROOM, return_logprobs=True)
    without = target.generate_batch(PROMPTS[:2], config, asked)
    with attach(target, make_drafter(target)) as attachment:
        found = target.generate_batch(PROMPTS[:2], config, asked)
    for name, each in without.items():
        assert found[name].generated_tokens == each.generated_tokens
        assert found[name].logprobs == pytest.approx(each.logprobs) and len(each.logprobs) == 4
    [(reason, count)] = attachment.statistics.stepped_aside.items()
    assert "log-probabilities" in reason and count == 1 and attachment.statistics.calls == 0


@pytest.mark.slow
def test_a_manager_drafts_from_when_something_is_attached_and_until_it_is_detached() -> None:
    target = make_target()
    config, sizes = GenerationConfig(**{**GREEDY, "max_new_tokens": 4}), ContinuousBatchingConfig(**ROOM)
    texts = [plain(target, prompt, **{**GREEDY, "max_new_tokens": 4}) for prompt in PROMPTS[:2]]
    calls = []
    for drafted in (False, True, False):
        with attach(target, make_drafter(target)) if drafted else contextlib.nullcontext() as attachment:
            found = target.generate_batch(PROMPTS[:2], config, sizes, persistent_manager=True)
        assert [each.generated_tokens for each in found.values()] == texts
        calls.append(attachment.statistics.calls if drafted else None)
    assert calls == [None, 2, None]
    target.destroy_cached_continuous_batching_manager()
