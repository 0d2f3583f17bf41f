"""The contract of `generate()` with a drafter: batches, ends, outputs, turns; against plain `generate()`."""

import asyncio
import contextlib
import copy
import dataclasses
import io
import itertools
import random
import warnings
from collections import Counter

import pytest
import torch
from conftest import LLAMA, VOCAB, Meanwhile, failing, make_drafter, make_target, model_of, scripted
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from session_helpers import forget
from tokenizers import Tokenizer, decoders, models
from transformers import (
    AsyncTextIteratorStreamer,
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
)
from transformers.cli.serving.utils import DirectStreamer
from transformers.generation.logits_process import WhisperNoSpeechDetection
from transformers.generation.streamers import BaseStreamer

from hf_hsdraft import CachebackDrafter, HSDraftConfig, HSDrafter, harmless
from hf_hsdraft.engine import local_target
from hf_hsdraft.engine.drafting import Drafting
from hf_hsdraft.methods.drawn import Rejection
from hf_hsdraft.pace.pacing import CostPace
from hf_hsdraft.runtime.cache_slots import cache_layers
from hf_hsdraft.runtime.ended_rows import EndedRows
from hf_hsdraft.serve.conversation import DraftColourStreamer
from hf_hsdraft.verify.verdict import OwnChoice

NEW = 16
GREEDY = {"do_sample": False, "max_new_tokens": NEW}
OUTPUTS = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


def batch_of(rows: int, length: int = 12, seed: int = 0, side: str = "left") -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, VOCAB, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        padded = slice(0, 2 * row) if side == "left" else slice(length - 2 * row, length)
        ids[row, padded], mask[row, padded] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def compare(target, drafter, inputs, seed: int = 0, script=None, **kwargs):
    """Plain decoding and scripted drafts, the same call; returns both outputs."""
    kwargs = {**GREEDY, "pad_token_id": 0, "return_dict_in_generate": True, **kwargs}
    plain = target.generate(**inputs, **kwargs)
    length = inputs["input_ids"].shape[1] if "input_ids" in inputs else 0
    assistant = scripted(drafter, script or plain.sequences[:, length:].tolist(), seed)
    return plain, target.generate(**inputs, **kwargs, assistant_model=assistant)


def assert_same_outputs(plain, drafted) -> None:
    """Tokens, scores, logits, states, attentions and cache: the same shapes, and the same values up to rounding."""
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    for name in ("scores", "logits", "hidden_states", "attentions"):
        theirs, ours = getattr(plain, name), getattr(drafted, name)
        assert (theirs is None) == (ours is None), name
        for step, (a, b) in enumerate(zip(theirs or (), ours or (), strict=True)):
            for x, y in zip(
                [a] if isinstance(a, torch.Tensor) else a, [b] if isinstance(b, torch.Tensor) else b, strict=True
            ):
                assert x.shape == y.shape, (name, step)
                torch.testing.assert_close(y, x, atol=2e-4, rtol=2e-4)
    assert_same_cache(plain, drafted)


def assert_same_cache(plain, drafted, *part, close: float = 2e-4) -> None:
    """Lengths, keys and values of all layers, or a part of them."""
    for ours, theirs in zip(cache_layers(drafted.past_key_values), cache_layers(plain.past_key_values), strict=True):
        assert ours.get_seq_length() == theirs.get_seq_length()
        torch.testing.assert_close(ours.keys[part], theirs.keys[part], atol=close, rtol=close)
        torch.testing.assert_close(ours.values[part], theirs.values[part], atol=close, rtol=close)


def make_windowed(attention: str = "sdpa"):
    types = ["sliding_attention", "full_attention"] * 2
    fields = {**LLAMA, "num_hidden_layers": 4, "head_dim": 8, "sliding_window": 8, "layer_types": types}
    return model_of("gemma3_text", attention=attention, **fields)


class Steps(BaseStreamer):
    """Notes what it is given: steps as they come, and all tokens."""

    def __init__(self):
        self.steps, self.tokens, self.ended = [], [], 0

    def put(self, value):
        self.steps.append(value.tolist())
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended += 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("rows", [2, 5])
def test_batches_of_padded_prompts(target, drafter, rows, side):
    plain, drafted = compare(target, drafter, batch_of(rows, side=side))
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert drafted.statistics.draft_kind == "tree" and drafted.statistics.tau > 1.3
    assert drafted.statistics.target_forwards < NEW


@pytest.mark.parametrize(("injector", "reuse"), [("path", "none"), ("low_rank", "ensemble"), ("selector", "resample")])
def test_a_batch_drafts_for_each_row_what_it_drafts_alone(target, injector, reuse):
    """A real drafter: the batch accepts row by row just as many tokens as calls for single prompts do."""
    drafter = make_drafter(target, injector=injector)
    drafter.generation_config.reuse = reuse
    drafter.generation_config.tree_sizing = "fixed"  # the rows of a batch share what is learnt of costs and gains
    inputs = batch_of(3)
    kwargs = {**GREEDY, "assistant_model": drafter, "return_dict_in_generate": True}
    drafter.generation_config.tree_size = 72  # two thirds of it, shared by three rows
    together = target.generate(**inputs, **kwargs)
    drafter.generation_config.tree_size = 16
    emitted = forwards = 0
    for row in range(3):
        alone = target.generate(**{name: value[row : row + 1] for name, value in inputs.items()}, **kwargs)
        assert together.sequences[row].tolist() == alone.sequences[0].tolist()
        emitted += alone.statistics.new_tokens
        forwards += alone.statistics.target_forwards
    assert together.statistics.tau == pytest.approx(emitted / forwards)


