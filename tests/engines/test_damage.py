"""Weight files that are missing, cut off, only a pointer or changed: the real engine process over a real chain names
them before anything of them is served, and goes on answering with the release before.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from reef.core.errors import DigestError
from reef.core.nouns import Release
from reef.engines import Answer
from reef.engines.local.client import LocalEngine
from reef.engines.local.layout import Layout
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from reef.releases.lfs import pointer
from tests.engines.kit import ask, make_lora

PROGRAM = """
import socket, sys
from pathlib import Path
from reef.engines import WeightFiles
from reef.engines.local.server import Options, run
from reef.releases.chain import GitChain

chain = GitChain(Path(sys.argv[3]))

def resolve(release):
    part = chain.get(release).parts["weights"]
    return WeightFiles(part.kind, chain.files(release, "weights"), part.meta)

run(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), resolve, Options(dtype="float32", threads=1, full=1))
"""
LARGE = {"lora": "adapter_model.safetensors", "full": "model.safetensors"}


class World:
    """An engine process, a client of it, and the chain it reads."""

    def __init__(self, place: Path, tiny: Path, layout: Layout) -> None:
        self.place, self.tiny, self.layout = place, tiny, layout
        self.chain = GitChain(place / "releases.git")
        self.chain.open()
        base = NewPart("base", {"weights.json": b'{"kind":"base"}'}, {"kind": "base"})
        self.base = self.head = self.chain.publish("a", Draft("create", {"weights": base}), None)

    def publish(self, kind: str, seed: int) -> Release:
        files: dict[str, Path | bytes] = {"weights.json": b"{}"}
        if kind == "lora":
            lora = make_lora(self.place / f"lora{seed}", self.layout, seed=seed)
            files |= {file.name: file for file in lora.iterdir()}
        else:
            tensors = load_file(self.tiny / "model.safetensors")
            name = "model.layers.0.mlp.down_proj.weight"
            tensors[name] = torch.roll(tensors[name], seed, 0)
            save_file(tensors, self.place / f"full{seed}.safetensors")
            files["model.safetensors"] = self.place / f"full{seed}.safetensors"
        draft = Draft("publish", {"weights": NewPart(kind, files, {"kind": kind})}, base=self.head.id, step=seed)
        self.head = self.chain.publish("a", draft, self.head.id)
        return self.head

    async def said(self, release: Release) -> tuple[int, ...]:
        *_, answer = [
            each async for each in self.engine.answer(ask("Hello", release=release.id, temperature=0, max_tokens=8))
        ]
        assert isinstance(answer, Answer)
        assert answer.choices is not None
        [span] = answer.choices[0].spans
        assert span.release_id == release.id
        return answer.choices[0].output_ids or ()


@pytest.fixture
async def world(tmp_path: Path, tiny: Path, layout: Layout) -> AsyncIterator[World]:
    made, short = World(tmp_path, tiny, layout), Path(tempfile.mkdtemp(prefix="reef-"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(short / "engine.sock"))
    listener.listen(16)
    command = [sys.executable, "-c", PROGRAM, str(listener.fileno()), str(tiny), str(tmp_path / "releases.git")]
    process = subprocess.Popen(command, pass_fds=(listener.fileno(),), env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    made.engine = LocalEngine(short / "engine.sock", model="m")
    yield made
    await made.engine.close()
    process.kill()
    process.wait()
    listener.close()
    shutil.rmtree(short)


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def change(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGE: dict[str, tuple[Callable[[bytes], bytes] | None, str]] = {
    "missing": (None, "is only an LFS pointer here"),
    "cut": (cut, "bytes where"),
    "pointer": (lambda data: pointer("a" * 64, len(data)), "bytes where"),
    "changed": (change, "does not match its digest"),
}


@pytest.mark.parametrize("kind", ["lora", "full"])
async def test_damaged_weights_are_named_and_the_release_before_goes_on(world: World, kind: str) -> None:
    """Case 55: all four kinds of damage, one release each; then the bytes come back, and the release is served."""
    good = world.publish(kind, 1)
    await world.engine.load(good.id)
    before = await world.said(good)
    assert before != await world.said(world.base)
    bad: dict[str, tuple[Release, Path, bytes]] = {}
    for seed, (name, (damage, words)) in enumerate(DAMAGE.items(), start=2):
        release = world.publish(kind, seed)
        file = world.chain.files(release.id, "weights")[LARGE[kind]]
        bad[name] = (release, file, data := file.read_bytes())
        file.unlink()
        if damage is not None:
            file.write_bytes(damage(data))
        for _ in range(2):  # a second try finds it again
            with pytest.raises(DigestError, match=words) as caught:
                await world.engine.load(release.id)
            assert f"weights/{LARGE[kind]} of release {release.id}" in caught.value.message
        with pytest.raises(DigestError, match=words):
            await world.said(release)
        with pytest.raises(DigestError, match=words):
            await world.engine.rate(release.id, [[1, 2, 3]], [1])
        assert await world.said(good) == before
    for release, file, data in bad.values():
        file.unlink(missing_ok=True)
        file.write_bytes(data)
        await world.engine.load(release.id)
        assert await world.said(release) != before
    assert await world.said(good) == before


@pytest.mark.parametrize("kind", ["lora", "full"])
async def test_a_file_that_is_cut_off_while_it_answers(world: World, kind: str) -> None:
    """What is in memory is a copy: it goes on answering, and the damage is named when the file is read again."""
    good = world.publish(kind, 1)
    await world.engine.load(good.id)
    before = await world.said(good)
    file = world.chain.files(good.id, "weights")[LARGE[kind]]
    file.chmod(0o644)
    os.truncate(file, 16)
    assert await world.said(good) == before
    same = world.chain.publish("a", Draft("rollback", {}, base=good.id, step=1), world.head.id)
    with pytest.raises(DigestError, match="bytes where"):
        await world.engine.load(same.id)
    assert await world.said(good) == before
