"""What all families promise: exact texts, drafts that depend on the text alone, files, refusals, and commands."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from conftest import VOCAB, each_with_its_seed, edited, make_drafter, make_target
from family_helpers import (
    PUBLISHED,
    STEPS,
    assert_same_tree,
    drafts,
    drafts_much,
    make_block_drafter,
    make_eagle,
    make_flashmap,
    make_lm,
    session_of,
)
from lm_helpers import drafted_call
from oracles.exactness import chi_square
from safetensors.torch import load_file, save_file
from session_helpers import news, padded
from small_target import exact_distribution, small_target
from test_specformer import make_specformer

from hf_hsdraft import AutoDrafter, CachebackDrafter, CascadeDrafter, CausalLMDrafter, HSDrafter
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Ask, Call
from hf_hsdraft.drafters.base.tree_session import DraftMemory
from hf_hsdraft.engine.loop import Observer
from hf_hsdraft.training.families.trainable import as_trained


def slotted(target, kind: str, **fields):
    if "draft_vocab_ids" in fields:
        fields["draft_vocab_size"] = len(fields["draft_vocab_ids"])
    return drafts_much(make_specformer(target, kind, **fields))


KINDS = {**PUBLISHED, "language model": make_lm}
SLOTTED = {f"specformer, {kind}": partial(slotted, kind=kind) for kind in ("default", "window", "frames")}
SLOTTED["flashmap"] = make_flashmap
READING = {**PUBLISHED, **SLOTTED}
KINDS |= SLOTTED
MAIN = ("block, vanilla", "block, selector", "eagle3", "peagle", "language model", *SLOTTED)
PAIR = {"block": make_block_drafter, "eagle": make_eagle}
EVERY = {
    **PAIR,
    "hidden states": make_drafter,
    "language model": CausalLMDrafter,
    "n-grams": lambda target: CachebackDrafter(),
    "cascade": lambda target: CascadeDrafter([CachebackDrafter(), CausalLMDrafter(target)], tokens=[4, 8]),
}
NEW = 10  # tokens
GREEDY = {"max_new_tokens": NEW, "do_sample": False}

every_kind = pytest.mark.parametrize("kind", KINDS)
published = pytest.mark.parametrize("kind", PUBLISHED)
reading = pytest.mark.parametrize("kind", READING)  # the target's hidden states
main = pytest.mark.parametrize("kind", MAIN)
pair = pytest.mark.parametrize("family", PAIR)


@pytest.fixture(scope="module")
def target():
    return make_target(num_hidden_layers=6)


@pytest.fixture(scope="module")
def plain(target):
    """A function that returns plain decoding's texts, by number of rows and whether they are drawn."""

    @cache
    def texts(rows: int, do_sample: bool) -> list[list[int]]:
        inputs, call = padded(rows), {"max_new_tokens": NEW, "do_sample": do_sample}
        torch.manual_seed(7)
        if do_sample and rows > 1:
            return each_with_its_seed(target, inputs["input_ids"], inputs["attention_mask"], 7, **call).tolist()
        return target.generate(**inputs, **call).tolist()

    return texts


# --- texts -----------------------------------------------------------------------------------------------------------


@every_kind
@pytest.mark.parametrize(("rows", "do_sample"), [(1, True), (3, False), (3, True)])
def test_texts_are_the_targets_own(target, plain, kind, rows, do_sample):
    """By trees and chains. Sampled, each row of a batch has a seed; the draws are foreseen."""
    drafter, call = KINDS[kind](target), {**padded(rows), "max_new_tokens": NEW, "do_sample": do_sample}
    for width in (5, 1):
        drafter.generation_config.beam_width = width
        torch.manual_seed(7)
        output = target.generate(**call, assistant_model=drafter, return_dict_in_generate=True)
        assert output.sequences.tolist() == plain(rows, do_sample)
        assert sum(output.statistics.drafted_nodes) > 0
        if width > 1 and do_sample and "eagle" in kind:  # the race's winner is guessed
            assert sum(output.statistics.accepted_lengths) > 0


@main
@pytest.mark.parametrize(
    "options",
    [
        {"tree_sizing": "cost", "ngram_length": 4, "assistant_confidence_threshold": 0.05},
        {"tree_builder": "gumbel", "verification": "rejection"},
        {"tree_builder": "stochastic_beam", "verification": "rejection"},
    ],
    ids=["paced", "gumbel", "stochastic_beam"],
)
def test_other_options_keep_greedy_texts(target, plain, kind, options):
    drafter = KINDS[kind](target)
    drafter.generation_config.update(**options)
    assert target.generate(**padded(3), **GREEDY, assistant_model=drafter).tolist() == plain(3, False)


