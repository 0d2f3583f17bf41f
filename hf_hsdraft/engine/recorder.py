"""Attentions and hidden states of each emitted token, where a call asks for them."""

from __future__ import annotations

from typing import Any

from ..runtime.target_runtime import TargetRuntime
from .decoded_texts import StepOutputs


class Recorder:
    """Collects them from the forwards of a target.

    Attributes:
        records: whether anything is asked for.
    """

    def __init__(self, runtime: TargetRuntime, config: Any) -> None:
        wanted = config.return_dict_in_generate
        self._runtime = runtime
        self._states = bool(wanted and config.output_hidden_states)
        self._attentions = bool(wanted and config.output_attentions)
        self.records = self._states or self._attentions

    def prompt(self, row: int) -> list[StepOutputs]:
        """Those of the prompts' forward."""
        return [self._runtime.prompt_outputs(row, self._states, self._attentions)] if self.records else []

    def path(self, row: int, path: list[int]) -> list[StepOutputs]:
        """Those of the root and of each node of an accepted path."""
        if not self.records:
            return []
        nodes = [0, *path]
        return [
            self._runtime.node_outputs(row, nodes[: index + 1], self._states, self._attentions)
            for index in range(len(nodes))
        ]
