"""`train()` and the commands, whole, on a tiny target with a tokenizer and chat template of its own."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, make_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from hf_hsdraft import HSDrafter
from hf_hsdraft.cli import app
from hf_hsdraft.training.answers import answer_prompts
from hf_hsdraft.training.conversations import (
    Conversation,
    Prompt,
    read_conversations,
    read_prompts,
    tokenize_conversation,
)
from hf_hsdraft.training.run import TrainingPlan, train
from hf_hsdraft.training.vocabulary import choose_draft_vocabulary, with_draft_vocabulary

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' end ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
WORDS = ["user", "assistant", "end", *(f"w{index}" for index in range(VOCAB - 5))]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="end", chat_template=TEMPLATE
    )


@pytest.fixture(scope="module")
def chatty():
    target = make_target(eos_token_id=4)
    target.generation_config.pad_token_id = 0
    return target


def write_prompts(path: Path, count: int) -> Path:
    rows = [{"turns": [f"w{index} w{2 * index + 1} w3"], "category": "ab"[index % 2]} for index in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def plan(folder: Path, **overrides) -> TrainingPlan:
    fields = {
        "prompts": [str(write_prompts(folder / "prompts.jsonl", 12))],
        "out": str(folder / "out"),
        "max_steps": 4,
        "eval_steps": 2,
        "eval_conversations": 3,
        "eval_prompts": 2,
        "eval_new_tokens": 6,
        "max_new_tokens": 12,
        "answer_batch_size": 5,
        "logging_steps": 1,
        "drafter": {"num_draft_steps": 3, "tree_size": 6, "injector_rank": 8, "draft_vocab_size": 40},
    }
    return TrainingPlan(**{**fields, **overrides})


def test_training_ends_with_a_drafter_that_loads_and_decodes(chatty, tokenizer, tmp_path):
    lines: list[str] = []
    train(chatty, tokenizer, plan(tmp_path), report=lines.append)
    drafter = HSDrafter.from_pretrained(tmp_path / "out")
    assert drafter.dtype == torch.bfloat16 and len(drafter.config.draft_vocab_ids) == 40
    assert 4 in drafter.config.draft_vocab_ids  # the end of a turn can be drafted
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = chatty.generate(ids, max_new_tokens=12, do_sample=False)
    drafted = chatty.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=drafter)
    assert drafted.tolist() == plain.tolist()
    assert any("cover" in line for line in lines)


def test_a_killed_run_resumes_where_it_was(chatty, tokenizer, tmp_path, monkeypatch):
    """The second run answers nothing anew, computes no features and goes on at the checkpoint."""
    from hf_hsdraft.training import features, trainer

    original = trainer.DrafterTrainer.compute_loss
    steps: list[int] = []

    def dies_at_step_three(self, *args, **kwargs):
        steps.append(self.state.global_step)
        if self.state.global_step == 3 and len(steps) == 4:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    monkeypatch.setattr(trainer.DrafterTrainer, "compute_loss", dies_at_step_three)
    with pytest.raises(KeyboardInterrupt):
        train(chatty, tokenizer, plan(tmp_path), report=lambda _: None)
    answers = (tmp_path / "out" / "answers.jsonl").read_text()
    assert len(answers.splitlines()) == 12
    monkeypatch.setattr(features, "_write_shard", lambda *_: pytest.fail("features were computed again"))
    steps.clear()
    train(chatty, tokenizer, plan(tmp_path), report=lambda _: None)
    assert steps == [2, 3]
    assert (tmp_path / "out" / "answers.jsonl").read_text() == answers
    steps.clear()
    train(chatty, tokenizer, plan(tmp_path), report=lambda _: None)
    assert not steps  # a finished run is finished


def test_a_run_is_not_resumed_with_other_settings(chatty, tokenizer, tmp_path):
    """Other data would give the checkpoint's rows another draft vocabulary."""
    train(chatty, tokenizer, plan(tmp_path), report=lambda _: None)
    changed = plan(tmp_path, learning_rate=0.5)
    with pytest.raises(ValueError, match=r"learning_rate: 0\.0006 -> 0\.5"):
        train(chatty, tokenizer, changed, report=lambda _: None)
    write_prompts(tmp_path / "prompts.jsonl", 13)
    with pytest.raises(ValueError, match="prompt_digests"):
        train(chatty, tokenizer, TrainingPlan(**{**vars(changed), "learning_rate": 6e-4}), report=lambda _: None)


