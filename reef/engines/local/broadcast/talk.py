"""What sender and receivers say to each other: who is there, what comes, who is ready, who got it. No torch here.

    both ways     Hello, Proof                     each proves that it knows the secret, and neither tells it
    sender     -> Offer                            what comes: files by name, sha256 and size
    receiver   -> Ready | Refused                  it has room, or says why it goes without
    sender     -> Begin                            a process group: its store's port, this member's rank
    receiver   -> Got | Lost                       whole and verified, or why not; a lost one may be begun again
    sender     -> Over                             nothing more comes of this offer

Knows: TCP, frames of a 4-byte length and msgpack, a shared secret, the file that says where a sender listens.
Does not know: weights, process groups, releases.

- The secret is made anew by each sender and lies in a file that only its owner can read. Who does not know it is told
  nothing, on either side; what it proves with is compared in constant time.
- Nothing waits for ever: the greeting has seconds, and a peer whose machine is gone is found by keep-alive.
- What follows the greeting is not encrypted. Whoever can listen on the network between two machines can read it, as
  with any torch.distributed job: keep it on loopback or on a private network.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from reef.core.errors import WireError

VERSION = 1
GREETING = 5.0  # seconds for the whole greeting
SENDING = 10.0  # seconds in which a peer must take a message
STRANGER = 4096  # bytes that somebody who has proved nothing can make the other side read
LONGEST = 256 * 1024  # bytes of a message


class Word(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Base of every message; the class name is its tag."""


class Hello(Word, frozen=True):
    version: int
    nonce: bytes


class Proof(Word, frozen=True):
    proof: bytes


class Carried(msgspec.Struct, frozen=True):
    """One file of an offer."""

    name: str
    sha256: str
    size: int


ALIGNED = 64
"""In the flat buffer files lie one after the other and begin at multiples of this, so that a tensor of any type can be
looked at where it lies."""


def places(files: Iterable[Carried]) -> tuple[list[int], int]:
    """Where each file begins in the flat buffer, and the buffer's size."""
    found, end = [], 0
    for file in files:
        found.append(end)
        end += -(-file.size // ALIGNED) * ALIGNED
    return found, end


class Offer(Word, frozen=True):
    """`device` is where the sender's buffer is (cpu | cuda), and so which backend carries it."""

    generation: str
    files: list[Carried]
    device: str


class Ready(Word, frozen=True):
    generation: str


class Refused(Word, frozen=True):
    generation: str
    why: str


class Begin(Word, frozen=True):
    """One try to carry an offer. The store listens on `port` of the machine that this connection goes to; `prefix`
    is where in it this group's keys are. Chunks are of `chunk` bytes, each within `patience` seconds."""

    generation: str
    prefix: str
    rank: int
    world: int
    port: int
    chunk: int
    patience: float


class Got(Word, frozen=True):
    generation: str
    prefix: str
    seconds: float  # until the last byte was here
    verify: float  # of which: hashing that the transfer did not hide


class Lost(Word, frozen=True):
    generation: str
    prefix: str
    why: str


class Over(Word, frozen=True):
    generation: str


Words = Hello | Proof | Offer | Ready | Refused | Begin | Got | Lost | Over
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Words).decode


# --- where a sender is ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Where:
    host: str
    port: int
    secret: bytes


