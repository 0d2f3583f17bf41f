"""Runs tests with each Python, torch and transformers that can be had here: `.ci/run --matrix`.

A row of the table is skipped, with the reason, where its interpreter is not installed (`pythonX.Y`, pyenv, uv), where
the index has no such wheel, or where torch brings CUDA's packages and `--cuda` is not given. Where only torch is
missing, the package is compiled by that Python with warnings as errors. The status is 1 if any row failed.

pip finds torch without CUDA where its index is configured: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
TORCHES = ("2.13.0", "newest")
TRANSFORMERS = ("5.23.0", "5.24.0", "newest")
CUDA = re.compile(r"nvidia|cuda|triton")
ROOT = Path(__file__).parents[1]
MARKS = "not (slow or train or server or process or install or browser)"
NEEDS = ("peft", "pytest", "pytest-xdist", "hypothesis", "accelerate", "gguf")  # of the tests, beside the package's


class Skipped(Exception):
    """Why a row cannot run here."""


def run(*command: object, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, command)], capture_output=True, text=True, **options)  # type: ignore[call-overload]


def interpreter(version: str) -> str:
    """An installed Python of this version. Raises a Skipped if there is none."""
    found = [shutil.which(f"python{version}")]
    found += sorted(map(str, Path("~/.pyenv/versions").expanduser().glob(f"{version}.*/bin/python")))
    if shutil.which("uv"):
        found.append(run("uv", "python", "find", "--no-python-downloads", version).stdout.strip())
    asks = "import sys; print('%d.%d' % sys.version_info[:2])"
    for path in filter(None, found):
        if run(path, "-c", asks).stdout.strip() == version:  # a shim of pyenv may answer with an error
            return path
    raise Skipped(f"Python {version} is not installed")


def resolved(python: str, requirement: str) -> dict[str, str]:
    """What pip would install for a requirement, by name. Raises a Skipped if there are no such wheels."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = (python, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--only-binary", ":all:")
        done = run(*command, "--quiet", "--report", report, requirement)
        if done.returncode:
            last = [line for line in done.stderr.splitlines() if line.startswith("ERROR")][-1:]
            raise Skipped(f"no wheels of {requirement}: {' '.join(last)[:160]}")
        found = json.loads(report.read_text())["install"]
    return {each["metadata"]["name"]: each["metadata"]["version"] for each in found}


def torch_version(python: str, torch: str, cuda: bool) -> str:
    """The version that a torch of the table is here. Raises a Skipped if it cannot be had."""
    found = resolved(python, "torch" if torch == "newest" else f"torch=={torch}")
    if not cuda and (heavy := [name for name in found if CUDA.search(name)]):
        raise Skipped(f"torch {found['torch']} brings {len(heavy)} packages for CUDA here; --cuda installs them")
    return found["torch"]


def compiled(python: str) -> str:
    done = run(python, "-W", "error", "-m", "compileall", "-q", "-f", "-o", "0", ROOT / "hf_hsdraft", env=_own_cache())
    if done.returncode:
        raise RuntimeError(f"the package does not compile: {done.stdout[-400:]}{done.stderr[-400:]}")
    return "the package compiles without a warning"


def _own_cache() -> dict[str, str]:
    return {**os.environ, "PYTHONPYCACHEPREFIX": str(Path(tempfile.gettempdir()) / "matrix-pycache")}


def environment(python: str, folder: Path, torch: str, transformers: str) -> Path:
    """An environment with these versions, of which later rows change the one that differs."""
    own = folder / "bin" / "python"
    if not own.exists():
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    install = [str(own), "-m", "pip", "install", "-q", f"torch=={torch}", f"transformers=={transformers}"]
    subprocess.run([*install, *NEEDS, "-e", str(ROOT)], check=True)
    return own


def tested(own: Path, tests: Sequence[str]) -> tuple[bool, str]:
    """Whether the tests pass, and pytest's last line."""
    # Distributions come of arithmetic that is the package's own.
    chosen = "-m", MARKS, "-k", "not keeps_the_targets_distribution"
    done = subprocess.run([str(own), "-m", "pytest", *chosen, *tests], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    return done.returncode == 0, (done.stdout.strip().splitlines() or ["nothing printed"])[-1].strip("= ")


class Table:
    """Prints a line for each row, and keeps whether one failed."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.failed = self.passed = self.skipped = 0

    def add(self, row: Sequence[str], outcome: str, said: str) -> None:
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.lines.append(f"| {' | '.join(row)} | {outcome}: {said} |")
        print(self.lines[-1], flush=True)

    def __str__(self) -> str:
        head = "| Python | torch | transformers | outcome |\n|---|---|---|---|\n"
        return head + "\n".join(self.lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", default=PYTHONS)
    parser.add_argument("--torch", nargs="+", default=TORCHES)
    parser.add_argument("--transformers", nargs="+", default=TRANSFORMERS)
    parser.add_argument("--cuda", action="store_true", help="install torch where it brings CUDA's packages too")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--folder", type=Path, default=ROOT / ".venv" / "matrix", help="of the environments")
    parser.add_argument("--tests", nargs="+", required=True)
    asked = parser.parse_args(arguments)
    table = Table()
    for python in asked.python:
        for torch in asked.torch:
            _rows(table, python, torch, asked)
    print(f"\n{table}\n\n{table.passed} passed, {table.failed} failed, {table.skipped} skipped")
    return table.failed > 0


def _rows(table: Table, python: str, torch: str, asked: argparse.Namespace) -> None:
    """Adds the rows of a Python and a torch: one for each transformers, or one that says why there is none."""
    path = ""
    try:
        path = interpreter(python)
        have = torch_version(path, torch, asked.cuda)
    except Skipped as reason:
        try:
            said = f"{reason}; {compiled(path)}" if path and torch == asked.torch[0] else str(reason)
            table.add((python, torch, "all"), "skipped", said)
        except RuntimeError as error:
            table.add((python, torch, "all"), "failed", str(error))
        return
    done = set()
    for wanted in asked.transformers:
        row = (python, _named(torch, have), wanted)
        try:
            requirement = "transformers" if wanted == "newest" else f"transformers=={wanted}"
            version = resolved(path, requirement)["transformers"]
            row = (*row[:2], _named(wanted, version))
            if version in done:
                table.add(row, "skipped", "a row above is the same")
                continue
            done.add(version)
            if asked.list:
                table.add(row, "skipped", "would run")
                continue
            own = environment(path, asked.folder / f"{python}-{have}", have, version)
            passed, said = tested(own, asked.tests)
            table.add(row, "passed" if passed else "failed", said)
        except Skipped as reason:
            table.add(row, "skipped", str(reason))
        except subprocess.CalledProcessError as error:
            table.add(row, "failed", f"pip ended with {error.returncode}")


def _named(wanted: str, version: str) -> str:
    return f"{wanted}: {version}" if wanted == "newest" else version


if __name__ == "__main__":
    sys.exit(main())
