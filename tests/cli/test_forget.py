"""`reef forget`: what goes, who learnt from it, the way back; with and without a server."""

import io
import json

import pytest

from reef.core.errors import MissingError
from reef.core.nouns import Consumed
from reef.experience.sessions import Sessions
from reef.releases import Draft, NewPart
from reef.scenario.learnt import cited, learnt
from reef.scenario.serving import align
from tests.cli.kept import Folder
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


def test_what_a_chain_cites(folder):
    story = Story(folder)
    chain = folder.gateway.chain
    assert set(cited(chain, ["default"])) == {story.one.id, story.two.id}
    assert learnt(chain, "default", [story.three.id]).releases == ()
    found = learnt(chain, "default", [story.one.id])
    assert (found.served, found.before) == (True, story.base)
    with pytest.raises(MissingError):
        chain.get("f" * 40)
