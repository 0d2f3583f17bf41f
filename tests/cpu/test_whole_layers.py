"""Layers of the common form in one call: plain decoding's texts and states; elsewhere layers run as they are."""

import copy
import functools

import pytest
import torch
from conftest import LLAMA, VOCAB, make_drafter, model_of
from torch import nn
from transformers import DynamicCache
from transformers.models.llama import modeling_llama

from hf_hsdraft import harmless
from hf_hsdraft.core.cache_name import CACHE
from hf_hsdraft.core.stand_ins import standing_in
from hf_hsdraft.cpu import layer_programs, packed_weights, whole_layers
from hf_hsdraft.cpu.packed_weights import PackedLinears
from hf_hsdraft.cpu.private_operators import can_pack
from hf_hsdraft.cpu.small_weights import KERNEL
from hf_hsdraft.engine.local_target import LocalTarget
from hf_hsdraft.runtime.cache_slots import make_room
from hf_hsdraft.runtime.target_runtime import Acceleration

pytestmark = pytest.mark.skipif(KERNEL.operators(wait=True) is None, reason="no compiler, or another processor")
IDS = torch.randint(2, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
GREEDY = {"max_new_tokens": 24, "do_sample": False}
SIZES = {**LLAMA, "hidden_size": 64, "head_dim": 32}
KINDS = {
    "llama": lambda: model_of("llama", **SIZES),
    "biases": lambda: model_of("llama", **SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": lambda: model_of("qwen2", **{**SIZES, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3": lambda: model_of("qwen3", **SIZES),
    "gemma3": lambda: model_of("gemma3_text", **SIZES, sliding_window=6, layer_types=["full_attention"] * 3),
}


@pytest.fixture(autouse=True)
def runs(monkeypatch):
    """Numbers of layers of each call of the operator. No programs are compiled."""
    found, decode = [], whole_layers.Chain._decoded

    def decoded(self, *args):
        made = decode(self, *args)
        if made:
            found.append(len(args[3]))  # of the cache
        return made

    monkeypatch.setattr(whole_layers.Chain, "_decoded", decoded)
    monkeypatch.setattr(whole_layers, "_tried", {})
    monkeypatch.setattr(layer_programs.Entry, "after_forward", lambda *_: False)
    return found


def asking(target):
    drafter = make_drafter(target)
    drafter.generation_config.compiled_layers = drafter.generation_config.packed_weights = True
    return drafter


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 3])
def test_texts_and_states_are_plain_decodings(runs, kind, rows):
    target = KINDS[kind]()
    call = {**GREEDY, "return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    plain = target.generate(IDS[:rows], **call)
    drafted = target.generate(IDS[:rows], assistant_model=asking(target), **call)
    assert drafted.statistics.compiled_layers and 3 in runs
    assert torch.equal(drafted.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(drafted.logits), torch.stack(plain.logits), atol=1e-3, rtol=1e-3)
    for before, after in zip(plain.hidden_states[1:], drafted.hidden_states[1:], strict=True):
        torch.testing.assert_close(after, before, atol=1e-3, rtol=1e-3)


def test_later_calls_begin_with_the_costs_of_whole_layers(runs, monkeypatch):
    """The first round must not be planned by the costs of other forwards."""
    target, kinds, kind = KINDS["llama"](), [], LocalTarget.kind

    def noted(self, session):
        kinds.append(kind(self, session))
        return kinds[-1]

    monkeypatch.setattr(LocalTarget, "kind", noted)
    drafter = asking(target)
    target.generate(IDS[:1], assistant_model=drafter, **GREEDY)
    first, last = len(kinds), kinds[-1]
    target.generate(IDS[:1], assistant_model=drafter, **GREEDY)
    assert first > 1 and kinds[first:] == [last] and runs


def test_each_weight_is_packed_once(runs, monkeypatch):
    target, packed, copy_of = KINDS["llama"](), [], packed_weights._copy_of
    monkeypatch.setattr(packed_weights, "_copy_of", lambda weights: packed.extend(map(id, weights)) or copy_of(weights))
    target.generate(IDS[:1], assistant_model=asking(target), **GREEDY)
    own = {id(module.weight) for module in target.modules() if isinstance(module, nn.Linear)}  # not the drafter's
    assert sorted(each for each in packed if each in own) == sorted(own) and runs


@pytest.mark.parametrize("how", ["inference mode", "hook"])
def test_layers_that_cannot_run_together_multiply_by_packed_weights(runs, how, monkeypatch):
    target, products, run = KINDS["llama"](), [], PackedLinears.run

    def counted(self, linear, *args):
        product = run(self, linear, *args)
        products.append((linear, product is not NotImplemented))
        return product

    monkeypatch.setattr(PackedLinears, "run", counted)
    if how == "hook":
        target.model.layers[1].mlp.up_proj.register_forward_hook(harmless(lambda *_: None))
    with torch.inference_mode(how == "inference mode"):
        target.generate(IDS[:1], assistant_model=asking(target), **GREEDY)
    queries = [done for linear, done in products if linear is target.model.layers[0].self_attn.q_proj]
    assert queries and all(queries) and not runs


@pytest.mark.parametrize("part", ["input_layernorm", "mlp.up_proj"])
def test_weights_without_a_version_are_left_to_the_layers(runs, part):
    target = KINDS["llama"]()
    with torch.inference_mode():
        weight = target.model.layers[1].get_submodule(part).weight.clone()
    target.model.layers[1].get_submodule(part).weight = nn.Parameter(weight, requires_grad=False)
    drafted = target.generate(IDS[:1], assistant_model=asking(target), **GREEDY)
    assert torch.equal(drafted, target.generate(IDS[:1], **GREEDY)) and not runs


def reading(target, count: int = 5, rows: int = 1):
    """The logits of a tree's forward, as it is and accelerated until all layers run at once.

    Both may be given what changes a cache that has had room for the tree.
    """
    ids, positions = IDS[:rows, :count], torch.arange(9, 9 + count).repeat(rows, 1)
    mask = torch.ones(rows, 1, count, 9 + count, dtype=torch.bool).tril(9)

    with torch.no_grad():
        prompt = target(IDS[:rows], use_cache=True)[CACHE]
    states = [(layer.keys, layer.values) for layer in prompt.layers]

    def read(acceleration, change=None):
        cache = DynamicCache(config=target.config)
        with torch.no_grad():
            for layer, state in zip(cache.layers, states, strict=True):
                layer.update(*map(torch.clone, state))
            make_room(cache)
            if change is not None:
                for layer in cache.layers:
                    layer.make_rooms(count)
                change(cache)
            given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, CACHE: cache}
            logits = acceleration.forward(given, comes_again=False).logits
        assert {layer.keys.shape[2] for layer in cache.layers} == {9 + count}
        return logits

    acceleration, plain = Acceleration(target), Acceleration(target)
    acceleration.begin(True, 100, True)
    for _ in range(3):
        read(acceleration)
        acceleration.after_round()
    return functools.partial(read, plain), functools.partial(read, acceleration)


