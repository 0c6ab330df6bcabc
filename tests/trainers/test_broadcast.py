"""Broadcasts between real processes: who is there gets the bytes, who died, hangs or came late costs seconds and no
more, and whatever goes wrong is read from files.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from reef.config.settings import TrainingSettings, listening
from reef.core.errors import TrainError, WireError
from reef.core.rpc import Client
from reef.core.wire import Ping, Pong, Step, Stepped
from reef.engines.local.broadcast import group, talk
from reef.engines.local.broadcast.arrivals import Arrivals
from reef.engines.local.broadcast.receive import Receiver
from reef.trainers import broadcast as sending
from reef.trainers import folder
from reef.trainers.broadcast import Listening, Sender, Sent, step_files
from tests.trainers.kit_broadcast import Child, Files, engine, trainer

Make = Callable[..., Step]


@pytest.fixture
def children() -> Iterator[list[Child]]:
    made: list[Child] = []
    yield made
    for child in made:
        child.close()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short patience, where a test waits for it to run out; small chunks, so that there is a middle."""
    monkeypatch.setattr(sending, "PATIENCE", 3.0)
    monkeypatch.setattr(sending, "GRACE", 4.0)
    monkeypatch.setattr(sending, "READY", 3.0)
    monkeypatch.setattr(group, "CHUNK", 64 * 1024)


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    made = Sender(Listening(tmp_path / "broadcast", "127.0.0.1", 0))
    made.start()
    yield made
    made.close()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[Receiver]:
    """An engine's receiving thread in this process."""
    made = Receiver(tmp_path / "broadcast", Arrivals(1 << 28), pause=0.05)
    made.start()
    yield made
    made.close()


def weights(folder: Path, size: int = 2_000_003, seed: int = 0, name: str = "model.safetensors") -> Files:
    folder.mkdir(exist_ok=True)
    path = folder / f"{seed}-{name}"
    path.write_bytes(bytes([seed % 251]) + os.urandom(size - 1))
    return {name: (path, hashlib.sha256(path.read_bytes()).hexdigest(), size)}


def has(receiver: Receiver, files: Files) -> bool:
    with receiver.arrivals.take({name: (digest, size) for name, (_, digest, size) in files.items()}) as held:
        if held is None:
            return False
        for name, (path, _, _) in files.items():
            assert held[name].read_bytes() == path.read_bytes()
        return True


def until(check: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.01)
    return found


def started(tmp_path: Path, limit: int = 1 << 28, failpoint: str = "") -> Child:
    """An engine's receiving thread in a process of its own."""
    return Child(engine, tmp_path / "broadcast", limit, failpoint)


# --- as it should be --------------------------------------------------------------------------------------------------


def test_two_engines_get_the_bytes_of_a_step(tmp_path: Path, sender: Sender, children: list[Child]) -> None:
    children += [started(tmp_path), started(tmp_path)]
    assert sender.receivers(2, 20) == 2
    for seed in range(4):
        files = weights(tmp_path / "w", 40_000_001 if seed == 0 else 3_000_000, seed)
        files |= weights(tmp_path / "w", 90, seed, "adapter_config.json")
        sent = sender.send(files)
        assert (len(sent.got), sent.lost, sent.refused, sent.groups) == (2, [], [], 1)
        assert all(child.takes(files) for child in children)
        assert not children[0].takes(files)  # loaded, so it left
    assert [child.shown()["received"] for child in children] == [4, 4]
    sent = sender.send(files)  # a step that is answered again
    assert (sent.got, sent.refused, sent.groups) == ([], ["it is here"] * 2, 0)


def test_nobody_there_costs_nothing(tmp_path: Path, sender: Sender) -> None:
    began = time.monotonic()
    sent = sender.send(weights(tmp_path / "w"))
    assert (sent.got, sent.lost, sent.reading) == ([], [], 0.0)
    assert time.monotonic() - began < 1.0


def test_an_engine_that_comes_late_gets_the_next_one(tmp_path: Path, sender: Sender, receiver: Receiver) -> None:
    sender.receivers(1, 20)
    early = Receiver(tmp_path / "broadcast", Arrivals(1 << 28), pause=0.05)
    first, second = weights(tmp_path / "w", seed=1), weights(tmp_path / "w", seed=2)
    assert len(sender.send(first).got) == 1
    early.start()
    assert sender.receivers(2, 20) == 2
    assert len(sender.send(second).got) == 2
    assert has(receiver, first)
    assert not has(early, first)
    assert has(early, second)
    early.close()


