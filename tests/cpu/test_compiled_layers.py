"""Layers that run as programs: the same texts and states, where they fit, and the layer itself where they do not."""

import copy
import getpass
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import LLAMA, VOCAB, make_drafter, make_target, model_of
from torch import nn
from transformers import DynamicCache
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_hsdraft import CachebackDrafter, harmless
from hf_hsdraft.core.cache_folder import is_own, is_private, private_folder
from hf_hsdraft.core.cache_name import CACHE
from hf_hsdraft.cpu import background, compiled_layers, layer_programs
from hf_hsdraft.cpu.layer_compiler import traced
from hf_hsdraft.cpu.layer_form import CannotCompile, description_of, form_of
from hf_hsdraft.cpu.layer_operators import running
from hf_hsdraft.cpu.whole_layers import Watch

IDS = torch.randint(2, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
GREEDY = {"max_new_tokens": 12, "do_sample": False}
_tracing = threading.Lock()


_graphs = {}  # what was traced, by the key of all layers that share it


class TracedProgram:
    """A program as it is handed to the compiler, interpreted."""

    runs = 0

    def __init__(self, layer, form, key) -> None:
        with torch.no_grad(), _tracing:  # a process has one tracer
            if key not in _graphs:
                _graphs[key] = traced(layer_programs._without_weights(layer), form)
        self._graph, _, self.needs = _graphs[key]

    def __call__(self, inputs, step):
        running.step = step
        TracedProgram.runs += 1
        outputs = self._graph(*inputs)
        return tuple(outputs) if self.needs.returns_tuple else outputs[0]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Programs are interpreted: as soon as a layer has run once, and without a compiler."""

    def after_forward(self, layer, form, at_once):
        try:
            self.program = TracedProgram(layer, form, self.key)
        except Exception as error:
            self.why_not = repr(error)
        return self.program is not None

    TracedProgram.runs = 0
    monkeypatch.setattr(layer_programs, "_entries", {})
    monkeypatch.setattr(layer_programs.Entry, "after_forward", after_forward)


def compiling(target, drafter=None):
    drafter = drafter or make_drafter(target)
    drafter.generation_config.compiled_layers = True
    return drafter


def assert_plain(target, drafter=None, plain=None):
    """A text is that of plain decoding, or of another target."""
    expected = (plain or target).generate(IDS[:1], **GREEDY)
    drafted = target.generate(IDS[:1], assistant_model=drafter or compiling(target), **GREEDY)
    assert torch.equal(drafted, expected)


def reasons() -> list[str]:
    """Why layers have no program."""
    return [entry.why_not for entry in layer_programs._entries.values()]


TARGETS = {
    "llama": make_target,
    "biases": lambda: make_target(attention_bias=True, mlp_bias=True),
    "qwen2": lambda: model_of("qwen2", **LLAMA),
    "qwen3": lambda: model_of("qwen3", **LLAMA, head_dim=8),
    "gemma3": lambda: model_of("gemma3_text", **LLAMA, head_dim=8, sliding_window=6),
}


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("llama", 1), ("llama", 3), ("biases", 3), ("qwen2", 1), ("qwen3", 3), ("gemma3", 1), ("gemma3", 3)],
)
def test_texts_and_states_are_plain_decodings(kind, rows):
    target = TARGETS[kind]()
    call = {**GREEDY, "max_new_tokens": 24, "return_dict_in_generate": True, "output_logits": True}
    plain = target.generate(IDS[:rows], **call)
    drafted = target.generate(IDS[:rows], assistant_model=compiling(target), **call)
    assert drafted.statistics.compiled_layers and TracedProgram.runs >= 6, reasons()
    assert torch.equal(drafted.sequences, plain.sequences)
    torch.testing.assert_close(torch.stack(drafted.logits), torch.stack(plain.logits), atol=1e-3, rtol=1e-3)


def test_hidden_states_are_returned():
    target = make_target()
    call = {**GREEDY, "return_dict_in_generate": True, "output_hidden_states": True}
    plain = target.generate(IDS[:1], **call)
    drafted = target.generate(IDS[:1], assistant_model=compiling(target), **call)
    assert TracedProgram.runs
    for before, after in zip(plain.hidden_states, drafted.hidden_states, strict=True):
        for expected, found in zip(before, after, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_all_layers_of_a_kind_share_a_program():
    target = TARGETS["gemma3"]()
    target.generate(IDS[:1], assistant_model=compiling(target), max_new_tokens=12)
    programs = [entry.program for entry in layer_programs._entries.values() if entry.program is not None]
    kinds = {description_of(layer, {}) for layer in target.model.layers}
    assert len(programs) == len(kinds) < target.config.num_hidden_layers


def test_products_of_one_input_are_joined():
    target = make_target()
    target.generate(IDS[:1], assistant_model=compiling(target), max_new_tokens=12)
    program = next(entry.program for entry in layer_programs._entries.values())
    assert [len(names) for names in program.needs.products] == [3, 1, 2, 1]


def test_layers_that_choose_what_they_run_run_as_they_are():
    assert_plain(model_of("mixtral", **LLAMA, num_local_experts=4))
    assert not TracedProgram.runs or not any(reasons())


class ByIndex(nn.Module):
    def __init__(self, layer) -> None:
        super().__init__()
        self.layer, self.layer_idx = layer, 0

    @harmless
    def forward(self, hidden_states, **kwargs):
        return self.layer(hidden_states, **kwargs) * (2.0 if self.layer_idx == 0 else 1.0)


def test_a_layer_that_reads_its_index_has_no_program():
    target = make_target()
    target.model.layers[2] = ByIndex(target.model.layers[2])
    # The drafter reads no hidden states, which hooks inside of the layer would capture.
    assert_plain(target, compiling(target, CachebackDrafter()))
    assert TracedProgram.runs and any("reads its index" in each for each in reasons()), reasons()


@pytest.mark.parametrize("where", ["layer", "part"])
def test_hooks_see_and_change_what_they_would(where):
    target = make_target()
    layer = target.model.layers[1]
    part = layer if where == "layer" else layer.mlp
    part.register_forward_hook(lambda module, args, output: output * 1.5)
    assert_plain(target)
    assert not TracedProgram.runs, "it may count forwards: nothing is drafted"


def test_a_changed_attribute_is_another_layer_and_a_replaced_forward_none():
    layer = make_target().model.layers[0]
    before = description_of(layer, {})
    layer.self_attn.scaling *= 2.0
    assert description_of(layer, {}) != before
    layer.mlp.forward = lambda x: x
    with pytest.raises(CannotCompile, match="forward"):
        description_of(layer, {})


def closed(scale):
    return lambda x: x * scale


def by_default(scale):
    return lambda x, scale=scale: x * scale


SCALE = 1.0


def reading(scale):
    return types.FunctionType((lambda x: x * SCALE).__code__, {"SCALE": scale})


def computing(scale):
    return (lambda x: x * 2.0) if scale == 2.0 else (lambda x: x + 2.0)


@pytest.mark.parametrize("made", [closed, by_default, reading, computing])
def test_a_layer_changes_with_what_its_functions_are_and_read(monkeypatch, made):
    layer, described = make_target().model.layers[0], []
    for scale in (1.0, 2.0, 2.0):
        function = made(scale)
        function.__module__, function.__qualname__ = modeling_llama.__name__, "rotate_half"
        monkeypatch.setattr(modeling_llama, "rotate_half", function)
        described.append(description_of(layer, {}))
    assert described[0] != described[1] == described[2]
    monkeypatch.setattr(modeling_llama, "rotate_half", made(object()))
    if made is not computing:
        with pytest.raises(CannotCompile, match="it reads a object"):
            description_of(layer, {})


def test_a_program_that_computes_something_else_is_dropped(monkeypatch):
    right = TracedProgram.__call__
    monkeypatch.setattr(TracedProgram, "__call__", lambda self, *args: right(self, *args) * 1.01)
    assert_plain(make_target())
    assert all("something else" in each for each in reasons())


def test_weights_that_are_written_to_count_at_once():
    target, other = make_target(), make_target(seed=5)
    drafter = compiling(target)
    target.generate(IDS[:1], assistant_model=drafter, max_new_tokens=12)
    target.load_state_dict(other.state_dict())
    assert_plain(target, drafter, other)


def test_nothing_stays_on_the_target():
    target = make_target()
    target.generate(IDS[:1], assistant_model=compiling(target), max_new_tokens=12)
    assert not [name for name, part in target.named_modules() if {"forward", "_compiled_call_impl"} & set(vars(part))]
    assert TracedProgram.runs
    copy.deepcopy(target)


def test_threads_run_their_own_layers():
    targets = [make_target(seed=seed) for seed in (0, 7)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(assert_plain, targets))


def test_small_layers_are_compiled_only_if_asked_for():
    layers = list(make_target().model.layers)
    assert compiled_layers.CompiledLayers(layers, True)._layers
    assert not compiled_layers.CompiledLayers(layers, None)._layers
    assert not compiled_layers.CompiledLayers(layers, False)._layers


def test_what_replaces_attention_or_code_between_calls_counts(monkeypatch):
    target = make_target()
    drafter = compiling(target)
    assert_plain(target, drafter)

    def louder(original):
        def forward(self, *args, **kwargs):
            output, weights = original(self, *args, **kwargs)
            return output * (1.5 if self.layer_idx == 1 else 1.0), weights

        return forward

    monkeypatch.setattr(LlamaAttention, "forward", louder(LlamaAttention.forward))
    assert_plain(target, drafter)


@pytest.mark.parametrize("what", ["scaling", "mlp"])
def test_what_is_changed_in_a_call_runs_as_it_is(what):
    layers = list(make_target().model.layers)
    watch = Watch(layers, weights=False)
    assert not watch.sees()
    if what == "scaling":
        layers[1].self_attn.scaling = 0.6
    else:
        layers[1].mlp = nn.Identity()
    assert watch.sees()


def test_a_graph_for_some_numbers_of_tokens_is_refused():
    class Counting(nn.Module):
        def __init__(self, layer) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, hidden_states, **kwargs):
            return self.layer(hidden_states, **kwargs) * (2.0 if hidden_states.shape[1] > 16 else 1.0)

    layer, hidden_states = make_target().model.layers[0], torch.zeros(1, 9, 32)
    places, mask = torch.arange(9)[None], torch.ones(1, 1, 9, 9, dtype=torch.bool)
    ropes = make_target().model.rotary_emb(hidden_states, places)
    cache = DynamicCache()
    found = form_of(hidden_states, {"attention_mask": mask, "position_embeddings": ropes, CACHE: cache})
    assert found is not None
    with torch.no_grad():
        traced(layer_programs._without_weights(layer), found[0])
        with pytest.raises(CannotCompile, match="number of texts or tokens"):
            traced(layer_programs._without_weights(Counting(layer)), found[0])
    across = hidden_states.transpose(1, 2).contiguous().transpose(1, 2)
    assert form_of(across, {"attention_mask": mask, CACHE: cache}) is None, "a program has one layout"


def test_only_the_users_own_programs_are_loaded(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    layer, package = make_target().model.layers[0], private_folder("layers") / "key.pt2"
    package.write_text("no program")
    entry = layer_programs.Entry("key")
    assert not entry.after_forward(layer, (), False) and "cannot be loaded" in entry.why_not
    package.chmod(0o666)
    entry = layer_programs.Entry("key")
    assert not entry.after_forward(layer, (), False) and not entry.why_not, "it will be compiled"
    package.parent.chmod(0o777)
    assert not layer_programs.Entry("key").after_forward(layer, (), False)
    package.parent.chmod(0o700)
    package.chmod(0o600)
    monkeypatch.setenv("TMPDIR", str(tmp_path / "open"))
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    entry = layer_programs.Entry("key")
    assert not entry.after_forward(layer, (), False) and "TMPDIR" in entry.why_not, "it is unpacked there"


def test_compilers_keep_what_they_include_in_a_private_folder(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "of-others"))
    given, start = [], background.subprocess.Popen

    def nothing(command, env, **kwargs):
        given.append(env)
        return start(["true"], **kwargs)

    monkeypatch.setattr(background.subprocess, "Popen", nothing)
    layer_programs._compiler(make_target().model.layers[0], (), tmp_path / "key.pt2", True)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TMPDIR"):
        assert Path(given[0][name]).is_relative_to(tmp_path / "cache") and is_private(given[0][name])


@pytest.mark.slow
def test_a_compiled_program_runs_and_is_found_again(monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # What another user may have left where PyTorch looks by default.
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    planted = tmp_path / "temporary" / f"torchinductor_{getpass.getuser()}"
    planted.mkdir(parents=True)
    planted.chmod(0o777)
    monkeypatch.setattr(layer_programs, "_entries", {})
    target = make_target()
    call = {"max_new_tokens": 30, "do_sample": False, "return_dict_in_generate": True}
    for rows in (1, 3):
        expected = target.generate(IDS[:rows], **call).sequences
        for _ in range(2):
            drafted = target.generate(IDS[:rows], assistant_model=compiling(target), **call)
            assert torch.equal(drafted.sequences, expected) and drafted.statistics.compiled_layers
    package = next((tmp_path / "hf_hsdraft" / "layers").glob("*.pt2"))
    made = package.stat().st_mtime_ns
    monkeypatch.setattr(layer_programs, "_entries", {})
    drafted = target.generate(IDS[:1], assistant_model=compiling(target), **call)
    assert drafted.statistics.compiled_layers and package.stat().st_mtime_ns == made
    assert is_own(package) and not list(planted.iterdir())
