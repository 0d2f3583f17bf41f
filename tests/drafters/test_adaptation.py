"""Learning during decoding: a token bias, its trial, and what is kept for later calls."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import VOCAB, as_plain, make_drafter
from session_helpers import padded
from transformers.generation.logits_process import TemperatureLogitsWarper

from hf_hsdraft import HSDrafter
from hf_hsdraft.drafters.base.protocol import Accepted
from hf_hsdraft.drafters.hidden_state import adaptation
from hf_hsdraft.drafters.hidden_state.adaptation import FILE, RECORDS, Adaptation, TokenRecord, Trial
from hf_hsdraft.verify.foresight import Race

LONG = {"max_new_tokens": 48, "min_new_tokens": 48}
IDS = torch.tensor([3, 5, 8, 9])  # a draft vocabulary
RIGHT, WRONG = 2, 0  # columns of it


def unforeseen(rows, depth):
    return None


def news_of(token: int, logits: torch.Tensor | None = None) -> Accepted:
    none = torch.empty(0)
    return Accepted(0, [token, 7], none, none, none, root_logits=logits)


def learnt(rounds: int, wanted: int, emitted: int, race_of=unforeseen) -> tuple[Adaptation, torch.Tensor]:
    """An adaptation after drafts that expect the column `WRONG`, for a target that wants one column, and emits one."""
    learner, logits = Adaptation(IDS), torch.zeros(1, 2, len(IDS))
    logits[..., WRONG] = 3.0
    target = torch.full((12,), -4.0)
    target[IDS[wanted]] = 4.0
    for _ in range(rounds):
        learner.adapted(logits, [0], race_of)
        learner.observe([news_of(int(IDS[emitted]), target)])
    return learner, learner.adapted(logits, [0], race_of)


@pytest.fixture
def adapting(target):
    """A drafter that adapts, with drafts of the same size in every run."""
    drafter = make_drafter(target)
    drafter.generation_config.adaptation = True
    drafter.generation_config.tree_sizing = "fixed"
    return drafter


@pytest.fixture
def always(monkeypatch):
    """Uses a great bias from the first lesson on; the list says of each draft whether its first choices changed."""
    plain, changed = Adaptation.adapted, []

    def adapted(self, logits, rows, race_of):
        made = plain(self, logits, rows, race_of)
        changed.append(bool((made.argmax(dim=-1) != logits.argmax(dim=-1)).any()))
        return made

    monkeypatch.setattr(Trial, "holds", property(lambda trial: trial.count > 0))
    monkeypatch.setattr(adaptation, "_WEIGHT", 20.0)
    monkeypatch.setattr(Adaptation, "adapted", adapted)
    return changed


@pytest.mark.parametrize("call", [{}, {"do_sample": True, "top_k": 0}, {"do_sample": True, "top_k": 20}], ids=str)
@pytest.mark.parametrize("reuse", ["none", "ensemble"])
def test_texts_stay_those_of_plain_decoding(target, adapting, always, prompt, call, reuse):
    adapting.generation_config.reuse = reuse
    as_plain(target, adapting, prompt, **LONG, **call)
    assert sum(always) > len(always) / 2, "nothing was learnt"


def test_batches_stay_those_of_plain_decoding(target, adapting, always):
    as_plain(target, adapting, padded(3), **LONG)
    assert sum(always) > len(always) / 2
    seeded = []
    for value in (True, False, True):
        adapting.generation_config.adaptation = value
        torch.manual_seed(4)
        seeded.append(target.generate(**padded(3), **LONG, do_sample=True, assistant_model=adapting).tolist())
    assert seeded[0] == seeded[1] == seeded[2]


def test_a_seed_repeats_texts_with_drawn_nodes(target, adapting, always, prompt):
    options = adapting.generation_config
    options.tree_builder, options.verification = "gumbel", "rejection"
    texts = []
    for _ in range(2):
        torch.manual_seed(3)
        texts.append(target.generate(prompt, **LONG, do_sample=True, assistant_model=adapting).tolist())
    assert texts[0] == texts[1]


def test_the_bias_makes_the_expected_number_of_tokens_the_targets():
    learner, adapted = learnt(20, wanted=RIGHT, emitted=RIGHT)
    expected = torch.tensor([math.exp(3), 1, 1, 1]) / (math.exp(3) + 3) * 20
    target = torch.full((12,), math.exp(-4.0))
    target[IDS[RIGHT]] = math.exp(4.0)
    wanted = (target / target.sum())[IDS] * 20
    torch.testing.assert_close(learner.record.expected, expected)
    torch.testing.assert_close(learner.record.wanted, wanted)
    bias = ((wanted + 0.1) / (expected + 0.1)).log()
    torch.testing.assert_close(adapted[0, 1], torch.tensor([3.0, 0, 0, 0]) + bias)
    assert adapted[0].argmax(dim=-1).tolist() == [RIGHT, RIGHT]


def test_without_the_targets_logits_emitted_tokens_count():
    learner = Adaptation(IDS)
    for token in (5, 5, 9, 4):  # 4 cannot be drafted
        learner.adapted(torch.zeros(1, 1, 4), [0], unforeseen)
        learner.observe([news_of(token)])
    learner.adapted(torch.zeros(1, 1, 4), [0], unforeseen)
    assert learner.record.wanted.tolist() == [0, 2, 0, 1]
    torch.testing.assert_close(learner.record.expected, torch.ones(4))


def test_the_trial_rejects_a_harmful_update():
    """The target's logits want one token, and another is emitted, which the drafter knew: as under a processor."""
    learner, logits = learnt(40, wanted=RIGHT, emitted=WRONG)
    assert learner.record.bias().argmax() == RIGHT and learner.trial.gain < 0
    assert logits[0, 0].argmax() == WRONG, "a harmful bias is used"
    helpful, _ = learnt(40, wanted=RIGHT, emitted=RIGHT)
    assert helpful.trial.holds and not learner.trial.holds


