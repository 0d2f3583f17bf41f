"""Drafted calls work wherever plain ones do: in forks beside threads, without a home, where no thread may start."""

import functools
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from conftest import make_drafter, make_target

CALL = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
NO_HOME = """
import os, pwd
for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME"):
    os.environ.pop(name, None)
def unknown(*_):
    raise KeyError("getpwuid(): uid not found")
pwd.getpwuid = pwd.getpwnam = unknown
COMPILED = False  # which takes long; below is where it would be done
"""
NO_THREADS = """
import threading
def refused(self):
    raise RuntimeError("can't start new thread")
threading.Thread.start = refused
COMPILED = True
"""
DECODE = """
import os, torch
from conftest import make_drafter, make_target
from hf_hsdraft import CachebackDrafter
from hf_hsdraft.core.cache_folder import compiler_places
target, ids = make_target(), torch.tensor([[5, 6, 7, 8]])
call = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
plain = target.generate(ids, **call).tolist()
for drafter in (CachebackDrafter(), make_drafter(target)):
    options = drafter.generation_config
    options.history, options.packed_weights, options.compiled_layers = "memory", True, COMPILED
    assert target.generate(ids, **call, assistant_model=drafter).tolist() == plain
assert target.generate(ids, **call, assistant_model="ngrams").tolist() == plain
assert os.path.isdir(compiler_places()["TORCHINDUCTOR_CACHE_DIR"])
print("DECODED")
"""


@pytest.mark.process
@pytest.mark.parametrize(
    "poor",
    [NO_HOME, pytest.param(NO_HOME + "COMPILED = True\n", marks=pytest.mark.slow), NO_THREADS],
    ids=["no home", "no home, compiled", "no threads"],
)
def test_a_poor_process_drafts(poor):
    package = Path(__file__).parents[2]
    paths = os.pathsep.join([str(package), str(package / "tests"), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "TMPDIR": os.environ.get("TMPDIR", "/tmp")}
    command = [sys.executable, "-c", poor + DECODE]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert "DECODED" in found.stdout, found.stderr[-3000:]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_forks_beside_threads_that_decode_do_not_hang():
    """A child that waits for a lock, which a thread of its parent held, is ended by its alarm."""
    target, ids, threads = make_target(), torch.tensor([[5, 6, 7, 8]]), torch.get_num_threads()
    drafters = [make_drafter(target) for _ in range(3)]
    torch.set_num_threads(1)  # OpenMP's own threads do not survive a fork
    plain, ended = target.generate(ids, **CALL).tolist(), threading.Event()

    def decode(drafter):
        while not ended.is_set():
            assert target.generate(ids, **CALL, assistant_model=drafter).tolist() == plain

    decoding = [threading.Thread(target=decode, args=(each,)) for each in drafters]
    for each in decoding:
        each.start()
    statuses = []
    try:
        for number in range(12):
            if (child := os.fork()) == 0:
                call = {**CALL, "assistant_model": drafters[number % 3]}
                _decode_and_exit(functools.partial(target.generate, ids, **call), plain)
            statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    finally:
        ended.set()
        for each in decoding:
            each.join()
        torch.set_num_threads(threads)
    assert statuses == [0] * 12


def _decode_and_exit(decode, plain):
    status = 2  # of an error
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)
        status = int(decode().tolist() != plain)
    finally:
        os._exit(status)
