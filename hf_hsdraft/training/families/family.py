"""The seam between the training pipeline and a family of drafters: what differs from family to family."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...core.methods import Registry
from ...drafters.base.target_weights import TargetWeights
from ...hub.pretrained_drafter import fields_of
from ...runtime.target_limits import decoder_layers, text_config
from ..loss.predictions import Predictions

Choose = Callable[[int], list[int]]
GROWTHS: Registry[Callable[[Any, Mapping[str, Any]], Any]] = Registry("growth")  # see `grown`, by the family's name


class TrainableFamily:
    """What the pipeline asks of a family.

    Its drafters are modules of torch, and have these besides what a `Drafter` has:

    - `forward(taps, embeds, position_ids, starts, document_ids, num_rolled, labels, ...)`, whose output holds drafted
      states of every chain, as K tensors `hidden_states`, and as `loss` what `loss_function(drafter, hidden_states,
      labels)` makes of them. Only the first `num_rolled` chains have states beyond the first depth;
    - `borrow(embedding, output_head)`, which returns the `TargetWeights` that the drafter uses;
    - `layers`, the modules of its layers, unless the family's `layers` finds them elsewhere;
    - `config`, `device`, `dtype`, `from_pretrained` and `save_pretrained`, as models of transformers have them.

    Attributes:
        name: name of the family, as `hsdraft train --family` takes it.
        drafter: class of its drafters.
        least: fields of the smallest drafter, by which it is tried whether a target can be drafted for.
        plain_options: drafting options with which a draft depends on nothing of earlier rounds.
        arguments: training arguments whose defaults differ for this family.
        takes_adapters: whether its drafters load adapters (LoRA).
        follows_drafts: whether its chains can follow other tokens than the text's, as most data policies want.
        starts_afresh: whether a drafter can be trained from nothing.
    """

    name: str
    drafter: Any
    least: Mapping[str, Any]
    plain_options: Mapping[str, Any] = {}
    arguments: Mapping[str, Any] = {}
    takes_adapters = False
    follows_drafts = True
    starts_afresh = True

    @property
    def fields(self) -> set[str]:
        """The fields that a training plan may set for a drafter."""
        return fields_of(self.drafter.config_class)

    def config_for(self, target: Any, fields: Mapping[str, Any]) -> Any:
        """Returns the configuration of a fresh drafter, but for the tokens of its draft vocabulary.

        It has `num_draft_steps`.

        Args:
            target: the target.
            fields: fields that differ from the defaults.

        Raises:
            ValueError: a field is invalid.
        """
        raise NotImplementedError

    def fresh(self, target: Any, fields: Mapping[str, Any], longest: int, choose: Choose) -> Any:
        """Returns a drafter with random weights, in float32 on the CPU.

        Args:
            target: the target.
            fields: fields that differ from the defaults.
            longest: number of tokens of the longest conversation that it will learn from.
            choose: returns ascending token ids for a draft vocabulary of the size that it is given.
        """
        raise NotImplementedError

    def untrained(self, target: Any, fields: Mapping[str, Any]) -> Any:
        """Returns a drafter of the right sizes, to count or time what it takes; what it drafts does not matter.

        Args:
            target: the target; it may be on the meta device.
            fields: fields that differ from the defaults.
        """
        return self.drafter(self.config_for(target, fields))

    def loaded(self, name: str, target: Any, fields: Mapping[str, Any]) -> Any:
        """Returns the drafter to start from, in float32.

        Args:
            name: its folder or Hub name.
            target: the target, for what a drafter of another kind lacks.
            fields: fields of the plan.
        """
        return self.drafter.from_pretrained(name, dtype=torch.float32)

    def check_start(self, drafter: Any, target: Any, tokenizer: Any) -> None:
        """Raises a ValueError if a drafter to start from was made for another target, or for another tokenizer.

        Args:
            drafter: the drafter.
            target: the target.
            tokenizer: the target's tokenizer.
        """
        drafter.check(target)
        drafter.warn_of_misfit(target, tokenizer, all_processes=False)

    def taken(self, drafter: Any) -> Any | None:
        """Returns a drafter that was loaded for drafting as training takes it; `None` if it is of another family.

        Raises:
            ValueError: it is of this family, but cannot be trained.
        """
        return drafter if isinstance(drafter, self.drafter) else None

    def snapshot(self, drafter: Any) -> Any:
        """Returns a drafter of the same weights, without what training has put around its forward."""
        copied = type(drafter)(drafter.config)
        copied.load_state_dict(drafter.state_dict())
        copied.generation_config = drafter.generation_config
        return copied.to(drafter.device)

    def grown(self, drafter: Any, fields: Mapping[str, Any]) -> Any:
        """Returns a drafter as large as a plan asks for, which drafts as the given one does; or the given one.

        Args:
            drafter: the drafter that training starts from.
            fields: fields of the plan. Those that say nothing of its size are not looked at.
        """
        grow = GROWTHS.get(self.name)
        return drafter if grow is None else grow(drafter, fields)

    def continued(self, drafter: Any, fields: Mapping[str, Any]) -> None:
        """Gives a drafter that is trained further those of the fields that no weights depend on.

        Args:
            drafter: the drafter, which is changed.
            fields: fields of the plan. The drafter must have the values of the others, except for a
                `draft_vocab_size` that `with_draft_vocabulary` can change.

        Raises:
            ValueError: it has others. The message names the field.
        """
        raise NotImplementedError

    def start_from_target(self, drafter: Any, target: Any, finals: torch.Tensor) -> None:
        """Takes over from the target what some parts of a fresh drafter need.

        Args:
            drafter: the drafter, which is changed.
            target: the target.
            finals: `[N, D]`, float32, some final hidden states of the target.
        """

    def check_trainable(self, config: Any) -> None:
        """Raises a ValueError for a drafter that can draft, but not be trained.

        Args:
            config: its configuration.
        """

    def width(self, config: Any) -> int:
        """Returns the width of what stands for the target's final hidden states, see `Predictions.final`.

        Args:
            config: configuration of the drafter.
        """
        width: int = config.hidden_size
        return width

    def only_objective(self, config: Any) -> str:
        """Returns the name of the only objective by which a drafter can learn; empty if there are others.

        Args:
            config: its configuration.
        """
        return ""

    def check_policy(self, data_policy: str) -> None:
        """Raises a ValueError for a data policy by which chains of this family cannot be trained."""
        if data_policy != "teacher" and not self.follows_drafts:
            raise ValueError(
                f"data_policy={data_policy!r} is invalid with family={self.name!r}, which learns from hidden states "
                "along the text: expected 'teacher'"
            )

    def with_draft_vocabulary(self, drafter: Any, ids: list[int], output_rows: torch.Tensor) -> Any:
        """Returns a copy of a drafter with another draft vocabulary, which keeps what the drafter has learned.

        Only families need it whose `continued` lets the size differ.

        Args:
            drafter: the drafter.
            ids: token ids of the new draft vocabulary, ascending.
            output_rows: `[V, D]`, the target's output embedding.
        """
        raise NotImplementedError

    def taps(self, drafter: Any, target: Any) -> Sequence[int]:
        """Returns the hidden states of a target that training reads. By default they are those that drafting reads."""
        taps: Sequence[int] = drafter.taps_of(target)
        if taps and taps[-1] > decoder_layers(text_config(target)):
            raise ValueError(
                "this drafter reads the output of the target's last layer before its norm, with which it can draft but "
                "not be trained here: expected one that reads lower layers only"
            )
        return taps

    def layers(self, drafter: Any) -> list[nn.Module]:
        """Returns the layers of a drafter, which are computed again in the backward where memory is short."""
        return list(drafter.layers)

    def predictions(self, drafter: Any, weights: TargetWeights) -> Predictions:
        """Returns what a drafter predicts with the weights that it borrows of a target."""
        raise NotImplementedError

    def record_target(self, drafter: Any, target: Any, tokenizer: Any, name: str | None = None) -> None:
        """Notes in a drafter's configuration which target it was made for.

        All processes of a sharded target have to take part.

        Args:
            drafter: the drafter, whose configuration is changed.
            target: its target.
            tokenizer: the target's tokenizer.
            name: name of the target; `None` for the name by which it was loaded.
        """
        raise NotImplementedError

    def describe(self, drafter: Any) -> str:
        """Returns what is special about a drafter of this family, for its recipe."""
        raise NotImplementedError
