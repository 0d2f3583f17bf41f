"""Adapters of one drafter, chosen by name in each call: drafts are those of the merged weights."""

import copy
import gc
import json
import threading
import weakref

import pytest
import torch
from conftest import VOCAB, as_plain, edited, make_drafter, make_target
from peft import LoraConfig, inject_adapter_in_model
from transformers import DynamicCache, GenerationConfig

from hf_hsdraft import CachebackDrafter, CascadeDrafter, CausalLMDrafter, HSDrafter, attach
from hf_hsdraft.core.cache_name import CACHE
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import WrappedDrafter
from hf_hsdraft.drafters.base.saved_drafter import write_options
from hf_hsdraft.engine.loop import Observer
from hf_hsdraft.methods.adapters import adapted, adapter_names

NAMES, RANK, ALPHA = ("code", "chat"), 4, 8


class Drafts(Observer):
    """A streamer that notes all drafted trees."""

    def __init__(self) -> None:
        self.trees = []

    def ended(self, done) -> None:
        self.trees += [(tree.tokens, tree.parents) for tree in done.trees]

    def put(self, value) -> None: ...

    def end(self) -> None: ...


def updated(module, name: str):
    """The weights of a module with adapters, with an update added by hand; without one for "none"."""
    plain = copy.deepcopy(module)
    for path, layer in [*module.named_modules()]:
        if hasattr(layer, "lora_A"):
            base = copy.deepcopy(layer.base_layer)
            if name in layer.lora_A:
                update = layer.lora_B[name].weight @ layer.lora_A[name].weight
                base.weight = torch.nn.Parameter(base.weight + ALPHA / RANK * update)
            parent, _, last = path.rpartition(".")
            setattr(plain.get_submodule(parent), last, base)
    return plain


def with_adapters(drafter, names=NAMES, targets="all"):
    """Adds adapters that change drafts a lot; the last one is active."""
    linear = sorted({path for path, part in drafter.named_modules() if isinstance(part, torch.nn.Linear)})
    for seed, name in enumerate(names):
        torch.manual_seed(10 + seed)
        wanted = linear if targets == "all" else targets
        config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=wanted, init_lora_weights=False)
        inject_adapter_in_model(config, drafter, name)
    return drafter.eval()


def of_family(family: str, target):
    if family == "lm":
        drafter = CausalLMDrafter(make_target(seed=7, num_hidden_layers=1))
        drafter.generation_config.node_cost = drafter.generation_config.depth_cost = 0.0
        return drafter
    return make_drafter(target)


def drafts(target, drafter, prompt, name=None, **call):
    """All trees of a call; its text is that of plain decoding."""
    if name is not None:
        call["generation_config"] = GenerationConfig(adapter_name=name, pad_token_id=0, eos_token_id=None)
    plain = target.generate(prompt, do_sample=False, max_new_tokens=16)
    listens = Drafts()
    out = target.generate(prompt, do_sample=False, max_new_tokens=16, assistant_model=drafter, streamer=listens, **call)
    assert out.equal(plain) and listens.trees
    return listens.trees


@pytest.fixture(params=["hidden-state", "lm"])
def adapters(request, target):
    drafter = with_adapters(of_family(request.param, target))
    drafter.generation_config.tree_sizing, drafter.generation_config.ngram_length = "fixed", 0
    return drafter


@pytest.mark.usefixtures("unrounded")
def test_each_call_drafts_as_the_merged_drafter(target, adapters, prompt):
    expected = {name: drafts(target, updated(adapters, name), prompt) for name in (*NAMES, "none")}
    assert len({str(trees) for trees in expected.values()}) == 3
    for name in (*NAMES, "", *NAMES):
        assert drafts(target, adapters, prompt, name) == expected[name or "none"]
    assert drafts(target, adapters, prompt) == expected["chat"], "the active one is as before"
    adapters.generation_config.adapter_name = "code"
    assert drafts(target, adapters, prompt) == expected["code"]
    assert drafts(target, adapters, prompt, "") == expected["none"], "the call decides"


