"""The target's own layers for multi-token prediction: drafts as transformers', exact texts, and their file."""

from __future__ import annotations

import copy
import json
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from conftest import write_prompts
from huggingface_hub import constants, file_download
from oracles import mtp_parity
from oracles.mtp_parity import states_of
from oracles.mtp_targets import LAYERS, counting, each_plain, made
from oracles.plain_texts import padded
from oracles.support import check_layers, types_with_layers
from oracles.tiny import VOCABULARY, tiny_config, tiny_model
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from typer.testing import CliRunner

from hf_hsdraft import CachebackDrafter, attach
from hf_hsdraft.cli.main import app
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.drafters.base.auto_drafter import find
from hf_hsdraft.drafters.base.draft_options import DraftOptions
from hf_hsdraft.drafters.base.protocol import Accepted, Ask, Call
from hf_hsdraft.drafters.base.registry import TargetInfo
from hf_hsdraft.generate import by_name
from hf_hsdraft.methods.mtp.drafter import MtpDrafter
from hf_hsdraft.methods.mtp.layers import MtpLayers
from hf_hsdraft.methods.mtp.loading import layers_of
from hf_hsdraft.methods.published import readings


def drafter_of(model_type: str, count: int, **options) -> MtpDrafter:
    target, layers = made(model_type, count)
    drafter = MtpDrafter(target, MtpLayers(layers))
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)
    return drafter


@pytest.mark.parametrize(("model_type", "count"), LAYERS.items())
@torch.no_grad()
def test_drafts_are_those_of_transformers(model_type, count):
    """Chains of one token a layer, at several points of a text that is read in pieces."""
    target, layers = made(model_type, count)
    drafter = drafter_of(model_type, count, num_assistant_tokens=count)
    ids = torch.randint(2, VOCABULARY, (30,), generator=torch.Generator().manual_seed(0))
    states, session = states_of(target, ids), drafter.session(Call(target, 1, DraftOptions.of(drafter)))
    for begin, end in ((0, 12), (12, 13), (13, 17), (17, 29)):
        at = torch.arange(begin, end)
        session.observe([Accepted(0, [int(ids[end])], states[begin:end], at, ids[begin + 1 : end + 1])])
        ask = Ask(0, int(ids[end]), count, count, 1)
        [tree] = session.draft([ask])
        text, places = ids[None, 1 : end + 1], torch.arange(1, end + 1)[None]
        expected, logits, _ = layers(text, states[None, :end], None, places, MtpCache(config=layers.config))
        assert list(tree.tokens[1:]) == expected[0].tolist()
        expansion, found = session.expansion([ask], count, session.options_for(ask)), []
        token, numbers = ids[None, end : end + 1], None
        for level in range(1, count + 1):
            scores, numbers = expansion.levels(level, token, numbers)
            found.append(scores[0, 0])
            token = scores.argmax(-1)
        torch.testing.assert_close(torch.stack(found), logits[0], rtol=1e-4, atol=1e-4)


TREES = [
    ("glm4_moe", 1),
    ("step3p7", 3),
    ("deepseek_v3", 2),
    *("Step-3.7 layers", "GLM-5 layers", "MiMo-V2 layers"),  # own heads, an index, sinks
    *("MiniMax-M3 layers", "GLM-5.3-Flash layers", "Qwen4-Exp layers"),  # groups of keys
    *([("inkling_text", 2)] if "inkling_text" in LAYERS else []),  # convolutions
]


