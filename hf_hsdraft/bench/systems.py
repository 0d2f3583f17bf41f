"""The systems to compare: variants by name, and how they decode."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..core.checks import public_name
from ..cpu.packed_weights import linears_to_pack
from ..drafters.base.draft_options import DraftOptions, option_names
from ..drafters.base.protocol import Drafter
from ..drafters.lookup.cacheback import CachebackDrafter
from ..verify.registry import OPTION_NAMES, is_lossy
from . import VARIANTS

PLAIN = "plain"
# Short names of drafting options. Any other option of `drafter.generation_config` is given as +name=value.
SHORT: dict[str, dict[str, Any]] = {
    "none": {"reuse": "none"},
    "ensemble": {"reuse": "ensemble"},
    "resample": {"reuse": "resample"},
    "ngrams": {"ngram_length": 4},
    "cost": {"tree_sizing": "cost"},
}
_DRAFTED = re.compile(r"(default|untrained|chain|tree)(?:(?<!default)(?<!untrained)(\d+)(?:x(\d+))?)?((?:\+[^+]+)*)")
_CHAINS, LONGEST_CHAIN = "chains", 7  # as other speculators report


# Further variants, by name. Each entry parses a whole variant, such as `mtp` or `dflash=FOLDER`, and returns what makes
# its system for a target. It raises errors as `Variant.parse` does.
OTHERS: dict[str, Callable[[str], Callable[[Any], System]]] = {}


@dataclass(frozen=True)
class Variant:
    """A variant as the user named it, before any model is loaded."""

    text: str
    # `default`, `untrained` (the same with random weights), `chain`, `chains`, `tree`, or one of `_FIXED` or `OTHERS`
    kind: str
    size: int | None = None  # of `treeSIZExDEPTH` or `chainSIZE`, if given
    depth: int | None = None
    options: dict[str, Any] = field(default_factory=dict)  # named drafting options
    system: Callable[[Any], System] | None = None  # makes the system of such a name for a target

    @property
    def public_text(self) -> str:
        """The name without local paths."""
        kind, sign, place = self.text.partition("=")
        return f"{kind}={public_name(place)}" if sign and self.system else self.text

    def each(self, drafter: Drafter) -> list[Variant]:
        """Returns the variants it expands to: chains of all lengths for `chains`, otherwise itself."""
        if self.kind != _CHAINS:
            return [self]
        longest = min(LONGEST_CHAIN, drafter.num_draft_steps)
        return [Variant(f"chain{length}", "chain", length) for length in range(1, longest + 1)]

    def for_depth(self, most: int) -> Variant:
        """Returns the variant with its depth, and its name, cut to the drafter's greatest depth.

        So one list of variants fits drafters of different depths.
        """
        if self.kind == "chain" and (self.size or 0) > most:
            return replace(self, text=self.text.replace(f"chain{self.size}", f"chain{most}", 1), size=most)
        if self.kind == "tree" and (self.depth or 0) > most:
            old, new = (f"tree{self.size}x{depth}" for depth in (self.depth, most))
            return replace(self, text=self.text.replace(old, new, 1), depth=most)
        return self

    @classmethod
    def parse(cls, text: str) -> Variant:
        """Parses a variant's name.

        Raises a ValueError if there is no such variant or folder, an ImportError if a package is missing.
        """
        if text in (_CHAINS, *_FIXED):
            return cls(text, text, system=_FIXED.get(text))
        match = _DRAFTED.fullmatch(text)
        if match is not None:
            kind, size, depth, suffixes = match.groups()
            options = _options(text, [part for part in suffixes.split("+") if part])
            return cls(text, kind, int(size) if size else None, int(depth) if depth else None, options)
        kind = re.split("[=:]", text)[0]
        if kind not in OTHERS:
            raise ValueError(f"unknown variant {text!r}: expected some of {VARIANTS}")
        return cls(text, kind, system=OTHERS[kind](text))


def parse_variants(text: str) -> list[Variant]:
    """Parses a comma-separated list of variants.

    Raises errors as `Variant.parse` does, and a ValueError if a variant is named twice, or none is named.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ValueError(f"no variant is named: expected some of {VARIANTS}")
    if len(set(names)) < len(names):
        raise ValueError(f"a variant is named twice: {text}")
    return [Variant.parse(name) for name in names]


@dataclass(frozen=True)
class System:
    """One way of decoding."""

    name: str  # of its row in the table
    # arguments of `generate()` besides the common settings
    generate_kwargs: dict[str, Any] = field(default_factory=dict)
    drafter: Any = None
    options: dict[str, Any] = field(default_factory=dict)  # drafting options set on the drafter during a call
    # In place of the target's `generate()`; its output tells too how many drafted tokens each round `accepted`
    generate: Callable[..., Any] | None = None
    # whether it drafts with a drafter that the user named. If such a system fails, the comparison fails
    ours: bool = False
    draws_as_plain: bool = True  # whether sampling with the same seed gives plain decoding's text
    static: bool = False  # whether its cache has a fixed length; its forwards may then be compiled
    drafts_later: bool = False  # whether nothing is drafted in the prompt's forward
    packed: bool = False  # whether the target's weights are packed for the whole call
    exact: bool = True  # whether its verification keeps the target's distribution

    def shown_options(self) -> dict[str, Any]:
        """Returns the drafting options in force, for the report."""
        if not self.ours:
            return self.options
        config = self.drafter.generation_config
        names = [*vars(self.drafter.default_generation_config()), *sorted(OPTION_NAMES)]
        given = {name: getattr(config, name, None) for name in names if not name.startswith("_")}
        return {name: value for name, value in {**given, **self.options}.items() if value is not None}