def test_a_finished_step_is_sent_with_the_digests_of_its_state(
    tmp_path: Path, sender: Sender, receiver: Receiver, order: Make
) -> None:
    sender.receivers(1, 20)
    contents = {
        "adapter_model.safetensors": os.urandom(5000),
        "adapter_config.json": b"{}",
        "weights.json": b"{}",
        "optimizer.safetensors": b"o",
        "modules.safetensors": b"m",
    }
    made = folder.write(tmp_path / "training", order(), "lora", contents, {})
    sender.announce(Path(made.folder))
    files = step_files(Path(made.folder))
    assert set(files) == {"adapter_model.safetensors", "adapter_config.json"}
    until(lambda: receiver.shown()["received"] == 1)
    assert has(receiver, files)
    folder.slim(tmp_path / "training", "demo", "weights", "one", 2)
    with pytest.raises(TrainError, match="no weights any more"):
        step_files(Path(made.folder))
    sender.announce(Path(made.folder))  # it is logged and left: the next one is sent all the same
    following = folder.write(tmp_path / "training", order(2), "lora", contents | {"adapter_config.json": b"{1}"}, {})
    sender.announce(Path(following.folder))
    until(lambda: receiver.shown()["received"] == 2)


# --- what can go wrong ------------------------------------------------------------------------------------------------


def test_a_file_that_is_not_what_its_step_says_is_not_sent(tmp_path: Path, sender: Sender, receiver: Receiver) -> None:
    sender.receivers(1, 20)
    [(name, (path, digest, size))] = weights(tmp_path / "w").items()
    for wrong, words in (
        ((path, "0" * 64, size), "does not match its digest"),
        ((path, digest, size + 1), "shorter than"),
        ((tmp_path / "none", digest, size), "cannot be read"),
    ):
        with pytest.raises(TrainError, match=words):
            sender.send({name: wrong})
    until(lambda: receiver.shown()["coming"] == 0)
    assert receiver.shown()["received"] == 0
    assert len(sender.send({name: (path, digest, size)}).got) == 1


