"""The sending side: a finished step's weights go from the trainer's process to every engine that is there and ready.

Knows: who is connected, a step's files, one flat buffer, process groups that are made for one broadcast.
Does not know: whether the step will become a candidate, or what an engine does with what it got.

- Sending is a favour: it runs in a thread of its own after the step is durable, and whatever fails is logged and left.
  An engine that got nothing reads the release's files.
- A member that died or hangs costs a group at most `PATIENCE`; the others are then served in a group without it.
- The flat buffer is kept from one broadcast to the next. It is as large as the largest step that was sent.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from reef.core.errors import ReefError, TrainError, WireError
from reef.core.failpoint import failpoint
from reef.engines.local.broadcast import talk
from reef.trainers import folder as steps

if TYPE_CHECKING:
    from torch import Tensor

LINKS = 32  # receivers at once, those that have not greeted yet included
WAITING = 4  # steps that wait to be sent; the oldest is left out
READY = 5.0  # seconds in which a receiver says that it has room
PATIENCE = 10.0  # seconds in which a group comes together, and in which each chunk passes
GRACE = 5.0  # seconds after a group's end in which its members say how it went
TRIES = 3
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a trainer's process listens for engines, and the file in which it says so."""

    place: Path
    host: str
    port: int
    device: str = "cpu"


@dataclass(slots=True)
class Sent:
    """What became of one offer. Seconds: `whole` of the last group, from its making to its last byte; in these,
    `reading` files into the buffer and `verifying` them there."""

    size: int = 0
    got: list[talk.Got] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    reading: float = 0.0
    verifying: float = 0.0
    whole: float = 0.0
    groups: int = 0


Reply = tuple[talk.Link, talk.Words | None]


