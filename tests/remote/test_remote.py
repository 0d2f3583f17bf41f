"""Drafts here, verification there: the same texts as plain `generate()`, whichever drafter, options and neighbours."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

from oracles.scripted import ScriptedDrafter
from oracles.tiny import tiny_config, tiny_model
from remote_helpers import Streamer, at_once, fail_once, plain, prompts, serving
from safetensors.torch import save_file
from transformers import (
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from hf_hsdraft import CachebackDrafter, CausalLMDrafter, DraftTree
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.remote.link import LinkLost, ServerRefused
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
from hf_hsdraft.remote.tree_reader import TreeReader

ENDS = list(range(0, VOCAB, 9))
NEW = 20
GREEDY = {"max_new_tokens": NEW, "do_sample": False}
SAMPLED = {"max_new_tokens": NEW, "do_sample": True, "temperature": 0.9, "top_k": 20, "repetition_penalty": 1.1}


@pytest.fixture(autouse=True)
def _rows_stay_here(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("hf_hsdraft.remote.weight_tables.HF_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def served(target):
    with serving(target, None, "tiny", piece=8, wait_seconds=0.02) as served:
        yield served


@pytest.fixture(scope="module")
def texts(target):
    """Prompts with their greedy and their sampled texts; seeds are their numbers."""
    both = [(ids, plain(target, ids, **GREEDY)) for ids in prompts(2)]
    return [(*one, plain(target, one[0], seed, **SAMPLED)) for seed, one in enumerate(both)]


@pytest.fixture
def model(served):
    with served.connect() as model:
        yield model


@pytest.mark.parametrize("kind", ["hidden states", "n-grams", "small model", "scripted", "none"])
def test_texts_are_those_of_plain_decoding_with_the_same_seed(target, model, texts, kind: str) -> None:
    drafter = {
        "hidden states": lambda: make_drafter(target),
        "n-grams": CachebackDrafter,
        "small model": lambda: CausalLMDrafter(make_target(seed=4)),
        "scripted": lambda: ScriptedDrafter(make_drafter(target), [one[0].tolist() for _, one, _ in texts]),
        "none": lambda: None,
    }[kind]()
    for seed, (ids, greedy, sampled) in enumerate(texts):
        assert torch.equal(model.generate(ids, assistant_model=drafter, **GREEDY), greedy)
        assert torch.equal(model.generate(ids, assistant_model=drafter, seed=seed, **SAMPLED), sampled)


@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_the_target_come_over_once_and_are_its_own(tied: bool, tmp_path, monkeypatch) -> None:
    """Once for all threads and later connections; on each device; and again if the file of them is damaged."""
    target = make_target(seed=6, tie_word_embeddings=tied)
    drafter, ids, fetched = make_drafter(target), prompts(4), []
    expected = [plain(target, one, max_new_tokens=6, do_sample=False) for one in ids]

    def watch(model) -> None:
        fetch = model._fetch
        monkeypatch.setattr(model, "_fetch", lambda *asked: fetched.append(asked) or fetch(*asked))

    def rows_of(shell):
        return shell.get_input_embeddings().weight, shell.get_output_embeddings().weight

    with serving(target) as served:
        for _ in range(2):
            with served.connect() as model:
                watch(model)
                found = at_once(lambda place: model.generate(ids[place], drafter, max_new_tokens=6, do_sample=False), 4)
                assert all(map(torch.equal, found, expected))
                for name in ("cpu", "meta"):
                    shell = model._shell_on(torch.device(name))
                    assert {rows.device.type for rows in rows_of(shell)} | {shell.device.type} == {name}
                for mine, its in zip(rows_of(model._shell_on(torch.device("cpu"))), rows_of(target), strict=True):
                    assert torch.equal(mine, its.detach().bfloat16().float())
        assert {table for table, _, _ in fetched} == ({0} if tied else {0, 1})
        count = len(fetched)
        assert count == len(set(fetched))
        (path,) = (tmp_path / "hf_hsdraft").iterdir()
        whole = path.read_bytes()
        flipped = whole[:-2] + bytes([whole[-2] ^ 1, whole[-1]])  # a file that reads well, with one bit off
        for damaged in (flipped, b"no tensors", b"", None):
            if damaged is None:  # of another form
                save_file({"input": torch.zeros(3, 3)}, path)
            else:
                path.write_bytes(damaged)
            with served.connect() as model:
                watch(model)
                found = model.generate(ids[0], drafter, max_new_tokens=6, do_sample=False)
                assert torch.equal(found, expected[0]) and len(fetched) == 2 * count
                del fetched[count:]
            assert path.read_bytes() == whole


def test_hidden_states_are_those_of_the_accepted_positions(target, model) -> None:
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


def test_states_of_the_last_positions_are_enough(target, model) -> None:
    drafter, ids, received = make_drafter(target), prompts(1, seed=41)[0].repeat(1, 3), []
    options = {"max_new_tokens": 12, "do_sample": False}
    for most in (None, 2):
        output = model.generate(ids, drafter, most_taps=most, return_dict_in_generate=True, **options)
        assert torch.equal(output.sequences, plain(target, ids, **options))
        received.append(output.link.prompt_received)
    assert received[0] - received[1] >= (ids.shape[1] - 2) * 2 * 32 * len(drafter.taps_of(target))
    with pytest.raises(ValueError, match="most_taps=0"):
        model.generate(ids, drafter, most_taps=0)


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


@pytest.mark.parametrize("wrong", [{"patience": -1}, {"patience": "x"}, {"timeout": 0}, {"timeout": math.nan}])
def test_seconds_that_are_none_are_refused(served, wrong) -> None:
    with pytest.raises(ValueError, match="expected seconds"):
        served.connect(**wrong)


def test_text_goes_there_and_back_by_the_servers_tokenizer(chatty, own_tokenizer) -> None:
    with serving(chatty, own_tokenizer) as served, served.connect() as model:
        ids = model.generate("w1 w2", CachebackDrafter(), chat=True, max_new_tokens=30, do_sample=False)
        turn = [{"role": "user", "content": "w1 w2"}]
        prompt = own_tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)["input_ids"]
        assert torch.equal(ids, plain(chatty, torch.tensor([prompt]), max_new_tokens=30, do_sample=False))
        assert model.decode(ids) == own_tokenizer.decode(ids[0], skip_special_tokens=True)
        for call, told in (
            (lambda: model.generate("w1 " * 60_000), "bytes"),  # not sent
            (lambda: model.decode([5] * 5000), "too many"),
            (lambda: model.decode([1.5]), "integers"),
        ):
            with pytest.raises(ValueError, match=told):
                call()


def losing(server: Any, rounds: int = 4) -> Streamer:
    """A streamer that lets a server forget its texts after some rounds."""
    return Streamer(lambda done: [server.sessions.remove(each) for each in server.sessions] if done == rounds else None)


@pytest.mark.parametrize("drafter", [CachebackDrafter(), None], ids=["drafts", "plain"])
def test_statistics_and_streams_tell_what_happened(target, model, drafter) -> None:
    streamer, ids = Streamer(), prompts(1)[0]
    output = model.generate(ids, drafter, streamer=streamer, return_dict_in_generate=True, **GREEDY)
    assert streamer.ended and streamer.tokens == output.sequences[0].tolist()
    statistics, link = output.statistics, output.link
    assert statistics.new_tokens == NEW and statistics.exact
    assert len(link.batches) + 1 == statistics.target_forwards and (drafter or statistics.target_forwards == NEW)
    assert 0 < link.prompt_received < link.received and link.sent > 4 * ids.shape[1]
    if drafter:
        assert sum(statistics.accepted_lengths) + statistics.target_forwards == NEW


def test_drafts_shrink_when_a_server_fills(target) -> None:
    with serving(target, max_columns=12, max_nodes=11, max_batch=3) as served, served.connect() as model:
        assert [served.opened(torch.tensor([[5, 6]]))[1].nodes for _ in range(4)] == [11, 5, 3, 3]
        ids = prompts(1)[0]
        texts = [plain(target, ids, **GREEDY)[0].tolist()]
        for drafter in (ScriptedDrafter(make_drafter(target), texts), make_drafter(target)):
            output = model.generate(ids, drafter, return_dict_in_generate=True, **GREEDY)
            assert output.sequences[0].tolist() == texts[0]
            assert output.statistics.drafted_nodes[0] <= 3 and max(output.statistics.drafted_nodes) <= 11


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"min_new_tokens": 12, "eos_token_id": ENDS},
        {"no_repeat_ngram_size": 2},
        {"begin_suppress_tokens": list(range(40))},
        {"forced_eos_token_id": 5},
        {"eos_token_id": ENDS},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_hold_and_hold_on_when_a_text_is_opened_again(target, served, model, options, sample: bool) -> None:
    ids = prompts(1, seed=17)[0]
    options = {"max_new_tokens": 24, "do_sample": sample, **options}
    expected = plain(target, ids, 3, pad_token_id=0, **options)
    drafter = ScriptedDrafter(make_drafter(target), [[*expected[0].tolist(), 7, 8]])
    for streamer in (None, losing(served, 3)):
        output = model.generate(ids, drafter, seed=3, streamer=streamer, return_dict_in_generate=True, **options)
        assert torch.equal(output.sequences, expected)
    short = expected.shape[1] - ids.shape[1] < 6
    assert output.link.reopened == 1 or short


@pytest.mark.parametrize("sample", [False, True])
def test_a_drafter_of_hidden_states_goes_on_when_its_text_is_resumed_or_opened_again(
    target, served, model, monkeypatch, sample: bool
) -> None:
    ids, drafter = prompts(1, seed=21)[0], make_drafter(target)
    options = {"max_new_tokens": 24, "do_sample": sample}
    expected = plain(target, ids, 4, **options)
    lost = model.generate(ids, drafter, seed=4, streamer=losing(served), return_dict_in_generate=True, **options)
    fail_once(monkeypatch, 8, LinkLost("broken"))  # in the middle of the text
    cut = model.generate(ids, drafter, seed=4, return_dict_in_generate=True, **options)
    assert (lost.link.reopened, lost.link.resumed) == (1, 0)
    assert (cut.link.reopened, cut.link.resumed) == (0, 1)
    assert torch.equal(lost.sequences, expected) and torch.equal(cut.sequences, expected)


def test_sampled_texts_of_other_seeds_options_and_drafters_share_forwards(target) -> None:
    ids, usual = prompts(4, seed=31), {"max_new_tokens": 16, "do_sample": True}
    options = [
        {**usual, "temperature": 0.7},
        {**usual, "top_k": 9, "repetition_penalty": 1.3},
        {**usual, "top_p": 0.8, "no_repeat_ngram_size": 3},
        {**usual, "do_sample": False},
    ]
    drafters = [make_drafter(target), CachebackDrafter(), make_drafter(target, seed=5), None]
    with serving(target, wait_seconds=0.2) as served, served.connect() as model:
        found = at_once(lambda place: model.generate(ids[place], drafters[place], seed=90 + place, **options[place]), 4)
        for place, one in enumerate(found):
            assert torch.equal(one, plain(target, ids[place], 90 + place, **options[place]))
        assert max(served.status()["batches"]["sizes"]) >= 3


def test_a_batch_waits_for_texts_that_come_back_soon(target, monkeypatch) -> None:
    """Drafts that come 10 ms after others come to share their forwards of 100 ms, unless the server does not wait."""
    read, ids, shared = TreeReader.read, prompts(2, seed=33), {}
    options = {"max_new_tokens": 14, "do_sample": False}
    late = Streamer(lambda _: time.sleep(0.01))

    def slow(self: TreeReader, *args: Any) -> Any:
        time.sleep(0.1)
        return read(self, *args)

    for wait in (None, 0.0):
        monkeypatch.setattr(TreeReader, "read", read)  # the server tries it first
        with serving(target, wait_seconds=wait) as served, served.connect() as model:
            monkeypatch.setattr(TreeReader, "read", slow)
            found = at_once(
                lambda place: model.generate(
                    ids[place], CachebackDrafter(), streamer=late if place else None, **options
                ),
                2,
            )
            assert all(torch.equal(one, plain(target, each, **options)) for one, each in zip(found, ids, strict=True))
            sizes = served.status()["batches"]["sizes"]
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


@pytest.mark.parametrize("kind", ["eager", "sdpa", "sliding", "sliding and full", "packed"])
def test_texts_of_other_lengths_share_forwards_of_any_attention_and_of_packed_weights(kind: str) -> None:
    target = sliding("full" in kind) if "sliding" in kind else make_target(kind.replace("packed", "sdpa"), seed=8)
    ids, options = prompts(3, seed=12), {"max_new_tokens": 14, "do_sample": False}
    expected = [plain(target, one, **options) for one in ids]
    drafter = ScriptedDrafter(make_drafter(target), [one[0].tolist() for one in expected])
    with serving(target, wait_seconds=0.2, packed=kind == "packed") as served, served.connect() as model:
        found = at_once(lambda place: model.generate(ids[place], assistant_model=drafter, **options), 3)
        assert all(map(torch.equal, found, expected))
        assert max(served.status()["batches"]["sizes"]) > 1
        assert served.server._reader._acceleration.packed == (kind == "packed")
