"""A small language model as a drafter: it drafts what a plain forward of it says."""

from __future__ import annotations

import copy
import functools
import gc
import json
import pickle
import random
import weakref

import pytest
import torch
from conftest import VOCAB, as_plain, edited, make_drafter, make_target
from family_helpers import near
from lm_helpers import tiny, with_fixed
from oracles.tiny import VOCABULARY, tiny_config, tiny_model
from session_helpers import padded
from transformers import AutoModelForCausalLM, BartForConditionalGeneration, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_hsdraft import AutoDrafter, CausalLMDrafter
from hf_hsdraft.cli._describe import describe
from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call
from hf_hsdraft.methods.language_model import lm_files

NEW = 12
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def target():
    return make_target(seed=3)


def drafter_of(model, tokenizer=None, **options) -> CausalLMDrafter:
    return with_fixed(CausalLMDrafter(model, tokenizer), **options)


class Texts:
    """Texts that go on as chance has it, for a session that drafts for them: what the engine would tell it."""

    def __init__(self, drafter, target, rows: int) -> None:
        self.options = DraftOptions.of(drafter)
        self.chance, self.vocab_size = random.Random(0), target.config.get_text_config().vocab_size
        self.texts = [self.tokens(5 + 4 * row) for row in range(rows)]
        self.session = drafter.session(Call(target, rows, self.options))
        self.observe(dict(enumerate(self.texts)), prompts=True)
        self.growing = list(range(rows))

    def tokens(self, count: int) -> list[int]:
        return [self.chance.randrange(2, self.vocab_size) for _ in range(count)]

    def observe(self, new: dict[int, list[int]], prompts: bool = False) -> None:
        news = []
        for row, tokens in new.items():
            known, last = (tokens[:-1], tokens[-1:]) if prompts else ([], tokens)
            places = torch.arange(len(last))
            news.append(Accepted(row, last, torch.zeros(len(last), 0), places, torch.tensor(last), known))
        self.session.observe(news)

    def draft(self, depth: int, rows: list[int] | None = None):
        rows = self.growing if rows is None else rows
        options, sharing = self.options, len(self.texts)
        size = options.shared_by(sharing).tree_size
        asks = [Ask(row, self.texts[row][-1], min(depth, options.depth), size, options.beam_width) for row in rows]
        return dict(zip(rows, self.session.draft(asks), strict=True))

    def accept(self, trees) -> None:
        """Accepts a random path of each tree and another token."""
        new = {}
        for row, tree in trees.items():
            path = tree.path(self.chance.randrange(len(tree)))
            new[row] = [tree.tokens[node] for node in path] + self.tokens(1)
            self.texts[row] = self.texts[row] + new[row]
        self.observe(new)


@torch.no_grad()
def assert_plain(model, text: list[int], tree, vocab_size: int) -> None:
    """The score of each node is the log-probability of its path by a plain forward of the model."""
    paths = [[tree.tokens[each] for each in tree.path(node)] for node in range(1, len(tree))]
    ids = torch.tensor([[*text, *path, *[0] * (max(tree.depths) - len(path))] for path in paths])
    logits = model(input_ids=ids, use_cache=False).logits[:, len(text) - 1 : -1, :vocab_size].float()
    for node, (path, after) in enumerate(zip(paths, logits.log_softmax(-1), strict=True), 1):
        expected = after[range(len(path)), path].sum().item()
        assert tree.scores[node] == pytest.approx(expected, abs=2e-3), (node, path)


