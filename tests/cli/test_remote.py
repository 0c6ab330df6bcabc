"""A remote followed and begun from: what travels, what a cursor of another store must not swallow, who is told."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from reef.cli import assemble, main
from reef.cli import remote as cli
from reef.cli.process import Boot
from reef.config import Settings
from reef.core.errors import ChainError
from reef.core.nouns import Consumed
from reef.records.journal import Journal
from reef.releases import Draft, NewPart
from reef.releases.remote import Remote
from reef.scenario.serving import archive, ensure, rollback
from tests.flow.test_serve import FAKE, MESSAGES, Served, until
from tests.loop.kit import BASE, NAME, World


@pytest.fixture
def there(tmp_path: Path) -> Path:
    place = tmp_path / "there.git"
    subprocess.run(["git", "init", "--quiet", "--bare", str(place)], check=True)
    return place


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    (tmp_path / "first").mkdir()
    made = await World(tmp_path / "first").open()
    yield made
    await made.close()


def push(world: World, there: Path) -> cli.State:
    return cli.push(Remote(world.folder / "releases.git", str(there)), world.folder, world.board, sure=True)


def prepare(folder: Path, there: Path) -> None:
    """What `reef serve` does first on a state folder."""
    given = {
        "reef": {"engine": "fake", "recipe": "record", "default_scenario": NAME, "state_dir": str(folder)},
        "releases": {"remote": str(there)},
    }
    folder.mkdir(exist_ok=True)
    settings = Settings.model_validate(given)
    assemble.prepare(Boot(settings.model_dump(mode="json"), folder / "run", "http://x", None))


async def test_a_fresh_folder_goes_on_from_the_remote_alone(world: World, there: Path, tmp_path: Path) -> None:
    """The head is served; what trained before does not train again; every new report does, whatever the old cursor."""
    await world.say(2)
    await world.settle()
    await world.say(6)
    await world.settle()
    head = world.head
    assert (head.seq, head.consumed["weights"].cursor) == (4, 16)
    assert push(world, there).condition == "in step"
    folder = tmp_path / "second"
    prepare(folder, there)
    second = await World(folder).open()
    told = [(act.kind, act.ref) for act in reversed(Journal(second.board).newest(50, NAME)) if act.kind != "push"]
    history = second.chain.history(NAME)[::-1]
    assert told == [("create" if release.seq == 0 else "release", release.id) for release in history]
    serving = second.board.get(NAME)
    assert serving is not None
    assert (second.head, serving.release_id) == (head, head.id)
    await second.say(2, release=head.id)  # the first two again: their receipts are in the chain
    assert await second.settle() == 0
    assert second.ledger.fates(NAME, "weights")["trained"] == 8
    second.made = 100
    receipts = await second.say(2)
    assert await second.settle() == 1
    after = second.head
    assert (after.seq, after.parent, after.base) == (5, head.id, head.id)
    assert set(after.consumed["weights"].units) == {f"{receipt}:0" for receipt in receipts}
    assert after.consumed["weights"].cursor > 16
    assert push(second, there).heads == {NAME: after.id}
    prepare(folder, there)  # a restart changes nothing
    assert second.head == after
    early = second.chain.history(NAME)[-2]
    chain = assemble.open_chain(
        folder, Settings.model_validate({"reef": {"state_dir": folder}, "releases": {"remote": str(there)}})
    )
    rolled = rollback(NAME, early.id, chain, second.board, actor="me", reason="")  # its large files are fetched first
    assert rolled.parts["weights"] == early.parts["weights"]
    await second.close()


async def test_a_rollback_to_files_that_nobody_gives_moves_nothing(world: World, there: Path, tmp_path: Path) -> None:
    await world.say(4)
    await world.settle()
    push(world, there)
    folder = tmp_path / "second"
    prepare(folder, there)
    there.rename(tmp_path / "away")
    second = await World(folder).open()
    head, early = second.head, second.chain.history(NAME)[-2]
    settings = Settings.model_validate({"reef": {"state_dir": folder}, "releases": {"remote": str(there)}})
    with pytest.raises(ChainError, match="cannot fetch large files from the remote"):
        rollback(NAME, early.id, assemble.open_chain(folder, settings), second.board, actor="me", reason="")
    assert second.head == head
    await second.close()


async def test_what_is_held_pinned_and_archived_travels(world: World, there: Path, tmp_path: Path) -> None:
    world.options = {"mode": "review"}
    await world.say(2)
    await world.settle()
    (look,) = world.ledger.looks(NAME)
    assert (look.verdict, look.candidate is not None) == ("hold", True)
    for name in ("gone", "kept"):
        world.board.create_scenario(name, {"batch_size": 3} if name == "kept" else {})
        ensure(name, world.chain, world.board, BASE, "fake")
    archive("gone", world.chain, world.board, actor="me", reason="")
    Journal(world.board).pin("kept", world.chain.head("kept").id, actor="me", reason="")  # type: ignore[union-attr]
    assert push(world, there).condition == "in step"
    folder = tmp_path / "second"
    prepare(folder, there)
    second = await World(folder).open()
    assert second.board.scenarios() == {NAME: {}, "kept": {"batch_size": 3}}
    pin = Journal(second.board).pinned("kept")
    assert pin is not None
    assert pin.release_id == second.chain.head("kept").id  # type: ignore[union-attr]
    (there_too,) = second.ledger.looks(NAME)
    assert (there_too.candidate, there_too.verdict, there_too.evaluation) == (look.candidate, "hold", look.evaluation)
    assert second.chain.files(str(look.candidate), "weights")
    second.options, second.made = {"mode": "review"}, 100
    await second.say(2)
    assert await second.settle() == 0, "the line waits for a person here too"
    second.ledger.overrule(NAME, str(look.candidate), "me", "no")
    assert await second.settle() == 1
    assert push(second, there).condition == "in step"
    marks = subprocess.run(["git", "for-each-ref", "refs/reef"], cwd=there, capture_output=True, text=True, check=True)
    assert str(look.candidate) not in marks.stdout, "what was decided is held no more"
    await second.close()


async def test_the_journal_has_each_release_once_and_each_outage_once(
    world: World, there: Path, tmp_path: Path
) -> None:
    await world.say(2)
    await world.settle()
    for _ in range(2):
        push(world, there)
    journal = Journal(world.board)

    def told(kind: str) -> list[str]:
        return [act.ref for act in journal.newest() if act.kind == kind][::-1]

    assert told("push") == [release.id for release in world.chain.history(NAME)][::-1]
    there.rename(tmp_path / "away")
    await world.say(2)
    await world.settle()
    for _ in range(cli.PATIENCE - 1):
        push(world, there)
    assert told("trouble") == []
    for _ in range(3):
        push(world, there)
    assert told("trouble") == [world.head.id]
    (act,) = [act for act in journal.newest() if act.kind == "trouble"]
    assert (act.detail["state"], act.detail["pushed"]) == ("unreachable", world.head.parent)
    (tmp_path / "away").rename(there)
    push(world, there)
    assert told("push")[-1] == world.head.id
    assert len(told("push")) == 3


async def test_follow_pushes_what_comes_and_waits_for_a_remote(
    world: World, there: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "LOOK", 0.02)
    monkeypatch.setattr(cli, "PAUSE", 0.05)
    there.rename(tmp_path / "away")
    task = asyncio.create_task(cli.follow(str(there), world.folder, world.board))

    async def in_step() -> None:
        while True:
            found = cli.remote.read(world.folder / "releases.git")
            if found is not None and (found.condition, found.heads.get(NAME)) == ("in step", world.head.id):
                return
            await asyncio.sleep(0.02)

    while (found := cli.remote.read(world.folder / "releases.git")) is None or found.tries < 2:
        await asyncio.sleep(0.02)
    (tmp_path / "away").rename(there)
    await asyncio.wait_for(in_step(), 20)
    world.note()
    await asyncio.wait_for(in_step(), 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cursor_of_another_store_is_never_reached_again(world: World, there: Path, tmp_path: Path) -> None:
    """Also one that only an old release or a candidate names, and also when the start was cut short."""
    head = world.head
    part = NewPart("lora", {"weights.json": b"{}"}, {"kind": "lora"})
    draft = Draft("publish", {"weights": part}, step=1, consumed={"weights": Consumed(9_000, ("x:0",))})
    made = world.chain.publish(NAME, draft, head.id)
    rollback(NAME, head.id, world.chain, world.board, actor="me", reason="")
    push(world, there)
    folder = tmp_path / "second"
    folder.mkdir()
    cli.begin(Settings.model_validate({"reef": {"state_dir": folder}, "releases": {"remote": str(there)}}))
    prepare(folder, there)
    second = await World(folder).open()
    assert second.chain.get(made.id) == made
    await second.say(1)
    assert (await second.store.events(NAME, 0, 10))[0].seq == 9_001
    await second.close()


def test_push_by_hand(
    tmp_path: Path, there: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("reef.yaml").write_text("reef: {engine: fake, recipe: record}\nreleases: {remote: there.git}\n")
    assert main.main(["push"]) == 1
    assert "holds no releases" in capsys.readouterr().err
    prepare(Path(".reef").absolute(), there)
    assert main.main(["push", "--json"]) == 0
    seen = json.loads(capsys.readouterr().out)
    assert (seen["state"], seen["scenarios"][NAME]["behind"]) == ("in step", False)
    there.rename(tmp_path / "away")
    assert main.main(["push"]) == 1
    said = capsys.readouterr().out
    assert "unreachable since" in said
    Path("reef.yaml").write_text("reef: {engine: fake, recipe: record}\n")
    assert main.main(["push"]) == 2
    assert "--releases.remote URL" in capsys.readouterr().err


def test_a_server_learns_pushes_and_begins_again_elsewhere(tmp_path: Path, there: Path) -> None:
    """`reef serve` twice: the second in an empty folder, with nothing but the remote."""
    config = f"{FAKE}releases: {{remote: 'file://{there}'}}\n"
    seen: list[str] = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        served = Served(tmp_path / place, config).start()  # type: ignore[no-untyped-call]
        try:
            status = served.client.get("/reef/status").json()
            begun = status["scenarios"]["default"]
            assert not seen or begun["release_id"] == seen[-1]
            for _ in range(4):
                answer = served.client.post("/v1/chat/completions", json={"model": "fake", "messages": MESSAGES})
                receipt = answer.headers["x-reef-agent-record-id"]
                served.client.post("/reef/report", json={"score": 1.0, "references": [receipt]})

            def pushed(served: Served = served, seq: int = begun["seq"]) -> dict[str, object] | None:
                found = served.client.get("/reef/status").json()
                now, remote = found["scenarios"]["default"], found["remote"]
                at = remote["scenarios"]["default"]
                done = now["seq"] > seq and (remote["state"], at["behind"], at["seq"]) == ("in step", False, now["seq"])
                return now if done else None

            seen.append(until(pushed, 60.0)["release_id"])  # type: ignore[no-untyped-call]
        finally:
            assert served.stop() == 0  # type: ignore[no-untyped-call]
    assert len(set(seen)) == 2
