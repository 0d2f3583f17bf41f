"""What every method promises, beside the families of `test_family_contract`: plain decoding's texts, and commands."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from conftest import as_plain, each_with_its_seed, make_drafter, write_prompts
from lm_helpers import GREEDY, layered_target, padded, steered, with_fixed
from oracles.exactness import chi_square
from small_target import SMALL, exact_distribution, small_target
from test_cascade import cascade_of
from test_refinement import KINDS as REFINED
from test_refinement import refined
from test_self_speculation import make_self
from test_specformer import KINDS as SLOTS
from test_specformer import make_specformer
from training_helpers import end_briefly
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter, LayerSkipDrafter
from hf_hsdraft.cli.main import app


def skipping(target):
    return with_fixed(LayerSkipDrafter.for_target(target, [1, 3]))


def set_options(drafter, **options):
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    return drafter


DRAFTERS = {
    **{f"specformer, {kind}": partial(make_specformer, kind=kind) for kind in SLOTS},
    "cascade": partial(cascade_of, kind="model"),
    "cascade with n-grams": partial(cascade_of, kind="three models", ngram_length=3),
    "cascade by cost": partial(cascade_of, kind="three models", tree_sizing="cost"),
    "cascade of chains": partial(cascade_of, kind="n-grams", beam_width=1),
    "self": make_self,
    "self, wrong": partial(make_self, right=False),
    "steered": steered,
    "layer skip": skipping,
}
REFINEMENTS = {f"refined {kind}, {builder}": (make, {"tree_builder": builder})
               for kind, make in REFINED.items() for builder in ("beam", "p_best", "gumbel")
               if builder == "beam" or kind in ("hidden-state", "block")}  # fmt: skip
REFINEMENTS |= {f"refined, {reuse}": (make_drafter, {"reuse": reuse}) for reuse in ("ensemble", "resample")}
SEEDED = ("specformer, without tokens", "specformer, part", "self", "steered", "layer skip",
          "refined hidden-state, beam", "refined block, beam")  # fmt: skip


def drafter_of(name: str, target, folder):
    if name not in REFINEMENTS:
        return DRAFTERS[name](target)
    make, options = REFINEMENTS[name]
    return set_options(refined(make(target), folder), **options)


@pytest.fixture(scope="module")
def target():
    return layered_target()


@pytest.fixture(scope="module")
def plain(target):
    """Greedy texts of plain decoding by number of rows."""
    return {rows: target.generate(**padded(rows), **GREEDY) for rows in (1, 3)}


@pytest.mark.parametrize("name", [*DRAFTERS, *REFINEMENTS])
def test_greedy_texts_are_those_of_plain_decoding(name, target, plain, tmp_path):
    drafter = drafter_of(name, target, tmp_path)
    for rows, text in plain.items():
        output = target.generate(**padded(rows), **GREEDY, assistant_model=drafter, return_dict_in_generate=True)
        assert output.sequences.tolist() == text.tolist() and sum(output.statistics.drafted_nodes) > 0


@pytest.mark.parametrize("width", [1, 4], ids=["chains", "trees"])
@pytest.mark.parametrize("name", SEEDED)
def test_seeds_give_the_texts_of_plain_decoding(name, width, target, tmp_path):
    """By the walk. With top-k the draws are foreseen, and each row of a batch has a seed."""
    drafter = set_options(drafter_of(name, target, tmp_path), beam_width=width)
    call = {"max_new_tokens": 8, "do_sample": True, "top_k": 20, "temperature": 1.2}
    as_plain(target, drafter, padded(1), seed=4, **call)
    expected = each_with_its_seed(target, *padded(3).values(), 9, **call)
    torch.manual_seed(9)
    assert target.generate(**padded(3), **call, assistant_model=drafter).tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["specformer, default", "cascade", "self", "steered", "layer skip"])
def test_rows_that_end_leave(name, target, plain, tmp_path):
    call = {**GREEDY, "max_new_tokens": 16, "eos_token_id": int(plain[3][1, 17])}
    as_plain(target, drafter_of(name, target, tmp_path), padded(3), **call)


DRAWN = {
    "self": make_self,
    "refined hidden-state": make_drafter,
    "refined specformer": make_specformer,
}


@pytest.mark.parametrize("name", DRAWN)
def test_texts_by_rejection_are_distributed_as_the_targets(name, tmp_path):
    """Drawn nodes are accepted by the distribution that they were drawn from: by any other the text would be biased."""
    target = small_target()
    drafter = DRAWN[name](target, draft_vocab_size=SMALL)
    if name.startswith("refined"):
        drafter = refined(drafter, tmp_path, share=0.7)
    set_options(drafter, tree_builder="gumbel", verification="rejection", tree_size=12, beam_width=3)
    prompt = torch.tensor([[1, 4, 2]])
    torch.manual_seed(0)
    output = target.generate(
        prompt.expand(300, -1), max_new_tokens=3, do_sample=True, top_k=0, assistant_model=drafter,
        return_dict_in_generate=True,
    )  # fmt: skip
    counts = Counter(tuple(text) for text in output.sequences[:, 4:].tolist())
    assert sum(output.statistics.accepted_lengths) > 0
    assert chi_square(counts, exact_distribution(target, prompt, 1.0).sum(dim=0)) > 1e-4


@pytest.mark.parametrize(("make", "what"), [(make_self, "a target"), (skipping, "some of the layers of a target")])
def test_processes_that_run_the_same_forwards_are_refused(make, what, target):
    with pytest.raises(ValueError, match=f"{what} that is sharded over processes"):
        make(target).warn_of_misfit(target, None, all_processes=True)


@pytest.mark.train
def test_the_commands_train_and_check_a_drafter_of_frames(chatty, tokenizer, tmp_path, monkeypatch):
    """Options of a method are those of the command; other families are in `test_trainable`."""
    end_briefly(monkeypatch)
    for part in (chatty, tokenizer):
        part.save_pretrained(tmp_path / "target")
    target, out = str(tmp_path / "target"), str(tmp_path / "out")
    arguments = ["--family", "specformer", "--num-draft-steps", "4", "--no-reads-tokens", "--objective", "ctc"]
    arguments += ["--target", target, "--out", out, "--max-steps", "2", "--eval-steps", "2", "--eval-prompts", "1"]
    arguments += ["--prompts", str(write_prompts(tmp_path / "prompts.jsonl", 8)), "--eval-conversations", "2"]
    result = CliRunner().invoke(app, ["train", *arguments, "--max-new-tokens", "10"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    config = AutoDrafter.from_pretrained(out).config
    assert (config.num_draft_steps, config.reads_tokens, config.ctc) == (4, False, True)
    result = CliRunner().invoke(app, ["check", out, target, "--max-new-tokens", "12"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
