"""A device's connections to a server that verifies: one, a pool shared by threads, and how long to retry."""

from __future__ import annotations

import contextlib
import queue
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, WebSocketException
from websockets.frames import CloseCode
from websockets.protocol import State
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from .messages import MOST_ANSWER, PROTOCOL, TO_CLIENT, Hello, Refused
from .wire import Message, WireError, decode, encode, silent_logger

_SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
R = TypeVar("R", bound=Message)


class LinkLost(OSError):
    """The connection has ended, or could not be made. Reconnecting may work.

    `code` is the close code; `None` if the connection was not closed in order.
    """

    def __init__(self, message: str = "", code: int | None = None) -> None:
        super().__init__(message)
        self.code = code


class ServerRefused(RuntimeError):
    """The server refused a request, see `Refused`."""

    def __init__(self, reason: str, message: str, retry_seconds: float = 0.0) -> None:
        when = f"; try again in {retry_seconds:.1f} s" if retry_seconds else ""
        super().__init__(f"{message} ({reason}){when}")
        self.reason, self.retry_seconds = reason, retry_seconds


@dataclass(frozen=True)
class Address:
    """URL (`ws://` or `wss://`) and credentials of a server."""

    url: str
    token: str = field(default="", repr=False)  # bearer token; empty for none. It never appears in the repr
    # for encrypted connections; `None` for the machine's certificates
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    @classmethod
    def of(cls, url: str, token: str = "", tls: ssl.SSLContext | None = None) -> Address:
        """Validates and normalises an address; raises a ValueError, also if a token would be sent unencrypted."""
        parts = urllib.parse.urlsplit(url)
        if "@" in url or parts.query:
            raise ValueError("the address holds a name, a password or a query: give the token as token=...")
        try:
            named = parts.scheme in _SCHEMES and parts.hostname and (parts.port is None or parts.port > 0)
        except ValueError:  # the port is no number, or too large
            named = False
        if not named:
            raise ValueError(f"{url!r} is no address: expected https://host:port, or http://host:port")
        scheme = _SCHEMES[parts.scheme]
        if token and scheme == "ws" and parts.hostname not in _LOOPBACK:
            raise ValueError(
                "the token would be sent unencrypted over a network: use https://, or a tunnel to this machine"
            )
        return cls(urllib.parse.urlunsplit((scheme, parts.netloc, parts.path or "/", "", "")), token, tls)


class Link:
    """One connection; raises `LinkLost` or `ServerRefused` if it cannot be made."""

    def __init__(self, address: Address, timeout: float = 60.0) -> None:
        self._timeout = timeout
        self.sent = self.received = 0  # bytes of all messages, without WebSocket framing
        headers = {"Authorization": f"Bearer {address.token}"} if address.token else None
        self._closing = contextlib.ExitStack()
        here = urllib.parse.urlsplit(address.url).hostname in _LOOPBACK
        try:
            self._socket = self._closing.enter_context(
                connect(
                    address.url,
                    ssl=address.tls,
                    subprotocols=[Subprotocol(PROTOCOL)],
                    additional_headers=headers,
                    compression=None,
                    open_timeout=timeout,
                    close_timeout=1.0,
                    max_size=MOST_ANSWER,
                    user_agent_header=None,
                    proxy=None if here else True,  # no proxy for connections to this machine
                    logger=silent_logger(),
                )
            )
        except InvalidStatus as error:
            raise _refusal_of(error.response.status_code, error.response.headers) from None
        except InvalidHandshake as error:
            raise ServerRefused("version", f"what answers does not speak {PROTOCOL}: {error}") from None
        except ssl.SSLCertVerificationError as error:
            raise ServerRefused("certificate", str(error)) from None
        except ssl.SSLError as error:
            raise LinkLost(
                f"no connection to {address.url}: {error}; a server without a certificate is reached by http://"
            ) from None
        except (OSError, WebSocketException) as error:
            raise LinkLost(f"no connection to {address.url}: {error}") from None
        if self._socket.subprotocol != PROTOCOL:
            self.close()
            raise ServerRefused("version", f"what answers does not speak {PROTOCOL}")
        try:
            self.hello = self.receive(Hello)
        except BaseException:
            self.close()
            raise

    def send(self, message: Message) -> None:
        """Sends a message; raises `LinkLost`, or `ServerRefused` if a message made the server close the connection."""
        data = encode(message)
        try:
            self._socket.send(data)
        except (ConnectionClosed, OSError) as error:
            raise _ended(error) from None
        self.sent += len(data)

    def receive(self, *kinds: type[R]) -> R:
        """Returns the next message.

        Raises `LinkLost` if the connection has ended or timed out, `ServerRefused` for a refusal, and a WireError for a
        message of another kind.
        """
        try:
            data = self._socket.recv(self._timeout)
        except TimeoutError:
            self.close()
            raise LinkLost(f"the server said nothing for {self._timeout:g} s") from None
        except (ConnectionClosed, OSError) as error:
            raise _ended(error) from None
        self.received += len(data)
        message = decode(data, TO_CLIENT)
        if isinstance(message, Refused):
            raise ServerRefused(message.reason, message.message, message.retry_seconds)
        if not isinstance(message, kinds):
            raise WireError(f"a {type(message).__name__} came in: expected {' or '.join(k.__name__ for k in kinds)}")
        return message

    def ask(self, message: Message, kind: type[R]) -> R:
        """Sends a message and returns the answer; raises what `send` and `receive` raise."""
        self.send(message)
        return self.receive(kind)

    @property
    def is_open(self) -> bool:
        return self._socket.state is State.OPEN

    def close(self) -> None:
        self._closing.close()


