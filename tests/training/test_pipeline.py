"""`train()` and the commands, whole, on a tiny target with a tokenizer and chat template of its own."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target, needs_peft, write_prompts
from huggingface_hub import DatasetCard, ModelCard
from training_helpers import chat_of, decodes_as_plain, end_briefly, interrupted, own_hub, planned, run
from transformers import AutoModelForCausalLM, GraniteConfig, MambaConfig

from hf_hsdraft import HSDrafter
from hf_hsdraft.core.progress import Reporter
from hf_hsdraft.methods.adapters import adapted as adapted_by
from hf_hsdraft.methods.adapters import adapter_names, with_lora
from hf_hsdraft.training.data import gather
from hf_hsdraft.training.data.plan import TrainingPlan
from hf_hsdraft.training.data.vocabulary import with_draft_vocabulary
from hf_hsdraft.training.files import RowFolder
from hf_hsdraft.training.loop import start
from hf_hsdraft.training.loop.arguments import TRAINING_OPTIONS
from hf_hsdraft.training.loop.run import train
from hf_hsdraft.training.loop.run_folder import steps_done
from hf_hsdraft.training.loop.trainer import DrafterTrainer, TrainingDiverged
from hf_hsdraft.training.loss import loss as loss_module

SIZES = {"num_draft_steps": 3, "tree_size": 6, "injector_rank": 8, "draft_vocab_size": 40}


def plan(folder: Path, **overrides) -> TrainingPlan:
    return planned(folder, **{"family": "hidden-state", "drafter": SIZES, **overrides})


@pytest.fixture(scope="module")
def trained(chatty, tokenizer, tmp_path_factory) -> SimpleNamespace:
    """A finished run with taps that are read and cached: its folder, its drafter and what it said."""
    folder, said = tmp_path_factory.mktemp("trained"), []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gather, "can_record", lambda target: False)
        drafter = run(chatty, tokenizer, plan(folder, cache_taps=True), Reporter(said.append, every=0.0), whole=True)
    return SimpleNamespace(out=folder / "out", drafter=drafter, said=said)


@pytest.fixture
def finished(trained, tmp_path) -> Path:
    """A copy of that run, where `plan(tmp_path)` has its folder."""
    return Path(shutil.copytree(trained.out, tmp_path / "out"))


def figures_of(out: Path) -> list[dict]:
    return json.loads((out / "figures.json").read_text())["training"]["history"]


def keys_of(folder: Path) -> list[str]:
    from datasets import load_dataset

    return load_dataset(str(folder), cache_dir=str(folder.parent.parent / "cache"))["train"]["key"]


def test_training_ends_with_a_drafter_that_loads_and_decodes(chatty, trained):
    drafter = HSDrafter.from_pretrained(trained.out)
    assert drafter.dtype == torch.bfloat16 and len(drafter.config.draft_vocab_ids) == 40
    assert 4 in drafter.config.draft_vocab_ids  # the end of a turn can be drafted
    assert decodes_as_plain(chatty, drafter)
    assert {path.name for path in trained.out.glob("*.png")} >= {"learning_curves.png", "acceptance.png"}
    last = [entry for entry in figures_of(trained.out) if "eval_tau" in entry][-1]
    assert {"eval_tau", "eval_parity", "eval_acceptance_1", "eval_accuracy_3", "eval_loss"} <= last.keys()


def test_cached_and_online_taps_train_the_same_drafter(chatty, tokenizer, trained, tmp_path):
    said: list[str] = []
    online = run(chatty, tokenizer, plan(tmp_path, cache_taps=False), said.append).state_dict()
    for name, value in trained.drafter.state_dict().items():
        torch.testing.assert_close(online[name], value, atol=2e-3, rtol=2e-2)
    assert any("cover" in line for line in said) and not any("GB on disk" in line for line in said)


def test_a_run_is_not_resumed_with_other_settings(chatty, tokenizer, tmp_path, finished):
    """Other data would give the checkpoint's rows another draft vocabulary."""
    with pytest.raises(ValueError, match=r"learning_rate: '0\.0006' -> '0\.5'"):
        run(chatty, tokenizer, plan(tmp_path), learning_rate=0.5)
    with pytest.raises(ValueError, match="target: "):
        run(make_target(eos_token_id=4, seed=5), tokenizer, plan(tmp_path), max_steps=6)
    changed = plan(tmp_path)
    write_prompts(tmp_path / "prompts.jsonl", 13)
    with pytest.raises(ValueError, match="prompt_digests"):
        run(chatty, tokenizer, changed)