@pytest.mark.parametrize("kind", [*MAIN, "hidden states"])
@pytest.mark.parametrize("builder", ["gumbel", "stochastic_beam"])
def test_rejection_keeps_the_targets_distribution(kind, builder):
    """Of what is drawn after a first token: counts against the target's probabilities. Most know 4 of 6 tokens.

    A row's share of the tree is 4 nodes: all known tokens.
    """
    target = small_target(num_hidden_layers=4)
    known = {"draft_vocab_ids": (0, 1, 2, 3), "draft_vocab_size": 4}
    drafter = {**EVERY, **KINDS}[kind](target, **known if kind != "block, selector" else {"selector_top_k": 4})
    drafter.generation_config.update(tree_builder=builder, verification="rejection", tree_size=1400, beam_width=3)
    prompt = torch.tensor([[1, 4, 2]])
    torch.manual_seed(0)
    output = target.generate(
        prompt.expand(200, -1), max_new_tokens=3, do_sample=True, top_k=0, assistant_model=drafter,
        return_dict_in_generate=True,
    )  # fmt: skip
    counts = Counter(tuple(text) for text in output.sequences[:, 4:].tolist())
    assert sum(output.statistics.accepted_lengths) > 0 and any(5 in text for text in counts)
    assert chi_square(counts, exact_distribution(target, prompt, 1.0).sum(dim=0)) > 1e-4


@reading
def test_prompts_may_be_embeddings(target, plain, kind):
    drafter, inputs = READING[kind](target), padded(3)
    inputs["inputs_embeds"] = target.get_input_embeddings()(inputs.pop("input_ids")).detach()
    new = target.generate(**inputs, **GREEDY, assistant_model=drafter)
    assert new.tolist() == [text[-NEW:] for text in plain(3, False)]


# --- drafts ----------------------------------------------------------------------------------------------------------


@main
def test_a_chat_drafts_as_a_call_that_reads_it_all(target, kind):
    """It goes on from what the earlier call has read; what another drafter has read is left alone."""
    drafter, ids = KINDS[kind](target), padded(1)["input_ids"]
    _, first = drafted_call(target, drafter, {"input_ids": ids}, max_new_tokens=NEW)
    more = {"input_ids": torch.cat([first.sequences, torch.tensor([[8, 9, 10]])], dim=1)}
    wanted, whole = drafted_call(target, drafter, more, max_new_tokens=NEW)
    stranger = make_eagle(target, seed=2)
    for each in (drafter, stranger):
        cache_of_first = copy.deepcopy(first.past_key_values)
        found, output = drafted_call(target, each, more, past_key_values=cache_of_first, max_new_tokens=NEW)
        assert output.sequences.tolist() == whole.sequences.tolist()
        if each is drafter:
            assert len(found) == len(wanted) > 0
            for one, other in zip(itertools.chain(*found), itertools.chain(*wanted), strict=True):
                assert one[:2] == other[:2] and one[2] == pytest.approx(other[2], abs=1e-4)


TEXTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], [20, 21, 22, 23], [30, 31, 32, 33, 34, 35, 36]]


@reading
def test_rows_of_a_batch_draft_as_they_do_alone(target, kind):
    """Of different lengths, read in different pieces, and with rows that wait or have ended in between."""
    drafter = READING[kind](target)
    together = session_of(drafter, target, rows=3)
    together.observe([news(drafter, target, text, 0, len(text) - 3, row) for row, text in enumerate(TEXTS)])
    for rows in ((1,), (0, 1, 2)):
        drafts(together, {row: TEXTS[row][-3] for row in rows})
    together.keep([0, 2])
    together.observe(
        [news(drafter, target, TEXTS[row], len(TEXTS[row]) - 3, len(TEXTS[row]) - 1, row) for row in (2, 0)]
    )
    found = drafts(together, {row: TEXTS[row][-1] for row in (2, 0)})
    for row, tree in zip((2, 0), found, strict=True):
        alone = session_of(drafter, target)
        alone.observe([news(drafter, target, TEXTS[row], 0, len(TEXTS[row]) - 1)])
        assert_same_tree(tree, drafts(alone, {0: TEXTS[row][-1]})[0])


