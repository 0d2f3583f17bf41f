"""How a kernel's library is compiled, and its name. Without torch, as setup.py reads this file too."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

_FLAGS = ("-std=c++20", "-O3", "-falign-loops=64", "-fPIC", "-shared", "-w")  # else loops take up to 1.6 times as long
AVX2 = (*_FLAGS, "-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16")


def processor_flags() -> Sequence[str]:
    """Flags for Linux on x86-64 with AVX2, or with AVX-512 and its bfloat16; empty on other machines."""
    if not sys.platform.startswith("linux") or platform.machine() != "x86_64":
        return ()
    found = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    for flags in (AVX512, AVX2):
        if {flag[2:].replace("512bf", "512_bf") for flag in flags if flag[:2] == "-m"} <= found:
            return flags
    return ()


def library_of(source: Path, flags: Sequence[str]) -> str:
    """The name of a library and its file: a digest of what makes it, so that versions can be loaded side by side."""
    files = source, *sorted(source.parent.glob("*.h"))  # it includes these
    parts = *flags, *(file.read_text(encoding="utf-8") for file in files)
    return f"hsdraft_{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:16]}"


def command(compiler: str, source: Path, flags: Sequence[str], out: Path) -> list[str]:
    return [compiler, *flags, f"-DHSDRAFT_LIBRARY={library_of(source, flags)}", str(source), "-ldl", "-o", str(out)]


def cpp_compiler() -> str | None:
    """The path of a C++ compiler: `$CXX`, or the first that is installed."""
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "g++"), "clang++", "c++"))), None)
