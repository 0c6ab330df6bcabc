"""`reef forget`: what goes, who learnt from it, the way back; with and without a server."""

import io
import json

import pytest

from reef.core.errors import MissingError
from reef.core.nouns import Consumed
from reef.experience.sessions import Sessions
from reef.harness.tree import FILE, Entry, write
from reef.loop.audit import Audit
from reef.records import keep
from reef.releases import Draft, NewPart
from reef.scenario.learnt import cited, learnt
from reef.scenario.serving import align
from tests.cli.kept import Folder
from tests.gateway.life import Life
from tests.gateway.test_imports import build, build_report


@pytest.fixture
def folder(tmp_path, monkeypatch, capfd):
    return Folder(tmp_path / "state", monkeypatch, capfd)


def publish(folder, *receipts, text="x", base=None):
    """A release that learnt from these records."""
    chain, head = folder.gateway.chain, folder.head
    units = tuple(f"{receipt}:0" for receipt in receipts)
    part = NewPart("base", {"weights.json": json.dumps({"kind": "base", "n": text}).encode()})
    draft = Draft(
        "publish", {"weights": part}, base=base or head.id, consumed={"weights": Consumed(9, units)}, reason=text
    )
    made = chain.publish("default", draft, head.id)
    align("default", chain, folder.gateway.board)
    return made


def left(folder, *ids):
    async def ask(store):
        return await store.known(ids)

    return folder.use(ask)


class Story:
    """Three records; releases 1 and 3 learnt from the first, 2 from the second."""

    def __init__(self, folder):
        self.one, self.two, self.three = (build(folder.head.id, session=name, tags={"user": name}) for name in "abc")
        self.alone, self.both = build_report(self.one.id), build_report(self.one.id, self.two.id)
        folder.store(self.one, self.two, self.three, self.alone, self.both)
        self.base = folder.head
        self.releases = [
            publish(folder, self.one.id, text="1"),
            publish(folder, self.two.id, text="2"),
            publish(folder, self.one.id, self.two.id, text="3"),
        ]


def test_what_is_forgotten_leaves_the_sessions_too(folder):
    story, path = Story(folder), folder.path / "sessions.db"
    assert folder.run("forget", "--record", story.three.id, "--yes")[0] == 0
    assert not path.exists(), "nothing was joined here, and nothing is made for it"
    sessions = Sessions(path)

    async def read(store):
        await sessions.read("default", store)

    folder.use(read)
    assert sessions.place(story.one.id) is not None
    assert folder.run("forget", "--record", story.one.id, "--yes")[0] == 0
    assert [sessions.place(each.id) is None for each in (story.one, story.two)] == [True, False]
    sessions.close()


def test_a_session_is_erased_and_the_releases_are_named(folder):
    story = Story(folder)
    code, out, err = folder.run("forget", "--session", "a", "--yes")
    assert code == 0, err
    assert out.splitlines()[0] == "1 record of scenario default, and the reports on nothing else"
    one, _, three = story.releases
    assert out.splitlines()[1] == f"these releases learnt from it: 1 ({one.id[:10]}), 3 ({three.id[:10]})"
    assert out.splitlines()[2].startswith("erased 1 record, 1 report, ")
    assert out.splitlines()[3] == "what is served still comes from them; `reef rollback 0` goes back to before"
    kept = (story.two.id, story.three.id, story.both.id)
    assert left(folder, story.one.id, story.alone.id, *kept) == list(kept)
    assert folder.head == three
    code, out, _ = folder.run("forget", "--record", story.one.id, "--yes")
    assert code == 0
    assert out.splitlines()[0] == "scenario default has no such record (any more)"
    assert out.splitlines()[1].startswith("these releases learnt from it: 1 (")


@pytest.mark.parametrize("served", [False, True])
def test_a_rollback_goes_to_before_the_first_of_them(folder, served):
    story = Story(folder)
    if served:
        with folder.serving():
            code, out, err = folder.run("forget", "--record", story.two.id, "--yes", "--rollback", "--json")
            assert folder.gateway.context.watch.get("default").release_id == folder.head.id
    else:
        code, out, err = folder.run("forget", "--record", story.two.id, "--yes", "--rollback", "--json")
    assert code == 0, err
    said = json.loads(out)
    assert [item["seq"] for item in said["learnt"]] == [2, 3]
    assert (said["records"], said["reports"], said["clean"], said["served"]) == (1, 0, True, True)
    assert (folder.head.operation, folder.head.base, folder.head.seq) == ("rollback", story.releases[0].id, 4)
    assert said["head"]["release_id"] == folder.head.id
    assert folder.gateway.board.get("default").release_id == folder.head.id
    assert left(folder, story.two.id) == []


