"""`hsdraft estimate hierarchy`: whether a hierarchy would pay on another device, by sizes and assumed acceptance."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...cli._shared import numbers, say
from ..estimate.estimate_commands import (
    H100_BYTES,
    H100_FLOPS,
    BandwidthOption,
    LengthOption,
    ReachedOption,
    TargetConfigArgument,
)
from .hierarchy import TARGET, Acceptance, Curve, Drafting, Levels, best_cascade, best_single

if TYPE_CHECKING:
    from ..estimate.estimates import Device

app = typer.Typer()
NGRAMS, MIDDLE = "n-grams", "middle"
_SHARES = "0.4,0.4,0.8"
_SAME_TOKENS = (
    "the middle model has to have the target's tokenizer; a vocabulary of equal size does not say so, and is all that "
    "is compared here"
)
_PADDING = 512  # tokens; tables are padded to multiples of powers of two
_LOOK_UP = 1e-4  # seconds of a draft by n-grams


@app.command("estimate-hierarchy", short_help="Say whether a middle model would pay.")
def hierarchy(
    target: TargetConfigArgument,
    middle: Annotated[str, typer.Argument(help="The same of a smaller model with the target's tokenizer.")],
    shares: Annotated[
        str, typer.Option(help="Tokens accepted of n-grams by the target, by the model, and of the model.")
    ] = _SHARES,
    speed_up: Annotated[float, typer.Option(min=0.0, help="Of another drafter that the hierarchy has to beat.")] = 0.0,
    length: LengthOption = 1024,
    bytes_per_second: BandwidthOption = H100_BYTES,
    flops_per_second: ReachedOption = H100_FLOPS,
) -> None:
    """Says whether n-grams, a middle model and the target would be faster than a drafter alone; runs nothing."""
    from ...runtime.target_loading import load_config
    from ..estimate.estimates import Device

    config, other = load_config(target), load_config(middle)
    found = numbers(shares, "--shares", _SHARES, float)
    check_vocabularies(config, other)
    try:
        levels = estimated_levels(config, other, found, Device(bytes_per_second, flops_per_second), length)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shares") from None
    for line in (*estimate_cascade(levels, speed_up), _SAME_TOKENS):
        say(line)


def check_vocabularies(config: Any, middle: Any) -> None:
    """Raises a ValueError if the middle model's vocabulary differs from the target's by more than padding."""
    sizes = [each.get_text_config().vocab_size for each in (config, middle)]
    if abs(sizes[0] - sizes[1]) > _PADDING:
        raise ValueError(
            f"the middle model has vocab_size={sizes[1]:,}, the target {sizes[0]:,}: expected a model with the "
            "target's tokenizer, whose size differs by padding at most"
        )


def estimated_levels(config: Any, middle: Any, shares: Sequence[float], device: Device, length: int) -> Levels:
    """Returns the levels n-grams, middle model and target after `length` tokens.

    `shares` are of tokens accepted, each after an accepted one: n-grams by the target, n-grams by the middle model, and
    the middle model by the target; a ValueError unless they are three in [0, 1). With 1, drafts would never end.
    """
    from ..estimate.estimates import Forward

    if len(shares) != 3 or not all(0.0 <= share < 1.0 for share in shares):
        raise ValueError(
            f"shares={list(shares)} is invalid: expected three numbers of 0 or more and below 1, of n-grams by the "
            "target, of n-grams by the middle model, and of the middle model by the target"
        )
    forwards = {
        name: partial(Forward.of(each).seconds, device=device, length=length)
        for name, each in ((MIDDLE, middle), (TARGET, config))
    }
    pairs = ((NGRAMS, TARGET), (NGRAMS, MIDDLE), (MIDDLE, TARGET))
    acceptances = {pair: Acceptance((share,)) for pair, share in zip(pairs, shares, strict=True)}
    step = forwards[MIDDLE](1)
    first = {NGRAMS: Drafting(Curve(((1, _LOOK_UP),))), MIDDLE: Drafting(Curve(((1, step), (2, 2 * step))))}
    return Levels(first, forwards, acceptances)


def estimate_cascade(levels: Levels, other: float = 0.0) -> list[str]:
    """Returns whether the best hierarchy pays, `other` being another speed-up, and the arithmetic."""
    lines = [f"forward of {name} over one token: {1000 * each(1):.4g} ms" for name, each in levels.forwards.items()]
    alone, cascade = [best_single(levels, name) for name in levels.first], best_cascade(levels)
    for plan in [*alone, *([cascade] if cascade else [])]:
        lines += [f"{plan.title}:", *(f"  {line}" for line in plan.lines)]
    if cascade is None:
        return ["no hierarchy: the middle model is not quicker than the target", "", *lines]
    best = max(other, *(plan.speed_up for plan in alone))
    verdict = "pays" if cascade.speed_up > best else "does not pay"
    share = needed_acceptance(levels, other)
    needed = "no share of the middle model's tokens would be enough"
    if share is not None:
        needed = f"it pays from a share of {share:.2f} of the middle model's tokens on"
    compared = f"{cascade.speed_up:.3f} against {best:.3f} of the best drafter alone"
    return [f"the hierarchy {verdict}: {compared}; {needed}", "", *lines]


def needed_acceptance(levels: Levels, other: float = 0.0) -> float | None:
    """Returns the acceptance of the middle model's tokens from which a hierarchy beats every single drafter.

    That is the share of its tokens that the target accepts, each after an accepted one; `None` if no share is enough.
    `other` is the speed-up of a further single drafter.
    """

    def wins(share: float) -> bool:
        changed = replace(levels, acceptances={**levels.acceptances, (MIDDLE, TARGET): Acceptance((share,))})
        cascade, alone = best_cascade(changed), [best_single(changed, name).speed_up for name in changed.first]
        return cascade is not None and cascade.speed_up > max(other, *alone)

    low, high = 0.0, 0.999
    if not wins(high):
        return None
    for _ in range(10):
        share = (low + high) / 2
        low, high = (low, share) if wins(share) else (share, high)
    return high