class Third(StoppingCriteria):
    """Plain decoding fills rows up only where there are end tokens; else they go on until all have ended."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, 12:] % 7 == 3).any(dim=1)


LIMITS = {
    "no time left": (1, {"max_time": 0.0}),
    "least new tokens": (1, {"min_new_tokens": 9}),
    "least length": (1, {"min_length": 20}),
    "greatest length": (1, {"max_length": 19, "max_new_tokens": None}),
    "a criterion without an end token": (3, {"stopping_criteria": [Third()]}),
}


@pytest.mark.parametrize("name", LIMITS)
def test_texts_end_where_plain_decoding_ends_them(target, drafter, name):
    rows, limits = LIMITS[name]
    inputs = batch_of(rows)
    ends = int(target.generate(**inputs, max_new_tokens=4, do_sample=False)[0, -1]) if rows == 1 else None
    plain, drafted = compare(target, drafter, inputs, eos_token_id=ends, **limits)
    assert plain.sequences.tolist() == drafted.sequences.tolist()
    assert plain.sequences.shape[1] < 12 + NEW or name.startswith("least")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("make", [lambda: make_target("eager"), lambda: make_windowed("eager")])
def test_outputs_are_those_of_plain_decoding(make, rows):
    target = make()
    plain, drafted = compare(target, make_drafter(target), batch_of(rows), **OUTPUTS)
    assert_same_outputs(plain, drafted)
    assert drafted.statistics.draft_kind == "tree"


@pytest.mark.parametrize("verification", ["walk", "rejection"])
@pytest.mark.parametrize("rows", [1, 2])
def test_judging_changes_nothing(target, drafter, monkeypatch, verification, rows):
    """A verifier may ask for the scores at a node as often as it likes."""

    def curious(judge):
        def asking(self, tree, nodes):
            def ask(node, tokens):
                first = nodes.scores(node, tokens).clone()
                assert torch.equal(nodes.scores(node, tokens), first)
                return first

            verdict = judge(self, tree, dataclasses.replace(nodes, scores=ask))
            tokens = [tree.tokens[node] for node in verdict.path]
            for depth, node in enumerate([0, *verdict.path]):
                nodes.scores(node, tokens[:depth])
            return verdict

        return asking

    class Counts(LogitsProcessor):
        """Asked once for each token, or another text comes out."""

        row_wise, calls = True, 0

        def __call__(self, input_ids, scores):
            self.calls += 1
            return scores + 0.1 * self.calls * torch.arange(scores.shape[-1]) if rows == 1 else scores / 2

    def scores_so_far(input_ids, scores):
        steps.append([float(one.max()) for one in scores])
        return torch.zeros(len(input_ids), dtype=torch.bool)

    def text(assistant):
        steps.clear()
        torch.manual_seed(0)
        given = {"logits_processor": [Counts()], "stopping_criteria": [scores_so_far]}
        return target.generate(**batch_of(rows), **call, **given, assistant_model=assistant), list(steps)

    drafter.generation_config.verification, drafter.generation_config.tree_builder = verification, "gumbel"
    call = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True, "max_new_tokens": 12}
    call |= {"do_sample": verification == "rejection", "pad_token_id": 0}
    steps: list[list[float]] = []
    expected, seen = text(drafter if verification == "rejection" else None)
    for verifier in (OwnChoice, Rejection):
        monkeypatch.setattr(verifier, "judge", curious(verifier.judge))
    output, seen_again = text(drafter)
    assert len(seen[-1]) == 12 and seen_again == [pytest.approx(each, abs=1e-3) for each in seen]
    assert_same_outputs(expected, output)


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 3),
    windowed=st.booleans(),
    new=st.integers(1, 16),
    ends=st.lists(st.integers(5, VOCAB - 1), max_size=12),
    penalty=st.sampled_from([1.0, 1.3]),
)
@settings(max_examples=20, deadline=None)
def test_any_trees_acceptances_and_ends(targets, seed, rows, windowed, new, ends, penalty):
    """Random trees, random acceptance, random ends: tokens, scores and cache are those of plain decoding."""
    target, drafter = targets[windowed]
    kwargs = {"max_new_tokens": new, "eos_token_id": ends or None, "repetition_penalty": penalty, "output_scores": True}
    plain, drafted = compare(target, drafter, batch_of(rows, seed=seed), seed=seed, **kwargs)
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    assert len(plain.scores) == len(drafted.scores)
    lengths = [_length(row, ends) for row in plain.sequences[:, 12:].tolist()]
    for step, (ours, theirs) in enumerate(zip(drafted.scores, plain.scores, strict=True)):
        going = [row for row, length in enumerate(lengths) if step < length]
        torch.testing.assert_close(ours[going], theirs[going], atol=2e-4, rtol=2e-4)
    assert_same_cache(plain, drafted, *([] if rows == 1 else [slice(0)]))  # rows of a batch end apart


def _length(tokens: list[int], ends: list[int]) -> int:
    return next((index + 1 for index, token in enumerate(tokens) if token in ends), len(tokens))


@pytest.fixture(scope="module")
def targets():
    made = {False: make_target(), True: make_windowed()}
    return {windowed: (target, make_drafter(target)) for windowed, target in made.items()}


def test_stop_strings(target, drafter):
    """A string that starts in one token and ends in the next, met in the middle of an accepted path."""
    letters = [chr(ord("a") + index) for index in range(26)]
    vocabulary = {
        "abcdef": 0,
        **{a + b: 1 + index for index, (a, b) in enumerate(itertools.product(letters[:12], letters[:8]))},
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="abcdef"))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="abcdef")
    inputs = batch_of(2)
    free = target.generate(**inputs, **GREEDY)
    words = {index: word for word, index in vocabulary.items()}
    stop = words[int(free[0, 12 + 6])][1] + words[int(free[0, 12 + 7])][0]
    for rows in (1, 2):
        some = {name: value[:rows] for name, value in inputs.items()}
        plain, drafted = compare(target, drafter, some, stop_strings=[stop], tokenizer=tokenizer)
        assert plain.sequences.tolist() == drafted.sequences.tolist()
        assert rows > 1 or plain.sequences.shape[1] <= 12 + 8


def test_allowed_tokens_are_asked_for_with_the_text_of_their_row(target, drafter):
    inputs = batch_of(3)
    prompts, asked = inputs["input_ids"].tolist(), []

    def allowed(batch_id, ids):
        assert ids.shape == (len(ids),) and ids[:12].tolist() == prompts[batch_id]
        asked.append((batch_id, len(ids)))
        return list(range(10 * batch_id + 5, 10 * batch_id + 30 + len(ids) % 3))

    plain, drafted = compare(target, drafter, inputs, prefix_allowed_tokens_fn=allowed)
    assert plain.sequences.tolist() == drafted.sequences.tolist()
    assert Counter(asked) == dict.fromkeys(asked, 2)  # by either call once for each token


class ForbidsInTheRow(LogitsProcessor):
    """Tells rows apart by their number."""

    def __call__(self, input_ids, scores):
        for row in range(len(scores)):
            scores[row, row::3] = -torch.inf
        return scores


class ForbidsTheLast(LogitsProcessor):
    """Row-wise, which only its author knows."""

    def __call__(self, input_ids, scores):
        return scores.scatter(1, input_ids[:, -1:], -torch.inf)


def test_unknown_processors_are_refused_in_batches_unless_they_are_said_to_be_row_wise(target, drafter, rows_read):
    call = {**GREEDY, "assistant_model": drafter}
    counts = rows_read(target)
    with pytest.raises(ValueError, match=r"ForbidsInTheRow .* row_wise = True .* call generate\(\) for each prompt"):
        target.generate(**batch_of(3), **call, logits_processor=[ForbidsInTheRow()])
    assert not counts
    plain, drafted = compare(target, drafter, batch_of(1), logits_processor=[ForbidsInTheRow()])
    assert plain.sequences.tolist() == drafted.sequences.tolist()

    class Said(ForbidsTheLast):
        row_wise = True

        def __call__(self, input_ids, scores):
            shapes.append((len(input_ids), len(scores)))
            return super().__call__(input_ids, scores)

    shapes: list[tuple[int, int]] = []
    by_object = ForbidsTheLast()
    by_object.row_wise = True
    for one in (Said(), by_object):
        plain, drafted = compare(target, drafter, batch_of(3), logits_processor=[one])
        assert plain.sequences.tolist() == drafted.sequences.tolist()
    assert Counter(shapes) == {(3, 3): NEW, (1, 1): 3 * NEW}


CHANGES_NOTHING_HERE = ("values", "most of the entropy")
PROCESSORS = {
    "repetition of padded rows": {"repetition_penalty": 1.3},
    "repetition of a prompt": {"encoder_repetition_penalty": 1.5},
    "n-grams of a prompt": {"encoder_no_repeat_ngram_size": 1},
    "two texts of a prompt": {
        "encoder_repetition_penalty": 1.5,
        "encoder_no_repeat_ngram_size": 2,
        "repetition_penalty": 1.3,
        "num_return_sequences": 2,
        "do_sample": True,
        "top_k": 1,
    },
    "lengths": {
        "min_new_tokens": 6,
        "min_length": 15,
        "forced_eos_token_id": 7,
        "exponential_decay_length_penalty": (3, 1.3),
        "eos_token_id": list(range(5, 50, 4)),
    },
    "lists": {
        "suppress_tokens": list(range(5, 40, 3)),
        "begin_suppress_tokens": list(range(6, 60, 2)),
        "bad_words_ids": [[9], [11, 12]],
        "sequence_bias": [[[13], 2.0], [[14, 15], 3.0]],
        "no_repeat_ngram_size": 2,
    },
    "prefixes of two texts of a prompt": {
        "prefix_allowed_tokens_fn": lambda prompt, ids: [3 * prompt + 5, 3 * prompt + 7 + len(ids) % 9],
        "num_return_sequences": 2,
        "do_sample": True,
        "top_k": 1,
    },
    "values": {"remove_invalid_values": True, "renormalize_logits": True},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
    "most of the entropy": {"do_sample": True, "top_h": 0.01},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors_of_the_library_are_asked_about_single_rows(target, drafter, monkeypatch, name):
    """Each sees the row that it is asked about and no other, and the text is plain decoding's."""
    call, sizes = PROCESSORS[name], []
    count = call.get("num_return_sequences", 1)
    plain = target.generate(**batch_of(4), pad_token_id=0, **{**GREEDY, **call})
    free = target.generate(**batch_of(4), do_sample=False, max_new_tokens=plain.shape[1] - 12, pad_token_id=0)
    assert plain.tolist() != free.repeat_interleave(count, dim=0).tolist() or name in CHANGES_NOTHING_HERE
    of_list = LogitsProcessorList.__call__

    @harmless
    def noting(self, input_ids, scores, **kwargs):
        sizes.append((len(input_ids), len(scores)))
        return of_list(self, input_ids, scores, **kwargs)

    monkeypatch.setattr(LogitsProcessorList, "__call__", noting)
    call = {**GREEDY, **call, "assistant_model": scripted(drafter, plain[:, 12:], 1)}
    drafted = target.generate(**batch_of(4), pad_token_id=0, **call)
    assert drafted.tolist() == plain.tolist()
    rows = len(plain)
    first = sizes.count((rows, rows))
    assert sizes == [(rows, rows)] * first + [(1, 1)] * (len(sizes) - first) and len(sizes) > first > 0


