"""Tiny random targets: real architectures of transformers, small enough for every test."""

from __future__ import annotations

import copy
import functools
import gc
import json
import os
import sys
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # there is one worker for each core
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import peft
import pytest
import torch
import typer.testing
from oracles.plain_texts import each_with_its_seed as each_with_its_seed
from oracles.scripted import ScriptedDrafter
from packaging.version import Version
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, StoppingCriteria
from transformers.integrations.peft import MIN_PEFT_VERSION
from transformers.utils import logging

from hf_hsdraft import HSDraftConfig, HSDrafter, harmless
from hf_hsdraft.cpu.small_weights import KERNEL

gc.disable()  # until all tests are imported: what imports make stays

# Tests that README's command leaves out, by folder or file; those of a test's own are beside it.
_MARKS = {"training": "train", "remote": "server", "serve": "server", "test_chat_page": "server", "test_hub": "process"}


def pytest_collection_modifyitems(items):
    for item in items:
        for place in (item.path.parent.name, item.path.stem):
            if place in _MARKS:
                item.add_marker(_MARKS[place])


def pytest_collection_finish():
    """What was imported stays: the collections of cycles that calls and tests ask for need not go through it."""
    gc.collect()
    gc.freeze()
    gc.enable()


# Typer makes all commands of the program anew in every call that a test makes of one of them.
typer.testing._get_command = functools.cache(typer.testing._get_command)


VOCAB = 97
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' end ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)
WORDS = ["user", "assistant", "end", *(f"w{index}" for index in range(VOCAB - 5))]


# transformers' own adapter methods, on which a drafter's `load_adapter` rests, want a newer PEFT from 5.24 on.
needs_peft = pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason=f"transformers wants PEFT {MIN_PEFT_VERSION}"
)


def make_target(attention: str = "sdpa", seed: int = 0, **overrides):
    torch.manual_seed(seed)
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": None,
        "bos_token_id": 1,
        "pad_token_id": 0,
        "initializer_range": 0.3,  # default weights are so small that the text never varies
    }
    config = LlamaConfig(**{**fields, **overrides})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()


SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1}
LLAMA = {"intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA |= {"initializer_range": 0.3, "max_position_embeddings": 256}


def model_of(model_type: str, auto=AutoModelForCausalLM, attention: str | None = None, **fields):
    """A target of another architecture; those that resemble Llama take the fields `LLAMA`."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**SIZES, **fields})
    return auto.from_config(config, **({"attn_implementation": attention} if attention else {})).eval()


def make_drafter(target, seed: int = 1, **overrides) -> HSDrafter:
    """An untrained drafter; its proposals are good only by luck, as a test of exactness wants them.

    Drafting costs nothing here, whatever the machine: so as much is drafted in every run, and by the default path,
    which multiplies by packed weights from the first rounds on.
    """
    torch.manual_seed(seed)
    fields = {"num_draft_steps": 4, "tree_size": 16, "beam_width": 5, "draft_vocab_size": VOCAB}
    fields |= {"injector_rank": 8, "injector_hidden_size": 16, "initializer_range": 0.3}
    drafter = HSDrafter(HSDraftConfig.for_target(target, **{**fields, **overrides})).eval()
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = 0.0
    drafter.generation_config.packed_weights = True  # however small
    return drafter


def as_plain(target, drafter, inputs, seed: int = 0, **call):
    """What a drafted call returns; its text has to be that of plain decoding with the same seed."""
    inputs = inputs if isinstance(inputs, dict) else {"input_ids": inputs}
    call = {"do_sample": False, "return_dict_in_generate": True, **inputs, **call}
    outputs = []
    for assistant in (None, drafter):
        torch.manual_seed(seed)
        outputs.append(target.generate(**call, assistant_model=assistant))
    plain, drafted = outputs
    assert drafted.sequences.tolist() == plain.sequences.tolist()
    return drafted


class NewTokens(torch.nn.Module):
    """An embedding without a table."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    @harmless
    def forward(self, ids):
        return self.base(ids) * 1.5


def edited(folder: Path, name: str = "config.json", **fields) -> dict:
    """The fields of a JSON file after these are changed; `None` takes one out."""
    found = {**json.loads((folder / name).read_text()), **fields}
    found = {field: value for field, value in found.items() if value is not None or field not in fields}
    if fields:
        (folder / name).write_text(json.dumps(found))
    return found


@pytest.fixture(autouse=True)
def _as_loud_as_before():
    """A server's command silences transformers in its process, which is that of later tests."""
    before = logging.get_verbosity()
    yield
    logging.set_verbosity(before)


@pytest.fixture(scope="session")
def target():
    return make_target()


@pytest.fixture
def drafter(target) -> HSDrafter:
    return make_drafter(target)


@pytest.fixture
def unrounded(monkeypatch):
    """Drafts in float32 by the weights as they are, as where our kernel does not run."""
    monkeypatch.setattr(KERNEL, "operators", lambda **_: None)


@pytest.fixture
def prompt() -> torch.Tensor:
    return torch.randint(2, VOCAB, (1, 11), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A word a token, with a chat template; the end of a turn is token 4."""
    vocabulary = {word: index for index, word in enumerate(["<pad>", "<unk>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", unk_token="<unk>", eos_token="end", chat_template=TEMPLATE
    )


@pytest.fixture
def own_tokenizer(tokenizer) -> PreTrainedTokenizerFast:
    """A copy for pipelines and servers: those of transformers set its side of padding."""
    return copy.deepcopy(tokenizer)


@pytest.fixture(scope="session")
def chatty():
    """A target that ends its turns."""
    target = make_target(eos_token_id=4)
    target.generation_config.pad_token_id = 0
    return target


def write_prompts(path: Path, count: int) -> Path:
    rows = [{"turns": [f"w{index} w{2 * index + 1} w3"], "category": "ab"[index % 2]} for index in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def unloadable(path: Path) -> Path:
    """A folder that looks like a target's, and cannot be loaded."""
    path.mkdir()
    (path / "config.json").write_text("{}")
    return path


@pytest.fixture
def tuned(monkeypatch):
    """A function that gives tuned numbers other values, in every module that reads them, for one test."""

    def change(**values):
        modules = [module for name, module in list(sys.modules.items()) if name.startswith("hf_hsdraft.")]
        for number, value in values.items():
            readers = [module for module in modules if number.upper() in vars(module)]
            assert readers, number
            for module in readers:
                monkeypatch.setattr(module, number.upper(), value)

    return change


class Meanwhile(StoppingCriteria):
    """Does something once in the middle of a call, when it is asked for a certain time; keeps what that returned."""

    def __init__(self, what, at: int) -> None:
        self.what, self.at, self.asked, self.results = what, at, 0, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked += 1
        if self.asked == self.at:
            self.results.append(self.what())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def failing(error: BaseException):
    """A function that raises an error, whatever its arguments."""

    def fail(*args, **kwargs):
        raise error

    return fail


def scripted(drafter, texts, seed=0):
    """A drafter that follows `texts`, the new tokens of each row, as far as chance has it; `None` for `None`."""
    texts = texts.tolist() if isinstance(texts, torch.Tensor) else texts
    return None if drafter is None else ScriptedDrafter(drafter, texts, seed)
