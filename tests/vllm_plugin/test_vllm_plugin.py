"""The plugin for vLLM: its models and proposers, driven as vLLM drives them. vLLM itself is replaced by stand-ins.

vLLM and this package need different versions of transformers, so no environment has both. What vLLM gives a draft model
is little: attention to keys and values that it keeps by position, and the target's embedding and head.
"""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import make_drafter, make_target
from torch import nn
from transformers import PreTrainedConfig

from hf_hsdraft.drafters.lookup.ngrams import NgramCache
from hf_hsdraft.vllm_plugin import ngram_proposer
from hf_hsdraft.vllm_plugin.ngram_proposer import NgramProposer
from hf_hsdraft.vllm_plugin.registration import register


class Attention(nn.Module):
    """Causal attention to all that was written at positions up to the own one, as vLLM's with its slots."""

    positions: torch.Tensor  # of the call to come

    def __init__(self, heads, head_size, scale, kv_heads, cache_config, per_layer_sliding_window, prefix):
        super().__init__()
        self.heads, self.kv_heads, self.scale, self.window = heads, kv_heads, scale, per_layer_sliding_window
        self.kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, queries, keys, values):
        shared = self.heads // self.kv_heads
        keys, values = (side.view(len(side), self.kv_heads, -1).repeat_interleave(shared, 1) for side in (keys, values))
        places = Attention.positions.tolist()
        self.kept.update(zip(places, zip(keys, values, strict=True), strict=True))
        rows = []
        for query, place in zip(queries.view(len(queries), self.heads, -1), places, strict=True):
            first = 0 if self.window is None else max(place + 1 - self.window, 0)
            seen = [self.kept[each] for each in range(first, place + 1)]
            scores = torch.stack([(query * key).sum(-1) * self.scale for key, _ in seen])
            mixed = (scores.softmax(0)[..., None] * torch.stack([value for _, value in seen])).sum(0)
            rows.append(mixed.flatten())
        return torch.stack(rows)


class Config(PreTrainedConfig):
    def __init__(self, **fields):
        for name, value in fields.items():
            setattr(self, name, value)


@pytest.fixture
def plugin(monkeypatch):
    """The plugin's modules with stand-ins for those of vLLM."""
    stand_ins = {
        "vllm.transformers_utils.configs.speculators": {"SpeculatorsConfig": Config},
        "vllm.model_executor.layers.attention": {"Attention": Attention},
        "vllm.model_executor.layers.vocab_parallel_embedding": {"VocabParallelEmbedding": nn.Embedding},
        "vllm.model_executor.models.llama_eagle3": {"Eagle3LlamaForCausalLM": nn.Module},
        "vllm.model_executor.models.utils": {"maybe_prefix": lambda prefix, name: f"{prefix}.{name}"},
    }
    for path, names in stand_ins.items():
        for end in range(1, path.count(".") + 2):
            name = ".".join(path.split(".")[:end])
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[path]).update(names)
    for name in ("draft_config", "draft_model"):
        monkeypatch.delitem(sys.modules, f"hf_hsdraft.vllm_plugin.{name}", raising=False)
    from hf_hsdraft.vllm_plugin import draft_config, draft_model

    yield SimpleNamespace(config=draft_config, model=draft_model)
    for name in ("draft_config", "draft_model"):
        sys.modules.pop(f"hf_hsdraft.vllm_plugin.{name}", None)


def drafter_for(target, **fields):
    """One of the kind that the plugin drafts with; it reads no output of the last layer."""
    return make_drafter(target, target_tap_layers=[1, 2], **fields)


def served(plugin, drafter, target, parallel=1):
    """The drafter as vLLM builds and loads it, with the target's embedding and head put in."""
    config = plugin.config.HSDraftVllmConfig(**drafter.config.to_dict())
    text = target.config
    vllm_config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config)),
        model_config=SimpleNamespace(
            get_vocab_size=lambda: text.vocab_size,
            get_hidden_size=lambda: text.hidden_size,
            get_total_num_hidden_layers=lambda: text.num_hidden_layers,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=parallel, pipeline_parallel_size=1),
        cache_config=None,
    )
    model = plugin.model.HSDraftForVllm(vllm_config=vllm_config)
    model = model.to(drafter.dtype).eval()
    model.load_weights(drafter.state_dict().items())
    model.model.embed_tokens, model.lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    return model


