"""Parts of a target that no trial can see: its text stays plain decoding's, and the statistics say why."""

import contextlib
import functools
import sys
import types

import accelerate
import pytest
import torch
from conftest import make_target
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AttentionMaskInterface, LlamaForCausalLM
from transformers.masking_utils import and_masks, causal_mask_function, sdpa_mask
from transformers.models.llama import modeling_llama

from hf_hsdraft import CachebackDrafter, attach, harmless

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


def test_another_kernel_is_used_in_drafted_calls_too(monkeypatch):
    target, inputs, calls = make_target(), prompt(), []
    own = torch.nn.functional.scaled_dot_product_attention

    @harmless
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

    @harmless  # which is not true: the trial has to find it
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


def made(change):
    target = make_target()
    target.model.layers[1].mlp = change(target.model.layers[1].mlp)
    return target


class Mapped(nn.Module):
    """The same states at any place: nobody can see that, so it has to be declared."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("change", [Every, Counted, patched, Mapped])
@pytest.mark.parametrize("rows", [1, 3])
def test_beside_modules_of_the_users_nothing_is_drafted(change, rows):
    ids = prompt(7 * rows)["input_ids"].view(rows, 7)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    target = made(change)
    plain = [target.generate(**inputs, **GREEDY) for _ in range(3)]
    drafter = CachebackDrafter([text[7:].tolist() for several in plain for text in several], tree_sizing="fixed")
    target = made(change)
    for text in plain:
        output = target.generate(**inputs, **GREEDY, assistant_model=drafter, return_dict_in_generate=True)
        assert output.sequences.equal(text) and not sum(output.statistics.drafted_nodes)
        assert "model.layers.1.mlp" in output.statistics.reason
    target = made(change)
    with attach(target, drafter) as attachment:
        assert all(target.generate(**inputs, **GREEDY).equal(text) for text in plain)
    assert attachment.statistics.calls == 0


def test_beside_modules_that_were_declared_harmless_is_drafted():
    class Own(nn.Linear):
        forward = harmless(lambda self, x: super().forward(x))

    class Declared(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner, self.shapes = inner, []

        @harmless
        def forward(self, x, **kwargs):
            self.note(x)
            return self.inner(x)

        def note(self, x):
            self.shapes.append(x.shape)

    target, inputs = make_target(), prompt()
    plain = target.generate(**inputs, **GREEDY)
    drafter = CachebackDrafter(plain[:, 12:].tolist(), tree_sizing="fixed")
    call = {**inputs, **GREEDY, "assistant_model": drafter, "return_dict_in_generate": True}
    target.model.layers[0].mlp = Declared(target.model.layers[0].mlp)
    target.model.layers[1].mlp.up_proj.__class__ = Own
    output = target.generate(**call)
    assert output.sequences.equal(plain) and output.statistics.tau > 2


def rotated(given):
    def apply(q, k, cos, sin, *args, **kwargs):
        return given(q, k, cos, sin if q.shape[2] > 1 else -sin, *args, **kwargs)

    return apply


@pytest.mark.parametrize("name", ["apply_rotary_pos_emb", "create_causal_mask", "eager_attention_forward", "sdpa"])
@pytest.mark.parametrize("how", ["function", "partial", "object"])
def test_beside_replaced_functions_nothing_is_drafted(monkeypatch, name, how):
    space, name = (nn.functional, "scaled_dot_product_attention") if name == "sdpa" else (modeling_llama, name)
    given = getattr(space, name)

    def function(*args, **kwargs):
        return given(*args, **kwargs)

    class Callable:
        __call__ = staticmethod(function)

    other = {"function": function, "partial": functools.partial(function), "object": Callable()}[how]
    target = make_target(attention="eager" if name == "eager_attention_forward" else "sdpa")
    with attach(target, CachebackDrafter()) as attachment:
        monkeypatch.setattr(space, name, other)
        target.generate(**prompt(), **GREEDY)
        assert attachment.statistics.calls == 0 and name in str(attachment.statistics.stepped_aside)
        monkeypatch.setattr(space, name, harmless(other))
        target.generate(**prompt(), **GREEDY)
    assert attachment.statistics.calls == 1


def test_what_torch_compile_leaves_in_a_module_does_not_end_drafting(monkeypatch):
    monkeypatch.setattr(modeling_llama, "__compiled_fn_1_0", lambda *args: args, raising=False)
    target = make_target()
    with attach(target, CachebackDrafter()) as attachment:
        target.generate(**prompt(), **GREEDY)
    assert attachment.statistics.calls == 1


class Odd:
    def __getattr__(self, name):
        raise RuntimeError(name)

    def __call__(self, *args, **kwargs):
        raise AssertionError("not called")


class Unsigned(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.odd = inner, Odd()

    def forward(self, x):
        return self.inner(x)

    forward.__signature__ = "none"


@pytest.mark.parametrize("change", ["global", "hook", Unsigned])
def test_objects_that_answer_strangely_end_drafting_and_no_call(monkeypatch, change):
    target = make_target() if isinstance(change, str) else made(change)
    if change == "global":
        monkeypatch.setattr(modeling_llama, "odd", Odd(), raising=False)
    elif change == "hook":
        monkeypatch.setattr(Odd, "__call__", lambda *_: None)
        target.model.layers[1].register_forward_hook(Odd())
    plain = target.generate(**prompt(), **GREEDY)
    with attach(target, CachebackDrafter(plain[:, 12:].tolist())) as attachment:
        assert target.generate(**prompt(), **GREEDY).equal(plain)
    assert attachment.statistics.calls == 0


class Cached(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        far = kwargs["past_key_values" if "past_key_values" in kwargs else "cache"].get_seq_length() > 20
        output = super().forward(*args, **kwargs)
        output.logits = output.logits.roll(1, dims=-1) if far else output.logits
        return output


class Placed(nn.Module):
    """Acts from some position on, of which it is told under different names."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def scaled(self, output, mask):
        return output * (1.5 if mask is not None and mask.shape[-1] > 30 else 1.0)


