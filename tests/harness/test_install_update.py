"""Updates: told of, taken whole, refused where somebody changed the same, taken back, and removed without a trace.
Case 52.
"""

import json
import os
import pty
import subprocess
import time
import tomllib
from pathlib import Path

import pytest

from reef.harness import install
from reef.harness.tree import Entry
from tests.harness.kit_install import TOKEN, rule, skill


def publish(shop):
    """A second release: another rule, a new skill."""
    shop.publish(rule("one", "Be briefer."), skill("two", "Run the tests.\n"), reason="the tests were forgotten")


def test_a_newer_release_is_told_of_and_taken(machine, shop):
    assert machine.wrapper("hi").good().err == ""
    publish(shop)
    ran = machine.wrapper("hi").good()
    assert ran.err.strip() == (
        "reef-pi: release 2 is out (you have 1): added skill two. Why: the tests were forgotten. "
        "To take it: reef-pi update"
    )
    assert "Be brief.\n" in ran.out
    preview = machine.wrapper("update", "--dry-run").good()
    assert "writes RULES.md" in preview.out
    assert preview.out.startswith("reef-pi: release 1 (")
    assert "Be brief.\n" in machine.wrapper("hi").out
    done = machine.wrapper("update").good()
    assert "release 1" in done.out
    assert "skills/two/SKILL.md" in done.out
    assert "why: the tests were forgotten" in done.out
    ran = machine.wrapper("hi").good()
    assert ran.err == ""
    assert "Be briefer.\n" in ran.out
    assert (machine.root / "skills/two/SKILL.md").read_text() == "Run the tests.\n"


@pytest.mark.parametrize(("adapter", "words", "inside"), [("pi", [], 1), ("pi", ["-p", "x"], 0), ("codex", [], 0)])
def test_in_a_terminal_the_client_itself_tells(machine, shop, adapter, words, inside):
    """Unless it has no place for that, as codex, or the run is one-shot."""
    machine.install(shop.bundle(adapter)).good()
    publish(shop)
    parent, child = pty.openpty()
    command = [str(machine.bin / f"reef-{adapter}"), *words]
    env = machine.environment
    done = subprocess.run(command, stdin=child, stdout=child, stderr=subprocess.PIPE, env=env, cwd=machine.home)
    os.close(child)
    said = os.read(parent, 65536).decode()
    os.close(parent)
    assert ("notice:release 2 is out" in said) == bool(inside)
    assert ("release 2 is out" in done.stderr.decode()) != bool(inside)


def test_an_update_that_is_there_writes_nothing(machine, shop):
    machine.wrapper("update").good()
    before = {name: stamp for name, stamp in machine.files(stamps=True).items() if (machine.home / name).is_file()}
    assert "already current" in machine.wrapper("update").good().out
    after = {name: stamp for name, stamp in machine.files(stamps=True).items() if (machine.home / name).is_file()}
    assert after == before


def test_a_server_that_is_slow_or_gone_keeps_nobody_waiting(machine, shop):
    publish(shop)
    shop.sleep.set()
    begun = time.monotonic()
    ran = machine.wrapper("hi").good()
    assert time.monotonic() - begun < 15  # the server would have waited for 20 s
    assert ran.err == ""
    shop.close()
    ran = machine.wrapper("hi").good()
    assert ran.err == ""
    done = machine.wrapper("update")
    assert done.code == 1
    assert "cannot be reached" in done.err


def test_a_name_that_nobody_resolves_keeps_nobody_waiting(machine, shop, tmp_path):
    """A look-up that hangs holds up the end of Node, whatever it is told."""
    (tmp_path / "slow.cjs").write_text("""
        const dns = require("node:dns"), http = require("node:http");
        dns.lookup = () => Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, 8000);
    """)
    machine.install(shop.bundle(url="http://reef.invalid:8900")).good()
    began = time.monotonic()
    machine.wrapper("hi", NODE_OPTIONS=f"--require={tmp_path}/slow.cjs").good()
    assert time.monotonic() - began < 5


def test_a_notice_cannot_write_to_the_terminal(machine, shop):
    shop.publish(rule("one", "x"), reason="\x1b]0;owned\x07 \u202e$(id)")
    err = machine.wrapper("hi").good().err
    assert "\x1b" not in err
    assert "\u202e" not in err
    assert "$(id)" in err


