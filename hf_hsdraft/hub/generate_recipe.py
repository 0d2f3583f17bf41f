"""Run by `model.generate(..., custom_generate="user/drafter", trust_remote_code=True)`.

It is `custom_generate/generate.py` in a drafter's repository, and decodes with that drafter.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

_OF_THE_HUB = ("revision", "code_revision", "token", "cache_dir", "local_files_only", "force_download")


def generate(model: Any, assistant_model: Any = None, **kwargs: Any) -> Any:
    """Loads the drafter, once for a repository, a dtype and a device, and decodes with it as `assistant_model`.

    `kwargs` are arguments of `generate()`, and of loading, such as `revision`. Raises a ValueError if there is an
    `assistant_model` too.
    """
    if assistant_model is not None:
        raise ValueError("custom_generate loads its own drafter: leave assistant_model out, or custom_generate")
    loading = {name: kwargs.pop(name) for name in _OF_THE_HUB if kwargs.get(name) is not None}
    # transformers passes a recipe no repository name; the caller's own variable has it.
    caller = inspect.currentframe().f_back  # type: ignore[union-attr]
    repository = None if caller is None else caller.f_locals.get("custom_generate")
    if not isinstance(repository, str | os.PathLike):
        raise ValueError("this recipe is to be called by generate(custom_generate=...), which names its repository")
    commit = Path(__file__).resolve().parent.parent.name
    if re.fullmatch("[0-9a-f]{40}", commit):
        loading["revision"] = commit  # weights and code of one state of the repository
    drafter = _drafter(str(repository), model.dtype, model.device, tuple(sorted(loading.items())), _state(repository))
    return model.generate(**kwargs, assistant_model=drafter)


@functools.lru_cache(maxsize=4)
def _drafter(
    repository: str, dtype: torch.dtype, device: torch.device, loading: tuple[tuple[str, Any], ...], state: float
) -> Any:
    drafter = AutoModel.from_pretrained(repository, dtype=dtype, trust_remote_code=True, **dict(loading))
    return (drafter if device.type == "meta" else drafter.to(device)).eval()  # "meta": the target is offloaded whole


def _state(repository: str | os.PathLike[str]) -> float:
    """Returns when a folder was last saved to; 0 for a repository of the Hub, whose commits never change."""
    config = Path(repository) / "config.json"
    return config.stat().st_mtime if config.is_file() else 0.0
