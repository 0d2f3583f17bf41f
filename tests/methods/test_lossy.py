"""Lossy rules of verification: each decides as its paper's rule, written down naively here, and is exact at its end."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, each_with_its_seed, make_drafter
from oracles.exactness import settings
from test_protocol import ListDrafter
from transformers import LogitsProcessor, LogitsProcessorList

from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.methods.lossy.pivot import FILE, LEAST_PROBABILITY, Pivot, PivotClassifier, tap_of
from hf_hsdraft.verify.registry import VERIFIERS, is_lossy
from hf_hsdraft.verify.verdict import Nodes, OwnChoice, Verdict

SIZE = 7  # of the vocabulary of the tables
WIDTH = 5  # of their hidden states
LOSSY = [name for name in VERIFIERS if is_lossy(name)]
EXACT = {  # values at which a rule accepts nothing but the target's own tokens
    "fly": {"fly_entropy": 1.0},
    "typical": {"typical_threshold": 1.0, "typical_delta": 1e6},
    "pivot": {"pivot_threshold": 0.0},
}
LOOSE = {
    "fly": {"fly_entropy": 0.0, "fly_window": 0},
    "typical": {"typical_threshold": 1e-6, "typical_delta": 1e-6},
    "pivot": {"pivot_threshold": 1.0},
}


class Table:
    """A target: its scores after any path, where some tokens are forbidden. Sampling draws by a fixed rule."""

    def __init__(self, seed: int, sampled: bool) -> None:
        self.rng, self.sampled, self.known = random.Random(seed), sampled, {}
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = torch.rand(SIZE, generator=self.generator)

    def scores(self, path: tuple[int, ...]) -> torch.Tensor:
        if path not in self.known:
            scale = self.rng.choice([0.2, 1.0, 4.0])
            scores = torch.randn(1, SIZE, generator=self.generator) * scale
            scores[0, self.rng.randrange(SIZE)] = -torch.inf
            self.known[path] = scores
        return self.known[path]

    def p(self, path: tuple[int, ...]) -> list[float]:
        return self.scores(path)[0].softmax(-1).tolist()

    def draw(self, probabilities: torch.Tensor) -> int:
        return int((probabilities[0] * self.weights).argmax())

    def own(self, path: tuple[int, ...]) -> int:
        return self.draw(self.scores(path).softmax(-1)) if self.sampled else int(self.scores(path).argmax())

    def tree(self, width: int) -> DraftTree:
        """A path of the target's own choices with wrong tokens here and there, and other branches beside it."""
        nodes: list[tuple[int, int, float, tuple[int, ...]]] = [(0, -1, 0.0, ())]
        tip = 0
        for depth in range(self.rng.randint(1, 9)):
            for _ in range(self.rng.randint(1, width)):
                parent = tip if width == 1 or self.rng.random() < 0.7 else self.rng.randrange(len(nodes))
                path = nodes[parent][3]
                token = self.own(path) if self.rng.random() < 0.75 else self.rng.randrange(SIZE)
                if (*path, token) in [node[3] for node in nodes]:
                    continue
                nodes.append((token, parent, nodes[parent][2] - self.rng.random(), (*path, token)))
            deepest = [place for place, node in enumerate(nodes) if len(node[3]) == depth + 1]
            tip = self.rng.choice(deepest) if deepest else tip
        tokens, parents, scores, paths = zip(*nodes, strict=True)
        return DraftTree(tokens, parents, tuple(map(len, paths)), scores)

    def nodes(self, tree: DraftTree) -> Nodes:
        logits = torch.cat([self.scores(path) for path in paths_of(tree)])
        taps = torch.stack([state_of(path) for path in paths_of(tree)])
        return Nodes(
            logits,
            lambda node, tokens: self.scores(tuple(tokens)),
            lambda path, tokens: False,
            self.draw if self.sampled else None,
            self.sampled,
            taps,
        )


def state_of(path: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(hash(path) % 2**31))


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[above] for above in tree.path(node)) for node in range(len(tree))]


