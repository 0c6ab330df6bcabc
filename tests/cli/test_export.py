"""`reef export` and `reef import`: every shape, round trips, interruptions; with and without a server."""

import json
import os
import subprocess
import sys

import pytest

from reef.cli.main import main
from reef.core.nouns import Choice
from reef.records import Query, raw
from tests.cli.kept import Folder
from tests.gateway.test_imports import ENVELOPES, build, build_report

FAKE = ("--reef.engine", "fake", "--training.backend", "fake", "--reef.recipe", "record")
SFT = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}'


@pytest.fixture
def folder(tmp_path, monkeypatch, capfd):
    return Folder(tmp_path / "state", monkeypatch, capfd)


def lines(text):
    return [json.loads(line) for line in text.splitlines()]


def ask(text, **more):
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **more}).encode()


def said(text, index=0, **fields):
    return Choice(index, text, "stop", **fields)


def plain(folder, request, *choices, **fields):
    given = {"request": request, "choices": choices, "prompt_ids": None, "sampling": None, "untrainable": "no tokens"}
    return build(folder.head.id, **{**given, **fields})


# --- raw --------------------------------------------------------------------------------------------------------------


def everything(folder):
    records = [build(folder.head.id, request=b"\xff raw"), build(folder.head.id, rendered=b"{}", session=None)]
    return [*records, build_report(records[0].id), build_report(*(record.id for record in records), score=-1.0)]


@pytest.mark.parametrize("served", [False, True])
def test_a_round_trip_into_another_folder_is_exact(folder, tmp_path, monkeypatch, capfd, served):
    entries = everything(folder)
    folder.store(*entries)
    file = tmp_path / "all.jsonl"
    code, out, err = folder.run("export", "-o", str(file))
    assert (code, out) == (0, "")
    assert "4 lines from 2 records" in err
    other = Folder(tmp_path / "other", monkeypatch, capfd)
    if served:
        with other.serving():
            code, out, err = other.run("import", str(file))
            again = other.run("import", str(file), "--json")
    else:
        code, out, err = other.run("import", str(file))
        again = other.run("import", str(file), "--json")
    assert (code, out) == (0, "4 entries, of which 0 were there already\n"), err
    assert json.loads(again[1]) == {"entries": 4, "duplicates": 4, "erased": 0}
    assert other.use(lambda store: store.get([entry.id for entry in entries])) == entries
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all.jsonl", "other", "state"]
    assert other.run("export")[1].encode() == file.read_bytes()


def test_raw_goes_to_standard_output_beside_a_server(folder):
    folder.store(*everything(folder))
    with folder.serving():
        code, out, _ = folder.run("export", "--session", "s1")
    assert code == 0
    assert [item["request_type"] for item in lines(out)] == ["inference", "report"]


def test_a_pipe_that_closes_early_ends_it_quietly(folder):
    folder.store(*(build(folder.head.id, request=os.urandom(20_000)) for _ in range(40)))
    words = f"{sys.executable} -m reef export --reef.state_dir {folder.path} | head -c 100"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", words], capture_output=True, check=False)
    assert (done.returncode, len(done.stdout)) == (0, 100), done.stderr
    assert b"Traceback" not in done.stderr


@pytest.mark.parametrize("levels", [300, 800])
def test_what_hardly_is_json_can_be_shown_and_exported(folder, tmp_path, monkeypatch, capfd, levels):
    """Lone surrogates, numbers of any size, more levels than most writers of JSON go."""
    deep = {"n": 2**80}
    for n in range(levels):
        deep = {"a": deep} if n % 2 else [deep]
    lone = "a\ud800b"
    answers = [
        said(lone, message={"role": "assistant", "content": lone, "reasoning": lone}),
        said("x", 1, message={"role": "assistant", "content": None, "deep": deep}),
    ]
    record = plain(folder, ask("q"), *answers, model_asked=lone, answer_id=lone)
    scored = build_report(record.id, score=1.0, choice=0, feedback={lone: lone}, metadata={"n": 2**80})
    corrected = build_report(record.id, demonstration={"role": "assistant", "content": lone, "deep": deep}, choice=1)
    folder.store(record, scored, corrected)
    for shape, count in [("raw", 3), ("sft", 2), ("prompts", 2), ("preference", 1)]:
        code, out, err = folder.run("export", "--shape", shape)
        assert (code, len(out.splitlines())) == (0, count), (shape, err)
    out = folder.run("export")[1]
    assert [raw.load(line)["agent_record_id"] for line in out.splitlines()] == [record.id, scored.id, corrected.id]
    with folder.serving():
        for words in ([], ["--reports"], [record.id]):
            for more in ([], ["--json"]):
                code, out, err = folder.run("records", *words, *more)
                assert code == 0, (words, more, err)
                assert "Traceback" not in err


