"""Full weights through the whole path with the embedded model: answers and reports, a step, the gate, an LFS release, a
swap while others ask, rollback and back, a LoRA recipe under full weights, an engine killed between publish and load.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from bench.kit.served import served
from reef.core.nouns import Release
from reef.core.rpc import Client
from reef.core.wire import Ping, Pong, Rate, Rated
from reef.engines.local.folder import prepare
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from reef.trainers.local.llama import Llama, pack

pytestmark = [pytest.mark.model, pytest.mark.timeout(400)]

CONFIG = """
reef: {{recipe: sao, train: full, learning_rate: 1.0e-4, batch_size: 2, port: {port}, state_dir: {state}}}
gate: {{policy: guarded, evaluate_every: 1}}
"""
SURE = "What is 2+2? Reply with only the number."
"""The base's first choice leads by half a nat at every token: rounding beside other requests changes nothing."""
GREEDY = {"temperature": 0, "seed": 1, "max_tokens": 12, "logprobs": True}


class Seat:
    """One user of a running server, and what a person at its machine could look at."""

    def __init__(self, state: Path, url: str, token: str) -> None:
        self.state = state
        self.chain = GitChain(state / "releases.git")
        self.client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {token}"}, timeout=60)
        self.url, self.token = url, token
        self.taught = ""  # the receipt of the answer that was good

    def ask(self, content: str, **more: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **more}
        answer = self.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        return answer

    def greedy(self) -> tuple[str, str, list[float]]:
        """The release that answered, its text and the log-probs of its tokens."""
        answer = self.ask(SURE, **GREEDY)
        choice = answer.json()["choices"][0]
        logprobs = [each["logprob"] for each in choice["logprobs"]["content"]]
        return answer.headers["x-reef-release-id"], choice["message"]["content"], logprobs

    def record(self, receipt: str) -> dict[str, Any]:
        return self.client.get(f"/reef/scenarios/default/records/{receipt}").json()

    def teach(self) -> None:
        for number in range(2):
            answer = self.ask(f"Say the number {number}.", max_tokens=6)
            receipt = answer.headers["x-reef-agent-record-id"]
            said = self.client.post("/reef/report", json={"score": float(number), "references": [receipt]})
            assert said.status_code in (200, 201, 202), said.text
            self.taught = receipt

    def served(self) -> str:
        return self.client.get("/reef/scenarios/default").json()["release_id"]

    def rollback(self, release_id: str) -> str:
        done = self.client.post("/reef/scenarios/default/rollback", json={"release_id": release_id})
        assert done.status_code == 200, done.text
        return done.json()["release_id"]

    def head(self) -> Release:
        found = self.chain.head("default")
        assert found is not None
        return found

    def call(self, message: Any) -> Any:
        """One message to the engine process."""

        async def once() -> Any:
            client = Client(self.state / "run" / "engine.sock")
            try:
                return await client.call(message, timeout=30)
            finally:
                await client.close()

        return asyncio.run(once())

    def engine(self) -> int:
        found = self.call(Ping())
        assert isinstance(found, Pong)
        return found.pid

    def rate(self, release_id: str, tokens: list[int]) -> list[float]:
        found = self.call(Rate(release_id=release_id, sequences=[tokens], starts=[1]))
        assert isinstance(found, Rated)
        return found.logprobs[0]


