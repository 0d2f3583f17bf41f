"""The messages between a device and a server that verifies, version 1.

A connection is a WebSocket with the subprotocol `PROTOCOL`, which negotiates the version before the first message. It
serves one text at a time. The device sends `Open` with its prompt, and gets `Opened` with the first token; then each
`Draft` is answered by `Accepted`. `Refused` may answer anything. A text outlives its connection for some seconds:
`Resume` continues it on a new one. Drafts of a text are numbered from 1, so a draft that was sent twice is verified
once.

Tokens are int32, parents int16, and hidden states and rows bfloat16, all little-endian; see `packed_ints` and others.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from ..core.draft_tree import DraftTree
from .wire import Message, WireError, by_code, digest, flag, layers, packed, real, settings, whole, words

PROTOCOL = "hsdraft.1"
MOST_LENGTH = 2**20  # tokens of a text
MOST_NODES = 2**12  # of a tree
MOST_ANSWER = 2**24  # bytes of a message to a device
PIECE_BYTES = 2**22  # bytes of hidden states or rows in one message
MOST_ROWS = 2**12  # embedding rows per request

INPUT, OUTPUT = 0, 1  # tables of embedding rows
SAMPLING_SEED = 2**63 - 1  # greatest seed


def most_request(longest: int) -> int:
    """Returns the maximum size in bytes of a message to a server whose texts have at most `longest` tokens."""
    return 4 * longest + 8 * MOST_NODES + 2**17


@dataclass(frozen=True)
class Open(Message, code=1):
    """Begins a text, or restores one that the server has lost."""

    ids: Annotated[bytes, packed(4)]  # the tokens so far
    prompt_length: Annotated[int, whole(1, MOST_LENGTH)]  # number of these that are the prompt
    seed: Annotated[int, whole(0, SAMPLING_SEED)]
    # whether the server decodes by itself; it then sends an `Accepted` per round without drafts
    plain: Annotated[bool, flag()]
    options: Annotated[dict[str, int | float | bool | list[int] | None], settings()]  # of `generate()`
    taps: Annotated[list[int], layers()]  # layers whose hidden states are wanted
    taps_from: Annotated[int, whole(0, MOST_LENGTH)]  # first position of which they are wanted


@dataclass(frozen=True)
class Draft(Message, code=2):
    """A draft tree: tokens and parents of its nodes. Node 0 is the root, the last token of the text."""

    number: Annotated[int, whole(1, MOST_LENGTH)]
    tokens: Annotated[bytes, packed(4)]
    parents: Annotated[bytes, packed(2)]


@dataclass(frozen=True)
class Resume(Message, code=3):
    """Continues a text after its connection has ended."""

    session: Annotated[str, words(64)]


@dataclass(frozen=True)
class Close(Message, code=4):
    """Lets the server forget the text."""


@dataclass(frozen=True)
class Rows(Message, code=5):
    """Asks for rows of the input embedding or of the output layer."""

    table: Annotated[int, whole(INPUT, OUTPUT)]
    first: Annotated[int, whole()]
    count: Annotated[int, whole(1, MOST_ROWS)]


@dataclass(frozen=True)
class Encode(Message, code=6):
    """Asks for the tokens of a text; with `chat` as a user message in the target's chat template."""

    text: Annotated[str, words()]
    chat: Annotated[bool, flag()]


@dataclass(frozen=True)
class Decode(Message, code=7):
    """Asks for the text of tokens."""

    ids: Annotated[bytes, packed(4)]


@dataclass(frozen=True)
class Hello(Message, code=16):
    """The first message of a server."""

    target: Annotated[str, words(1024)]
    config: Annotated[str, words()]  # the target's configuration, as JSON
    dtype: Annotated[str, words(32)]
    rows: Annotated[int, whole(1, 2**31)]  # number of embedding rows
    width: Annotated[int, whole(1, 2**20)]  # of a row; of hidden states too, for most targets
    tied: Annotated[bool, flag()]  # whether the output layer shares the input embedding
    # SHA-256 of the rows of both tables as they are sent; a device may cache them under it
    fingerprint: Annotated[str, digest()]
    weights: Annotated[str, digest()]  # SHA-256 of a few numbers of every weight; identifies the target
    longest: Annotated[int, whole(1, MOST_LENGTH)]  # maximum number of tokens of a text
    most_nodes: Annotated[int, whole(1, MOST_NODES)]  # maximum of a tree, without the root

    @property
    def identity(self) -> Hello:
        """Copy without what differs between servers of the same target."""
        return replace(self, longest=1, most_nodes=1)


@dataclass(frozen=True)
class Taps(Message, code=17):
    """A part of the prompt's hidden states. All parts come before `Opened`; they may split a position."""

    states: Annotated[bytes, packed(2)]


