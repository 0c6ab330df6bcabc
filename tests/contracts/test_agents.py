"""What every agent adapter keeps to: pure placement, paths below the root, no token, and text that stays text."""

import importlib
import json
import os
import re
import sqlite3
import sys
import tomllib
from pathlib import Path, PurePosixPath

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reef.core.errors import ConfigError
from reef.harness import kinds
from reef.harness.agents import AGENTS, TOKEN, Door, Placed, agent, gather, render
from reef.harness.tree import Entry

PAGE = Path(__file__).parents[2] / "docs/agents.md"
DOOR = Door("http://127.0.0.1:8900", "demo")
HOSTILE = (
    "$(rm -rf ~)", "`rm -rf ~`", "!`rm -rf ~`", "a\n---\nname: other\n---\nb", "'''", '"""', "a'b\"c\\d",
    "# no: 1\n- x", "{{args}} ${HOME} %s {env:HOME} {file:/etc/passwd}", "true", "1e3", "null", "~", "[x]",
    "é 珊瑚 \U0001f600", "tab\there", "\u2028\u2029\u0085\x7f\ufeff", "a\r\nb",
    "key = 'x'\n[table]", "@/etc/passwd", "<!-- -->", " lead",
)  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def fifth(tmp_path_factory):
    """The worked example of docs/agents.md, as the module that the page calls it."""
    (code,) = re.findall(r"```python\n(# qwen\.py.*?)```", PAGE.read_text(), re.DOTALL)
    folder = tmp_path_factory.mktemp("fifth")
    (folder / "qwen.py").write_text(code)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield "qwen:Qwen"
    sys.path.remove(str(folder))


@pytest.fixture(params=[*AGENTS, "qwen:Qwen"])
def made(request):
    return agent(request.param)


def entry(kind, id_="one", text="Run the tests first.", name="tests", of="pi"):
    fields = {"text": text, "name": name, "description": text[:1024], "agent": of, "file": "own.js"}
    fields["values"] = {"said": text, "deep": {"list": [1, text]}}
    return Entry(id_, kind, {key: fields[key] for key in kinds.KINDS[kind].fields})


def whole(made, text="Run the tests first."):
    """An entry of each kind."""
    return [entry(kind, f"{kind}-1", text, f"n-{kind}", made.name) for kind in kinds.KINDS]


def split(page):
    """The front matter of a page, as YAML says, and its text."""
    assert page.startswith("---\n")
    head, _, body = page[4:].partition("\n---\n")
    return yaml.safe_load(head), body


def told(files, suffix):
    return [text for path, text in files.items() if path.endswith(suffix)]


def test_every_kind_has_a_place(made):
    for kind in kinds.KINDS:
        placed = made.place(entry(kind, of=made.name))
        assert placed, kind
        assert placed == made.place(entry(kind, of=made.name))


def test_what_is_for_another_agent_is_nothing(made):
    for kind in ("config", "extension"):
        assert list(made.place(entry(kind, of="another"))) == []


def test_same_tree_same_bytes(made):
    entries = [*whole(made), entry("rules", "rules-0", "Say it shortly.")]
    files = render(made, entries, DOOR)
    assert list(render(made, entries[::-1], DOOR).items()) == list(files.items())
    (rules,) = [text for text in files.values() if "Say it shortly." in text]
    assert rules == "Say it shortly.\n\nRun the tests first.\n"


def test_paths_are_plain_and_the_base_is_whole(made):
    base = render(made, [], DOOR)
    files = render(made, whole(made), DOOR)
    assert set(base) < set(files) | {""}
    for path in files:
        assert not PurePosixPath(path).is_absolute()
        assert ".." not in PurePosixPath(path).parts
    for text in files.values():
        assert text.endswith("\n") or text == "Run the tests first."


def test_the_door_is_in_the_base_and_the_token_is_not(made, monkeypatch):
    monkeypatch.setenv(TOKEN, "secret-4711")
    files = render(made, whole(made), Door("http://reef.test:9", "a-scenario", "a-model"))
    text = "\n".join(files.values())
    assert "secret-4711" not in text + json.dumps(dict(made.environment(Path("/root")))) + repr(
        made.launch(Path("/r"), "p")
    )
    assert TOKEN in text
    for word in ("http://reef.test:9", "a-scenario", "a-model", "x-reef-scenario", "x-reef-harness"):
        assert word in text, word


