"""A training run, from nothing or from prompts to a saved drafter. `hsdraft train` calls it."""

from __future__ import annotations

import contextlib
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import patch_environment
from torch.utils.data import Subset
from transformers import EarlyStoppingCallback

from ...core.methods import load
from ...core.progress import Reporter
from ...hub.publication import Repository
from ...runtime.target_limits import text_config
from ...runtime.target_loading import is_sharded
from ..data.conversations import Conversation, Prompt, TokenizedConversation, keeps_turns, tokenize_conversation
from ..data.features import FeatureCache, LikelyTokens, read_by_length
from ..data.gather import Answering, ChatStream, StreamPlace, in_order, kinds_to_invent, read_sources, recipe_of
from ..data.generating import can_record
from ..data.plan import Report, TrainingPlan
from ..data.vocabulary import answer_counts, with_draft_vocabulary
from ..families.family import TrainableFamily
from ..families.trainable import family_for
from ..files import disk_full, is_disk_full
from . import run_folder as folder
from .arguments import DrafterTrainingArguments
from .budget import ANSWERS, FIRST_ANSWERS, TimeBudget, TrainingProgress
from .results import RenewedPictures, name_data_set, publish, save, saved, untrained, what_is_computed
from .start import (
    check_learning,
    check_target_can_teach,
    draft_vocabulary,
    drafter_to_start_from,
    fingerprint,
    prepared,
)
from .trainer import DrafterTrainer

_CANDIDATES, _LARGE_VOCABULARY = 16, 4096  # by default so many are compared, where so many can be drafted
_FEWEST = 3  # more chats than these: then training begins when the time for answers is over
BEFORE_LEARNING = 1024  # conversations of a stream that choose the held-out ones and the draft vocabulary


@patch_environment(accelerate_use_fsdp="false", accelerate_use_deepspeed="false")
def train(
    target: Any,
    tokenizer: Any,
    plan: TrainingPlan,
    arguments: Mapping[str, Any] | None = None,
    report: Report = print,
    began: float | None = None,
) -> Any:
    """Makes prompts and answers, trains a drafter on them, and returns the best one by tau, as it was saved.

    A killed run resumes from what it has kept. Each of several processes (`accelerate launch`) answers its share and
    has the whole drafter; FSDP and ZeRO shard the target only, see `load_target`.

    Args:
        plan: what to learn from and what to make.
        arguments: fields of `DrafterTrainingArguments` that differ from their defaults.
        report: a function that takes lines, or a `Reporter`.
        began: when the run's `max_minutes` began, in seconds of `time.monotonic()`; `None` for now.

    Raises:
        ValueError: there is nothing to train on, or plan, arguments and target do not fit together.
        TrainingDiverged: the loss became infinite or not a number.
        OSError: the disk is full. What is finished is kept.
        RuntimeError: another run is at work in the same folder.
    """
    out, began = Path(plan.out), time.monotonic() if began is None else began
    plan, args = prepared(plan, arguments or {}, target.device.type)
    main = PartialState().is_main_process
    report = Reporter.of(report if main else lambda _: None)
    if is_sharded(target):
        report(f"target sharded over {PartialState().num_processes} processes")
    family = family_for(plan)
    check_target_can_teach(target, tokenizer, family)
    run = _Run(target, tokenizer, plan, args, family, fingerprint(target), report, began)
    start = run.start()
    finished, prompts = run.sources()
    pushes = (arguments or {}).get("push_to_hub", False)
    repository, chats = _on_the_hub(plan, args, run.recipe, pushes) if main else ("", None)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with folder.only_run(out) if main else contextlib.nullcontext():
            if main:
                folder.claim(out, folder.settings_of(run.identity, plan, args))
            if folder.is_finished(out, folder.limits_of(args)):
                limits = (f"{name} {value:g}" for name, value in folder.limits_of(args).items())
                report(f"already finished: {', '.join(limits)}")
            else:
                torch.manual_seed(args.seed)
                run.answer_and_learn(finished, prompts, start)
            if chats is not None:  # before the drafter, as its card names them
                report(f"chats sent: {chats.send(out / 'data')}")
                name_data_set(plan, chats.name)
            if repository:
                publish(plan, repository, args.hub_token)
                report(f"pushed to {repository}")
            return saved(plan, family)
    except OSError as error:
        if is_disk_full(error) and "the disk is full" not in str(error):
            raise disk_full(out) from error
        raise


