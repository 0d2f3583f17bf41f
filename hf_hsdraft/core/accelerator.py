"""The seam of acceleration: what makes the forwards of a call faster, and changes no text.

The code that travels with a drafter has `Acceleration` alone, which runs the target as it is. The package registers
`DeviceAcceleration`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Acceleration:
    """Runs the forwards of one call as the target runs them.

    Args:
        target: the model being decoded.

    Attributes:
        compile_config: by which forwards over trees are compiled; `None` if they are not.
        packed: whether forwards multiply by packed copies of the weights.
        packs: whether the next forward makes such copies, and takes longer for it.
    """

    compile_config: Any = None
    packed = False
    packs = False

    def __init__(self, target: Any) -> None:
        self._target = target

    def compile(self, model_kwargs: dict[str, Any], generation_config: Any, states: Sequence[torch.Tensor]) -> None:
        """May compile forwards into a static cache, whose keys and values are `states`."""

    def compiled(self, function: Callable[..., None]) -> Callable[..., None]:
        """Returns a function of fixed shapes, compiled where forwards are."""
        return function

    def begin(self, asked_for: bool | None, room: int, slower: Callable[[], bool]) -> None:
        """May pack weights before the first round.

        Args:
            asked_for: the option `packed_weights`.
            room: number of tokens that the call may emit.
            slower: returns whether packed weights are known to slow this kind of call down.
        """

    def after_round(self) -> bool:
        """Counts a round; returns whether forwards become others from here on, whose costs have to be learnt anew."""
        return False

    def forward(self, inputs: dict[str, Any], comes_again: bool, model: Any = None) -> Any:
        """Returns the target's outputs.

        Args:
            comes_again: whether many forwards have inputs of this shape, which is worth compiling for.
            model: runs instead of the target, of whose layers it is made.
        """
        return (self._target if model is None else model)(**inputs, return_dict=True)


_registered: list[type[Acceleration]] = [Acceleration]


def acceleration_of(target: Any) -> Acceleration:
    """Returns the acceleration of one call, of the class that is registered."""
    return _registered[-1](target)


def register_acceleration(faster: type[Acceleration]) -> None:
    """Puts another class in the place of this one."""
    _registered.append(faster)
