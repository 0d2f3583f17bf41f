"""Bounds of what the config.json of a language model may make transformers build or fetch."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM

from ...core.checks import is_integer, printable, short
from ...hub.drafter_files import CONFIG, DamagedFile, read_json

# Numbers of parts, which transformers makes or lists each; the largest models have some hundreds.
_COUNTS = re.compile(r"(^|_)(layers?|depths?|blocks?|experts?|heads?|groups?|labels?|stages?|codebooks?|streams?)$")
_MOST_PARTS, _MOST_OF_OTHERS, _MOST_MODULES = 1024, 2**40, 40_000
# With others, transformers may fetch a kernel from the Hub and run it.
_ATTENTION = ("eager", "sdpa", "flex_attention")
_IMPLEMENTATIONS = re.compile(r"_?(attn|experts)_implementation(_internal)?$")
_EXPERTS = ("eager", "batched_mm", "grouped_mm")
_FORBIDDEN = ("distributed_config", "fusion_config", "kernel_config", "transformers_weights", "use_kernels")


def read_config(folder: Path) -> Any:
    """Returns transformers' configuration of a language model in a folder.

    Raises an OSError if it is missing, and a DamagedFile if a number is out of bounds, if it names an implementation
    that transformers does not have itself, or if transformers cannot read it.
    """
    path = folder / CONFIG
    _check("", read_json(path), path)
    with _told(path):
        return AutoConfig.from_pretrained(folder, trust_remote_code=False)


def build(config: Any, folder: Path) -> Any:
    """Returns a model on the meta device; raises a DamagedFile if transformers cannot build it, or if it is too large.

    `folder` is named in messages.
    """
    with _told(folder / CONFIG), few_modules(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


@contextmanager
def few_modules() -> Iterator[None]:
    """Raises a ValueError within, in this thread, when more modules are made than a drafter can have."""
    thread, made = threading.get_ident(), 0

    def count(*_: Any) -> None:
        nonlocal made
        made += threading.get_ident() == thread
        if made > _MOST_MODULES:
            raise ValueError(f"it has more than {_MOST_MODULES:,} modules")

    handle = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _told(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # on the meta device, whatever is raised is due to the configuration
        told = f"{type(error).__name__}: {printable(error)}"
        message = f"{path} is no configuration that transformers builds a language model of ({told})"
        raise DamagedFile(message, path) from error


def _check(name: str, value: Any, path: Path) -> None:
    """Raises a DamagedFile for the first value out of bounds, in nested objects too."""
    if isinstance(value, Mapping):
        for inner, each in value.items():  # implementations may be given by parts of the model
            _check(name if _IMPLEMENTATIONS.match(name) else inner, each, path)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for each in value:
            _check(name, each, path)
    elif wanted := _wanted(name, value):
        raise DamagedFile(f"{printable(name)}={short(value)} in {path} is invalid: expected {wanted}", path)


def _wanted(name: str, value: Any) -> str:
    """What is expected of a field; empty if the value is that."""
    if name in _FORBIDDEN:
        return "" if value in (None, False) else "nothing, as a drafter brings no code and no kernels"
    if _IMPLEMENTATIONS.match(name):
        allowed = _ATTENTION if "attn" in name else _EXPERTS
        return "" if value is None or value in allowed else f"one of {', '.join(allowed)}"
    if isinstance(value, float):
        return "" if abs(value) < float("inf") else "a finite number"
    if not is_integer(value):
        return ""
    most = _MOST_PARTS if _COUNTS.search(name) else _MOST_OF_OTHERS
    return "" if abs(value) <= most else f"at most {most:,}"