def test_a_launch_says_the_prompt_once_and_names_the_root(made):
    root = Path("/somewhere/tree")
    for prompt in ("Say hello.", "-v", "--help", "@/etc/passwd", "two\nlines", "$(rm -rf ~)", "a  b 'c' \"d\" "):
        launch = made.launch(root, prompt)
        assert [word for word in launch.arguments if prompt in word] == [launch.arguments[-1]]
        assert launch.arguments[-1] in (prompt, f" {prompt}")
        assert launch.environment[made.client.root] == str(root)
        assert launch.environment.items() >= made.environment(root).items()


def test_the_client_is_pinned(made):
    assert re.fullmatch(r"(?:@[a-z0-9-]+/)?[a-z0-9-]+", made.client.package)
    assert re.fullmatch(r"\d+\.\d+\.\d+", made.client.version)
    assert re.fullmatch(r"\d+\.\d+", made.client.node)
    assert re.fullmatch(r"[A-Z_]+", made.client.root)


def test_the_pinned_versions_are_the_tested_ones():
    tested = json.loads((Path(__file__).parents[1] / "clients/package.json").read_text())["dependencies"]
    assert {agent(name).client.package: agent(name).client.version for name in AGENTS} == tested


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(made, text):
    base = render(made, [], DOOR)
    files = render(made, whole(made, text), DOOR)
    new = {path: text for path, text in files.items() if path not in base}
    pages = [split(page) for page in new.values() if page.startswith("---\n")]
    assert len(pages) == 2
    for front, body in pages:
        assert front["description"] == text
        assert set(front) <= {"name", "description"}
        assert plain(body) == text.strip("\n")
    assert [each for each in new.values() if each == text]  # the extension, byte for byte
    (rules,) = [each for path, each in new.items() if path.endswith(".md") and "/" not in path]
    assert plain(rules) == text.strip("\n")
    values = {"said": text, "deep": {"list": [1, text]}}
    read = [json.loads(each) for each in told(files, ".json")] + [tomllib.loads(each) for each in told(files, ".toml")]
    assert [each for each in read if values.items() <= each.items()]


def plain(text):
    """A page's text without what keeps a client from running or reading what it names."""
    return re.sub(r"`(@\S*)`", r"\1", text.strip("\n").replace("! `", "!`").replace("\\@", "@"))


@pytest.mark.parametrize("name", ["claude", "opencode", "qwen:Qwen"])
def test_a_command_runs_nothing_when_it_is_shown(name):
    command = entry("command", text="Look: !`rm -rf ~`, !{rm -rf ~} and\n```!\nrm -rf ~\n```\n")
    (placed,) = agent(name).place(command)
    _, body = split(placed.text)
    assert "!`" not in body
    assert "!{" not in body
    assert "```!" not in body


def test_what_names_a_file_reads_none():
    text = "@/etc/passwd and @~/.ssh/id_rsa but a@b.c"
    for kind in ("rules", "skill", "command"):
        (placed,) = agent("claude").place(entry(kind, text=text))
        assert "\\@/etc/passwd and \\@~/.ssh/id_rsa but a@b.c" in placed.text
    (placed,) = agent("opencode").place(entry("command", text=text))
    assert "`@/etc/passwd` and `@~/.ssh/id_rsa` but a@b.c" in placed.text


def test_an_entry_waits_for_what_it_needs(made):
    needs = Entry("later", "rules", {"text": "Second.", "needs": ["first"]})
    assert "Second." not in "".join(render(made, [needs], DOOR).values())
    both = render(made, [needs, entry("rules", "first", "First.")], DOOR)
    assert "Second." in "".join(both.values())


def test_two_claims_of_one_file_name_both(made):
    one, two = entry("skill", "one"), entry("skill", "two")
    with pytest.raises(ValueError, match="'one' and entry 'two'"):
        render(made, [one, two], DOOR)


