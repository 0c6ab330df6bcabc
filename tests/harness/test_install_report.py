"""What a run was worth: said by a person, by a check's exit status, by a client's hook."""

import json
import os

import pytest

from tests.harness.kit_install import TOKEN


def test_a_report_is_on_the_last_run(machine, shop):
    assert "no run yet" in machine.wrapper("report", "--score", "1").err
    machine.wrapper("first").good()
    session = machine.wrapper("second").good().told("session")
    done = machine.wrapper("report", "--score", "0.5", "--feedback", "it's $(fine)").good()
    assert shop.reports == [{"score": 0.5, "feedback": "it's $(fine)", "session": session}]
    assert session in done.out


@pytest.mark.parametrize("words", [[], ["--score", "good"], ["--score", "NaN"], ["--score"], ["--scroe", "1"]])
def test_a_report_that_says_nothing_is_refused(machine, shop, words):
    machine.wrapper("first").good()
    assert machine.wrapper("report", *words).code == 2
    assert shop.reports == []


def test_two_runs_whose_reports_cross(machine, shop, tmp_path):
    """Two terminals: A starts, B runs and reports, then A ends and reports; each on its own run."""
    pi = machine.bin / "reef-pi"
    inner = f"unset REEF_SESSION FAKE_RUN; {pi} b >{tmp_path}/b; {pi} report --feedback of-b"
    terminal = f"FAKE_RUN='sh -c \"{inner}\"' {pi} a >{tmp_path}/a; {pi} report --feedback of-a"
    machine._run(["sh", "-c", terminal + "; exit 0"], b"", {}).good()
    sessions = {
        name: next(line for line in (tmp_path / name).read_text().splitlines() if line.startswith("session:"))[8:]
        for name in "ab"
    }
    assert sessions["a"] != sessions["b"]
    assert [(each["feedback"], each["session"]) for each in shop.reports] == [
        ("of-b", sessions["b"]), ("of-a", sessions["a"]),
    ]  # fmt: skip


def test_a_check_s_exit_status_is_the_score(machine, shop):
    ran = machine.wrapper("--check", "echo all good; true", "-p", "task").good()
    assert "word:-p\nword:task\n" in ran.out
    assert (ran.told("token"), ran.told("plain")) == (f"Bearer {TOKEN}", "it's $HOME `id`")
    (report,) = shop.reports
    assert report["score"] == 1
    assert report["session"] == ran.told("session")
    assert report["metadata"] == {"command": "echo all good; true", "exit": 0, "client_exit": 0, "output": "all good\n"}
    assert report["agent_record_id"].startswith("rep_")


@pytest.mark.parametrize(
    ("client", "check", "score", "code"), [("0", "exit 3", 0, 3), ("4", "exit 3", 0, 4), ("4", "true", 1, 4)]
)
def test_the_client_s_exit_status_comes_first(machine, shop, client, check, score, code):
    ran = machine.wrapper("--check", check, "task", FAKE_EXIT=client)
    assert ran.code == code
    (report,) = shop.reports
    assert report["score"] == score


def test_a_check_s_output_never_carries_the_token(machine, shop):
    machine.wrapper("--check=env; head -c 100000 /dev/zero | tr '\\0' x; env", "task").good()
    (report,) = shop.reports
    assert TOKEN not in json.dumps(report)
    assert "[token]" in report["metadata"]["output"]
    assert len(report["metadata"]["output"]) <= 4000


def test_a_report_that_does_not_arrive_changes_nothing(machine, shop):
    shop.close()
    ran = machine.wrapper("--check", "true", "task").good()
    assert "could not be reported" in ran.err


def test_the_session_that_a_client_tells_is_the_one_reported(machine, shop):
    tells = 'echo \'{"session_id": "its-own"}\' >"$REEF_RUN"'
    machine.wrapper("--check", "true", "task", FAKE_RUN=tells).good()
    machine.wrapper("report", "--score", "1").good()
    assert [report["session"] for report in shop.reports] == ["its-own", "its-own"]


RECEIPTS = ["0" * 31 + digit for digit in "1234"]


