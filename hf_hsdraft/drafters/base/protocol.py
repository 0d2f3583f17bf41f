"""Interface between decoding and drafters.

A family is a file or folder with a `Drafter` (weights and options, no per-call state) and a `Session` (the drafting
state of one call). A `WrappedDrafter` measures or checks another one.
"""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig

from ...core.checks import MOST_NODES, misfit_of
from ...core.draft_tree import DraftTree, Expansion, TreeBatch
from ...core.options import Option
from ...core.refusals import DraftingRefused
from ...core.tensors import Transform
from ...verify.foresight import Foresight
from ...verify.registry import NO_HISTORY, VERIFIERS
from ...verify.verdict import Verifier

if TYPE_CHECKING:
    from .draft_options import DraftOptions


def weights_of(*modules: nn.Module | None) -> int:
    return sum(parameter.numel() for module in modules if module is not None for parameter in module.parameters())


@dataclass(frozen=True)
class Ask:
    """Request for a draft of one row. Its sizes are final; sessions ignore those in the options."""

    row: int  # index in the batch
    root: int  # the last accepted token, not yet read by the target
    depth: int  # greatest useful depth of a node; 0 to draft nothing
    size: int  # most nodes besides the root
    width: int = MOST_NODES  # nodes expanded per depth by sessions that grow beams; 1 for a chain

    @property
    def chain(self) -> bool:
        """Whether only one path may be drafted."""
        return self.width == 1


@dataclass(frozen=True)
class Accepted:
    """What the target accepted of one row since the last news; n positions were read.

    x_i are the tokens. h_i is the tapped hidden state at position i, from reading x_i; its logits are for x_{i+1}.
    """

    row: int  # index in the batch
    tokens: list[int]  # emitted tokens; the last is the bonus token, the next root
    taps: torch.Tensor  # `[n, taps * D]`, h_i of the positions read
    positions: torch.Tensor  # `[n]`, int64, the positions i, not counting padding
    following: torch.Tensor  # `[n]`, int64, the tokens x_{i+1}; with `embeds`, the last one only
    earlier: Sequence[int] = ()  # in a prompt's news, the tokens before `tokens`, as far as known
    num_drafted: int = 0  # emitted tokens that the draft held
    num_relaxed: int = 0  # of these, tokens that a lossy rule accepted instead of the target's
    # `[n - 1, D]`, embeddings of the x_{i+1} except the last, for prompts given as embeddings
    embeds: torch.Tensor | None = None

    def next_embeds(self, embed: Transform) -> torch.Tensor:
        """Returns embeddings `[n, D]` of the tokens x_{i+1}; `embed` maps token ids."""
        if self.embeds is None:
            return embed(self.following)
        last = embed(self.following[-1:])
        return torch.cat([self.embeds.to(last.device, last.dtype), last])

    def of_row(self, row: int) -> Accepted:
        """Returns the same news of another row."""
        other = copy.copy(self)
        vars(other)["row"] = row
        return other

    @classmethod
    def of_tokens(cls, row: int, tokens: Sequence[int]) -> Accepted:
        """Returns news without hidden states, for sessions that only read tokens."""
        none = torch.empty(0, dtype=torch.int64)
        return cls(row, list(tokens), torch.empty(0, 0), none, none)


@dataclass(frozen=True)
class Call:
    """One call of `generate()`, as seen by the engine and the drafter's session."""

    target: Any  # the model that verifies
    rows: int
    options: DraftOptions  # drafting options, as reduced for this target
    texts: Any = None  # the growing sequences, `engine.decoded_texts.DecodedTexts`; None if they grow elsewhere
    runtime: Any = None  # the target's forwards and cache, `runtime.target_runtime.TargetRuntime`; None likewise
    synced_gpus: bool = False  # whether all processes must run the same forwards
    outlives: bool = False  # whether the target's cache outlives the call
    observers: Sequence[Any] = ()  # additional observers of rounds; see `engine.loop.Observer`
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)  # closes when the call ends
    history: Any = None  # past texts, `methods.history`; None without the option `history`

    @property
    def foresight(self) -> Foresight | None:
        """The foreseen draws of the target; None if nothing is drawn."""
        return None if self.texts is None else self.texts.foresight


