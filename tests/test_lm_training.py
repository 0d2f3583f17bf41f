"""Small language models made of a target: pruned, trained, steered; and the target's own layers as a drafter."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import pytest
import torch
from conftest import VOCAB, each_with_its_seed, make_target, write_prompts
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from typer.testing import CliRunner

from hf_hsdraft import AutoDrafter, CausalLMDrafter, LayerSkipDrafter, SteeredLMDrafter
from hf_hsdraft.bench.tiny import tiny_config, tiny_model
from hf_hsdraft.cli import app
from hf_hsdraft.common.refusals import DraftingRefused
from hf_hsdraft.drafters.causal_lm.layer_subset import evenly, layers_of, with_layers
from hf_hsdraft.drafters.causal_lm.lm_steering import Steering, SteeringSizes
from hf_hsdraft.training.conversations import TokenizedConversation
from hf_hsdraft.training.families.trained_lm import LMPredictions
from hf_hsdraft.training.features import read_features
from hf_hsdraft.training.layer_search import judged, search, speed_of_chains, written_texts
from hf_hsdraft.training.loss import Chains, Pack, true_labels, unroll
from hf_hsdraft.training.plan import TrainingPlan
from hf_hsdraft.training.pruning import prune
from hf_hsdraft.training.run import train
from hf_hsdraft.training.trainable import TRAINABLE
from hf_hsdraft.training.trainer import DrafterTrainer

GREEDY = {"do_sample": False, "max_new_tokens": 24}
FIXED = {"tree_sizing": "fixed", "ngram_length": 0}


@pytest.fixture(scope="module")
def target():
    """A target each of whose layers changes little, as those of trained models do."""
    made = make_target(seed=3, num_hidden_layers=6)
    with torch.no_grad():
        for layer in made.model.layers:
            layer.self_attn.o_proj.weight *= 0.3
            layer.mlp.down_proj.weight *= 0.3
    return made


def tiny(model_type: str, **fields):
    config = tiny_config(CONFIG_MAPPING[model_type], layer_lists="cut")
    for name, value in fields.items():
        setattr(config, name, value)
    return tiny_model(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)


def with_fixed(drafter, **options):
    for name, value in {**FIXED, **options}.items():
        setattr(drafter.generation_config, name, value)
    return drafter


def padded(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(2, VOCAB, (rows, 11), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 2 * row], ids[row, : 2 * row] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def steered(target, seed: int = 0, size: float = 0.05, kept=(0, 2, 5)) -> SteeredLMDrafter:
    """A drafter of some of the target's layers whose steering changes what it says."""
    model = with_layers(target, kept)
    torch.manual_seed(seed)
    steering = Steering(SteeringSizes.of(model, target))
    torch.nn.init.normal_(steering.up.weight, std=size)
    torch.nn.init.normal_(steering.fuse.weight, std=0.1)
    return with_fixed(SteeredLMDrafter(model, steering=steering.eval()))


