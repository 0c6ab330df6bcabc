"""What an answer is worth, 0 to 1: exact, contains, regex, number, schema, code, and the doors to `tests` and `judge`.

Knows: how a scorer is written down, `{use: number, answer: 5}`, who may write which, and what no score can be.
Does not know: tasks, engines' answers, or what follows from a score.

A scorer's dataclass fields are its keys. "Not judged" is a value, None with a note, for what is the scorer's own fault:
a pattern that takes too long, a callable that raises, a score that is no number from 0 to 1. It is never a 0.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import inspect
import json
import math
import numbers
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from reef.config.check import Lookup, arguments, choice
from reef.config.file import Place, Where
from reef.core.errors import ConfigError
from reef.core.load import load
from reef.core.nouns import Cost, Json
from reef.core.text import deeper
from reef.evaluation import Price, Score, Scorer, Task
from reef.evaluation.worker import Unsettled, match

if TYPE_CHECKING:
    from reef.engines import Engine

SCORERS = {
    "exact": "reef.evaluation.scorers:Exact",
    "contains": "reef.evaluation.scorers:Contains",
    "regex": "reef.evaluation.scorers:Regex",
    "number": "reef.evaluation.scorers:Number",
    "schema": "reef.evaluation.scorers:Schema",
    "code": "reef.evaluation.scorers:Code",
    "tests": "reef.evaluation.sandbox:Tests",
    "judge": "reef.evaluation.judge:Judge",
}
HARMLESS = frozenset({"exact", "contains", "regex", "number", "schema"})
"""They run nothing that an answer or a stranger wrote, reach no network and cost nothing."""

Trust = Literal["configuration", "file", "request"]
"""Who wrote a scorer down. The configuration may use all of them, a file of tasks all but `code` (it names what is
imported), a request or a report's metadata the harmless ones."""

LONGEST = 4096
"""Characters of a pattern or schema in a request, as JSON: checking a long one takes a while."""

_ALLOWED: Mapping[Trust, frozenset[str]] = {
    "configuration": frozenset(SCORERS),
    "file": frozenset(SCORERS) - {"code"},
    "request": HARMLESS,
}
_VERSION = "1"  # of what the scorers here make of an answer; a change of it changes every key
_NUMBER = re.compile(r"(?:(?<![\w)])[-−])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}\b)?")
_DEPTH = 100  # levels of JSON in an answer that is still read
_PLACES = 8  # calls of code at once; one that overruns keeps its place until it ends
_places = threading.BoundedSemaphore(_PLACES)


