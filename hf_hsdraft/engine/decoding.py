"""One call of `generate()` with a drafter, from its prompts to its output."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from ..core.checks import public_name
from ..core.draft_tree import DraftTree
from ..core.refusals import DraftingRefused
from ..core.statistics import DraftStatistics
from ..core.tensors import device_of
from ..core.tuning import MOST_KNOWN
from ..drafters.base.draft_options import DraftOptions, adapted
from ..drafters.base.protocol import Accepted, Call, Drafter, Session
from ..runtime.foreign_parts import why_untriable
from ..runtime.module_hooks import experience_of
from ..runtime.static_cache import with_draft_room
from ..runtime.target_limits import (
    GRADIENTS,
    check_cache,
    check_inputs,
    furthest_position,
    gradients_flow,
    refusal,
    text_config,
)
from ..runtime.target_runtime import TargetRuntime
from ..runtime.tree_reading import TargetOutput, picked_taps
from ..verify.verdict import Verifier
from .call_output import HSDraftEncoderDecoderOutput, HSDraftGenerateOutput, as_output, named_target, prompt_outputs
from .decoded_texts import DecodedTexts
from .draft_limits import DraftLimits, TextPositions, refuse
from .drafting import Drafting, history_for
from .local_target import LocalTarget
from .loop import Keeper, Observer, decode
from .row_processors import check_processors, is_row_wise


def check_call(
    target: Any, drafter: Drafter, input_ids: torch.Tensor, processors: Any, synced_gpus: bool, kwargs: dict[str, Any]
) -> None:
    """Raises a DraftingRefused for everything known beforehand that would make the call fail or be wrong."""
    check_drafter(drafter, target)
    check_inputs(target)
    if not kwargs.get("use_cache"):
        raise DraftingRefused("use_cache=False is not possible with a drafter: verification needs the target's cache")
    if experience_of(target).cacheless:
        check_cache(target, None)
    if gradients_flow(target, kwargs):
        raise DraftingRefused(GRADIENTS)
    window = furthest_position(target)
    rotary = getattr(text_config(target), "rope_parameters", None)  # works beyond the window
    length = 0 if rotary else _positions_taken(target, input_ids, kwargs)
    if length > window:
        raise DraftingRefused(
            f"the prompt has {length} tokens, the target's context window is {window}; shorten the prompt"
        )
    if synced_gpus and any(isinstance(one, UnbatchedClassifierFreeGuidanceLogitsProcessor) for one in processors):
        raise DraftingRefused(
            "guidance_scale is not possible with a drafter and synced_gpus=True: its forwards differ by process"
        )
    check_processors(processors, len(input_ids))


def check_drafter(drafter: Drafter, target: Any) -> None:
    """Raises a DraftingRefused for a drafter without weights, and what its `check` raises."""
    module: Any = drafter if isinstance(drafter, nn.Module) else nn.Identity()
    on_meta = any(weight.is_meta for weight in module.parameters())
    if on_meta and not any(hasattr(part, "_hf_hook") for part in module.modules()):  # hooks bring offloaded weights
        raise DraftingRefused(
            "the drafter is on the meta device, where weights have no values: load it by "
            "AutoDrafter.from_pretrained(name), not inside torch.device('meta')"
        )
    drafter.check(target)


def told_of_class(kind: type) -> str:
    """The error message for a class passed as a drafter."""
    parameters = inspect.signature(kind).parameters.values()
    given = [one for one in parameters if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    alone = issubclass(kind, Drafter) and all(one.default is not one.empty for one in given)
    made = f"{kind.__name__}() or " if alone else ""
    return f"{kind.__name__} is a class: expected a drafter, which {made}{kind.__name__}.from_pretrained(...) makes"


def check_verifier(verifier: Verifier, target: Any, processors: Any) -> None:
    """Raises a ValueError for a verification rule trained for another target.

    Raises a DraftingRefused for a rule that may drop scores again, if a processor may keep state between calls.
    """
    config = text_config(target)
    name = public_name(getattr(target, "name_or_path", ""))
    verifier.check(getattr(config, "hidden_size", 0), getattr(config, "num_hidden_layers", 0), name)
    if verifier.looks_ahead and (keeping := [type(one).__name__ for one in processors if not is_row_wise(one)]):
        raise DraftingRefused(
            f"{type(verifier).__name__} asks for scores beyond a mismatch that it may drop again, and "
            f"{', '.join(keeping)} may remember being asked; set row_wise = True on a processor that remembers "
            f"nothing, choose another rule of verification, or {DraftingRefused.PLAINLY}"
        )


def _positions_taken(target: Any, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> int:
    """Number of the target's positions that the prompts take."""
    if target.config.is_encoder_decoder:
        return input_ids.shape[1]
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if positions is not None:
        return int(positions.max()) + 1
    return input_ids.shape[1] if mask is None else int(mask.sum(dim=1).max())


