"""One call of `generate()` with a drafter, from its prompts to its output."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ..core.draft_tree import DraftTree
from ..core.refusals import DraftingRefused
from ..core.tensors import device_of
from ..drafters.base.draft_options import DraftOptions
from ..drafters.base.protocol import Drafter
from ..runtime.static_cache import with_draft_room
from ..runtime.target_outputs import TargetOutput, picked_taps
from ..runtime.target_runtime import TargetRuntime
from .call_checks import check_call, check_verifier
from .call_output import DraftStatistics, HSDraftEncoderDecoderOutput, HSDraftGenerateOutput, as_output
from .decoded_texts import DecodedTexts
from .draft_limits import refuse
from .observers import Observer, StatisticsKeeper
from .recorder import Recorder
from .rounds import Rounds, Setting


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
    """Decodes with a drafter ("Make Every Draft Count"); the output has the target's own distribution.

    It has not where the drafter's options name a lossy rule of verification; the statistics say so. Takes what
    `generate()` hands to a decoding method, and returns what it returns: `[B, length]` token ids, or with
    `return_dict_in_generate` an [`HSDraftGenerateOutput`].

    Args:
        statistics: are filled in, whatever the call returns; seconds only with `return_dict_in_generate`.
        refused: told that the target turns out to read no drafts, which takes a few tokens to find out. Where it raises
            nothing, the call goes on without drafts.

    Raises:
        DraftingRefused: target, drafter and call do not fit together. Nothing has been streamed or drawn then, and the
            cache is as it was given; only `refused` is told later.
    """
    check_call(target, drafter, input_ids, logits_processor, synced_gpus, model_kwargs)
    options = DraftOptions.of(drafter, generation_config)
    drafter.warn_of_misfit(target, tokenizer, synced_gpus)
    columns = options.shared_by(len(input_ids)).tree_size + 1
    model_kwargs = with_draft_room(target, model_kwargs, generation_config, input_ids, columns)
    verifier = drafter.verifier(options)
    check_verifier(verifier, target, logits_processor)
    runtime = TargetRuntime(target, sorted({*drafter.taps_of(target), *verifier.taps}), model_kwargs)
    texts = DecodedTexts(input_ids, generation_config, logits_processor, stopping_criteria, streamer, verifier)
    returned = generation_config.return_dict_in_generate
    statistics = DraftStatistics() if statistics is None else statistics
    keeper = StatisticsKeeper(statistics, device_of(target), timed=returned)
    with runtime.released_on_error(), contextlib.ExitStack() as stack:
        keeper.began()
        recorder = Recorder(runtime, generation_config)
        output = _read_prompts(runtime, texts, input_ids, generation_config, recorder)
        keeper.enter("prefill_seconds")
        statistics.target_forwards, statistics.row_forwards = 1, len(input_ids)
        outlives = returned or getattr(runtime.cache, "_is_user_defined", False)
        observers = [streamer] if isinstance(streamer, Observer) else []
        setting = Setting(
            target, drafter, options, runtime, texts, recorder, synced_gpus, outlives, refused, stack, observers
        )
        rounds = _run_rounds(setting, output, model_kwargs.get("inputs_embeds"), keeper)
    texts.end_stream()
    if rounds is not None and not synced_gpus:
        rounds.drafting.session.end()
    keeper.finish()
    statistics.new_tokens, statistics.exact = texts.all_new_tokens(), verifier.exact
    statistics.packed_weights, statistics.reused_share = runtime.acceleration.packed, runtime.reused_share
    return as_output(texts, runtime, statistics, generation_config, model_kwargs) if returned else texts.sequences()


def _run_rounds(
    call: Setting,
    output: TargetOutput,
    inputs_embeds: torch.Tensor | None,
    keeper: StatisticsKeeper,
) -> Rounds | None:
    """Runs all rounds after the prompts' forward; returns `None` if there are none, as each text has ended."""
    rounds = None
    if call.texts.active or call.synced_gpus:
        with call.target._optimize_model_for_decode():  # experts are multiplied as in plain decoding
            rounds = Rounds(call, output, inputs_embeds, keeper)
            rounds.run()
    call.texts.stream()
    call.runtime.finish(call.texts.sequences())
    if rounds is not None and call.outlives:
        rounds.leave_memory()
    return rounds


def _read_prompts(
    runtime: TargetRuntime, texts: DecodedTexts, input_ids: torch.Tensor, generation_config: Any, recorder: Recorder
) -> TargetOutput:
    """The prompts' forward, and the first token of each text."""
    output = runtime.prefill(input_ids, generation_config)
    rule_taps = picked_taps(output.taps[:, -1:], runtime.tap_layers, texts.verifier.taps)
    texts.foresee(output.logits.shape[-1])
    texts.start(output.logits[:, -1])
    for row in range(len(input_ids)):
        tree = DraftTree.root(-1)
        verdict = texts.judge(row, tree, output.logits[row, -1:], rule_taps[row])
        texts.emit(row, tree, verdict, recorder.prompt(row))
    texts.end_batch()
    return output