class Sender:
    """`start` (WireError when it cannot listen), `announce` each step's folder, `close`."""

    def __init__(self, listening: Listening) -> None:
        self._listening = listening
        self._secret = secrets.token_bytes(32)
        self._listener: socket.socket | None = None
        self._links: list[talk.Link] = []
        self._changed = threading.Condition()
        self._room = threading.Semaphore(LINKS)
        self._replies: queue.Queue[Reply] = queue.Queue()
        self._steps: deque[Path] = deque(maxlen=WAITING)
        self._closed = False
        self._worker: threading.Thread | None = None
        self._flat: Tensor | None = None
        self._sent, self._last = 0, Sent()

    def start(self) -> None:
        wanted = self._listening
        family = socket.AF_INET6 if ":" in wanted.host else socket.AF_INET
        try:
            self._listener = socket.create_server((wanted.host, wanted.port), family=family)
            self.port = int(self._listener.getsockname()[1])
            talk.tell(wanted.place, talk.Where(wanted.host, self.port, self._secret))
        except OSError as error:
            self.close()
            raise WireError(
                f"weights cannot be broadcast at {wanted.host}:{wanted.port} ({error.strerror or error}); engines read "
                "files instead. Set training.broadcast to a free port of an address of this machine, and restart"
            ) from None
        threading.Thread(target=self._admit, name="admit", daemon=True).start()
        self._worker = threading.Thread(target=self._work, name="broadcast", daemon=True)
        self._worker.start()
        log.info("weights are broadcast at %s:%d", wanted.host, self.port)

    def announce(self, step: Path) -> None:
        """A step is durable. Returns at once."""
        with self._changed:
            self._steps.append(step)
            self._changed.notify_all()

    def close(self) -> None:
        """A broadcast under way is left at its next chunk, and waited for: a process that ends inside of one aborts."""
        with self._changed:
            self._closed = True
            links = list(self._links)
            self._changed.notify_all()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for link in links:
            link.close()
        if self._worker is not None:
            self._worker.join(PATIENCE + GRACE)
            with contextlib.suppress(OSError, WireError):  # so that no engine calls at a port that will be another's
                found = talk.find(self._listening.place)
                if found is not None and found.secret == self._secret:
                    self._listening.place.unlink()

    def receivers(self, least: int = 0, timeout: float = 0.0) -> int:
        """How many are connected; waits until there are `least`."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._links) >= least or self._closed, timeout)
            return len(self._links)

    def shown(self) -> dict[str, Any]:
        last = self._last
        return {
            "address": f"{self._listening.host}:{self.port}",
            "receivers": self.receivers(),
            "sent": self._sent,
            "last": {"bytes": last.size, "got": len(last.got), "refused": last.refused, "lost": last.lost},
        }

    # --- who is there -------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        assert self._listener is not None
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # no descriptors now
                continue
            if not self._room.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._hear, args=(connection,), name="hear", daemon=True).start()

    def _hear(self, connection: socket.socket) -> None:
        """One connection, from its greeting to its end."""
        try:
            link = talk.admit(connection, self._secret)
            with self._changed:
                self._links.append(link)
                self._changed.notify_all()
            try:
                while (word := link.receive()) is not None:
                    self._replies.put((link, word))
            finally:
                with self._changed:
                    self._links.remove(link)
                link.close()
                self._replies.put((link, None))
        except WireError as error:
            log.warning("at the port for engines: %s", error.message)
        finally:
            self._room.release()

    # --- what is sent -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._steps or self._closed)
                if self._closed:
                    return
                step = self._steps.popleft()
            try:
                sent = self.send(step_files(step))
                if sent.got or sent.lost:
                    log.info(
                        "%s: %d bytes to %d of %d engines in %.2f s", step, sent.size, len(sent.got),
                        len(sent.got) + len(sent.lost), sent.whole,
                    )  # fmt: skip
            except ReefError as error:
                log.warning("%s is not broadcast: %s", step, error.message)
            except Exception as error:
                log.error("%s is not broadcast", step, exc_info=error)

    def send(self, files: Mapping[str, tuple[Path, str, int]]) -> Sent:
        """Offer files (by name: where each is, its sha256 and size) and carry them to whoever is ready. Blocking; for
        one thread at a time. TrainError when a file is not what it is said to be."""
        carried = [talk.Carried(name, digest, size) for name, (_, digest, size) in files.items()]
        _, size = talk.places(carried)
        sent = self._last = Sent(size=size)
        generation = secrets.token_hex(16)
        offer = talk.Offer(generation=generation, files=carried, device=self._listening.device.partition(":")[0])
        with self._changed:
            links = list(self._links)
        offered = [link for link in links if link.send(offer)]
        members = self._ready(generation, offered, sent)
        try:
            if members:
                parcel = Parcel(carried, [path for path, _, _ in files.values()], self._room_for(size))
                try:
                    self._serve(generation, members, parcel, sent)
                finally:
                    parcel.close()
                    sent.reading, sent.verifying = parcel.reading, parcel.digests.seconds
        finally:
            for link in offered:
                link.send(talk.Over(generation=generation))
        self._sent += bool(sent.got)
        return sent

    def _ready(self, generation: str, offered: Sequence[talk.Link], sent: Sent) -> list[talk.Link]:
        """Who takes it. Who does not say so in time goes without."""
        waiting, members, deadline = set(offered), list[talk.Link](), time.monotonic() + READY
        while waiting:
            reply = self._reply(deadline)
            if reply is None:
                break
            link, word = reply
            if word is None:
                waiting.discard(link)
            elif isinstance(word, talk.Ready | talk.Refused) and word.generation == generation and link in waiting:
                waiting.discard(link)
                if isinstance(word, talk.Ready):
                    members.append(link)
                else:
                    sent.refused.append(word.why)
        sent.lost += ["it did not answer"] * len(waiting)
        return members

    def _serve(self, generation: str, members: list[talk.Link], parcel: Parcel, sent: Sent) -> None:
        """Groups, until every member has it, is gone, or was tried often enough."""
        left, why = members, ""
        for _ in range(TRIES):
            left, why = self._group(generation, left, parcel, sent)
            if not left or self._closed:
                return
        sent.lost += [why] * len(left)

    def _group(
        self, generation: str, members: list[talk.Link], parcel: Parcel, sent: Sent
    ) -> tuple[list[talk.Link], str]:
        """One group. Returns the members that said that they are still without it, and why."""
        import torch

        from reef.engines.local.broadcast import group

        prefix, host = f"{generation}/{sent.groups}", self._listening.host
        sent.groups += 1
        began = time.perf_counter()
        device = torch.device(self._listening.device)
        with group.store(host) as (store, port):
            seat = group.Seat(host, port, prefix, 0, len(members) + 1, host, PATIENCE, group.CHUNK)
            for rank, link in enumerate(members, 1):
                link.send(
                    talk.Begin(
                        generation=generation, prefix=prefix, rank=rank, world=seat.world, port=port,
                        chunk=seat.chunk, patience=seat.patience,
                    )
                )  # fmt: skip
            try:
                failpoint("broadcast.send")
                with group.group(seat, device, store) as made:
                    group.carry(made, seat, parcel.flat, self._passed, parcel.fill)
                    sent.whole = time.perf_counter() - began
                    parcel.check()
                    return self._outcome(prefix, members, sent)  # the group stays until all have their last byte
            except RuntimeError as error:
                broken = str(error).splitlines()[0]
                log.info("a group of %d broke: %s", len(members), broken)
            return self._outcome(prefix, members, sent, GRACE)

    def _passed(self, start: int, stop: int) -> None:
        failpoint("broadcast.sent")
        if self._closed:
            raise RuntimeError("this trainer stops")

    def _outcome(
        self, prefix: str, members: list[talk.Link], sent: Sent, seconds: float | None = None
    ) -> tuple[list[talk.Link], str]:
        """What the members say, who has some seconds for it."""
        waiting, left, why = set(members), list[talk.Link](), ""
        deadline = time.monotonic() + (PATIENCE + GRACE if seconds is None else seconds)
        while waiting:
            reply = self._reply(deadline)
            if reply is None:
                break
            link, word = reply
            if link not in waiting:
                continue
            if word is None:
                waiting.discard(link)
                sent.lost.append("it went away")
            elif isinstance(word, talk.Got | talk.Lost) and word.prefix == prefix:
                waiting.discard(link)
                if isinstance(word, talk.Got):
                    sent.got.append(word)
                else:
                    left.append(link)
                    why = word.why
        sent.lost += ["it hangs"] * len(waiting)
        return left, why

    def _reply(self, deadline: float) -> Reply | None:
        try:
            return self._replies.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def _room_for(self, size: int) -> Tensor:
        import torch

        from reef.engines.local.broadcast import group

        if self._flat is None or self._flat.numel() < size:
            self._flat = None  # before the new one is made
            self._flat = group.buffer(torch.device(self._listening.device), size)
        return self._flat[:size]


class Parcel:
    """Files one after the other in a flat buffer, read as far as they are needed, hashed while they are warm. What was
    read once is there for the next group."""

    def __init__(self, carried: Sequence[talk.Carried], paths: Sequence[Path], flat: Tensor) -> None:
        from reef.engines.local.broadcast.held import Digests

        self.flat, self.digests, self.reading = flat, Digests(carried, flat), 0.0
        self._files = list(zip(carried, talk.places(carried)[0], paths, strict=True))
        self._filled = 0
        self._open: tuple[Path, IO[bytes]] | None = None

    def fill(self, start: int, stop: int) -> None:
        """Bytes up to `stop` are there. TrainError for a file that is shorter than it is said to be, or gone."""
        if stop <= self._filled:
            return
        began = time.perf_counter()
        for file, place, path in self._files:
            end = place + file.size
            low, high = max(self._filled, place), min(stop, end)
            if low < high:
                self._read(path, low - place, self.flat[low:high])
            low, high = max(self._filled, end), min(stop, end + -file.size % talk.ALIGNED)
            if low < high:
                self.flat[low:high].zero_()
        self.reading += time.perf_counter() - began
        self.digests.take(self._filled, stop)
        self._filled = stop

    def check(self) -> None:
        """TrainError when the files are not what they are said to be. Receivers have found that, too."""
        if (wrong := self.digests.wrong()) is not None:
            raise TrainError(f"{wrong}; it is damaged on disk, or changed since the step was made")

    def close(self) -> None:
        if self._open is not None:
            self._open[1].close()

    def _read(self, path: Path, offset: int, into: Tensor) -> None:
        import torch

        host = into if into.device.type == "cpu" else torch.empty(into.numel(), dtype=torch.uint8, pin_memory=True)
        data = host.numpy().data
        try:
            if self._open is None or self._open[0] != path:
                self.close()
                self._open = (path, path.open("rb", buffering=0))
            handle = self._open[1]
            handle.seek(offset)
            while len(data):
                count = handle.readinto(data)  # type: ignore[attr-defined]
                if not count:
                    raise TrainError(f"{path} is shorter than the step says")
                data = data[count:]
        except OSError as error:
            raise TrainError(f"{path} cannot be read ({error.strerror or error})") from None
        if host is not into:
            into.copy_(host)


def step_files(step: Path) -> dict[str, tuple[Path, str, int]]:
    """What of a finished step an engine will want: its part's files without the note beside them, and what `state.json`
    says of each."""
    state = steps.read(step)
    if state is None or not state.files:
        raise TrainError("it holds no weights any more")
    spare = {*steps.PRIVATE, "weights.json"}
    return {name: (step / name, *said) for name, said in sorted(state.files.items()) if name not in spare}
