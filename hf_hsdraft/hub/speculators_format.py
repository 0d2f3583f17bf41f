"""The common fields of drafters in the format of the package speculators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.checks import demand, public_name
from ..core.fields import Fields
from .checkpoint import Checkpoint

_PROPOSALS = "config.json, speculators_config"


def speculators_type(checkpoint: Checkpoint) -> str:
    """Returns the kind of drafter that a checkpoint in this format names; empty for other formats."""
    kind = checkpoint.config.get("speculators_model_type")
    return kind if isinstance(kind, str) else ""


def target_of(config: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """Returns the target's publishable name and its class names in a config.json, as far as named."""
    found: Any = config
    for name in ("speculators_config", "verifier"):
        found = found.get(name) if isinstance(found, Mapping) else None
    found = found if isinstance(found, Mapping) else {}
    name, architectures = found.get("name_or_path"), found.get("architectures")
    return (
        public_name(name) if isinstance(name, str) else "",
        tuple(map(str, architectures)) if isinstance(architectures, list) else (),
    )


def check_proposals(config: Fields) -> None:
    """Reads `speculators_config`, if present. Raises a ValueError if it asks for a rule that changes the text."""
    proposals = config.table("speculators_config", None)
    methods, place = proposals.values.get("proposal_methods") if proposals else None, f"{_PROPOSALS}.proposal_methods"
    demand(isinstance(methods, list | None), place, methods, "expected a list")
    for method in methods or []:
        fields = Fields(method if isinstance(method, dict) else {}, place)
        fields.expect("proposal_type", "greedy")
        fields.expect("verifier_accept_k", 1)
        fields.expect("accept_tolerance", 0, 0.0)


def speculators_fields(
    kind: str, num_draft_steps: int, target_name: str, architectures: Sequence[str]
) -> dict[str, Any]:
    """Returns the common fields of config.json for `kind` `"eagle3"` or `"dspark"`; no `target_name` becomes null."""
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": num_draft_steps,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target_name or None, "architectures": list(architectures)},
        },
    }