@pytest.mark.parametrize("kept", [True, False], ids=["kept", "of an earlier version"])
@pytest.mark.parametrize("family", ["hidden-state", "eagle3"])
def test_a_resumed_run_keeps_the_draft_vocabulary_that_it_began_with(
    chatty, tokenizer, tmp_path, monkeypatch, family, kept
):
    chosen = plan(tmp_path, family=family, drafter={"num_draft_steps": 3, "tree_size": 6})
    monkeypatch.setattr(start, "paying_size", lambda *_: 30)
    begun = run(chatty, tokenizer, chosen)
    monkeypatch.setattr(start, "paying_size", lambda *_: pytest.fail("a size was chosen again"))
    if not kept:
        (tmp_path / "out" / "draft_vocabulary.json").unlink()
    resumed = run(chatty, tokenizer, chosen, max_steps=6)
    assert resumed.draft_vocab_ids().tolist() == begun.draft_vocab_ids().tolist()
    assert len(begun.draft_vocab_ids()) == 30 and steps_done(tmp_path / "out") == 6


@pytest.mark.parametrize("head", ["target", "trained"])
def test_a_new_vocabulary_keeps_what_was_learned(chatty, head):
    """Old rows stay as they are; new ones follow the map from the target's rows that explains the old ones."""
    old_ids, new_ids = list(range(0, 80)), [*range(10, 80), 85, 90]
    drafter = make_drafter(chatty, head=head, draft_vocab_size=80, draft_vocab_ids=old_ids)
    rows = chatty.get_output_embeddings().weight.detach()
    names = ["injector.up.weight", "lm_head.weight"][: 1 + (head == "trained")]
    truth = {name: rows @ torch.randn(rows.shape[1], drafter.state_dict()[name].shape[1]) for name in names}
    drafter.load_state_dict(drafter.state_dict() | {name: truth[name][old_ids] for name in names})
    changed = with_draft_vocabulary(drafter, new_ids, rows)
    for name, value in changed.state_dict().items():
        if name in names:
            assert torch.equal(value[:70], drafter.state_dict()[name][10:80])
            torch.testing.assert_close(value, truth[name][new_ids], atol=1e-3, rtol=1e-3)
        else:
            assert torch.equal(value, drafter.state_dict()[name])
    assert changed.draft_vocab_ids().tolist() == new_ids


def test_training_in_bfloat16_keeps_float32_weights(chatty, tokenizer, tmp_path, monkeypatch):
    seen = []
    compute = loss_module.ChainLoss.__call__

    def spied(self, drafter, *args, **kwargs):
        seen.append((torch.is_autocast_enabled("cpu"), drafter.fuse.weight.dtype))
        return compute(self, drafter, *args, **kwargs)

    def noted(args, weight):
        term = regression.term(args, weight)
        return replace(term, of_states=lambda *given: steps.append(given[-1]) or term.of_states(*given))

    steps, regression = [], TRAINING_OPTIONS["regression_weight"]
    monkeypatch.setitem(TRAINING_OPTIONS, "regression_weight", replace(regression, term=noted))
    monkeypatch.setattr(loss_module.ChainLoss, "__call__", spied)
    drafter = run(chatty, tokenizer, plan(tmp_path), bf16=True, regression_weight=1.0, regression_steps=3)
    assert set(seen) == {(True, torch.float32)}
    assert len(set(steps)) > 2 and steps == sorted(steps), "the weight of the regression follows the steps"
    assert decodes_as_plain(chatty, drafter)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "forward_kl on teacher data (regression_weight 1.0) (regression_steps 3)" in card


