"""EAGLE-3 drafters within `generate()`: exact, in batches, by all builders; and their forward of training."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch
from conftest import VOCAB, each_with_its_seed, make_target
from oracles.exactness import chi_square
from oracles.scripted import ScriptedDrafter
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from hf_hsdraft import AutoDrafter, EagleConfig, EagleDrafter
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call
from hf_hsdraft.drafters.base.wrapped_drafter import WrappedDrafter
from hf_hsdraft.drafters.eagle import session as session_module
from hf_hsdraft.engine.loop import Observer

PADDED = torch.tensor([[0, 0, 0, 5, 6, 7, 5, 6], [9, 8, 9, 31, 9, 8, 44, 8], [0, 11, 12, 13, 14, 15, 16, 17]])
MASK = (PADDED > 0).long()
KINDS = {
    "eagle3": {},
    "eagle3, three layers": {"num_hidden_layers": 3, "windows": (None, 8, None)},
    "eagle3, norm_output": {"norm_output": True, "norm_before_residual": True},
    "peagle": {"mask_token_id": 3, "own_embedding": True},
}


@pytest.fixture(scope="module")
def target():
    return make_target(num_hidden_layers=8)


def make_eagle(target, seed: int = 1, **fields) -> EagleDrafter:
    """An untrained drafter that drafts as much as it may, whatever the machine."""
    torch.manual_seed(seed)
    drafter = EagleDrafter(EagleConfig.for_target(target, **{"num_draft_steps": 4, **fields})).eval()
    drafter.reset_parameters(std=0.3)
    options = drafter.generation_config
    options.node_cost = options.depth_cost = 0.0
    options.tree_sizing, options.ngram_length, options.tree_size, options.beam_width = "fixed", 0, 40, 5
    return drafter


@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_texts_are_the_targets_own(target, kind, do_sample, rows, width):
    drafter = make_eagle(target, **KINDS[kind])
    drafter.generation_config.beam_width = width
    ids, mask = PADDED[-rows:], MASK[-rows:]
    call = {"max_new_tokens": 24, "do_sample": do_sample}
    torch.manual_seed(7)
    output = target.generate(ids, attention_mask=mask, assistant_model=drafter, return_dict_in_generate=True, **call)
    if do_sample and rows > 1:
        expected = each_with_its_seed(target, ids, mask, seed=7, **call)
    else:
        torch.manual_seed(7)
        expected = target.generate(ids, attention_mask=mask, **call)
    assert output.sequences.tolist() == expected.tolist()
    assert sum(output.statistics.drafted_nodes) > 0
    if width > 1 and do_sample:  # the race's winner is guessed
        assert sum(output.statistics.accepted_lengths) > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("builder", ["gumbel", "stochastic_beam"])
@pytest.mark.parametrize("rows", [1, 3])
def test_drawn_trees_keep_greedy_texts(target, kind, builder, rows):
    drafter = make_eagle(target, **KINDS[kind])
    options = drafter.generation_config
    options.tree_builder, options.verification = builder, "rejection"
    call = {"attention_mask": MASK[-rows:], "max_new_tokens": 16, "do_sample": False}
    plain = target.generate(PADDED[-rows:], **call)
    assert target.generate(PADDED[-rows:], assistant_model=drafter, **call).tolist() == plain.tolist()


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
@pytest.mark.parametrize(
    "options", [{"tree_sizing": "cost", "ngram_length": 4}, {"assistant_confidence_threshold": 0.05}]
)
def test_other_options_keep_texts(target, kind, options):
    drafter = make_eagle(target, **KINDS[kind])
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    call = {"attention_mask": MASK, "max_new_tokens": 30, "do_sample": False}
    plain = target.generate(PADDED, **call)
    assert target.generate(PADDED, assistant_model=drafter, **call).tolist() == plain.tolist()


SMALL = 6


@pytest.fixture(scope="module")
def small():
    target = make_target(
        vocab_size=SMALL, pad_token_id=None, bos_token_id=None, initializer_range=0.2, num_hidden_layers=5
    )
    target.generation_config.pad_token_id = 0
    return target


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
@pytest.mark.parametrize(
    ("verification", "builder"), [("walk", "beam"), ("rejection", "gumbel"), ("rejection", "stochastic_beam")]
)
def test_whole_calls_are_distributed_as_the_target(small, kind, verification, builder):
    fields = {**KINDS[kind], "draft_vocab_ids": (0, 1, 2, 3, 4), "num_draft_steps": 2}
    drafter = make_eagle(small, target_tap_layers=(1, 2, 3), **fields)
    options = drafter.generation_config
    options.verification, options.tree_builder, options.beam_width, options.tree_size = verification, builder, 3, 6
    prompt = torch.tensor([[1, 4, 2, 2, 3]])
    texts = torch.tensor(list(itertools.product(range(SMALL), repeat=3)))
    with torch.no_grad():
        logits = small(torch.cat([prompt.expand(len(texts), -1), texts], dim=1)).logits[:, -4:-1] / 1.3
    exact = logits.double().log_softmax(-1).gather(2, texts[..., None]).sum(dim=(1, 2)).exp()
    counts: Counter[tuple[int, ...]] = Counter()
    torch.manual_seed(1)
    for _ in range(150):
        output = small.generate(
            prompt.repeat(4, 1), do_sample=True, temperature=1.3, top_k=0, max_new_tokens=3, assistant_model=drafter
        )
        counts.update(tuple(row) for row in output[:, 5:].tolist())
    assert chi_square(counts, exact.reshape(SMALL, SMALL, SMALL)) > 1e-4
    assert any(5 in text for text in counts), "a token that is not in the draft vocabulary was never emitted"


def test_right_drafts_are_accepted(target):
    """A drafter that knows the text: what it says is written over, all else is as ever."""
    drafter, ids = make_eagle(target), PADDED[1:2]
    plain = target.generate(ids, max_new_tokens=40, do_sample=False)
    scripted = ScriptedDrafter(drafter, [plain[0, 8:].tolist()], 0)
    output = target.generate(
        ids, max_new_tokens=40, do_sample=False, assistant_model=scripted, return_dict_in_generate=True
    )
    assert output.sequences.tolist() == plain.tolist() and output.statistics.tau > 1.2


def news_of(row: int, count: int, begin: int = 0, seed: int = 0) -> Accepted:
    """Made-up news of `count` positions from `begin` on; the same ones whatever their number."""
    generator = torch.Generator().manual_seed(seed)
    taps = torch.randn(200, 3 * 32, generator=generator)[begin : begin + count]
    following = torch.randint(5, VOCAB, (200,), generator=generator)[begin : begin + count]
    return Accepted(row, following.tolist(), taps, torch.arange(begin, begin + count), following)


def session_of(drafter, target, rows=1):
    options = DraftOptions.of(drafter)
    return drafter.session(Call(target, rows, options)), options


def drafts(session, options, rows=(0,), root=11):
    with torch.no_grad():
        return session.draft([Ask(row, root, options.depth, options.tree_size, options.beam_width) for row in rows])


def assert_same(tree, other):
    assert tree.tokens == other.tokens and tree.parents == other.parents
    torch.testing.assert_close(torch.tensor(tree.scores), torch.tensor(other.scores), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_a_batch_draft_as_they_do_alone(target, kind):
    """Of different lengths, read in different pieces, and with texts that have ended in between."""
    drafter, lengths = make_eagle(target, **KINDS[kind]), (5, 40, 17)
    together, options = session_of(drafter, target, 3)
    together.observe([news_of(row, length, seed=row) for row, length in enumerate(lengths)])
    drafts(together, options, (0, 1, 2))
    together.keep([0, 2])
    together.observe([news_of(row, 3, lengths[row], seed=row) for row in (2, 0)])
    found = drafts(together, options, (2, 0))
    for row, tree in zip((2, 0), found, strict=True):
        alone, _ = session_of(drafter, target)
        alone.observe([news_of(0, lengths[row] + 3, seed=row)])
        assert_same(tree, drafts(alone, options)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_drafted_is_forgotten(target, kind):
    """Drafts before the last news change nothing, nor does when the news came."""
    drafter = make_eagle(target, **KINDS[kind])
    often, options = session_of(drafter, target)
    for begin in range(0, 30, 2):
        often.observe([news_of(0, 2, begin)])
        drafts(often, options)
    rarely, _ = session_of(drafter, target)
    rarely.observe([news_of(0, 30)])
    assert_same(drafts(often, options)[0], drafts(rarely, options)[0])
    assert_same(drafts(often, options)[0], drafts(rarely, options)[0])  # asked again without news


def test_long_prompts_are_read_in_blocks(target, monkeypatch, tuned):
    drafter = make_eagle(target, num_hidden_layers=2, windows=(None, None))
    whole, options = session_of(drafter, target)
    whole.observe([news_of(0, 150)])
    expected = drafts(whole, options)[0]
    sizes, attention = [], session_module.batched_attention

    def noting(queries, keys, values, seen=None):
        sizes.append(queries.shape[1] * keys.shape[2])
        return attention(queries, keys, values, seen)

    monkeypatch.setattr(session_module, "batched_attention", noting)
    tuned(mask_rows=16)
    blocks, _ = session_of(drafter, target)
    blocks.observe([news_of(0, 150)])
    assert_same(expected, drafts(blocks, options)[0])
    assert max(sizes) <= 16 * 150


def test_news_that_wait_for_long_are_read(target, tuned):
    tuned(most_pending=4)
    drafter = make_eagle(target)
    session, options = session_of(drafter, target)
    with torch.no_grad():
        for begin in range(20):
            session.observe([news_of(0, 1, begin)])
    assert len(session._rows[0].pending) <= 5
    other, _ = session_of(drafter, target)
    other.observe([news_of(0, 20)])
    assert_same(drafts(session, options)[0], drafts(other, options)[0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_later_call_goes_on_from_the_memory_of_an_earlier_one(target, kind):
    drafter = make_eagle(target, **KINDS[kind])
    first, options = session_of(drafter, target)
    first.observe([news_of(0, 12)])
    drafts(first, options)
    first.observe([news_of(0, 3, 12)])
    memory = first.memory(length=16)
    expected, _ = session_of(drafter, target)
    expected.observe([news_of(0, 20)])
    tree = drafts(expected, options)[0]
    for _ in range(2):  # it may be gone on from more than once
        second, _ = session_of(drafter, target)
        second.resume(memory, cached=15)
        second.observe([news_of(0, 5, 15)])
        assert_same(tree, drafts(second, options)[0])
    stranger, _ = session_of(make_eagle(target, seed=2, **KINDS[kind]), target)
    stranger.resume(memory, cached=15)
    assert stranger._context.lengths == [0]


def test_a_chat_goes_on_from_its_cache(target):
    drafter, ids = make_eagle(target), PADDED[1:2]
    call = {"max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
    first = target.generate(ids, assistant_model=drafter, **call)
    longer = torch.cat([first.sequences, torch.tensor([[40, 41]])], dim=1)
    second = target.generate(longer, past_key_values=first.past_key_values, assistant_model=drafter, **call)
    assert second.sequences.tolist() == target.generate(longer, **call).sequences.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_prompts_may_be_embeddings(target, kind, rows):
    drafter = make_eagle(target, **KINDS[kind])
    embeds = target.get_input_embeddings()(PADDED[-rows:]).detach()
    call = {"inputs_embeds": embeds, "attention_mask": MASK[-rows:], "max_new_tokens": 12, "do_sample": False}
    assert target.generate(**call, assistant_model=drafter).tolist() == target.generate(**call).tolist()


def test_embeddings_of_another_width_are_left_out(target, monkeypatch):
    layer = EagleConfig.for_target(target).layer
    small = type(layer)(**{**vars(layer), "hidden_size": 16})
    drafter = make_eagle(target, layer=small, own_embedding=True)
    call = {"inputs_embeds": target.get_input_embeddings()(PADDED[1:2]).detach(), "max_new_tokens": 12}
    plain = target.generate(**call, do_sample=False)
    assert target.generate(**call, do_sample=False, assistant_model=drafter).tolist() == plain.tolist()


def test_a_limited_vocabulary_drafts_what_is_left(target):
    drafter, kept = make_eagle(target, draft_vocab_ids=tuple(range(3, 90))), list(range(80, 20, -3))
    session, options = session_of(drafter, target)
    session.observe([news_of(0, 9)])
    hidden = torch.randn(4, 32)
    with torch.no_grad():
        before = drafter.logits(hidden)
        drafter.limit_vocabulary(kept)
        assert torch.equal(drafter.logits(hidden), before[:, [token - 3 for token in kept]])
    limited, _ = session_of(drafter, target)
    limited.observe([news_of(0, 9)])
    tree = drafts(limited, options)[0]
    assert len(tree) > 10 and set(tree.tokens[1:]) <= set(kept)
    with pytest.raises(ValueError, match=r"ids holds 2: expected tokens of the drafter's vocabulary"):
        drafter.limit_vocabulary([2, 80])


def test_the_head_is_multiplied_for_expanded_nodes_only(target, monkeypatch):
    drafter, rows = make_eagle(target), []
    hook = drafter.lm_head.register_forward_hook(lambda _, inputs, __: rows.append(inputs[0].shape[:-1].numel()))
    session, options = session_of(drafter, target)
    session.observe([news_of(0, 9)])
    drafts(session, options)
    hook.remove()
    assert rows == [1, 5, 5, 5]


@pytest.mark.parametrize("kind", KINDS)
def test_the_forward_of_training_drafts_as_a_session_does(target, kind, monkeypatch):
    """Two documents in one row; chains at some pairs, of which some are unrolled along given tokens."""
    if kind == "eagle3, three layers":
        kind, fields = kind, {"num_hidden_layers": 3, "windows": (8, 8, 8)}
    else:
        fields = KINDS[kind]
    drafter, lengths = make_eagle(target, **fields), (20, 13)
    news = [news_of(0, length, seed=row) for row, length in enumerate(lengths)]
    weights = drafter.borrow(target.get_input_embeddings())
    taps, following = (torch.cat([getattr(each, name) for each in news]) for name in ("taps", "following"))
    positions = torch.cat([each.positions for each in news])
    documents = torch.arange(2).repeat_interleave(torch.tensor(lengths))
    starts = torch.tensor([9, 14, 24, 30])
    paths = torch.randint(5, VOCAB, (4, 3), generator=torch.Generator().manual_seed(2))
    tokens = torch.cat([following[starts][:, None], paths], dim=1)
    if drafter.config.mask_token_id is not None:
        tokens[:, 1:] = drafter.config.mask_token_id
    output = drafter(
        taps, weights.embed(following), positions, starts, documents, num_rolled=3, path_embeds=weights.embed(tokens)
    )
    assert [len(states) for states in output.hidden_states] == [4, 3, 3, 3]
    chains = torch.stack([states[:3] for states in output.hidden_states], dim=1)
    for chain, start in enumerate(starts[:3].tolist()):
        document = int(documents[start])
        count = start - (0 if document == 0 else lengths[0]) + 1
        session, _ = session_of(drafter, target)
        session.observe([news_of(0, count, seed=document)])
        with torch.no_grad():
            session.read_pending([0])
            drafted = session.rows_after([0])
            if drafter.config.mask_token_id is not None:
                logits = session_module.parallel_logits(drafter, weights, drafted, drafter.config.mask_token_id, 4)[0]
            else:
                expansion = session_module.EagleExpansion(drafter, weights, drafted, 4)
                logits, states = [], None
                for level, token in enumerate(tokens[chain].tolist(), 1):
                    found, states = expansion.logits(level, torch.tensor([[token]]), states)
                    logits.append(found[0, 0])
                logits = torch.stack(logits)
        torch.testing.assert_close(drafter.logits(chains[chain]), logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_every_weight_learns(target, kind):
    drafter = make_eagle(target, **KINDS[kind], norm_before_fc=True)
    news, weights = news_of(0, 20), drafter.borrow(target.get_input_embeddings())
    drafter.loss_function = lambda network, states, labels: sum(
        network.logits(each).log_softmax(-1)[:, labels].mean() for each in states
    )
    tokens = torch.full((3, 4), 3)
    output = drafter(
        news.taps,
        weights.embed(news.following),
        news.positions,
        torch.tensor([7, 11, 19]),
        path_embeds=weights.embed(tokens),
        labels=5,
    )
    output.loss.backward()
    assert all(each.grad is not None and bool(each.grad.abs().sum() > 0) for each in drafter.parameters())
    with pytest.raises(ValueError, match="path_embeds=None is invalid with 4 draft steps"):
        drafter(news.taps, weights.embed(news.following), news.positions)


def test_a_fresh_drafter_is_like_a_layer_of_its_target(target, tmp_path):
    config = EagleConfig.for_target(target, num_draft_steps=5, draft_vocab_ids=[3, 5, 9])
    assert (config.target_tap_layers, config.draft_vocab_size, config.num_draft_steps) == ((2, 4, 5), 3, 5)
    assert config.layer.num_key_value_heads == target.config.num_key_value_heads
    drafter = EagleDrafter(config)
    drafter.save_pretrained(tmp_path)
    assert AutoDrafter.from_pretrained(tmp_path).draft_vocab_ids().tolist() == [3, 5, 9]
    for fields, message in (
        ({"draft_vocab_ids": [3, 3]}, "draft_vocab_ids"),
        ({"draft_vocab_size": VOCAB + 1}, f"draft_vocab_size={VOCAB + 1} is invalid: the target has only"),
        ({"target_tap_layers": [4, 2]}, r"target_tap_layers=\(4, 2\) is invalid: expected ascending"),
        ({"num_draft_steps": 0}, "num_draft_steps=0 is invalid"),
        ({"windows": (3,)}, r"windows=\(3,\) is invalid"),
        ({"rope": {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}}, "rope=.* is invalid"),
    ):
        with pytest.raises(ValueError, match=message):
            EagleDrafter(EagleConfig.for_target(target, **fields))


@pytest.mark.parametrize("hooked", [False, True])
def test_rows_are_borrowed_without_the_factor_of_the_target(target, hooked):
    """As the projects train them: on a copy of the table."""
    embedding, tokens = Gemma3TextScaledWordEmbedding(VOCAB, 32, 0, embed_scale=7.0), torch.tensor([[3, 9]])
    if hooked:  # as an offloaded module
        embedding.register_forward_hook(lambda *_: None)
    found = make_eagle(target).borrow(embedding).embed(tokens)
    torch.testing.assert_close(found, embedding.weight.detach()[tokens])


def test_a_wrapped_drafter_reads_the_same(target):
    drafter = make_eagle(target)
    wrapped = WrappedDrafter(drafter)
    assert wrapped.taps == drafter.taps == tuple(wrapped.taps_of(target)) == (2, 4, 5)


class Listening(Observer):
    """Keeps what the trees of a batch grow from, each with the log-probabilities of two depths as they are then."""

    def __init__(self):
        self.heard = []

    def on_expansion(self, rows, expansion):
        self.heard.append((rows, expansion, depths_of(rows, expansion)))

    def put(self, tokens): ...

    def end(self): ...


def depths_of(rows, expansion):
    tokens = torch.tensor([[9 + row] for row in rows])
    first, states = expansion(1, tokens, None)
    return torch.cat([first, expansion(2, tokens, states)[0]])


def test_what_trees_of_a_batch_grow_from_can_be_asked_after_the_call(target):
    listening = Listening()
    call = {"attention_mask": MASK, "max_new_tokens": 12, "do_sample": False}
    target.generate(PADDED, assistant_model=make_eagle(target), streamer=listening, **call)
    assert any(len(rows) > 1 for rows, *_ in listening.heard)
    for rows, expansion, before in listening.heard:
        torch.testing.assert_close(depths_of(rows, expansion), before)


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_is_the_same(target, tmp_path, kind):
    drafter = make_eagle(target, **KINDS[kind])
    drafter.generation_config.tree_size = 13
    drafter.save_pretrained(tmp_path)
    again = AutoDrafter.from_pretrained(tmp_path)
    assert again.config == drafter.config and again.generation_config.tree_size == 13
    card = (tmp_path / "README.md").read_text()
    assert f"`{'peagle' if kind == 'peagle' else 'eagle3'}`" in card and "It reads hidden states" in card
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    with pytest.raises(ValueError, match="tree_size"):
        again.generation_config.tree_size = 0
        again.save_pretrained(tmp_path / "other")
