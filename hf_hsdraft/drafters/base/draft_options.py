"""Drafting options, merged from a drafter's `generation_config` and the call's, and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

from torch import nn
from transformers import GenerationConfig
from transformers.utils import logging

from ...core.checks import (
    choice,
    demand,
    few,
    is_number,
    nearest_option,
    printable,
    short,
    typo_of,
)
from ...core.draft_tree import TREE_BUILDERS
from ...core.methods import Registry, load, offered
from ...core.options import Option
from ...pace.pacing import Costs
from ...verify.registry import COMMON_OPTIONS, NO_HISTORY, OPTION_NAMES, VERIFIERS, is_lossy, rule_options
from ...verify.verdict import Verifier

# Share of `tree_size` that the rows of a batch have together - measured; the figures were not kept.
BATCH_SHARE = Fraction(2, 3)
BATCH_LEAST_NODES = 2  # least number of nodes of each row of a batch - by hand

logger = logging.get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class MethodOption(Option):
    """An option with which a method changes what any drafter's calls draft. At 0, its default, nothing is loaded."""

    fits: Callable[[Any, DraftOptions], None]  # takes the drafter; raises a ValueError if it cannot be used with these
    begin: Callable[[Any, Any], None]  # takes the call and its `engine.drafting.Drafting`, which it changes


METHOD_OPTIONS: Registry[MethodOption] = Registry("drafting_option")


