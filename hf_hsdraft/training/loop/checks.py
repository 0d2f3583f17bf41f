"""Checks before hours are spent: whether the target can teach, and which run a folder holds."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from filelock import FileLock, Timeout

from ...runtime.target_limits import text_config
from ..data.conversations import Conversation, tokenize_conversation
from ..families.family import TrainableFamily
from ..files import write_json
from ..loss.objectives import WHOLE_LOSSES

_PLAN, _FINISHED, _LOCK = "training_plan.json", "finished.json", ".lock"


def check_target_can_teach(target: Any, tokenizer: Any, family: TrainableFamily) -> None:
    """Raises a ValueError for a target whose drafter of this family could not be trained or used."""
    check_device(target)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the target's tokenizer has no chat template, so chats cannot be rendered as the target reads them: "
            "pass one (--chat-template FILE)"
        )
    chat = Conversation((("user", "Count from one to ten."), ("assistant", "One, two, three.")))
    ids = tokenize_conversation(tokenizer, chat, 256).input_ids
    _check_drafting(target, family, ids[None])
    _check_teacher(target, ids[None])


def check_learning(family: TrainableFamily, config: Any, target: Any, args: Any) -> None:
    """Raises a ValueError where a drafter with this configuration cannot be trained as the arguments ask."""
    _check_objective(family, config, args)
    family.check_policy(args.data_policy)
    width, wanted = family.width(config), text_config(target).hidden_size
    for name in ("regression_weight", "cosine_weight"):
        if getattr(args, name) > 0 and width != wanted:
            raise ValueError(
                f"{name}={getattr(args, name)} is invalid: drafted states have a width of {width}, those of the "
                f"target {wanted}. Leave it out, or train a drafter of the target's width"
            )


def _check_objective(family: TrainableFamily, config: Any, args: Any) -> None:
    only = family.only_objective(config)
    if only and args.objective != only:
        raise ValueError(f"objective={args.objective!r} is invalid for this drafter, which learns by {only!r} only")
    if only:
        WHOLE_LOSSES[only].check(config, args)
    elif args.objective in WHOLE_LOSSES:
        raise ValueError(f"objective={args.objective!r} is invalid for this drafter, which cannot learn by it")


def check_device(target: Any) -> None:
    """Raises a ValueError if the target is on another GPU than this process trains on."""
    own = PartialState().device
    index = torch.cuda.current_device() if own.type == "cuda" and own.index is None else own.index
    if target.device.type == "cuda" and not hasattr(target, "hf_device_map") and target.device.index != index:
        raise ValueError(
            f"this process trains on GPU {index}, the target is on {target.device}: leave --device out, and choose by "
            "CUDA_VISIBLE_DEVICES"
        )


def check_template_keeps_turns(tokenizer: Any) -> None:
    """Raises a ValueError if the template renders earlier turns differently once later ones follow."""
    turns = (("user", "Name a colour."), ("assistant", "Blue."), ("user", "And another."), ("assistant", "Green."))
    tokenize_conversation(tokenizer, Conversation(turns), 256)


def _check_drafting(target: Any, family: TrainableFamily, input_ids: torch.Tensor) -> None:
    """Tries the smallest drafter; raises a ValueError unless the target decodes with it."""
    drafter = family.fresh(target, family.least, 1, lambda size: list(range(size))).to(target.device, target.dtype)
    kwargs = {"attention_mask": torch.ones_like(input_ids), "do_sample": False, "max_new_tokens": 4}
    kwargs |= {"input_ids": input_ids, "eos_token_id": None}
    target.generate(
        **{k: v.to(target.device) if torch.is_tensor(v) else v for k, v in kwargs.items()}, assistant_model=drafter
    )


@torch.no_grad()
def _check_teacher(target: Any, input_ids: torch.Tensor) -> None:
    """Raises a ValueError unless the target's logits are its final hidden states times its output rows.

    The drafter learns from that product. Scaled, capped or biased logits would be another distribution.
    """
    last = target.config.get_text_config().num_hidden_layers
    output = target(input_ids.to(target.device), output_hidden_states=[last], use_cache=False)
    logits = output.logits[0].float().cpu()
    rows = target.get_output_embeddings().weight.detach().float().cpu()
    rebuilt = output.hidden_states[last][0].to("cpu", torch.bfloat16).float() @ rows.T
    error = float((rebuilt.log_softmax(-1).exp() - logits.log_softmax(-1).exp()).abs().sum(-1).mean())
    if error > 0.1:  # twice the total variation; the rounding of bfloat16 features stays well below
        raise ValueError(
            f"{type(target).__name__} changes its logits after the output layer (scale, cap or bias): the teacher "
            f"would be wrong by {error:.2f} in total variation. Training for such targets is not supported yet."
        )


def fingerprint(target: Any) -> str:
    """Returns a digest that identifies target and dtype, because answers and features of one do not fit another.

    It covers some values of every weight of this process. All processes of a sharded target have to take part.
    """
    digest = hashlib.sha256()
    for parameter in target.parameters():
        if parameter.is_meta or not parameter.numel():  # offloaded, or in another process
            continue
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        digest.update(whole.detach().flatten()[:64].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    name = type(target).__name__.removeprefix("FSDP")  # a sharded target is the same target
    return f"{name}, {target.dtype}, {digest.hexdigest()[:12]}"


def claim(out: Path, settings: dict[str, Any], may_change: set[str]) -> None:
    """Writes the settings of a run into its folder; a ValueError names those that differ from the folder's.

    Before the first checkpoint all settings may change, as answers and features have their own checks; settings named
    in `may_change` always may.
    """
    path = out / _PLAN
    settings = json.loads(json.dumps(settings))  # tuples become lists, as on disk
    if path.exists() and steps_done(out):
        stored = json.loads(path.read_text(encoding="utf-8"))
        differing = sorted(
            name for name in settings if name in stored and name not in may_change and stored[name] != settings[name]
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


def finish(out: Path, steps: int, limits: dict[str, float]) -> None:
    """Records that a run's drafter is saved, after how many steps, and by which limits training ended."""
    write_json(out / _FINISHED, {"steps": steps, "limits": limits})


def is_finished(out: Path, limits: dict[str, float]) -> bool:
    """Whether the run in a folder ended with these limits, or with wider ones."""
    path = out / _FINISHED
    if not path.exists():
        return False
    stored = json.loads(path.read_text(encoding="utf-8"))["limits"]
    return limits.keys() == stored.keys() and all(value <= stored[name] for name, value in limits.items())


def last_checkpoint(out: Path) -> Path | None:
    """Returns the newest complete checkpoint of a run, if any.

    The Trainer writes its state last, so a checkpoint is complete if its state can be read.
    """
    found = [path for path in (out / "checkpoints").glob("checkpoint-*") if read_state(path)]
    return max(found, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Returns the trainer's state of a checkpoint; empty if it is missing or incomplete."""
    try:
        state: dict[str, Any] = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state


def steps_done(out: Path) -> int:
    """Returns the number of steps at a run's last checkpoint; 0 if there is none."""
    last = last_checkpoint(out)
    return int(last.name.rsplit("-", 1)[1]) if last else 0