def test_a_drafter_to_start_from_keeps_its_own_sizes(chatty, tokenizer, tmp_path):
    from conftest import make_drafter

    make_drafter(chatty, target_tap_layers=[1, 3], num_draft_steps=2, tree_size=4).save_pretrained(tmp_path / "first")
    start = str(tmp_path / "first")
    with pytest.raises(ValueError, match="num_draft_steps=2"):
        train(chatty, tokenizer, plan(tmp_path, init_from=start), report=lambda _: None)
    continued = plan(tmp_path, init_from=start, drafter={}, out=str(tmp_path / "second"))
    drafter = train(chatty, tokenizer, continued, report=lambda _: None)
    assert drafter.config.target_tap_layers == [1, 3] and drafter.config.num_draft_steps == 2


def test_a_drafter_to_start_from_may_change_its_vocabulary(chatty, tokenizer, tmp_path):
    from conftest import make_drafter

    make_drafter(chatty, draft_vocab_size=20, draft_vocab_ids=range(20)).save_pretrained(tmp_path / "first")
    wider = plan(tmp_path, init_from=str(tmp_path / "first"), drafter={"draft_vocab_size": 40})
    drafter = train(chatty, tokenizer, wider, report=lambda _: None)
    assert drafter.config.draft_vocab_size == len(drafter.config.draft_vocab_ids) == 40
    assert HSDrafter.from_pretrained(tmp_path / "out").draft_vocab_ids().tolist() == drafter.config.draft_vocab_ids


@pytest.mark.parametrize("head", ["target", "trained"])
def test_a_new_vocabulary_keeps_what_was_learned(chatty, head):
    """Old rows stay as they are; new ones follow the map from the target's rows that explains the old ones."""
    from conftest import make_drafter

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
    from hf_hsdraft.training import trainer

    seen = []
    compute = trainer.chain_loss

    def spied(drafter, *args, **kwargs):
        seen.append((torch.is_autocast_enabled("cpu"), drafter.fuse.weight.dtype))
        return compute(drafter, *args, **kwargs)

    monkeypatch.setattr(trainer, "chain_loss", spied)
    drafter = train(chatty, tokenizer, plan(tmp_path, bf16=True), report=lambda _: None)
    assert set(seen) == {(True, torch.float32)}
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = chatty.generate(ids, max_new_tokens=12, do_sample=False)
    assert chatty.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=drafter).tolist() == plain.tolist()