def test_logits_are_those_of_the_merged_weights(target):
    drafter, inputs = with_adapters(make_drafter(target)), (torch.randn(3, 96), torch.randn(3, 32), torch.arange(3))
    with torch.no_grad():
        for name in (*NAMES, ""):
            made = adapted(drafter, name)(*inputs).hidden_states[-1]
            torch.testing.assert_close(made, updated(drafter, name)(*inputs).hidden_states[-1], atol=1e-3, rtol=1e-3)


def test_levels_and_wrapped_drafters_use_the_adapter_too(target, prompt):
    lm, tokens = CausalLMDrafter(with_adapters(make_target(seed=7, num_hidden_layers=1))), [4, 8]
    cascade = CascadeDrafter([CachebackDrafter(), lm], tokens)
    for drafter, model_of in ((cascade, lambda view: view.levels[1].model), (WrappedDrafter(lm), modules_of)):
        for name in (*NAMES, ""):
            made, expected = model_of(adapted(drafter, name))(prompt), updated(lm.model, name)(prompt)
            torch.testing.assert_close(made.logits, expected.logits, atol=1e-3, rtol=1e-3)
        drafts(target, drafter, prompt, "code")


def modules_of(view: WrappedDrafter):
    return view._drafter.model


def test_saved_options_name_no_adapter(target, tmp_path):
    """It is not among the files, so a drafter that names one could not be used."""
    drafter = make_drafter(target)
    drafter.save_pretrained(tmp_path)
    with_adapters(drafter).generation_config.adapter_name = "code"
    drafter.check_options()
    write_options(drafter.generation_config, tmp_path)
    assert "adapter_name" not in json.loads((tmp_path / "generation_config.json").read_text())
    assert drafter.generation_config.adapter_name == "code"
    edited(tmp_path, "generation_config.json", adapter_name="code")  # as earlier versions did
    loaded = HSDrafter.from_pretrained(tmp_path)
    loaded.check_options()
    assert loaded.generation_config.adapter_name is None


