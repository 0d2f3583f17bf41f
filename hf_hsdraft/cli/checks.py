"""`hsdraft support`, `exactness` and `check`: what has to hold; they exit with 1 where it does not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ._shared import DeviceOption, Dtype, DtypeOption, check_fit, console

app = typer.Typer()


@app.command(short_help="Try every type of target of transformers.")
def support(
    out: Annotated[Path | None, typer.Option(help="Markdown file to write.")] = None,
    tasks: Annotated[str, typer.Option(help="Comma-separated.")] = "causal,seq2seq,image-text,speech",
    only: Annotated[str, typer.Option(help="Model types, comma-separated; default: all.")] = "",
) -> None:
    """Decodes a tiny random model of every type of transformers with and without drafts, and writes the table."""
    from ..bench.support import MAPPINGS, as_markdown, check_all, write_table

    names = [task.strip() for task in tasks.split(",")]
    if not set(names) <= set(MAPPINGS):
        raise typer.BadParameter(f"expected some of {', '.join(MAPPINGS)}", param_hint="--tasks")
    rows = []
    for row in check_all(names, [name for name in only.split(",") if name]):
        rows.append(row)
        console.print(f"{row.task} {row.model_type}: {row.drafts} {row.reason}", highlight=False, soft_wrap=True)
    if out is not None:
        write_table(str(out), rows)
    summary = as_markdown(rows) if out is None else f"{len(rows)} types, table written to {out}"
    console.print(summary, highlight=False, soft_wrap=True, markup=False)
    if any(row.differs or row.drafts == "error" for row in rows):
        sys.exit(1)


@app.command(short_help="Test that sampling is exact.")
def exactness(
    samples: Annotated[int, typer.Option(min=1000, help="Rounds drawn for each setting.")] = 200_000,
    processors: Annotated[str, typer.Option(help="Comma-separated; default: all.")] = "",
    part: Annotated[str, typer.Option(help="i/n: the i-th of n shares of the settings, to run side by side.")] = "1/1",
) -> None:
    """Tests that every builder and verifier emits the target's own distribution; exits with 1 if not."""
    from ..bench.exactness import PROCESSORS, check, settings

    chosen = tuple(name for name in processors.split(",") if name) or tuple(PROCESSORS)
    if not set(chosen) <= set(PROCESSORS):
        raise typer.BadParameter(f"expected some of {', '.join(PROCESSORS)}", param_hint="--processors")
    index, _, count = part.partition("/")
    mine = list(settings(chosen))[int(index) - 1 :: int(count)]
    worst = 1.0
    for setting in mine:
        outcome = check(*setting, samples=samples)
        worst = min(worst, outcome.p_value)
        verifier, builder, processor, temperature = setting
        console.print(
            f"{verifier:9} {builder:15} {processor:10} T={temperature}: p = {outcome.p_value:.4f}, "
            f"{outcome.accepted:.3f} drafts accepted a round",
            highlight=False,
            soft_wrap=True,
        )
    limit = 1e-3 / len(mine)  # one run in a thousand fails by chance
    verdict = "exact as far as this can tell" if worst >= limit else "NOT the target's distribution"
    summary = f"{len(mine)} settings of {samples} samples, least p-value {worst:.5f} (limit {limit:.5f}): {verdict}"
    console.print(summary, highlight=False, soft_wrap=True)
    if worst < limit:
        sys.exit(1)


@app.command(short_help="Check that a drafter does what it should.")
def check(
    drafter: Annotated[str, typer.Argument(help="Hub name or folder of the drafter.")],
    target: Annotated[
        str | None, typer.Argument(help="Hub name, folder or .gguf file; default: SmolLM2-135M-Instruct.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option("--prompts", exists=True, dir_okay=False, help="JSONL, `turns`; default: a few.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Prompts in all.")] = 8,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    tolerance: Annotated[float, typer.Option(min=0.0, help="Mean total variation allowed; 0: by dtype.")] = 0.0,
    dtype: DtypeOption = Dtype.float32,
    device: DeviceOption = "cpu",
) -> None:
    """Checks a drafter by what it drafts for a few prompts; exits with 1 if something is wrong.

    A drafter that cannot be trained here decodes: it says whether the texts are those of plain decoding, and tau. Of a
    drafter that can be trained it compares, depth by depth, what training computes with what decoding uses.
    """
    from ..generate.by_name import load_drafter
    from ..runtime.prompt_inputs import encode_prompts
    from ..runtime.target_loading import load_target
    from ..training.data.conversations import read_prompts
    from ..training.evaluate.parity import PROMPTS
    from ..training.families.trainable import as_trained

    texts = list(PROMPTS) if prompts is None else [prompt.turns[0] for prompt in read_prompts(prompts)]
    if not texts:
        raise typer.BadParameter(f"no prompts: {prompts} holds no line with `turns`", param_hint="--prompts")
    loaded = load_drafter(drafter, dtype.torch, device)
    model, tokenizer = load_target(target, dtype.torch, device)
    check_fit(loaded, model, tokenizer)
    inputs = encode_prompts(model, tokenizer, texts[:limit])
    trained = as_trained(loaded)
    if trained is not None:
        _check_training(trained, model, inputs, max_new_tokens, tolerance)
    else:
        _check_decoding(loaded, model, inputs, max_new_tokens)


def _check_training(drafter: Any, target: Any, inputs: list[Any], max_new_tokens: int, tolerance: float) -> None:
    from ..training.evaluate.parity import ParityError, parity

    report = parity(drafter, target, [each["input_ids"] for each in inputs], max_new_tokens, tolerance)
    for line in report.lines():
        console.print(line, highlight=False, soft_wrap=True)
    if not report.passed:
        raise ParityError(report.explain())
    console.print(f"passed: training and decoding agree at all {len(report.depths)} depths", highlight=False)


def _check_decoding(drafter: Any, target: Any, inputs: list[Any], max_new_tokens: int) -> None:
    from ..engine.call_output import pooled_tau
    from ..training.evaluate.decoding_check import check_texts

    checked = []
    for found in check_texts(drafter, target, inputs, max_new_tokens):
        checked.append(found)
        console.print(str(found), highlight=False, soft_wrap=True)
    same = sum(found.divergence is None for found in checked)
    tau = pooled_tau([found.statistics for found in checked])
    console.print(f"same texts: {same} of {len(checked)}; tau {tau:.2f}", highlight=False, soft_wrap=True)
    if same == len(checked):
        console.print("passed: every text is that of plain decoding", highlight=False)
    elif target.dtype.itemsize < 4:
        console.print("undecided: half precision rounds differently; check with --dtype float32", highlight=False)
    else:
        console.print("FAILED: a drafted text is not that of plain decoding", highlight=False)
        sys.exit(1)
