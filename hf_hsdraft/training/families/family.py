"""The interface between the training pipeline and a family of drafters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

from ...core.checks import public_name
from ...core.methods import Registry
from ...drafters.base.pretrained_drafter import fields_of
from ...drafters.base.target_weights import TargetWeights
from ...runtime.target_limits import decoder_layers, text_config

Choose = Callable[[], list[int]]
OPTIONS = ("tree_size", "beam_width")  # drafting options, on which no weights depend
KEPT = "the drafter to start from has {!r}; leave it out, or train from scratch"  # of fields that weights depend on
_HEAD, _UP = 0.3, 0.2  # scales of the head and of the token bias of a fresh drafter
# By a family's name, makes a drafter of the sizes in a plan's fields, which drafts as the given one does.
GROWTHS: Registry[Callable[[Any, Mapping[str, Any]], Any]] = Registry("growth")


def name_of(target: Any, name: str | None = None) -> str:
    """Returns a target's name as it may be published: `name`, or else the one by which it was loaded."""
    return public_name(name or getattr(target, "name_or_path", "") or "")


def width_of(config: Any) -> int:
    """Width of what `TrainableFamily.final` returns."""
    width: int = getattr(config, "sizes", config).hidden_size
    return width


def some_columns(module: nn.Module, inputs: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """Returns what a linear module gives, `[..., V']`, or some columns of it. What wraps it computes all of them."""
    if columns is None or type(module) is not nn.Linear:
        return module(inputs) if columns is None else module(inputs)[..., columns]
    return F.linear(inputs, module.weight[columns], None if module.bias is None else module.bias[columns])


def trained(*modules: nn.Module | None) -> list[nn.Parameter]:
    """Returns the trained parameters of modules; `None` stands for a missing module."""
    known = [module for module in modules if module is not None]
    return [parameter for module in known for parameter in module.parameters() if parameter.requires_grad]


class TrainableFamily:
    """What the pipeline asks of a family.

    Its drafters are torch modules, and have these besides what a `Drafter` has:

    - `forward(taps, embeds, position_ids, starts, document_ids, num_rolled, labels, ...)`, whose output holds drafted
      states of every chain, as K tensors `hidden_states`, and as `loss` the result of `loss_function(drafter,
      hidden_states, labels)`. Only the first `num_rolled` chains have states beyond the first depth;
    - `borrow(embedding, output_head)`, which returns the `TargetWeights` that the drafter uses;
    - `layers`, the modules of its layers, unless the family's `layers` finds them elsewhere;
    - `config`, `device`, `dtype`, `from_pretrained` and `save_pretrained`, as models of transformers have them.

    In shapes S are chains, K draft steps, D the size of a drafted state, V' the draft vocabulary, N predictions. Depth
    d of the chain at position i predicts x_{i+2+d}. Its parent, the last token that it may know, is x_{i+1+d}.
    """

    name: str  # name of the family, as `hsdraft train --family` takes it
    drafter: Any  # class of its drafters
    model: Any  # a drafter, once `predictions` has bound it
    weights: TargetWeights  # what it borrows of its target
    # Whether drafted states depend on the path's tokens. If they do, each further token of a path takes another
    # forward.
    reads_tokens = False
    least: Mapping[str, Any]  # fields of the smallest drafter, with which a target is tried
    arguments: Mapping[str, Any] = {}  # training arguments whose defaults differ for this family
    takes_adapters = False  # whether its drafters load adapters (LoRA)
    follows_drafts = True  # whether its chains can follow other tokens than the text's, as most data policies want
    starts_afresh = True  # whether a drafter can be trained from random weights

    @property
    def fields(self) -> set[str]:
        """The fields that a training plan may set for a drafter."""
        return fields_of(self.drafter.config_class)

    def config_for(self, target: Any, fields: Mapping[str, Any]) -> Any:
        """Returns the configuration of a fresh drafter, with `num_draft_steps`, but without a chosen draft vocabulary.

        An invalid field is a ValueError.
        """
        raise NotImplementedError

    def fresh(self, target: Any, fields: Mapping[str, Any], longest: int, choose: Choose) -> Any:
        """Returns a drafter with random weights, in float32 on the CPU.

        `longest` is the number of tokens of the longest conversation that it will learn from. `choose` returns the
        ascending token ids of a draft vocabulary, of the size that the plan asks for or else of one that pays.
        """
        config = self.config_for(target, fields)
        if config.draft_vocab_ids is None and config.draft_vocab_size < config.vocab_size:
            ids = choose()
            config = self.config_for(target, {**fields, "draft_vocab_size": len(ids), "draft_vocab_ids": ids})
        drafter = self.drafter(config)
        self.set_options(drafter, fields)
        return drafter

    def untrained(self, target: Any, fields: Mapping[str, Any]) -> Any:
        """Returns a drafter of the right sizes, to count or time; the target may be on the meta device."""
        return self.drafter(self.config_for(target, fields))

    def column_cost(self, drafter: Any, target: Any) -> float:
        """Returns the share of a round that a column of a drafter's head takes, which a draft reads once.

        A round takes as long as reading the target's weights. Both models may be on the meta device.
        """
        config = text_config(target)
        # DeepSpeed leaves a partitioned parameter without elements, and tells their number.
        weights = sum(getattr(each, "ds_numel", each.numel()) for each in target.parameters())
        return width_of(drafter.config) / max(weights, config.vocab_size * config.hidden_size)

    def loaded(self, name: str, target: Any, fields: Mapping[str, Any]) -> Any:
        """Returns the drafter to start from in float32. The target is for what a drafter of another kind lacks."""
        return self.drafter.from_pretrained(name, dtype=torch.float32)

    def check_start(self, drafter: Any, target: Any, tokenizer: Any) -> None:
        """Raises a ValueError if a drafter to start from was made for another target or tokenizer."""
        drafter.check(target)
        drafter.warn_of_misfit(target, tokenizer, all_processes=False)

    def taken(self, drafter: Any) -> Any | None:
        """Converts a drafter loaded for drafting to its training form; `None` if it is of another family.

        One of this family that cannot be trained is a ValueError.
        """
        return drafter if isinstance(drafter, self.drafter) else None

    def snapshot(self, drafter: Any) -> Any:
        """Returns a drafter with the same weights, without what training has put around its forward."""
        copied = type(drafter)(drafter.config)
        copied.load_state_dict(drafter.state_dict())
        copied.generation_config = drafter.generation_config
        return copied.to(drafter.device)

    def continued(self, drafter: Any, fields: Mapping[str, Any]) -> None:
        """Sets the fields that no weights depend on, in a drafter that is trained further.

        A plan that changes any other field is a ValueError that names it, except for a `draft_vocab_size` that
        `vocabulary.with_draft_vocabulary` can change.
        """
        raise NotImplementedError

    def set_options(self, drafter: Any, fields: Mapping[str, Any]) -> None:
        """Sets the drafting options among some fields; an invalid one is a ValueError."""
        for name in OPTIONS:
            if name in fields:
                setattr(drafter.generation_config, name, fields[name])
        drafter.check_options()

    @torch.no_grad()
    def start_from_target(self, drafter: Any, target: Any, finals: torch.Tensor) -> None:
        """Initialises a fresh drafter of the target's width: its logits are small, but aligned with the target's.

        An untrained drafter gives noise. If its logits were as large as the target's, it would take hundreds of steps
        to unlearn that. The final norm gets the scale of the target's final hidden states, of which `finals` `[N, D]`,
        float32, are some; the drafter's own head becomes the target's; a bias of low rank gets the leading directions
        of that.
        """
        if width_of(drafter.config) != drafter.config.target_hidden_size:
            return
        norm, rows = drafter.norm.weight, target.get_output_embeddings().weight.detach()
        rows = rows[drafter.draft_vocab_ids().to(rows.device)].to(norm.device, torch.float32)
        norm.copy_(finals.pow(2).mean(dim=0).sqrt())
        if drafter.lm_head is not None:
            drafter.lm_head.weight.copy_(rows)
        if (up := self.bias_rows(drafter)) is not None:
            # After the norm's scale, states vary equally in all directions, so the head is scaled in the same way.
            scaled = rows * norm
            directions = torch.linalg.eigh(scaled.T @ scaled).eigenvectors.flip(
                dims=[1]
            )  # the leading directions first
            leading = scaled @ directions[:, : up.shape[1]]
            up[:, : leading.shape[1]].copy_(_UP * leading)
        norm.mul_(_HEAD)

    def bias_rows(self, drafter: Any) -> torch.Tensor | None:
        """Returns the weight `[V', r]` of the last product of the drafter's token bias; None if it has no such bias."""
        return None

    def check_trainable(self, config: Any) -> None:
        """Raises a ValueError for the configuration of a drafter that can draft, but not be trained."""

    def by_columns(self, config: Any) -> bool:
        """Whether `logits` can compute some columns alone, as the loss on candidates wants."""
        return False

    def taps(self, drafter: Any, target: Any) -> Sequence[int]:
        """Returns the hidden states of a target that training reads; by default those that drafting reads."""
        taps: Sequence[int] = drafter.taps_of(target)
        if taps and taps[-1] > decoder_layers(text_config(target)):
            raise ValueError(
                "this drafter reads the output of the target's last layer before its norm, with which it can draft but "
                "not be trained here: expected one that reads lower layers only"
            )
        return taps

    def layers(self, drafter: Any) -> list[nn.Module]:
        """Returns the layers of a drafter, which are recomputed in the backward where memory is short."""
        return list(drafter.layers)

    def record_target(
        self, drafter: Any, target: Any, tokenizer: Any, name: str | None = None, seconds: float | None = None
    ) -> None:
        """Records a drafter's target in its configuration, in `seconds` if given; less is recorded then.

        All processes of a sharded target have to take part.
        """
        raise NotImplementedError

    def describe(self, drafter: Any) -> str:
        """Describes what is special about a drafter of this family, for its recipe."""
        raise NotImplementedError

    def predictions(self, drafter: Any, weights: TargetWeights) -> Self:
        """Returns what a drafter of this family predicts with the weights that it borrows: the methods below."""
        bound = copy.copy(self)
        bound.model, bound.weights = drafter, weights
        return bound

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters that `states`, `logits` and `final` depend on."""
        return trained(self.model.norm, self.model.lm_head)

    def inputs(self, tokens: torch.Tensor) -> dict[str, Any]:
        """Returns further inputs of the drafter's forward, by the parents of the first k depths, `[S, k]`, int64."""
        return {}

    def states(self, tokens: torch.Tensor, hidden_states: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        """Returns for each depth a state of the paths `[rows, ...]`; `None` where logits do not depend on them.

        `tokens` `[S, k]` are the parents of the first k depths, `hidden_states` their drafted states `[rows, D]`, whose
        rows are the first chains.
        """
        return [None] * len(hidden_states)

    def logits(
        self, hidden: torch.Tensor, states: torch.Tensor | None, columns: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Returns logits `[N, V']` of drafted states `[N, D]`, with `states` `[N, ...]` of their paths if there are.

        `columns` `[C]`, int64, are those of the draft vocabulary to compute, `[N, C]`; `None` for all. Only families
        that can compute some (`by_columns`) are asked for them.
        """
        if columns is None:
            return self.model.logits(hidden, self.weights)
        normed = self.model.norm(hidden)
        if self.model.lm_head is not None:
            return some_columns(self.model.lm_head, normed, columns)
        assert self.weights.head is not None
        return F.linear(normed, self.weights.head[columns])

    def final(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns what is compared with the target's final hidden states: `[N, width]`, of drafted states `[N, D]`."""
        return self.model.norm(hidden)
