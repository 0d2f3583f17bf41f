"""Cascades: middle models verify what a quicker drafter drafts, and the text stays the target's own."""

from __future__ import annotations

import copy
import json
from collections import Counter

import pytest
import torch
from conftest import VOCAB, as_plain, make_drafter, make_target
from family_helpers import near
from lm_helpers import padded
from oracles.exactness import chi_square
from session_helpers import news
from small_target import SMALL, exact_distribution, small_target
from transformers import AutoModelForCausalLM, MistralConfig

from hf_hsdraft import AutoDrafter, CachebackDrafter, CascadeDrafter, CausalLMDrafter, SteeredLMDrafter, harmless
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call
from hf_hsdraft.methods.steering.steered_lm import Steering, SteeringSizes

NEW = 16
GREEDY = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True}


@pytest.fixture(scope="module")
def target():
    return make_target(seed=3)


def cascade_of(target, kind: str, **options) -> CascadeDrafter:
    """Cascades of the kinds that there are, which draft as much on every machine."""
    middle, small = CausalLMDrafter(near(target, 0.01)), CausalLMDrafter(near(target, 0.03, seed=2))
    levels, tokens = {
        "n-grams": ([CachebackDrafter(), middle], [3, 6]),
        "model": ([small, middle], [3, 6]),
        "one by one": ([small, middle], [1, 1]),
        "three": ([CachebackDrafter(), small, middle], [2, 3, 7]),
        "states": ([make_drafter(middle.model), middle], [3, 6]),
        "states, three": ([make_drafter(small.model), small, middle], [2, 3, 7]),
        "three models": ([CausalLMDrafter(near(target, 0.05, seed=4)), small, middle], [2, 3, 7]),
    }[kind]
    cascade = CascadeDrafter(levels, tokens).eval()
    for name, value in {"tree_sizing": "fixed", **options}.items():
        setattr(cascade.generation_config, name, value)
    return cascade


KINDS = ["n-grams", "model", "one by one", "three", "three models", "states", "states, three"]


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_are_those_of_plain_decoding(target, kind, rows):
    output = as_plain(target, cascade_of(target, kind, tree_size=24 * rows), padded(rows), max_new_tokens=NEW)
    assert output.statistics.tau > 1.3, "middle models that are often right are often accepted"
    assert 0 in output.statistics.accepted_lengths, "and rejected, so that they take tokens back"


