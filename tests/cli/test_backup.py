"""`reef backup`: whole copies under load, nothing at TARGET after a kill, and a drill that finds what is wrong."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading

import pytest

from reef.core.nouns import Consumed
from reef.evaluation.book import Book
from reef.releases import Draft, NewPart
from tests.cli.kept import Folder
from tests.cli.test_forget import Story, publish
from tests.gateway.test_imports import build, build_report


@pytest.fixture
def folder(tmp_path, monkeypatch, capfd):
    made = Folder(tmp_path / "state", monkeypatch, capfd)
    made.story = Story(made)
    return made


@pytest.mark.parametrize("name", ["copy", "copy.tar"])
def test_a_backup_can_be_restored(folder, tmp_path, name, monkeypatch, capfd):
    """case 35: started from, asked, its head and records the same."""
    with sqlite3.connect(folder.path / "learn.db") as db:
        db.execute("CREATE TABLE cursors (place INTEGER)")
    book = Book(folder.path / "gate.db")
    book.turn("default", "candidate")
    book.close()
    (folder.path / "token").write_text("secret-token-text")
    target = tmp_path / name
    code, out, err = folder.run("backup", str(target))
    assert code == 0, err
    assert out.startswith(f"{target}: 3 records, 2 reports, 4 releases, ")
    code, out, _ = folder.run("backup", str(target), "--check")
    assert (code, out.startswith(f"{target} can be restored: 3 records")) == (0, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "state"])
    assert target.stat().st_mode & 0o77 == 0, "prompts are nobody else's"
    if name.endswith(".tar"):
        shutil.unpack_archive(target, tmp_path / "out")
        target = tmp_path / "out" / "copy"
    assert not any(b"secret-token-text" in path.read_bytes() for path in target.rglob("*") if path.is_file())
    restored = Folder(target, monkeypatch, capfd)
    with restored.serving():
        assert restored.run("records", "--json")[0] == 0
        assert restored.run("import", "/dev/null")[0] == 0
    assert restored.head == folder.head
    book = Book(restored.path / "gate.db")
    assert book.turn("default", "next") == 2
    book.close()
    assert restored.use(lambda store: store.get([folder.story.one.id])) == [folder.story.one]


def test_new_events_come_after_all_that_a_release_has_consumed(folder, tmp_path, monkeypatch, capfd):
    """The chain is copied last, so it may know events that are not in the copy; their numbers are not given again."""
    chain, head = folder.gateway.chain, folder.head
    part = NewPart("base", {"weights.json": b'{"n":"later"}'})
    chain.publish(
        "default", Draft("publish", {"weights": part}, base=head.id, consumed={"weights": Consumed(5000)}), head.id
    )
    assert folder.run("backup", str(tmp_path / "copy"))[0] == 0
    restored = Folder(tmp_path / "copy", monkeypatch, capfd)
    restored.store(build(restored.head.id))
    events = restored.use(lambda store: store.events("default", 5000, 10))
    assert [event.seq for event in events] == [5001]


def test_under_load_every_release_a_record_names_is_there(folder, tmp_path):
    """case 35: two threads write records and publish releases all the while; then the drill."""
    stop = threading.Event()
    written, promised = [], []

    def write():
        async def run(store):
            while not stop.is_set():
                record = build(folder.head.id, request=os.urandom(3000))
                await store.append_all([record, build_report(record.id)])
                written.append(record.id)

        folder.use(run)

    def release():
        while not stop.is_set():
            publish(folder, text=os.urandom(4).hex())

    threads = [threading.Thread(target=write), threading.Thread(target=release)]
    for thread in threads:
        thread.start()
    try:
        while len(written) < 20:
            stop.wait(0.01)
        for n in range(3):
            before = len(written)
            code, _, err = folder.run("backup", str(tmp_path / f"copy{n}"))
            assert code == 0, err
            promised.append(written[:before])
            while len(written) <= before:
                stop.wait(0.01)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for n in range(3):
        code, out, err = folder.run("backup", str(tmp_path / f"copy{n}"), "--check", "--json")
        said = json.loads(out)
        assert (code, said["wrong"]) == (0, []), err
        assert said["records"] >= 3 + len(promised[n]) >= 23
        assert said["releases"] > 4
        with sqlite3.connect(tmp_path / f"copy{n}" / "records.db") as db:
            assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            there = {name for (name,) in db.execute("SELECT id FROM records")}
        assert there >= set(promised[n]), "a receipt from before the backup is not in it"


@pytest.mark.parametrize("name", ["copy", "copy.tar"])
def test_a_kill_leaves_nothing_at_the_target(folder, tmp_path, name):
    """case 35: killed at any step, a backup is not there at all; the next one is whole."""
    points = ["backup.records_copied", "backup.refs_copied", "backup.filled"]
    target = tmp_path / name
    for point in [*points, "backup.packed" if name.endswith(".tar") else "backup.synced"]:
        words = [sys.executable, "-m", "reef", "backup", str(target), "--reef.state_dir", str(folder.path)]
        killed = subprocess.run(words, env={**os.environ, "REEF_FAILPOINT": point}, capture_output=True, check=False)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert not target.exists()
    assert folder.run("backup", str(target))[0] == 0
    assert folder.run("backup", str(target), "--check")[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "state"])


def damage(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.chmod(0o600)
    path.write_bytes(data)


def resign(copy, *names):
    """Make the manifest agree with damaged files, so that the checks behind it are reached."""
    from reef.core import disk

    manifest = json.loads((copy / "backup.json").read_text())
    for name in names:
        manifest["files"][name]["sha256"] = disk.sha256(copy / name)
    (copy / "backup.json").write_text(json.dumps(manifest))


def test_the_drill_finds_what_is_wrong(folder, tmp_path):
    """case 35: each kind of damage has its word."""
    copy = tmp_path / "copy"
    folder.run("backup", str(copy))

    def wrong():
        code, _, err = folder.run("backup", str(copy), "--check")
        assert code == 1
        return err

    objects = sorted(path for path in (copy / "releases.git" / "objects").rglob("*") if path.is_file())
    whole = (copy / "records.db").read_bytes()
    damage(copy / "records.db")
    assert "wrong: records.db is not what was copied" in wrong()
    (copy / "records.db").write_bytes(whole)
    kept = objects[0].read_bytes()
    objects[0].unlink()
    assert f"wrong: {objects[0].relative_to(copy)} is missing" in wrong()
    objects[0].write_bytes(kept)
    damage(objects[-1])
    resign(copy, str(objects[-1].relative_to(copy)))
    assert "wrong: " in wrong()
    shutil.rmtree(copy)
    folder.run("backup", str(copy))
    with sqlite3.connect(copy / "records.db") as db:
        db.execute("UPDATE records SET release_id = ? WHERE id = ?", ("f" * 40, folder.story.one.id))
        db.execute("DELETE FROM reports")
    resign(copy, "records.db")
    said = wrong()
    assert f"name the release {'f' * 40}, which is not there" in said
    assert "there are 3 records and 0 reports; the manifest says otherwise" in said


def test_wrong_words(folder, tmp_path):
    (tmp_path / "there").mkdir()
    code, _, err = folder.run("backup", str(tmp_path / "there"))
    assert (code, "is there already" in err) == (2, True)
    code, _, err = folder.run("backup", str(tmp_path / "there"), "--check")
    said = f"reef: {tmp_path / 'there'} is no backup: it has no backup.json, which `reef backup` writes\n"
    assert (code, err) == (2, said)
    (tmp_path / "note.tar").write_text("no tar")
    code, _, err = folder.run("backup", str(tmp_path / "note.tar"), "--check")
    assert (code, "is no backup, or a damaged one" in err) == (2, True)
    code, _, err = folder.run("backup", str(tmp_path / "none"), "--check")
    assert (code, "there is no backup" in err) == (1, True)
    folder.path = tmp_path / "empty"
    code, _, err = folder.run("backup", str(tmp_path / "x"))
    assert (code, "holds no records and releases" in err) == (1, True)


def test_no_place_to_check_a_backup_in(folder, tmp_path, monkeypatch):
    target = tmp_path / "kept"
    assert folder.run("backup", str(target))[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
        code, _, err = folder.run("backup", str(target), "--check")
    assert code != 0
    assert "free some disk space, or set TMPDIR" in err