class Keywords(Placed):
    def forward(self, hidden_states, **kwargs):
        return self.scaled(self.inner(hidden_states, **kwargs), kwargs["attention_mask"])


class Masked(Placed):
    def forward(self, hidden_states, attention_mask=None, **_):
        return self.scaled(self.inner(hidden_states, attention_mask=attention_mask, **_), attention_mask)


class Thinned(nn.ModuleList):
    """Swaps two layers in each third forward."""

    forwards = 0

    def __getitem__(self, places):
        self.forwards += 1
        first, second, *rest = super().__getitem__(places)
        return [second, first, *rest] if self.forwards % 3 == 0 else [first, second, *rest]


@pytest.mark.parametrize("change", [Cached, Keywords, Masked, Thinned])
def test_beside_forwards_that_are_told_a_place_nothing_is_drafted(change):
    target = make_target(attention="eager")
    if change is Cached:
        target.__class__ = Cached
    elif change is Thinned:
        target.model.layers.__class__ = Thinned
    else:
        target.model.layers[1] = change(target.model.layers[1])
    plain = target.generate(**prompt(), **GREEDY)
    with attach(target, CachebackDrafter(plain[:, 12:].tolist(), tree_sizing="fixed")) as attachment:
        for _ in range(2):
            target.model.layers.forwards = 0
            assert target.generate(**prompt(), **GREEDY).equal(plain)
    assert attachment.statistics.calls == 0 and "not transformers' own" in str(attachment.statistics.stepped_aside)


@pytest.mark.parametrize("most", [8, 12, 20, 24])
def test_experts_that_overflow_by_a_whole_draft_are_found(most):
    """A few tokens do not fill them, and not every draft of the text does."""

    def few(inner):
        return Few(inner, most)

    plain = made(few).generate(**prompt(7), **GREEDY)
    drafter, target = CachebackDrafter(plain[:, 7:].tolist(), tree_sizing="fixed"), made(few)
    with pytest.raises(ValueError, match="cannot be drafted for: "):
        target.generate(**prompt(7), **GREEDY, assistant_model=drafter)
    with attach(target := made(few), drafter):
        assert all(target.generate(**prompt(7), **GREEDY).equal(plain) for _ in range(3))


