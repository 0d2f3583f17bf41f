"""Texts that a verifying server decodes by itself: in which order it asks for forwards and tells devices."""

from __future__ import annotations

import asyncio

import pytest
from conftest import make_target

pytest.importorskip("msgpack")
pytest.importorskip("websockets")

from test_remote import plain, prompts

from hf_hsdraft.remote.desk import Conversation, DeviceGone
from hf_hsdraft.remote.messages import Accepted, Open, packed_ints, unpacked_ints
from hf_hsdraft.remote.micro_batches import Job
from hf_hsdraft.remote.verify_server import VerifyServer
from hf_hsdraft.remote.wire import Message

TOKENS = 12


class Device:
    """A connection that notes what is asked of the target, and what it is told.

    Args:
        server: the server.
        leaves_after: number of answers after which it is gone.
    """

    def __init__(self, server: VerifyServer, leaves_after: int = 99) -> None:
        self._desk, self._left = server._desk, leaves_after
        self._submit, self._desk.batches.submit = self._desk.batches.submit, self.submit  # type: ignore[method-assign]
        self.events: list[str] = []
        self.tokens: list[int] = []
        self.conversation = Conversation(self._desk, self.send, lambda: self._left > 0)

    def submit(self, job: Job) -> None:
        if job.tree is not None:
            self.events.append("asked")
        self._submit(job)

    async def send(self, message: Message) -> None:
        if isinstance(message, Accepted):
            if self._left == 0:
                raise DeviceGone
            self._left -= 1
            self.events.append("told")
            self.tokens += unpacked_ints(message.tokens)

    async def decode(self, ids: list[int]) -> None:
        options = {"do_sample": False, "max_new_tokens": TOKENS}
        await self.conversation.answer(
            Open(packed_ints(ids), len(ids), seed=0, plain=True, options=options, taps=(), taps_from=0)
        )


@pytest.fixture
def server():
    made = VerifyServer(make_target("sdpa", seed=3))
    yield made
    made.close()


def test_the_next_forward_is_asked_for_before_the_device_is_told_of_the_last_one(server) -> None:
    ids, device = prompts(1, seed=3)[0], Device(server)
    asyncio.run(device.decode(ids[0].tolist()))
    rounds = TOKENS - 1  # the first token comes with the prompt
    assert device.events == ["asked", *["asked", "told"] * (rounds - 1), "told"]
    expected = plain(server._desk.target, ids, max_new_tokens=TOKENS, do_sample=False)
    assert device.tokens == expected[0, ids.shape[1] + 1 :].tolist()


def test_a_device_that_leaves_costs_no_further_forwards(server) -> None:
    device = Device(server, leaves_after=4)
    with pytest.raises(DeviceGone):
        asyncio.run(device.decode(prompts(1, seed=4)[0][0].tolist()))
    device.conversation.end()
    assert device.events.count("told") == 4 and device.events.count("asked") == 5
    assert len(server.sessions) == 0
