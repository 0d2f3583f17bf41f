"""`hsdraft bench`: what is measured, how it is put together, and what is refused before anything is measured."""

from __future__ import annotations

import copy
import io
import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target, write_prompts
from rich.console import Console
from typer.testing import CliRunner

from hf_hsdraft import CachebackDrafter, CausalLMDrafter, HSDrafter, harmless
from hf_hsdraft.bench import calls as timing
from hf_hsdraft.bench.calls import (
    BATCH,
    CONTEXT,
    NEW,
    PeakMemory,
    Run,
    Settings,
    check_points,
    measure,
    padded_batches,
    padded_prompt,
    time_call,
    turn_order,
)
from hf_hsdraft.bench.plan import BenchPlan, run_plan
from hf_hsdraft.bench.report import as_document, by_system, print_report, summarise
from hf_hsdraft.bench.systems import PLAIN, System, make_systems, parse_variants
from hf_hsdraft.cli.hub import enter_benchmarks
from hf_hsdraft.cli.main import app
from hf_hsdraft.drafters.base.protocol import WrappedDrafter
from hf_hsdraft.drafters.hidden_state.network import WorkingWeights
from hf_hsdraft.methods.pictures.bench_pictures import draw_bench
from hf_hsdraft.methods.round_profile import PARTS, PYTHON, TARGET, TIMED, profile
from hf_hsdraft.runtime.misreading import Divergence, first_divergence
from hf_hsdraft.runtime.prompt_inputs import encode_prompt

CONSOLE_WIDTH = {"COLUMNS": "200"}


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def inputs(tokenizer):
    return [encode_prompt(tokenizer, f"w{index} w{index + 3} w7") for index in range(4)]


def systems_of(text: str, target, drafter: HSDrafter | None = None) -> list[System]:
    return make_systems(parse_variants(text), target, {} if drafter is None else {"d": drafter})


def call(question: int, seconds: float, tokens: int = 10, repeat: int = 0, **more) -> Run:
    return Run(tokens, seconds, tokens, question=question, repeat=repeat, same_rows=1, **more)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_in_turn_everyone_has_every_place_and_follows_everyone(count):
    orders = [turn_order(range(count), turn) for turn in range(2 * count)]
    for item in range(count):
        assert sorted(order.index(item) for order in orders) == sorted([*range(count)] * 2)
    for one, other in itertools.combinations(range(count), 2):
        assert sum(order.index(one) < order.index(other) for order in orders) == count


def test_systems_alternate_after_first_calls_that_are_apart(monkeypatch, target, inputs):
    calls = []

    def recorded(target, given, system, settings):
        calls.append((system.name, settings.max_new_tokens, settings.seed))
        return [[5]], Run(1, float(len(calls)), 1)

    monkeypatch.setattr(timing, "time_call", recorded)
    measured = measure(target, [System("a"), System("b", static=True)], inputs, Settings(200, seed=7), repeats=2)
    assert calls[:4] == [(PLAIN, 96, 7), ("a", 96, 7), ("b", 96, 7), ("b", 96, 7)]  # compiled, then recorded
    assert {name: each.seconds for name, each in measured.first.items()} == {PLAIN: 1.0, "a": 2.0, "b": 3.0}
    assert all(each.seconds > 4.0 for runs in measured.runs.values() for each in runs)
    timed = [calls[start : start + 3] for start in range(4, len(calls), 3)]
    assert len(timed) == 2 * len(inputs)
    assert all({name for name, *_ in turn} == {PLAIN, "a", "b"} for turn in timed)
    assert len({tuple(name for name, *_ in turn) for turn in timed}) >= 4
    assert {turn[0][0] for turn in timed} == {PLAIN, "a", "b"}
    seeds = [{seed for *_, seed in turn} for turn in timed]
    assert seeds == [{7}, {8}, {9}, {10}] * 2  # a seed a prompt, the same for every system and repeat
    assert [(one.question, one.repeat) for one in measured.runs["a"]] == [(q, r) for r in (0, 1) for q in range(4)]


