"""Where a demo plays: a folder, the scripted model, a server before it, and a narrator.

Knows: how they are started and ended, how long a release is waited for, how its page is printed.
Does not know: the story.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from reef.cli import state
from reef.cli.demo.model import NAME, Model
from reef.core.errors import InputError, ReefError, WireError
from reef.study import server as serving

SCENARIO: Final = "demo"
PATIENCE: Final = 900.0  # seconds in which a release must be there
LOOK: Final = 1.0  # seconds between two looks at the status
EIGHTH: Final = 8  # steps of a progress that are told
_SCRIPTED = """\
What is scripted: the model (it does small tasks, and follows what its instructions say, no more) and the proposer (it
makes instructions of what checks said). Everything else is real."""
_CONFIG = """\
reef:
  host: 127.0.0.1
  port: {port}
  state_dir: {state}
  default_scenario: {scenario}
  create_scenarios: false
  engine: model
  recipe: harness_evolve
  batch_size: {reports}
  proposer: reef.cli.demo.proposer:propose
engines:
  model: {{kind: upstream, url: "{model}", model: {name}}}
"""
_GATE = "gate: {{policy: better, suite: suite.jsonl, tasks: {tasks}, least: {tasks}, repeats: 1}}\n"


@dataclass(slots=True)
class Stage:
    """`folder` is the demo's own. After `serve`, `url` and `token` are the server's."""

    folder: Path
    model: Model
    out: IO[str]
    url: str = ""
    token: str = ""
    began: float = field(default_factory=time.monotonic)
    _child: subprocess.Popen[bytes] | None = None

    def say(self, text: str = "") -> None:
        print(text, file=self.out, flush=True)

    def step(self, text: str) -> None:
        self.say(f"\n== {text} ({time.monotonic() - self.began:.0f} s)")

    def serve(self, suite: str, *, reports: int, more: str = "") -> None:
        """Start a server whose gate measures on this suite (guards only, where it is empty); `reports` make one
        proposal. One that runs is ended first."""
        self.close()
        port = int(self.url.rpartition(":")[2]) if self.url else serving.free_port()
        given = {"port": port, "state": self.folder / "state", "scenario": SCENARIO, "reports": reports}
        given |= {"model": self.model.url, "name": NAME, "tasks": suite.count("\n")}
        config = self.folder / "reef.yaml"
        config.write_text((_CONFIG + (_GATE if suite else "")).format(**given) + more)
        (self.folder / "suite.jsonl").write_text(suite)
        log = self.folder / "serve.log"
        self.url = f"http://127.0.0.1:{port}"
        self._child = serving.start(["-c", str(config)], log, bound=True)
        serving.await_start(self._child, self.url, log)
        self.token = state.read_token(self.folder / "state") or ""

    def get(self, path: str, **query: Any) -> Any:
        return self._ask("GET", path, params=query)

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._ask("POST", path, json=body)

    def _ask(self, method: str, path: str, **how: Any) -> Any:
        import httpx

        try:
            headers = {"authorization": f"Bearer {self.token}"}
            answer = httpx.request(method, f"{self.url}{path}", headers=headers, timeout=60, **how)
        except httpx.HTTPError as error:
            raise WireError(f"the demo's server did not answer ({type(error).__name__}); see {self._log}") from None
        if answer.status_code != 200:
            raise ReefError(f"{method} {path} was answered with {answer.status_code}: {answer.text[:500]}")
        return answer.json()

    @property
    def _log(self) -> Path:
        return self.folder / "serve.log"

    def released(self) -> dict[str, Any]:
        """The next release, with what the learner does meanwhile; ReefError when the candidate comes to nothing."""
        told, deadline = "", time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            found = self.get("/reef/status")["scenarios"][SCENARIO]
            part = ((found.get("learner") or {}).get("parts") or {}).get("harness") or {}
            if (found.get("seq") or 0) > 0:
                return dict(self.get(f"/reef/scenarios/{SCENARIO}/releases/{found['release_id']}"))
            if (last := part.get("last")) and last["verdict"] in ("reject", "hold"):
                raise ReefError(f"the candidate was not released ({last['verdict']}): {last['reason']}")
            if part.get("error"):
                raise ReefError(f"the learner cannot go on: {part['error']}; see {self._log}")
            if (now := _doing(part)) != told:
                told = now
                self.say(f"   {now}")
            time.sleep(LOOK)
        raise ReefError(f"no release came in {PATIENCE:.0f} s; see {self._log}")

    def page(self, release: Mapping[str, Any]) -> None:
        """The release's page, as `reef why` prints it."""
        words = ["why", release["release_id"], "--url", self.url, "--token", self.token, "-s", SCENARIO, "-n", "3"]
        done = subprocess.run(
            [sys.executable, "-m", "reef", *words], cwd=self.folder, capture_output=True, text=True, check=False
        )
        self.say(done.stdout + done.stderr)

    def table(self, rows: Sequence[Sequence[str]]) -> None:
        wide = [max(len(row[place]) for row in rows) for place in range(len(rows[0]))]
        for row in rows:
            self.say("   " + "  ".join(cell.ljust(width) for cell, width in zip(row, wide, strict=True)).rstrip())

    def close(self) -> None:
        if self._child is not None:
            serving.stop(self._child)
            self._child = None


@contextlib.contextmanager
def stage(keep: Path | None, out: IO[str]) -> Iterator[Stage]:
    """A stage that is gone when the block ends, but for its folder where it is to be kept."""
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise InputError(f"{keep} is there already and not empty; name a new folder to keep", param="keep")
    folder = keep.absolute() if keep is not None else Path(tempfile.mkdtemp(prefix="reef-demo-"))
    folder.mkdir(parents=True, exist_ok=True)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with Model() as model:
        here = Stage(folder, model, out)
        try:
            here.say(_SCRIPTED)
            yield here
        finally:
            here.close()
            signal.signal(signal.SIGTERM, before)
            if keep is None:
                shutil.rmtree(folder, ignore_errors=True)
            else:
                here.say(f"everything is kept in {folder}; `reef serve -c {folder / 'reef.yaml'}` needs its model back")


def _doing(part: Mapping[str, Any]) -> str:
    """What the learner is at, in a line."""
    words = {"waiting": "reads the reports", "searching": "makes an edit", "evaluating": "the gate measures it"}
    said = words.get(str(part.get("state")), str(part.get("state") or "starts"))
    if progress := part.get("progress"):
        stage, done, total = progress
        said += f": {stage}, {done - done % max(1, total // EIGHTH)} of {total}"
    return said