@pytest.mark.parametrize("which", TREES, ids=str)
@torch.no_grad()
def test_what_a_tree_says_of_a_path_is_what_a_chain_along_it_says(which, tmp_path):
    """Deeper than there are layers too, and in a batch of texts of different lengths."""
    if isinstance(which, str):
        target = mtp_parity.published(next(case for case in mtp_parity.CASES if case.name == which), tmp_path).target
        drafter = MtpDrafter.for_target(target)
    else:
        target, drafter = made(*which)[0], drafter_of(*which)
    depth = drafter.num_draft_steps
    texts = [
        torch.randint(2, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)) for length in (9, 14)
    ]

    def session_of(rows):
        session = drafter.session(Call(target, len(rows), DraftOptions.of(drafter)))
        for row, ids in enumerate(rows):
            states, at = states_of(target, ids, drafter.config.last_tap_is_normed)[:-1], torch.arange(len(ids) - 1)
            session.observe([Accepted(row, [int(ids[-1])], states, at, ids[1:])])
        return session

    batch = session_of(texts)
    asks = [Ask(row, int(ids[-1]), depth, 20, 4) for row, ids in enumerate(texts)]
    expansion = batch.expansion(asks, depth, batch.options_for(asks[0]))
    roots = torch.tensor([[ask.root] for ask in asks])
    scores, states = expansion.levels(1, roots, None)
    level_paths: list[list[tuple[int, ...]]] = [[()], [()]]
    seen = {0: {(): scores[0, 0]}, 1: {(): scores[1, 0]}}
    above = states
    for level in range(2, depth + 1):
        children = [scores[row].topk(2).indices for row in (0, 1)]
        tokens = torch.stack([each.flatten() for each in children])[:, :4]
        owners = torch.stack([torch.arange(scores.shape[1]).repeat_interleave(2) for _ in (0, 1)])[:, :4]
        level_paths = [
            [(*level_paths[row][int(owners[row, place])], int(tokens[row, place])) for place in range(tokens.shape[1])]
            for row in (0, 1)
        ]
        above = above.gather(1, owners[..., None])
        scores, above = expansion.levels(level, tokens, above)
        for row in (0, 1):
            seen[row].update({path: scores[row, place] for place, path in enumerate(level_paths[row])})
    for row, ids in enumerate(texts):
        for path, found in seen[row].items():
            alone = session_of([ids])
            chain = alone.expansion([Ask(0, int(ids[-1]), depth, depth, 1)], depth, alone.options_for(asks[0]))
            expected, state = chain.levels(1, ids[None, -1:], None)
            for level, token in enumerate(path, start=2):
                expected, state = chain.levels(level, torch.tensor([[token]]), state)
            torch.testing.assert_close(found, expected[0, 0], rtol=1e-4, atol=1e-4)


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("do_sample", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("model_type", "count"), LAYERS.items())
def test_texts_are_those_of_plain_decoding(model_type, count, do_sample, rows):
    target, _ = made(model_type, count)
    drafter, inputs = drafter_of(model_type, count, tree_sizing="fixed"), padded(rows)
    call = {"max_new_tokens": 24, "do_sample": do_sample}
    plain = each_plain(target, inputs, 7, **call)
    torch.manual_seed(7)
    drafted = target.generate(**inputs, **call, assistant_model=drafter, return_dict_in_generate=True)
    assert drafted.sequences.tolist() == plain.tolist()
    assert sum(drafted.statistics.drafted_nodes) > 0


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("shape", ["tree", "chain"])
@pytest.mark.parametrize(("model_type", "count"), [("glm4_moe", 1), ("step3p7", 3)])
def test_layers_that_know_what_follows_are_accepted_at_all_depths(model_type, count, shape, rows):
    target, layers = counting(model_type, count)
    drafter = MtpDrafter(target, MtpLayers(layers))
    drafter.generation_config.tree_sizing, drafter.generation_config.tree_size = "fixed", 64
    if shape == "chain":
        drafter.generation_config.beam_width = 1
    inputs = padded(rows)
    plain = target.generate(**inputs, max_new_tokens=25, do_sample=False)
    made_of = target.generate(
        **inputs, max_new_tokens=25, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
    )
    assert made_of.sequences.tolist() == plain.tolist()
    assert made_of.statistics.tau > 4


@torch.no_grad()
def test_a_next_call_on_the_same_cache_drafts_as_one_whole_text():
    target, _ = made("deepseek_v3", 2)
    drafter = drafter_of("deepseek_v3", 2)
    ids = torch.randint(2, VOCABULARY, (20,), generator=torch.Generator().manual_seed(3))
    states = states_of(target, ids)

    def told(session, begin, end):
        at = torch.arange(begin, end)
        session.observe([Accepted(0, [int(ids[end])], states[begin:end], at, ids[begin + 1 : end + 1])])
        ask = Ask(0, int(ids[end]), 4, 4, 1)
        return session.expansion([ask], 4, session.options_for(ask)).levels(1, ids[None, end : end + 1], None)[0]

    first, second, whole = (drafter.session(Call(target, 1, DraftOptions.of(drafter))) for _ in range(3))
    told(first, 0, 12)
    second.resume(first.memory(13), 12)
    torch.testing.assert_close(told(second, 12, 19), told(whole, 0, 19), rtol=1e-4, atol=1e-4)