def move_values(cache):
    for layer in cache.layers:
        layer.values = (2.0 * layer.values).transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.reorder_cache(torch.tensor([2, 0, 1])),
        lambda cache: setattr(cache.layers[1], "keys", 1.0 + cache.layers[1].keys),
        lambda cache: setattr(cache.layers[2], "keys", cache.layers[2].rooms[0].fill_(0.5)[:, :, 1:10]),
        lambda cache: setattr(cache.layers[0], "values", cache.layers[1].values),
        move_values,
    ],
    ids=["rows", "keys", "place", "another layer's", "strides"],
)
def test_replaced_keys_and_values_are_read(runs, change):
    plain, accelerated = reading(KINDS["llama"](), rows=3)
    runs.clear()
    torch.testing.assert_close(accelerated(change), plain(change), atol=1e-3, rtol=1e-3)
    assert runs == [3] and not torch.allclose(accelerated(), accelerated(change), atol=1e-3)


def test_keys_without_values_are_an_error_as_in_plain_decoding(runs):
    """As an interrupted forward of the user's may have left them."""

    def shorten(cache):
        for layer in cache.layers:
            layer.values = layer.values[:, :, :8]

    for read in reading(KINDS["llama"]()):
        runs.clear()
        with pytest.raises(RuntimeError, match="must match"):
            read(shorten)
    assert not runs


@pytest.mark.parametrize("dtype", [each for each in (torch.float32, torch.bfloat16) if can_pack(each)])
def test_all_layers_are_one_call(runs, dtype):
    plain, accelerated = reading(KINDS["llama"]().to(dtype))
    runs.clear()
    found, expected = accelerated(), plain()
    assert runs == [3]
    assert (found - expected).norm() <= (1e-5 if dtype == torch.float32 else 0.03) * expected.norm()


def louder(module, args, output):
    return output * 1.5


def louder_last(module, args, output):
    output.last_hidden_state = output.last_hidden_state * 1.5
    return output


def other_layer(layer):
    other = copy.deepcopy(layer)
    other.mlp.up_proj.weight.data.mul_(2.0)
    return other


