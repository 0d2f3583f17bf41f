"""Several answers to a request, the log-probabilities of their tokens and their form, beside other requests."""

import asyncio
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from serve_helpers import WINDOW, serving
from starlette.exceptions import HTTPException
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_hsdraft.serve.prompts import Grammars
from hf_hsdraft.serve.requests import ChatRequest


@pytest.fixture(scope="module", params=[4, 1])
def served(request, tokenizer):
    target = make_target(max_position_embeddings=WINDOW)
    with serving(target, tokenizer, make_drafter(target), max_batch_size=request.param) as found:
        yield found


def streamed(chunks) -> tuple[dict[int, str], dict[int, list], dict[int, str], list]:
    """Texts, log-probabilities and reasons by choice, and all usages."""
    texts, values, reasons, usages = {}, {}, {}, []
    for chunk in chunks:
        usages += [chunk.usage] if chunk.usage else []
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            values.setdefault(choice.index, []).extend(choice.logprobs.content if choice.logprobs else [])
            reasons[choice.index] = choice.finish_reason
    return texts, values, reasons, usages


def test_several_answers_are_those_of_successive_seeds(served):
    fields = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 12}
    single = [served.ask("w1 w2", seed=5 + index, **fields).choices[0].message.content for index in range(3)]
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(served.ask, "w1 w2", n=3, seed=5, **fields)
        parts = pool.submit(lambda: streamed(served.ask("w1 w2", n=3, seed=5, stream=True, **fields)))
    answer, (texts, _, reasons, usages) = whole.result(), parts.result()
    assert [choice.message.content for choice in answer.choices] == single and len(set(single)) == 3
    assert [texts[index] for index in range(3)] == single and set(reasons.values()) == {"length"}
    assert answer.usage.completion_tokens == 36 and usages == [answer.usage]
    fields["temperature"] = 0
    found = served.client.completions.create(model=served.name, prompt="w1 w2", n=2, **fields)
    assert [choice.index for choice in found.choices] == [0, 1] and found.choices[0].text == found.choices[1].text


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_log_probabilities_are_the_target_s(served, temperature):
    fields = {"temperature": temperature, "seed": 3, "max_tokens": 9, "logprobs": True, "top_logprobs": 4}
    fields["frequency_penalty"] = 0.2
    answer = served.ask("w1 w2", **fields).choices[0]
    messages = [{"role": "user", "content": "w1 w2"}]
    prompt = served.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    found = answer.logprobs.content
    new = [served.tokenizer.convert_tokens_to_ids(each.token) for each in found]
    assert served.tokenizer.decode(new) == answer.message.content and len(new) == 9
    with torch.no_grad():
        logits = served.reference(torch.tensor([prompt + new])).logits[0]
    for place, each in enumerate(found):
        row, before = logits[len(prompt) - 1 + place].float(), torch.tensor(sorted({*prompt, *new[:place]}))
        row[before] = torch.where(row[before] < 0, row[before] * 1.2, row[before] / 1.2)
        top = row.log_softmax(dim=-1).topk(4)
        assert math.isclose(each.logprob, row.log_softmax(dim=-1)[new[place]], abs_tol=1e-3)
        assert [one.token for one in each.top_logprobs] == [served.tokenizer.decode([one]) for one in top.indices]
        assert bytes(each.bytes).decode() == each.token
    _, values, _, _ = streamed(served.ask("w1 w2", stream=True, **fields))
    assert [(one.token, round(one.logprob, 3)) for one in values[0]] == [
        (one.token, round(one.logprob, 3)) for one in found
    ]


def test_completions_report_them_in_their_form(served):
    fields = {"model": served.name, "prompt": "w1 w2", "max_tokens": 6, "temperature": 0}
    found = served.client.completions.create(**fields, logprobs=2).choices[0].logprobs
    assert len(found.tokens) == len(found.token_logprobs) == len(found.text_offset) == 6
    assert [max(top, key=top.get) for top in found.top_logprobs] == found.tokens and found.text_offset[0] == 0
    assert all(len(top) == 2 for top in found.top_logprobs)
    none = served.client.completions.create(**fields, logprobs=0).choices[0].logprobs
    assert none.token_logprobs == pytest.approx(found.token_logprobs, abs=1e-3) and none.top_logprobs is None


def test_each_answer_ends_at_its_own_stop_string(served):
    fields = {"temperature": 1.0, "top_p": 1.0, "max_tokens": 30, "seed": 5}
    plain = served.ask("w1", n=2, **fields).choices
    stop = plain[1].message.content.split()[4]
    found = served.ask("w1", n=2, stop=stop, logprobs=True, **fields).choices
    for before, after in zip(plain, found, strict=True):
        assert after.message.content == before.message.content.split(stop)[0]
    assert found[1].finish_reason == "stop"


@pytest.mark.parametrize("most", [4, 1])
def test_answers_have_the_form_that_each_request_asks_for(most):
    """Beside others of another form, and of none."""
    pytest.importorskip("xgrammar")
    letters = [*(chr(code) for code in range(32, 127)), "<pad>", "</s>"]  # a character a token
    backend = Tokenizer(models.WordLevel({letter: index for index, letter in enumerate(letters)}, unk_token="<pad>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    speller = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", chat_template="{{ messages[0].content }}"
    )
    target = make_target(max_position_embeddings=WINDOW, eos_token_id=VOCAB - 1, pad_token_id=VOCAB - 2)
    values = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4}
    schema = {"type": "object", "properties": {"a": values}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    with serving(target, speller, make_drafter(target), max_batch_size=most) as served:

        def ask(index: int):
            fields = {"max_tokens": 200, "temperature": 1.0, "seed": index}
            if index % 2:
                fields["response_format"] = form
            if index % 3 == 1:
                return [streamed(served.ask(f"q{index}", stream=True, **fields))[0][0]]
            return [each.message.content for each in served.ask(f"q{index}", n=2, **fields).choices]

        with ThreadPoolExecutor(4) as pool:
            for index, texts in enumerate(pool.map(ask, range(6))):
                for text in texts if index % 2 else ():
                    answer = json.loads(text)["a"]
                    assert 2 <= len(answer) <= 4 and all(isinstance(each, bool) for each in answer)
        wrong = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": 5}}}
        with pytest.raises(openai.BadRequestError, match="xgrammar cannot compile the schema: Type should be a string"):
            served.ask("q", response_format=wrong)
        beams = {"response_format": form, "extra_body": {"generation_config": '{"num_beams": 2}'}}
        with pytest.raises(openai.BadRequestError, match="not supported with beams"):
            served.ask("q", **beams)


def test_a_grammar_that_takes_too_long_holds_up_no_other(monkeypatch):
    pytest.importorskip("xgrammar")
    ended, late = threading.Event(), {"type": "object", "title": "late"}

    def compiled(self, schema: str) -> str:
        if "late" in schema:
            ended.wait(30)
        return schema

    monkeypatch.setattr(Grammars, "_compiled", compiled)

    async def asked() -> list:
        grammars, found = Grammars(None, None, 0.3), []
        for schema in (late, {"type": "object"}, late, {"type": "object"}):
            form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
            chat = ChatRequest.model_validate({"messages": [{"role": "user", "content": "q"}], "response_format": form})
            try:
                found.append(await grammars.of(chat))
            except HTTPException as error:
                found.append(error.status_code)
        return found

    try:
        first, other, second, further = asyncio.run(asked())
    finally:
        ended.set()
    assert (first, second, further) == (503, 503, 503) and "object" in other  # two of them may be late at once
