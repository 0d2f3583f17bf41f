"""One training run from nothing, or from prompts, to a saved drafter; what `hsdraft train` calls."""

from __future__ import annotations

import hashlib
import json
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import patch_environment
from torch.utils.data import Subset
from transformers import EarlyStoppingCallback
from transformers import __version__ as transformers_version

from .._version import __version__
from ..bench.measure import encode_prompt
from ..configuration_hsdraft import HSDraftConfig
from ..decoding import check_target
from ..modeling_hsdraft import HSDrafter
from ..target_loading import is_sharded
from .adapters import with_lora
from .answers import TEMPERATURES, Answered, answer_prompts, store_answers
from .arguments import DrafterTrainingArguments
from .budget import TimeBudget
from .checks import check_target_can_teach, claim, fingerprint, finish, finished_steps, last_checkpoint, steps_done
from .conversations import Conversation, Prompt, read_conversations, read_prompts, tokenize_conversation
from .dataset import RowFolder
from .features import cache_features, feature_bytes, read_features
from .files import disk_full, is_disk_full, write_json
from .pictures import draw_pictures
from .prompts import invent_prompts, prompts_from_dataset
from .server import answer_by_server
from .trainer import DrafterTrainer
from .vocabulary import choose_draft_vocabulary, with_draft_vocabulary

Report = Callable[[str], None]
INVENTED_PROMPTS = 2000  # where no prompts are given and no number is asked for


@dataclass(frozen=True)
class TrainingPlan:
    """What a run learns from and what it makes; how it learns is said by `DrafterTrainingArguments`.

    Attributes:
        out: folder of the run: prompts, answers, features, checkpoints and, at its top, the best drafter.
        prompts: JSONL files of prompts (`turns`) or of finished conversations (`messages`).
        dataset, dataset_config, dataset_split, dataset_column: see `prompts_from_dataset`.
        num_prompts: prompts used at most. Without files and data set, prompts that the target invents.
        openings: beginnings of invented prompts, see `invent_prompts`.
        invented_turns: further user turns that the target makes up in each chat it answers.
        answers_from: URL of an OpenAI-compatible server that runs the target; `None` answers here.
        server_model: the target's name there.
        temperatures: of the answers, drawn from evenly; 0 is greedy.
        max_new_tokens: tokens of an answer; max_length: tokens of a conversation, the rest is cut.
        greedy_only: leave finished conversations with a `temperature` above 0 out.
        skip_bad_lines: report lines of `prompts` that cannot be used, and go on.
        cache_taps: keep the target's hidden states on disk instead of computing them in every step.
        eval_conversations: held-out conversations, the first `eval_prompts` of which also measure tau.
        init_from: drafter to start from; lora: rank of the updates to train on it instead of all its weights.
        drafter: overrides of `HSDraftConfig.for_target`.
    """

    out: str
    prompts: Sequence[str] = ()
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "train"
    dataset_column: str | None = None
    num_prompts: int | None = None
    openings: Sequence[str] = ("",)
    invented_turns: int = 0
    answers_from: str | None = None
    server_model: str | None = None
    temperatures: Sequence[float] = TEMPERATURES
    max_new_tokens: int = 256
    max_length: int = 1024
    greedy_only: bool = False
    answer_batch_size: int = 64
    skip_bad_lines: bool = False
    cache_taps: bool = False
    eval_conversations: int = 48
    eval_prompts: int = 16
    init_from: str | None = None
    lora: int | None = None
    drafter: dict[str, Any] = field(default_factory=dict)


# What may change between a run and its resumption; anything else would mix two different drafters.
_MAY_CHANGE = {"out", "eval_prompts", "answer_batch_size", "answers_from", "server_model", "cache_taps"}
_ARGUMENTS_FIXED = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_steps",
    "weight_decay",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "objective",
    "data_policy",
    "depth_decay",
    "depth_weights",
    "regression_weight",
    "regression_steps",
    "chains_per_conversation",
    "rolled_fraction",
    "seed",
    "bf16",
)