@reading
@torch.no_grad()
def test_each_node_of_a_tree_goes_on_from_its_own_path(target, kind):
    drafter, text, heard = READING[kind](target), TEXTS[0], []
    session = session_of(drafter, target)
    session.on_expansion = lambda rows, expansion: heard.append(expansion)
    session.observe([news(drafter, target, text, 0, len(text) - 1)])
    [tree] = session.draft([Ask(0, text[-1], STEPS, 240, 4)])
    columns = drafter.draft_vocab_ids().tolist() or range(VOCAB)
    assert max(tree.depths) > 2 and len(set(tree.parents)) > max(tree.depths)
    for node in sorted(range(1, len(tree)), key=tree.depths.__getitem__)[::-10]:  # the deepest and some others
        path, expected, states = [tree.tokens[each] for each in tree.path(node)], 0.0, None
        for level, (token, child) in enumerate(itertools.pairwise([text[-1], *path]), 1):
            log_probs, states = heard[0](level, torch.tensor([[token]]), states)
            expected += float(log_probs[0, 0, columns.index(child)])
        assert tree.scores[node] == pytest.approx(expected, abs=1e-4)


@reading
def test_drafts_depend_on_the_text_alone(target, kind, tuned):
    """Not on earlier drafts, nor on when the text came, though it waits for a draft for long."""
    tuned(most_pending=2)
    drafter, text = READING[kind](target), list(range(5, 20))
    whole, often, rarely = (session_of(drafter, target) for _ in range(3))
    told = news(drafter, target, text, 0, 14)
    whole.observe([told])
    for start in range(14):
        one = slice(start, start + 1)
        parts = {name: getattr(told, name)[one] for name in ("tokens", "taps", "positions", "following")}
        for session in (often, rarely):
            session.observe([replace(told, **parts)])
        drafts(often, {0: text[start + 1]})
    assert len(rarely._pending[0]) <= 3
    wanted = drafts(whole, {0: text[-1]})[0]
    for session in (often, often, rarely):
        assert_same_tree(drafts(session, {0: text[-1]})[0], wanted)


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
    return first if expansion.depth == 1 else torch.cat([first, expansion(2, tokens, states)[0]])


@main
def test_what_trees_of_a_batch_grow_from_can_be_asked_after_the_call(target, kind):
    listening, drafter = Listening(), KINDS[kind](target)  # what trees grow from does not keep a drafter alive
    target.generate(**padded(3), **GREEDY, assistant_model=drafter, streamer=listening)
    assert any(len(rows) > 1 for rows, *_ in listening.heard)
    for rows, expansion, before in listening.heard:
        torch.testing.assert_close(depths_of(rows, expansion), before)


def test_costs_of_one_kind_are_no_costs_of_another(target):
    drafters = [
        make_eagle(target),
        make_eagle(target, "peagle"),
        make_block_drafter(target),
        make_block_drafter(target, "gated"),
    ]
    kinds = {each.session(Call(target, 1, DraftOptions.of(each))).kind for each in drafters}
    assert len(kinds) == len(drafters)


def test_drafters_that_can_only_draft_are_known(target):
    for drafter in (make_drafter(target), make_block_drafter(target), make_eagle(target)):
        assert as_trained(drafter) is drafter
    assert as_trained(make_block_drafter(target, "rnn", sample_from_anchor=False)) is None


def test_a_memory_does_not_fit_a_drafter_of_another_dtype(target):
    drafter = make_drafter(target)
    memory = DraftMemory.of(drafter, 5, None, ())
    assert memory.fits(drafter, 5)
    assert not memory.fits(drafter.to(torch.bfloat16), 5)


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", [kind for kind in PUBLISHED if kind not in ("block, sliding", "eagle1", "eagle3, latent")]
)
def test_saved_and_loaded_it_is_the_same(target, kind, tmp_path):
    drafter = PUBLISHED[kind](target, target_name="/home/somebody/models/a-target")
    drafter.generation_config.tree_size = 13
    drafter.save_pretrained(tmp_path)
    again = AutoDrafter.from_pretrained(tmp_path)
    unknown = {"target_num_hidden_layers": None} if "block" in kind else {}
    assert again.config == replace(drafter.config, target_name="a-target", **unknown)
    assert again.generation_config.tree_size == 13
    for name, tensor in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    card, config = ((tmp_path / name).read_text() for name in ("README.md", "config.json"))
    assert f"`{edited(tmp_path)['speculators_model_type']}`" in card and "reads hidden states" in card
    assert "a-target" in card and "a-target" in config and "somebody" not in card + config
    again.generation_config.tree_size = 0
    with pytest.raises(ValueError, match="tree_size=0 is invalid"):
        again.save_pretrained(tmp_path / "other")


