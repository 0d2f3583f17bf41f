"""Refined drafts: the formula, exact texts, files, and the training of refiners."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, as_plain, make_drafter
from lm_helpers import drafted_call, drafts_of, with_fixed
from oracles.format_parity import randomise
from session_helpers import borrow, news, padded
from test_specformer import make_specformer
from training_helpers import planned, run
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter, BlockDrafter, HSDrafter
from hf_hsdraft.cli.main import app
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call
from hf_hsdraft.drafters.base.tree_session import ParallelExpansion
from hf_hsdraft.engine.drafting import Drafting
from hf_hsdraft.hub.drafter_files import DamagedFile
from hf_hsdraft.methods.growth import grown
from hf_hsdraft.methods.refinement import refiner_training
from hf_hsdraft.methods.refinement.refinement import (
    PathLM,
    PathLMSizes,
    Refiner,
    has_refiner,
    load_refiner,
    refiner_of,
    save_refiner,
)
from hf_hsdraft.methods.refinement.refiner_training import examples_of, perplexity, train_refiner
from hf_hsdraft.training.data.conversations import TokenizedConversation
from hf_hsdraft.training.data.vocabulary import with_draft_vocabulary

SHARE = 0.4


def make_refiner(drafted: int = VOCAB, width: int = 32, length: int = 3) -> PathLM:
    model = PathLM(PathLMSizes(width, drafted, length=length, width=5, inner_size=7, rank=4)).eval()
    randomise(model, std=0.6)
    return model.requires_grad_(False)


def refined(drafter, folder, share: float = SHARE):
    """The drafter as it is loaded from a folder in which a refiner lies too."""
    drafter.save_pretrained(folder)
    ids = drafter.draft_vocab_ids()
    save_refiner(make_refiner(len(ids)), folder, ids)
    loaded = AutoDrafter.from_pretrained(folder).eval()
    loaded.generation_config.refinement = share
    loaded.generation_config.node_cost = loaded.generation_config.depth_cost = 0.0
    return loaded


def make_block(target, markov_rank: int = 4) -> BlockDrafter:
    fields = {"num_hidden_layers": 1, "block_size": 4, "mask_token_id": VOCAB - 1, "markov_rank": markov_rank}
    drafter = BlockDrafter.for_target(target, **fields).eval()
    randomise(drafter)
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = 0.0
    return drafter


KINDS = {
    "hidden-state": make_drafter,
    "selector": lambda target: make_drafter(target, injector="selector", injector_top_k=5),
    "specformer": make_specformer,
    "part": lambda target: make_specformer(target, "part"),
    "block": make_block,
}


def naive(model: PathLM, embed, text: list[int]) -> torch.Tensor:
    """The model's logits after a text, written out: the newest token first, zeros before the beginning."""
    kept = []
    for back in range(1, model.sizes.length + 1):
        if back > len(text):
            kept.append(torch.zeros(model.sizes.width))
            continue
        x = embed(torch.tensor(text[-back]))
        normed = x / (x.pow(2).mean() + 1e-6).sqrt() * model.norm.weight
        kept.append(model.read.weight @ normed)
    both = model.mix.weight @ torch.cat(kept) + model.mix.bias
    gate, value = both[: model.sizes.inner_size], both[model.sizes.inner_size :]
    code = model.down.weight @ (gate * torch.sigmoid(gate) * value)
    return model.up.weight @ code + model.up.bias


