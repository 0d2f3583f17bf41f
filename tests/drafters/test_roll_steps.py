"""Trunks whose text is read by more layers than roll on, and whose steps have parameters of their own (PRISM)."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCAB, as_plain, edited, make_drafter
from session_helpers import accept, drafted_by, hidden_session, pairs_of
from test_pipeline import decodes_as_plain, plan, run
from training_helpers import kill_at_step_three

from hf_hsdraft import AutoDrafter, HSDraftConfig, HSDrafter
from hf_hsdraft.cli._describe import describe
from hf_hsdraft.methods.growth import grown
from hf_hsdraft.training.evaluate.parity import parity
from hf_hsdraft.training.loop.trainer import _recompute_layers
from hf_hsdraft.training.loss.loss import ChainLoss
from hf_hsdraft.training.loss.objectives import OBJECTIVES

SHAPES = {
    "text deeper": {"num_hidden_layers": 3, "num_roll_layers": 1},
    "text a little deeper": {"num_hidden_layers": 3, "num_roll_layers": 2},
    "two sets": {"num_step_modules": 2},
    "a set a step": {"num_step_modules": 4, "num_hidden_layers": 2},
    "both": {"num_hidden_layers": 3, "num_roll_layers": 1, "num_step_modules": 3},
}
shapes = pytest.mark.parametrize("shape", SHAPES)
STEPS = 4


def drafter_of(target, shape: str, **fields) -> HSDrafter:
    """One whose norms are no ones, so that none is mistaken for another."""
    drafter = make_drafter(target, **{"initializer_range": 0.15, **SHAPES[shape], **fields})
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    return drafter


class Slots:
    """The definition, a row at a time: keys and values of each slot, which any set of parameters may look at."""

    def __init__(self, config: HSDraftConfig) -> None:
        self.config, self.kept = config, {slot: [] for slot in range(config.num_hidden_layers)}

    def turned(self, heads: torch.Tensor, position: int) -> torch.Tensor:
        half = self.config.head_dim // 2
        angles = position * self.config.rope_theta ** (-torch.arange(half) / half)
        low, high = heads[:, :half], heads[:, half:]
        return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=1)

    def layer(self, layer, slot: int, x: torch.Tensor, position: int) -> torch.Tensor:
        config, parts = self.config, layer.attention
        normed = layer.input_norm(x)
        query, key, value = (
            part(normed).view(-1, config.head_dim) for part in (parts.q_proj, parts.k_proj, parts.v_proj)
        )
        self.kept[slot].append((self.turned(key, position), value, position))
        seen = [each for each in self.kept[slot] if position - each[2] < (config.sliding_window or 10**6)]
        groups = config.num_attention_heads // config.num_key_value_heads
        mixed = []
        for head, one in enumerate(self.turned(query, position)):
            scores = torch.stack([one @ keys[head // groups] for keys, _, _ in seen]) / config.head_dim**0.5
            mixed.append(scores.softmax(0) @ torch.stack([values[head // groups] for _, values, _ in seen]))
        x = x + parts.o_proj(torch.cat(mixed))
        normed = layer.mlp_norm(x)
        return x + layer.down_proj(F.silu(layer.gate_proj(normed)) * layer.up_proj(normed))


def by_definition(drafter: HSDrafter, taps, embeds, positions, steps: int) -> torch.Tensor:
    """g_0 .. g_{K-1} after the last pair, `[K, D]`."""
    config, slots = drafter.config, Slots(drafter.config)
    for row, position in enumerate(positions.tolist()):
        x = drafter.fuse_inputs(taps[row : row + 1], embeds[row : row + 1])[0]
        for slot, layer in enumerate(drafter.layers):
            x = slots.layer(layer, slot, x, position)
    states = [x]
    for step in range(1, steps):
        number = min(step, config.num_step_modules - 1)
        part = drafter.step_modules[number - 1] if number else drafter
        layers = list(part.layers)[-config.num_roll_layers :]
        x = part.roll_proj(part.roll_norm(x))
        for index, layer in enumerate(layers):
            x = slots.layer(layer, config.num_hidden_layers - len(layers) + index, x, position + step)
        states.append(x)
    return torch.stack(states)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)


@torch.no_grad()
@shapes
@pytest.mark.parametrize("window", [None, 6])
def test_steps_are_their_definition(target, shape, window):
    drafter = drafter_of(target, shape, sliding_window=window)
    inputs = pairs_of(drafter, 9)
    found = torch.cat(drafter(*inputs).hidden_states)
    close(found, by_definition(drafter, *inputs, STEPS))


@torch.no_grad()
@shapes
@pytest.mark.parametrize("window", [None, 6])
def test_rounds_of_one_text_and_of_a_batch_draft_what_training_computes(target, shape, window):
    drafter = drafter_of(target, shape, sliding_window=window)
    drafter.generation_config.tree_size = 64  # enough for both texts to be drafted to the end
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    texts = [torch.randint(2, VOCAB, (20,), generator=torch.Generator().manual_seed(seed)) for seed in range(2)]
    taps = [pairs_of(drafter, 20, seed)[0] for seed in range(2)]
    alone, batch = (hidden_session(drafter, weights, rows) for rows in (1, 2))
    for begins, ends in itertools.pairwise([(0, 0), (8, 5), (9, 9), (14, 11)]):
        for row in range(2):
            part = slice(begins[row], ends[row])
            news = taps[row][part], texts[row][begins[row] + 1 : ends[row] + 1], torch.arange(part.start, part.stop)
            accept(batch, *news, row=row)
            if row == 0:
                accept(alone, *news)
        drafted_by(alone)
        drafted_by(batch)
        for row in range(2):
            end = ends[row]
            embeds = weights.embed(texts[row][1 : end + 1])
            expected = torch.cat(drafter(taps[row][:end], embeds, torch.arange(end)).hidden_states)
            close(batch._rows[row].drafted, expected)
            if row == 0:
                close(alone._rows[0].drafted, expected)
    reach = drafter.config.num_hidden_layers * ((window or 10**6) - 1) + 1
    assert alone.saved()[0][0].shape[1] <= reach


@pytest.mark.parametrize("injector", ["path", "selector"])
def test_parity_holds_at_every_depth(target, injector):
    prompts = [torch.randint(2, VOCAB, (1, 6), generator=torch.Generator().manual_seed(n)) for n in range(3)]
    drafter = drafter_of(target, "both", injector=injector, injector_top_k=5)
    report = parity(drafter, target, prompts, max_new_tokens=20)
    assert len(report.depths) == STEPS and min(depth.predictions for depth in report.depths) >= 10
    assert max(max(depth.drafter, depth.target) for depth in report.depths) < 1e-4, report


@shapes
def test_texts_are_those_of_plain_decoding(target, prompt, shape):
    drafter, batch = (
        drafter_of(target, shape),
        torch.randint(2, VOCAB, (3, 8), generator=torch.Generator().manual_seed(5)),
    )
    as_plain(target, drafter, prompt, max_new_tokens=10, do_sample=True, temperature=1.2)
    plain = target.generate(batch, max_new_tokens=10, do_sample=False)
    for reuse in ("none", "ensemble", "resample"):
        drafter.generation_config.reuse = reuse
        drafted = target.generate(batch, max_new_tokens=10, do_sample=False, assistant_model=drafter)
        assert torch.equal(drafted, plain)


@shapes
def test_all_that_is_trained_gets_gradients_as_far_as_it_is_used(target, shape):
    """Also where layers are computed again in the backward; and a set of parameters knows its own depths only."""
    gradients = []
    for again in (False, True):
        drafter = drafter_of(target, shape).train()
        if again:
            _recompute_layers(drafter)
        states = drafter(*pairs_of(drafter, 9)).hidden_states
        torch.cat(states).square().mean().backward()
        gradients.append({name: each.grad for name, each in drafter.named_parameters()})
        trunk = {name for name in gradients[0] if not name.startswith(("injector", "norm"))}
        assert all(gradients[-1][name] is not None for name in trunk)
    for name in trunk:
        torch.testing.assert_close(gradients[0][name], gradients[1][name], atol=1e-4, rtol=1e-3)
    if drafter.step_modules:
        drafter.zero_grad()
        drafter(*pairs_of(drafter, 9), num_draft_steps=2).hidden_states[1].sum().backward()
        used = [step.roll_proj.weight.grad is not None for step in drafter.step_modules]
        assert used == [index == 0 for index in range(len(used))]


@shapes
def test_it_is_saved_and_loaded(target, prompt, shape, tmp_path):
    drafter = drafter_of(target, shape)
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert {name: tensor.shape for name, tensor in loaded.state_dict().items()} == {
        name: tensor.shape for name, tensor in drafter.state_dict().items()
    }
    assert all(torch.equal(value, drafter.state_dict()[name]) for name, value in loaded.state_dict().items())
    for name, value in SHAPES[shape].items():
        assert getattr(loaded.config, name) == value
    words = {
        "text deeper": "3 layers for the text, 1 for the roll-out",
        "text a little deeper": "3 layers for the text, 2 for the roll-out",
        "two sets": "layers: 1; sets of parameters by step: 2",
        "a set a step": "layers: 2; sets of parameters by step: 4",
        "both": "3 layers for the text, 1 for the roll-out; sets of parameters by step: 3",
    }[shape]
    assert describe(str(tmp_path))["drafter"]["trunk"] == words
    assert f"| trunk | {words} |" in (tmp_path / "README.md").read_text()


def test_a_drafter_that_names_neither_is_as_before(target, tmp_path):
    """Files of earlier versions: all layers roll on, and one set of parameters serves all steps."""
    drafter = make_drafter(target, num_hidden_layers=2)
    assert not any("step_modules" in name for name in drafter.state_dict())
    drafter.save_pretrained(tmp_path)
    config = edited(tmp_path)
    assert config["num_roll_layers"] == 2 and config["num_step_modules"] == 1
    edited(tmp_path, num_roll_layers=None, num_step_modules=None)
    loaded, inputs = HSDrafter.from_pretrained(tmp_path), pairs_of(drafter, 7)
    with torch.no_grad():
        close(torch.cat(loaded(*inputs).hidden_states), torch.cat(drafter(*inputs).hidden_states))
        close(torch.cat(loaded(*inputs).hidden_states), by_definition(drafter, *inputs, STEPS))


@torch.no_grad()
@pytest.mark.parametrize(
    ("shape", "modules", "layers"), [(None, 2, 1), (None, 4, 1), (None, 1, 3), (None, 3, 2), ("both", 4, 4)]
)
def test_a_grown_drafter_drafts_what_it_was_grown_from(target, shape, modules, layers):
    drafter = make_drafter(target) if shape is None else drafter_of(target, shape)
    drafter.generation_config.tree_size = 7
    before = {name: value.clone() for name, value in drafter.state_dict().items()}
    larger = grown(drafter, modules, layers)
    assert larger.config.num_step_modules == modules and larger.config.num_hidden_layers == layers
    assert larger.config.num_roll_layers == drafter.config.num_roll_layers
    assert larger.generation_config.tree_size == 7
    inputs = pairs_of(drafter, 9)
    close(torch.cat(larger(*inputs).hidden_states), torch.cat(drafter(*inputs).hidden_states))
    for parameter in larger.parameters():  # nothing of it is shared
        parameter.add_(1.0)
    assert all(torch.equal(value, before[name]) for name, value in drafter.state_dict().items())


def test_new_layers_learn(target):
    larger = grown(make_drafter(target), 2, 2).train()
    weights = larger.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    larger.loss_function = ChainLoss(weights, weights.head, OBJECTIVES["forward_kl"], [1.0] * STEPS)
    torch.cat(larger(*pairs_of(larger, 9)).hidden_states).square().mean().backward()
    assert larger.layers[0].attention.o_proj.weight.grad.abs().max() > 0
    assert larger.layers[0].down_proj.weight.grad.abs().max() > 0


@pytest.mark.train
def test_one_set_of_parameters_is_trained_then_copied(chatty, tokenizer, tmp_path, monkeypatch):
    """The recipe of PRISM, killed and resumed; a smaller drafter than the one to start from is refused."""
    first = run(chatty, tokenizer, plan(tmp_path, out=str(tmp_path / "one")))
    assert first.config.num_step_modules == 1
    sizes = {"num_step_modules": 2, "num_hidden_layers": 2}
    planned, steps = plan(tmp_path, init_from=str(tmp_path / "one"), drafter=sizes), kill_at_step_three(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        run(chatty, tokenizer, planned)
    second = run(chatty, tokenizer, planned)
    assert steps == [0, 1, 2, 3, 2, 3]
    loaded = HSDrafter.from_pretrained(tmp_path / "out")
    assert loaded.config.num_step_modules == second.config.num_step_modules == 2
    assert loaded.config.num_hidden_layers == 2 and loaded.config.num_roll_layers == 1
    assert not torch.equal(loaded.layers[1].down_proj.weight, loaded.step_modules[0].layers[0].down_proj.weight)
    assert decodes_as_plain(chatty, loaded)
    recipe = edited(tmp_path / "out", "training_recipe.json")["training"]
    assert (
        "2 layers for the text, 1 for the roll-out; sets of parameters by step: 2, path injector" in recipe["drafter"]
    )
    figures = edited(tmp_path / "out", "figures.json")["training"]["history"]
    assert max(entry["eval_parity"] for entry in figures if "eval_parity" in entry) < 1e-4
    smaller = plan(tmp_path, init_from=str(tmp_path / "out"), drafter={"num_step_modules": 1}, out=str(tmp_path / "no"))
    with pytest.raises(ValueError, match="num_step_modules=1 is invalid: the drafter to start from has 2"):
        run(chatty, tokenizer, smaller)
    other = plan(
        tmp_path, init_from=str(tmp_path / "one"), drafter=sizes | {"num_roll_layers": 2}, out=str(tmp_path / "n")
    )
    with pytest.raises(ValueError, match="num_roll_layers=2 is invalid: the drafter to start from has 1"):
        run(chatty, tokenizer, other)
