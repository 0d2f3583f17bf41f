"""A drafter by the code that its repository brings, where the package is not installed."""

from __future__ import annotations

import copy
import json
import pickle
import sys

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from session_helpers import accept, hidden_session, padded
from test_self_speculation import make_self
from test_specformer import make_specformer
from transformers import AutoModel, LogitsProcessor, MistralConfig, MistralForCausalLM, StoppingCriteria
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.generation.utils import GenerationMixin

from hf_hsdraft import HSCandidateGenerator, HSDrafter
from hf_hsdraft.drafters.base.protocol import Ask

NEW = 24
WRAPPED = ("_assisted_decoding", "_get_candidate_generator", "_validate_generation_mode", "_prepare_generation_config")


@pytest.fixture
def alone(monkeypatch):
    """Loads drafters of folders as where the package is missing. What they wrap is unwrapped afterwards."""
    for name in WRAPPED:
        monkeypatch.setattr(GenerationMixin, name, getattr(GenerationMixin, name))

    def load(folder, **kwargs):
        entry = json.loads((folder / "config.json").read_text())["auto_map"]
        with monkeypatch.context() as context:
            context.setitem(sys.modules, "hf_hsdraft", None)
            get_class_from_dynamic_module(entry["AutoConfig"], folder)
            drafter = get_class_from_dynamic_module(entry["AutoModel"], folder).from_pretrained(folder, **kwargs).eval()
        code_of(drafter).install()  # again, if an earlier test has loaded the same code
        return drafter

    return load


def code_of(drafter):
    """The module that all drafters bring."""
    return sys.modules[next(kind.__module__ for kind in type(drafter).__mro__ if kind.__name__ == "TravellingDrafter")]


@pytest.fixture(scope="module")
def target():
    return make_target(seed=3)


@pytest.fixture
def folder(target, tmp_path):
    """A drafter whose saved options ask for a lossy rule, which transformers' own loop does not know."""
    drafter = make_drafter(target)
    drafter.generation_config.verification = "fly"
    drafter.save_pretrained(tmp_path / "drafter")
    return tmp_path / "drafter"


def decoded(target, ids=None, **call):
    """The text, and the next number that is drawn after it."""
    torch.manual_seed(7)
    ids = torch.tensor([[5, 6, 7, 8]]) if ids is None else ids
    output = target.generate(ids, **{"max_new_tokens": NEW, "pad_token_id": 0, **call})
    return getattr(output, "sequences", output).tolist(), float(torch.rand(()))


def knowing(drafter, text, monkeypatch, wrong=5):
    """Lets a drafter know a text, but for every token at a multiple of `wrong`; returns the lengths of its drafts."""
    module, drafted = sys.modules[type(drafter).__module__], []

    def draft(self, taps, following, positions, accepted, length):
        known = [
            token if (length + place) % wrong else (token + 1) % VOCAB for place, token in enumerate(text[length:])
        ]
        drafted.append(known[: min(self._depth, self._max_length - length - 1)])
        return drafted[-1]

    monkeypatch.setattr(module.HSCandidateGenerator, "_draft", draft)
    return drafted


CALLS = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True},
    "warped": {"do_sample": True, "top_k": 5, "temperature": 0.7},
    "processed": {"do_sample": False, "repetition_penalty": 1.3, "min_new_tokens": 9},
    "padded": {"do_sample": True, "ids": torch.tensor([[0, 0, 5, 6]]), "attention_mask": torch.tensor([[0, 0, 1, 1]])},
    "returned": {"do_sample": True, "return_dict_in_generate": True, "output_logits": True},
}


