"""A real server in a thread, with all that a test compares it with."""

from __future__ import annotations

import copy
import json
import socket
import struct
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai

from hf_hsdraft import attach
from hf_hsdraft.cli._shared import bound_socket
from hf_hsdraft.serve.server import Server, build_app

NAME = "user/tiny"
WINDOW = 4096


@dataclass
class Served:
    """A running server, with all that a test compares it with."""

    target: Any
    reference: Any  # a copy of the target, which has no drafter
    tokenizer: Any
    name: str
    port: int
    server: Server

    @property
    def client(self):
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key="none", max_retries=0)

    def ask(self, text: str, **fields):
        messages = [{"role": "user", "content": text}]
        fields = {"model": self.name, "messages": messages, "temperature": 0, **fields}
        return self.client.chat.completions.create(**fields)

    def streamed(self, text: str, **fields) -> tuple[str, str, Any]:
        """Text, finish reason and usage of a streamed answer."""
        pieces, reason, usage = [], None, None
        for chunk in self.ask(text, stream=True, **fields):
            for choice in chunk.choices:
                pieces.append(choice.delta.content or "")
                reason = choice.finish_reason or reason
            usage = chunk.usage or usage
        return "".join(pieces), reason, usage

    def plain(self, text: str, **options) -> tuple[str, int, int]:
        """Text, number of prompt tokens and of new tokens, by `generate()` without the drafter."""
        ids = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        new = self.reference.generate(**ids, **{"do_sample": False, **options})[0, ids["input_ids"].shape[1] :]
        return self.tokenizer.decode(new, skip_special_tokens=True), ids["input_ids"].shape[1], len(new)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/{path}", timeout=10) as response:
            return json.load(response)

    def drafting(self, calls: int = 0) -> Any:
        """What drafting did, once so many calls have ended: an answer is there a moment before its call has ended."""
        deadline = time.monotonic() + 10
        while (report := self.get("drafting"))["calls"] < calls and time.monotonic() < deadline:
            time.sleep(0.01)
        return report

    def send_raw(self, text: str, **fields) -> socket.socket:
        """A request over a bare connection, which a test can break."""
        body = json.dumps({"model": self.name, "messages": [{"role": "user", "content": text}], **fields})
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{body}".encode())
        return connection


def kill(connection: socket.socket) -> None:
    """Breaks a connection as the end of a process does."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@contextmanager
def serving(target, tokenizer, drafter, name: str = NAME, *args: Any, **kwargs: Any) -> Iterator[Served]:
    reference, attachment = copy.deepcopy(target), attach(target, drafter)
    listener = bound_socket("127.0.0.1", 0)
    tokenizer = copy.deepcopy(tokenizer)  # transformers sets the side of padding of the one it serves
    server = Server(build_app(target, tokenizer, name, attachment, *args, **kwargs), "error")
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        deadline = time.monotonic() + 30
        while not server.started and time.monotonic() < deadline:
            time.sleep(0.01)
        yield Served(target, reference, tokenizer, name, listener.getsockname()[1], server)
    finally:
        server.should_exit = True
        thread.join(20)
        attachment.detach()
        assert not thread.is_alive()
