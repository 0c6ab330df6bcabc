"""Log files: JSON lines with the receipt, secrets struck out, warnings and crashes on the terminal."""

import io
import json
import logging
import sys

import pytest

from reef.cli import logs
from reef.cli.logs import Lines, Log


def say(level, message, **more):
    """A line as a child writes it."""
    return Lines().format(logging.makeLogRecord({"levelname": level, "msg": message, "name": "reef.a", **more}))


def kept(folder):
    return [json.loads(line) for line in (folder / "role.log").read_text().splitlines()]


def test_a_line_tells_what_an_exchange_was(tmp_path):
    log = Log(tmp_path, "role")
    told = {"receipt": "0199", "scenario": "default", "route": "/v1/chat/completions", "status": 200, "seconds": 0.25}
    log.line(say("INFO", "done %s", args=("well",), created=1.5, **told))
    (line,) = kept(tmp_path)
    assert line == {
        "time": "1970-01-01T00:00:01.500+00:00",
        "level": "INFO",
        "process": "role",
        "logger": "reef.a",
        "message": "done well",
        **told,
    }


def test_logs_are_kept_masked_and_warnings_shown(tmp_path, capfd):
    log = Log(tmp_path, "role", secrets=["rf_canary", "x", 'quo"ted'])
    for text in (
        say("INFO", "quiet rf_canary", receipt="rf_canary"),
        say("WARNING", 'loud rf_canary quo"ted'),
        "Fatal Python error: rf_canary",
        say("INFO", "quiet again"),
    ):
        log.line(text)
    shown = capfd.readouterr().err
    text = (tmp_path / "role.log").read_text()
    assert "canary" not in text + shown
    assert "ted" not in text.replace("quoted", "")
    assert [line["message"] for line in kept(tmp_path)] == [
        "quiet ***",
        "loud *** ***",
        "Fatal Python error: ***",
        "quiet again",
    ]
    assert "WARNING reef.a: loud" in shown
    assert "Fatal Python error" in shown
    assert "quiet" not in shown


@pytest.mark.parametrize(
    "secret",
    ["reef_" + "A1-_" * 11, "rf_" + "b2" * 20, "sk-proj-" + "c3" * 20, "Bearer eyJh.eyJz.abc-_~+/=abcdefgh"],
)
def test_what_looks_like_a_key_is_struck_out_whosever_it_is(tmp_path, secret, capfd):
    log = Log(tmp_path, "role")
    log.line(say("ERROR", f"sent {secret}, refused"))
    log.line(f"raw {secret}")
    assert secret not in (tmp_path / "role.log").read_text() + capfd.readouterr().err
    assert kept(tmp_path)[0]["message"] == "sent ***, refused"


def test_a_trace_is_one_line_in_the_file_and_many_on_the_terminal(tmp_path, capfd):
    log = Log(tmp_path, "role", secrets=["rf_canary"])
    try:
        raise ValueError("because of rf_canary")
    except ValueError:
        log.line(say("ERROR", "it failed", exc_info=sys.exc_info()))
    (line,) = kept(tmp_path)
    assert line["trace"].startswith("Traceback")
    assert line["trace"].endswith("ValueError: because of ***")
    assert capfd.readouterr().err.rstrip().splitlines()[-1] == "ValueError: because of ***"


@pytest.mark.parametrize(
    "text", ['{"time": 1', '{"time": "x"}', '{"time": 1, "level": 3}', "{}", "[]", "", '{"time": null}']
)
def test_what_is_no_line_of_ours_is_kept_as_it_came(tmp_path, text, capfd):
    Log(tmp_path, "role").line(text)
    (line,) = kept(tmp_path)
    assert (line["message"], line["level"], line["process"]) == (text, None, "role")
    assert capfd.readouterr().err == f"[role] {text}\n"


def test_a_message_of_many_lines_stays_one(tmp_path):
    Log(tmp_path, "role").line(say("INFO", 'one\ntwo "three" é'))
    assert kept(tmp_path)[0]["message"] == 'one\ntwo "three" é'


def test_logs_stay_small(tmp_path):
    log = Log(tmp_path, "role", size=1000)
    for number in range(200):
        log.line(say("INFO", f"line {number}"))
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["role.log", "role.log.1"]
    assert all(file.stat().st_size <= 1000 for file in files)
    assert kept(tmp_path)[-1]["message"] == "line 199"


def test_a_child_writes_lines_that_its_log_reads(tmp_path, monkeypatch):
    said = io.StringIO()
    monkeypatch.setattr(sys, "stderr", said)
    before = logging.getLogger().handlers[:], logging.getLogger().level
    try:
        logs.configure("debug")
        logging.getLogger("reef.x").debug("seen", extra={"receipt": "0199"})
        logging.getLogger("httpx").info("GET https://user:password@host")
    finally:
        logging.getLogger().handlers[:], logging.getLogger().level = before
    log = Log(tmp_path, "role")
    for line in said.getvalue().splitlines():
        log.line(line)
    (line,) = kept(tmp_path)
    assert (line["message"], line["level"], line["receipt"]) == ("seen", "DEBUG", "0199")