KINDS = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "gemma3_text": {"sliding_window": 8},
    "gpt2": {},
    "gpt_oss": {"sliding_window": 8},
    "cohere2": {"sliding_window": 8},
}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_every_node_has_the_probability_of_a_plain_forward(kind, rows):
    """Over rounds with accepted and rejected drafts, texts of different lengths, pauses, and texts that end."""
    model = tiny(kind, **KINDS[kind])
    texts = Texts(drafter_of(model, tree_builder="stochastic_beam", tree_size=18 * rows, beam_width=3), model, rows)
    for number in range(6):
        if number == 4 and rows > 1:
            texts.growing = [0, 2]
            texts.session.keep(texts.growing)
        pausing = [row for row in texts.growing if rows > 1 and number % 3 == row]
        trees = texts.draft(4, [row for row in texts.growing if row not in pausing])
        for row, tree in trees.items():
            assert max(tree.depths) == 4 < len(tree) - 1 and not tree.fault(VOCABULARY)
            assert_plain(model, texts.texts[row], tree, VOCABULARY)
        texts.accept({**trees, **{row: DraftTree.root(texts.texts[row][-1]) for row in pausing}})


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", ["bloom", "falcon"])
def test_models_that_read_no_trees_draft_chains(kind, rows):
    model = tiny(kind, **({"alibi": True} if kind == "falcon" else {}))
    texts = Texts(drafter_of(model), model, rows)
    for _ in range(4):
        trees = texts.draft(4)
        for row, tree in trees.items():
            assert max(tree.depths) == len(tree) - 1 > 1
            assert_plain(model, texts.texts[row], tree, VOCABULARY)
        texts.accept(trees)


def test_texts_may_be_longer_than_one_mask_and_slots_do_not_run_away(tuned):
    tuned(mask_rows=3)
    model = tiny("mistral", sliding_window=8)
    texts = Texts(drafter_of(model, tree_builder="stochastic_beam", tree_size=36, beam_width=2), model, 3)
    for _ in range(6):
        for row, tree in texts.draft(3).items():
            assert_plain(model, texts.texts[row], tree, VOCABULARY)
        [group] = texts.session._groups
        assert group.kept == [len(text) for text in texts.texts] and group._slots.length == max(group.kept)
        texts.accept({row: DraftTree.root(text[-1]) for row, text in enumerate(texts.texts)})


def test_only_roots_and_expanded_nodes_are_multiplied_by_the_head():
    model, rows = tiny("llama"), []
    texts = Texts(drafter_of(model, tree_size=12, beam_width=3), model, 1)
    model.lm_head.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[1]))
    texts.draft(4)
    assert rows == [1, 3, 3, 3]


@pytest.mark.parametrize("rows", [1, 2])
def test_the_target_itself_drafts_what_it_accepts(target, rows):
    """All drafted tokens of a chain are right: a round emits its depth and one token more."""
    drafter = drafter_of(target, beam_width=1, tree_size=15)
    depth = DraftOptions.of(drafter).shared_by(rows).depth
    output = as_plain(target, drafter, padded(rows), max_new_tokens=1 + 4 * (depth + 1))
    assert output.statistics.accepted_lengths == [depth] * 4 * rows
    assert output.statistics.target_forwards == 1 + 4


def test_a_model_that_is_deaf_to_masks_drafts_chains(target):
    """It is tried once: its class and its configuration tell nothing of it."""
    model, forwards = near(target), []
    forward = model.forward

    @functools.wraps(forward)
    def deaf(input_ids, attention_mask=None, **kwargs):
        forwards.append(len(input_ids))
        return forward(input_ids, **kwargs)

    model.forward = deaf
    drafter = drafter_of(model)
    output = as_plain(target, drafter, padded(2), max_new_tokens=NEW)
    assert sum(output.statistics.accepted_lengths) > 0
    assert set(forwards[-10:]) == {1}
    texts = Texts(drafter, target, 2)
    for row, tree in texts.draft(3).items():
        assert_plain(near(target), texts.texts[row], tree, VOCAB)


