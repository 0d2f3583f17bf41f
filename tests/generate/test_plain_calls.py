"""Calls that cannot be drafted decode as if there were no drafter, and say why; attachments nest in any order."""

import inspect
import os
import threading

import pytest
import torch
from conftest import NewTokens, make_drafter, make_target

from hf_hsdraft import CachebackDrafter, attach, attached, detach, harmless
from hf_hsdraft.core.refusals import DraftingRefused

GREEDY = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


def gradients(target, ids, assistant=None):
    """The text and the gradient of a loss over its scores."""
    target.zero_grad()
    more = {} if assistant is None else {"assistant_model": assistant}
    with torch.enable_grad():
        generate = inspect.unwrap(type(target).generate)
        output = generate(target, input_ids=ids, **GREEDY, return_dict_in_generate=True, output_logits=True, **more)
        torch.stack(output.logits, 1).log_softmax(-1).max(-1).values.sum().backward()
    return output, torch.cat([each.grad.flatten() for each in target.parameters() if each.grad is not None])


@pytest.mark.parametrize("rows", [1, 3])
def test_gradients_flow_through_a_call_with_a_drafter(rows):
    target = make_target()
    ids = torch.randint(5, 90, (rows, 8), generator=torch.Generator().manual_seed(0))
    plain, expected = gradients(target, ids)
    drafter = make_drafter(target)
    drafter.generation_config.tree_sizing = "fixed"
    direct, found = gradients(target, ids, drafter)
    assert direct.sequences.tolist() == plain.sequences.tolist()
    assert torch.equal(found, expected) and "gradients" in direct.statistics.reason
    with attach(target, drafter) as attachment:
        output, found = gradients(target, ids)
    assert output.sequences.tolist() == plain.sequences.tolist() and torch.equal(found, expected)
    [reason] = attachment.statistics.stepped_aside
    assert "torch.no_grad()" in reason


def test_gradients_that_only_a_hook_brings_are_seen():
    target = make_target().requires_grad_(False)
    ids = torch.randint(5, 90, (1, 8), generator=torch.Generator().manual_seed(0))
    steering = torch.zeros(1, requires_grad=True)
    hook = target.lm_head.register_forward_hook(lambda module, inputs, output: output + steering)
    with attach(target, CachebackDrafter()) as attachment, torch.enable_grad():
        inspect.unwrap(type(target).generate)(target, input_ids=ids, **GREEDY)
    hook.remove()
    assert any("gradients" in reason for reason in attachment.statistics.stepped_aside)


@pytest.mark.parametrize("make", [lambda target: CachebackDrafter(), make_drafter])
def test_an_embedding_without_a_table_drafts_the_same_text(make, prompt):
    target = make_target()
    drafter = make(target)
    target.set_input_embeddings(NewTokens(target.get_input_embeddings()))
    expected = target.generate(prompt, **GREEDY)
    drafter.generation_config.tree_sizing = "fixed"
    assert target.generate(prompt, **GREEDY, assistant_model=drafter).tolist() == expected.tolist()


@pytest.mark.parametrize("where", ["config", "call"])
def test_a_target_whose_configuration_wants_tuples_drafts_as_it_decodes(where, prompt):
    target, more = make_target(), {"return_dict": False} if where == "call" else {}
    if where == "config":
        target.config.return_dict = False
    outcomes = []
    for assistant in (None, CachebackDrafter(), make_drafter(target)):
        try:
            outcomes.append(target.generate(prompt, **GREEDY, **more, assistant_model=assistant).tolist())
        except Exception as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_a_forward_that_returns_the_last_logits_alone_is_refused(prompt):
    target = make_target()
    kind = type(target)

    class LastAlone(kind):
        @harmless
        def forward(self, *args, **kwargs):
            return super().forward(*args, **{**kwargs, "logits_to_keep": 1})

    target.__class__ = LastAlone
    expected = target.generate(prompt, **GREEDY)
    drafter = CachebackDrafter()
    drafter.generation_config.tree_sizing = "fixed"
    with pytest.raises(DraftingRefused, match="returns logits of 1"):
        target.generate(prompt, **GREEDY, assistant_model=drafter)
    with attach(target, drafter) as attachment:
        assert target.generate(prompt, **GREEDY).tolist() == expected.tolist()
    assert any("returns logits of 1" in reason for reason in attachment.statistics.stepped_aside)


def test_blocks_that_overlap_end_in_any_order(target):
    first, second, third = (attach(target, CachebackDrafter()).__enter__() for _ in range(3))
    second.__exit__()
    assert attached(target) is third
    third.__exit__()
    assert attached(target) is first
    first.__exit__()
    assert attached(target) is None


def test_overlapping_blocks_restore_what_was_attached_before(target):
    before = attach(target, CachebackDrafter())
    first = attach(target, CachebackDrafter()).__enter__()
    second = attach(target, CachebackDrafter()).__enter__()
    first.__exit__()
    second.__exit__()
    assert attached(target) is before
    detach(target)
    assert attached(target) is None


def test_threads_that_attach_leave_nothing_attached(target):
    barrier = threading.Barrier(4)

    def block(seconds):
        barrier.wait()
        with attach(target, CachebackDrafter()):
            threading.Event().wait(seconds)

    threads = [threading.Thread(target=block, args=(0.01 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert attached(target) is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_locks_are_free_in_a_forked_child():
    from hf_hsdraft.core.forks import new_lock, new_rlock
    from hf_hsdraft.cpu import packing

    locks, held, done = [new_lock(), new_rlock(), packing._lock], threading.Event(), threading.Event()

    def hold():
        with locks[0], locks[1], locks[2]:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        os._exit(0 if all(lock.acquire(timeout=5) for lock in locks) else 1)
    status = os.waitpid(child, 0)[1]
    done.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
