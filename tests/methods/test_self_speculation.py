"""Drafting by the target's own first layers: exact texts, what is reused, training, files; with images too."""

from __future__ import annotations

import json

import pytest
import torch
import training_helpers
from conftest import VOCAB, as_plain
from lm_helpers import tiny
from oracles.format_parity import randomise
from oracles.tiny import VOCABULARY
from session_helpers import borrow, padded
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter, SelfDraftConfig, SelfDrafter
from hf_hsdraft.cli.main import app
from hf_hsdraft.methods.self_speculation.first_layers import FirstLayers
from hf_hsdraft.runtime.tree_reading import read_trees
from hf_hsdraft.training.data.conversations import TokenizedConversation
from hf_hsdraft.training.data.features import read_features
from hf_hsdraft.training.families.trainable import TRAINABLE, family_of
from hf_hsdraft.training.loop.arguments import TRAINING_OPTIONS, DrafterTrainingArguments
from hf_hsdraft.training.loop.trainer import DrafterTrainer
from hf_hsdraft.training.loss.chains import Chains, Pack, true_labels, unroll
from hf_hsdraft.training.loss.loss import ChainLoss
from hf_hsdraft.training.loss.objectives import objective_of

LAYERS, NEW = 4, 12
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": LAYERS}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256}
SIZES |= {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.3}
WINDOWS = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2}
TARGETS = {
    "llama": {"model_type": "llama"},
    "eager": {"model_type": "llama", "attn_implementation": "eager"},
    "qwen2": {"model_type": "qwen2"},
    "windows": {"model_type": "gemma3_text", **WINDOWS},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": LAYERS, "n_head": 4, "n_positions": 256},
}


def target_of(kind: str, **overrides):
    torch.manual_seed(0)
    fields = {**SIZES, **TARGETS[kind], **overrides}
    attention = fields.pop("attn_implementation", "sdpa")
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