def test_a_notice_of_any_length_lets_the_client_start(machine, shop):
    shop.seq = 10**4000
    ran = machine.wrapper("hi").good()
    assert len(ran.err) < 5000
    assert "To take it: reef-pi update" in ran.err


def test_a_page_of_something_else_is_no_reef_server(machine, shop):
    shop.publish(rule("one", "x"), reason="r")
    shop.answers = b"<html>Sign in</html>"
    assert machine.wrapper("hi").good().err == ""
    for words in (["update"], ["report", "--score", "1"]):
        assert "is no Reef server" in machine.wrapper(*words).err


# --- local changes ----------------------------------------------------------------------------------------------------


def test_a_changed_file_is_not_overwritten(machine, shop):
    (machine.root / "RULES.md").write_text("# Rules\n\nBe brief.\nAnd kind.\n")
    publish(shop)
    before = machine.files()
    for words in (["update"], ["update", "--dry-run"]):
        done = machine.wrapper(*words)
        assert done.code == 1
        assert "RULES.md changed here" in done.err
        assert "--theirs" in done.err
        assert (
            "--- RULES.md (yours)\n+++ RULES.md (release 2)\n@@ -1,4 +1,3 @@\n"
            " # Rules\n \n-Be brief.\n-And kind.\n+Be briefer." in done.out
        )
        assert machine.files() == before


def test_ours_keeps_and_theirs_takes(machine, shop):
    mine = "# Rules\n\nMine.\n"
    (machine.root / "RULES.md").write_text(mine)
    publish(shop)
    machine.wrapper("update", "--ours").good()
    assert (machine.root / "RULES.md").read_text() == mine
    assert (machine.root / "skills/two/SKILL.md").exists()
    assert "changed:   RULES.md" in machine.wrapper("status").good().out
    machine.wrapper("update", "--theirs").good()
    assert (machine.root / "RULES.md").read_text() == "# Rules\n\nBe briefer.\n"
    (kept,) = machine.base().glob("replaced/*/RULES.md")
    assert kept.read_text() == mine


def test_a_change_of_another_file_is_no_obstacle(machine, shop):
    publish(shop)
    machine.wrapper("update").good()
    (machine.root / "skills/two/SKILL.md").write_text("Mine.\n")
    shop.publish(rule("one", "Be silent."), skill("two", "Run the tests.\n"), reason="more")
    done = machine.wrapper("update").good()
    assert "your changes stay: skills/two/SKILL.md" in done.out
    assert (machine.root / "skills/two/SKILL.md").read_text() == "Mine.\n"
    assert "Be silent." in (machine.root / "RULES.md").read_text()


def test_settings_that_the_client_wrote_stay_beside_the_release_s(machine, shop):
    settings = machine.root / "settings.json"
    settings.write_text(json.dumps({"model": "reef", "lastChangelog": "1.2", "theme": {"dark": True}}))
    shop.publish(rule("one", "x"), Entry("c", "config", {"agent": "pi", "values": {"theme": {"size": 3}}}), reason="r")
    machine.wrapper("update").good()
    assert json.loads(settings.read_text()) == {
        "model": "reef", "lastChangelog": "1.2", "theme": {"dark": True, "size": 3},
    }  # fmt: skip
    shop.publish(rule("one", "x"), Entry("c", "config", {"agent": "pi", "values": {"theme": {"dark": 0}}}), reason="r")
    done = machine.wrapper("update")
    assert done.code == 1
    assert "settings.json changed here" in done.err


BASE = "[a]\nx = 1\n\n[a.b]\ny = 1\n"


@pytest.mark.parametrize(
    ("more", "theirs", "joined"),
    [
        ("\n[mine]\nz = 1\n", BASE + "\n[new]\nz = 1\n", True),
        ("\n[a.mine]\nz = 1\n", BASE + "\n[new]\nz = 1\n", True),
        ('\n["new"]\nz = 2\n', BASE + "\n[new]\nz = 1\n", False),  # one table twice is no TOML
        ("\n[[new.list]]\nz = 2\n", "new.list = [{z = 1}]\n" + BASE, False),
        ("z = 1\n", BASE + "\n[new]\nz = 1\n", False),  # would get into another table
    ],
)
def test_tables_that_the_client_added_stay_behind_the_release_s(more, theirs, joined):
    program = Path(install.__file__).parent / "diff.mjs"
    script = f"""
        import {{ merge }} from {json.dumps(str(program))};
        console.log(JSON.stringify(merge("config.toml", ...{json.dumps([BASE, BASE + more, theirs])})));
    """
    done = subprocess.run(["node", "--input-type=module", "-e", script], capture_output=True, text=True, check=True)
    made = json.loads(done.stdout)
    assert made == (theirs + more if joined else None)
    assert made is None or tomllib.loads(made)


