"""Between text and tokens: the model's chat template and tokenizer, and text back out of sampled tokens as they come.

Knows: tokenizer.json, the chat template (jinja2 in its sandbox, rendered as transformers does), stop strings, UTF-8.
Does not know: torch, requests, or how tokens are drawn.

- Text that was handed out is never taken back: a token that ends inside a character, or a tail that could become a stop
  string, waits for the tokens that decide it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from reef.core.errors import ContextError, InputError
from reef.core.nouns import Json
from reef.engines.local.layout import read_json
from reef.engines.local.tools import Offer, opened, overlap, tell

BROKEN = "�"  # what a decoder writes for bytes that are not (yet) a character
LONG = 8_000  # characters from which a text is made into tokens without holding the interpreter (and in a thread)
PROBE = 16  # characters for each token of a context: nearly any text so long has more tokens than fit


class _Generation(Extension):
    """`{% generation %}` marks the assistant's own text for training; for rendering it is transparent."""

    tags = {"generation"}  # noqa: RUF012 (the library's own way)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Text:
    """The tokenizer and chat template of one model folder."""

    def __init__(self, folder: Path) -> None:
        config = read_json(folder / "tokenizer_config.json")
        try:
            self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self.longest = max(map(len, self.tokenizer.get_vocab(with_added_tokens=True)))  # token, in characters
        except Exception as error:  # the library raises plain Exception, even for a file that is not there
            raise InputError(
                f"{folder / 'tokenizer.json'} cannot be read ({error}); fetch the model again", param="model"
            ) from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        source, extra = _templates(folder, config)
        self._results = "tool" in source  # whether the template is left to show past calls and results
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)  # as transformers: local time
        try:
            self._template = environment.from_string(source)
            knowing = extra or source
            self._calling = environment.from_string(knowing) if re.search(r"\btools\b", knowing) else None
        except TemplateError as error:
            raise InputError(f"{folder}: the chat template cannot be read ({error})", param="model") from None
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        self._special = {name: _content(config[name]) for name in names if config.get(name) is not None}

    def render(self, messages: Sequence[dict[str, Json]], tools: Offer | None = None, *, generate: bool = True) -> str:
        """The prompt for the next assistant message, exactly as the model's own template writes it; without `generate`
        the messages alone, as they stand in a later prompt.

        A template that names `tools` gets them; for any other they are told in words, see `tools.tell`.
        """
        try:
            if tools is None:
                told = [dict(message) if self._results else degrade(message) for message in messages]
                return self._fill(self._template, told, generate=generate)
            if self._calling is None:
                # Also what the template has of its own for past calls: a model should see one form of them only.
                return self._fill(self._template, tell(messages, tools), generate=generate)
            offered = list(tools.sent) if tools.open else None
            try:
                return self._fill(self._calling, [opened(message) for message in messages], offered, generate=generate)
            except TypeError:  # some write arguments down as the text that they are in a request
                return self._fill(self._calling, [dict(message) for message in messages], offered, generate=generate)
        except Exception as error:  # a template is a program of somebody else's: whatever it raises, it refuses
            raise InputError(f"the model's chat template refuses these messages: {error}", param="messages") from None

    def _fill(
        self, template: Template, messages: list[dict[str, Json]], tools: Json = None, *, generate: bool = True
    ) -> str:
        for message in messages:
            if message["role"] == "developer":
                message["role"] = "system"
        return template.render(messages=messages, tools=tools, add_generation_prompt=generate, **self._special)

    def encode(self, text: str) -> list[int]:
        if len(text) < LONG:
            found: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        else:  # only the batch form lets go of the interpreter, which everything else in the process needs meanwhile
            found = self.tokenizer.encode_batch([text], add_special_tokens=False)[0].ids
        return found

    def fit(self, text: str, context: int) -> list[int]:
        """The tokens of a prompt. ContextError, before all of it is made into tokens, when they cannot be few enough.

        A prompt a little too long still comes back whole: its caller can name the number.
        """
        too_long = len(text) > context * self.longest
        if not too_long and len(text) > context * PROBE:
            # The end of the piece may be cut inside a token, so only a piece that is clearly too long counts.
            too_long = len(self.encode(text[: context * PROBE])) > context + context // 4
        if too_long:
            raise ContextError(
                f"this model's context is {context} tokens; the messages (with tools) are {len(text)} characters, "
                "which is more tokens than that. Send less, or use a model with a larger context",
                param="messages",
            )
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        found: str = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return found

    def piece(self, token: int) -> str:
        """One token's own text; special tokens have none."""
        return self.decode([token])


