"""A run's drafter on the Hub."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi

from ..drafter_files import DOCUMENTS
from ..model_card import write_card
from ..modeling_hsdraft import HSDrafter

_OF_AN_ADAPTER = ["adapter_config.json", "adapter_model.safetensors", *DOCUMENTS]


def prepare_repository(name: str, token: str | None, private: bool | None) -> str:
    """Makes sure that the repository exists and can be written, before hours are spent; returns its full name."""
    return HfApi(token=token).create_repo(name, exist_ok=True, private=private).repo_id


def publish(folder: Path, repo_id: str, token: str | None) -> None:
    """Uploads drafter (or adapter), card, figures and pictures of a finished run; not its data and checkpoints."""
    message = "Drafter trained by hsdraft"
    if not (folder / "adapter_config.json").is_file():
        HSDrafter.from_pretrained(folder).push_to_hub(repo_id, token=token, commit_message=message)
        return
    write_card(folder, repo_id)
    HfApi(token=token).upload_folder(
        folder_path=folder, repo_id=repo_id, allow_patterns=_OF_AN_ADAPTER, commit_message=message
    )
