"""`hsdraft estimate training` and `decoding`."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import typer

from ...cli._shared import say

app = typer.Typer()
Injector = StrEnum("Injector", ["path", "low_rank", "selector"])
_TARGET = "Hub name or folder of the target, a .gguf file or a config.json."
TargetConfigArgument = Annotated[str, typer.Argument(help=_TARGET)]
StepsOption = Annotated[int | None, typer.Option(min=1, help="K; default: the drafter's, 6 of a new one.")]
LayersOption = Annotated[int | None, typer.Option(min=1, help="Layers of the drafter.")]
RollLayersOption = Annotated[int | None, typer.Option(min=1, help="Layers of a roll-out step.")]
ModulesOption = Annotated[int | None, typer.Option(min=1, help="Sets of parameters by step.")]
InjectorOption = Annotated[Injector | None, typer.Option(help="Of hidden-state drafters.")]
BandwidthOption = Annotated[float, typer.Option(min=1.0, help="Bytes per second of the device's memory.")]
ReachedOption = Annotated[float, typer.Option(min=1.0, help="Operations per second of the device, as reached.")]
LengthOption = Annotated[int, typer.Option(min=1, help="Tokens that the target's cache holds.")]
H100_BYTES, H100_FLOPS = 3.35e12, 9.9e14  # per second


@app.command("estimate-training", short_help="Say what training a drafter would take.")
def training(
    target: TargetConfigArgument,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the training conversations.")] = 1_000_000,
    epochs: Annotated[float, typer.Option(min=0.0, help="Passes over them.")] = 3.0,
    flops_per_second: Annotated[float | None, typer.Option(min=1.0, help="Of the machine, as reached.")] = None,
    chains_per_token: Annotated[float, typer.Option(min=0.0, max=1.0, help="Chain starts per token.")] = 0.5,
    rolled_fraction: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share followed to depth K.")] = 0.2,
    tokens_per_step: Annotated[int, typer.Option(min=1, help="Tokens packed into a step.")] = 1024,
    cache_taps: Annotated[bool, typer.Option(help="With the target's hidden states on disk.")] = False,
    world_size: Annotated[int, typer.Option(min=1, help="Devices.")] = 1,
    sharded: Annotated[bool, typer.Option(help="Target sharded over the devices (FSDP, ZeRO 3).")] = False,
    num_draft_steps: StepsOption = None,
    num_hidden_layers: LayersOption = None,
    num_roll_layers: RollLayersOption = None,
    num_step_modules: ModulesOption = None,
    injector: InjectorOption = None,
) -> None:
    """Says what training a hidden-state drafter for a target would take, with the arithmetic; runs nothing."""
    from ...runtime.target_loading import load_config
    from .estimates import estimate

    config = load_config(target)
    sizes = _fields(num_hidden_layers, num_roll_layers, num_step_modules, injector, num_draft_steps=num_draft_steps)
    made, assumed = _drafter(config, None, "hidden-state", sizes)
    found = estimate(
        config,
        made.config,
        tokens=tokens,
        epochs=epochs,
        flops_per_second=flops_per_second,
        cached=cache_taps,
        chains_per_token=chains_per_token,
        rolled_fraction=rolled_fraction,
        sharded=sharded,
        conversations_tokens_per_step=tokens_per_step,
        world_size=world_size,
    )
    _print(found.result("time", "operations", "memory", "taps on disk"), *found.lines, *assumed)


@app.command("estimate-decoding", short_help="Say what decoding with a drafter would take.")
def decoding(
    target: TargetConfigArgument,
    tau: Annotated[float, typer.Option(min=1.0, help="Tokens per target forward, as measured.")],
    drafter: Annotated[str | None, typer.Option(help="Hub name or folder of a drafter.")] = None,
    family: Annotated[str | None, typer.Option(help="Family of a fresh drafter; default: hidden-state.")] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Verified nodes besides the root; default: the drafter's.")
    ] = None,
    length: LengthOption = 1024,
    bytes_per_second: BandwidthOption = H100_BYTES,
    flops_per_second: ReachedOption = H100_FLOPS,
    num_draft_steps: StepsOption = None,
    num_hidden_layers: LayersOption = None,
    num_roll_layers: RollLayersOption = None,
    num_step_modules: ModulesOption = None,
    injector: InjectorOption = None,
    draft_layers: Annotated[int | None, typer.Option(min=1, help="Of self drafters: first layers that draft.")] = None,
) -> None:
    """Says what memory and time decoding with a drafter would take, with the arithmetic; runs nothing.

    By default the device is an H100, and the drafter a fresh hidden-state drafter.
    """
    from ...runtime.target_loading import load_config
    from .estimates import Device, Drafting, estimate_decoding

    fields = _fields(num_hidden_layers, num_roll_layers, num_step_modules, injector, draft_layers=draft_layers)
    if drafter is not None and fields:
        told = f"{drafter} has its own sizes: leave {', '.join(fields)} out"
        raise typer.BadParameter(told, param_hint="--drafter")
    if drafter is not None and family is not None:
        raise typer.BadParameter("the drafter is of a family already: leave it out", param_hint="--family")
    config = load_config(target)
    fields |= {} if drafter is not None or num_draft_steps is None else {"num_draft_steps": num_draft_steps}
    made, assumed = _drafter(config, drafter, family or "hidden-state", fields)
    options, deepest = made.generation_config, made.num_draft_steps
    depth = min(num_draft_steps or options.num_assistant_tokens, deepest)
    plan = Drafting(depth, options.beam_width, nodes or options.tree_size, tau, length)
    found = estimate_decoding(config, made, plan, Device(bytes_per_second, flops_per_second))
    _print(found.result("speed-up, at most", "target in memory", "drafter in memory"), *found.lines, *assumed)


def _print(result: str, *arithmetic: str) -> None:
    for line in (result, "", *arithmetic):
        say(line)


def _fields(
    layers: int | None, roll_layers: int | None, modules: int | None, injector: Injector | None, **more: int | None
) -> dict[str, Any]:
    """The sizes of a fresh drafter that are given."""
    sizes = {"num_hidden_layers": layers, "num_roll_layers": roll_layers, "num_step_modules": modules, **more}
    fields: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    return fields | ({} if injector is None else {"injector": injector.value})


def _drafter(config: Any, name: str | None, family: str, fields: dict[str, Any]) -> tuple[Any, tuple[str, ...]]:
    """The drafter named, or a fresh one on the meta device and what is assumed; a ValueError if it does not fit."""
    import torch
    from transformers import AutoModelForCausalLM

    from ...generate.by_name import load_drafter
    from ...training.families.trainable import trainable
    from .estimates import RANK_POWER, typical_size

    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
    if name is not None:
        drafter = load_drafter(name)
        drafter.check(target)
        return drafter, ()
    kind = trainable(family, fields)
    with torch.device("meta"):
        made = kind.untrained(target, fields)
    if "draft_vocab_size" not in kind.fields:
        return made, ()
    size = typical_size(made.config.vocab_size, kind.column_cost(made, target))
    with torch.device("meta"):
        made = kind.untrained(target, {"draft_vocab_size": size, **fields})
    why = f"as many as pay if the token of rank r occurs in proportion to 1 / r ** {RANK_POWER}"
    return made, (f"assumed: a draft vocabulary of {size:,} tokens, {why}; training chooses by the answers",)