_MEMORY = "_hsdraft_memory"  # on a cache that outlives the call: the drafter's state


def speculative_decoding(
    target: Any,
    drafter: Drafter,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    synced_gpus: bool = False,
    streamer: Any = None,
    tokenizer: Any = None,
    statistics: DraftStatistics | None = None,
    refused: Callable[[DraftingRefused], None] = refuse,
    **model_kwargs: Any,
) -> HSDraftGenerateOutput | HSDraftEncoderDecoderOutput | torch.Tensor:
    """Decodes with a drafter ("Make Every Draft Count"); the output has the target's distribution.

    The exception is a lossy verification rule set in the drafter's options; the statistics say so. Takes what
    `generate()` hands to a decoding method, and returns what it returns.

    Args:
        statistics: filled in, whatever the call returns; seconds only with `return_dict_in_generate`.
        refused: called if the target turns out, after the prompt, to read no drafts; none are made if it returns.

    Raises:
        DraftingRefused: target, drafter and call do not fit together. Nothing has been streamed or drawn then, and the
            cache is as it was given.
        OSError: the folder of the option `history` cannot be used. Nothing has been done then either.
    """
    options = DraftOptions.of(drafter, generation_config)
    columns = options.shared_by(len(input_ids)).tree_size + 1
    check_call(target, drafter, input_ids, logits_processor, synced_gpus, model_kwargs)
    untriable = why_untriable(target, len(input_ids) * columns)
    if untriable and refused is not refuse:  # the caller can decode plainly
        raise refusal(target, f"{untriable}.")
    history, drafter = history_for(drafter, target, options), adapted(drafter, options.adapter_name)
    introduce(drafter, target, tokenizer, synced_gpus, [] if untriable else first_prompt(input_ids, model_kwargs))
    model_kwargs = with_draft_room(target, model_kwargs, generation_config, input_ids, columns)
    verifier = drafter.verifier(options)
    check_verifier(verifier, target, logits_processor)
    runtime = TargetRuntime(target, sorted({*drafter.taps_of(target), *verifier.taps}), model_kwargs)
    texts = DecodedTexts(input_ids, generation_config, logits_processor, stopping_criteria, streamer, verifier)
    returned, statistics = generation_config.return_dict_in_generate, statistics or DraftStatistics()
    statistics.drafter, statistics.target = type(drafter).__name__, named_target(target)
    keeper = Keeper(statistics, device_of(target), timed=returned)
    with runtime.released_on_error(), contextlib.ExitStack() as stack:
        keeper.began()
        packs = not untriable and options.packed_weights
        with runtime.acceleration.of_prompts(packs, options.compiled_layers, *_sizes(texts, input_ids, model_kwargs)):
            output = runtime.prefill(input_ids, generation_config)
        _choose_first(runtime, texts, output, keeper)
        stack.enter_context(runtime.acceleration.of_rounds(runtime.slots))
        outlives = returned or getattr(runtime.cache, "_is_user_defined", False)
        observers = [streamer] if isinstance(streamer, Observer) else []
        call = Call(target, len(input_ids), options, texts, runtime, synced_gpus, outlives, observers, stack, history)
        positions = TextPositions.of(runtime, output.taps.shape[1], len(input_ids))
        limits = DraftLimits(call, positions, refused, untriable)
        session = _grow(call, drafter, output, model_kwargs.get("inputs_embeds"), keeper, limits)
    _finish(keeper, texts, runtime, None if synced_gpus else session)
    _remember(history, texts, input_ids, model_kwargs)
    return as_output(texts, runtime, statistics, generation_config, model_kwargs) if returned else texts.sequences()


