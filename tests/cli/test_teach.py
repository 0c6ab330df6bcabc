"""`reef teach` against a server that learns, over real HTTP: what it asks, reports, waits for, shows and draws."""

import argparse
import io
import json
import struct
import sys

import pytest
from rich.console import Console

from reef.cli import lesson as lessons
from reef.cli import main, teach
from reef.cli.preferences import PREFERENCES
from reef.core.errors import ConfigError, InputError
from tests.cli.classroom import Classroom, Served


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("REEF_URL", "REEF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def room():
    return Classroom()


@pytest.fixture
def served(room):
    with Served(room) as server:
        yield server


def reef(*words):
    return main.main([str(word) for word in words])


def taught(served, capsys, *more):
    words = ("teach", "addition", "--url", served.url, "--token", "secret", "--json", "--samples", "2", *more)
    assert reef(*words) == 0
    return json.loads(capsys.readouterr().out)["lessons"][0]


def test_a_lesson_is_learnt_measured_and_drawn(served, room, capsys, tmp_path):
    result = taught(served, capsys, "--reports", "40", "--png", tmp_path / "out" / "curve.png")
    held_out = result["held_out"]
    assert held_out["base"]["score"] < 0.3
    assert held_out["after"]["score"] > 0.9
    assert held_out["base"]["seq"] == 0
    assert held_out["after"]["seq"] == 5
    assert result["reports"] == len(room.reports) == 40
    assert [wave["reports"] for wave in result["waves"]] == [8, 16, 24, 32, 40]
    assert result["waves"][-1]["score"] > result["waves"][0]["score"]
    assert [mark["seq"] for mark in result["marks"]] == [0, 1, 2, 3, 4, 5]
    assert result["timings"] == {"waiting": 0.5, "training": 0.02, "gate": 0.25}
    assert result["releases"][0]["current"]
    assert len(result["releases"]) == 6
    picture = (tmp_path / "out" / "curve.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 900
    assert height > 500


def test_reports_say_what_the_check_said_of_each_answer(served, room, capsys):
    taught(served, capsys, "--updates", "2", "--no-png")
    assert len(room.reports) == 16
    for body, _ in room.reports:
        assert set(body) == {"score", "references", "agent_record_id"}
        assert body["score"] in (0.0, 1.0)
        assert len(body["references"]) == 1
    assert len({body["references"][0] for body, _ in room.reports}) == 16


def test_held_out_prompts_are_asked_only_with_a_pinned_release(served, room, capsys):
    taught(served, capsys, "--reports", "16", "--no-png")
    unseen = {prompt.text for prompt in PREFERENCES["addition"].held_out}
    pinned = [body for body, headers in room.chats if "x-reef-release" in headers]
    assert {body["messages"][0]["content"] for body in pinned} == unseen
    live = [body["messages"][0]["content"] for body, headers in room.chats if "x-reef-release" not in headers]
    assert len(live) == 16
    assert not unseen & set(live)
    seeds = [body["seed"] for body in pinned]
    assert sorted(seeds[: len(seeds) // 2]) == sorted(seeds[len(seeds) // 2 :])  # base and after: the same seeds
    assert len(set(seeds)) == 2 * len(PREFERENCES["addition"].held_out)


def test_the_scenario_is_new_each_time_and_gets_the_preferences_settings(served, room, capsys):
    first = taught(served, capsys, "--reports", "8", "--no-png")
    second = taught(served, capsys, "--reports", "8", "--no-png", "--seed", "0")
    assert [first["scenario"], second["scenario"]] == ["teach-addition-0", "teach-addition-0-2"]
    assert room.scenarios["teach-addition-0"]["settings"] == dict(PREFERENCES["addition"].settings)


def test_a_named_scenario_goes_on_where_it_was(served, room, capsys):
    taught(served, capsys, "--reports", "16", "--no-png", "-s", "mine")
    result = taught(served, capsys, "--reports", "8", "--no-png", "-s", "mine")
    assert result["scenario"] == "mine"
    assert [result["held_out"][name]["seq"] for name in ("base", "before", "after")] == [0, 2, 3]


def test_small_batches_make_waves_of_several(room, capsys):
    room.batch = 1
    with Served(room) as served:
        result = taught(served, capsys, "--updates", "16", "--no-png")
    assert [wave["reports"] for wave in result["waves"]] == [8, 16]
    assert result["learner"]["trained"] == 16


def test_a_server_that_is_away_for_a_moment_is_waited_for(served, room, capsys):
    room.flaky = 3
    assert taught(served, capsys, "--reports", "8", "--no-png")["reports"] == 8


def test_text_output_has_progress_both_tables_and_the_curve(served, capsys, tmp_path):
    words = ("teach", "--url", served.url, "--token", "secret", "--samples", "1", "--reports", "24")
    assert reef(*words) == 0
    text = capsys.readouterr().out
    for expected in ("held-out, base:", "wave   3/3", "base", "after", "releases", "accept", "from a batch"):
        assert expected in text, expected
    assert text.index("scenario: teach-addition-0\n") < text.index("held-out, base:")
    assert "at most 24 reports, in 3 waves of 8 chats" in text
    assert "the gate looked at 3 candidates: 3 accepted, 0 rejected" in text
    assert "before" not in text  # a fresh scenario: the same as the base
    for command in ("chat", "releases", "records"):
        assert f"reef {command} -s teach-addition-0 --url {served.url}" in text
    assert "curve: teach-addition.png" in text
    assert (tmp_path / "teach-addition.png").exists()


def test_each_rejection_is_told_and_counted(served, room, capsys):
    room.rejects = {2}
    assert reef("teach", "--url", served.url, "--token", "secret", "--samples", "1", "--reports", "24", "--no-png") == 0
    text = capsys.readouterr().out
    assert text.count("rejected at step 2: Rejected by guard drift [x]\n") == 1
    assert text.index("rejected at step 2") < text.index("wave   2/3")
    assert "gate 1 accepted, 1 rejected" in text
    assert "the gate looked at 3 candidates: 2 accepted, 1 rejected" in text
    result = taught(served, capsys, "--reports", "24", "--no-png")
    assert result["looks"] == {"accept": 2, "reject": 1}
    assert [(one["step"], one["verdict"]) for one in result["verdicts"]] == [
        (1, "accept"),
        (2, "reject"),
        (3, "accept"),
    ]


def test_a_scenario_that_was_taught_before_has_a_row_of_its_own_for_it(served, capsys):
    words = ("teach", "--url", served.url, "--token", "secret", "--samples", "1", "--no-png", "-s", "mine")
    for _ in range(2):
        assert reef(*words, "--reports", "8") == 0
    assert " before " in capsys.readouterr().out


def test_what_to_do_next(room, monkeypatch):
    lesson = lessons.Lesson(PREFERENCES["addition"], "s", 0)
    monkeypatch.setattr("shutil.which", lambda name: "/usr/bin/reef")
    assert "\n  reef chat -s s " in teach.further([lesson], False, None)
    assert "are gone now" in teach.further([lesson], True, None)


def test_the_live_table_shows_waves_and_what_happens_now(room):
    lesson = lessons.Lesson(PREFERENCES["addition"], "s", 0, planned=20, size=8)
    lesson.stage, lesson.part = "wave 17: learning", {"state": "training", "step": 16, "pending": 8}
    lesson.marks.append(lessons.Mark(8, "abcdef1234567890", 3, {}))
    lesson.verdicts.append(lessons.Verdict(8, 1, "accept", "all guards passed"))
    lesson.waves = [lessons.Wave(n, 8 * n, n / 20, "abc", 0.5, n, 30.0) for n in range(1, 17)]
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    with teach.screen(lesson, console) as watch:
        watch(lesson)
    for expected in (
        "128",
        "0.80",
        "█",
        "release 3 (abcdef12)",
        "gate 1 accepted",
        "learner training",
        "about 2:00 left",
    ):
        assert expected in out.getvalue(), expected


def test_a_preference_of_ones_own_by_dotted_path(served, room, capsys, tmp_path, monkeypatch):
    (tmp_path / "wishes.py").write_text(
        "import dataclasses\nfrom reef.cli.preferences import PREFERENCES\n"
        "MINE = dataclasses.replace(PREFERENCES['addition'], name='mine', settings={'batch_size': 8})\nOTHER = 3\n"
    )
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != ""])
    words = ("teach", "wishes:MINE", "--url", served.url, "--token", "secret", "--reports", "8", "--no-png", "--json")
    assert reef(*words) == 0
    assert room.scenarios["teach-mine-0"]["settings"] == {"batch_size": 8}
    with pytest.raises(ConfigError, match="wishes:OTHER is a int"):
        teach.choose("wishes:OTHER")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("nonsense",), 2, "no preference 'nonsense'; there are addition"),
        (("addition", "sentence", "-s", "one"), 2, "one preference at a time"),
        (("--reports", "3"), 2, "less than one wave of 8"),
        (("--token", "wrong"), 1, "wrong token; give --token; give the token with --token or REEF_TOKEN"),
        (("--reports", "0"), 2, "at least 1"),
        (("--reports", "5", "--updates", "5"), 2, "not allowed with"),
    ],
)
def test_mistakes_are_explained(served, capsys, words, status, said):
    token = () if "--token" in words else ("--token", "secret")
    assert reef("teach", "--url", served.url, "--no-png", *token, *words) == status
    assert said in capsys.readouterr().err


