"""GRPO of TRL with a drafter: the same training as without one, tau in the logs, and a drafter that learns along."""

import copy
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from conftest import make_drafter, make_target
from torch.nn.utils.rnn import pad_sequence
from transformers import TrainerCallback

from hf_hsdraft import DraftStatistics, attach
from hf_hsdraft.drafters.hidden_state.quick_weights import quick_weights
from hf_hsdraft.methods.co_training.co_training import CoTraining
from hf_hsdraft.methods.co_training.drafting_log import DraftingLog, log_drafting

STEPS = 3
NEW = 8
needs_trl = pytest.mark.skipif(find_spec("trl") is None, reason="trl is missing: pip install -e '.[trl]'")


def policy(**overrides):
    target = make_target(eos_token_id=4, tie_word_embeddings=True, **overrides)
    target.generation_config.pad_token_id = 0
    return target


def reward_even(completion_ids, **kwargs):
    """The share of tokens with an even number."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def trainer_of(target, tokenizer, folder, reward=reward_even, lora=False, callbacks=None, **overrides):
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    fields = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_generations": 2}
    fields |= {"max_completion_length": NEW, "max_steps": STEPS, "learning_rate": 0.05, "logging_steps": 1}
    fields |= {"bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
    rows = [
        {"prompt": [{"role": "user", "content": " ".join(f"w{n * k + k}" for k in range(1, n + 2))}]} for n in (1, 4)
    ]
    return GRPOTrainer(
        target,
        reward,
        args=GRPOConfig(output_dir=str(folder), **{**fields, **overrides}),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=callbacks,
        peft_config=LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"]) if lora else None,
    )


def row_by_row(generate):
    """A plain `generate` of batches in which each row draws by the seed that the row of a drafted batch gets."""

    def call(input_ids, attention_mask, generation_config):
        seeds = torch.randint(2**63 - 1, (len(input_ids),)).tolist()
        after, texts = torch.get_rng_state(), []
        for row, seed in enumerate(seeds):
            torch.manual_seed(seed)
            inputs = {"input_ids": input_ids[row : row + 1], "attention_mask": attention_mask[row : row + 1]}
            texts += generate(**inputs, generation_config=generation_config)
        torch.set_rng_state(after)
        return pad_sequence(texts, batch_first=True, padding_value=0)

    return call


def rewards(trainer) -> list[float]:
    history = trainer.state.log_history
    return [entry[name] for entry in history for name in ("reward", "eval_reward") if name in entry]


@needs_trl
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lora": True},
        {
            "optim": "adafactor",  # it writes to `.data`
            "beta": 0.0,
            "temperature": 0.7,
            "top_k": 20,
            "gradient_checkpointing": False,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 2,
        },
    ],
    ids=["full", "lora", "adafactor, accumulated"],
)
def test_training_with_a_drafter_is_training_without(tokenizer, tmp_path, options):
    """Every roll-out, every log-probability and every update: the trained weights are the same to the last bit."""
    options = {"eval_strategy": "steps", "eval_steps": 2, **options}
    plain, drafted = policy(), policy()
    start = copy.deepcopy(plain.state_dict())
    plain.generate = row_by_row(plain.generate)
    without = trainer_of(plain, tokenizer, tmp_path, **options)
    without.train()
    drafter = make_drafter(drafted)
    with_drafter = trainer_of(drafted, tokenizer, tmp_path, **options)
    attachment = attach(with_drafter.model, drafter)
    with_drafter.train()
    assert rewards(with_drafter) == rewards(without) and len(set(rewards(without))) > 1
    trained, expected = drafted.state_dict(), plain.state_dict()
    assert all(torch.equal(trained[name], expected[name]) for name in expected)
    assert any(not torch.equal(expected[name], start.get(name, torch.empty(0))) for name in expected)
    done = attachment.statistics
    assert done.calls >= STEPS + 1 and not done.stepped_aside and done.accepted_tokens > 0


class Watching:
    """A `generate()` that first asks something about the model at that moment, without drawing numbers."""

    def __init__(self, target, ask):
        self.generate, self.ask, self.answers = target.generate, ask, []
        target.generate = self

    def __call__(self, **inputs):
        self.answers.append(self.ask(inputs))
        return self.generate(**inputs)


def fixed(drafter):
    """Drafts that depend on the weights alone: not on earlier texts, nor on n-grams."""
    drafter.generation_config.tree_sizing, drafter.generation_config.ngram_length = "fixed", 0
    return drafter


@needs_trl
def test_drafts_follow_the_weights(tokenizer, tmp_path):
    """At every step, greedy texts and drafts are those of a new model and a new drafter with the same weights."""
    target = policy()
    drafter = fixed(make_drafter(target))
    trainer = trainer_of(target, tokenizer, tmp_path)
    attachment = attach(target, drafter)
    generate = target.generate

    def ask(inputs):
        call = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
        call |= {"do_sample": False, "max_new_tokens": 16, "eos_token_id": None}
        fresh = policy()
        fresh.load_state_dict(target.state_dict())
        plain = fresh.generate(**call).tolist()
        new = attach(fresh, fixed(make_drafter(fresh)))
        assert fresh.generate(**call).tolist() == plain
        assert target.training
        for mode in (False, True):
            target.train(mode)
            assert generate(**call).tolist() == plain
            assert attachment.last.accepted_lengths == new.last.accepted_lengths
        head = target.get_output_embeddings()
        hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
        kept = quick_weights(drafter, target.get_input_embeddings(), head).logits(hidden)
        torch.testing.assert_close(kept, drafter.norm(hidden) @ head.weight.T, atol=1e-4, rtol=1e-4)
        return plain, sum(new.last.accepted_lengths)

    seen = Watching(target, torch.no_grad()(ask)).answers
    trainer.train()
    assert len(seen) == STEPS and seen[0][0] != seen[-1][0] and sum(accepted for _, accepted in seen)


class Reporter(TrainerCallback):
    """Sees what wandb and others see."""

    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


@needs_trl
def test_tau_is_in_the_logs(tokenizer, tmp_path):
    target, reporter = policy(), Reporter()
    counts = []

    def reward(completion_ids, **kwargs):
        counts.append((trainer.model.training, attachment.statistics))
        return reward_even(completion_ids)

    options = {"eval_strategy": "steps", "eval_steps": 1, "logging_steps": 2, "max_steps": 4}
    trainer = trainer_of(target, tokenizer, tmp_path, reward, callbacks=[reporter], **options)
    attachment = attach(target, make_drafter(target))
    log_drafting(trainer, attachment)
    trainer.train()
    before, expected, tokens, forwards = DraftStatistics.sum(), [], 0, 0
    for training, now in counts:
        if training:
            tokens += now.new_tokens - before.new_tokens
            forwards += now.row_forwards - before.row_forwards
            expected.append((tokens, forwards))
        before = now
    pairs = [expected[1], (expected[3][0] - expected[1][0], expected[3][1] - expected[1][1])]
    for logs in (reporter.logs, trainer.state.log_history):
        assert [entry["hsdraft/tau"] for entry in logs if "reward" in entry] == [new / row for new, row in pairs]
        assert not any("hsdraft/tau" in entry for entry in logs if "eval_reward" in entry)


@needs_trl
def test_roll_outs_by_continuous_batching_are_drafted(tokenizer, tmp_path):
    """Each is what `generate()` draws by its seed; weights that a step has changed are read anew."""
    target, seen = policy(), []

    def reward(prompts, completion_ids, **kwargs):
        texts = [tokenizer.apply_chat_template(one, add_generation_prompt=True)["input_ids"] for one in prompts]
        seen.append((sorted(zip(texts, completion_ids, strict=True)), copy.deepcopy(target.state_dict())))
        return reward_even(completion_ids)

    options = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": {"seed": 23}}
    trainer = trainer_of(target, tokenizer, tmp_path, reward, **options)
    attachment = attach(target, make_drafter(target))
    log_drafting(trainer, attachment)
    trainer.train()
    call = {"do_sample": True, "top_k": 0, "max_new_tokens": NEW, "eos_token_id": target.generation_config.eos_token_id}
    for pairs, weights in seen:
        expected, model = [], policy()
        model.load_state_dict(weights)
        for seed, (prompt, _) in enumerate(sorted(pairs, reverse=True), 23):
            torch.manual_seed(seed)
            expected.append((prompt, model.generate(torch.tensor([prompt]), **call)[0, len(prompt) :].tolist()))
        assert sorted(expected) == pairs
    assert len(seen) == STEPS and len({str(pairs) for pairs, _ in seen}) == STEPS
    done = attachment.statistics
    assert done.calls == 4 * STEPS and done.accepted_tokens > 0 and not done.stepped_aside
    assert all("hsdraft/tau" in entry for entry in trainer.state.log_history if "reward" in entry)


@needs_trl
def test_roll_outs_that_are_not_drafted_are_told(tokenizer, tmp_path):
    target = policy()
    trainer = trainer_of(target, tokenizer, tmp_path, generation_kwargs={"num_beams": 2}, max_steps=1)
    log_drafting(trainer, attach(target, make_drafter(target)))
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["hsdraft/stepped_aside"] == 1 and "hsdraft/tau" not in first


@pytest.mark.parametrize(("last", "warned"), [(1.45, False), (1.39, True)])
def test_a_warning_when_drafting_brings_a_third_less(last, warned, caplog):
    attachment = SimpleNamespace(statistics=DraftStatistics())
    callback, state = DraftingLog(attachment, window=2), SimpleNamespace(log_history=[])
    for tau in (1.7, 1.5, 1.6, last, last, last):
        callback.on_step_begin(None, state, None)
        done = attachment.statistics
        attachment.statistics = DraftStatistics(
            new_tokens=done.new_tokens + int(100 * tau), row_forwards=done.row_forwards + 100
        )
        callback.on_step_end(None, state, None)
        logs = {}
        callback.on_log(None, state, None, logs=logs)
        assert logs["hsdraft/tau"] == pytest.approx(tau)
    assert [record.levelname for record in caplog.records if "hsdraft/tau has fallen" in record.message] == [
        "WARNING"
    ] * warned


# The drafter learns along


def texts(count=6):
    numbers = torch.randint(5, 97, (count, 20), generator=torch.Generator().manual_seed(0)).tolist()
    return [(row[:5], row[5:]) for row in numbers]


def co_training_of(target, tokenizer=None, **options) -> CoTraining:
    return CoTraining(target, make_drafter(target), tokenizer, **{"learning_rate": 3e-3, "batch_size": 4, **options})


def test_a_drafter_learns_from_what_the_target_is_now():
    """After the target has changed, an update is that of a new drafter with a new target of these weights."""
    changed = policy(seed=0).train()
    learner = co_training_of(changed, learning_rate=0.0)  # so that the drafter stays as new as the other
    numbers = torch.get_rng_state()
    for seed in (0, 5):
        changed.load_state_dict(policy(seed=seed).state_dict())
        other = co_training_of(policy(seed=seed), learning_rate=0.0)
        for prompt, answer in texts():
            learner.add(prompt, answer)
            other.add(prompt, answer)
        torch.set_rng_state(numbers)
        assert learner.update() == other.update()
        assert torch.equal(torch.get_rng_state(), numbers)
    assert changed.training and all(weight.grad is None for weight in changed.parameters())
    assert not learner.drafter.training and learner.losses[0] != learner.losses[1]


def test_what_cannot_be_learned_from_is_refused():
    target = policy()
    with pytest.raises(ValueError, match="every=0"):
        co_training_of(target, every=0)
    with pytest.raises(ValueError, match="float32"):
        CoTraining(target, make_drafter(target).to(torch.bfloat16), None)
    with pytest.raises(TypeError, match="plain reward function"):
        co_training_of(target).recording(torch.nn.Linear(1, 1))
    with pytest.raises(ValueError, match="no roll-outs"):
        co_training_of(target).update()


@needs_trl
@pytest.mark.parametrize("lora", [False, True])
def test_co_training_changes_the_drafter_and_not_the_training(tokenizer, tmp_path, lora):
    runs = []
    for every in (0, 2):
        target = policy()
        drafter = make_drafter(target)
        before = copy.deepcopy(drafter.state_dict())
        learner = CoTraining(target, drafter, tokenizer, every=every) if every else None
        reward = learner.recording(reward_even) if learner else reward_even
        callbacks = [learner] if learner else None
        trainer = trainer_of(target, tokenizer, tmp_path, reward, lora=lora, callbacks=callbacks)
        attach(trainer.model, drafter)
        trainer.train()
        now = drafter.state_dict()
        assert all(torch.equal(now[name], before[name]) for name in now) is (not every)
        assert "rewards/reward_even/mean" in trainer.state.log_history[0]
        runs.append((rewards(trainer), target.state_dict()))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(runs[0][1][name], runs[1][1][name]) for name in runs[0][1])


@needs_trl
def test_co_training_reads_the_prompts_as_trl_does(tokenizer, tmp_path):
    target = policy()
    learner = co_training_of(target, tokenizer, every=100)
    trainer = trainer_of(target, tokenizer, tmp_path, learner.recording(reward_even), max_steps=1)
    read = []
    Watching(target, lambda inputs: read.append((inputs["input_ids"], inputs["attention_mask"])))
    trainer.train()
    [(ids, mask)] = read
    trainer.evaluate()  # its roll-outs are not for learning
    assert len(read) > 1
    prompts = [row[keep.bool()].tolist() for row, keep in zip(ids, mask, strict=True)]
    assert [chat.input_ids[~chat.answer_mask].tolist() for chat in learner._fresh] == prompts
