"""The demo with a coding agent: pi is installed from Reef, fails tasks, is updated with what was learnt, and passes.

Knows: the story, and the commands that a person would type. Does not know: how the client is installed or measured.

The client is real, its home is the demo's own folder, and what it may reach is the demo's server.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from reef.cli.demo import tasks
from reef.cli.demo.stage import Stage
from reef.cli.demo.tasks import Task
from reef.core.errors import InputError, ReefError

ADAPTER: Final = "pi"
WRAPPER: Final = f"reef-{ADAPTER}"
LIMIT: Final = 300.0  # seconds that one command may take
STARTS: Final = 5  # of the client, at most, until it tells of the release


@dataclass(frozen=True, slots=True)
class User:
    """Somebody with a home in the demo's folder."""

    here: Stage
    client: str | None

    def run(self, *words: str, cwd: Path | None = None, given: str | None = None) -> subprocess.CompletedProcess[str]:
        home = self.here.folder / "home"
        home.mkdir(exist_ok=True)
        environment = {name: text for name, text in os.environ.items() if not name.startswith(("REEF_", "PI_", "XDG_"))}
        if (settings := Path.home() / ".npmrc").exists():  # how this machine reaches npm's registry
            environment.setdefault("NPM_CONFIG_USERCONFIG", str(settings))
        environment |= {"HOME": str(home), "PATH": f"{home}/.local/bin:{os.environ['PATH']}", "TERM": "dumb"}
        environment |= {"REEF_TOKEN": self.here.token, "PI_OFFLINE": "1", "NO_PROXY": "127.0.0.1"}
        environment |= {"REEF_CLIENT": self.client} if self.client else {}
        try:
            return subprocess.run(
                words, cwd=cwd or home, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False,
                **({"input": given} if given is not None else {"stdin": subprocess.DEVNULL}),
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise ReefError(f"{' '.join(words)[:80]} did not end in {LIMIT:.0f} s") from None

    def work(self, task: Task, turn: str) -> bool:
        """One task in a folder of its own: whether its check passed. It is reported, or a ReefError."""
        place = self.here.folder / "work" / turn / task.path.partition(".")[0]
        place.mkdir(parents=True)
        (place / "check.py").write_text(tasks.CHECK)
        done = self.run(WRAPPER, "--check", task.check, "-p", task.prompt, cwd=place)
        lines = done.stderr.splitlines()
        said = next((line.partition(": ")[2] for line in lines if line.startswith(f"{task.path}:")), "")
        self.here.say(f"   {task.path}: {said or ('failed' if done.returncode else 'passed')}")
        if not any("; reported as rep_" in line for line in lines):
            raise ReefError(f"the check of {task.path} was not reported: {done.stderr.strip()[-1000:]}")
        return done.returncode == 0


def play(here: Stage, client: str | None) -> dict[str, Any]:
    """The whole story; what came of it."""
    user = User(here, needed(client or os.environ.get("REEF_CLIENT")))
    if user.client is None:
        here.step("A server before the model")
        here.serve("", reports=4)
        here.step("Install pi from it, with the scenario's harness, which is empty")
        install(user)
        here.step("The server again, with a gate that measures with pi itself, in sandboxes")
        here.serve(tasks.jobs(ADAPTER), reports=4, more=places(here.folder / "home/.local/share/reef"))
    else:
        here.step("A server before the model, with a gate that measures with pi itself, in sandboxes")
        here.serve(tasks.jobs(ADAPTER), reports=4, more=places(within(Path(user.client))))
        here.step("Install the scenario's harness, which is empty, for the pi that is here")
        install(user)
    here.step(f'Work: {WRAPPER} --check "python3 check.py FILE" -p "…"')
    before = {task.path: user.work(task, "before") for task in tasks.LIVE}
    failed = [task for task in tasks.LIVE if not before[task.path]]
    here.step(f"{len(failed)} of {len(before)} failed, and the checks reported it; the learner takes it from here")
    release = here.released()
    here.step(f"The next {WRAPPER}")
    notice = heard(user)
    here.say(f"   {notice or '(no notice)'}")
    updated = user.run(WRAPPER, "update")
    here.say("".join(f"   {line}\n" for line in (updated.stdout + updated.stderr).splitlines()).rstrip())
    here.step("The same tasks again")
    after = {task.path: user.work(task, "after") for task in tasks.LIVE}
    here.step("What happened")
    word = {True: "passed", False: "failed"}
    here.table([["task", "before", "after"], *([path, word[before[path]], word[after[path]]] for path in before)])
    here.step("The release: why, what changed, evidence")
    here.page(release)
    return {
        "ok": bool(failed) and all(after.values()) and bool(notice) and updated.returncode == 0,
        "before": before,
        "after": after,
        "notice": notice,
        "updated": updated.returncode,
        "release": release,
    }


def needed(client: str | None) -> str | None:
    """The client's program as an absolute path, if one is named. InputError when what the demo needs is not here."""
    for program, why in (("bwrap", "the gate's episodes run in bubblewrap"), ("node", "pi runs on Node 20.6 or newer")):
        if shutil.which(program) is None:
            raise InputError(f"{program} is missing: {why}. Install it, or see the demo without an agent: --plain")
    if client is None:
        if shutil.which("npm") is None:
            raise InputError("npm is missing, and pi is installed with it; name a pi that is here with --client")
        return None
    found = shutil.which(client) if "/" not in client else client
    if not found or not os.access(found, os.X_OK):
        raise InputError(f"{client} is no program that can be run", param="client")
    return str(Path(found).absolute())


def within(program: Path) -> Path | None:
    """The folder whose node_modules a program is in. None: in none, so that PATH must name it."""
    for each in (program, program.resolve()):
        if "node_modules" in each.parts:
            return Path(*each.parts[: each.parts.index("node_modules")])
    os.environ["PATH"] = f"{program.parent}:{os.environ['PATH']}"
    return None


def places(folder: Path | None) -> str:
    """Where the gate's episodes find the client, as a piece of configuration."""
    return "" if folder is None else f"harness: {{clients: {json.dumps(str(folder))}}}\n"


def install(user: User) -> None:
    """As a person would: the script, piped into a shell."""
    here = user.here
    import httpx

    path = f"/reef/harness/install?adapter={ADAPTER}"
    here.say(f"   curl -fsS -H \"Authorization: Bearer $REEF_TOKEN\" '{here.url}{path}' | bash")
    script = httpx.get(f"{here.url}{path}", headers={"authorization": f"Bearer {here.token}"}, timeout=60)
    if script.status_code != 200:
        raise ReefError(f"the install script was answered with {script.status_code}: {script.text[:500]}")
    done = user.run("bash", given=script.text)
    here.say("".join(f"   {line}\n" for line in (done.stdout + done.stderr).splitlines()).rstrip())
    if done.returncode:
        raise ReefError(f"the install script ended with {done.returncode}")


def heard(user: User) -> str:
    """What the wrapper says of a newer release when it starts the client. It waits 0.3 s for the server and is silent
    when that was too short, as on a busy machine; then the next start says it."""
    for _ in range(STARTS):
        said = user.run(WRAPPER, "-p", "Hello.")
        lines = [line for line in said.stderr.splitlines() if "update" in line and "release" in line]
        if lines:
            return lines[0].strip()
    return ""