def by_bypass(model, kept, ids) -> torch.Tensor:
    """Logits of a model some of whose layers pass their inputs on."""
    handles = []
    for number, layer in enumerate(layers_of(model)[1]):
        if number not in kept:

            def passed_on(module, args, kwargs, output):
                hidden = args[0] if args else kwargs["hidden_states"]
                return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

            handles.append(layer.register_forward_hook(passed_on, with_kwargs=True))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return logits


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "mixtral", "gpt_oss", "qwen3"])
def test_a_pruned_model_is_the_target_without_its_other_layers(kind, tmp_path):
    model = tiny(kind)
    ids = torch.randint(2, 90, (1, 20), generator=torch.Generator().manual_seed(0))
    for kept in ([0, 3], [1, 2, 3]):
        before = copy.deepcopy(model.config).to_dict()
        prune(model, None, kept, tmp_path / str(len(kept)))
        small = AutoModelForCausalLM.from_pretrained(tmp_path / str(len(kept)), dtype=torch.float32).eval()
        assert len(layers_of(small)[1]) == len(kept) == small.config.num_hidden_layers
        with torch.no_grad():
            logits = small(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(logits, by_bypass(model, kept, ids), atol=1e-4, rtol=1e-4)
        cached = small.generate(ids, max_new_tokens=4, do_sample=False)  # its layers have slots of their own
        assert cached.tolist() == small.generate(ids, max_new_tokens=4, do_sample=False, use_cache=False).tolist()
        assert model.config.to_dict() == before and len(layers_of(model)[1]) == 4


def test_layers_are_spread_evenly():
    assert evenly(30, 6) == [0, 6, 12, 17, 23, 29] and evenly(5, 5) == [0, 1, 2, 3, 4] and evenly(7, 1) == [0]
    with pytest.raises(ValueError, match="num_layers=8 is invalid: expected 1 to 7"):
        evenly(7, 8)


@pytest.mark.parametrize("kept", [[], [0, 0], [2, 1], [0, 6], [-1, 2]])
def test_layers_that_are_not_there_are_refused_before_anything_is_written(target, tmp_path, kept):
    with pytest.raises(ValueError, match="expected ascending numbers from 0 to 5"):
        prune(target, None, kept, tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_a_model_that_cannot_be_saved_with_some_layers_is_refused(tmp_path):
    model = tiny("mixtral")
    model.config.num_local_experts = 2  # so the files are not what the model is
    with pytest.raises(ValueError, match="MixtralForCausalLM cannot be pruned"):
        prune(model, None, [0, 3], tmp_path / "new")
    assert not list(tmp_path.iterdir())


def test_the_command_prunes(target, tokenizer, tmp_path):
    for part in (target, tokenizer):
        part.save_pretrained(tmp_path / "target")
    out = tmp_path / "small"
    arguments = ["prune", str(tmp_path / "target"), "--num-layers", "3", "--out", str(out)]
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 0 and "3 of 6 layers (0, 2, 5)" in found.output, found.output
    recipe = json.loads((out / "pruning_recipe.json").read_text())
    assert recipe["kept_layers"] == [0, 2, 5] and recipe["target"] == "target" and recipe["target_layers"] == 6
    assert AutoTokenizer.from_pretrained(out).get_vocab() == tokenizer.get_vocab()
    drafter = AutoDrafter.from_pretrained(out)
    assert type(drafter) is CausalLMDrafter
    assert isinstance(CliRunner().invoke(app, arguments).exception, FileExistsError)


@pytest.mark.parametrize("make", [steered, lambda target: with_fixed(LayerSkipDrafter.for_target(target, [1, 3]))])
@pytest.mark.parametrize("rows", [1, 3])
def test_texts_are_those_of_plain_decoding(target, make, rows):
    drafter, inputs = make(target), padded(rows)
    plain = target.generate(**inputs, **GREEDY)
    for width in (1, 4):
        drafter.generation_config.beam_width = width
        output = target.generate(**inputs, **GREEDY, assistant_model=drafter, return_dict_in_generate=True)
        assert output.sequences.tolist() == plain.tolist()
        assert sum(output.statistics.accepted_lengths) > 0
    sampling = {"do_sample": True, "temperature": 1.0, "max_new_tokens": 24}
    torch.manual_seed(7)
    found = target.generate(**inputs, **sampling, assistant_model=drafter)
    if rows == 1:
        torch.manual_seed(7)
        assert found.tolist() == target.generate(**inputs, **sampling).tolist()
    else:
        alone = each_with_its_seed(target, inputs["input_ids"], inputs["attention_mask"], 7, **sampling)
        assert found.tolist() == alone.tolist()


def drafted_call(target, drafter, inputs, **call):
    """The trees that a drafter proposes round by round, with their scores, and what the call returns."""
    noted, session = [], drafter.session

    def noting(call):
        made = session(call)
        draft = made.draft

        def noted_draft(asks):
            trees = draft(asks)
            noted.append([(tree.tokens, tree.parents, tree.scores) for tree in trees])
            return trees

        made.draft = noted_draft
        return made

    drafter.session = noting
    output = target.generate(**inputs, **GREEDY, **call, assistant_model=drafter, return_dict_in_generate=True)
    del drafter.session
    return noted, output


def drafts_of(target, drafter, inputs):
    return drafted_call(target, drafter, inputs)[0]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_new_steering_drafts_as_the_plain_drafter_does(target, rows):
    model = with_layers(target, [0, 2, 5])
    plain = with_fixed(CausalLMDrafter(model))
    new = with_fixed(SteeredLMDrafter(model, steering=Steering(SteeringSizes.of(model, target))))
    other = steered(target)
    expected = drafts_of(target, plain, padded(rows))
    assert drafts_of(target, new, padded(rows)) == expected
    assert drafts_of(target, other, padded(rows)) != expected
    other.generation_config.steering = False
    assert drafts_of(target, other, padded(rows)) == expected


def test_a_new_steering_sums_the_hidden_states():
    sizes = SteeringSizes((1, 2, 3), 8, (16, 16))
    taps, steering = torch.randn(5, 24), Steering(sizes)
    summed = sum(taps.split(8, dim=-1))
    torch.testing.assert_close(steering.vectors(taps), torch.nn.functional.layer_norm(summed, (8,)))
    assert not steering.deltas(steering.vectors(taps)).any()


@torch.no_grad()
def test_each_drafted_token_is_steered_by_the_last_verified_position(target):
    """The drafts' scores, by a forward written out here: gated blocks with deltas, tokens read one text at a time."""
    drafter, inputs = steered(target), padded(1)
    plain = target.generate(**inputs, **GREEDY)[0].tolist()
    taps = target(torch.tensor([plain]), output_hidden_states=True).hidden_states
    taps = torch.cat([taps[layer][0] for layer in drafter.taps], dim=-1)
    steering, model = drafter.steering, with_layers(target, [0, 2, 5])

    def logits(tokens: list[int], root: int) -> torch.Tensor:
        """After tokens whose root stands at a position: those behind it know no more than the root does."""
        sources = [min(place, root) - 1 for place in range(len(tokens))]
        deltas = torch.stack(
            [
                torch.zeros(3 * 64)
                if source < 0
                else steering.up.weight
                @ torch.nn.functional.layer_norm(
                    steering.fuse.weight @ taps[source], (32,), steering.norm.weight, steering.norm.bias
                )
                for source in sources
            ]
        )
        blocks = []
        for number, layer in enumerate(model.model.layers):
            mlp = layer.mlp

            def gated(x, mlp=mlp, delta=deltas[:, 64 * number : 64 * (number + 1)]):
                return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * (mlp.up_proj(x) + delta))

            blocks.append((mlp, gated))
        for mlp, gated in blocks:
            mlp.forward = gated
        found = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        for mlp, _ in blocks:
            del mlp.forward
        return found.log_softmax(-1)

    drafts, output = drafted_call(target, drafter, inputs)
    position, accepted = inputs["input_ids"].shape[1], output.statistics.accepted_lengths
    assert len(drafts) == len(accepted) and sum(accepted) > 0
    for [(tokens, parents, scores)], length in zip(drafts, accepted, strict=True):
        assert tokens[0] == plain[position]
        for node in range(1, len(tokens)):
            path, each = [], node
            while each > 0:
                path.insert(0, each)
                each = parents[each]
            said = logits([*plain[: position + 1], *(tokens[each] for each in path)], position)
            expected = sum(said[position + depth, tokens[each]].item() for depth, each in enumerate(path))
            assert scores[node] == pytest.approx(expected, abs=2e-3), (position, node)
        position += length + 1


def test_a_steered_drafter_is_saved_beside_an_ordinary_model(target, tmp_path):
    drafter = steered(target)
    drafter.save_pretrained(tmp_path)
    ids = padded(1)["input_ids"]
    small = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(small(ids).logits, with_layers(target, [0, 2, 5])(ids).logits)
    loaded = AutoDrafter.from_pretrained(tmp_path)
    assert type(loaded) is SteeredLMDrafter and loaded.taps == drafter.taps
    assert drafts_of(target, loaded, padded(1)) == drafts_of(target, drafter, padded(1))
    assert AutoDrafter.from_pretrained(tmp_path, steering=False).generation_config.steering is False
    plain = CausalLMDrafter.from_pretrained(tmp_path)
    assert type(plain) is CausalLMDrafter and not hasattr(plain.generation_config, "steering_")
    (tmp_path / "steering.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ValueError, match=r"steering\.safetensors is damaged"):
        AutoDrafter.from_pretrained(tmp_path)


def test_a_steering_for_other_models_is_refused(target):
    drafter = steered(target)
    with pytest.raises(DraftingRefused, match=r"hidden_size=16.*reads hidden_size=32"):
        drafter.check(make_target(hidden_size=16, num_hidden_layers=6))
    with pytest.raises(DraftingRefused, match=r"num_hidden_layers=2.*reads hidden states"):
        drafter.check(make_target(num_hidden_layers=2))
    with pytest.raises(ValueError, match="GPT2LMHeadModel cannot be steered: layer 0 has 0 gated"):
        SteeringSizes.of(tiny("gpt2"), target)
    with pytest.raises(ValueError, match="expected the model that it was trained with"):
        SteeredLMDrafter(with_layers(target, [0, 5]), steering=drafter.steering)
    with pytest.raises(ValueError, match="steering=1 is invalid: expected True or False"):
        with_fixed(drafter, steering=1).check_options()


def test_the_model_that_is_steered_stays_as_it_was(target):
    model = with_layers(target, [0, 5])
    steering = Steering(SteeringSizes.of(model, target))
    torch.nn.init.normal_(steering.up.weight)
    drafter = SteeredLMDrafter(model, steering=steering)
    ids = padded(1)["input_ids"]
    with torch.no_grad(), steering.applied(torch.ones(1, 1, 128)):
        assert not torch.equal(drafter.model(ids).logits, model(ids).logits)
    assert not any(part._forward_hooks for part in model.modules())


def test_a_chat_goes_on_from_what_a_steered_drafter_had_read(target):
    drafter, inputs = steered(target), padded(1)
    unsteered = with_fixed(CausalLMDrafter(with_layers(target, [0, 2, 5])))
    for before, after in ((True, True), (True, False), (False, True)):
        drafter.generation_config.steering = before
        first = target.generate(**inputs, **GREEDY, assistant_model=drafter, return_dict_in_generate=True)
        ids = torch.cat([first.sequences, torch.tensor([[9, 8, 7]])], dim=1)
        drafter.generation_config.steering = after
        cache = first.past_key_values
        drafts, output = drafted_call(target, drafter, {"input_ids": ids}, past_key_values=cache)
        assert output.sequences.tolist() == target.generate(ids, **GREEDY).tolist()
        if not after:  # what the steered drafter had read is not gone on from
            expected = drafts_of(target, unsteered, {"input_ids": ids})
            assert [each[0][0] for each in drafts] == [each[0][0] for each in expected]


def test_skipped_layers_are_saved_as_a_list(target, tmp_path):
    drafter = LayerSkipDrafter.for_target(target, [1, 3], "user/target")
    drafter.generation_config.tree_size = 9
    drafter.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.safetensors"))
    loaded = AutoDrafter.from_pretrained(tmp_path, dtype=torch.float32, beam_width=2)
    assert type(loaded) is LayerSkipDrafter and loaded.config == drafter.config
    assert loaded.generation_config.tree_size == 9 and loaded.generation_config.beam_width == 2
    with pytest.raises(DraftingRefused, match=r"num_hidden_layers=3, this drafter leaves out layers of one with 6"):
        loaded.check(make_target())
    with pytest.raises(TypeError, match="no drafting option tree_sise: the nearest is tree_size"):
        AutoDrafter.from_pretrained(tmp_path, tree_sise=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "skipped_layers": [3, 1]}))
    with pytest.raises(ValueError, match="is damaged: skipped_layers"):
        AutoDrafter.from_pretrained(tmp_path)


