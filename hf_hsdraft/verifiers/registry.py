"""The rules of verification, by the value of the option `verification`."""

from __future__ import annotations

from .own_choice import OwnChoice
from .rejection import Rejection
from .verdict import Verifier

VERIFIERS: dict[str, Verifier] = {"walk": OwnChoice(), "rejection": Rejection()}
