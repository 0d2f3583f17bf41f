"""Parts of a target that no trial can see: its text stays plain decoding's, and the statistics say why."""

import contextlib
import types

import pytest
import torch
from conftest import make_target
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AttentionMaskInterface
from transformers.masking_utils import and_masks, causal_mask_function, sdpa_mask
from transformers.models.llama import modeling_llama

from hf_hsdraft import CachebackDrafter, attach

GREEDY = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}


def prompt(length=12):
    ids = torch.randint(5, 90, (1, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


@contextlib.contextmanager
def steering(target):
    count = [0]

    def steered(module, args, output):
        count[0] += 1
        if count[0] % 8 == 0:
            (output[0] if isinstance(output, tuple) else output)[:, -1] += 2.0
        return output

    handle = target.model.layers[1].register_forward_hook(steered)
    yield
    handle.remove()


@contextlib.contextmanager
def window(target):
    def mask(*args, mask_function=causal_mask_function, **kwargs):
        kwargs["allow_is_causal_skip"] = False
        near = and_masks(mask_function, lambda batch, head, q, kv: kv > q - 24)
        return sdpa_mask(*args, mask_function=near, **kwargs)

    AttentionMaskInterface.register("sdpa", mask)
    yield
    AttentionMaskInterface.register("sdpa", sdpa_mask)


@contextlib.contextmanager
def rotary(target):
    part = target.model.rotary_emb
    forward = part.forward

    def far(self, x, position_ids):
        return forward(x, position_ids * 2 if int(position_ids.max()) > 30 else position_ids)

    part.forward = types.MethodType(far, part)
    yield
    del part.forward


@contextlib.contextmanager
def positions_of_the_text(target):
    """Handed on from forward to forward, so that a step's depends on how often that was."""
    given = type(target)._update_model_kwargs_for_generation

    def update(self, outputs, model_kwargs, **kwargs):
        steps = model_kwargs.get("steps", 0) + 1
        model_kwargs = given(self, outputs, model_kwargs, **kwargs)
        if steps % 5 == 0:
            model_kwargs["position_ids"] = model_kwargs["position_ids"] + 1
        return {**model_kwargs, "steps": steps}

    target._update_model_kwargs_for_generation = types.MethodType(update, target)
    yield
    del target._update_model_kwargs_for_generation


@pytest.mark.parametrize("change", [steering, window, rotary, positions_of_the_text])
def test_what_may_follow_from_text_length_or_forwards_is_not_drafted(change):
    target, inputs = make_target(), prompt()
    bare = target.generate(**inputs, **GREEDY)
    texts = []
    for how in ("plain", "direct", "attached"):
        with change(target):
            if how == "attached":
                with attach(target, CachebackDrafter(bare[:, 12:].tolist(), tree_sizing="fixed")) as attachment:
                    texts.append(target.generate(**inputs, **GREEDY))
            elif how == "direct":
                drafter = CachebackDrafter(bare[:, 12:].tolist(), tree_sizing="fixed")
                more = {"assistant_model": drafter, "return_dict_in_generate": True}
                output = target.generate(**inputs, **GREEDY, **more)
                texts.append(output.sequences)
            else:
                texts.append(target.generate(**inputs, **GREEDY))
    assert texts[0].equal(texts[1]) and texts[0].equal(texts[2])
    assert output.statistics.reason and not sum(output.statistics.drafted_nodes)
    assert attachment.statistics.stepped_aside and attachment.statistics.calls == 0


def test_activated_lora_is_not_drafted():
    torch.manual_seed(0)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    lora.alora_invocation_tokens = [91, 92, 93]
    model = get_peft_model(make_target(), lora).eval()
    ids = torch.cat([prompt()["input_ids"], torch.tensor([[91, 92, 93]])], dim=1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    plain = model.generate(**inputs, **GREEDY)
    drafter = CachebackDrafter(plain[:, 15:].tolist(), tree_sizing="fixed")
    output = model.generate(**inputs, **GREEDY, assistant_model=drafter, return_dict_in_generate=True)
    assert output.sequences.equal(plain) and "activated LoRA" in output.statistics.reason


def test_hooks_that_only_count_and_layers_that_map_states_are_drafted():
    class Own(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    target, inputs, calls = make_target(), prompt(), []
    target.register_forward_hook(lambda *_: calls.append(1))
    target.model.layers[1].mlp.up_proj.__class__ = Own
    plain = target.generate(**inputs, **GREEDY)
    drafter = CachebackDrafter(plain[:, 12:].tolist(), tree_sizing="fixed")
    output = target.generate(**inputs, **GREEDY, assistant_model=drafter, return_dict_in_generate=True)
    assert output.sequences.equal(plain) and output.statistics.tau > 1 and calls


def test_another_kernel_is_used_in_drafted_calls_too(monkeypatch):
    target, inputs, calls = make_target(), prompt(), []
    own = torch.nn.functional.scaled_dot_product_attention

    def kernel(query, *args, **kwargs):
        calls.append(query.shape[2])
        return own(query * 0.5, *args, **kwargs)

    target.generate(**inputs, **GREEDY, assistant_model=CachebackDrafter(tree_sizing="fixed"))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", kernel)
    plain = target.generate(**inputs, **GREEDY)
    calls.clear()
    drafter = CachebackDrafter(plain[:, 12:].tolist(), tree_sizing="fixed")
    output = target.generate(**inputs, **GREEDY, assistant_model=drafter, return_dict_in_generate=True)
    assert output.sequences.equal(plain)
    assert len(calls) >= output.statistics.target_forwards * target.config.num_hidden_layers


def test_the_description_of_a_layer_changes_with_the_functions_it_calls(monkeypatch):
    from hf_hsdraft.cpu.layer_form import description_of

    layer, given = make_target().model.layers[0], modeling_llama.apply_rotary_pos_emb
    before = description_of(layer, {})

    def other(q, k, cos, sin, **kwargs):
        return given(q, k, cos, -sin, **kwargs)

    other.__module__, other.__qualname__ = given.__module__, given.__qualname__
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", other)
    assert description_of(layer, {}) != before


class Every(nn.Module):
    """Acts in each seventh forward, by an attribute."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.count = inner, 0

    def forward(self, x):
        self.count += 1
        return self.inner(x) * (1.5 if self.count % 7 == 0 else 1.0)


class Counted(nn.Module):
    """The same by a buffer."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x):
        self.count.add_(1)
        return self.inner(x) * (1.5 if self.count % 7 == 0 else 1.0)


class Few(nn.Module):
    """Experts that drop what exceeds a number in a forward."""

    def __init__(self, inner, most):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.gate, self.most = inner, nn.Linear(32, 2), most

    def forward(self, x):
        expert = self.gate(x).argmax(-1).flatten()
        places = nn.functional.one_hot(expert, 2).cumsum(0).gather(1, expert[:, None])[:, 0]
        return self.inner(x) * (places <= self.most).view(*x.shape[:-1], 1)


def patched(inner):
    """The same as `Every`, by a variable around a replaced forward."""
    count, given = [0], inner.forward

    def forward(x):
        count[0] += 1
        return given(x) * (1.5 if count[0] % 7 == 0 else 1.0)

    inner.forward = forward
    return inner


def recorded(inner):
    shapes, given = [], inner.forward

    def forward(x):
        shapes.append(x.shape)
        return given(x)

    inner.forward = forward
    return inner


def made(change):
    target = make_target()
    target.model.layers[1].mlp = change(target.model.layers[1].mlp)
    return target


def drafted(change, rows=1):
    """The plain text of a changed target, and what drafting for it gives, directly and attached."""
    inputs = {"input_ids": prompt(7 * rows)["input_ids"].view(rows, 7)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    plain = made(change).generate(**inputs, **GREEDY)
    drafter = CachebackDrafter(plain[:, 7:].tolist(), tree_sizing="fixed")
    output = made(change).generate(**inputs, **GREEDY, assistant_model=drafter, return_dict_in_generate=True)
    with attach(target := made(change), drafter) as attachment:
        attached = target.generate(**inputs, **GREEDY)
    assert output.sequences.equal(plain) and attached.equal(plain)
    return output.statistics, attachment.statistics


@pytest.mark.parametrize("change", [Every, Counted, patched])
def test_beside_modules_that_count_forwards_nothing_is_drafted(change):
    statistics, aside = drafted(change)
    assert "count in each forward" in statistics.reason and not sum(statistics.drafted_nodes)
    assert aside.calls == 0 and "count in each forward" in str(aside.stepped_aside)


def test_a_forward_that_records_is_drafted():
    assert drafted(recorded)[0].tau > 2


@pytest.mark.parametrize("most", [8, 12, 20, 24])
def test_experts_that_overflow_by_a_whole_draft_are_found(most):
    """A few tokens do not fill them, and not every draft of the text does."""

    def few(inner):
        return Few(inner, most)

    plain = made(few).generate(**prompt(7), **GREEDY)
    drafter = CachebackDrafter(plain[:, 7:].tolist(), tree_sizing="fixed")
    with pytest.raises(ValueError, match="cannot be drafted for: "):
        made(few).generate(**prompt(7), **GREEDY, assistant_model=drafter)
    with attach(target := made(few), drafter):
        assert target.generate(**prompt(7), **GREEDY).equal(plain)


def test_the_experts_of_a_large_batch_overflow_too():
    """Two rows are tried, each with as many tokens as all rows have together."""
    inputs = {"input_ids": prompt(16)["input_ids"].view(16, 1).repeat(1, 2)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    target = made(lambda inner: Few(inner, 40))
    plain = target.generate(**inputs, **GREEDY)
    with attach(target, CachebackDrafter(plain[:, 2:].tolist())) as attachment:
        assert target.generate(**inputs, **GREEDY).equal(plain)
    assert attachment.statistics.tau <= 1


class Recorder:
    def __init__(self):
        self.seen = []

    def __call__(self, module, args, output):
        self.seen.append(output.detach())


def hooks_that_record():
    shapes, by_name, rounds = [], {}, 0

    def named(module, args, output):
        nonlocal rounds
        rounds += 1
        by_name[rounds] = output.shape

    return [lambda module, args, output: shapes.append(output.shape), named, Recorder(), Recorder().__call__]


def hooks_that_may_change():
    seen, scale = [], 1.0

    def in_place(module, args, output):
        seen.append(output.shape)
        if len(seen) % 7 == 0:
            output *= 1.5

    def by_method(module, args, output):
        if len(seen) % 7 == 0:
            output.mul_(1.5)

    def out(module, args, output):
        torch.mul(output, 1.5, out=output)

    def returned(module, args, output):
        seen.append(output)
        return output if len(seen) % 7 else output * 1.5

    def item(module, args, output):
        output[:, -1] = scale

    def unknown(module, args, output):
        in_place(module, args, output)

    def of_the_module(module, args, output):
        module.half()

    return [in_place, by_method, out, returned, item, unknown, of_the_module]


@pytest.mark.parametrize("hook", hooks_that_record())
def test_beside_hooks_that_only_record_is_drafted(hook):
    target, inputs = make_target(), prompt()
    plain = target.generate(**inputs, **GREEDY)
    target.model.layers[1].mlp.register_forward_hook(hook)
    drafter = CachebackDrafter(plain[:, 12:].tolist(), tree_sizing="fixed")
    output = target.generate(**inputs, **GREEDY, assistant_model=drafter, return_dict_in_generate=True)
    assert output.statistics.tau > 2 and output.sequences.equal(plain)


@pytest.mark.parametrize("hook", hooks_that_may_change(), ids=lambda hook: hook.__name__)
def test_beside_hooks_that_may_do_more_nothing_is_drafted(hook):
    target = make_target()
    target.model.layers[1].mlp.register_forward_hook(hook)
    with attach(target, CachebackDrafter()) as attachment, contextlib.suppress(RuntimeError):
        target.generate(**prompt(), **GREEDY)
    assert attachment.statistics.calls == 0 and "forward hook" in str(attachment.statistics.stepped_aside)


def test_a_call_that_does_not_draft_runs_transformers_operators(monkeypatch):
    from hf_hsdraft.cpu import grouped_attention

    def forbidden(*args, **kwargs):
        raise AssertionError("an operator of this package")

    target, inputs = make_target(), prompt()
    plain = target.generate(**inputs, **GREEDY)
    drafter = CachebackDrafter(plain[:, 12:].tolist(), tree_sizing="fixed")
    monkeypatch.setattr(grouped_attention, "_attend_tree", forbidden)
    with steering(target):
        target.generate(**inputs, **GREEDY, assistant_model=drafter)
        with attach(target, drafter):
            target.generate(**inputs, **GREEDY)
