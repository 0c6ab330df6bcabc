"""The filters of `reef records`, against a server."""

import json

import pytest

from reef.cli.main import main
from tests.cli.kept import Folder
from tests.gateway.test_imports import ENVELOPES, build, build_report


@pytest.fixture
def folder(tmp_path, monkeypatch, capfd):
    return Folder(tmp_path / "state", monkeypatch, capfd)


def test_records_and_reports_are_narrowed(folder):
    one = build(folder.head.id, session="a", tags={"team": "x"})
    two = build(folder.head.id, session="b", status="aborted")
    folder.store(one, two, low := build_report(one.id, score=0.1), high := build_report(two.id, score=0.9))
    with folder.serving():

        def found(*words, kind="records"):
            code, out, err = folder.run("records", *words, "--json")
            assert code == 0, err
            return [item["agent_record_id"] for item in json.loads(out)[kind]]

        assert found("--session", "a") == [one.id]
        assert found("--tag", "team=x") == [one.id]
        assert found("--status", "aborted") == [two.id]
        assert found("--min-score", "0.5") == [two.id]
        assert found("--since", "2024-01-01") == []
        assert found("--until", "2024-01-01", "--release-id", folder.head.id) == [two.id, one.id]
        assert found("--reports", "--max-score", "0.5", kind="reports") == [low.id]
        assert found("--reports", kind="reports") == [high.id, low.id]
        for words, message in [
            (("--since", "soon"), "--since must be unix seconds"),
            (("--reports", "--session", "a"), "--session is not for reports; leave it out"),
            (("--min-score", "high"), "--min-score must be a number"),
            (("--since", "27"), "--since must be unix seconds"),
            (("--tag", "team"), "--tag is NAME=VALUE"),
        ]:
            code, _, err = folder.run("records", *words)
            assert (code, message in err) == (2, True), err


def test_a_record_is_found_by_any_of_its_ids_and_without_its_scenario(folder, tmp_path):
    (tmp_path / "in.jsonl").write_text(json.dumps(ENVELOPES[0] | {"agent_record_id": "sample 1/a"}))
    with folder.serving():
        assert folder.run("import", "in.jsonl", "-s", "other")[0] == 0
        code, out, err = folder.run("records", "sample 1/a")
        assert code == 0, err
        receipt = json.loads(out)["agent_record_id"]
        assert folder.run("records", receipt)[0] == 0
        code, _, err = folder.run("records", receipt, "-s", "default")
        assert (code, f"scenario 'default' has no record '{receipt}'" in err) == (1, True)
        code, _, err = folder.run("records", "f" * 32)
        assert (code, "nor has another one" in err) == (1, True)
    code, _, err = folder.run("forget", "--record", "sample 1/a", "--yes")
    assert (code, "is a record of the scenario other, not of default; add -s other" in err) == (1, True)
    code, out, err = folder.run("forget", "--record", "sample 1/a", "-s", "other", "--yes")
    assert (code, "erased 1 record" in out) == (0, True), err
    code, out, err = folder.run("forget", "--record", "sample 1/a", "-s", "other", "--yes")
    assert (code, "has no such record (any more)" in out) == (0, True), err


def test_a_server_of_another_folder_is_not_asked(folder, tmp_path, capfd):
    folder.store(build(folder.head.id))
    with folder.serving():
        port = folder.gateway.url.rpartition(":")[2]
        for words in (["records"], ["status"], ["chat"]):
            assert main([*words, "--reef.port", port, "--reef.state_dir", "other"]) == 1
            assert "no server runs on the state folder other; start one" in capfd.readouterr().err
        (tmp_path / ".reef").mkdir()
        (tmp_path / ".reef" / "token").write_text("rf_another")
        assert main(["records", "--reef.port", port]) == 1
        assert "is not that of the state folder .reef: wrong token" in capfd.readouterr().err
