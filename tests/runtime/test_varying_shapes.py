"""Attention kernels in drafted calls and training on GPUs; a CPU stands for one here."""

import threading

import pytest
import torch
from conftest import make_drafter, make_target
from torch.nn.attention import SDPBackend, sdpa_kernel

from hf_hsdraft.batching.generate_many import generate_many
from hf_hsdraft.gpu import varying_shapes as module
from hf_hsdraft.gpu.varying_shapes import varying_shapes
from hf_hsdraft.training.data.conversations import TokenizedConversation
from hf_hsdraft.training.data.features import read_features
from hf_hsdraft.training.loop.arguments import DrafterTrainingArguments
from hf_hsdraft.training.loop.trainer import DrafterTrainer


@pytest.fixture
def as_gpu(monkeypatch):
    monkeypatch.setattr(module, "_AFFECTED", ("cpu", "cuda"))
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)


def test_cudnn_is_left_out_until_the_last_call_ends(as_gpu):
    enabled, entered, ends = torch.backends.cuda.cudnn_sdp_enabled, threading.Event(), threading.Event()
    device, seen = torch.device("cpu"), []

    def other():
        with varying_shapes(device):
            entered.set()
            ends.wait(10)
            seen.append(enabled())

    thread = threading.Thread(target=other)
    with pytest.raises(KeyError), varying_shapes(device):
        thread.start()
        assert entered.wait(10) and not enabled()
        raise KeyError
    assert not enabled()
    ends.set()
    thread.join(10)
    assert seen == [False] and enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)  # as its user left it
    with varying_shapes(device):
        pass
    assert not enabled()


def test_cudnn_stays_where_nothing_else_is_enabled(as_gpu):
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), varying_shapes(torch.device("cpu")):
        assert torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_drafted_calls_and_features_leave_cudnn_out_and_plain_calls_do_not(as_gpu):
    target, seen = make_target(), []
    drafter = make_drafter(target)
    target.model.layers[0].register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    ids = torch.arange(1, 9)[None]

    def left_out(call, prompts=0):  # the prompt is read before it is known whether the cache is static
        seen.clear()
        call()
        return len(seen) > prompts and not any(seen[prompts:])

    calls = {"max_new_tokens": 12, "do_sample": False}
    assert not left_out(lambda: target.generate(ids, **calls))
    assert left_out(lambda: target.generate(ids, assistant_model=drafter, **calls), prompts=1)
    static = {**calls, "cache_implementation": "static", "disable_compile": True}
    assert not left_out(lambda: target.generate(ids, assistant_model=drafter, **static), prompts=1)
    assert left_out(lambda: list(generate_many(target, [{"input_ids": ids, **calls}] * 2, assistant_model=drafter)))
    chat = TokenizedConversation(ids[0], ids[0] > 3)
    assert left_out(lambda: read_features(target, [1], [chat]))
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_training_leaves_cudnn_out(as_gpu, tmp_path):
    target, seen = make_target(), []
    drafter = make_drafter(target)
    drafter.layers[0].register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
    args = DrafterTrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, max_steps=1, eval_strategy="no", load_best_model_at_end=False,
        save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    chats = [TokenizedConversation(torch.arange(2, 14), torch.ones(12, dtype=torch.bool))] * 2
    trainer = DrafterTrainer(drafter, args, target=target, train_dataset=chats, eval_dataset=chats)
    trainer.train()
    trained = len(seen)
    trainer.evaluate()
    assert 0 < trained < len(seen) and not any(seen)