def drafted_system(variant: Variant, drafter: Drafter, label: str = "") -> System:
    """Returns the system of one of our variants; `label` names the drafter where several are compared.

    Raises a ValueError if the drafter has no such option, or the option cannot have that value.
    """
    variant, options = variant.for_depth(drafter.num_draft_steps), {}
    names = option_names(drafter)
    if variant.kind == "untrained":
        drafter = _untrained(drafter)
    elif variant.kind != "default":
        config = drafter.default_generation_config()
        depth = variant.depth or (variant.size if variant.kind == "chain" else None) or config.num_assistant_tokens
        options = {
            **({"reuse": "none"} if "reuse" in names else {}),
            "ngram_length": drafter.least_ngram_length,
            "tree_sizing": "fixed",
            "beam_width": 1 if variant.kind == "chain" else max(config.beam_width, 2),
            "tree_size": variant.size or config.tree_size,
            "num_assistant_tokens": depth,
        }
    options |= variant.options
    stored = drafter.generation_config
    unknown = [name for name in options if name not in names]
    if unknown:
        raise ValueError(f"variant {variant.text!r}: no drafting option {', '.join(unknown)}")
    with_options(drafter, options)
    try:
        chosen = DraftOptions.of(drafter)
    except ValueError as error:
        raise ValueError(f"variant {variant.text!r}: {error}") from None
    finally:
        drafter.generation_config = stored
    alike = chosen.verification == "walk" and not chosen.drawn  # others consume more random numbers
    exact = not is_lossy(chosen.verification)
    name = f"{label}: {variant.text}" if label else variant.text
    return System(name, {"assistant_model": drafter}, drafter, options, ours=True, draws_as_plain=alike, exact=exact)


def _untrained(drafter: Any) -> Any:
    """Returns a drafter of the same shape with random weights, to show the cost of useless drafts.

    Raises a ValueError if the drafter has no weights.
    """
    if not hasattr(drafter, "parameters"):
        raise ValueError(f"variant 'untrained' needs a drafter with weights: a {type(drafter).__name__} has none")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made: Any = type(drafter)(drafter.config)
    return made.to(drafter.device, drafter.dtype).eval()


def with_options(drafter: Any, options: dict[str, Any]) -> None:
    """Gives a drafter a copy of its options with some of them changed."""
    drafter.generation_config = copy.deepcopy(drafter.generation_config)
    for name, value in options.items():
        setattr(drafter.generation_config, name, value)


def _packed(target: Any) -> System:
    if not linears_to_pack(target, True):
        raise ValueError("variant 'packed': no weight of this target can be packed here")
    return System("plain, packed weights", packed=True)


_LOOKUP = {"prompt_lookup_num_tokens": 10}  # transformers' own example
_FIXED: dict[str, Callable[[Any], System]] = {
    # It samples at all drafted places at once, so the same seed gives another text than plain decoding.
    "lookup": lambda target: System("prompt lookup (transformers)", _LOOKUP, draws_as_plain=False),
    "static": lambda target: System("plain, static cache", {"cache_implementation": "static"}, static=True),
    "packed": _packed,
    "cacheback": lambda _: System("cacheback (no training)", {"assistant_model": (own := CachebackDrafter())}, own),
}


def make_systems(variants: Sequence[Variant], target: Any, drafters: dict[str, Drafter]) -> list[System]:
    """Returns the systems of some variants, in order. Each of our variants comes with each drafter.

    Labels of drafters are shown only if there are several. Raises a ValueError if an option does not fit its drafter.
    """
    several, systems = len(drafters) > 1, []
    for variant in variants:
        if variant.system is not None:
            systems.append(variant.system(target))
            continue
        for label, drafter in drafters.items():
            shown = label if several else ""
            systems.extend(drafted_system(each, drafter, shown) for each in variant.each(drafter))
    names = [system.name for system in systems]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"two variants come to the same row of the table: {', '.join(sorted(twice))}")
    return systems


def _options(text: str, parts: Sequence[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for part in parts:
        name, sign, value = part.partition("=")
        if not sign and name not in SHORT:
            raise ValueError(f"unknown variant {text!r}: +{name} is none of {', '.join(SHORT)}, nor +option=value")
        for option, setting in ({name: _value(value)} if sign else SHORT[name]).items():
            if option in options:
                raise ValueError(f"variant {text!r} sets {option} twice")
            options[option] = setting
    return options


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