class Crowd:
    """Clients that stream answers all the while; every answer that is no whole one is in `failed`."""

    def __init__(self, seat: Seat, clients: int = 2, pause: float = 0.1) -> None:
        self.failed: list[str] = []
        self.releases: list[str] = []
        self._seat, self._stop, self._pause = seat, threading.Event(), pause
        self._threads = [threading.Thread(target=self._live, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _live(self, number: int) -> None:
        headers = {"authorization": f"Bearer {self._seat.token}"}
        with httpx.Client(base_url=self._seat.url, headers=headers, timeout=60) as client:
            while not self._stop.is_set():
                ask = {"role": "user", "content": f"Tell me about {number}."}
                body = {"messages": [ask], "stream": True, "max_tokens": 8}
                try:
                    with client.stream("POST", "/v1/chat/completions", json=body) as answer:
                        whole = b"".join(answer.iter_raw())
                        if answer.status_code != 200 or not whole.endswith(b"data: [DONE]\n\n"):
                            self.failed.append(f"{answer.status_code}: {whole[-200:]!r}")
                        self.releases.append(answer.headers.get("x-reef-release-id", ""))
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                time.sleep(self._pause)


def until(check: Callable[[], Any], seconds: float = 300.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := check()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
    return found


@torch.no_grad()
def forward(model: Llama, tokens: list[int]) -> list[float]:
    """The trainer's own log-probs of each token after the first."""
    hidden = model.hidden(pack([tokens]))[:-1]
    return model.logprobs(hidden, torch.tensor(tokens[1:]), torch.ones(len(tokens) - 1)).tolist()


def apart(one: list[float], other: list[float]) -> float:
    return statistics.fmean(abs(a - b) for a, b in zip(one, other, strict=True))


@pytest.fixture(scope="module")
def seat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seat]:
    state = tmp_path_factory.mktemp("full") / "state"
    with served(state, CONFIG) as (url, token):
        yield Seat(state, url, token)


@pytest.fixture(scope="module")
def learnt(seat: Seat) -> Release:
    """The release of the first step, and the answers of the base before it."""
    seat.before = seat.greedy()  # type: ignore[attr-defined]
    with Crowd(seat, clients=1, pause=0.5) as crowd:  # the trainer has what the engine leaves of the machine
        seat.teach()
        until(lambda: seat.head().seq == 1)
        head = seat.head()
        until(lambda: seat.served() == head.id)
        until(lambda: head.id in crowd.releases)
    assert crowd.failed == []
    return head


def test_reports_become_a_release_of_full_weights(seat: Seat, learnt: Release) -> None:
    """Case 39: the record names the release whose weights answered, and its log-probs are those weights'."""
    part = learnt.parts["weights"]
    assert part.kind == "full"
    assert part.meta["base"] == seat.chain.history("default")[-1].parts["weights"].meta["base"]
    assert set(part.files) == {"model.safetensors", "weights.json"}
    _, size = part.files["model.safetensors"]
    assert 268e6 < size < 271e6
    assert learnt.evaluation is not None
    measured = {guard.name: guard.value for guard in learnt.evaluation.guards}
    assert measured["finite"] == 0
    assert 0 <= (measured["drift"] or 0) < 0.3
    release, text, logprobs = seat.greedy()
    assert release == learnt.id
    before = seat.before  # type: ignore[attr-defined]
    if text == before[1]:
        assert 1e-3 < apart(logprobs, before[2]) < 1.0
    receipt = seat.ask("Name a colour.", max_tokens=8).headers["x-reef-agent-record-id"]
    record = until(lambda: (found := seat.record(receipt)) and found.get("status") == "complete" and found)
    assert record["release_id"] == learnt.id
    choice = record["choices"][0]
    assert [span["release_id"] for span in choice["spans"]] == [learnt.id]
    tokens = [*record["prompt_ids"], *choice["output_ids"]]
    answered = len(choice["output_ids"])
    rated = seat.rate(learnt.id, tokens)
    base = seat.rate(seat.chain.history("default")[-1].id, tokens)
    assert apart(choice["logprobs"], rated[-answered:]) < 0.1
    assert apart(rated, base) > 2 * apart(choice["logprobs"], rated[-answered:])


def test_the_engine_and_the_trainer_agree_on_the_release(seat: Seat, learnt: Release) -> None:
    """The same files in both: apart by rounding, no more than on the base, and far less than the step moved them."""
    record = seat.record(seat.taught)
    output = record["choices"][0]["output_ids"]
    tokens, last = [*record["prompt_ids"], *output], len(output)
    base = Llama.load(prepare("smollm2-135m").path)
    moved = Llama(base.layout, load_file(seat.chain.files(learnt.id, "weights")["model.safetensors"]), base.compute)
    first = seat.chain.history("default")[-1].id
    noise = apart(seat.rate(first, tokens)[-last:], forward(base, tokens)[-last:])
    assert apart(seat.rate(learnt.id, tokens)[-last:], forward(moved, tokens)[-last:]) < 2 * noise + 0.02
    gain = [new - old for new, old in zip(forward(moved, tokens), forward(base, tokens), strict=True)][-last:]
    assert statistics.fmean(gain) > 2 * noise


def test_back_to_the_base_and_forth_again(seat: Seat, learnt: Release) -> None:
    record = seat.record(seat.taught)
    tokens = [*record["prompt_ids"], *record["choices"][0]["output_ids"]]
    first = seat.chain.history("default")[-1]
    before = seat.before  # type: ignore[attr-defined]
    with Crowd(seat) as crowd:
        back = seat.rollback(first.id)
        release, said, rated = seat.greedy()
        assert (release, said) == (back, before[1])
        assert apart(rated, before[2]) < 0.1
        assert apart(seat.rate(back, tokens), seat.rate(first.id, tokens)) < 0.05
        forth = seat.rollback(learnt.id)
        assert seat.greedy()[0] == forth
        moved = apart(seat.rate(forth, tokens), seat.rate(back, tokens))
        assert apart(seat.rate(forth, tokens), seat.rate(learnt.id, tokens)) < 0.05 < moved
        until(lambda: forth in crowd.releases)
    assert crowd.failed == []
    assert seat.chain.get(forth).parts["weights"].files == learnt.parts["weights"].files


def test_a_lora_recipe_under_full_weights_is_told_what_to_do(seat: Seat, learnt: Release) -> None:
    """A LoRA is cumulative on one base, so it cannot go on from full weights. After a rollback to the base it can."""
    made = seat.client.post("/reef/scenarios", json={"name": "mixed", "recipe": "sao", "batch_size": 2})
    if made.status_code != 201:
        pytest.fail(made.text)
    head = seat.chain.head("mixed")
    assert head is not None
    part = learnt.parts["weights"]
    files: dict[str, Path | bytes] = dict(seat.chain.files(learnt.id, "weights"))
    draft = Draft("publish", {"weights": NewPart("full", files, part.meta)}, base=head.id, step=1)
    full = seat.chain.publish("mixed", draft, head.id)
    client = httpx.Client(
        base_url=f"{seat.url}",
        headers={"authorization": f"Bearer {seat.token}", "x-reef-scenario": "mixed"},
        timeout=60,
    )
    until(lambda: client.get("/reef/scenarios/mixed").json()["release_id"] == full.id)
    for number in range(2):
        body = {"messages": [{"role": "user", "content": f"Say {number}."}], "max_tokens": 4}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.headers["x-reef-release-id"] == full.id
        receipt = answer.headers["x-reef-agent-record-id"]
        client.post("/reef/report", json={"score": float(number), "references": [receipt]})
    found = until(lambda: (seen := _learner(client)).get("state") == "blocked" and seen.get("pending") == 2 and seen)
    assert found["error"].endswith("so reports wait: set train: full, or roll back to the base (reef rollback 0)")
    assert (found["trained"], found["dropped"]) == (0, {})
    assert client.get("/reef/scenarios/mixed").json()["release_id"] == full.id


def _learner(client: httpx.Client) -> dict[str, Any]:
    learner = client.get("/reef/status").json()["scenarios"]["mixed"]["learner"] or {}
    return (learner.get("parts") or {}).get("weights") or {}


def test_an_engine_killed_between_publish_and_load(seat: Seat, learnt: Release) -> None:
    """Case 38: the old release is served until the new one is loaded, by whichever engine process that is."""
    was = seat.served()
    tensors = load_file(seat.chain.files(learnt.id, "weights")["model.safetensors"])
    tensors["model.norm.weight"] *= 1.01
    file = seat.state.parent / "model.safetensors"
    save_file(tensors, file)
    pid = seat.engine()
    os.kill(pid, signal.SIGSTOP)
    try:
        head = seat.head()
        meta = learnt.parts["weights"].meta
        new = NewPart("full", {"model.safetensors": file, "weights.json": b"{}"}, meta)
        made = seat.chain.publish("default", Draft("publish", {"weights": new}, base=head.id, step=2), head.id)
        for _ in range(8):  # the learner has asked a stopped engine to load it by now
            time.sleep(0.1)
            assert seat.served() == was
    finally:
        os.kill(pid, signal.SIGKILL)
    until(lambda: seat.served() == made.id)
    assert seat.engine() != pid
    release, text, logprobs = seat.greedy()
    assert release == made.id
    assert text
    assert all(map(float.__le__, logprobs, itertools.repeat(0.0)))
    back = seat.rollback(was)
    found = seat.call(Ping())  # this process never served it, and holds it before anybody asks
    assert was in found.detail["resident"]
    began = time.monotonic()
    assert seat.greedy()[0] == back
    print(f"the first answer after a cold rollback took {time.monotonic() - began:.2f} s")
