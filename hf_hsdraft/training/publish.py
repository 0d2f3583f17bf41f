"""A run's drafter on the Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

_STAYS_HERE = ["checkpoints/*", "features/*", "data/*", "prompts/*", "training_plan.json", "finished.json", "*.partial"]


def prepare_repository(name: str, token: str | None, private: bool | None) -> str:
    """Makes sure that the repository exists and can be written, before hours are spent; returns its full name."""
    return HfApi(token=token).create_repo(name, exist_ok=True, private=private).repo_id


def publish(folder: Path, repo_id: str, token: str | None) -> None:
    """Uploads drafter, card, figures and pictures of a finished run; not its data and checkpoints."""
    HfApi(token=token).upload_folder(
        folder_path=folder, repo_id=repo_id, ignore_patterns=_STAYS_HERE, commit_message="Drafter trained by hsdraft"
    )