def entropy(p: list[float]) -> float:
    return -sum(each * math.log(each) for each in p if each > 0)


def naively(table: Table, tree: DraftTree, forgives, end: int | None = None) -> tuple[int, ...]:
    """The tokens that a rule emits, by the paths of a tree alone.

    Args:
        forgives: takes the path, the best child's token and all paths.
        end: token that ends the text.
    """
    paths = dict(zip(paths_of(tree), tree.scores, strict=True))
    path: tuple[int, ...] = ()
    while True:
        if path and path[-1] == end:
            return path
        own = (*path, table.own(path))
        if own in paths:
            path = own
            continue
        below = [each for each in paths if len(each) == len(path) + 1 and each[:-1] == path]
        below = [each for each in below if table.p(path)[each[-1]] > 0]
        best = max(below, key=paths.__getitem__, default=None)
        if best is None or not forgives(path, best[-1], paths):
            return own
        path = best


def fly(table: Table, theta: float, window: int, most: int = SIZE):
    def forgives(path, token, paths):
        highest = sorted(table.p(path))[-most:]
        if entropy([each / sum(highest) for each in highest]) / math.log(most) < theta:
            return False
        following = (*path, token)
        for _ in range(window):
            following = (*following, table.own(following))
        return following in paths

    return forgives


def typical(table: Table, epsilon: float, delta: float):
    def forgives(path, token, paths):
        p = table.p(path)
        return p[token] > min(epsilon, delta * math.exp(-entropy(p)))

    return forgives


def pivot(table: Table, classifier: PivotClassifier, sigma: float):
    def forgives(path, token, paths):
        p = table.p(path)
        figures = torch.tensor([[entropy(p) / math.log(SIZE), p[token]]])
        weights = dict(classifier.named_parameters())
        states = weights["states.weight"] @ state_of((*path, token)) + weights["states.bias"]
        told = weights["figures.weight"] @ figures[0] + weights["figures.bias"]
        inner = (weights["inner.weight"] @ torch.cat([states, told]) + weights["inner.bias"]).clamp(min=0)
        logits = (weights["outer.weight"] @ inner + weights["outer.bias"]).tolist()
        chance = math.exp(logits[1]) / (math.exp(logits[0]) + math.exp(logits[1]))
        return chance < sigma and p[token] >= LEAST_PROBABILITY

    return forgives


def tokens_of(tree: DraftTree, verdict: Verdict) -> tuple[int, ...]:
    return (*(tree.tokens[node] for node in verdict.path), verdict.next_token)


def a_classifier(width: int = WIDTH, tap: int = 1) -> PivotClassifier:
    torch.manual_seed(0)
    made = PivotClassifier(width, tap, {"tasks": "none"})
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made.requires_grad_(False)


def a_rule(name: str, values: dict) -> object:
    rule = Pivot(a_classifier()) if name == "pivot" else VERIFIERS[name]
    defaults = {option.name: option.default for option in rule.own_options}
    return rule.with_options({**defaults, **values})


def definition(name: str, table: Table, rule, numbers: tuple):
    if name == "pivot":
        return pivot(table, rule.classifier, *numbers)
    return {"fly": fly, "typical": typical}[name](table, *numbers)