def test_skipped_layers_draft_what_the_others_say(target):
    """Nothing skipped is the target itself: every draft is right. The part shares the target's weights."""
    inputs = padded(1)
    whole = with_fixed(LayerSkipDrafter.for_target(target, []), beam_width=1)
    output = target.generate(**inputs, **GREEDY, assistant_model=whole, return_dict_in_generate=True)
    assert all(length == 5 for length in output.statistics.accepted_lengths[:-1])
    part = with_fixed(LayerSkipDrafter.for_target(target, [1, 3]))
    pruned = with_fixed(CausalLMDrafter(with_layers(copy.deepcopy(target), [0, 2, 4, 5])))
    assert drafts_of(target, part, inputs) == drafts_of(target, pruned, inputs)


def test_what_a_draft_reads_is_counted(target):
    drafter = steered(target)
    layers, head, steering = drafter.reads(3, 4)
    assert layers.weights == sum(weight.numel() for weight in drafter.model.model.layers.parameters()) + 32  # the norm
    assert (layers.times, layers.rows, head.weights) == (3, 4, VOCAB * 32)
    assert steering.weights == sum(weight.numel() for weight in drafter.steering.parameters()) and steering.times == 1


@pytest.mark.parametrize("family", ["lm", "steered-lm"])
def test_the_command_estimates_decoding_with_a_language_model(target, tmp_path, family):
    target.config.save_pretrained(tmp_path)
    found = CliRunner().invoke(app, ["estimate", str(tmp_path), "--tau", "2.5", "--family", family])
    assert found.exit_code == 0, (found.output, found.exception)
    assert "draft: layers" in found.output and ("draft: steering" in found.output) == (family == "steered-lm")


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
    assert len(lines) == 3 and lines[1].startswith("without [2, 4]: agreement 1.000") and {2, 4} <= set(best.skipped)
    found = judged(lazy, [2, 4], texts)
    assert found.agreement == 1.0 and found.speed > judged(lazy, [1, 3], texts).speed
    sizes = sum(weight.numel() for weight in lazy.model.layers[0].parameters())
    assert found.cost == pytest.approx((4 * sizes + VOCAB * 32) / (6 * sizes + VOCAB * 32))


