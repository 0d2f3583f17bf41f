"""Each request of a batch has its own grammar, stop strings, seed and processors."""

import json
from typing import Any

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from test_generate_many import alone, decoded_at_random, new_tokens
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_hsdraft import CachebackDrafter
from hf_hsdraft.batching.scheduler import ContinuousBatching

LETTERS = [*(chr(code) for code in range(32, 127)), "<pad>", "</s>"]
SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


@pytest.fixture(scope="module")
def speller() -> PreTrainedTokenizerFast:
    """A character a token."""
    backend = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(LETTERS)}, unk_token="<pad>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")


@pytest.mark.parametrize("kind", ["hidden_state", "n-grams"])
def test_grammars_stop_strings_and_seeds(kind: str, speller: PreTrainedTokenizerFast) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    target = make_target(eos_token_id=VOCAB - 1)
    info = xgrammar.TokenizerInfo(LETTERS, xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=[VOCAB - 1])
    compiler = xgrammar.GrammarCompiler(info)
    grammars = [
        compiler.compile_json_schema(json.dumps(SCHEMA)),
        compiler.compile_grammar("root ::= ([a-c] [d-f] [g-i] [j-l])+"),
        compiler.compile_grammar('root ::= [0-9]{6,20} "." [0-9]{1,3}'),
    ]

    def requests() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        for index in range(12):
            ids = torch.tensor([speller.encode(f"Number {index}: ")])
            found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 30})
            found[-1] |= {"do_sample": index % 2 == 0, "seed": index}
            if index % 3 != 2:
                own = xgrammar.contrib.hf.LogitsProcessor(grammars[index % 4 % 3])
                found[-1]["logits_processor"] = [own]
            if index % 3:
                found[-1] |= {"stop_strings": [LETTERS[20 + index], "al"], "tokenizer": speller}
        return found

    drafter = make_drafter(target) if kind == "hidden_state" else CachebackDrafter()
    batching = ContinuousBatching(target, drafter, 4, chunk_size=8)
    done, lengths = decoded_at_random(batching, requests(), 3), set[int]()
    for index, options in enumerate(requests()):
        assert done[index].error is None
        text = new_tokens(done[index].output, options)
        assert text == new_tokens(alone(target, options), options)
        lengths.add(len(text))
    assert not batching.alone and len(lengths) > 3


def test_requests_of_one_grammar_object_are_decoded_together(speller: PreTrainedTokenizerFast) -> None:
    xgrammar = pytest.importorskip("xgrammar")
    target = make_target(eos_token_id=VOCAB - 1)
    info = xgrammar.TokenizerInfo(LETTERS, xgrammar.VocabType.RAW, vocab_size=VOCAB, stop_token_ids=[VOCAB - 1])
    compiled = xgrammar.GrammarCompiler(info).compile_grammar("root ::= ([a-c] [d-f] [g-i] [j-l])+")
    shared = xgrammar.contrib.hf.LogitsProcessor(compiled)
    requests = [{"input_ids": torch.tensor([[20 + index, 30]]), "max_new_tokens": 20} for index in range(4)]
    batching, most = ContinuousBatching(target, CachebackDrafter(), 4), 0
    for each in requests:
        batching.submit({**each, "logits_processor": [shared]})
    while batching.busy:
        for done in batching.step():
            own = {**requests[done.index], "logits_processor": [xgrammar.contrib.hf.LogitsProcessor(compiled)]}
            assert done.output.tolist() == alone(target, own).tolist()
        most = max(most, batching.running)
    assert most == 4
