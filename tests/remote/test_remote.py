"""Drafts here, verification there: the same texts as plain `generate()`, whoever drafts."""

from __future__ import annotations

import math
import threading
import time

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

from oracles.remote_server import connected, in_background
from oracles.scripted import ScriptedDrafter
from oracles.tiny import tiny_config, tiny_model
from transformers import MambaConfig, MambaForCausalLM

from hf_hsdraft import CachebackDrafter, CausalLMDrafter, DraftTree
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.remote.connecting import connect
from hf_hsdraft.remote.link import ServerRefused
from hf_hsdraft.remote.messages import (
    Accepted,
    Open,
    Opened,
    Taps,
    packed_ints,
    packed_tree,
    unpacked_ints,
    unpacked_states,
)
from hf_hsdraft.remote.sessions import ServerLimits
from hf_hsdraft.remote.tree_reader import TreeReader
from hf_hsdraft.remote.verify_server import VerifyServer


def until(condition, seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


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
    assert until(lambda: len(server.sessions) == server.sessions.attached == 0)  # the ends are on their way


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_the_target_come_over_once_and_are_its_own(tied: bool, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("hf_hsdraft.remote.weight_tables.HF_HOME", str(tmp_path))
    target = make_target(seed=6, tie_word_embeddings=tied)
    drafter, ids = make_drafter(target), prompts(1)[0]
    fetched = []
    for _ in range(2):
        with connected(VerifyServer(target)) as model:
            fetch = model._fetch
            monkeypatch.setattr(model, "_fetch", lambda *asked, fetch=fetch: fetched.append(asked) or fetch(*asked))
            found = model.generate(ids, assistant_model=drafter, max_new_tokens=20, do_sample=False)
            assert torch.equal(found, plain(target, ids, max_new_tokens=20, do_sample=False))
            shell = model._shell_on(torch.device("cpu"))
            for mine, its in (
                (shell.get_input_embeddings(), target.get_input_embeddings()),
                (shell.get_output_embeddings(), target.get_output_embeddings()),
            ):
                assert torch.equal(mine.weight, its.weight.detach().bfloat16().float())
    assert {table for table, _, _ in fetched} == ({0} if tied else {0, 1})
    assert len(fetched) == len(set(fetched))


def test_hidden_states_are_those_of_the_accepted_positions(target, served, model) -> None:
    ids, layers = prompts(1)[0], [1, 3]
    truth = plain(target, ids, max_new_tokens=8, do_sample=False)[0].tolist()
    count = ids.shape[1]
    states = target(torch.tensor([truth]), output_hidden_states=True).hidden_states
    expected = torch.cat([states[layer][0] for layer in layers], dim=-1)
    link = model._links.take()
    link.send(Open(packed_ints(ids[0].tolist()), count, 0, False, {"max_new_tokens": 8}, layers, 2))
    pieces = []
    while isinstance(reply := link.receive(Taps, Opened), Taps):
        pieces.append(unpacked_states(reply.states, expected.shape[1]))
    assert len(pieces) > 1  # a prompt is read in pieces
    torch.testing.assert_close(torch.cat(pieces).float(), expected[2:count], atol=0.03, rtol=0.02)
    right, wrong = truth[count + 1], (truth[count + 1] + 1) % VOCAB
    tree = DraftTree((truth[count], wrong, right, truth[count + 2]), (-1, 0, 0, 2), (0, 1, 1, 2), (0.0,) * 4)
    answer = link.ask(packed_tree(1, tree), Accepted)
    assert unpacked_ints(answer.tokens) == truth[count + 1 : count + 4] and answer.drafted == 2
    found = unpacked_states(answer.taps, expected.shape[1]).float()
    torch.testing.assert_close(found, expected[count : count + 3], atol=0.03, rtol=0.02)
    link.close()


def test_a_target_with_recurrent_layers_is_refused() -> None:
    target = tiny_model(MambaForCausalLM, tiny_config(MambaConfig))
    with pytest.raises(DraftingRefused, match=r"Mamba.* cannot"):
        TreeReader(target)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"temperatur": 0.5}, "did you mean temperature"),
        ({"suppress_tokens": [VOCAB]}, "no tokens"),
        ({"eos_token_id": list(range(5000))}, "4096 token ids"),
        ({"temperature": torch.tensor(0.5)}, "expected a number"),
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"attention_mask": torch.zeros(1, 5)}, "padding"),
        ({"input_ids": torch.ones(2, 5, dtype=torch.long)}, "one text"),
        ({"input_ids": torch.full((1, 5), VOCAB)}, "no tokens"),
        ({"input_ids": torch.ones(1, 300, dtype=torch.long)}, "300 tokens"),
        ({"inputs": "a text"}, "no tokenizer"),
        ({"inputs": ["a", "b"]}, r"\['a', 'b'\] is no prompt: expected one text"),
        ({"inputs": [[1, 2], [3]]}, "call generate.. for each of several texts"),
        ({"inputs": {"input_ids": [1]}}, "is no prompt"),
        ({"assistant_model": CachebackDrafter}, "CachebackDrafter is a class"),
        ({"max_new_tokens": "8"}, "max_new_tokens='8'"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"seed": True}, "seed=True"),
        ({"assistant_model": "a name"}, "AutoDrafter"),
        ({"assistant_model": CachebackDrafter(), "tree_size": 3}, r"drafter\.generation_config\.tree_size"),
    ],
)
def test_what_is_wrong_is_said_and_the_next_call_works(model, target, arguments, message: str) -> None:
    ids = prompts(1)[0]
    with pytest.raises((ValueError, ServerRefused), match=message):
        model.generate(**{"input_ids": None if "inputs" in arguments else ids, **arguments})
    found = model.generate(ids, CachebackDrafter(), max_new_tokens=5, do_sample=False)
    assert torch.equal(found, plain(target, ids, max_new_tokens=5, do_sample=False))


