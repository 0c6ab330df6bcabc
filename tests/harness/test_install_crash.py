"""An update that is killed, or whose disk refuses, at any step: what is installed is one release, whole, and works.
Case 52.
"""

import shutil
import subprocess
import time

import pytest

from tests.harness.kit_install import Machine, Shop, rule, skill

WATCH = """
// Counts what changes the disk, and ends or refuses the process at one of these.
import fs from "node:fs";
import { syncBuiltinESMExports } from "node:module";
let left = Number(process.env.AT);
const ends = process.env.END;
const names = ["open", "writeFile", "fsync", "rename", "mkdir", "rm", "rmdir", "link"].map((name) => `${name}Sync`);
for (const name of names) {
  const real = fs[name];
  fs[name] = (...given) => {
    if (name === "openSync" && given[1] === "r") return real(...given);
    if (--left === 0) {
      if (ends === "kill") process.kill(process.pid, "SIGKILL");
      throw Object.assign(new Error("no space left on device"), { code: "ENOSPC" });
    }
    return real(...given);
  };
}
syncBuiltinESMExports();
process.on("exit", () => { if (left > 0) process.stderr.write("whole\\n"); });
"""
OLD = {"RULES.md": "# Rules\n\nBe brief.\n", "skills/gone/SKILL.md": "Gone.\n", "skills/both/SKILL.md": "Old.\n"}
NEW = {"RULES.md": "# Rules\n\nBe briefer.\n", "skills/new/SKILL.md": "New.\n", "skills/both/SKILL.md": "New.\n"}


@pytest.fixture
def shop():
    made = Shop()
    made.entries = [rule("one", "Be brief."), skill("gone", "Gone.\n"), skill("both", "Old.\n")]
    yield made
    made.close()


@pytest.fixture
def machine(tmp_path, shop):
    made = Machine(tmp_path)
    made.install(shop.bundle()).good()
    shop.publish(rule("one", "Be briefer."), skill("new", "New.\n"), skill("both", "New.\n"), reason="better")
    (tmp_path / "watch.mjs").write_text(WATCH)
    shutil.copytree(made.home, tmp_path / "kept")
    return made


def tree(machine):
    found = {
        str(path.relative_to(machine.root)): path.read_text() for path in machine.root.rglob("*") if path.is_file()
    }
    found.pop("settings.json")
    return found


@pytest.mark.parametrize(("ends", "first"), [("kill", 1), ("refuse", 2)])
def test_an_update_that_ends_halfway_leaves_one_version(machine, tmp_path, ends, first):
    """Every fourth step; both kinds together, every second."""
    break_off(machine, tmp_path, ends, range(first, 1000, 4), thorough=9)


@pytest.mark.soak
@pytest.mark.parametrize("ends", ["kill", "refuse"])
def test_an_update_that_ends_anywhere_leaves_one_version(machine, tmp_path, ends):
    break_off(machine, tmp_path, ends, range(1, 1000), thorough=1)


def break_off(machine, tmp_path, ends, steps, thorough):
    seen = []
    for at in steps:
        shutil.rmtree(machine.home)
        shutil.copytree(tmp_path / "kept", machine.home)
        watched = {"NODE_OPTIONS": f"--import={tmp_path}/watch.mjs", "AT": str(at), "END": ends}
        done = machine.wrapper("update", **watched)
        if "whole" in done.err:
            break
        if ends == "kill":
            assert done.code in (-9, 137), done
        ran = machine.wrapper("hi").good()
        found = tree(machine)
        assert found in (OLD, NEW), (at, done, found)
        seen.append(found == NEW)
        assert found["RULES.md"] in ran.out
        assert not (machine.base() / "journal.json").exists()
        if len(seen) % thorough:
            continue
        machine.wrapper("doctor").good()
        machine.wrapper("update").good()
        assert tree(machine) == NEW
        machine.wrapper("rollback").good()
        assert tree(machine) == OLD
        assert sorted(path.name for path in machine.base().iterdir()) == [
            "current.json", "previous.json", "program", "root", "runs",
        ]  # fmt: skip
    assert tree(machine) == NEW
    assert at > 40
    assert not seen[0]
    assert seen[-1]
    assert seen == sorted(seen) or ends == "refuse"  # a disk that refuses once may be well again a moment later


def test_an_installation_that_is_killed_anywhere_can_be_made_again(tmp_path, shop):
    (tmp_path / "watch.mjs").write_text(WATCH)
    for at in range(1, 400, 11):
        machine = Machine(tmp_path / str(at))
        watched = {"NODE_OPTIONS": f"--import={tmp_path}/watch.mjs", "AT": str(at), "END": "kill"}
        done = machine.install(shop.bundle(), **watched)
        machine.install(shop.bundle()).good()
        assert tree(machine) == OLD
        machine.wrapper("uninstall").good()
        assert [path for path in machine.home.rglob("*") if path.is_file()] == []
        if done.err.count("whole") == 2:  # the look at Node's version, and the installation
            assert at > 40
            return
    raise AssertionError("it never came to its end")


def test_a_killed_holder_s_lock_goes_to_one_process_only(machine, tmp_path):
    """Whoever finds it takes it away: not the one that another has taken since."""
    (program,) = (machine.base() / "program").iterdir()
    (tmp_path / "alone.mjs").write_text(f"""
        import {{ alone }} from "{program}/lock.mjs";
        import fs from "node:fs";
        const [base, begin] = process.argv.slice(2);
        while (Date.now() < Number(begin));
        await alone(base, async () => {{
          fs.writeFileSync(`${{base}}/inside`, "", {{ flag: "wx" }});
          await new Promise((resolve) => setTimeout(resolve, 30));
          fs.rmSync(`${{base}}/inside`);
        }}).catch((error) => console.log(error.message));
    """)
    folder = tmp_path / "locked"
    folder.mkdir()
    for _ in range(10):
        (folder / "lock").write_text("999999999")
        command = ["node", tmp_path / "alone.mjs", folder, str(int(time.time() * 1000) + 200)]
        both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
        said = "".join(each.communicate()[0] for each in both)
        assert "EEXIST" not in said
        assert "ENOENT" not in said
        assert list(folder.iterdir()) == []


def test_what_was_written_during_an_update_is_kept(machine, tmp_path):
    """Killed with its journal written, then a person edits, then the next start completes the update."""
    for at in range(1, 100):
        watched = {"NODE_OPTIONS": f"--import={tmp_path}/watch.mjs", "AT": str(at), "END": "kill"}
        machine.wrapper("update", **watched)
        if (machine.base() / "journal.json").exists():
            break
    (machine.root / "RULES.md").write_text("Mine.\n")
    ran = machine.wrapper("hi").good()
    assert "is kept as" in ran.err
    assert tree(machine) == NEW
    assert [path.read_text() for path in (machine.base() / "replaced").rglob("*.md")] == ["Mine.\n"]


def test_a_folder_for_a_moment_s_files_that_is_missing_is_said_in_a_line(tmp_path, shop):
    done = Machine(tmp_path).install(shop.bundle(), TMPDIR=str(tmp_path / "missing"))
    assert done.code == 1
    assert done.err.startswith("reef: ENOENT")
    assert done.err.count("\n") == 1
