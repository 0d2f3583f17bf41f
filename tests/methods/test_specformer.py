"""SpecFormer drafters: the network against its formula, exact texts, sessions, files."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch
from conftest import VOCAB, make_target
from oracles.format_parity import randomise
from session_helpers import news, padded
from torch.nn.functional import silu
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter, SpecFormerConfig, SpecFormerDrafter
from hf_hsdraft.cli.main import app
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Ask, Call
from hf_hsdraft.methods.specformer.specformer_session import SpecFormerSession

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


def borrowed(drafter, target):
    return drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())


def session_of(drafter, target, rows: int = 1) -> SpecFormerSession:
    return SpecFormerSession(drafter, borrowed(drafter, target), Call(target, rows, DraftOptions.of(drafter)))


def slots_after(session: SpecFormerSession, *asks: tuple[int, int], depth: int = STEPS) -> torch.Tensor:
    return session.drafted([Ask(row, root, depth, 9) for row, root in asks], depth)


# --- the network -----------------------------------------------------------------------------------------------------


def normed(x: torch.Tensor, norm) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight


def turned(head: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    half = len(head) // 2
    angles = torch.tensor([position * theta ** (-2 * index / len(head)) for index in range(half)])
    low, high = head[:half], head[half:]
    return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()])


def attended(part, rows: list[torch.Tensor], row: int, window: int, config) -> torch.Tensor:
    """What a row takes of the rows up to it, head by head."""
    width, groups, mixed = config.head_dim, config.num_attention_heads // config.num_key_value_heads, []
    for head in range(config.num_attention_heads):
        query = turned((part.q_proj.weight @ rows[row])[head * width :][:width], row, config.rope_theta)
        place = head // groups * width
        scores, values = [], []
        for other in range(max(0, row + 1 - window), row + 1):
            key = turned((part.k_proj.weight @ rows[other])[place:][:width], other, config.rope_theta)
            scores.append(float(query @ key) / math.sqrt(width))
            values.append((part.v_proj.weight @ rows[other])[place:][:width])
        shares = torch.tensor(scores).softmax(0)
        mixed.append(sum(share * value for share, value in zip(shares, values, strict=True)))
    return part.o_proj.weight @ torch.cat(mixed)


def formula(drafter, taps: torch.Tensor, embeds: torch.Tensor, start: int) -> torch.Tensor:
    """The slots of a position of one text, one after the other (SpecFormer, section 3, with norms before attention)."""
    config = drafter.config
    size, joined = config.target_hidden_size, []
    for tap, embed in zip(taps[: start + 1], embeds, strict=False):
        parts = [normed(tap[size * n :][:size], norm) for n, norm in enumerate(drafter.tap_norms)]
        parts += [normed(embed, drafter.token_norm)] if config.reads_tokens else []
        joined.append(drafter.fuse.weight @ torch.cat(parts))
    rows = [normed(x, drafter.context_norm) for x in joined]
    window = config.sliding_window or len(rows)
    state = joined[start] + attended(drafter.context_attn, rows, start, window, config)
    made = drafter.expand.weight @ normed(state, drafter.expand_norm) + drafter.expand.bias
    slots = list(made.split(config.hidden_size))
    for layer in drafter.layers:
        inner = [normed(slot, layer.input_layernorm) for slot in slots]
        slots = [slot + attended(layer.self_attn, inner, row, 99, config) for row, slot in enumerate(slots)]
        for row, slot in enumerate(slots):
            x = normed(slot, layer.post_attention_layernorm)
            gated = silu(layer.mlp.gate_proj.weight @ x) * (layer.mlp.up_proj.weight @ x)
            slots[row] = slot + layer.mlp.down_proj.weight @ gated
    return torch.stack(slots)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_the_network_is_its_formula(kind, target):
    """Of two packed texts, with chains of which some have one slot only; and as a session drafts them."""
    drafter = make_specformer(target, kind)
    weights = borrowed(drafter, target)
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
    for chain, start in enumerate(starts):
        text, place = (0, start) if start < lengths[0] else (1, start - lengths[0])
        wanted = formula(drafter, told[text].taps, embeds[text], place)
        session = session_of(drafter, target)
        session.observe([news(drafter, target, texts[text], 0, place + 1)])
        [decoded] = slots_after(session, (0, texts[text][place + 1]))
        for depth in range(STEPS):
            assert torch.allclose(decoded[depth], wanted[depth], atol=1e-4)
            if depth == 0 or chain < 5:
                assert torch.allclose(drafts[depth][chain], wanted[depth], atol=1e-4)


@torch.no_grad()
def test_a_shallow_draft_is_the_beginning_of_a_deep_one(target):
    drafter, text = make_specformer(target), list(range(5, 18))
    session = session_of(drafter, target)
    session.observe([news(drafter, target, text, 0, 12)])
    whole = slots_after(session, (0, text[-1]))
    for depth in (1, 2, 3):  # nothing new is to be read
        assert torch.allclose(slots_after(session, (0, text[-1]), depth=depth), whole[:, :depth], atol=1e-5)


@torch.no_grad()
def test_only_a_drafter_that_reads_tokens_knows_the_last_one(target):
    """Two texts that differ in the last token alone, which the target has not read."""
    for reads in (True, False):
        drafter, found = make_specformer(target, reads_tokens=reads), []
        for last in (20, 30):
            text = [*range(5, 15), last]
            session = session_of(drafter, target)
            session.observe([news(drafter, target, text, 0, 10)])
            found.append(slots_after(session, (0, last)))
        assert torch.equal(*found) != reads


# --- calls -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_trees_follow_the_products_of_the_slots(target):
    """The best paths of all, by the probabilities of each depth."""
    drafter, text = make_specformer(target, "part", num_draft_steps=3), list(range(5, 15))
    session = session_of(drafter, target)
    session.observe([news(drafter, target, text, 0, 9)])
    [tree] = session.draft([Ask(0, text[-1], depth=3, size=16)])
    assert not tree.fault(VOCAB) and len(tree) == 17
    logs = drafter.logits(slots_after(session, (0, text[-1]), depth=3), session.weights)[0].log_softmax(-1).tolist()
    scores = sorted(
        (
            sum(logs[depth][column] for depth, column in enumerate(path))
            for length in (1, 2, 3)
            for path in itertools.product(range(len(PART)), repeat=length)
        ),
        reverse=True,
    )
    assert sorted(tree.scores[1:], reverse=True) == pytest.approx(scores[:16], abs=1e-4)
    [chain] = session.draft([Ask(0, text[-1], depth=3, size=24, width=1)])
    assert chain.depths == (0, 1, 2, 3)
    [none] = session.draft([Ask(0, text[-1], depth=0, size=24)])
    assert len(none) == 1


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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_draft_steps": 65}, "num_draft_steps=65 is invalid: expected an integer from 1 to 64"),
        ({"ctc": "yes"}, "ctc='yes' is invalid: expected true or false"),
        ({"reads_tokens": 1}, "reads_tokens=1 is invalid: expected true or false"),
        ({"target_tap_layers": [2, 1]}, r"target_tap_layers=\[2, 1\] is invalid: expected ascending"),
        ({"head": "own"}, "head='own' is invalid: expected one of target, trained"),
        ({"hidden_size": 16}, "hidden_size=16 is invalid with head='target'"),
        ({"draft_vocab_ids": [3, 2]}, "draft_vocab_ids is invalid: expected ascending"),
        ({"format_version": 99}, "format_version=99.*upgrade hf_hsdraft"),
        ({"sliding_window": 3}, "sliding_window=3 is invalid"),
        ({"injector": "path"}, "has no injector"),
    ],
)
def test_wrong_fields_are_named(fields, message, target):
    with pytest.raises(ValueError, match=message):
        SpecFormerConfig.for_target(target, **fields)


def test_another_target_is_refused(target, prompt):
    drafter = make_specformer(target, target_name="user/target")
    with pytest.raises(ValueError, match=r"has num_hidden_layers=2, the drafter expects 3.*trained for user/target"):
        make_target(num_hidden_layers=2).generate(prompt, assistant_model=drafter, max_new_tokens=4)


def test_what_a_draft_reads_is_counted(target):
    drafter = make_specformer(target)
    whole = {read.part: read for read in drafter.reads(STEPS, 8)}
    half = {read.part: read for read in drafter.reads(STEPS // 2, 8)}
    products = {
        "fusion": 5 * 32 * 32,  # four hidden states and an embedding
        "attention to the text": 2 * 32 * 32 + 2 * 32 * 16,
        "slots": STEPS * 32 * (32 + 1),
        "head": VOCAB * 32,
    }
    assert {name: whole[name].weights for name in products} == products
    assert half["slots"].weights * 2 == whole["slots"].weights
    assert whole["head"].borrowed and whole["slot layers"].rows == STEPS


@pytest.mark.parametrize("kind", ["default", "without tokens", "own head", "frames"])
def test_a_drafter_is_saved_and_loaded(kind, target, tmp_path):
    drafter = make_specformer(target, kind, target_name="user/target")
    drafter.generation_config.num_assistant_tokens = 3
    drafter.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert type(loaded) is SpecFormerDrafter and loaded.generation_config.num_assistant_tokens == 3
    assert loaded.config.reads_tokens == drafter.config.reads_tokens and loaded.config.ctc == (kind == "frames")
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in drafter.state_dict().items())
    inputs, call = padded(2), {"max_new_tokens": 10, "do_sample": False}
    plain = target.generate(**inputs, **call)
    assert target.generate(**inputs, **call, assistant_model=str(tmp_path)).tolist() == plain.tolist()
    told = CliRunner().invoke(app, ["info", str(tmp_path)], catch_exceptions=False).output
    assert "specformer, SpecFormerDrafter" in told
    card = (tmp_path / "README.md").read_text()
    assert "of the family `specformer`" in card and "It reads hidden states of the model." in card
    assert "user/target" in card and "2602.21224" not in card and "torch alone" in card


def test_with_its_repository_travels_what_hands_over_to_the_package(target, tmp_path):
    """Its network stays with the package. Without that, see `test_travelling`."""
    make_specformer(target).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "hub_entry.SpecFormerConfig",
        "AutoModel": "hub_entry.SpecFormerDrafter",
    }
    assert config["code_files"] == ["checks.py", "hub_entry.py", "travelling_drafter.py"]
    remote = get_class_from_dynamic_module(config["auto_map"]["AutoModel"], tmp_path)
    assert remote is SpecFormerDrafter and type(remote.from_pretrained(tmp_path)) is SpecFormerDrafter