SETTINGS = [
    ("fly", (0.3, 2), {"fly_entropy": 0.3, "fly_window": 2}),
    ("fly", (0.6, 0), {"fly_entropy": 0.6, "fly_window": 0}),
    ("fly", (0.0, 1), {"fly_entropy": 0.0, "fly_window": 1}),
    ("fly", (0.6, 1, 3), {"fly_entropy": 0.6, "fly_window": 1, "fly_most_probable": 3}),
    ("typical", (0.09, 0.3), {}),
    ("typical", (0.15, 0.6), {"typical_threshold": 0.15, "typical_delta": 0.6}),
    ("pivot", (0.5,), {}),
    ("pivot", (0.9,), {"pivot_threshold": 0.9}),
]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("width", "end"), [(1, None), (3, None), (3, 3)], ids=["chains", "trees", "ends"])
@pytest.mark.parametrize(("name", "numbers", "values"), SETTINGS, ids=str)
def test_a_rule_decides_as_its_definition_says(name, numbers, values, width, end, sampled):
    """An end token ends the text, whoever chose it. Inside a window of fly it is a token like others."""
    rule, forgiven, parted, ends_ahead = a_rule(name, values), 0, 0, 0
    inside = end is None or name != "fly" or not values["fly_window"]  # of a window no end token is looked for
    for seed in range(200 if end is None else 500):
        enough = min(forgiven, parted) > 10 and (inside or ends_ahead)
        if enough and seed >= 60:
            break
        table = Table(seed, sampled)
        tree = table.tree(width)
        verdict = rule.judge(tree, replace(table.nodes(tree), ends=lambda path, tokens: tokens[-1] == end))
        emitted, paths = naively(table, tree, definition(name, table, rule, numbers), end), paths_of(tree)
        assert tokens_of(tree, verdict) == emitted, seed
        assert verdict.finished == (emitted[-1] == end) and end not in emitted[:-1]
        assert verdict.num_drafted == sum(emitted[: place + 1] in paths for place in range(len(emitted)))
        others = [emitted[: place + 1] for place, token in enumerate(emitted) if token != table.own(emitted[:place])]
        assert [paths[node] for node in verdict.relaxed] == others
        forgiven += len(others)
        parted += len(emitted) <= max(tree.depths)
        ends_ahead += bool(others) and verdict.finished and others[-1] == emitted[:-1]
        for length in range(len(verdict.path)):
            cut = verdict.cut(tree, length)
            assert tokens_of(tree, cut) == emitted[: length + 1]
            assert [paths[node] for node in cut.relaxed] == [each for each in others if len(each) <= length + 1]
    assert forgiven > 10 and parted > 10 and (inside or ends_ahead)


@pytest.mark.parametrize("name", LOSSY)
def test_a_token_that_the_target_does_not_score_is_never_accepted(name):
    """A target may embed more tokens than it scores; n-grams of the text may draft them."""
    rule = a_rule(name, LOOSE[name])
    if name == "pivot":
        torch.nn.init.zeros_(rule.classifier.outer.weight)  # so that each token is a pivot with the same chance
    for seed in range(20):
        table = Table(seed, sampled=False)
        own = table.own(())
        possible = [token for token in range(SIZE) if token != own and table.p(())[token] > 1e-3]
        alone = DraftTree((0, SIZE), (-1, 0), (0, 1), (0.0, -0.1))
        assert tokens_of(alone, rule.judge(alone, table.nodes(alone))) == (own,)
        for token in possible[:1]:
            beside = DraftTree((0, SIZE, token), (-1, 0, 0), (0, 1, 1), (0.0, -0.1, -2.0))
            verdict = rule.judge(beside, table.nodes(beside))
            assert verdict.path == [2] and verdict.relaxed == (2,)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", LOSSY)
def test_a_rule_at_its_exact_end_follows_the_target_alone(name, sampled):
    exact, loose = a_rule(name, EXACT[name]), a_rule(name, LOOSE[name])
    differing = 0
    for seed in range(150):
        table = Table(seed, sampled)
        tree = table.tree(3)
        expected = OwnChoice().judge(tree, table.nodes(tree))
        assert exact.judge(tree, table.nodes(tree)) == expected
        differing += loose.judge(tree, table.nodes(tree)) != expected
    assert differing > 10 and name not in {setting[0] for setting in settings()}


def opted_in(target, name: str, values: dict, folder=None, **options):
    drafter = make_drafter(target)
    if name == "pivot":
        drafter.save_pretrained(folder)
        a_classifier(target.config.hidden_size, tap_of(target.config.num_hidden_layers)).save(folder / FILE)
        drafter.loaded_from = folder
    config = drafter.generation_config
    config.verification, config.tree_sizing = name, "fixed"
    for option, value in {**values, **options}.items():
        setattr(config, option, value)
    return drafter