def test_wrong_words_are_usage_errors(folder):
    for words, message in [
        (("--since", "yesterday"), "since must be unix seconds"),
        (("--tag", "team"), "--tag is NAME=VALUE"),
        (("--status", "done"), "status must be one of"),
        (("-o", "/nowhere/x"), "cannot write /nowhere/x: No such file"),
    ]:
        code, _, err = folder.run("export", *words)
        assert code in (1, 2)
        assert message in err
    folder.path = folder.path / "none"
    code, _, err = folder.run("export")
    assert (code, "there is no record store" in err, "--reef.state_dir FOLDER" in err) == (1, True, True)


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_sft(folder):
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    tools = [{"type": "function", "function": {"name": "f"}}]
    folder.store(
        good := plain(folder, ask("a"), said("A")),
        bad := plain(folder, ask("b"), said("B")),
        two := plain(folder, ask("c"), said("C0"), said("C1", 1)),
        plain(folder, ask("d", tools=tools), said("", message=called)),
        plain(folder, ask("e"), said("E"), status="aborted"),
        plain(folder, ask("f"), said("F"), purpose="evaluation"),
        plain(folder, b"not json", said("G")),
        build_report(good.id, score=0.9),
        build_report(bad.id, score=0.1),
        build_report(two.id, score=0.1),
        build_report(two.id, score=1.0, choice=1),
    )
    code, out, err = folder.run("export", "--shape", "sft")
    assert code == 0
    asked = {"role": "user", "content": "a"}
    found = lines(out)
    assert found[0] == {"messages": [asked, {"role": "assistant", "content": "A"}]}
    assert found[4] == {"messages": [{"role": "user", "content": "d"}, called], "tools": tools}
    assert [item["messages"][-1]["content"] for item in found] == ["A", "B", "C0", "C1", None]
    assert "left out 1: the answer is aborted\nleft out 1: the request is not JSON" in err
    out = folder.run("export", "--shape", "sft", "--min-score", "0.5")[1]
    assert [item["messages"][-1]["content"] for item in lines(out)] == ["A", "C1"]
    out = folder.run("export", "--shape", "sft", "--purpose", "evaluation")[1]
    assert [item["messages"][-1]["content"] for item in lines(out)] == ["F"]


def test_requests_of_the_other_dialects_become_messages(folder):
    anthropic = {"model": "m", "max_tokens": 9, "system": "Be brief.", "messages": [{"role": "user", "content": "hi"}]}
    responses = {"model": "m", "instructions": "Be brief.", "input": "hi"}
    later = responses | {"previous_response_id": "resp_" + "0" * 32}
    folder.store(
        plain(folder, json.dumps(anthropic).encode(), said("A"), dialect="messages"),
        plain(folder, json.dumps(responses).encode(), said("B"), dialect="responses"),
        plain(folder, json.dumps(later).encode(), said("C"), dialect="responses"),
        plain(folder, b'{"input":"x"}', said(""), dialect="embeddings"),
    )
    code, out, err = folder.run("export", "--shape", "sft")
    first, second = lines(out)
    assert code == 0
    assert [item["content"] for item in first["messages"]] == ["Be brief.", "hi", "A"]
    assert [item["role"] for item in second["messages"]] in (
        ["system", "user", "assistant"],
        ["developer", "user", "assistant"],
    )
    assert "left out 1: the request goes on from another response" in err
    assert "left out 1: the dialect embeddings has no conversation" in err


def test_prompts_with_rewards(folder):
    folder.store(
        first := plain(folder, ask("a"), said("A")),
        plain(folder, ask("b"), said("B")),
        two := plain(folder, ask("c"), said("C0"), said("C1", 1)),
        build_report(first.id, score=0.5),
        build_report(first.id, score=0.75),  # the newest counts
        build_report(two.id, score=0.0, choice=1),
    )
    code, out, err = folder.run("export", "--shape", "prompts")
    assert code == 0
    assert [(item["prompt"][0]["content"], item["completion"], item["reward"]) for item in lines(out)] == [
        ("a", "A", 0.75),
        ("c", "C1", 0.0),
    ]
    assert "left out 1: no report gives it a score" in err


def test_preference_pairs(folder):
    """Equal prompts, also written otherwise; the best against each worse one; a demonstration against its answer."""
    blocks = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]}
    folder.store(
        low := plain(folder, ask("a"), said("low")),
        high := plain(folder, json.dumps(blocks).encode(), said("high")),
        same := plain(folder, ask("a"), said("high")),
        alone := plain(folder, ask("b"), said("alone")),
        shown := plain(folder, ask("c"), said("wrong")),
        right := plain(folder, ask("d"), said("right")),
        build_report(low.id, score=0.0),
        build_report(high.id, score=1.0),
        build_report(same.id, score=0.5),  # the same answer is no pair
        build_report(alone.id, score=0.0),
        build_report(shown.id, score=None, demonstration="better"),
        build_report(right.id, score=None, demonstration={"content": "right"}),  # as it was answered
    )
    code, out, _ = folder.run("export", "--shape", "preference")
    assert code == 0
    assert [(item["chosen"]["content"], item["rejected"]["content"]) for item in lines(out)] == [
        ("better", "wrong"),
        ("high", "low"),
    ]
    assert lines(out)[0]["prompt"] == [{"role": "user", "content": "c"}]
    assert lines(out)[0]["chosen"]["role"] == "assistant"
    assert folder.run("export", "--shape", "preference")[1] == out


