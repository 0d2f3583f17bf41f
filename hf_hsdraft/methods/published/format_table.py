"""Reads configurations of other projects: a format is a table of rows, one for each of our fields.

Formats number the target's layers differently. Here tap k is `hidden_states[k]` of transformers: 0 is the embeddings, k
the output of layer k. In a list of layers from 0, layer i is tap i + 1, which is an offset of 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ...core.checks import are_ascending, demand, printable
from ...drafters.base.registry import TREES
from ...hub.checkpoint import target_of
from ...hub.drafter_files import CONFIG, Shape
from .checkpoint import AnyCheckpoint, speculators_type
from .fields import REQUIRED, Fields
from .formats import AT_ONCE, IN_TURN, Format, fields_told, register_format
from .layer_tables import sizes, with_defaults
from .readings import kept
from .refusals import with_fields
from .target_sizes import fit_by_sizes

OURS: Any = object()  # a default: that of our field; without one it is required
USUAL_DRAFTED = 32000  # tokens, in the format of speculators

# What other projects write, with the source of each line: switches that change nothing that a drafter computes, in any
# format or in those of a family; fields that do change it, by the values that do not; and tensors that are not used.
FOREIGN = json.loads((Path(__file__).parent / "foreign_fields.json").read_text(encoding="utf-8"))


class Files:
    """A checkpoint while it is read: tables of its config.json, shapes of its tensors, and arguments of the caller."""

    def __init__(self, form: PublishedFormat, checkpoint: AnyCheckpoint, given: Mapping[str, Any]) -> None:
        self.form, self.checkpoint, self.given = form, checkpoint, given
        top = Fields(checkpoint.config, CONFIG)
        if speculators_type(checkpoint):
            check_proposals(top)
        if form.with_defaults and not form.layers:
            top = with_defaults(top, form.with_defaults)
        self.top, self._tables = top, {"": top}
        if form.with_defaults and form.layers:
            self._tables[form.layers] = with_defaults(top.table(form.layers), form.with_defaults)
        for name, allowed in form.expected.items():
            table, own = self.placed(name)
            table.expect(own, *allowed)

    def table(self, name: str) -> Fields:
        """Returns a table of config.json, which is empty if it is not there."""
        if name not in self._tables:
            self._tables[name] = self.top.table(name, None) or Fields({}, f"{CONFIG}, {name}")
        return self._tables[name]

    @property
    def layers(self) -> Fields:
        return self.table(self.form.layers)

    def placed(self, name: str) -> tuple[Fields, str]:
        """Returns the table of a field, and its name there; `layers.` is the table about layers."""
        table, _, own = name.rpartition(".")
        return (self.layers if table == "layers" else self.table(table)), own

    def shape(self, name: str) -> Shape | None:
        """Returns the shape of a tensor by our name; None if it is not there."""
        return self.checkpoint.shapes.get(self.form.stored_name(name, self.checkpoint.shapes))

    def finish(self) -> None:
        """Raises a ValueError for fields that were not read and may change what a drafter computes."""
        tables = (self.top, self.layers, *map(self.table, self.form.checked))
        for each in tables:
            each.ignore(*(name for name in each.values if _is_among(name, [*FOREIGN["ignored"], *self.form.ignored])))
        try:
            for each in tables:
                each.refuse_unread({name: neutral for name, (neutral, _) in FOREIGN["changing"].items()})
            for name in self.form.checked:
                self.table(name).refuse_unread_numbers()
        except ValueError as error:
            told = f"{printable(self.checkpoint.name)}, read as {self.form.name}: {error}"
            raise ValueError(
                f"{told}. A later version may know it; the drafter's card names programs that do"
            ) from None


def check_proposals(config: Fields) -> None:
    """Reads `speculators_config`, if present. Raises a ValueError if it asks for a rule that changes the text."""
    proposals, place = config.table("speculators_config", None), f"{CONFIG}, speculators_config.proposal_methods"
    methods = proposals.values.get("proposal_methods") if proposals else None
    demand(isinstance(methods, list | None), place, methods, "expected a list")
    for method in methods or []:
        fields = Fields(method if isinstance(method, dict) else {}, place)
        fields.expect("proposal_type", "greedy")
        fields.expect("verifier_accept_k", 1)
        fields.expect("accept_tolerance", 0, 0.0)


Row = Callable[[Files, "Field[Any]"], Any]


def _is_among(name: str, patterns: Collection[str]) -> bool:
    return any(fnmatchcase(name, each) for each in patterns)


def told(*names: str, default: Any = REQUIRED) -> Row:
    """Returns a row: the first of `names` that the files have, within the limit of our field."""

    def row(files: Files, each: Field[Any]) -> Any:
        places, limit = [files.placed(name) for name in names], each.metadata["limit"]
        found = [value for table, own in places if (value := table.checked(own, limit, None)) is not None]
        usual = (REQUIRED if each.default is MISSING else each.default) if default is OURS else default
        table, own = places[0]
        return found[0] if found else table.checked(own, limit, usual)

    return row


def same(*names: str, default: Any = REQUIRED) -> dict[str, Row]:
    """Returns rows of fields that the files name as we do."""
    return {name: told(name, default=default) for name in names}


def shown(name: str) -> Row:
    """Returns a row that a tensor decides by being there."""
    return lambda files, _: files.shape(name) is not None


def taps(offsets: Mapping[str, int], default: Any = REQUIRED, least: int = 0, is_sorted: bool = False) -> Row:
    """Returns the row of `target_tap_layers`: names of lists of numbers, from `least` on, by what we add to these.

    An empty list counts as missing: all projects that write it mean that. With `is_sorted`, all readers of the format
    sort the numbers, and the columns of `fc` stand in that order.
    """

    def row(files: Files, _: Any) -> Any:
        found = {}
        for name, offset in offsets.items():
            table, own = files.placed(name)
            ids = None if table.values.get(own) == [] else table.integers(own, None, least=least, most=4096)
            ids = sorted(ids) if is_sorted and ids is not None else ids
            if ids is not None and not are_ascending(ids, least, 4096):
                raise ValueError(
                    f"{own}={ids} in {table.place} is invalid: expected ascending numbers, each once; other readers "
                    "sort them, and then the hidden states would stand in another order than the columns of fc"
                )
            if ids is not None:
                found[tuple(number + offset for number in ids)] = name
        if len(found) > 1:
            raise ValueError(
                f"{CONFIG} names different hidden states ({' and '.join(map(str, sorted(found)))}): expected one of "
                f"{', '.join(offsets)}"
            )
        table, own = files.placed(next(iter(offsets)))
        return next(iter(found), default) if found or default is not REQUIRED else table.integers(own)

    return row


def _is_open(files: Files, names: Any) -> bool:
    if callable(names):
        return bool(names(files))
    return not any(own in table for table, own in map(files.placed, names))


@dataclass(frozen=True)
class PublishedFormat:
    """A format of drafters that other projects publish.

    Attributes:
        name: shown in messages.
        rank: order of matching, see `Format`.
        matches: whether a checkpoint has this format.
        drafter: class of the drafters, a `PublishedNetwork`, whose configuration has the `rows`.
        rows: what gives each of our fields: a `Row`, or the value itself. Fields without a row have their defaults.
        layers: the table of config.json about layers; empty if its fields are at the top.
        with_defaults: types of transformers' configurations whose defaults that table leaves out; a single one is the
            usual one of any.
        checked: further tables of config.json, in which unknown switches are refused too, and unknown numbers.
        ignored: names of switches, in any table, that change nothing that a drafter computes.
        expected: allowed values of further fields, `table.name`; others are refused.
        unread: names of tensors that are not used, with `*` for any part.
        tensors: beginnings of names in the files by those of ours, where they differ; the first that is there counts.
        converted: what makes weights by our names of those in the files, where more than names differ.
        open: fields that the files may leave open (`readings.QUESTIONS`), by the names in the files that tell them, or
            by a function that says whether it is open; they are arguments of `from_pretrained` too.
        given: arguments of `from_pretrained` that rows read, with values that stand in where nothing is loaded.
        needed: fields without which a config.json has another format.
        possible: as in `Format`, beside `needed`.
    """

    name: str
    rank: int
    matches: Callable[[AnyCheckpoint], bool]
    drafter: Any
    rows: Mapping[str, Any]
    layers: str = ""
    with_defaults: Sequence[str] = ()
    checked: Sequence[str] = ()
    ignored: Collection[str] = ()
    expected: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    unread: Collection[str] = ()
    tensors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    converted: Callable[[Files, Any, dict[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
    open: Mapping[str, Any] = field(default_factory=dict)
    given: Mapping[str, Any] = field(default_factory=dict)
    needed: Sequence[str] = ("hidden_size",)

    def read(self, checkpoint: AnyCheckpoint, **given: Any) -> Any:
        """Reads a configuration; raises a ValueError for fields that are missing, invalid or unknown switches."""
        kind = self.drafter.config_class
        files, known = Files(self, checkpoint, given), {each.name: each for each in fields(kind)}
        found = {name: row(files, known[name]) if callable(row) else row for name, row in self.rows.items()}
        listed = files.top.values.get("untold")  # in drafters that were saved here
        untold = [name for name, names in self.open.items() if _is_open(files, names) or name in (listed or ())]
        files.finish()
        return kind(**found, **({"untold": tuple(untold)} if untold else {}))

    def weights(
        self, checkpoint: AnyCheckpoint, config: Any, state: dict[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Returns the weights of a network from those in the files, by our names."""
        return state if self.converted is None else self.converted(Files(self, checkpoint, {}), config, state)

    def stored_name(self, name: str, stored: Collection[str]) -> str:
        """Returns the name in the files of a tensor by ours."""
        for ours, theirs in self.tensors.items():
            if name.startswith(ours):
                there = (each for each in theirs if any(other.startswith(each) for other in stored))
                return next(there, ours) + name.removeprefix(ours)
        return name

    def unread_shapes(self, checkpoint: AnyCheckpoint) -> dict[str, Shape]:
        """Returns the shapes of tensors that the files have and no drafter of the format uses."""
        patterns = [*FOREIGN["unread tensors"], *self.unread]
        return {name: shape for name, shape in checkpoint.shapes.items() if _is_among(name, patterns)}

    def describe(self, checkpoint: AnyCheckpoint) -> dict[str, str]:
        """See `Format.describe`."""
        told = fields_told(checkpoint)
        try:
            config = self.read(checkpoint, **self.given)
            with torch.device("meta"):
                self.drafter(config).matched(self, checkpoint)
            drafts = f"{TREES}, {AT_ONCE if self.drafter.at_once(config) else IN_TURN}"
            return {
                "drafts": drafts,
                **told,
                **self.drafter.described(config),
                **(kept(checkpoint.folder) if self.open else {}),
            }
        except ValueError as error:
            return {**told, "cannot be loaded": printable(error, 400)}

    def register(self) -> None:
        """Registers the format with `AutoDrafter`."""
        register_format(
            Format(
                self.name,
                self.rank,
                self.matches,
                partial(self.drafter.of_format, self),
                describe=self.describe,
                drafter=self.drafter,
                possible=with_fields(*self.needed),
                fit=lambda checkpoint, *target: fit_by_sizes(self.read(checkpoint, **self.given), *target),
            )
        )


def speculators(kind: str, drafter: Any, rows: Mapping[str, Any], **further: Any) -> PublishedFormat:
    """Returns a format of the package speculators; `kind` is its type there, `further` as in `PublishedFormat`."""
    common = {
        "vocab_size": told("layers.vocab_size"),
        "target_hidden_size": told("target_hidden_size", "layers.hidden_size"),
        "sizes": sizes,
        "num_hidden_layers": told("layers.num_hidden_layers"),
        "draft_vocab_size": told("draft_vocab_size", default=USUAL_DRAFTED),
        "target_name": lambda files, _: target_of(files.top.values)[0],
        "target_architectures": lambda files, _: target_of(files.top.values)[1],
    }
    place: dict[str, Any] = {"layers": "transformer_layer_config", "needed": ("speculators_model_type",)}
    matches = lambda checkpoint: speculators_type(checkpoint) == kind  # noqa: E731
    return PublishedFormat(f"speculators {kind}", 10, matches, drafter, {**common, **rows}, **place, **further)
