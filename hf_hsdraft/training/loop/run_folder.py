"""The folder of a run: its settings, its checkpoints, and how it ended."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ...hub.drafter_files import CONFIG, WEIGHTS, header, read_json
from ..data.plan import TrainingPlan
from ..files import read_kept, write_json
from .arguments import TRAINING_OPTIONS, DrafterTrainingArguments
from .budget import TimeBudget

_PLAN, _FINISHED, _LOCK = "training_plan.json", "finished.json", ".lock"
_VOCABULARY, _IDS = "draft_vocabulary.json", "draft_vocab_ids"
# Settings that may change when a run is resumed. Others would mix two different drafters.
_MAY_CHANGE = {"out", "eval_prompts", "answer_batch_size", "answers_from", "server_model", "cache_taps", "publish_data"}
_FIXED = (
    "learning_rate", "lr_scheduler_type", "warmup_steps", "weight_decay", "per_device_train_batch_size",
    "gradient_accumulation_steps", "objective", "ce_share", "data_policy", "depth_weighting", "depth_decay",
    "depth_weights", "chains_per_conversation", "rolled_fraction", "candidates", "drawn_candidates", "seed", "bf16",
)  # fmt: skip


def settings_of(identity: str, plan: TrainingPlan, args: DrafterTrainingArguments) -> dict[str, Any]:
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
        "answers by the clock": args.max_minutes is not None,  # decides how many conversations there are
        **{name: str(getattr(args, name)) for name in _FIXED},
        **{name: str(args.method_options.get(name, each.default)) for name, each in TRAINING_OPTIONS.items()},
    }


def claim(out: Path, settings: dict[str, Any]) -> None:
    """Writes the settings of a run into its folder; a ValueError names those that differ from the folder's.

    Before the first checkpoint all settings may change, as answers and features have their own checks.
    """
    path = out / _PLAN
    settings = json.loads(json.dumps(settings))  # tuples become lists, as on disk
    if steps_done(out):
        stored = read_kept(path, "delete it, and give the command with which the run began, or use a new --out")
        differing = sorted(
            name for name in settings if name in stored and name not in _MAY_CHANGE and stored[name] != settings[name]
        )
        if differing:
            changes = ", ".join(f"{name}: {stored[name]!r} -> {settings[name]!r}" for name in differing)
            raise ValueError(
                f"{out} holds a run with other settings ({changes}); resume it with the same, or use a new --out"
            )
    write_json(path, settings)


@contextlib.contextmanager
def only_run(out: Path) -> Iterator[None]:
    """Locks a folder against other runs, until the process ends at the latest. Another run there is a RuntimeError."""
    lock = FileLock(out / _LOCK)
    try:
        lock.acquire(timeout=0)
    except NotImplementedError:  # a file system without locks
        pass
    except Timeout:
        raise RuntimeError(f"another run is at work in {out}: wait until it ends, or use a new --out") from None
    try:
        yield
    finally:
        lock.release()


def check_no_other_run(out: Path) -> None:
    """Raises a RuntimeError if a run is at work in a folder."""
    if (out / _LOCK).exists():
        with only_run(out):
            pass


def finish(
    out: Path, steps: int, limits: dict[str, float], untrained: bool = False, amount: Mapping[str, int] | None = None
) -> None:
    """Records that a run's drafter is saved, after how many steps, what ended training, if in vain, and its texts."""
    write_json(out / _FINISHED, {"steps": steps, "limits": limits, "untrained": untrained, "amount": amount or {}})


def _ended(out: Path) -> dict[str, Any]:
    """What `finish` recorded; empty for nothing, and for a damaged record: the drafter is saved once more then."""
    with contextlib.suppress(ValueError):
        return read_kept(out / _FINISHED, "")
    return {}


def ended_untrained(out: Path) -> dict[str, Any]:
    """The steps, limits and texts of a run that ended with an untrained drafter; empty for any other."""
    found = _ended(out)
    return found if found.get("untrained") else {}


def is_finished(out: Path, limits: dict[str, float]) -> bool:
    """Whether the run in a folder ended with these limits, or with wider ones."""
    stored = _ended(out).get("limits", {})
    return limits.keys() == stored.keys() and all(value <= stored[name] for name, value in limits.items())


def last_checkpoint(out: Path) -> Path | None:
    """Returns the newest complete checkpoint of a run, if any.

    The Trainer writes its state last, so a checkpoint is complete if its state can be read.
    """
    found = [path for path in (out / "checkpoints").glob("checkpoint-*") if read_state(path)]
    return max(found, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Returns the trainer's state of a checkpoint; empty if it is missing or incomplete."""
    state: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError):
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    return state


def steps_done(out: Path) -> int:
    """Returns the number of steps at a run's last checkpoint; 0 if there is none."""
    last = last_checkpoint(out)
    return int(last.name.rsplit("-", 1)[1]) if last else 0


def keep_vocabulary(out: Path, ids: list[int]) -> None:
    """Keeps the draft vocabulary that was chosen for a run."""
    write_json(out / _VOCABULARY, {_IDS: ids})


def vocabulary_of(out: Path) -> list[int] | int | None:
    """Returns the draft vocabulary that a run was begun with: its token ids, or its size if no more is known.

    Returns `None` where nothing has been learned. Earlier versions kept it in checkpoints only: the ids in
    configurations, and where a checkpoint has none, the rows of the head.
    """
    last = last_checkpoint(out)
    if last is None:
        return None
    known = [read_json(path).get(_IDS) for path in (out / _VOCABULARY, last / CONFIG) if path.is_file()]
    if ids := next(filter(None, known), None):
        return [int(token) for token in ids]
    shape, _ = header(last / WEIGHTS).get("lm_head.weight", ((None,), ""))
    return shape[0]


def limits_of(args: DrafterTrainingArguments) -> dict[str, float]:
    """The limits that end training, by name. With a wider limit a finished run continues."""
    given = {"max_minutes": args.max_minutes, "max_training_minutes": args.max_training_minutes}
    given |= {"max_steps": args.max_steps if args.max_steps > 0 else None, "num_train_epochs": args.num_train_epochs}
    limits = dict([next(each for each in given.items() if each[1] is not None)])
    limits["early_stopping_patience"] = args.early_stopping_patience
    return {name: float(value) for name, value in limits.items() if value is not None}


def had_ended(last: Path, args: DrafterTrainingArguments, minutes: float | None) -> bool:
    """Whether training, of so many minutes or by steps, had taken its last step before it was interrupted."""
    state = read_state(last)
    if minutes is not None:
        clock = callback_of(last, TimeBudget)  # earlier versions trained until the time was over, and recorded no end
        return max(clock.get("ended", 0.0), clock.get("spent", 0.0) / 60) >= minutes
    if args.max_steps > 0:
        return bool(state["global_step"] >= args.max_steps)
    return bool(state["epoch"] >= args.num_train_epochs)


def callback_of(last: Path | None, kind: type) -> dict[str, Any]:
    """Returns the attributes of a callback in a checkpoint; empty for a run without it, and without a checkpoint."""
    callbacks = {} if last is None else read_state(last).get("stateful_callbacks", {})
    attributes: dict[str, Any] = callbacks.get(kind.__name__, {}).get("attributes", {})
    return attributes
