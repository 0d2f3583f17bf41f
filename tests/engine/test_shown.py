"""What statistics, attachments and drafters print."""

import itertools
from xml.etree import ElementTree

import pytest
import torch
from conftest import make_drafter
from family_helpers import make_lm
from session_helpers import padded

from hf_hsdraft import CachebackDrafter, attach
from hf_hsdraft.core.statistics import DraftStatistics

CALL = {"max_new_tokens": 24, "do_sample": False, "return_dict_in_generate": True}


def shown(text) -> list[str]:
    return repr(text).splitlines()


def test_statistics_print_what_their_fields_hold(target, prompt):
    found = target.generate(prompt, **CALL, assistant_model=make_lm(target)).statistics
    lines = shown(found)
    assert lines[0] == (
        f"tau {found.tau:.2f} (tokens emitted per target forward and row, bonus token included): 24 tokens, "
        f"{found.target_forwards} forwards"
    )
    lengths = found.accepted_lengths
    for depth, share in enumerate(found.acceptance_by_depth, 1):
        assert share == sum(length >= depth for length in lengths) / found.rounds
        assert f"{depth}: {share:.0%}" in lines[1]
    assert len(found.acceptance_by_depth) == max(lengths) > 0 and f" {found.rounds} rounds" in lines[1]
    assert 1 + sum(found.acceptance_by_depth) == pytest.approx((found.new_tokens - 1) / found.rounds)
    assert lines[2] == "drafter: CausalLMDrafter, trees; target: LlamaForCausalLM"
    assert lines[3].startswith(f"seconds: {found.total_seconds:.2f} = {found.prefill_seconds:.2f} prefill + ")
    assert lines[4] == "text: the target's own"
    accepted = " ".join(f"{share:.0%}" for share in found.acceptance_by_depth)
    assert str(found) == (
        f"tau {found.tau:.2f}, 24 tokens in {found.target_forwards} forwards, {found.total_seconds:.2f} s, accepted by "
        f"depth: {accepted}"
    )


def test_accepted_lengths_by_row_are_those_of_each_text_alone(target):
    drafter, rows = make_lm(target), 3
    drafter.generation_config.tree_sizing = "fixed"
    inputs = padded(rows)
    found = target.generate(**inputs, **CALL, assistant_model=drafter)
    by_row = found.statistics.accepted_by_row
    assert len(by_row) == rows and sum(map(len, by_row)) == found.statistics.rounds
    assert sorted(itertools.chain(*by_row)) == sorted(found.statistics.accepted_lengths)
    for row in range(rows):
        # The prompts' forward emits one token and each round one more; of the last round tokens may be dropped.
        assert 0 <= 1 + sum(by_row[row]) + len(by_row[row]) - CALL["max_new_tokens"] <= by_row[row][-1]
    assert "counted by row" in shown(found.statistics)[0]


def test_notebooks_show_a_table_with_a_bar_for_each_depth(target, prompt):
    with attach(target, make_lm(target)) as attachment:
        found = target.generate(prompt, **CALL).statistics
    for page in (found._repr_html_(), attachment.statistics._repr_html_()):
        texts = ["".join(row.itertext()) for row in ElementTree.fromstring(f"<div>{page}</div>").iter("tr")]
        assert f"tau{found.tau:.2f}" in texts and found.explain().replace("<", "&lt;") in page
        for depth, share in enumerate(found.acceptance_by_depth, 1):
            assert f"accepted, depth {depth} {share:.0%}" in texts and f"width:{10 * share:.1f}em" in page
        assert page.count("<td") == page.count('<td style="text-align:left">') > 3  # bars begin below each other


def drafted(accepted: int, **seconds: float) -> DraftStatistics:
    """Ten rounds with 8 nodes, each accepting as many, where a plain forward takes a second."""
    return DraftStatistics(
        new_tokens=1 + 10 * (1 + accepted), target_forwards=11, row_forwards=11, accepted_lengths=[accepted] * 10,
        drafted_nodes=[8] * 10, round_rows=[0] * 10, plain_seconds=1.0, **seconds,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("found", "limit"),
    [
        (drafted(2, verify_seconds=20.0, draft_seconds=1.0), "Verification limits it"),
        (drafted(2, verify_seconds=12.0, draft_seconds=9.0), "Drafting limits it"),
        (drafted(2, verify_seconds=11.0, draft_seconds=1.0), "Acceptance limits it: 100% of"),
        (drafted(0, verify_seconds=20.0, draft_seconds=9.0), "Acceptance limits it: 0% of"),
    ],
)
def test_statistics_explain_what_limits_a_call_by_its_costs(found, limit):
    said = found.explain()
    parts = [found.verify_seconds / 10, found.draft_seconds / 10]
    assert limit in said and f"in the time of {sum(parts):.2f} forwards over one token" in said
    assert f"{parts[0]:.2f} to verify 8.0 drafted tokens, {parts[1]:.2f} to draft them" in said
    two = found + found
    assert two.explain() == said, "the same calls twice"
    assert DraftStatistics.sum([two, found]) == DraftStatistics.sum([found] * 3), "whatever the order of sums"