def test_a_file_of_the_user_s_own_in_the_place_of_a_new_one(machine, shop):
    (machine.root / "skills/two").mkdir(parents=True)
    (machine.root / "skills/two/SKILL.md").write_text("My own skill.\n")
    publish(shop)
    done = machine.wrapper("update")
    assert done.code == 1
    assert "skills/two/SKILL.md (not from Reef)" in done.out
    assert (machine.root / "skills/two/SKILL.md").read_text() == "My own skill.\n"


def test_a_removed_entry_s_file_goes_and_what_is_unknown_stays(machine, shop):
    publish(shop)
    machine.wrapper("update").good()
    (machine.root / "skills/two/notes.md").write_text("mine")
    (machine.root / "sessions").mkdir()
    (machine.root / "sessions/a.jsonl").write_text("{}")
    shop.publish(rule("one", "Be silent."), reason="no skills")
    said = machine.wrapper("update").good().out
    assert "files: RULES.md\n" in said
    assert "removed: skills/two/SKILL.md\n" in said
    assert not (machine.root / "skills/two/SKILL.md").exists()
    assert (machine.root / "skills/two/notes.md").read_text() == "mine"
    assert (machine.root / "sessions/a.jsonl").exists()


@pytest.mark.parametrize("inside", ["RULES.md", "skills"])
def test_a_symbolic_link_is_never_written_through(machine, shop, tmp_path, inside):
    outside = tmp_path / "outside"
    link = machine.root / inside
    if inside == "skills":
        outside.mkdir()
    else:
        outside.write_bytes(link.read_bytes())
        link.unlink()
    link.symlink_to(outside)
    publish(shop)
    before = outside.read_bytes() if outside.is_file() else None
    for words in (["update"], ["update", "--theirs"], ["update", "--ours"]):
        done = machine.wrapper(*words)
        assert done.code == 1
        assert str(link) in done.err
        assert "symbolic link" in done.err
    assert link.is_symlink()
    assert outside.is_dir() or outside.read_bytes() == before
    assert not outside.is_dir() or not list(outside.iterdir())
    if inside == "RULES.md":
        assert "symbolic link" in machine.wrapper("doctor").out
    assert "Be brief." in machine.wrapper("hi").good().out
    machine.wrapper("uninstall").good()
    assert link.is_symlink()
    assert outside.exists()


def test_a_hard_link_is_broken_and_not_written_through(machine, shop, tmp_path):
    other = tmp_path / "other"
    os.link(machine.root / "RULES.md", other)
    publish(shop)
    machine.wrapper("update").good()
    assert other.read_text() == "# Rules\n\nBe brief.\n"
    assert "Be briefer." in (machine.root / "RULES.md").read_text()
    assert (machine.root / "RULES.md").stat().st_nlink == 1


# --- back, and away ---------------------------------------------------------------------------------------------------


def test_rollback_needs_no_server_and_goes_both_ways(machine, shop):
    assert "no version before" in machine.wrapper("rollback").err
    publish(shop)
    machine.wrapper("update").good()
    shop.close()
    machine.wrapper("rollback").good()
    assert "Be brief.\n" in machine.wrapper("hi").good().out
    assert not (machine.root / "skills").exists()
    machine.wrapper("rollback").good()
    assert "Be briefer.\n" in machine.wrapper("hi").good().out


def test_status(machine, shop):
    publish(shop)
    (machine.root / "RULES.md").unlink()
    said = json.loads(machine.wrapper("status", "--json").good().out)
    assert (said["installed"]["seq"], said["served"]["seq"]) == (1, 2)
    assert said["changed"] == ["RULES.md"]
    assert said["client"] == {"path": str(machine.client), "version": "9.9.9"}
    assert "client:    9.9.9" in machine.wrapper("status").good().out


