"""What a run was worth: said by a person, by a check's exit status, by a client's hook."""

import json

import pytest

from tests.harness.kit_install import TOKEN, Machine, Shop


@pytest.fixture
def shop():
    made = Shop()
    yield made
    made.close()


@pytest.fixture
def machine(tmp_path, shop):
    made = Machine(tmp_path)
    made.install(shop.bundle()).good()
    return made


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