@pytest.mark.parametrize(
    "change",
    [
        lambda target: target.model.layers[1].register_forward_hook(louder),
        lambda target: target.model.layers[1].mlp.register_forward_hook(louder),
        lambda target: target.model.layers[2].mlp.register_forward_pre_hook(lambda module, args: (args[0] * 2.0,)),
        lambda target: target.model.norm.register_forward_hook(louder),
        lambda target: target.model.register_forward_hook(louder_last),
        lambda target: target.model.layers[1].input_layernorm.weight.data.mul_(2.0),
        lambda target: target.model.norm.weight.data.mul_(2.0),
        lambda target: setattr(target.model.layers[2].input_layernorm.weight, "data", torch.arange(128.0)[::2]),
        lambda target: target.model.layers[2].mlp.up_proj.weight.detach().mul_(2.0),
        lambda target: target.model.layers.__setitem__(1, other_layer(target.model.layers[1])),
        lambda target: setattr(target.model, "norm", nn.Identity()),
    ],
    ids=[
        "hook", "inner hook", "pre-hook", "hook of the norm", "hook of the model", "norm", "last norm", "strides",
        "written", "layer", "another norm",
    ],
)  # fmt: skip
def test_hooks_and_writes_within_a_call_count_at_once(change):
    target = KINDS["llama"]()
    plain, accelerated = reading(target)
    before = accelerated()
    change(target)
    found, expected = accelerated(), plain()
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    assert not torch.allclose(found, before, atol=1e-2)


@pytest.mark.parametrize(
    "change",
    [
        lambda target: setattr(target.model.layers[1].self_attn, "scaling", 0.7),
        lambda target: setattr(target.model.layers[1], "mlp", nn.Identity()),
        lambda target: setattr(target.model.layers[2].mlp.up_proj, "weight", nn.Parameter(torch.ones(64, 64))),
    ],
    ids=["scaling", "part", "replaced"],
)
def test_what_is_replaced_counts_from_the_next_call_on(change):
    target = KINDS["llama"]()
    drafted = {"assistant_model": asking(target)}
    before = target.generate(IDS[:1], **drafted, **GREEDY)
    change(target)
    found, expected = target.generate(IDS[:1], **drafted, **GREEDY), target.generate(IDS[:1], **GREEDY)
    assert torch.equal(found, expected) and not torch.equal(found, before)


@pytest.mark.parametrize("part", ["", "mlp.up_proj"], ids=["layer", "product"])
def test_calls_of_other_threads_are_no_change(runs, part):
    target = KINDS["llama"]()
    with standing_in({target.model.layers[0].get_submodule(part): None}):  # as while another thread's call runs
        _, accelerated = reading(target)
    runs.clear()
    accelerated()
    assert runs == [3]


def test_layers_that_are_not_called_leave_no_keys(runs):
    target, caches = KINDS["llama"](), []
    _, accelerated = reading(target)
    runs.clear()

    def stop(module, args, kwargs, output):
        caches.append(kwargs[CACHE])
        raise KeyboardInterrupt

    target.model.layers[1].register_forward_hook(stop, with_kwargs=True)
    with pytest.raises(KeyboardInterrupt):
        accelerated()
    assert [layer.keys.shape[2] for layer in caches[0].layers] == [14, 14, 9] and runs == [3]


def test_states_that_are_changed_between_layers_are_read(runs):
    target = KINDS["llama"]()
    target.model.layers[0].register_forward_hook(lambda module, args, output: output.add_(1.0))
    plain, accelerated = reading(target)
    torch.testing.assert_close(accelerated(), plain(), atol=1e-3, rtol=1e-3)
    assert 3 in runs


def test_code_of_others_is_not_taken_for_the_common_form(monkeypatch):
    layer = KINDS["llama"]().model.layers[0]
    assert whole_layers._is_common(layer)
    original = modeling_llama.LlamaAttention.forward
    monkeypatch.setattr(
        modeling_llama.LlamaAttention, "forward", lambda self, *args, **kwargs: original(self, *args, **kwargs)
    )
    assert not whole_layers._is_common(layer)
    monkeypatch.undo()
    monkeypatch.setattr(modeling_llama, "rotate_half", lambda x: x)
    assert not whole_layers._is_common(layer)


def test_an_operator_that_computes_something_else_is_not_used(runs, monkeypatch):
    decode = whole_layers.Chain._decoded
    monkeypatch.setattr(
        whole_layers.Chain, "_decoded", lambda self, *args: [1.01 * each for each in decode(self, *args)]
    )
    plain, accelerated = reading(KINDS["llama"]())
    torch.testing.assert_close(accelerated(), plain(), atol=1e-3, rtol=1e-3)
    assert set(runs) == {1}
