"""`reef connect AGENT`: a client that is installed already, set up to work through Reef; and what SDKs need for it.

Knows: how a client is found and asked for its version, the server's install script, what its settings are without our
tree. Does not know: how anything is installed (`harness.install`), or clients' files (`harness.agents`).

`--print` changes nothing: it shows what a person puts into the client's own configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from reef.cli import options
from reef.cli.api import Found, connect, find, refusal, silent
from reef.core.errors import InputError, WireError

if TYPE_CHECKING:
    from reef.core.nouns import Json
    from reef.harness.agents import Agent, Placed

_HOMES = {"pi": "~/.pi/agent", "opencode": "~/.config/opencode", "codex": "~/.codex", "claude": "~/.claude"}
_OURS = ("node_modules/", "package-lock.json", "config/")  # keep a root of ours quiet: no place for another's
_VERSION = re.compile(r"\d+\.\d+\.\d+[\w.+-]*")

_OPENAI = """\
from openai import OpenAI
client = OpenAI(
    base_url={url!r},
    api_key=os.environ["REEF_TOKEN"],
    default_headers={headers},
)
answer = client.chat.completions.with_raw_response.create(model="reef", messages=[...])
receipt = answer.headers["x-reef-agent-record-id"]   # report on it, or on the session"""
_ANTHROPIC = """\
from anthropic import Anthropic
client = Anthropic(
    base_url={url!r},
    auth_token=os.environ["REEF_TOKEN"],
    default_headers={headers},
)
answer = client.messages.with_raw_response.create(model="reef", max_tokens=1024, messages=[...])
receipt = answer.headers["x-reef-agent-record-id"]   # report on it, or on the session"""


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "connect",
        help="set up an installed client, or show what an SDK needs",
        description="Set up a client that is installed already to work through Reef, as reef-AGENT: pi, opencode, "
        "codex or claude. openai and anthropic: print what their SDKs need.",
    )
    parser.add_argument("agent", metavar="AGENT", help="pi, opencode, codex, claude; openai or anthropic (SDKs)")
    parser.add_argument("--client", metavar="PATH", help="the client's program (default: the one on PATH)")
    parser.add_argument("--print", action="store_true", help="change nothing; print the settings for your own files")
    keep = parser.add_mutually_exclusive_group()
    keep.add_argument("--theirs", action="store_true", help="a file of the tree that was changed here: take Reef's")
    keep.add_argument("--ours", action="store_true", help="or keep the one that is here")
    options.server(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from reef.harness.agents import AGENTS, agent

    if args.agent in ("openai", "anthropic"):
        print(snippet(args.agent, find(args), args.scenario))
        return 0
    if args.agent not in AGENTS and ":" not in args.agent:
        known = ", ".join((*AGENTS, "openai", "anthropic"))
        raise InputError(f"there is no client {args.agent!r}; there are {known}", param="agent")
    chosen = agent(args.agent)
    if args.print:
        print(settings(chosen, find(args)))
        return 0
    program = locate(chosen, args.client)
    print(told(chosen, program))
    return _install(args, chosen, program)


def locate(chosen: Agent, named: str | None) -> str:
    """The client's program, absolute. InputError says how to get one."""
    client = chosen.client
    found = shutil.which(named or client.program)
    if found is not None:
        return os.path.abspath(found)
    if named is not None:
        raise InputError(f"--client {named}: there is no such program", param="client")
    raise InputError(
        f"{client.program} is not on PATH; name it with --client PATH, or install it: "
        f"npm install -g {client.package}@{client.version} (the version that Reef is tested with)",
        param="agent",
    )


def told(chosen: Agent, program: str) -> str:
    """The client's version against the tested one."""
    client = chosen.client
    environment = {name: value for name, value in os.environ.items() if name != "REEF_TOKEN"}
    asked, nothing = [program, "--version"], subprocess.DEVNULL
    try:
        done = subprocess.run(asked, env=environment, stdin=nothing, capture_output=True, text=True, timeout=20)
        found = _VERSION.search(done.stdout) or _VERSION.search(done.stderr)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        found = None
    if found is None:
        return f"{program} does not tell its version; Reef is tested with {client.version}"
    if found[0] == client.version:
        return f"{program} is {client.program} {found[0]}, the version that Reef is tested with"
    return f"{program} is {client.program} {found[0]}; Reef is tested with {client.version}; take that if it misbehaves"


def _install(args: argparse.Namespace, chosen: Agent, program: str) -> int:
    import httpx

    headers = {"x-reef-scenario": args.scenario} if args.scenario else {}
    with connect(args) as api:
        if api.found.apart:
            raise WireError(silent(api.found))
        try:
            answer = api.client.get("/reef/harness/install", params={"adapter": args.agent}, headers=headers)
        except httpx.HTTPError:
            raise WireError(silent(api.found)) from None
        if not answer.is_success:
            raise refusal(api.found, answer)
    with tempfile.TemporaryDirectory(prefix="reef-connect-") as folder:
        script = Path(folder) / "install.sh"
        script.write_bytes(answer.content)
        more = ["--theirs"] * args.theirs + ["--ours"] * args.ours
        status = subprocess.run(["sh", str(script), *more], env={**os.environ, "REEF_CLIENT": program}).returncode
    if status == 0:
        print(f"{program} itself and its own configuration are as they were; to undo: reef-{chosen.name} uninstall")
    return status


def settings(chosen: Agent, found: Found) -> str:
    """What points a client's own configuration at Reef, without a tree. The release's rules are then those of a plain
    application: in the requests, where the scenario wishes it."""
    from reef.harness.agents import Door, gather

    client = chosen.client
    base = [one for one in chosen.base(Door(found.url, found.scenario)) if not _wrapped(one)]
    files = gather(("", _plain(one)) for one in base)
    home = _HOMES.get(chosen.name, "its configuration folder")
    lines = [
        f"# {chosen.name} through Reef at {found.url}, scenario {found.scenario}. Nothing was changed.",
        f"# Its token comes from the environment{_where(found)}:",
        "export REEF_TOKEN=...",
        f"# These belong into {home}" + (f" (or where {client.root} says)" if client.root else "")
        + ", merged with what is there; take them out again to undo it.",
    ]  # fmt: skip
    for path, text in files.items():
        lines += ["", f"# {path}", text.rstrip()]
    return "\n".join(lines)


def _wrapped(one: Placed) -> bool:
    """Whether a placement is for a root of ours, or shows what only the wrapper says."""
    return one.path.startswith(_OURS) or Path(one.path).stem == "reef-notice"


def _plain(one: Placed) -> Placed:
    """A placement without the header that says that the tree is in the client's files, and the wrapper's hooks."""
    from dataclasses import replace

    if one.how == "values":
        values = {name: value for name, value in one.values.items() if name != "hooks"}
        return replace(one, values=_without(values))
    if one.path.endswith(".json"):
        return replace(one, text=json.dumps(_without(json.loads(one.text)), indent=2, ensure_ascii=False) + "\n")
    return one


def _without(value: Json) -> Json:
    if isinstance(value, dict):
        return {name: _without(item) for name, item in value.items() if name != "x-reef-harness"}
    if isinstance(value, list):
        return [_without(item) for item in value]
    return re.sub(r"\n?x-reef-harness: off", "", value) if isinstance(value, str) else value


def snippet(sdk: str, found: Found, scenario: str | None) -> str:
    """Lines for the shell and for Python. A scenario goes into the address, for programs that take no headers."""
    place = found.url + (f"/s/{scenario}" if scenario else "")
    url = f"{place}/v1" if sdk == "openai" else place
    key = "OPENAI_API_KEY" if sdk == "openai" else "ANTHROPIC_AUTH_TOKEN"
    shell = [
        f"# the shell, for any program on the {sdk} SDK; the token{_where(found)}:",
        "export REEF_TOKEN=...",
        f"export {sdk.upper()}_BASE_URL={shlex.quote(url)}",
        f'export {key}="$REEF_TOKEN"',
    ]
    headers = '{"x-reef-session": "a name of yours for this conversation"}'
    python = (_OPENAI if sdk == "openai" else _ANTHROPIC).format(url=url, headers=headers)
    return "\n".join([*shell, "", "# Python", "import os", python])


def _where(found: Found) -> str:
    """Where the token is kept, when it is here."""
    kept = found.state_dir / "token"
    return f" (here it is in {kept})" if not found.named and kept.exists() else ""