def test_status_announces_no_release_with_the_same_files(machine, shop):
    shop.publish(*shop.entries, reason="other weights")
    shop.changes = {"added": [], "releases": []}
    said = machine.wrapper("status").good().out
    assert "served:    release 2, with the same files\n" in said
    assert "other weights" not in said
    assert machine.wrapper("hi").good().err == ""


def test_the_reason_for_users_is_the_one_told(machine, shop):
    publish(shop)
    shop.changes = {"releases": [{"reason": "shorter (Accepted: all hold.)", "why": "shorter"}, {"why": ""}]}
    assert "Why: shorter. To take it" in machine.wrapper("hi").good().err


@pytest.mark.parametrize("streams", ["", "2>&1"])
def test_a_reader_that_goes_away_is_no_error(machine, shop, streams):
    command = f"({machine.bin}/reef-pi status {streams}; echo $? >status) | true; cat status"
    done = machine._run(["sh", "-c", command], b"", {})
    assert (done.out, done.err) == ("0\n", "")


def test_doctor_says_what_to_do(machine, shop):
    done = machine.wrapper("doctor").good()
    assert {line.split()[0] for line in done.out.splitlines()} == {"ok"}
    machine.client.chmod(0o644)
    (machine.root / "RULES.md").write_text("changed")
    done = machine.wrapper("doctor", REEF_TOKEN=None)
    assert done.code == 1
    lines = {line.split()[1]: line for line in done.out.splitlines()}
    assert f"{machine.client} is not there: install it again" in lines["client"]
    assert "export REEF_TOKEN" in lines["token"]
    assert "REEF_TOKEN is not set" in lines["server"]
    assert "RULES.md; reef-pi update --theirs" in lines["files"]
    shop.close()
    assert "cannot be reached" in machine.wrapper("doctor").out
    assert "PATH" in machine.wrapper("doctor", PATH=os.environ["PATH"]).out


def test_a_client_that_is_gone_is_said_so(machine):
    machine.client.unlink()
    ran = machine.wrapper("hi")
    assert ran.code == 127
    assert "reef-pi doctor" in ran.err


def test_uninstall_removes_exactly_what_was_installed(machine, shop):
    publish(shop)
    machine.wrapper("update").good()
    machine.wrapper("hi").good()
    machine.wrapper("uninstall").good()
    assert {str(path.relative_to(machine.home)) for path in machine.home.rglob("*")} == {
        ".local", ".local/bin", ".local/share",
    }  # fmt: skip


def test_uninstall_leaves_and_names_what_is_not_its_own(machine, shop):
    (machine.root / "sessions").mkdir()
    (machine.root / "sessions/a.jsonl").write_text("{}")
    (machine.root / "RULES.md").write_text("changed")
    done = machine.wrapper("uninstall").good()
    left = [path for path in machine.home.rglob("*") if path.is_file()]
    assert sorted(left) == [machine.root / "RULES.md", machine.root / "sessions/a.jsonl"]
    assert all(str(path) in done.out for path in left)


def test_uninstall_all(machine, shop):
    (machine.root / "sessions").mkdir()
    (machine.root / "sessions/a.jsonl").write_text("{}")
    machine.wrapper("uninstall", "--all").good()
    assert [path for path in machine.home.rglob("*") if path.is_file()] == []


def test_it_can_be_installed_again_after_that(machine, shop):
    machine.wrapper("uninstall").good()
    machine.install(shop.bundle()).good()
    assert "Be brief." in machine.wrapper("hi").good().out


def test_a_newer_program_replaces_the_older(machine, shop, monkeypatch):
    (old,) = (machine.base() / "program").iterdir()
    real = shop.bundle

    def changed(adapter="pi", **more):
        made = real(adapter, **more)
        return made | {"program": made["program"] | {"extra.mjs": "// more\n"}}

    monkeypatch.setattr(shop, "bundle", changed)
    machine.wrapper("update").good()
    (new,) = (machine.base() / "program").iterdir()
    assert new != old
    assert "Be brief." in machine.wrapper("hi").good().out
    machine.wrapper("doctor").good()
    assert TOKEN not in (machine.bin / "reef-pi").read_text()


def test_an_argument_that_is_ours_by_name_can_go_to_the_client(machine):
    assert "word:update" in machine.wrapper("--", "update").good().out
    wrong = machine.wrapper("update", "--thiers")
    assert wrong.code == 2
    assert "--theirs or --ours" in wrong.err
