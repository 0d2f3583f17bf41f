"""Nobody gets a lossy text who did not ask for it, by whatever way a drafter or its options come."""

from __future__ import annotations

import contextlib

import pytest
import torch
from conftest import edited, make_drafter, make_target
from safetensors import safe_open
from safetensors.torch import save_file
from test_lossy import LOOSE, a_classifier
from transformers import AutoModel, GenerationConfig, pipeline

from hf_hsdraft import AutoDrafter, CachebackDrafter, HSDrafter, attach
from hf_hsdraft.bench.report import BenchResult, _main_table
from hf_hsdraft.bench.systems import make_systems, parse_variants
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.hub.drafter_files import CARD, OPTIONS
from hf_hsdraft.methods.lossy.pivot import FILE, Pivot, PivotClassifier, _loaded, tap_of
from hf_hsdraft.verify.registry import VERIFIERS, is_lossy

NEW = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def folder(target, tmp_path_factory):
    """A drafter whose saved options ask for the loosest rule there is."""
    folder = tmp_path_factory.mktemp("user") / "drafter"
    drafter = make_drafter(target)
    config = drafter.generation_config
    config.verification, config.tree_sizing = "fly", "fixed"
    for name, value in LOOSE["fly"].items():
        setattr(config, name, value)
    drafter.save_pretrained(folder)
    assert edited(folder, OPTIONS)["verification"] == "fly"
    return folder


@pytest.fixture(scope="module")
def plain(target):
    ids = torch.arange(5, 16)[None]
    return ids, target.generate(ids, **NEW).tolist()


def test_the_default_is_exact(target):
    for drafter in (make_drafter(target), CachebackDrafter()):
        assert VERIFIERS[DraftOptions.of(drafter).verification].exact
    assert not is_lossy("walk") and not is_lossy("rejection") and not is_lossy(None) and not is_lossy(["fly"])


LOADERS = {
    "HSDrafter": HSDrafter.from_pretrained,
    "AutoDrafter": AutoDrafter.from_pretrained,
    "AutoModel": AutoModel.from_pretrained,
}


@pytest.mark.parametrize("loader", LOADERS)
def test_loading_warns_and_stays_exact_until_it_is_confirmed(target, folder, plain, caplog, loader):
    ids, text = plain
    drafter = LOADERS[loader](folder)
    [warning] = [line for line in caplog.messages if "verification=fly" in line]
    assert "lossy" in warning and "pass the drafter itself" in warning
    assert warning.endswith("not the published ones: fly_entropy=0.0, not 0.3, fly_window=0, not 6")
    output = decoded(target, drafter, ids)
    assert output.sequences.tolist() == text and output.exact
    drafter.generation_config.verification = "fly"
    with attach(target, drafter) as attachment:
        assert target.generate(ids, **NEW).tolist() != text
        assert attachment.statistics.relaxed_tokens == attachment.last.relaxed_tokens > 0  # by the saved thresholds
        assert not attachment.statistics.exact and not attachment.last.exact


def test_a_drafter_without_weights_stays_exact_too(tmp_path, caplog):
    """The warning names no thresholds that are as published."""
    drafter = CachebackDrafter()
    drafter.generation_config.verification = "typical"
    drafter.save_pretrained(tmp_path)
    loaded = CachebackDrafter.from_pretrained(tmp_path)
    assert DraftOptions.of(loaded).verification == "walk"
    assert "lossy" in caplog.text and "published" not in caplog.text


def test_options_of_the_caller_confirm(folder):
    given = GenerationConfig(verification="fly", **LOOSE["fly"])
    drafter = HSDrafter.from_pretrained(folder, generation_config=given)
    assert DraftOptions.of(drafter).verification == "fly"


def test_the_configuration_of_a_drafter_cannot_ask_for_it(target, tmp_path):
    make_drafter(target).save_pretrained(tmp_path)
    edited(tmp_path, verification="fly", **LOOSE["fly"])
    drafter = HSDrafter.from_pretrained(tmp_path)
    assert DraftOptions.of(drafter).verification == "walk"