@patch_environment(accelerate_use_fsdp="false", accelerate_use_deepspeed="false")
def train(
    target: Any, tokenizer: Any, plan: TrainingPlan, arguments: Mapping[str, Any] | None = None, report: Report = print
) -> HSDrafter:
    """Makes prompts and answers, trains a drafter on them and keeps the best one by tau.

    Every stage restarts where a killed run stopped: prompts and answers are appended, feature shards are kept, the
    trainer resumes from its last checkpoint. On several processes (`accelerate launch`) each answers its share. FSDP
    and ZeRO are for the target, see `load_target`: the drafter is small, every process has all of it.

    Args:
        arguments: fields of `DrafterTrainingArguments` to set otherwise than by default.

    Returns:
        the drafter as it was saved.

    Raises:
        ValueError: there is nothing to train on, or plan, arguments and target do not fit together.
        TrainingDiverged: the loss became infinite or not a number.
        OSError: a disk is full; what was finished is kept.
    """
    out = Path(plan.out)
    args = _training_arguments(target, out, arguments or {})
    state = PartialState()
    report = report if state.is_main_process else _silent
    check_target_can_teach(target, tokenizer)
    start = _start(target, plan)
    sizes = start.config if start else HSDraftConfig.for_target(target, **plan.drafter)
    args.weights_of_depths(sizes.num_draft_steps)
    bad: list[str] = []
    finished, prompts = _given(plan, args.seed, bad.append if plan.skip_bad_lines else None)
    for line in bad:
        report(f"left out: {line}")
    _check_amount(plan, len(finished) + len(prompts))
    try:
        out.mkdir(parents=True, exist_ok=True)
        if state.is_main_process:
            claim(out, _settings(target, plan, args), {*_MAY_CHANGE, "max_steps"})
        if 0 < args.max_steps <= finished_steps(out):
            report(f"already finished: {finished_steps(out)} of {args.max_steps} steps")
            return _load(out, plan)
        torch.manual_seed(args.seed)
        conversations = finished + _answers(target, tokenizer, plan, args.seed, prompts, out, report)
        return _train_on(target, tokenizer, plan, args, start, conversations, report)
    except OSError as error:
        if is_disk_full(error) and "the disk is full" not in str(error):
            raise disk_full(out) from error
        raise


def _train_on(
    target: Any,
    tokenizer: Any,
    plan: TrainingPlan,
    args: DrafterTrainingArguments,
    start: HSDrafter | None,
    conversations: Sequence[Conversation],
    report: Report,
) -> HSDrafter:
    out, state = Path(plan.out), PartialState()
    conversations = _in_order(conversations, args.seed)
    pairs = [(chat, tokenize_conversation(tokenizer, chat, plan.max_length)) for chat in conversations]
    pairs = [pair for pair in pairs if bool(pair[1].answer_mask[2:].any())]  # a chain predicts x_2 at the earliest
    _check_amount(plan, len(pairs))
    tokenized = [pair[1] for pair in pairs]
    tokens, answers = (sum(int(part.sum()) for part in parts) for parts in _token_counts(tokenized))
    report(f"{len(pairs):,} conversations, {tokens:,} tokens, {answers:,} of them answers")
    if start and plan.drafter.get("draft_vocab_size", start.config.draft_vocab_size) != start.config.draft_vocab_size:
        ids = _draft_vocabulary(target, tokenizer, tokenized, plan.drafter["draft_vocab_size"], report)
        start = with_draft_vocabulary(start, ids, target.get_output_embeddings().weight)
    config = start.config if start else _drafter_config(target, tokenizer, tokenized, plan, report)
    dataset: Any = tokenized
    if plan.cache_taps:
        size = feature_bytes(tokens, len(config.target_tap_layers), config.target_hidden_size)
        report(f"taps of {tokens:,} tokens: {size / 1e9:,.2f} GB on disk")
        dataset = cache_features(
            target,
            config.target_tap_layers,
            tokenized,
            out / "features",
            on_shard=lambda done, of: report(f"taps: {done}/{of} shards"),
            share=(state.process_index, state.num_processes),
            wait=state.wait_for_everyone,
        )
    torch.manual_seed(args.seed)  # again: answers drew from it, each process others
    drafter = (start or HSDrafter(config)).to(args.device)
    if not start:
        sample = read_features(target, config.target_tap_layers, tokenized[: min(16, len(tokenized))])
        start_from_target(drafter, target, torch.cat([features.final for features in sample]).float())
    model = drafter if plan.lora is None else with_lora(drafter, plan.lora)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    report(
        f"drafter of {sum(p.numel() for p in drafter.parameters()) / 1e6:.1f}M parameters, {trained / 1e6:.1f}M trained"
    )
    prompts = [_first_user_message(chat) for chat, _ in pairs[: min(plan.eval_prompts, plan.eval_conversations)]]
    last = last_checkpoint(out)
    trainer = DrafterTrainer(
        model,
        args,
        target=target,
        tau_prompts=[encode_prompt(tokenizer, prompt, target.device) for prompt in prompts],
        train_dataset=Subset(dataset, range(plan.eval_conversations, len(pairs))),
        eval_dataset=Subset(dataset, range(plan.eval_conversations)),
        budget=_budget(args, last),
        callbacks=_callbacks(args),
    )
    report(_what_is_computed(trainer, config))
    begin = time.perf_counter()
    if args.max_steps > steps_done(out):  # the Trainer would take one step more
        trainer.train(resume_from_checkpoint=str(last) if last else None)
    else:
        trainer.restore_best(last)
    seconds = time.perf_counter() - begin
    if trainer.state.best_model_checkpoint:
        step = str(trainer.state.best_model_checkpoint).rsplit("-", 1)[1]
        report(f"best tau {trainer.state.best_metric:.2f}, at step {step}")
    trainer.evaluate()  # of what is saved
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)
    report(f"trained for {seconds / 60:.1f} minutes, peak memory {peak:.1f} GB")
    if state.is_main_process:
        _save(trainer, plan, out)
        finish(out, trainer.state.global_step)
    state.wait_for_everyone()
    if args.push_to_hub:
        trainer.push_to_hub()
    return _load(out, plan)