def degrade(message: dict[str, Json]) -> dict[str, Json]:
    """A message for a template that knows no tools: results become the user's words, calls the assistant's."""
    role, content = message["role"], message["content"]
    if role in ("tool", "function"):
        name = message.get("name")
        return {"role": "user", "content": f"Result of {name}:\n{content}" if name else f"Tool result:\n{content}"}
    if role == "assistant" and message.get("tool_calls"):
        calls = [call.get("function", call) for call in message["tool_calls"] if isinstance(call, dict)]
        said = json.dumps(calls, ensure_ascii=False)
        return {"role": role, "content": f"{content}\n{said}" if content else said}
    return {**message}


def _templates(folder: Path, config: dict[str, Any]) -> tuple[str, str]:
    """The model's chat template, and the one it has for requests with tools; empty: it has none of its own."""
    separate = folder / "chat_template.jinja"
    if separate.exists():
        try:
            return separate.read_text(encoding="utf-8"), ""
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{separate} cannot be read ({error}); fetch the model again", param="model") from None
    found, extra = config.get("chat_template"), None
    if isinstance(found, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found, extra = named.get("default"), named.get("tool_use")
    if not isinstance(found, str):
        raise InputError(
            f"{folder} has no chat template (it may be a base model); use an instruction-tuned model, or put one into "
            "chat_template.jinja",
            param="model",
        )
    return found, extra if isinstance(extra, str) else ""


def _content(token: Json) -> str:
    return str(token.get("content", "") if isinstance(token, dict) else token)


def _tojson(value: Json, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TemplateError(message)


class Stream:
    """Text out of tokens, one by one: only whole characters, and nothing that may turn out to be a stop string."""

    __slots__ = ("_held", "_ids", "_known", "_start", "_stops", "_text", "stopped")

    def __init__(self, text: Text, stops: Sequence[str] = ()) -> None:
        self._text, self._stops = text, tuple(stops)
        self._ids: list[int] = []
        self._start = 0  # tokens before this one are fully handed on
        self._known = 0  # tokens up to this one gave whole characters
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """The text that is certain now. After a stop string `stopped` is set and nothing more comes."""
        self._ids.append(token)
        before = self._text.decode(self._ids[self._start : self._known])
        now = self._text.decode(self._ids[self._start :])
        # A few tokens of context stay in front, since some tokenizers write a token's space only after another.
        if now.endswith(BROKEN) or len(now) <= len(before):
            return ""
        self._start, self._known = self._known, len(self._ids)
        return self._release(now[len(before) :])

    def finish(self) -> str:
        """What is left at the end: a broken character as it is, a tail that was no stop string after all."""
        if self.stopped:
            return ""
        before = self._text.decode(self._ids[self._start : self._known])
        rest = self._text.decode(self._ids[self._start :])[len(before) :]
        self._known = len(self._ids)
        found = self._release(rest) if rest else ""
        if self.stopped:
            return found
        found, self._held = found + self._held, ""
        return found

    def _release(self, new: str) -> str:
        if not self._stops:
            return new
        text = self._held + new
        places = [place for place in (text.find(stop) for stop in self._stops) if place >= 0]
        if places:
            self.stopped, self._held = True, ""
            return text[: min(places)]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]