NEW = 16
CALL = {"max_new_tokens": NEW, "return_dict_in_generate": True}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("ngrams", [0, 4])
@pytest.mark.parametrize("name", LOSSY)
def test_calls_at_the_exact_end_are_plain_decoding_and_looser_ones_say_what_they_are(
    target, prompt, name, ngrams, rows, tmp_path
):
    ids = prompt.expand(rows, -1).clone()
    ids[:, 0] = torch.arange(5, 5 + rows)
    plain = target.generate(ids, do_sample=False, max_new_tokens=NEW)
    exact = opted_in(target, name, EXACT[name], tmp_path / "exact", ngram_length=ngrams)
    output = target.generate(ids, do_sample=False, assistant_model=exact, **CALL)
    assert output.sequences.tolist() == plain.tolist() and output.statistics.relaxed_tokens == 0
    assert not output.exact and not output.statistics.exact  # the rule is lossy, whatever its threshold

    loose = opted_in(target, name, LOOSE[name], tmp_path / "loose", ngram_length=ngrams)
    output = target.generate(ids, do_sample=False, assistant_model=loose, **CALL)
    text = output.sequences
    chosen = target(text[:, :-1]).logits.argmax(-1)[:, ids.shape[1] - 1 :]
    new = text[:, ids.shape[1] :]
    assert output.statistics.relaxed_tokens == int((chosen != new).sum()) > 0
    assert output.statistics.tau > 1 and not output.exact


@pytest.mark.parametrize(("name", "values"), [*EXACT.items(), ("fly", {"fly_entropy": 0.0, "fly_window": 10})], ids=str)
def test_sampling_that_forgives_nothing_draws_as_plain_decoding(target, prompt, name, values, tmp_path):
    """Fly looks ahead at every mismatch by the last values, and nothing is as long as its window."""
    call = {"do_sample": True, "max_new_tokens": NEW, "top_k": 0, "temperature": 2.0}
    exact = opted_in(target, name, values, tmp_path / "exact")
    loose = opted_in(target, name, LOOSE[name], tmp_path / "loose")
    texts, after = [], []
    for assistant in ({}, {"assistant_model": exact}, {"assistant_model": loose}):
        torch.manual_seed(5)
        texts.append(target.generate(prompt, **call, **assistant).tolist())
        after.append(float(torch.rand(1)))
    assert texts[0] == texts[1] != texts[2] and after[0] == after[1]


def test_a_window_that_reaches_the_greatest_length_forgives_nothing(target, prompt):
    """What is drafted is the target's text, but for the second best token at two places."""
    window, start, text = 2, prompt.shape[1], prompt
    for place in range(14):
        best = target(text).logits[0, -1].topk(2).indices
        text = torch.cat([text, best[None, int(place in (3, 9)), None]], dim=1)
    drafter, relaxed = ListDrafter([text[0, start - 1 :].tolist()]), []
    config = drafter.generation_config
    config.verification, config.tree_sizing, config.ngram_length = "fly", "fixed", 0
    config.fly_entropy, config.fly_window = 0.0, window
    for new in range(1, 14):
        output = target.generate(prompt, do_sample=False, assistant_model=drafter, **{**CALL, "max_new_tokens": new})
        found = output.sequences
        assert found.shape[1] == start + new
        chosen = target(found[:, :-1]).logits.argmax(-1)[0, start - 1 :]
        others = (chosen != found[0, start:]).nonzero().flatten().tolist()
        assert output.statistics.relaxed_tokens == len(others)
        assert all(place + window < new and not {place + 1, place + 2} & set(others) for place in others), new
        relaxed.append(len(others))
    # The last token is never drafted, so the mismatch at 3 needs 3 + 2 + 2 tokens.
    assert relaxed == [0] * 6 + [1] * 7


def length_of(row: list[int], end: int) -> int:
    return row.index(end) + 1 if end in row else len(row)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", LOSSY)
