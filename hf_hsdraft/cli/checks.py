"""`hsdraft check`: exits with 1 if a drafter is faulty."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ..core.progress import working
from ._shared import (
    DeviceOption,
    DrafterArgument,
    Dtype,
    DtypeOption,
    PromptFileOption,
    TargetArgument,
    check_fit,
    loaded_target,
    prompt_texts,
    say,
)

app = typer.Typer()
_FAILED = "FAILED"


@app.command(short_help="Check a drafter for faults.")
def check(
    drafter: DrafterArgument,
    target: TargetArgument = None,
    prompts: PromptFileOption = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of prompts.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Maximum number of new tokens per prompt.")] = 64,
    tolerance: Annotated[
        float, typer.Option(min=0.0, help="Largest mean total variation allowed; 0 chooses by dtype.")
    ] = 0.0,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Checks what a drafter drafts for a few prompts; exits with 1 if it is faulty.

    For a drafter that cannot be trained here, it compares texts with plain decoding and prints tau. For a trainable
    drafter, it compares the distributions of training and decoding at each depth. The last line is the
    verdict: passed, undecided (rounding in half precision) or FAILED.
    """
    from ..generate.by_name import found_for_targets
    from ..runtime.prompt_inputs import encode_prompts
    from ..training.families.trainable import as_trained

    texts = prompt_texts(prompts)
    named = found_for_targets(drafter, dtype.torch, device)
    model, tokenizer = loaded_target(target, dtype.torch, device)
    loaded = named(model)
    check_fit(loaded, model, tokenizer)
    inputs = encode_prompts(model, tokenizer, texts[:limit])
    trained = as_trained(loaded)
    if trained is not None:
        _check_training(trained, model, inputs, max_new_tokens, tolerance)
    else:
        _check_decoding(loaded, model, inputs, max_new_tokens)


def _check_training(drafter: Any, target: Any, inputs: list[Any], max_new_tokens: int, tolerance: float) -> None:
    from ..training.evaluate.parity import parity

    with working("comparing what training and decoding predict"):
        report = parity(drafter, target, [each["input_ids"] for each in inputs], max_new_tokens, tolerance)
    for line in report.lines():
        say(line)
    if report.passed:
        count, depths = sum(each.predictions for each in report.depths), len(report.depths)
        _end("passed", f"training and decoding agree about {count} predictions at all {depths} depths")
    else:
        _end(_FAILED, report.explain())


def _check_decoding(drafter: Any, target: Any, inputs: list[Any], max_new_tokens: int) -> None:
    from ..engine.call_output import pooled_tau
    from ..engine.divergence import first_divergence

    call = {"do_sample": False, "max_new_tokens": max_new_tokens, "return_dict_in_generate": True}
    calls, same = [], 0
    for each in inputs:
        plain = target.generate(**each, **call).sequences
        output = target.generate(**each, **call, assistant_model=drafter)
        divergence = first_divergence(target, each["input_ids"].shape[1], plain, output.sequences)
        calls.append(output.statistics)
        same += divergence is None
        told = "yes" if divergence is None else divergence
        say(f"{calls[-1].new_tokens} tokens, tau {calls[-1].tau:.2f}, same text {told}")
    told = f"{same} of {len(calls)} texts are those of plain decoding; tau {pooled_tau(calls):.2f}"
    if same == len(calls):
        _end("passed", told)
    elif target.dtype.itemsize < 4:
        _end("undecided", f"{told}; half precision rounds differently: check with --dtype float32")
    else:
        _end(_FAILED, told)


def _end(verdict: str, why: str) -> None:
    """Prints the last line, and exits with 1 if the drafter is faulty."""
    say(f"verdict: {verdict}: {why}")
    if verdict == _FAILED:
        sys.exit(1)
