"""What the gateways of one server did, as numbers that Prometheus reads.

Knows: the metrics' names and labels, that a label's values are bounded, how the numbers of all gateways are summed.
Does not know: when something is worth counting.

- Each gateway counts in a mapped file of its own in the run folder (some memory writes for an exchange, nothing to
  flush); a page reads the files of all. What a dead gateway counted stays counted; its gauges are left out.
- A label is never a receipt, a path, a token or a model that a client named; the 101st scenario is "other".
"""

from __future__ import annotations

import asyncio
import json
import os
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from reef.core.errors import RightError
from reef.core.nouns import Usage
from reef.gateway.seat import Seat, Shared, locked

if TYPE_CHECKING:
    from reef.gateway.app import App
    from reef.gateway.call import Call
    from reef.gateway.seat import Numbers

SCENARIOS = 100
"""Names that get a label of their own on one server; the rest are `other`."""
SEATS = 64

_NUMBERS = 1 << 16  # doubles of one gateway: 600 for each scenario and some
_WASTE = _NUMBERS - 32  # what finds no place is counted here, which no page shows
_FAST = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_SLOW = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


@dataclass(frozen=True, slots=True)
class Kind:
    """A metric: counter, gauge or histogram (its `bounds` are seconds, ascending)."""

    name: str
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    gauge: bool = False

    @property
    def width(self) -> int:
        """Doubles: one, or a count for each bucket, one beyond the last, and the sum."""
        return len(self.bounds) + 2 if self.bounds else 1


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "reef_requests_total",
            "Inference requests, by scenario, dialect and the status that the client got",
            ("scenario", "dialect", "http_status"),
        ),
        Kind("reef_refused_total", "Requests that were refused before any work", ("route", "http_status")),
        Kind("reef_request_seconds", "Seconds from a request's arrival to its answer's end", ("dialect",), _SLOW),
        Kind(
            "reef_gateway_overhead_seconds",
            "Seconds of reef_request_seconds that Reef itself took",
            ("dialect",),
            _FAST,
        ),
        Kind(
            "reef_engine_seconds",
            "Seconds of reef_request_seconds that the engine or provider took",
            ("dialect",),
            _SLOW,
        ),
        Kind(
            "reef_first_byte_seconds",
            "Seconds from arrival to the first byte of a streamed answer",
            ("dialect",),
            _SLOW,
        ),
        Kind("reef_commit_seconds", "Seconds that a record took to be on disk", (), _FAST),
        Kind(
            "reef_tokens_total", "Tokens as the answers tell them, by kind: prompt or completion", ("scenario", "kind")
        ),
        Kind(
            "reef_cached_tokens_total",
            "Tokens of prompts that the embedded engine had computed before, a part of reef_tokens_total",
            ("scenario",),
        ),
        Kind(
            "reef_records_total",
            "Records by how they ended: complete, interrupted, aborted, rejected or failed",
            ("scenario", "status"),
        ),
        Kind("reef_reports_total", "Reports that were stored", ("scenario",)),
        Kind("reef_left_out_total", "Rules and skills that a request had no room for (harness.tokens)", ("scenario",)),
        Kind("reef_bytes_total", "Bytes of bodies: in (requests), out (answers)", ("direction",)),
        Kind("reef_in_work", "Requests in work now", (), (), True),
        Kind("reef_store_queue", "Records and reports that wait to be stored now", (), (), True),
    )
}


async def metrics(app: App, call: Call) -> None:
    """GET /metrics. It tells of every scenario, so a token that is for some of them cannot read it."""
    if call.token.scenarios is not None:
        raise RightError("metrics tell of every scenario, and this token is for some; use one without --scenario")
    page, content_type = await asyncio.to_thread(app.metrics.page)
    await call.reply(200, page, {"content-type": content_type})