@dataclass(frozen=True, slots=True)
class Reach:
    """What scorers may use. One for all scorers of a scenario, since it counts what they spend.

    engines: by their name in the configuration; None: not there yet, as in a check of it. prices: by engine/model or
    model name. base_id: the release that a judge on the embedded engine answers with.
    """

    engines: Mapping[str, Engine] | None = None
    prices: Mapping[str, Price] = field(default_factory=dict)
    base_id: str = "base"
    _spent: dict[tuple[str, int], int] = field(default_factory=dict)  # calls by judge and day

    def price(self, engine: str, model: str | None) -> Price | None:
        return self.prices.get(f"{engine}/{model}") or self.prices.get(model or engine)

    def spend(self, name: str, most: int | None) -> bool:
        """Whether a judge may make one more call today (UTC), which is then counted."""
        key = (name, int(time.time() // 86400))
        if most is not None and self._spent.get(key, 0) >= most:
            return False
        self._spent[key] = self._spent.get(key, 0) + 1
        return True


class Fields(Protocol):
    """A scorer as it is written down."""

    def build(self, name: str, key: str, reach: Reach) -> Scorer:
        """The scorer. ConfigError when something it needs is not there."""


def make(
    spec: Mapping[str, Any] | str,
    reach: Reach | None = None,
    *,
    trust: Trust = "configuration",
    where: Where = ("scorer",),
    lookup: Lookup = lambda _: Place("default"),
) -> Scorer:
    """The scorer that `spec` describes: a mapping with its name under `use`, or the name alone.

    `where` and `lookup` say where it is written, for the ConfigError of a wrong one.
    """
    given = {"use": spec} if isinstance(spec, str) else dict(spec)
    name = given.pop("use", None)
    if not isinstance(name, str):
        raise ConfigError(f"{lookup(where)}: a scorer has its name under use: {', '.join(SCORERS)}", param="use")
    choice((*where, "use"), name, SCORERS, lookup, "scorer", path=False)
    if name not in _ALLOWED[trust]:
        said = ", ".join(each for each in SCORERS if each in _ALLOWED[trust])
        home = "the configuration file" if name == "code" else "the configuration or a file of tasks"
        raise ConfigError(
            f"{lookup(where)}: the scorer {name} may only be named in {home}; here there are {said}", param="use"
        )
    if trust == "request" and name in ("regex", "schema") and len(json.dumps(given)) > LONGEST:
        raise ConfigError(f"{lookup(where)}: a {name} in a request has at most {LONGEST:,} characters", param="answer")
    made: Any = arguments(load(SCORERS[name], what="scorer"), given, where, f"scorer {name}", lookup)
    if trust != "request" and isinstance(made, Regex):
        try:
            made.check()
        except ValueError as error:
            raise ConfigError(f"{lookup(where)}: the scorer {name}: {error}") from None
    scorer: Scorer = made.build(name, digest(name, dataclasses.asdict(made)), reach or Reach())
    return scorer


async def reported(check: Json) -> Scorer:
    """The scorer of a report's `metadata.check`, tried on a trifle: what judges nothing there judges nothing at all.

    ConfigError, a sentence that begins with the field, for what is no harmless scorer.
    """
    made = await asyncio.to_thread(_reported, check)
    if isinstance(made, Rule) and (found := await made.judge("{}")).value is None:
        raise ConfigError(f"metadata.check.answer: {found.note}", param="metadata.check.answer")
    return made


def _reported(check: Json) -> Scorer:
    if not isinstance(check, dict) or not isinstance(spec := check.get("scorer"), (str, dict)):
        example = '{"scorer": "number", "answer": 5}'
        raise ConfigError(f"metadata.check must be an object like {example}", param="metadata.check")
    given: dict[str, Any] = {"use": spec} if isinstance(spec, str) else dict(spec)
    if check.get("answer") is not None:
        given["answer"] = check["answer"]
    try:
        return make(given, trust="request", where=("metadata", "check", "scorer"))
    except ConfigError as error:
        said = error.message.removeprefix(f"{Place('default')}: ")
        named = said if said.startswith("metadata.check") else f"metadata.check: {said}"
        raise ConfigError(named, param="metadata.check") from None


def digest(*of: Any) -> str:
    """A short key of what a judgement depends on."""
    text = json.dumps([_VERSION, *of], sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def graded(value: object, note: str = "", cost: Cost | None = None) -> Score:
    """A value as a score; one that is not from 0 to 1 is not judged."""
    cost = cost or Cost()
    if value is None:
        return Score(None, note or "the scorer gave no score", cost)
    if not isinstance(value, numbers.Real):
        return Score(None, f"not a score: {type(value).__name__}", cost)
    number = float(value)
    if not math.isfinite(number) or not 0 <= number <= 1:
        return Score(None, f"not a score from 0 to 1: {number:g}", cost)
    return Score(number, note, cost)


class Rule:
    """A scorer that needs the text alone. `right` gives a score; it may wait for what bounds its time."""

    def __init__(self, name: str, key: str, right: Callable[[str], object]) -> None:
        self.name, self.key, self._right = name, key, right

    async def score(self, task: Task, text: str) -> Score:
        return await self.judge(text)

    async def judge(self, text: str) -> Score:
        try:
            found = self._right(text)
            return graded(await found if inspect.isawaitable(found) else found)
        except Unsettled as error:
            return Score(None, str(error))


@dataclass(frozen=True, slots=True)
class Exact:
    """The answer is `answer`, or one of a list. Space around it does not count."""

    answer: Any

    def __post_init__(self) -> None:
        _several(self.answer)

    def build(self, name: str, key: str, reach: Reach) -> Scorer:
        known = {str(each).strip() for each in _several(self.answer)}
        return Rule(name, key, lambda text: text.strip() in known)


@dataclass(frozen=True, slots=True)
class Contains:
    """The answer has `answer` in it, or one of a list. Case does not count."""

    answer: Any

    def __post_init__(self) -> None:
        if not all(str(each).strip() for each in _several(self.answer)):
            raise ValueError("answer is empty, and everything contains that")

    def build(self, name: str, key: str, reach: Reach) -> Scorer:
        known = [str(each).casefold() for each in _several(self.answer)]
        return Rule(name, key, lambda text: any(each in text.casefold() for each in known))


@dataclass(frozen=True, slots=True)
class Regex:
    """A pattern (Python's) is found in the answer, or one of a list. Looking for it is bounded in time."""

    answer: Any

    def __post_init__(self) -> None:
        _several(self.answer)

    def check(self) -> None:
        """ValueError for what is no pattern. Compiling may take long, too, so a stranger's is left to the child."""
        for pattern in _several(self.answer):
            try:
                re.compile(str(pattern))
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"answer: not a pattern: {error}") from None

    def build(self, name: str, key: str, reach: Reach) -> Scorer:
        patterns = [str(each) for each in _several(self.answer)]
        return Rule(name, key, lambda text: match("regex", patterns, text))


@dataclass(frozen=True, slots=True)
class Number:
    """The last number of the answer is `answer`, or one of a list: within `tolerance`, or within `relative` of it."""

    answer: Any
    tolerance: float = 1e-12
    relative: float = 1e-9

    def __post_init__(self) -> None:
        for each in _several(self.answer):
            if not math.isfinite(float(each)):
                raise ValueError(f"answer is not a number: {each!r}")
        if not (0 <= self.tolerance < math.inf and 0 <= self.relative < 1):
            raise ValueError("tolerance is 0 or more, relative from 0 to below 1")

    def build(self, name: str, key: str, reach: Reach) -> Scorer:
        known = [float(each) for each in _several(self.answer)]

        def right(text: str) -> bool:
            found = last_number(text)
            return found is not None and any(
                abs(found - each) <= max(self.tolerance, self.relative * abs(each)) for each in known
            )

        return Rule(name, key, right)


@dataclass(frozen=True, slots=True)
class Schema:
    """The answer is JSON, bare or in a code fence, that fits the JSON schema `answer`. Nothing is fetched for it."""

    answer: dict[str, Any]

    def __post_init__(self) -> None:
        from jsonschema.exceptions import SchemaError
        from jsonschema.validators import validator_for

        try:
            validator_for(self.answer).check_schema(self.answer)
        except SchemaError as error:
            raise ValueError(f"answer is not a JSON schema: {error.message}") from None

    def build(self, name: str, key: str, reach: Reach) -> Scorer:
        def right(text: str) -> object:
            try:
                value = written(text)
            except ValueError:
                return False
            return match("schema", self.answer, value)

        return Rule(name, key, right)


@dataclass(frozen=True, slots=True)
class Code:
    """A Python callable `(text, task)` that returns True, False, a number from 0 to 1, or None for "not judged".

    It is our own code: it runs in this process, in a thread, for at most `seconds`. It finds `answer`, which is for it
    alone to understand, at `task.scorer.answer`.
    """

    call: str
    answer: Any = None
    seconds: float = 10.0

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 600:
            raise ValueError("seconds is more than 0 and at most 600")

    def build(self, name: str, key: str, reach: Reach) -> Scorer:
        call = load(self.call, what="scorer")
        if not callable(call) or inspect.iscoroutinefunction(call):
            raise ConfigError(f"{self.call} is not a plain function (text, task)", param="call")
        return Called(name, digest(key, _source(call)), call, self.answer, self.seconds)


class Called:
    """A callable as a scorer. A thread that overruns cannot be ended, so too many of them end the judging."""

    def __init__(self, name: str, key: str, call: Callable[[str, Task], object], answer: Json, seconds: float) -> None:
        self.name, self.key, self.answer, self._call, self._seconds = name, key, answer, call, seconds

    async def score(self, task: Task, text: str) -> Score:
        loop = asyncio.get_running_loop()
        given: asyncio.Future[Score] = loop.create_future()

        def settle(score: Score) -> None:
            if not given.done():
                given.set_result(score)

        def work() -> None:
            try:
                score = graded(self._call(text, task))
            except BaseException as error:  # whatever it is, it says nothing of the answer
                where = _raised(error, self._call)
                score = Score(None, f"the scorer raised {type(error).__name__}: {str(error)[:200]}{where}")
            finally:
                _places.release()
            try:
                loop.call_soon_threadsafe(settle, score)
            except RuntimeError:  # the loop ended meanwhile
                pass

        try:
            async with asyncio.timeout(self._seconds):
                while not _places.acquire(blocking=False):  # noqa: ASYNC110 - threads free it, any of them
                    await asyncio.sleep(0.01)
        except TimeoutError:
            return Score(None, f"{_PLACES} calls of code are still at work; no score came in time")
        threading.Thread(target=work, name="reef-scorer", daemon=True).start()
        try:
            async with asyncio.timeout(self._seconds):
                return await given
        except TimeoutError:
            return Score(None, f"the scorer gave no score within {self._seconds:g} s")


def last_number(text: str) -> float | None:
    """The last number in a text: 1,234.5 and -3e4 are numbers; a sign after a letter or digit is a dash."""
    found = None
    for found in _NUMBER.finditer(text):  # noqa: B007
        pass
    return None if found is None else float(found.group().replace(",", "").replace("−", "-"))


def written(text: str) -> Json:
    """The JSON that an answer is, bare or in its last code fence. ValueError when it is none, or not finite."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is not JSON")

    said = text.strip()
    if not said.startswith(("{", "[", '"')) and (blocks := fenced(said)):
        said = blocks[-1][1]
    try:
        value = json.loads(said, parse_constant=refuse)
    except RecursionError:
        raise ValueError("too deep") from None
    if deeper(value, _DEPTH):
        raise ValueError("too deep")
    return value


def fenced(text: str) -> list[tuple[str, str]]:
    """The code blocks of a text: the word after each fence, lower-case, and what is inside. The last may be open."""
    blocks: list[tuple[str, str]] = []
    fence, word, lines = "", "", list[str]()
    for line in text.splitlines():
        bare = line.strip()
        if not fence and bare.startswith(("```", "~~~")):
            fence = bare[: len(bare) - len(bare.lstrip(bare[0]))]
            word, lines = bare[len(fence) :].strip().lower(), []
        elif fence and bare.startswith(fence) and not bare.strip(fence[0]):
            blocks.append((word, "\n".join(lines) + "\n"))
            fence = ""
        elif fence:
            lines.append(line)
    if fence:
        blocks.append((word, "\n".join(lines) + "\n"))
    return blocks


def _several(answer: Any) -> list[Any]:
    several = list(answer) if isinstance(answer, (list, tuple)) else [answer]
    if not several or any(each is None or isinstance(each, (bool, dict, list, tuple)) for each in several):
        raise ValueError("answer is a text or a number, or a list of them of which any will do")
    return several


def _raised(error: BaseException, call: Any) -> str:
    """Where the callable's own file was when it failed; else where the error was raised."""
    frames = traceback.extract_tb(error.__traceback__)[1:]  # the first is ours
    own = getattr(sys.modules.get(getattr(call, "__module__", None) or ""), "__file__", None)
    found = next((frame for frame in reversed(frames) if frame.filename == own), frames[-1] if frames else None)
    return f" ({found.filename}, line {found.lineno})" if found else ""


def _source(call: Any) -> str:
    """The text of the module a callable is from: when it changes, judgements may."""
    found = getattr(sys.modules.get(getattr(call, "__module__", None) or ""), "__file__", None)
    try:
        return Path(found).read_text(encoding="utf-8") if found else ""
    except (OSError, UnicodeDecodeError):
        return ""