@pytest.mark.parametrize("rule", ["rejection", "fly", "pivot"])
def test_other_rules_than_the_targets_own_choice_are_refused(model, drafter, rule: str) -> None:
    drafter.generation_config.verification = rule  # "rejection" would need another tree builder: that is not the matter
    with pytest.raises(DraftingRefused, match=f"{rule}.*not possible with a remote target"):
        model.generate(prompts(1)[0], drafter, max_new_tokens=5)


@pytest.mark.parametrize("damage", [b"no tensors", b""])
def test_kept_rows_that_are_damaged_are_fetched_anew(target, drafter, served, tmp_path, monkeypatch, damage) -> None:
    monkeypatch.setattr("hf_hsdraft.remote.weight_tables.HF_HOME", str(tmp_path))
    ids = prompts(1)[0]
    with connect(served[1]) as model:
        expected = model.generate(ids, drafter, max_new_tokens=8, do_sample=False)
    (path,) = (tmp_path / "hf_hsdraft").iterdir()
    whole = path.read_bytes()
    path.write_bytes(
        damage or whole[:-2] + bytes([whole[-2] ^ 1, whole[-1]])
    )  # a file that reads well, with one bit off
    with connect(served[1]) as model:
        assert torch.equal(model.generate(ids, drafter, max_new_tokens=8, do_sample=False), expected)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("wrong", [{"patience": -1}, {"patience": "x"}, {"timeout": 0}, {"timeout": math.nan}])
def test_seconds_that_are_none_are_refused(served, wrong) -> None:
    with pytest.raises(ValueError, match="expected seconds"):
        connect(served[1], **wrong)


def test_text_goes_there_and_back_by_the_servers_tokenizer(chatty, own_tokenizer) -> None:
    with connected(VerifyServer(chatty, own_tokenizer)) as model:
        ids = model.generate("w1 w2", CachebackDrafter(), chat=True, max_new_tokens=30, do_sample=False)
        turn = [{"role": "user", "content": "w1 w2"}]
        prompt = own_tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert torch.equal(ids, plain(chatty, torch.tensor([prompt]), max_new_tokens=30, do_sample=False))
        assert model.decode(ids) == own_tokenizer.decode(ids[0], skip_special_tokens=True)


def test_statistics_and_streams_tell_what_happened(target, model) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.ended = False

        def put(self, value: torch.Tensor) -> None:
            self.tokens += value.flatten().tolist()

        def end(self) -> None:
            self.ended = True

    streamer, ids = Streamer(), prompts(1)[0]
    for drafter in (CachebackDrafter(), None):
        streamer = Streamer()
        output = model.generate(
            ids, drafter, max_new_tokens=40, do_sample=False, streamer=streamer, return_dict_in_generate=True
        )
        assert streamer.ended and streamer.tokens == output.sequences[0].tolist()
        statistics, link = output.statistics, output.link
        assert statistics.new_tokens == 40 and statistics.exact
        assert len(link.batches) + 1 == statistics.target_forwards and (drafter or statistics.target_forwards == 40)
        assert 0 < link.prompt_received < link.received and link.sent > 4 * ids.shape[1]
        if drafter:
            assert sum(statistics.accepted_lengths) + statistics.target_forwards == 40


def test_drafts_shrink_when_a_server_fills(target, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("hf_hsdraft.remote.weight_tables.HF_HOME", str(tmp_path))
    limits = ServerLimits(max_length=256, max_columns=12, max_nodes=11, max_batch=3)
    server = VerifyServer(target, limits=limits)
    with connected(server) as model:
        links = [model._links.take() for _ in range(4)]
        opening = Open(packed_ints([5, 6]), 2, 0, False, {"max_new_tokens": 9}, [], 0)
        assert [link.ask(opening, Opened).nodes for link in links] == [11, 5, 3, 3]
        ids = prompts(1)[0]
        texts = [plain(target, ids, max_new_tokens=30, do_sample=False)[0].tolist()]
        for drafter in (ScriptedDrafter(make_drafter(target), texts), make_drafter(target)):
            output = model.generate(ids, drafter, max_new_tokens=30, do_sample=False, return_dict_in_generate=True)
            assert output.sequences[0].tolist() == texts[0]
            assert output.statistics.drafted_nodes[0] <= 3 and max(output.statistics.drafted_nodes) <= 11


def test_packed_weights_change_no_text(target) -> None:
    server, ids = VerifyServer(target, packed_weights=True), prompts(1)[0]
    with connected(server) as model:
        found = model.generate(ids, CachebackDrafter(), max_new_tokens=40, do_sample=False)
    assert torch.equal(found, plain(target, ids, max_new_tokens=40, do_sample=False))
    assert server._reader.packed