def _save(trainer: DrafterTrainer, plan: TrainingPlan, out: Path) -> None:
    model = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    if plan.lora is None:
        model.loss_function = None
        model.to(torch.bfloat16).save_pretrained(out)
    else:
        model.save_pretrained(out)
    history = trainer.state.log_history
    calibration = asdict(trainer.calibration) if trainer.calibration else None
    write_json(out / "figures.json", {"history": history, "calibration": calibration})
    draw_pictures(history, calibration, out)


def _load(out: Path, plan: TrainingPlan) -> HSDrafter:
    drafter: HSDrafter
    if plan.lora is None:
        drafter = HSDrafter.from_pretrained(out)
    else:
        drafter = HSDrafter.from_pretrained(plan.init_from)
        drafter.load_adapter(str(out))
    return drafter


def _given(
    plan: TrainingPlan, seed: int, on_bad_line: Callable[[str], None] | None
) -> tuple[list[Conversation], list[Prompt]]:
    """Finished conversations and prompts of files and data set; none of either where the target is to invent them."""
    finished, prompts = [], []
    for path in plan.prompts:
        chats = read_conversations(path, plan.greedy_only, on_bad_line)
        asked = read_prompts(path, None if on_bad_line is None else _ignore)
        if not chats and not asked:
            raise ValueError(f"{path} holds no prompts: expected lines with `turns` or `messages`")
        finished += chats
        prompts += asked
    if plan.dataset is not None:
        prompts += prompts_from_dataset(plan.dataset, plan.dataset_config, plan.dataset_split, plan.dataset_column)
    unique = {prompt.key: prompt for prompt in prompts}
    order = sorted(unique, key=lambda key: hashlib.sha256(f"{seed} {key}".encode()).hexdigest())
    return finished, [unique[key] for key in order][: plan.num_prompts]


def _check_amount(plan: TrainingPlan, count: int) -> None:
    if _invents(plan):
        count = max(count, plan.num_prompts or INVENTED_PROMPTS)
    if count <= plan.eval_conversations:
        raise ValueError(
            f"{count} conversations and prompts are too few: {plan.eval_conversations} of them are held out; give "
            "more, or hold out fewer (--eval-conversations)"
        )


def _invents(plan: TrainingPlan) -> bool:
    return not plan.prompts and plan.dataset is None