def test_settings_may_be_corrected_until_something_was_trained(chatty, tokenizer, tmp_path, monkeypatch):
    """Answers are the expensive part: a mistake in the drafter's sizes or the learning rate must not cost them."""
    from hf_hsdraft.training import run

    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(run, "_fit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            train(chatty, tokenizer, plan(tmp_path), report=lambda _: None)
    answers = (tmp_path / "out" / "answers.jsonl").read_text()
    with pytest.raises(ValueError, match="max_new_tokens: 12 -> 9"):
        train(chatty, tokenizer, plan(tmp_path, max_new_tokens=9), report=lambda _: None)
    sizes = {"num_draft_steps": 2, "tree_size": 4, "injector_rank": 8, "draft_vocab_size": 30}
    drafter = train(chatty, tokenizer, plan(tmp_path, drafter=sizes, learning_rate=1e-3), report=lambda _: None)
    assert drafter.config.num_draft_steps == 2
    assert (tmp_path / "out" / "answers.jsonl").read_text() == answers


def test_more_data_never_holds_out_what_was_learned(tmp_path):
    """A drafter that goes on from another one's run must not be judged by chats which that one trained on."""
    from hf_hsdraft.training.run import _conversations

    chats = [Conversation((("user", f"w{index}"), ("assistant", f"w{index + 1}"))) for index in range(60)]
    ordered = [
        _conversations(None, None, plan(tmp_path), part, [], tmp_path, lambda _: None)
        for part in (chats[:35], chats[::-1])
    ]
    learned_first, held_out_later = ordered[0][10:], ordered[1][:10]
    assert not set(learned_first) & set(held_out_later)
    assert sorted(ordered[1], key=chats.index) == chats
    assert ordered[1] != chats


def test_half_written_checkpoints_are_passed_over(chatty, tokenizer, tmp_path):
    train(chatty, tokenizer, plan(tmp_path), report=lambda _: None)
    checkpoints = tmp_path / "out" / "checkpoints"
    (checkpoints / "checkpoint-4" / "trainer_state.json").unlink()
    train(chatty, tokenizer, plan(tmp_path, max_steps=6), report=lambda _: None)
    assert (checkpoints / "checkpoint-6" / "trainer_state.json").exists()


def test_a_run_killed_before_its_drafter_is_saved_is_not_finished(chatty, tokenizer, tmp_path, monkeypatch):
    train(chatty, tokenizer, plan(tmp_path), report=lambda _: None)

    def interrupted(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("hf_hsdraft.training.run._write_json", lambda *_: None)
        patch.setattr(HSDrafter, "save_pretrained", interrupted)
        patch.setattr("hf_hsdraft.training.run._fit", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            train(chatty, tokenizer, plan(tmp_path, max_steps=8), report=lambda _: None)
    said = []
    train(chatty, tokenizer, plan(tmp_path, max_steps=8), report=said.append)
    assert not any("already finished" in line for line in said)
    said.clear()
    train(chatty, tokenizer, plan(tmp_path, max_steps=8), report=said.append)
    assert said == ["already finished: 8 of 8 steps"]


def test_targets_that_cannot_be_drafted_for_are_not_trained_for(chatty, tokenizer, tmp_path):
    """Before a single answer is generated."""
    from conftest import make_target

    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with pytest.raises(ValueError, match="rotary frequencies"):
        train(make_target(rope_parameters=dynamic), tokenizer, plan(tmp_path), report=lambda _: None)
    with pytest.raises(ValueError, match="tree_size=6"):
        sizes = {"num_draft_steps": 30, "tree_size": 6}
        train(chatty, tokenizer, plan(tmp_path, drafter=sizes), report=lambda _: None)
    assert not (tmp_path / "out").exists()


def test_the_target_of_a_run_cannot_change(chatty, tokenizer, tmp_path):
    train(chatty, tokenizer, plan(tmp_path), report=lambda _: None)
    with pytest.raises(ValueError, match="target: "):
        train(make_target(eos_token_id=4, seed=5), tokenizer, plan(tmp_path, max_steps=6), report=lambda _: None)


@pytest.mark.parametrize(
    "sizes", [{"head": "trained"}, {"head": "trained", "hidden_size": 16, "num_attention_heads": 2}]
)
def test_trained_heads(chatty, tokenizer, tmp_path, sizes):
    overrides = {"num_draft_steps": 2, "tree_size": 6, "injector_rank": 8, "draft_vocab_size": 40, "head_dim": 8}
    overrides |= {"num_key_value_heads": 1, **sizes}
    drafter = train(chatty, tokenizer, plan(tmp_path, drafter=overrides), report=lambda _: None)
    loaded = HSDrafter.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded.lm_head.weight, drafter.lm_head.weight)
    ids = torch.tensor([[5, 6, 7, 8]])
    plain = chatty.generate(ids, max_new_tokens=12, do_sample=False)
    assert chatty.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=loaded).tolist() == plain.tolist()


def test_targets_with_scaled_logits_are_not_taught_wrongly(tokenizer, tmp_path):
    from transformers import AutoModelForCausalLM, GraniteConfig

    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, logits_scaling=8.0, initializer_range=0.3, pad_token_id=0, eos_token_id=4,
    )  # fmt: skip
    with pytest.raises(ValueError, match="scale, cap or bias"):
        train(AutoModelForCausalLM.from_config(config).eval(), tokenizer, plan(tmp_path), report=lambda _: None)


def test_answers_survive_a_torn_line_without_loss_or_doubles(chatty, tokenizer, tmp_path):
    prompts = [Prompt(f"p:{index}", (f"w{index} w1",)) for index in range(7)]
    path = tmp_path / "answers.jsonl"
    answer_prompts(chatty, tokenizer, prompts[:4], path, max_new_tokens=5, batch_size=2)
    complete = path.read_bytes()
    path.write_bytes(complete + b'{"key": "p:5", "mess')
    assert answer_prompts(chatty, tokenizer, prompts, path, max_new_tokens=5, batch_size=2) == 7
    keys = [json.loads(line)["key"] for line in path.read_text().splitlines()]
    assert sorted(keys) == [prompt.key for prompt in prompts]
    assert path.read_bytes().startswith(complete)


def test_answers_without_a_padding_token(chatty, tokenizer, tmp_path):
    """Llama's and Mistral's tokenizers have none; batches are padded with the end of the turn then."""
    bare = copy.deepcopy(tokenizer)
    bare.pad_token = None
    prompts = read_prompts(write_prompts(tmp_path / "prompts.jsonl", 5))
    rows = []
    for name, each in (("bare", bare), ("padded", tokenizer)):
        answer_prompts(chatty, each, prompts, tmp_path / name, temperatures=(0.0,), max_new_tokens=8, batch_size=5)
        rows.append((tmp_path / name).read_text())
    assert rows[0] == rows[1]
    assert bare.pad_token is None