def test_what_is_read_of_the_first_scores_is_of_all_rows(target, drafter):
    found = []
    for assistant in (None, drafter):
        silence = WhisperNoSpeechDetection(no_speech_token=9, begin_index=1)
        silence.set_begin_index(12)
        given = {"logits_processor": [silence], "assistant_model": assistant}
        target.generate(**batch_of(3), do_sample=False, max_new_tokens=6, **given)
        found.append(silence.no_speech_prob.tolist())
    assert found[0] == pytest.approx(found[1]) and len(set(found[0])) == 3


def test_guidance_is_exact_for_one_prompt_and_refused_for_more(target, drafter):
    plain, drafted = compare(target, drafter, batch_of(1), guidance_scale=1.5)
    assert plain.sequences.tolist() == drafted.sequences.tolist()
    with pytest.raises(ValueError, match="call generate\\(\\) for each prompt"):
        target.generate(**batch_of(2), max_new_tokens=3, guidance_scale=1.5, assistant_model=drafter)


@pytest.mark.parametrize("end", ["a token", "a criterion of all rows"])
def test_streamers_of_a_batch_get_steps_in_order(target, drafter, end):
    """And no token beyond an end, also one that is found later than the tokens behind it."""
    inputs = batch_of(3)
    free = target.generate(**inputs, **GREEDY)[:, 12:].tolist()
    seen = []
    for assistant in (None, drafter):
        call = {**GREEDY, "pad_token_id": 0, "streamer": Steps()}
        if end == "a token":
            call["eos_token_id"] = free[1][5]
        else:
            criterion = MultiToken([tuple(free[1][7:9])], 12, 3, lambda done: done[1])
            call["stopping_criteria"] = [criterion]
        target.generate(**inputs, **call, assistant_model=scripted(assistant, free, seed=2))
        assert call["streamer"].ended == 1
        seen.append(call["streamer"].steps)
    assert seen[0] == seen[1] and (end == "a token" or len(seen[0]) <= 1 + 9)


