"""Outlines' constrained texts: the code of docs/integrations.md drafts, and gives plain decoding's text."""

import json
import re
from pathlib import Path

import pytest
from conftest import VOCAB, make_target
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_hsdraft import CachebackDrafter, attach, attached, detach

outlines = pytest.importorskip("outlines", reason="pip install outlines")

ROOT = Path(__file__).parents[2]
LETTERS = [chr(code) for code in range(32, 127)]  # a character a token, then padding and the end of a text


@pytest.fixture(scope="module")
def letters():
    vocabulary = {word: index for index, word in enumerate([*LETTERS, "<pad>", "</s>"])}
    assert len(vocabulary) == VOCAB
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", padding_side="left")


@pytest.fixture
def model():
    made = make_target(eos_token_id=VOCAB - 1)
    made.generation_config.pad_token_id = VOCAB - 2
    yield made
    detach(made)


def known(tokenizer, *texts: str) -> CachebackDrafter:
    """A drafter that has read these texts."""
    drafter = CachebackDrafter([tokenizer.encode(text) for text in texts])
    drafter.generation_config.tree_sizing = "fixed"  # whatever drafts cost
    return drafter


def test_the_code_of_the_docs_drafts_with_the_text_of_plain_decoding(model, letters):
    page = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    [code] = [cell for cell in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "import outlines" in cell]
    plain = {"model": model, "tokenizer": letters}
    assert code.count("attach(model, drafter)") == 1
    exec(code.replace("attach(model, drafter)", ""), plain)
    assert attached(model) is None and isinstance(json.loads(plain["answer"])["days"], int)
    names = {"model": model, "tokenizer": letters, "drafter": known(letters, plain["prompt"] + plain["answer"])}
    exec(code, names)
    statistics = attached(model).statistics
    assert names["answer"] == plain["answer"]
    assert statistics.accepted_tokens > 0 and not statistics.stepped_aside


def test_a_batch_is_decoded_without_drafts_because_the_processor_keeps_a_state(model, letters):
    constrained = outlines.from_transformers(model, letters)
    generate = outlines.Generator(constrained, outlines.regex("[0-9]{6,12}"))
    prompts, call = ["A number:", "Another number, please:"], {"max_new_tokens": 14, "do_sample": False}
    plain = generate.batch(prompts, **call)
    with attach(model, known(letters, *map("".join, zip(prompts, plain, strict=True)))) as attachment:
        assert generate.batch(prompts, **call) == plain
        assert attachment.statistics.calls == 0 and len(attachment.statistics.stepped_aside) == 1
        assert generate(prompts[0], **call) == plain[0] and attachment.statistics.accepted_tokens > 0