def test_the_command_searches(target, tokenizer, tmp_path):
    for part in (target, tokenizer):
        part.save_pretrained(tmp_path / "target")
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", 2), tmp_path / "skip"
    arguments = ["skip-layers", "--target", str(tmp_path / "target"), "--prompts", str(prompts), "--out", str(out)]
    found = CliRunner().invoke(app, [*arguments, "--max-new-tokens", "8", "--most", "2"])
    assert found.exit_code == 0 and "best without [" in found.output, found.output
    loaded = with_fixed(AutoDrafter.from_pretrained(out))
    assert loaded.config.target_name == "target"
    inputs = padded(1)
    assert (
        target.generate(**inputs, **GREEDY).tolist()
        == target.generate(**inputs, **GREEDY, assistant_model=loaded).tolist()
    )


def pruned_folder(target, tokenizer, folder):
    prune(target, tokenizer, [0, len(layers_of(target)[1]) - 1], folder)
    return str(folder)


@pytest.fixture(scope="module")
def tied():
    """A target that ends its turns, and whose output rows are its embeddings, as small models have them."""
    made = make_target(eos_token_id=4, tie_word_embeddings=True)
    made.generation_config.pad_token_id = 0
    return made


def planned(tmp_path, family: str, **fields) -> TrainingPlan:
    given = {
        "prompts": [str(write_prompts(tmp_path / "prompts.jsonl", 12))], "out": str(tmp_path / "out"),
        "eval_conversations": 3, "eval_prompts": 2, "max_new_tokens": 12, "answer_batch_size": 5, "family": family,
        "drafter": {"num_draft_steps": 3, "tree_size": 6},
    }  # fmt: skip
    return TrainingPlan(**{**given, **fields})


