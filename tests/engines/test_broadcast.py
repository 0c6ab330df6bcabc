"""What arrives by broadcast: who may talk, files in memory, bounded room, weights that equal those read from files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from reef.core.errors import ConfigError, EngineError, MissingError, WireError
from reef.core.nouns import Part
from reef.engines import WeightFiles
from reef.engines.local.broadcast import arrivals as room
from reef.engines.local.broadcast import group, talk
from reef.engines.local.broadcast.arrivals import Arrivals, Space
from reef.engines.local.broadcast.held import Digests, Held
from reef.engines.local.broadcast.talk import ALIGNED, Carried, places
from reef.engines.local.layout import read_layout
from reef.engines.local.lora import Shelf, load_lora
from reef.engines.local.model import load_weights
from reef.engines.local.server import Options
from tests.engines.kit import Releases, lora_files, make_lora, make_tiny

SECRET = b"s" * 32


def carried(name: str, data: bytes) -> Carried:
    return Carried(name, hashlib.sha256(data).hexdigest(), len(data))


def flat(*contents: bytes) -> torch.Tensor:
    """The contents one after the other, as a broadcast lays them."""
    whole = b"".join(data + bytes(-len(data) % ALIGNED) for data in contents)
    return torch.frombuffer(bytearray(whole), dtype=torch.uint8)


def arrive(found: Arrivals, files: dict[str, bytes]) -> Space:
    """As if these bytes had come."""
    space = found.offer([carried(name, data) for name, data in files.items()])
    assert isinstance(space, Space), space
    space.flat.copy_(flat(*files.values()))
    found.keep(space)
    return space


def wanted(files: dict[str, bytes]) -> dict[str, tuple[str, int]]:
    return {name: (hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()}


# --- who may talk -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(answer: Any) -> Iterator[talk.Where]:
    """A port at which each connection is handed to `answer`."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield talk.Where("127.0.0.1", listener.getsockname()[1], SECRET)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


def test_both_sides_prove_themselves_and_talk() -> None:
    links: list[talk.Link] = []
    with listening(lambda connection: links.append(talk.admit(connection, SECRET))) as where:
        link = talk.dial(where)
        until(lambda: links)
        assert link.send(talk.Ready(generation="g"))
        assert links[0].receive() == talk.Ready(generation="g")
        offer = talk.Offer(generation="h", files=[Carried("a", "0" * 64, 5)], device="cpu")
        assert links[0].send(offer)
        assert link.receive() == offer
        assert (link.peer, link.own) == ("127.0.0.1", "127.0.0.1")
        link.close()
        assert links[0].receive() is None
        assert not link.send(offer)


def test_a_stranger_at_the_port_is_told_nothing() -> None:
    said: list[str] = []

    def admit(connection: socket.socket) -> None:
        with pytest.raises(WireError) as caught:
            talk.admit(connection, b"another" * 5)
        said.append(caught.value.message)

    with listening(admit) as where:
        with pytest.raises(WireError, match="does not know the secret, so it is not this trainer"):
            talk.dial(where)
        until(lambda: said)
    assert said == ["somebody who does not know the secret connected; it was told nothing"]


