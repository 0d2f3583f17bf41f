"""A drafted call reads hidden states by hooks of transformers, which must not stay on the model."""

import copy
import io
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from conftest import VOCAB, Meanwhile, failing, make_drafter, make_target

from hf_hsdraft import harmless

NEW = 8
STATES = {"return_dict_in_generate": True, "output_hidden_states": True}


@pytest.fixture
def target():
    return make_target()


def prompts(rows: int) -> torch.Tensor:
    return torch.randint(2, VOCAB, (rows, 9), generator=torch.Generator().manual_seed(5))


def decode(target, ids: torch.Tensor, drafter=None, **call):
    mask = torch.ones_like(ids)
    return target.generate(
        ids, attention_mask=mask, assistant_model=drafter, do_sample=False, max_new_tokens=NEW, **call
    )


def hooks_of(target) -> list:
    return [(name, dict(module._forward_hooks)) for name, module in target.named_modules() if module._forward_hooks]


def attributes_of(target) -> dict[str, set[str]]:
    return {name: set(vars(module)) for name, module in target.named_modules()}


def saved_and_loaded(target):
    file = io.BytesIO()
    torch.save(target, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def unpickled(target):
    return pickle.loads(pickle.dumps(target))


def assert_same_states(output, plain) -> None:
    """Up to rounding: one forward reads several tokens of a drafted text."""
    for states, expected in zip(all_states(output), all_states(plain), strict=True):
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


def all_states(output) -> list[torch.Tensor]:
    return [layer for step in output.hidden_states for layer in step]


@pytest.mark.parametrize(
    ("kind", "copied"),
    [
        ("single", unpickled),
        ("batch", saved_and_loaded),
        ("raises", copy.deepcopy),
        ("hidden states", unpickled),
        ("hidden states", copy.deepcopy),
    ],
)
def test_a_model_can_be_copied_after_a_drafted_call(target, kind, copied):
    drafter, attributes, ids = make_drafter(target), attributes_of(target), prompts(3 if kind == "batch" else 1)
    if kind == "raises":
        with pytest.raises(RuntimeError, match="on purpose"):
            decode(target, ids, drafter, stopping_criteria=[Meanwhile(failing(RuntimeError("on purpose")), 3)])
    else:
        decode(target, ids, drafter, **(STATES if kind == "hidden states" else {}))
    assert hooks_of(target) == [] and attributes_of(target) == attributes
    other, plain = copied(target), decode(make_target(), ids, **STATES)
    for model in (other, target):
        assert decode(model, ids, drafter).equal(plain.sequences)
        assert decode(model, ids).equal(plain.sequences)
        for one in (drafter, None):
            output = decode(model, ids, one, **STATES)
            assert output.sequences.equal(plain.sequences) and len(output.hidden_states) == len(plain.hidden_states)
            assert_same_states(output, plain)


def test_hooks_that_were_there_before_stay(target):
    drafter, ids, seen = make_drafter(target), prompts(1), []
    target.model.layers[1].register_forward_hook(harmless(lambda *args: seen.append(1)))
    plain = decode(target, ids, **STATES)
    before = hooks_of(target)
    assert decode(target, ids, drafter).equal(plain.sequences)
    assert hooks_of(target) == before and len(before) > 1
    assert_same_states(decode(target, ids, **STATES), plain)


def test_the_last_of_several_calls_removes_the_hooks(target):
    drafter, ids = make_drafter(target), prompts(1)
    plain, within = decode(target, ids), []

    def call_beside() -> None:
        with ThreadPoolExecutor(1) as pool:
            within.append(pool.submit(decode, target, ids, drafter).result())
        within.append(hooks_of(target))

    output = decode(target, ids, drafter, stopping_criteria=[Meanwhile(call_beside, 3)])
    assert output.equal(plain) and within[0].equal(plain)
    assert within[1] and not hooks_of(target)


def test_a_forward_that_captures_keeps_its_hooks(target):
    """A drafted call ends while another thread is in the middle of a forward that uses the hooks of that call."""
    drafter, ids, expected = make_drafter(target), prompts(1), make_target()(prompts(1), output_hidden_states=True)
    reached, ended, outputs = threading.Event(), threading.Event(), []
    plain = threading.Thread(target=lambda: outputs.append(target(ids, output_hidden_states=True)))

    def wait_for_the_end(*args) -> None:
        if threading.current_thread() is plain:
            reached.set()
            ended.wait(60)

    def start_plain() -> None:
        plain.start()
        reached.wait(60)

    handle = target.model.layers[1].register_forward_pre_hook(harmless(wait_for_the_end))
    text = decode(target, ids, drafter, stopping_criteria=[Meanwhile(start_plain, 3)])
    left = hooks_of(target)
    ended.set()
    plain.join()
    handle.remove()
    assert left and text.equal(decode(make_target(), ids))
    assert len(outputs[0].hidden_states) == len(expected.hidden_states)
    for states, other in zip(outputs[0].hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(states, other)
    decode(target, ids, drafter)  # removes what had to stay
    assert pickle.dumps(target) and not hooks_of(target)


def test_plain_calls_beside_drafted_ones_get_all_hidden_states(target):
    drafter, ids = make_drafter(target), prompts(1)
    plain, outputs, done = decode(make_target(), ids, **STATES), [], threading.Event()

    def decode_plainly() -> None:
        while not done.is_set() or not outputs:
            outputs.append(decode(target, ids, **STATES))

    thread = threading.Thread(target=decode_plainly)
    thread.start()
    try:
        assert all(decode(target, ids, drafter).equal(plain.sequences) for _ in range(4))
    finally:
        done.set()
        thread.join()
    for output in outputs:
        assert_same_states(output, plain)
