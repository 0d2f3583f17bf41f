"""A training run, from nothing or from prompts to a saved drafter. `hsdraft train` calls it."""

from __future__ import annotations

import contextlib
import hashlib
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import patch_environment
from torch.utils.data import Subset
from transformers import EarlyStoppingCallback

from ...core.checks import public_name
from ...hub.drafter_files import FIGURES, RECIPE
from ...hub.model_card import write_card
from ...runtime.prompt_inputs import encode_prompt
from ...runtime.target_loading import is_sharded
from ..data.conversations import Conversation, Prompt, TokenizedConversation, tokenize_conversation
from ..data.features import cache_features, feature_bytes, read_features
from ..data.gather import answer_all, in_order, kinds_to_invent, read_sources, recipe_of
from ..data.plan import Report, TrainingPlan
from ..data.published_chats import PublishedChats
from ..evaluate.pictures import draw_pictures
from ..families.family import TrainableFamily
from ..families.trainable import family_for
from ..files import disk_full, is_disk_full, write_json
from .adapters import with_lora
from .arguments import DrafterTrainingArguments
from .budget import TimeBudget
from .checks import (
    check_learning,
    check_target_can_teach,
    check_template_keeps_turns,
    claim,
    fingerprint,
    finish,
    is_finished,
    last_checkpoint,
    only_run,
    read_state,
)
from .prepared import prepared
from .progress import Reporter, TrainingProgress
from .publish import name_data_set, prepare_repository, publish
from .recipe import training_recipe, what_is_computed
from .start import draft_vocabulary, drafter_to_start_from, fresh_drafter
from .trainer import DrafterTrainer

# Settings that may change when a run is resumed. Others would mix two different drafters.
_MAY_CHANGE = {"out", "eval_prompts", "answer_batch_size", "answers_from", "server_model", "cache_taps", "publish_data"}
_ARGUMENTS_FIXED = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "objective",
    "ce_share",
    "ctc_labels",
    "data_policy",
    "rejected_drafts",
    "depth_weighting",
    "depth_decay",
    "depth_weights",
    "regression_weight",
    "regression_steps",
    "cosine_weight",
    "chains_per_conversation",
    "rolled_fraction",
    "seed",
    "bf16",
)


@patch_environment(accelerate_use_fsdp="false", accelerate_use_deepspeed="false")
def train(
    target: Any, tokenizer: Any, plan: TrainingPlan, arguments: Mapping[str, Any] | None = None, report: Report = print
) -> Any:
    """Makes prompts and answers, trains a drafter on them, and returns the best one by tau, as it was saved.

    A killed run resumes: prompts, answers and features are kept, and the trainer resumes from its last checkpoint. Each
    of several processes (`accelerate launch`) answers its share. FSDP and ZeRO shard the target only, see
    `load_target`. The drafter is small, and every process has all of it.

    Args:
        plan: what to learn from and what to make.
        arguments: fields of `DrafterTrainingArguments` that differ from their defaults.
        report: a function that takes lines, or a `Reporter`.

    Raises:
        ValueError: there is nothing to train on, or plan, arguments and target do not fit together.
        TrainingDiverged: the loss became infinite or not a number.
        OSError: the disk is full. What is finished is kept.
        RuntimeError: another run is at work in the same folder.
    """
    out = Path(plan.out)
    plan, args = prepared(plan, arguments or {}, target.device.type)
    family, state = family_for(plan), PartialState()
    report = Reporter.of(report if state.is_main_process else _silent)
    if is_sharded(target):
        report(f"target sharded over {state.num_processes} processes")
    check_target_can_teach(target, tokenizer, family)
    identity = fingerprint(target)
    start = drafter_to_start_from(family, target, tokenizer, plan)
    config = start.config if start else family.config_for(target, plan.drafter)
    check_learning(family, config, target, args)
    steps = config.num_draft_steps
    args.weights_of_depths(steps)
    args.check_metric(steps, generates=plan.eval_prompts > 0)
    finished, prompts = _checked_sources(plan, args.seed, tokenizer, report)
    push = (arguments or {}).get("push_to_hub", False) and state.is_main_process
    repository = prepare_repository(_hub_name(args, out), args.hub_token, args.hub_private_repo) if push else ""
    chats = _published_chats(plan, args, recipe_of(target, tokenizer, plan, args.seed, identity))
    try:
        out.mkdir(parents=True, exist_ok=True)
        with only_run(out) if state.is_main_process else contextlib.nullcontext():
            if state.is_main_process:
                claim(out, _settings(identity, plan, args), _MAY_CHANGE)
            if is_finished(out, _limits(args)):
                report(f"already finished: {', '.join(f'{name} {value:g}' for name, value in _limits(args).items())}")
            else:
                torch.manual_seed(args.seed)
                answered = answer_all(target, tokenizer, plan, args.seed, identity, prompts, out, report)
                _train_on(target, tokenizer, plan, args, family, start, identity, finished + answered, report)
            _publish(out, chats, repository, args, report)
            return _load(out, plan, family)
    except OSError as error:
        if is_disk_full(error) and "the disk is full" not in str(error):
            raise disk_full(out) from error
        raise