def test_calls_by_name_attachments_and_pipelines_stay_exact(target, folder, plain, own_tokenizer, caplog):
    ids, text = plain
    assert target.generate(ids, **NEW, assistant_model=str(folder)).tolist() == text
    own = make_target()
    with attach(own, folder) as attachment:
        assert own.generate(ids, **NEW).tolist() == text
        assert attachment.statistics.calls == 1 and attachment.statistics.exact
    with_name = pipeline("text-generation", model=target, tokenizer=own_tokenizer, assistant_model=str(folder))
    without = pipeline("text-generation", model=target, tokenizer=own_tokenizer)
    words = "w3 w5 w7 w11"
    assert with_name(words, **NEW) == without(words, **NEW)
    assert sum("lossy" in line for line in caplog.messages) >= 3


def test_the_recipe_of_a_repository_stays_exact(target, folder, plain):
    ids, text = plain
    assert target.generate(ids, **NEW, custom_generate=str(folder), trust_remote_code=True).tolist() == text


def decoded(target, drafter, ids, attached: bool = False):
    """By a drafter that is attached, or given with the call."""
    with attach(target, drafter) if attached else contextlib.nullcontext():
        given = {} if attached else {"assistant_model": drafter}
        return target.generate(ids, **NEW, **given, return_dict_in_generate=True)


@pytest.mark.parametrize("attached", [False, True])
def test_the_options_of_a_target_cannot_ask_for_it(plain, attached):
    """They come with the target's own files, by its generation_config.json."""
    ids, text = plain
    target = make_target()
    target.generation_config.update(verification="fly", fly_entropy=0.0, fly_window=0)
    drafter = make_drafter(target)
    drafter.generation_config.tree_sizing = "fixed"
    output = decoded(target, drafter, ids, attached)
    assert output.sequences.tolist() == text and output.exact


@pytest.mark.parametrize("attached", [False, True])
def test_the_options_of_a_target_cannot_loosen_the_rule_that_the_user_chose(plain, caplog, attached):
    ids, text = plain
    target = make_target()
    options = target.generation_config
    options.fly_entropy, options.fly_window = 0.001 + attached / 1000, 0  # a warning is given once
    drafter = make_drafter(target)
    config = drafter.generation_config
    config.verification, config.tree_sizing, config.fly_entropy = "fly", "fixed", 1.0
    output = decoded(target, drafter, ids, attached)
    assert output.sequences.tolist() == text and output.statistics.relaxed_tokens == 0 and not output.exact
    wanted = f"fly_entropy={options.fly_entropy}"
    assert any(wanted in line and "drafter.generation_config.fly_entropy" in line for line in caplog.messages)
    config.fly_entropy, config.fly_window = 0.0, 0
    assert decoded(target, drafter, ids, attached).sequences.tolist() != text  # what the drafter says is used


def test_bench_tables_mark_lossy_variants(target):
    variants = parse_variants("tree,tree+verification=fly")
    systems = make_systems(variants, target, {"": make_drafter(target)})
    assert [system.exact for system in systems] == [True, False]
    result = BenchResult({"lossy": [systems[1].name]}, {}, [])
    from hf_hsdraft.bench.calls import Run

    for name in ("plain", *(system.name for system in systems)):
        result.measured.runs[name] = [Run(4, 1.0, 2)]
    names = [column.header for column in _main_table(result).columns]
    assert names == ["all prompts", "plain", "tree", "tree+verification=fly (lossy)"]


def test_a_card_says_what_saved_options_ask_for(folder):
    card = (folder / CARD).read_text()
    assert "## Lossy verification" in card and "verification='fly'" in card and "verifies exactly until" in card


def test_a_classifier_travels_with_its_drafter(target, tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    make_drafter(target).save_pretrained(one)
    assert "Lossy" not in (one / CARD).read_text()
    made = a_classifier(target.config.hidden_size, tap_of(target.config.num_hidden_layers))
    made.recipe = {"tasks": "copying"}
    made.save(one / FILE)
    loaded = HSDrafter.from_pretrained(one)
    with torch.no_grad():
        next(loaded.parameters()).add_(1.0)  # other weights: the classifier is of the target
    loaded.save_pretrained(other)
    there = PivotClassifier.load(other / FILE)
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, there.state_dict()[name])
    assert there.recipe == made.recipe and there.tap == made.tap
    card = (other / CARD).read_text()
    assert "## Lossy verification" in card and "copying" in card
    make_drafter(target, seed=9).save_pretrained(other)  # another drafter takes the place of this one
    assert not (other / FILE).exists()


