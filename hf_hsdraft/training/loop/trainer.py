"""`transformers.Trainer` with the drafter's loss. Measured tau decides which checkpoint is the best."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch.utils.checkpoint import checkpoint
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback, TrainerState

from ...core.progress import Reporter
from ...core.statistics import DraftStatistics
from ...drafters.base.draft_options import leave_folder
from ...drafters.base.target_weights import TargetWeights
from ...gpu.varying_shapes import varying_shapes
from ...runtime.target_loading import is_sharded
from ..data.conversations import TokenizedConversation
from ..data.features import Features, read_by_length
from ..evaluate.parity import ParityError, parity
from ..families.trainable import family_of
from ..loss.chains import DATA_POLICIES, Pack, PolicyStep, true_labels, unroll
from ..loss.loss import CHUNK_LOGITS, ChainLoss, LossParts
from ..loss.objectives import WHOLE_LOSSES, Candidates, objective_of
from .arguments import DrafterTrainingArguments
from .budget import TimeBudget, figures_in_words
from .start import check_learning

_BINS = 10  # of confidence


@dataclass(frozen=True)
class Calibration:
    """Confidence of first choices and their accuracy, as tables of K depths x `_BINS` equal bins of confidence.

    `accuracy` is the share of a bin's predictions whose first choice is the target's. Empty bins hold 0.
    """

    count: list[list[int]]
    confidence: list[list[float]]
    accuracy: list[list[float]]

    @classmethod
    def of(cls, parts: Iterable[LossParts], steps: int) -> Calibration:
        """Collects the measured predictions of several batches, for `steps` depths."""
        tables = torch.zeros(3, steps * _BINS)
        for part in parts:
            sure, right = part.confidence.cpu().float(), part.right.cpu().float()
            cell = part.depth.cpu() * _BINS + (sure * _BINS).long().clamp(max=_BINS - 1)
            tables.index_add_(1, cell, torch.stack([torch.ones_like(sure), sure, right]))
        count, *sums = tables.view(3, steps, _BINS)
        return cls(count.int().tolist(), *((each / count.clamp(min=1)).tolist() for each in sums))


class TrainingDiverged(RuntimeError):
    """The loss became infinite or not a number. Earlier checkpoints are good."""


def collate(conversations: Sequence[Features | TokenizedConversation]) -> dict[str, Any]:
    """Returns the conversations of a step as they are: they are packed where the target can make features."""
    return {"conversations": list(conversations)}


class DrafterTrainer(Trainer):
    """Trains a drafter against a frozen target.

    Args:
        model: a drafter of a family that can be trained, or a PEFT model of one.
        target: makes features that are not on disk, labels for drafted tokens, and the texts for tau.
        tau_prompts: inputs of `generate()` for measuring tau.
        token_counts: `[V]`, how often the answers have each token, for the columns that `candidates` draws; `None` for
            equally often.
        budget: clock that ends training and sets the learning rate; `None` to leave both to `args`.
        report: reports how far evaluations are; `None` to report nothing, and to leave printing to the Trainer.
        kwargs: arguments of `Trainer`. The data sets hold `Features`, or `TokenizedConversation`s whose features are
            computed in every step.
    """

    control: Any
    lr_scheduler: Any
    args: DrafterTrainingArguments

    def __init__(
        self,
        model: Any,
        args: DrafterTrainingArguments,
        *,
        target: Any,
        tau_prompts: Sequence[dict[str, torch.Tensor]] = (),
        token_counts: torch.Tensor | None = None,
        budget: TimeBudget | None = None,
        report: Reporter | None = None,
        **kwargs: Any,
    ) -> None:
        self.target = target
        self.tau_prompts = tau_prompts
        self.budget = budget or TimeBudget(math.inf)
        drafter = _base(model)
        check_learning(family_of(drafter), drafter.config, target, args)
        weights = drafter.borrow(target.get_input_embeddings(), target.get_output_embeddings())
        rows = target.get_output_embeddings().weight.detach()
        # The frozen head has the products' dtype: casting it in every step would take as long as they do.
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32
        self.teacher_head = rows[weights.vocab_ids.to(rows.device)].to(drafter.device, dtype)
        self.weights = weights if weights.head is None else replace(weights, head=weights.head.to(dtype))
        self.loss = _loss(args, drafter, self.weights, self.teacher_head, token_counts)
        drafter.loss_function = self.loss
        if args.activation_checkpointing:
            _recompute_layers(drafter)
            args.activation_checkpointing = False  # the Trainer's works only for layers called as modules
        with _without_frozen_config(drafter):
            super().__init__(model=model, args=args, data_collator=collate, **kwargs)
        if self.budget.limited:
            self.add_callback(self.budget)
        if report is not None:
            self.remove_callback(PrinterCallback)
        self.report = report or Reporter(lambda _: None)
        self._figures: dict[int, tuple[dict[str, Any], Calibration]] = {}
        self._recent: LossParts | None = None
        self._tokens, self._since = 0, time.perf_counter()
        self.calibration: Calibration | None = None
        self.held_out = (0, 0)  # conversations and prompts that the last evaluation measured

    @property
    def drafter(self) -> Any:
        """The drafter that is trained, without its wrappers."""
        return _base(self.accelerator.unwrap_model(self.model))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        if not self.budget.limited:
            return super().create_scheduler(num_training_steps, optimizer)
        if self.lr_scheduler is None:
            own = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(own, lambda _: self.budget.scale())
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def compute_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, **kwargs: Any) -> Any:
        measured = (self.state.global_step + 1) % max(1, int(self.state.logging_steps or 1)) == 0
        conversations = inputs["conversations"]
        self._tokens += sum(len(conversation.input_ids) for conversation in conversations)
        parts = self._parts(model, conversations, self.state.global_step, measured)
        if not bool(torch.isfinite(parts.loss)):
            raise TrainingDiverged(
                f"the loss is {parts.loss.item()} at step {self.state.global_step}: checkpoints until then are good. "
                "Continue from one with --init-from, another --out and a lower --learning-rate"
            )
        if measured:
            self._recent = replace(parts, loss=parts.loss.detach())
        return (parts.loss, {"loss": parts.loss}) if return_outputs else parts.loss

    def _parts(self, model: Any, conversations: Sequence[Any], step: int, measured: bool) -> LossParts:
        pack = self.pack(conversations)
        drafter = _base(self.accelerator.unwrap_model(model))
        seeds = [zlib.crc32(chat.input_ids.cpu().numpy().tobytes()) + step for chat in conversations]
        args = self.args
        policy = DATA_POLICIES[args.data_policy if drafter.training else "teacher"]  # evaluations follow the text
        step_data = PolicyStep(drafter, self.target, self.weights, pack, args, seeds, self.loss.rows_per_chunk)
        chains, labels = policy.chains(step_data)
        count = labels.count
        if model.training and self.accelerator.num_processes > 1:
            # Gradients are averaged over all processes. The average count makes them equal to one large batch's.
            count = self.accelerator.reduce(count.float(), reduction="mean")
        labels = replace(labels, count=count, step=step, measured=measured)
        predictions = family_of(drafter).predictions(drafter, self.weights)
        with varying_shapes(self.args.device):
            output = unroll(model, predictions, pack, chains, labels.tokens, labels)
        loss: LossParts = output["loss"]
        return loss

    def pack(self, conversations: Sequence[Features | TokenizedConversation]) -> Pack:
        """Packs the conversations of a step. The target makes the features that are missing."""
        drafter = _base(self.model)
        taps = family_of(drafter).taps(drafter, self.target)
        bare = [chat for chat in conversations if not isinstance(chat, Features)]
        read = iter(read_by_length(self.target, taps, bare, self.args.device))
        features = [chat if isinstance(chat, Features) else next(read) for chat in conversations]
        return Pack.of(features, pad_to_multiple_of=128).to(self.args.device, self.teacher_head.dtype)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds tokens/s and the accuracy by depth of the latest step to each line about training."""
        if self._recent is not None and "loss" in logs:
            logs |= {f"accuracy_{depth + 1}": round(a, 3) for depth, a in enumerate(self._recent.accuracy.tolist())}
            now = time.perf_counter()
            logs["tokens_per_second"] = round(self._tokens * self.accelerator.num_processes / (now - self._since), 1)
            self._tokens, self._since = 0, now
            if self.budget.limited:
                logs["minutes"] = round(self.budget.spent / 60, 1)
        super().log(logs, *args, **kwargs)

    @torch.no_grad()
    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval") -> Any:
        """Measures held-out loss and accuracy by depth and, by generating texts, tau and acceptance by depth.

        With a time budget it measures as much as there is time for, see `TimeBudget.within`.
        """
        begin, since, limit = time.monotonic(), time.perf_counter(), self.budget.evaluation_limit
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        model = self.model_wrapped if self.model_wrapped is not None else self.model
        model.eval()
        size = self.args.per_device_eval_batch_size
        batches = [range(at, min(at + size, len(dataset))) for at in range(0, len(dataset), size)]
        parts: list[LossParts] = []
        calls: list[DraftStatistics] = []
        distance = math.nan
        everything = len(dataset) + len(self.tau_prompts)
        with self.report.stage("evaluating", "conversations and prompts", everything) as stage:
            for batch in self.budget.within(batches, "batches", 0.4 * limit):
                with self.accelerator.autocast():  # a resumed run may evaluate before the Trainer has wrapped the model
                    parts.append(self._parts(model, [dataset[i] for i in batch], 0, measured=True))
                stage.advance(batch.stop)
            self.held_out = (batch.stop, 0)
            if self.tau_prompts:
                end = begin + limit
                left = 0.8 * limit - (time.monotonic() - begin)
                for call in self._decode(self.budget.within(self.tau_prompts, "prompts", left), end):
                    calls.append(call)
                    stage.advance(batch.stop + len(calls))
                distance = self._parity(self.tau_prompts[: min(2, len(calls))], end)
                self.held_out = (batch.stop, len(calls))
            metrics = self._metrics(parts, calls, distance, metric_key_prefix)
            calibration = Calibration.of(parts, len(parts[0].count))
            metrics[f"{metric_key_prefix}_seconds"] = round(time.monotonic() - begin, 1)
            # All processes must choose the same best checkpoint, and stop at the same step.
            [metrics] = broadcast_object_list([metrics])
            note = f"step {self.state.global_step:,}, {figures_in_words(metrics)}"
            if (measured := sum(self.held_out)) < everything:
                note += f", of {everything:,} as many as the time budget has room for"
            stage.total = measured
            stage.advance(measured, note)
        self.calibration = calibration
        self._figures[self.state.global_step] = (dict(metrics), calibration)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        model.train()
        self._since += time.perf_counter() - since  # tokens/s counts the time of training alone
        return metrics

    def _metrics(
        self, parts: Sequence[LossParts], calls: Sequence[DraftStatistics], distance: float, prefix: str
    ) -> dict[str, Any]:
        # The means are over predictions, because a pack with few of them must not count as much as the others.
        counts = torch.stack([part.count for part in parts])
        divergence, accuracy = (
            (torch.stack([getattr(part, name) for part in parts]) * counts).sum(dim=0) / counts.sum(dim=0).clamp(min=1)
            for name in ("divergence", "accuracy")
        )
        scale = torch.tensor(self.args.weights_of_depths(len(divergence)), device=divergence.device)
        scale = scale * (counts.sum(dim=0) > 0)  # frames have fewer labels than depths
        metrics = {f"{prefix}_loss": float((divergence * scale).sum() / scale.sum().clamp(min=1e-9))}
        metrics |= _by_depth(f"{prefix}_accuracy", accuracy.tolist())
        if calls:
            metrics[f"{prefix}_tau"] = DraftStatistics.sum(calls).tau
            metrics |= _by_depth(f"{prefix}_acceptance", acceptance(calls, len(divergence)))
            metrics[f"{prefix}_parity"] = distance
        return metrics

    def show(self, step: int) -> None:
        """Makes the figures of the loaded checkpoint the last ones of the log."""
        if step in self._figures:
            metrics, self.calibration = self._figures[step]
            self.log(dict(metrics))
        else:  # an earlier process measured it
            self.evaluate()

    def _seconds(self, end: float) -> float | None:
        """Seconds left for a text of an evaluation that ends at `end`; `None` for no limit."""
        if not self.budget.limited or is_sharded(self.target):  # all processes have to decode the same tokens
            return None
        return max(end - time.monotonic(), 0.0)

    def _parity(self, prompts: Sequence[dict[str, torch.Tensor]], end: float) -> float:
        """Returns the greatest total variation between training and decoding over all depths.

        After `end`, if there is a time budget, nothing is compared: not a number. A `ParityError` is raised if it is
        more than rounding explains: such training would never improve tau.
        """
        if (seconds := self._seconds(end)) == 0.0:
            return math.nan
        ids = [prompt["input_ids"] for prompt in prompts]
        limits: dict[str, Any] = {"max_new_tokens": self.args.eval_new_tokens, "max_time": seconds}
        report = parity(self.snapshot(), self.target, ids, **limits, labels_of=true_labels)
        if report.depths and not report.passed:
            raise ParityError("\n".join([*report.lines(), report.explain()]))
        return round(max((max(depth.drafter, depth.target) for depth in report.depths), default=math.nan), 5)

    def _decode(self, prompts: Iterable[dict[str, torch.Tensor]], end: float) -> Iterator[DraftStatistics]:
        drafter = copy.copy(self.snapshot())  # shares the weights, not the options
        drafter.generation_config = copy.deepcopy(drafter.generation_config)
        drafter.generation_config.ngram_length = 0  # tau must not depend on repetitions in the texts
        drafter.generation_config.tree_sizing = "fixed"  # nor on the machine
        leave_folder(drafter)  # nor on what is not trained here
        for prompt in prompts:
            yield self.target.generate(
                **prompt,
                assistant_model=drafter,
                do_sample=False,
                max_new_tokens=self.args.eval_new_tokens,
                max_time=self._seconds(end),
                return_dict_in_generate=True,
                synced_gpus=False,  # of a sharded target: all processes decode the same texts, so none has to wait
            ).statistics

    def restore(self, checkpoint: Path) -> None:
        """Restores the state of a run that ended at a checkpoint, and its best or last weights."""
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        if not (self.args.load_best_model_at_end and self.state.best_model_checkpoint):
            self.state.best_model_checkpoint = str(checkpoint)
        self._load_best_model()

    def _load_best_model(self) -> None:
        """Loads the best checkpoint from the folder of the run, which may have been moved since.

        A missing one is a FileNotFoundError; the Trainer itself would only warn, and keep its weights.
        """
        best = Path(self.args.output_dir) / Path(str(self.state.best_model_checkpoint)).name
        if not best.is_dir():
            raise FileNotFoundError(f"the best checkpoint is gone: {best}; train again, in another --out")
        self.state.best_model_checkpoint = str(best)
        model = self.accelerator.unwrap_model(self.model)
        name = getattr(model, "active_adapter", None)
        if isinstance(name, str) and (best / name).is_dir():  # PEFT's place for a named adapter, which Trainer ignores
            model.load_adapter(str(best / name), name, is_trainable=True)
        else:
            super()._load_best_model()

    def snapshot(self) -> Any:
        """Returns the drafter as it is now, without the wrappers of mixed precision and data parallelism."""
        model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=True)
        drafter = _base(model)
        if drafter is not model:
            return drafter.eval()  # PEFT puts layers into the drafter and nothing around it
        return family_of(model).snapshot(model).eval()


