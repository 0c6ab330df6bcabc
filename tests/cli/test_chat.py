"""`reef chat` on piped lines: streams answers, reports on the last one, explains what went wrong."""

import io

import pytest

from reef.cli import main
from tests.cli.classroom import Classroom, Served


@pytest.fixture
def room(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REEF_URL", raising=False)
    monkeypatch.setenv("REEF_TOKEN", "secret")
    return Classroom(base=1.0)


@pytest.fixture
def say(room, monkeypatch, capsys):
    """Feed lines to `reef chat`; its exit status, output and errors."""
    with Served(room) as served:

        def talk(*lines, words=()):
            monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
            status = main.main(["chat", "--url", served.url, *words])
            said = capsys.readouterr()
            return status, said.out, said.err

        yield talk


def test_answers_are_streamed_and_the_talk_is_remembered(say, room):
    status, out, _ = say("What is 2+3?", "", "and 4+5?", "/quit", "never said")
    assert (status, out) == (0, "2+3 = 5\n4+5 = 9\n")
    bodies = [body for body, _ in room.chats]
    assert all(body["stream"] for body in bodies)
    assert [message["content"] for message in bodies[1]["messages"]] == ["What is 2+3?", "2+3 = 5", "and 4+5?"]


def test_reports_quote_the_last_answer(say, room):
    status, out, _ = say("1+1", "/good", "1+2", "/bad", "/fix it is three", "1+3", words=("--system", "be brief"))
    assert status == 0
    first, second, _third = room.receipts
    assert [body for body, _ in room.reports] == [
        {"score": 1.0, "references": [first]},
        {"score": 0.0, "references": [second]},
        {"demonstration": "it is three", "references": [second]},
    ]
    assert "reported as good" in out
    assert "only the first one trains" not in out
    said = [message["content"] for message in room.chats[-1][0]["messages"]]
    assert said == ["be brief", "1+1", "1+1 = 2", "1+2", "it is three", "1+3"]


def test_a_second_score_on_an_answer_is_kept_and_said_not_to_train(say, room):
    _, out, _ = say("1+1", "/good", "/bad", "1+2", "/bad")
    assert len(room.reports) == 3
    lines = [line for line in out.splitlines() if line.startswith("reported as")]
    assert ["only the first one trains" in line for line in lines] == [False, True, False]


def test_what_no_recipe_learns_from_is_said(say, room):
    room.scenario("default")["part"]["signals"] = ["demonstration"]
    _, out, _ = say("1+1", "/good", "/fix two", "/fix it is two", "1+2", "/fix three")
    told = [line.partition(")")[2] for line in out.splitlines() if "reported as" in line]
    only = "; no recipe of this scenario learns from a score (weights from demonstration): it is kept"
    again = "; this answer had a report already, and only the first one trains: this one is kept"
    assert told == [only, "", again, ""], out
    room.scenarios["default"]["part"]["signals"] = ["demonstration", "score"]
    _, out, _ = say("1+1", "/good", "/fix two")
    assert [line.partition(")")[2] for line in out.splitlines() if "reported as" in line] == ["", again]


def test_a_scenario_that_only_records_is_said(say, room, monkeypatch):
    view = room.view
    monkeypatch.setattr(room, "view", lambda name: view(name) | {"recipe": "record", "learner": {"parts": {}}})
    assert "only keeps records" in say("1+1", "/good")[1]
    monkeypatch.setattr(room, "view", lambda name: view(name) | {"learner": None})
    assert "reported as good (rep_x)\n" in say("1+1", "/good")[1], "what cannot be known is not said"


def test_a_model_is_asked_for_by_name_only_when_one_is_given(say, room):
    say("1+1")
    say("1+1", words=("--as", "fast"))
    assert [body.get("model", "none") for body, _ in room.chats] == ["none", "fast"]


def test_scenario_release_help_and_a_new_conversation(say, room):
    status, out, _ = say("1+1", "/release", "/help", "/new", "1+2", words=("-s", "mine"))
    release = room.scenarios["mine"]["releases"][0]["release_id"][:12]
    assert status == 0
    assert f"served now: {release} (seq 0); the last answer came from {release}" in out
    assert "/fix TEXT" in out
    assert len(room.chats[-1][0]["messages"]) == 1


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (("/good",), "no answer to report on yet"),
        (("1+1", "/fix"), "/fix TEXT"),
        (("/nonsense",), "no command /nonsense"),
    ],
)
def test_mistakes_are_explained_and_the_talk_goes_on(say, lines, said):
    status, out, err = say(*lines, "2+2")
    assert said in err
    assert out.endswith("2+2 = 4\n")
    assert status == 1


def test_a_stream_without_its_end_is_called_cut_off(say, room):
    room.cut = True
    status, out, err = say("1+1")
    assert "cut off" in err
    assert "1+1 = 2" in out
    assert status == 1


def test_a_refused_request_shows_the_servers_words(say, room):
    say("1+1")
    room.token = "other"
    status, _, err = say("1+1", words=("--token", "bad"))
    assert "wrong token" in err
    assert status == 1


def test_no_server(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("hello\n"))
    assert main.main(["chat", "--url", "http://127.0.0.1:9"]) == 1
    assert "reef serve" in capsys.readouterr().err