def test_a_learner_that_failed_ends_the_lesson_with_its_reason(served, room, capsys):
    room.fail_learner = True
    assert reef("teach", "--url", served.url, "--token", "secret", "--no-png") == 1
    assert "the loss is not finite" in capsys.readouterr().err


def test_no_server_at_a_url_that_was_given(capsys):
    assert reef("teach", "--url", "http://127.0.0.1:9", "--token", "x") == 1
    assert "leave --url out" in capsys.readouterr().err


def test_a_server_of_its_own_that_cannot_start_says_why(capsys, tmp_path):
    (tmp_path / "reef.yaml").write_text("reef: {engine: nonexistent}\n")
    status = reef("teach", "--no-png")
    text = capsys.readouterr()
    assert status in (1, 2)
    assert "nonexistent" in text.err


def test_a_picture_that_cannot_be_written(tmp_path, room):
    from reef.cli.curve import draw

    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot write"):
        draw([lessons.Lesson(PREFERENCES["addition"], "s", 0)], tmp_path / "file" / "x.png")


def test_intervals_are_wilsons():
    assert teach.interval(0.0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert teach.interval(0.7, 120) == pytest.approx((0.6128, 0.7748), abs=1e-3)


def test_numbers_must_be_positive():
    with pytest.raises(argparse.ArgumentTypeError):
        teach._positive("0")