# --- the formula -----------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("before", [[], [7], [3, 9, 4, 6, 8]])
def test_the_model_is_its_formula_step_by_step(target, before):
    """Also where the text is shorter than what the model looks back."""
    weights = borrow(make_drafter(target), target)
    model = make_refiner()
    refiner = Refiner(model, SHARE, weights)
    for tokens in (before[:2], [*before[2:], 11]):
        refiner.observe([Accepted.of_tokens(0, tokens)])
    refinement = refiner.refined([0])
    text, states = [*before, 11], None
    for level, token in enumerate((11, 20, 21, 22), 1):
        text = text if states is None else [*text, token]
        states = refinement.advance(level, torch.tensor([[token]]), states)
        wanted = naive(model, weights.embed, text)
        torch.testing.assert_close(model(states)[0, 0], wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("likely", [20, 512])
@pytest.mark.parametrize("kind", ["hidden-state", "selector", "specformer", "part"])
def test_scores_are_the_interpolation_of_both_models(kind, target, tuned, tmp_path, likely):
    """log q' = log softmax((1 - share) log q + share log p) below the first depth, which keeps the drafter's own q."""
    tuned(likely_columns=likely)
    drafter = refined(KINDS[kind](target), tmp_path)
    weights, text = borrow(drafter, target), list(range(5, 15))
    model, sessions = refiner_of(drafter, weights), []
    for share in (0.0, SHARE):
        drafter.generation_config.refinement = share
        drafting = Drafting(drafter, Call(target, 1, DraftOptions.of(drafter)))
        drafting.observe([news(drafter, target, text, 0, 9)])
        sessions.append(drafting.session)
    plain, other = (expansion_of(session, text[-1]) for session in sessions)
    ids = weights.vocab_ids
    states, tokens, paths = [None, None], torch.tensor([[text[-1]]]), [[]]
    choices = (([3, 8, 1], [0, 0, 0]), ([2, 5, 3], [0, 2, 1]), ([0], [0]))  # columns and parents
    for level in (1, 2, 3):
        (own, states[0]), (found, states[1]) = (
            each(level, tokens, state) for each, state in zip((plain, other), states, strict=True)
        )
        for place, path in enumerate(paths):
            q = own[0, min(place, own.shape[1] - 1)]
            p = naive(model, weights.embed, [*text, *path]).log_softmax(-1)
            wanted = q if level == 1 else ((1 - SHARE) * q + SHARE * p).log_softmax(-1)
            torch.testing.assert_close(found[0, min(place, found.shape[1] - 1)], wanted, atol=2e-4, rtol=2e-4)
        columns, parents = choices[level - 1]
        paths = [[*paths[parent], int(ids[column])] for parent, column in zip(parents, columns, strict=True)]
        states = [None if state is None else state[:, parents] for state in states]
        tokens = ids[torch.tensor([columns])]


def expansion_of(session, root: int) -> ParallelExpansion:
    """What a session builds the tree of the next draft by."""
    made = []
    session.on_expansion = lambda rows, expansion: made.append(expansion)
    session.draft([Ask(0, root, depth=3, size=8)])
    return made[0]


@pytest.mark.parametrize("kind", ["hidden-state", "part", "block"])
def test_a_chat_that_goes_on_keeps_its_last_tokens(kind, target, tmp_path):
    """The second call drafts as one call would that reads the whole text, also where few tokens are new."""
    drafter = with_fixed(refined(KINDS[kind](target), tmp_path))
    _, first = drafted_call(target, drafter, padded(1))
    more = {"input_ids": torch.cat([first.sequences, torch.tensor([[8]])], dim=1)}
    found, continued = drafted_call(target, drafter, more, past_key_values=first.past_key_values)
    wanted, whole = drafted_call(target, drafter, more)
    assert continued.sequences.tolist() == whole.sequences.tolist()
    assert [each[0][:2] for each in found] == [each[0][:2] for each in wanted]


# --- options and files -----------------------------------------------------------------------------------------------


def test_it_is_off_by_default_and_changed_from_call_to_call(target, tmp_path):
    drafter = refined(make_drafter(target), tmp_path)
    del drafter.generation_config.refinement
    assert DraftOptions.of(drafter).own.get("refinement", 0.0) == 0.0
    plain = drafts_of(target, with_fixed(make_drafter(target)), padded(1))
    for share, alike in ((0.0, True), (0.3, False), (0.0, True)):
        found = drafts_of(target, with_fixed(drafter, refinement=share), padded(1))
        assert (found[0][0][:2] == plain[0][0][:2]) == alike


@pytest.mark.parametrize(
    ("kind", "share", "told"),
    [("", share, "=.* is invalid: expected a number from 0") for share in (-0.1, 1.0, "much", math.nan)]
    + [("", 0.2, "=0.2 is invalid: this drafter has no refiner beside its weights; train one by `hsdraft make ref"),
       ("frames", 0.2, r"=0\.2 is invalid for this drafter: its slots are frames.*set it")],
)  # fmt: skip
def test_what_cannot_be_is_refused(kind, share, told, target):
    drafter = with_fixed(make_specformer(target, kind) if kind else make_drafter(target), refinement=share)
    with pytest.raises(ValueError, match=f"refinement{told}"):
        DraftOptions.of(drafter)


@pytest.mark.parametrize("kind", ["hidden-state", "part", "block"])
def test_it_comes_along_when_a_drafter_is_saved(kind, target, prompt, tmp_path):
    drafter = refined(KINDS[kind](target), tmp_path / "one")
    drafter.save_pretrained(tmp_path / "two")
    again = AutoDrafter.from_pretrained(tmp_path / "two").eval()
    assert again.generation_config.refinement == SHARE
    before, after = (refiner_of(each, borrow(each, target)).state_dict() for each in (drafter, again))
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name])
    as_plain(target, again, prompt, max_new_tokens=8)
    assert refiner_of(again.to(torch.bfloat16), borrow(again, target)).up.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("kind", ["part", "block"])
