"""A small language model as a drafter: it drafts what a plain forward of it says, and the target decides."""

from __future__ import annotations

import copy
import json
import pickle
import random

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from hf_hsdraft import AutoDrafter, CausalLMDrafter, attach
from hf_hsdraft.bench.tiny import VOCABULARY, tiny_config, tiny_model
from hf_hsdraft.drafters.draft_options import DraftOptions
from hf_hsdraft.drafters.protocol import Accepted, Ask, DraftCall

GREEDY = {"do_sample": False, "max_new_tokens": 24, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def target():
    return make_target(seed=3)


def drafter_of(model, tokenizer=None, **options) -> CausalLMDrafter:
    """A drafter whose trees have the same size on every machine."""
    drafter = CausalLMDrafter(model, tokenizer)
    for name, value in {"tree_sizing": "fixed", "ngram_length": 0, **options}.items():
        setattr(drafter.generation_config, name, value)
    return drafter


def near(target, seed: int = 1, noise: float = 0.02):
    """A model whose drafts are often right and often wrong: the target with noise on its weights."""
    model, generator = copy.deepcopy(target), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight += noise * torch.randn(weight.shape, generator=generator)
    return model


def padded(rows: int, side: str = "left") -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCAB, (rows, 11), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        columns = slice(None, 2 * row) if side == "left" else slice(11 - 2 * row, None)
        mask[row, columns], ids[row, columns] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def tiny(model_type: str, seed: int = 0, **fields):
    """A tiny random model of a type, with small windows."""
    config = tiny_config(CONFIG_MAPPING[model_type])
    for name, value in fields.items():
        setattr(config, name, value)
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    return tiny_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config, seed)


class Texts:
    """Texts that go on as chance has it, for a session that drafts for them: what the engine would tell it."""

    def __init__(self, drafter, target, rows: int, seed: int = 0, **options) -> None:
        for name, value in options.items():
            setattr(drafter.generation_config, name, value)
        self.options = DraftOptions.of(drafter)
        self.chance, self.vocab_size = random.Random(seed), target.config.get_text_config().vocab_size
        self.texts = [self.tokens(5 + 4 * row) for row in range(rows)]
        self.session = drafter.session(DraftCall(target, rows, self.options))
        self.observe({row: text for row, text in enumerate(self.texts)}, prompts=True)
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
        asks = [
            Ask(row, self.texts[row][-1], depth, size, sharing, options.beam_width == 1, reach=depth) for row in rows
        ]
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
    """The score of each node is the log-probability of its path by plain forwards of the model."""
    for node in range(1, len(tree)):
        path = [tree.tokens[each] for each in tree.path(node)]
        ids = torch.tensor([[*text, *path]])
        logits = model(input_ids=ids, use_cache=False).logits[0, len(text) - 1 : -1, :vocab_size].float()
        expected = logits.log_softmax(-1)[range(len(path)), path].sum().item()
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
    for number in range(7):
        if number == 5 and rows > 1:
            texts.growing = [0, 2]
            texts.session.keep(texts.growing)
        pausing = [row for row in texts.growing if rows > 1 and number % 3 == row]
        trees = texts.draft(4, [row for row in texts.growing if row not in pausing])
        for row, tree in trees.items():
            assert max(tree.depths) == 4 < len(tree) - 1 and not tree.fault(VOCABULARY)
            assert_plain(model, texts.texts[row], tree, VOCABULARY)
        texts.accept({**trees, **{row: texts_root(texts, row) for row in pausing}})


def texts_root(texts, row):
    from hf_hsdraft.trees.draft_tree import DraftTree

    return DraftTree.root(texts.texts[row][-1])


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
