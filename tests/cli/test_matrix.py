"""`.ci/run --matrix`: which rows run, and why others do not."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def matrix(monkeypatch):
    """The script, of which pip and pytest are replaced: transformers 5.30 is the newest, and fails its tests."""
    spec = importlib.util.spec_from_file_location("matrix", ROOT / ".ci" / "matrix.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def resolved(python, requirement):
        name, _, version = requirement.partition("==")
        if version == "9.9":
            raise script.Skipped(f"no wheels of {requirement}")
        cuda = {"nvidia-cublas": "13.1", "triton": "4.0"} if requirement == "torch" else {}
        return {name: version or {"torch": "2.20.0", "transformers": "5.30.0"}[name], **cuda}

    made = []
    monkeypatch.setattr(script, "resolved", resolved)
    monkeypatch.setattr(script, "environment", lambda *given: made.append(given[2:]) or given[3])
    monkeypatch.setattr(script, "tested", lambda own, tests: (own != "5.30.0", f"{' '.join(tests)} with {own}"))
    monkeypatch.setattr(script, "compiled", lambda python: "it compiles")
    script.made = made
    return script


def rows(script, capsys, *options: str) -> tuple[int, list[str]]:
    status = script.main([*options, "--tests", "t.py"])
    return status, capsys.readouterr().out.partition("|---|---|---|---|\n")[2].splitlines()


def test_every_row_says_what_it_ran_or_why_it_was_skipped(matrix, capsys):
    options = ("--python", HERE, "2.0", "--torch", "2.13.0", "newest", "9.9")
    status, shown = rows(matrix, capsys, *options, "--transformers", "5.23.0", "9.9", "newest", "5.30.0")
    assert status == 1, "a row failed"
    assert shown == [
        f"| {HERE} | 2.13.0 | 5.23.0 | passed: t.py with 5.23.0 |",
        f"| {HERE} | 2.13.0 | 9.9 | skipped: no wheels of transformers==9.9 |",
        f"| {HERE} | 2.13.0 | newest: 5.30.0 | failed: t.py with 5.30.0 |",
        f"| {HERE} | 2.13.0 | 5.30.0 | skipped: a row above is the same |",
        f"| {HERE} | newest | all | skipped: torch 2.20.0 brings 2 packages for CUDA here; --cuda installs them |",
        f"| {HERE} | 9.9 | all | skipped: no wheels of torch==9.9 |",
        "| 2.0 | 2.13.0 | all | skipped: Python 2.0 is not installed |",
        "| 2.0 | newest | all | skipped: Python 2.0 is not installed |",
        "| 2.0 | 9.9 | all | skipped: Python 2.0 is not installed |",
        "",
        "1 passed, 1 failed, 7 skipped",
    ]
    assert matrix.made == [("2.13.0", "5.23.0"), ("2.13.0", "5.30.0")]


def test_cuda_is_installed_where_it_is_asked_for(matrix, capsys):
    options = ("--python", HERE, "--torch", "newest", "--transformers", "5.24.0")
    assert rows(matrix, capsys, *options, "--cuda") == (
        0,
        [f"| {HERE} | newest: 2.20.0 | 5.24.0 | passed: t.py with 5.24.0 |", "", "1 passed, 0 failed, 0 skipped"],
    )


def test_a_python_without_torch_compiles_the_package(matrix, capsys):
    _, shown = rows(matrix, capsys, "--python", HERE, "--torch", "newest")
    assert shown[0].endswith("--cuda installs them; it compiles |")


@pytest.mark.process
def test_a_package_that_does_not_compile_fails(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("matrix", ROOT / ".ci" / "matrix.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.compiled(script.interpreter(HERE)) == "the package compiles without a warning"
    (tmp_path / "hf_hsdraft").mkdir()
    (tmp_path / "hf_hsdraft" / "wrong.py").write_text("x = '\\d'\n")  # a warning
    monkeypatch.setattr(script, "ROOT", tmp_path)
    with pytest.raises(RuntimeError, match="does not compile"):
        script.compiled(script.interpreter(HERE))


@pytest.mark.process
def test_ci_passes_the_matrix_the_tests_of_the_hooks():
    command = ["bash", ".ci/run", "--matrix", "--python", "2.0", "--torch", "2.13.0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "0 passed, 0 failed, 1 skipped" in done.stdout, done.stderr
    shown = "eval \"$(sed -n '/^hook_tests=(/,/^)/p' .ci/run)\"; printf '%s\\n' \"${hook_tests[@]}\""
    named = subprocess.run(["bash", "-c", shown], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert len(named) == 12 and all((ROOT / name.partition("::")[0]).is_file() for name in named)