def _loss(
    args: DrafterTrainingArguments,
    drafter: Any,
    weights: TargetWeights,
    head: torch.Tensor,
    token_counts: torch.Tensor | None,
) -> Any:
    on_cpu = drafter.device.type == "cpu"
    if args.objective in WHOLE_LOSSES:
        chunk = CHUNK_LOGITS["cpu" if on_cpu else "cuda"]
        return WHOLE_LOSSES[args.objective].made(args, drafter, weights, head, chunk)
    candidates = None
    if args.candidates:
        ids = weights.vocab_ids
        own = torch.ones(len(ids)) if token_counts is None else token_counts[ids.to(token_counts.device)]
        candidates = Candidates.of(args.candidates, args.drawn_candidates, own.to(ids.device))
    chunks = {} if on_cpu else dict.fromkeys(("chunk_logits", "scored_logits"), CHUNK_LOGITS["cuda"])
    return ChainLoss(
        weights,
        head,
        objective_of(args.objective, args.ce_share),
        args.weights_of_depths(drafter.num_draft_steps),
        terms=list(args.terms.values()),
        by_prediction=args.depth_weighting == "by-prediction",
        candidates=candidates,
        **chunks,
    )


def _recompute_layers(drafter: Any) -> None:
    """Lets the backward recompute the trunk's layers, which would take most of a step's memory for long packs."""
    for layer in family_of(drafter).layers(drafter):
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)


@contextlib.contextmanager
def _without_frozen_config(drafter: Any) -> Iterator[None]:
    """Hides a dataclass configuration from the Trainer, which would set `use_cache` in it."""
    config = drafter.config
    if is_dataclass(config):
        drafter.config = None
    try:
        yield
    finally:
        drafter.config = config


def acceptance(calls: Sequence[DraftStatistics], steps: int) -> list[float]:
    """Returns for d = 1 .. `steps` the share of rounds that accept d tokens or more, among those with d - 1 or more."""
    lengths = [length for call in calls for length in call.accepted_lengths]
    reached = [sum(length >= depth for length in lengths) for depth in range(steps + 1)]
    return [after / before if before else math.nan for before, after in itertools.pairwise(reached)]


def _by_depth(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_{depth}": round(value, 4) for depth, value in enumerate(values, 1)}


def _base(model: Any) -> Any:
    """Returns the drafter inside a PEFT model, or the drafter itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
