"""The target without some of its layers as a drafter, and the search for these layers."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import VOCAB, as_plain, edited, make_target, unloadable, write_prompts
from lm_helpers import GREEDY, drafts_of, layered_target, padded, with_fixed
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter, CausalLMDrafter, LayerSkipDrafter
from hf_hsdraft.cli.main import app
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.methods.distillation.layer_subset import with_layers
from hf_hsdraft.methods.language_model.lm_texts import LMAbility
from hf_hsdraft.methods.layer_skip import layer_skip
from hf_hsdraft.methods.layer_skip.layer_skip import (
    Judged,
    as_drafter,
    judged,
    search,
    speed_of_chains,
    written_texts,
)


@pytest.fixture(scope="module")
def target():
    return layered_target()


def test_skipped_layers_are_saved_as_a_list(target, tmp_path):
    drafter = LayerSkipDrafter.for_target(target, [1, 3], "user/target")
    drafter.generation_config.tree_size = 9
    drafter.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    told = CliRunner().invoke(app, ["info", str(tmp_path)]).output
    assert "skipped_layers" in told and "[1, 3]" in told
    loaded = AutoDrafter.from_pretrained(tmp_path, dtype=torch.float32, beam_width=2)
    assert type(loaded) is LayerSkipDrafter and loaded.config == drafter.config
    assert loaded.generation_config.tree_size == 9 and loaded.generation_config.beam_width == 2
    with pytest.raises(DraftingRefused, match=r"num_hidden_layers=3, this drafter leaves out layers of one with 6"):
        loaded.check(make_target())
    with pytest.raises(TypeError, match="no drafting option tree_sise: the nearest option is tree_size"):
        AutoDrafter.from_pretrained(tmp_path, tree_sise=3)
    edited(tmp_path, skipped_layers=[3, 1])
    with pytest.raises(ValueError, match="is damaged: skipped_layers"):
        AutoDrafter.from_pretrained(tmp_path)


def test_skipped_layers_draft_what_the_others_say(target):
    inputs = padded(1)
    part = with_fixed(LayerSkipDrafter.for_target(target, [1, 3]))
    pruned = with_fixed(CausalLMDrafter(with_layers(copy.deepcopy(target), [0, 2, 4, 5])))
    assert drafts_of(target, part, inputs) == drafts_of(target, pruned, inputs)


def test_the_speed_of_chains_is_that_of_rounds_counted_out():
    generator = torch.Generator().manual_seed(0)
    for agreement, cost, depth in ((0.8, 0.3, 4), (0.5, 0.1, 2), (1.0, 1.0, 3)):
        right = torch.rand(200_000, depth, generator=generator) < agreement
        emitted = 1 + right.cumprod(dim=1).sum(dim=1).float().mean().item()
        assert speed_of_chains(agreement, cost, depth) == pytest.approx(emitted / (1 + depth * cost), rel=5e-3)


def test_the_search_leaves_out_what_does_nothing(target):
    """Two layers are made to pass on what they read: the search finds them first."""
    lazy = copy.deepcopy(target)
    with torch.no_grad():
        for number in (2, 4):
            for name in ("self_attn.o_proj", "mlp.down_proj"):
                lazy.model.layers[number].get_submodule(name).weight.zero_()
    texts = written_texts(lazy, [padded(1)], 24)
    lines: list[str] = []
    best = search(lazy, texts, most=3, report=lines.append)
    found = [line for line in lines if line.startswith("without ")]
    assert len(found) == 3 and found[1].startswith("without [2, 4]: agreement 1.000") and {2, 4} <= set(best.skipped)
    told = [line for line in lines if line.startswith("judging lists of layers")]
    assert told[-1].startswith("judging lists of layers: 9/9 lists"), told  # 4 + 3 + 2
    found = judged(lazy, [2, 4], texts)
    assert found.agreement == 1.0 and found.speed > judged(lazy, [1, 3], texts).speed
    sizes = sum(weight.numel() for weight in lazy.model.layers[0].parameters())
    assert found.cost == pytest.approx((4 * sizes + VOCAB * 32) / (6 * sizes + VOCAB * 32))


def test_the_command_searches(target, tokenizer, tmp_path):
    for part in (target, tokenizer):
        part.save_pretrained(tmp_path / "target")
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", 2), tmp_path / "skip"
    arguments = [
        "make",
        "skip-layers",
        "--target",
        str(tmp_path / "target"),
        "--prompts",
        str(prompts),
        "--out",
        str(out),
    ]
    found = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "8", "--most", "2"])
    assert found.exit_code == 0 and "best without [" in found.output, found.output
    loaded = with_fixed(AutoDrafter.from_pretrained(out))
    assert loaded.config.target_name == "target"
    depth = int(found.output.split("best without")[1].split("with chains of ")[1].split(";")[0])
    options = loaded.generation_config
    assert (options.num_assistant_tokens, options.beam_width, options.tree_size) == (depth, 1, depth)
    assert options.ngram_length == 0 and "writing texts" in found.output
    speed = float(found.output.split("best without")[1].split(" forwards, ")[1].split(" x plain")[0])
    assert ("this does not pay here: " in found.output) == (speed <= 1.0)
    as_plain(target, loaded, padded(1), max_new_tokens=24)


def test_what_was_judged_is_what_is_drafted(target):
    """Nothing skipped says all that the target says, so each round emits one token more than the chain has."""
    for depth in (1, 3, 8):
        drafter = with_fixed(as_drafter(target, Judged((), 1.0, 1.0, 1.0, depth)))
        call = {**GREEDY, "max_new_tokens": 24, "return_dict_in_generate": True}
        output = target.generate(**padded(1), **call, assistant_model=drafter)
        rounds = output.statistics.rounds - 1  # the last one may be shorter
        assert rounds > 1 and output.statistics.drafted_nodes[:rounds] == [depth] * rounds
        assert output.statistics.accepted_lengths[:rounds] == [depth] * rounds


def test_errors_come_before_the_target_writes(target, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_skip, "written_texts", None)
    empty, prompts = tmp_path / "empty.jsonl", write_prompts(tmp_path / "prompts.jsonl", 2)
    empty.write_text("")
    for name, model in (("short", make_target(num_hidden_layers=2)), ("right", target)):
        for part in (model, tokenizer):
            part.save_pretrained(tmp_path / name)

    def refused(name: str, file):
        given = {"--target": tmp_path / name, "--prompts": file, "--out": tmp_path / "x"}
        return CliRunner().invoke(app, ["make", "skip-layers", *(str(each) for pair in given.items() for each in pair)])

    assert "the target has 2 layers: expected 3 or more" in str(refused("short", prompts).exception)
    nothing = refused(unloadable(tmp_path / "unloadable").name, empty)  # seen before a target is loaded
    assert nothing.exit_code == 2 and "holds no line with" in nothing.output
    monkeypatch.setattr(layer_skip, "ability_of", lambda part: LMAbility(reason="it reads no masks"))
    assert "the target's layers cannot draft: it reads no masks" in str(refused("right", prompts).exception)
    assert not (tmp_path / "x").exists()
