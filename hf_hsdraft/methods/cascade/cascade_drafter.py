"""The public drafter of a hierarchy: construction from levels, loading, saving and use in `generate()`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from torch import nn
from transformers import GenerationConfig

from ...core.checks import FORMAT_VERSION, demand, integer, printable
from ...core.draft_tree import TREE_BUILDERS
from ...core.refusals import DraftingRefused
from ...core.tensors import device_of
from ...drafters.base.auto_drafter import AutoDrafter
from ...drafters.base.draft_options import DraftOptions, default_options
from ...drafters.base.plain_config import AnyTarget
from ...drafters.base.protocol import Call, Drafter, Session
from ...drafters.base.registry import register_drafter
from ...drafters.base.saved_drafter import Placement, SavedDrafter, take_options
from ...drafters.hidden_state.modeling_hsdraft import HSDrafter
from ...hub.drafter_files import CONFIG, check_is_drafter, read_json
from ...runtime.module_hooks import no_hooks_left
from ...runtime.target_limits import text_config
from ..published.checkpoint import AnyCheckpoint
from .cascade_session import CascadeSession, Step
from .levels import LMReader, StateFeed, model_of
from .supposing import supposes, supposing_session

_MOST = 64  # tokens that a level may pass up
_HERE = "./"  # prefix of levels inside the cascade's folder
_PLACE = re.compile(r"\./(level_\d+)")  # of a level that was saved with the cascade


@dataclass(frozen=True)
class CascadeConfig(AnyTarget):  # only ids known to all levels are drafted
    model_type: ClassVar[str] = "cascade"


class CascadeDrafter(nn.Module, SavedDrafter):
    """A hierarchy of drafters ("Hierarchical speculative decoding", 2510.19705).

        cascade = CascadeDrafter([CachebackDrafter(), CausalLMDrafter(small_model)], tokens=[4, 8])
        out = model.generate(**inputs, assistant_model=cascade)

    The first level drafts. Each further level is a language model that verifies the drafts of the level below until it
    holds enough tokens, then passes them up. The target verifies last. With `verification="rejection"` and a sampling
    `tree_builder`, each model samples from its distribution, and the next level verifies against that distribution.

    Args:
        levels: drafters, fastest first. All but the first need a language model, as in [`CausalLMDrafter`]. The first
            must be able to take tokens back, as [`CachebackDrafter`], [`CausalLMDrafter`] and [`HSDrafter`] can. An
            [`HSDrafter`] reads the hidden states of level 1, so it must be trained for that model.
        tokens: one number per level: tokens that the first level drafts at a time, and tokens that each further level
            holds before it passes them up. A level can exceed this by what its last draft adds.

    Raises a ValueError if the levels do not fit together, or a number of tokens is out of range.

    Each level is saved in a subfolder. config.json may be hand-written:
    `{"model_type": "cascade", "levels": [...], "tokens": [...]}`. A level is a folder, a Hub name, or a folder beside
    that file if it begins with `./`.
    """

    has_card = False
    num_draft_steps = 2 * _MOST
    takes_tree_builders = True

    def __init__(self, levels: Sequence[Drafter], tokens: Sequence[int]) -> None:
        super().__init__()
        _check_levels(levels, tokens)
        self.models = nn.ModuleDict({str(i): each for i, each in enumerate(levels) if isinstance(each, nn.Module)})
        self._levels, self.tokens = tuple(levels), tuple(tokens)
        self.config = CascadeConfig()
        self.generation_config = self.default_generation_config()

    @classmethod
    def of_checkpoint(cls, checkpoint: AnyCheckpoint, **kwargs: Any) -> CascadeDrafter:
        """As in `SavedDrafter`; `dtype`, `device_map` and `attn_implementation` are for the levels."""
        folder, document = checkpoint.folder, checkpoint.config
        attention, placement = kwargs.get("attn_implementation"), Placement.taken_from(kwargs)
        given = {"dtype": placement.dtype, "device_map": placement.device, "attn_implementation": attention}
        loading = {name: value for name, value in given.items() if value is not None}
        check_is_drafter(folder, CascadeConfig.model_type)
        names, tokens = document.get("levels"), document.get("tokens")
        if not isinstance(names, list) or not all(isinstance(each, str) and 0 < len(each) < 1024 for each in names):
            raise ValueError(
                f"{folder / CONFIG} is damaged: expected names of drafters as levels, found {printable(names)}"
            )
        if not isinstance(tokens, list):
            raise ValueError(f"{folder / CONFIG} is damaged: expected numbers as tokens, found {printable(tokens)}")
        _check_tokens(tokens, len(names))  # before weights are loaded
        _check_names(names, folder, "" if checkpoint.subfolder else checkpoint.name)
        levels, place = [], checkpoint.name if checkpoint.hub else folder
        for each in names:
            if each.startswith(_HERE):
                within = "/".join(filter(None, (checkpoint.subfolder, *PurePosixPath(each).parts)))
                levels.append(AutoDrafter.from_pretrained(place, subfolder=within, **checkpoint.hub, **loading))
            else:
                of_others = {key: value for key, value in checkpoint.hub.items() if key != "revision"}
                levels.append(AutoDrafter.from_pretrained(each, **of_others, **loading))
        drafter = cls(levels, tokens)
        take_options(drafter, folder, kwargs)
        return drafter.eval()

    def subfolders(self, folder: Path) -> set[str]:
        return {*(f"level_{index}" for index in range(len(self.levels))), *_former_places(folder)}

    def write(self, folder: Path, **kwargs: Any) -> None:
        """Writes each level into a subfolder, and the configuration that joins them; `kwargs` are for the levels."""
        places = [f"level_{index}" for index in range(len(self.levels))]
        for level, place in zip(self.levels, places, strict=True):
            level.save_pretrained(folder / place, **kwargs)
        document = {"model_type": CascadeConfig.model_type, "format_version": FORMAT_VERSION}
        document |= {"levels": [_HERE + place for place in places], "tokens": list(self.tokens)}
        (folder / CONFIG).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")

    @property
    def levels(self) -> tuple[Any, ...]:
        """The drafters, fastest first."""
        models = dict(self.models.items())
        return tuple(models.get(str(index), each) for index, each in enumerate(self._levels))

    @property
    def device(self) -> torch.device:
        return device_of(model_of(self.levels[-1]))

    @property
    def dtype(self) -> torch.dtype:
        return model_of(self.levels[-1]).dtype

    @property
    def reach(self) -> tuple[int, ...]:
        """The greatest number of tokens that each level passes up at a time."""
        first, *others = self.tokens
        reach = [first]
        for tokens in others:
            reach.append(tokens + reach[-1])
        return tuple(reach)

    def default_generation_config(self) -> GenerationConfig:
        """Drafting options of a cascade saved without any. Its levels decide how much each drafts."""
        depth = min(self.reach[-1], self.num_draft_steps)
        options = default_options(depth, tree_size=max(24, depth), beam_width=8)
        options.ngram_length = 0  # if useful, n-grams are the first level
        return options

    def check_options(self) -> None:
        super().check_options()
        for index in range(len(self.levels)):
            self._check_level(index)

    def _check_level(self, index: int) -> None:
        level = self.levels[index]
        try:
            level.check_options()
        except ValueError as error:
            raise ValueError(f"level {index} of this cascade, {_named(level)}: {error}") from None

    def check_together(self, options: DraftOptions) -> None:
        super().check_together(options)
        builder = options.tree_builder
        demand(not TREE_BUILDERS[builder].whole, "tree_builder", builder, "its levels pass chains up")

    def check(self, target: Any) -> None:
        for index, (level, model) in enumerate(self._pairs(target)):
            upper = "the target" if index == len(self.levels) - 1 else f"level {index + 1}"
            try:
                level.check(model)
            except ValueError as error:
                raise DraftingRefused(
                    f"level {index} of this cascade, {_named(level)}, does not fit {upper}: {error}"
                ) from None
        self._check_level(0)  # the call's options cover the other levels

    def warn_of_misfit(self, target: Any, tokenizer: Any, all_processes: bool) -> None:
        for level, model in self._pairs(target):
            level.warn_of_misfit(model, tokenizer, all_processes)

    def session(self, call: Call) -> Session:
        first, *others = self.levels
        models = [model_of(level) for level in others]
        vocab_size = min(text_config(model).vocab_size for model in (*models, call.target))
        temperature, pending = call.options.temperature if call.options.drawn else None, sum(self.reach) + 1
        options = self._of_first(call.options, pending)
        session: Any = supposing_session(
            first, replace(call, target=models[0], options=options, texts=None, runtime=None)
        )
        taps = first.taps_of(models[0])
        if taps:
            call.stack.enter_context(no_hooks_left(models[0]))
        for index, level in enumerate(others, 1):
            reader = LMReader(model_of(level), call.rows, pending, taps if index == 1 else ())
            feed = StateFeed(session, reader) if taps and index == 1 else None
            step = Step(self.tokens[index], self.reach[index - 1], temperature, vocab_size)
            session = CascadeSession(session, reader, step, call.rows, feed, call.foresight)
        return session

    def _of_first(self, options: DraftOptions, pending: int) -> DraftOptions:
        """The options of the first level, set to chains of its number of tokens.

        Reuse and refinement only work on text that stays, so an `HSDrafter` keeps their defaults: up to `pending` of
        the tokens that it drafts from can be taken back.
        """
        first, tokens = self.levels[0], self.tokens[0]
        drawn, own = options.drawn and first.takes_tree_builders, DraftOptions.of(first)
        plain = {option.name: option.default for option in first.own_options} if isinstance(first, HSDrafter) else {}
        return replace(
            own,
            own={**own.own, **plain},
            depth=tokens,
            tree_size=pending,
            beam_width=1,
            threshold=0.0,
            tree_builder="stochastic_beam" if drawn else "beam",
            drawn=drawn,
            temperature=options.temperature if drawn else 1.0,
            tree_sizing="fixed",
        )

    def _pairs(self, target: Any) -> Iterator[tuple[Drafter, Any]]:
        yield from zip(self.levels, [*map(model_of, self.levels[1:]), target], strict=True)


def _check_names(names: Sequence[str], folder: Path, own: str) -> None:
    """Raises a ValueError if a level is the cascade itself (named `own`), or outside of its folder."""
    for index, name in enumerate(names):
        parts = PurePosixPath(name).parts
        outside = name.startswith(_HERE) and (not parts or ".." in parts or "\\" in name)
        if outside or name == own or Path(name).resolve() == folder.resolve():
            raise ValueError(
                f"{folder / CONFIG} is damaged: levels[{index}]={name!r} is the cascade itself or lies outside of its "
                "folder; expected the name of another drafter, or a folder in it, as './level_0'"
            )


def _former_places(folder: Path) -> list[str]:
    """Returns the level folders of the cascade saved in a folder."""
    try:
        check_is_drafter(folder, CascadeConfig.model_type)
        names = read_json(folder / CONFIG).get("levels")
    except (OSError, ValueError):
        return []
    found = [_PLACE.fullmatch(name) for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return [match[1] for match in found if match]


def _check_levels(levels: Sequence[Drafter], tokens: Sequence[int]) -> None:
    wrong = [type(level).__name__ for level in levels if not isinstance(level, Drafter)]
    if wrong:
        raise ValueError(f"levels={wrong} are no drafters: expected such as CachebackDrafter() or CausalLMDrafter(...)")
    if len(levels) < 2:
        raise ValueError(f"a cascade of {len(levels)} levels is none: expected a drafter and a model that verifies it")
    for index, level in enumerate(levels[1:], 1):
        if model_of(level) is None:
            raise ValueError(
                f"level {index} is {_named(level)}, which cannot verify: expected a language model, as a "
                "CausalLMDrafter has"
            )
    first = levels[0]
    if not supposes(first):
        raise ValueError(
            f"level 0 is {_named(first)}, which cannot take back what it was told: expected a drafter that "
            "can: a CachebackDrafter, a CausalLMDrafter, or an HSDrafter without a narrow window"
        )
    _check_tokens(tokens, len(levels))
    most = first.num_draft_steps
    demand(tokens[0] <= most, "tokens[0]", tokens[0], f"{_named(first)} drafts {most}")


def _check_tokens(tokens: Sequence[int], count: int) -> None:
    demand(len(tokens) == count, "tokens", list(tokens), f"expected a number for each level, {count} in all")
    limit = integer(_MOST)
    for index, each in enumerate(tokens):
        demand(limit.valid(each), f"tokens[{index}]", each, f"expected {limit.wanted}")


def _named(level: Drafter) -> str:
    name = type(level).__name__
    return f"{'an' if name.startswith(('A', 'E', 'HS', 'I', 'O')) else 'a'} {name}"


register_drafter(CascadeConfig.model_type, CascadeConfig, CascadeDrafter)
