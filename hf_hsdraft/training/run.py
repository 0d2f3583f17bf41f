"""One training run from prompts to a saved drafter; what `hsdraft train` calls."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, TrainingArguments

from ..configuration_hsdraft import HSDraftConfig
from ..decoding import check_target
from ..modeling_hsdraft import HSDrafter
from ..target_runtime import TargetRuntime
from .answers import answer_prompts
from .conversations import (
    Conversation,
    Prompt,
    read_conversations,
    read_prompts,
    tokenize_conversation,
)
from .features import FeatureDataset, cache_features, feature_bytes
from .trainer import DrafterTrainer
from .vocabulary import choose_draft_vocabulary, with_draft_vocabulary

Report = Callable[[str], None]


@dataclass(frozen=True)
class TrainingPlan:
    """What `hsdraft train` was asked to do.

    Attributes:
        prompts: JSONL files of prompts (`turns`) or of finished conversations (`messages`).
        out: folder of the run: answers, features, checkpoints and, at its top, the best drafter.
        max_steps: optimiser steps.
        conversations_per_step: conversations packed into one step.
        chains_per_step, rolled_fraction, depth_decay: see `DrafterTrainer`.
        max_prompts: prompts answered at most, `None` for all.
        greedy_only: leave finished conversations with a `temperature` above 0 out.
        eval_conversations: held-out conversations, the first `eval_prompts` of which also measure tau.
        bf16: matrix products of the training steps in bfloat16 (autocast), weights and optimiser in float32.
        drafter: overrides of `HSDraftConfig.for_target`.
    """

    prompts: Sequence[str]
    out: str
    max_steps: int = 2000
    learning_rate: float = 6e-4
    conversations_per_step: int = 2
    chains_per_step: int = 160
    rolled_fraction: float = 0.5
    depth_decay: float = 0.8
    max_length: int = 1024
    max_new_tokens: int = 256
    max_prompts: int | None = None
    greedy_only: bool = False
    answer_batch_size: int = 32
    eval_conversations: int = 48
    eval_prompts: int = 16
    eval_new_tokens: int = 48
    eval_steps: int = 500
    logging_steps: int = 25
    init_from: str | None = None
    bf16: bool = False
    seed: int = 0
    drafter: dict[str, Any] = field(default_factory=dict)


def train(target: Any, tokenizer: Any, plan: TrainingPlan, report: Report = print) -> HSDrafter:
    """Answers the prompts with the target, caches its features, trains a drafter and keeps the best one by tau.

    Every stage restarts where a killed run stopped: answers are appended, feature shards are kept, the trainer resumes
    from its last checkpoint.

    Raises:
        ValueError: there is nothing to train on, or the plan does not fit the target.
    """
    _check_target(target, tokenizer)
    start = _start(target, plan)
    finished, prompts = _read(plan)
    if len(finished) + len(prompts) <= plan.eval_conversations:
        raise ValueError(
            f"{len(finished) + len(prompts)} conversations and prompts are too few: {plan.eval_conversations} of them "
            "are held out; give more, or hold out fewer (--eval-conversations)"
        )
    out = Path(plan.out)
    arguments = _training_arguments(target, plan, out)
    out.mkdir(parents=True, exist_ok=True)
    _claim(out, target, plan)
    if _finished_steps(out) >= plan.max_steps:
        report(f"already finished: {_finished_steps(out)} of {plan.max_steps} steps")
        return _load(out)
    torch.manual_seed(plan.seed)
    conversations = _conversations(target, tokenizer, plan, finished, prompts, out, report)
    pairs = [(chat, tokenize_conversation(tokenizer, chat, plan.max_length)) for chat in conversations]
    pairs = [pair for pair in pairs if bool(pair[1].answer_mask[2:].any())]  # a chain predicts x_2 at the earliest
    conversations, tokenized = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    if len(tokenized) <= plan.eval_conversations:
        raise ValueError(
            f"only {len(tokenized)} conversations hold answers to learn from, of which {plan.eval_conversations} are "
            "held out; give more prompts, or hold out fewer (--eval-conversations)"
        )
    if start and plan.drafter.get("draft_vocab_size", start.config.draft_vocab_size) != start.config.draft_vocab_size:
        ids = _draft_vocabulary(target, tokenizer, tokenized, plan.drafter["draft_vocab_size"], report)
        start = with_draft_vocabulary(start, ids, target.get_output_embeddings().weight)
    config = start.config if start else _drafter_config(target, tokenizer, tokenized, plan, report)
    tokens = sum(len(chat.input_ids) for chat in tokenized)
    size = feature_bytes(tokens, len(config.target_tap_layers), config.target_hidden_size)
    report(f"features of {tokens:,} tokens, {size / 1e6:,.0f} MB on disk")
    features = cache_features(
        target,
        config.target_tap_layers,
        tokenized,
        out / "features",
        on_shard=lambda done, of: report(f"features: {done}/{of} shards"),
    )
    drafter = (start or HSDrafter(config)).to(target.device)
    if not start:
        start_from_target(drafter, target, features)
    report(f"drafter of {sum(p.numel() for p in drafter.parameters()) / 1e6:.1f}M parameters")
    _fit(target, tokenizer, drafter, features, conversations, plan, arguments, report)
    drafter.to(torch.bfloat16).save_pretrained(out)
    _write_json(out / _FINISHED, {"steps": plan.max_steps})
    return _load(out)


def _load(out: Path) -> HSDrafter:
    drafter: HSDrafter = HSDrafter.from_pretrained(out)
    return drafter


_PLAN, _FINISHED = "training_plan.json", "finished.json"

# What may change between a run and its resumption; anything else would mix two different drafters.
_MAY_CHANGE = {
    "max_steps",
    "eval_steps",
    "logging_steps",
    "eval_prompts",
    "eval_new_tokens",
    "answer_batch_size",
    "out",
}
# As long as nothing was trained, only what decides the answers has to stay.
_DECIDES_ANSWERS = {"target", "prompts", "prompt_digests", "max_prompts", "max_new_tokens", "greedy_only", "seed"}


def _claim(out: Path, target: Any, plan: TrainingPlan) -> None:
    """Writes the plan into the folder, or checks that the folder belongs to the same one.

    Raises:
        ValueError: the folder holds a run of another plan; the message names the fields that differ.
    """
    path = out / _PLAN
    digests = [hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16] for name in plan.prompts]
    fields = {**asdict(plan), "prompts": [Path(name).name for name in plan.prompts], "prompt_digests": digests}
    document = json.loads(json.dumps({**fields, "target": _fingerprint(target)}))  # tuples become lists, as on disk
    if path.exists():
        stored = {**_plan_defaults(), **json.loads(path.read_text(encoding="utf-8"))}
        fixed = document.keys() - _MAY_CHANGE if _steps_done(out) else _DECIDES_ANSWERS
        differing = sorted(name for name in fixed if stored.get(name) != document[name])
        if differing:
            changes = ", ".join(f"{name}: {stored.get(name)!r} -> {document[name]!r}" for name in differing)
            raise ValueError(
                f"{out} holds a run with other settings ({changes}); resume it with the same, or use a new --out"
            )
    _write_json(path, document)


def _plan_defaults() -> dict[str, Any]:
    """Fields that a plan written by an older version may lack."""
    return {f.name: f.default for f in dataclass_fields(TrainingPlan) if f.default is not MISSING}


def _write_json(path: Path, document: dict[str, Any]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)


def _fingerprint(target: Any) -> str:
    """Tells targets apart, and dtypes: answers and features of one are not those of another."""
    rows = target.get_output_embeddings().weight.detach()[:64].cpu().contiguous()
    digest = hashlib.sha256(rows.view(torch.uint8).numpy().tobytes())
    return f"{type(target).__name__}, {target.dtype}, {digest.hexdigest()[:12]}"


def _check_target(target: Any, tokenizer: Any) -> None:
    """Raises a ValueError for a target whose drafter could not be trained, or not be used, before hours are spent."""
    TargetRuntime(target, [], DynamicCache(config=target.config))  # raises where trees cannot be verified
    if target.device.type == "cuda" and target.device.index:
        raise ValueError(
            f"training runs on the first visible GPU, not on {target.device}: use --device cuda, and "
            f"CUDA_VISIBLE_DEVICES={target.device.index} to choose"
        )
    message = [{"role": "user", "content": "Count from one to ten."}]
    ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    _check_teacher(target, ids["input_ids"])


def _start(target: Any, plan: TrainingPlan) -> HSDrafter | None:
    """The drafter to start from, if any.

    Raises:
        ValueError: it was made for another target, or the plan asks for other sizes than it has.
    """
    if plan.init_from is None:
        HSDraftConfig.for_target(target, **plan.drafter)  # raises where the sizes cannot be
        return None
    drafter: HSDrafter = HSDrafter.from_pretrained(plan.init_from, dtype=torch.float32)
    check_target(target, drafter)
    drafter.config.target_name = plan.drafter.get("target_name", drafter.config.target_name)
    for name, value in plan.drafter.items():
        found = getattr(drafter.config, name)
        if found != value and name != "draft_vocab_size":
            raise ValueError(
                f"{plan.init_from} has {name}={found!r}, not {value!r}; leave {name} out, or train from scratch"
            )
    size = plan.drafter.get("draft_vocab_size", 1)
    if not 1 <= size <= drafter.config.vocab_size:
        raise ValueError(f"draft_vocab_size={size} is invalid: expected 1 to {drafter.config.vocab_size}")
    return drafter


@torch.no_grad()
def _check_teacher(target: Any, input_ids: torch.Tensor) -> None:
    """Raises a ValueError unless the target's logits are its final hidden states times its output rows.

    Scaled, capped or biased logits would be another distribution than the one the drafter is taught.
    """
    last = target.config.get_text_config().num_hidden_layers
    output = target(input_ids.to(target.device), output_hidden_states=[last], use_cache=False)
    logits = output.logits[0].float().cpu()
    rows = target.get_output_embeddings().weight.detach().float().cpu()
    rebuilt = output.hidden_states[last][0].to("cpu", torch.bfloat16).float() @ rows.T
    error = float((rebuilt.log_softmax(-1).exp() - logits.log_softmax(-1).exp()).abs().sum(-1).mean())
    if error > 0.1:  # total variation times two; bfloat16 features stay well below
        raise ValueError(
            f"{type(target).__name__} changes its logits after the output layer (scale, cap or bias): the teacher "
            f"would be wrong by {error:.2f} in total variation. Training for such targets is not supported yet."
        )


def _read(plan: TrainingPlan) -> tuple[list[Conversation], list[Prompt]]:
    """Finished conversations of all files, and the prompts to answer in the order of the plan's seed."""
    finished = [chat for path in plan.prompts for chat in read_conversations(path, greedy_only=plan.greedy_only)]
    prompts = [prompt for path in plan.prompts for prompt in read_prompts(path)]
    random.Random(plan.seed).shuffle(prompts)
    return finished, prompts[: plan.max_prompts]