@dataclass(frozen=True)
class Opened(Message, code=18):
    """The prompt has been read."""

    session: Annotated[str, words(64)]  # name to resume the text by; a secret of this client
    token: Annotated[int, whole(0, 2**31)]  # the first new token
    reach: Annotated[int, whole(0, MOST_LENGTH)]  # as in `Accepted`, like `nodes`
    nodes: Annotated[int, whole(0, MOST_NODES)]
    finished: Annotated[bool, flag()]  # whether the text has ended with this token


@dataclass(frozen=True)
class Resumed(Message, code=19):
    """The text still exists, with this many drafts verified."""

    number: Annotated[int, whole(0, MOST_LENGTH)]


@dataclass(frozen=True)
class Accepted(Message, code=20):
    """Outcome of a draft."""

    number: Annotated[int, whole(1, MOST_LENGTH)]
    tokens: Annotated[bytes, packed(4)]  # emitted: accepted tokens, then the target's own
    drafted: Annotated[int, whole(0, MOST_NODES)]  # number of these that were in the draft
    reach: Annotated[int, whole(0, MOST_LENGTH)]  # maximum depth of the next draft
    # nodes the next draft should have at most, without the root, given the server's load
    nodes: Annotated[int, whole(0, MOST_NODES)]
    finished: Annotated[bool, flag()]  # whether the text has ended
    taps: Annotated[bytes, packed(2)]  # hidden states of the root and of the accepted nodes
    batch: Annotated[int, whole(1, 2**16)]  # number of texts in the forward that verified it
    seconds: Annotated[float, real()]  # duration of that forward


@dataclass(frozen=True)
class Refused(Message, code=21):
    """Why a request was refused."""

    # `"overloaded"`, `"unknown"` (no such text), `"out of order"`, `"invalid"`, `"malformed"`, `"failed"` or
    # `"replaced"` (another connection has taken the text over). `Link` adds reasons that arise on the device
    reason: Annotated[str, words(32)]
    message: Annotated[str, words(4096)]
    retry_seconds: Annotated[float, real()]  # when to retry; 0 where that is of no use


@dataclass(frozen=True)
class RowData(Message, code=22):
    """Answers `Rows`."""

    states: Annotated[bytes, packed(2)]


@dataclass(frozen=True)
class Tokens(Message, code=23):
    """Answers `Encode`."""

    ids: Annotated[bytes, packed(4)]


@dataclass(frozen=True)
class Text(Message, code=24):
    """Answers `Decode`."""

    text: Annotated[str, words()]


TO_SERVER: dict[int, type[Message]] = by_code(Open, Draft, Resume, Close, Rows, Encode, Decode)
TO_CLIENT: dict[int, type[Message]] = by_code(Hello, Taps, Opened, Resumed, Accepted, Refused, RowData, Tokens, Text)


def packed_ints(values: Iterable[int], kind: str = "i") -> bytes:
    """Packs integers: `"i"` as int32, `"h"` as int16."""
    return _least_first(array(kind, values)).tobytes()


def unpacked_ints(data: bytes, kind: str = "i") -> list[int]:
    values = array(kind)
    values.frombytes(data)
    return _least_first(values).tolist()


def _least_first(values: array[int]) -> array[int]:
    if sys.byteorder == "big":
        values.byteswap()
    return values


def packed_states(states: torch.Tensor) -> bytes:
    """Packs vectors `[..., D]` as bfloat16."""
    return states.detach().to("cpu", torch.bfloat16).contiguous().view(torch.uint8).numpy().tobytes()


def unpacked_states(data: bytes | bytearray, width: int) -> torch.Tensor:
    """Unpacks vectors `[n, width]`, bfloat16; raises a WireError for a fraction of a vector."""
    if len(data) % max(2 * width, 1) or (data and not width):
        raise WireError(f"{len(data)} bytes are no vectors of {width} numbers")
    if not data:
        return torch.zeros(0, width, dtype=torch.bfloat16)
    return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(-1, width)


def packed_tree(number: int, tree: DraftTree) -> Draft:
    """Returns the message of a draft. Depths follow from the parents, and scores stay with the drafter."""
    return Draft(number, packed_ints(tree.tokens), packed_ints(tree.parents, "h"))


def unpacked_tree(draft: Draft, vocab_size: int) -> DraftTree:
    """Returns the tree in a message; raises a WireError that says what is wrong with it."""
    tokens, parents = unpacked_ints(draft.tokens), unpacked_ints(draft.parents, "h")
    if not 1 <= len(tokens) <= MOST_NODES or len(parents) != len(tokens):
        raise WireError(f"a draft came in with {len(tokens)} tokens and {len(parents)} parents")
    depths: list[int] = []
    for parent in parents:  # wrong ones are told below
        depths.append(depths[parent] + 1 if 0 <= parent < len(depths) else 0)
    tree = DraftTree(tuple(tokens), tuple(parents), tuple(depths), (0.0,) * len(tokens))
    fault = tree.fault(vocab_size) if 0 <= tokens[0] < vocab_size else "the root is no token of the vocabulary"
    if fault:
        raise WireError(f"a draft is no tree: {fault}")
    return tree