def test_figures_are_medians_with_a_spread():
    plain = [call(question, 1.0, repeat=repeat) for repeat in range(3) for question in range(2)]
    own = [call(q, s, repeat=r) for r, (a, b) in enumerate([(0.5, 0.5), (0.25, 0.25), (1.0, 3.0)]) for q, s in
           ((0, a), (1, b))]  # fmt: skip
    row = summarise(own, plain)
    assert row.speed_up == 2.0 and row.speed_up_repeats == (0.5, 4.0)  # repeats: 2, 4, and 20 tokens in 4 s
    assert row.tokens_per_second == 20.0 and row.time_ratio == 0.5  # of 0.5, 0.25 and 2
    assert row.speed_up_prompts == pytest.approx((2.0, 2.0, 2.0))  # each prompt's median: 0.5 s
    spread = summarise([call(q, 1 / (q + 1)) for q in range(3)], [call(q, 1.0) for q in range(3)]).speed_up_prompts
    assert spread == pytest.approx((1.2, 2.0, 2.8))
    assert summarise(plain, plain).speed_up == 1.0 == summarise(plain, plain).tau
    assert row.decode_speed_up is row.first_token_ms is row.peak_memory_mb is None
    plain = [call(0, 10.0, tokens=11, first_seconds=5.0, first_tokens=1)]  # 2 tokens/s after the first
    own = [call(0, 6.0, tokens=11, first_seconds=5.0, first_tokens=3)]  # 8 tokens/s after the first three
    row = summarise(own, plain)
    assert row.decode_speed_up == pytest.approx(4.0) and row.speed_up == pytest.approx(10 / 6)
    assert row.first_token_ms == 5000.0


def test_texts_are_counted_by_prompt():
    margins = [[None, None], [1e-5, 1e-5], [1e-5, 0.5], [0.5, None]]
    runs = [
        Run(5, 1.0, 5, question=q, repeat=r, same_rows=int(margin is None),
            divergence=None if margin is None else Divergence(2, margin))
        for q, pair in enumerate(margins) for r, margin in enumerate(pair)
    ]  # fmt: skip
    row = summarise(runs, runs)
    assert (row.identical, row.ties, row.divergent) == (1, 1, 2)


@pytest.mark.parametrize(
    ("dtype", "margin", "is_tie"),
    [
        (torch.float32, 2.0**-10, True),
        (torch.float32, 2.0**-3, False),
        (torch.float16, 2.0**-6, True),  # one step between numbers from 16 to 32
        (torch.float16, 2.0**-3, False),
        (torch.bfloat16, 2.0**-3, True),  # one step
        (torch.bfloat16, 2.0**-2, True),
        (torch.bfloat16, 0.5, False),
    ],
)
@pytest.mark.parametrize("returned", [None, torch.float32])
def test_ties_are_what_a_dtype_rounds_away(dtype, margin, is_tie, returned):
    """Also where a model returns float32 that was computed in half precision."""
    logits = torch.tensor([[[1.0 / 3, 20.0, 20.0 - margin, 0.1]]]).to(dtype).to(returned or dtype)

    def target(*args, **kwargs):
        return SimpleNamespace(logits=logits)

    target.dtype = dtype
    found = first_divergence(target, 1, torch.tensor([[3, 1]]), torch.tensor([[3, 2]]))
    assert found.margin == margin and found.is_tie == is_tie == str(found).endswith("a tie")
    row = summarise([replace(call(0, 1.0), same_rows=0, divergence=found)], [call(0, 1.0)])
    assert (row.ties, row.divergent) == ((1, 0) if is_tie else (0, 1))


