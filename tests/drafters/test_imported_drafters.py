"""What drafters of other projects share: how they are loaded and saved, and what calls learn of them."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest
import torch
from conftest import make_drafter, make_target
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from hf_hsdraft import (
    AutoDrafter,
    BlockDrafter,
    CachebackDrafter,
    CascadeDrafter,
    CausalLMDrafter,
    EagleConfig,
    EagleDrafter,
    HSDrafter,
)
from hf_hsdraft.cli._describe import cached_drafters
from hf_hsdraft.cli.main import app
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Call
from hf_hsdraft.drafters.base.reading_session import RowContext
from hf_hsdraft.drafters.base.tree_session import DraftMemory
from hf_hsdraft.drafters.eagle.eagle_expansion import DraftedRows
from hf_hsdraft.training.families.trainable import as_trained


def block(target, **fields) -> BlockDrafter:
    return BlockDrafter.for_target(target, num_draft_steps=4, num_hidden_layers=2, markov_rank=4, **fields)


def eagle(target, **fields) -> EagleDrafter:
    return EagleDrafter(EagleConfig.for_target(target, **fields))


EVERY = {
    "hidden states": make_drafter,
    "block": block,
    "eagle": eagle,
    "language model": lambda target: CausalLMDrafter(target),
    "n-grams": lambda target: CachebackDrafter(),
    "cascade": lambda target: CascadeDrafter([CachebackDrafter(), CausalLMDrafter(target)], tokens=[4, 8]),
}


@pytest.mark.parametrize("make", [block, eagle])
def test_a_dtype_and_options_are_given_by_name(make, tmp_path):
    make(make_target()).save_pretrained(tmp_path)
    assert AutoDrafter.from_pretrained(tmp_path, dtype="auto").dtype == torch.float32
    drafter = AutoDrafter.from_pretrained(tmp_path, dtype="bfloat16", tree_size=9)
    assert drafter.dtype == torch.bfloat16 and drafter.generation_config.tree_size == 9
    with pytest.raises(ValueError, match="dtype='nine' is invalid"):
        AutoDrafter.from_pretrained(tmp_path, dtype="nine")
    with pytest.raises(TypeError, match="no drafting option tree_sise: the nearest option is tree_size"):
        AutoDrafter.from_pretrained(tmp_path, tree_sise=9)
    with pytest.raises(ValueError, match="tree_size=0 is invalid"):
        AutoDrafter.from_pretrained(tmp_path, tree_size=0)


@pytest.mark.parametrize("kind", [*EVERY])
def test_every_family_takes_the_same_arguments(kind, tmp_path):
    EVERY[kind](make_target()).save_pretrained(tmp_path)
    for dtype in ({"dtype": "bfloat16"}, {"torch_dtype": torch.bfloat16}):
        drafter = AutoDrafter.from_pretrained(tmp_path, **dtype, attn_implementation="eager", ngram_length=1)
        assert getattr(drafter, "dtype", torch.bfloat16) == torch.bfloat16
        assert drafter.generation_config.ngram_length == 1
    weightless = kind == "n-grams"
    for device in ("cpu", "auto", {"": "cpu"}, torch.device("cpu")):
        drafter = AutoDrafter.from_pretrained(tmp_path, device_map=device, attn_implementation="sdpa", token=None)
        assert weightless or drafter.device.type == "cpu"
    for wrong, error in (
        ({"dtype": "int8"}, ValueError),
        ({"attn_implementation": "flash_attention_9"}, (ValueError, ImportError)),
        ({"tree_sise": 9}, (TypeError, ValueError)),
        *([] if kind == "language model" else [({"device_map": {"a": "cpu", "b": 0}}, ValueError)]),
    ):
        [name] = wrong
        with pytest.raises(error, match=name):
            AutoDrafter.from_pretrained(tmp_path, **wrong)


@pytest.mark.parametrize("make", [block, eagle])
def test_a_device_is_where_the_weights_go(make, tmp_path):
    make(make_target()).save_pretrained(tmp_path)
    assert AutoDrafter.from_pretrained(tmp_path, device_map="meta").device.type == "meta"
    with pytest.raises(ValueError, match="dtype='float16' contradicts torch_dtype='float32'"):
        AutoDrafter.from_pretrained(tmp_path, dtype="float16", torch_dtype="float32")


def test_what_the_format_of_speculators_cannot_say_is_not_written(tmp_path):
    """It takes the output of the last layer before the norm, transformers gives it after."""
    drafter = block(make_target(), target_tap_layers=[1, 3])
    drafter.config = replace(drafter.config, last_tap_is_normed=True)
    with pytest.raises(ValueError, match="last layer after its norm"):
        drafter.save_pretrained(tmp_path / "drafter")
    assert not (tmp_path / "drafter" / "config.json").exists()


def test_costs_of_one_kind_are_no_costs_of_another():
    target = make_target()
    parallel = replace(EagleConfig.for_target(target), mask_token_id=3)
    drafters = [eagle(target), EagleDrafter(parallel), block(target), block(target, markov_head_type="gated")]
    kinds = {each.session(Call(target, 1, DraftOptions.of(each))).kind for each in drafters}
    assert len(kinds) == len(drafters)


def test_drafters_that_can_only_draft_are_known():
    target = make_target()
    for drafter in (make_drafter(target), block(target), eagle(target)):
        assert as_trained(drafter) is drafter
    assert as_trained(block(target, markov_head_type="rnn", sample_from_anchor=False)) is None


def test_a_memory_does_not_fit_a_drafter_of_another_dtype():
    drafter = make_drafter(make_target())
    memory = DraftMemory.of(drafter, 5, None, ())
    assert memory.fits(drafter, 5)
    assert not memory.fits(drafter.to(torch.bfloat16), 5)


@pytest.mark.parametrize("make", [block, eagle])
def test_a_saved_drafter_names_no_path_of_this_machine(make, tmp_path):
    drafter = make(make_target(), target_name="/home/somebody/models/a-target")
    drafter.save_pretrained(tmp_path)
    for name in ("config.json", "README.md"):
        text = (tmp_path / name).read_text()
        assert "a-target" in text and "somebody" not in text


@pytest.mark.parametrize(("own", "other"), [(block, eagle), (eagle, block)])
def test_a_class_refuses_drafters_of_others_before_it_loads_them(own, other, tmp_path, monkeypatch):
    kind = type(own(make_target()))
    other(make_target()).save_pretrained(tmp_path / "other")
    CausalLMDrafter(make_target()).save_pretrained(tmp_path / "model")
    monkeypatch.setattr(torch.nn.Module, "load_state_dict", None)
    for name, form in (("other", "speculators"), ("model", "causal language model")):
        with pytest.raises(ValueError, match=f"is of the format {form}.*, not a {kind.__name__}: load it by AutoDraft"):
            kind.from_pretrained(tmp_path / name)


@pytest.mark.parametrize("make", [block, eagle])
def test_a_drafter_is_exported_with_the_name_of_its_target(make, tmp_path):
    make(make_target()).save_pretrained(tmp_path / "saved")
    out = tmp_path / "out"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "saved"), "--out", str(out), "--target", "org/a-target"])
    assert done.exit_code == 0, done.output
    document = json.loads((out / "config.json").read_text())
    assert document["speculators_config"]["verifier"]["name_or_path"] == "org/a-target"
    assert AutoDrafter.from_pretrained(out).config.target_name == "org/a-target"
    assert "org/a-target" in (out / "README.md").read_text()


@pytest.mark.parametrize("make", [block, eagle])
def test_recipe_and_figures_come_along_while_the_weights_stay(make, tmp_path):
    make(make_target()).save_pretrained(tmp_path / "saved")
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
    assert json.loads((tmp_path / "changed" / "training_recipe.json").read_text())["changed_since"] is True


def test_a_class_of_another_kind_names_the_one_that_loads_it(tmp_path):
    eagle(make_target()).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"AutoDrafter\.from_pretrained\(\) loads it"):
        HSDrafter.from_pretrained(tmp_path)


def test_masks_with_an_embedding_of_their_own_are_kept_here_and_not_exported(tmp_path):
    drafter = block(make_target(), learned_mask=True)
    drafter.mask_embedding.data.normal_()
    with pytest.raises(ValueError, match="its masks have an embedding of their own, for which that format has no"):
        drafter.export("speculators", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    drafter.save_pretrained(tmp_path / "saved")
    assert torch.equal(AutoDrafter.from_pretrained(tmp_path / "saved").mask_embedding, drafter.mask_embedding)
    block(make_target()).save_pretrained(tmp_path / "saved")
    assert not AutoDrafter.from_pretrained(tmp_path / "saved").config.learned_mask


@pytest.mark.parametrize("make", [block, eagle])
@pytest.mark.parametrize("change", [lambda marked: marked.roll(1), lambda marked: torch.ones_like(marked)])
def test_maps_of_the_vocabulary_that_contradict_each_other_are_refused(make, change, tmp_path):
    make(make_target(), draft_vocab_ids=range(2, 20, 3)).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file({**state, "t2d": change(state["t2d"])}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"d2t and t2d of .* name different tokens"):
        AutoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("make", [block, eagle])
def test_switches_of_the_layers_that_are_not_known_are_refused(make, tmp_path):
    make(make_target()).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    document = json.loads(path.read_text())
    harmless = {"use_cache": True, "return_dict": True, "is_decoder": False, "tie_word_embeddings": False}
    document["transformer_layer_config"].update(harmless)
    path.write_text(json.dumps(document))
    AutoDrafter.from_pretrained(tmp_path)
    document["transformer_layer_config"]["scales_by_depth"] = True
    path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="transformer_layer_config has scales_by_depth=true"):
        AutoDrafter.from_pretrained(tmp_path)


@pytest.mark.parametrize("make", [block, eagle])
def test_a_targets_name_is_no_way_to_write_to_a_terminal(make):
    target = make_target()
    drafter = make(target)
    drafter.config = replace(drafter.config, target_name="a\x1b[31m\ntarget")
    with pytest.raises(DraftingRefused) as told:
        drafter.check(make_target(vocab_size=target.config.vocab_size + 1))
    assert str(told.value).isprintable() and "target: " not in str(told.value).split("drafter expects")[0]


def test_the_cache_lists_drafters_of_every_format(tmp_path):
    target, kinds = make_target(), {}
    for name, drafter in (
        ("block", block(target, target_name="org/big")),
        ("eagle", eagle(target)),
        ("model", CausalLMDrafter(make_target())),
        ("own", make_drafter(target)),
    ):
        drafter.save_pretrained(tmp_path / name)
    target.save_pretrained(tmp_path / "plain")  # a language model that nobody saved as a drafter
    cache = tmp_path / "cache"
    for name in ("block", "eagle", "model", "own", "plain"):
        place = cache / f"models--user--{name}"
        (place / "refs").mkdir(parents=True)
        (place / "refs" / "main").write_text("c" * 40)
        shutil.copytree(tmp_path / name, place / "snapshots" / ("c" * 40))
    kinds = {each.name: (each.format, each.target) for each in cached_drafters(str(cache))}
    assert kinds == {
        "user/block": ("speculators (dflash, dflash2, dspark)", "org/big"),
        "user/eagle": ("speculators eagle3 and peagle", ""),
        "user/model": ("causal language model", ""),
        "user/own": ("2", ""),
    }
    assert all(each.bytes and not each.problem for each in cached_drafters(str(cache)))


def test_rows_of_an_offloaded_embedding_are_taken_as_they_are():
    accelerate = pytest.importorskip("accelerate")

    class Scaled(torch.nn.Embedding):
        embed_scale = 3.0

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * self.embed_scale

    target, tokens = make_target(), torch.tensor([[3, 4]])
    embedding = Scaled(*target.get_input_embeddings().weight.shape)
    rows = embedding.weight.detach().clone()[tokens]
    accelerate.cpu_offload(torch.nn.Sequential(embedding), torch.device("cpu"))
    assert embedding.weight.device.type == "meta"
    for drafter in (block(target), eagle(target)):
        assert torch.equal(drafter.borrow(embedding, target.get_output_embeddings()).embed(tokens), rows)
    doubled = block(target, embedding_scale=2.0)
    assert torch.equal(doubled.borrow(embedding, target.get_output_embeddings()).embed(tokens), 2.0 * rows)


def test_ids_of_a_draft_vocabulary_are_made_once():
    drafter = eagle(make_target(), draft_vocab_ids=(4, 2, 9))
    assert drafter.draft_vocab_ids() is drafter.draft_vocab_ids()
    drafter.limit_vocabulary([9, 4])
    assert drafter.draft_vocab_ids().tolist() == [9, 4]


def test_what_texts_see_is_told_without_waiting_for_a_device():
    """A tensor on the meta device has no values that could be waited for."""
    device = torch.device("meta")
    context = RowContext(1, 1, 1, 2, device, torch.float32)
    context.reserve({0: 3}, torch.arange(3))
    assert context.seen([0], torch.tensor([[5]], device=device)).shape == (1, 1, 3)


def test_layers_of_the_same_window_share_a_mask(monkeypatch):
    config = replace(EagleConfig.for_target(make_target()), num_hidden_layers=4, windows=(None, 9, None, 9))
    drafter, target, made, drafted = EagleDrafter(config), make_target(), [], []
    seen, extend = RowContext.seen, DraftedRows.extend

    def counted(self, rows, last, window=None, number=0):
        made.extend([window] if number else [])
        return seen(self, rows, last, window, number)

    monkeypatch.setattr(RowContext, "seen", counted)
    monkeypatch.setattr(DraftedRows, "extend", lambda *arguments: drafted.append(1) or extend(*arguments))
    target.generate(torch.tensor([[5, 6, 7]]), assistant_model=drafter, max_new_tokens=8, do_sample=False)
    assert drafted and len(made) == 2 * len(drafted)


def test_a_misspelt_option_of_a_language_model_is_named(tmp_path):
    make_target().save_pretrained(tmp_path)
    with pytest.raises(TypeError, match="no drafting option tree_sise: the nearest is tree_size"):
        CausalLMDrafter.from_pretrained(tmp_path, tree_sise=9)


@pytest.mark.parametrize("methods", [None, [], "greedy"])
def test_the_methods_of_a_file_may_be_missing_but_not_wrong(methods, tmp_path):
    eagle(make_target()).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    fields["speculators_config"] |= {"proposal_methods": methods, "verifier": "a name"}
    path.write_text(json.dumps(fields))
    if methods == "greedy":
        with pytest.raises(ValueError, match="proposal_methods='greedy' is invalid: expected a list"):
            AutoDrafter.from_pretrained(tmp_path)
    else:
        assert isinstance(AutoDrafter.from_pretrained(tmp_path), EagleDrafter)


def test_decoding_is_estimated_for_the_drafters_own_target_with_its_own_sizes(tmp_path):
    target = make_target()
    target.save_pretrained(tmp_path / "target")
    make_target(hidden_size=96).save_pretrained(tmp_path / "other")
    block(target).save_pretrained(tmp_path / "drafter")

    def estimated(target: str, *options: str):
        return CliRunner().invoke(app, ["estimate", str(tmp_path / target), *options])

    of_target = estimated("target", "--tau", "2", "--drafter", str(tmp_path / "drafter"))
    assert of_target.exit_code == 0 and "25 rows" in of_target.output
    of_other = estimated("other", "--tau", "2", "--drafter", str(tmp_path / "drafter"))
    assert "hidden_size=96" in str(of_other.exception)
    assert estimated("target", "--family", "block").exit_code == 2