def chain_by_vllm(model, taps, following, positions, depth):
    """What vLLM's proposer does for one text: the logits `[depth, V]` of a greedy chain, and its tokens."""
    Attention.positions = positions
    told, handed = model(following, positions, model.combine_hidden_states(taps))
    told, handed, logits, tokens = told[-1:], handed[-1:], [], []
    for step in range(1, depth + 1):
        logits.append(model.compute_logits(told)[0])
        tokens.append(int(logits[-1].argmax()))
        Attention.positions = positions[-1:] + step
        told, handed = model(torch.tensor(tokens[-1:]), Attention.positions, handed)
    return torch.stack(logits), tokens


def chain_by_training(drafter, target, taps, following, positions, tokens):
    """The logits `[depth, V']` for the same chain, by the forward that training uses and the injector's own words."""
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    states = drafter(taps, weights.embed(following), positions, num_draft_steps=len(tokens)).hidden_states
    injected = drafter.injector.advance(weights.embed(following[-1:]), None)
    logits = [drafter.logits(states[0], weights)]
    for state, token in zip(states[1:], tokens, strict=False):
        injected = drafter.injector.advance(weights.embed(torch.tensor([token])), injected)
        logits.append(drafter.injector.told(drafter.logits(state, weights), state, injected))
    return torch.cat(logits)


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {"injector": "low_rank"}, {"num_hidden_layers": 2}, {"sliding_window": 5}])
def test_logits_are_those_of_training(plugin, fields):
    target = make_target().double()
    drafter = drafter_for(target, draft_vocab_ids=list(range(0, 97, 3)), draft_vocab_size=33, **fields).double()
    for parameter in drafter.parameters():  # an untrained injector says nothing
        parameter.add_(torch.randn_like(parameter) * 0.2)
    model, ids = served(plugin, drafter, target), drafter.draft_vocab_ids()
    text = torch.randint(0, target.config.vocab_size, (1, 14))
    states = target(text, output_hidden_states=True).hidden_states
    taps = torch.cat([states[layer][0] for layer in drafter.taps], dim=-1)
    following, positions = text[0, 1:], torch.arange(13)
    # The prompt, then a round in which drafts were rejected: their slots are written anew.
    for end in (9, 11, 13):
        begin = 0 if end == 9 else end - 2
        part = slice(begin, end)
        logits, tokens = chain_by_vllm(model, taps[part], following[part], positions[part], depth=4)
        whole = slice(0, end)
        expected = chain_by_training(drafter, target, taps[whole], following[whole], positions[whole], tokens)
        torch.testing.assert_close(logits[:, ids], expected, atol=2e-3, rtol=2e-3)  # of values up to 100
        others = torch.ones(logits.shape[-1], dtype=torch.bool).index_fill(0, ids, False)
        assert bool((logits[:, others] == -torch.inf).all())


def test_what_vllm_is_told_of_a_drafter(plugin):
    target = make_target()
    drafter = drafter_for(target)
    config = plugin.config.HSDraftVllmConfig(**drafter.config.to_dict())
    assert config.eagle_aux_hidden_state_layer_ids == list(drafter.taps)
    assert config.architectures == ["HSDraftForVllm"] and config.vocab_size == target.config.vocab_size
    own = config.to_dict()
    assert plugin.config.HSDraftVllmConfig(**own).hidden_size == config.hidden_size  # a copy of a copy
    plugin.config.HSDraftVllmConfig()


@pytest.mark.parametrize("fields, message", [
    ({"num_step_modules": 2}, "several sets of parameters"),
    ({"num_hidden_layers": 2, "num_roll_layers": 1}, "a part of its layers"),
    ({"head": "trained"}, "trained output rows"),
    ({"injector": "selector"}, "a selector"),
])  # fmt: skip
def test_drafters_of_other_kinds_are_refused(plugin, fields, message):
    drafter = drafter_for(make_target(), **fields)
    with pytest.raises(ValueError, match=message):
        plugin.config.HSDraftVllmConfig(**drafter.config.to_dict())


def test_other_targets_are_refused(plugin):
    target = make_target()
    drafter = drafter_for(target)
    with pytest.raises(ValueError, match=r"num_hidden_layers=.*the drafter expects"):
        served(plugin, drafter, make_target(num_hidden_layers=target.config.num_hidden_layers + 1))
    with pytest.raises(ValueError, match="whole on one device"):
        served(plugin, drafter, target, parallel=2)