def test_a_missing_damaged_or_foreign_classifier_is_told_before_work(target, plain, tmp_path):
    ids, _ = plain
    drafter = make_drafter(target)
    drafter.generation_config.verification = "pivot"
    with pytest.raises(ValueError, match=r"train one by `hsdraft make verifier`, for a hidden-state, SpecFormer or"):
        target.generate(ids, **NEW, assistant_model=drafter)
    drafter.save_pretrained(tmp_path)
    drafter.loaded_from = tmp_path
    a_classifier(width=12, tap=1).save(tmp_path / FILE)
    with pytest.raises(ValueError, match=r"width 12: the target has hidden states 0 to 3 of width 32"):
        target.generate(ids, **NEW, assistant_model=drafter)
    (tmp_path / FILE).write_bytes(b"\0" * 100)
    with pytest.raises(ValueError, match="is damaged"):
        target.generate(ids, **NEW, assistant_model=drafter)
    save_file({"x": torch.zeros(1)}, tmp_path / FILE)
    with pytest.raises(ValueError, match="expected a file that `hsdraft make verifier` wrote"):
        target.generate(ids, **NEW, assistant_model=drafter)


def test_a_classifier_is_for_a_target_of_its_layers_and_name(target, plain, tmp_path, caplog, monkeypatch):
    ids, _ = plain
    drafter = make_drafter(target)
    drafter.generation_config.verification = "pivot"
    drafter.save_pretrained(tmp_path)
    drafter.loaded_from = tmp_path
    made = a_classifier(target.config.hidden_size, tap=1)
    monkeypatch.setattr(target, "name_or_path", "somebody/large-chat")

    def generate(layers: int, name: str = "") -> list[str]:
        caplog.clear()
        made.layers, made.recipe = layers, {"target": name} if name else {}
        made.save(tmp_path / FILE)
        _loaded.cache_clear()
        target.generate(ids, **NEW, assistant_model=drafter)
        return [line for line in caplog.messages if FILE in line]

    with pytest.raises(ValueError, match=r"hidden state 1 of a target of 4 layers of width 32: the target has hidden"):
        generate(4)
    assert generate(3, "somebody/large-chat") == generate(3, "large-chat") == generate(3) == []
    for other in ("else/large-chat", "large-base"):
        [warning] = generate(3, other)
        assert f"trained for {other}, and the target is somebody/large-chat" in warning
    with safe_open(tmp_path / FILE, framework="pt") as file:
        head = file.metadata()
    assert head.pop("layers") == "3"
    save_file(made.state_dict(), tmp_path / FILE, metadata=head)  # as older files are
    assert PivotClassifier.load(tmp_path / FILE).layers == 0
    Pivot(PivotClassifier.load(tmp_path / FILE)).check(32, 99)


@pytest.mark.parametrize(
    ("head", "dtype", "told"),
    [({field: "x"}, torch.float32, ".*'x'.*") for field in ("width", "tap", "layers")]
    + [({}, dtype, rf".* is {dtype}, not torch.float32") for dtype in (torch.bfloat16, torch.float64, torch.int64)],
)
def test_wrong_numbers_or_weights_of_a_classifier_are_told(tmp_path, head, dtype, told):
    weights = {name: tensor.to(dtype) for name, tensor in a_classifier().state_dict().items()}
    numbers = {"format": "hsdraft-pivot-1", "width": "5", "tap": "1", "layers": "3"}
    save_file(weights, tmp_path / FILE, metadata=numbers | head)
    with pytest.raises(ValueError, match=rf"{FILE} is damaged \({told}\): expected a file that `hsdraft make ver"):
        PivotClassifier.load(tmp_path / FILE)
