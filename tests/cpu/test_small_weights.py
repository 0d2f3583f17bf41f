"""Products by weights as their user quantised them: the layer's own but for rounding, and those of no other target."""

import os
from threading import Event

import pytest
import torch
import torch.nn.functional as F
from conftest import VOCAB, make_drafter, make_target
from torch import nn

from hf_hsdraft.cpu import packed_weights, small_weights
from hf_hsdraft.cpu.gguf_blocks import copy_of_blocks, remember_file
from hf_hsdraft.cpu.kernel import Kernel
from hf_hsdraft.cpu.kernel_files import library_of
from hf_hsdraft.cpu.packed_weights import PackedWeight, PackedWeights, linears_to_pack
from hf_hsdraft.cpu.small_weights import BLOCKS, INT8, KERNEL, SmallCopy, in_blocks, in_int8, joined, small_copy

IDS = torch.randint(2, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def operators():
    found = KERNEL.operators(wait=True)
    if found is None:
        pytest.skip("no AVX-512 with bfloat16 here, or no compiler")
    return found


def made(operators, format: str, outputs: int, inputs: int, dtype=torch.bfloat16) -> tuple[SmallCopy, torch.Tensor]:
    """A copy, and the weight that it stands for, in float64."""
    numbers = torch.randint(-128, 128, (outputs, inputs), dtype=torch.int8)
    if format == "int8":
        scales = torch.rand(outputs)
        return in_int8(operators, numbers, scales), numbers.double() * scales[:, None].double()
    blocks = random_blocks(format, outputs, inputs)
    weight = dequantised(format, blocks)
    copy = in_blocks(operators, format, blocks, weight.to(dtype))
    assert copy is not None
    return copy, weight.double()


def random_blocks(kind: str, outputs: int, inputs: int) -> torch.Tensor:
    """`[outputs, bytes]`: any bytes are weights, as long as their scales, in float16, are finite."""
    gguf = pytest.importorskip("gguf")
    size, of_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = torch.randint(0, 256, (outputs, inputs // size, of_bytes), dtype=torch.uint8)
    halves = 2 if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 1
    scales = torch.rand(outputs, inputs // size, halves).half().view(torch.uint8)
    place = of_bytes - 2 if kind == "Q6_K" else 0
    blocks[..., place : place + 2 * halves] = scales
    return blocks.flatten(1)


def dequantised(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """The weights as the package gguf reads them, float32."""
    gguf = pytest.importorskip("gguf")
    return torch.from_numpy(gguf.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))


FORMATS = ("int8", *BLOCKS)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32])
def test_sums_of_words(operators, dtype):
    """Those by which packed weights notice writes, whether the kernel was there when they were packed or not."""
    words = torch.randint(-(2**62), 2**62, (37, 73), generator=torch.Generator().manual_seed(1))
    first, second = words[:, :36].contiguous(), words[:, 36:].contiguous()
    expected = torch.cat([first.view(37, 4, 9).sum(-1).flatten(), second.sum(-1)])
    rows = [each.view(dtype) for each in (first, second)]
    assert torch.equal(operators.sums(rows), expected)
    assert torch.equal(torch.cat([packed_weights._sums(each).flatten() for each in rows]), expected)
    one = rows[0]
    for wrong in (one[:, ::2], one.t(), one[:, : 4 // one.element_size()].contiguous(), one[:0]):
        with pytest.raises(RuntimeError, match="whole words"):
            operators.sums([one, wrong])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 13, 18, 32, 34, 64, 80, 97, 200])
@pytest.mark.parametrize("by_tiles", [True, False])
@torch.no_grad()
def test_products_are_those_of_the_weight(operators, format, rows, by_tiles):
    for dtype, bound in ((torch.bfloat16, 2.0**-8), (torch.float32, 2e-6)):
        torch.manual_seed(rows)
        copy, weight = made(operators, format, 48, 512, dtype)
        x, bias = torch.randn(rows, 512).to(dtype), torch.randn(48).to(dtype)
        # In blocks, each weight is rounded to the dtype first, as a target's dequantised ones are.
        exact = weight if format == "int8" else weight.float().to(dtype).double()
        for added in (None, bias):
            expected = F.linear(x.double(), exact, None if added is None else added.double())
            found = copy(x, added, by_tiles)
            assert found.dtype == dtype and found.shape == expected.shape
            assert (found.double() - expected).abs().max() <= bound * expected.abs().max()


@pytest.mark.parametrize("format", FORMATS)
@torch.no_grad()
def test_joined_copies_are_side_by_side(operators, format):
    [(one, _), (other, _)] = (made(operators, format, outputs, 256) for outputs in (32, 16))
    x, whole = torch.randn(3, 256).bfloat16(), joined([one, other])
    assert whole is not None and torch.equal(whole(x), torch.cat([one(x), other(x)], dim=-1))
    assert joined([one, made(operators, "Q8_0" if format == "int8" else "int8", 32, 256)[0]]) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", BLOCKS)
@torch.no_grad()
def test_blocks_are_bitwise_their_weights(operators, kind, dtype):
    blocks = random_blocks(kind, 32, 512)
    weight = dequantised(kind, blocks).to(dtype)
    copy = in_blocks(operators, kind, blocks, weight)
    assert copy is not None
    for by_tiles in (True, False):
        columns = [copy(part, None, by_tiles) for part in torch.eye(512, dtype=dtype).split(32)]
        assert torch.equal(torch.cat(columns).t(), weight)
    weight[17, 300] = weight[17, 300] * 1.5 + 1.0
    assert in_blocks(operators, kind, blocks, weight) is None, "another weight"


@torch.no_grad()
def quantised(target, layers: str = "mlp"):
    """Gives some layers int8 weights as torchao's are: a scale for each output."""
    for name, module in target.named_modules():
        if isinstance(module, nn.Linear) and layers in name:
            scales = module.weight.abs().amax(dim=1, keepdim=True).float() / 127
            numbers = (module.weight.float() / scales).round().to(torch.int8)
            module.weight = nn.Parameter((numbers.float() * scales).to(target.dtype), requires_grad=False)
            module.weight.qdata, module.weight.scale = numbers, scales
    return target


@torch.no_grad()
def test_a_quantised_layer_multiplies_by_its_8_bits(operators, monkeypatch):
    target = quantised(make_target())
    linear, x = target.model.layers[0].mlp.gate_proj, torch.randn(1, 9, 32)
    packed, plain = PackedWeight(linear.weight, shared=True), linear(x)
    torch.testing.assert_close(packed(x), plain)
    assert isinstance(packed._copy, SmallCopy) and packed.holds(linear.weight)
    linear.weight.qdata[3, 4] += 1
    assert not packed.holds(linear.weight)
    many = torch.randn(1, 200, 32)
    torch.testing.assert_close(packed(many), linear(many))
    monkeypatch.setattr(packed_weights, "small_rows", lambda dtype: 96)  # as beside AMX
    assert torch.equal(packed(many), linear(many)), "more rows are the layer's own product"


@torch.no_grad()
def test_a_layer_whose_product_is_another_stays_as_it_is(operators):
    linear = quantised(make_target()).model.layers[0].mlp.gate_proj
    linear.weight.scale = linear.weight.scale * 1.01
    assert small_copy(linear.weight) is None
    x = torch.randn(1, 9, 32)
    assert torch.equal(PackedWeight(linear.weight)(x), linear(x))


@pytest.mark.parametrize("name", ["zero_point", "act_quant_kwargs", "act_pre_scale"])
def test_layers_that_do_more_are_left_alone(operators, name):
    linear = quantised(make_target()).model.layers[0].mlp.gate_proj
    setattr(linear.weight, name, object())
    assert small_copy(linear.weight) is None


def test_only_what_was_quantised_becomes_small(operators):
    target = quantised(make_target(), "mlp")
    assert small_copy(target.model.layers[0].self_attn.q_proj.weight) is None
    assert copy_of_blocks(target.model.layers[0].self_attn.q_proj.weight) is None


@pytest.mark.parametrize("do_sample", [False, True])
def test_the_text_is_plain_decodings(operators, do_sample):
    target = quantised(make_target())
    drafter = make_drafter(target)
    drafter.generation_config.packed_weights = True
    call = {"max_new_tokens": 40, "do_sample": do_sample}
    texts = []
    for assistant in ({}, {"assistant_model": drafter}):
        torch.manual_seed(0)
        texts.append(target.generate(IDS, **call, **assistant).tolist())
    assert texts[0] == texts[1]


@torch.no_grad()
def test_without_the_kernel_quantised_layers_run_themselves(monkeypatch):
    monkeypatch.setattr(small_weights.KERNEL, "operators", lambda wait=False: None)
    target = quantised(make_target())
    target.requires_grad_(False)
    linear = target.model.layers[0].mlp.gate_proj
    assert linear not in linears_to_pack(target, True)
    assert small_copy(linear.weight) is None


def test_what_a_compiler_refuses_is_done_without(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "wrong.cpp"
    source.write_text("no C++", encoding="utf-8")
    assert Kernel(source, "wrong products", lambda found: True).operators(wait=True) is None


@pytest.mark.parametrize("harm", ["mode", "link", "owner"])
def test_operators_that_others_may_have_written_are_compiled_again(tmp_path, monkeypatch, harm):
    if harm == "owner" and os.getuid() != 0:
        pytest.skip("makes a file of another user")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source, compiled, loaded = tmp_path / "planted.cpp", [], []
    source.write_text("", encoding="utf-8")
    monkeypatch.setattr(Kernel, "_compile", lambda self, at_once: compiled.append(self))
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    kernel = Kernel(source, "planted products", lambda found: True)
    kernel._may_run = True
    if harm == "link":
        (tmp_path / "elsewhere.so").write_text("")
        kernel._file.symlink_to(tmp_path / "elsewhere.so")
    else:
        kernel._file.write_text("")
        kernel._file.chmod(0o666 if harm == "mode" else 0o600)
    if harm == "owner":
        os.chown(kernel._file, 12345, 12345)
    assert kernel.operators(wait=True) is None and compiled and not loaded


def test_operators_that_came_with_the_package_are_not_compiled(tmp_path, monkeypatch):
    source, loaded = tmp_path / "made.cpp", []
    source.write_text("", encoding="utf-8")
    monkeypatch.setenv("PATH", "")  # no compiler
    monkeypatch.setattr(torch.ops, "load_library", loaded.append)
    kernel = Kernel(source, "made products", lambda found: True)
    if not kernel._flags:
        pytest.skip("no kernel for this processor")
    assert not kernel.may_come
    del kernel._may_run, kernel._file
    made = tmp_path / f"{library_of(source, kernel._flags)}.so"
    made.write_text("", encoding="utf-8")
    assert kernel.may_come
    kernel.operators()
    assert loaded == [str(made)], "and no call runs without what only has to be loaded"


def test_tensors_of_another_dtype_are_refused(operators):
    blocks = torch.zeros(1, 1, 512, dtype=torch.uint8)
    for wrong in ({"scales": torch.ones(16).half()}, {"blocks": blocks.to(torch.int8)}):
        given = {"x": torch.ones(1, 32), "blocks": blocks, "scales": torch.ones(16), "bias": None, **wrong}
        with pytest.raises(RuntimeError, match="dtype"):
            KERNEL.operators().product(**given, outputs=16, format=INT8, by_tiles=False)


def test_a_copy_of_bfloat16_in_words_takes_no_float32(operators):
    copy, _ = made(operators, "Q4_1", 16, 32)
    if copy.format == made(operators, "Q4_1", 16, 32, torch.float32)[0].format:
        pytest.skip("copies have one layout here")
    with pytest.raises(RuntimeError, match="expected bfloat16"):
        copy(torch.ones(1, 32))


def test_a_torch_without_the_stable_interface_has_no_operators(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1")
    kernel = Kernel(KERNEL._source, "products", lambda found: True)
    assert not kernel.may_come and kernel.operators(wait=True) is None


def test_calls_do_not_wait_for_a_compiler(tmp_path, monkeypatch):
    compiling, source = Event(), tmp_path / "slow.cpp"
    source.write_text("", encoding="utf-8")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(Kernel, "_compile", lambda self, at_once: not compiling.wait(30))
    kernel = Kernel(source, "slow products", lambda found: True)
    assert kernel.operators() is None
    compiling.set()
    assert kernel.operators(wait=True) is None, "nothing was made"


def gguf_target(folder, dtype=torch.bfloat16, **types):
    """A target whose weights were dequantised from a GGUF file, two layers of it with rows in another order."""
    gguf = pytest.importorskip("gguf")
    target = make_target(num_hidden_layers=1).to(dtype)
    path, writer = folder / "tiny.gguf", gguf.GGUFWriter(str(folder / "tiny.gguf"), "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    for name, weight in target.named_parameters():
        kind = next((kind for part, kind in types.items() if part in name), None)
        if kind is None:
            continue
        kind = gguf.GGMLQuantizationType[kind]
        raw = gguf.quantize(weight.detach().float().numpy(), kind)
        values = torch.from_numpy(gguf.dequantize(raw, kind)).to(dtype)
        order = torch.randperm(len(values)) if "self_attn" in name else torch.arange(len(values))
        weight.data = values[order]
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), raw, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    remember_file(target, path)
    return target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_the_blocks_of_a_gguf_file_are_the_targets_weights(operators, tmp_path, dtype):
    if dtype == torch.bfloat16 and not operators.is_quick():
        pytest.skip("packed copies are quicker here")
    target = gguf_target(tmp_path, dtype, q_proj="Q4_1", k_proj="Q5_0", gate_proj="Q4_0", up_proj="Q8_0")
    layer = target.model.layers[0]
    for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.mlp.gate_proj, layer.mlp.up_proj):
        copy = copy_of_blocks(linear.weight)
        assert copy is not None
        same = copy(torch.eye(32, dtype=dtype)).t()
        assert torch.equal(same, linear.weight)
    assert copy_of_blocks(layer.mlp.down_proj.weight) is None, "not in the file"
    layer.mlp.gate_proj.weight[2, 3] += 1
    assert copy_of_blocks(layer.mlp.gate_proj.weight) is None, "changed since"
    (cut := tmp_path / "tiny.gguf").write_bytes(cut.read_bytes()[:-2048])
    assert copy_of_blocks(layer.mlp.up_proj.weight) is None, "another file by now"
    with PackedWeights(linears_to_pack(target, True)).in_use():
        found = target(IDS).logits
    torch.testing.assert_close(found, target(IDS).logits, atol=0.1, rtol=0.1)
