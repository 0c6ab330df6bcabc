"""Many scenarios on one server: four recipes side by side, each with its own part, gate and mode; nobody starves.

What is fair is counted in turns, not in seconds.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reef.core import rpc
from reef.core.wire import Datum, Message, Step, Stepped
from reef.trainers import Ground, Report, folder
from reef.trainers.client import SocketTrainer
from reef.trainers.fake import _files
from reef.trainers.server import Server
from tests.flow.test_serve import Served, until

BOTH = """
reef: {port: 0, recipes: [{use: sao, batch_size: 2}, feedback_rules]}
gate: {policy: always}
"""
FOUR = """
reef: {port: 0, engine: fake, recipe: record}
gate: {policy: always}
training: {backend: fake}
scenarios:
  hot: {recipe: sao, batch_size: 2, max_staleness: 100}
  talk: {recipe: openclawrl, batch_size: 2, gate: {patience: 5}}
  shown: {recipe: sft, batch_size: 2, releases: {mode: review}}
  rules: {recipe: feedback_rules, gate: {policy: guarded}}
  both: {recipes: [{use: sao, batch_size: 1}, feedback_rules]}
"""
BACKLOG = 24  # batches of the hot scenario


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    made = Served(tmp_path_factory.mktemp("many"), FOUR)
    yield made.start()
    made.stop()


def say(served: Served, scenario: str, *messages: str) -> tuple[str, str]:
    """(receipt, text) of an answer to a talk that begins with the user."""
    roles = ("user", "assistant")
    chat = [{"role": roles[at % 2], "content": text} for at, text in enumerate(messages)]
    answer = served.client.post(f"/s/{scenario}/v1/chat/completions", json={"model": "any", "messages": chat})
    assert answer.status_code == 200, answer.text
    return answer.headers["x-reef-agent-record-id"], answer.json()["choices"][0]["message"]["content"]


def report(served: Served, receipt: str, **fields: Any) -> None:
    told = served.client.post("/reef/report", json={"references": [receipt], **fields})
    assert told.status_code == 200, told.text


def releases(served: Served, scenario: str) -> list[dict[str, Any]]:
    """Oldest first, without the base."""
    found = served.client.get(f"/reef/scenarios/{scenario}/releases?limit=200").json()["releases"]
    return sorted((one for one in found if one["seq"]), key=lambda one: one["seq"])


def held(served: Served) -> list[dict[str, Any]]:
    return list(served.client.get("/reef/scenarios/shown/candidates?state=held").json()["candidates"])


def serves(served: Served, scenario: str, release_id: str) -> None:
    """Wait until it does, at both workers: each look is a connection of its own, and so at either of them."""
    address = f"/reef/scenarios/{scenario}"
    until(lambda: all(served.client.get(address).json()["release_id"] == release_id for _ in range(12)))


def test_four_recipes_learn_side_by_side_and_a_hot_one_starves_nobody(served: Served) -> None:
    for number in range(2 * BACKLOG):
        report(served, say(served, "hot", f"Question {number}?")[0], score=float(number % 2))
    for number in range(2):
        _, text = say(served, "talk", f"Sum {number}?")
        say(served, "talk", f"Sum {number}?", text, "No, that is wrong. Say it in one word.")
        receipt, _ = say(served, "shown", f"Where is {number}?")
        report(served, receipt, demonstration=f"It is at {number}.")
    report(served, say(served, "rules", "Why?")[0], feedback="Answer in one short sentence.")
    asked = len(releases(served, "hot"))
    assert asked < BACKLOG // 2
    until(lambda: releases(served, "talk") and releases(served, "rules") and held(served), 60)
    passed = len(releases(served, "hot")) - asked
    print(f"hot: {asked} of {BACKLOG} batches before the others asked, {passed} until all of them had their turn")
    assert passed <= BACKLOG // 3  # the three waited for a few of its turns, not for its backlog

    (talk,), (rules,) = releases(served, "talk"), releases(served, "rules")
    assert (set(talk["parts"]), set(rules["parts"])) == ({"weights"}, {"weights", "harness"})
    assert (talk["parts"]["weights"]["kind"], rules["parts"]["weights"]["kind"]) == ("lora", "base")
    assert releases(served, "shown") == []  # a person decides there
    (waiting,) = held(served)
    answer = served.client.post(f"/reef/scenarios/shown/candidates/{waiting['candidate_id']}/promote", json={})
    assert answer.status_code == 200, answer.text
    until(lambda: len(releases(served, "hot")) > asked + passed, 60)  # and it goes on
    heads = {name: releases(served, name)[-1]["release_id"] for name in ("talk", "shown", "rules")}
    assert len(set(heads.values())) == 3
    for name, head in heads.items():
        serves(served, name, head)
        receipt, _ = say(served, name, "Now?")
        record = served.client.get(f"/reef/scenarios/{name}/records/{receipt}").json()
        assert record["release_id"] == head
        assert bool(record["rendered"]) == (name == "rules")
    status = served.client.get("/reef/status").json()["scenarios"]
    for name in ("hot", *heads):
        (part,) = status[name]["learner"]["parts"].values()
        assert part["error"] is None, (name, part)


def test_both_parts_of_one_scenario_improve_in_one_chain(served: Served) -> None:
    """Scores make weights, words make rules, in turn; each release keeps the other part of the one before it."""
    lessons: list[dict[str, Any]] = [
        {"score": 1.0},
        {"feedback": "Answer in one short sentence."},
        {"score": 0.0},
        {"feedback": "Never mention the weather."},
    ]
    receipts = []
    for number, lesson in enumerate(lessons, 1):
        receipts.append(say(served, "both", f"Question {number}?")[0])
        report(served, receipts[-1], **lesson)
        head = until(lambda number=number: [one for one in releases(served, "both") if one["seq"] == number])[0]
        serves(served, "both", head["release_id"])
    chain = releases(served, "both")
    assert [one["parent"] for one in chain[1:]] == [one["release_id"] for one in chain[:-1]]
    parts = [one["parts"] for one in chain]
    one, two, three, four = parts
    assert [sorted(each) for each in parts] == [["weights"], *[["harness", "weights"]] * 3]
    assert two["weights"] == one["weights"] != three["weights"] == four["weights"]
    assert two["harness"] == three["harness"] != four["harness"]
    for receipt, release in zip(receipts, chain, strict=True):
        story = json.dumps(served.client.get(f"/reef/why/{receipt}").json())
        assert release["release_id"] in story

    receipt, _ = say(served, "both", "Both?")
    rendered = served.client.get(f"/reef/scenarios/both/records/{receipt}").json()["rendered"]["messages"][0]["content"]
    assert "one short sentence" in rendered
    assert "weather" in rendered
    back = served.client.post("/reef/scenarios/both/rollback", json={"release_id": chain[1]["release_id"]})
    assert back.status_code == 200, back.text
    head = releases(served, "both")[-1]
    assert (head["operation"], head["parts"]) == ("rollback", two)
    serves(served, "both", head["release_id"])
    receipt, _ = say(served, "both", "And now?")
    rendered = served.client.get(f"/reef/scenarios/both/records/{receipt}").json()["rendered"]["messages"][0]["content"]
    assert "one short sentence" in rendered
    assert "weather" not in rendered


@pytest.mark.model
def test_answers_in_a_form_train_and_feedback_becomes_a_rule_on_the_real_model(tmp_path: Path) -> None:
    """One scenario, both parts, as a person would set it up; the trainer finds again what was legal."""
    served = Served(tmp_path, BOTH)
    body = {
        "messages": [{"role": "user", "content": "Is the sea blue?"}],
        "structured_outputs": {"choice": ["yes", "no", "it depends"]},
    }
    try:
        served.start()
        for score in (1.0, 0.0):  # not 1 and -1: the same answer twice would be a gradient of zero, and no candidate
            answer = served.client.post("/v1/chat/completions", json=body)
            assert answer.json()["choices"][0]["message"]["content"] in body["structured_outputs"]["choice"]
            report(served, answer.headers["x-reef-agent-record-id"], score=score)
        (weights,) = until(lambda: releases(served, "default"), 150)
        assert weights["parts"]["weights"]["kind"] == "lora"
        learner = served.client.get("/reef/status").json()["scenarios"]["default"]["learner"]["parts"]["weights"]
        assert (learner["error"], learner["metrics"]["left_out"]) == (None, 0.0)
        report(served, answer.headers["x-reef-agent-record-id"], feedback="Think of the weather before you answer.")
        harness = until(lambda: [one for one in releases(served, "default") if one["seq"] == 2], 60)[0]
        assert harness["parts"]["weights"] == weights["parts"]["weights"]
        serves(served, "default", harness["release_id"])
        answer = served.client.post("/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] in body["structured_outputs"]["choice"]
        record = served.resolves(answer.headers["x-reef-agent-record-id"])
        assert "weather" in record["rendered"]["messages"][0]["content"]
        assert json.loads(record["sampling"]["legal"]) == body["structured_outputs"]
        refused = served.client.post("/v1/chat/completions", json={**body, "structured_outputs": {"regex": "("}})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "structured_outputs")
    finally:
        served.stop()


# --- the trainer's turns ----------------------------------------------------------------------------------------------


class Turns(Server):
    """The trainer process's own queue and socket; a step writes the files of the fake trainer."""

    def __init__(self, training: Path) -> None:
        super().__init__(Ground(training, training, lambda name: None))  # type: ignore[arg-type,return-value]
        self.came: list[tuple[str, int]] = []  # (scenario, steps begun before)
        self.begun: list[str] = []

    def answer(self, message: Message) -> Any:
        if isinstance(message, Step):
            self.came.append((message.scenario, len(self.begun)))
        return super().answer(message)

    def _advance(self, order: Step, report: Report) -> Stepped:
        self.begun.append(order.scenario)
        report("train", 1, 1)
        return folder.write(self._ground.training, order, "lora", _files(order), {})