def test_bytes_that_changed_on_the_way_are_not_kept(
    tmp_path: Path, sender: Sender, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender.receivers(1, 20)
    files = weights(tmp_path / "w")
    fill, right = sending.Parcel.fill, files["model.safetensors"][0].read_bytes()[1_000_000]

    def damage(parcel: sending.Parcel, start: int, stop: int) -> None:
        fill(parcel, start, stop)
        if start <= 1_000_000 < stop:
            parcel.flat[1_000_000] = right ^ 1

    monkeypatch.setattr(sending.Parcel, "fill", damage)
    sent = sender.send(files)
    assert sent.got == []
    assert sent.groups == sending.TRIES
    assert sent.lost[0].startswith("model.safetensors does not match its digest")
    assert not has(receiver, files)
    monkeypatch.undo()
    assert len(sender.send(files).got) == 1


def test_an_engine_without_room_reads_files(tmp_path: Path, sender: Sender, children: list[Child]) -> None:
    children += [started(tmp_path, 1_000_000), started(tmp_path)]
    sender.receivers(2, 20)
    files = weights(tmp_path / "w")
    sent = sender.send(files)
    assert len(sent.got) == 1
    assert sent.refused == ["2000064 bytes, and room for 1000000"]
    assert [child.takes(files) for child in children] == [False, True]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("failpoint", ["broadcast.receive", "broadcast.received:1", "broadcast.received:20"])
def test_an_engine_killed_mid_way_costs_the_others_seconds(
    tmp_path: Path, sender: Sender, children: list[Child], failpoint: str
) -> None:
    """Of three, one dies before, at the beginning and in the middle of a transfer: both others have the weights."""
    children += [started(tmp_path), started(tmp_path, failpoint=failpoint), started(tmp_path)]
    assert sender.receivers(3, 20) == 3
    files = weights(tmp_path / "w", 4_000_000)
    sent = sender.send(files)
    assert children[1].ended() == -signal.SIGKILL
    assert len(sent.got) == 2
    assert sent.lost == ["it went away"]
    assert sent.groups >= 2
    assert children[0].takes(files)
    assert children[2].takes(files)
    assert sender.receivers() == 2
    children.append(started(tmp_path))  # started again
    assert sender.receivers(3, 20) == 3
    assert len(sender.send(weights(tmp_path / "w", seed=1)).got) == 3


@pytest.mark.usefixtures("quick")
def test_an_engine_that_hangs_costs_the_others_seconds(tmp_path: Path, sender: Sender, children: list[Child]) -> None:
    children += [started(tmp_path), started(tmp_path)]
    sender.receivers(2, 20)
    children[1].signal(signal.SIGSTOP)
    files = weights(tmp_path / "w", 4_000_000)
    sent = sender.send(files)  # it does not say that it is ready
    assert (len(sent.got), sent.lost) == (1, ["it did not answer"])
    assert children[0].takes(files)
    children[1].signal(signal.SIGCONT)
    assert not children[1].takes(files)
    later = weights(tmp_path / "w", seed=3)
    assert len(sender.send(later).got) == 2


@pytest.mark.usefixtures("quick")
def test_an_engine_that_hangs_in_the_middle(
    tmp_path: Path, sender: Sender, children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    children += [started(tmp_path), started(tmp_path)]
    sender.receivers(2, 20)
    files, passed = weights(tmp_path / "w", 4_000_000), 0

    def stop(name: str) -> None:
        nonlocal passed
        passed += name == "broadcast.sent"
        if passed == 10:
            children[1].signal(signal.SIGSTOP)

    monkeypatch.setattr(sending, "failpoint", stop)
    sent = sender.send(files)
    assert (len(sent.got), sent.lost) == (1, ["it hangs"])
    assert children[0].takes(files)
    children[1].signal(signal.SIGCONT)
    assert not children[1].takes(files)
    until(lambda: children[1].shown()["coming"] == 0)
    assert len(sender.send(weights(tmp_path / "w", seed=3)).got) == 2


@pytest.mark.parametrize("failpoint", ["broadcast.send", "broadcast.sent:1", "broadcast.sent:2"])
def test_a_trainer_killed_mid_way_and_started_again(
    tmp_path: Path, children: list[Child], receiver: Receiver, failpoint: str
) -> None:
    """What did not come whole is not there; the next trainer, with another port and secret, is found by itself."""
    files = weights(tmp_path / "w", 60_000_000)
    path = files["model.safetensors"][0]
    first = Child(trainer, tmp_path / "broadcast", 0, failpoint)
    children.append(first)
    first.say(path)
    assert first.ended() == -signal.SIGKILL
    assert not has(receiver, files)
    before = talk.find(tmp_path / "broadcast")
    second = Child(trainer, tmp_path / "broadcast", 0, "")
    children.append(second)
    after = talk.find(tmp_path / "broadcast")
    assert before is not None
    assert after is not None
    assert before.secret != after.secret
    second.say(path)
    assert second.line() == 1
    assert has(receiver, files)


def test_two_trainers(tmp_path: Path, children: list[Child], receiver: Receiver) -> None:
    """The engine hears the one it is connected to; when that ends, the one whose file is there. Nothing mixes."""
    mine, theirs = weights(tmp_path / "w", seed=1), weights(tmp_path / "w", seed=2)
    first = Sender(Listening(tmp_path / "broadcast", "127.0.0.1", 0))
    first.start()
    assert first.receivers(1, 20) == 1
    second = Sender(Listening(tmp_path / "broadcast", "127.0.0.1", 0))
    second.start()
    assert len(second.send(theirs).got) == 0
    assert len(first.send(mine).got) == 1
    with pytest.raises(WireError, match=r"Set training\.broadcast to a free port"):
        Sender(Listening(tmp_path / "broadcast", "127.0.0.1", first.port)).start()
    first.close()
    assert talk.find(tmp_path / "broadcast") is not None  # the other's
    assert second.receivers(1, 20) == 1
    assert len(second.send(theirs).got) == 1
    assert has(receiver, mine)
    assert has(receiver, theirs)
    second.close()
    assert talk.find(tmp_path / "broadcast") is None


def test_an_impostor_where_the_trainer_was(tmp_path: Path, receiver: Receiver) -> None:
    """The trainer died, and somebody else listens on its port. The engine takes nothing, and finds the next trainer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        talk.tell(tmp_path / "broadcast", talk.Where("127.0.0.1", port, b"r" * 32))
        refused: list[str] = []

        def pretend() -> None:
            connection, _ = listener.accept()
            try:
                talk.admit(connection, b"not the secret")
            except WireError as error:
                refused.append(error.message)

        thread = threading.Thread(target=pretend)
        thread.start()
        thread.join(10)
        assert refused
        assert not receiver.shown()["connected"]
    made = Sender(Listening(tmp_path / "broadcast", "127.0.0.1", 0))
    made.start()
    assert made.receivers(1, 20) == 1
    made.close()


def test_strangers_at_the_port_do_not_get_in_the_way(tmp_path: Path, sender: Sender, receiver: Receiver) -> None:
    sender.receivers(1, 20)
    files = weights(tmp_path / "w")
    with contextlib.ExitStack() as stack:
        for number in range(20):
            stranger = stack.enter_context(socket.create_connection(("127.0.0.1", sender.port)))
            stranger.sendall(os.urandom(number))
        assert sender.receivers() == 1
        assert len(sender.send(files).got) == 1
    assert has(receiver, files)


def test_nonsense_at_the_ports_of_a_transfer_ends_neither_side(
    tmp_path: Path, sender: Sender, children: list[Child], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever connects to the store or to a member's own port with anything but its language costs at most the
    transfer: the files are still there."""
    children.append(started(tmp_path))
    sender.receivers(1, 20)
    monkeypatch.setattr(sending, "PATIENCE", 1.0)
    disturbed = dict[str, int]()

    def disturb(name: str) -> None:
        if disturbed.get(name, 0) < 5:
            disturbed[name] = disturbed.get(name, 0) + 1
            for pid in (os.getpid(), children[0].process.pid):
                for port in ports(pid):
                    if port != sender.port:
                        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1) as other:
                            other.sendall(b"\xff" * 4096)

    with monkeypatch.context() as patched:
        patched.setattr(sending, "failpoint", disturb)
        for seed in range(5):
            sender.send(weights(tmp_path / "w", 40_000_000, seed=seed))
    assert disturbed == {"broadcast.send": 5, "broadcast.sent": 5}
    assert children[0].process.is_alive()
    files = weights(tmp_path / "w", seed=9)
    assert len(sender.send(files).got) == 1
    assert children[0].takes(files)


def ports(pid: int) -> set[int]:
    """TCP ports on which a process listens."""
    sockets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            sockets.add(os.readlink(entry))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(int(fields[1].rpartition(":")[2], 16))
    return found


def test_everything_listens_on_the_address_it_was_given(
    tmp_path: Path, sender: Sender, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = ports(os.getpid()) - {sender.port}  # such as those of a Ray that earlier tests began in this process
    sender.receivers(1, 20)
    seen: set[str] = set()

    def look(name: str) -> None:
        for table in ("tcp", "tcp6"):
            for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                host, _, port = fields[1].rpartition(":")
                if fields[3] == "0A" and int(port, 16) in mine:
                    seen.add(host)

    mine: set[int] = set()

    def failpoint(name: str) -> None:
        mine.update(ports(os.getpid()) - others)
        look(name)

    monkeypatch.setattr(sending, "failpoint", failpoint)
    assert len(sender.send(weights(tmp_path / "w")).got) == 1
    assert len(mine) >= 2  # the greeting, the store
    assert seen == {"0100007F"}


def test_nothing_is_left_behind(tmp_path: Path, sender: Sender, receiver: Receiver) -> None:
    """Threads, descriptors: the same after many broadcasts as after a few."""
    sender.receivers(1, 20)

    def count() -> tuple[int, int]:
        tasks = len(list(Path("/proc/self/task").iterdir()))
        return tasks, len(list(Path("/proc/self/fd").iterdir()))

    for seed in range(5):
        assert len(sender.send(weights(tmp_path / "w", 100_000, seed)).got) == 1
    time.sleep(0.2)
    before = count()
    for seed in range(5, 25):
        assert len(sender.send(weights(tmp_path / "w", 100_000, seed)).got) == 1
    until(lambda: count()[0] <= before[0] and count()[1] <= before[1])


def test_python_goes_on_while_a_group_waits(tmp_path: Path) -> None:
    """The lock is not held by a store or a group that nobody comes to: the model's thread would stand still."""
    gaps, done = [0.0], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not done.is_set():
            time.sleep(0.001)
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.monotonic()
    with group.store("127.0.0.1") as (_, port):
        seat = group.Seat("127.0.0.1", port, "nobody", 1, 2, "127.0.0.1", 1.0)
        with pytest.raises(RuntimeError), group.group(seat, group.torch.device("cpu")):
            pass
    waited = time.monotonic() - began
    done.set()
    ticking.join()
    assert 0.5 < waited < 10
    assert max(gaps) < waited / 2


# --- in the trainer's process -----------------------------------------------------------------------------------------

SERVER = """
import socket, sys
from pathlib import Path
from reef.engines import WeightFiles
from reef.trainers import Ground
from reef.trainers.broadcast import Listening
from reef.trainers.server import run

base = WeightFiles("base", {}, {"base": {"name": "tiny", "digest": "d"}, "kind": "base"})
ground = Ground(Path(sys.argv[2]), Path(sys.argv[3]), lambda release: base)
print("started", flush=True)
listening = Listening(Path(sys.argv[4]), "127.0.0.1", int(sys.argv[5]))
run(socket.socket(fileno=int(sys.argv[1])), ground, broadcast=listening)
"""


async def steps_of(
    place: Path, tiny: Path, port: int, orders: list[Step], enough: Callable[[Stepped], bool] = lambda made: True
) -> tuple[list[Stepped], dict[str, Any]]:
    """What a trainer's process made of orders, and what it says of itself when the last one is `enough`."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place / "trainer.sock"))
    listener.listen(4)
    number = listener.fileno()
    arguments = [str(number), str(tiny), str(place / "training"), str(place / "broadcast"), str(port)]
    process = subprocess.Popen([sys.executable, "-c", SERVER, *arguments], pass_fds=[number])
    client, made = Client(place / "trainer.sock"), list[Stepped]()
    try:
        for order in orders:
            made += [item async for item in client.stream(order) if isinstance(item, Stepped)]
        while not enough(made[-1]):
            await asyncio.sleep(0.02)
        pong = await client.call(Ping(), timeout=10)
        assert isinstance(pong, Pong)
        return made, pong.detail
    finally:
        await client.close()
        process.terminate()
        assert process.wait(20) == 0
        listener.close()


async def test_each_step_reaches_the_engine(tmp_path: Path, tiny: Path, order: Make, receiver: Receiver) -> None:
    def enough(made: Stepped) -> bool:
        last = receiver.shown()["last"]
        files = step_files(Path(made.folder))
        return last is not None and last["files"] == {name: digest[:12] for name, (_, digest, _) in files.items()}

    made, detail = await steps_of(tmp_path, tiny, 0, [order(), order(2), order(2)], enough)
    assert [one.reused for one in made] == [False, False, True]
    assert detail["broadcast"]["address"].startswith("127.0.0.1:")
    assert has(receiver, step_files(Path(made[1].folder)))


async def test_a_port_that_is_taken_stops_no_training(tmp_path: Path, tiny: Path, order: Make) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        made, detail = await steps_of(tmp_path, tiny, taken.getsockname()[1], [order()])
    assert len(made) == 1
    assert "broadcast" not in detail
    assert not (tmp_path / "broadcast").exists()


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("127.0.0.1:0", ("127.0.0.1", 0)),
        ("trainer.lan:9000", ("trainer.lan", 9000)),
        ("[::1]:65535", ("::1", 65535)),
        *((wrong, None) for wrong in ("", "9000", ":0", "h:", "h:x", "h:-1", "h:65536", "::1:9", "[h]:9", "[]:9")),
        *((every, None) for every in ("0.0.0.0:0", "[::]:0")),
    ],
)
def test_the_address_in_the_configuration(address: str, found: tuple[str, int] | None) -> None:
    if found is not None:
        assert listening(address) == found
        assert TrainingSettings(broadcast=address).broadcast == address
        return
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:0"):
        TrainingSettings(broadcast=address)


def test_what_was_sent_is_told(tmp_path: Path, sender: Sender, receiver: Receiver) -> None:
    assert sender.shown()["last"] == {"bytes": 0, "got": 0, "refused": [], "lost": []}
    sender.receivers(1, 20)
    sent = sender.send(weights(tmp_path / "w", 1000))
    assert isinstance(sent, Sent)
    assert sender.shown() == {
        "address": f"127.0.0.1:{sender.port}",
        "receivers": 1,
        "sent": 1,
        "last": {"bytes": 1024, "got": 1, "refused": [], "lost": []},
    }