def transcript(path):
    lines = [
        {"type": "user", "message": {"content": "first"}},
        {"type": "assistant", "requestId": RECEIPTS[0], "message": {}},
        {"type": "user", "message": {"content": [{"type": "text", "text": "second"}]}},
        {"type": "assistant", "requestId": RECEIPTS[1], "message": {}},
        {"type": "assistant", "requestId": RECEIPTS[1], "message": {}},
        {"type": "user", "message": {"content": [{"type": "tool_result", "content": "x"}]}},
        {"type": "assistant", "requestId": RECEIPTS[2], "message": {}},
        {"type": "assistant", "requestId": "req_of_another_server", "message": {}},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"type": "assis')


def test_the_stop_hook_reports_the_last_turn(machine, shop, tmp_path):
    transcript(tmp_path / "t.jsonl")
    told = {"session_id": "s-1", "transcript_path": str(tmp_path / "t.jsonl"), "cwd": str(tmp_path)}
    machine.wrapper("hook", "stop", "--check", "pwd; exit 1", stdin=json.dumps(told).encode()).good()
    (report,) = shop.reports
    assert report["references"] == RECEIPTS[1:3]
    assert report["score"] == 0
    assert report["metadata"]["output"] == f"{tmp_path}\n"


@pytest.mark.parametrize("stdin", [b"", b"not json", b"[]", b'{"transcript_path": "/nowhere", "session_id": "s-1"}'])
def test_the_stop_hook_never_stops_the_client(machine, shop, stdin):
    ran = machine.wrapper("hook", "stop", "--check", "true", stdin=stdin).good()
    assert ran.out == ""
    if b"s-1" in stdin:
        assert [report["session"] for report in shop.reports] == ["s-1"]
    else:
        assert "only as a hook of Claude Code" in ran.err


@pytest.mark.parametrize("words", [["stop"], ["start"], ["stop", "--chek", "true"]])
def test_a_hook_that_is_written_wrong_does_not_stop_the_client_either(machine, words):
    """For Claude Code a status of 2 means: go on."""
    assert "--check" in machine.wrapper("hook", *words, stdin=b"{}").good().err


def test_a_token_that_the_end_of_the_output_cuts_through_is_left_out(machine, shop):
    machine.wrapper("--check", "printf %s \"$REEF_TOKEN\"; head -c 3995 /dev/zero | tr '\\0' x; exit 1", "task")
    (report,) = shop.reports
    assert report["feedback"] == report["metadata"]["output"] == "x" * 3995


def test_a_run_that_is_not_remembered_is_the_one_that_one_is_in(machine, shop):
    machine.wrapper("task").good()
    machine.wrapper("report", "--score", "1", REEF_SESSION="forgotten").good()
    assert [report["session"] for report in shop.reports] == ["forgotten"]


@pytest.mark.parametrize(
    ("check", "says", "code"),
    [
        ("nosuchcmd", "exit status 127", 127),
        ("./home/nothing-here || exit 126", "exit status 126", 126),
        ("kill -9 $$", "ended by SIGKILL", 137),
        ("sh -c 'kill -9 $$'; exit $?", "ended by SIGKILL", 137),
        ("echo pytest >/dev/null; exit 5", "pytest found no tests", 5),
        ("echo no tests ran in 0.01s; exit 5", "pytest found no tests", 5),
    ],
)
def test_a_check_that_could_not_run_is_no_score(machine, shop, check, says, code):
    ran = machine.wrapper("--check", check, "task")
    assert ran.code == code
    assert "the check could not run (" in ran.err
    assert says in ran.err
    assert "; nothing was reported" in ran.err
    told = json.dumps({"session_id": "s-1"}).encode()
    assert says in machine.wrapper("hook", "stop", "--check", check, stdin=told).good().err
    assert shop.reports == []


def test_a_status_of_5_of_another_command_is_a_failure(machine, shop):
    assert machine.wrapper("--check", "exit 5", "task").code == 5
    assert [report["score"] for report in shop.reports] == [0]


def test_a_check_that_cannot_be_started_is_no_score(machine, shop):
    told = {"session_id": "s-1", "cwd": "/nowhere"}
    ran = machine.wrapper("hook", "stop", "--check", "true", stdin=json.dumps(told).encode()).good()
    assert "could not be started" in ran.err
    assert shop.reports == []


def test_a_clock_that_was_ahead_hides_no_run(machine, shop):
    runs = machine.base() / "runs"
    runs.mkdir()
    for place in range(60):
        session = f"{place:036x}"
        run = {"session": session, "cwd": str(machine.home), "pid": 1, "parent": os.getpid(), "at": 9e15 + place}
        (runs / f"{session}.json").write_text(json.dumps(run))
    (runs / f"{'f' * 36}.json").write_text("null")
    session = machine.wrapper("task").good().told("session")
    machine.wrapper("report", "--score", "1").good()
    assert [report["session"] for report in shop.reports] == [session]