def order(scenario: str, step: int) -> Step:
    datum = Datum(
        tokens=[1, 2], prompt_length=1, mask=[1], logprobs=[-1.0], reward=1.0, record_id="0" * 32, choice=0,
        temperature=1.0, lag=0,
    )  # fmt: skip
    return Step(
        scenario=scenario, part="weights", line="a" * 12 + "-1", step=step, base_release="a" * 40, base_step=0,
        objective="x:Y", options={}, batch_id=f"{scenario}-{step}", unit_ids=[f"{scenario}-{step}:0"], cursor=step,
        data=[datum],
    )  # fmt: skip


async def test_the_trainer_takes_turns(tmp_path: Path) -> None:
    """However many steps one scenario wants, another's next step waits for at most one of each other scenario."""
    place = Path(tempfile.mkdtemp(prefix="reef-"))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place / "trainer.sock"))
    trainer = Turns(tmp_path)
    server = await rpc.serve(listener, trainer.answer)
    many = {"hot": 40, "one": 6, "two": 6, "three": 6}

    async def learn(name: str) -> None:
        client = SocketTrainer(place / "trainer.sock")
        for step in range(1, many[name] + 1):
            async for _ in client.step(order(name, step)):
                pass
        await client.close()

    try:
        await asyncio.gather(*map(learn, many))
    finally:
        server.close()
        shutil.rmtree(place)
    assert sorted(trainer.begun) == sorted(name for name, count in many.items() for _ in range(count))
    begins = {name: [at for at, each in enumerate(trainer.begun) if each == name] for name in many}
    for name in many:
        came = [at for each, at in trainer.came if each == name]
        waited = [began - asked for asked, began in zip(came, begins[name], strict=True)]
        assert max(waited) <= len(many) - 1, (name, waited)
    assert json.dumps(trainer.begun[-10:]) == json.dumps(["hot"] * 10)