def _last_checkpoint(out: Path) -> Path | None:
    """The newest complete checkpoint of a run; what a kill left half-written is passed over.

    The Trainer writes its state last, so a checkpoint that has it is whole.
    """
    found = [path for path in (out / "checkpoints").glob("checkpoint-*") if (path / "trainer_state.json").is_file()]
    return max(found, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)


def _steps_done(out: Path) -> int:
    """Steps of the last checkpoint in a run's folder, 0 if there is none."""
    last = _last_checkpoint(out)
    return int(last.name.rsplit("-", 1)[1]) if last else 0


def _finished_steps(out: Path) -> int:
    """Steps after which the drafter in a run's folder was saved, 0 if none was."""
    path = out / _FINISHED
    return int(json.loads(path.read_text(encoding="utf-8"))["steps"]) if path.exists() else 0


def _conversations(
    target: Any,
    tokenizer: Any,
    plan: TrainingPlan,
    finished: Sequence[Conversation],
    prompts: Sequence[Prompt],
    out: Path,
    report: Report,
) -> list[Conversation]:
    """The finished conversations and the target's answers to all prompts, ordered by digest.

    That is a shuffle which more data does not reshuffle: of the conversations held out, the first ones, none was
    learned by an earlier run on a part of the same data, from whose drafter this one may start.
    """
    conversations = list(finished)
    if conversations:
        report(f"{len(conversations)} finished conversations")
    if prompts:
        answers = out / "answers.jsonl"
        answer_prompts(
            target,
            tokenizer,
            prompts,
            answers,
            temperatures=(0.0,) if plan.greedy_only else (0.0, 0.0, 0.7, 1.0),
            max_new_tokens=plan.max_new_tokens,
            batch_size=plan.answer_batch_size,
            seed=plan.seed,
            on_batch=lambda done, tokens: report(f"answers: {done}/{len(prompts)} prompts"),
        )
        conversations += read_conversations(answers, greedy_only=plan.greedy_only)
    return sorted(conversations, key=lambda chat: hashlib.sha256(repr((plan.seed, chat.messages)).encode()).hexdigest())