@pytest.mark.parametrize("repeats", [1, 2])
def test_what_columns_mean_is_said_by_their_titles(tmp_path, chatty, tokenizer, repeats):
    plan = BenchPlan(
        [write_prompts(tmp_path / "p.jsonl", 2)], "default,chain", Settings(4), repeats=repeats, points={NEW: [3]},
        profile=True,
    )  # fmt: skip
    progress, printed = Console(file=io.StringIO()), Console(file=io.StringIO(), width=300)
    result = run_plan(plan, chatty, tokenizer, {"": CachebackDrafter()}, progress)
    print_report(result, printed)
    lines = printed.file.getvalue().splitlines()
    titles = [cell.strip() for line in lines if line[:1] == "┃" for cell in line.strip("┃").split("┃")]
    rows = [line.split("│")[1].strip() for line in lines if line[:1] == "│"]
    of_cells = {part.strip() for title in titles if ": " in title for part in title.split(": ")[1].split(",")}
    explained = [line.split(": ")[0] for line in lines[lines.index(next(x for x in lines if x[:4] == "tau:")) :]]
    named = {part for title in explained for part in title.split(", ")}
    assert rows[0] == "tau" and set(rows[:10]) <= named  # of the table of all prompts
    lines_of_figures = {"first calls", "limit", "reached", "accept N", "ms a round"}
    assert named <= {*titles, *rows, *of_cells, *lines_of_figures} and of_cells <= named
    assert all("_" not in title for title in explained)
    assert f"bench: {2 * repeats}/{2 * repeats} prompts" in progress.file.getvalue()
    narrow = Console(file=io.StringIO(), width=80)
    print_report(result, narrow)
    names = ("default", "chain", "tree24x6", "cacheback", "prompt_lookup", "summarization")
    narrow.print(
        by_system("mathematical reasoning", {name: ["1.23 (1.00 to 2.34)"] for name in names}, ["summarization"])
    )
    assert "…" not in narrow.file.getvalue(), "nothing is cut in a terminal of 80 columns"


def test_a_bench_without_a_terminal_says_how_far_it_is(tmp_path, chatty, tokenizer, monkeypatch):
    monkeypatch.setattr("hf_hsdraft.bench.plan.EVERY", 0.01)
    console = Console(file=io.StringIO(), width=100)
    run_plan(BenchPlan([write_prompts(tmp_path / "p.jsonl", 4)], "lookup", Settings(4)), chatty, tokenizer, {}, console)
    said = console.file.getvalue()
    assert said.startswith("bench: 0/4 prompts\n") and "bench: 2/4 prompts" in said and "4/4 prompts; took" in said


def test_greedy_texts_are_plains_and_the_drafter_is_left_as_it_was(target, drafter, inputs):
    before = drafter.generation_config.to_dict()
    names = "default,chain+resample+ngrams,tree6x2+tree_builder=gumbel,lookup,static,packed"
    systems = systems_of(names, target, drafter)
    measured = measure(target, systems, inputs, Settings(10))
    assert not measured.left_out and len(measured.runs) == 7
    for name, runs in measured.runs.items():
        row = summarise(runs, measured.plain)
        assert row.identical == len(inputs) and row.ties == row.divergent == 0, name
        assert all(0 < one.first_seconds < one.seconds and 1 <= one.first_tokens <= 10 for one in runs)
    assert summarise(measured.plain, measured.plain).tau == 1.0
    assert all(len(nodes) and max(nodes) <= 6 for one in measured.runs["tree6x2+tree_builder=gumbel"]
               for nodes in [one.statistics.drafted_nodes])  # fmt: skip
    assert drafter.generation_config.to_dict() == before