def test_an_impostor_cannot_be_the_trainer() -> None:
    """It greets, and claims to be the sender with what it heard: the receiver's own proof, or its own words."""

    def echo(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(4096):
                connection.sendall(data)

    def repeat(connection: socket.socket) -> None:
        with contextlib.suppress(OSError, WireError):
            talk._hello(connection, time.monotonic() + 5)
            proof = talk._receive(connection, talk.STRANGER)
            assert isinstance(proof, talk.Proof)
            talk._send(connection, talk._encode(proof))

    for impostor, words in ((echo, "says what it hears"), (repeat, "does not know the secret")):
        with listening(impostor) as where, pytest.raises(WireError, match=words):
            talk.dial(where)


@pytest.mark.parametrize(
    "data", [b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, (8).to_bytes(4) + b"\x00" * 8, (5000).to_bytes(4)]
)
def test_nonsense_is_refused_by_both(data: bytes) -> None:
    failed: list[WireError] = []

    def admit(connection: socket.socket) -> None:
        with pytest.raises(WireError) as caught:
            talk.admit(connection, SECRET)
        failed.append(caught.value)

    with listening(admit) as where, socket.create_connection((where.host, where.port)) as other:
        other.sendall(data)
        with contextlib.suppress(OSError):  # refused already
            other.shutdown(socket.SHUT_WR)
        until(lambda: failed)

    def nonsense(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.close()

    with listening(nonsense) as where, pytest.raises(WireError):
        talk.dial(where)


def test_a_peer_that_drips_does_not_hold_anybody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(talk, "GREETING", 0.2)

    def drip(connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            connection.sendall((4000).to_bytes(4))
            while True:
                connection.sendall(b"x")
                time.sleep(0.05)

    began = time.monotonic()
    with listening(drip) as where, pytest.raises(WireError, match="did not greet"):
        talk.dial(where)
    assert time.monotonic() - began < 3


def test_the_file_that_says_where_is_its_owners_alone(tmp_path: Path) -> None:
    place = tmp_path / "broadcast"
    assert talk.find(place) is None
    where = talk.Where("127.0.0.1", 4711, SECRET)
    talk.tell(place, where)
    assert talk.find(place) == where
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["broadcast"]
    place.chmod(0o644)
    with pytest.raises(WireError, match="chmod 600"):
        talk.find(place)
    place.chmod(0o600)
    for text in ("", "[]", '{"host": "h"}', '{"host": "h", "port": 1, "secret": "zz"}'):
        place.write_text(text)
        with pytest.raises(WireError, match="remove it"):
            talk.find(place)


# --- files in memory --------------------------------------------------------------------------------------------------


def test_tensors_are_views_that_equal_those_of_the_file(tmp_path: Path) -> None:
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7, 2).to(torch.bfloat16),
        "c": torch.arange(4),
        "d": torch.tensor([True, False, True]),
        "e": torch.tensor(2.5),
        "f": torch.empty(0, 3),
    }
    save_file(tensors, tmp_path / "one.safetensors", metadata={"format": "pt"})
    data = (tmp_path / "one.safetensors").read_bytes()
    whole = flat(b"x" * 7, data)
    held = Held("one", whole[ALIGNED : ALIGNED + len(data)])
    assert held.read_bytes() == data
    found = held.tensors()
    for name, tensor in load_file(tmp_path / "one.safetensors").items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)
    assert found["a"].untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()


def test_a_tensor_at_an_odd_place_is_copied() -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    values = torch.tensor([1.5, -2.0])
    data = len(header).to_bytes(8, "little") + header + values.numpy().tobytes()
    assert (8 + len(header)) % 4 != 0
    assert torch.equal(Held("odd", flat(data)[: len(data)]).get_tensor("a"), values)


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"{",
        b'{"a": 1}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}}',
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [-4, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}}',
        b'{"a": {"dtype": "I2", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 8]}}',
    ],
)
def test_a_header_that_lies_is_an_error(header: bytes) -> None:
    data = len(header).to_bytes(8, "little") + header.ljust(64) + bytes(8)
    with pytest.raises(EngineError, match="no whole"):
        Held("bad", flat(data)[: len(data)]).tensors()
    with pytest.raises(EngineError, match="no whole"):
        Held("cut", flat(data)[:12]).tensors()