@pytest.mark.usefixtures("unrounded")
def test_threads_draft_each_by_its_adapter(target, adapters, prompt):
    expected = {name: drafts(target, updated(adapters, name), prompt) for name in NAMES}
    ready, found = threading.Barrier(4), []

    def call(name: str) -> None:
        ready.wait()
        for _ in range(3):
            found.append((name, drafts(target, adapters, prompt, name)))

    threads = [threading.Thread(target=call, args=(name,)) for name in NAMES * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 12 and all(trees == expected[name] for name, trees in found)


@pytest.mark.usefixtures("unrounded")
def test_a_switch_during_a_call_changes_later_calls_only(target, adapters, prompt):
    class Switch(Drafts):
        def ended(self, done) -> None:
            super().ended(done)
            switch(adapters, "code")

    expected, listens = {name: drafts(target, updated(adapters, name), prompt) for name in NAMES}, Switch()
    target.generate(prompt, do_sample=False, max_new_tokens=16, assistant_model=adapters, streamer=listens)
    assert listens.trees == expected["chat"]
    assert drafts(target, adapters, prompt) == expected["code"]


def switch(drafter, name: str) -> None:
    for layer in drafter.modules():
        if hasattr(layer, "lora_A"):
            layer.set_adapter(name)


def test_a_cache_is_continued_by_the_adapter_that_read_it_only(target, adapters, prompt):
    def last_drafts(*names, forgets=False):
        cache, ids = DynamicCache(config=target.config), prompt
        for name in names:
            if forgets and hasattr(cache, "_hsdraft_memory"):
                del cache._hsdraft_memory
            listens, config = Drafts(), GenerationConfig(adapter_name=name, max_new_tokens=8, pad_token_id=0)
            call = {"generation_config": config, CACHE: cache, "streamer": listens}
            ids = target.generate(ids, assistant_model=adapters, **call)
        return listens.trees

    if isinstance(adapters, HSDrafter):  # a language model reads the text again
        assert last_drafts("code", "code") != last_drafts("code", "code", forgets=True)
    assert last_drafts("chat", "code") == last_drafts("chat", "code", forgets=True)


def test_views_are_kept_and_follow_the_drafter(target, prompt):
    drafter = with_adapters(make_drafter(target), ("code",), ["fuse"])
    view = adapted(drafter, "code")
    drafts(target, drafter, prompt, "code")
    assert adapted(drafter, "code") is view is adapted(drafter), "the active one is the same"
    assert adapted(drafter, "") is not view and adapted(drafter, "code") is view
    assert {id(weight) for weight in view.parameters()} == {id(weight) for weight in drafter.parameters()}
    with_adapters(drafter, ("chat",), ["roll_proj", "q_proj"])
    inputs = torch.randn(3, 96), torch.randn(3, 32), torch.arange(3)
    with torch.no_grad():
        for name in ("code", "chat", ""):
            made = adapted(drafter, name)(*inputs).hidden_states[-1]
            torch.testing.assert_close(made, updated(drafter, name)(*inputs).hidden_states[-1], atol=1e-3, rtol=1e-3)
    view = adapted(drafter, "code")
    drafter.double()
    assert adapted(drafter, "code").dtype is torch.float64
    drafter.train()
    assert adapted(drafter, "code").fuse.training and not drafter.eval().fuse.training
    assert not adapted(drafter, "code").fuse.training
    view = adapted(drafter, "code")
    drafter.generation_config = copy.deepcopy(drafter.generation_config)
    assert adapted(drafter, "code") is view and view.generation_config is drafter.generation_config
    del view
    gone = weakref.ref(drafter), weakref.ref(adapted(drafter, "code"))
    del drafter
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_unknown_names_are_errors_before_any_work(target, prompt):
    drafter = make_drafter(target)
    drafter.generation_config.adapter_name = "code"
    with pytest.raises(ValueError, match=r"adapter_name='code' is invalid: .* holds no adapters; drafter.load_adapter"):
        drafts(target, drafter, prompt)
    with_adapters(drafter)
    assert adapter_names(drafter) == ["chat", "code"]
    cacheback = CachebackDrafter()
    cacheback.generation_config.adapter_name = "code"
    with pytest.raises(ValueError, match=r"expected None or '', as this drafter holds no adapters$"):
        DraftOptions.of(cacheback)
    for wrong in ("cod", 3, ["code"]):
        drafter.generation_config.adapter_name = wrong
        with pytest.raises(ValueError, match=r"is invalid: expected None .*, '' for none, or one of 'chat', 'code'"):
            DraftOptions.of(drafter)
    drafter.generation_config.adapter_name = None
    with pytest.raises(ValueError, match=r"drafter.generation_config.adapter_name = 'code'"):
        target.generate(prompt, assistant_model=drafter, adapter_name="code")
    with attach(target, drafter) as attachment:
        target.generate(prompt, generation_config=GenerationConfig(adapter_name="cod", max_new_tokens=4))
        assert "'chat', 'code'" in next(iter(attachment.statistics.stepped_aside))


def test_merged_and_replaced_layers_are_refused_by_name(target, prompt):
    drafter = with_adapters(make_drafter(target))
    drafter.fuse.merge(adapter_names=["code"])
    with pytest.raises(DraftingRefused, match="code is merged into the weights"):
        drafts(target, drafter, prompt, "chat")
    drafts(target, drafter, prompt)
    drafter.fuse.unmerge()
    drafter.fuse.forward = drafter.fuse.forward
    with pytest.raises(DraftingRefused, match="the forward of Linear was replaced"):
        drafts(target, drafter, prompt, "chat")
    drafts(target, drafter, prompt)


def test_batches_and_sampling(target, adapters):
    torch.manual_seed(5)
    prompts = torch.randint(2, VOCAB, (3, 9))
    adapters.generation_config.adapter_name = "code"
    as_plain(target, adapters, prompts, max_new_tokens=12)
    as_plain(target, adapters, prompts[:1], max_new_tokens=12, do_sample=True)