def test_greedy_answers_are_the_targets_own(chatty, tokenizer, tmp_path):
    """Batched and padded, each answer is what the target says to that prompt alone."""
    prompts = [Prompt(f"p:{index}", (" ".join(f"w{n}" for n in range(index + 1)),)) for index in range(5)]
    path = tmp_path / "answers.jsonl"
    answer_prompts(chatty, tokenizer, prompts, path, temperatures=(0.0,), max_new_tokens=10, batch_size=5)
    for row in map(json.loads, path.read_text().splitlines()):
        ids = tokenizer.apply_chat_template(
            row["messages"][:1], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        alone = chatty.generate(ids, max_new_tokens=10, do_sample=False)[0, ids.shape[1] :]
        assert row["messages"][1]["content"] == tokenizer.decode(alone, skip_special_tokens=True).strip()


def test_only_the_assistants_tokens_are_learned(tokenizer):
    chat = Conversation((("user", "w1 w2"), ("assistant", "w3 w4"), ("user", "w5"), ("assistant", "w6")))
    tokenized = tokenize_conversation(tokenizer, chat, 100)
    text = tokenizer.convert_ids_to_tokens(tokenized.input_ids.tolist())
    learned = [word for word, mine in zip(text, tokenized.answer_mask.tolist(), strict=True) if mine]
    assert learned == ["w3", "w4", "end", "w6", "end"]


def test_the_draft_vocabulary_is_the_most_frequent_answers(tokenizer):
    chats = [Conversation((("user", "w9 w9 w9 w9"), ("assistant", "w1 w1 w1 w2 w2 w3")))]
    tokenized = [tokenize_conversation(tokenizer, chat, 100) for chat in chats]
    chosen = choose_draft_vocabulary(tokenized, VOCAB, 3, always=[0])
    w1, w2 = tokenizer.convert_tokens_to_ids(["w1", "w2"])
    assert chosen.ids == [0, w1, w2]
    assert chosen.coverage == pytest.approx(5 / 7)  # six words and the end of the turn


@pytest.mark.parametrize(
    ("line", "expected"),
    [("{oops", "line 2: not valid JSON"), ("[1]", "a JSON object"), ('{"turns": []}', "non-empty"), ("{}", "`turns`")],
)
def test_bad_prompt_files_name_file_and_line(tmp_path, line, expected):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"turns": ["w1"]}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2") as error:
        read_prompts(path)
    assert expected in str(error.value)


def test_bad_conversations_are_refused(tmp_path):
    path = tmp_path / "bad.jsonl"
    for row, expected in (
        ({"messages": [{"role": "user"}]}, "`role` and `content`"),
        ({"messages": [{"role": "user", "content": "w1"}]}, "nothing to learn from"),
    ):
        path.write_text(json.dumps(row))
        with pytest.raises(ValueError, match=expected):
            read_conversations(path)


@pytest.fixture
def saved(chatty, tokenizer, tmp_path) -> Path:
    chatty.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path


def test_commands_train_bench_and_demo(saved):
    runner = CliRunner()
    prompts = str(write_prompts(saved / "prompts.jsonl", 10))
    target, drafter = str(saved / "target"), str(saved / "drafter")
    arguments = ["--target", target, "--prompts", prompts, "--out", drafter, "--max-steps", "2", "--eval-steps", "2"]
    arguments += [
        "--eval-conversations",
        "2",
        "--eval-prompts",
        "1",
        "--max-new-tokens",
        "10",
        "--num-draft-steps",
        "3",
    ]
    result = runner.invoke(app, ["train", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    report = saved / "bench.json"
    common = ["--target", target, "--drafter", drafter, "--max-new-tokens", "12"]
    arguments = [
        "--prompts",
        prompts,
        "--limit",
        "4",
        "--json",
        str(report),
        "--variants",
        "tree8x2,chain+resample,lookup",
    ]
    result = runner.invoke(app, ["bench", *common, *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    figures = json.loads(report.read_text())
    assert figures["summary"]["plain"]["tau"] == 1.0
    assert figures["summary"]["tree8x2"]["identical"] == 4 == figures["settings"]["questions"]
    assert set(figures["summary"]) == {"plain", "tree8x2", "chain+resample", "prompt lookup (transformers)"}
    assert sorted(figures["categories"]) == ["a", "a", "b", "b"]
    result = runner.invoke(app, ["demo", "w1 w2 w3", *common], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "same text      yes" in result.output and "tau" in result.output


def test_bench_refuses_unknown_variants(saved, chatty):
    from conftest import make_drafter

    make_drafter(chatty).save_pretrained(saved / "drafter")
    prompts = str(write_prompts(saved / "prompts.jsonl", 2))
    arguments = ["--target", str(saved / "target"), "--drafter", str(saved / "drafter"), "--prompts", prompts]
    result = CliRunner().invoke(app, ["bench", *arguments, "--variants", "forest"])
    assert result.exit_code != 0
    assert "forest" in str(result.exception) + result.output
    for wrong, expected in ((["--variants", "tree,tree"], "twice"), (["--json", "missing/x.json"], "no such folder")):
        result = CliRunner().invoke(app, ["bench", *arguments, *wrong])
        assert result.exit_code != 0
        assert expected in str(result.exception) + result.output
