"""What is settled before hours are spent: checks of plan, arguments and target, and the drafter to start from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from ...core.methods import load
from ...hub.drafter_files import CONFIG, find_folder, loading
from ...runtime.target_limits import text_config
from ..data.conversations import Conversation, tokenize_conversation
from ..data.gather import read_files
from ..data.inventing import chosen_kinds
from ..data.plan import Report, TrainingPlan
from ..data.vocabulary import choose_draft_vocabulary, paying_size
from ..families.family import GROWTHS, TrainableFamily, width_of
from ..families.trainable import family_for
from ..loss.objectives import WHOLE_LOSSES, only_objective
from .arguments import DrafterTrainingArguments, training_arguments
from .run_folder import keep_vocabulary, vocabulary_of


def prepared(
    plan: TrainingPlan, arguments: Mapping[str, Any], device_type: str
) -> tuple[TrainingPlan, DrafterTrainingArguments]:
    """Checks a plan and the arguments of its run, which differ from the family's defaults, and completes both.

    Raises:
        ValueError: plan and arguments do not fit together, or a line of the prompts cannot be used.
        TypeError: there is no such argument.
        OSError: there is no such drafter to start from, or no such file of prompts.
    """
    plan.check(PartialState().num_processes)
    chosen_kinds(plan.kinds)
    args = training_arguments(Path(plan.out), {**family_for(plan).arguments, **arguments}, device_type)
    _check_policy(family_for(plan), args.data_policy)
    if args.max_minutes is not None and PartialState().num_processes > 1:
        raise ValueError(
            "--max-minutes divides the time of one process: give --max-training-minutes and --num-prompts, or start "
            "without `accelerate launch`"
        )
    if plan.stream:
        args.ignore_data_skip = True  # a resumed run continues with new conversations
        args.accelerator_config.dispatch_batches = False  # of conversations, not of tensors
        if args.max_steps <= 0:
            raise ValueError("a stream has no epochs: give --max-minutes or --max-steps")
        if args.dataloader_num_workers or args.auto_find_batch_size:
            raise ValueError(
                "a stream is read once, in this process: leave the loader's workers and the search for a batch size out"
            )
    if args.objective in WHOLE_LOSSES:
        plan = replace(plan, drafter={**plan.drafter, **WHOLE_LOSSES[args.objective].fields})
        family_for(plan)  # raises for fields that such a drafter lacks
    if plan.init_from is not None:
        with loading(plan.init_from):
            find_folder(plan.init_from, (CONFIG,))
    bad_lines = list[str]().append if plan.skip_bad_lines else None  # the run reports them
    finished, prompts = read_files(plan, bad_lines)
    if plan.dataset is None or plan.num_prompts is not None:
        plan.check_amount(len(finished) + len(prompts) + (plan.num_prompts or 0) * (plan.dataset is not None))
    return plan, args


_COUNTED = {"role": "assistant", "content": "One, two, three."}


def check_target_can_teach(target: Any, tokenizer: Any, family: TrainableFamily) -> None:
    """Raises a ValueError for a target whose drafter of this family could not be trained or used."""
    check_device(target)
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the target's tokenizer has no chat template, so chats cannot be rendered as the target reads them: "
            "pass one (--chat-template FILE; docs/performance.md has an example under Gemma 3 270M)"
        )
    chat = Conversation.of([{"role": "user", "content": "Count from one to ten."}, _COUNTED])
    ids = tokenize_conversation(tokenizer, chat, 256).input_ids
    _check_drafting(target, family, ids[None])
    _check_teacher(target, ids[None])


def check_learning(family: TrainableFamily, config: Any, target: Any, args: Any) -> None:
    """Raises a ValueError where a drafter with this configuration cannot be trained as the arguments ask."""
    _check_objective(config, args)
    _check_policy(family, args.data_policy)
    if args.candidates and not family.by_columns(config):
        raise ValueError(
            f"candidates={args.candidates} is invalid for this drafter of family {family.name!r}, whose logits are "
            "computed for the whole draft vocabulary at once: leave it out"
        )
    width, wanted = width_of(config), text_config(target).hidden_size
    for name, term in args.terms.items():
        if term.of_states is not None and width != wanted:
            raise ValueError(
                f"{name}={args.method_options[name]} is invalid: drafted states have a width of {width}, those of the "
                f"target {wanted}. Leave it out, or train a drafter of the target's width"
            )


def _check_policy(family: TrainableFamily, data_policy: str) -> None:
    if data_policy != "teacher" and not family.follows_drafts:
        raise ValueError(
            f"data_policy={data_policy!r} is invalid with family={family.name!r}, which learns from hidden states "
            "along the text: expected 'teacher'"
        )


def _check_objective(config: Any, args: Any) -> None:
    only = only_objective(config)
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


def _check_drafting(target: Any, family: TrainableFamily, input_ids: torch.Tensor) -> None:
    """Tries the smallest drafter; raises a ValueError unless the target decodes with it."""
    drafter = family.fresh(target, family.least, 1, lambda: [0]).to(target.device, target.dtype)
    ids, how = input_ids.to(target.device), {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}
    target.generate(ids, attention_mask=torch.ones_like(ids), **how, assistant_model=drafter)


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


def drafter_to_start_from(family: TrainableFamily, target: Any, tokenizer: Any, plan: TrainingPlan) -> Any:
    """Loads the drafter to start from; returns `None` if the plan names none.

    One for another target or tokenizer, of another family, or without the sizes that the plan asks for is a ValueError.
    """
    if plan.init_from is None:
        return None
    if (Path(plan.init_from) / "adapter_config.json").is_file():
        raise ValueError(f"{plan.init_from} is an adapter, not a drafter: start from the drafter that it adapts")
    if plan.lora is not None:
        load("adapting", "peft")  # an error here, before answers are made
    drafter = family.loaded(plan.init_from, target, plan.drafter)
    family.check_start(drafter, target, tokenizer)
    fixed = sorted(plan.drafter.keys() - {"target_name"})
    if plan.lora is not None and fixed:
        raise ValueError(f"LoRA keeps the sizes of {plan.init_from}: leave {', '.join(fixed)} out")
    if (grow := GROWTHS.get(family.name)) is not None:
        drafter = grow(drafter, plan.drafter)
    family.continued(drafter, plan.drafter)
    size = plan.drafter.get("draft_vocab_size", 1)
    if not 1 <= size <= drafter.config.vocab_size:
        raise ValueError(f"draft_vocab_size={size} is invalid: expected 1 to {drafter.config.vocab_size}")
    return drafter


def draft_vocabulary(
    family: TrainableFamily, target: Any, tokenizer: Any, tokenized: Sequence[Any], plan: TrainingPlan, report: Report
) -> list[int]:
    """Returns the token ids of a plan's draft vocabulary, see `choose_draft_vocabulary`.

    A resumed run keeps those that it began with. Without a `draft_vocab_size` there are as many as pay.
    """
    out, size = Path(plan.out), plan.drafter.get("draft_vocab_size")
    begun = vocabulary_of(out)
    if isinstance(begun, list):
        return begun
    always = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    vocab_size, size = target.config.get_text_config().vocab_size, begun or size
    if size is None:
        with torch.device("meta"):
            column_cost = family.column_cost(family.untrained(target, plan.drafter), target)
        size = paying_size(tokenized, vocab_size, column_cost)
    chosen = choose_draft_vocabulary(tokenized, vocab_size, size, always)
    report(f"draft vocabulary: {len(chosen.ids):,} tokens cover {chosen.coverage:.1%} of the answers")
    if PartialState().is_main_process:
        keep_vocabulary(out, chosen.ids)
    return chosen.ids