def _finish(keeper: Keeper, texts: DecodedTexts, runtime: TargetRuntime, session: Session | None) -> None:
    texts.end_stream()
    if session is not None:
        session.end()
    keeper.finish()
    statistics = keeper.statistics
    statistics.new_tokens, statistics.exact = texts.all_new_tokens(), texts.verifier.exact
    statistics.packed_weights, statistics.reused_share = runtime.acceleration.packed, runtime.reused_share
    acceleration = runtime.acceleration
    statistics.compiled_layers, statistics.compiling = acceleration.compiled_layers, acceleration.compiling


def introduce(drafter: Drafter, target: Any, tokenizer: Any, synced_gpus: bool, tokens: Sequence[int]) -> None:
    """Lets a drafter look at its target, and try on a text's `tokens` what its files leave open."""
    drafter.warn_of_misfit(target, tokenizer, synced_gpus)
    if not synced_gpus:  # else all processes would have to try it
        drafter.settle(target, tokens)


def first_prompt(input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> list[int]:
    """The tokens of the first row's prompt, without padding."""
    mask = model_kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.shape == input_ids.shape:
        return input_ids[0][mask[0].bool()].tolist()
    return input_ids[0].tolist()


def _remember(history: Any, texts: DecodedTexts, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> None:
    """Hands prompts and answers of all rows to the history, if there is one, without padding."""
    if history is None:
        return
    prompts, sequences, length = input_ids.tolist(), texts.sequences().tolist(), input_ids.shape[1]
    mask = model_kwargs.get("attention_mask")
    encodes = model_kwargs.get("encoder_outputs") is not None  # then the mask is that of the encoder's input
    if isinstance(mask, torch.Tensor) and mask.ndim == 2 and mask.shape[1] >= length > 0 and not encodes:
        kept = mask[:, mask.shape[1] - length :].tolist()  # of the prompts' last tokens, where a cache has earlier ones
        prompts = [list(itertools.compress(*pair)) for pair in zip(prompts, kept, strict=True)]
    most = texts.length() - length
    answers = [ids[length : length + min(texts.new_tokens(row), most)] for row, ids in enumerate(sequences)]
    history.remember(list(zip(prompts, answers, strict=True)))


def _choose_first(runtime: TargetRuntime, texts: DecodedTexts, output: TargetOutput, keeper: Keeper) -> None:
    """Chooses the first token of each text after the prompts' forward, which returned `output`."""
    rows = range(len(texts.rows))
    texts.foresee(output.logits.shape[-1])
    if texts.chosen_together and not runtime.records:
        texts.emit_chosen(texts.choose(rows, output.logits[:, -1]))
    else:
        rule_taps = picked_taps(output.taps[:, -1:], runtime.tap_layers, texts.verifier.taps)
        texts.start(output.logits[:, -1])
        for row in rows:
            tree = DraftTree.root(-1)
            verdict = texts.judge(row, tree, output.logits[row, -1:], rule_taps[row])
            texts.emit(row, tree, verdict, prompt_outputs(runtime, row) if runtime.records else [])
    texts.end_batch()
    keeper.enter("prefill")
    keeper.statistics.target_forwards, keeper.statistics.row_forwards = 1, len(rows)


def _sizes(texts: DecodedTexts, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Number of tokens that a text may still emit, and that a forward over the prompts `[B, length]` reads, or more."""
    embeds = model_kwargs.get("inputs_embeds")  # `[B, length, D]`
    rows = max(input_ids.numel(), 0 if embeds is None else embeds.shape[:2].numel())
    return max(map(texts.room, range(len(input_ids)))), rows


def _grow(call: Call, drafter: Drafter, *given: Any) -> Session | None:
    """Grows the texts to their ends, see `_run_rounds`; returns `None` if each has ended with its first token."""
    runtime, texts, session = call.runtime, call.texts, None
    if texts.active or call.synced_gpus:
        with call.target._optimize_model_for_decode():  # experts run as in plain decoding
            session = _run_rounds(call, drafter, *given)
    texts.stream()
    runtime.finish(texts.sequences())
    # The drafter's state for a single text stays with the cache, for a call that continues the text.
    memory = session.memory(runtime.length + 1) if session and call.outlives and call.rows == 1 else None
    if memory is not None:
        setattr(runtime.cache, _MEMORY, memory)
    return session


def _run_rounds(
    call: Call,
    drafter: Drafter,
    output: TargetOutput,
    inputs_embeds: torch.Tensor | None,
    keeper: Keeper,
    limits: DraftLimits,
) -> Session:
    """Grows the texts to their ends after the prompts' forward, which returned `output`; returns the session.

    `inputs_embeds` is `[B, length, D]`, for prompts given as embeddings. Raises a DraftingRefused if the target reads
    no drafts.
    """
    runtime, texts, statistics = call.runtime, call.texts, keeper.statistics
    limits.find()
    target = LocalTarget(call, limits, drafter.taps_of(call.target))
    drafting = Drafting(drafter, replace(call, options=limits.options))
    texts.stream()  # the first tokens, as no refusal can follow
    if limits.options.depth == 0 and call.rows > 1:
        drafting.rest()
    memory = getattr(runtime.cache, _MEMORY, None)
    if memory is not None and call.rows == 1:
        drafting.session.resume(memory, runtime.cached_before)
    room = max(map(texts.room, range(call.rows)))
    if limits.options.depth:
        runtime.acceleration.begin(call.options.packed_weights, room, call.options.compiled_layers)
    target.set_pace(drafting)
    keeper.report_to(drafting, runtime.acceleration, lambda: target.set_pace(drafting))
    drafting.observe(_news_of_prompts(texts, output, limits.positions, target, inputs_embeds, runtime))
    decode(target, drafting, [keeper, *call.observers])
    if call.outlives and call.rows == 1:
        drafting.catch_up()
    before = runtime.forwards
    if call.outlives and (call.rows > 1 or call.synced_gpus):  # processes may have different numbers of rows
        target.read_padding()
    statistics.target_forwards += runtime.forwards - before
    statistics.draft_kind, statistics.reason = limits.kind, limits.reason
    return drafting.session


def _news_of_prompts(
    texts: DecodedTexts,
    output: TargetOutput,
    positions: TextPositions,
    target: LocalTarget,
    inputs_embeds: torch.Tensor | None,
    runtime: TargetRuntime,
) -> list[Accepted]:
    """The prompts' taps, each with the token that follows."""
    count, news, attended = output.taps.shape[1], [], runtime.rows.attended
    for row in range(len(texts.rows)):
        ids = texts.ids.of(row)[0]
        known = ids[:-1]
        if attended is not None and 0 < len(known) <= attended.shape[1]:  # padding is known
            known = known[attended[row, -len(known) :].to(known.device)]
        real = positions.real[row].nonzero().flatten()
        taps, places = target.own_taps(output.taps[row, real.to(output.taps.device)]), positions.prompt[row, real]
        earlier, tokens = known[-MOST_KNOWN:].tolist(), [texts.last_token(row)]
        if inputs_embeds is not None and len(ids) <= count:
            after = inputs_embeds[row, inputs_embeds.shape[1] - count + 1 :]
            embeds = after[real[:-1].to(after.device)]
            news.append(Accepted(row, tokens, taps, places, ids[-1:], earlier, embeds=embeds))
        else:
            following = ids[-count:][real.to(ids.device)]
            news.append(Accepted(row, tokens, taps, places, following, earlier))
    return news