def test_settings_may_be_corrected_until_something_was_trained(chatty, tokenizer, tmp_path, monkeypatch):
    """Answers are the expensive part: a mistake in the drafter's sizes or the learning rate must not cost them."""
    with monkeypatch.context() as patch:
        patch.setattr("hf_hsdraft.training.loop.run._Run.learn_from", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(chatty, tokenizer, plan(tmp_path))
    keys = keys_of(tmp_path / "out" / "data")
    with pytest.raises(ValueError, match="max_new_tokens: 12 -> 9"):
        run(chatty, tokenizer, plan(tmp_path, max_new_tokens=9))
    sizes = {"num_draft_steps": 2, "tree_size": 4, "injector_rank": 8, "draft_vocab_size": 30}
    drafter = run(chatty, tokenizer, plan(tmp_path, drafter=sizes), learning_rate=1e-3)
    assert drafter.config.num_draft_steps == 2
    assert keys_of(tmp_path / "out" / "data") == keys


def test_more_data_never_holds_out_what_was_learned():
    """A drafter that goes on from another one's run must not be judged by chats which that one trained on."""
    from hf_hsdraft.training.data.gather import in_order

    chats = [chat_of((("user", f"w{index}"), ("assistant", f"w{index + 1}"))) for index in range(60)]
    ordered = [in_order(part, 0) for part in (chats[:35], chats[::-1])]
    learned_first, held_out_later = ordered[0][10:], ordered[1][:10]
    assert not {chat.key for chat in learned_first} & {chat.key for chat in held_out_later}
    assert sorted(ordered[1], key=chats.index) == chats
    assert ordered[1] != chats


@pytest.mark.parametrize("state", [None, '{"global_step": 4'])
def test_half_written_checkpoints_are_passed_over(chatty, tokenizer, tmp_path, finished, state):
    last = finished / "checkpoints" / "checkpoint-4" / "trainer_state.json"
    last.unlink()
    if state is not None:
        last.write_text(state)
    run(chatty, tokenizer, plan(tmp_path), max_steps=6)
    assert steps_done(finished) == 6


def test_a_run_killed_before_its_drafter_is_saved_is_not_finished(chatty, tokenizer, tmp_path, finished, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("hf_hsdraft.training.loop.run.save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(chatty, tokenizer, plan(tmp_path), max_steps=6)
    said: list[str] = []
    run(chatty, tokenizer, plan(tmp_path), said.append, max_steps=6)
    assert not any("already finished" in line for line in said)
    said.clear()
    run(chatty, tokenizer, plan(tmp_path), said.append, max_steps=6)
    assert said == ["already finished: max_steps 6"]


NARROW = {**SIZES, "head": "trained", "hidden_size": 16, "num_attention_heads": 2}
WIDTHS = "=1.0 is invalid: drafted states have a width of 16, those .* 32"


@pytest.mark.parametrize(
    ("fields", "arguments", "message"),
    [
        ({"drafter": {"num_draft_steps": 30, "tree_size": 6}}, {}, "tree_size=6"),
        ({}, {"objective": "forward"}, "objective='forward'"),
        ({}, {"metric_for_best_model": "eval_speed"}, r"'eval_speed' will not be measured: expected one of eval_tau, "),
        ({"eval_prompts": 0}, {}, r"'eval_tau' will not be measured without prompts"),
        ({}, {"depth_weights": [1.0, 0.5]}, "depth_weights has 2 entries"),
        ({"drafter": NARROW}, {"regression_weight": 1.0}, f"regression_weight{WIDTHS}"),
        ({"drafter": NARROW}, {"cosine_weight": 1.0}, f"cosine_weight{WIDTHS}"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_an_answer_is_made(
    chatty, tokenizer, tmp_path, fields, arguments, message
):
    with pytest.raises(ValueError, match=message):
        run(chatty, tokenizer, plan(tmp_path, **fields), **arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (MambaConfig, {"state_size": 4}, "cannot be drafted for: (there is no cache|its cache has linear-attention)"),
        (GraniteConfig, {"logits_scaling": 8.0, "num_attention_heads": 4}, "scale, cap or bias"),
    ],
)
def test_targets_that_cannot_teach_are_refused_before_an_answer_is_made(tokenizer, tmp_path, kind, fields, message):
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
    target = AutoModelForCausalLM.from_config(
        kind(**sizes, **fields, initializer_range=0.3, pad_token_id=0, eos_token_id=4)
    )
    with pytest.raises(ValueError, match=message):
        run(target.eval(), tokenizer, plan(tmp_path))
    assert not (tmp_path / "out").exists()


def test_the_best_checkpoint_is_found_where_the_run_was_moved_to(chatty, tokenizer, tmp_path, finished):
    """The run was killed before its drafter was saved."""
    for name in ("finished.json", "model.safetensors"):
        (finished / name).unlink()
    moved = finished.rename(tmp_path / "moved")
    drafter = run(chatty, tokenizer, plan(tmp_path, out=str(moved)))
    kept = [HSDrafter.from_pretrained(path) for path in (moved / "checkpoints").glob("checkpoint-*")]
    assert any(torch.equal(each.fuse.weight.bfloat16(), drafter.fuse.weight) for each in kept)


def test_cached_taps_are_those_of_the_target_at_hand(chatty, tokenizer, tmp_path, monkeypatch):
    """The folder was begun with another target; its head is the same, as after a fine-tuning of the layers alone."""
    from hf_hsdraft.training.loop.start import fingerprint

    tuned = copy.deepcopy(chatty)
    with torch.no_grad():
        tuned.model.layers[1].mlp.up_proj.weight.mul_(1.5)
    assert fingerprint(tuned) != fingerprint(chatty) == fingerprint(copy.deepcopy(chatty))


def test_only_the_gpu_of_this_process_is_trained_on(monkeypatch):
    monkeypatch.setattr(start.torch.cuda, "current_device", lambda: 0)
    for own, place, fits in (("cuda", "cuda:0", True), ("cuda:1", "cuda:1", True), ("cuda", "cuda:1", False)):
        monkeypatch.setattr(start, "PartialState", lambda own=own: SimpleNamespace(device=torch.device(own)))
        target = SimpleNamespace(device=torch.device(place))
        if fits:
            start.check_device(target)
        else:
            with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES"):
                start.check_device(target)


def test_chats_are_published_as_a_data_set_that_the_card_names(chatty, tokenizer, tmp_path, finished, monkeypatch):
    from datasets import load_dataset

    hub_options = {"hub_token": "hf_secret", "hub_private_repo": True}
    with own_hub(monkeypatch) as hub:
        said: list[str] = []
        assert "datasets" not in (tmp_path / "out" / "README.md").read_text()
        hub.fail("POST", "/commit/main", 500, times=None)
        with pytest.raises(OSError, match="500"):  # a finished run sends its chats too, and may be asked again
            run(chatty, tokenizer, plan(tmp_path, publish_data="user/chats"), **hub_options)
        hub.heal()
        for _ in range(2):
            run(chatty, tokenizer, plan(tmp_path, publish_data="user/chats"), said.append, **hub_options)
        files, commits = hub.files("datasets/user/chats"), hub.commits("datasets/user/chats")
        assert len(commits) == 2  # the one that made it, and one with everything
        with pytest.raises(ValueError, match=r"made with other settings .*max_new_tokens: 12 -> 9"):
            run(chatty, tokenizer, plan(tmp_path, out=str(tmp_path / "b"), publish_data="user/chats", max_new_tokens=9),
                **hub_options)  # fmt: skip
        hub.put("datasets/user/other", {"data.csv": b"1,2"}, private=True)
        with pytest.raises(ValueError, match=r"holds another data set \(data.csv\)"):
            run(chatty, tokenizer, plan(tmp_path, out=str(tmp_path / "b"), publish_data="user/other"), **hub_options)
        hub.put("datasets/user/open", {})
        with pytest.raises(ValueError, match="exists and is public"):
            run(chatty, tokenizer, plan(tmp_path, out=str(tmp_path / "b"), publish_data="user/open"), **hub_options)
    assert not (tmp_path / "b").exists()  # all that was known before anything was made
    assert set(files) == {".gitattributes", "README.md", "recipe.yaml", "data/train-00000-of-00001.parquet"}
    assert not any(b"hf_secret" in content or str(tmp_path).encode() in content for content in files.values())
    for name, content in files.items():
        path = tmp_path / "chats" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    chats = load_dataset(str(tmp_path / "chats"), cache_dir=str(tmp_path / "cache"), split="train")
    assert chats["key"] == sorted(keys_of(tmp_path / "out" / "data")) and len(chats) == 12
    assert chats[0]["messages"][-1]["role"] == "assistant" and chats[0]["messages"][-1]["content"]
    data_card = DatasetCard.load(tmp_path / "chats" / "README.md")
    assert data_card.data.size_categories == "n<1K" and "| chats | 12, " in data_card.text
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.datasets == ["user/chats"] and any("chats sent" in line for line in said)


def test_chats_that_were_given_with_their_answers_are_not_published(chatty, tokenizer, tmp_path):
    lines = [{"messages": [{"role": "user", "content": f"w{i}"}, {"role": "assistant", "content": "w2 w3 w4"}]}
             for i in range(8)]  # fmt: skip
    given = tmp_path / "given.jsonl"
    given.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match="--publish-data sends the chats that the target answers"):
        run(chatty, tokenizer, plan(tmp_path, prompts=[str(given)], publish_data="user/chats"))
    assert not (tmp_path / "out").exists()


def test_the_hub_is_asked_before_hours_are_spent(chatty, tokenizer, tmp_path, monkeypatch):
    with own_hub(monkeypatch), pytest.raises(OSError, match="401"):
        run(chatty, tokenizer, plan(tmp_path), push_to_hub=True, hub_token="hf_wrong")
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_no_number_stops_and_keeps_the_checkpoint(chatty, tokenizer, tmp_path, monkeypatch):
    from hf_hsdraft.training.loss import objectives

    def diverges(logits, teacher):
        scale = math.nan if torch.is_grad_enabled() and len(calls) > 4 else 1.0
        calls.append(None)
        return objectives.forward_kl(logits, teacher) * scale

    calls: list[None] = []
    monkeypatch.setitem(objectives.OBJECTIVES, "forward_kl", objectives.Objective(diverges))
    with pytest.raises(TrainingDiverged, match=r"loss is nan at step 2: .*--init-from"):
        run(chatty, tokenizer, plan(tmp_path))
    checkpoint = HSDrafter.from_pretrained(tmp_path / "out" / "checkpoints" / "checkpoint-2")
    assert all(bool(torch.isfinite(value).all()) for value in checkpoint.state_dict().values())


def clock_of(out: Path) -> dict:
    """What the last checkpoint says of the time budget."""
    states = sorted((out / "checkpoints").glob("*/trainer_state.json"), key=lambda path: int(path.parent.name[11:]))
    return json.loads(states[-1].read_text())["stateful_callbacks"]["TimeBudget"]["attributes"]


@pytest.fixture
def clock(monkeypatch):
    """Lets each look at the clock take a second."""
    from hf_hsdraft.training.loop import budget

    now = iter(range(10**6))
    monkeypatch.setattr(budget.time, "monotonic", lambda: float(next(now)))
    end_briefly(monkeypatch)
    return now


def test_training_by_the_clock_ends_and_resumes(chatty, tokenizer, tmp_path, clock):
    timed = {"max_training_minutes": 1.0, "eval_steps": 3, "eval_new_tokens": 6, "logging_steps": 1}
    begins: list[int] = []
    say = lambda line: begins.append(next(clock)) if "minutes begin" in line else None  # noqa: E731
    train(chatty, tokenizer, plan(tmp_path), timed, report=Reporter(say, every=1e9))
    spent = clock_of(tmp_path / "out")["spent"]
    assert 30.0 < spent < 60.0 and clock_of(tmp_path / "out")["ended"] == 1.0  # the rest is for what follows
    assert next(clock) - begins[0] < 80
    states = list((tmp_path / "out" / "checkpoints").glob("*/trainer_state.json"))
    rates = [entry["learning_rate"] for entry in figures_of(tmp_path / "out") if "loss" in entry]
    assert rates[-1] < 0.1 * max(rates)
    assert decodes_as_plain(chatty, HSDrafter.from_pretrained(tmp_path / "out"))
    said: list[str] = []
    train(chatty, tokenizer, plan(tmp_path), timed, report=said.append)
    assert said == ["already finished: max_training_minutes 1"]
    shutil.rmtree(tmp_path / "out" / "data")  # killed before the drafter was saved
    (tmp_path / "out" / "finished.json").unlink()
    steps = steps_done(tmp_path / "out")
    train(chatty, tokenizer, plan(tmp_path), timed, report=lambda _: None)
    assert len(list((tmp_path / "out" / "checkpoints").glob("*/trainer_state.json"))) == len(states)
    assert steps_done(tmp_path / "out") == steps
    train(chatty, tokenizer, plan(tmp_path), {**timed, "max_training_minutes": 2.0}, report=lambda _: None)  # goes on
    assert steps_done(tmp_path / "out") > steps and clock_of(tmp_path / "out")["spent"] > 60.0
    with pytest.raises(ValueError, match="warmup_steps would have no effect"):
        train(chatty, tokenizer, plan(tmp_path), {**timed, "warmup_steps": 3}, report=lambda _: None)


def test_an_evaluation_fits_into_a_short_time_and_measures_as_much_each_time(chatty, tokenizer, tmp_path, clock):
    """In half a minute there is time for a part of the evaluation alone, and the figures say so."""
    planned = plan(tmp_path, eval_conversations=9, eval_prompts=8)
    said: list[str] = []
    timed = {"max_training_minutes": 0.5, "eval_steps": 2, "eval_new_tokens": 6, "per_device_eval_batch_size": 1}
    train(chatty, tokenizer, planned, timed, report=said.append)
    measured = clock_of(tmp_path / "out")["measured"]
    assert 1 <= measured["batches"] < 9 and 1 <= measured["prompts"] < 8
    held_out = json.loads((tmp_path / "out" / "figures.json").read_text())["training"]["held_out"]
    assert held_out.startswith(f"{measured['batches']} conversations; tau: {measured['prompts']} prompts")
    count = measured["batches"] + measured["prompts"]
    amount = f"evaluating: {count}/{count} conversations and prompts, step "
    lines = [line for line in said if line.startswith(amount) and "tau" in line]
    assert lines and all("of 17 as many as the time budget has room for" in line for line in lines)
    train(chatty, tokenizer, planned, {**timed, "max_training_minutes": 1.0}, report=lambda _: None)
    assert clock_of(tmp_path / "out")["measured"] == measured


def test_the_figures_of_the_saved_drafter_are_not_measured_twice(chatty, tokenizer, tmp_path, monkeypatch):
    from hf_hsdraft.training.loop import trainer

    values = iter([3.0, 2.0, 1.0])
    monkeypatch.setattr(
        trainer.DraftStatistics, "tau", property(lambda _: next(values))
    )  # raises an error at a fourth evaluation
    run(chatty, tokenizer, plan(tmp_path), max_steps=6)
    found = [entry["eval_tau"] for entry in figures_of(tmp_path / "out") if "eval_tau" in entry]
    assert found == [3.0, 2.0, 1.0, 3.0]


def test_invented_chats_are_of_the_kinds_asked_for(chatty, tokenizer, tmp_path, monkeypatch):
    from hf_hsdraft.training.data import generating, inventing

    asked = plan(tmp_path, prompts=[], num_prompts=12, kinds={"mathematics": 1.0, "writing": 2.0}, max_length=200)
    run(chatty, tokenizer, asked)
    rows = list(RowFolder(tmp_path / "out" / "data").rows())
    assert Counter(row["category"] for row in rows) == {"mathematics": 4, "writing": 8}
    assert "mathematics, writing x 2" in (tmp_path / "out" / "training_recipe.json").read_text()
    for place, name in ((generating.TargetWriter, "reply"), (inventing._Writer, "prompts")):
        monkeypatch.setattr(place, name, lambda *_: pytest.fail("made again"))
    (tmp_path / "out" / "finished.json").unlink()
    run(chatty, tokenizer, asked)
    with pytest.raises(ValueError, match="kinds: "):
        run(chatty, tokenizer, replace(asked, kinds={"mathematics": 1.0}), max_steps=6)


def test_every_stage_of_a_run_says_how_far_it_is(trained):
    said = trained.said
    assert any("GB on disk" in line for line in said)
    for line in (
        "answering: 0/12 prompts",
        "taps: 0/1 files",
        "training: 0/4 steps",
        "evaluating: 0/4 conversations and prompts",
        "drawing: 0/3 pictures",
    ):
        name = line.split(":")[0]
        assert line in said
        assert any(other.startswith(f"{name}: ") and "; took" in other for other in said)
    assert any(line.startswith("training: 3/4 steps, loss") and line.endswith(" left") for line in said)
    assert any(line.startswith("evaluating: 4/4 ") and "tau" in line and "step 4" in line for line in said)


def test_epochs_and_their_end(chatty, tokenizer, tmp_path, monkeypatch):
    """Nine conversations to learn from, two a step."""
    end_briefly(monkeypatch)
    for epochs, steps in ((1.0, 5), (1.0, 5), (2.0, 10)):
        arguments = {"num_train_epochs": epochs, "eval_steps": 5, "eval_new_tokens": 4}
        train(chatty, tokenizer, plan(tmp_path), arguments, report=lambda _: None)
        assert steps_done(tmp_path / "out") == steps


def test_training_stops_when_tau_does_not_grow(chatty, tokenizer, tmp_path, monkeypatch):
    from hf_hsdraft.training.loop import trainer

    monkeypatch.setattr(trainer.DraftStatistics, "tau", 1.0)
    for _ in range(2):  # the second time it is finished
        run(chatty, tokenizer, plan(tmp_path), max_steps=40, early_stopping_patience=2)
        assert steps_done(tmp_path / "out") == 6


def test_training_that_decoding_does_not_use_is_stopped(chatty, tokenizer, tmp_path, monkeypatch):
    """The shift is in training alone, so nothing but the comparison could tell."""
    from hf_hsdraft.training.evaluate import parity
    from hf_hsdraft.training.loop import trainer
    from hf_hsdraft.training.loss import chains as chain_module

    def shifted(pack, chains, steps):
        labels = chain_module.true_labels(pack, chains, steps)
        return replace(labels, tokens=labels.tokens.roll(1, dims=1))

    monkeypatch.setattr(trainer, "true_labels", shifted)
    with pytest.raises(parity.ParityError, match="off by one"):
        run(chatty, tokenizer, plan(tmp_path), eval_new_tokens=12, learning_rate=0.05)


@needs_peft
def test_lora_is_a_peft_adapter_that_switches_per_call(chatty, tokenizer, tmp_path, finished):
    finished.rename(tmp_path / "base")
    base = HSDrafter.from_pretrained(tmp_path / "base")
    adapted = run(
        chatty, tokenizer, plan(tmp_path, init_from=str(tmp_path / "base"), lora=2, drafter={}), learning_rate=0.05
    )
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= files and "model.safetensors" not in files
    assert 'drafter.load_adapter("out")' in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(ValueError, match="leave tree_size out"):
        other = plan(
            tmp_path, init_from=str(tmp_path / "base"), lora=2, drafter={"tree_size": 9}, out=str(tmp_path / "x")
        )
        run(chatty, tokenizer, other)
    inputs = torch.randn(3, base.fuse.in_features // 4 * 3), torch.randn(3, 32), torch.arange(3)

    def drafted(model) -> torch.Tensor:
        with torch.no_grad():
            return model.float()(*inputs).hidden_states[-1]

    plain = drafted(base)
    assert not torch.allclose(drafted(adapted), plain)
    assert decodes_as_plain(chatty, adapted)
    adapted.disable_adapters()
    torch.testing.assert_close(drafted(adapted), plain)
    adapted.enable_adapters()
    assert not torch.allclose(drafted(adapted), plain)


def test_adapters_with_names_are_loaded_beside_each_other(chatty, tokenizer, tmp_path, finished):
    finished.rename(tmp_path / "base")
    for name, seed in (("code", 1), ("chat", 2)):
        asked = plan(
            tmp_path, init_from=str(tmp_path / "base"), lora=2, adapter_name=name, drafter={}, out=str(tmp_path / name)
        )
        adapted = run(chatty, tokenizer, asked, learning_rate=0.05, seed=seed)
        assert adapter_names(adapted) == [name]
        files = {path.name for path in (tmp_path / name / name).iterdir()}
        assert {"adapter_config.json", "adapter_model.safetensors", "README.md", "figures.json"} <= files
        assert not (tmp_path / name / "README.md").exists()
        card = (tmp_path / name / name / "README.md").read_text()
        assert f'drafter.load_adapter("{name}", adapter_name="{name}")' in card
    shutil.copytree(tmp_path / "chat/chat", tmp_path / "code/chat")
    drafter = HSDrafter.from_pretrained(tmp_path / "base", dtype=torch.float32)
    inputs = torch.randn(3, drafter.fuse.in_features // 4 * 3), torch.randn(3, 32), torch.arange(3)
    found = []
    with torch.no_grad():
        found.append(drafter(*inputs).hidden_states[-1])
        for name in ("code", "chat"):
            drafter.load_adapter(str(tmp_path / "code"), adapter_name=name)
            alone = HSDrafter.from_pretrained(tmp_path / "base", dtype=torch.float32)
            alone.load_adapter(str(tmp_path / name / name))
            found.append(alone(*inputs).hidden_states[-1])
        for name, expected in zip(("", "code", "chat"), found, strict=True):
            torch.testing.assert_close(adapted_by(drafter, name)(*inputs).hidden_states[-1], expected)
            drafter.generation_config.adapter_name = name
            assert decodes_as_plain(chatty, drafter)
    assert not torch.allclose(found[0], found[1]) and not torch.allclose(found[1], found[2])
    with pytest.raises(ValueError, match="not found"):
        drafter.load_adapter(str(tmp_path / "code"), adapter_name="law")


def test_a_run_keeps_its_folder_to_itself(chatty, tokenizer, tmp_path, finished):
    def told(line: str) -> None:
        if line.startswith("drafter of"):  # in the middle of it
            with pytest.raises(RuntimeError, match="another run is at work"):
                run(chatty, tokenizer, plan(tmp_path))
            seen.append(line)

    seen: list[str] = []
    run(chatty, tokenizer, plan(tmp_path), told, max_steps=6)
    assert seen


@needs_peft
def test_the_best_checkpoint_of_a_named_adapter_is_loaded(tmp_path):
    model = with_lora(make_drafter(make_target()), 2, "code")
    weights = [part for name, part in model.named_parameters() if "lora_B" in name]
    for weight, value in ((part, value) for value in (1.0, 9.0) for part in weights):
        if value == 9.0 and not (tmp_path / "checkpoint-1").is_dir():
            model.save_pretrained(tmp_path / "checkpoint-1")
        torch.nn.init.constant_(weight, value)
    trainer = SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(unwrap_model=lambda model: model),
        args=SimpleNamespace(output_dir=str(tmp_path)),
        state=SimpleNamespace(best_model_checkpoint="elsewhere/checkpoint-1"),
    )
    DrafterTrainer._load_best_model(trainer)
    assert all(bool((part == 1.0).all()) for part in weights)


@pytest.mark.parametrize("name", ["train", "keys", "training"])
def test_names_that_adapters_cannot_have_are_errors_before_any_work(name, tmp_path):
    with pytest.raises(ValueError, match="is no attribute of"):
        TrainingPlan(out=str(tmp_path), init_from="drafter", lora=2, adapter_name=name).check(1)
