"""`reef token`: secrets alone on stdout, beside a running server and without one."""

import json
import os
import stat
import time
from pathlib import Path

import pytest

from reef.cli.main import main
from reef.cli.token import duration
from reef.core.errors import InputError
from reef.records.board import Board
from reef.records.tokens import Quota, TokenTable, digest


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("REEF_URL", "REEF_TOKEN", "REEF_UPSTREAM_URL", "REEF_UPSTREAM_MODEL"):
        monkeypatch.delenv(name, raising=False)


def run(capsys, *arguments):
    """Exit code, stdout, stderr."""
    capsys.readouterr()
    code = main(["token", *arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


def rows(path=Path(".reef/records.db")):
    board = Board(path)
    try:
        return {grant.name: grant for grant in TokenTable(board).list()}
    finally:
        board.close()


def test_create_prints_the_secret_alone_and_keeps_its_digest(capsys):
    code, out, err = run(
        capsys, "create", "ci", "--right", "infer", "read", "--scenario", "team-*", "default",
        "--requests-per-minute", "60", "--tokens-per-minute", "5000", "--concurrent", "4", "--expires", "30d",
    )  # fmt: skip
    assert code == 0
    assert out.startswith("reef_")
    assert len(out.split()) == 1
    assert out.strip() not in err
    assert "once" in err
    found = rows()["ci"]
    assert found.digest == digest(out.strip())
    assert (found.rights, found.scenarios) == (frozenset({"infer", "read"}), ("team-*", "default"))
    assert found.quota == Quota(60, 5000, 4)
    assert found.expires_at == pytest.approx(time.time() + 30 * 86400, abs=60)


def test_a_plain_token_asks_and_reports_everywhere_for_ever(capsys):
    run(capsys, "create", "app")
    found = rows()["app"]
    assert (found.rights, found.scenarios, found.quota) == (frozenset({"infer", "report"}), None, Quota())
    assert found.expires_at is None


def test_a_new_state_folder_is_private_and_named(capsys):
    _, _, err = run(capsys, "create", "app")
    assert str(Path(".reef").absolute()) in err
    assert stat.S_IMODE(Path(".reef").stat().st_mode) == 0o700


def test_list_shows_no_secret_and_no_digest(capsys):
    secret = run(capsys, "create", "app", "--requests-per-minute", "5")[1].strip()
    run(capsys, "create", "gone", "--scenario", "a")
    run(capsys, "revoke", "gone")
    code, out, err = run(capsys, "list")
    assert code == 0
    assert "app" in out
    assert "5 requests/min" in out
    assert "revoked" in out
    whole = run(capsys, "list", "--json")[1]
    shown = {item["name"]: item for item in json.loads(whole)["tokens"]}
    assert (shown["app"]["state"], shown["gone"]["state"]) == ("active", "revoked")
    assert (shown["app"]["scenarios"], shown["gone"]["scenarios"]) == (None, ["a"])
    for text in (out, err, whole):
        assert secret not in text
        assert digest(secret).hex() not in text


def test_list_of_nothing_makes_nothing(capsys):
    assert run(capsys, "list")[0] == 0
    assert not Path(".reef").exists()


def test_episodes_are_not_listed(capsys):
    run(capsys, "create", "app")
    board = Board(Path(".reef/records.db"))
    TokenTable(board).episode("default", "c0ffee", 60)
    board.close()
    assert [item["name"] for item in json.loads(run(capsys, "list", "--json")[1])["tokens"]] == ["app"]


def test_rotate_prints_the_new_secret_and_says_how_long_the_old_one_works(capsys):
    old = run(capsys, "create", "app")[1].strip()
    code, out, err = run(capsys, "rotate", "app", "--overlap", "10m")
    assert code == 0
    assert "10m" in err
    found = rows()
    assert found["app"].digest == digest(out.strip())
    assert found["app~old"].digest == digest(old)
    assert found["app~old"].expires_at == pytest.approx(time.time() + 600, abs=60)
    run(capsys, "rotate", "app", "--overlap", "0")
    assert rows()["app~old"].state(time.time()) == "expired"


def test_it_works_beside_a_server_that_has_the_file_open(capsys):
    run(capsys, "create", "app")
    server = Board(Path(".reef/records.db"))
    before = server.version()
    assert run(capsys, "revoke", "app")[0] == 0
    assert server.version() != before
    assert TokenTable(server).list()[0].revoked_at is not None
    server.close()


def test_the_folder_is_the_configurations(capsys, tmp_path):
    Path("deep").mkdir()
    Path("deep/reef.yaml").write_text("reef:\n  state_dir: state\n")
    run(capsys, "create", "app", "-c", "deep/reef.yaml")
    assert "app" in rows(Path("state/records.db"))
    run(capsys, "create", "b", "--reef.state_dir", str(tmp_path / "other"))
    assert "b" in rows(tmp_path / "other/records.db")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["create", "a b"], 2, "name"),
        (["create", "operator"], 2, "operator"),
        (["create", "app"], 1, "already"),
        (["create", "b", "--scenario", "Team"], 2, "pattern"),
        (["create", "b", "--concurrent", "0"], 2, "concurrent must be 1 or more"),
        (["create", "b", "--expires", "soon"], 2, "30d"),
        (["create", "b", "--expires", "0"], 2, "more than 0 seconds"),
        (["create", "b", "--right", "fly"], 2, "infer"),
        (["revoke", "b"], 1, "reef token list"),
        (["rotate", "b"], 1, "reef token list"),
        (["rotate", "app", "--overlap", "-1h"], 2, "overlap"),
        ([], 2, "ACTION"),
    ],
)
def test_mistakes_say_what_to_do_and_print_no_secret(capsys, arguments, code, said):
    run(capsys, "create", "app")
    found, out, err = run(capsys, *arguments)
    assert found == code
    assert out == ""
    assert said in err
    assert set(rows()) == {"app"}


def test_revoke_without_any_tokens_names_the_folder(capsys):
    code, _, err = run(capsys, "revoke", "app")
    assert code == 2
    assert os.fspath(Path(".reef").absolute()) in err


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("1.5h", 5400), ("30d", 30 * 86400), ("2w", 14 * 86400), ("0", 0)],
)
def test_durations(text, seconds):
    assert duration(text, "--expires") == seconds


@pytest.mark.parametrize("text", ["", "1", "-1d", "1y", "d", "1 d", "１d", "1e9d", "nan"])
def test_what_is_no_duration(text):
    with pytest.raises(InputError):
        duration(text, "--expires")
