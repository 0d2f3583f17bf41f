"""`attach`: every call of a model drafts, its text and its traces stay those of plain decoding, and it steps aside."""

import copy
import functools
import gc
import inspect
import io
import logging
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import VOCAB, make_drafter, make_target
from transformers import (
    DynamicCache,
    LogitsProcessor,
    LogitsProcessorList,
    MambaConfig,
    MambaForCausalLM,
    MusicgenForConditionalGeneration,
    StaticCache,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerationMixin

from hf_hsdraft import Attachment, AutoDrafter, CachebackDrafter, HSDrafter, attach, attached, detach, harmless
from hf_hsdraft.core.cache_name import CACHE, given_cache
from hf_hsdraft.core.refusals import DraftingRefused
from hf_hsdraft.engine.call_output import HSDraftGenerateOutput

NEW = 14
GREEDY = {"do_sample": False, "max_new_tokens": NEW}
FREE = {"node_cost": 0.0, "depth_cost": 0.0}


@pytest.fixture
def target():
    """A new one for every test, so that none leaves an attachment to the others."""
    return make_target()


@pytest.fixture
def batch():
    ids = torch.randint(2, VOCAB, (3, 9), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :4], mask[2, :1] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


class Collect(BaseStreamer):
    def __init__(self):
        self.got = []

    def put(self, value):
        self.got += value.flatten().tolist()

    def end(self):
        self.got.append("end")


def knowing(text: torch.Tensor) -> CachebackDrafter:
    """A drafter that knows a text, so that much of it is accepted."""
    return CachebackDrafter(text.tolist(), **FREE)


def forwards_of(target) -> list:
    counted: list = []
    target.register_forward_pre_hook(harmless(lambda *args: counted.append(1)))
    return counted


# The text


@pytest.mark.parametrize("sampled", [False, True])
def test_the_text_of_one_prompt_is_that_of_plain_decoding(target, drafter, prompt, sampled):
    call = {"max_new_tokens": NEW, "do_sample": sampled, "temperature": 0.7} if sampled else GREEDY
    torch.manual_seed(5)
    plain = target.generate(prompt, **call)
    for proposes in (drafter, knowing(plain)):
        attachment = attach(target, proposes)
        torch.manual_seed(5)
        text = target.generate(prompt, **call)
        assert type(text) is torch.Tensor and text.tolist() == plain.tolist()
        assert attachment.statistics.calls == 1 and attachment.statistics.stepped_aside == {}
    assert attachment.statistics.tau > 2


def test_a_dictionary_is_returned_where_it_is_asked_for(target, drafter, prompt):
    asked = {**GREEDY, "return_dict_in_generate": True, "output_scores": True}
    plain = target.generate(prompt, **asked)
    attachment = attach(target, drafter)
    output = target.generate(prompt, **asked)
    assert isinstance(output, HSDraftGenerateOutput) and output.sequences.tolist() == plain.sequences.tolist()
    assert len(output.scores) == len(plain.scores)
    assert output.past_key_values.get_seq_length() == plain.past_key_values.get_seq_length()
    assert attachment.last is output.statistics


# Statistics


@pytest.mark.parametrize("rows", [1, 3])
def test_statistics_are_what_can_be_counted_from_outside(target, batch, rows):
    call = {name: value[:rows] for name, value in batch.items()}
    plain = target.generate(**call, **GREEDY)
    attachment, forwards, calls = attach(target, knowing(plain)), forwards_of(target), 3
    target.generate(**call, **GREEDY)  # finds out what the target can do, which takes forwards of its own
    attachment.reset()
    forwards.clear()
    assert attachment.statistics.calls == 0 and attachment.last is None
    for _ in range(calls):
        assert target.generate(**call, **GREEDY).tolist() == plain.tolist()
    found = attachment.statistics
    assert (found.calls, found.new_tokens, found.target_forwards) == (calls, calls * rows * NEW, len(forwards))
    if rows == 1:
        assert found.tau == calls * NEW / len(forwards) > 1.5
        # Each forward emits one token of the target's own, and the others were drafted.
        assert found.accepted_tokens == calls * NEW - len(forwards)
    assert found.drafted_tokens >= found.accepted_tokens and found.total_seconds > 0 and found.exact
    target.generate(**call, **GREEDY)
    assert found.calls == calls, "a copy that does not change"


def test_a_lossy_rule_is_told(target, prompt, monkeypatch):
    from hf_hsdraft.verify.verdict import OwnChoice

    attachment = attach(target, CachebackDrafter(**FREE))
    target.generate(prompt, **GREEDY)
    assert attachment.statistics.exact
    monkeypatch.setattr(OwnChoice, "exact", False)
    target.generate(prompt, **GREEDY)
    assert not attachment.statistics.exact


# Stepping aside


class Unknown(LogitsProcessor):
    def __call__(self, input_ids, scores):
        return scores.clone().masked_fill_(torch.arange(scores.shape[-1]) % 7 == 3, -torch.inf)


class Uncroppable(DynamicCache):
    is_croppable = False


def written_down(folder: Path) -> str:
    (folder / "custom_generate").mkdir(exist_ok=True)
    recipe = "def generate(model, inputs, **kwargs):\n    return inputs[:, :3]\n"
    (folder / "custom_generate" / "generate.py").write_text(recipe)
    return str(folder)


ASIDE = {
    "beams": (lambda tmp: {"num_beams": 3}, "beam search"),
    "sampled beams": (lambda tmp: {"num_beams": 2, "do_sample": True}, "beam sample"),
    "another assistant": (lambda tmp: {"assistant_model": make_target(seed=4, num_hidden_layers=1)}, "assistant_model"),
    "a drafter of its own": (lambda tmp: {"assistant_model": CachebackDrafter(**FREE)}, "assistant_model"),
    "prompt lookup": (lambda tmp: {"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
    "custom_generate": (lambda tmp: {"custom_generate": lambda model, ids, **_: ids[:, :2]}, "custom_generate"),
    "a recipe": (lambda tmp: {"custom_generate": written_down(tmp), "trust_remote_code": True}, "custom_generate"),
    "no cache": (lambda tmp: {"use_cache": False, "do_sample": True}, "use_cache=False"),
    "a drafting option": (lambda tmp: {"num_assistant_tokens": 99, "do_sample": True}, "num_assistant_tokens=99"),
    "a cache": (lambda tmp: {"past_key_values": Uncroppable()}, "cannot be put back"),
    "a processor": (
        lambda tmp: {"num_return_sequences": 2, "do_sample": True, "logits_processor": [Unknown()]}, "detach(model)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ASIDE)
def test_it_steps_aside_as_if_it_were_not_there(target, drafter, prompt, name, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    (given, reason), results = ASIDE[name], []
    for drafting in (False, True, True):
        if drafting and attached(target) is None:
            attachment = attach(target, drafter)
        torch.manual_seed(3)
        text = target.generate(prompt, **{**GREEDY, **given(tmp_path)})
        results.append((text.tolist(), torch.get_rng_state().tolist()))
    assert results[0] == results[1] == results[2]
    found = attachment.statistics
    assert found.calls == 0 and attachment.last is None
    ((told, times),) = found.stepped_aside.items()
    assert times == 2 and reason in told
    assert sum(told in record.getMessage() for record in caplog.records) == 1
    assert name != "a processor" or "assistant_model" not in told  # which the call does not have


@pytest.mark.parametrize("kind", ["dropout", "checkpointing"])
def test_training_draws_the_same_numbers_as_without(drafter, prompt, kind):
    target = make_target(attention_dropout=0.5 if kind == "dropout" else 0.0).train()
    if kind == "checkpointing":
        target.gradient_checkpointing_enable()
    results = []
    for drafting in (False, True):
        attachment = attach(target, drafter) if drafting else None
        torch.manual_seed(0)
        text = target.generate(prompt, do_sample=True, max_new_tokens=NEW)
        results.append((text.tolist(), torch.get_rng_state().tolist()))
    assert results[0] == results[1] and attachment.statistics.calls == 0
    target.gradient_checkpointing_disable()
    for module in (target.eval(), make_target().train()):  # where nothing is dropped, training drafts too
        attachment = attach(module, drafter)
        module.generate(prompt, **GREEDY)
        assert attachment.statistics.calls == 1


def misread(monkeypatch, target) -> None:
    """A planted fault: several tokens at once are read without their positions."""
    forward = type(target.model).forward

    @harmless
    def forgetful(self, input_ids=None, position_ids=None, **kwargs):
        read = 0 if given_cache(kwargs) is None else given_cache(kwargs).get_seq_length()
        if read and input_ids.shape[1] > 1 and position_ids is not None:
            position_ids = torch.zeros_like(position_ids)
        return forward(self, input_ids, position_ids=position_ids, **kwargs)

    monkeypatch.setattr(type(target.model), "forward", forgetful)


@pytest.mark.parametrize("costs", [None, 0.0])
@pytest.mark.parametrize(("rows", "sampled"), [(1, False), (1, True), (3, False)])  # sampled batches draw by row
def test_a_target_that_turns_out_to_read_no_drafts_goes_on_plainly(target, batch, monkeypatch, rows, sampled, costs):
    """It is found out with tokens of the text, so the call goes on from there: nothing is drawn or streamed twice."""
    misread(monkeypatch, target)
    call = {name: value[:rows] for name, value in batch.items()} | {"do_sample": sampled, "max_new_tokens": NEW}
    drafter = make_drafter(target)
    drafter.generation_config.node_cost = drafter.generation_config.depth_cost = costs
    results = []
    for drafting in (False, True, True, True):
        attachment = attach(target, drafter) if drafting and attached(target) is None else attached(target)
        streamer, cache = Collect(), DynamicCache(config=target.config)
        torch.manual_seed(0)
        text = target.generate(**call, streamer=streamer, past_key_values=cache)
        further = torch.cat([text, text[:, :2]], dim=1)
        mask = torch.nn.functional.pad(call["attention_mask"], (0, NEW + 2), value=1)
        with torch.no_grad():
            scores = target(further[:, cache.get_seq_length() :], attention_mask=mask, past_key_values=cache).logits
        results.append((text.tolist(), streamer.got, scores))
    for text, streamed, scores in results[1:]:
        assert text == results[0][0] and streamed == results[0][1]
        torch.testing.assert_close(scores, results[0][2], atol=1e-4, rtol=1e-4)
    found = attachment.statistics
    assert found.calls == 0 and list(found.stepped_aside.values()) == [3], found


def test_a_target_whose_cache_tells_no_length_is_plain(prompt):
    torch.manual_seed(0)
    target = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=8)).eval()
    plain = target.generate(prompt, **GREEDY, eos_token_id=None)
    attachment = attach(target, CachebackDrafter(**FREE))
    assert target.generate(prompt, **GREEDY, eos_token_id=None).tolist() == plain.tolist()
    why = "linear-attention layers only" if CACHE == "cache" else "there is no cache"  # named otherwise before 5.24
    assert attachment.statistics.calls == 0 and why in str(attachment.statistics.stepped_aside)


def make_mute(monkeypatch, target, after: int = 0) -> None:
    """From some forward on it returns no hidden states."""
    forward, forwards = type(target).forward, forwards_of(target)

    @functools.wraps(forward)
    @harmless
    def mute(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        missing = "hidden_states" if len(forwards) > after else ""
        return type(output)(**{name: value for name, value in output.items() if name != missing})

    monkeypatch.setattr(type(target), "forward", mute)


@pytest.mark.parametrize(("filled", "static"), [(0, False), (6, False), (6, True)])
def test_a_refusal_after_the_prompts_were_read_leaves_the_cache_as_it_was(
    target, drafter, prompt, monkeypatch, filled, static
):
    """Only the first forward shows that a target returns no hidden states."""
    make_mute(monkeypatch, target)
    results = []
    for drafting in (False, True):
        attachment = attach(target, drafter) if drafting else None
        cache = StaticCache(target.config, max_cache_len=64) if static else DynamicCache()
        if filled:
            with torch.no_grad():
                target(prompt[:, :filled], past_key_values=cache)
        if drafting:
            with pytest.raises(ValueError, match="hidden states"):
                target.generate(prompt, **GREEDY, past_key_values=cache, assistant_model=drafter)
            assert int(cache.get_seq_length()) == filled
        text = target.generate(prompt, **GREEDY, past_key_values=cache)
        results.append((text.tolist(), int(cache.get_seq_length())))
    assert results[0] == results[1]
    assert "hidden states" in str(attachment.statistics.stepped_aside) and attachment.statistics.calls == 0


# Errors


def test_calls_that_are_wrong_in_any_case_show_the_plain_error(target, drafter, prompt):
    wrong = [
        ({"no_such_argument": 1}, ValueError),
        ({"max_new_tokens": -3}, ValueError),
        ({"temperature": -1.0, "do_sample": True}, ValueError),
        ({"streamer": Collect(), "num_beams": 2}, ValueError),
        ({"cache_implementation": "static", "past_key_values": DynamicCache()}, ValueError),
        ({"assistant_model": make_target(vocab_size=50)}, ValueError),
    ]
    messages = []
    for drafting in (False, True):
        attachment = attach(target, drafter) if drafting else None
        messages.append([])
        for given, kind in wrong:
            with pytest.raises(kind) as caught:
                target.generate(prompt, **{**GREEDY, **given})
            messages[-1].append(str(caught.value))
    assert messages[0] == messages[1]
    assert attachment.statistics.calls == 0 and attachment.statistics.stepped_aside == {}


def test_an_error_in_the_middle_of_a_call_comes_through(target, drafter, prompt):
    class Failing(LogitsProcessor):
        asked = 0

        def __call__(self, input_ids, scores):
            self.asked += 1
            if self.asked == 5:
                raise ValueError("mine")
            return scores

    plain = target.generate(prompt, **GREEDY)
    attachment = attach(target, drafter)
    with pytest.raises(ValueError, match=r"^mine$"):
        target.generate(prompt, **GREEDY, logits_processor=LogitsProcessorList([Failing()]))
    assert attachment.statistics.calls == 0 and attachment.statistics.stepped_aside == {}
    assert target.generate(prompt, **GREEDY).tolist() == plain.tolist()


def test_a_target_that_fails_in_the_middle_of_a_call_is_not_asked_again(target, drafter, prompt, monkeypatch):
    attachment = attach(target, drafter)
    target.generate(prompt, **GREEDY)
    make_mute(monkeypatch, target, after=3)
    streamer = Collect()
    with pytest.raises(ValueError, match="hidden states"):
        target.generate(prompt, **GREEDY, streamer=streamer)
    assert attachment.statistics.stepped_aside == {} and "end" not in streamer.got


def test_an_option_of_the_drafter_that_is_wrong_is_an_error(target, drafter, prompt):
    attach(target, drafter)
    drafter.generation_config.tree_size = -1
    with pytest.raises(ValueError, match="tree_size=-1"):
        target.generate(prompt, **GREEDY)


def test_what_can_never_draft_is_not_attached(target, drafter, tmp_path):
    with pytest.raises(TypeError, match=r"no generate\(\) of transformers"):
        attach(torch.nn.Linear(2, 2), drafter)
    with pytest.raises(TypeError, match="LlamaForCausalLM is no drafter"):
        attach(target, make_target(seed=2))
    with pytest.raises(TypeError, match=r"HSDrafter is a class: expected a drafter, which HSDrafter\.from_pretrained"):
        attach(target, HSDrafter)
    with pytest.raises(TypeError, match=r"AutoDrafter is a class: expected a drafter, which AutoDrafter\.from_pretrai"):
        attach(target, AutoDrafter)
    with pytest.raises(DraftingRefused, match="the drafter is on the meta device"):
        attach(target, make_drafter(target).to("meta"))
    with pytest.raises(ValueError, match="vocab_size=50, the drafter expects 97"):
        attach(make_target(vocab_size=50), drafter)
    with pytest.raises(OSError, match="no such drafter folder"):
        attach(target, tmp_path / "none")
    with pytest.raises(TypeError, match="revision only with the name"):
        attach(target, drafter, revision="main")
    drafter.generation_config.beam_width = 0
    with pytest.raises(ValueError, match="beam_width=0"):
        attach(target, drafter)
    with torch.device("meta"):
        own = MusicgenForConditionalGeneration.__new__(MusicgenForConditionalGeneration)
    torch.nn.Module.__init__(own)
    with pytest.raises(ValueError, match="its own way"):
        attach(own, CachebackDrafter(**FREE))
    assert attached(target) is None


# The model


def test_nothing_of_the_model_changes(target, drafter, prompt):
    other, plain = make_target(), target.generate(prompt, **GREEDY)
    attributes, kinds = dict(vars(target)), dict(vars(type(target)))
    methods = {name: vars(GenerationMixin)[name] for name in vars(GenerationMixin)}
    before = inspect.signature(target.generate), target.generate.__func__, target.generation_config.to_dict()
    attachment = attach(target, drafter)
    target.generate(prompt, **GREEDY)
    assert vars(target) == attributes and dict(vars(type(target))) == kinds
    assert {name: vars(GenerationMixin)[name] for name in vars(GenerationMixin)} == methods
    assert before == (inspect.signature(target.generate), target.generate.__func__, target.generation_config.to_dict())
    forwards = forwards_of(other)
    assert other.generate(prompt, **GREEDY).tolist() == plain.tolist()
    assert len(forwards) == NEW and attachment.statistics.calls == 1
    detach(target)
    forwards = forwards_of(target)
    assert target.generate(prompt, **GREEDY).tolist() == plain.tolist() and len(forwards) == NEW
    assert attachment.statistics.calls == 1 and attached(target) is None
    detach(target)


def test_a_block_ends_with_what_was_before(target, drafter, prompt):
    with attach(target, drafter) as outer:
        with pytest.raises(KeyError), attach(target, CachebackDrafter(**FREE)) as inner:
            assert attached(target) is inner and isinstance(inner, Attachment)
            raise KeyError
        assert attached(target) is outer
        target.generate(prompt, **GREEDY)
    assert attached(target) is None and (inner.statistics.calls, outer.statistics.calls) == (0, 1)
    first, second = attach(target, drafter), attach(target, CachebackDrafter(**FREE))
    first.detach()
    assert attached(target) is second, "it was replaced before"
    second.detach()
    assert attached(target) is None


def test_attaching_again_and_again_keeps_no_drafters(target):
    replaced = []
    for _ in range(4):
        drafter = CachebackDrafter(**FREE)
        attach(target, drafter)
        replaced.append(weakref.ref(drafter))
    del drafter
    gc.collect()
    assert [each() is not None for each in replaced[:2]] == [False, False]


def test_blocks_that_threads_enter_after_all_have_attached_end_with_what_was_before(target, drafter):
    permanent, ready = attach(target, drafter), threading.Barrier(3)

    def enter():
        block = attach(target, CachebackDrafter(**FREE))
        ready.wait(60)
        with block:
            ready.wait(60)

    with ThreadPoolExecutor(3) as pool:
        for each in [pool.submit(enter) for _ in range(3)]:
            each.result()
    assert attached(target) is permanent
    permanent.detach()


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "save_pretrained"])
def test_copies_have_no_attachment(target, drafter, prompt, how, tmp_path):
    plain = target.generate(prompt, **GREEDY)
    attachment = attach(target, drafter)
    target.generate(prompt, **GREEDY)
    if how == "deepcopy":
        copied = copy.deepcopy(target)
    elif how == "pickle":
        copied = pickle.loads(pickle.dumps(target))
    elif how == "torch.save":
        file = io.BytesIO()
        torch.save(target, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    else:
        target.save_pretrained(tmp_path)
        copied = type(target).from_pretrained(tmp_path)
        assert {path.name for path in tmp_path.iterdir()} == {
            "config.json",
            "generation_config.json",
            "model.safetensors",
        }
    assert attached(copied) is None
    forwards = forwards_of(copied)
    assert copied.generate(prompt, **GREEDY).tolist() == plain.tolist() and len(forwards) == NEW
    target.generate(prompt, **GREEDY)
    assert attachment.statistics.calls == 2
    again = attach(copied, drafter)
    assert copied.generate(prompt, **GREEDY).tolist() == plain.tolist() and again.statistics.calls == 1


@pytest.mark.parametrize("kind", ["hidden states", "n-grams"])
def test_an_attachment_keeps_no_model_alive(kind, prompt):
    target = make_target()
    attachment = attach(target, make_drafter(target) if kind == "hidden states" else CachebackDrafter(**FREE))
    target.generate(prompt, **GREEDY)
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None and attachment.statistics.calls == 1
    attachment.detach()


def test_a_loaded_drafter_follows_its_model(target, drafter, prompt, tmp_path):
    drafter.save_pretrained(tmp_path)
    attachment = attach(target, tmp_path)
    assert isinstance(attachment.drafter, HSDrafter) and attachment.drafter.dtype == torch.float32
    target.to(torch.float64)
    plain = copy.deepcopy(target).generate(prompt, **GREEDY)
    assert target.generate(prompt, **GREEDY).tolist() == plain.tolist()
    assert attachment.drafter.dtype == torch.float64 and attachment.statistics.calls == 1


# Wrappers


@pytest.mark.parametrize("first", ["attach", "wrap"])
def test_peft(target, drafter, prompt, first):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
    attachment = attach(target, drafter) if first == "attach" else None
    torch.manual_seed(0)
    model = peft.get_peft_model(target, config).eval()
    attachment = attachment or attach(torch.nn.DataParallel(model), drafter)  # any wrapper is seen through
    assert attached(model) is attached(target) is attachment
    with torch.no_grad():  # written out: no call of generate() that could draft
        ids = prompt
        for _ in range(NEW):
            ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], dim=1)
    assert model.generate(input_ids=prompt, **GREEDY).tolist() == ids.tolist()
    assert attachment.statistics.calls == 1
    detach(model)
    assert attached(target) is None
    assert model.generate(input_ids=prompt, **GREEDY).tolist() == ids.tolist() and attachment.statistics.calls == 1
    merged = model.merge_and_unload()
    attachment = attach(merged, drafter)
    assert merged.generate(prompt, **GREEDY).tolist() == ids.tolist() and attachment.statistics.calls == 1


@pytest.mark.parametrize(
    "how", ["wrapper", *(pytest.param(how, marks=pytest.mark.slow) for how in ("forward", "model"))]
)
def test_compiled_forwards(prompt, how):
    target, few, compiled = make_target(num_hidden_layers=1), {"do_sample": False, "max_new_tokens": 6}, []

    def backend(graph, inputs):
        compiled.append(1)
        return graph.forward

    plain, model = target.generate(prompt, **few), target
    if how == "forward":
        target.forward = torch.compile(target.forward, backend=backend, dynamic=True)
    elif how == "model":
        target.compile(backend=backend, dynamic=True)
    else:
        model = torch.compile(target, backend=backend)
    attachment = attach(model, CachebackDrafter(plain.tolist(), tree_size=4, tree_sizing="fixed", beam_width=1))
    assert model.generate(prompt, **few).tolist() == plain.tolist()
    assert attachment.statistics.calls == 1 and attachment.statistics.tau > 1.5
    assert compiled or how == "wrapper", "generate() of the wrapper runs forwards that are not compiled"
    torch._dynamo.reset()


# Callers


@pytest.mark.parametrize("batch_size", [1, 2])
def test_a_pipeline_drafts(target, drafter, own_tokenizer, batch_size):
    texts = ["w1 w2 w3 w4", "w7 w3 w9 w1 w2"]
    target.generation_config.pad_token_id = 0
    pipe = pipeline("text-generation", model=target, tokenizer=own_tokenizer)
    plain = pipe(texts, batch_size=batch_size, **GREEDY)
    with attach(target, drafter) as attachment:
        assert pipe(texts, batch_size=batch_size, **GREEDY) == plain
        assert attachment.statistics.calls == 2 // batch_size
    assert pipe(texts, batch_size=batch_size, **GREEDY) == plain and attachment.statistics.calls == 2 // batch_size


def test_threads_at_once(target, drafter):
    prompts = [torch.randint(2, VOCAB, (1, 5 + n), generator=torch.Generator().manual_seed(n)) for n in range(3)]
    plain = [target.generate(prompt, **GREEDY).tolist() for prompt in prompts]
    attachment = attach(target, drafter)
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda ids: [target.generate(ids, **GREEDY).tolist() for _ in range(2)], prompts)
    assert list(found) == [[text] * 2 for text in plain]
    assert attachment.statistics.calls == 6 and attachment.statistics.new_tokens == 6 * NEW