@pytest.mark.parametrize("kind", ["n-grams", "three models"])
def test_models_with_windows_take_back_what_is_rejected(kind):
    """The window is shorter than a text, so its layers drop what is behind it, but not what is to be seen again."""
    torch.manual_seed(5)
    shape = {**make_target().config.to_dict(), "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 6}
    model = AutoModelForCausalLM.from_config(MistralConfig(**{**shape, "model_type": "mistral"})).eval()
    for rows in (1, 3):
        cascade = cascade_of(model, kind, tree_size=24 * rows)
        assert as_plain(model, cascade, padded(rows), max_new_tokens=NEW).statistics.tau > 1.3


class Rounds:
    """A text that goes on as chance has it, for the session of a cascade."""

    def __init__(self, target, cascade, rows: int = 1) -> None:
        self.texts = {row: [5 + row, 9, 7, 9, 7 + row] for row in range(rows)}
        self.session = cascade.session(Call(target, rows, DraftOptions.of(cascade)))
        self.chance = torch.Generator().manual_seed(0)
        for row, text in self.texts.items():
            self.tell(row, text)

    def go_on(self) -> dict[int, list[int]]:
        """The drafts of a round, of which as much is accepted as chance has it, and then any token."""
        chains = self.draft()
        for row, chain in chains.items():
            accepted = int(torch.randint(len(chain) + 1, (), generator=self.chance))
            new = [*chain[:accepted], int(torch.randint(2, VOCAB, (), generator=self.chance))]
            self.tell(row, new)
            self.texts[row] = [*self.texts[row], *new]
        return chains

    def tell(self, row: int, tokens: list[int]) -> None:
        self.session.observe([Accepted.of_tokens(row, tokens)])

    def draft(self, depth: int = 20) -> dict[int, list[int]]:
        asks = [Ask(row, text[-1], depth, depth, width=1) for row, text in self.texts.items()]
        return {
            row: list(tree.tokens[1:])
            for row, tree in zip(self.texts, self.session.draft(asks), strict=True)
            if tree.depths == tuple(range(len(tree)))
        }


@torch.no_grad()
def says(model, text: list[int], chain: list[int]) -> bool:
    """Whether each token of a chain is what a model says after those before it, by a plain forward."""
    logits = model(torch.tensor([[*text, *chain]]), use_cache=False).logits[0, len(text) - 1 : -1]
    return logits.argmax(-1).tolist() == chain


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_chain_is_what_the_last_middle_model_says(target, kind, rows):
    """Whatever is accepted of it: nothing that was taken back is seen any more, and nothing is read at wrong places."""
    cascade = cascade_of(target, kind)
    rounds = Rounds(target, cascade, rows)
    for _ in range(4):
        before = dict(rounds.texts)
        for row, chain in rounds.go_on().items():
            assert cascade.tokens[-1] <= len(chain) <= cascade.reach[-1]
            assert says(cascade.levels[-1].model, before[row], chain)


def test_the_model_reads_accepted_drafts_once(target):
    """Drafts that are always right are read in chains: 6 tokens take two forwards of the model, not six."""
    model = near(target, 0.01)
    cascade = CascadeDrafter([CausalLMDrafter(copy.deepcopy(model)), CausalLMDrafter(model)], tokens=[2, 6]).eval()
    rounds, columns = Rounds(target, cascade), []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: columns.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    chain = rounds.draft()[0]
    assert len(chain) == 6 and columns == [5 + 2, 1 + 2]
    rounds.tell(0, [*chain, 11])  # all of it is right
    rounds.texts[0] += [*chain, 11]
    columns.clear()
    rounds.draft()
    assert columns == [2 + 2, 1 + 2], "the last token of the chain and the bonus token are new"


@pytest.mark.usefixtures("unrounded")
@pytest.mark.parametrize("rows", [1, 3])
def test_a_hidden_state_drafter_drafts_for_the_middle_model_as_for_a_target(target, rows):
    """It drafts what a fresh session drafts that was told the same text at once, by plain forwards of the model."""
    model = near(target, 0.01)
    first = make_drafter(model)
    cascade = CascadeDrafter([first, CausalLMDrafter(model)], tokens=[3, 6]).eval()
    rounds, drafts = Rounds(target, cascade, rows), []
    feed, lower = rounds.session._feed, rounds.session._lower
    texts, tell, draft = {}, feed.tell, lower.draft

    def noting(row, settled, held):
        texts[row] = [*settled, *held]
        return tell(row, settled, held)

    def drafting(asks):
        trees = draft(asks)
        drafts.extend((texts[ask.row], tree) for ask, tree in zip(asks, trees, strict=True) if ask.depth)
        return trees

    feed.tell, lower.draft = noting, drafting
    for _ in range(5):
        rounds.go_on()
    assert len(drafts) > 10 * rows
    for text, tree in drafts:
        fresh = first.session(Call(model, 1, DraftOptions.of(first)))
        fresh.observe([news(first, model, text, 0, len(text) - 1)])
        [expected] = fresh.draft([Ask(0, text[-1], 3, 3, width=1)])
        assert tree.tokens == expected.tokens[: len(tree)]


@pytest.mark.parametrize("size", [1, 3])
def test_small_trees_limit_the_chain_as_depths_do(target, size):
    cascade = cascade_of(target, "n-grams", tree_size=size, num_assistant_tokens=12)
    [tree] = Rounds(target, cascade).session.draft([Ask(0, 7, 12, size, width=1)])
    assert len(tree) - 1 == size == len(Rounds(target, cascade).draft(size)[0])
    assert max(as_plain(target, cascade, padded(1), max_new_tokens=NEW).statistics.drafted_nodes) == size


def test_a_text_longer_than_the_models_positions_goes_on_without_drafts(target):
    short = near(make_target(seed=3, max_position_embeddings=16), 0.01)
    cascade = CascadeDrafter([CachebackDrafter(), CausalLMDrafter(short)], tokens=[2, 4]).eval()
    as_plain(target, cascade, padded(2), max_new_tokens=NEW)


def three_levels(target, kind: str, verification: str) -> CascadeDrafter:
    """N-grams or a model, a model of other opinions that knows fewer tokens, and the target."""
    other = make_target(seed=9, vocab_size=5, pad_token_id=None, bos_token_id=None, initializer_range=0.2)
    first = CachebackDrafter() if kind == "n-grams" else CausalLMDrafter(make_target(
        seed=8, vocab_size=SMALL, pad_token_id=None, bos_token_id=None, initializer_range=0.2
    ))  # fmt: skip
    cascade = CascadeDrafter([first, CausalLMDrafter(other)], tokens=[2, 2]).eval()
    options = cascade.generation_config
    options.tree_sizing, options.tree_size, options.verification = "fixed", 96, verification
    options.tree_builder = "gumbel" if verification == "rejection" else "beam"
    return cascade


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verification", "kind", "rows"),
    [("walk", "n-grams", 4), ("rejection", "n-grams", 1), ("rejection", "n-grams", 4), ("rejection", "model", 4)],
)
def test_texts_through_three_levels_are_distributed_as_the_targets(kind, verification, rows):
    """Of a target of six tokens. A seed gives the same texts again."""
    small, prompt = small_target(), torch.tensor([[1, 4, 2, 2, 3, 1, 4, 2]])
    cascade = three_levels(small, kind, verification)
    call = {"do_sample": True, "temperature": 1.3, "top_k": 0, "max_new_tokens": 3, "assistant_model": cascade}
    counts, calls = Counter(), []
    torch.manual_seed(1)
    for _ in range(800 // rows):
        calls.append(small.generate(prompt.repeat(rows, 1), **call)[:, prompt.shape[1] :].tolist())
        counts.update(map(tuple, calls[-1]))
    assert chi_square(counts, exact_distribution(small, prompt, 1.3)) > 1e-4
    assert any(5 in text for text in counts), "the token that the middle model does not know"
    torch.manual_seed(1)
    assert small.generate(prompt.repeat(rows, 1), **call)[:, prompt.shape[1] :].tolist() == calls[0]


def test_middle_models_run_the_races_of_the_target(target):
    """Where the target's draws are foreseen, a middle model that is the target itself is right about all of them."""
    levels = [CachebackDrafter(), CausalLMDrafter(copy.deepcopy(target)), CausalLMDrafter(copy.deepcopy(target))]
    cascade = CascadeDrafter(levels, tokens=[2, 2, 4]).eval()
    cascade.generation_config.tree_sizing = "fixed"
    assert as_plain(target, cascade, padded(1), do_sample=True, max_new_tokens=24, top_k=0).statistics.tau > 4


def test_what_is_saved_loads_and_drafts_as_before(target, tmp_path):
    """A configuration may also be written by hand, with levels by name."""
    cascade = cascade_of(target, "three", num_assistant_tokens=9)
    cascade.save_pretrained(tmp_path / "cascade")
    loaded = AutoDrafter.from_pretrained(tmp_path / "cascade")
    assert isinstance(loaded, CascadeDrafter) and loaded.tokens == cascade.tokens
    assert loaded.generation_config.num_assistant_tokens == 9
    assert [type(level).__name__ for level in loaded.levels] == ["CachebackDrafter", *2 * ["CausalLMDrafter"]]
    one, other = (Rounds(target, each).draft() for each in (cascade, loaded))
    assert one == other
    assert as_plain(target, str(tmp_path / "cascade"), padded(1), max_new_tokens=NEW).statistics.tau > 1.3
    CachebackDrafter(texts=[[5, 6, 7]]).save_pretrained(tmp_path / "own" / "words")
    names = ["./words", str(tmp_path / "cascade" / "level_1")]
    (tmp_path / "own" / "config.json").write_text(
        json.dumps({"model_type": "cascade", "levels": names, "tokens": [3, 5]})
    )
    own = AutoDrafter.from_pretrained(tmp_path / "own", dtype=torch.float32, tree_sizing="fixed")
    assert own.levels[0].texts == [[5, 6, 7]] and own.generation_config.tree_sizing == "fixed"
    assert own.generation_config.num_assistant_tokens == 8


def test_saving_anew_leaves_nothing_of_the_former_levels(target, tmp_path):
    folder = tmp_path / "cascade"
    cascade_of(target, "three").save_pretrained(folder)
    (folder / "notes.txt").write_text("mine")
    assert (folder / "level_1" / "config.json").is_file() and (folder / "level_2").is_dir()
    two = cascade_of(target, "n-grams")
    two.save_pretrained(folder)
    fresh = tmp_path / "fresh"
    two.save_pretrained(fresh)
    names = [{str(path.relative_to(each)) for path in each.rglob("*")} for each in (folder, fresh)]
    assert names[0] == names[1] | {"notes.txt"}
    assert AutoDrafter.from_pretrained(folder).tokens == two.tokens


def test_a_level_that_cannot_be_saved_changes_no_file(target, tmp_path):
    cascade = cascade_of(target, "n-grams")
    cascade.save_pretrained(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    other = CascadeDrafter([CachebackDrafter(texts=[[5, 6]]), cascade.levels[1]], tokens=[2, 4])
    cascade.levels[1].generation_config.tree_size = 0
    with pytest.raises(ValueError, match="level 1 of this cascade, a CausalLMDrafter: tree_size=0 is invalid"):
        other.save_pretrained(tmp_path)
    cascade.levels[1].generation_config.tree_size = 16
    cascade.levels[1].model.save_pretrained = None  # fails late, when level 0 was written
    with pytest.raises(TypeError):
        other.save_pretrained(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_wrong_options_of_level_0_are_told_before_the_prompt_is_read(target):
    cascade = cascade_of(target, "model")
    cascade.levels[0].generation_config.tree_size = 0
    calls = []
    hook = target.register_forward_pre_hook(harmless(lambda *args: calls.append(None)))
    with pytest.raises(ValueError, match="level 0 of this cascade, a CausalLMDrafter: tree_size=0 is invalid"):
        target.generate(**padded(1), **GREEDY, assistant_model=cascade)
    hook.remove()
    assert not calls


def test_level_0_keeps_its_own_options_unless_they_need_a_text_that_stays(target):
    model = near(target, 0.01)
    first = SteeredLMDrafter(model, steering=Steering(SteeringSizes.of(model, model))).eval()
    first.generation_config.steering = False
    options = CascadeDrafter([first, CausalLMDrafter(model)], [3, 6])._of_first(DraftOptions.of(first), 9)
    assert options.own["steering"] is False
    first = make_drafter(model)
    first.generation_config.reuse = "ensemble"
    options = CascadeDrafter([first, CausalLMDrafter(model)], [3, 6])._of_first(DraftOptions.of(first), 9)
    assert options.own["reuse"] == "none"


@pytest.mark.parametrize("level", ["./", "./.", "./../cascade", "./level_0/../../cascade", "{folder}"])
def test_a_level_outside_of_its_cascade_is_told_before_one_is_loaded(tmp_path, level):
    folder = tmp_path / "cascade"
    CachebackDrafter().save_pretrained(folder / "level_0")
    document = {"model_type": "cascade", "levels": ["./level_0", level.format(folder=folder)], "tokens": [3, 5]}
    (folder / "config.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"levels\[1\]=.* is the cascade itself or lies outside of its folder"):
        AutoDrafter.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"levels": "words"}, "expected names of drafters as levels"),
        ({"tokens": 4}, "expected numbers as tokens"),
        ({"tokens": [4]}, "expected a number for each level"),
        ({"tokens": [4, 0]}, r"tokens\[1\]=0 is invalid: expected an integer from 1 to 64"),
    ],
)
def test_a_damaged_file_is_told_before_a_level_is_loaded(tmp_path, change, told):
    document = {"model_type": "cascade", "levels": ["./nowhere", "./nothing"], "tokens": [3, 5]}
    (tmp_path / "config.json").write_text(json.dumps({**document, **change}))
    with pytest.raises(ValueError, match=told):
        AutoDrafter.from_pretrained(tmp_path)