# --- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A target whose files hold a layer, as published ones do: behind the last one, with the number of layers."""
    folder = tmp_path_factory.mktemp("mtp")
    sizes = {"hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 8, "num_hidden_layers": 3}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "n_routed_experts": 2}
    sizes |= {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "max_position_embeddings": 64}
    torch.manual_seed(0)
    target = Glm4MoeForCausalLM(Glm4MoeConfig(vocab_size=VOCABULARY, **sizes, num_mtp_layers=1, pad_token_id=0)).eval()
    layers = MtpModel(target, 1).eval()
    with torch.no_grad():
        for module in (target, layers):
            for name, weight in module.named_parameters():
                if name.startswith("layers.") and weight.dim() > 1:
                    weight.normal_(std=0.1)  # some are made empty
                if "o_proj" in name or "down_proj" in name:
                    weight.zero_()
        target.lm_head.weight.copy_(target.model.embed_tokens.weight.roll(1, 0))
        layers.layers[0].eh_proj.weight.copy_(torch.eye(32, 64))
    target.generation_config.eos_token_id = None
    target.save_pretrained(folder)
    named = {
        f"model.layers.3.{name.removeprefix('layers.0.').removeprefix('mtp_block.')}": tensor.clone()
        for name, tensor in layers.state_dict().items()
        if name.startswith("layers.")
    }
    file = folder / "model.safetensors"
    save_file(load_file(file) | named, file, metadata={"format": "pt"})
    return folder


def test_a_checkpoint_with_layers_drafts_in_one_line(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    ids = padded(1)["input_ids"]
    plain = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert model.generate(ids, max_new_tokens=20, do_sample=False, assistant_model="mtp").tolist() == plain.tolist()
    with attach(model) as attachment:
        assert isinstance(attachment.drafter, MtpDrafter)
        attachment.drafter.generation_config.tree_sizing = "fixed"  # whatever drafts cost here
        assert attachment.drafter.layers is MtpDrafter.for_target(model).layers  # they are read once
        assert model.generate(ids, max_new_tokens=20, do_sample=False).tolist() == plain.tolist()
        assert attachment.statistics.tau > 1.2


IN_FILES = {
    "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "post_norm": "norm"
}  # fmt: skip


def as_published(layers) -> dict[str, torch.Tensor]:
    """The tensors of one layer by the names of Qwen's files, where each expert has its own."""
    tensors = {}
    for name, tensor in layers.state_dict().items():
        name, tensor = name.removeprefix("layers.0."), tensor.clone()
        part, _, rest = name.removeprefix("mtp_block.").partition("mlp.experts.")
        if name.split(".")[0] in IN_FILES:
            tensors[f"mtp.{IN_FILES[name.split('.')[0]]}.weight"] = tensor
        elif rest:
            for expert, one in enumerate(tensor):
                parts = {"down_proj": one} if rest == "down_proj" else dict(zip(HALVES, one.chunk(2), strict=True))
                for each, weight in parts.items():
                    tensors[f"mtp.layers.0.mlp.experts.{expert}.{each}.weight"] = weight.clone()
        elif name.startswith("mtp_block."):
            tensors[f"mtp.layers.0.{part}"] = tensor
    return tensors


HALVES = ("gate_proj", "up_proj")


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_layers_are_read_by_the_names_of_qwens_files(model_type, tmp_path):
    target, layers = made(model_type, 1)
    target.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | as_published(layers), file, metadata={"format": "pt"})
    read = layers_of(AutoModelForCausalLM.from_pretrained(tmp_path).eval()).model.state_dict()
    expected = {name: tensor for name, tensor in layers.state_dict().items() if name.startswith("layers.")}
    assert all(torch.equal(read[name], tensor) for name, tensor in expected.items())


def test_layers_are_refused_with_a_reason(checkpoint, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    drafter = MtpDrafter.for_target(target)
    with pytest.raises(DraftingRefused, match=r"another model's layers: make one with MtpDrafter.for_target\(model\)"):
        copy.deepcopy(target).generate(padded(1)["input_ids"], assistant_model=drafter)
    with pytest.raises(DraftingRefused, match="was not loaded from a checkpoint"):
        MtpDrafter.for_target(made("glm4_moe", 1)[0])
    plain = tiny_model(LlamaForCausalLM, tiny_config(LlamaConfig))
    with pytest.raises(DraftingRefused, match="this LlamaForCausalLM has no layers for multi-token prediction"):
        plain.generate(padded(1)["input_ids"], assistant_model="mtp")
    target.save_pretrained(tmp_path)  # without the layers
    with pytest.raises(DraftingRefused, match=r"cannot be read from .*weights are missing"):
        MtpDrafter.for_target(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert not listed(tmp_path)


def listed(folder) -> bool:
    """Whether `hsdraft find` lists the layers of a checkpoint."""
    return any("own layers" in each.name for each in find(TargetInfo.of_name(str(folder), "", True), True)[0])


def test_layers_whose_tensors_are_not_there_are_not_listed(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    assert listed(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, shard = load_file(file), tmp_path / "of-layers.safetensors"
    own = {name: tensor for name, tensor in tensors.items() if ".layers.3." in name}
    later = {name.replace(".layers.3.", ".layers.4."): tensor for name, tensor in own.items()}  # the first is missing
    rest = {name: tensor for name, tensor in tensors.items() if name not in own}
    save_file(rest | later, file, metadata={"format": "pt"})
    assert not listed(tmp_path)
    save_file(rest, file, metadata={"format": "pt"})
    save_file(own, shard, metadata={"format": "pt"})
    weight_map = {name: (shard if name in own else file).name for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert listed(tmp_path)
    shard.unlink()
    assert not listed(tmp_path)


def test_layers_are_found_in_the_cache_that_the_target_was_loaded_from(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # transformers asks the Hub for adapters in any case
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "models--user--mtp"
    shutil.copytree(checkpoint, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)

    def load():
        return AutoModelForCausalLM.from_pretrained("user/mtp", cache_dir=tmp_path, local_files_only=True).eval()

    expected = MtpDrafter.for_target(AutoModelForCausalLM.from_pretrained(checkpoint)).layers.model.layers.state_dict()
    target = load()
    with pytest.raises(DraftingRefused, match=r"revision \w+ is not in the cache .*cache_dir=\.\.\."):
        MtpDrafter.for_target(target)
    with pytest.raises(DraftingRefused, match=r"revision other is not in the cache"):
        MtpDrafter.for_target(target, cache_dir=tmp_path, revision="other")
    with attach(target, "mtp", cache_dir=tmp_path, revision=commit) as attachment:
        found = attachment.drafter.layers.model.layers.state_dict()
    with pytest.raises(DraftingRefused, match=r"revision other is not in the cache"):
        MtpDrafter.for_target(target, cache_dir=tmp_path, revision="other")  # after others were read
    monkeypatch.setattr(file_download, "HF_HUB_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for each in (found, MtpDrafter.for_target(load()).layers.model.layers.state_dict()):
        assert each.keys() == expected.keys() and all(torch.equal(each[name], expected[name]) for name in each)


def test_calls_of_several_threads_follow_a_target_in_turn(checkpoint, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    layers, inside, ties = layers_of(model), threading.Lock(), []
    tie = layers.model.tie_with_main_model

    def slowly(target) -> None:
        assert inside.acquire(blocking=False), "another thread is at it"
        time.sleep(0.05)
        tie(target)
        ties.append(target)
        inside.release()

    monkeypatch.setattr(layers.model, "tie_with_main_model", slowly)
    model.set_input_embeddings(copy.deepcopy(model.get_input_embeddings()))
    with ThreadPoolExecutor(4) as pool:
        for each in [pool.submit(layers.follow, model) for _ in range(4)]:
            each.result()
    assert len(ties) == 1


def test_an_expansion_that_fails_leaves_what_was_read(monkeypatch):
    """`repeatable` works on a copy, and puts the session's own back whatever happens."""
    drafter = drafter_of("glm4_moe", 1)
    session = drafter.session(Call(made("glm4_moe", 1)[0], 1, DraftOptions.of(drafter)))
    read = session._context

    def fails(*_):
        assert session._context is not read
        raise KeyboardInterrupt

    monkeypatch.setattr(session, "expansion", fails)
    with pytest.raises(KeyboardInterrupt):
        session.repeatable([], SimpleNamespace(depth=1), DraftOptions.of(drafter))
    assert session._context is read


def test_commands_take_the_layers_by_name(checkpoint, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(readings, "_LEAST", 8)  # tokens: a trial in each command continues a short prompt
    folder = Path(shutil.copytree(checkpoint, tmp_path / "target"))
    tokenizer.save_pretrained(folder)
    prompts_file = write_prompts(tmp_path / "prompts.jsonl", 2)
    both, short = ["--target", str(folder), "--drafter", "mtp"], ["--max-new-tokens", "8"]
    said = []
    for arguments in (
        ["check", "mtp", str(folder), *short],
        ["demo", "w1 w2", *both, *short],
        ["bench", *both, *short, "--prompts", str(prompts_file), "--variants", "default"],
        ["measure", "throughput", *both, *short, "--prompts", str(prompts_file), "--batch-sizes", "2", "--calls", "1"],
    ):
        outcome = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
        assert outcome.exception is None, (arguments[0], outcome.exception)
        said.append(" ".join(outcome.output.split()))
    assert "verdict: passed: 3 of 3 texts are those of plain decoding" in said[0]
    assert "same text yes" in said[1] and "tau" in said[2] and "tau" in said[3]
    refused = CliRunner().invoke(app, ["hub", "export", "mtp", "--to", "vllm", "--out", str(tmp_path / "out")])
    assert "'mtp' names a drafter made of a loaded target" in str(refused.exception)


def test_a_path_is_a_folder_even_if_it_is_called_mtp(checkpoint, tmp_path, monkeypatch):
    target = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    CachebackDrafter().save_pretrained(tmp_path / "mtp")
    monkeypatch.chdir(tmp_path)
    for name, kind in (("mtp", MtpDrafter), (Path("mtp"), CachebackDrafter), ("./mtp", CachebackDrafter)):
        assert type(by_name.drafter_of(target, name)) is kind


@pytest.mark.parametrize(
    "model_type", ["glm4_moe", "qwen3_5_moe_text", "bailing_hybrid", "inkling_text", "qwen4_exp_text"]
)
def test_the_table_says_what_the_layers_of_a_type_do(model_type):
    if model_type not in {each for each, *_ in types_with_layers()}:
        pytest.skip("transformers has no such type")
    row = check_layers(model_type)
    if row.drafts == "refused":
        assert model_type == "bailing_hybrid" and row.reason
    else:
        assert row.equal and row.batch == "equal" and row.tau > 1.5


def test_layers_of_targets_that_choose_blocks_of_keys_draft_chains():
    """As files of MiniMax-M3 have them; its configuration class makes all layers full attention."""
    row = check_layers("minimax_m3_vl_text")
    assert row.drafts == "chain" and "MiniMaxM3VLSparseCacheLayer" in row.reason
    assert row.equal and row.batch == "refused" and row.tau > 1.5


def test_reading_the_layers_leaves_the_target_trainable(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).train()
    layers = MtpDrafter.for_target(model).layers.model.layers
    assert all(weight.requires_grad for weight in model.parameters())
    assert all(module.training for module in model.modules())
    assert not any(weight.requires_grad for weight in layers.parameters())


def test_layers_that_were_read_outlive_their_files(checkpoint, tmp_path):
    shutil.copytree(checkpoint, tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    first = MtpDrafter.for_target(model)
    shutil.rmtree(tmp_path / "model")
    assert MtpDrafter.for_target(model).layers is first.layers


def test_layers_that_belong_to_a_checkpoint_are_not_saved_again(checkpoint, tmp_path):
    drafter = MtpDrafter.for_target(AutoModelForCausalLM.from_pretrained(checkpoint).eval())
    folder = tmp_path / "drafter"
    for save in (
        lambda: drafter.save_pretrained(folder),
        lambda: drafter.save_pretrained(folder, push_to_hub=True),
        lambda: drafter.push_to_hub("user/drafter"),
        lambda: drafter.export("speculators", folder),
    ):
        with pytest.raises(ValueError, match=r"belong to its target's checkpoint; keep that.*MtpDrafter\.for_target"):
            save()
    assert not folder.exists()


def test_wrapped_targets_get_the_layers_of_the_model_inside(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"], r=2)).eval()
    drafter, ids = MtpDrafter.for_target(wrapped), padded(1)["input_ids"]
    plain = wrapped.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    drafted = wrapped.generate(input_ids=ids, max_new_tokens=8, do_sample=False, assistant_model=drafter)
    assert drafted.tolist() == plain.tolist()


def test_a_target_with_another_embedding_is_followed(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    drafter, ids = MtpDrafter.for_target(model), padded(1)["input_ids"]
    model.set_input_embeddings(copy.deepcopy(model.get_input_embeddings()))
    plain = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert model.generate(ids, max_new_tokens=8, do_sample=False, assistant_model=drafter).tolist() == plain.tolist()
    assert drafter.layers.model.embed_tokens is model.get_input_embeddings()


def test_weights_that_are_not_at_hand_are_refused(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(DraftingRefused, match="this Glm4MoeForCausalLM is offloaded"):
        MtpDrafter.for_target(model)


def test_the_name_of_the_layers_takes_no_subfolder(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    with pytest.raises(TypeError, match="'mtp' names the target's own layers, which take no subfolder"):
        attach(model, "mtp", subfolder="x")


def test_a_target_that_has_moved_takes_its_layers_with_it(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    drafter, ids = MtpDrafter.for_target(model), padded(1)["input_ids"]
    model.to(torch.bfloat16)
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)
    assert model.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=drafter).tolist() == plain.tolist()
    assert drafter.dtype == torch.bfloat16
