"""Verification rules by the value of the option `verification`, and the drafting options of all drafters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.checks import MOST_NODES, Limit, choice, integer, is_number, printable
from ..core.draft_tree import TREE_BUILDERS
from ..core.methods import Registry, load, offered
from ..core.options import Option
from .verdict import OwnChoice, Verifier

NO_HISTORY, IN_MEMORY = "off", "memory"  # values of `history` besides folders
MOST_LEADING = 16  # longest n-gram leader, in tokens
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


def _depth(drafter: Any) -> Limit:
    limit = integer(drafter.num_draft_steps)
    return Limit(limit.valid, f"{limit.wanted}, the greatest depth of this drafter")


def _leader(drafter: Any) -> Limit:
    least = drafter.least_ngram_length
    shortest = "0 (no n-grams)" if least == 0 else f"{least}, the least of a {type(drafter).__name__},"
    return Limit(integer(MOST_LEADING, least).valid, f"an integer from {shortest} to {MOST_LEADING}")


def _why_no_builder(value: Any) -> str:
    draws = isinstance(value, str) and value in TREE_BUILDERS and TREE_BUILDERS[value].draws
    return _OTHER_SAMPLES if draws else ""


def _why_no_rule(value: Any) -> str:
    if not isinstance(value, str):
        return ""  # an invalid value is reported by the checks of options
    if value not in VERIFIERS:
        return "this installation has no such rule"
    if is_lossy(value):
        return "it is lossy and may change the text"
    return "" if VERIFIERS[value].own_draws else _OTHER_SAMPLES


def _why_no_history(value: Any) -> str:
    return "" if value in (None, NO_HISTORY) else "a history keeps users' texts"


def _is_history(value: Any) -> bool:
    named = isinstance(value, str) and bool(value.strip()) and (os.sep in value or os.path.isdir(value))
    return named or value in (NO_HISTORY, IN_MEMORY)


def _if_it_pays(work: str) -> Limit:
    return Limit(
        lambda value: value is None or isinstance(value, bool), f"True, False, or None for {work} where it pays"
    )


_OTHER_SAMPLES = "with it, samples with a seed are no longer those of plain decoding"
_PROBABILITY = Limit(lambda value: is_number(value) and 0.0 <= value < 1.0, "a probability below 1")
_KEPT = Limit(_is_history, '"off", "memory", or a folder: one that exists, or a path with a separator, as "./history"')

_OF_ALL = (
    Option("num_assistant_tokens", limit=_depth),
    Option("tree_size", limit=integer(MOST_NODES)),
    Option("beam_width", limit=integer(MOST_NODES)),
    Option("assistant_confidence_threshold", 0.0, _PROBABILITY),
    Option("tree_builder", "beam", lambda drafter: choice(*TREE_BUILDERS), why_not_free=_why_no_builder),
    Option("verification", "walk", why_not_free=_why_no_rule),
    Option("ngram_length", 4, _leader),
    Option("tree_sizing", "cost", choice("cost", "fixed")),
    Option("node_cost"),
    Option("depth_cost"),
    Option("packed_weights", limit=_if_it_pays("packing")),
    Option("compiled_layers", None, _if_it_pays("compiling"), "", lambda value: "it starts a compiler" * bool(value)),
    Option("adapter_name", why_not_free=lambda value: "" if value is None else "adapters are loaded by name in code"),
    Option("history", NO_HISTORY, _KEPT, why_not_free=_why_no_history),
)
COMMON_OPTIONS: Mapping[str, Option] = {option.name: option for option in _OF_ALL}  # of all drafters


def free_options(stored: Mapping[str, Any], where: Any) -> tuple[dict[str, Any], str]:
    """Returns the options in a drafter's files that need no consent, and a line about the others, if any."""
    why = {name: COMMON_OPTIONS[name].why_not_free(stored[name]) for name in stored if name in COMMON_OPTIONS}
    refused = [name for name in why if why[name]]
    free = {name: value for name, value in stored.items() if name not in refused}
    if not refused:
        return free, ""
    asked = [f"{name}={printable(stored[name])} ({why[name]})" for name in refused]
    return free, (
        f"the options saved in {where} ask for {', '.join(asked)}. It is not used, as a drafter's files do not decide "
        f"this. To use it, load the drafter, set drafter.generation_config.{refused[0]}, and pass the drafter "
        "itself, not its name"
    )
