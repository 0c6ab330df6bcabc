"""`reef connect`: an installed client set up through the server's own script, and settings to print."""

import json
import os
import stat
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from reef.cli.main import main
from reef.harness.agents import AGENTS, agent


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder, a bin with a client in it, no server."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("REEF_")]:
        monkeypatch.delenv(name)
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    program(bin_ / "pi", f"echo {agent('pi').client.version}")
    monkeypatch.setenv("PATH", f"{bin_}:/usr/bin:/bin")
    return tmp_path


def program(path, words):
    path.write_text(f"#!/bin/sh\n{words}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


@pytest.fixture
def server():
    """One that hands out a script and remembers who asked for it."""
    asked = []

    class Door(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, dict(self.headers.items())))
            wrong = "adapter=pi" not in self.path
            body = b'{"error": {"message": "no such adapter here"}}' if wrong else SCRIPT
            self.send_response(404 if wrong else 200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    made = HTTPServer(("127.0.0.1", 0), Door)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{made.server_port}", asked
    made.shutdown()


SCRIPT = b'#!/bin/sh\necho "$REEF_CLIENT $*" > ran\n[ ! -e fail ]\n'


def test_the_installed_client_is_handed_to_the_servers_script(place, server, capfd):
    url, asked = server
    assert main(["connect", "pi", "--url", url, "--token", "t-1", "-s", "demo"]) == 0
    ((path, headers),) = asked
    assert path == "/reef/harness/install?adapter=pi"
    assert headers["authorization"] == "Bearer t-1"
    assert headers["x-reef-scenario"] == "demo"
    assert Path("ran").read_text().split() == [str(place / "bin" / "pi")]
    said = capfd.readouterr().out
    assert "the version that Reef is tested with" in said
    assert "reef-pi uninstall" in said
    Path("fail").touch()
    assert main(["connect", "pi", "--url", url, "--theirs"]) == 1
    assert Path("ran").read_text().split() == [str(place / "bin" / "pi"), "--theirs"]


@pytest.mark.parametrize(
    ("words", "said"),
    [("echo pi 9.9.9-rc.1 and more", "pi 9.9.9-rc.1; Reef is tested with"), ("exit 3", "does not tell its version")],
)
def test_another_version_is_told(place, server, capfd, words, said):
    program(place / "bin" / "pi", words)
    assert main(["connect", "pi", "--url", server[0]]) == 0
    assert said in capfd.readouterr().out


def test_the_token_is_not_shown_to_the_client(place, server, capfd, monkeypatch):
    monkeypatch.setenv("REEF_TOKEN", "secret")
    program(place / "bin" / "pi", 'echo "1.2.3-$REEF_TOKEN"')
    assert main(["connect", "pi", "--url", server[0]]) == 0
    assert "secret" not in capfd.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["claude"], 2, "not on PATH"),
        (["claude"], 2, "npm install -g @anthropic-ai/claude-code@"),
        (["pi", "--client", "nowhere/pi"], 2, "no such program"),
        (["pie"], 2, "no client 'pie'; there are pi, opencode, codex, claude, openai, anthropic"),
        (["codex", "--client", "bin/pi"], 1, "no such adapter here"),
    ],
)
def test_what_is_missing_says_what_to_do(place, server, capfd, arguments, status, said):
    assert main(["connect", *arguments, "--url", server[0]]) == status
    assert said in capfd.readouterr().err
    assert not Path("ran").exists()


def test_without_a_server(place, capfd):
    assert main(["connect", "pi", "--url", "http://127.0.0.1:1"]) == 1
    assert "no server answers" in capfd.readouterr().err


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_printed_settings_point_at_reef_and_leave_the_rules_to_the_requests(place, capfd, name):
    assert main(["connect", name, "--print", "--url", "http://reef.test:8900", "-s", "demo"]) == 0
    said = capfd.readouterr().out
    assert "http://reef.test:8900" in said
    assert "demo" in said
    assert "REEF_TOKEN" in said
    assert "x-reef-harness" not in said
    assert "REEF_NOTICE" not in said  # only the wrapper sets these
    assert "REEF_RUN" not in said
    assert ("reef-session.ts" in said) == (name == "pi")  # which works without it
    assert not Path("ran").exists()
    for block in said.split("\n\n# ")[1:]:
        path, _, text = block.partition("\n")
        if path.endswith(".json"):
            json.loads(text)


@pytest.mark.parametrize("sdk", ["openai", "anthropic"])
def test_sdks(place, capfd, sdk):
    assert main(["connect", sdk, "--url", "http://reef.test:8900", "-s", "demo"]) == 0
    said = capfd.readouterr().out
    url = "http://reef.test:8900/s/demo" + ("/v1" if sdk == "openai" else "")
    assert f"export {sdk.upper()}_BASE_URL={url}\n" in said
    python = said.partition("# Python\n")[2]
    compile(python.replace("[...]", "[]"), "snippet", "exec")
    assert f"base_url={url!r}" in python


@pytest.mark.parametrize("words", [["pi"], ["pi", "--print"], ["openai"]])
def test_a_scenario_that_no_scenario_is_called_is_said_so(place, server, capsys, words):
    url, asked = server
    assert main(["connect", *words, "--url", url, "-s", "é"]) != 0
    assert "a scenario's name is" in capsys.readouterr().err
    assert asked == []
