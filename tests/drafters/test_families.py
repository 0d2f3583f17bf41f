"""A family of drafters in one file: this one. It is registered, saved, loaded, and decodes exactly."""

from __future__ import annotations

import pytest
import torch
from conftest import VOCAB, as_plain, edited, make_drafter
from torch import nn
from transformers import AutoModel, PreTrainedConfig

from hf_hsdraft import AutoDrafter, CachebackDrafter, HSDraftConfig, HSDrafter, register_drafter
from hf_hsdraft.bench.systems import Variant, drafted_system
from hf_hsdraft.core.checks import Limit
from hf_hsdraft.core.draft_tree import TREE_BUILDERS, Expansion, TreeLimits
from hf_hsdraft.core.options import Option
from hf_hsdraft.drafters.base.draft_options import default_options
from hf_hsdraft.drafters.base.pretrained_drafter import PretrainedDrafter
from hf_hsdraft.drafters.base.protocol import Session
from hf_hsdraft.drafters.base.registry import FAMILIES

GREEDY = {"max_new_tokens": 16, "do_sample": False}
FREE = {"node_cost": 0.0, "depth_cost": 0.0}


class TinyConfig(PreTrainedConfig):
    model_type = "tiny_block"

    def __init__(self, vocab_size: int = VOCAB, num_draft_steps: int = 3, **kwargs) -> None:
        self.vocab_size, self.num_draft_steps = vocab_size, num_draft_steps
        super().__init__(**kwargs)


class Base(PretrainedDrafter):
    """What two families have in common; it belongs to none. Drafts all depths at once, out of the last token alone."""

    own_options = (Option("tiny_scale", 1.0, Limit(lambda value: isinstance(value, float) and value > 0, "above 0")),)

    def __init__(self, config: TinyConfig) -> None:
        super().__init__(config)
        self.num_draft_steps = config.num_draft_steps
        self.table = nn.Embedding(config.vocab_size, config.num_draft_steps * config.vocab_size)
        self.generation_config = self.default_generation_config()
        self.post_init()

    def default_generation_config(self):
        return default_options(self.num_draft_steps, tree_size=8, beam_width=3, own=self.own_options)

    def session(self, call):
        return TinySession(self, call.options)


class TinyDrafter(Base):
    config_class = TinyConfig


class Blocks(Expansion):
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits, self.depth = logits, logits.shape[1]

    def __call__(self, level, tokens, states):
        return self.logits[:, level - 1 : level].log_softmax(-1), None


class TinySession(Session):
    def __init__(self, drafter, options) -> None:
        self.drafter, self.options = drafter, options

    @torch.no_grad()
    def draft(self, asks):
        roots, ids = torch.tensor([ask.root for ask in asks]), torch.arange(VOCAB)
        logits = self.drafter.table(roots).unflatten(1, (-1, VOCAB)) * self.options.own["tiny_scale"]
        width = 1 if asks[0].chain else self.options.beam_width
        limits = TreeLimits(asks[0].size, width, 0.0, [ask.depth for ask in asks])
        return TREE_BUILDERS["beam"].grow(Blocks(logits), roots, ids, limits)


@pytest.fixture(scope="module", autouse=True)
def registered():
    register_drafter("tiny_block", TinyConfig, TinyDrafter)
    yield
    del FAMILIES["tiny_block"]


@pytest.fixture
def tiny() -> TinyDrafter:
    torch.manual_seed(0)
    drafter = TinyDrafter(TinyConfig())
    drafter.generation_config.update(**FREE, tiny_scale=2.0)
    return drafter


def test_a_family_of_one_file_is_saved_loaded_and_exact(target, tiny, prompt, tmp_path):
    tiny.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert type(loaded) is TinyDrafter and loaded.generation_config.tiny_scale == 2.0
    assert torch.equal(loaded.table.weight, tiny.table.weight)
    for ids in (prompt, prompt.repeat(2, 1)):
        assert sum(as_plain(target, loaded, ids, **GREEDY).statistics.drafted_nodes) > 0


def test_its_own_files_travel_and_its_card_is_its_own(tiny, tmp_path):
    tiny.save_pretrained(tmp_path)
    config = edited(tmp_path)
    assert config["auto_map"] == {
        "AutoConfig": "custom_generate/test_families.TinyConfig",
        "AutoModel": "custom_generate/test_families.TinyDrafter",
    }
    place = tmp_path / "custom_generate"
    assert config["code_files"] == ["test_families.py"] == [path.name for path in place.glob("*_families.py")]
    assert {path.name for path in tmp_path.iterdir()} == {
        "README.md", "config.json", "custom_generate", "generation_config.json", "model.safetensors"
    }  # fmt: skip
    card = (tmp_path / "README.md").read_text()
    assert "of the family `tiny_block`" in card and "hidden states" not in card
    assert "by the code in this repository and `hf_hsdraft`" in card and "torch alone" not in card
    assert "and the module that registers this family is imported" in card
    needed = (tmp_path / "custom_generate" / "requirements.txt").read_text().split()
    assert "hf-hsdraft" in needed and any(name.startswith("torch") for name in needed)