def test_a_wrapped_drafter_drafts_as_the_other_one_does_with_fixed_sizes_and_leaves_it_alone(target, drafter, inputs):
    before = drafter.generation_config.to_dict()
    call = {**inputs[0], "max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    wrapped = target.generate(**call, assistant_model=WrappedDrafter(drafter))
    assert drafter.generation_config.to_dict() == before
    drafter.generation_config.tree_sizing, drafter.generation_config.ngram_length = "fixed", 0
    own = target.generate(**call, assistant_model=drafter)
    assert wrapped.statistics.drafted_nodes == own.statistics.drafted_nodes
    assert wrapped.statistics.accepted_lengths == own.statistics.accepted_lengths
    with pytest.raises(ValueError, match="vocab_size"):
        make_target(vocab_size=VOCAB + 1).generate(**call, assistant_model=WrappedDrafter(drafter))


def test_sampled_texts_are_compared_where_the_draws_are_alike(target, drafter, inputs):
    rejecting = "tree+tree_builder=gumbel+verification=rejection"
    measured = measure(
        target, systems_of(f"tree,{rejecting},lookup,static,packed", target, drafter), inputs, Settings(8, 1.0, seed=3)
    )
    rows = {name: summarise(runs, measured.plain) for name, runs in measured.runs.items()}
    assert rows["tree"].identical == rows["plain, static cache"].identical == len(inputs)
    assert rows["plain, packed weights"].identical == len(inputs) and rows["plain, packed weights"].tau == 1.0
    assert rows[rejecting].identical is rows["prompt lookup (transformers)"].identical is None
    texts = [time_call(target, inputs[0], System(PLAIN), Settings(8, 1.0, seed=seed))[0] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]  # a seed decides, and something is drawn at all


def test_sampling_takes_as_many_tokens_as_it_is_told(target, inputs):
    for top_k in (None, 0, 1, 3):
        torch.manual_seed(5)
        told = {} if top_k is None else {"top_k": top_k}
        expected = target.generate(**inputs[0], max_new_tokens=8, do_sample=True, temperature=1.5, **told)
        found = time_call(target, inputs[0], System(PLAIN), Settings(8, 1.5, 5, top_k))[0]
        prompt = inputs[0]["input_ids"].shape[1]
        assert found == expected[:, prompt:].tolist(), top_k
    with pytest.raises(ValueError, match="--top-k 0 is invalid"):
        BenchPlan((), "lookup", Settings(8, top_k=0))


def test_who_cannot_decode_is_left_out_but_none_of_ours(monkeypatch, target, drafter, inputs):
    def broken(*_, **__):
        raise RuntimeError("no kernel\nfor this")

    others = [System("broken", generate=broken), *systems_of("chain", target, drafter)]
    measured = measure(target, others, inputs[:1], Settings(4))
    assert measured.left_out == {"broken": "RuntimeError: no kernel"} and set(measured.runs) == {PLAIN, "chain"}
    monkeypatch.setattr(WorkingWeights, "logits", broken)
    with pytest.raises(RuntimeError, match="no kernel"):
        measure(target, others, inputs[:1], Settings(4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("forest", "unknown variant 'forest': expected some of default, untrained, chain"),
        ("default8", "unknown variant"),
        ("tree+leaves", r"\+leaves is none of"),
        ("tree+ensemble+resample", "sets reuse twice"),
        ("tree,tree", "named twice"),
        (" , ", "no variant is named"),
    ],
)
def test_wrong_variants_are_refused_by_their_name(text, message):
    with pytest.raises(ValueError, match=message):
        parse_variants(text)


def test_options_have_to_be_the_drafters(target, drafter):
    [system] = systems_of("tree7x3+assistant_confidence_threshold=0.25+verification=walk", target, drafter)
    assert system.options == {
        "reuse": "none", "ngram_length": 0, "tree_sizing": "fixed", "beam_width": 5, "tree_size": 7,
        "num_assistant_tokens": 3,
        "assistant_confidence_threshold": 0.25, "verification": "walk",
    }  # fmt: skip
    assert systems_of("default", target, drafter)[0].options == {}
    with pytest.raises(ValueError, match="no drafting option leaf_size"):
        systems_of("tree+leaf_size=3", target, drafter)
    with pytest.raises(ValueError, match=r"variant 'chain\+reuse=always': reuse='always' is invalid"):
        systems_of("chain+reuse=always", target, drafter)
    two = make_systems(parse_variants("chain,lookup"), target, {"one": drafter, "two": make_drafter(target, seed=5)})
    assert [system.name for system in two] == ["one: chain", "two: chain", "prompt lookup (transformers)"]


def test_chains_of_all_lengths_tell_how_many_drafted_tokens_are_accepted(target, drafter, inputs):
    assert systems_of("chain3", target, drafter)[0].options["num_assistant_tokens"] == 3
    systems = systems_of("chains", target, drafter)
    assert [system.name for system in systems] == ["chain1", "chain2", "chain3", "chain4"]  # as long as it drafts
    measured = measure(target, systems, inputs, Settings(10))
    for length, system in enumerate(systems, 1):
        runs = measured.runs[system.name]
        rounds = [count for one in runs for count in one.statistics.accepted_lengths]
        drafted = [count for one in runs for count in one.statistics.drafted_nodes]
        assert max(drafted) == length and max(rounds) <= length
        row = summarise(runs, measured.plain)
        # Each text's first token is that of the prompt's forward, and no round follows its last one.
        assert row.acceptance_length == pytest.approx(4 * 9 / len(rounds))
        assert row.identical == len(inputs)
    assert summarise(measured.plain, measured.plain).acceptance_length is None


@pytest.mark.parametrize("name", ["cacheback", "untrained"])
def test_drafters_without_training_are_made_when_they_are_asked_for(target, drafter, inputs, name):
    [system] = systems_of(name, target, drafter)
    assert system.drafter is not drafter
    measured = measure(target, [system], inputs[:1], Settings(6))
    assert summarise(measured.runs[system.name], measured.plain).identical == 1
    assert measured.runs[system.name][0].statistics.rounds > 0


def test_a_timed_call_of_ours_has_no_hooks_and_counts_every_forward(target, drafter, inputs, monkeypatch):
    """A hook would keep layers from running in one call, and the figures would be another program's."""
    hooks, forwards, forward = list[bool](), list[None](), type(target.model).forward

    @harmless
    def counted(self, *args, **kwargs):
        forwards.append(None)
        hooks.append(any(module._forward_pre_hooks for module in self.layers.modules()))
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(target.model), "forward", counted)
    for variant in ("tree", "default"):
        [system] = systems_of(variant, target, drafter)
        time_call(target, inputs[0], system, Settings(12))  # the first call tries the target
        hooks.clear(), forwards.clear()
        _, timed = time_call(target, inputs[0], system, Settings(12))
        assert timed.forwards == len(forwards) > 1 and not any(hooks)