def test_the_base_cannot_be_changed(made):
    files = render(made, [entry("config", of=made.name)], DOOR)
    path = next(path for path, text in files.items() if "Run the tests" in text)
    values = json.loads(files[path]) if path.endswith(".json") else tomllib.loads(files[path])
    for key, value in values.items():
        if key in ("said", "deep"):
            continue
        config = Entry("away", "config", {"agent": made.name, "values": {key: "other"}})
        with pytest.raises(ValueError, match=re.escape(f"'away' sets {key}")):
            render(made, [config], DOOR)
        same = Entry("same", "config", {"agent": made.name, "values": {key: value}})
        assert render(made, [same], DOOR) == render(made, [], DOOR)


def test_settings_that_have_no_form_are_an_error():
    for values in ({"a": None}, {"a": [{"b": None}]}):
        with pytest.raises(ValueError, match=r"entry 'one' cannot be written as config\.toml"):
            render(agent("codex"), [Entry("one", "config", {"agent": "codex", "values": values})], DOOR)
    deep = {}
    for _ in range(2000):
        deep = {"a": deep}
    for name in AGENTS:
        config = Entry("one", "config", {"agent": name, "values": deep})
        with pytest.raises(ValueError, match="entry 'one'"):
            render(agent(name), [config], DOOR)


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../up", "a/../../b", "a\\b", "a//b", "a/", "", ".", "a\nb", "con", "skills/nul.md", ".git/hooks/x",
     ".reef/manifest", "a:b", "é", "a ", "b./c", "a\x00"],
)  # fmt: skip
def test_paths_that_leave_the_root_or_are_reserved(path):
    with pytest.raises(ValueError, match=r"entry 'one' would write"):
        gather([("one", Placed(path, text="x"))])


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Placed("a.md"), Placed("a.md")),
        (Placed("a.md"), Placed("a.md", "section")),
        (Placed("a.json", "values"), Placed("a.json", "section")),
        (Placed("a.md"), Placed("A.md")),
        (Placed("a"), Placed("a/b")),
        (Placed("a/b/c"), Placed("A")),
    ],
)
def test_claims_that_cannot_both_be(first, second):
    for placed in ([("one", first), ("two", second)], [("two", second), ("one", first)]):
        with pytest.raises(ValueError, match=r"'one'.*'two'|'two'.*'one'"):
            gather(placed)
    with pytest.raises(ValueError, match="the base"):
        gather([("", first), ("one", second)])


def test_later_settings_win_and_objects_merge():
    one = Placed("s.json", "values", values={"a": {"b": 1, "c": [1]}, "d": 1})
    two = Placed("s.json", "values", values={"a": {"c": [2]}, "d": {"e": 1}})
    assert json.loads(gather([("two", two), ("one", one)])["s.json"]) == {"a": {"b": 1, "c": [2]}, "d": {"e": 1}}


def test_an_unknown_agent_names_what_there_is():
    with pytest.raises(ConfigError, match="pii"):
        agent("pii")


# Transcripts: whatever lies there, reading never raises.

PLACES = {
    "pi": "sessions/--work--/2026_a.jsonl",
    "opencode": "opencode.db",
    "codex": "sessions/2026/01/02/rollout-a.jsonl",
    "claude": "projects/-work/a.jsonl",
    "qwen": "projects/-work/chats/a.jsonl",
}
_plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
_words = st.sampled_from(
    ["type", "role", "message", "payload", "content", "id", "call_id", "toolCallId", "tool_use_id", "usage", "name",
     "arguments", "input", "output", "response_id", "responseId", "requestId", "data", "customType", "sessionId",
     "parts", "state", "tool", "callID"]
)  # fmt: skip
_values = st.sampled_from(
    ["session", "message", "assistant", "user", "toolResult", "toolCall", "tool_use", "tool_result", "response_item",
     "function_call", "function_call_output", "token_usage_record", "session_meta", "event_msg", "custom",
     "reef", "text", "tool"]
)  # fmt: skip
_close = st.recursive(
    _values | _plain,
    lambda inner: st.dictionaries(_words, inner, max_size=6) | st.lists(inner, max_size=3),
    max_leaves=16,
)
_object = st.dictionaries(_words, _close, max_size=6)
_line = st.binary(max_size=40) | _object.map(lambda value: json.dumps(value).encode())
_quiet = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@_quiet
@given(order=st.randoms(use_true_random=False))
def test_the_order_of_placements_does_not_matter(made, order):
    """Of different entries; one entry's own stay in its order."""
    entries = [*whole(made), entry("rules", "rules-0", "Say it shortly."), entry("config", "config-2", of=made.name)]
    groups = [
        [("", one) for one in made.base(DOOR)],
        *([(each.id, one) for one in made.place(each)] for each in entries),
    ]
    order.shuffle(groups)
    assert gather(pair for group in groups for pair in group) == render(made, entries, DOOR)


