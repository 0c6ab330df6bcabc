"""Rendered trees under real clients: the provider sees the tree, Reef the headers, and transcripts are read back.

One run straight to the scripted provider shows what a client sends; one through Reef shows what it leaves behind.
"""

import json
import os
import subprocess

import pytest

from reef.core.ids import parse_receipt
from reef.harness.agents import AGENTS, Door, agent, render
from reef.harness.tree import Entry
from tests.clients.conftest import CLIENTS, TOKEN
from tests.clients.upstream import KEY, WORD

NPM = CLIENTS / "node/node_modules/.bin"
RULES = "Greet the harbour master by name."
SKILL = "Use when somebody asks how high the tide is."
COMMAND = "Write a greeting into $ARGUMENTS and tell me what came of it."
ACTS = "First !`echo ran-$((40+2))`, then @{0}.\n\n```!\necho ran-$((40+2))\n```\n"
OWN = {
    "pi": ("own.ts", 'export default () => { process.stderr.write("own code ran\\n"); };\n'),
    "opencode": ("own.js", 'export const Own = async () => { process.stderr.write("own code ran\\n"); return {}; };\n'),
}
"""Extensions that clients load by themselves; the others have a folder of scripts, which this tree does not name."""
ASKS = {"pi": "/hail {}", "claude": "/hail {}", "opencode": None, "codex": None}
KEYS = dict.fromkeys(
    ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN", "CLAUDE_CODE_OAUTH_TOKEN", "OPENAI_API_KEY", "CODEX_API_KEY"),
    "sk-of-the-user",
)


def tree(name):
    entries = [
        Entry("greet", "rules", {"text": RULES}),
        Entry("hail", "command", {"name": "hail", "description": "Greets.", "text": COMMAND}),
        Entry("tide", "skill", {"name": "tide-table", "description": SKILL, "text": "Look it up."}),
    ]
    if name in OWN:
        file, text = OWN[name]
        entries.append(Entry("own", "extension", {"agent": name, "file": file, "text": text}))
    return entries


class Ship:
    """One agent, its tree in a config root, and runs of it."""

    def __init__(self, folder, name):
        self.folder, self.agent = folder, agent(name)
        self.root, self.work = folder / "root", folder / "work"
        for made in (self.root, self.work, folder / "home"):
            made.mkdir()
        self.file = self.work / "hello.txt"
        self.plain = COMMAND.replace("$ARGUMENTS", str(self.file))

    def install(self, url, scenario):
        self.place(render(self.agent, tree(self.agent.name), Door(url, scenario, "reef-model")))

    def place(self, files):
        for path, text in files.items():
            place = self.root / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)

    def start(self, arguments, own, **environment):
        return subprocess.run(
            [self.agent.client.program, *arguments],
            cwd=self.work, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120,
            env={
                "PATH": f"{NPM}:{os.environ['PATH']}", "HOME": str(self.folder / "home"), "LANG": "C.UTF-8",
                "TERM": "dumb", "NO_PROXY": "127.0.0.1", "TMPDIR": str(self.folder), **own, **environment,
            },
        )  # fmt: skip

    def run(self, prompt, **environment):
        launch = self.agent.launch(self.root, prompt)
        done = self.start(launch.arguments, launch.environment, **environment)
        self.said = f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == 0, self.said
        assert self.file.read_text() == WORD + "\n", self.said
        assert "The tool returned:" in done.stdout, self.said
        return self


@pytest.fixture
def ship(tmp_path, request):
    return Ship(tmp_path, request.param)


SESSIONS = ("x-reef-session", "x-session-id", "session-id", "x-claude-code-session-id")
"""Headers that name a session, in the order in which Reef looks at them; an empty one is none."""


@pytest.mark.parametrize("ship", AGENTS, indirect=True)
def test_the_provider_sees_the_tree(ship, upstreams):
    upstream = upstreams["native"]
    before = len(upstream.seen)
    ship.install(upstream.url.removesuffix("/v1"), "harbour")
    asked = (ASKS[ship.agent.name] or ship.plain).format(ship.file)
    ship.run(asked, REEF_TOKEN=KEY, REEF_NOTICE="Reef: r7", **KEYS)
    seen = upstream.seen[before:]
    turns = [each for each in seen if each.json.get("tools")]
    assert len(turns) == 2
    for each in seen:
        assert each.headers["x-reef-scenario"] == "harbour"
        assert each.headers["x-reef-harness"] == "off"
        assert "sk-of-the-user" not in json.dumps(each.headers)
    for each in turns:
        said = json.dumps(each.json, ensure_ascii=False)
        assert RULES in said
        assert SKILL in said
        assert ship.plain in said
        assert "Look it up." not in said
    (session,) = {next(each.headers[name] for name in SESSIONS if each.headers.get(name)) for each in seen}
    assert ship.agent.read(ship.root).session == session
    assert ("own code ran" in ship.said) == (ship.agent.name in OWN)
    for path in ship.root.rglob("*"):
        assert path.is_dir() or KEY.encode() not in path.read_bytes(), path
    assert not list(ship.folder.rglob("@opencode-ai"))  # nothing was fetched


