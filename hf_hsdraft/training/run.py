"""One training run from prompts to a saved drafter; what `hsdraft train` calls."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ..configuration_hsdraft import HSDraftConfig
from ..modeling_hsdraft import HSDrafter
from .answers import answer_prompts
from .conversations import Conversation, read_conversations, read_prompts, tokenize_conversation
from .features import FeatureDataset, cache_features, feature_bytes
from .trainer import DrafterTrainer
from .vocabulary import choose_draft_vocabulary

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
        drafter: overrides of `HSDraftConfig.for_target`.
    """

    prompts: Sequence[str]
    out: str
    max_steps: int = 2000
    learning_rate: float = 1e-3
    conversations_per_step: int = 2
    chains_per_step: int = 128
    rolled_fraction: float = 0.5
    depth_decay: float = 0.8
    max_length: int = 1024
    max_new_tokens: int = 256
    max_prompts: int | None = None
    greedy_only: bool = False
    answer_batch_size: int = 32
    eval_conversations: int = 48
    eval_prompts: int = 8
    eval_new_tokens: int = 48
    eval_steps: int = 500
    logging_steps: int = 25
    init_from: str | None = None
    seed: int = 0
    drafter: dict[str, Any] = field(default_factory=dict)


def train(target: Any, tokenizer: Any, plan: TrainingPlan, report: Report = print) -> HSDrafter:
    """Answers the prompts with the target, caches its features, trains a drafter and keeps the best one by tau.

    Every stage restarts where a killed run stopped: answers are appended, feature shards are kept, the trainer resumes
    from its last checkpoint.

    Raises:
        ValueError: there is nothing to train on, or the plan does not fit the target.
    """
    out = Path(plan.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(plan.seed)
    conversations = _conversations(target, tokenizer, plan, out, report)
    tokenized = [tokenize_conversation(tokenizer, chat, plan.max_length) for chat in conversations]
    tokenized = [chat for chat in tokenized if int(chat.answer_mask.sum()) > 1]
    if len(tokenized) <= plan.eval_conversations:
        raise ValueError(
            f"only {len(tokenized)} conversations to learn from, of which {plan.eval_conversations} are held out; "
            "give more prompts or a smaller number of held-out conversations"
        )
    config = _drafter_config(target, tokenizer, tokenized, plan, report)
    tokens = sum(len(chat.input_ids) for chat in tokenized)
    size = feature_bytes(tokens, len(config.target_tap_layers), config.target_hidden_size)
    report(f"features of {tokens:,} tokens, {size / 1e9:.1f} GB on disk")
    features = cache_features(
        target,
        config.target_tap_layers,
        tokenized,
        out / "features",
        on_shard=lambda done, of: report(f"features: {done}/{of} shards"),
    )
    drafter = HSDrafter.from_pretrained(plan.init_from, dtype=torch.float32) if plan.init_from else HSDrafter(config)
    if not plan.init_from:
        start_from_target(drafter, target, features)
    report(f"drafter of {sum(p.numel() for p in drafter.parameters()) / 1e6:.1f}M parameters")
    _fit(target, tokenizer, drafter, features, conversations, plan, out)
    drafter.to(torch.bfloat16).save_pretrained(out)
    (out / "training_plan.json").write_text(json.dumps(asdict(plan), indent=2) + "\n", encoding="utf-8")
    return drafter


def _conversations(target: Any, tokenizer: Any, plan: TrainingPlan, out: Path, report: Report) -> list[Conversation]:
    """Finished conversations of all files, then the target's answers to all prompts."""
    conversations = [chat for path in plan.prompts for chat in read_conversations(path, greedy_only=plan.greedy_only)]
    report(f"{len(conversations)} finished conversations")
    prompts = [prompt for path in plan.prompts for prompt in read_prompts(path)]
    if prompts:
        random.Random(plan.seed).shuffle(prompts)
        prompts = prompts[: plan.max_prompts]
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
        conversations += read_conversations(answers)
    random.Random(plan.seed).shuffle(conversations)
    return conversations


def _drafter_config(
    target: Any, tokenizer: Any, tokenized: Sequence[Any], plan: TrainingPlan, report: Report
) -> HSDraftConfig:
    overrides = dict(plan.drafter)
    default = HSDraftConfig.for_target(target, **overrides)
    if default.draft_vocab_ids is None and default.draft_vocab_size < default.vocab_size:
        always = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        chosen = choose_draft_vocabulary(tokenized, default.vocab_size, default.draft_vocab_size, always)
        overrides |= {"draft_vocab_size": len(chosen.ids), "draft_vocab_ids": chosen.ids}
        report(f"draft vocabulary: {len(chosen.ids):,} tokens cover {chosen.coverage:.1%} of the answers")
    return HSDraftConfig.for_target(target, **overrides)


@torch.no_grad()
def start_from_target(drafter: HSDrafter, target: Any, features: FeatureDataset, sample: int = 16) -> None:
    """Starts the parts that have an obvious counterpart in the target from it.

    The final norm takes the scale of the target's final hidden states, the injector's output the leading directions of
    the target's head: from the first step on both speak the head's language.
    """
    finals = torch.cat([features[index].final for index in range(min(sample, len(features)))]).float()
    drafter.norm.weight.copy_(finals.pow(2).mean(dim=0).sqrt())
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    if weights.head is not None:
        rank = drafter.config.injector_rank
        _, _, directions = torch.linalg.svd(weights.head.float() * drafter.norm.weight, full_matrices=False)
        # Without the norm's scale a unit of hidden state would move the logits by very unequal amounts.
        leading = (weights.head.float() * drafter.norm.weight) @ directions[:rank].T
        drafter.injector.up.weight[:, : leading.shape[1]].copy_(leading)


def _fit(
    target: Any,
    tokenizer: Any,
    drafter: HSDrafter,
    features: FeatureDataset,
    conversations: Sequence[Conversation],
    plan: TrainingPlan,
    out: Path,
) -> None:
    from ..bench.measure import measure_tau

    held = range(plan.eval_conversations)
    training = torch.utils.data.Subset(features, range(plan.eval_conversations, len(features)))
    prompts = [conversations[index].messages[0][1] for index in held[: plan.eval_prompts]]
    weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
    rows = target.get_output_embeddings().weight.detach()
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
    trainer = DrafterTrainer(
        drafter,
        arguments,
        weights=weights,
        teacher_head=rows[weights.vocab_ids.to(rows.device)].float(),
        measure_tau=lambda model: measure_tau(target, tokenizer, model, prompts, plan.eval_new_tokens),
        chains_per_step=plan.chains_per_step,
        rolled_fraction=plan.rolled_fraction,
        depth_decay=plan.depth_decay,
        train_dataset=training,
        eval_dataset=torch.utils.data.Subset(features, list(held)),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(out / "checkpoints")) if _started(out) else None)


def _started(out: Path) -> bool:
    return (out / "checkpoints").is_dir()