def _on_the_hub(
    plan: TrainingPlan, args: DrafterTrainingArguments, recipe: dict[str, Any], pushes: bool
) -> tuple[str, Any]:
    """Prepares the repositories that the drafter and the chats are sent to; returns the first one's name, if any."""
    hub = {"token": args.hub_token, "private": args.hub_private_repo}
    repository, chats = "", None
    if pushes:
        repository = Repository.open(args.hub_model_id or Path(plan.out).resolve().name, {**hub}).name
    if plan.publish_data is not None:
        kind = load("publishing", "chats").PublishedChats
        chats = kind(plan.publish_data, plan.describe_prompts(), plan.dataset, hub).prepare(recipe)
    return repository, chats


@dataclass(frozen=True)
class _Run:
    """A run whose plan and arguments are complete; `identity` is the target's fingerprint."""

    target: Any
    tokenizer: Any
    plan: TrainingPlan
    args: DrafterTrainingArguments
    family: TrainableFamily
    identity: str
    report: Reporter
    began: float

    @property
    def recipe(self) -> dict[str, Any]:
        return recipe_of(self.target, self.tokenizer, self.plan, self.args.seed, self.identity)

    def start(self) -> Any:
        """Returns the drafter to start from, if any; a ValueError if what the plan asks for cannot be trained."""
        plan, args = self.plan, self.args
        start = drafter_to_start_from(self.family, self.target, self.tokenizer, plan)
        config = start.config if start else self.family.config_for(self.target, plan.drafter)
        if args.candidates is None:  # the default is to compare few where a gain was measured
            measured = self.target.device.type == "cpu" and args.data_policy == "teacher" and plan.lora is None
            args.candidates = None if measured and self.family.by_columns(config) else 0
        check_learning(self.family, config, self.target, args)
        args.weights_of_depths(config.num_draft_steps)
        args.check_metric(config.num_draft_steps, generates=plan.eval_prompts > 0)
        return start

    def sources(self) -> tuple[list[Conversation], list[Prompt]]:
        """`read_sources`; a ValueError if there are too few, or the tokenizer's template cannot render them."""
        plan, bad = self.plan, list[str]()
        on_bad_line = bad.append if plan.skip_bad_lines else None
        finished, prompts = read_sources(plan, self.tokenizer, self.args.seed, on_bad_line, self.report)
        for line in bad:
            self.report(f"left out: {line}")
        plan.check_amount(len(finished) + len(prompts))
        plan.check_publishes(len(prompts))
        if plan.invents:
            kinds_to_invent(plan, self.tokenizer)
        several = plan.invented_turns or any(len(chat.answers) > 1 for chat in finished)
        if (several or any(len(prompt.turns) > 1 for prompt in prompts)) and not keeps_turns(self.tokenizer):
            self.report("the chat template changes earlier turns once later ones follow: only the last one is learned")
        return finished, prompts

    def answer_and_learn(self, finished: list[Conversation], prompts: Sequence[Prompt], start: Any) -> None:
        """Trains on finished conversations and on the target's answers to prompts, afterwards or meanwhile."""
        plan, budget, features = self.plan, self._budget(), self._features(start, bool(finished))
        timed = self.args.max_minutes is not None
        shared = (self.target, self.tokenizer, plan, self.args.seed, self.identity, self.report)
        answering = Answering(*shared, features, plan.stream or timed, budget.answer_seconds)
        groups = answering.groups(prompts)
        chats = [*finished, *next(groups)]
        total: float = answering.expected(prompts)
        unit, given = "prompts", len(finished)
        if plan.stream:
            unit, total, given = "chats", BEFORE_LEARNING, 0
        if timed:
            unit, total = "minutes", budget.answer_minutes

        def done() -> float:
            return min(budget.spent / 60 if timed else len(chats) - given, total)

        enough = BEFORE_LEARNING if plan.stream else math.inf
        fewest = plan.eval_conversations if plan.stream else _FEWEST
        with self.report.stage("answering", unit, total, done()) as stage:
            while len(chats) < enough:
                left = budget.answer_seconds()
                late = left is not None and left <= 0.0
                if (late and len(chats) > fewest) or (group := next(groups, None)) is None:
                    break
                chats += group
                stage.advance(done(), f"{len(chats):,} chats" if timed else None)
        self.learn_from(chats, start, features, groups if plan.stream else None, budget)

    def _budget(self) -> TimeBudget:
        """The time of the whole run, or of its training; without end if it is not limited."""
        args, out = self.args, Path(self.plan.out)
        if args.max_minutes is None:
            return TimeBudget(args.max_training_minutes or math.inf)
        share = ANSWERS  # of all minutes: a finished run that gets more of them answers more too
        if self.plan.stream:  # it answers while it trains
            share = 0.0 if folder.last_checkpoint(out) else FIRST_ANSWERS
        return TimeBudget(args.max_minutes, out, share, self.began)

    def learn_from(
        self,
        conversations: Sequence[Conversation],
        start: Any,
        features: FeatureCache | None,
        groups: Iterator[list[Conversation]] | None,
        budget: TimeBudget,
    ) -> None:
        """Trains a drafter, `start` or a fresh one, and saves the best.

        The first conversations choose the draft vocabulary, and some of these are held out. `groups` yields further
        ones; `None` for no stream. Without `features` on disk every step computes them.
        """
        target, plan, args, family, report = self.target, self.plan, self.args, self.family, self.report
        first, held_out = len(conversations), plan.eval_conversations
        if budget.first is not None or groups is not None:  # what a resumed run has answered since changes neither
            first = min(budget.first or BEFORE_LEARNING, first)
        if groups is None and args.max_minutes is not None:  # a slow machine has few
            held_out = min(held_out, first // 2)
        pairs = self._tokenized(in_order(conversations[:first], args.seed), held_out)
        further = conversations[first:]
        begun, first, pairs = first, len(pairs), [*pairs, *(self._tokenized(further, -1) if further else ())]
        tokenized = [pair[1] for pair in pairs]
        amount = _amount(tokenized)  # those of a stream join them
        report("{chats:,} conversations, {tokens:,} tokens, {answers:,} of them answers".format(**amount))
        drafter = self._drafter(start, tokenized[:first])
        if args.candidates is None:
            args.candidates = _CANDIDATES if len(drafter.draft_vocab_ids()) >= _LARGE_VOCABULARY else 0
        taps = family.taps(drafter, target)
        readable = self._cached(drafter, features) if features is not None else lambda chats: chats
        dataset: Any = readable(tokenized)
        model = self._model(drafter.to(args.device), start, taps, tokenized[:16])
        last, patience = folder.last_checkpoint(Path(plan.out)), args.early_stopping_patience
        callbacks: list[Any] = [RenewedPictures(plan.results)]
        callbacks += [] if patience is None else [EarlyStoppingCallback(early_stopping_patience=patience)]
        train_dataset: Any = Subset(dataset, range(held_out, len(pairs)))
        if groups is not None:
            answered = (readable(self._answered(group, amount)) for group in groups)
            samples = args.train_batch_size * args.gradient_accumulation_steps * folder.steps_done(Path(plan.out))
            place = StreamPlace.after(samples, plan.passes, folder.callback_of(last, StreamPlace))
            train_dataset = ChatStream(train_dataset, answered, plan.passes, args.seed, place.begin)
            callbacks.append(place)
        if budget.limited:
            budget.begin_training(begun, folder.callback_of(last, TimeBudget))
        trainer = DrafterTrainer(
            model,
            args,
            target=target,
            tau_prompts=self._tau_prompts([chat for chat, _ in pairs[:held_out]]),
            token_counts=answer_counts(tokenized[:first], text_config(target).vocab_size) if args.candidates else None,
            train_dataset=train_dataset,
            eval_dataset=Subset(dataset, range(held_out)),
            budget=budget,
            report=report,
            callbacks=callbacks,
        )
        report(what_is_computed(trainer))
        begin = time.perf_counter()
        _learn(trainer, last, report)
        self._keep(trainer, amount, begin)

    def _model(
        self, drafter: Any, start: Any, taps: Sequence[int], sample: Sequence[TokenizedConversation]
    ) -> torch.nn.Module:
        """Returns what is trained: the drafter or its adapter. A fresh drafter begins from the target, by a sample."""
        target, plan, family = self.target, self.plan, self.family
        if not start:
            read = read_by_length(target, taps, sample)
            family.start_from_target(drafter, target, torch.cat([features.final for features in read]).float())
        model: torch.nn.Module = drafter
        if plan.lora is not None:
            model = load("adapting", "peft").with_lora(drafter, plan.lora, plan.adapter_name)
        size, trained = drafter.parameters(), (part for part in model.parameters() if part.requires_grad)
        whole, learned = (sum(part.numel() for part in parts) / 1e6 for parts in (size, trained))
        self.report(f"drafter of {whole:.1f}M parameters, {learned:.1f}M trained")
        return model

    def _keep(self, trainer: DrafterTrainer, amount: Counter[str], begin: float) -> None:
        """Saves the drafter that was trained since `begin`, in seconds, on an amount of conversations."""
        target, plan, family, report = self.target, self.plan, self.family, self.report
        out, state = Path(plan.out), PartialState()
        if plan.lora is None:
            try:
                limited = trainer.budget.limited and not is_sharded(target)  # all processes have to write as much
                seconds = trainer.budget.remaining if limited else None
                name = plan.drafter.get("target_name")
                family.record_target(trainer.drafter, target, self.tokenizer, name, seconds)
            except Exception as error:  # the drafter is saved all the same
                report(f"what the target writes could not be recorded: {error}")
        if state.is_main_process:
            data = f"{_in_words(amount)}, by the target itself"
            save(trainer, plan, family, {"data": data, "prompts": plan.describe_prompts()}, report)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)
            minutes = (time.perf_counter() - begin) / 60
            spent = f"{minutes:.1f} minutes from the first step of this run to the saved drafter"
            report(f"{spent}, peak memory {peak:.1f} GB")
            steps = trainer.state.global_step
            vain = untrained(trainer.state.log_history, steps)
            folder.finish(out, steps, folder.limits_of(self.args), vain, amount)
        state.wait_for_everyone()

    def _answered(self, conversations: Sequence[Conversation], amount: Counter[str]) -> list[TokenizedConversation]:
        """Returns the tokens of a stream's conversations, which join the amount."""
        every = [tokenize_conversation(self.tokenizer, chat, self.plan.max_length) for chat in conversations]
        tokenized = [chat for chat in every if bool(chat.answer_mask[2:].any())]
        amount += _amount(tokenized)
        self.report(_in_words(amount))
        return tokenized

    def _tokenized(
        self, conversations: Sequence[Conversation], held_out: int
    ) -> list[tuple[Conversation, TokenizedConversation]]:
        """Returns conversations with something to learn, each with its tokens.

        A ValueError is raised unless more than `held_out` are left.
        """
        most, pairs = self.plan.max_length, list[tuple[Conversation, TokenizedConversation]]()
        with self.report.stage("tokenizing", "conversations", len(conversations)) as stage:
            for chat in conversations:
                pairs.append((chat, tokenize_conversation(self.tokenizer, chat, most)))
                stage.advance(len(pairs))
        pairs = [pair for pair in pairs if bool(pair[1].answer_mask[2:].any())]  # a chain predicts x_2 at the earliest
        if lost := len(conversations) - len(pairs):
            self.report(f"{lost} conversations left out: no answer within the first {most} tokens (--max-length)")
        if cut := sum(len(chat.input_ids) == most for _, chat in pairs):
            self.report(f"{cut} conversations cut at {most} tokens (--max-length)")
        if len(pairs) <= held_out:
            raise ValueError(f"{len(pairs)} conversations are left, {held_out} are to be held out: give more")
        return pairs

    def _drafter(self, start: Any, tokenized: Sequence[TokenizedConversation]) -> Any:
        """Returns the drafter to start from, with the draft vocabulary that the plan asks for, or a fresh one."""

        def choose() -> list[int]:
            return draft_vocabulary(self.family, self.target, self.tokenizer, tokenized, self.plan, self.report)

        wanted = self.plan.drafter.get("draft_vocab_size")
        if start and wanted not in (None, start.config.draft_vocab_size):
            rows = self.target.get_output_embeddings().weight
            start = with_draft_vocabulary(start, choose(), rows)
        torch.manual_seed(self.args.seed)  # answering has advanced the RNG differently in each process
        longest = max(len(chat.input_ids) for chat in tokenized)
        return start or self.family.fresh(self.target, self.plan.drafter, longest, choose)

    def _features(self, start: Any, answered: bool) -> FeatureCache | None:
        """The features on disk that the drafter to train reads, if the plan keeps them.

        `answered` says whether some conversations came with their answers.
        """
        family, target, keeps = self.family, self.target, self.plan.cache_taps
        if keeps is None:
            keeps = can_record(target) and not answered and self.plan.answers_from is None
        if not keeps:
            return None
        with torch.random.fork_rng(devices=[]):  # or sampled answers would change
            taps = family.taps(start or family.untrained(target, self.plan.drafter), target)
        return FeatureCache(target, taps, Path(self.plan.out) / "features", self.identity, self.report)

    def _cached(self, drafter: Any, cache: FeatureCache) -> Callable[[Sequence[TokenizedConversation]], Any]:
        """Returns a function that returns the features of conversations, after writing those that are missing."""
        likely = None
        if candidates := self.args.candidates:
            ids = drafter.draft_vocab_ids()
            rows = self.target.get_output_embeddings().weight.detach()
            likely = LikelyTokens(rows[ids.to(rows.device)].to(torch.bfloat16), ids, candidates, self.report)
        return lambda chats: cache.dataset(chats, likely)

    def _tau_prompts(self, chats: Sequence[Conversation]) -> list[dict[str, torch.Tensor]]:
        """Returns inputs of held-out chats up to the user's first message, where they leave room for an answer."""
        window = getattr(self.target.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        asked = [chat for chat in chats if chat.turns][: self.plan.eval_prompts]
        texts = [chat.first_request(self.tokenizer) for chat in asked]
        found = [self.tokenizer(text, add_special_tokens=False, return_tensors="pt") for text in texts]
        names = "input_ids", "attention_mask"
        encoded = [{name: inputs[name].to(self.target.device) for name in names} for inputs in found]
        return [inputs for inputs in encoded if inputs["input_ids"].shape[1] + self.args.eval_new_tokens <= window]


def _amount(chats: Sequence[TokenizedConversation]) -> Counter[str]:
    tokens, answers = sum(len(chat.input_ids) for chat in chats), sum(int(chat.answer_mask.sum()) for chat in chats)
    return Counter(chats=len(chats), tokens=tokens, answers=answers)


def _in_words(amount: Counter[str]) -> str:
    return f"{amount['chats']:,} conversations, {amount['answers']:,} answer tokens"


def _learn(trainer: DrafterTrainer, last: Path | None, report: Reporter) -> None:
    """Takes the steps that are left after checkpoint `last`, and loads the best drafter."""
    args, budget = trainer.args, trainer.budget
    minutes = budget.minutes if budget.limited else None
    if last is not None and folder.had_ended(last, args, minutes):  # the Trainer would take one more step
        trainer.restore(last)
    else:
        if budget.limited:
            left = budget.minutes - budget.spent / 60
            report(f"{left:.3g} minutes begin: steps, evaluations and pictures, until the drafter is saved")
        with report.stage("training", "minutes" if budget.limited else "steps") as stage:
            trainer.add_callback(TrainingProgress(stage, budget if budget.limited else None))
            trainer.train(resume_from_checkpoint=str(last) if last else None)
    best = trainer.state.best_model_checkpoint
    if best:
        report(f"best {args.metric_for_best_model} {trainer.state.best_metric:.2f}, at step {best.rsplit('-', 1)[1]}")
    if trainer.calibration is None or (best and int(best.rsplit("-", 1)[1]) != trainer.state.global_step):
        # The last figures must be the saved drafter's.
        trainer.show(int(best.rsplit("-", 1)[1]) if best else trainer.state.global_step)
