"""`reef doctor` on a state folder: each kind of damage is one line with a next step, and the safe ones are repaired."""

import contextlib
import json
import shutil
import sqlite3
import struct
import subprocess
from pathlib import Path

import pytest

from reef.cli import assemble, state
from reef.cli.main import main
from reef.cli.process import Boot
from reef.config import load
from reef.core.errors import DigestError
from reef.core.nouns import Consumed
from reef.core.wire import Step
from reef.records.board import Board
from reef.records.journal import Journal
from reef.releases import Draft, NewPart, marker
from reef.releases.chain import GitChain
from reef.releases.prune import Policy, prune
from reef.releases.remote import Remote
from reef.scenario import serving
from reef.trainers import folder as training

CONFIG = "reef: {port: 0, engine: fake, recipe: record}\ntraining: {backend: fake}\n"


def weights(fill):
    header = json.dumps({"a": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    model = struct.pack("<Q", len(header)) + header + bytes([fill]) * 64
    return NewPart("lora", {"weights.json": b'{"n":%d}' % fill, "adapter_model.safetensors": model}, {"n": fill})


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder with three releases, a candidate, a step and a record, all well."""
    monkeypatch.chdir(tmp_path)
    Path("reef.yaml").write_text(CONFIG)
    Path(".reef").mkdir()
    assemble.prepare(Boot(load().settings.model_dump(mode="json"), tmp_path / "run", "http://x", None))
    chain, board = opened()
    head = chain.head("default")
    for number in (1, 2):
        consumed = {"weights": Consumed(number, ("a" * 32 + ":0",) if number == 2 else ())}
        draft = Draft("publish", {"weights": weights(number)}, base=head.id, step=number, consumed=consumed)
        head = chain.publish("default", draft, head.id)
        serving.align("default", chain, board)
        serving.tell(head, board)
    chain.publish("default", Draft("candidate", {"weights": weights(9)}, base=head.id, step=3), None)
    board.close()
    with base("records.db") as db:
        row = ("a" * 32, "default", "complete", "live", head.id)
        db.execute(
            "INSERT INTO records (seq, id, scenario, status, purpose, release_id, request, meta)"
            " VALUES (1, ?, ?, ?, ?, ?, x'00', x'00')", row,
        )  # fmt: skip
    step(head, f"{head.id[:12]}-1")
    return tmp_path


def step(head, line):
    order = Step(
        scenario="default", part="weights", line=line, step=3, base_release=head.id, base_step=2, objective="x",
        options={}, batch_id="b", unit_ids=["a:0"], cursor=1, data=[],
    )  # fmt: skip
    training.write(Path(".reef/training"), order, "lora", {"weights.json": b"{}"}, {})


@contextlib.contextmanager
def base(name):
    with contextlib.closing(sqlite3.connect(f".reef/{name}")) as db, db:
        yield db


def opened():
    return GitChain(Path(".reef/releases.git")), Board(Path(".reef/records.db"))


def doctor(capsys, *more):
    """The findings on the state folder that are not well, by what they are of; and the exit code."""
    code = main(["doctor", "--json", *more])
    found = capsys.readouterr()
    assert found.out, found.err
    said = json.loads(found.out)
    assert said["ok"] == (code == 0)
    return code, {item["what"]: item["note"] for item in said["findings"] if item["ok"] is False}


def everything():
    return {
        str(file): file.read_bytes()
        for file in Path(".reef").rglob("*")
        if file.is_file() and not file.name.endswith(("-shm", "-wal", "mutex"))
    }


def repaired(capsys):
    """After a repair all is well, and looking again finds it so."""
    assert doctor(capsys, "--repair") == (0, {})
    assert doctor(capsys) == (0, {})


def test_a_sound_folder_is_found_so_and_left_alone(site, capsys):
    before = everything()
    assert doctor(capsys) == (0, {})
    assert everything() == before
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    assert "3 releases and 1 candidate, each file verified" in said
    assert "1 step, each whole and on a release" in said
    lock = state.claim(Path(".reef"))
    assert doctor(capsys) == (0, {}), "also with a server at work"
    lock.release()


def test_a_folder_without_releases(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("reef.yaml").write_text(CONFIG)
    assert doctor(capsys) == (0, {})
    Path(".reef").mkdir()
    assert doctor(capsys) == (0, {})


def test_a_stale_lock(site, capsys):
    Path(".reef/releases.git/refs/heads/default.lock").touch()
    code, wrong = doctor(capsys)
    assert (code, list(wrong)) == (1, ["releases"])
    assert "refs/heads/default.lock was left by a process that was killed" in wrong["releases"]
    assert Path(".reef/releases.git/refs/heads/default.lock").exists()
    repaired(capsys)


def test_a_damaged_head(site, capsys):
    ref = Path(".reef/releases.git/refs/heads/default")
    ref.write_text("nonsense")
    code, wrong = doctor(capsys)
    assert (code, list(wrong)) == (1, ["releases default"])
    assert "goes back to the last good release" in wrong["releases default"]
    assert ref.read_text() == "nonsense"
    repaired(capsys)


@pytest.mark.parametrize("how", ["lost", "changed", "pointer"])
def test_a_large_file_that_is_not_as_it_was(site, capsys, how):
    chain, board = opened()
    first = chain.history("default")[1]
    place = chain.files(first.id, "weights")["adapter_model.safetensors"]
    whole = place.read_bytes()
    place.unlink()
    if how != "lost":
        place.write_bytes(whole[:-1] + b"?" if how == "changed" else b"version https://git-lfs.github.com/spec/v1\n")
    code, wrong = doctor(capsys, "--repair")
    assert (code, list(wrong)) == (1, ["releases default"])
    assert f"adapter_model.safetensors of release {first.id}" in wrong["releases default"]
    board.close()


def test_a_cut_off_object_of_an_earlier_release(site, capsys):
    """The finding says what is refused and what helps; a rollback says where to look. A remote gives it again."""
    chain, board = opened()
    first, head = chain.history("default")[1], chain.head("default")
    place = chain.files(first.id, "weights")["adapter_model.safetensors"]
    whole = place.read_bytes()
    there = site / "there.git"
    subprocess.run(["git", "init", "--quiet", "--bare", str(there)], check=True)
    pushed = Remote(Path(".reef/releases.git"), str(there)).push({}, sure=True)
    assert pushed.condition == "in step", pushed.error
    place.unlink()  # a remote in a folder may hold the same file
    place.write_bytes(whole[:20])
    code, wrong = doctor(capsys, "--repair")
    note = wrong["releases default"]
    assert (code, list(wrong)) == (1, ["releases default"])
    assert f"of release {first.id} has 20 bytes where {len(whole)} were recorded" in note
    assert f"restore .reef/releases.git/lfs/objects/{place.parent.parent.name}/{place.parent.name}/{place.name}" in note
    assert f"a rollback to {first.id[:12]} is refused" in note
    with pytest.raises(DigestError, match="nothing moved; `reef doctor` says how to mend it"):
        serving.rollback("default", first.id, GitChain(chain.path), board, actor="me", reason="")
    remote = ("--releases.remote", str(there))
    note = doctor(capsys, *remote)[1]["releases default"]
    assert note.endswith("; `reef doctor --repair` fetches it again from releases.remote")
    away = there.rename(site / "away.git")
    code, wrong = doctor(capsys, *remote, "--repair")
    assert "the repair failed" in wrong["releases default"]
    assert place.read_bytes() == whole[:20], "what did not come replaces nothing"
    away.rename(there)
    assert doctor(capsys, *remote, "--repair") == (0, {})
    assert place.read_bytes() == whole
    assert doctor(capsys) == (0, {})
    assert serving.rollback("default", first.id, GitChain(chain.path), board, actor="me", reason="").parent == head.id
    board.close()


def test_a_repair_that_mends_several_findings_says_what_it_did_once(site, capsys):
    heads = Path(".reef/releases.git/refs/heads")
    for name in ("default.lock", "other.lock"):
        (heads / name).write_text("")
    main(["doctor", "--repair", "--json"])
    said = [item["note"] for item in json.loads(capsys.readouterr().out)["findings"] if "repaired" in item["note"]]
    assert [note.partition(" (it was")[0] == "repaired with what is above" for note in said] == [False, True]


def test_pruned_files_are_no_damage(site, capsys):
    chain, board = opened()
    head = chain.head("default")
    for number in (3, 4):
        head = chain.publish("default", Draft("publish", {"weights": weights(number)}), head.id)
        serving.align("default", chain, board)
        serving.tell(head, board)
    prune(chain, Policy(releases=2, candidates=2))
    board.close()
    assert doctor(capsys) == (0, {})
    main(["doctor"])
    assert "5 releases, 2 of them without their large files (by policy)" in capsys.readouterr().out


def test_files_that_only_the_remote_has(site, capsys):
    chain, board = opened()
    board.close()
    newest, before = chain.history("default")[:2]
    chain.files(before.id, "weights")["adapter_model.safetensors"].unlink()
    assert doctor(capsys)[0] == 1
    assert doctor(capsys, "--releases.remote", "/elsewhere.git") == (0, {})
    chain.files(newest.id, "weights")["adapter_model.safetensors"].unlink()
    assert list(doctor(capsys, "--releases.remote", "/elsewhere.git")[1]) == ["releases default"]


@pytest.mark.parametrize("name", ["records.db", "learn.db", "gate.db"])
def test_a_damaged_store(site, capsys, name):
    place = Path(".reef") / name
    if not place.exists():
        with base(name) as db:
            db.execute("CREATE TABLE x (y)")
            db.executemany("INSERT INTO x VALUES (?)", [("z" * 500,)] * 200)
    with base(name) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(place.read_bytes())
    content[4096 : len(content)] = b"\xff" * (len(content) - 4096)
    place.write_bytes(content)
    code, wrong = doctor(capsys)
    assert code == 1
    assert "damaged" in wrong[name]
    assert ("backup" if name == "records.db" else "restart the server") in wrong[name]


def test_a_board_behind_its_head_and_a_silent_journal(site, capsys):
    chain, board = opened()
    head = chain.publish("default", Draft("publish", {"weights": weights(3)}), chain.head("default").id)
    code, wrong = doctor(capsys)
    assert (code, list(wrong)) == (1, ["serving default", "journal default"])
    assert f"the chain's head is {head.id}" in wrong["serving default"]
    assert "no entry for 1 release (the first is 3)" in wrong["journal default"]
    assert board.get("default").release_id != head.id
    repaired(capsys)
    assert board.get("default").release_id == head.id
    assert [act.ref for act in Journal(board).after(0) if act.kind == "release"][-1] == head.id
    board.close()


def test_a_head_without_its_files_is_not_served(site, capsys):
    """A start leaves what was served, `doctor` says so and so does a repair; when the file is back, all is well."""
    chain, board = opened()
    was = chain.head("default")
    head = chain.publish("default", Draft("publish", {"weights": weights(3)}, base=was.id, step=3), was.id)
    serving.tell(head, board)
    place = chain.objects.place(head.parts["weights"].files["adapter_model.safetensors"][0])
    kept = place.rename(site / "kept")
    assemble.prepare(Boot(load().settings.model_dump(mode="json"), site / "run", "http://x", None))
    assert board.get("default").release_id == was.id
    for more in ((), ("--repair",)):
        code, wrong = doctor(capsys, *more)
        assert (code, set(wrong)) == (1, {"releases default", "serving default"})
        assert wrong["serving default"].startswith(
            f"release {was.id[:12]} goes on: files of release 3 ({head.id[:12]}), the newest, are missing or damaged"
        )
        assert board.get("default").release_id == was.id
    kept.rename(place)
    repaired(capsys)
    assert board.get("default").release_id == head.id
    board.close()


def test_a_pin_that_its_scenario_left(site, capsys):
    chain, board = opened()
    first = chain.history("default")[-1]
    Journal(board).pin("default", first.id, actor="ada", reason="r")
    code, wrong = doctor(capsys)
    assert (code, list(wrong)) == (1, ["serving default"])
    assert f"pinned to {first.id[:12]}" in wrong["serving default"]
    repaired(capsys)
    assert chain.head("default").base == first.id
    board.close()


def test_records_and_releases_that_do_not_know_each_other(site, capsys):
    with base("records.db") as db:
        db.execute("UPDATE records SET id = ?, release_id = ?", ("b" * 32, "f" * 40))
    code, wrong = doctor(capsys, "--repair")
    assert code == 1
    assert "1 record that releases learnt from: not in records.db" in wrong["records default"]
    with base("records.db") as db:
        db.execute("INSERT INTO erased VALUES (?, 0)", ("a" * 32,))  # forgotten on request
    code, wrong = doctor(capsys)
    assert "1 record cannot train: answered by release " + "f" * 40 in wrong["records default"]
    with base("records.db") as db:
        db.execute("DELETE FROM records")
    assert doctor(capsys) == (0, {})


def test_what_a_person_asked_for_is_no_record(site, capsys):
    chain, board = opened()
    head = chain.head("default")
    asked = {"weights": Consumed(3, ("ask_one",))}
    draft = Draft("publish", {"weights": weights(3)}, base=head.id, step=3, consumed=asked)
    serving.tell(chain.publish("default", draft, head.id), board)
    serving.align("default", chain, board)
    board.close()
    assert doctor(capsys) == (0, {})


def test_steps_that_are_damaged_or_stand_on_nothing(site, capsys):
    chain, board = opened()
    board.close()
    head = chain.head("default")
    place = training.path(Path(".reef/training"), "default", "weights", f"{head.id[:12]}-1", 3)
    (place / "weights.json").write_bytes(b"{ }")
    code, wrong = doctor(capsys)
    assert (code, list(wrong)) == (1, ["training default"])
    assert "does not match its digest" in wrong["training default"]
    shutil.rmtree(place)
    step(head, "f" * 12 + "-1")
    assert "remove it" in doctor(capsys)[1]["training default"]


def test_a_repository_of_another_format(site, capsys):
    Path(".reef/releases.git/reef/format").write_text(f"{marker.FORMAT + 1}\n")
    code, wrong = doctor(capsys)
    assert (code, list(wrong)) == (1, ["releases"])
    assert "a newer one" in wrong["releases"]
    Path(".reef/releases.git/reef/format").write_text("1\n")
    assert doctor(capsys) == (0, {})
    assert Path(".reef/releases.git/reef/format").read_text() == "1\n"


def test_releases_of_another_model(site, capsys):
    Path("reef.yaml").write_text(CONFIG.replace("engine: fake", "engine: local, model: /nonexistent/model"))
    code, wrong = doctor(capsys)
    assert code == 1
    assert "no model folder" in wrong["model"]
    assert wrong["serving default"].startswith("base missing: no model folder")


@pytest.mark.parametrize("more", [[], ["--repair"]])
def test_a_folder_that_cannot_be_told_apart_from_a_crash_is_left_to_a_start(site, capsys, more):
    shutil.rmtree(".reef/releases.git")
    Path(".reef/releases.git/reef").mkdir(parents=True)
    code, wrong = doctor(capsys, *more)
    assert (code, "releases" in wrong) == ((1, True) if not more else (0, False))