def _answers(
    target: Any,
    tokenizer: Any,
    plan: TrainingPlan,
    seed: int,
    prompts: Sequence[Prompt],
    out: Path,
    report: Report,
) -> list[Conversation]:
    """The target's answers to all prompts, invented first where there are none."""
    state = PartialState()
    recipe = _recipe(target, tokenizer, plan, seed)
    sharded = is_sharded(target)
    same = RowFolder if state.is_main_process else _ReadOnlyRows  # where all processes do the same, one keeps it
    if _invents(plan):
        count = plan.num_prompts or INVENTED_PROMPTS
        made = same(out / "prompts", "Prompts a chat model invented.", {**recipe, "openings": list(plan.openings)})
        if state.is_main_process or sharded:
            invent_prompts(
                target,
                tokenizer,
                count,
                made,
                openings=plan.openings,
                seed=seed,
                on_batch=lambda done: report(f"prompts invented: {done}/{count}"),
            )
        state.wait_for_everyone()
        prompts = [Prompt.of(row["turns"], "invented") for row in made.rows()][:count]
    together = sharded and plan.answers_from is None
    rows = same if together else RowFolder
    store = rows(out / "data", "Chats answered by the target.", recipe, writer=state.process_index)
    done = store.keys()
    pending = [prompt for prompt in prompts if prompt.key not in done]
    if not prompts:
        return []
    state.wait_for_everyone()  # until all have seen the same rows
    share = pending if together else pending[state.process_index :: state.num_processes]
    skipped: list[str] = []
    # A conversation is cut at `max_length`; a prompt must leave room for an answer, and fit the target's window.
    limit = max(8, plan.max_length - min(plan.max_new_tokens, plan.max_length // 2))
    batches: Iterable[Sequence[Answered]]
    if plan.answers_from is not None and share:
        batches = (
            [answered]
            for answered in answer_by_server(
                plan.answers_from,
                share,
                model=plan.server_model,
                temperatures=_temperatures(plan),
                max_new_tokens=plan.max_new_tokens,
                seed=seed,
                on_skip=lambda prompt, why: skipped.append(why),
            )
        )
    else:
        batches = answer_prompts(
            target,
            tokenizer,
            share,
            temperatures=_temperatures(plan),
            max_new_tokens=plan.max_new_tokens,
            max_prompt_tokens=limit,
            batch_size=plan.answer_batch_size,
            invented_turns=plan.invented_turns,
            seed=seed,
            on_skip=lambda prompt, why: skipped.append(why),
        )
    store_answers(
        batches,
        store,
        on_progress=lambda count, speed: report(f"answers: {count}/{len(share)} prompts, {speed:,.0f} tokens/s"),
    )
    if skipped:
        report(f"{len(skipped)} prompts left out; the first because {skipped[0]}")
    state.wait_for_everyone()
    wanted = {prompt.key for prompt in prompts}
    return [Conversation.of(row["messages"]) for row in store.rows() if row["key"] in wanted]


class _ReadOnlyRows(RowFolder):
    """The rows as a process sees them that makes the same ones as another, which keeps them."""

    def append(self, rows: Sequence[dict[str, Any]]) -> None: ...


def _temperatures(plan: TrainingPlan) -> Sequence[float]:
    return (0.0,) if plan.greedy_only else plan.temperatures


def _recipe(target: Any, tokenizer: Any, plan: TrainingPlan, seed: int) -> dict[str, Any]:
    """Everything that decides the answers."""
    return {
        "target": fingerprint(target),
        "target_name": plan.drafter.get("target_name", ""),
        "target_revision": getattr(target.config, "_commit_hash", None),
        "chat_template": hashlib.sha256(str(tokenizer.chat_template).encode()).hexdigest()[:16],
        "temperatures": list(_temperatures(plan)),
        "top_k": 0,
        "top_p": 1.0,
        "max_new_tokens": plan.max_new_tokens,
        "invented_turns": plan.invented_turns,
        "seed": seed,
        "hf_hsdraft": __version__,
        "transformers": transformers_version,
    }


def _in_order(conversations: Sequence[Conversation], seed: int) -> list[Conversation]:
    """Ordered by digest: a shuffle which more data does not reshuffle.

    Of the conversations held out, the first ones, none was learned by an earlier run on a part of the same data, from
    whose drafter this one may start.
    """
    return sorted(conversations, key=lambda chat: hashlib.sha256(repr((seed, chat.messages)).encode()).hexdigest())


def _token_counts(tokenized: Sequence[Any]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return [torch.ones_like(chat.input_ids) for chat in tokenized], [chat.answer_mask for chat in tokenized]


def _settings(target: Any, plan: TrainingPlan, args: DrafterTrainingArguments) -> dict[str, Any]:
    digests = [hashlib.sha256(Path(name).read_bytes()).hexdigest()[:16] for name in plan.prompts]
    return {
        **asdict(plan),
        "prompts": [Path(name).name for name in plan.prompts],
        "prompt_digests": digests,
        "target": fingerprint(target),
        **{name: str(getattr(args, name)) for name in _ARGUMENTS_FIXED},
    }


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
    for name in ("tree_size", "beam_width"):  # decide no weights
        if name in plan.drafter:
            setattr(drafter.config, name, plan.drafter[name])
            setattr(drafter.generation_config, name, plan.drafter[name])
    drafter.config.check()
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
def start_from_target(drafter: HSDrafter, target: Any, finals: torch.Tensor) -> None:
    """Starts the parts that have an obvious counterpart in the target from it.

    The final norm takes the scale of the target's final hidden states, the injector's output the leading directions of
    the target's head: from the first step on both speak the head's language.

    Args:
        finals: `[N, D]`, float32, some final hidden states of the target.
    """
    if drafter.config.hidden_size != drafter.config.target_hidden_size:
        return
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


def _training_arguments(target: Any, out: Path, overrides: Mapping[str, Any]) -> DrafterTrainingArguments:
    """Raises a ValueError or TypeError for arguments that do not exist or contradict each other."""
    fields = {"output_dir": str(out / "checkpoints"), "use_cpu": target.device.type == "cpu", **overrides}
    for name in ("fsdp", "deepspeed"):
        if fields.get(name):
            raise ValueError(f"--{name} would shard the drafter, which is small; `accelerate launch` shards the target")
    if "eval_steps" in fields and "save_steps" not in fields:
        fields["save_steps"] = fields["eval_steps"]  # the best checkpoint must be one that was measured
    # Made here since the arguments would wait half an hour at most on CPUs.
    timeout = timedelta(seconds=fields.get("ddp_timeout", DrafterTrainingArguments.ddp_timeout))
    PartialState(cpu=fields["use_cpu"], timeout=timeout)
    args = DrafterTrainingArguments(**fields)
    # One process trains on one device; several are started by `accelerate launch`.
    args._n_gpu = min(args.n_gpu, 1)
    return args


def _callbacks(args: DrafterTrainingArguments) -> list[Any]:
    patience = args.early_stopping_patience
    return [] if patience is None else [EarlyStoppingCallback(early_stopping_patience=patience)]


def _budget(args: DrafterTrainingArguments, last: Path | None) -> TimeBudget | None:
    """The clock of a run, less what was spent before its last checkpoint."""
    if args.max_minutes is None:
        return None
    if last is None:
        return TimeBudget(args.max_minutes)
    states = json.loads((last / "trainer_state.json").read_text(encoding="utf-8"))["stateful_callbacks"]
    return TimeBudget(args.max_minutes, spent=states["TimeBudget"]["attributes"]["spent"])


def _what_is_computed(trainer: DrafterTrainer, config: HSDraftConfig) -> str:
    args, loss = trainer.args, trainer.loss
    return (
        f"{args.objective} on {args.data_policy} data; at most {args.chains_per_conversation} chains a conversation, "
        f"{args.rolled_fraction:.0%} of them {config.num_draft_steps} deep, depth weights "
        f"{', '.join(f'{weight:.2f}' for weight in loss.depth_weights)}; logits of {loss.rows_per_chunk} predictions x "
        f"{config.draft_vocab_size:,} tokens at a time"
    )


def _first_user_message(chat: Conversation) -> str:
    return next(content for role, content in chat.messages if role == "user")


def _silent(_: str) -> None:
    """Reports of all processes but the first."""


def _ignore(_: str) -> None:
    """A bad line that was reported before."""
