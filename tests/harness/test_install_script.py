"""The installer: what piping it into a shell does, does again, and does not do when it is not whole.
Cases 34 and 52.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from reef.harness import install
from reef.harness.agents import Door
from reef.harness.tree import Entry
from tests.harness.kit_install import TOKEN, Fake, Machine, rule

SHELLS = [shell for shell in ("bash", "dash") if shutil.which(shell)]


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_both_shells_are_here():
    assert SHELLS == ["bash", "dash"]


@pytest.mark.parametrize("shell", SHELLS)
def test_installs_and_says_so(machine, shop, shell):
    done = machine.install(shop.bundle(), shell=shell).good()
    assert "reef-pi: installed" in done.out
    assert "release 1" in done.out
    assert (machine.root / "RULES.md").read_text() == "# Rules\n\nBe brief.\n"
    ran = machine.wrapper("-p", "two words", "it's").good()
    assert [line for line in ran.out.splitlines() if line.startswith("word:")] == [
        "word:-p", "word:two words", "word:it's",
    ]  # fmt: skip
    assert ran.told("root") == str(machine.root)
    assert ran.told("token") == f"Bearer {TOKEN}"
    assert ran.told("plain") == "it's $HOME `id`"
    assert len(ran.told("session")) == 36


def test_again_writes_nothing(machine, shop):
    machine.install(shop.bundle()).good()
    before = machine.files(stamps=True)
    again = machine.install(shop.bundle()).good()
    assert "already current" in again.out
    assert machine.files(stamps=True) == before


def test_the_token_is_in_no_file(machine, shop):
    """Case 33."""
    machine.install(shop.bundle()).good()
    machine.wrapper("hello").good()
    machine.wrapper("report", "--score", "1").good()
    for name, data in machine.files().items():
        assert TOKEN.encode() not in data, name


def test_the_token_need_not_be_exported(machine, shop):
    done = machine.install(shop.bundle(), REEF_TOKEN=None).good()
    assert "export REEF_TOKEN" in done.out
    bare = machine.wrapper("hello", REEF_TOKEN=None)
    assert bare.code == 2
    assert "REEF_TOKEN is not set: export" in bare.err
    machine.wrapper("--version", REEF_TOKEN=None).good()


def test_half_a_download_does_nothing(machine, shop):
    script = install.script(shop.bundle())
    end = script.rindex(b"main ")
    cuts = {*range(0, end, max(1, end // 60)), *range(end - 6, end + 4)}
    for shell in SHELLS:
        for cut in sorted(cuts):
            machine.shell(script[:cut], shell=shell)
            assert list(machine.home.iterdir()) == [], (shell, script[:cut][-80:])
    machine.shell(script).good()


def test_a_damaged_download_does_nothing(machine, shop):
    script = install.script(shop.bundle())
    place = script.index(b"REEF_PAYLOAD'") + 500
    other = b"A" if script[place : place + 1] != b"A" else b"B"
    done = machine.shell(script[:place] + other + script[place + 1 :])
    assert done.code == 1
    assert "damaged" in done.err
    assert list(machine.home.iterdir()) == []


def without(tmp_path, *names):
    """A PATH with the usual tools but these."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for name in {"sh", "cat", "node", "npm", "env", "dirname", "id", "chmod"} - set(names):
        (folder / name).symlink_to(shutil.which(name))
    return str(folder)


def test_without_node_it_says_where_to_get_it(machine, shop, tmp_path):
    done = machine.install(shop.bundle(), PATH=without(tmp_path, "node"))
    assert done.code == 1
    assert "Node is missing" in done.err
    assert "https://nodejs.org" in done.err
    assert list(machine.home.iterdir()) == []


def test_without_npm_it_says_where_to_get_it(machine, shop, tmp_path):
    path = without(tmp_path, "npm")
    done = machine.install(shop.bundle(), PATH=path, REEF_CLIENT=None)
    assert done.code == 1
    assert "npm is missing" in done.err
    machine.install(shop.bundle(), PATH=path).good()  # a client that is there needs no npm


def test_an_npm_that_is_not_there_is_named(machine, shop):
    done = machine.install(shop.bundle(), REEF_NPM="nope", REEF_CLIENT=None)
    assert done.code == 1
    assert "REEF_NPM is nope" in done.err
    assert "npm is missing" not in done.err
    assert list(machine.home.iterdir()) == []