@pair
@pytest.mark.parametrize("model_type", [None, "speculator_model"])  # earlier versions wrote one
def test_a_drafter_takes_the_place_of_a_former_one(target, family, model_type, tmp_path):
    make_block_drafter(target, "own mask").save_pretrained(tmp_path)
    for name in ("model-00001-of-00002.safetensors", "figures.json", "notes.txt"):
        (tmp_path / name).write_text("{}")
    drafter = PAIR[family](target)
    drafter.save_pretrained(tmp_path)
    left = {"model-00001-of-00002.safetensors", "figures.json", "mask_embedding.pt", "notes.txt"}
    assert {path.name for path in tmp_path.iterdir()} & left == {"notes.txt"}
    edited(tmp_path, **({"model_type": model_type} if model_type else {}))
    assert torch.equal(AutoDrafter.from_pretrained(tmp_path).fc.weight, drafter.fc.weight)


@pytest.mark.parametrize("kind", EVERY)
def test_every_family_takes_the_same_arguments(target, kind, tmp_path):
    EVERY[kind](target).save_pretrained(tmp_path)
    for dtype in ({"dtype": "bfloat16"}, {"torch_dtype": torch.bfloat16}):
        drafter = AutoDrafter.from_pretrained(tmp_path, **dtype, attn_implementation="eager", tree_size=9)
        assert getattr(drafter, "dtype", torch.bfloat16) == torch.bfloat16
        assert drafter.generation_config.tree_size == 9
    weightless = kind == "n-grams"
    for device in ("cpu", "auto", {"": "cpu"}, torch.device("cpu")):
        drafter = AutoDrafter.from_pretrained(tmp_path, device_map=device, attn_implementation="sdpa", token=None)
        assert weightless or drafter.device.type == "cpu"
    for wrong, error in (
        ({"dtype": "int8"}, ValueError),
        ({"attn_implementation": "flash_attention_9"}, (ValueError, ImportError)),
        ({"tree_sise": 9}, (TypeError, ValueError)),
        ({"tree_size": 0}, ValueError),
        *([] if kind == "language model" else [({"device_map": {"a": "cpu", "b": 0}}, ValueError)]),
    ):
        [name] = wrong
        with pytest.raises(error, match=name):
            AutoDrafter.from_pretrained(tmp_path, **wrong)
    if kind not in PAIR:
        return
    assert AutoDrafter.from_pretrained(tmp_path, dtype="auto").dtype == torch.float32
    assert AutoDrafter.from_pretrained(tmp_path, device_map="meta").device.type == "meta"
    for wrong, message in (
        ({"dtype": "nine"}, "dtype='nine' is invalid"),
        ({"dtype": "float16", "torch_dtype": "float32"}, "dtype='float16' contradicts torch_dtype='float32'"),
        ({"tree_sise": 9}, "no drafting option tree_sise: the nearest option is tree_size"),
        ({"variant": "fp16"}, "no drafting option variant"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            AutoDrafter.from_pretrained(tmp_path, **wrong)


@pair
def test_a_class_refuses_drafters_of_others_before_it_loads_them(target, family, tmp_path, monkeypatch):
    kind, [other] = type(PAIR[family](target)), [make for name, make in PAIR.items() if name != family]
    other(target).save_pretrained(tmp_path / "other")
    CausalLMDrafter(target).save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"AutoDrafter\.from_pretrained\(\) loads it"):
        HSDrafter.from_pretrained(tmp_path / "other")
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", None)
    for name, form in (("other", "speculators"), ("model", "causal language model")):
        with pytest.raises(ValueError, match=f"is of the format {form}.*, not a {kind.__name__}: load it by AutoDraft"):
            kind.from_pretrained(tmp_path / name)


@pair
def test_recipe_and_figures_come_along_while_the_weights_stay(target, family, tmp_path):
    PAIR[family](target).save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "figures.json").write_text("{}")
    (tmp_path / "saved" / "training_recipe.json").write_text('{"training": {"data": "some chats"}}')
    drafter = AutoDrafter.from_pretrained(tmp_path / "saved")
    drafter.save_pretrained(tmp_path / "again")
    drafter.export("speculators", tmp_path / "exported")
    for name in ("again", "exported"):
        assert (tmp_path / name / "figures.json").is_file()
        assert "some chats" in (tmp_path / name / "training_recipe.json").read_text()
    next(drafter.parameters()).data.mul_(2)
    drafter.save_pretrained(tmp_path / "changed")
    assert not (tmp_path / "changed" / "figures.json").exists()
    assert edited(tmp_path / "changed", "training_recipe.json")["changed_since"] is True


