"""The options of a text, whoever shares its forwards, and after its server has lost it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

from oracles.remote_server import connected, in_background
from oracles.scripted import ScriptedDrafter
from test_remote import plain, prompts
from transformers import MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hf_hsdraft import CachebackDrafter
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.remote.connecting import connect
from hf_hsdraft.remote.link import Link, LinkLost
from hf_hsdraft.remote.remote_target import RemoteCall, RemoteTarget
from hf_hsdraft.remote.sessions import ServerLimits
from hf_hsdraft.remote.tree_reader import TreeReader
from hf_hsdraft.remote.verified_text import seeded
from hf_hsdraft.remote.verify_server import VerifyServer

ENDS = list(range(0, VOCAB, 9))
OPTIONS = [
    {"min_new_tokens": 12, "eos_token_id": ENDS},
    {"no_repeat_ngram_size": 2},
    {"begin_suppress_tokens": list(range(40))},
    {"forced_eos_token_id": 5},
    {"eos_token_id": ENDS},
]


class Losing:
    """A streamer that lets a server forget its texts after some rounds."""

    def __init__(self, server: VerifyServer, rounds: int = 4) -> None:
        self.server, self.left = server, rounds

    def put(self, value: torch.Tensor) -> None:
        self.left -= 1
        if self.left == 0:
            for each in self.server.sessions:
                self.server.sessions.remove(each)

    def end(self) -> None: ...


class Late:
    """A streamer that holds a device up for 20 ms after each round."""

    def put(self, value: torch.Tensor) -> None:
        time.sleep(0.02)

    def end(self) -> None: ...


@pytest.fixture(autouse=True)
def _rows_stay_here(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("hf_hsdraft.remote.weight_tables.HF_HOME", str(tmp_path))


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: next(iter(options)))
def test_options_hold_and_hold_on_when_a_text_is_opened_again(target, options, sample: bool) -> None:
    ids, limits = prompts(1, seed=17)[0], ServerLimits(max_length=256)
    options = {"max_new_tokens": 24, "do_sample": sample, "pad_token_id": 0, **options}
    expected = plain(target, ids, 3, **options)
    del options["pad_token_id"]
    drafter = ScriptedDrafter(make_drafter(target), [[*expected[0].tolist(), 7, 8]])
    server = VerifyServer(target, limits=limits)
    with connected(server) as model:
        for streamer in (None, Losing(server, 3)):
            output = model.generate(ids, drafter, seed=3, streamer=streamer, return_dict_in_generate=True, **options)
            assert torch.equal(output.sequences, expected)
        short = expected.shape[1] - ids.shape[1] < 6
        assert output.link.reopened == 1 or short


@pytest.mark.parametrize("sample", [False, True])
def test_a_drafter_of_hidden_states_goes_on_when_its_text_is_resumed_or_opened_again(
    target, monkeypatch, sample: bool
) -> None:
    ids, drafter, receive = prompts(1, seed=21)[0], make_drafter(target), Link.receive
    options = {"max_new_tokens": 40, "do_sample": sample}
    expected = plain(target, ids, 4, **options)
    server, told = VerifyServer(target, limits=ServerLimits(max_length=256, piece=8)), []

    def broken(self, *kinds):
        told.append(kinds)
        if len(told) == 8:  # in the middle of the text
            self.close()
            raise LinkLost("broken")
        return receive(self, *kinds)

    with connected(server) as model:
        lost = model.generate(ids, drafter, seed=4, streamer=Losing(server), return_dict_in_generate=True, **options)
        monkeypatch.setattr(Link, "receive", broken)
        cut = model.generate(ids, drafter, seed=4, return_dict_in_generate=True, **options)
    assert (lost.link.reopened, lost.link.resumed) == (1, 0)
    assert (cut.link.reopened, cut.link.resumed) == (0, 1)
    assert torch.equal(lost.sequences, expected) and torch.equal(cut.sequences, expected)


def test_sampled_texts_of_other_seeds_options_and_drafters_share_forwards(target) -> None:
    ids, server = prompts(4, seed=31), VerifyServer(target, limits=ServerLimits(max_length=256, wait_seconds=0.2))
    options = [
        {"temperature": 0.7},
        {"top_k": 9, "repetition_penalty": 1.3},
        {"top_p": 0.8, "no_repeat_ngram_size": 3},
        {"do_sample": False},
    ]
    options = [{"max_new_tokens": 30, "do_sample": True, **each} for each in options]
    drafters = [make_drafter(target), CachebackDrafter(), make_drafter(target, seed=5), None]
    with (
        in_background(server) as port,
        connect(f"http://127.0.0.1:{port}") as model,
        ThreadPoolExecutor(4) as threads,
    ):

        def decode(place: int) -> torch.Tensor:
            return model.generate(ids[place], drafters[place], seed=90 + place, **options[place])

        found = list(threads.map(decode, range(4)))
    for place, one in enumerate(found):
        assert torch.equal(one, plain(target, ids[place], 90 + place, **options[place]))
    assert max(server.status()["batches"]["sizes"]) >= 3


def test_a_batch_waits_for_texts_that_come_back_soon(target, monkeypatch) -> None:
    """Drafts that come 20 ms after others come to share their forwards of 200 ms, unless the server does not wait."""
    read, ids = TreeReader.read, prompts(2, seed=33)
    expected = [plain(target, one, max_new_tokens=14, do_sample=False) for one in ids]
    shared = {}

    def slow(self: TreeReader, *args: Any) -> Any:
        time.sleep(0.2)
        return read(self, *args)

    for wait in (None, 0.0):
        server = VerifyServer(target, limits=ServerLimits(max_length=256, wait_seconds=wait))
        monkeypatch.setattr(TreeReader, "read", slow)
        with (
            in_background(server) as port,
            connect(f"http://127.0.0.1:{port}") as model,
            ThreadPoolExecutor(2) as threads,
        ):

            def decode(place: int) -> torch.Tensor:
                late = Late() if place else None
                return model.generate(ids[place], CachebackDrafter(), streamer=late, max_new_tokens=14, do_sample=False)

            assert all(map(torch.equal, threads.map(decode, range(2)), expected))
        sizes = server.status()["batches"]["sizes"]
        shared[wait] = sizes.get(2, 0) / sum(sizes.values())
    assert shared[None] > 0.5 > 0.3 > shared[0.0]


def sliding(mixed: bool):
    torch.manual_seed(2)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 6, "initializer_range": 0.3}
    kinds = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    if mixed:
        return Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, **kinds, eos_token_id=None)).eval()
    return MistralForCausalLM(MistralConfig(**sizes, **heads, eos_token_id=None)).eval()


@pytest.mark.parametrize("kind", ["eager", "sdpa", "sliding", "sliding and full"])
def test_texts_of_other_lengths_share_forwards_of_any_attention(kind: str) -> None:
    target = make_target(kind, seed=8) if kind in ("eager", "sdpa") else sliding("full" in kind)
    ids = prompts(3, seed=12)
    expected = [plain(target, one, max_new_tokens=24, do_sample=False) for one in ids]
    drafter = ScriptedDrafter(make_drafter(target), [one[0].tolist() for one in expected])
    server = VerifyServer(target, limits=ServerLimits(wait_seconds=0.2))
    with (
        in_background(server) as port,
        connect(f"http://127.0.0.1:{port}") as model,
        ThreadPoolExecutor(3) as threads,
    ):

        def decode(one: torch.Tensor) -> torch.Tensor:
            return model.generate(one, assistant_model=drafter, max_new_tokens=24, do_sample=False)

        assert all(map(torch.equal, threads.map(decode, ids), expected))
    assert max(server.status()["batches"]["sizes"]) > 1


def test_states_of_the_last_positions_are_enough(target) -> None:
    ids, drafter = prompts(1, seed=41)[0], make_drafter(target)
    ids, received = ids.repeat(1, 3), []
    expected = plain(target, ids, max_new_tokens=12, do_sample=False)
    with connected(VerifyServer(target)) as model:
        for most in (None, 2):
            output = model.generate(
                ids, drafter, most_taps=most, max_new_tokens=12, do_sample=False, return_dict_in_generate=True
            )
            assert torch.equal(output.sequences, expected)
            received.append(output.link.prompt_received)
        taps = len(drafter.taps_of(target))
        assert received[0] - received[1] >= (ids.shape[1] - 2) * 2 * 32 * taps
        with pytest.raises(ValueError, match="most_taps=0"):
            model.generate(ids, drafter, most_taps=0)


@pytest.mark.parametrize("drawn", [0, 1, 2, 7])
@pytest.mark.parametrize("vocab_size", [97, 5000])
def test_random_numbers_are_passed_over_as_draws_take_them(drawn: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(11)
    probabilities = torch.rand(1, vocab_size, generator=torch.Generator().manual_seed(1))
    for _ in range(drawn):
        torch.multinomial(probabilities, num_samples=1, generator=generator)
    found = seeded(11, torch.device("cpu"), vocab_size, drawn)
    assert torch.equal(found.get_state(), generator.get_state())


def test_no_draft_is_asked_for_that_is_deeper_than_the_server_has_room_for():
    """Without any room for nodes nothing is drafted: sessions are never asked for trees of no nodes."""
    draft = DraftOptions.of(CachebackDrafter())
    target = RemoteTarget(RemoteCall(lambda: None, [5, 6], 0, {}), draft, 32)
    for nodes in (0, 1, 2, 500):
        target._reach, target._most_nodes = 8, nodes
        [ask] = target.asks()
        assert ask.size == min(nodes, draft.tree_size) and ask.depth == ask.reach == min(nodes, 8)