def test_another_drafter_that_is_saved_there_has_none(kind, others, target, tmp_path):
    """Its folder goes too, unless somebody keeps something in it."""
    refined(KINDS[kind](target), tmp_path)
    if others:
        (tmp_path / "refiner" / "notes.txt").write_text("mine")
    other = KINDS[kind](target)
    randomise(other, seed=9)
    other.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("refiner/*")] == (["notes.txt"] if others else [])
    assert (tmp_path / "refiner").exists() == others


def test_refiners_for_others_and_damaged_files_are_refused(target, prompt, tmp_path):
    """A refiner of an older version, without the digest of its weights, is read."""
    drafter, ids = refined(make_drafter(target), tmp_path), torch.arange(VOCAB)
    config, weights = (tmp_path / "refiner" / name for name in ("config.json", "model.safetensors"))
    document = json.loads(config.read_text())
    with pytest.raises(ValueError, match="another draft vocabulary"):
        load_refiner(tmp_path, ids + 1)
    for rank, told in ((5, "of other shapes: down.weight"), ("4", "rank='4' is invalid"), (0, "rank=0 is invalid")):
        config.write_text(json.dumps({**document, "rank": rank}))
        with pytest.raises(ValueError, match=told):
            load_refiner(tmp_path, ids)
    config.write_text(json.dumps(document))
    weights.write_bytes(b"nothing")
    with pytest.raises(DamagedFile, match="damaged"):
        load_refiner(tmp_path, ids)
    other = make_refiner()
    other.up.bias.add_(1.0)
    save_refiner(other, tmp_path, ids)
    config.write_text(json.dumps(document))  # as if one of two files had been copied
    with pytest.raises(DamagedFile, match=r"not the one in config.json; .*`hsdraft make refiner` wrote$"):
        load_refiner(tmp_path, ids)
    del document["weights_digest"]
    config.write_text(json.dumps(document))
    assert torch.equal(load_refiner(tmp_path, ids).up.bias, other.up.bias)
    save_refiner(make_refiner(width=16), tmp_path, ids)
    with pytest.raises(ValueError, match=r"for embeddings of 16 and 97 .* this target and drafter have 32 and 97"):
        target.generate(prompt, max_new_tokens=4, assistant_model=drafter)


def test_a_drafter_of_any_vocabulary_is_refined(target, prompt, tmp_path):
    """What it drafts is known with the target only."""
    drafter = refined(make_block(target, markov_rank=0), tmp_path)
    drafter.config = replace(drafter.config, vocab_size=None, draft_vocab_size=None)
    assert len(drafter.draft_vocab_ids()) == 0 and len(refiner_of(drafter, borrow(drafter, target)).up.bias) == VOCAB
    as_plain(target, drafter, prompt, max_new_tokens=8)