def run(target, tokenizer, plan: TrainingPlan, **arguments):
    fields = {"max_steps": 4, "eval_steps": 2, "eval_new_tokens": 6, "logging_steps": 1, "disable_tqdm": True}
    return train(target, tokenizer, plan, {**fields, **arguments}, report=lambda _: None)


@pytest.mark.parametrize(("family", "kind"), [("lm", CausalLMDrafter), ("steered-lm", SteeredLMDrafter)])
@pytest.mark.parametrize("arguments", [{}, {"bf16": True, "data_policy": "mixed", "activation_checkpointing": True}])
def test_training_lowers_the_loss_and_saves_an_ordinary_model(tied, tokenizer, tmp_path, family, kind, arguments):
    start = pruned_folder(tied, tokenizer, tmp_path / "small")
    plan = planned(tmp_path, family, init_from=start)
    run(tied, tokenizer, plan, **{"max_steps": 40, "eval_steps": 40, "learning_rate": 5e-3}, **arguments)
    history = json.loads((tmp_path / "out" / "figures.json").read_text())["training"]["history"]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5]), losses
    assert max(entry["eval_parity"] for entry in history if "eval_parity" in entry) < 1e-3
    loaded = AutoDrafter.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert type(loaded) is kind and loaded.generation_config.num_assistant_tokens == 3
    assert loaded.generation_config.tree_size == 6 and loaded.tokenizer is not None
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before = AutoModelForCausalLM.from_pretrained(start, dtype=torch.bfloat16).state_dict()
    same = all(torch.equal(value.bfloat16(), before[name]) for name, value in plain.state_dict().items())
    assert same == (family == "steered-lm")  # there the language model stays as it was
    inputs = padded(1)
    text = tied.generate(**inputs, **GREEDY)
    assert tied.generate(**inputs, **GREEDY, assistant_model=loaded).tolist() == text.tolist()
    recipe = json.loads((tmp_path / "out" / "training_recipe.json").read_text())["training"]
    assert recipe["family"] == family and "2 layers of width 32" in recipe["drafter"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"| family | {family} |" in card and ("reads hidden states" in card) == (family == "steered-lm")


@pytest.mark.parametrize("family", ["lm", "steered-lm"])
def test_a_killed_run_resumes_where_it_was(tied, tokenizer, tmp_path, family, monkeypatch):
    start = pruned_folder(tied, tokenizer, tmp_path / "small")
    plans = [planned(tmp_path, family, init_from=start, out=str(tmp_path / name)) for name in ("whole", "killed")]
    whole = run(tied, tokenizer, replace(plans[0], cache_taps=True))
    original, steps = DrafterTrainer.compute_loss, []

    def dies_at_step_three(self, *args, **kwargs):
        steps.append(self.state.global_step)
        if len(steps) == 4:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(DrafterTrainer, "compute_loss", dies_at_step_three)
    with pytest.raises(KeyboardInterrupt):
        run(tied, tokenizer, plans[1])
    resumed = run(tied, tokenizer, plans[1])
    assert steps[4:] == [2, 3]
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value)