def _drafter_config(
    target: Any, tokenizer: Any, tokenized: Sequence[Any], plan: TrainingPlan, report: Report
) -> HSDraftConfig:
    overrides = dict(plan.drafter)
    default = HSDraftConfig.for_target(target, **overrides)
    if default.draft_vocab_ids is None and default.draft_vocab_size < default.vocab_size:
        ids = _draft_vocabulary(target, tokenizer, tokenized, default.draft_vocab_size, report)
        overrides |= {"draft_vocab_size": len(ids), "draft_vocab_ids": ids}
    return HSDraftConfig.for_target(target, **overrides)


def _draft_vocabulary(target: Any, tokenizer: Any, tokenized: Sequence[Any], size: int, report: Report) -> list[int]:
    always = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    chosen = choose_draft_vocabulary(tokenized, target.config.get_text_config().vocab_size, size, always)
    report(f"draft vocabulary: {len(chosen.ids):,} tokens cover {chosen.coverage:.1%} of the answers")
    return chosen.ids


@torch.no_grad()
def start_from_target(drafter: HSDrafter, target: Any, features: FeatureDataset, sample: int = 16) -> None:
    """Starts the parts that have an obvious counterpart in the target from it.

    The final norm takes the scale of the target's final hidden states, the injector's output the leading directions of
    the target's head: from the first step on both speak the head's language.
    """
    if drafter.config.hidden_size != drafter.config.target_hidden_size:
        return
    finals = torch.cat([features[index].final for index in range(min(sample, len(features)))]).float()
    drafter.norm.weight.copy_(finals.pow(2).mean(dim=0).sqrt())
    rows = target.get_output_embeddings().weight.detach()
    head = rows[drafter.draft_vocab_ids().to(rows.device)].to(drafter.device, torch.float32)
    if drafter.lm_head is not None:
        drafter.lm_head.weight.copy_(head)
    # With the norm's scale a unit of hidden state moves the logits alike in all directions.
    head = head * drafter.norm.weight
    _, _, directions = torch.linalg.svd(head, full_matrices=False)
    leading = head @ directions[: drafter.config.injector_rank].T
    drafter.injector.up.weight[:, : leading.shape[1]].copy_(leading)