def tell(place: Path, where: Where) -> None:
    """Write down where a sender listens, for its owner's eyes. OSError when the folder cannot be written."""
    draft = place.with_name(f".{place.name}-{secrets.token_hex(8)}")
    text = json.dumps({"version": VERSION, "host": where.host, "port": where.port, "secret": where.secret.hex()})
    try:
        with open(draft, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(text)
        draft.replace(place)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def find(place: Path) -> Where | None:
    """Where a sender listens; None while none does. WireError for a file that others may have written or read."""
    try:
        with place.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid != os.getuid() or status.st_mode & 0o077:
                raise WireError(f"{place} can be read by others, and it holds a secret: chmod 600 it, or remove it")
            found = json.loads(file.read(STRANGER))
        return Where(str(found["host"]), int(found["port"]), bytes.fromhex(found["secret"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WireError(f"{place} cannot be read ({error}); remove it, the trainer writes it when it starts") from None


# --- one connection ---------------------------------------------------------------------------------------------------


class Link:
    """A connection whose other side has proved itself. `receive` belongs to one thread; any may `send` and `close`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self.peer: str = str(connection.getpeername()[0])
        self.own: str = str(connection.getsockname()[0])
        self.port: int = int(connection.getpeername()[1])
        connection.settimeout(None)
        _keep_alive(connection)

    def send(self, word: Word) -> bool:
        """False when the other side is gone, or does not read."""
        data = _encode(word)
        try:
            with self._sending:
                _send(self._socket, data)
            return True
        except OSError:
            self.close()
            return False

    def receive(self) -> Words | None:
        """The next message, however long it takes; None when the connection ended or spoke nonsense."""
        try:
            return _receive(self._socket, LONGEST)
        except (OSError, WireError):
            self.close()
            return None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that receives
        self._socket.close()


def dial(where: Where) -> Link:
    """A receiver's way to its sender. WireError when nobody is there, or somebody who does not know the secret."""
    try:
        connection = socket.create_connection((where.host, where.port), GREETING)
    except OSError as error:
        raise WireError(f"no trainer broadcasts at {where.host}:{where.port} ({error.strerror or error})") from None
    deadline = time.monotonic() + GREETING
    try:
        theirs, mine = _hello(connection, deadline)
        _send(connection, _encode(Proof(proof=_proof(where.secret, b"receiver", theirs, mine))))
        answer = _receive(connection, STRANGER, deadline)
        wanted = _proof(where.secret, b"sender", theirs, mine)
        if not (isinstance(answer, Proof) and hmac.compare_digest(answer.proof, wanted)):
            raise WireError(
                f"whoever listens at {where.host}:{where.port} does not know the secret, so it is not this trainer; "
                "nothing is taken from it"
            )
        return Link(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise WireError(f"{where.host}:{where.port} did not greet ({error.strerror or error})") from None
        raise


def admit(connection: socket.socket, secret: bytes) -> Link:
    """A sender's view of somebody who connected. WireError when it does not prove itself in time."""
    deadline = time.monotonic() + GREETING
    try:
        connection.settimeout(GREETING)
        theirs, mine = _hello(connection, deadline)
        proof = _receive(connection, STRANGER, deadline)
        wanted = _proof(secret, b"receiver", mine, theirs)
        if not (isinstance(proof, Proof) and hmac.compare_digest(proof.proof, wanted)):
            raise WireError("somebody who does not know the secret connected; it was told nothing")
        _send(connection, _encode(Proof(proof=_proof(secret, b"sender", mine, theirs))))
        return Link(connection)
    except BaseException as error:
        connection.close()
        if isinstance(error, OSError):
            raise WireError(f"somebody connected and did not greet ({error.strerror or error})") from None
        raise


def _hello(connection: socket.socket, deadline: float) -> tuple[bytes, bytes]:
    """Exchange nonces: (theirs, mine)."""
    mine = secrets.token_bytes(32)
    _send(connection, _encode(Hello(version=VERSION, nonce=mine)))
    hello = _receive(connection, STRANGER, deadline)
    if not isinstance(hello, Hello) or hello.version != VERSION or len(hello.nonce) != 32:
        raise WireError("the other side speaks another language; both must be of this version of Reef")
    if hmac.compare_digest(hello.nonce, mine):
        raise WireError("the other side says what it hears")
    return hello.nonce, mine


def _proof(secret: bytes, who: bytes, senders: bytes, receivers: bytes) -> bytes:
    return hmac.digest(secret, b"reef broadcast " + who + senders + receivers, "sha256")


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(len(data).to_bytes(4) + data)


def _receive(connection: socket.socket, longest: int, deadline: float | None = None) -> Words | None:
    """One message; None at the end of the connection. WireError for what is none."""
    head = _exactly(connection, 4, deadline)
    if head is None:
        return None
    length = int.from_bytes(head)
    if length > longest:
        raise WireError(f"a message of {length} bytes; the limit is {longest}")
    data = _exactly(connection, length, deadline)
    if data is None:
        return None
    try:
        return _decode(data)
    except msgspec.MsgspecError as error:
        raise WireError(f"the other side sent what is no message ({error})") from None


def _exactly(connection: socket.socket, length: int, deadline: float | None) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        if deadline is not None:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
        found = connection.recv(length - len(data))
        if not found:
            return None
        data += found
    return bytes(data)


def _keep_alive(connection: socket.socket) -> None:
    """A peer whose machine went away without a word is gone after some ten seconds, and so is one that never reads."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", int(SENDING), 0))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):  # macOS spells the first otherwise; its default of hours only delays a clean-up
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