# --- import -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("served", [False, True])
def test_an_import_goes_on_where_it_stopped(folder, tmp_path, served, monkeypatch):
    monkeypatch.setattr("reef.cli.export.BATCH", 3)
    rows = [json.dumps(ENVELOPES[0] | {"agent_record_id": f"n{n}"}) for n in range(10)]
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join([*rows[:7], '{"agent_record_id": "x", "request_type": "report"}', *rows[7:]]) + "\n")

    def twice():
        code, _, err = folder.run("import", str(file))
        assert code == 2
        assert "reef: line 8: references must be a list" in err
        assert err.endswith("correct the file and run this again\n")
        code, _, err = folder.run("import", str(file))
        assert "going on after 6 entries" in err
        file.write_text("\n".join(rows) + "\n\n")  # another file now: from the start, and nothing twice
        return folder.run("import", str(file))

    if served:
        with folder.serving():
            code, out, err = twice()
    else:
        code, out, err = twice()
    assert (code, out) == (0, "10 entries, of which 6 were there already\n"), err
    assert len(folder.use(lambda store: store.find(Query("default")))) == 10
    assert not list(tmp_path.glob(".in*"))


def test_lines_of_several_scenarios_are_sent_apart(folder, tmp_path):
    file = tmp_path / "in.jsonl"
    rows = [ENVELOPES[0] | {"agent_record_id": f"n{n}", "scenario": ("default", "two")[n % 2]} for n in range(4)]
    file.write_text("\n".join(map(json.dumps, rows)))
    code, _, err = folder.run("import", str(file), "--reef.create_scenarios", "false", *FAKE)
    assert (code, "there is no scenario 'two', and reef.create_scenarios is off" in err) == (1, True), err
    with folder.serving():
        assert folder.run("import", str(file))[0] == 0
    assert len(folder.use(lambda store: store.find(Query("two")))) == 2
    with folder.serving():
        assert folder.run("import", str(file), "-s", "three")[1].startswith("4 entries, of which 0")


def test_a_mistake_after_the_part_that_is_in_has_its_line_of_the_file(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("reef.cli.export.BATCH", 2)
    file = tmp_path / "in.jsonl"
    rows = [json.dumps(ENVELOPES[0] | {"agent_record_id": f"n{n}"}) for n in range(5)]
    file.write_text("\n\n".join([*rows, "{"]) + "\n")
    for _ in range(2):  # the second time it goes on
        code, _, err = folder.run("import", str(file))
        assert (code, "line 11 is not JSON" in err) == (2, True), err


def test_an_import_into_a_new_folder_makes_its_scenarios(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    rows = [ENVELOPES[0] | {"agent_record_id": f"n{n}", "scenario": ("default", "two")[n % 2]} for n in range(4)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main(["import", "in.jsonl", *FAKE]) == 0, capfd.readouterr().err
    assert capfd.readouterr().out == "4 entries, of which 0 were there already\n"
    for scenario in ("default", "two"):
        assert main(["export", "-s", scenario, *FAKE]) == 0
        assert len(lines(capfd.readouterr().out)) == 2
    assert main(["export", "-s", "nope", *FAKE]) == 1
    assert "there is no scenario 'nope' in .reef; there are default, two" in capfd.readouterr().err


@pytest.mark.parametrize("served", [False, True])
def test_what_was_erased_is_not_told_as_there(folder, tmp_path, served):
    """An import cannot bring it back."""
    folder.store(*everything(folder))
    file = tmp_path / "all.jsonl"
    folder.run("export", "-o", str(file))
    assert file.stat().st_mode & 0o777 == 0o600, "prompts are nobody else's"
    assert folder.run("forget", "--session", "s1", "--yes")[0] == 0
    if served:
        with folder.serving():
            code, out, _ = folder.run("import", str(file))
    else:
        code, out, _ = folder.run("import", str(file))
    assert (code, out) == (
        0,
        "4 entries, of which 2 were there already, and 2 were erased here on request and stay so\n",
    )


def test_what_is_no_line_is_named(folder, tmp_path):
    file = tmp_path / "in.jsonl"
    for text, message in [("{", "line 1 is not JSON"), ("[]", "is not an object"), (SFT, "is training data")]:
        file.write_text(text)
        code, _, err = folder.run("import", str(file))
        assert code == 2
        assert message in err
    code, _, err = folder.run("import", str(tmp_path / "none"))
    assert (code, "cannot read" in err) == (2, True)
