"""Publishes a run's chats as a data set of the Hub, with a card. Only chats that the target answered are ever sent."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import DatasetCardData

from ..core.checks import printable, public_name
from ..hub.drafter_files import CARD, read_document
from ..hub.model_card import MARK, cell, code, table
from ..hub.publication import Repository, leave_foreign_card, told
from ..training.files import RECIPE, RowFolder, differences, write_json

KIND = "dataset"
_SIZES = {1_000: "n<1K", 10_000: "1K<n<10K", 100_000: "10K<n<100K", 1_000_000: "100K<n<1M", 10_000_000: "1M<n<10M"}


@dataclass(frozen=True)
class PublishedChats:
    """The data set that a run's chats become on the Hub.

    Attributes:
        name: name of the repository, as user/name.
        prompts: description of where prompts and answers come from.
        source: name of the data set that the prompts come from, as it was given; `None` for other sources.
        hub: `token` and `private`, as `HfApi` takes them.
    """

    name: str
    prompts: str
    source: str | None = None
    hub: Mapping[str, Any] = field(default_factory=dict)

    def prepare(self, recipe: Mapping[str, Any]) -> PublishedChats:
        """Makes sure that the repository exists and is writable; returns the data set with its full name.

        Raises:
            OSError: the Hub refuses or cannot be reached.
            ValueError: the repository holds something else, or chats of another recipe; or it is public while a private
                one was asked for.
        """
        with told(self.name):
            repository = Repository.open(self.name, dict(self.hub), KIND)
            _check_is_ours(repository, _public(recipe))
        return replace(self, name=repository.name)

    def send(self, folder: Path) -> str:
        """Sends a folder's rows in one commit and returns its address. What is there already is not sent again.

        Raises:
            OSError: the Hub refuses or cannot be reached. The same call may be repeated.
            ValueError: the repository holds something else, or chats of another recipe.
        """
        with told(self.name), tempfile.TemporaryDirectory() as place:
            staged = Path(place)
            recipe = self._write(folder, staged)
            repository = Repository.open(self.name, dict(self.hub), KIND)
            _check_is_ours(repository, recipe)
            sent = {path.relative_to(staged).as_posix() for path in staged.rglob("*.parquet")}
            stale = {path for path in repository.files if path.startswith("data/")} - sent
            leave_foreign_card(repository, staged)
            commit = repository.send(staged, stale, commit_message="Chats answered by the target of a drafter")
        return str(commit.commit_url)

    def _write(self, folder: Path, staged: Path) -> dict[str, Any]:
        """Writes rows, recipe and card; returns the recipe, without paths of this machine."""
        from datasets import Dataset

        rows = sorted(self._rows(folder), key=lambda row: row["key"])  # the same files, whichever process answered
        if not rows:
            raise ValueError(f"{folder} holds no chats: nothing was sent")
        (staged / "data").mkdir()
        Dataset.from_list(rows).to_parquet(staged / "data" / "train-00000-of-00001.parquet")
        recipe = _public(json.loads((folder / RECIPE).read_text(encoding="utf-8")))
        write_json(staged / RECIPE, recipe)
        (staged / CARD).write_text(self._card(rows, recipe), encoding="utf-8")
        return recipe

    def _rows(self, folder: Path) -> Iterator[dict[str, Any]]:
        for row in RowFolder(folder).rows():
            named = self.source is not None and row["category"] == self.source
            yield {**row, "category": public_name(row["category"])} if named else row

    def _card(self, rows: list[dict[str, Any]], recipe: Mapping[str, Any]) -> str:
        target = recipe["target_name"] or "a target that is not named"
        tokens = sum(row["new_tokens"] for row in rows)
        greedy = sum(row["temperature"] == 0 for row in rows)
        metadata = DatasetCardData(
            task_categories=["text-generation"],
            tags=["speculative-decoding", "hsdraft", "synthetic"],
            size_categories=next((name for most, name in _SIZES.items() if len(rows) < most), "n>10M"),
            pretty_name=self.name.rsplit("/", 1)[-1],
        )
        facts = {
            "chats": f"{len(rows):,}, {greedy:,} of them greedy",
            "answer tokens": f"{tokens:,}",
            "answers by": " at revision ".join(filter(None, [code(target), recipe.get("target_revision") or ""])),
            "prompts and answers": self.prompts,
            "all settings": f"in {code(RECIPE)}",
        }
        columns = {
            "key": "digest of the prompt",
            "category": "label of the prompt's source, may be empty",
            "temperature": "of the answers; 0 is greedy",
            "new_tokens": "tokens of the answers",
            "messages": "the chat: `role` (`user` or `assistant`) and `content`",
        }
        use = f'from datasets import load_dataset\n\nchats = load_dataset({json.dumps(self.name)}, split="train")'
        parts = [
            f"---\n{metadata.to_yaml()}\n---",
            MARK,
            f"# {cell(self.name.rsplit('/', 1)[-1])}",
            f"Chats whose answers were all written by {code(target)}. `hsdraft train` made them, to train a drafter "
            "that speculates what this model says. They say what the model says, its mistakes too.",
            table(["", ""], facts.items()),
            table(["column", "meaning"], columns.items()),
            f"```python\n{use}\n```",
        ]
        return "\n\n".join(parts) + "\n"


def _public(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe without paths of this machine."""
    return {**recipe, "target_name": public_name(recipe.get("target_name") or "")}


def _check_is_ours(repository: Repository, recipe: Mapping[str, Any]) -> None:
    """Raises a ValueError if a repository holds another data set, or chats of another recipe."""
    name = repository.name
    if RECIPE not in repository.files:
        others = sorted(repository.files - {".gitattributes", CARD})
        if others:
            raise ValueError(f"{name} holds another data set ({printable(others[0])}): nothing was sent, name another")
        return
    with tempfile.TemporaryDirectory() as place:
        stored = read_document(repository.fetch(RECIPE, place))
    if changes := differences(stored, recipe):
        raise ValueError(
            f"{name} holds chats that were made with other settings ({printable('; '.join(changes), 400)}): nothing "
            "was sent, name another repository"
        )