def test_streamers_of_one_text_get_flat_tensors(target, drafter, tokenizer):
    """Each streamer, the library's and our own, says what it says of plain decoding; the server counts all tokens."""

    class Collects(TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            said.append(text)

    async def run(assistant):
        served, printed = asyncio.Queue(), io.StringIO()
        streamers = {
            "server": DirectStreamer(tokenizer._tokenizer, asyncio.get_running_loop(), served),
            "text": Collects(tokenizer),
            "new text": Collects(tokenizer, skip_prompt=True),
            "iterator": TextIteratorStreamer(tokenizer, skip_prompt=True),
            "async": AsyncTextIteratorStreamer(tokenizer, skip_prompt=True),
            "demo": DraftColourStreamer(tokenizer, Console(file=printed, width=1000)),
            "flat": flat,
        }
        texts = {}
        for name, streamer in streamers.items():
            said.clear()
            target.generate(
                **inputs, **call, assistant_model=scripted(assistant, free[:, 12:], seed=1), streamer=streamer
            )
            texts[name] = "".join(said)
        await asyncio.sleep(0)
        texts["server"] = "".join(filter(None, [served.get_nowait() for _ in range(served.qsize())]))
        texts["demo"] = printed.getvalue()
        texts["iterator"] = "".join(streamers["iterator"])
        texts["async"] = "".join([text async for text in streamers["async"]])
        return texts, streamers["server"].total_tokens

    inputs, call = batch_of(1), {**GREEDY}
    free = target.generate(**inputs, **call)
    results = []
    said: list[str] = []
    for assistant in (None, drafter):
        flat = Steps()
        results.append(asyncio.run(run(assistant)))
        assert len(flat.steps[0][0]) == 12 and all(isinstance(each, int) for step in flat.steps[1:] for each in step)
        assert flat.tokens == free[0].tolist()
    assert results[0] == results[1] and results[1][1] == NEW
    assert len(flat.steps) < 1 + NEW and len(results[0][0]["text"]) > NEW


@pytest.mark.parametrize("rows", [1, 2])
def test_prompts_as_embeddings(target, drafter, rows):
    inputs = batch_of(rows)
    embeds = target.get_input_embeddings()(inputs["input_ids"])
    given = {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}
    plain, drafted = compare(target, drafter, given)
    assert plain.sequences.tolist() == drafted.sequences.tolist()
    by_tokens = target.generate(**inputs, **GREEDY)
    assert drafted.sequences.tolist() == by_tokens[:, 12:].tolist()
    real = target.generate(**given, **GREEDY, assistant_model=drafter)
    assert real.tolist() == plain.sequences.tolist()


@pytest.mark.parametrize("make", [make_target, make_windowed])
def test_chats_go_on_from_the_returned_cache(make):
    target = make()
    drafter = make_drafter(target)
    inputs = batch_of(1)
    kwargs = {**GREEDY, "return_dict_in_generate": True}
    texts = []
    for assistant in (None, drafter):
        ids, cache = inputs["input_ids"], None
        for turn in range(2):
            given = {} if assistant is None else {"assistant_model": assistant}
            output = target.generate(ids, past_key_values=cache, **kwargs, **given)
            cache = output.past_key_values
            ids = torch.cat([output.sequences, torch.tensor([[7 + turn, 8, 9]])], dim=1)
        texts.append(ids.tolist())
    assert texts[0] == texts[1]


def test_the_drafter_goes_on_from_the_returned_cache_too(target, drafter):
    """The next turn is drafted just as if the whole text had been read anew, also from a copy of the cache."""
    kwargs = {**GREEDY, "return_dict_in_generate": True, "assistant_model": drafter}
    first = target.generate(**batch_of(1), **kwargs)
    ids = torch.cat([first.sequences, torch.tensor([[5, 6, 7]])], dim=1)
    anew = target.generate(ids, **kwargs)
    for cache in (copy.deepcopy(first.past_key_values), first.past_key_values):
        output = target.generate(ids, past_key_values=cache, **kwargs)
        assert output.sequences.tolist() == anew.sequences.tolist()
        assert output.statistics.accepted_lengths == anew.statistics.accepted_lengths
    other = make_drafter(target, seed=9)
    cropped = target.generate(ids[:, :14], past_key_values=None, **{**kwargs, "max_new_tokens": 4}).past_key_values
    output = target.generate(ids, past_key_values=cropped, **{**kwargs, "assistant_model": other})
    assert output.sequences.tolist() == anew.sequences.tolist()


def test_windows_of_a_batch_hold_what_the_slowest_row_sees():
    """One row accepts everything, another nothing: the window's layers keep enough for both."""
    target = model_of("mistral", **LLAMA, head_dim=8, sliding_window=6)
    drafter = HSDrafter(HSDraftConfig.for_target(target, num_draft_steps=4, tree_size=8, draft_vocab_size=VOCAB))
    inputs = batch_of(2)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=32)
    wrong = [random.Random(0).randrange(5, VOCAB) for _ in range(32)]
    assistant = scripted(drafter, [plain[0, 12:].tolist(), wrong], 4)
    drafted = target.generate(**inputs, do_sample=False, max_new_tokens=32, assistant_model=assistant)
    assert drafted.tolist() == plain.tolist()