def test_a_card_says_that_a_family_reads_hidden_states(tiny, tmp_path):
    tiny.taps = (1, 2)
    tiny.save_pretrained(tmp_path)
    card = (tmp_path / "README.md").read_text()
    assert "of the family `tiny_block`" in card and "It reads hidden states of the model." in card
    assert "It was trained for the weights of its target" in card and "2602.21224" not in card
    assert "warns with what it measured" not in card


def test_a_cacheback_drafter_is_saved_with_its_texts(target, prompt, tmp_path):
    plain = target.generate(prompt, **GREEDY)
    known = CachebackDrafter(texts=[plain[0].tolist()], ngram_length=3, tree_size=9, **FREE)
    known.save_pretrained(tmp_path)
    loaded = AutoDrafter.from_pretrained(tmp_path, dtype=torch.float32)
    assert type(loaded) is CachebackDrafter and loaded.texts == known.texts
    options = loaded.generation_config
    assert (options.ngram_length, options.tree_size, options.node_cost) == (3, 9, 0.0)
    found = [as_plain(target, each, prompt, **GREEDY).statistics for each in (known, loaded, str(tmp_path))]
    assert len({statistics.target_forwards for statistics in found}) == 1 < found[0].tau
    assert CachebackDrafter.from_pretrained(tmp_path, tree_size=5).generation_config.tree_size == 5
    card = (tmp_path / "README.md").read_text()
    assert "of the family `cacheback`" in card and "trust_remote_code" not in card


def test_damaged_texts_and_other_models_are_told(target, tmp_path):
    CachebackDrafter().save_pretrained(tmp_path)
    edited(tmp_path, texts=[["a"]])
    with pytest.raises(ValueError, match="expected lists of token ids"):
        AutoDrafter.from_pretrained(tmp_path)
    make_drafter(target).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match="not a drafter of type 'cacheback'"):
        CachebackDrafter.from_pretrained(tmp_path / "other")


def test_variants_of_bench_go_by_the_options_of_a_drafter(target):
    chain = drafted_system(Variant.parse("chain"), CachebackDrafter())
    assert chain.options["beam_width"] == 1 and chain.options["ngram_length"] == 1 and "reuse" not in chain.options
    assert drafted_system(Variant.parse("chain"), make_drafter(target)).options["reuse"] == "none"
    with pytest.raises(ValueError, match="'untrained' needs a drafter with weights"):
        drafted_system(Variant.parse("untrained"), CachebackDrafter())
    assert isinstance(drafted_system(Variant.parse("untrained"), make_drafter(target)).drafter, HSDrafter)


class NextConfig(TinyConfig):
    model_type = "tiny_next"

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)


class NextDrafter(TinyDrafter):
    """A family that is derived from another one."""

    config_class = NextConfig


def test_a_family_that_is_derived_from_another_one_is_saved_as_itself(target, prompt, tmp_path):
    register_drafter("tiny_next", NextConfig, NextDrafter)
    try:
        NextDrafter(NextConfig()).save_pretrained(tmp_path)
        code = edited(tmp_path)["auto_map"]
        assert code["AutoModel"].endswith(".NextDrafter") and code["AutoConfig"].endswith(".NextConfig")
        loaded = AutoDrafter.from_pretrained(tmp_path)
        assert type(loaded) is NextDrafter
        as_plain(target, loaded, prompt, **GREEDY)
        again = type("NextDrafter", (TinyDrafter,), {"config_class": NextConfig, "__module__": __name__})
        register_drafter("tiny_next", NextConfig, again)  # as by running a notebook's cell again
        assert type(AutoDrafter.from_pretrained(tmp_path)) is again
        config = type("NextConfig", (NextConfig,), {"__module__": __name__})
        anew = type("NextDrafter", (TinyDrafter,), {"config_class": config, "__module__": __name__})
        register_drafter("tiny_next", config, anew)
        assert type(AutoDrafter.from_pretrained(tmp_path)) is anew is type(AutoModel.from_pretrained(tmp_path))
        with pytest.raises(ValueError, match="tiny_next' is taken by NextDrafter"):
            register_drafter("tiny_next", NextConfig, TinyDrafter)
    finally:
        del FAMILIES["tiny_next"]
    with pytest.raises(ValueError, match="import the module that registers it"):
        AutoDrafter.from_pretrained(tmp_path)


class PrismConfig(HSDraftConfig):
    model_type = "prism"


class Prism(HSDrafter):
    config_class = PrismConfig


class OtherOfBase(Base):
    config_class = NextConfig


@pytest.mark.parametrize("family", [Prism, OtherOfBase])
def test_a_family_of_whatever_base_is_the_one_that_is_saved(family, target, tmp_path):
    config = PrismConfig(**make_drafter(target).config.to_dict()) if family is Prism else NextConfig()
    family(config).save_pretrained(tmp_path)
    config = edited(tmp_path)
    assert config["auto_map"] == {
        "AutoConfig": f"custom_generate/test_families.{family.config_class.__name__}",
        "AutoModel": f"custom_generate/test_families.{family.__name__}",
    }
    assert "test_families.py" in config["code_files"]
    assert "hf-hsdraft" in (tmp_path / "custom_generate" / "requirements.txt").read_text()