@pytest.mark.parametrize("missing", ["vllm", "vllm.transformers_utils.configs.speculators"])
def test_another_vllm_starts_without_the_plugin(plugin, monkeypatch, caplog, missing):
    """`plugin` puts stand-ins in the place of vLLM, without a registry of models."""
    monkeypatch.setitem(sys.modules, missing, None)
    register()
    (line,) = caplog.messages
    assert "vLLM cannot draft with hidden-state drafters" in line and "install vLLM 0.32" in line


def proposer(rows=3, longest=64, depth=4):
    return NgramProposer(
        SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=depth),
            model_config=SimpleNamespace(max_model_len=longest, get_vocab_size=lambda: 50),
            scheduler_config=SimpleNamespace(max_num_seqs=rows),
        )
    )


def proposed(proposer, texts, longest=64):
    """What is drafted for texts in these rows; `None` for one that still reads its prompt."""
    tokens, lengths = np.zeros((len(texts), longest), dtype=np.int32), np.zeros(len(texts), dtype=np.int32)
    for row, text in enumerate(texts):
        lengths[row] = len(text or ())
        tokens[row, : lengths[row]] = text or ()
    return proposer.propose([[] if text is None else text[-1:] for text in texts], lengths, tokens)


def chain(text, depth=4):
    """The same from tables that are made anew."""
    cache = NgramCache(4, vocab_size=50)
    cache.extend(text)
    return list(cache.draft(depth, depth, width=1).tokens[1:])


def test_ngrams_follow_their_texts_when_rows_move():
    one, two, three = [1, 2, 3, 4, 1, 2, 3], [7, 8, 9, 7, 8], [1, 2, 3, 5, 1]
    ours = proposer()
    assert proposed(ours, [one, two, three]) == [chain(one), chain(two), chain(three)]
    assert chain(one)[0] == 4 and chain(two)[0] == 9
    one, three = [*one, 4, 1], [*three, 2, 3]
    assert proposed(ours, [three, one]) == [chain(three), chain(one)]  # the second has ended, the others moved
    assert proposed(ours, [None, one]) == [[], chain(one)]
    assert proposed(ours, [three, [*one, 2, 9]]) == [chain(three), chain([*one, 2, 9])]
    for start in range(20):  # texts that have ended are forgotten
        proposed(ours, [[start, start + 1, start]])
    assert len(ours._texts) <= 1 + 3  # one that is decoded, and as many others as there are rows


def test_tables_of_ended_texts_are_bounded_by_their_tokens(monkeypatch):
    monkeypatch.setattr(ngram_proposer, "_WAITING_TOKENS", 10)
    ours = proposer(rows=8)
    texts = [[start, *range(1, 5)] for start in range(20, 28)]
    assert proposed(ours, texts) == [chain(text) for text in texts]
    assert len(ours._texts) == 8  # those that are decoded are kept, however many tokens they have
    going_on = [*texts[3], 1, 2]
    assert proposed(ours, [going_on]) == [chain(going_on)]
    assert len(ours._texts) == 1 + 2 and sum(len(text.tokens) for text in ours._texts[1:]) <= 10
    forgotten = [*texts[7], 1, 2]
    assert proposed(ours, [forgotten]) == [chain(forgotten)]  # its tables are made anew


def test_ngrams_stay_within_the_longest_text_and_the_vocabulary():
    text = [1, 2, 3, 4] * 3
    assert len(proposed(proposer(longest=14), [text], 14)[0]) == 2
    assert proposed(proposer(longest=12), [text], 12) == [[]]
    assert proposed(proposer(), [[1, 2, 1, 60]]) == [[]]  # an id beyond the vocabulary


def test_an_older_transformers_has_the_plugin_alone():
    code = """
import transformers, transformers.cache_utils
transformers.__version__ = "5.19.0"
del transformers.cache_utils.DummyLayer  # newer than that
import hf_hsdraft
import hf_hsdraft.vllm_plugin.ngram_proposer, hf_hsdraft.vllm_plugin.registration, hf_hsdraft.vllm_plugin.speculation
import hf_hsdraft.drafters.hidden_state.network, hf_hsdraft.drafters.hidden_state.trunk
try:
    from hf_hsdraft import AutoDrafter
except ImportError as error:
    print(error)
assert not hasattr(hf_hsdraft, "something_else")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "transformers 5.19.0 is installed" in done.stdout and "hf_hsdraft.vllm_plugin" in done.stdout, done.stderr