def put(root, made, data):
    path = root / PLACES[made.name]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def sound(made, root):
    """Whatever was read can be written down again."""
    read = made.read(root)
    if read is not None:
        assert read.agent == made.name
        for move in read.moves:
            json.dumps([[call.id, call.name, call.arguments, call.result] for call in move.calls], allow_nan=False)
            (move.text + (move.error or "") + read.session).encode()
    return read


@_quiet
@given(found=st.lists(_line, max_size=12))
def test_any_bytes_can_be_read(made, tmp_path, found):
    put(tmp_path, made, b"\n".join(found))
    sound(made, tmp_path)


@_quiet
@given(rows=st.lists(st.tuples(_object, st.booleans()), max_size=8))
def test_any_rows_can_be_read(tmp_path_factory, rows):
    made, root = agent("opencode"), tmp_path_factory.mktemp("rows")
    tables(root)
    with sqlite3.connect(root / "opencode.db") as kept:
        kept.execute("INSERT INTO session VALUES ('ses_1', NULL, 1)")
        for number, (value, top) in enumerate(rows):
            data = json.dumps(value)
            if top:
                kept.execute("INSERT INTO message VALUES (?, 'ses_1', ?, ?)", (f"msg_{number}", number, data))
            else:
                kept.execute(
                    "INSERT INTO part VALUES (?, ?, ?, ?)", (f"prt_{number}", f"msg_{number - 1}", number, data)
                )
    kept.close()
    sound(made, root)


def tables(root):
    with sqlite3.connect(root / "opencode.db") as kept:
        kept.execute("CREATE TABLE session (id, parent_id, time_created)")
        kept.execute("CREATE TABLE message (id, session_id, time_created, data)")
        kept.execute("CREATE TABLE part (id, message_id, time_created, data)")
    kept.close()


def test_a_root_without_a_transcript_is_none(made, tmp_path):
    assert made.read(tmp_path) is None
    assert made.read(tmp_path / "missing") is None


def test_deep_long_and_cut_lines_are_counted(made, tmp_path):
    deep = b'{"type":"message","message":' + b"[" * 100_000 + b"\n"
    long = b'{"type": "user", "message": "' + b"x" * (5 * 1024 * 1024) + b'"}\n'
    put(tmp_path, made, deep + long + b'{"type": "use')
    read = sound(made, tmp_path)
    assert read.unread == (1 if made.name == "opencode" else 3)
    assert read.moves == ()


def test_links_out_of_the_root_are_not_followed(made, tmp_path):
    outside, root = tmp_path / "outside", tmp_path / "root"
    path = put(outside, made, b'{"type": "user", "message": {"role": "user", "content": "secret"}}\n')
    place = root / PLACES[made.name]
    place.parent.mkdir(parents=True)
    place.symlink_to(path)
    assert made.read(root) is None
    place.unlink()
    os.mkfifo(place)
    assert made.read(root) is None
    first = PurePosixPath(PLACES[made.name]).parts[0]
    if first != place.name:
        other = tmp_path / "other"
        other.mkdir()
        (other / first).symlink_to(outside / first)
        assert made.read(other) is None


def test_a_table_without_end_is_left(tmp_path):
    with sqlite3.connect(tmp_path / "opencode.db") as kept:
        endless = (
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS id, NULL AS parent_id, i AS"
        )
        kept.execute(f"CREATE VIEW session AS {endless} time_created FROM n")
    kept.close()
    assert agent("opencode").read(tmp_path).unread == 1