@pytest.mark.parametrize("rows", [1, 2])
def test_synced_processes_wait_for_each_other(target, drafter, monkeypatch, rows):
    """With ZeRO or FSDP every process runs forwards until all have ended; the idle ones change nothing."""
    inputs = batch_of(rows)
    plain = target.generate(**inputs, **GREEDY, return_dict_in_generate=True)
    idle = 3

    def unfinished(self, this_peer_finished, synced_gpus, device):
        nonlocal idle
        assert synced_gpus
        if this_peer_finished:
            idle -= 1
        return idle >= 0

    monkeypatch.setattr(type(target), "_has_unfinished_sequences", unfinished)
    call = {"assistant_model": scripted(drafter, plain.sequences[:, 12:]), "return_dict_in_generate": True}
    drafted = target.generate(**inputs, **GREEDY, **call, synced_gpus=True)
    assert idle == -2, "asked once more, about the padding of ended rows"
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    length = plain.past_key_values.get_seq_length()
    assert drafted.past_key_values.get_seq_length() == length


def test_an_error_in_a_batch_leaves_windows_as_they_were():
    """The caller's cache is good for plain decoding after an exception in the middle of a round."""
    target = make_windowed()
    drafter = make_drafter(target)
    for rows in (1, 2):
        inputs = batch_of(rows)
        plain = target.generate(**inputs, **GREEDY)
        cache = DynamicCache(config=target.config)
        kwargs = {"do_sample": False, "past_key_values": cache}
        script = [plain[0, 12:].tolist(), [5] * NEW][:rows]  # the second row accepts hardly anything
        with pytest.raises(RuntimeError, match="from a criterion"):
            call = {"assistant_model": scripted(drafter, script)}
            call["stopping_criteria"] = [Meanwhile(failing(RuntimeError("from a criterion")), 9)]
            target.generate(**inputs, **kwargs, max_new_tokens=NEW, **call)
        windowed = [layer for layer in cache.layers if layer.is_sliding]
        assert windowed and all(layer.sliding_window == 8 and not layer.record_past for layer in windowed)
        assert all(layer.keys.shape[-2] == 7 for layer in windowed)
        if rows == 1:
            continued = target.generate(plain[:, : 12 + 11], **kwargs, max_new_tokens=NEW - 11)
            assert continued.tolist() == plain.tolist()


