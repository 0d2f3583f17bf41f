"""SpecFormer drafters: the network against its formula, exact texts, sessions, files."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCAB, as_plain
from oracles.format_parity import randomise
from session_helpers import borrow, news, padded
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter, SpecFormerConfig, SpecFormerDrafter
from hf_hsdraft.cli.main import app
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Ask, Call
from hf_hsdraft.methods.specformer.drafter import SpecFormerSession

STEPS = 4
PART = list(range(1, VOCAB, 3))
KINDS = {
    "default": {},
    "without tokens": {"reads_tokens": False},
    "window": {"sliding_window": 5},
    "part": {"draft_vocab_ids": PART},
    "own head": {"head": "trained", "draft_vocab_ids": PART, "hidden_size": 16},
    "two layers": {"num_hidden_layers": 2, "target_tap_layers": [1, 3]},
    "frames": {"ctc": True},
}


def make_specformer(target, kind: str = "default", **overrides) -> SpecFormerDrafter:
    """A drafter of random weights, whose drafts cost nothing."""
    fields = {"num_draft_steps": STEPS, "draft_vocab_size": VOCAB, "intermediate_size": 48, "tree_size": 16}
    fields |= KINDS[kind] | ({"draft_vocab_size": len(PART)} if "draft_vocab_ids" in KINDS[kind] else {})
    drafter = SpecFormerDrafter(SpecFormerConfig.for_target(target, **{**fields, **overrides})).eval()
    randomise(drafter)
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = 0.0
    return drafter


def session_of(drafter, target, rows: int = 1) -> SpecFormerSession:
    return SpecFormerSession(drafter, borrow(drafter, target), Call(target, rows, DraftOptions.of(drafter)))


def slots_after(session: SpecFormerSession, *asks: tuple[int, int], depth: int = STEPS) -> torch.Tensor:
    return session.drafted([Ask(row, root, depth, 9) for row, root in asks], depth)


# --- the network -----------------------------------------------------------------------------------------------------


def normed(x: torch.Tensor, norm) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], norm.weight, norm.eps)


def turned(heads: torch.Tensor, theta: float) -> torch.Tensor:
    """Heads `[H, n, size]` by their positions 0 to n - 1."""
    half = heads.shape[-1] // 2
    angles = torch.arange(heads.shape[1])[:, None] * theta ** (-torch.arange(half) / half)
    low, high = heads.split(half, dim=-1)
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], dim=-1)


def attended(part, rows: torch.Tensor, window: int, config) -> torch.Tensor:
    """What rows `[n, D]` take of the rows up to them."""
    products = (F.linear(rows, module.weight) for module in (part.q_proj, part.k_proj, part.v_proj))
    queries, keys, values = (each.unflatten(-1, (-1, config.head_dim)).transpose(0, 1) for each in products)
    queries, keys = turned(queries, config.rope_theta), turned(keys, config.rope_theta)
    back = torch.arange(len(rows))[:, None] - torch.arange(len(rows))
    seen = (back >= 0) & (back < window)
    mixed = F.scaled_dot_product_attention(queries, keys, values, seen, enable_gqa=True)
    return F.linear(mixed.transpose(0, 1).flatten(1), part.o_proj.weight)


def formula(drafter, taps: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
    """The slots `[n, K, D]` of all positions of a text (SpecFormer, section 3, with norms before attention)."""
    config, found = drafter.config, []
    parts = [normed(tap, norm) for tap, norm in zip(taps.split(32, dim=-1), drafter.tap_norms, strict=True)]
    parts += [normed(embeds, drafter.token_norm)] if config.reads_tokens else []
    joined = F.linear(torch.cat(parts, dim=-1), drafter.fuse.weight)
    window = config.sliding_window or len(joined)
    states = joined + attended(drafter.context_attn, normed(joined, drafter.context_norm), window, config)
    made = F.linear(normed(states, drafter.expand_norm), drafter.expand.weight, drafter.expand.bias)
    for slots in made.unflatten(-1, (STEPS, -1)):
        for layer in drafter.layers:
            slots = slots + attended(layer.self_attn, normed(slots, layer.input_layernorm), STEPS, config)
            x, mlp = normed(slots, layer.post_attention_layernorm), layer.mlp
            gated = F.silu(F.linear(x, mlp.gate_proj.weight)) * F.linear(x, mlp.up_proj.weight)
            slots = slots + F.linear(gated, mlp.down_proj.weight)
        found.append(slots)
    return torch.stack(found)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_network_is_its_formula(kind, target):
    """Of two packed texts, with chains of which some have one slot only; and as a session drafts them."""
    drafter = make_specformer(target, kind)
    weights = borrow(drafter, target)
    texts = [list(range(5, 18)), list(range(40, 49))]
    told = [news(drafter, target, text, 0, len(text) - 1) for text in texts]
    embeds = [weights.embed(each.following) for each in told]
    lengths = [len(each.positions) for each in told]
    starts = [0, 4, 11, 12, 15, 19, 7]  # the last position of the second text is 19
    drafts = drafter(
        torch.cat([each.taps for each in told]),
        torch.cat(embeds),
        torch.cat([each.positions for each in told]),
        starts=torch.tensor(starts),
        document_ids=torch.tensor([0] * lengths[0] + [1] * lengths[1]),
        num_rolled=5,
    ).hidden_states
    assert [len(states) for states in drafts] == [7, 5, 5, 5]
    formulas = [formula(drafter, each.taps, following) for each, following in zip(told, embeds, strict=True)]
    for chain, start in enumerate(starts):
        text, place = (0, start) if start < lengths[0] else (1, start - lengths[0])
        wanted, session = formulas[text][place], session_of(drafter, target)
        session.observe([news(drafter, target, texts[text], 0, place + 1)])
        for depth in (STEPS, 1, 2):  # a shallow draft is the beginning of a deep one
            [decoded] = slots_after(session, (0, texts[text][place + 1]), depth=depth)
            torch.testing.assert_close(decoded[:depth], wanted[:depth], atol=1e-4, rtol=1e-4)
        for depth in range(STEPS if chain < 5 else 1):
            torch.testing.assert_close(drafts[depth][chain], wanted[depth], atol=1e-4, rtol=1e-4)


# --- calls -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_frames_are_collapsed_into_a_tree(target):
    """However few depths are asked for, all frames are: any of them may say the first token."""
    drafter, text = make_specformer(target, "frames"), list(range(5, 15))
    session = session_of(drafter, target)
    session.observe([news(drafter, target, text, 0, 9)])
    [tree] = session.draft([Ask(0, text[-1], depth=2, size=16)])
    frames = drafter.frames(slots_after(session, (0, text[-1]), depth=2), session.weights)
    assert frames.shape == (1, STEPS, VOCAB + 1) and max(tree.depths) <= 2 and not tree.fault(VOCAB)
    said, silent = frames[0].exp(), 1.0
    first = torch.zeros(VOCAB)
    for frame in said:
        first += silent * frame[:-1]
        silent = silent * frame[-1]
    for node in range(1, len(tree)):
        if tree.depths[node] == 1:
            assert math.exp(tree.scores[node]) == pytest.approx(float(first[tree.tokens[node]]), rel=1e-4)


# --- configuration and files -----------------------------------------------------------------------------------------


def test_a_fresh_drafter_follows_its_target(target):
    config = SpecFormerConfig.for_target(target)
    assert config.num_draft_steps == 8 and config.reads_tokens and config.target_tap_layers == [0, 1, 2, 3]
    assert config.hidden_size == target.config.hidden_size and config.draft_vocab_size == VOCAB // 4
    assert SpecFormerConfig(target_num_hidden_layers=36).target_tap_layers == [0, 18, 35, 36]
    assert SpecFormerConfig(target_num_hidden_layers=1).target_tap_layers == [0, 1]
    for name, value in (("ctc", "yes"), ("reads_tokens", 1)):
        with pytest.raises(ValueError, match=f"{name}={value!r} is invalid: expected true or false"):
            SpecFormerConfig.for_target(target, **{name: value})


@pytest.mark.parametrize("kind", ["without tokens", "own head", "frames"])
def test_a_drafter_is_saved_and_loaded(kind, target, tmp_path):
    drafter = make_specformer(target, kind, target_name="user/target")
    drafter.generation_config.num_assistant_tokens = 3
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert type(loaded) is SpecFormerDrafter and loaded.generation_config.num_assistant_tokens == 3
    assert loaded.config.reads_tokens == drafter.config.reads_tokens and loaded.config.ctc == (kind == "frames")
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in drafter.state_dict().items())
    as_plain(target, str(tmp_path), padded(2), max_new_tokens=10)
    told = CliRunner().invoke(app, ["info", str(tmp_path)], catch_exceptions=False).output
    assert "specformer, SpecFormerDrafter" in told
    card = (tmp_path / "README.md").read_text()
    assert "of the family `specformer`" in card and "It reads hidden states of the model." in card
    assert "user/target" in card and "2602.21224" not in card and "torch alone" in card