@pair
@pytest.mark.parametrize("contradict", [lambda marked: marked.roll(1), torch.ones_like])
def test_maps_of_the_vocabulary_that_contradict_each_other_are_refused(target, family, contradict, tmp_path):
    PAIR[family](target, draft_vocab_ids=range(2, 20, 3)).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, "t2d": contradict(state["t2d"])}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"d2t and t2d of .* name different tokens"):
        AutoDrafter.from_pretrained(tmp_path)


@pair
def test_switches_and_methods_of_files(target, family, tmp_path):
    """Harmless switches of layers are passed over, unknown ones refused; methods may be missing but not wrong."""
    PAIR[family](target).save_pretrained(tmp_path)
    layers, proposals = (edited(tmp_path)[name] for name in ("transformer_layer_config", "speculators_config"))
    assert (layers["mlp_bias"], layers["tie_word_embeddings"]) == (False, False)  # readers have different defaults
    harmless = {"use_cache": True, "return_dict": True, "is_decoder": False, "tie_word_embeddings": False}
    for methods in (None, []):
        edited(tmp_path, transformer_layer_config={**layers, **harmless},
               speculators_config={**proposals, "proposal_methods": methods, "verifier": "a name"})  # fmt: skip
        AutoDrafter.from_pretrained(tmp_path)
    edited(tmp_path, speculators_config={**proposals, "proposal_methods": "greedy"})
    with pytest.raises(ValueError, match="proposal_methods='greedy' is invalid: expected a list"):
        AutoDrafter.from_pretrained(tmp_path)
    edited(tmp_path, speculators_config=proposals, transformer_layer_config={**layers, "scales_by_depth": True})
    with pytest.raises(ValueError, match="transformer_layer_config has scales_by_depth=true"):
        AutoDrafter.from_pretrained(tmp_path)


# --- other targets ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*PAIR, "hidden states"])
def test_another_target_is_refused_before_any_work(target, family):
    drafter = EVERY[family](target, target_tap_layers=(1, 4))
    if family in PAIR:
        drafter.config = replace(drafter.config, target_name="a\x1b[31m\ntarget")
    wanted = r"reads its hidden states \[1, 4\]" if family == "eagle" else "expects 6"
    for fields, message in (
        ({"vocab_size": VOCAB + 1}, f"vocab_size={VOCAB + 1}, the drafter expects {VOCAB}"),
        ({"hidden_size": 64}, "hidden_size=64, the drafter expects 32"),
        ({"num_hidden_layers": 3}, f"num_hidden_layers=3, the drafter {wanted}"),
    ):
        other = make_target(**{"num_hidden_layers": 6, **fields})
        other.register_forward_pre_hook(lambda *_: pytest.fail("the target ran"))
        with pytest.raises(DraftingRefused, match=message) as told:
            other.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, max_new_tokens=4)
        assert str(told.value).isprintable() and "Use a drafter of this target" in str(told.value)


def test_a_size_that_is_not_known_fits_no_target(target):
    drafter = EVERY["hidden states"](target)
    drafter.config.vocab_size = None
    with pytest.raises(DraftingRefused, match=f"vocab_size={VOCAB}, the drafter expects None"):
        drafter.check(target)


def test_rows_of_an_offloaded_embedding_are_taken_as_they_are(target):
    accelerate = pytest.importorskip("accelerate")

    class Scaled(torch.nn.Embedding):
        embed_scale = 3.0

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * self.embed_scale

    tokens, head = torch.tensor([[3, 4]]), target.get_output_embeddings()
    embedding = Scaled(*target.get_input_embeddings().weight.shape)
    rows = embedding.weight.detach().clone()[tokens]
    accelerate.cpu_offload(torch.nn.Sequential(embedding), torch.device("cpu"))
    assert embedding.weight.device.type == "meta"
    for drafter in (make_block_drafter(target), make_eagle(target)):
        assert torch.equal(drafter.borrow(embedding, head).embed(tokens), rows)
    doubled = make_block_drafter(target, embedding_scale=2.0)
    assert torch.equal(doubled.borrow(embedding, head).embed(tokens), 2.0 * rows)