def test_a_returned_cache_can_be_stored(target, drafter, tmp_path):
    """What the drafter has read does not go with it."""
    kwargs = {**GREEDY, "return_dict_in_generate": True}
    first = target.generate(**batch_of(1), **kwargs, assistant_model=drafter)
    torch.save(first.past_key_values, tmp_path / "cache.pt")
    cache = torch.load(tmp_path / "cache.pt", weights_only=False)
    ids = torch.cat([first.sequences, torch.tensor([[5, 6, 7]])], dim=1)
    plain = target.generate(ids, **GREEDY)
    output = target.generate(ids, past_key_values=cache, **kwargs, assistant_model=drafter)
    assert output.sequences.tolist() == plain.tolist()


def test_time_may_run_out_in_the_middle_of_a_path(target, drafter):
    """The criterion is asked once for each token, in order, and what follows its yes is not emitted."""

    class Clock(StoppingCriteria):
        def __init__(self):
            self.asked = 0

        def __call__(self, input_ids, scores, **kwargs):
            self.asked += 1
            return torch.full((len(input_ids),), self.asked >= 10)

    texts = []
    for assistant in (None, drafter):
        clock = Clock()
        free = target.generate(**batch_of(1), **GREEDY)
        call = {**GREEDY, "assistant_model": scripted(assistant, free[:, 12:], 3)}
        texts.append(target.generate(**batch_of(1), **call, stopping_criteria=[clock]).tolist())
        assert clock.asked == 10
    assert texts[0] == texts[1] and len(texts[0][0]) == 22


class MultiToken(StoppingCriteria):
    """Ends rows at a sequence of two tokens, by the texts of all rows; keeps which of them have met it.

    As evaluation harnesses have it; `answer` makes of that list what is returned.
    """

    def __init__(self, sequences, length, rows, answer):
        self.sequences, self.length, self.answer = sequences, length, answer
        self.done, self.asked = [False] * rows, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append((input_ids.tolist(), None if scores is None else len(scores)))
        for row, tokens in enumerate(input_ids[:, self.length :][:, -3:].tolist()):
            met = any(pair in self.sequences for pair in itertools.pairwise(tokens))
            self.done[row] = self.done[row] or met
        return self.answer(self.done)


ANSWERS = {
    "each row": torch.tensor,
    "whether all rows have": all,
    "the first row for all": lambda done: done[0],
    "the second row for all": lambda done: torch.full((len(done),), done[1]),
}


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(("make", "answer"), [*((make_target, each) for each in ANSWERS), (make_windowed, "each row")])
def test_criteria_with_a_state_of_all_rows(make, answer, ends):
    """They are asked as by plain decoding: once for each step, with the texts of all rows."""
    target = make()
    drafter, call = make_drafter(target), {**GREEDY, "pad_token_id": 0, "return_dict_in_generate": True}
    call |= {"output_scores": True, "output_logits": True}
    for seed in range(2):
        inputs = batch_of(3, seed=seed)
        free = target.generate(**inputs, **GREEDY)[:, 12:].tolist()
        sequences = [tuple(row[at : at + 2]) for row, at in zip(free, (2, 8, 13), strict=True)]
        if ends:
            call["eos_token_id"] = [free[2][6], free[0][9]]
        outputs, seen = [], []
        for assistant in (None, drafter):
            criterion = MultiToken(sequences, 12, 3, ANSWERS[answer])
            call["stopping_criteria"] = [criterion]
            outputs.append(target.generate(**inputs, **call, assistant_model=scripted(assistant, free, seed)))
            seen.append((criterion.asked, criterion.done))
        plain, drafted = outputs
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        assert seen[0] == seen[1]
        assert len(plain.scores) == len(drafted.scores) == len(drafted.logits)
        assert_same_cache(plain, drafted, plain.sequences[:, -1] != 0)  # of these rows all keys are of text


@pytest.fixture
def rows_read(monkeypatch):
    """Makes a target note how many rows each forward reads, from the call of the returned function on."""

    def note(target):
        counts, call = [], type(target).__call__

        @harmless
        def noting(self, *args, **kwargs):
            if self is target:
                counts.append(len(kwargs["input_ids"]))
            return call(self, *args, **kwargs)

        monkeypatch.setattr(type(target), "__call__", noting)  # not its forward: the target would be tried again
        return counts

    return note


def ending_apart(target, rows=4):
    """A padded batch whose rows end at different lengths, the last one at the greatest; prompts and end tokens."""
    for seed in range(100):
        inputs = batch_of(rows, seed=seed)
        free = target.generate(**inputs, **GREEDY)[:, 12:].tolist()
        ends = [row[2 + 3 * index] for index, row in enumerate(free[:-1])]
        lengths = [_length(row, ends) for row in free]
        if sorted(set(lengths)) == sorted(lengths) and max(lengths) - sorted(lengths)[-2] > 4:
            return inputs, ends
    raise AssertionError("no such batch found")