@dataclass(frozen=True)
class DraftOptions:
    """Drafting options of one call, read from `drafter.generation_config`."""

    depth: int  # `num_assistant_tokens`, greatest depth of the drafter's nodes; n-grams may reach further
    tree_size: int  # see `TreeLimits`; shared by the rows of a batch
    beam_width: int  # see `TreeLimits`
    threshold: float  # `assistant_confidence_threshold`, least probability of a drafted path
    tree_builder: str = "beam"  # a name in `TREE_BUILDERS`
    verification: str = "walk"  # a name in `VERIFIERS`
    drawn: bool = False  # whether `tree_builder` draws nodes from the drafter's distribution, as `rejection` requires
    temperature: float = 1.0  # for drawing nodes; 1 if they are not drawn
    ngram_length: int = 0  # longest leader of `NgramCache`, whose nodes join the tree; 0 disables n-grams
    # `"cost"` drafts and verifies what pays, up to the sizes above; `"fixed"` always uses these sizes
    tree_sizing: str = "fixed"
    costs: Costs | None = None  # used by `"cost"`; None to measure them
    # Pack the target's weights on CPUs; None once drafting has saved the time that packing takes
    packed_weights: bool | None = None
    # Compile the target's decoder layers on CPUs; None after many forwards, True at once
    compiled_layers: bool | None = None
    adapter_name: str | None = None  # adapter that the drafter uses; "" for none, None for the active ones
    history: str = NO_HISTORY  # past texts to draft from: `"off"`, `"memory"`, or a folder
    # Options of the drafter's family, of verification rules, and those set of `METHOD_OPTIONS`, by name
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def of_methods(self) -> list[MethodOption]:
        return [METHOD_OPTIONS[name] for name in offered(METHOD_OPTIONS.kind) if self.own.get(name)]

    def shared_by(self, rows: int) -> DraftOptions:
        """Options of each row of a batch, where nodes cost more: trees are smaller and less deep."""
        if rows == 1:
            return self
        size = max(int(BATCH_SHARE * self.tree_size / rows), BATCH_LEAST_NODES)
        return replace(self, tree_size=size, depth=min(self.depth, (size + 1) // 2))

    def as_chain(self) -> DraftOptions:
        return replace(self, beam_width=1, tree_size=max(self.depth, 1) + self.own.get("ngram_continuation", 0))

    @classmethod
    def of(cls, drafter: Any, call: GenerationConfig | None = None) -> DraftOptions:
        """Reads and checks the options.

        Args:
            drafter: a `Drafter`.
            call: the call's generation configuration, which overrides the drafter's. transformers has already filled in
                its defaults, which count as not set, and the target's saved values, which look like the caller's. So
                lossy rules and their options are ignored here.

        Raises:
            ValueError: an option is misspelt or out of range; the message names it and the allowed values.
        """
        config = drafter.generation_config
        own = _own_options(drafter, _given(config), _given(call))
        defaults = drafter.default_generation_config()
        _check_names(config, option_names(drafter), type(drafter).__name__)
        library = GenerationConfig._get_default_generation_params()
        of_lossy = {each.name for each in rule_options(lossy=True)}

        def option(name: str) -> Any:
            given, set_here = getattr(call, name, None), getattr(config, name, None)
            if set_here is None:
                set_here = own[name].default if name in own else getattr(defaults, name)
            if given is None or given == library.get(name) or given == set_here:
                return set_here
            why = ""
            if name == "history" and given != NO_HISTORY:
                why = "a history keeps users' texts"
            elif name in of_lossy or (name == "verification" and is_lossy(given)):
                why = "lossy verification may change the text"
            if why:  # the value may come from the target's files, which must not decide that
                logger.warning_once(
                    f"the target's generation configuration, or the call, asks for {name}={short(given)}. It is not "
                    f"used, since {why}. To use it, set drafter.generation_config.{name}"
                )
            return set_here if why else given

        known = {**COMMON_OPTIONS, **own}
        values = {name: each.checked(option(name), drafter) for name, each in known.items()}
        _check_together(values, drafter)
        builder = TREE_BUILDERS[values["tree_builder"]]
        if builder.draws:  # which needs known probabilities; dropping some nodes would bias the output
            values |= {"ngram_length": 0, "ngram_continuation": 0, "history": NO_HISTORY}
        if builder.draws or builder.whole:  # "cost" keeps only the best nodes
            values["tree_sizing"] = "fixed"
        sampled = call is not None and call.do_sample and isinstance(call.temperature, int | float)
        options = cls(
            depth=values["num_assistant_tokens"],
            threshold=values["assistant_confidence_threshold"],
            drawn=builder.draws,
            temperature=call.temperature if builder.draws and sampled else 1.0,  # type: ignore[union-attr]
            costs=_given_costs(values["node_cost"], values["depth_cost"]),
            own={name: values[name] for name in own},
            **{each.name: values[each.name] for each in fields(cls) if each.name in COMMON_OPTIONS},
        )
        drafter.check_together(options)
        return options


def _check_together(values: Mapping[str, Any], drafter: Any) -> None:
    if values["adapter_name"] not in (None, ""):
        wanted = "expected none, as hf_hsdraft/methods/adapters.py is not here"
        demand(bool(offered("adapting")), "adapter_name", values["adapter_name"], wanted)
        load("adapting", "peft").check_adapter_name(drafter, values["adapter_name"])
    if not choice(*VERIFIERS).valid(values["verification"]):
        # Only here: whether a rule is lossy is known once its method is loaded.
        rules = ", ".join(f"{each} (lossy)" if is_lossy(each) else each for each in VERIFIERS)
        demand(False, "verification", values["verification"], f"expected one of {rules}")
    builder, verification = values["tree_builder"], values["verification"]
    if VERIFIERS[verification].drawn_nodes and not TREE_BUILDERS[builder].draws:
        raise ValueError(
            f"verification={verification!r} is invalid with tree_builder={builder!r}: its ratio holds for drawn nodes "
            "only, the best nodes or paths would bias the text; choose tree_builder='gumbel' or 'stochastic_beam'"
        )
    if builder != "beam" and not drafter.takes_tree_builders:
        raise ValueError(
            f"tree_builder={builder!r} is invalid for a {type(drafter).__name__}, which grows its trees by itself: "
            "expected tree_builder='beam', and with it verification='walk'"
        )


def default_options(
    num_assistant_tokens: int, tree_size: int, beam_width: int, own: Sequence[Option] = ()
) -> GenerationConfig:
    """The default options of a family; `own` are its `Drafter.own_options`. Options of rules are added when set."""
    common = dict.fromkeys(offered(METHOD_OPTIONS.kind), 0)
    common |= {name: each.default for name, each in COMMON_OPTIONS.items()}
    sizes = {"num_assistant_tokens": num_assistant_tokens, "tree_size": tree_size, "beam_width": beam_width}
    return GenerationConfig(**{**common, **sizes, **{option.name: option.default for option in own}})


def adapted(drafter: Any, name: str | None) -> Any:
    """Returns a view of a drafter with its adapter `name`, see `methods/adapters.py`; itself if it holds none.

    Without that method, a drafter with adapters drafts by those that are active.
    """
    if name is None and not offered("adapting"):
        return drafter
    parts = [part for part in (drafter, *vars(drafter).values()) if isinstance(part, nn.Module)]
    if not any(hasattr(each, "_active_adapter") for part in parts for each in part.modules()):
        return drafter
    return load("adapting", "peft").adapted(drafter, name)


def _given(config: GenerationConfig | None) -> dict[str, Any]:
    return {} if config is None else {name: value for name, value in vars(config).items() if value is not None}


def _own_options(drafter: Any, *given: Mapping[str, Any]) -> dict[str, Option]:
    """Returns options of the drafter's family, of verification rules (see `rule_options`) and methods, by name."""
    methods = [name for name in offered(METHOD_OPTIONS.kind) if any(each.get(name, 0) != 0 for each in given)]
    options = [*rule_options(*given), *(METHOD_OPTIONS[name] for name in methods), *drafter.own_options]
    own = {option.name: option for option in options}
    taken = sorted(own.keys() & (vars(GenerationConfig()).keys() | COMMON_OPTIONS.keys() | vars(Verifier).keys()))
    taken += sorted({option.name for option in options if own[option.name] is not option})  # rules may share an option
    if taken:
        raise ValueError(f"{', '.join(taken)} means something else already: expected another name")
    return own


def option_names(drafter: Any = None) -> set[str]:
    """Returns the names of a drafter's options; without a drafter, the names common to all."""
    if drafter is None:
        rules = {option.name for option in rule_options()}
        return COMMON_OPTIONS.keys() | OPTION_NAMES | rules | set(offered(METHOD_OPTIONS.kind))
    given = vars(drafter.default_generation_config()).keys() - vars(GenerationConfig()).keys()
    return option_names() | _own_options(drafter).keys() | given


def _check_names(config: GenerationConfig, options: set[str], kind: str) -> None:
    """Raises a ValueError for misspelt options. Other unknown names only warn: libraries add such fields."""
    known = options | vars(GenerationConfig()).keys() | {"transformers_version"}
    unknown = sorted(name for name in vars(config) if name not in known and not name.startswith("_"))
    told = []
    for name in unknown:
        if meant := typo_of(name, options):
            raise ValueError(
                f"{printable(name)} on drafter.generation_config is no drafting option: {meant} is one; correct the "
                f"name, or remove it by `del drafter.generation_config.{printable(name)}`"
            )
        near = nearest_option(name, options)
        told.append(f"{name} (the nearest option is {near})" if near else name)
    if told:
        logger.warning_once(f"fields of drafter.generation_config that mean nothing to a {kind}: {few(told)}")


def _given_costs(node: Any, depth: Any) -> Costs | None:
    """The costs that the user sets; None to measure them."""
    if node is None and depth is None:
        return None
    for name, value in (("node_cost", node), ("depth_cost", depth)):
        wanted = "expected 0 to 1, in forwards of one token; give both node_cost and depth_cost, or neither to measure"
        demand(is_number(value) and 0.0 <= value <= 1.0, name, value, wanted)
    return Costs(tree=0.0, node=node, draft=depth, depth=depth)


def leave_folder(drafter: Any) -> None:
    """Forgets the folder that a drafter was loaded from and all in it; switches its refiner off, in place."""
    drafter.loaded_from = None
    if getattr(drafter.generation_config, "refinement", 0):
        drafter.generation_config.refinement = 0.0