def _checked_sources(
    plan: TrainingPlan, seed: int, tokenizer: Any, report: Reporter
) -> tuple[list[Conversation], list[Prompt]]:
    """`read_sources`, with a ValueError if there are too few, or the tokenizer's template cannot render them."""
    bad: list[str] = []
    finished, prompts = read_sources(plan, seed, bad.append if plan.skip_bad_lines else None, report)
    for line in bad:
        report(f"left out: {line}")
    plan.check_amount(len(finished) + len(prompts))
    plan.check_publishes(len(prompts))
    if plan.invents:
        kinds_to_invent(plan, tokenizer)
    if plan.invented_turns or any(len(prompt.turns) > 1 for prompt in prompts):
        check_template_keeps_turns(tokenizer)
    return finished, prompts


def _published_chats(
    plan: TrainingPlan, args: DrafterTrainingArguments, recipe: Mapping[str, Any]
) -> PublishedChats | None:
    """The verified data set that this process sends chats to, if any."""
    if plan.publish_data is None or not PartialState().is_main_process:
        return None
    hub = {"token": args.hub_token, "private": args.hub_private_repo}
    return PublishedChats(plan.publish_data, plan.describe_prompts(), plan.dataset, hub).prepare(recipe)


def _publish(
    out: Path, chats: PublishedChats | None, repository: str, args: DrafterTrainingArguments, report: Report
) -> None:
    """Sends the chats first, as the drafter's card names them, and then the drafter."""
    if chats is not None:
        report(f"chats sent: {chats.send(out / 'data')}")
        name_data_set(out, chats.name)
    if repository:
        publish(out, repository, args.hub_token)
        report(f"pushed to {repository}")


def _train_on(
    target: Any,
    tokenizer: Any,
    plan: TrainingPlan,
    args: DrafterTrainingArguments,
    family: TrainableFamily,
    start: Any,
    identity: str,
    conversations: Sequence[Conversation],
    report: Reporter,
) -> None:
    out, state = Path(plan.out), PartialState()
    pairs = _tokenized(tokenizer, plan, in_order(conversations, args.seed), report)
    tokenized = [pair[1] for pair in pairs]
    tokens, answers = (sum(int(part.sum()) for part in parts) for parts in _token_counts(tokenized))
    report(f"{len(pairs):,} conversations, {tokens:,} tokens, {answers:,} of them answers")
    drafter = _drafter_to_train(target, tokenizer, plan, args, family, start, tokenized, report)
    dataset: Any = tokenized
    if plan.cache_taps:
        dataset = _cached_taps(target, family.taps(drafter, target), tokenized, tokens, out, identity, report)
    drafter = drafter.to(args.device)
    if not start:
        sample = read_features(target, family.taps(drafter, target), tokenized[: min(16, len(tokenized))])
        family.start_from_target(drafter, target, torch.cat([features.final for features in sample]).float())
    model = drafter if plan.lora is None else with_lora(drafter, plan.lora)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    report(
        f"drafter of {sum(p.numel() for p in drafter.parameters()) / 1e6:.1f}M parameters, {trained / 1e6:.1f}M trained"
    )
    last = last_checkpoint(out)
    trainer = DrafterTrainer(
        model,
        args,
        target=target,
        tau_prompts=_tau_prompts(target, tokenizer, [chat for chat, _ in pairs[: plan.eval_conversations]], plan, args),
        train_dataset=Subset(dataset, range(plan.eval_conversations, len(pairs))),
        eval_dataset=Subset(dataset, range(plan.eval_conversations)),
        budget=_budget(args, last),
        report=report,
        callbacks=_callbacks(args),
    )
    report(what_is_computed(trainer))
    begin = time.perf_counter()
    _learn(trainer, last, report)
    if plan.lora is None:
        try:
            family.record_target(trainer.drafter, target, tokenizer, plan.drafter.get("target_name"))
        except Exception as error:  # the drafter is saved all the same
            report(f"what the target writes could not be recorded: {error}")
    if state.is_main_process:
        amount = f"{len(pairs):,} conversations, {answers:,} answer tokens, by the target itself"
        _save(trainer, plan, family, out, {"data": amount, "prompts": plan.describe_prompts()}, report)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)
        minutes = (time.perf_counter() - begin) / 60
        report(f"{minutes:.1f} minutes from the first step of this run to the saved drafter, peak memory {peak:.1f} GB")
        finish(out, trainer.state.global_step, _limits(args))
    state.wait_for_everyone()


