"""Commands with a target that no drafter was trained for: n-grams of the text draft."""

import logging

import pytest
from conftest import make_target, write_prompts
from typer.testing import CliRunner

from hf_hsdraft import CachebackDrafter, attach
from hf_hsdraft.cli.main import app
from hf_hsdraft.runtime.prompt_inputs import encode_prompts

PROMPT, NEW = "w1 w2 w3 w1 w2 w3", 12


@pytest.fixture
def place(tmp_path, tokenizer):
    make_target().save_pretrained(tmp_path / "target")
    tokenizer.save_pretrained(tmp_path / "target")
    write_prompts(tmp_path / "prompts.jsonl", 3)
    return tmp_path


def run(*arguments: str, given: str | None = None) -> str:
    result = CliRunner().invoke(app, [*arguments], input=given, env={"COLUMNS": "200"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("named", [[], ["--drafter", "ngrams"]])
def test_every_command_drafts_by_ngrams_and_says_so(place, tokenizer, named, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("hf_hsdraft"), "propagate", True)
    target, prompts = ["--target", str(place / "target"), *named], ["--prompts", str(place / "prompts.jsonl")]
    printed = {
        "demo": run("demo", PROMPT, *target, "--max-new-tokens", str(NEW)),
        "chat": run("chat", *target, "--max-new-tokens", str(NEW), given=f"{PROMPT}\n"),
        "bench": run("bench", *target, *prompts, "--max-new-tokens", "4"),
        "throughput": run(
            "measure", "throughput", *target, *prompts, "--max-new-tokens", "4", "--batch-sizes", "1", "--calls", "1"
        ),
    }
    pytest.importorskip("fastapi")
    served = []
    monkeypatch.setattr("hf_hsdraft.serve.server.Server.run", lambda self, sockets: served.append(self))
    printed["serve"] = run("serve", *target, "--port", "0")
    assert served
    assert ("nothing that was trained for target is at hand: drafting with n-grams" in caplog.text) != bool(named)
    for name, text in printed.items():
        if name == "demo":  # which looks for drafters
            continue
        said = "no drafter comes with this target: drafting with n-grams of the text; `hsdraft find "
        assert (said in text) != bool(named), name
    model = make_target()
    [inputs] = encode_prompts(model, tokenizer, [PROMPT])
    new = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)[0, inputs["input_ids"].shape[1] :]
    answer = tokenizer.decode(new, skip_special_tokens=True)
    assert answer in printed["chat"] and "tau " in printed["chat"]
    assert printed["demo"].index(PROMPT) < printed["demo"].index(answer) < printed["demo"].index("the same without")
    assert "same text   yes" in printed["demo"]


def test_a_demo_explains_the_terms_of_its_table(place):
    shown = run("demo", PROMPT, "--target", str(place / "target"), "--max-new-tokens", "4")
    table = " ".join(shown[shown.index(" prompt ") :].split())
    for term in ("tau", "plain", "tokens/s", "same text"):
        assert f"{term}: " in table and table.index(term) < table.index(f"{term}: ")


def test_ngrams_are_a_name_wherever_a_drafter_has_one(prompt):
    target = make_target()
    plain = target.generate(prompt, do_sample=False, max_new_tokens=NEW)
    call = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True}
    output = target.generate(prompt, **call, assistant_model="ngrams")
    assert output.sequences.equal(plain) and output.statistics.rounds
    with attach(target, "ngrams", tree_size=5) as attachment:
        assert isinstance(attachment.drafter, CachebackDrafter) and attachment.drafter.generation_config.tree_size == 5
        assert target.generate(prompt, **call).sequences.equal(plain)
    with pytest.raises(ValueError, match="tree_sze"):
        attach(target, "ngrams", tree_sze=5)


def test_a_command_that_needs_a_trained_drafter_says_how_to_get_one(place):
    result = CliRunner().invoke(
        app, ["make", "refiner", "--target", str(place / "target"), "--train", str(place)], env={"COLUMNS": "200"}
    )
    assert result.exit_code == 2 and "hsdraft train --target" in result.output