def test_a_steering_is_trained_further_and_a_language_model_made_on_the_way(tied, tokenizer, tmp_path):
    plain = run(tied, tokenizer, planned(tmp_path, "lm", drafter={"num_hidden_layers": 2}))  # nothing to start from
    assert len(layers_of(plain.model)[1]) == 2 and plain.tokenizer is not None
    fields = {"target_tap_layers": [1, 3]}
    first = planned(tmp_path, "steered-lm", init_from=str(tmp_path / "out"), out=str(tmp_path / "a"), drafter=fields)
    second = replace(first, init_from=str(tmp_path / "a"), out=str(tmp_path / "b"), drafter={})
    made, again = (run(tied, tokenizer, plan) for plan in (first, second))
    assert list(made.taps) == list(again.taps) == [1, 3]
    assert not torch.equal(made.steering.up.weight, again.steering.up.weight)
    with pytest.raises(ValueError, match=r"target_tap_layers=\[2\] is invalid: the drafter to start from reads"):
        run(tied, tokenizer, replace(second, drafter={"target_tap_layers": [2]}, out=str(tmp_path / "c")))
    with pytest.raises(ValueError, match="num_hidden_layers=3 is invalid: the drafter to start from has 2"):
        run(tied, tokenizer, replace(second, drafter={"num_hidden_layers": 3}, out=str(tmp_path / "c")))
    with pytest.raises(ValueError, match="num_draft_steps=40 is invalid"):
        run(tied, tokenizer, planned(tmp_path, "lm", drafter={"num_draft_steps": 40}, out=str(tmp_path / "c")))
    assert not (tmp_path / "c").exists()


