"""pi (@earendil-works/pi-coding-agent): chat completions, a folder per tree, sessions as JSON lines.

Knows: pi 0.74.2's files, flags and transcript. Does not know: Reef's server.

The two extensions of the base are ours: one shows an update's notice where there is a screen, one names the session to
Reef and keeps each answer's receipt in pi's own transcript. pi 0.74 reads a header or key as an environment variable's
name when there is one of that name, so the token and the session are given by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from reef.core.nouns import Json
from reef.harness.agents import SESSION, TOKEN, Client, Door, Launch, Placed, dump
from reef.harness.agents.page import page
from reef.harness.agents.transcript import Story, below, lines, newest, receipt, text, usage
from reef.harness.trajectory import Trajectory
from reef.harness.tree import Entry

_ROOMY = 65_536  # tokens of context with which pi's own settings do
_NOTICE = """\
// Shows the update's notice that the wrapper left in the environment, where there is a screen to show it on.
export default function (pi: any) {
  pi.on("session_start", async (_event: any, ctx: any) => {
    const notice = process.env.REEF_NOTICE;
    if (notice && ctx.hasUI) ctx.ui.notify(notice, "info");
    delete process.env.REEF_NOTICE;
  });
}
"""
_SESSION = """\
// Names the session to Reef, and keeps the receipt of each answer in the transcript.
const given = process.env.REEF_SESSION;
export default function (pi: any) {
  pi.on("session_start", async (_event: any, ctx: any) => {
    process.env.REEF_SESSION = given || ctx.sessionManager.getSessionId();
  });
  pi.on("after_provider_response", async (event: any) => {
    const receipt = event.headers?.["x-reef-agent-record-id"];
    if (receipt) pi.appendEntry("reef", { receipt });
  });
}
"""


class Pi:
    name = "pi"
    client = Client("@earendil-works/pi-coding-agent", "0.74.2", "pi", node="20.6", root="PI_CODING_AGENT_DIR")

    def place(self, entry: Entry) -> Sequence[Placed]:
        config = entry.config
        match entry.kind:
            case "rules":
                return [Placed("AGENTS.md", "section", config["text"])]
            case "skill":
                front = {"name": config["name"], "description": config["description"]}
                return [Placed(f"skills/{config['name']}/SKILL.md", text=page(front, config["text"]))]
            case "command":
                front = {"description": config["description"]}
                return [Placed(f"prompts/{config['name']}.md", text=page(front, config["text"]))]
            case "config" if config["agent"] == self.name:
                return [Placed("settings.json", "values", values=config["values"])]
            case "extension" if config["agent"] == self.name:
                return [Placed(f"extensions/{config['file']}", text=config["text"])]
        return []

    def base(self, door: Door) -> Sequence[Placed]:
        provider = {
            "baseUrl": door.url.rstrip("/") + "/v1",
            "api": "openai-completions",
            "apiKey": TOKEN,
            "headers": {"x-reef-scenario": door.scenario, "x-reef-harness": "off", "x-reef-session": SESSION},
            "models": [{"id": door.model, "contextWindow": door.context, "maxTokens": door.output}],
        }
        settings: dict[str, Json] = {
            "defaultProvider": "reef",
            "defaultModel": door.model,
            "enableInstallTelemetry": False,
        }
        if door.context < _ROOMY:  # pi keeps 16,384 tokens free and 20,000 as they are, or summarises at every turn
            settings["compaction"] = {"reserveTokens": door.context // 4, "keepRecentTokens": door.context // 4}
        return [
            Placed("models.json", text=dump({"providers": {"reef": provider}})),
            Placed("settings.json", "values", values=settings),
            Placed("extensions/reef-notice.ts", text=_NOTICE),
            Placed("extensions/reef-session.ts", text=_SESSION),
        ]

    def environment(self, root: Path) -> Mapping[str, str]:
        return {"PI_CODING_AGENT_DIR": str(root), "PI_SKIP_VERSION_CHECK": "1", "PI_TELEMETRY": "0"}

    def launch(self, root: Path, prompt: str) -> Launch:
        """A prompt that begins like an option or a file gets a blank in front, pi having no sign for where they end."""
        words = f" {prompt}" if prompt.startswith(("-", "@")) else prompt
        return Launch(("-p", words), {**self.environment(root), "PI_OFFLINE": "1"})

    def read(self, root: Path) -> Trajectory | None:
        if (path := newest(below(root, "sessions"), ".jsonl", 1)) is None:
            return None
        story, session, kept = Story(), None, None
        for line in lines(path):
            kind = line.get("type") if line else None
            message = line.get("message") if line else None
            if line is None or not isinstance(kind, str) or (kind == "message" and not isinstance(message, dict)):
                story.unread += 1
            elif kind == "session":
                session = line.get("id")
            elif kind == "custom" and line.get("customType") == "reef" and isinstance(line.get("data"), dict):
                kept = receipt(line["data"].get("receipt"))
            elif isinstance(message, dict):
                kept = _message(story, message, kept)
        return story.told(self.name, session)


def _message(story: Story, message: Mapping[str, object], kept: str | None) -> str | None:
    """One message; what is left of the receipt that was kept before it."""
    match message.get("role"):
        case "user":
            story.say("user", text(message.get("content")))
        case "toolResult":
            failed = message.get("isError") is True
            story.result(message.get("toolCallId"), text(message.get("content")), failed=failed)
        case "assistant":
            said = story.say("assistant", text(message.get("content")))
            said.receipt = kept or receipt(message.get("responseId"))
            if message.get("stopReason") in ("error", "aborted"):
                said.error = str(message.get("errorMessage") or message["stopReason"])
            if isinstance(used := message.get("usage"), dict):
                parts = [used.get(name) or 0 for name in ("input", "cacheRead", "cacheWrite")]
                asked = sum(part for part in parts if isinstance(part, int))
                said.usage = usage(asked, used.get("output"))
            content = message.get("content")
            for part in content if isinstance(content, list) else []:
                if isinstance(part, dict) and part.get("type") == "toolCall":
                    story.call(said, part.get("id"), part.get("name"), part.get("arguments"))
            return None
    return kept