def test_the_command_refuses_before_it_loads_anything(tmp_path):
    prompts = str(write_prompts(tmp_path / "prompts.jsonl", 2))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")  # a target that cannot be loaded
    common = ["bench", "--prompts", prompts, "--target", str(tmp_path)]
    for wrong, message in (
        (["--variants", "forest"], "forest"),
        (["--json", str(tmp_path / "missing" / "x.json")], "no such folder"),
        (["--context-lengths", "8,many"], "many"),
        (["--batch-sizes", "2,2"], "different whole numbers"),
        (["--variants", "lookup", "--profile"], "name a variant such as tree"),
    ):
        result = CliRunner().invoke(app, [*common, *wrong], env=CONSOLE_WIDTH)
        assert result.exit_code == 2 and message in result.output, result.output


def test_every_part_of_a_round_is_timed():
    assert tuple(TIMED) == PARTS


@pytest.mark.parametrize("variant", ["tree", "tree+ngrams"])
def test_parts_of_a_round_add_up_and_nobody_stays_watching(variant, target, drafter, inputs):
    [system] = systems_of(variant, target, drafter)
    text, plain = time_call(target, inputs[0], system, Settings(12))
    options = system.drafter.generation_config
    found = profile(target, system, inputs[:2], Settings(12), decode_speed_up=0.5)
    assert set(found.parts) == set(PARTS) and sum(found.parts.values()) == pytest.approx(found.round_ms)
    taken = {part for part, milliseconds in found.parts.items() if milliseconds > 0}
    assert taken == set(PARTS) - (set() if variant == "tree+ngrams" else {"n-grams"}), found.parts
    assert found.parts[TARGET] + found.parts[PYTHON] < found.round_ms
    assert found.rounds >= plain.statistics.rounds and 1.0 <= found.tau <= 5.0 and 1 <= found.nodes <= 17
    assert abs(found.timed_nodes - found.nodes) < 2 and found.forward_one_ms > 0
    assert found.limit == pytest.approx(found.tau * found.forward_one_ms / found.forward_nodes_ms)
    assert found.reached == pytest.approx(0.5 / found.limit)
    assert sys.getprofile() is None and not target._forward_hooks and not target._forward_pre_hooks
    assert "forward" not in vars(target) and system.drafter.generation_config is options
    assert time_call(target, inputs[0], system, Settings(12))[0] == text