def test_rows_that_have_ended_are_read_no_more(target, drafter, rows_read):
    inputs, ends = ending_apart(target)
    call = {"eos_token_id": ends, "output_scores": True, "output_logits": True}
    plain = target.generate(**inputs, **call, **GREEDY, pad_token_id=0, return_dict_in_generate=True)
    compare(target, drafter, inputs)  # the target is tried, on two rows
    counts = rows_read(target)
    _, drafted = compare(target, drafter, inputs, seed=2, script=plain.sequences[:, 12:].tolist(), **call)
    counts = counts[len(counts) // 2 :]
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    while counts[-1] == len(inputs["input_ids"]):  # at the end, padding for the cache that is returned
        counts.pop()
    assert counts[-1] == 1 and counts == sorted(counts, reverse=True)
    for name in ("scores", "logits"):
        assert len(drafted[name]) == len(plain[name])
    for row, tokens in enumerate(plain.sequences[:, 12:].tolist()):
        length = _length(tokens, ends)
        for ours, theirs in zip(drafted.logits[:length], plain.logits[:length], strict=True):
            torch.testing.assert_close(ours[row], theirs[row], atol=2e-4, rtol=2e-4)
        assert_same_cache(plain, drafted, row, slice(None), slice(12 + length), close=1e-4)
    for ours, theirs in zip(drafted.past_key_values.layers, plain.past_key_values.layers, strict=True):
        assert ours.keys.shape == theirs.keys.shape


WHY_ROWS_STAY = ["own cache", "attentions", "synced", "windows", "token types", "lists"]


@pytest.mark.slow
@pytest.mark.parametrize("why", WHY_ROWS_STAY)
def test_all_rows_are_read_to_the_end_where_they_cannot_leave(target, rows_read, monkeypatch, why):
    target = make_windowed("eager") if why == "windows" else make_target("eager") if why == "attentions" else target
    inputs, ends = ending_apart(target)
    call = {"eos_token_id": ends, **GREEDY, "pad_token_id": 0}
    if why == "attentions":
        call |= {"output_attentions": True, "return_dict_in_generate": True}
    monkeypatch.setattr(type(target), "_has_unfinished_sequences", lambda self, done, *args, **kwargs: not done)
    expected = target.generate(**inputs, **call)
    compare(target, make_drafter(target), inputs)  # the target is tried, on two rows
    if why == "own cache":
        call["past_key_values"] = DynamicCache(config=target.config)
    elif why == "synced":
        call["synced_gpus"] = True
    elif why in ("token types", "lists"):  # a target that is given more of each row, and needs it
        call["token_type_ids" if why == "token types" else "adapter_names"] = (
            torch.zeros_like(inputs["input_ids"]) if why == "token types" else ["one"] * 4
        )
        monkeypatch.setattr(type(target), "_validate_model_kwargs", lambda *args: None)
    if why == "attentions":  # what the target can do is tried on two rows, before
        target.generate(**inputs, **call, assistant_model=make_drafter(target))
    counts = rows_read(target)
    drafted = target.generate(**inputs, **call, assistant_model=make_drafter(target))
    assert set(counts) == {4}
    sequences = [output if isinstance(output, torch.Tensor) else output.sequences for output in (expected, drafted)]
    assert sequences[0].tolist() == sequences[1].tolist()


def test_nothing_is_held_of_a_cache_that_nobody_sees(target, drafter, monkeypatch):
    inputs, ends = ending_apart(target)
    held, take_out = [], EndedRows.take_out

    def counted(self, *args):
        rows = take_out(self, *args)
        held.append(len(self._held))
        return rows

    monkeypatch.setattr(EndedRows, "take_out", counted)
    call = {"eos_token_id": ends, **GREEDY, "pad_token_id": 0}
    for wanted in (False, True):
        target.generate(**inputs, **call, assistant_model=drafter, return_dict_in_generate=wanted)
    assert held[0] == 0 < held[-1]


@pytest.mark.parametrize("make", [make_target, make_windowed])
def test_the_cache_holds_the_end_of_every_row(make):
    """Also of a row that ends in the last round while a longer one, that ended before, decides the length."""
    target, found = make(), 0
    drafter = make_drafter(target)
    for seed in range(20):
        inputs = batch_of(3, seed=seed)
        free = target.generate(**inputs, **GREEDY)[:, 12:].tolist()
        ends = [row[(3, 9, 14)[index]] for index, row in enumerate(free)]
        lengths = [_length(row, ends) for row in free]
        if len(set(lengths)) == 1:
            continue
        found += 1
        plain, drafted = compare(target, drafter, inputs, seed=seed, script=free, eos_token_id=ends)
        assert drafted.sequences.tolist() == plain.sequences.tolist()
        assert_same_cache(plain, drafted)
        if found == 4:
            return
    pytest.fail("too few batches whose rows end apart")


def test_the_rows_that_a_batch_waits_for_are_the_last_ones():
    assert local_target.waited_for({0: 30, 2: 12, 3: 13, 5: 14}) == [2, 3]
    assert local_target.waited_for({0: 30}) == [0] and local_target.waited_for({}) == []


def test_rows_that_are_behind_decide_and_those_that_stay_share_what_is_verified(target, monkeypatch):
    """What is worth verifying is asked of the trees of those rows alone; of fewer rows each may have more nodes."""
    inputs, ends = ending_apart(target)
    drafter = make_drafter(target, tree_size=24)
    asked, sizes, fit, draft = [], [], CostPace.fit, Drafting.draft

    def noting_rows(self, drafted, depth, deciding, join):
        trees = fit(self, drafted, depth, deciding, join)
        asked.append([trees[row].tokens[0] for row in deciding])
        return trees

    def noting_sizes(self, asks):
        sizes.append((len(asks), asks[0].size))
        trees = draft(self, asks)
        if len(asked[-1]) == 1 and len(trees) > 1:  # the last row alone was asked, and the others verify as much
            [last] = [tree for ask, tree in zip(asks, trees, strict=True) if ask.decides]
            assert asked[-1] == [last.tokens[0]] and max(map(len, trees)) >= len(last)
        return trees

    monkeypatch.setattr(local_target, "waited_for", lambda lengths: list(lengths)[-1:])
    monkeypatch.setattr(CostPace, "fit", noting_rows)
    monkeypatch.setattr(Drafting, "draft", noting_sizes)
    call = {"eos_token_id": ends, **GREEDY, "pad_token_id": 0}
    target.generate(**inputs, **call, assistant_model=drafter)
    assert {len(trees) for trees in asked} == {1} and len(asked) > 5
    assert dict(sizes)[4] == 4 and dict(sizes)[1] == 24


@pytest.mark.parametrize("do_sample", [False, True])
def test_rows_leave_one_after_the_other_whatever_is_drafted(target, do_sample):
    """A real drafter, sizes by cost: the texts are those of every row alone."""
    inputs, ends = ending_apart(target)
    drafter = make_drafter(target)
    call = {"eos_token_id": ends, "do_sample": do_sample, "max_new_tokens": NEW, "pad_token_id": 0}
    texts = []
    for sizing in ("fixed", "cost", "cost"):
        drafter.generation_config.tree_sizing = sizing
        torch.manual_seed(5)
        texts.append(target.generate(**inputs, **call, assistant_model=drafter).tolist())
    assert texts[0] == texts[1] == texts[2]
    if not do_sample:
        assert texts[0] == target.generate(**inputs, **call).tolist()


@pytest.mark.parametrize("misread", [False, True], ids=["read rightly", "misread beyond a length"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_target_is_tried_again_after_rows_have_left(target, monkeypatch, misread, side, tuned):
    """One text has ended and left when the others outgrow what is known; where trees are misread then, all go on."""
    from hf_hsdraft.engine import draft_limits

    trials, find_out = [], draft_limits.find_out

    @harmless
    def noting(runtime, *args, **kwargs):
        found = find_out(runtime, *args, **kwargs)
        first = runtime.length == 8
        trials.extend([1] * (not first))
        made = {"trees": False, "chains": False, "reason": "so it is made"}
        return dataclasses.replace(found, **made) if misread and not first else found

    monkeypatch.setattr(draft_limits, "find_out", noting)
    tuned(sure_length=16)
    for rows in (2, 4):
        forget("experience")
        inputs = batch_of(rows, length=8, side=side)
        kwargs = {"do_sample": False, "max_new_tokens": 36, "pad_token_id": 0}
        free = target.generate(**inputs, **kwargs)[:, 8:].tolist()
        ends = next(
            ([token] for token in free[0][4:20] if sum(token in text[:24] for text in free) < rows),
            pytest.fail,
        )
        plain = target.generate(**inputs, **kwargs, eos_token_id=ends)
        drafter = CachebackDrafter(tree_sizing="fixed", tree_size=8)
        assert target.generate(**inputs, **kwargs, eos_token_id=ends, assistant_model=drafter).equal(plain)
    assert trials


def test_an_interrupted_first_call_has_streamed_what_its_cache_holds():
    """An error in the first call, after the target has been tried, loses no token."""
    target = make_target(seed=8)
    ids = batch_of(1)["input_ids"]
    plain = target.generate(ids, **GREEDY)
    drafter = make_drafter(target)
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = None  # else it is tried beforehand
    cache, streamer = DynamicCache(config=target.config), Steps()
    with pytest.raises(KeyboardInterrupt):
        call = {"past_key_values": cache, "streamer": streamer, "assistant_model": drafter}
        target.generate(ids, **GREEDY, **call, stopping_criteria=[Meanwhile(failing(KeyboardInterrupt()), 4)])
    told = len(streamer.tokens)
    assert streamer.tokens == plain[0, :told].tolist() and cache.get_seq_length() == told - 1
    goes_on = target.generate(plain[:, :told], **GREEDY, past_key_values=cache)
    assert goes_on[0, : plain.shape[1]].equal(plain[0])


@pytest.mark.parametrize("rows", [1, 3])
def test_experts_are_multiplied_as_in_plain_decoding(target, drafter, monkeypatch, rows):
    """On GPUs `generate()` multiplies experts otherwise after the prompt's forward; so do all forwards of a draft."""
    inside, seen, optimized = [False], [], type(target)._optimize_model_for_decode

    @contextlib.contextmanager
    @harmless
    def noting(self):
        with optimized(self):
            inside[0] = True
            yield
            inside[0] = False

    monkeypatch.setattr(type(target), "_optimize_model_for_decode", noting)
    hook = target.register_forward_pre_hook(harmless(lambda *_: seen.append(inside[0])))
    try:
        for assistant in ({}, {"assistant_model": drafter}):
            seen.clear()
            target.generate(**batch_of(rows), **GREEDY, **assistant)
            assert not seen[0] and len(seen) > 1 and all(seen[1:])
    finally:
        hook.remove()


@pytest.mark.parametrize("rows", [1, 3])
def test_no_name_that_transformers_deprecates_is_used(target, drafter, rows):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        compare(target, drafter, batch_of(rows))
