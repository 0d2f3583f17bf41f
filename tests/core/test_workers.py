"""Work on a thread that ends with it."""

from __future__ import annotations

import threading

import pytest

from hf_hsdraft.remote.workers import on_own_thread


def test_the_result_comes_back_and_the_thread_has_ended():
    found = []

    def work(one: int, other: int) -> int:
        found.append(threading.current_thread())
        return one + other

    assert on_own_thread(work, 2, other=3) == 5
    assert found[0] is not threading.current_thread() and not found[0].is_alive()


def test_an_error_comes_back():
    def work() -> None:
        raise ValueError("the file is not there")

    with pytest.raises(ValueError, match="the file is not there"):
        on_own_thread(work)