def test_prompts_are_padded_to_a_length_by_other_text(target, tokenizer):
    others = [" ".join(f"w{number}" for number in range(start, start + 9)) for start in (10, 30, 50)]
    for length in (6, 17, 60):
        padded = padded_prompt(tokenizer, "w1 w2 w3", others, length)
        assert padded.endswith("w1 w2 w3") and encode_prompt(tokenizer, padded)["input_ids"].shape[1] == length
    assert padded_prompt(tokenizer, others[0], others[1:], 8) is None
    tokenizer = copy.deepcopy(tokenizer)  # pipelines of other tests set the side of the common one
    tokenizer.padding_side = "right"
    batches = padded_batches(tokenizer, ["w1", "w1 w2 w3 w4", "w1 w2", "w5", "w6 w7"], 2, "cpu")
    assert [batch["attention_mask"].sum(1).tolist() for batch in batches] == [[4, 4], [5, 5]]
    [batch] = padded_batches(tokenizer, ["w1 w2", "w3", "w4 w5 w6"], 3, "cpu")
    assert batch["attention_mask"][:, 0].tolist() == [0, 0, 1] and batch["attention_mask"][:, -1].all()
    assert tokenizer.padding_side == "right"
    for points, message in (
        ({CONTEXT: [300]}, "more than the target's 256 positions"),
        ({CONTEXT: [3]}, "the shortest has 4 tokens"),
        ({BATCH: [9]}, "a batch of 9 needs as many prompts; there are 2"),
        ({NEW: [251, 252]}, "of 5 tokens, and 252 new tokens are more than the target's 256 positions"),
    ):
        with pytest.raises(ValueError, match=message):
            check_points(target, tokenizer, ["w1", "w2 w3"], points, 10)


def test_peak_memory_is_of_the_time_since_the_start():
    memory = PeakMemory(torch.device("cpu"))
    if memory.start() is None:
        pytest.skip("this system does not tell a process's peak anew")
    before = memory.start()
    block = torch.ones(25_000_000)  # 100 MB
    assert memory.peak() - before > 80e6
    del block
    after = memory.start()
    assert memory.peak() - after < 20e6


@pytest.fixture
def saved(chatty, tokenizer, tmp_path) -> Path:
    chatty.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_drafter(chatty).save_pretrained(tmp_path / "drafter")
    return tmp_path