FLOWS = [("pi", "native"), ("pi", "chatty"), ("opencode", "native"), ("codex", "chatty"), ("claude", "native")]


@pytest.mark.parametrize(("ship", "scenario"), FLOWS, indirect=["ship"])
def test_a_transcript_is_read_back(ship, scenario, served, begin):
    flow = begin(scenario)
    ship.install(served.url, scenario)
    ship.run(ship.plain, REEF_TOKEN=TOKEN, REEF_SESSION="wrapped-1")
    flow.end().check()
    read = ship.agent.read(ship.root)
    assert read.agent == ship.agent.name
    assert read.unread == 0
    assert read.errors == ()
    assert [move.text for move in read.moves if move.role == "user" and ship.plain in move.text]
    (call,) = [call for move in read.moves for call in move.calls]
    assert WORD in json.dumps(call.arguments, ensure_ascii=False)
    assert call.result
    assert not call.failed
    assert read.final.startswith("The tool returned:")
    answers = [move for move in read.moves if move.role == "assistant"]
    assert len(answers) == 2
    assert all(move.usage.prompt_tokens == 120 for move in answers)
    turns = [record for record in flow.records if record["request"].get("tools")]
    if ship.agent.name != "opencode":
        assert read.receipts == tuple(record["agent_record_id"] for record in turns)
        assert all(parse_receipt(receipt) == receipt for receipt in read.receipts)
    named = read.session if ship.agent.name == "claude" else "wrapped-1"  # it has no place for a name from outside
    assert {record["session"] for record in flow.records} == {named}


NOTICE = 'release 7 is out: it\'s "new"; $(touch hacked) `touch hacked` \\ %s é\nand more'


def test_claude_is_told_of_an_update_by_a_command_that_is_no_shell_s_affair(tmp_path):
    (settings,) = [one for one in agent("claude").base(Door("http://127.0.0.1:1", "demo")) if one.how == "values"]
    (start,) = settings.values["hooks"]["SessionStart"]
    command = start["hooks"][0]["command"]
    for notice in (NOTICE, ""):
        environment = {"PATH": os.environ["PATH"], "REEF_NOTICE": notice}
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert (json.loads(done.stdout) if done.stdout else None) == ({"systemMessage": notice} if notice else None)
    gone = subprocess.run(["/bin/sh", "-c", command], env={"PATH": "", "REEF_NOTICE": NOTICE}, capture_output=True)
    assert (gone.returncode, gone.stdout) == (0, b"")  # without Node there is no notice, and no harm
    assert list(tmp_path.iterdir()) == []


def test_pi_shows_the_notice_where_somebody_can_see_it(tmp_path):
    ship = Ship(tmp_path, "pi")
    ship.install("http://127.0.0.1:1", "demo")
    environment = {"PATH": f"{NPM}:{os.environ['PATH']}", "HOME": str(tmp_path / "home"), "REEF_TOKEN": TOKEN}
    environment |= {"REEF_NOTICE": NOTICE, "PI_OFFLINE": "1", **ship.agent.environment(ship.root)}
    with subprocess.Popen(
        ["pi", "--mode", "rpc"], cwd=ship.work, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as pi:
        told = next(line for line in map(json.loads, pi.stdout) if line.get("method") == "notify")
        pi.stdin.close()
        assert pi.wait(30) == 0
    assert told["message"] == NOTICE


SHOWN = {"claude": ("-p", "--", "/act now"), "opencode": ("run", "--command", "act", "now")}


@pytest.mark.parametrize("ship", SHOWN, indirect=True)
def test_a_page_runs_and_reads_nothing_when_it_is_shown(ship, upstreams):
    secret = ship.folder / "secret.txt"
    secret.write_text("what-nobody-may-know\n")
    text, upstream = ACTS.format(secret), upstreams["native"]
    before = len(upstream.seen)
    fields = {"name": "act", "description": "Acts.", "text": text}
    entries = [Entry("act", "command", fields), Entry("rule", "rules", {"text": text})]
    files = render(ship.agent, entries, Door(upstream.url.removesuffix("/v1"), "harbour", "reef-model"))
    ship.place(files)
    ship.start(SHOWN[ship.agent.name], ship.agent.launch(ship.root, "").environment, REEF_TOKEN=KEY)
    said = "".join(json.dumps(each.json) for each in upstream.seen[before:])
    assert said.count("First ! `echo ran-$((40+2))`") >= 2  # the rule and the command
    assert "ran-42" not in said
    assert "what-nobody-may-know" not in said