RECURRENT = "recurrent layers: they cannot take back"
REFUSED = {
    "mamba": (lambda: tiny("mamba"), RECURRENT),
    "jamba": (lambda: tiny("jamba"), RECURRENT),
    "qwen3_next": (lambda: tiny("qwen3_next"), RECURRENT),
    "openai-gpt": (lambda: tiny("openai-gpt"), "OpenAIGPTLMHeadModel keeps no keys and values"),
    "in training": (lambda: make_target().train(), r"training mode.*call drafter.eval\(\)"),
    "bart": (
        lambda: tiny_model(BartForConditionalGeneration, tiny_config(CONFIG_MAPPING["bart"])),
        "BartForConditionalGeneration is an encoder-decoder",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_models_that_cannot_draft_are_refused(target, kind):
    make, message = REFUSED[kind]
    with pytest.raises(ValueError, match=message):
        target.generate(**padded(1), assistant_model=CausalLMDrafter(make()))


@pytest.mark.parametrize("size", [VOCAB - 40, VOCAB + 30])
@pytest.mark.parametrize("rows", [1, 3])
def test_only_tokens_that_both_know_are_drafted(target, size, rows):
    """A text with a token that the drafter does not know goes on without drafts."""
    drafter, inputs = drafter_of(make_target(seed=3, vocab_size=size)), padded(rows)
    if size < VOCAB:
        inputs["input_ids"] %= size
        inputs["input_ids"][-1, -1] = VOCAB - 1
    seen, session = [], drafter.session

    def watched(call):
        made = session(call)
        draft = made.draft
        made.draft = lambda asks: seen.extend(trees := draft(asks)) or trees
        return made

    drafter.session = watched
    as_plain(target, drafter, inputs, max_new_tokens=NEW)
    drafted = [token for tree in seen for token in tree.tokens[1:]]
    assert all(token < min(size, VOCAB) for token in drafted)
    assert bool(drafted) is (size > VOCAB or rows > 1)


def test_nothing_is_drafted_beyond_the_models_positions():
    model, target = tiny("gpt2", n_positions=20), make_target(vocab_size=VOCABULARY)
    drafter = drafter_of(model)
    for rows in (1, 3):
        output = as_plain(target, drafter, padded(rows), max_new_tokens=NEW)
        assert output.statistics.drafted_nodes[0] > 0 == output.statistics.drafted_nodes[-1]


def other_words(tokenizer, word: str, other: str):
    made = copy.deepcopy(tokenizer)
    vocabulary = json.loads(made.backend_tokenizer.to_str())
    vocabulary["model"]["vocab"][other] = vocabulary["model"]["vocab"].pop(word)
    made._tokenizer = made.backend_tokenizer.from_str(json.dumps(vocabulary))
    return made


def test_a_drafter_with_another_tokenizer_is_refused(target, tokenizer):
    inputs, other = padded(1), other_words(tokenizer, "w7", "seven")
    with pytest.raises(ValueError, match=r"tokenizer is not the target's: 1 of 97 token ids .* is 'seven', .* 'w7'"):
        target.generate(**inputs, assistant_model=drafter_of(target, other), tokenizer=tokenizer)
    more = copy.deepcopy(tokenizer)
    more.add_tokens(["<further>"])
    for own in (more, None, tokenizer):
        target.generate(**inputs, max_new_tokens=4, assistant_model=drafter_of(target, own), tokenizer=tokenizer)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_a_chat_goes_on_without_reading_anything_twice(kind):
    target, read = tiny(kind, **KINDS[kind]), []
    model = tiny(kind, seed=1, **KINDS[kind])
    drafter = drafter_of(model)
    model.register_forward_pre_hook(lambda m, args, kwargs: read.append(kwargs["input_ids"].shape[1]), with_kwargs=True)
    cache, ids = DynamicCache(config=target.config), padded(1)["input_ids"]
    cache.activate_past_recording()
    call = {**GREEDY, "assistant_model": drafter}
    first = target.generate(ids, **call, past_key_values=cache).sequences
    further = torch.cat([first, ids[:, :6]], dim=1)
    copies = [copy.deepcopy(cache) for _ in range(2)]
    stored = pickle.loads(pickle.dumps(copies[0]))
    plain = target.generate(further, **GREEDY).sequences.tolist()
    for each, at_most in ((copies[0], 12), (copies[1], 12), (stored, 1000)):
        read.clear()
        output = target.generate(further, **call, past_key_values=each)
        assert output.sequences.tolist() == plain
        assert read[0] <= at_most if at_most == 12 else read[0] == further.shape[1] + 1
    read.clear()  # of another text the cache holds nothing
    other = torch.cat([ids, first[:, 11:] % 50 + 5], dim=1)
    as_plain(target, drafter, other, max_new_tokens=NEW)
    assert read[0] >= other.shape[1]


def test_a_folder_of_a_language_model_is_a_drafter(target, tokenizer, tmp_path):
    model = near(target)
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    drafter = AutoDrafter.from_pretrained(tmp_path / "model", dtype=torch.float64, tree_size=9)
    assert type(drafter) is CausalLMDrafter and drafter.dtype == torch.float64
    assert drafter.tokenizer.get_vocab() == tokenizer.get_vocab()
    drafter.generation_config.num_assistant_tokens = 3
    drafter.save_pretrained(tmp_path / "again")
    again = CausalLMDrafter.from_pretrained(str(tmp_path / "again"))
    assert (again.generation_config.num_assistant_tokens, again.generation_config.tree_size) == (3, 9)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert plain.generation_config.temperature == 0.5 and not hasattr(plain.generation_config, "tree_size")


def test_a_plain_model_object_is_transformers_own_assistant(target, prompt):
    model = near(target)
    output = target.generate(prompt, **GREEDY, assistant_model=model)
    assert not hasattr(output, "statistics")
    assert hasattr(target.generate(prompt, **GREEDY, assistant_model=CausalLMDrafter(model)), "statistics")


MARKS = {
    "draft_vocab_size": 50, "eagle_config": {}, "dflash_config": {"mask_token_id": 4}, "markov_rank": 8,
    "speculators_model_type": "eagle3", "target_layer_ids": [1],
}  # fmt: skip


def test_a_drafter_of_another_format_is_no_language_model(target, tmp_path):
    target.save_pretrained(tmp_path)
    for mark, value in MARKS.items():
        edited(tmp_path, **{**dict.fromkeys(MARKS), mark: value})
        with pytest.raises(ValueError, match=mark):
            CausalLMDrafter.from_pretrained(tmp_path)


def test_what_is_no_language_model_or_not_a_whole_one_is_told(target, tmp_path):
    with pytest.raises(TypeError, match="model=str is invalid: expected a causal language model"):
        CausalLMDrafter("name")
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    with pytest.raises(ValueError, match=r"holds no causal language model: architectures=.*HSDrafter"):
        CausalLMDrafter.from_pretrained(tmp_path / "drafter")
    state = target.state_dict()
    del state["model.layers.1.mlp.up_proj.weight"]
    target.save_pretrained(tmp_path / "part", state_dict=state)
    with pytest.raises(ValueError, match=r"missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        AutoDrafter.from_pretrained(tmp_path / "part")
    target.save_pretrained(tmp_path / "more", state_dict={**target.state_dict(), "further.weight": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"unknown: further\.weight"):
        AutoDrafter.from_pretrained(tmp_path / "more")
    with pytest.raises(ValueError, match="trust_remote_code=True is invalid"):
        AutoDrafter.from_pretrained(tmp_path / "more", trust_remote_code=True)


@pytest.mark.parametrize("installed", [False, True])
def test_info_says_what_language_models_in_gptq_need(installed, target, tmp_path, monkeypatch):
    target.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(lm_files, "is_optimum_available", lambda: installed)
    told = describe(str(tmp_path))["drafter"]
    assert told["drafts here"] == ("yes" if installed else "no")
    assert ("pip install optimum" in told.get("cannot be loaded", "")) is not installed


def test_options_and_shapes_are_checked_before_weights_are_read(target, tmp_path, monkeypatch):
    CausalLMDrafter(target).save_pretrained(tmp_path)
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(TypeError, match="no drafting option tree_sise: the nearest option is tree_size"):
        CausalLMDrafter.from_pretrained(tmp_path, tree_sise=9)
    with pytest.raises(ValueError, match="tree_size=0 is invalid"):
        AutoDrafter.from_pretrained(tmp_path, tree_size=0)
    edited(tmp_path, "drafting_config.json", beam_width=0)
    with pytest.raises(ValueError, match="beam_width=0 is invalid"):
        AutoDrafter.from_pretrained(tmp_path)
    (tmp_path / "drafting_config.json").unlink()
    edited(tmp_path, intermediate_size=2**20)
    with pytest.raises(ValueError, match=r"of other shapes: model\.layers\.0\.mlp\.\w+\.weight \[.* instead of"):
        AutoDrafter.from_pretrained(tmp_path)


def test_a_cache_does_not_keep_the_drafter_alive(target):
    drafter, cache = drafter_of(near(target)), DynamicCache(config=target.config)
    cache.activate_past_recording()
    target.generate(padded(1)["input_ids"], **GREEDY, assistant_model=drafter, past_key_values=cache)
    model, parameters = weakref.ref(drafter.model), weakref.ref(next(drafter.model.parameters()))
    del drafter
    gc.collect()
    assert model() is None and parameters() is None