def test_a_useless_bias_is_learnt_less_often():
    learner, _ = learnt(400, wanted=RIGHT, emitted=WRONG)
    helpful, _ = learnt(400, wanted=RIGHT, emitted=RIGHT)
    assert 128 <= learner.trial.count < 150 < 190 < helpful.trial.count < 210


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_foreseen_draws_are_ranked_by_their_race(temperature):
    """The rank of the emitted token is its place in the race between the drafter's tokens, by brute force."""
    times = torch.empty(12).exponential_(generator=torch.Generator().manual_seed(2))
    race = Race([[times]], [TemperatureLogitsWarper(temperature)], IDS)
    logits = torch.tensor([1.0, 0.5, 0.2, -0.3])
    speeds = (logits / temperature).exp() / times[IDS]
    order = sorted(range(4), key=lambda column: -float(speeds[column]))
    scores = adaptation._scores(logits, race)
    assert [adaptation._rank(scores, column) for column in order] == [0, 1, 2, 3]


def test_state_does_not_leak_between_calls(target, adapting, always, prompt):
    found = [as_plain(target, adapting, prompt, **LONG).statistics.accepted_lengths for _ in range(2)]
    assert found[0] == found[1]
    assert float(RECORDS.of(adapting).expected.sum()) == 0.0
    assert all("adaptation" not in name for name in adapting.state_dict())


def test_kept_records_begin_the_next_call_and_are_saved(target, adapting, always, prompt, tmp_path):
    adapting.generation_config.adaptation = "kept"
    first = as_plain(target, adapting, prompt, **LONG).statistics
    record = RECORDS.of(adapting)
    assert 0 < float(record.expected.sum()) <= first.rounds + 1e-3
    adapting.save_pretrained(tmp_path)
    assert not (tmp_path / FILE).exists(), "what users decoded is published"
    assert adapting.save_adaptation(tmp_path) == tmp_path / FILE
    loaded = HSDrafter.from_pretrained(tmp_path)
    loaded.generation_config.packed_weights = True
    torch.testing.assert_close(RECORDS.of(loaded).wanted, record.wanted)
    second = [as_plain(target, each, prompt, **LONG).statistics.accepted_lengths for each in (adapting, loaded)]
    assert second[0] == second[1] != first.accepted_lengths
    adapting.forget_adaptation()
    assert as_plain(target, adapting, prompt, **LONG).statistics.accepted_lengths == first.accepted_lengths


@pytest.mark.parametrize("damage", ["cut", "size", "negative"])
def test_unfit_files_are_refused_before_decoding(target, prompt, tmp_path, damage):
    make_drafter(target).save_pretrained(tmp_path)
    record = TokenRecord.empty(VOCAB + (damage == "size"))
    record.wanted[0] = -1.0 if damage == "negative" else 1.0
    record.save(tmp_path / FILE)
    if damage == "cut":
        (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:20])
    drafter = HSDrafter.from_pretrained(tmp_path)
    drafter.generation_config.adaptation = "kept"
    with pytest.raises(ValueError, match=f"{FILE} .*(damaged|does not fit)"):
        target.generate(prompt, max_new_tokens=4, assistant_model=drafter)


def test_threads_share_a_drafter(target, adapting, always, prompt):
    """Texts are right, and what both threads have learnt is kept once each."""
    adapting.generation_config.adaptation = "kept"
    plain = target.generate(prompt, **LONG, do_sample=False).tolist()

    def decode(_):
        out = target.generate(prompt, **LONG, do_sample=False, assistant_model=adapting, return_dict_in_generate=True)
        return out.sequences.tolist(), out.statistics.rounds

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(decode, range(4)))
    assert all(text == plain for text, _ in found)
    lessons, rounds = float(RECORDS.of(adapting).expected.sum()), sum(rounds for _, rounds in found)
    assert 0.5 * rounds < lessons <= rounds + 1e-2


@pytest.mark.parametrize("value", ["yes", 1, None, "off"])
def test_other_values_are_told(target, adapting, prompt, value):
    adapting.generation_config.adaptation = value
    if value is None:  # not set
        as_plain(target, adapting, prompt, max_new_tokens=4)
        return
    with pytest.raises(ValueError, match=r"adaptation=.* is invalid: expected True, False, or 'kept'"):
        target.generate(prompt, max_new_tokens=4, assistant_model=adapting)
