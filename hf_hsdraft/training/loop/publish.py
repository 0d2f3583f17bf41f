"""Sends the drafter of a run to the Hub."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from huggingface_hub import HfApi

from ...drafters.base.auto_drafter import AutoDrafter
from ...hub.drafter_files import DOCUMENTS, RECIPE, read_json
from ...hub.model_card import read_recipe, write_card
from ...hub.pushing import push
from ..files import write_json


def prepare_repository(name: str, token: str | None, private: bool | None) -> str:
    """Creates the repository if it is missing, before hours are spent. Returns its full name."""
    return HfApi(token=token).create_repo(name, exist_ok=True, private=private).repo_id


def publish(folder: Path, repo_id: str, token: str | None) -> None:
    """Uploads the drafter (or adapter), card, figures and pictures of a finished run, but no data and checkpoints."""
    commit = {"token": token, "commit_message": "Drafter trained by hsdraft"}
    if (folder / "adapter_config.json").is_file():
        push(folder, repo_id, **commit)
        return
    with tempfile.TemporaryDirectory() as place:
        staged = Path(place)
        AutoDrafter.from_pretrained(folder).save_pretrained(staged)
        for name in DOCUMENTS:
            if (folder / name).is_file():
                shutil.copyfile(folder / name, staged / name)
        push(staged, repo_id, **commit)


def name_data_set(folder: Path, name: str) -> None:
    """Names a data set of the Hub in the recipe and the card of a run's drafter."""
    named = read_recipe(folder).get("datasets", [])
    if name not in named:
        write_json(folder / RECIPE, {**read_json(folder / RECIPE), "datasets": [*named, name]})
        write_card(folder, folder.resolve().name)