def test_the_scenario_is_told_and_the_one_it_replaces(machine, shop):
    assert f"scenario demo at {shop.url}\n" in machine.install(shop.bundle()).good().out
    again = machine.install(shop.bundle(scenario="team")).good().out
    assert f"scenario team at {shop.url}; was: demo at {shop.url}\n" in again
    assert "scenario demo" not in machine.install(shop.bundle(scenario="team")).good().out


def test_the_wrapper_s_own_words_are_told(machine, shop):
    words = "reef-pi update|rollback|status|doctor|report|hook|uninstall, reef-pi --check COMMAND"
    assert words in machine.install(shop.bundle()).good().out
    assert words in machine.wrapper("doctor").good().out
    launcher = (machine.bin / "reef-pi").read_text()
    assert "update | rollback | status | doctor | uninstall | report | hook | --check | --check=*)" in launcher


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["updat"], "update"), (["udpate"], "update"), (["statuss"], "status"), (["dockor"], "doctor"),
        (["--chek"], "--check"), (["updat", "x"], None), (["--", "update"], None), (["--", "--check"], None),
        (["up"], None), ([""], None),
        (["fix the update"], None), (["toudpate"], None),
    ],
)  # fmt: skip
def test_a_word_that_is_nearly_one_of_them_is_hinted_at(machine, shop, words, meant):
    machine.install(shop.bundle()).good()
    ran = machine.wrapper(*words).good()
    assert f"word:{words[-1]}\n" in ran.out  # the client has it all the same
    assert (ran.err.strip().rpartition(": reef-pi ")[2] or None) == meant


def test_a_node_that_is_too_old_is_named(machine, shop):
    client = shop.bundle()["client"] | {"node": "99.1"}
    done = machine.install(shop.bundle(client=client))
    assert done.code == 1
    assert "needs Node 99.1 or newer" in done.err


def test_a_client_that_is_not_there_is_named(machine, shop):
    done = machine.install(shop.bundle(), REEF_CLIENT="/nowhere/pi")
    assert done.code == 1
    assert "REEF_CLIENT is /nowhere/pi" in done.err
    assert not (machine.base() / "current.json").exists()


def test_another_program_of_that_name_stays(machine, shop):
    machine.bin.mkdir(parents=True)
    (machine.bin / "reef-pi").write_text("somebody's own")
    done = machine.install(shop.bundle())
    assert done.code == 1
    assert "is not Reef's" in done.err
    assert (machine.bin / "reef-pi").read_text() == "somebody's own"


NPM = """#!/bin/sh
env >"$NPM_SAW"
[ -z "${NPM_FAILS-}" ] || exit 7
while [ "$#" -gt 0 ]; do
  case "$1" in --prefix) shift; prefix=$1 ;; esac
  last=$1; shift
done
mkdir -p "$prefix/node_modules/.bin"
cp "$NPM_CLIENT" "$prefix/node_modules/.bin/fake"
echo "$last" >"$prefix/wanted"
"""


@pytest.fixture
def npm(machine, tmp_path):
    program = tmp_path / "an npm"
    program.write_text(NPM)
    program.chmod(0o755)
    saw = tmp_path / "saw"
    machine.environment |= {"REEF_NPM": str(program), "NPM_CLIENT": str(machine.client), "NPM_SAW": str(saw)}
    del machine.environment["REEF_CLIENT"]
    return saw


def test_npm_installs_the_exact_version_below_the_home_and_never_sees_the_token(machine, shop, npm):
    machine.install(shop.bundle()).good()
    folder = machine.base() / "client/1.2.3"
    assert (folder / "wanted").read_text() == "fake-agent@1.2.3\n"
    assert TOKEN not in npm.read_text()
    assert f"client {folder}/node_modules/.bin/fake" in machine.wrapper("hi").good().out
    npm.unlink()
    machine.install(shop.bundle()).good()
    assert not npm.exists()  # it is there already


def test_what_the_client_writes_while_npm_works_stays(machine, shop, npm, tmp_path, monkeypatch):
    machine.install(shop.bundle()).good()
    real = shop.bundle
    monkeypatch.setattr(shop, "bundle", lambda name: real(name, client=real(name)["client"] | {"version": "1.2.4"}))
    shop.publish(Entry("c", "config", {"agent": "pi", "values": {"size": 3}}), reason="r")
    program = tmp_path / "an npm"
    program.write_text(NPM + f"""echo '{{"model": "reef", "dark": true}}' >'{machine.root}/settings.json'\n""")
    machine.wrapper("update").good()
    assert json.loads((machine.root / "settings.json").read_text()) == {"model": "reef", "dark": True, "size": 3}