def _ended(error: Exception) -> Exception:
    """The error for an ended connection: `LinkLost` unless the same messages would end a new one too."""
    closed = (error.rcvd or error.sent) if isinstance(error, ConnectionClosed) else None
    if closed is not None and closed.code == CloseCode.MESSAGE_TOO_BIG:
        return ServerRefused("size", "a message is larger than is taken here or there")
    if closed is not None and closed.code == CloseCode.INTERNAL_ERROR and "ping" not in closed.reason:
        return ServerRefused("fault", "the server has a fault: its log says which")
    return LinkLost(f"the connection has ended: {error}", closed.code if closed is not None else None)


def _refusal_of(status: int, headers: Mapping[str, Any]) -> Exception:
    if status == 401:
        return ServerRefused("token", "the server wants a bearer token, or another one: give token=...")
    if status == 503:
        after = str(headers.get("Retry-After", "1"))
        return ServerRefused(
            "overloaded",
            "the server has too many connections, or is being stopped",
            float(after) if after.isdigit() else 1,
        )
    if status == 400:
        return ServerRefused("version", f"what answers does not speak {PROTOCOL}")
    if status in (502, 504):
        return LinkLost(f"the server is not reached: HTTP status {status}")
    return ServerRefused("address", f"what answers is no server that verifies: HTTP status {status}")


_IDLE_LINKS = 4  # kept for later calls


class LinkPool:
    """Connections to a server; raises `LinkLost` or `ServerRefused` if it cannot connect.

    The first connection retries only an overload: the address may be wrong.
    """

    def __init__(self, address: Address, patience: float, timeout: float) -> None:
        self._address, self.patience, self._timeout = address, patience, timeout
        self._idle = queue.LifoQueue[Link](_IDLE_LINKS)
        link = _patiently(lambda: Link(address, timeout), patience, (ServerRefused,))
        self.hello = link.hello
        self.give_back(link)

    def take(self) -> Link:
        """Returns an unused connection; raises `LinkLost`, or `ServerRefused`, also if the target has changed."""
        with contextlib.suppress(queue.Empty):
            while True:
                idle = self._idle.get_nowait()
                if idle.is_open:
                    return idle
                idle.close()
        link = Link(self._address, self._timeout)
        if link.hello.identity != self.hello.identity:
            link.close()
            raise ServerRefused(
                "target", "the server has another target than before, or the same one in another dtype: connect again"
            )
        return link

    def give_back(self, link: Link) -> None:
        try:
            self._idle.put_nowait(link)
        except queue.Full:
            link.close()

    def ask(self, question: Callable[[Link], Any]) -> Any:
        """Returns the answer to a question that needs no text. Retries on another connection if one ends."""

        def once() -> Any:
            link = self.take()
            try:
                answer = question(link)
            except BaseException:  # an answer may still come
                link.close()
                raise
            self.give_back(link)
            return answer

        return _patiently(once, self.patience, (LinkLost, ServerRefused))

    def close(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._idle.get_nowait().close()


def _patiently(step: Callable[[], Any], patience: float, waited_for: tuple[type[Exception], ...]) -> Any:
    """Retries a step on the given errors; of refusals, only on an overload."""
    waiting = Patience(patience)
    while True:
        try:
            return step()
        except waited_for as error:
            if isinstance(error, ServerRefused) and error.reason != "overloaded":
                raise
            waiting.wait(error, getattr(error, "retry_seconds", 0.0))


_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 2.0  # seconds


class Patience:
    """Waits between tries, doubling the pause, for `seconds` in total; with 0 the first error is raised."""

    def __init__(self, seconds: float) -> None:
        self._end, self._pause = time.monotonic() + seconds, _FIRST_PAUSE

    def wait(self, error: Exception, least: float = 0.0) -> float:
        """Waits until the next try, at least `least` seconds; returns the seconds. Raises `error` if the time is up."""
        seconds = max(self._pause, least)
        if time.monotonic() + seconds > self._end:
            raise error
        time.sleep(seconds)
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        return seconds