def test_acceptance_is_explained_by_the_rounds_that_drafted():
    found = DraftStatistics(accepted_lengths=[1, 1, 0] + [0] * 74, drafted_nodes=[2] * 3 + [0] * 74)
    assert "Acceptance limits it: 67% of the rounds with a draft" in found.explain() and "trained on" in found.explain()
    assert found.explain().endswith("3 of 77 rounds drafted."), "no costs were measured"


def test_statistics_explain_what_else_happened(target, prompt):
    found = drafted(1)
    found.drafted_nodes[:3], found.reason, found.compiling, found.processor_share = [0] * 3, "no masks", True, 0.3
    for part in ("7 of 10 rounds drafted; in the others no draft would have paid", "chains, not trees: no masks",
                 "still being compiled", "only 30% of the"):  # fmt: skip
        assert part in found.explain()
    assert DraftStatistics().explain().startswith("No drafts: ")
    assert "would not have paid" in DraftStatistics(accepted_lengths=[0], drafted_nodes=[0]).explain()
    none = {"accepted_lengths": [0], "drafted_nodes": [0], "reason": "no masks"}
    said = DraftStatistics(**none, plain_seconds=1.0).explain()
    assert said.startswith("No drafts: by the measured costs they would not have paid. ") and "chains, not" in said
    assert DraftStatistics(**none).explain() == "No drafts: no masks."
    with attach(target, make_lm(target)) as attachment:
        attachment.drafter.generation_config.update(tree_sizing="cost", node_cost=None, depth_cost=None)
        target.generate(prompt, max_new_tokens=4, do_sample=False, num_beams=2)
        assert attachment.statistics.explain() == "No drafts: the call decodes by beam search."
        target.generate(prompt, max_new_tokens=24, do_sample=False)
    found = attachment.statistics  # nobody asked for times but the pace
    assert (
        0 < found.verify_seconds < found.total_seconds and found.plain_seconds and "in the time of" in found.explain()
    )


def test_chains_and_lossy_rules_print_why(target):
    lines = shown(DraftStatistics(draft_kind="chain", reason="no masks", exact=False, relaxed_tokens=3))
    assert lines[1] == "accepted by depth, share of 0 rounds: nothing"
    assert "chains: no masks" in lines[2] and lines[4] == "text: lossy verification, 3 tokens relaxed"


def test_an_attachment_prints_all_of_its_calls(target, prompt):
    with attach(target, make_lm(target)) as attachment:
        assert shown(attachment) == ["CausalLMDrafter attached to LlamaForCausalLM", "drafted calls: 0, in 0.00 s"]
        calls = []
        for count in (8, 24):
            target.generate(prompt, max_new_tokens=count, do_sample=False)
            calls.append(attachment.last)
        target.generate(prompt, max_new_tokens=4, do_sample=False, num_beams=2)
    found, lengths = attachment.statistics, [*calls[0].accepted_lengths, *calls[1].accepted_lengths]
    assert found.accepted_by_depth == [
        sum(length >= depth for length in lengths) for depth in (1, 2, 3, 4)[: max(lengths)]
    ]
    assert found.rounds == len(lengths) and 0 < calls[1].total_seconds < found.total_seconds < 60
    lines = shown(attachment)
    assert lines[1] == f"drafted calls: 2, in {found.total_seconds:.2f} s" and lines[2].startswith(
        f"tau {found.tau:.2f} ("
    )
    assert lines[-1] == "calls without drafts: 1, because the call decodes by beam search"
    found.stepped_aside["a copy"] = 1
    assert attachment.statistics.stepped_aside != found.stepped_aside


def test_drafters_print_target_shape_and_size(target):
    drafter = make_drafter(target, target_name="someone/target")
    lines = [line.strip() for line in shown(drafter)]
    assert lines[0] == "HSDrafter(" and lines[1] == "for the target someone/target"
    assert lines[2].startswith(f"num_assistant_tokens={drafter.num_draft_steps}, tree_size=")
    assert lines[3] == f"reads the target's hidden states {', '.join(map(str, drafter.taps))}"
    assert lines[4].endswith("M parameters") and any("Linear(" in line for line in lines)
    assert shown(CachebackDrafter(tree_size=7))[0].startswith("CachebackDrafter(num_assistant_tokens=")
    assert shown(make_lm(target))[1].strip().startswith("num_assistant_tokens=")


def test_a_drafter_that_is_not_yet_built_can_be_printed():
    from hf_hsdraft.drafters.base.protocol import Drafter

    class Bare(Drafter):
        pass

    assert repr(Bare()) == "Bare()" and isinstance(torch.nn.Linear(1, 1).extra_repr(), str)