def test_the_experts_of_a_large_batch_overflow_too():
    """Two rows are tried, each with as many tokens as all rows have together."""
    inputs = {"input_ids": prompt(16)["input_ids"].view(16, 1).repeat(1, 2)}
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    target = made(lambda inner: Few(inner, 40))
    plain = target.generate(**inputs, **GREEDY)
    with attach(target, CachebackDrafter(plain[:, 2:].tolist())) as attachment:
        assert all(target.generate(**inputs, **GREEDY).equal(plain) for _ in range(2))
    assert attachment.statistics.tau <= 1


class Recorder:
    def __init__(self):
        self.seen = []

    def __call__(self, module, args, output):
        self.seen.append(type(output))

    def see(self, module, args, output):
        self.seen.append(type(output))

    @harmless
    def declared(self, module, args, output):
        self.seen.append(type(output))


def count(seen, module, args, output):
    seen.append(type(output))


HOOKS = {
    "function": lambda: lambda module, args, output: None,
    "partial": lambda: functools.partial(count, []),
    "object": Recorder,
    "method": lambda: Recorder().see,
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("where", ["module", "accelerate", "everywhere"])
def test_nothing_is_drafted_beside_hooks_that_were_not_declared_harmless(kind, where):
    target, hook = make_target(), HOOKS[kind]()

    class Own(accelerate.hooks.ModelHook):
        def post_forward(self, module, output):
            return output

    if where == "accelerate":
        accelerate.hooks.add_hook_to_module(target.model.layers[1].mlp, Own())
    elif where == "module":
        target.model.layers[1].mlp.register_forward_hook(hook)
    else:
        handle = nn.modules.module.register_module_forward_hook(hook)
    with attach(target, CachebackDrafter()) as attachment:
        target.generate(**prompt(), **GREEDY)
        if where == "everywhere":
            handle.remove()
    (reason,) = attachment.statistics.stepped_aside
    name = "Own" if where == "accelerate" else getattr(getattr(hook, "func", hook), "__qualname__", "Recorder")
    assert attachment.statistics.calls == 0 and f"the forward hook {name}" in reason and "harmless" in reason


def test_beside_hooks_that_were_declared_harmless_is_drafted():
    target, inputs = make_target(), prompt()
    plain = target.generate(**inputs, **GREEDY)
    for kind in HOOKS.values():
        target.model.layers[1].mlp.register_forward_hook(harmless(kind()))
    target.model.layers[1].mlp.register_forward_hook(Recorder().declared)
    drafter = CachebackDrafter(plain[:, 12:].tolist(), tree_sizing="fixed")
    output = target.generate(**inputs, **GREEDY, assistant_model=drafter, return_dict_in_generate=True)
    assert output.statistics.tau > 2 and output.sequences.equal(plain)


@pytest.mark.parametrize("of_hub", [True, False], ids=["hub", "folder"])
def test_kernels_of_the_hub_count_as_a_library(monkeypatch, of_hub):
    """`kernels` names a module by its build, and puts the forwards of its layers into those of the model."""
    module = types.ModuleType("_activation_cpu_1a2b3c")
    exec("import torch\ndef forward(self, x):\n    return torch.nn.functional.silu(x)", vars(module))
    loaded = types.SimpleNamespace(module=module, repo_info="kernels-community/activation" if of_hub else None)
    monkeypatch.setitem(sys.modules, "kernels", types.SimpleNamespace(get_loaded_kernels=lambda: [loaded]))
    target, inputs = make_target(), prompt()
    for layer in target.model.layers:
        layer.mlp.act_fn.forward = types.MethodType(module.forward, layer.mlp.act_fn)
    plain = target.generate(**inputs, **GREEDY)
    with attach(target, CachebackDrafter(plain.tolist(), tree_sizing="fixed")) as attachment:
        assert target.generate(**inputs, **GREEDY).equal(plain)
    assert (attachment.statistics.tau > 2) == of_hub and (not attachment.statistics.stepped_aside) == of_hub


class Slotted:
    __slots__ = ()


def test_a_declaration_is_for_one_function():
    def declared(module, args, output):
        return None

    @functools.wraps(harmless(declared))
    def around(module, args, output):
        return output * 1.5

    target = make_target()
    target.model.layers[1].mlp.register_forward_hook(around)
    with attach(target, CachebackDrafter()) as attachment:
        target.generate(**prompt(), **GREEDY)
    assert attachment.statistics.calls == 0
    with pytest.raises(TypeError, match="Wrap it"):
        harmless(Slotted())


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