@pytest.mark.slow
def test_a_whole_comparison_is_a_complete_report_with_pictures(saved):
    prompts, report = write_prompts(saved / "prompts.jsonl", 5), saved / "report.json"
    arguments = ["bench", "--prompts", str(prompts), "--target", str(saved / "target"), "--limit", "2"]
    arguments += ["--drafter", str(saved / "drafter"), "--variants", "default,tree8x2+resample,lookup,static,packed"]
    arguments += ["--max-new-tokens", "6", "--repeats", "2", "--temperature", "1.0", "--profile"]
    arguments += ["--context-lengths", "12,20", "--batch-sizes", "1,2", "--new-tokens", "1,3", "--json", str(report)]
    result = CliRunner().invoke(app, arguments, env=CONSOLE_WIDTH, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    document = json.loads(report.read_text(), parse_constant=pytest.fail)  # no NaN, no infinity
    names = ["plain", "default", "tree8x2+resample", "prompt lookup (transformers)", "plain, static cache"]
    names += ["plain, packed weights"]
    assert list(document["summary"]) == document["settings"]["systems"] == names
    assert document["summary"]["default"]["identical"] == document["settings"]["questions"] == 2
    assert document["summary"]["prompt lookup (transformers)"]["identical"] is None
    assert all(len(runs) == 4 for runs in document["runs"].values())
    assert set(document["by_category"]["default"]) == {"a", "b"}
    assert set(document["summary"]["plain"]) <= set(document["definitions"])  # each figure with its definition
    assert set(document["profile"]) == {"default", "tree8x2+resample"}
    assert [point["value"] for point in document[CONTEXT]] == [12, 20]
    assert all(point["prompt_tokens"] == point["value"] for point in document[CONTEXT])
    assert [point["value"] for point in document[NEW]] == [1, 3]
    assert all(point["summary"]["default"]["identical"] == 2 for point in document[NEW])
    assert list(document["first_calls"]) == names and document["first_calls"]["default"]["tokens"] > 0
    lone, pairs = document[BATCH]
    assert "prompt lookup (transformers)" in lone["summary"] and "batch_size" in str(pairs["left_out"])
    assert lone["summary"]["default"]["identical"] == 2 and pairs["summary"]["default"]["identical"] is None
    assert document["settings"]["variants"]["tree8x2+resample"]["num_assistant_tokens"] == 2
    assert str(saved) not in json.dumps(document)
    assert "time: seconds of all calls" in result.output and "first calls: plain" in result.output
    assert "limit" in result.output and "tokens/s: new tokens" in result.output
    pictures = sorted(path.name for path in saved.glob("*.png"))
    found = {f"report_{name}.png" for name in ("speed_up", "round", "context_lengths", "batch_sizes", "new_tokens")}
    assert found <= set(pictures) and not list(saved.glob("*partial*"))
    assert all((saved / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for name in pictures)
    enter_benchmarks(saved / "drafter", [report])
    [entry] = json.loads((saved / "drafter" / "figures.json").read_text())["benchmarks"]
    assert set(entry["ours"]) == {"default", "tree8x2+resample"}


def test_a_run_cut_short_leaves_a_report_of_what_there_is(saved, chatty, tokenizer, monkeypatch):
    report = saved / "report.json"
    plan = BenchPlan([write_prompts(saved / "p.jsonl", 4)], "chain", Settings(4), repeats=2, json_out=report)
    drafters = {"d": HSDrafter.from_pretrained(saved / "drafter")}
    calls, timed = [], timing.time_call

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2 + 5:  # after the warm-up of two systems, two prompts
            raise KeyboardInterrupt
        return timed(*arguments)

    monkeypatch.setattr(timing, "time_call", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_plan(plan, chatty, tokenizer, drafters, Console(quiet=True))
    document = json.loads(report.read_text())
    assert len(document["runs"]["chain"]) == len(document["runs"]["plain"]) == 2
    monkeypatch.setattr(timing, "time_call", timed)
    result = run_plan(plan, chatty, tokenizer, drafters, Console(quiet=True))
    assert len(as_document(result)["runs"]["chain"]) == 8
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="matplotlib"):
        draw_bench(result, saved)


def test_variants_fit_drafters_of_any_depth(target, drafter):
    """Where a drafter drafts less deep, the row says how deep it was."""
    language_model = CausalLMDrafter(target)
    two = make_systems(parse_variants("chain,chain9,tree24x6+ngrams"), target, {"a": drafter, "lm": language_model})
    assert [system.name for system in two] == [
        "a: chain", "lm: chain", "a: chain4", "lm: chain9", "a: tree24x4+ngrams", "lm: tree24x6+ngrams",
    ]  # fmt: skip
    assert [system.options["num_assistant_tokens"] for system in two] == [4, 5, 4, 9, 4, 6]
    with pytest.raises(ValueError, match="two variants come to the same row of the table: chain4"):
        make_systems(parse_variants("chain4,chain9"), target, {"a": drafter})
