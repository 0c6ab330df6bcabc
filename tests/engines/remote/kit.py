"""Releases, stub servers and engines over them, for tests of engines that are servers of their own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from reef.core.errors import MissingError
from reef.engines import Answer, Ask, Head, Piece, WeightFiles
from reef.engines.local.layout import read_layout
from reef.engines.remote import Away
from reef.engines.remote.engine import RemoteEngine
from reef.engines.remote.sglang import SglangEngine
from reef.engines.remote.vllm import VllmEngine
from tests.engines.kit import make_lora, make_tiny
from tests.engines.remote.stub import Said, Stub, serving
from tests.engines.remote.stub_sglang import SglangStub
from tests.engines.remote.stub_vllm import VllmStub

BASE = "b" * 40
LORAS = tuple(f"{number}" * 40 for number in (1, 2, 3))
FULLS = tuple(f"{letter}" * 40 for letter in "de")
DIGEST = "ab" * 32


@dataclass(frozen=True, slots=True)
class World:
    """A base model and releases of it: adapters, and sets of full weights. `other` is another base of the same form."""

    folder: Path
    other: Path
    known: Mapping[str, WeightFiles]

    def resolve(self, release_id: str) -> WeightFiles:
        if release_id not in self.known:
            raise MissingError(f"no release {release_id}")
        return self.known[release_id]


def make_world(folder: Path) -> World:
    tiny = make_tiny(folder / "tiny", max_position_embeddings=2048)
    meta = {"base": {"name": "tiny", "digest": DIGEST}}
    known = {BASE: WeightFiles("base", {}, meta)}
    for seed, release in enumerate(LORAS):
        made = make_lora(folder / f"lora{seed}", read_layout(tiny), seed=seed)
        known[release] = WeightFiles("lora", {path.name: path for path in made.iterdir()}, meta)
    for seed, release in enumerate(FULLS):
        path = folder / f"full{seed}.safetensors"
        _shaken(tiny / "model.safetensors", path, seed)
        known[release] = WeightFiles("full", {"model.safetensors": path}, meta)
    other = make_tiny(folder / "other", max_position_embeddings=2048)
    _shaken(other / "model.safetensors", other / "model.safetensors", 9)
    return World(tiny, other, known)


def _shaken(source: Path, target: Path, seed: int) -> None:
    seeded = torch.Generator().manual_seed(seed)
    tensors = {name: each + torch.randn(each.shape, generator=seeded) * 0.1 for name, each in load_file(source).items()}
    save_file(tensors, target, metadata={"format": "pt"})


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of server: its stub, its engine, and where what is done."""

    name: str
    stub: Callable[..., Any]
    engine: Callable[..., RemoteEngine]
    ask: str  # the path of answers
    load: str  # of adapters
    drop: str
    swap: str  # of full weights

    def honest(self, world: World, **options: Any) -> Any:
        return self.stub(world.folder, **options)


VLLM = Kind(
    "vllm",
    VllmStub,
    VllmEngine,
    "/v1/chat/completions",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/collective_rpc",
)
SGLANG = Kind(
    "sglang",
    SglangStub,
    SglangEngine,
    "/generate",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/update_weights_from_disk",
)
KINDS = (VLLM, SGLANG)


def away(world: World, place: Path, *stubs: Stub, **changes: Any) -> Away:
    fields: dict[str, Any] = {
        "name": "gpu",
        "urls": tuple(stub.url for stub in stubs),
        "model": None,
        "key": None,
        "folder": world.folder,
        "base": "tiny",
        "digest": DIGEST,
        "resolve": world.resolve,
        "place": place,
        "connect": 2.0,
        "idle": 4.0,
    }
    return Away(**fields | changes)


@contextlib.asynccontextmanager
async def engine_of(
    kind: Kind, world: World, place: Path, *stubs: Stub, changes: Mapping[str, Any] | None = None, **options: Any
) -> AsyncIterator[RemoteEngine]:
    made = kind.engine(
        away(world, place, *stubs, **(changes or {})), **{"turn": 0.05, "wait": 10.0, "patience": 10.0, **options}
    )
    try:
        yield made
    finally:
        await made.close()


@contextlib.asynccontextmanager
async def running(
    kind: Kind, world: World, place: Path, count: int = 1, *, stub: Mapping[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[RemoteEngine, list[Any]]]:
    """An engine over `count` honest servers."""
    stubs = [kind.honest(world, **(stub or {})) for _ in range(count)]
    async with serving(*stubs), engine_of(kind, world, place, *stubs, **options) as engine:
        yield engine, stubs


def ask(
    release: str = BASE,
    text: str = "hello there",
    *,
    stream: bool = False,
    priority: int = 0,
    session: str | None = None,
    receipt: str = "0" * 32,
    **fields: Any,
) -> Ask:
    messages = [{"role": "user", "content": text}]
    body = {"model": "m", "messages": messages, "stream": stream, "max_tokens": 12, "seed": 5, **fields}
    return Ask(receipt, release, "chat", json.dumps(body).encode(), stream, {}, priority, session=session)


async def collect(engine: RemoteEngine, request: Ask) -> tuple[Head, list[Piece], Answer]:
    async with aclosing(engine.answer(request)) as items:  # type: ignore[type-var]
        head, *pieces, answer = [item async for item in items]
    assert isinstance(head, Head)
    assert isinstance(answer, Answer)
    return head, [piece for piece in pieces if isinstance(piece, Piece)], answer


def truth(stub: Stub, answer: Answer, weights: str) -> list[float]:
    """What the log-probs of an answer's first choice are with these weights."""
    choice = (answer.choices or ())[0]
    whole = [*(answer.prompt_ids or ()), *(choice.output_ids or ())]
    rated = stub.brain.rate(whole, weights)[len(answer.prompt_ids or ()) :]
    return [value for value in rated if value is not None]


def trainable(answer: Answer) -> bool:
    """Whether a record of this answer would be trained on."""
    return answer.untrainable is None and all(choice.output_ids for choice in answer.choices or ())


def told(said: Said) -> str:
    """The one set of weights that a sequence came from. Fails for one that came from several."""
    assert said.origin == {said.weights}
    return said.weights
