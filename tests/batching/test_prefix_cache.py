"""Prompts that begin alike are read once, and every text is still what it is alone."""

import random
from typing import Any

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target, model_of
from peft import LoraConfig, get_peft_model
from test_generate_many import alone, decoded_at_random, new_tokens

from hf_hsdraft import CachebackDrafter, CausalLMDrafter, generate_many
from hf_hsdraft.batching.scheduler import ContinuousBatching


def prompts(count: int, common: int, seed: int = 0) -> list[dict[str, Any]]:
    """Requests with a common beginning, some of it shared by some only, and ends of their own."""
    rng = random.Random(seed)
    first, second = ([rng.randrange(6, VOCAB) for _ in range(common)] for _ in range(2))
    found = []
    for index in range(count):
        ids = first + second[: rng.choice([0, common // 2, common])] + [6 + index, 40, 7]
        found.append({"input_ids": torch.tensor([ids]), "max_new_tokens": 12})
        if index % 3 == 1:
            found[-1] |= {"do_sample": True, "seed": index}
    return found


@pytest.mark.parametrize("kind", ["hidden_state", "n-grams", "language_model"])
@pytest.mark.parametrize("chunk_size", [5, 512])
def test_a_common_beginning_is_read_once(target: Any, kind: str, chunk_size: int) -> None:
    makers = {"hidden_state": make_drafter, "n-grams": lambda _: CachebackDrafter()}
    drafter = makers.get(kind, lambda _: CausalLMDrafter(make_target(seed=3)))(target)
    requests = prompts(9, 20)
    batching = ContinuousBatching(target, drafter, 3, chunk_size)
    done = decoded_at_random(batching, requests, 1)
    for index, options in enumerate(requests):
        assert done[index].error is None
        assert new_tokens(done[index].output, options) == new_tokens(alone(target, options), options)
    assert done[0].reused_tokens == 0 and all(done[index].reused_tokens >= 20 for index in range(1, 9))
    assert batching.reused_tokens == sum(each.reused_tokens for each in done.values())


def test_drafts_are_as_good_as_without(chatty: Any) -> None:
    requests = prompts(6, 30)
    accepted = []
    for tokens in (0, 4096):
        drafter = make_drafter(chatty, draft_vocab_size=VOCAB)
        drafter.generation_config.tree_sizing = "fixed"
        batching = ContinuousBatching(chatty, drafter, 2, prefix_cache_tokens=tokens)
        for each in requests:
            batching.submit({name: value for name, value in each.items() if name in ("input_ids", "max_new_tokens")})
        done = {}
        while batching.busy:
            done.update({each.index: each for each in batching.step()})
        accepted.append([done[index].statistics.accepted_lengths for index in range(6)])
        assert bool(batching.reused_tokens) == bool(tokens)
    assert accepted[0] == accepted[1]


def test_as_much_is_held_as_permitted_and_what_is_used_stays(target: Any) -> None:
    batching = ContinuousBatching(target, CachebackDrafter(), 1, prefix_cache_tokens=100)
    common = list(range(10, 40))
    reused = []
    for index in range(12):
        batching.submit({"input_ids": torch.tensor([[*common, *range(40 + index, 70 + index)]]), "max_new_tokens": 2})
        while batching.busy:
            reused += [each.reused_tokens for each in batching.step()]
            assert batching._prefixes.size <= 100
    assert reused == [0] + [30] * 11
    batching.submit({"input_ids": torch.full((1, 150), 8), "max_new_tokens": 2})
    batching.submit({"input_ids": torch.full((1, 150), 8), "max_new_tokens": 2})
    while batching.busy:
        assert all(each.reused_tokens == 0 and each.error is None for each in batching.step())


@pytest.mark.parametrize("model_type", ["gpt2", "qwen3", "mistral"])
def test_other_architectures(model_type: str) -> None:
    fields = {"intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    own = {"n_embd": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
    more = own if model_type == "gpt2" else {**fields, "head_dim": 8, "initializer_range": 0.3, "sliding_window": 8}
    target = model_of(model_type, **more)
    requests = prompts(5, 24, seed=2)
    for done in generate_many(target, requests, CachebackDrafter(), max_batch_size=2):
        options = requests[done.index]
        assert new_tokens(done.output, options) == new_tokens(alone(target, options), options)
        assert (done.reused_tokens > 0) == (done.index > 0 and model_type != "mistral")


def test_a_text_decoded_alone_after_its_prompt_was_read_is_plain() -> None:
    target = make_target(max_position_embeddings=32)
    ids = torch.randint(6, VOCAB, (1, 30), generator=torch.Generator().manual_seed(2))
    batching = ContinuousBatching(target, make_drafter(target))
    batching.submit({"input_ids": ids, "max_new_tokens": 2})
    [done] = [each for _ in range(2) for each in batching.step()]
    assert batching.alone and done.output.tolist() == target.generate(ids, max_new_tokens=2).tolist()


def test_what_an_adapter_computed_is_not_reused_by_another() -> None:
    target = make_target()
    config = {"r": 4, "target_modules": ["q_proj", "k_proj", "v_proj"], "init_lora_weights": False}
    model = get_peft_model(target, LoraConfig(**config), adapter_name="a").eval()
    model.add_adapter("b", LoraConfig(**config, lora_alpha=64))
    texts = [[*range(6, 46), last] for last in (7, 9, 8)]
    for index, done in enumerate(generate_many(target, texts, CachebackDrafter(), max_batch_size=1, max_new_tokens=25)):
        model.set_adapter("b" if index else "a")
        assert done.error is None
        assert torch.equal(done.output, target.generate(torch.tensor([texts[index]]), max_new_tokens=25))
        assert bool(done.reused_tokens) == (index == 2)
        model.set_adapter("b")


def test_closing_frees_what_prompts_left(target: Any) -> None:
    batching = ContinuousBatching(target, CachebackDrafter(), 2)
    decoded_at_random(batching, prompts(2, 20), 1)
    batching.close()
    again = decoded_at_random(batching, prompts(1, 20), 1)
    assert all(each.reused_tokens == 0 for each in again.values())
