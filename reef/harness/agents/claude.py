"""Claude Code (@anthropic-ai/claude-code): the Messages API only, settings and hooks in settings.json.

Knows: Claude Code 2.1.332's files, flags and transcript. Does not know: Reef's server.

The token is asked for by a fixed command, printenv, so that it is in no file; keys that the user has for another
provider are emptied, so that they are not sent here. A script of an `extension` lies in hooks/, where a `config` may
name it. Text that Claude Code would run or read by itself when it shows a page is made plain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from reef.core.nouns import Json
from reef.harness.agents import TOKEN, Client, Door, Launch, Placed
from reef.harness.agents.page import closed, inert, page
from reef.harness.agents.transcript import Said, Story, below, lines, newest, receipt, text, usage
from reef.harness.trajectory import Trajectory
from reef.harness.tree import Entry

_TOOLS: Final = "Bash,Edit,Glob,Grep,NotebookEdit,Read,Skill,SlashCommand,Task,TodoWrite,Write"
_TELL: Final = "const n=process.env.REEF_NOTICE;if(n)console.log(JSON.stringify({systemMessage:n}))"
NOTICE: Final = f"""[ -z "$REEF_NOTICE" ] || "${{REEF_NODE:-node}}" -e '{_TELL}' 2>/dev/null || :"""
"""A fixed command: what the notice says is read by Node from the environment and never by a shell."""
RUN: Final = """[ -z "$REEF_RUN" ] || cat >"$REEF_RUN" 2>/dev/null || :"""
"""A fixed command: tells the wrapper which session its run became, so that a report finds it."""


class Claude:
    name = "claude"
    client = Client("@anthropic-ai/claude-code", "2.1.332", "claude", node="18.0", root="CLAUDE_CONFIG_DIR")

    def place(self, entry: Entry) -> Sequence[Placed]:
        config = entry.config
        match entry.kind:
            case "rules":
                return [Placed("CLAUDE.md", "section", closed(config["text"]))]
            case "skill":
                front = {"name": config["name"], "description": config["description"]}
                return [Placed(f"skills/{config['name']}/SKILL.md", text=page(front, closed(inert(config["text"]))))]
            case "command":
                front = {"description": config["description"]}
                return [Placed(f"commands/{config['name']}.md", text=page(front, closed(inert(config["text"]))))]
            case "config" if config["agent"] == self.name:
                return [Placed("settings.json", "values", values=config["values"])]
            case "extension" if config["agent"] == self.name:
                return [Placed(f"hooks/{config['file']}", text=config["text"])]
        return []

    def base(self, door: Door) -> Sequence[Placed]:
        tiers = ("HAIKU", "OPUS", "SONNET")
        off = ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_TELEMETRY")
        environment = {
            "ANTHROPIC_BASE_URL": door.url.rstrip("/"),
            "ANTHROPIC_CUSTOM_HEADERS": f"x-reef-scenario: {door.scenario}\nx-reef-harness: off",
            "ANTHROPIC_MODEL": door.model,
            "ANTHROPIC_API_KEY": "",
            "ANTHROPIC_AUTH_TOKEN": "",
            "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(door.context),  # else it assumes a million
            "SLASH_COMMAND_TOOL_CHAR_BUDGET": str(max(16_000, door.context // 2)),  # else it lists skills by name only
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(door.output),
            "CLAUDE_CODE_MAX_RETRIES": "3",  # ten are 40 silent seconds for a wrong token
            "DISABLE_ERROR_REPORTING": "1",
            **{f"ANTHROPIC_DEFAULT_{tier}_MODEL": door.model for tier in tiers},
            **dict.fromkeys(off, "1"),
        }
        hooks = [{"type": "command", "command": command, "timeout": 5} for command in (NOTICE, RUN)]
        settings: dict[str, Json] = {
            "env": environment,
            "apiKeyHelper": f"printenv {TOKEN}",
            "hooks": {"SessionStart": [{"hooks": hooks}]},
        }
        return [Placed("settings.json", "values", values=settings)]

    def environment(self, root: Path) -> Mapping[str, str]:
        return {"CLAUDE_CONFIG_DIR": str(root)}

    def launch(self, root: Path, prompt: str) -> Launch:
        flags = ("-p", "--allowedTools", _TOOLS, "--permission-mode", "acceptEdits")
        return Launch((*flags, "--", prompt), self.environment(root))

    def read(self, root: Path) -> Trajectory | None:
        if (path := newest(below(root, "projects"), ".jsonl", 1)) is None:
            return None
        story, session, known = Story(), None, dict[str, Said]()
        for line in lines(path):
            if line is None or not isinstance(line.get("type"), str):
                story.unread += 1
                continue
            session = session or line.get("sessionId")
            if line["type"] in ("user", "assistant") and line.get("isSidechain") is not True:
                message = line.get("message")
                if not isinstance(message, dict):
                    story.unread += 1
                elif line["type"] == "user":
                    _user(story, message, hidden=line.get("isMeta") is True)
                else:
                    _assistant(story, line, message, known)
        return story.told(self.name, session)


def _user(story: Story, message: dict[str, Any], *, hidden: bool) -> None:
    """A person's words, or what tools returned, which the Messages API also gives to the user."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    results = [part for part in parts if isinstance(part, dict) and part.get("type") == "tool_result"]
    for part in results:
        story.result(part.get("tool_use_id"), text(part.get("content")), failed=part.get("is_error") is True)
    if not results:
        story.say("system" if hidden else "user", text(content))


def _assistant(story: Story, line: dict[str, Any], message: dict[str, Any], known: dict[str, Said]) -> None:
    """One block of an answer: each is a line of its own, with the answer's id."""
    id_ = message.get("id")
    said = known.get(id_) if isinstance(id_, str) else None
    if said is None:
        said = story.say("assistant")
        if isinstance(id_, str):
            known[id_] = said
    said.receipt = said.receipt or receipt(line.get("requestId"), id_)
    words = text(message.get("content"))
    if line.get("isApiErrorMessage") is True:
        said.error = words or "error"
    elif words:
        said.text = f"{said.text}\n{words}" if said.text else words
    if isinstance(used := message.get("usage"), dict):
        parts = [used.get(f"{name}input_tokens") or 0 for name in ("", "cache_read_", "cache_creation_")]
        asked = sum(part for part in parts if isinstance(part, int))
        said.usage = usage(asked, used.get("output_tokens")) or said.usage
    content = message.get("content")
    for part in content if isinstance(content, list) else []:
        if isinstance(part, dict) and part.get("type") == "tool_use":
            story.call(said, part.get("id"), part.get("name"), part.get("input"))