@pytest.mark.train
@pytest.mark.parametrize("kind", ["part", "block"])
def test_a_run_that_trains_a_drafter_further_leaves_it_behind(kind, chatty, tokenizer, tmp_path):
    """Its evaluations draft too, by the options that came with the drafter."""
    refined(KINDS[kind](chatty), tmp_path / "one").save_pretrained(tmp_path / "start")
    family = {"part": "specformer", "block": "block"}[kind]
    further = planned(tmp_path, family, drafter={}, init_from=str(tmp_path / "start"))
    trained = run(chatty, tokenizer, further, max_steps=2, eval_steps=1)
    assert trained.generation_config.refinement == 0.0 and not has_refiner(trained)
    assert (tmp_path / "start" / "refiner").is_dir() and not list((tmp_path / "out").rglob("refiner"))


@pytest.mark.parametrize(
    "changed",
    [
        lambda drafter, target: grown(drafter, 2, drafter.config.num_hidden_layers),
        lambda drafter, target: with_draft_vocabulary(
            drafter, list(range(0, VOCAB, 2)), target.get_output_embeddings().weight
        ),
    ],
    ids=["grown", "another vocabulary"],
)
def test_a_changed_drafter_drafts_without_it(changed, target, prompt, tmp_path):
    drafter = changed(refined(make_drafter(target), tmp_path), target)
    as_plain(target, drafter, prompt, max_new_tokens=8)


# --- training --------------------------------------------------------------------------------------------------------


def test_examples_are_next_tokens_of_answers_in_the_vocabulary():
    chat = TokenizedConversation(torch.tensor([5, 9, 7, 8, 6]), torch.tensor([False, False, True, True, True]))
    found = examples_of([chat], torch.tensor([6, 7, 9]), length=3)
    assert found.before.tolist() == [[-1, 5, 9], [9, 7, 8]]  # 8 cannot be drafted
    assert found.labels.tolist() == [1, 0]
    shuffled = examples_of([chat], torch.tensor([9, 6, 7]), length=3)  # as published drafters may have it
    assert shuffled.before.tolist() == found.before.tolist() and shuffled.labels.tolist() == [2, 1]
    with pytest.raises(ValueError, match="hold no token of an answer that can be drafted"):
        examples_of([chat], torch.tensor([1, 2]), length=3)


def texts_of_a_rule(count: int, seed: int) -> list[TokenizedConversation]:
    """The next token follows from the last two, and now and then from nothing."""
    generator = torch.Generator().manual_seed(seed)
    chats = []
    for _ in range(count):
        ids = torch.randint(2, VOCAB, (2,), generator=generator).tolist()
        for noise in torch.rand(40, generator=generator).tolist():
            ids.append(2 + (3 * ids[-1] + ids[-2]) % 9 if noise < 0.9 else 20)
        chats.append(TokenizedConversation(torch.tensor(ids), torch.tensor([False] * 2 + [True] * 40)))
    return chats


def test_training_lowers_the_perplexity_of_texts_that_it_has_not_seen(target):
    """A seed gives the same training again."""
    weights = borrow(make_drafter(target), target)
    sizes = PathLMSizes(32, VOCAB)
    train, held_out = (
        examples_of(texts_of_a_rule(*each), weights.vocab_ids, sizes.length) for each in ((150, 1), (20, 2))
    )
    (model, found), (_, again) = (train_refiner(train, held_out, sizes, weights, epochs=12) for _ in range(2))
    assert found["perplexity_after"] == again["perplexity_after"] and found["steps"] == again["steps"] > 0
    counts = torch.bincount(train.labels, minlength=VOCAB).float() + 0.1
    unigram = math.exp(-float((counts / counts.sum()).log()[held_out.labels].mean()))
    assert found["perplexity_before"] == pytest.approx(unigram, rel=1e-3)
    assert found["perplexity_after"] < 0.6 * found["perplexity_before"]
    part, naive_loss = held_out.part(slice(20)), 0.0
    for before, label in zip(part.before, part.labels, strict=True):
        naive_loss -= float(naive(model, weights.embed, before[before >= 0].tolist()).log_softmax(-1)[label])
    assert perplexity(model, part, weights.embed) == pytest.approx(math.exp(naive_loss / 20), rel=1e-3)


