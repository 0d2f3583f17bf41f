"""`hsdraft try`, `demo` and `env`: what drafting does for a model on this machine."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from . import _shared as shared
from ._shared import QUESTION, Dtype, check_fit, console, loaded_target, option, prompt_texts, say

app = typer.Typer()
_PROMPTS = 3
SvgOption = Annotated[
    Path | None, option("File for a picture of the last prompt's two texts.", "--svg", dir_okay=False)
]
OfflineOption = Annotated[bool, option("Look for drafters in the cache only.", "--offline")]


@app.command("try", short_help="Say what drafting does for a model, on three prompts.")
def try_model(
    target: shared.TargetArgument = None,
    prompt: Annotated[list[str] | None, typer.Argument(help="Prompts like yours.")] = None,
    prompts: shared.PromptFileOption = None,
    drafter: shared.DrafterOption = None,
    max_new_tokens: shared.ShortTextOption = None,
    offline: OfflineOption = False,
    dtype: shared.DtypeOption = Dtype.float32,
    device: shared.DeviceOption = "cpu",
    json_out: shared.JsonOption = None,
    svg: SvgOption = None,
) -> None:
    """Decodes prompts with and without drafts, by the best drafter that `hsdraft find` lists or the one that is named.

    Shows the text with accepted drafts coloured, the speed-up with its spread, what limits it, and the lines of code
    for this model. Without prompts it takes three of the package, and of a file the first three.
    """
    if prompt and prompts is not None:
        raise typer.BadParameter("name prompts or a file of them, not both", param_hint="--prompts")
    texts = list(prompt or prompt_texts(prompts)[:_PROMPTS])
    _try(target, drafter, texts, max_new_tokens, offline, dtype, device, json_out, svg)


@app.command(short_help="Answer a prompt, with drafted tokens coloured.")
def demo(
    prompt: Annotated[str, typer.Argument(help="The prompt.")] = QUESTION,
    target: shared.TargetOption = None,
    drafter: shared.DrafterOption = None,
    max_new_tokens: shared.NewTokensOption = 128,
    dtype: shared.DtypeOption = Dtype.float32,
    device: shared.DeviceOption = "cpu",
) -> None:
    """`hsdraft try` with one prompt, offline."""
    _try(target, drafter, [prompt], max_new_tokens, True, dtype, device)


def _try(
    target: str | None,
    name: str | None,
    prompts: list[str],
    max_new_tokens: int | None,
    offline: bool,
    dtype: Dtype,
    device: str,
    json_out: Path | None = None,
    svg: Path | None = None,
) -> None:
    from ..generate.by_name import found_for_targets
    from ..runtime.target_loading import DEFAULT_TARGET, check_target
    from ._try import DRAFTED, Trial, decode, machine, report

    for file in filter(None, (json_out, svg)):
        if not file.resolve().parent.is_dir():
            raise typer.BadParameter(f"there is no folder {file.resolve().parent}: make it first")
    if name is not None and not name.strip():
        raise typer.BadParameter("the name is empty: expected a Hub name or a folder", param_hint="--drafter")
    check_target(target)
    named = None if name is None else found_for_targets(name, dtype.torch, device)
    model, tokenizer = loaded_target(target, dtype.torch, device)
    if named is None:
        drafter, kind, why, use = _best(model, tokenizer, offline)
    else:
        drafter, kind, why = named(model), str(name), "named by --drafter"
        use = f"model.generate(**inputs, assistant_model={json.dumps(name)})"
    check_fit(drafter, model, tokenizer)
    code = ["from hf_hsdraft import attach" if use.startswith("attach") else "import hf_hsdraft", use]
    trial = Trial(target or DEFAULT_TARGET, kind, why, code, machine(device) | {"dtype": dtype.value})
    console.print(f"[{DRAFTED}]drafted and accepted[/], the target's own\n" if console.color_system else "")
    decode(trial, model, tokenizer, drafter, prompts, max_new_tokens, console)
    report(trial, console)
    if json_out is not None:
        json_out.write_text(json.dumps(trial.document(), indent=1), encoding="utf-8")
    if svg is not None:
        svg.write_text(trial.picture(shlex.join(["hsdraft", *sys.argv[1:]])), encoding="utf-8")


def _best(model: Any, tokenizer: Any, offline: bool) -> tuple[Any, str, str, str]:
    """The best drafter, what it is, why it fits, and the line of code that uses it."""
    from ..core.progress import working
    from ..drafters.base.auto_drafter import AutoDrafter
    from ..generate.by_name import follow

    with working("looking for drafters"):
        found, drafter = AutoDrafter.chosen_for(model, tokenizer, offline)
    follow(drafter, model)
    return drafter, f"{found.name} ({found.kind})", found.why, found.use


@app.command(short_help="Print what an issue should say: versions, processor, drafter.")
def env(
    target: Annotated[
        str | None, typer.Argument(help="Hub name or folder of your target: its drafters too.", callback=shared.present)
    ] = None,
    device: shared.DeviceOption = "cpu",
) -> None:
    """Prints versions and the processor and, for a target, what drafts for it. Loads no weights and asks no server.

    Add what `print(repr(output.statistics))` says about your call.
    """
    from ._try import machine

    for title, value in machine(device).items():
        say(f"{title}: {value}")
    if target is not None:
        from ..drafters.base.auto_drafter import find
        from ..drafters.base.registry import TargetInfo

        info = TargetInfo.of_name(target, "", True)
        say(f"target: {type(info.config).__name__.removesuffix('Config')}, {info.name}")
        for each in find(info, True)[0]:
            say(f"drafter: {each.name} ({each.kind}), {each.problem or each.why}")