def test_chains_of_the_text_are_what_the_text_says(target):
    """Read as rows of the text, or as branches of it, they are the same; labels along the text need no branches."""
    drafter = TRAINABLE["lm"].fresh(target, {"num_draft_steps": 4, "num_hidden_layers": 3}, 64, list)
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    ids = [torch.randint(2, VOCAB, (length,), generator=torch.Generator().manual_seed(length)) for length in (9, 14)]
    chats = [TokenizedConversation(each, torch.ones(len(each), dtype=torch.bool)) for each in ids]
    pack = Pack.of(read_features(target, (), chats)).to(torch.device("cpu"), torch.float32)
    chains = Chains(torch.tensor([2, 11, 14]), 2, torch.ones(3, dtype=torch.bool))
    labels = true_labels(pack, chains, 4)
    predictions = LMPredictions(drafter, weights)
    with torch.no_grad():
        together = unroll(drafter, predictions, pack, chains, labels.tokens).hidden_states
        drafter.apart = True
        apart = unroll(drafter, predictions, pack, chains, labels.tokens).hidden_states
        plain = drafter.model(input_ids=ids[1][None]).logits[0]
    assert [len(each) for each in together] == [3, 2, 2, 2]
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    for depth in range(4):  # chain 1 starts at the second text's position 2
        torch.testing.assert_close(drafter.logits(apart[depth][1]), plain[3 + depth], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", ["lm", "steered-lm"])
def test_commands_train_and_check(tied, tokenizer, tmp_path, family):
    for part in (tied, tokenizer):
        part.save_pretrained(tmp_path / "target")
    target, out = str(tmp_path / "target"), str(tmp_path / "out")
    arguments = ["--family", family, "--target", target, "--out", out, "--max-steps", "2", "--eval-steps", "2"]
    arguments += ["--prompts", str(write_prompts(tmp_path / "prompts.jsonl", 8)), "--eval-conversations", "2"]
    arguments += ["--init-from", pruned_folder(tied, tokenizer, tmp_path / "small"), "--eval-prompts", "1"]
    arguments += ["--max-new-tokens", "8", "--eval-new-tokens", "4"]
    found = CliRunner().invoke(app, ["train", *arguments])
    assert found.exit_code == 0, (found.output, found.exception)
    checked = CliRunner().invoke(app, ["check", out, target, "--max-new-tokens", "8", "--limit", "2"])
    assert checked.exit_code == 0 and "same texts: 2 of 2" in checked.output, checked.output
    refused = CliRunner().invoke(app, ["train", *arguments, "--draft-vocab-size", "5"])
    assert "draft_vocab_size=5 is invalid with family" in str(refused.exception)