class Session:
    """Drafting state of one call."""

    # Drafts take negligible time. Free sessions always draft, and first; the pace limits the depth of others.
    free = False
    listens = False  # whether it observes all rounds of a call in which nothing can be drafted
    takes_ngrams = True  # whether n-grams may be put in front, as `ngram_length` asks
    # Whether a row that `keep` has left out may begin another text: its next news are those of a prompt
    takes_new_texts = False
    # Hashable; what the time of a draft depends on besides the session's class, target, options and depth
    kind: tuple[Any, ...] = ()
    # Called with rows and the expansion of their trees; see `engine.loop.Observer.on_expansion`
    on_expansion: Callable[[Sequence[int], Expansion], None] | None = None
    # Takes the same, and returns the expansion to grow the trees from instead; set by methods
    revise: Callable[[Sequence[int], Expansion], Expansion] | None = None
    # Takes a greedy text's forward over its last draft, on the device: the nodes, the target's choices there `[N]`, the
    # taps `[N, taps * D]`, and the root's position. Launches the next draft behind it, and reads both back at once;
    # returns the choices, or None if it does nothing. None if the session cannot. What it drafts is used if the choices
    # are accepted along the tree.
    follow: Callable[[TreeBatch, torch.Tensor, torch.Tensor, int], list[int] | None] | None = None
    followed: float = 0.0  # time that the last draft by `follow` took of the device, in seconds

    def draft(self, asks: Sequence[Ask]) -> list[DraftTree]:
        """A tree for each ask, in order; a lone root if there is nothing to propose."""
        raise NotImplementedError

    def observe(self, news: Sequence[Accepted]) -> None:
        """Takes accepted tokens; the first news are the prompts'."""

    def keep(self, rows: Sequence[int]) -> None:
        """Continues with these rows only. May be called again with fewer rows."""

    def memory(self, length: int) -> Any:
        """State that lets the next call on the same cache continue a sequence of `length` tokens, or None."""
        return None

    def resume(self, memory: Any, cached: int) -> None:
        """Continues from a memory, if it is this drafter's, of the text whose `cached` tokens the target has read."""

    def end(self) -> None:
        """Called when the call ends without an error."""


class Drafter:
    """Weights, configuration and drafting options. One drafter may serve several calls at once.

    Measurements are kept per object, so drafters must hash by identity, dataclasses included.
    """

    taps: Sequence[int] = ()  # indices of the target's hidden states that the drafter reads, ascending; () for none
    num_draft_steps: int  # greatest `num_assistant_tokens`
    takes_tree_builders: bool = False  # whether sessions accept any `tree_builder`, including those that draw nodes
    least_ngram_length: int = 0  # least `ngram_length`; 0 if n-grams are optional
    own_options: Sequence[Option] = ()  # options of this family; their values are in `call.options.own`
    # Why it has no files, and what to do instead of saving it; "" if it has
    unsaved: str = "it has no files of its own; make it again where you need it"
    generation_config: GenerationConfig  # the drafting options
    # Decodes a call in place of the engine; takes the target, and what `generate()` hands to a decoding method
    decoding: Callable[..., Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if vars(cls).get("__hash__") is None:  # dataclasses and classes with `__eq__` have none
            cls.__hash__ = object.__hash__  # type: ignore[method-assign]
        if getattr(cls, "extra_repr", None) is nn.Module.extra_repr:  # printed above the modules
            cls.extra_repr = Drafter.summary  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.summary()})"

    def summary(self) -> str:
        """What it is, in a few lines: target, shape of its drafts, hidden states that it reads, size."""
        options, lines = getattr(self, "generation_config", None), list[str]()
        if name := getattr(getattr(self, "config", None), "target_name", ""):
            lines.append(f"for the target {name}")
        if options is not None:
            shape = "num_assistant_tokens", "tree_size", "beam_width", "ngram_length", "verification"
            lines.append(", ".join(f"{each}={getattr(options, each, None)}" for each in shape))
        if taps := getattr(self, "taps", ()):
            lines.append(f"reads the target's hidden states {', '.join(map(str, taps))}")
        if isinstance(self, nn.Module) and (count := weights_of(self)):
            lines.append(f"{count / 1e6:.1f}M parameters")
        return "\n".join(lines)

    def default_generation_config(self) -> GenerationConfig:
        """The default drafting options."""
        raise NotImplementedError

    def check_options(self) -> None:
        """Raises a ValueError for an invalid drafting option."""
        from .draft_options import DraftOptions  # which asks the target's modules; vLLM's plugin runs without them

        DraftOptions.of(self)

    def check_together(self, options: DraftOptions) -> None:
        """Raises a ValueError for options that exclude each other in this family, or methods that it cannot take."""
        for each in options.of_methods:
            each.fits(self, options)

    def taps_of(self, target: Any) -> Sequence[int]:
        """Returns the hidden states that it reads of a target; called after `check`."""
        return self.taps

    def check(self, target: Any) -> None:
        """Raises DraftingRefused, naming the field, if this drafter was made for another target."""

    def warn_of_misfit(self, target: Any, tokenizer: Any, all_processes: bool) -> None:
        """May warn of a bad fit, or raise a DraftingRefused.

        `tokenizer` is the target's or None, `all_processes` whether all processes must run the same forwards.
        """

    def settle(self, target: Any, tokens: Sequence[int]) -> None:
        """May try on the target what the drafter's files leave open, before a call; `tokens` are of a prompt."""

    def match_told(self, target: Any, tokenizer: Any, name: str) -> list[str]:
        """Lines on how well it fits a target, called `name` there; none if only drafting tells. Raises as `check`."""
        return []

    def session(self, call: Call) -> Session:
        raise NotImplementedError

    def export(self, form: str, folder: str | os.PathLike[str], target_name: str = "") -> None:
        """Writes the drafter in another project's format `form`; raises a ValueError if it has no such format.

        `folder` is created if missing; `target_name` is by default the one that the drafter knows.
        """
        only = "it has no format but its own; save it by save_pretrained, whose files all programs that can run it read"
        raise ValueError(f"a {type(self).__name__} cannot be written in the format {form!r}: {self.unsaved or only}")

    def save_pretrained(self, save_directory: str | os.PathLike[str], **kwargs: Any) -> None:
        """Raises a ValueError: only a `SavedDrafter` has files."""
        raise ValueError(f"a {type(self).__name__} cannot be saved: {self.unsaved}")

    def push_to_hub(self, repo_id: str, **kwargs: Any) -> Any:
        """As `save_pretrained`."""
        self.save_pretrained(repo_id)

    def verifier(self, options: DraftOptions) -> Verifier:
        """The rule that accepts its drafts; raises a ValueError if its trained files are missing beside the weights."""
        rule = VERIFIERS[options.verification].with_options(options.own)
        return rule.learned(getattr(self, "loaded_from", None))