def command(folder, *options: str, chats: str | None = None):
    """Runs `make refiner` for the drafter in a folder, on 40 chats."""
    rows = [
        {"messages": [{"role": "user", "content": f"w{n} w1"}, {"role": "assistant", "content": "w5 w6 w7 " * 4}]}
        for n in range(40)
    ]
    (folder / "chats.jsonl").write_text(chats or "".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["make", "refiner", "--train", str(folder / "chats.jsonl"), "--drafter", str(folder / "drafter")]
    return CliRunner().invoke(app, [*arguments, *options])


@pytest.fixture
def loads(chatty, tokenizer, tmp_path, monkeypatch) -> list[torch.dtype]:
    """A saved drafter, and the dtypes in which its target is loaded."""
    dtypes: list[torch.dtype] = []

    def load(name, dtype, device):
        dtypes.append(dtype)
        return chatty, tokenizer

    monkeypatch.setattr("hf_hsdraft.runtime.target_loading.load_target", load)
    make_drafter(chatty).to(torch.bfloat16).save_pretrained(tmp_path / "drafter")
    return dtypes


@pytest.mark.parametrize("where", ["beside", "elsewhere"])
def test_the_command_looks_first_whether_it_can_save(where, loads, chatty, tokenizer, tmp_path, monkeypatch):
    """The target is loaded in the drafter's dtype, and one that the drafter fits by its sizes only is warned of."""
    warned = []
    monkeypatch.setattr(HSDrafter, "warn_of_misfit", lambda self, *args, **kwargs: warned.append(args))
    monkeypatch.setattr(refiner_training, "train_refiner", lambda *args: pytest.fail("has trained"))
    out = tmp_path / ("drafter" if where == "beside" else "out")
    out.mkdir(exist_ok=True)
    (out / "refiner").write_text("in the way")
    done = command(tmp_path, *(() if where == "beside" else ("--out", str(out))))
    assert isinstance(done.exception, NotADirectoryError) and "refiner is a file" in str(done.exception)
    if where == "elsewhere":
        assert loads == [HSDrafter.from_pretrained(out).dtype] == [torch.bfloat16] and warned == [(chatty, tokenizer)]
        make_specformer(chatty, "frames").save_pretrained(tmp_path / "drafter")
        done = command(tmp_path, chats="no JSON")
        assert "this SpecFormerDrafter cannot be refined: its slots are frames" in str(done.exception)


@pytest.mark.train
def test_the_command_trains_and_saves(loads, chatty, tmp_path):
    make_drafter(chatty).save_pretrained(tmp_path / "drafter")
    done = command(tmp_path, "--out", str(tmp_path / "out"), "--epochs", "20")
    assert done.exit_code == 0, done.output
    recipe = json.loads((tmp_path / "out" / "refiner" / "config.json").read_text())["recipe"]
    assert recipe["perplexity_after"] < recipe["perplexity_before"] and recipe["held_out"] > 0
    assert not (tmp_path / "drafter" / "refiner").exists()
    loaded = HSDrafter.from_pretrained(tmp_path / "out")
    assert loaded.generation_config.refinement == 0.0
    loaded.generation_config.refinement = 0.3
    as_plain(chatty, loaded, torch.tensor([[5, 6, 7]]), max_new_tokens=8)
    weights = (tmp_path / "drafter" / "model.safetensors").read_bytes()
    done = command(tmp_path)  # beside the weights, which stay
    assert weights == (tmp_path / "drafter" / "model.safetensors").read_bytes()
    assert done.exit_code == 0 and (tmp_path / "drafter" / "refiner" / "model.safetensors").is_file()
    done = command(tmp_path, "--held-out", "100")
    assert "40 chats are too few" in str(done.exception)