def _tokenized(
    tokenizer: Any, plan: TrainingPlan, conversations: Sequence[Conversation], report: Reporter
) -> list[tuple[Conversation, TokenizedConversation]]:
    """Returns the conversations with something to learn, each with its tokens; a ValueError if too few are left."""
    pairs = []
    with report.stage("tokenizing", "conversations", len(conversations)) as stage:
        for chat in conversations:
            pairs.append((chat, tokenize_conversation(tokenizer, chat, plan.max_length)))
            stage.advance(len(pairs))
    pairs = [pair for pair in pairs if bool(pair[1].answer_mask[2:].any())]  # a chain predicts x_2 at the earliest
    if len(pairs) < len(conversations):
        report(
            f"{len(conversations) - len(pairs)} conversations left out: no answer within the first {plan.max_length} "
            "tokens (--max-length)"
        )
    cut = sum(len(chat.input_ids) == plan.max_length for _, chat in pairs)
    if cut:
        report(f"{cut} conversations cut at {plan.max_length} tokens (--max-length)")
    if len(pairs) <= plan.eval_conversations:
        raise ValueError(
            f"{len(pairs)} conversations are left, {plan.eval_conversations} are to be held out: give more"
        )
    return pairs


def _drafter_to_train(
    target: Any,
    tokenizer: Any,
    plan: TrainingPlan,
    args: DrafterTrainingArguments,
    family: TrainableFamily,
    start: Any,
    tokenized: Sequence[TokenizedConversation],
    report: Reporter,
) -> Any:
    """Returns the drafter to start from, with the draft vocabulary that the plan asks for, or a fresh one."""
    if start and plan.drafter.get("draft_vocab_size", start.config.draft_vocab_size) != start.config.draft_vocab_size:
        ids = draft_vocabulary(target, tokenizer, tokenized, plan.drafter["draft_vocab_size"], report)
        start = family.with_draft_vocabulary(start, ids, target.get_output_embeddings().weight)
    torch.manual_seed(args.seed)  # answering has advanced the RNG differently in each process
    return start or fresh_drafter(family, target, tokenizer, tokenized, plan, report)


def _cached_taps(
    target: Any,
    taps: Sequence[int],
    tokenized: Sequence[TokenizedConversation],
    tokens: int,
    out: Path,
    identity: str,
    report: Reporter,
) -> Any:
    """Returns the features of all conversations, after this process has written its share."""
    state = PartialState()
    size = feature_bytes(tokens, len(taps), target.config.get_text_config().hidden_size)
    report(f"taps of {tokens:,} tokens: {size / 1e9:,.2f} GB on disk")
    with report.stage("taps", "files") as stage:
        return cache_features(
            target,
            taps,
            tokenized,
            out / "features",
            identity,
            stage=stage,
            share=(state.process_index, state.num_processes),
            wait=state.wait_for_everyone,
        )


def _learn(trainer: DrafterTrainer, last: Path | None, report: Reporter) -> None:
    """Takes the steps that are left after checkpoint `last`, and loads the best drafter."""
    args, budget = trainer.args, trainer.budget
    if last is not None and _had_ended(last, args):  # the Trainer would take one more step
        trainer.restore(last)
    else:
        if budget is not None:
            left = budget.minutes - budget.spent / 60
            report(f"{left:.3g} minutes begin: steps, evaluations and pictures, until the drafter is saved")
        with report.stage("training", "steps" if budget is None else "minutes") as stage:
            trainer.add_callback(TrainingProgress(stage, budget))
            trainer.train(resume_from_checkpoint=str(last) if last else None)
    best = trainer.state.best_model_checkpoint
    if best:
        report(f"best {args.metric_for_best_model} {trainer.state.best_metric:.2f}, at step {best.rsplit('-', 1)[1]}")
    if trainer.calibration is None or (best and int(best.rsplit("-", 1)[1]) != trainer.state.global_step):
        # The last figures must be the saved drafter's.
        trainer.show(int(best.rsplit("-", 1)[1]) if best else trainer.state.global_step)


def _limits(args: DrafterTrainingArguments) -> dict[str, float]:
    """The limits that end training, by name. With a wider limit a finished run continues."""
    if args.max_minutes is not None:
        limits = {"max_minutes": args.max_minutes}
    elif args.max_steps > 0:
        limits = {"max_steps": float(args.max_steps)}
    else:
        limits = {"num_train_epochs": args.num_train_epochs}
    if args.early_stopping_patience is not None:
        limits["early_stopping_patience"] = float(args.early_stopping_patience)
    return limits


