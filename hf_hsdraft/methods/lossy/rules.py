"""Lossy rules as text, with the options set: `fly`, or `fly+fly_entropy=0.5+fly_window=2`."""

from __future__ import annotations

import contextlib
from typing import Any

from ...verify.registry import VERIFIERS, is_lossy

BESIDE = ("ngram_continuation", "num_assistant_tokens", "tree_size")  # options of drafts, allowed beside a rule's


def lossy_rule(text: str) -> tuple[str, dict[str, Any]]:
    """Reads a lossy rule with the options set: `fly`, or `fly+fly_entropy=0.5+fly_window=2`.

    Raises a ValueError for unknown names and bad values.
    """
    name, *parts = text.strip().split("+")
    lossy = [each for each in VERIFIERS if is_lossy(each)]
    if name not in lossy:
        raise ValueError(f"{name!r} is no lossy rule: expected some of {', '.join(lossy)}")
    own, options = {option.name: option for option in VERIFIERS[name].own_options}, {}
    for part in parts:
        option, sign, given = part.partition("=")
        if option in BESIDE and given.isdecimal():
            options[option] = int(given)
            continue
        if option not in own or not sign:
            raise ValueError(f"{name} has no option {part!r}: expected some of {', '.join([*own, *BESIDE])}, as a=b")
        value: Any = given
        with contextlib.suppress(ValueError):  # `checked` refuses what is no number
            number = float(given)
            value = int(number) if isinstance(own[option].default, int) and number.is_integer() else number
        options[option] = own[option].checked(value)
    return name, options
