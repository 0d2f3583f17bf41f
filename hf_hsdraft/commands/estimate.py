"""`hsdraft estimate`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ._shared import Injector, console

app = typer.Typer()


@app.command(short_help="Say what training or drafting would take.")
def estimate(
    target: Annotated[str, typer.Argument(help="Hub name or folder of the target, or a config.json.")],
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the training conversations.")] = 1_000_000,
    epochs: Annotated[float, typer.Option(min=0.0, help="Passes over them.")] = 3.0,
    flops_per_second: Annotated[float | None, typer.Option(min=1.0, help="Of the machine, as reached.")] = None,
    chains_per_token: Annotated[float, typer.Option(min=0.0, max=1.0, help="Chain starts per token.")] = 0.5,
    rolled_fraction: Annotated[float, typer.Option(min=0.01, max=1.0, help="Share followed to depth K.")] = 0.5,
    tokens_per_step: Annotated[int, typer.Option(min=1, help="Tokens packed into a step.")] = 1024,
    cache_taps: Annotated[bool, typer.Option(help="With the target's hidden states on disk.")] = False,
    world_size: Annotated[int, typer.Option(min=1, help="Devices.")] = 1,
    sharded: Annotated[bool, typer.Option(help="Target sharded over the devices (FSDP, ZeRO 3).")] = False,
    num_draft_steps: Annotated[
        int | None, typer.Option(min=1, help="K; default: the drafter's, 6 of a new one.")
    ] = None,
    num_hidden_layers: Annotated[int | None, typer.Option(min=1, help="Layers of the drafter.")] = None,
    num_roll_layers: Annotated[int | None, typer.Option(min=1, help="Layers of a roll-out step.")] = None,
    num_step_modules: Annotated[int | None, typer.Option(min=1, help="Sets of parameters by step.")] = None,
    injector: Annotated[Injector | None, typer.Option(help="Of hidden-state drafters.")] = None,
    draft_layers: Annotated[int | None, typer.Option(min=1, help="Of self drafters: first layers that draft.")] = None,
    tau: Annotated[
        float | None,
        typer.Option(min=1.0, help="Tokens per target forward, as measured: estimates decoding instead of training."),
    ] = None,
    drafter: Annotated[str | None, typer.Option(help="With --tau: folder or Hub name of the drafter.")] = None,
    family: Annotated[
        str | None, typer.Option(help="With --tau and no --drafter: a fresh drafter of this family; hidden-state.")
    ] = None,
    bytes_per_second: Annotated[float, typer.Option(min=1.0, help="With --tau: of the device's memory.")] = 3.35e12,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="With --tau: verified nodes besides the root; default: the drafter's.")
    ] = None,
    length: Annotated[int, typer.Option(min=1, help="With --tau: tokens that the target's cache holds.")] = 1024,
    middle: Annotated[
        str | None,
        typer.Option(help="With --tau: a smaller model; also estimates n-grams > this model > target."),
    ] = None,
    shares: Annotated[
        str,
        typer.Option(help="With --middle: tokens accepted of n-grams by the target, by the model, and of the model."),
    ] = "0.4,0.4,0.8",
) -> None:
    """Says what training a drafter for a target would take, with the arithmetic; runs nothing.

    With --tau it says what memory and time decoding with a drafter would take. The defaults are those of an H100.
    """
    from transformers import AutoConfig

    from ..drafters.hidden_state.configuration_hsdraft import HSDraftConfig
    from ..training.estimate import estimate as run
    from ..training.estimate import explain

    sizes = {
        "num_hidden_layers": num_hidden_layers,
        "num_roll_layers": num_roll_layers,
        "num_step_modules": num_step_modules,
        "injector": injector and injector.value,
        "draft_layers": draft_layers,
    }
    fields = {name: value for name, value in sizes.items() if value is not None}
    if drafter is not None and fields:
        raise typer.BadParameter(f"{drafter} has its own sizes: leave {', '.join(fields)} out", param_hint="--drafter")
    given = {"--drafter": drafter, "--family": family, "--nodes": nodes, "--middle": middle}
    if tau is None and (unused := [name for name, value in given.items() if value is not None]):
        raise typer.BadParameter("it is about decoding: expected --tau beside it", param_hint=unused[0])
    if drafter is not None and family is not None:
        raise typer.BadParameter("the drafter is of a family already: leave it out", param_hint="--family")
    config = AutoConfig.from_pretrained(target)
    if tau is not None:
        from ..bench.decoding_estimate import Device, Drafting, estimate_decoding

        if drafter is None and num_draft_steps is not None:
            fields["num_draft_steps"] = num_draft_steps
        made = _drafter(config, drafter, family or "hidden-state", fields)
        options = made.generation_config
        depth = min(num_draft_steps or options.num_assistant_tokens, made.num_draft_steps)
        plan = Drafting(depth, options.beam_width, nodes or options.tree_size, tau, length)
        device = Device(bytes_per_second, flops_per_second or 9.9e14)
        found = estimate_decoding(config, made, plan, device)
        lines = list(found.lines)
        if middle is not None:
            from ..bench.hierarchy_estimate import estimate_cascade, estimated_levels

            parts = [float(share) for share in shares.split(",")]
            levels = estimated_levels(config, AutoConfig.from_pretrained(middle), parts, device, length)
            lines += ["", *estimate_cascade(levels, found.figures["speed-up, at most"])]
    else:
        figures = run(
            config,
            HSDraftConfig.for_target_config(config, num_draft_steps=num_draft_steps or 6, **fields),
            tokens=tokens,
            epochs=epochs,
            flops_per_second=flops_per_second,
            chains_per_token=chains_per_token,
            rolled_fraction=rolled_fraction,
            conversations_tokens_per_step=tokens_per_step,
            cached=cache_taps,
            world_size=world_size,
            sharded=sharded,
        )
        lines = explain(figures)
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def _drafter(config: Any, name: str | None, family: str, fields: dict[str, Any]) -> Any:
    """The drafter that was named, or a fresh one without storage.

    Raises:
        ValueError: the drafter was made for another target, or there is no such family.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from ..by_name import load_drafter
    from ..training.trainable import trainable

    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
        if name is None:
            return trainable(family, fields).untrained(target, fields)
    drafter = load_drafter(name)
    drafter.check(target)
    return drafter