class Metrics:
    """One for each gateway process. `folder` None: this process alone (tests)."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        in_work: Callable[[], float] = lambda: 0.0,
        queue: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.gauges = {"reef_in_work": in_work, "reef_store_queue": queue}  # how each is read
        self._folder = folder
        self._seat: Seat | None = None
        self._shared: Shared | None = None
        self._names: int | None = None
        self._view: Numbers = array("d")
        self._places: dict[str, int] = {}  # a series as JSON -> where its doubles begin
        self._used = 0
        self._scenarios: dict[str, str] = {}
        self._routes: set[str] = set()
        self._exchanges: dict[tuple[str, str, str, int], _Exchange] = {}
        self._reports: dict[str, int] = {}
        if folder is None:
            self._view = array("d", bytes(8 * _NUMBERS))
        else:
            self._seat = Seat(folder, SEATS)
            self._shared = Shared(folder / f"{self._seat.number}.values", _NUMBERS)
            self._view = self._shared.view
            path = folder / f"{self._seat.number}.names"
            for line in _lines(path):  # of the one that sat here before: its counts go on
                self._places[line] = self._used
                self._used += KINDS[json.loads(line)[0]].width
            self._names = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._names, sum(len(line) + 1 for line in self._places))  # without half a last line
        self._bytes_in, self._bytes_out = (self._series("reef_bytes_total", way) for way in ("in", "out"))
        self._commit = self._series("reef_commit_seconds")

    def exchange(
        self,
        *,
        scenario: str,
        dialect: str,
        status: str,
        http_status: int,
        overhead: float,
        engine: float | None = None,
        first: float | None = None,
        commit: float | None = None,
        usage: Usage | None = None,
        cached: int = 0,
        bytes_in: int = 0,
        bytes_out: int = 0,
    ) -> None:
        """One inference request that is over. Times in seconds; None is what there was not.

        `status` is the record's, or "" when nothing was recorded. `overhead` and `engine` add up to the whole.
        """
        key = (scenario, dialect, status, http_status)
        found = self._exchanges.get(key)
        if found is None:
            found = self._exchange(key)
        view = self._view
        view[found.requests] += 1.0
        if status:
            view[found.records] += 1.0
        _observe(view, found.overhead, _FAST, overhead)
        whole = overhead
        if engine is not None:
            _observe(view, found.engine, _SLOW, engine)
            whole += engine
        _observe(view, found.request, _SLOW, whole)
        if first is not None:
            _observe(view, found.first, _SLOW, first)
        if commit is not None:
            _observe(view, self._commit, _FAST, commit)
        if usage is not None:
            view[found.prompt] += usage.prompt_tokens or 0
            view[found.completion] += usage.completion_tokens or 0
        view[found.cached] += cached
        view[self._bytes_in] += bytes_in
        view[self._bytes_out] += bytes_out

    def refused(self, route: str, http_status: int) -> None:
        """A request that came to nothing. `route` is a route's pattern, never the path that was asked for."""
        if route not in self._routes:
            if len(self._routes) >= SCENARIOS:
                route = "other"
            self._routes.add(route)
        self._view[self._series("reef_refused_total", route, str(http_status))] += 1.0

    def report(self, scenario: str, count: int = 1) -> None:
        """Reports that were stored."""
        if (place := self._reports.get(scenario)) is None:
            place = self._series("reef_reports_total", self._label(scenario))
            if len(self._reports) < 10 * SCENARIOS:
                self._reports[scenario] = place
        self._view[place] += count

    def left_out(self, scenario: str, count: int) -> None:
        """Entries of a harness that one request had no room for."""
        self._view[self._series("reef_left_out_total", self._label(scenario))] += count

    def page(self) -> tuple[bytes, str]:
        """What all gateways counted, and its content type. Blocking for some milliseconds: call it in a thread."""
        registry = CollectorRegistry()
        registry.register(_Page(self))
        return generate_latest(registry), CONTENT_TYPE_LATEST

    async def follow(self) -> None:
        """Write down the gauges every second, for the pages of other gateways. Runs until it is cancelled."""
        while True:
            self.gauge()
            await asyncio.sleep(1.0)

    def gauge(self) -> None:
        """Write down the gauges now."""
        for name, read in self.gauges.items():
            self._view[self._series(name)] = read()

    def close(self) -> None:
        """Leave the seat: the counts stay, the gauges do not."""
        if self._shared is not None and self._seat is not None and self._names is not None:
            self._view = array("d", bytes(8 * _NUMBERS))
            self._shared.close()
            os.close(self._names)
            self._seat.close()
            self._names = self._shared = None

    def sums(self) -> dict[str, list[float]]:
        """Every series of every gateway, added up."""
        self.gauge()
        total: dict[str, list[float]] = {}
        _sum(total, self._places.items(), self._view)
        if self._folder is None or self._seat is None:
            return total
        for path in sorted(self._folder.glob("*.values")):
            number = int(path.stem)
            if number == self._seat.number:
                continue
            values = array("d")
            data = path.read_bytes()
            values.frombytes(data[: len(data) // 8 * 8])
            alive = self._seat.taken(number)
            place, found = 0, []
            for line in _lines(path.with_suffix(".names")):
                kind = KINDS[json.loads(line)[0]]
                if alive or not kind.gauge:
                    found.append((line, place))
                place += kind.width
            _sum(total, found, values)
        return total

    def _exchange(self, key: tuple[str, str, str, int]) -> _Exchange:
        scenario, dialect, status, http_status = key
        label = self._label(scenario)
        made = _Exchange(
            self._series("reef_requests_total", label, dialect, str(http_status)),
            self._series("reef_records_total", label, status) if status else 0,
            self._series("reef_request_seconds", dialect),
            self._series("reef_gateway_overhead_seconds", dialect),
            self._series("reef_engine_seconds", dialect),
            self._series("reef_first_byte_seconds", dialect),
            self._series("reef_tokens_total", label, "prompt"),
            self._series("reef_tokens_total", label, "completion"),
            self._series("reef_cached_tokens_total", label),
        )
        if len(self._exchanges) < 50 * SCENARIOS:
            self._exchanges[key] = made
        return made

    def _label(self, scenario: str) -> str:
        """The scenario's name while there are at most SCENARIOS of them on the server, else `other`."""
        if (label := self._scenarios.get(scenario)) is not None:
            return label
        if self._folder is None or self._shared is None:
            label = scenario if len(self._scenarios) < SCENARIOS else "other"
        else:
            with locked(self._folder / "scenarios") as fd:
                names = os.pread(fd, 100 * SCENARIOS, 0).decode().split()
                label = scenario if scenario in names or len(names) < SCENARIOS else "other"
                if label not in (*names, "other"):
                    os.write(fd, f"{scenario}\n".encode())
        if label != "other" or len(self._scenarios) < 10 * SCENARIOS:
            self._scenarios[scenario] = label
        return label

    def _series(self, name: str, *labels: str) -> int:
        """Where a series' doubles begin; a new one is written down first. Without room, it counts for nobody."""
        line = json.dumps([name, *labels])
        if (place := self._places.get(line)) is not None:
            return place
        width = KINDS[name].width
        if self._used + width > _WASTE:
            return _WASTE
        place = self._places[line] = self._used
        self._used += width
        if self._names is not None:
            os.write(self._names, line.encode() + b"\n")
        return place


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Where the numbers of one kind of exchange are."""

    requests: int
    records: int
    request: int
    overhead: int
    engine: int
    first: int
    prompt: int
    completion: int
    cached: int


class _Page(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        grouped: dict[str, list[tuple[list[str], list[float]]]] = {name: [] for name in KINDS}
        for line, numbers in sorted(self._metrics.sums().items()):
            name, *labels = json.loads(line)
            grouped[name].append((labels, numbers))
        for name, series in grouped.items():
            yield _family(KINDS[name], series)


def _family(kind: Kind, series: Iterable[tuple[list[str], list[float]]]) -> Metric:
    if kind.bounds:
        histogram = HistogramMetricFamily(kind.name, kind.help, labels=kind.labels)
        for labels, numbers in series:
            buckets, count = [], 0.0
            for bound, amount in zip((*map(str, kind.bounds), "+Inf"), numbers, strict=False):
                count += amount
                buckets.append((bound, count))
            histogram.add_metric(labels, buckets, numbers[-1])
        return histogram
    made = (GaugeMetricFamily if kind.gauge else CounterMetricFamily)(kind.name, kind.help, labels=kind.labels)
    for labels, numbers in series:
        made.add_metric(labels, numbers[0])
    return made


def _observe(view: Numbers, place: int, bounds: tuple[float, ...], seconds: float) -> None:
    view[place + bisect_left(bounds, seconds)] += 1.0
    view[place + len(bounds) + 1] += seconds


def _sum(total: dict[str, list[float]], series: Iterable[tuple[str, int]], values: Numbers) -> None:
    for line, place in list(series):
        width = KINDS[json.loads(line)[0]].width
        numbers = list(values[place : place + width])
        before = total.get(line)
        total[line] = numbers if before is None else [a + b for a, b in zip(before, numbers, strict=True)]


def _lines(path: Path) -> list[str]:
    """Whole lines only: the last may be under way."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    return [line.decode() for line in text[: text.rfind(b"\n") + 1].splitlines()]
