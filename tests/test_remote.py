"""Drafts here, verification there: the same texts as plain `generate()`, whoever drafts, whatever happens to the link."""

from __future__ import annotations

import threading

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

from hf_hsdraft import CachebackDrafter, CausalLMDrafter
from hf_hsdraft.bench.scripted import ScriptedDrafter
from hf_hsdraft.remote.remote_model import connect
from hf_hsdraft.remote.sessions import ServerLimits
from hf_hsdraft.remote.verify_server import VerifyServer, in_background


def prompts(count: int, seed: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 30, (count,), generator=generator).tolist()
    return [torch.randint(2, VOCAB, (1, length), generator=generator) for length in lengths]


def plain(target, ids: torch.Tensor, seed: int = 0, **options) -> torch.Tensor:
    torch.manual_seed(seed)
    return target.generate(ids, attention_mask=torch.ones_like(ids), **options)


@pytest.fixture(scope="module")
def served(target):
    limits = ServerLimits(max_length=256, piece=8, wait_seconds=0.02)
    server = VerifyServer(target, name="tiny", limits=limits)
    with in_background(server) as port:
        yield server, f"http://127.0.0.1:{port}"


@pytest.fixture
def model(served, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_hsdraft.remote.weight_tables.HF_HOME", str(tmp_path))
    with connect(served[1]) as model:
        yield model


def drafters(target):
    texts = [plain(target, ids, max_new_tokens=40, do_sample=False)[0].tolist() for ids in prompts(3)]
    return {
        "hidden states": make_drafter(target),
        "n-grams": CachebackDrafter(),
        "small model": CausalLMDrafter(make_target(seed=4)),
        "scripted": ScriptedDrafter(make_drafter(target), texts),
        "none": None,
    }


@pytest.mark.parametrize("kind", ["hidden states", "n-grams", "small model", "scripted", "none"])
def test_greedy_texts_are_those_of_plain_decoding(target, model, kind: str) -> None:
    drafter = drafters(target)[kind]
    for ids in prompts(3):
        expected = plain(target, ids, max_new_tokens=40, do_sample=False)
        found = model.generate(ids, assistant_model=drafter, max_new_tokens=40, do_sample=False)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["hidden states", "n-grams", "none"])
def test_sampled_texts_are_those_of_the_same_seed(target, model, kind: str) -> None:
    drafter = drafters(target)[kind]
    options = {"max_new_tokens": 40, "do_sample": True, "temperature": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    for seed, ids in enumerate(prompts(3)):
        found = model.generate(ids, assistant_model=drafter, seed=seed, **options)
        assert torch.equal(found, plain(target, ids, seed, **options))


def test_many_threads_share_forwards_and_no_text_feels_it(target, served, model) -> None:
    server, _ = served
    drafter, ids = CachebackDrafter(), prompts(8, seed=9)
    expected = [plain(target, one, max_new_tokens=30, do_sample=False) for one in ids]
    found: dict[int, torch.Tensor] = {}

    def decode(place: int) -> None:
        found[place] = model.generate(ids[place], assistant_model=drafter, max_new_tokens=30, do_sample=False)

    threads = [threading.Thread(target=decode, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[place], one) for place, one in enumerate(expected))
    assert max(server.status()["batches"]["sizes"]) > 1
    assert len(server.sessions) == 0