def _had_ended(last: Path, args: DrafterTrainingArguments) -> bool:
    """Whether training had taken its last step before it was interrupted."""
    state = read_state(last)
    if args.max_minutes is not None:
        clock = _clock(last)  # earlier versions trained until the time was over, and recorded no end
        return max(clock.get("ended", 0.0), clock.get("spent", 0.0) / 60) >= args.max_minutes
    if args.max_steps > 0:
        return bool(state["global_step"] >= args.max_steps)
    return bool(state["epoch"] >= args.num_train_epochs)


def _clock(last: Path) -> dict[str, Any]:
    """Returns a checkpoint's time budget; empty for a run by steps."""
    clock: dict[str, Any] = read_state(last).get("stateful_callbacks", {}).get("TimeBudget", {}).get("attributes", {})
    return clock


def _hub_name(args: DrafterTrainingArguments, out: Path) -> str:
    return args.hub_model_id or out.resolve().name


def _tau_prompts(
    target: Any,
    tokenizer: Any,
    chats: Sequence[Conversation],
    plan: TrainingPlan,
    args: DrafterTrainingArguments,
) -> list[dict[str, torch.Tensor]]:
    """Returns inputs for the first user messages of held-out chats that leave room for an answer."""
    window = getattr(target.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
    asked = [text for chat in chats for text in [_first_user_message(chat)] if text is not None]
    encoded = [encode_prompt(tokenizer, text, target.device) for text in asked[: plan.eval_prompts]]
    return [inputs for inputs in encoded if inputs["input_ids"].shape[1] + args.eval_new_tokens <= window]


def _save(
    trainer: DrafterTrainer,
    plan: TrainingPlan,
    family: TrainableFamily,
    out: Path,
    data: dict[str, Any],
    report: Reporter,
) -> None:
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    if plan.lora is None:
        model.loss_function = None
        model.to(torch.bfloat16).save_pretrained(out)
    else:
        readme = out / "README.md"
        before = readme.read_text(encoding="utf-8") if readme.exists() else None
        model.save_pretrained(out)  # PEFT writes an empty card too
        readme.unlink(missing_ok=True)
        if before is not None:
            readme.write_text(before, encoding="utf-8")
    history = trainer.state.log_history
    calibration = asdict(trainer.calibration) if trainer.calibration else None
    figures = [{name: None if value != value else value for name, value in entry.items()} for entry in history]
    held_out = f"{trainer.held_out[0]} conversations; tau: {trainer.held_out[1]} prompts, at most "
    held_out += f"{trainer.args.eval_new_tokens} tokens each"
    write_json(out / FIGURES, {"training": {"history": figures, "calibration": calibration, "held_out": held_out}})
    with report.stage("drawing", "pictures") as stage:
        draw_pictures(history, calibration, out, stage)
    recipe: dict[str, Any] = {"training": {**data, **training_recipe(trainer, plan, family)}}
    recipe["target"] = trainer.drafter.config.target_name  # a language model's config.json does not name it
    if plan.dataset is not None:
        recipe["datasets"] = [public_name(plan.dataset)]
    if plan.lora is not None:
        recipe["adapts"] = public_name(str(plan.init_from))
    write_json(out / RECIPE, recipe)
    write_card(out, out.resolve().name)


def _load(out: Path, plan: TrainingPlan, family: TrainableFamily) -> Any:
    if plan.lora is None:
        return family.drafter.from_pretrained(out)
    drafter = family.drafter.from_pretrained(plan.init_from)
    drafter.load_adapter(str(out))
    return drafter


def _token_counts(tokenized: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.ones_like(chat.input_ids) for chat in tokenized], [chat.answer_mask for chat in tokenized]


def _settings(identity: str, plan: TrainingPlan, args: DrafterTrainingArguments) -> dict[str, Any]:
    digests, excluded = (
        [hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16] for name in names]
        for names in (plan.prompts, plan.exclude_near)
    )
    told = asdict(plan)
    for name in () if plan.invents else ("kinds", "openings"):
        del told[name]  # without effect on the result
    return {
        **told,
        "prompts": [Path(name).name for name in plan.prompts],
        "prompt_digests": digests,
        "exclude_near": excluded,
        "target": identity,
        **{name: str(getattr(args, name)) for name in _ARGUMENTS_FIXED},
    }


def _callbacks(args: DrafterTrainingArguments) -> list[Any]:
    patience = args.early_stopping_patience
    return [] if patience is None else [EarlyStoppingCallback(early_stopping_patience=patience)]


def _budget(args: DrafterTrainingArguments, last: Path | None) -> TimeBudget | None:
    """The clock of a run, with the time before its last checkpoint; `None` for a run by steps."""
    if args.max_minutes is None:
        return None
    return TimeBudget.resumed(args.max_minutes, {} if last is None else _clock(last))


def _first_user_message(chat: Conversation) -> str | None:
    return next((content for role, content in chat.messages if role == "user"), None)


def _silent(_: str) -> None:
    """Drops the reports of all processes but the first."""