@pytest.mark.parametrize("chunk", [1, 7, 64, 100, 10_000])
def test_digests_come_from_chunks_of_any_size(chunk: int) -> None:
    contents = {"a": b"a" * 130, "b": b"", "c": bytes(range(200)), "d": b"d"}
    files = [carried(name, data) for name, data in contents.items()]
    buffer = flat(*contents.values())
    starts, size = places(files)
    assert size == buffer.numel()
    for damaged in (None, *starts):
        digests = Digests(files, buffer)
        copy = buffer.clone()
        if damaged is not None:
            buffer[damaged if damaged < size else 0] ^= 1
        for start in range(0, size, chunk):
            digests.take(start, min(size, start + chunk))
        buffer.copy_(copy)
        assert (digests.wrong() is None) == (damaged is None)


# --- room -------------------------------------------------------------------------------------------------------------


def test_an_arrival_is_found_by_its_digests_and_leaves_when_it_was_loaded() -> None:
    found, files = Arrivals(10_000), {"w": b"w" * 500, "config": b"{}"}
    arrive(found, files)
    with found.take(wanted(files)) as held:
        assert held is not None
        assert {name: one.read_bytes() for name, one in held.items()} == files
    with found.take(wanted(files)) as held:
        assert held is None
    shown = found.shown()
    assert (shown["received"], shown["loaded"], shown["read"], shown["waiting"]) == (1, 1, 1, [])
    assert found.offer([carried(name, data) for name, data in files.items()]) == "it is here"


def test_only_exactly_what_a_release_records_is_taken() -> None:
    found, files = Arrivals(10_000), {"w": b"w" * 500, "config": b"{}"}
    arrive(found, files)
    for other in ({"w": b"v" * 500, "config": b"{}"}, {**files, "more": b"m"}, {"w": b"w" * 499}):
        with found.take(wanted(other)) as held:
            assert held is None
    with found.take({}) as held:
        assert held is None
    with found.take(wanted({"w": files["w"]})) as held:
        assert held is not None


def test_one_that_could_not_be_loaded_stays() -> None:
    found, files = Arrivals(10_000), {"w": b"w" * 500}
    arrive(found, files)
    with pytest.raises(EngineError), found.take(wanted(files)) as held:
        assert held is not None
        raise EngineError("not finite")
    with found.take(wanted(files)) as held:
        assert held is not None


def test_room_is_bounded_and_the_oldest_goes() -> None:
    found = Arrivals(4096)
    assert "4160 bytes, and room for 4096" in str(found.offer([carried("w", b"x" * 4097)]))
    for number in range(6):
        arrive(found, {"w": bytes([number]) * 1500})
        assert found.shown()["bytes"] <= 4096
    kept = [number for number in range(6) if gets(found, {"w": bytes([number]) * 1500})]
    assert kept == [4, 5]
    for number in range(9):
        arrive(found, {"w": bytes([100 + number]) * 10})
    assert len(found.shown()["waiting"]) == room.KEPT


def test_what_is_being_read_is_never_overwritten() -> None:
    found, first, second = Arrivals(3000), {"w": b"1" * 1400}, {"w": b"2" * 1400}
    arrive(found, first)
    arrive(found, second)
    with found.take(wanted(first)) as one, found.take(wanted(second)) as two:
        assert one is not None
        assert two is not None
        assert found.offer([carried("w", b"3" * 1400)]) == "all the room is in use"
        assert one["w"].read_bytes() == first["w"]
        assert two["w"].read_bytes() == second["w"]
    arrive(found, {"w": b"3" * 1400})


def test_buffers_are_used_again() -> None:
    made: list[int] = []

    def make(device: torch.device, size: int) -> torch.Tensor:
        made.append(size)
        return group.buffer(device, size)

    found = Arrivals(100_000, make=make)
    for number in range(5):
        arrive(found, {"w": bytes([number]) * 5000})
        assert gets(found, {"w": bytes([number]) * 5000})
    assert len(made) == 1
    arrive(found, {"w": b"s" * 64})  # far too small for that buffer
    assert len(made) == 2
    space = found.offer([carried("w", b"t" * 5000)])
    assert isinstance(space, Space)
    found.drop(space)  # did not come; its buffer is free all the same
    arrive(found, {"w": b"u" * 5000})
    assert len(made) == 2