def with_images():
    vision = {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    torch.manual_seed(0)
    text = {"model_type": "llama", **SIZES}
    config = AutoConfig.for_model("llava", vision_config=vision, text_config=text, image_token_id=96)
    return AutoModelForImageTextToText.from_config(config).eval()


def pictures(rows: int) -> dict[str, torch.Tensor]:
    inputs = padded(rows)
    inputs["input_ids"].clamp_(max=90)
    inputs["input_ids"][:, 7:11] = 96
    return inputs | {"pixel_values": torch.randn(rows, 3, 28, 28, generator=torch.Generator().manual_seed(1))}


def make_self(target, layers: int = 2, right: bool = True, **overrides) -> SelfDrafter:
    """A drafter whose drafts cost nothing. It passes early states on as they are, and so is `right` after `early`."""
    fields = {"num_draft_steps": 4, "draft_vocab_size": VOCAB, "tree_size": 14, "draft_layers": layers}
    drafter = SelfDrafter(SelfDraftConfig.for_target(target, **{**fields, **overrides})).eval()
    randomise(drafter)
    if right:
        final = target.get_decoder().norm if hasattr(target.get_decoder(), "norm") else target.get_decoder().ln_f
        offset = 1.0 if "Gemma" in type(final).__name__ else 0.0
        for module in (drafter.turn, *(layer.down_proj for layer in drafter.layers)):
            torch.nn.init.zeros_(module.weight)
        torch.nn.init.ones_(drafter.tap_norm.weight)
        drafter.norm.weight.data.copy_(final.weight.data + offset)
    options = drafter.generation_config
    options.node_cost = options.depth_cost = 0.0
    options.tree_sizing, options.ngram_length = "fixed", 0
    return drafter


@torch.no_grad()
def early(target, layers: int = 2):
    """The target with other layers that say little: its first ones often know the next token."""
    decoder = target.get_decoder()
    for layer in (decoder.layers if hasattr(decoder, "layers") else decoder.h)[layers:]:
        for name, weight in layer.named_parameters():
            if any(part in name for part in ("o_proj", "down_proj", "c_proj", "post_")):
                weight.mul_(0.1)
    return target


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", TARGETS)
def test_texts_are_the_targets_own(kind, rows, right):
    target = early(target_of(kind))
    drafter = make_self(target, right=right)
    statistics = as_plain(target, drafter, padded(rows), max_new_tokens=NEW).statistics
    assert statistics.draft_kind == "tree" and max(statistics.drafted_nodes) > 1
    assert statistics.reused_share > 0.1
    assert not right or sum(statistics.accepted_lengths) > statistics.rounds * 0.5


@pytest.mark.parametrize("kind", ["gptj", "codegen", "falcon"])
def test_layers_that_return_tuples_draft_too(kind):
    target = tiny(kind)
    drafter = make_self(target, right=False, draft_vocab_size=VOCABULARY)
    statistics = as_plain(target, drafter, padded(2), max_new_tokens=NEW).statistics
    assert statistics.draft_kind == "tree" and max(statistics.drafted_nodes) > 1 and statistics.reused_share > 0.1


@pytest.mark.parametrize(
    "options", [{}, {"layer_reuse": False}, {"beam_width": 1}, {"ngram_length": 4, "tree_sizing": "cost"}], ids=str
)
def test_rows_are_drafted_up_to_the_last_position(options):
    """The longest row has no positions for the depths that others are drafted to."""
    inputs = padded(3)
    length = inputs["input_ids"].shape[1]
    target = early(target_of("gpt2", n_positions=length + NEW))
    drafter = make_self(target)
    drafter.generation_config.update(**options)
    drafted = as_plain(target, drafter, inputs, max_new_tokens=NEW)
    assert drafted.sequences.shape[1] == length + NEW
    if "tree_sizing" not in options:
        assert sum(drafted.statistics.accepted_lengths) > drafted.statistics.rounds * 0.5
        assert (drafted.statistics.reused_share > 0) == options.get("layer_reuse", True)


@pytest.mark.parametrize("rows", [1, 2])
def test_pictures_in_the_prompt(rows):
    target = early(with_images())
    drafter = make_self(target)
    drafted = as_plain(target, drafter, pictures(rows), suppress_tokens=[96], max_new_tokens=NEW)
    assert drafted.statistics.reused_share > 0.1
    assert sum(drafted.statistics.accepted_lengths) > drafted.statistics.rounds * 0.5
    other = pictures(rows) | {"pixel_values": torch.zeros(rows, 3, 28, 28)}
    assert target.generate(**other, max_new_tokens=NEW, do_sample=False).tolist() != drafted.sequences.tolist()


@torch.no_grad()
def test_logits_after_reuse_are_those_of_a_whole_forward(monkeypatch):
    """Of every node, where a text is read with n-grams and leaves that nobody has read ahead."""
    target = early(target_of("llama"))
    drafter = make_self(target)
    drafter.generation_config.ngram_length = 4
    original, compared = FirstLayers.verify, []

    def checked(self, trees, columns):
        found = original(self, trees, columns)
        if found is not None and self._reused:
            texts = found.logits[:, -columns:]
            self._call.slots.drop(columns)
            plain = read_trees(self._call, trees, columns, self._call.kinds)
            compared.extend(
                (texts[row, node], plain.logits[row, node])
                for row, tree in enumerate(trees)
                for node in range(len(tree))
            )
            return plain
        return found

    monkeypatch.setattr(FirstLayers, "verify", checked)
    as_plain(target, drafter, padded(3), max_new_tokens=16)
    found, wanted = map(torch.stack, zip(*compared, strict=True))
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    assert len(found) > 50


@pytest.mark.parametrize("where", ["drafting", "verifying"])
def test_an_interrupt_leaves_the_cache_as_it_was(where, monkeypatch):
    target = early(target_of("windows"))
    drafter, inputs = make_self(target), padded(1)
    cache = DynamicCache(config=target.config)
    name = {"drafting": "read_nodes", "verifying": "_model_after"}[where]
    original, calls = getattr(FirstLayers, name), []

    def interrupted(self, *args):
        found = original(self, *args)
        calls.append(None)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(FirstLayers, name, interrupted)
    call = {"max_new_tokens": 48, "do_sample": False, "assistant_model": drafter}
    with pytest.raises(KeyboardInterrupt):
        target.generate(**inputs, **call, past_key_values=cache)
    lengths = {layer.get_seq_length() for layer in cache.layers}
    assert len(lengths) == 1 and lengths.pop() >= 12


def test_hidden_states_that_are_asked_for_are_those_of_plain_decoding():
    """Then nothing is reused: the first layers would return none."""
    target = early(target_of("llama"))
    call = {"max_new_tokens": NEW, "output_hidden_states": True}
    drafted = as_plain(target, make_self(target), padded(1), **call)
    plain = target.generate(**padded(1), **call, do_sample=False, return_dict_in_generate=True)
    assert drafted.statistics.reused_share == 0.0
    for one, other in zip(plain.hidden_states, drafted.hidden_states, strict=True):
        for left, right in zip(one, other, strict=True):
            torch.testing.assert_close(left, right, atol=1e-3, rtol=1e-3)


def test_a_cache_that_does_not_grow_is_decoded_without_drafts(caplog):
    target = early(target_of("llama"))
    drafted = as_plain(target, make_self(target), padded(1), cache_implementation="static", max_new_tokens=NEW)
    assert not sum(drafted.statistics.drafted_nodes) and "a cache that grows" in caplog.text


def test_the_target_is_left_as_it_was():
    target = early(target_of("llama"))
    before = [(name, sorted(vars(module)), list(module._modules)) for name, module in target.named_modules()]
    as_plain(target, make_self(target), padded(1), max_new_tokens=NEW)
    assert [(name, sorted(vars(module)), list(module._modules)) for name, module in target.named_modules()] == before


def test_layers_that_were_misread_are_not_reused(monkeypatch, caplog):
    """Wherever reuse gives other logits, all is recomputed."""
    target = early(target_of("llama"))
    original = FirstLayers._last_slots
    monkeypatch.setattr(FirstLayers, "_last_slots", lambda self, count: [(k, -v) for k, v in original(self, count)])
    drafted = as_plain(target, make_self(target), padded(1), max_new_tokens=NEW)
    assert drafted.statistics.reused_share == 0.0
    assert "all layers of LlamaForCausalLM are recomputed" in caplog.text


def test_what_cannot_be_taken_apart_is_refused():
    target = target_of("llama")
    target.model.forward = target.model.forward
    with pytest.raises(ValueError, match="its first layers cannot draft: the forward of LlamaModel was replaced"):
        target.generate(**padded(1), max_new_tokens=4, assistant_model=make_self(target))


# --- training and files ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_network_is_its_formula():
    drafter = make_self(target_of("llama"), right=False, num_hidden_layers=2)
    states = torch.randn(9, 32, generator=torch.Generator().manual_seed(0))

    def normed(x, norm):
        return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight

    x = normed(states, drafter.tap_norm)
    x = x + x @ drafter.turn.weight.T
    for layer in drafter.layers:
        inner = normed(x, layer.norm)
        gate = inner @ layer.gate_proj.weight.T
        x = x + (gate * gate.sigmoid() * (inner @ layer.up_proj.weight.T)) @ layer.down_proj.weight.T
    starts = torch.tensor([2, 5])
    found = drafter(states, starts=starts, num_rolled=1).hidden_states
    torch.testing.assert_close(found[0], x[[3, 6]])
    for depth in (1, 2, 3):
        torch.testing.assert_close(found[depth], x[[3 + depth]])


def packed(target) -> tuple[torch.Tensor, Pack]:
    """A text of 14 tokens, all of them an answer."""
    ids = torch.randint(2, VOCAB, (14,), generator=torch.Generator().manual_seed(0))
    chat = TokenizedConversation(ids, torch.ones(14, dtype=torch.bool))
    return ids, Pack.of(read_features(target, (2,), [chat], dtype=torch.float32))


@torch.no_grad()
def loss_by_hand(drafter, target, ids: torch.Tensor, place: int) -> tuple[float, float, float]:
    """Divergence, cross-entropy and cosine distance of the prediction at a position."""
    states, head = target(ids[None], output_hidden_states=True).hidden_states, target.get_output_embeddings().weight
    state, final = drafter.norm(drafter.imitated(states[2][0][place])), states[LAYERS][0][place]
    p, q = (final @ head.T).log_softmax(-1), (state @ head.T).log_softmax(-1)
    cosine = state @ final / state.norm() / final.norm()
    return float((p.exp() * (p - q)).sum()), -float(q[p.argmax()]), 1 - float(cosine)


def test_the_loss_is_a_cosine_a_divergence_and_a_cross_entropy():
    target = target_of("llama")
    drafter = make_self(target, right=False)
    ids, pack = packed(target)
    chains = Chains(torch.tensor([3, 6]), 2, torch.ones(2, dtype=torch.bool))
    weights, head = borrow(drafter, target), target.get_output_embeddings().weight.detach()
    terms = [TRAINING_OPTIONS["cosine_weight"].term(None, 2.0)]
    drafter.loss_function = ChainLoss(weights, head, objective_of("kl_ce", 0.25), [1.0] * 4, terms=terms)
    labels = true_labels(pack, chains, 4)
    found = unroll(drafter, family_of(drafter).predictions(drafter, weights), pack, chains, labels.tokens, labels).loss
    parts = [loss_by_hand(drafter, target, ids, place) for place in (4, 5, 6, 7, 7, 8, 9, 10)]  # i + 1 + d
    total = sum(0.75 * divergence + 0.25 * entropy + 2 * cosine for divergence, entropy, cosine in parts)
    assert float(found.loss.detach()) == pytest.approx(total / 8, rel=1e-4)


def test_rolled_chains_weigh_no_more_than_others(tmp_path):
    """By default each prediction weighs by its depth: the loss is their sum by the number of them."""
    target = target_of("llama")
    drafter = make_self(target, right=False)
    ids, pack = packed(target)
    chains = Chains(torch.tensor([6, 1, 3, 5, 8]), 1, torch.ones(5, dtype=torch.bool))  # one of five is followed
    fields = {"output_dir": str(tmp_path), "use_cpu": True, "eval_strategy": "no", "load_best_model_at_end": False}
    fields |= {name: value for name, value in TRAINABLE["self"].arguments.items() if name != "cosine_weight"}
    found = {}
    for kind in ("by-prediction", "fixed"):
        args = DrafterTrainingArguments(**{**fields, "depth_weighting": kind})
        trainer = DrafterTrainer(drafter, args, target=target)
        labels = true_labels(pack, chains, 4)
        predictions = family_of(drafter).predictions(drafter, trainer.weights)
        found[kind] = float(unroll(drafter, predictions, pack, chains, labels.tokens, labels).loss.loss.detach())
    by_depth = [[7, 2, 4, 6, 9], [8], [9], [10]]  # positions
    values = [[sum(loss_by_hand(drafter, target, ids, place)[:2]) / 2 for place in places] for places in by_depth]
    total = sum(0.8**depth * sum(each) for depth, each in enumerate(values)) / 8
    means = sum(0.8**depth * sum(each) / len(each) for depth, each in enumerate(values))
    assert fields["depth_weighting"] == "by-prediction" and found["by-prediction"] == pytest.approx(total, rel=1e-4)
    assert found["fixed"] == pytest.approx(means / sum(0.8**depth for depth in range(4)), rel=1e-4)


def planned(folder):
    sizes = {"num_draft_steps": 3, "draft_vocab_size": 40, "tree_size": 6, "draft_layers": 2}
    return training_helpers.planned(folder, "self", drafter=sizes)


@pytest.mark.slow
def test_a_few_steps_lower_the_loss_and_the_drafter_is_saved(chatty, tokenizer, tmp_path):
    steps = {"max_steps": 30, "eval_steps": 30, "learning_rate": 2e-2}
    training_helpers.run(chatty, tokenizer, planned(tmp_path), **TRAINABLE["self"].arguments, **steps)
    figures = json.loads((tmp_path / "out" / "figures.json").read_text())["training"]["history"]
    losses = [entry["loss"] for entry in figures if "loss" in entry]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses
    assert max(entry["eval_parity"] for entry in figures if "eval_parity" in entry) < 1e-3
    loaded = AutoDrafter.from_pretrained(tmp_path / "out")
    assert type(loaded) is SelfDrafter and loaded.config.draft_layers == 2 and loaded.config.draft_vocab_size == 40
    assert {"hub_entry.py", "travelling_drafter.py"} <= {
        path.name for path in (tmp_path / "out" / "custom_generate").iterdir()
    }
    as_plain(chatty, loaded.float(), padded(1), max_new_tokens=12)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| family | self |" in card and "first 2 of 3 layers" in card
    assert "kl_ce (ce_share 0.5) on teacher data (cosine_weight 1.0)" in card
    assert "weights of predictions by depth 1.00, 0.80, 0.64" in card
    told = CliRunner().invoke(app, ["info", str(tmp_path / "out")], catch_exceptions=False).output
    assert "self_speculation" in told


def test_wrong_fields_are_named():
    target = target_of("llama")
    for fields, message in (
        ({"draft_layers": 4}, "draft_layers=4 is invalid: it must be below target_num_hidden_layers=4"),
        ({"draft_layers": 9}, "draft_layers=9 is invalid: it must be below target_num_hidden_layers=4"),
        ({"draft_layers": 0}, "draft_layers=0 is invalid: expected an integer from 1 to 4,096"),
        ({"num_attention_heads": 4}, "has no num_attention_heads"),
    ):
        with pytest.raises(ValueError, match=message):
            SelfDraftConfig.for_target(target, **fields)
    assert SelfDraftConfig.for_target(target).draft_layers == 1


def test_estimates_count_the_layers_that_draft(tmp_path):
    target_of("llama").config.save_pretrained(tmp_path)
    arguments = ["estimate", "decoding", str(tmp_path), "--tau", "2.5", "--family", "self", "--draft-layers", "2"]
    output = CliRunner().invoke(app, arguments, catch_exceptions=False).output
    weights = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64 + 2 * 32)  # attention, gated block and norms of each layer
    assert "first 2 layers of the target" in output and f"{weights:,} weights" in output
