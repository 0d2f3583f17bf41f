"""Sends the drafter of a run to the Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

from ..drafters.hidden_state.modeling_hsdraft import HSDrafter
from ..repository.care import care


def prepare_repository(name: str, token: str | None, private: bool | None) -> str:
    """Creates the repository if it is missing, before hours are spent. Returns its full name."""
    return HfApi(token=token).create_repo(name, exist_ok=True, private=private).repo_id


def publish(folder: Path, repo_id: str, token: str | None) -> None:
    """Uploads the drafter (or adapter), card, figures and pictures of a finished run, but no data and checkpoints."""
    commit = {"token": token, "commit_message": "Drafter trained by hsdraft"}
    if (folder / "adapter_config.json").is_file():
        care().push(folder, repo_id, **commit)
    else:
        HSDrafter.from_pretrained(folder).push_to_hub(repo_id, **commit)