def test_rows_of_a_batch_end_each_for_itself(chatty, prompt, name, sampled, tmp_path):
    """By rules that accept end tokens too. At its exact end each row is plain decoding's, by its own draws."""
    ids, end = prompt.expand(4, -1).clone(), chatty.config.eos_token_id
    ids[:, 0] = torch.arange(5, 9)
    call = {"do_sample": sampled, "max_new_tokens": 40 if sampled else 24, "return_dict_in_generate": True}
    call |= {"temperature": 1.5, "top_k": 0} if sampled else {}
    exact = opted_in(chatty, name, EXACT[name], tmp_path / "exact")
    torch.manual_seed(7)
    drafted = chatty.generate(ids, assistant_model=exact, **call)
    assert drafted.statistics.relaxed_tokens == 0
    whole = {"eos_token_id": None, "return_dict_in_generate": False}
    plain = each_with_its_seed(chatty, ids, torch.ones_like(ids), 7, **{**call, **whole})[:, ids.shape[1] :].tolist()
    for row, text in zip(drafted.sequences[:, ids.shape[1] :].tolist(), plain, strict=True):
        assert row[: length_of(row, end)] == text[: length_of(text, end)]

    loose = opted_in(chatty, name, LOOSE[name], tmp_path / "loose")
    output = chatty.generate(ids, assistant_model=loose, **call)
    rows = output.sequences[:, ids.shape[1] :].tolist()
    lengths = [length_of(row, end) for row in rows]
    assert len(set(lengths)) > 1 and output.statistics.relaxed_tokens > 0
    assert all(set(row[length:]) <= {chatty.generation_config.pad_token_id}
               for row, length in zip(rows, lengths, strict=True))  # fmt: skip
    if not sampled:
        chosen = chatty(output.sequences[:, :-1]).logits.argmax(-1)[:, ids.shape[1] - 1 :].tolist()
        others = sum(
            one != other
            for row, wanted, length in zip(rows, chosen, lengths, strict=True)
            for one, other in zip(row[:length], wanted[:length], strict=True)
        )
        assert output.statistics.relaxed_tokens == others


@pytest.mark.parametrize("name", LOSSY)
def test_what_processors_forbid_is_never_accepted(target, prompt, name, tmp_path):
    forbidden = list(range(0, VOCAB, 2))
    drafter = opted_in(target, name, LOOSE[name], tmp_path)
    output = target.generate(prompt, do_sample=False, assistant_model=drafter, suppress_tokens=forbidden, **CALL)
    assert output.statistics.relaxed_tokens > 0
    assert not set(output.sequences[0, prompt.shape[1] :].tolist()) & set(forbidden)


def test_a_processor_that_remembers_is_refused_by_a_rule_that_looks_ahead(target, prompt):
    class Counting(LogitsProcessor):
        def __call__(self, ids, scores):
            return scores

    processors, drafter = LogitsProcessorList([Counting()]), opted_in(target, "fly", {})
    call = {"do_sample": False, "max_new_tokens": 4, "logits_processor": processors}
    with pytest.raises(DraftingRefused, match=r"FLy asks for scores .* Counting .* row_wise = True"):
        target.generate(prompt, assistant_model=drafter, **call)
    Counting.row_wise = True
    assert target.generate(prompt, assistant_model=drafter, **call).shape[1] == prompt.shape[1] + 4
    Counting.row_wise = False
    drafter.generation_config.verification = "typical"
    assert target.generate(prompt, assistant_model=drafter, **call).shape[1] == prompt.shape[1] + 4


@pytest.mark.parametrize(
    ("option", "value"),
    [("fly_entropy", 1.5), ("fly_window", -1), ("fly_most_probable", 1), ("typical_threshold", 0.0),
     ("typical_delta", math.inf), ("pivot_threshold", "half")],
)  # fmt: skip
def test_values_out_of_range_are_told(target, option, value):
    drafter = make_drafter(target)
    setattr(drafter.generation_config, option, value)
    with pytest.raises(ValueError, match=f"{option}=.* is invalid: expected"):
        DraftOptions.of(drafter)