def check_sizes(wanted: Any, target: Any) -> None:
    """Raises DraftingRefused if the target's sizes differ from those in the drafter's configuration `wanted`."""
    if misfit := misfit_of(wanted, target):
        raise DraftingRefused(
            f"{misfit}: this drafter was trained for {wanted.target_name or 'another target'}. Use a drafter of this "
            "target, or train one with `hsdraft train`."
        )


class WrappedDrafter(Drafter):
    """Drafts like another drafter, with trees of fixed size, no n-grams and no history: every run drafts the same.

    Subclasses may override `session`. The wrapped drafter is not changed: options are copied. A `rule` verifies instead
    of the one that the options name.
    """

    def __init__(self, drafter: Any, rule: Verifier | None = None) -> None:
        self.config, self.device = drafter.config, getattr(drafter, "device", None)
        self.num_draft_steps = drafter.num_draft_steps
        self.takes_tree_builders, self.own_options = drafter.takes_tree_builders, drafter.own_options
        self.generation_config = copy.deepcopy(drafter.generation_config)
        options = self.generation_config
        options.tree_sizing, options.ngram_length, options.ngram_continuation = "fixed", 0, 0
        options.history = NO_HISTORY
        self._drafter, self._rule = drafter, rule

    def default_generation_config(self) -> GenerationConfig:
        return self._drafter.default_generation_config()

    def check_together(self, options: DraftOptions) -> None:
        self._drafter.check_together(options)

    @property
    def taps(self) -> Sequence[int]:  # type: ignore[override]
        return self._drafter.taps

    def taps_of(self, target: Any) -> Sequence[int]:
        return self._drafter.taps_of(target)

    def check(self, target: Any) -> None:
        self._drafter.check(target)

    def settle(self, target: Any, tokens: Sequence[int]) -> None:
        self._drafter.settle(target, tokens)

    def session(self, call: Call) -> Session:
        return self._drafter.session(call)

    def verifier(self, options: DraftOptions) -> Verifier:
        return self._drafter.verifier(options) if self._rule is None else self._rule
