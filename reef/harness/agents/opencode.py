"""opencode: chat completions through its built-in AI SDK, plugins, sessions in SQLite.

Knows: opencode 1.18.33's files, flags and tables. Does not know: Reef's server.

opencode writes its sessions where XDG_DATA_HOME says; OPENCODE_DB puts the database into the config root, so that a
tree has its own. It sends its session's id by itself, and shows no answer's headers or id: its transcript has receipts
only where they are told in the message.

At each start it installs the types of plugins with npm into every config folder whose lock file does not name them. The
base says that they are there: plugins run without them, and nothing waits for a registry.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from reef.harness.agents import SESSION, TOKEN, Client, Door, Launch, Placed, dump
from reef.harness.agents.page import coded, inert, page
from reef.harness.agents.transcript import Said, Story, below, inner, opened, parse, receipt, usage
from reef.harness.trajectory import Trajectory
from reef.harness.tree import Entry

_DATABASE: Final = "opencode.db"
_CONFIG: Final = "config"  # stands for ~/.config where nobody is at home
_EMPTY: Final = "Nothing is installed here: plugins run without the types of @opencode-ai/plugin.\n"
_LARGEST: Final = 256 * 1024 * 1024  # bytes of a database that is read
_ROWS: Final = 100_000
_STEPS: Final = 2_000  # of 10,000 instructions of SQLite each: a table may be a view without end
_NOTICE = """\
// Shows the update's notice that the wrapper left in the environment.
export const ReefNotice = async ({ client }) => {
  const notice = process.env.REEF_NOTICE;
  if (!notice) return {};
  let shown = false;
  return {
    event: async ({ event }) => {
      if (shown || event.type !== "session.created") return;
      shown = true;
      try {
        await client.tui.showToast({ body: { title: "Reef", message: notice, variant: "info" } });
      } catch {}
    },
  };
};
"""


class OpenCode:
    name = "opencode"
    client = Client("opencode-ai", "1.18.33", "opencode", node="18.0", root="OPENCODE_CONFIG_DIR")

    def place(self, entry: Entry) -> Sequence[Placed]:
        config = entry.config
        match entry.kind:
            case "rules":
                return [Placed("AGENTS.md", "section", config["text"])]
            case "skill":
                front = {"name": config["name"], "description": config["description"]}
                return [Placed(f"skill/{config['name']}/SKILL.md", text=page(front, config["text"]))]
            case "command":
                front = {"description": config["description"]}
                return [Placed(f"command/{config['name']}.md", text=page(front, coded(inert(config["text"]))))]
            case "config" if config["agent"] == self.name:
                return [Placed("opencode.json", "values", values=config["values"])]
            case "extension" if config["agent"] == self.name:
                return [Placed(f"plugin/{config['file']}", text=config["text"])]
        return []

    def base(self, door: Door) -> Sequence[Placed]:
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": "Reef",
            "options": {
                "baseURL": door.url.rstrip("/") + "/v1",
                "apiKey": f"{{env:{TOKEN}}}",
                "headers": {
                    "x-reef-scenario": door.scenario,
                    "x-reef-harness": "off",
                    "x-reef-session": f"{{env:{SESSION}}}",  # empty when there is none, and then opencode's own counts
                },
            },
            "models": {door.model: {"limit": {"context": door.context, "output": door.output}}},
        }
        settings = {
            "$schema": "https://opencode.ai/config.json",  # else it writes that itself, and the file counts as changed
            "provider": {"reef": provider},
            "model": f"reef/{door.model}",
            "small_model": f"reef/{door.model}",
            "share": "disabled",
            "autoupdate": False,
        }
        lock = dump({"lockfileVersion": 3, "packages": {"": {"dependencies": {"@opencode-ai/plugin": "*"}}}})
        quiet = [Placed(f"{folder}package-lock.json", text=lock) for folder in ("", f"{_CONFIG}/opencode/")]
        empty = [Placed(f"{folder}node_modules/README.md", text=_EMPTY) for folder in ("", f"{_CONFIG}/opencode/")]
        notice = Placed("plugin/reef-notice.js", text=_NOTICE)
        return [Placed("opencode.json", "values", values=settings), notice, *quiet, *empty]

    def environment(self, root: Path) -> Mapping[str, str]:
        off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")
        places = {"OPENCODE_CONFIG_DIR": str(root), "OPENCODE_DB": str(root / _DATABASE)}
        return places | {f"OPENCODE_DISABLE_{name}": "1" for name in off}

    def launch(self, root: Path, prompt: str) -> Launch:
        apart = {"XDG_CONFIG_HOME": str(root / _CONFIG)}  # else the home's own config folder would be installed to
        return Launch(("run", "--auto", "--", prompt), {**self.environment(root), **apart})

    def read(self, root: Path) -> Trajectory | None:
        with _copy(root) as path:
            if path is None:
                return None
            story = Story()
            try:
                with contextlib.closing(sqlite3.connect(path)) as kept:
                    session = _session(kept, story)
            except sqlite3.Error:
                return Trajectory(self.name, "", (), 1)
        return None if session is None else story.told(self.name, session)


@contextlib.contextmanager
def _copy(root: Path) -> Iterator[Path | None]:
    """The database and its log in a folder of our own: SQLite writes when it reads, and we don't write in the root."""
    with tempfile.TemporaryDirectory() as folder:
        for name in (_DATABASE, f"{_DATABASE}-wal"):
            place = below(root, name)
            if place is None:
                continue
            with opened(place) as file:
                found = os.fstat(file.fileno()) if file else None
                if file and found and stat.S_ISREG(found.st_mode) and found.st_size <= _LARGEST:
                    with (Path(folder) / name).open("wb") as made:
                        shutil.copyfileobj(file, made)
        path = Path(folder) / _DATABASE
        yield path if path.exists() else None


