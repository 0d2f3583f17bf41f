"""`hsdraft estimate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ..core.methods import load
from ._shared import Injector, say

app = typer.Typer()
StepsOption = Annotated[int | None, typer.Option(min=1, help="K; default: the drafter's, 6 of a new one.")]
TauOption = Annotated[
    float | None,
    typer.Option(min=1.0, help="Tokens per target forward, as measured: estimates decoding instead of training."),
]
FamilyOption = Annotated[
    str | None, typer.Option(help="With --tau and no --drafter: a fresh drafter of this family; hidden-state.")
]
NodesOption = Annotated[
    int | None, typer.Option(min=1, help="With --tau: verified nodes besides the root; default: the drafter's.")
]
MiddleOption = Annotated[
    str | None, typer.Option(help="With --tau: a smaller model; also estimates n-grams > this model > target.")
]
_SHARES = "0.4,0.4,0.8"
SharesOption = Annotated[
    str | None,
    typer.Option(
        help="With --middle: tokens accepted of n-grams by the target, by the model, and of the model, as "
        f"{_SHARES}, the default."
    ),
]


@app.command(short_help="Say what training or drafting would take.")
def estimate(
    target: Annotated[str, typer.Argument(help="Hub name or folder of the target, a .gguf file or a config.json.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the training conversations.")] = 1_000_000,
    epochs: Annotated[float, typer.Option(min=0.0, help="Passes over them.")] = 3.0,
    flops_per_second: Annotated[float | None, typer.Option(min=1.0, help="Of the machine, as reached.")] = None,
    chains_per_token: Annotated[float, typer.Option(min=0.0, max=1.0, help="Chain starts per token.")] = 0.5,
    rolled_fraction: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share followed to depth K.")] = 0.5,
    tokens_per_step: Annotated[int, typer.Option(min=1, help="Tokens packed into a step.")] = 1024,
    cache_taps: Annotated[bool, typer.Option(help="With the target's hidden states on disk.")] = False,
    world_size: Annotated[int, typer.Option(min=1, help="Devices.")] = 1,
    sharded: Annotated[bool, typer.Option(help="Target sharded over the devices (FSDP, ZeRO 3).")] = False,
    num_draft_steps: StepsOption = None,
    num_hidden_layers: Annotated[int | None, typer.Option(min=1, help="Layers of the drafter.")] = None,
    num_roll_layers: Annotated[int | None, typer.Option(min=1, help="Layers of a roll-out step.")] = None,
    num_step_modules: Annotated[int | None, typer.Option(min=1, help="Sets of parameters by step.")] = None,
    injector: Annotated[Injector | None, typer.Option(help="Of hidden-state drafters.")] = None,
    draft_layers: Annotated[int | None, typer.Option(min=1, help="Of self drafters: first layers that draft.")] = None,
    tau: TauOption = None,
    drafter: Annotated[str | None, typer.Option(help="With --tau: folder or Hub name of the drafter.")] = None,
    family: FamilyOption = None,
    bytes_per_second: Annotated[float, typer.Option(min=1.0, help="With --tau: of the device's memory.")] = 3.35e12,
    nodes: NodesOption = None,
    length: Annotated[int, typer.Option(min=1, help="With --tau: tokens that the target's cache holds.")] = 1024,
    middle: MiddleOption = None,
    shares: SharesOption = None,
) -> None:
    """Says what training a drafter for a target would take, with the arithmetic; runs nothing.

    With --tau it says what memory and time decoding with a drafter would take. The defaults are those of an H100.
    """
    from ..drafters.hidden_state.configuration_hsdraft import HSDraftConfig
    from ..runtime.target_loading import load_config
    from ..training.evaluate.decoding_estimate import Device, Drafting, estimate_decoding
    from ..training.evaluate.estimate import estimate as run

    sizes = {"num_hidden_layers": num_hidden_layers, "num_roll_layers": num_roll_layers}
    sizes |= {"num_step_modules": num_step_modules, "draft_layers": draft_layers}
    fields: dict[str, Any] = {name: value for name, value in sizes.items() if value is not None}
    fields |= {} if injector is None else {"injector": injector.value}
    given = {"--drafter": drafter, "--family": family, "--nodes": nodes, "--middle": middle, "--shares": shares}
    _check_given(tau, fields, {name: value for name, value in given.items() if value is not None})
    config = load_config(target)
    if tau is None:
        made = HSDraftConfig.for_target_config(config, **fields, num_draft_steps=num_draft_steps or 6)
        lines = run(
            config,
            made,
            tokens=tokens,
            epochs=epochs,
            flops_per_second=flops_per_second,
            cached=cache_taps,
            chains_per_token=chains_per_token,
            rolled_fraction=rolled_fraction,
            sharded=sharded,
            conversations_tokens_per_step=tokens_per_step,
            world_size=world_size,
        ).lines
    else:
        fields |= {} if drafter is not None or num_draft_steps is None else {"num_draft_steps": num_draft_steps}
        made = _drafter(config, drafter, family or "hidden-state", fields)
        options, deepest = made.generation_config, made.num_draft_steps
        depth = min(num_draft_steps or options.num_assistant_tokens, deepest)
        plan = Drafting(depth, options.beam_width, nodes or options.tree_size, tau, length)
        device = Device(bytes_per_second, flops_per_second or 9.9e14)
        found = estimate_decoding(config, made, plan, device)
        lines = found.lines
        if middle is not None:
            tell, best = load("estimate", "--middle").tell, found.figures["speed-up, at most"]
            lines += ("", *tell(config, load_config(middle), shares or _SHARES, device, length, best))
    for line in lines:
        say(line)


def _check_given(tau: float | None, fields: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raises a BadParameter for options that do not go together.

    `fields` are sizes of a drafter, `given` options about decoding; `tau` is None where training is estimated.
    """
    if "--drafter" in given and fields:
        told = f"{given['--drafter']} has its own sizes: leave {', '.join(fields)} out"
        raise typer.BadParameter(told, param_hint="--drafter")
    if tau is None and given:
        raise typer.BadParameter("it is about decoding: expected --tau beside it", param_hint=next(iter(given)))
    if {"--drafter", "--family"} <= given.keys():
        raise typer.BadParameter("the drafter is of a family already: leave it out", param_hint="--family")
    if "--shares" in given and "--middle" not in given:
        raise typer.BadParameter("it is about a smaller model: expected --middle beside it", param_hint="--shares")


def _drafter(config: Any, name: str | None, family: str, fields: dict[str, Any]) -> Any:
    """The drafter that was named, or a fresh one on the meta device.

    Raises a ValueError if the drafter was made for another target, or there is no such family.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from ..generate.by_name import load_drafter
    from ..training.families.trainable import trainable

    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
        if name is None:
            return trainable(family, fields).untrained(target, fields)
    drafter = load_drafter(name)
    drafter.check(target)
    return drafter