def test_an_update_brings_another_version_and_rollback_the_one_before(machine, shop, npm, monkeypatch):
    machine.install(shop.bundle()).good()
    folder, real = machine.base() / "client", shop.bundle
    for version in ("1.2.4", "1.2.5"):
        monkeypatch.setattr(
            shop, "bundle", lambda name, v=version: real(name, client=real(name)["client"] | {"version": v})
        )
        shop.publish(rule("one", f"For {version}."), reason=version)
        assert f"installed fake-agent {version}" in machine.wrapper("update").good().out
        assert f"/client/{version}/" in machine.wrapper("hi").good().out
    assert sorted(path.name for path in folder.iterdir()) == ["1.2.4", "1.2.5"]
    npm.unlink()
    machine.wrapper("rollback", NPM_FAILS="1").good()
    ran = machine.wrapper("hi").good()
    assert "/client/1.2.4/" in ran.out
    assert "For 1.2.4." in ran.out
    assert not npm.exists()
    npm_fails = machine.install(real("pi") | {"client": real("pi")["client"] | {"version": "9.0.0"}}, NPM_FAILS="1")
    assert npm_fails.code == 1
    assert "For 1.2.4." in machine.wrapper("hi").good().out


def test_an_update_names_an_npm_that_is_not_there(machine, shop, npm, monkeypatch):
    machine.install(shop.bundle()).good()
    real = shop.bundle
    monkeypatch.setattr(shop, "bundle", lambda name: real(name, client=real(name)["client"] | {"version": "1.2.4"}))
    done = machine.wrapper("update", REEF_NPM="nope")
    assert done.code == 1
    assert "REEF_NPM is nope, which does not start: ENOENT" in done.err


def test_an_npm_that_fails_leaves_nothing_half_done(machine, shop, npm):
    done = machine.install(shop.bundle(), NPM_FAILS="1")
    assert done.code == 1
    assert "could not install fake-agent@1.2.3 (exit 7)" in done.err
    assert not (machine.base() / "current.json").exists()
    assert list((machine.base() / "client").iterdir()) == []
    machine.install(shop.bundle()).good()


def test_a_server_that_asks_for_no_token(machine, shop):
    shop.keyless = True
    done = machine.install(shop.bundle(), REEF_TOKEN=None).good()
    assert "REEF_TOKEN" not in done.out
    shop.publish(rule("one", "Be briefer."), reason="shorter")
    ran = machine.wrapper("hello", REEF_TOKEN=None).good()
    assert ran.told("token") == "Bearer keyless"
    assert "release 2 is out" in ran.err
    machine.wrapper("report", "--score", "1", REEF_TOKEN=None).good()
    assert shop.reports
    assert not any("authorization" in {name.lower() for name in headers} for _, _, headers, _ in shop.asked)


def test_two_agents_do_not_touch_each_other(machine, shop):
    machine.install(shop.bundle("pi")).good()
    machine.install(shop.bundle("codex")).good()
    pi = {name: data for name, data in machine.files(stamps=True).items() if "reef/pi" in name}
    shop.publish(rule("one", "Be briefer."), reason="shorter")
    machine.wrapper("update", adapter="codex").good()
    assert "Be briefer." in machine.wrapper("hi", adapter="codex").out
    machine.wrapper("uninstall", adapter="codex").good()
    assert {name: data for name, data in machine.files(stamps=True).items() if "reef/pi" in name} == pi
    assert "Be brief." in machine.wrapper("hi").good().out


def test_three_hundred_entries(machine, shop):
    shop.entries = [rule(f"rule-{place:03}", f"Rule {place}. " + "word " * 40) for place in range(300)]
    machine.install(shop.bundle()).good()
    assert "Rule 299." in machine.wrapper("hi").good().out


# --- quoting ----------------------------------------------------------------------------------------------------------

NASTY = st.text(st.sampled_from("a '\"$`\\;&|<>(){}*?!#~%=\n\té珊"), min_size=1, max_size=12)
HOMES = NASTY.filter(lambda text: "\\" not in text)


