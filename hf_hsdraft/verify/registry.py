"""Verification rules by the value of the option `verification`; all but the walk are methods."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..core.methods import Registry, load, offered
from ..core.options import Option
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
