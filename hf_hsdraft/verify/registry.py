"""The rules of verification, by the value of the option `verification`."""

from __future__ import annotations

from typing import Any

from ..core.options import Option
from .fly import FLy
from .pivot import Pivot
from .rejection import Rejection
from .typical import Typical
from .verdict import OwnChoice, Verifier

VERIFIERS: dict[str, Verifier] = {
    "walk": OwnChoice(),
    "rejection": Rejection(),
    "fly": FLy(),
    "typical": Typical(),
    "pivot": Pivot(),
}


def is_lossy(name: Any) -> bool:
    """Whether this names a rule that may change the text. Such a rule is never used unless the caller asks for it."""
    return isinstance(name, str) and name in VERIFIERS and not VERIFIERS[name].exact


def lossy_options() -> dict[str, Option]:
    """Returns the options of lossy rules by name."""
    return {option.name: option for rule in VERIFIERS.values() if not rule.exact for option in rule.own_options}


def rule_files() -> list[str]:
    """Returns the names of the files that hold what rules have learned; they lie beside a drafter's weights."""
    return [rule.file for rule in VERIFIERS.values() if rule.file]
