"""One run of a study: a driver's view of its own server.

Knows: how to ask, report, wait for the learner, pin a release, keep the driver's place.
Does not know: what is asked, or what an answer is worth.

A driver that was killed goes on at its kept place: it reads `kept`, skips what lies before, and makes its calls again.
Those that were made in its earlier life are answered from a journal (see `kept`), reports that were sent are known to
the server by their ids: nothing is asked, reported or trained twice. For that a driver is the same each time: its
randomness comes from `at(place)`, and what it learnt from the server comes from these calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from reef.core import rpc
from reef.core.errors import ReefError, TrainError, WireError
from reef.core.wire import Done, Look, Looked, Wake
from reef.study import Arm, door, server
from reef.study.kept import Kept, key

if TYPE_CHECKING:
    import httpx

ABREAST = 32  # requests in flight: more than the engine answers at once, so that no place in it is empty
QUICK, SLOW = 0.05, 0.25  # seconds between two looks at the learner: at first, and while it is long at work
STALLED = 900.0  # seconds without any change after which a learner that does not rest is given up
FAILING = 60.0  # seconds of nothing but failures after which it is given up, too
FLIP = 5.0  # seconds a gateway may take to serve what was published

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    receipt: str  # empty when it was not recorded
    release_id: str
    finish_reason: str
    message: Mapping[str, Any]  # the assistant's message as it came
    tokens: int  # of the answer


class Run:
    """`arm` and `seed` say which run it is. Open it with `opened`; a driver is given it open."""

    def __init__(self, folder: Path, arm: Arm, seed: int, *, show: Show = lambda text: None) -> None:
        self.arm, self.seed = arm, seed
        self.folder, self.state = folder, folder / "state"
        self.config = _config(arm, seed, self.state)
        self.scenario: str = self.config["reef"].get("default_scenario", "default")
        self._show = show
        self._kept = Kept(folder)
        self._spent: dict[str, float] = dict(self._kept.seconds)  # seconds by what they were spent on
        self._busy: Counter[str] = Counter()
        self._since: dict[str, float] = {}
        self._began = time.monotonic()
        self._before = self._spent.get("all", 0.0)
        self._abreast = asyncio.Semaphore(ABREAST)
        self._client: httpx.AsyncClient
        self._learner: rpc.Client

    # --- for drivers --------------------------------------------------------------------------------------------------

    def at(self, *place: object) -> random.Random:
        """Random numbers that depend on the seed and this place alone."""
        return random.Random("/".join(map(str, (self.seed, *place))))

    async def ask(
        self,
        messages: str | Sequence[Mapping[str, Any]],
        *,
        seed: int,
        max_tokens: int,
        release: str | None = None,
        record: bool = True,
        session: str | None = None,
        **body: Any,
    ) -> Answer:
        """One chat request; a text is a single user message. `release`: pinned (never trained on). `body`: further
        fields. Many at once are sent `ABREAST` at a time."""
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else list(messages)
        sent = {"model": "reef", "messages": said, "max_tokens": max_tokens, "seed": seed % 2**31, **body}
        headers = {"x-reef-scenario": self.scenario}
        headers |= {"x-reef-release": release} if release else {}
        headers |= {} if record else {"x-reef-capture": "false"}
        headers |= {"x-reef-session": session} if session else {}

        async def make() -> dict[str, Any]:
            with self.spending("asking"):
                answer = await door.send(self._client, "POST", "/v1/chat/completions", json=sent, headers=headers)
            found = answer.json()
            choice = found["choices"][0]
            made = Answer(
                text=choice["message"].get("content") or "",
                receipt=answer.headers.get("x-reef-agent-record-id", "") if record else "",
                release_id=answer.headers.get("x-reef-release-id", ""),
                finish_reason=choice["finish_reason"],
                message=choice["message"],
                tokens=int((found.get("usage") or {}).get("completion_tokens") or 0),
            )
            return asdict(made)

        async with self._abreast:
            return Answer(**await self._once(key("ask", sent, headers), make))

    async def report(self, receipt: str | Sequence[str], score: float | None = None, **fields: Any) -> None:
        """Feedback on one receipt or several."""
        references = [receipt] if isinstance(receipt, str) else list(receipt)
        body: dict[str, Any] = {"references": references, **fields}
        if score is not None:
            body["score"] = float(score)
        body["agent_record_id"] = f"rep_{key('report', body)}"  # the same again is one report
        with self.spending("reporting"):
            await door.send(self._client, "POST", "/reef/report", json=body)

    async def learnt(self) -> dict[str, Any]:
        """Wait until all that was asked and reported so far was used or turned down, the learner rests, and what it
        made is served. Its own words (`trained`, `dropped`, `metrics`, `last` …) about the weights, or the one part
        there is; `parts` has those of each. TrainError when it failed."""

        async def make() -> dict[str, Any]:
            with self.spending("learning"):
                parts = await self._rested()
                await self._served()
            main = parts.get("weights") or next(iter(parts.values()))
            for name, seconds in ((main.get("last") or {}).get("timings") or {}).items():
                self._spent[f"learner: {name}"] = self._spent.get(f"learner: {name}", 0.0) + (seconds or 0.0)
            return {**main, "parts": parts}

        found: dict[str, Any] = await self._once("learnt", make)
        return found

    async def create(self, name: str, **settings: Any) -> None:
        """Another scenario on the same server, such as a pupil beside its teacher; one that is there already stays. Set
        `scenario` to its name to go on with it."""
        body = {"name": name, **settings}
        await door.send(self._client, "POST", "/reef/scenarios", json=body, good=(409,))

    async def releases(self) -> list[dict[str, Any]]:
        """The whole chain, oldest first."""
        return (await door.chain(self._client, self.scenario))[::-1]

    async def head(self) -> str:
        """The release that is served."""

        async def make() -> str:
            return str((await self._status())["release_id"])

        found: str = await self._once("head", make)
        return found

    def point(self, **figures: Any) -> None:
        """Add a line to the run's log (points.jsonl) and show it."""
        name = key("point", figures)
        if self._kept.take(name)[0]:
            return
        with (self.folder / "points.jsonl").open("a") as file:
            file.write(json.dumps({"seconds": round(self.seconds, 1), **figures}) + "\n")
        self._kept.note(name, None)
        self._show("  ".join(f"{name} {_plain(value)}" for name, value in figures.items()))

    @property
    def kept(self) -> dict[str, Any]:
        """What the driver keeps between two lives; `keep` writes it."""
        return dict(self._kept.values)

    def keep(self, **values: Any) -> None:
        """Everything before this call is done and never repeated. Values are plain JSON."""
        self._kept.keep(self.spent, **values)

    async def drift(self, before: str, after: str) -> dict[str, float]:
        """Forgetting, see `drift.measure`. Empty where the engine gives no log-probs of given tokens."""

        async def make() -> dict[str, float]:
            from reef.engines.local.client import LocalEngine
            from reef.study import drift

            if self.config["reef"].get("engine", "local") != "local":
                return {}
            engine = LocalEngine(self._socket("engine"), model="reef")
            try:
                with self.spending("drift"):
                    return await drift.measure(engine, before, after)
            finally:
                await engine.close()

        found: dict[str, float] = await self._once(key("drift", before, after), make)
        return found

    # --- for whoever runs it ------------------------------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def opened(self) -> AsyncIterator[Run]:
        """With its server running. What the last life left of one is waited for."""
        import httpx

        with self.spending("starting"):
            server.room(self.folder, server.ROOM)
            await server.released(self.state)
            port = server.free_port()
            self.config["reef"]["port"] = port
            file, log = self.folder / "serve.yaml", self.folder / "serve.log"
            file.write_text(yaml.safe_dump(self.config, sort_keys=False))
            url = f"http://127.0.0.1:{port}"
            child = server.start(["-c", str(file)], log, bound=True)
        try:
            with self.spending("starting"):
                await server.started(child, url, log)
            token = (self.state / "token").read_text().strip()
            limits, timeout = httpx.Limits(max_connections=2 * ABREAST), httpx.Timeout(600.0, connect=5.0, pool=None)
            head = {"authorization": f"Bearer {token}"}
            self._learner = rpc.Client(self._socket("learner"))
            async with httpx.AsyncClient(base_url=url, headers=head, limits=limits, timeout=timeout) as client:
                self._client = client
                async with server.watched(child, self.folder, log):
                    yield self
        finally:
            await _closed(self)
            await asyncio.shield(asyncio.to_thread(_stop, child))

    @property
    def seconds(self) -> float:
        """Of all lives; what was done after the last `keep` of an earlier one counts once, as it was repeated."""
        return self._before + time.monotonic() - self._began

    @property
    def spent(self) -> dict[str, float]:
        """Seconds by what they were spent on; `learner: …` are the learner's own, inside `learning`."""
        return self._spent | {"all": self.seconds}

    @contextlib.contextmanager
    def spending(self, name: str) -> Iterator[None]:
        """Seconds in which at least one was at it."""
        if self._busy[name] == 0:
            self._since[name] = time.monotonic()
        self._busy[name] += 1
        try:
            yield
        finally:
            self._busy[name] -= 1
            if self._busy[name] == 0:
                self._spent[name] = self._spent.get(name, 0.0) + time.monotonic() - self._since[name]

    # --- the inside ---------------------------------------------------------------------------------------------------

    async def _once(self, name: str, make: Callable[[], Awaitable[Any]]) -> Any:
        """What the call made in an earlier life, or makes now."""
        known, value = self._kept.take(name)
        if not known:
            value = await make()
            self._kept.note(name, value)
        return value

    async def _rested(self) -> dict[str, dict[str, Any]]:
        """Every part's words, once each was seen at rest twice since now. A look that goes on now may have begun before
        the last report was stored; the next one cannot have."""
        known: dict[str, int] = {}
        words, changed, well, pause = "", time.monotonic(), time.monotonic(), QUICK
        while True:
            parts = await self._look()
            for part in parts.values():
                if part.get("state") == "blocked":
                    raise TrainError(f"the learner cannot go on: {part.get('error')}")
            rests = {name: int(part.get("rests") or 0) for name, part in parts.items()}
            known = {name: min(known.get(name, count), count) for name, count in rests.items()}  # fewer: it restarted
            if rests and all(count >= known[name] + 2 for name, count in rests.items()):
                return parts
            failed = [str(part.get("error")) for part in parts.values() if part.get("state") == "failed"]
            well = time.monotonic() if not failed else well
            if time.monotonic() - well > FAILING:
                raise TrainError(f"the learner fails again and again: {failed[0]}; see {self.state / 'logs'}")
            said = json.dumps({name: {**part, "oldest_seconds": 0} for name, part in parts.items()}, sort_keys=True)
            if said != words:
                words, changed = said, time.monotonic()
            quiet = time.monotonic() - changed
            if quiet > STALLED:
                raise WireError(f"the learner did nothing for {STALLED / 60:.0f} minutes; see {self.state / 'logs'}")
            busy = any(part.get("state") in ("training", "evaluating", "publishing") for part in parts.values())
            pause = min(SLOW, pause * 1.3) if busy else QUICK
            await asyncio.sleep(pause)

    async def _look(self) -> dict[str, dict[str, Any]]:
        """What the learner says of each part now; it is woken. Empty while it starts."""
        deadline = time.monotonic() + door.AWAY
        while True:
            try:
                woken = await self._learner.call(Wake(scenario=self.scenario), timeout=30.0)
                found = await self._learner.call(Look(scenario=self.scenario), timeout=30.0)
            except WireError as error:
                if time.monotonic() > deadline:
                    raise WireError(f"{error.message}; see {self.state / 'logs'}") from None
                await asyncio.sleep(0.2)
                continue
            assert isinstance(woken, Done)
            assert isinstance(found, Looked)
            shown = found.scenarios.get(self.scenario) or {}
            parts: dict[str, dict[str, Any]] = shown.get("parts") or {}
            return parts

    async def _served(self) -> None:
        """Wait until the gateway serves what the chain has; not for ever, since a pin may keep it elsewhere."""
        deadline = time.monotonic() + FLIP
        while (await self._status()).get("behind") and time.monotonic() < deadline:  # noqa: ASYNC110 (no event crosses)
            await asyncio.sleep(QUICK)

    async def _status(self) -> dict[str, Any]:
        answer = (await door.send(self._client, "GET", "/reef/status")).json()
        found: dict[str, Any] = answer["scenarios"][self.scenario]
        return found

    def _socket(self, name: str) -> Path:
        return (self.state / "run").resolve() / f"{name}.sock"


def _config(arm: Arm, seed: int, state: Path) -> dict[str, Any]:
    """The server's YAML: the arm's, on one gateway (so that what one request sees the next one sees too)."""
    found = json.loads(json.dumps(arm.config).replace('"{seed}"', str(seed)))  # plain and our own
    reef = {"workers": 1, **(found.get("reef") or {})}
    if misplaced := {"state_dir", "port", "host"} & reef.keys():
        raise ReefError(f"the arm {arm.name} sets reef.{min(misplaced)}, which is the study's to set; leave it out")
    training = {"nice": 0, **(found.get("training") or {})}  # nobody else is served here
    reef |= {"host": "127.0.0.1", "port": 0, "state_dir": str(state.absolute())}
    return {**found, "reef": reef, "training": training}


async def _closed(run: Run) -> None:
    if (learner := getattr(run, "_learner", None)) is not None:
        await learner.close()


def _stop(child: subprocess.Popen[bytes]) -> None:
    server.stop(child)


def _plain(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


__all__ = ["ABREAST", "Answer", "Run"]