def _training_arguments(target: Any, plan: TrainingPlan, out: Path) -> TrainingArguments:
    """Raises an ImportError if the packages of the `train` extra are missing."""
    arguments = TrainingArguments(
        output_dir=str(out / "checkpoints"),
        max_steps=plan.max_steps,
        per_device_train_batch_size=plan.conversations_per_step,
        per_device_eval_batch_size=plan.conversations_per_step,
        learning_rate=plan.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=min(100, plan.max_steps // 10),
        adam_beta2=0.95,
        weight_decay=0.01,
        max_grad_norm=1.0,
        eval_strategy="steps",
        eval_steps=plan.eval_steps,
        save_steps=plan.eval_steps,
        save_total_limit=2,
        logging_steps=plan.logging_steps,
        load_best_model_at_end=True,
        metric_for_best_model="eval_tau",
        greater_is_better=True,
        remove_unused_columns=False,
        report_to="none",
        seed=plan.seed,
        use_cpu=target.device.type == "cpu",
    )
    # The loss reaches past the model's forward, which a DataParallel wrapper would hide.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments


def _fit(
    target: Any,
    tokenizer: Any,
    drafter: HSDrafter,
    features: FeatureDataset,
    conversations: Sequence[Conversation],
    plan: TrainingPlan,
    arguments: TrainingArguments,
    report: Report,
) -> None:
    from ..bench.measure import measure_tau

    held = range(plan.eval_conversations)
    training = torch.utils.data.Subset(features, range(plan.eval_conversations, len(features)))
    prompts = [_first_user_message(conversations[index]) for index in held[: plan.eval_prompts]]
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    rows = target.get_output_embeddings().weight.detach()
    compute_dtype = torch.bfloat16 if plan.bf16 else torch.float32  # autocast would cast the head anew at every depth
    teacher_head = rows[weights.vocab_ids.to(rows.device)].to(drafter.device, compute_dtype)
    if weights.head is not None:
        weights = replace(weights, head=weights.head.to(compute_dtype))
    trainer = DrafterTrainer(
        drafter,
        arguments,
        weights=weights,
        teacher_head=teacher_head,
        measure_tau=lambda model: measure_tau(target, tokenizer, model, prompts, plan.eval_new_tokens),
        chains_per_step=plan.chains_per_step,
        rolled_fraction=plan.rolled_fraction,
        depth_decay=plan.depth_decay,
        bf16=plan.bf16,
        train_dataset=training,
        eval_dataset=torch.utils.data.Subset(features, list(held)),
    )
    last = _last_checkpoint(Path(plan.out))
    trainer.train(resume_from_checkpoint=str(last) if last else None)
    best = trainer.state.best_model_checkpoint
    if best:
        report(f"best tau {trainer.state.best_metric:.2f}, at step {best.rsplit('-', 1)[1]}")


def _first_user_message(chat: Conversation) -> str:
    return next(content for role, content in chat.messages if role == "user")