def test_levels_that_do_not_go_together_are_told(target):
    middle = CausalLMDrafter(near(target, 0.01))
    for levels, tokens, told in (
        ([middle], [4], "a cascade of 1 levels is none"),
        ([middle, CachebackDrafter()], [4, 4], "level 1 is a CachebackDrafter, which cannot verify"),
        ([target, middle], [4, 4], r"are no drafters: expected such as CachebackDrafter\(\)"),
        ([middle, middle], [40, 4], r"tokens\[0\]=40 is invalid: a CausalLMDrafter drafts 32"),
    ):
        with pytest.raises(ValueError, match=told):
            CascadeDrafter(levels, tokens)
    other = make_drafter(make_target(hidden_size=48, num_attention_heads=6))
    with pytest.raises(ValueError, match="level 0 of this cascade, an HSDrafter, does not fit level 1: "):
        target.generate(**padded(1), **GREEDY, assistant_model=CascadeDrafter([other, middle], [3, 5]).eval())
    with pytest.raises(ValueError, match="level 0 is an HSDrafter, which cannot take back what it was told"):
        CascadeDrafter([make_drafter(target, sliding_window=128), middle], [3, 5])
    trained = CascadeDrafter([CachebackDrafter(), middle], [3, 5])
    trained.train()
    with pytest.raises(
        ValueError, match=r"level 1 of this cascade, a CausalLMDrafter, does not fit the target: .*eval"
    ):
        target.generate(**padded(1), **GREEDY, assistant_model=trained)
    trained.eval()
    trained.generation_config.tree_builder = "p_best"
    with pytest.raises(ValueError, match="its levels pass chains up"):
        trained.check_options()