def test_after_a_rollback_nothing_that_is_served_comes_from_them(folder):
    story = Story(folder)
    folder.run("rollback", "1")
    publish(folder, story.three.id, text="4")
    code, out, _ = folder.run("forget", "--tag", "user=b", "--yes", "--rollback")
    assert code == 0
    assert "what is served now does not come from them" in out
    assert folder.head.reason == "4"


def test_it_asks_first(folder, monkeypatch):
    story = Story(folder)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, _, err = folder.run("forget", "--session", "c")
    assert (code, "add --yes" in err) == (2, True)

    class Typed(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stdin", Typed("no\n"))
    code, out, err = folder.run("forget", "--session", "c")
    assert (code, "no release learnt from them" in out) == (1, True)
    assert "Erase 1 record for good? [y/N]" in err
    assert left(folder, story.three.id) == [story.three.id]
    monkeypatch.setattr("sys.stdin", Typed("y\n"))
    assert folder.run("forget", "--session", "c")[0] == 0
    assert left(folder, story.three.id) == []


def test_wrong_words(folder):
    Story(folder)
    for words, code, message in [
        (("--record", "nothing"), 1, "scenario 'default' has no record 'nothing'"),
        (("--session", "a", "-s", "nope"), 1, "there is no scenario 'nope' in"),
        (("--record", "f" * 32), 1, "has no record 'ffff"),
        (("--tag", "user"), 2, "--tag is NAME=VALUE"),
        (("--session", "a", "--url", "http://127.0.0.1:9"), 2, "run it on the server's machine"),
        ((), 2, "one of the arguments"),
    ]:
        found, _, err = folder.run("forget", *words, "--yes")
        assert (found, message in err) == (code, True), err


def test_a_rollback_for_what_is_gone_already_says_how_to_go_back(folder):
    Story(folder)
    assert folder.run("forget", "--session", "a", "--yes")[0] == 0
    code, out, err = folder.run("forget", "--session", "a", "--yes", "--rollback")
    assert (code, out, "`reef rollback N`" in err) == (1, "", True)
    assert folder.head.reason == "3"
    assert folder.run("forget", "--session", "a", "--yes")[0] == 0


def test_a_server_that_the_environment_names_is_said_to_be_the_cause(folder, monkeypatch):
    monkeypatch.setenv("REEF_URL", "http://127.0.0.1:9")
    code, _, err = folder.run("forget", "--session", "a", "--yes")
    assert (code, "--url or REEF_URL names a server" in err) == (2, True)


def test_what_a_chain_cites(folder):
    story = Story(folder)
    chain = folder.gateway.chain
    assert set(cited(chain, ["default"])) == {story.one.id, story.two.id}
    assert learnt(chain, "default", [story.three.id]).releases == ()
    found = learnt(chain, "default", [story.one.id])
    assert (found.served, found.before) == (True, story.base)
    with pytest.raises(MissingError):
        chain.get("f" * 40)


# --- the harness ------------------------------------------------------------------------------------------------------


class Learnt:
    """A rule that came from one report, and one more release that kept it and added another from a second report."""

    def __init__(self, folder):
        self.folder, gateway = folder, folder.gateway
        self.life = Life(folder.path, gateway.chain, gateway.board)
        self.one, self.two = (build(folder.head.id, session=name) for name in "ab")
        self.first, self.second = build_report(self.one.id), build_report(self.two.id)
        folder.store(self.one, self.two, self.first, self.second)
        self.releases = [
            self.learn({"please": "Say please."}, self.one, self.first),
            self.learn({"please": "Say please.", "brief": "Be brief."}, self.two, self.second),
        ]

    def learn(self, texts, record, report):
        head, unit = self.folder.head, f"{record.id}:0"
        line = f"{head.id[:12]}-1"
        self.life.train(line, {unit: report.id})
        entries = [Entry(name, "rules", {"text": text}) for name, text in texts.items()]
        part = NewPart("tree", {FILE: write(entries)})
        draft = Draft(
            "publish", {"harness": part}, base=head.id, line=line, consumed={"harness": Consumed(9, (unit,))},
            reason="better by 20 points",
        )  # fmt: skip
        made = self.folder.gateway.chain.publish("default", draft, head.id)
        align("default", self.folder.gateway.chain, self.folder.gateway.board)
        return made

    def noted(self):
        """What the doctor says of the harness."""
        from reef.cli.forget import standing

        chain, path = self.folder.gateway.chain, self.folder.path
        return standing(
            chain, Audit(path / "learn.db"), self.folder.head, lambda ids: keep.erased(path / "records.db", ids)
        )


@pytest.mark.parametrize("what", ["record", "report"])
def test_entries_that_came_from_it_are_named_until_they_are_gone(folder, what):
    """Case 51: the removal of a record or report flags what was made of it."""
    learnt = Learnt(folder)
    assert learnt.noted() == ""
    name = learnt.one.id if what == "record" else learnt.first.id
    code, out, err = folder.run("forget", f"--{what}", name, "--yes")
    assert code == 0, err
    first, second = learnt.releases
    assert f"these releases learnt from it: 1 ({first.id[:10]})" in out
    assert out.splitlines()[-5:] == [
        "these entries of the harness came from them:",
        f"  please (rules): by release 1 ({first.id[:10]}), held by 1 to 2, served now",
        "    1 | Say please.",
        "what is served still comes from them; `reef rollback 0` goes back to before",
        "or take those entries out of the harness with a proposal; `reef doctor` names them until then",
    ]
    assert "came from records or reports that were forgotten: please (release 1);" in learnt.noted()
    assert left(folder, learnt.one.id, learnt.first.id) == ([learnt.one.id] if what == "report" else [])
    assert left(folder, learnt.two.id, learnt.second.id) == [learnt.two.id, learnt.second.id]
    code, out, _ = folder.run("why", second.id)
    assert "please (rules): release 1" in out
    assert out.count("WHAT IT CAME FROM WAS FORGOTTEN") == 1
    _, out, _ = folder.run("doctor", "--reef.engine", "fake")
    assert "harness default" in out
    folder.run("rollback", "0")
    assert learnt.noted() == ""
    _, out, _ = folder.run("doctor", "--reef.engine", "fake")
    assert "harness default" not in out


def test_a_rollback_takes_the_entries_out(folder):
    learnt = Learnt(folder)
    code, out, err = folder.run("forget", "--report", learnt.second.id, "--yes", "--rollback", "--json")
    assert code == 0, err
    said = json.loads(out)
    assert (said["records"], said["reports"], said["served"]) == (0, 1, True)
    (entry,) = said["entries"]
    assert (entry["id"], entry["held"], entry["brought"]) == ("brief", [2], [[learnt.releases[1].id, 2]])
    assert [line["text"] for line in entry["lines"]] == ["Be brief."]
    assert (folder.head.operation, folder.head.base) == ("rollback", learnt.releases[0].id)
    assert learnt.noted() == ""


def test_reports_that_are_not_there(folder):
    learnt = Learnt(folder)
    code, _, err = folder.run("forget", "--report", "rep_nothing", "--yes")
    assert (code, "has no report 'rep_nothing'" in err) == (1, True)
    folder.run("forget", "--report", learnt.first.id, "--yes")
    code, out, _ = folder.run("forget", "--report", learnt.first.id, "--yes")
    assert code == 0
    assert "has no such record (any more)" in out


def test_without_an_audit_a_report_is_taken_to_have_taught_whoever_learnt_from_its_answers(folder):
    learnt = Learnt(folder)
    (folder.path / "learn.db").unlink()
    code, out, err = folder.run("forget", "--report", learnt.first.id, "--yes", "--json")
    assert code == 0, err
    assert [item["seq"] for item in json.loads(out)["learnt"]] == [1]


def test_entries_that_are_not_served_any_more_are_named_too(folder):
    learnt = Learnt(folder)
    learnt.learn({"brief": "Be brief."}, build_kept(folder), learnt.second)
    code, out, err = folder.run("forget", "--record", learnt.one.id, "--yes")
    assert code == 0, err
    assert "  please (rules): by release 1 (" in out
    assert "held by 1 to 2\n" in out
    assert "or take those entries out" not in out
    assert learnt.noted() == ""


def build_kept(folder):
    record = build(folder.head.id, session="c")
    folder.store(record)
    return record
