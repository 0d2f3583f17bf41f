"""GGUF files as targets: finds the file that a name means, and caches a dequantised copy.

The cache key is the SHA-256 of the file, since two files may share name and size. Hashing several gigabytes takes
seconds, so the digest is cached under path, device, inode, size, mtime and ctime; unlike an mtime, a ctime cannot be
set back. Timestamps may be up to two seconds coarse: a file modified less than that before it was hashed may change
again within the same timestamp, so its digest is not cached.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

_RESOLUTION = 2 * 10**9  # nanoseconds; the coarsest timestamps, as on FAT


def gguf_file(name: str | os.PathLike[str]) -> Path | None:
    """Returns the GGUF file that a name means: a file, or the only one in a folder without config.json; else `None`.

    Raises a FileNotFoundError if there is no such GGUF file, or a ValueError if a folder holds several.
    """
    path = Path(name)
    if path.is_dir():
        found = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
        if len(found) > 1:
            raise ValueError(f"{path} holds {', '.join(file.name for file in found)}: name the one file that you mean")
        return found[0] if found else None
    if path.suffix != ".gguf":
        return None
    if not path.is_file():
        raise FileNotFoundError(f"no such GGUF file: {path}")
    return path


def dequantised(source: Path, dtype: torch.dtype) -> Path:
    """Returns the folder of a GGUF file's dequantised copy, which it may create.

    Raises an OSError if the file is replaced meanwhile.
    """
    stamp = _stamp(source)
    digest = _digest(source, stamp)
    folder = _copies() / f"{source.stem}-{digest[:16]}-{str(dtype).removeprefix('torch.')}"
    if not (folder / "config.json").exists():
        _dequantise(source, folder, dtype, stamp)
    return folder


def _copies() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hf_hsdraft"


def _stamp(source: Path) -> str:
    """Cache key of a file's digest; changes with every write, up to the resolution of timestamps."""
    found = source.stat()
    times = found.st_mtime_ns, found.st_ctime_ns
    return repr((str(source.resolve()), found.st_dev, found.st_ino, found.st_size, *times))


def _digest(source: Path, stamp: str) -> str:
    """The SHA-256 of a file, cached by its `_stamp`."""
    began, found = time.time_ns(), source.stat()
    known = _copies() / "digests" / hashlib.sha256(stamp.encode()).hexdigest()
    if known.is_file() and len(digest := known.read_text(encoding="ascii")) == 64:
        return digest
    hashed = hashlib.sha256()
    with source.open("rb") as file:
        while block := file.read(2**20):
            hashed.update(block)
    if began - max(found.st_mtime_ns, found.st_ctime_ns) > _RESOLUTION and _stamp(source) == stamp:
        known.parent.mkdir(parents=True, exist_ok=True)
        partial = known.with_suffix(f".{os.getpid()}")
        partial.write_text(hashed.hexdigest(), encoding="ascii")
        os.replace(partial, known)
    return hashed.hexdigest()


def _dequantise(source: Path, folder: Path, dtype: torch.dtype, stamp: str) -> None:
    """Saves a dequantised copy: loading a GGUF file takes many times as long. Renamed into place when complete."""
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
    )
    if _stamp(source) != stamp:
        raise OSError(f"{source} was replaced while it was read: load it again")
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    if not folder.exists():
        os.replace(partial, folder)
