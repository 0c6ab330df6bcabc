"""The scripted model of the demos: an OpenAI-chat server on loopback that does as its instructions say, and no more.

Knows: three kinds of small tasks, and two kinds of instruction, '… begins with the line "X"' and '… ends with the line
"X"', about all files or those of one kind. It reads them in the system text of each request, and in the skills that the
system text lists, when one fits the task (with the client's `read` tool, as a real model would).
Does not know: Reef, the checks, or which instruction would pass them.

Without such an instruction it writes the plain file; with another one it does what that says.
"""

from __future__ import annotations

import http.server
import itertools
import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from typing import Any, Final

NAME: Final = "scripted-1"
_PATH = re.compile(r"`([\w/-]+\.(?:py|md|txt))`")
_FUNCTION = re.compile(r"function `(\w+\([\w, ]*\))` that returns `([^`\n]+)`")
_WORDS = re.compile(r": (.+)$", re.MULTILINE)
_FIRST = re.compile(r"\b(?:begins?|starts?) with the line [\"`]([^\"`\n]+)[\"`]", re.IGNORECASE)
_LAST = re.compile(r"\b(?:ends?) with the line [\"`]([^\"`\n]+)[\"`]", re.IGNORECASE)
_NOT = re.compile(r"\b(?:never|not|no longer|without)\b|n't\b", re.IGNORECASE)
_SKILL = re.compile(r"<description>(.*?)</description>\s*<location>(.*?)</location>", re.DOTALL)
_KINDS: Final = (("python", ".py"), ("changelog", ".md"), ("note", ".txt"))
"""Words by which an instruction says which files it is about."""
_count = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Turn:
    """What the model answers: a text, and perhaps a call of a tool."""

    text: str
    tool: str | None = None
    arguments: Mapping[str, str] | None = None


def turn(body: Mapping[str, Any]) -> Turn:
    """The answer to a chat request, from nothing but what is in it."""
    messages = [message for message in body.get("messages") or () if isinstance(message, dict)]
    system = "\n".join(_text(one.get("content")) for one in messages if one.get("role") in ("system", "developer"))
    asked = [place for place, one in enumerate(messages) if one.get("role") == "user"]
    task = _text(messages[asked[-1]].get("content")) if asked else ""
    path = _PATH.search(task)
    if path is None:
        return Turn(f"I am a scripted model, and I write small files. You said: {' '.join(task.split())[:200]}")
    done = list(_done(messages[asked[-1] :]))
    learnt = "\n".join(result for name, _, result in done if name == "read")
    content = written(path[1], task, f"{system}\n{learnt}")
    tools = {
        str((tool.get("function") or {}).get("name")) for tool in body.get("tools") or () if isinstance(tool, dict)
    }
    if "write" not in tools:
        return Turn(content)
    if any(name == "write" for name, _, _ in done):
        return Turn(f"I wrote {path[1]}.")
    known = {arguments.get("path") for name, arguments, _ in done if name == "read"}
    skill = next((place for place in fitting(system, task) if place not in known), None)
    if skill is not None and "read" in tools:
        return Turn("There is a skill for this.", "read", {"path": skill})
    return Turn(f"I write {path[1]}.", "write", {"path": path[1], "content": content})


def written(path: str, task: str, instructions: str) -> str:
    """The file, as the task and the instructions want it."""
    function, words = _FUNCTION.search(task), _WORDS.search(task)
    lines = [f"def {function[1]}:", f"    return {function[2]}"] if function else [words[1] if words else task]
    first, last = _wanted(_FIRST, path, instructions), _wanted(_LAST, path, instructions)
    return "\n".join([*first, *lines, *last]) + "\n"


def fitting(system: str, task: str) -> list[str]:
    """Where the skills are that have two words or more of their description in common with the task."""
    said = _stems(task)
    return [unescape(place) for what, place in _SKILL.findall(system) if len(said & _stems(unescape(what))) > 1]


def _wanted(form: re.Pattern[str], path: str, instructions: str) -> list[str]:
    """The line that instructions of this form ask for in this file; the last one counts."""
    found = []
    for line in instructions.splitlines():
        kinds = [end for word, end in _KINDS if word in line.lower()]
        about = not kinds or any(path.endswith(end) for end in kinds)
        if about and not _NOT.search(line) and (match := form.search(line)):
            found.append(match[1])
    return found[-1:]


def _stems(text: str) -> set[str]:
    return {word[:5] for word in re.findall(r"[a-z]{5,}", text.lower())}


def _done(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """The tool calls since the task was set: name, arguments, result."""
    results = {one.get("tool_call_id"): _text(one.get("content")) for one in messages if one.get("role") == "tool"}
    for message in messages:
        for call in message.get("tool_calls") or ():
            function = call.get("function") or {}
            try:
                arguments = json.loads(function.get("arguments") or "{}")
            except ValueError:
                arguments = {}
            yield (
                str(function.get("name")),
                arguments if isinstance(arguments, dict) else {},
                results.get(call.get("id"), ""),
            )


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return content if isinstance(content, str) else ""


# --- the server -------------------------------------------------------------------------------------------------------


class Model(http.server.ThreadingHTTPServer):
    """`with Model() as model:` serves on `model.url` until the block ends. `systems` are the system texts it was given,
    the newest last."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Door)
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def __enter__(self) -> Model:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.server_close()


class _Door(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send("application/json", json.dumps({"object": "list", "data": [{"id": NAME, "object": "model"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)))
        made = whole(turn(body), body)
        if not body.get("stream"):
            return self._send("application/json", json.dumps(made))
        return self._send("text/event-stream", events(made, body))

    def _send(self, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def whole(made: Turn, body: Mapping[str, Any]) -> dict[str, Any]:
    """A turn as a chat completion. A token is four characters, as far as this model counts."""
    message: dict[str, Any] = {"role": "assistant", "content": made.text}
    arguments = json.dumps(made.arguments, ensure_ascii=False)
    if made.tool:
        function = {"name": made.tool, "arguments": arguments}
        message["tool_calls"] = [{"id": f"call_{next(_count)}", "type": "function", "function": function}]
    asked, answered = len(json.dumps(body)) // 4, (len(made.text) + len(arguments)) // 4 + 1
    return {
        "id": f"chatcmpl-{next(_count)}",
        "object": "chat.completion",
        "created": 0,
        "model": NAME,
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if made.tool else "stop"}],
        "usage": {"prompt_tokens": asked, "completion_tokens": answered, "total_tokens": asked + answered},
    }


def events(made: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """A completion as a stream of events."""
    choice = made["choices"][0]
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [call | {"index": place} for place, call in enumerate(calls)]
    head = {"id": made["id"], "object": "chat.completion.chunk", "created": 0, "model": NAME}
    chunks = [
        head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        head | {"choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]},
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append(head | {"choices": [], "usage": made["usage"]})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