def test_who_wants_what_is_on_its_way_waits_but_not_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    found, files = Arrivals(10_000), {"w": b"w" * 500}
    space = found.offer([carried("w", files["w"])])
    assert isinstance(space, Space)
    seen: list[bool] = []
    waiting = threading.Thread(target=lambda: seen.append(gets(found, files)))
    waiting.start()
    time.sleep(0.05)
    assert seen == []
    space.flat.copy_(flat(files["w"]))
    found.keep(space)
    waiting.join(5)
    assert seen == [True]

    lost = found.offer([carried("w", b"v" * 500)])
    assert isinstance(lost, Space)
    waiting = threading.Thread(target=lambda: seen.append(gets(found, {"w": b"v" * 500})))
    waiting.start()
    found.drop(lost)
    waiting.join(5)
    assert seen == [True, False]

    monkeypatch.setattr(room, "PATIENCE", 0.05)
    assert isinstance(found.offer([carried("w", b"u" * 500)]), Space)
    assert not gets(found, {"w": b"u" * 500})


@pytest.mark.parametrize(
    "files",
    [[], [Carried("a", "0" * 64, 1)] * 2, [Carried("a", "0" * 64, -64)], [Carried(str(n), "0", 1) for n in range(65)]],
)
def test_an_offer_that_cannot_be_meant_is_refused(files: list[Carried]) -> None:
    assert Arrivals(10_000).offer(files) == "the offer is none"


def gets(found: Arrivals, files: dict[str, bytes]) -> bool:
    with found.take(wanted(files)) as held:
        if held is not None:
            assert {name: one.read_bytes() for name, one in held.items()} == files
        return held is not None


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_in_memory_are_those_of_the_file_and_keep_nothing_of_the_buffer(tiny: Path, dtype: torch.dtype) -> None:
    layout, file = read_layout(tiny), tiny / "model.safetensors"
    buffer = flat(file.read_bytes())
    read = load_weights([file], layout, dtype)
    taken = load_weights([Held("model.safetensors", buffer[: file.stat().st_size])], layout, dtype)
    buffer.zero_()
    x = torch.randn(3, layout.hidden, dtype=dtype)
    assert torch.equal(taken.embed, read.embed)
    assert torch.equal(taken.norm, read.norm)
    assert torch.equal(taken.head(x), read.head(x))
    for mine, theirs in zip(taken.layers, read.layers, strict=True):
        assert torch.equal(mine.attention_norm, theirs.attention_norm)
        assert torch.equal(mine.qkv(x), theirs.qkv(x))
        assert torch.equal(mine.gate_up(x), theirs.gate_up(x))


