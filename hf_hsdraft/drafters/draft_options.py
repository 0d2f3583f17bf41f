"""Drafting options: what a drafter's `generation_config` and a call's say, checked."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from transformers import GenerationConfig
from transformers.utils import logging

from ..common.checks import few, is_integer, is_number, printable
from ..common.tuning import TUNING
from ..pace.round_costs import Costs
from ..trees.builder_registry import TREE_BUILDERS
from ..verifiers.registry import VERIFIERS
from .ngrams.ngram_cache import MOST_LEADING

logger = logging.get_logger(__name__)

_SHARED_WITH_TRANSFORMERS = ("num_assistant_tokens", "assistant_confidence_threshold")
_ALIKE = 0.85  # of two names; see `difflib.SequenceMatcher.ratio`

MOST_NODES = 2**12  # of a tree, and of those that are expanded at a depth
TREE_SIZINGS = ("cost", "fixed")
REUSES = ("none", "ensemble", "resample")


@dataclass(frozen=True)
class DraftOptions:
    """Drafting options of one call, read from `drafter.generation_config`.

    Attributes:
        depth: greatest depth of what the drafter drafts, `num_assistant_tokens`; n-grams may reach further.
        tree_size, beam_width: see `TreeLimits`; a batch shares `tree_size`.
        threshold: `assistant_confidence_threshold`, the least probability of a drafted path.
        reuse: `"none"`, `"ensemble"` or `"resample"`.
        reuse_weight: weight of the old logits in `"ensemble"`, the new ones weighing 1.
        tree_builder: `"beam"`, `"gumbel"` or `"stochastic_beam"`; the last two draw nodes instead of taking the best.
        verification: `"walk"` or `"rejection"`.
        temperature: of the draws of a sampled tree.
        ngram_length: tokens of the longest leader of `NgramCache`, whose nodes join the tree; 0 leaves them out.
        tree_sizing: `"cost"` drafts and verifies what pays, up to the sizes above; `"fixed"` always does all.
        costs: what that goes by; `None` to measure them.
        packed_weights: of the target, on CPUs; `None` once drafting has saved the time for it.
    """

    depth: int
    tree_size: int
    beam_width: int
    threshold: float
    reuse: str
    reuse_weight: float
    tree_builder: str = "beam"
    verification: str = "walk"
    temperature: float = 1.0
    ngram_length: int = 0
    tree_sizing: str = "fixed"
    costs: Costs | None = None
    packed_weights: bool | None = None

    def shared_by(self, rows: int) -> DraftOptions:
        """The options of each row of a batch: the rows share two thirds of `tree_size`, at least two nodes each.

        A batch fills the machine by itself, so a node costs more than it does alone; small trees need no depth either.
        """
        if rows == 1:
            return self
        size = max(int(TUNING.batch_share * self.tree_size / rows), TUNING.batch_least_nodes)
        return replace(self, tree_size=size, depth=min(self.depth, (size + 1) // 2))

    def as_chain(self) -> DraftOptions:
        """The same options for a target that reads one path at a time."""
        builder = "stochastic_beam" if self.tree_builder == "gumbel" else self.tree_builder  # both draw one path
        reuse = "none" if self.reuse == "resample" else self.reuse  # that would merge two paths
        return replace(self, beam_width=1, tree_size=max(self.depth, 1), tree_builder=builder, reuse=reuse)

    @classmethod
    def of(cls, drafter: Any, call: GenerationConfig | None = None) -> DraftOptions:
        """Reads and checks the options.

        Args:
            drafter: a `Drafter`.
            call: generation configuration of the call. What it sets goes before what the drafter says; transformers has
                filled in its own defaults by then, and those count as not set.

        Raises:
            ValueError: an option is misspelt or out of range; the message names it and what would be right.
        """
        config = drafter.generation_config
        defaults = drafter.default_generation_config()
        _check_names(config, defaults)
        library = GenerationConfig._get_default_generation_params()

        def option(name: str) -> Any:
            given = getattr(call, name, None)
            values = (None if given == library.get(name) else given, getattr(config, name, None))
            value = next((value for value in values if value is not None), getattr(defaults, name))
            if name == "reuse" and value == "skip":  # drafters of an earlier version may ask for it
                logger.warning_once("reuse='skip' is gone, as it gained nothing measurable: nothing is reused")
                return "none"
            return value

        _check_sizes(option, drafter)
        _check_rules(option, drafter)
        builder = option("tree_builder")
        if (
            builder == "gumbel" and option("beam_width") == 1
        ):  # that builder draws trees only; of one path both are alike
            builder = "stochastic_beam"
        sampled = call is not None and call.do_sample and isinstance(call.temperature, int | float)
        return cls(
            depth=option("num_assistant_tokens"),
            tree_size=option("tree_size"),
            beam_width=option("beam_width"),
            threshold=option("assistant_confidence_threshold"),
            reuse=option("reuse"),
            reuse_weight=option("reuse_weight"),
            tree_builder=builder,
            verification=option("verification"),
            temperature=call.temperature if sampled else 1.0,  # type: ignore[union-attr]
            # Of drawn nodes one has to know how likely they were; leaving some of them out would bias the text.
            ngram_length=option("ngram_length") if builder == "beam" else 0,
            tree_sizing=option("tree_sizing") if builder == "beam" else "fixed",
            costs=_given_costs(option("node_cost"), option("depth_cost")),
            packed_weights=option("packed_weights"),
        )


def _check_sizes(option: Callable[[str], Any], drafter: Any) -> None:
    """Raises a ValueError for a number that is out of range."""
    most_depth, least_length = drafter.num_draft_steps, drafter.least_ngram_length
    sizes = dict.fromkeys(("tree_size", "beam_width"), MOST_NODES)
    for name, most in {"num_assistant_tokens": most_depth, **sizes}.items():
        value = option(name)
        if not is_integer(value) or not 1 <= value <= most:
            wanted = "1 or more" if name in sizes else f"from 1 to {most}, the greatest depth of this drafter"
            wanted = f"at most {most:,}" if name in sizes and is_integer(value) and value > most else wanted
            raise ValueError(f"{name}={value!r} is invalid: expected an integer {wanted}")
    length, threshold, weight = map(option, ("ngram_length", "assistant_confidence_threshold", "reuse_weight"))
    if not is_integer(length) or not least_length <= length <= MOST_LEADING:
        least = "0 (no n-grams)" if least_length == 0 else f"{least_length}, the least of a {type(drafter).__name__},"
        raise ValueError(f"ngram_length={length!r} is invalid: expected an integer from {least} to {MOST_LEADING}")
    if not is_number(threshold) or not 0.0 <= threshold < 1.0:
        raise ValueError(f"assistant_confidence_threshold={threshold!r} is invalid: expected a probability below 1")
    if not is_number(weight) or not weight >= 0.0:
        raise ValueError(f"reuse_weight={weight!r} is invalid: expected a number of 0 or more")


def _check_rules(option: Callable[[str], Any], drafter: Any) -> None:
    """Raises a ValueError for a rule that is not known, or does not go with another one."""
    rules = {"tree_sizing": TREE_SIZINGS, "tree_builder": tuple(TREE_BUILDERS), "verification": tuple(VERIFIERS)}
    for name, allowed in {"reuse": REUSES, **rules}.items():
        if option(name) not in allowed:
            raise ValueError(f"{name}={option(name)!r} is invalid: expected one of {', '.join(allowed)}")
    builder, verification, reuse, packed = map(option, ("tree_builder", "verification", "reuse", "packed_weights"))
    if VERIFIERS[verification].drawn_nodes and builder == "beam":
        raise ValueError(
            f"verification={verification!r} is invalid with tree_builder='beam': its ratio holds for drawn nodes "
            "only, the best nodes of a beam would bias the text; choose tree_builder='gumbel' or 'stochastic_beam'"
        )
    if builder != "beam" and not drafter.draws_nodes:
        raise ValueError(
            f"tree_builder={builder!r} is invalid for a {type(drafter).__name__}, which does not draw its nodes: "
            "expected tree_builder='beam', and with it verification='walk'"
        )
    if packed is not None and not isinstance(packed, bool):
        raise ValueError(
            f"packed_weights={packed!r} is invalid: expected True, False, or None for packing where it pays"
        )
    if builder != "beam" and reuse != "none":
        raise ValueError(f"reuse={reuse!r} is invalid with tree_builder={builder!r}: only beams can be merged")


def default_options(num_assistant_tokens: int, tree_size: int, beam_width: int) -> GenerationConfig:
    """The drafting options there are, as they stand where nobody says otherwise."""
    return GenerationConfig(
        num_assistant_tokens=num_assistant_tokens,
        tree_size=tree_size,
        beam_width=beam_width,
        assistant_confidence_threshold=0.0,
        reuse="none",
        reuse_weight=0.4,
        tree_builder="beam",
        verification="walk",
        ngram_length=4,
        tree_sizing="cost",
        node_cost=None,
        depth_cost=None,
        packed_weights=None,
    )


def _check_names(config: GenerationConfig, defaults: GenerationConfig) -> None:
    """Tells fields of a drafter's generation configuration that are no options.

    A name that is nearly an option's is a typing error. Others are left alone: libraries set fields of their own, and
    transformers copies all those of a model's generation configuration.

    Args:
        config: of the drafter; defaults: all the options there are, among transformers' own fields.

    Raises:
        ValueError: a name is misspelt.
    """
    unknown = [name for name in vars(config) if name not in vars(defaults) and not name.startswith("_")]
    unknown = sorted(name for name in unknown if name != "transformers_version")
    options = sorted(vars(defaults).keys() - vars(GenerationConfig()).keys() | set(_SHARED_WITH_TRANSFORMERS))
    for name in unknown:
        meant = difflib.get_close_matches(name, options, n=1, cutoff=_ALIKE)
        if meant:
            raise ValueError(
                f"{printable(name)} on drafter.generation_config is no drafting option: {meant[0]} is one; correct the "
                f"name, or remove it by `del drafter.generation_config.{printable(name)}`"
            )
    if unknown:
        logger.warning_once(f"fields of drafter.generation_config that mean nothing to it: {few(unknown)}")


def _given_costs(node: Any, depth: Any) -> Costs | None:
    """The costs that a user gives; `None` if they are to be measured."""
    if node is None and depth is None:
        return None
    for name, value in (("node_cost", node), ("depth_cost", depth)):
        if not is_number(value) or not 0.0 <= value <= 1.0:
            raise ValueError(
                f"{name}={value!r} is invalid: expected 0 to 1, in forwards of one token; give both node_cost and "
                "depth_cost, or neither to have them measured"
            )
    return Costs(tree=0.0, node=node, draft=depth, depth=depth)