@settings(
    max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.explicit, Phase.generate]
)
@given(home=HOMES, reason=NASTY, url=NASTY, scenario=NASTY, text=NASTY, value=NASTY, word=NASTY)
@example(home="$'$&$`\n'\"", reason="'", url="'", scenario="'", text="$(id)", value="${HOME}'\\", word="-n")
def test_nothing_that_is_put_in_is_ever_run(tmp_path_factory, home, reason, url, scenario, text, value, word):
    machine = Machine(tmp_path_factory.mktemp("fuzz"), f"{home}x")
    origin = install.Origin("0" * 40, 1, f"$(touch {machine.home}/bad) {reason}")
    agent = Fake(environment={"FAKE_PLAIN": f"{value}x"})
    bundle = install.bundle(agent, [rule("one", f"{text}x")], Door(url, scenario), origin)
    for shell in SHELLS:
        machine.install(bundle, shell=shell).good()
    ran = machine.wrapper(word, "$(touch bad)").good()
    assert f"word:{word}\nword:$(touch bad)\n" in ran.out
    assert f"root:{machine.root}\n" in ran.out
    assert f"plain:{value}x\n" in ran.out
    assert json.loads((machine.base() / "current.json").read_bytes())["bundle"]["scenario"] == scenario
    machine.wrapper("uninstall").good()
    assert [path for path in machine.home.rglob("*") if not path.is_dir()] == []


def test_a_home_that_node_cannot_load_from_is_refused(tmp_path, shop):
    machine = Machine(tmp_path, "back\\slash")
    done = machine.install(shop.bundle())
    assert done.code == 1
    assert "XDG_DATA_HOME" in done.err
    assert list(machine.home.iterdir()) == []
    machine.install(shop.bundle(), XDG_DATA_HOME=str(tmp_path / "data")).good()
    assert "Be brief." in machine.wrapper("hi").good().out


def test_shellcheck_finds_nothing(machine, shop, tmp_path):
    machine.install(shop.bundle()).good()
    script = tmp_path / "install.sh"
    script.write_bytes(install.script(shop.bundle()))
    for path in (script, machine.bin / "reef-pi"):
        done = subprocess.run(["shellcheck", "--shell=sh", "--severity=style", path], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_only_plain_words_enter_the_script_outside_of_the_payload(shop):
    for broken in ({"package": "a; rm -rf ~"}, {"version": "1\n2"}, {"node": "$(id)"}):
        with pytest.raises(ValueError):
            install.script(shop.bundle(client=shop.bundle()["client"] | broken))
    with pytest.raises(ValueError):
        install.script(shop.bundle(adapter="../pi"))


def test_the_program_is_plain_files_of_a_readable_size():
    for name, text in install.program().items():
        assert text.count("\n") < 300, name
        assert str(Path(__file__).parents[2]) not in text, "a path of this checkout"
    assert {"main.mjs", "setup.mjs"} <= set(install.program())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try being somebody else")
def test_it_needs_no_root(machine, shop, tmp_path):
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, 65534, 65534)
    for path in tmp_path.parents[:3]:
        path.chmod(0o755)
    script = tmp_path / "script"
    script.write_bytes(install.script(shop.bundle()))
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sh"]
    with script.open() as given_:
        done = subprocess.run(words, stdin=given_, env=machine.environment, cwd=tmp_path, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert (machine.root / "RULES.md").stat().st_uid == 65534


@pytest.mark.timeout(600)
def test_a_wheel_carries_the_program(tmp_path):
    root = Path(install.__file__).parents[3]
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), str(root)]
    subprocess.run(words, check=True, capture_output=True, timeout=500)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = {Path(name).name for name in packed.namelist() if name.startswith("reef/harness/install/")}
    assert names == {"__init__.py", "install.sh", *install.program()}


@pytest.mark.parametrize("part", ["program", "version", "package"])
def test_names_that_are_paths_are_refused(machine, shop, part):
    bundle = shop.bundle()
    if part == "program":
        bundle["program"] = bundle["program"] | {"../../outside.mjs": "1"}
    else:
        bundle["client"] = bundle["client"] | {part: "../../outside"}
    machine.install(shop.bundle()).good()
    shop.bundle = lambda name: bundle
    before = machine.files()
    done = machine.wrapper("update")
    assert done.code == 1
    assert "is no plain name" in done.err
    assert machine.files() == before
