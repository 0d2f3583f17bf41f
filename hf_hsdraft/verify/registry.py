"""Verification rules by the value of the option `verification`, all but the walk methods, and what files may set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.checks import printable
from ..core.methods import Registry, load, offered
from ..core.options import Option
from ..trees.tree_builders import TREE_BUILDERS
from .verdict import OwnChoice, Verifier

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
class Stored:
    """What a drafter's files may set an option to. Other values need the user's consent: they are set in code.

    Attributes:
        is_free: whether a value may come from files.
        why_not: what other values do.
    """

    is_free: Callable[[Any], bool] = lambda value: True
    why_not: Callable[[Any], str] = lambda value: ""


def _keeps_seeds(value: Any) -> bool:
    """Whether samples with a seed stay those of plain decoding."""
    return not (isinstance(value, str) and value in TREE_BUILDERS and TREE_BUILDERS[value].draws)


def _is_free_rule(value: Any) -> bool:
    if not isinstance(value, str):
        return True  # an invalid value is reported by the checks of options
    return value in VERIFIERS and VERIFIERS[value].exact and VERIFIERS[value].own_draws


def _why_no_rule(value: Any) -> str:
    if value not in VERIFIERS:
        return "this installation has no such rule"
    return "it is lossy and may change the text" if is_lossy(value) else _OTHER_SAMPLES


_FREE = Stored()
_OTHER_SAMPLES = "with it, samples with a seed are no longer those of plain decoding"

COMMON_OPTIONS: Mapping[str, Stored] = {
    "num_assistant_tokens": _FREE,
    "tree_size": _FREE,
    "beam_width": _FREE,
    "assistant_confidence_threshold": _FREE,
    "tree_builder": Stored(_keeps_seeds, lambda value: _OTHER_SAMPLES),
    "verification": Stored(_is_free_rule, _why_no_rule),
    "ngram_length": _FREE,
    "ngram_continuation": _FREE,
    "tree_sizing": _FREE,
    "node_cost": _FREE,
    "depth_cost": _FREE,
    "packed_weights": _FREE,
    "compiled_layers": Stored(lambda value: not value, lambda value: "it starts a compiler"),
    "adapter_name": Stored(lambda value: value is None, lambda value: "adapters are loaded by name in code"),
    "history": Stored(lambda value: value in (None, "off"), lambda value: "a history keeps users' texts"),
}


def free_options(stored: Mapping[str, Any], where: Any) -> tuple[dict[str, Any], str]:
    """Returns the options in a drafter's files that need no consent, and a line about the others, if any."""
    refused = {name: value for name, value in stored.items() if not COMMON_OPTIONS.get(name, _FREE).is_free(value)}
    free = {name: value for name, value in stored.items() if name not in refused}
    if not refused:
        return free, ""
    asked = [f"{name}={printable(value)} ({COMMON_OPTIONS[name].why_not(value)})" for name, value in refused.items()]
    return free, (
        f"the options saved in {where} ask for {', '.join(asked)}. It is not used, as a drafter's files do not decide "
        f"this. To use it, load the drafter, set drafter.generation_config.{next(iter(refused))}, and pass the drafter "
        "itself, not its name"
    )
