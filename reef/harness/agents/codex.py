"""codex (@openai/codex): the Responses API only, settings in TOML, rollouts as JSON lines.

Knows: codex 0.171.0's files, flags and rollouts. Does not know: Reef's server.

codex has no commands of its own any more, so a command becomes a skill of its name. It shows no notice without asking
to trust a hook first: the wrapper prints it. A script of an `extension` lies in hooks/, where a `config` may name it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reef.core.nouns import Json
from reef.harness.agents import SESSION, TOKEN, Client, Door, Launch, Placed
from reef.harness.agents.page import page
from reef.harness.agents.transcript import Said, Story, below, lines, newest, parse, receipt, text, usage
from reef.harness.trajectory import Trajectory
from reef.harness.tree import MAX_TREE, Entry

_EXIT = re.compile(r"(?:Process exited with code|Exit code:) (\d+)")


class Codex:
    name = "codex"
    client = Client("@openai/codex", "0.171.0", "codex", node="16.0", root="CODEX_HOME")

    def place(self, entry: Entry) -> Sequence[Placed]:
        config = entry.config
        match entry.kind:
            case "rules":
                return [Placed("AGENTS.md", "section", config["text"])]
            case "skill" | "command":
                front = {"name": config["name"], "description": config["description"]}
                return [Placed(f"skills/{config['name']}/SKILL.md", text=page(front, config["text"]))]
            case "config" if config["agent"] == self.name:
                return [Placed("config.toml", "values", values=config["values"])]
            case "extension" if config["agent"] == self.name:
                return [Placed(f"hooks/{config['file']}", text=config["text"])]
        return []

    def base(self, door: Door) -> Sequence[Placed]:
        provider = {
            "name": "Reef",
            "base_url": door.url.rstrip("/") + "/v1",
            "env_key": TOKEN,
            "wire_api": "responses",
            "http_headers": {"x-reef-scenario": door.scenario, "x-reef-harness": "off"},
            "env_http_headers": {"x-reef-session": SESSION},
        }
        settings: dict[str, Json] = {
            "model": door.model,
            "model_provider": "reef",
            "model_providers": {"reef": provider},
            "model_context_window": door.context,
            "project_doc_max_bytes": MAX_TREE,  # rules are read whole: 32 KiB of them are otherwise
            "check_for_update_on_startup": False,
            "analytics": {"enabled": False},
            "feedback": {"enabled": False},
        }
        return [Placed("config.toml", "values", values=settings)]

    def environment(self, root: Path) -> Mapping[str, str]:
        return {"CODEX_HOME": str(root)}

    def launch(self, root: Path, prompt: str) -> Launch:
        flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
        return Launch(("exec", *flags, "--", prompt), self.environment(root))

    def read(self, root: Path) -> Trajectory | None:
        if (path := newest(below(root, "sessions"), ".jsonl", 3)) is None:
            return None
        story, session = Story(), None
        for line in lines(path):
            payload = line.get("payload") if line else None
            if line is None or not isinstance(payload, dict):
                story.unread += 1
            elif line.get("type") == "session_meta":
                session = session or payload.get("id")
            elif line.get("type") == "response_item":
                _item(story, payload)
            elif line.get("type") in ("event_msg", "token_usage_record"):
                _event(story, line["type"], payload)
        return story.told(self.name, session)


def _item(story: Story, item: dict[str, Any]) -> None:
    match item.get("type"):
        case "message" if item.get("role") == "assistant":
            said, words = _open(story), text(item.get("content"))
            said.text = f"{said.text}\n{words}" if said.text else words
        case "message":
            story.say("user" if item.get("role") == "user" else "system", text(item.get("content")))
        case "function_call" | "custom_tool_call":
            given = item.get("arguments", item.get("input"))
            arguments = parse(given) if isinstance(given, str) else given
            story.call(_open(story), item.get("call_id"), item.get("name"), given if arguments is None else arguments)
        case "function_call_output" | "custom_tool_call_output":
            words = text(item.get("output"))
            found = _EXIT.search(words[:500])
            story.result(item.get("call_id"), words, failed=bool(found and found[1] != "0"))


def _event(story: Story, kind: str, payload: dict[str, Any]) -> None:
    if kind == "token_usage_record":
        said = story.answer()
        said.receipt = said.receipt or receipt(payload.get("response_id"))
        if isinstance(used := payload.get("usage"), dict):
            said.usage = usage(used.get("input_tokens"), used.get("output_tokens"))
    elif payload.get("type") == "task_complete" and isinstance(error := payload.get("error"), dict):
        story.say("assistant").error = str(error.get("message") or "error")


def _open(story: Story) -> Said:
    """The answer that is being told: a new one begins after the last one's usage, or what its calls returned."""
    said = story.said[-1] if story.said else None
    told = said is not None and (said.usage or said.receipt or any(call.result is not None for call in said.calls))
    return story.say("assistant") if told or said is None else story.answer()
