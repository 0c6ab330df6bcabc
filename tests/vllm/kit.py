"""A real vLLM server on CPUs, releases of the embedded model, and what their log-probs must be."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from safetensors.torch import load_file, save_file

from reef.core.errors import MissingError
from reef.engines import Answer, Ask, Head, Piece, WeightFiles
from reef.engines.local.folder import ModelFolder
from reef.engines.local.layout import read_layout
from reef.engines.remote import Away
from reef.engines.remote.vllm import VllmEngine
from tests.engines.kit import make_lora

PYTHON = Path(__file__).parent.parent.parent / ".vllm" / "bin" / "python"
NAME = "base"
START = 900.0  # seconds that a server may take on a busy machine
FLAGS = (
    *("--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--max-num-seqs", "16"),
    *("--enable-lora", "--max-loras", "4", "--max-cpu-loras", "16", "--max-lora-rank", "16"),
    *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs"),
)
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}
BASE = "b" * 40
LORAS = tuple(f"{number:040x}" for number in range(1, 5))
FULLS = tuple(f"{number:040x}" for number in range(0xE1, 0xE3))


class Vllm:
    """One server. `folder` is where it runs and logs: not in a folder that holds one named `vllm`."""

    def __init__(self, model: Path, folder: Path, *flags: str) -> None:
        self._model, self._folder, self._flags = model, folder, flags
        with contextlib.closing(socket.socket()) as found:
            found.bind(("127.0.0.1", 0))
            self.port = int(found.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"),
            *("--port", str(self.port), "--model", str(self._model), "--served-model-name", NAME),
            *(self._flags or FLAGS),
        ]
        with (self._folder / "vllm.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self._folder,
                env={**os.environ, **ENVIRONMENT},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, seconds: float = START) -> None:
        assert self._process is not None
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(OSError), urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                if answer.status == 200:
                    return
            time.sleep(0.5)
        raise AssertionError(f"vLLM did not start:\n{self.log()[-4000:]}")

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """As the kernel would: all its processes at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def log(self) -> str:
        return (self._folder / "vllm.log").read_text(errors="replace")

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.loads(answer.read())

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            data = answer.read()
        with contextlib.suppress(ValueError):
            return json.loads(data)
        return data.decode()


@contextlib.contextmanager
def started(model: Path, folder: Path, *flags: str) -> Iterator[Vllm]:
    server = Vllm(model, folder, *flags)
    server.start()
    try:
        server.wait()
        yield server
    finally:
        server.kill()


class World:
    """The embedded model with releases of it: adapters, and sets of full weights."""

    def __init__(self, model: ModelFolder, folder: Path) -> None:
        self.model = model
        meta = {"base": {"name": model.name, "digest": model.digest}}
        self.known = {BASE: WeightFiles("base", {}, meta)}
        layout = read_layout(model.path)
        for seed, release in enumerate(LORAS):
            made = make_lora(folder / f"lora{seed}", layout, seed=seed, rank=8, alpha=16, size=0.03)
            self.known[release] = WeightFiles("lora", {path.name: path for path in made.iterdir()}, meta)
        tensors = load_file(model.path / "model.safetensors")
        for seed, release in enumerate(FULLS):
            path = folder / f"full{seed}.safetensors"
            seeded = torch.Generator().manual_seed(seed)
            shaken = {
                name: (each.float() * (1 + 0.05 * torch.randn(each.shape, generator=seeded))).to(each.dtype)
                for name, each in tensors.items()
            }
            save_file(shaken, path, metadata={"format": "pt"})
            self.known[release] = WeightFiles("full", {"model.safetensors": path}, meta)

    def resolve(self, release_id: str) -> WeightFiles:
        if release_id not in self.known:
            raise MissingError(f"no release {release_id}")
        return self.known[release_id]

    def away(self, place: Path, *urls: str, **changes: Any) -> Away:
        fields: dict[str, Any] = {
            "name": "gpu",
            "urls": urls,
            "model": NAME,
            "key": None,
            "folder": self.model.path,
            "base": self.model.name,
            "digest": self.model.digest,
            "resolve": self.resolve,
            "place": place,
        }
        return Away(**fields | changes)

    def truth(self, release: str, tokens: Sequence[int], start: int, temperature: float = 1.0) -> list[float]:
        """The log-probs by transformers, in float32."""
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        found = self.known[release]
        model = AutoModelForCausalLM.from_pretrained(self.model.path, dtype=torch.float32)
        if found.kind == "lora":
            model = PeftModel.from_pretrained(model, str(next(iter(found.files.values())).parent))
        elif found.kind == "full":
            weights = {name: each.float() for name, each in load_file(found.files["model.safetensors"]).items()}
            missing, unexpected = model.load_state_dict(weights, strict=False)
            assert not unexpected
            assert set(missing) <= {"lm_head.weight"}
        with torch.no_grad():
            logits = model(torch.tensor([list(tokens)])).logits[0].float() / temperature
        rated = torch.log_softmax(logits, -1)
        return [float(rated[at - 1, tokens[at]]) for at in range(start, len(tokens))]


@contextlib.asynccontextmanager
async def engine_of(world: World, place: Path, *urls: str, **options: Any):
    made = VllmEngine(world.away(place, *urls), **options)
    try:
        yield made
    finally:
        await made.close()


def ask(
    release: str = BASE,
    text: str = "Tell me about the sea.",
    *,
    stream: bool = False,
    session: str | None = None,
    **fields: Any,
) -> Ask:
    messages = [{"role": "user", "content": text}]
    body = {"model": "m", "messages": messages, "stream": stream, "max_tokens": 12, **fields}
    return Ask("0" * 32, release, "chat", json.dumps(body).encode(), stream, {}, 0, session=session)


async def collect(engine: VllmEngine, request: Ask) -> tuple[Head, list[Piece], Answer]:
    async with aclosing(engine.answer(request)) as items:  # type: ignore[type-var]
        head, *pieces, answer = [item async for item in items]
    assert isinstance(head, Head)
    assert isinstance(answer, Answer)
    return head, [piece for piece in pieces if isinstance(piece, Piece)], answer


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The mean distance."""
    assert len(one) == len(other) > 0
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / len(one)
