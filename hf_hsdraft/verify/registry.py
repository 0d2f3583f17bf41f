"""Verification rules by the value of the option `verification`, and the drafting options of all drafters."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.checks import MOST_NODES, Limit, choice, integer, is_number, printable
from ..core.draft_tree import TREE_BUILDERS
from ..core.methods import Registry, load, offered
from ..core.options import Option
from ..core.tuning import NGRAM_DEPTH
from .verdict import OwnChoice, Verifier

NO_HISTORY, IN_MEMORY = "off", "memory"  # values of `history` besides folders
VERIFIERS: Registry[Verifier] = Registry("verification", {"walk": OwnChoice()})
OPTION_NAMES = frozenset(offered("verification_option"))  # of rules that need not be loaded


def is_lossy(name: Any) -> bool:
    """Whether this names a rule that may change the text. Such a rule is only used if the caller asks for it."""
    return isinstance(name, str) and name in VERIFIERS and not VERIFIERS[name].exact


def rule_options(*given: Mapping[str, Any], lossy: bool = False) -> list[Option]:
    """Returns the options of the loaded rules, or of the lossy ones.

    Rules named in `given` drafting options, or whose options are among them, are loaded first.
    """
    for options in given:
        VERIFIERS.get(str(options.get("verification")))
        for name in OPTION_NAMES & options.keys():
            load("verification_option", name)
    rules = [rule for rule in list(VERIFIERS.loaded.values()) if not (lossy and rule.exact)]
    return [option for rule in rules for option in rule.own_options]


def rules_learned_in(folder: Path) -> list[Verifier]:
    """Returns the rules that have a file in a drafter's folder."""
    for name in offered("file"):
        if (folder / name).is_file():
            load("file", name)
    return [rule for rule in list(VERIFIERS.loaded.values()) if rule.file and (folder / rule.file).is_file()]


@dataclass(frozen=True)
class CommonOption:
    """A drafting option that all drafters have."""

    default: Any = None  # None for sizes, which each family has its own of, and for what is measured
    limit: Limit | None = None  # its values; None where the drafter, or the methods at hand, decide
    # Whether a value may come from a drafter's files. Others need the user's consent: they are set in code.
    is_free: Callable[[Any], bool] = lambda value: True
    why_not: Callable[[Any], str] = lambda value: ""  # what other values do


def _keeps_seeds(value: Any) -> bool:
    return not (isinstance(value, str) and value in TREE_BUILDERS and TREE_BUILDERS[value].draws)


def _is_free_rule(value: Any) -> bool:
    if not isinstance(value, str):
        return True  # an invalid value is reported by the checks of options
    return value in VERIFIERS and VERIFIERS[value].exact and VERIFIERS[value].own_draws


def _why_no_rule(value: Any) -> str:
    if value not in VERIFIERS:
        return "this installation has no such rule"
    return "it is lossy and may change the text" if is_lossy(value) else _OTHER_SAMPLES


def _is_history(value: Any) -> bool:
    named = isinstance(value, str) and bool(value.strip()) and (os.sep in value or os.path.isdir(value))
    return named or value in (NO_HISTORY, IN_MEMORY)


def _if_it_pays(work: str) -> Limit:
    return Limit(
        lambda value: value is None or isinstance(value, bool), f"True, False, or None for {work} where it pays"
    )


_OTHER_SAMPLES = "with it, samples with a seed are no longer those of plain decoding"
_PROBABILITY = Limit(lambda value: is_number(value) and 0.0 <= value < 1.0, "a probability below 1")
_CONTINUED = Limit(integer(NGRAM_DEPTH, 0).valid, f"an integer from 0 (none) to {NGRAM_DEPTH}")
_KEPT = Limit(_is_history, '"off", "memory", or a folder: one that exists, or a path with a separator, as "./history"')

COMMON_OPTIONS: Mapping[str, CommonOption] = {
    "num_assistant_tokens": CommonOption(),
    "tree_size": CommonOption(None, integer(MOST_NODES)),
    "beam_width": CommonOption(None, integer(MOST_NODES)),
    "assistant_confidence_threshold": CommonOption(0.0, _PROBABILITY),
    "tree_builder": CommonOption("beam", None, _keeps_seeds, lambda value: _OTHER_SAMPLES),
    "verification": CommonOption("walk", None, _is_free_rule, _why_no_rule),
    "ngram_length": CommonOption(4),
    "ngram_continuation": CommonOption(0, _CONTINUED),
    "tree_sizing": CommonOption("cost", choice("cost", "fixed")),
    "node_cost": CommonOption(),
    "depth_cost": CommonOption(),
    "packed_weights": CommonOption(None, _if_it_pays("packing")),
    "compiled_layers": CommonOption(
        None, _if_it_pays("compiling"), lambda value: not value, lambda value: "it starts a compiler"
    ),
    "adapter_name": CommonOption(
        None, None, lambda value: value is None, lambda value: "adapters are loaded by name in code"
    ),
    "history": CommonOption(
        NO_HISTORY, _KEPT, lambda value: value in (None, NO_HISTORY), lambda value: "a history keeps users' texts"
    ),
}


def free_options(stored: Mapping[str, Any], where: Any) -> tuple[dict[str, Any], str]:
    """Returns the options in a drafter's files that need no consent, and a line about the others, if any."""
    common = {name: value for name, value in stored.items() if name in COMMON_OPTIONS}
    refused = {name: value for name, value in common.items() if not COMMON_OPTIONS[name].is_free(value)}
    free = {name: value for name, value in stored.items() if name not in refused}
    if not refused:
        return free, ""
    asked = [f"{name}={printable(value)} ({COMMON_OPTIONS[name].why_not(value)})" for name, value in refused.items()]
    return free, (
        f"the options saved in {where} ask for {', '.join(asked)}. It is not used, as a drafter's files do not decide "
        f"this. To use it, load the drafter, set drafter.generation_config.{next(iter(refused))}, and pass the drafter "
        "itself, not its name"
    )


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
        option, sign, value = part.partition("=")
        if option in BESIDE and value.isdecimal():
            options[option] = int(value)
            continue
        if option not in own or not sign:
            known = ", ".join([*own, *BESIDE])
            raise ValueError(f"{text!r}: {name} has no option {part!r}: expected some of {known}, as a=b")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"{text!r}: {option}={value} is invalid: expected {own[option].expected}") from None
        whole = isinstance(own[option].default, int) and number.is_integer()
        options[option] = own[option].checked(int(number) if whole else number)
    return name, options