@pytest.mark.parametrize("rank", [1, 4])
def test_a_lora_in_memory_is_that_of_the_file_and_keeps_nothing_of_the_buffer(
    tiny: Path, tmp_path: Path, rank: int
) -> None:
    layout = read_layout(tiny)
    files = lora_files(make_lora(tmp_path / "lora", layout, seed=1, rank=rank)).files
    contents = {name: path.read_bytes() for name, path in files.items()}
    buffer = flat(*contents.values())
    starts, _ = places([carried(name, data) for name, data in contents.items()])
    held = {
        name: Held(name, buffer[start : start + len(data)])
        for (name, data), start in zip(contents.items(), starts, strict=True)
    }
    read, taken = load_lora(files, layout), load_lora(held, layout)
    buffer.zero_()
    for mine, theirs in zip(taken.pairs, read.pairs, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine:
            assert torch.equal(mine[name][0], theirs[name][0])
            assert torch.equal(mine[name][1], theirs[name][1])


class Chain:
    """Releases with what a chain records of each. Counts which files were asked for."""

    def __init__(self, known: dict[str, WeightFiles]) -> None:
        self.releases = Releases(known)
        self.parts = {
            name: Part(
                files.kind,
                {
                    **{one: (hashlib.sha256(p.read_bytes()).hexdigest(), p.stat().st_size) for one, p in
                       files.files.items()},
                    "weights.json": ("0" * 64, 2),
                },
                dict(files.meta),
            )
            for name, files in {"base": WeightFiles("base", {}, {}), **known}.items()
        }  # fmt: skip

    def recorded(self, release_id: str) -> Part:
        if release_id not in self.parts:
            raise MissingError(f"no release {release_id}")
        return self.parts[release_id]


def shelf(tiny: Path, chain: Chain, found: Arrivals, **more: Any) -> Shelf:
    layout = read_layout(tiny)
    base = load_weights([tiny / "model.safetensors"], layout, torch.float32)
    limits = {"loras": 4, "full": 2, **more}
    return Shelf(base, layout, torch.float32, chain.releases, arrivals=found, recorded=chain.recorded, **limits)


def full_files(folder: Path, scale: float) -> WeightFiles:
    folder.mkdir()
    tensors = load_file(make_tiny(folder / "base") / "model.safetensors")
    tensors["model.norm.weight"] *= scale
    save_file(tensors, folder / "model.safetensors")
    return WeightFiles("full", {"model.safetensors": folder / "model.safetensors"}, {})


async def test_a_release_is_taken_from_an_arrival_with_its_digests_and_else_from_files(
    tiny: Path, tmp_path: Path
) -> None:
    one, two = full_files(tmp_path / "one", 1.5), full_files(tmp_path / "two", 2.0)
    chain, found = Chain({"candidate": one, "release": one, "other": two}), Arrivals(1 << 24)
    arrive(found, {name: path.read_bytes() for name, path in one.files.items()})
    made = shelf(tiny, chain, found)
    first = await made.take("candidate")
    assert chain.releases.asked == []  # no file was looked at
    assert found.shown()["loaded"] == 1
    second = await made.take("release")  # the same bytes under another id: one set in memory
    assert second.weights is first.weights
    other = await made.take("other")
    assert chain.releases.asked == ["other"]
    assert not torch.equal(other.weights.norm, first.weights.norm)
    assert torch.equal(first.weights.norm * 4, other.weights.norm * 3)
    base = await made.take("base")
    assert base.weights is not first.weights
    with pytest.raises(MissingError):
        await made.take("unknown")


async def test_a_lora_is_taken_from_an_arrival(tiny: Path, tmp_path: Path) -> None:
    files = lora_files(make_lora(tmp_path / "lora", read_layout(tiny), seed=3))
    chain, found = Chain({"r": files}), Arrivals(1 << 24)
    arrive(found, {name: path.read_bytes() for name, path in files.files.items()})
    taken = await shelf(tiny, chain, found).take("r")
    assert chain.releases.asked == []
    read = await shelf(tiny, chain, found).take("r")
    assert chain.releases.asked == ["r"]
    assert taken.lora is not None
    assert read.lora is not None
    for mine, theirs in zip(taken.lora.pairs, read.lora.pairs, strict=True):
        assert all(torch.equal(mine[name][1], theirs[name][1]) for name in theirs)


async def test_weights_made_for_another_base_are_refused_from_an_arrival_too(tiny: Path, tmp_path: Path) -> None:
    files = full_files(tmp_path / "one", 1.5)
    meta = {"base": {"name": "other", "digest": "b" * 64}}
    chain, found = Chain({"r": WeightFiles("full", files.files, meta)}), Arrivals(1 << 24)
    arrive(found, {name: path.read_bytes() for name, path in files.files.items()})
    with pytest.raises(EngineError, match="other"):
        await shelf(tiny, chain, found, digest="a" * 64).take("r")


def test_the_option_is_checked() -> None:
    with pytest.raises(ConfigError, match="arrival_bytes"):
        Options(arrival_bytes=0)


def until(check: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)
