"""Drafters of other projects in `generate_many`, saved, and pushed where `save_pretrained` is asked to."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from conftest import make_target
from family_helpers import near
from oracles import assistant_parity, eagle_parity, heads_parity, mtp_alone_parity, mtp_parity
from oracles.eagle_by_hand import by_hand

from hf_hsdraft import AutoDrafter, CachebackDrafter, CausalLMDrafter, generate_many
from hf_hsdraft.drafters.base import saved_drafter
from hf_hsdraft.methods.cascade.cascade_drafter import CascadeDrafter
from hf_hsdraft.methods.mtp.drafter import MtpDrafter

PROMPTS = [[5, 9, 11, 3], [7, 8, 60, 61, 62, 7, 8], [40, 41, 42], [2, 3], [11, 12, 13, 14, 15]]


def of_checkpoint(folder):
    case = next(case for case in mtp_parity.CASES if case.model_type == "glm4_moe")
    target = mtp_parity.published(case, folder).target
    return target, MtpDrafter.for_target(target)


def of_speculators(folder):
    pytest.importorskip("speculators")
    target = mtp_alone_parity.target_of("qwen3")
    mtp_alone_parity.model_of(target).save_pretrained(folder)
    return target, AutoDrafter.from_pretrained(folder)


def of_gemma(folder):
    target, assistant = assistant_parity.made(assistant_parity.CASES[0])
    assistant.save_pretrained(folder)
    return target, AutoDrafter.from_pretrained(folder, dtype=torch.float32)


def pard(folder):
    target = make_target()
    model = near(target).eval()
    model.config.pard_token = 3
    CausalLMDrafter(model).save_pretrained(folder)
    return target, AutoDrafter.from_pretrained(folder)


def quantised(name, folder):
    target = eagle_parity.eagle_target()
    by_hand(target, quantised=name).save(folder)
    return target, AutoDrafter.from_pretrained(folder, dtype=torch.float32)


KINDS = {
    "MTP": of_checkpoint,
    "MTP of speculators": of_speculators,
    "Gemma 4 assistant": of_gemma,
    "PARD": pard,
    "fp8": partial(quantised, "fp8, blocks"),
    "AWQ": partial(quantised, "AWQ"),
    "w4a16": partial(quantised, "compressed-tensors w4a16"),
    "NVFP4": partial(quantised, "ModelOpt NVFP4"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_many_requests_get_the_texts_of_plain_decoding(kind, tmp_path):
    target, drafter = KINDS[kind](tmp_path)
    call = {"max_new_tokens": 12, "do_sample": False}
    requests = [{"input_ids": torch.tensor([prompt]), **call} for prompt in PROMPTS]
    found = {done.index: done for done in generate_many(target, requests, drafter, max_batch_size=3)}
    for index, request in enumerate(requests):
        assert found[index].error is None
        output = found[index].output
        sequences = output if isinstance(output, torch.Tensor) else output.sequences
        assert sequences.tolist() == target.generate(**request).tolist()


@pytest.mark.parametrize("kind", ["Gemma 4 assistant", "PARD", "fp8", "NVFP4"])
def test_a_saved_drafter_drafts_as_it_did(kind, tmp_path):
    """Quantised weights are saved as the numbers they stand for."""
    (tmp_path / "first").mkdir()
    target, drafter = KINDS[kind](tmp_path / "first")
    drafter.save_pretrained(tmp_path / "again")
    again = AutoDrafter.from_pretrained(tmp_path / "again", dtype=torch.float32)
    own, read = (getattr(each, "model", each).state_dict() for each in (drafter, again))
    assert own.keys() == read.keys() and all(torch.equal(own[name], read[name]) for name in own)
    call = {"input_ids": torch.tensor([PROMPTS[1]]), "max_new_tokens": 10, "return_dict_in_generate": True}
    for each in (drafter, again):
        each.generation_config.update(tree_sizing="fixed", ngram_length=0)
    first, second = (target.generate(**call, assistant_model=each) for each in (drafter, again))
    assert first.sequences.tolist() == second.sequences.tolist() == target.generate(**call).sequences.tolist()
    assert first.statistics.accepted_lengths == second.statistics.accepted_lengths != []


SAVED = {
    "EAGLE-3": lambda target: by_hand(target).loaded(),
    "Medusa": lambda target: heads_parity.medusa(target).loaded(),
    "n-grams": lambda target: CachebackDrafter(),
    "language model": lambda target: CausalLMDrafter(near(target)),
    "cascade": lambda target: CascadeDrafter([CachebackDrafter(), CausalLMDrafter(near(target))], [3, 2]),
}


@pytest.mark.parametrize("name", SAVED)
def test_saving_pushes_where_it_is_asked_to(name, tmp_path, monkeypatch):
    drafter, sent = SAVED[name](eagle_parity.eagle_target()), []
    for push in ("push", "push_as_it_is"):
        monkeypatch.setattr(
            saved_drafter, push, lambda folder, repo_id, **given: sent.append((repo_id, given, set(folder.iterdir())))
        )
    told = {"target_name": "user/target"} if getattr(drafter, "saved_as", ()) else {}
    drafter.save_pretrained(tmp_path / "mine", **told)
    assert not sent
    drafter.save_pretrained(tmp_path / "mine", **told, push_to_hub=True, private=True)
    drafter.save_pretrained(tmp_path / "mine", push_to_hub=True, repo_id="user/other", revision="one")
    names = {path.name for path in (tmp_path / "mine").iterdir()}
    assert [each[:2] for each in sent] == [("mine", {"private": True}), ("user/other", {"revision": "one"})]
    assert all({path.name for path in files} == names for *_, files in sent)