def sliding():
    """A target whose layers see 8 positions."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = MistralConfig(vocab_size=VOCAB, num_key_value_heads=2, sliding_window=8, initializer_range=0.3, **sizes)
    return MistralForCausalLM(config).eval()


@pytest.mark.parametrize("make", [lambda: make_target(seed=3), sliding], ids=["all", "sliding"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_texts_and_random_numbers_are_those_of_plain_decoding(call, make, folder, alone, monkeypatch):
    target = make()
    drafter, plain = alone(folder), decoded(target, **call)
    assert decoded(target, **call, assistant_model=drafter) == plain
    drafted = knowing(drafter, plain[0][0], monkeypatch)
    assert decoded(target, **call, assistant_model=drafter) == plain
    assert len(drafted) < NEW // 2 and any(drafted)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_text_ends_where_plain_decoding_ends_it(do_sample, target, folder, alone, monkeypatch):
    plain, _ = decoded(target, do_sample=do_sample)
    call = {"do_sample": do_sample, "eos_token_id": plain[0][12]}  # inside a draft
    plain = decoded(target, **call)
    drafter = alone(folder)
    assert knowing(drafter, plain[0][0] + [9] * NEW, monkeypatch) == []
    assert decoded(target, **call, assistant_model=drafter) == plain


class Own(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.roll(1, dims=-1)


class Stop(StoppingCriteria):
    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 11)


PLAIN = {
    "several texts": {"ids": padded(2)["input_ids"], "attention_mask": padded(2)["attention_mask"]},
    "several texts of one prompt": {"do_sample": True, "num_return_sequences": 2},
    "beams": {"num_beams": 2},
    "a static cache": {"cache_implementation": "static"},
    "no cache": {"use_cache": False},
    "somebody's processor": {"logits_processor": [Own()]},
    "somebody's criterion": {"stopping_criteria": [Stop()]},
    "hidden states": {"output_hidden_states": True, "return_dict_in_generate": True},
    "scores of draws": {"do_sample": True, "output_scores": True, "return_dict_in_generate": True},
}


@pytest.mark.parametrize("call", PLAIN.values(), ids=PLAIN)
def test_other_calls_are_decoded_plainly_with_one_warning(call, target, folder, alone, caplog, monkeypatch):
    drafter, call = alone(folder), {"do_sample": False, **call}
    told = []
    monkeypatch.setattr(code_of(drafter).logger, "warning_once", told.append)
    plain = decoded(target, **call)
    assert decoded(target, **call, assistant_model=drafter) == plain
    assert len(told) == 1 and "the package hf_hsdraft" in told[0]


def test_another_target_is_told_and_other_generates_never_see_the_drafter(target, folder, alone):
    drafter = alone(folder)
    with pytest.raises(ValueError, match="hidden_size=48, the drafter expects 32"):
        decoded(make_target(seed=3, hidden_size=48, head_dim=12), assistant_model=drafter)
    _, others = target._prepare_generation_config(None, assistant_model=drafter)  # as Whisper does
    assert others == {}


@pytest.mark.parametrize("make", [make_specformer, make_self], ids=["specformer", "self_speculation"])
def test_other_families_are_decoded_plainly_and_can_be_saved_again(make, target, alone, tmp_path):
    drafter = make(target)
    drafter.save_pretrained(tmp_path / "one")
    remote = alone(tmp_path / "one")
    assert decoded(target, do_sample=True, assistant_model=remote) == decoded(target, do_sample=True)
    remote.save_pretrained(tmp_path / "two")
    loaded = type(drafter).from_pretrained(tmp_path / "two")
    assert all(torch.equal(value, drafter.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert {path.name for path in (tmp_path / "one").iterdir()} == {path.name for path in (tmp_path / "two").iterdir()}


@torch.no_grad()
@pytest.mark.parametrize("reuse", ["none", "ensemble", "resample"])
@pytest.mark.parametrize("injector", ["low_rank", "path", "selector"])
def test_chains_are_those_that_the_package_drafts(reuse, injector, target):
    drafter = make_drafter(target, injector=injector, draft_vocab_size=VOCAB)
    for name, value in {"beam_width": 1, "reuse": reuse, "ngram_length": 0}.items():
        setattr(drafter.generation_config, name, value)
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    ours, theirs = HSCandidateGenerator(drafter, weights), hidden_session(drafter, weights)
    ids = torch.randint(5, VOCAB, (30,), generator=torch.Generator().manual_seed(1))
    states = target(ids[None], output_hidden_states=True).hidden_states
    taps = torch.cat([states[layer][0] for layer in drafter.config.target_tap_layers], dim=-1)
    begin = 0
    for end in (9, 10, 12, 15, 16):
        part, accepted = slice(begin, end), ids[begin + 1 : end].tolist() if begin else []
        pairs = taps[part], ids[begin + 1 : end + 1], torch.arange(begin, end)
        accept(theirs, *pairs, accepted)
        depth = drafter.config.num_draft_steps
        [tree] = theirs.draft([Ask(0, int(ids[end]), depth, depth, width=1)])
        assert ours._draft(*pairs, accepted, end + 1) == list(tree.tokens[1:])
        begin = end


def test_saved_again_it_is_a_whole_repository(target, folder, alone, tmp_path):
    (folder / "figures.json").write_text("{}")
    drafter = alone(folder)
    drafter.generation_config.reuse = "resample"
    drafter.save_pretrained(tmp_path / "same")
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    saved = tmp_path / "same"
    assert {str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file()} == names
    own = HSDrafter.from_pretrained(saved)
    assert own.generation_config.reuse == "resample" and own.generation_config.tree_size == 16
    fields = [json.loads((each / "config.json").read_text()) for each in (folder, saved)]
    assert fields[0]["auto_map"] == fields[1]["auto_map"] and fields[0]["weights_digest"] == fields[1]["weights_digest"]
    with torch.no_grad():
        drafter.fuse.weight.add_(1.0)
    drafter.save_pretrained(tmp_path / "changed")
    assert not (tmp_path / "changed" / "figures.json").exists() and not (tmp_path / "changed" / "README.md").exists()
    again, plain = alone(tmp_path / "changed"), decoded(target, do_sample=True)
    assert torch.equal(again.fuse.weight, drafter.fuse.weight)
    for each in (again, copy.deepcopy(again), pickle.loads(pickle.dumps(again))):
        assert decoded(target, do_sample=True, assistant_model=each) == plain


def test_copies_of_several_versions_and_the_package_get_along(target, folder, alone, tmp_path):
    first = alone(folder)
    HSDrafter.from_pretrained(folder).save_pretrained(tmp_path / "later")
    (tmp_path / "later" / "custom_generate" / "travelling_drafter.py").open("a").write("# of a later version\n")
    second, own = alone(tmp_path / "later"), HSDrafter.from_pretrained(folder)
    assert type(first).__module__ != type(second).__module__
    wrapped = GenerationMixin._assisted_decoding
    assert alone(folder) is not None and GenerationMixin._assisted_decoding is wrapped  # wrapped once
    for do_sample in (False, True):
        plain = decoded(target, do_sample=do_sample)
        for each in (first, second, own):
            assert decoded(target, do_sample=do_sample, assistant_model=each) == plain
        other = make_target(seed=5)
        assert decoded(target, do_sample=False, assistant_model=other) == decoded(target, do_sample=False)


@pytest.mark.parametrize("entry", ["hub_entry", "modeling_hsdraft"])
def test_repositories_of_earlier_versions_are_loaded_by_the_package(entry, target, folder):
    """There the configuration had a file of its own as entry, and before that `modeling_hsdraft` was the other one."""
    path = folder / "config.json"
    for file in (folder / "custom_generate").glob("[!g]*.py"):
        file.rename(folder / file.name)
    auto_map = {"AutoConfig": "configuration_hsdraft.HSDraftConfig", "AutoModel": f"{entry}.HSDrafter"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "auto_map": auto_map}))
    for drafter in (HSDrafter.from_pretrained(folder), AutoModel.from_pretrained(folder, trust_remote_code=True)):
        assert type(drafter) is HSDrafter
        assert decoded(target, do_sample=False, assistant_model=drafter) == decoded(target, do_sample=False)


def test_a_newer_format_is_refused(folder, alone):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 3}))
    with pytest.raises(ValueError, match="format_version=3"):
        alone(folder)


@pytest.mark.parametrize("attention", [None, "sdpa", "eager"])
def test_names_of_attention_that_change_nothing_are_taken(attention, target, folder, alone):
    given = {} if attention is None else {"attn_implementation": attention}
    plain = decoded(target)
    for drafter in (AutoModel.from_pretrained(folder, trust_remote_code=True, **given), alone(folder, **given)):
        assert decoded(target, assistant_model=drafter) == plain
        drafter.save_pretrained(folder.parent / "again")
        assert "sdpa" not in (folder.parent / "again" / "config.json").read_text()


def test_attention_that_a_drafter_does_not_compute_is_refused(folder):
    with pytest.raises(ValueError, match=r"computes attention by itself; leave it out, or pass 'sdpa' or 'eager'"):
        AutoModel.from_pretrained(folder, trust_remote_code=True, attn_implementation="flash_attention_2")
