"""The filters of `reef records`, against a server."""

import json

import pytest

from tests.cli.kept import Folder
from tests.gateway.test_imports import build, build_report


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
            (("--since", "soon"), "since must be unix seconds"),
            (("--reports", "--session", "a"), "no parameter 'session' here; there are: after, limit, since"),
            (("--tag", "team"), "--tag is NAME=VALUE"),
        ]:
            code, _, err = folder.run("records", *words)
            assert (code, message in err) == (2, True), err