def _session(kept: sqlite3.Connection, story: Story) -> str | None:
    """Tells the newest session that no other began; its id, None when there is no session."""
    ticks = itertools.count()
    kept.set_progress_handler(lambda: next(ticks) > _STEPS, 10_000)
    kept.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 16 * 1024 * 1024)
    kept.text_factory = lambda data: data.decode("utf-8", "replace")
    kept.execute("PRAGMA trusted_schema = OFF")
    newest = "SELECT id FROM session WHERE parent_id IS NULL ORDER BY time_created DESC, id DESC LIMIT 1"
    if (row := kept.execute(newest).fetchone()) is None or not isinstance(row[0], str):
        return None
    moves: dict[str, Said | None] = {}
    asked = "SELECT id, data FROM message WHERE session_id = ? ORDER BY time_created, id LIMIT ?"
    for id_, data in kept.execute(asked, (row[0], _ROWS)):
        moves[id_] = _message(story, _object(data))
    parts = (
        "SELECT p.message_id, p.data FROM part p JOIN message m ON m.id = p.message_id WHERE m.session_id = ?"
        " ORDER BY p.time_created, p.id LIMIT ?"
    )
    for id_, data in kept.execute(parts, (row[0], _ROWS)):
        part, said = _object(data), moves.get(id_)
        if part is None:
            story.unread += 1
        elif said is not None:
            _part(story, said, part)
    return row[0]


def _object(data: Any) -> dict[str, Any] | None:
    return parse(data) if isinstance(data, str | bytes) else None


def _message(story: Story, message: dict[str, Any] | None) -> Said | None:
    role = message.get("role") if message else None
    if message is None or role not in ("user", "assistant"):
        story.unread += 1
        return None
    said = story.say(role)
    tokens = inner(message.get("tokens"))
    counts = [tokens.get("input"), *(inner(tokens.get("cache")).get(name) or 0 for name in ("read", "write"))]
    if all(isinstance(count, int) for count in counts):
        said.usage = usage(sum(counts), tokens.get("output"))
    if error := inner(message.get("error")):
        told = inner(error.get("data"))
        said.error = str(told.get("message") or error.get("name") or "error")
        said.receipt = receipt(inner(told.get("responseHeaders")).get("x-reef-agent-record-id"))
    return said


def _part(story: Story, said: Said, part: dict[str, Any]) -> None:
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        said.text = f"{said.text}\n{part['text']}" if said.text else part["text"]
    for about in inner(part.get("metadata")).values():
        said.receipt = said.receipt or receipt(inner(about).get("responseId"), inner(about).get("itemId"))
    if part.get("type") != "tool":
        return
    state = inner(part.get("state"))
    story.call(said, part.get("callID"), part.get("tool"), state.get("input"))
    if state.get("status") in ("completed", "error"):
        words = state.get("error") if state["status"] == "error" else state.get("output")
        failed = state["status"] == "error" or inner(state.get("metadata")).get("exit") not in (None, 0)
        story.result(part.get("callID"), words if isinstance(words, str) else "", failed=failed)
