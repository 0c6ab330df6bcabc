"""The gate's means, put together from the configuration: suite, scorers, hold-out, prices, caps, what tells of them.

Knows: `gate`, `prices` and `engines` of the configuration, and the rooms they lead to.
Does not know: policies' insides, processes.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from reef.config import ScenarioSettings, Settings
from reef.config import check as rules
from reef.config.file import Where, dotted
from reef.config.settings import GateSettings, dotted_source
from reef.core.errors import ConfigError
from reef.core.kinds import OWN
from reef.core.load import load
from reef.core.nouns import Record, Release, Usage

if TYPE_CHECKING:
    from pathlib import Path

    from reef.engines import Engine
    from reef.evaluation import Evaluator, Means, Price, Sizes, Suite, Task
    from reef.evaluation.book import Book
    from reef.evaluation.suite import Judging
    from reef.experience.holdout import Holdout
    from reef.harness.apply import Applied
    from reef.harness.episode import Rooms
    from reef.records import RecordStore
    from reef.records.board import Board
    from reef.records.journal import Journal
    from reef.records.sqlite import SqliteStore

EMBEDDED = "smollm2-135m"
RECENT = 200  # records among which the guards find live prompts


# --- checking, before anything runs -----------------------------------------------------------------------------------


def check(
    settings: Settings, scenario: ScenarioSettings, engines: Sequence[str], lookup: rules.Lookup, within: Where = ()
) -> list[str]:
    """The gate of a scenario: suite files and code, scorer, options, prices. ConfigError names the place. `engines` are
    those that run. Returns what is allowed and will come to nothing, each with what to do."""
    from reef.evaluation import POLICIES, Means
    from reef.evaluation.book import Book

    gate, at = scenario.gate, (*within, "gate")
    rules.choice((*at, "policy"), gate.policy, POLICIES, lookup, "policy")
    if gate.scorer:
        _scorer(gate, engines, lookup, (*at, "scorer"))
    if gate.money is not None and (dear := _unpriced(settings, scenario)) is not None:
        where = (*at, "money")
        raise ConfigError(
            f"{lookup(where)}: {dotted(where)} needs to know what the {dear} costs; add its model to prices, with 0 "
            "for one that costs nothing",
            param=dotted(where),
        )
    book = Book.memory()
    try:
        known = cast("Mapping[str, Engine]", dict.fromkeys(engines))
        found = suite(gate, scenario.name, judging(settings, gate, known), book)
        return _measurable(gate, found, policy(scenario, Means.none(found)))
    except ConfigError as error:
        key = (error.param or "").removeprefix("gate.")
        where = (*at, *key.split(".")) if (error.param or "").startswith("gate.") else at
        raise ConfigError(f"{lookup(where)}: {error.message}", param=error.param) from None
    finally:
        book.close()


def _measurable(gate: GateSettings, suite: Suite | None, made: Evaluator) -> list[str]:
    """What can be said before the first look of a suite whose tasks are all here."""
    from reef.evaluation.policies import Guarded
    from reef.evaluation.suite import Sources

    if not isinstance(suite, Sources) or not isinstance(made, Guarded) or {"traffic", "failures"} & {*sources(gate)}:
        return []
    if (known := suite.known()) is None:
        return []
    for name in sorted({name for shield in made.shields() for name in shield.names} - known.keys()):
        close = difflib.get_close_matches(name, known, 1) or list(known)[:1]
        raise ConfigError(
            f"the suite has no task {name!r} to protect; did you mean {close[0]!r}?", param="gate.options.tasks"
        )
    if len(known) >= gate.least or not made.claims(gate.alpha, max(1, len(known))):
        return []
    few = f"{len(known)} {'task' if len(known) == 1 else 'tasks'}"
    return [
        f"the suite has {few} and gate.least is {gate.least}: no candidate can be accepted; add "
        f"{gate.least - len(known)} more, or lower gate.least"
    ]


def _scorer(gate: GateSettings, engines: Sequence[str], lookup: rules.Lookup, where: Where) -> None:
    """The default scorer by itself: with an answer in the place of the one that tasks bring, where it wants one."""
    from reef.evaluation.scorers import SCORERS, make

    spec, name = dict(gate.scorer), gate.scorer.get("use")
    if isinstance(name, str):
        rules.choice((*where, "use"), name, SCORERS, lookup, "scorer", path=False)
        wanted = {field.name for field in dataclasses.fields(load(SCORERS[name])) if field.default is MISSING}
        if "answer" in wanted - set(spec):
            spec["answer"] = _EXAMPLES.get(name, "0")
    if name == "judge":
        rules.choice((*where, "engine"), str(spec.get("engine")), engines, lookup, "engine", path=False)
    make(spec, where=where, lookup=lookup)


_EXAMPLES: Mapping[str, Any] = {"schema": {}, "tests": "def test_it():\n    pass\n"}


def _unpriced(settings: Settings, scenario: ScenarioSettings) -> str | None:
    """Who is asked and has no price, in words."""
    judge = scenario.gate.scorer
    if judge.get("use") == "judge":
        engine, model = str(judge.get("engine")), judge.get("model")
        if f"{engine}/{model}" not in settings.prices and (model or engine) not in settings.prices:
            return f"judge {engine}/{model}" if model else f"judge {engine}"
    return f"engine {scenario.engine}" if price(settings, scenario) is None else None


def harmless(settings: Settings, wanted: ScenarioSettings, own: Sequence[ScenarioSettings]) -> None:
    """A request's gate: no file, code or asking of others that `own`, the configuration's scenarios, do not name, and
    no higher caps than the server's."""
    from reef.evaluation.scorers import make

    gate, gates = wanted.gate, [scenario.gate for scenario in own]
    known = {word for each in gates for word in (each.policy, *_words(each.options))}
    for path in (gate.policy, *_words(gate.options)):
        if ":" in path and path not in known:
            raise ConfigError(f"{path} is not named in this server's configuration; a request cannot load code")
    named = {"traffic", "failures", *(source for each in gates for source in sources(each))}
    if strange := [source for source in sources(gate) if source not in named]:
        what = "load code" if dotted_source(strange[0]) else "name files of the server"
        raise ConfigError(
            f"gate.suite: a request cannot {what}; name the suite {strange[0]} in its configuration", param="gate.suite"
        )
    if gate.scorer and gate.scorer not in [each.scorer for each in gates]:
        make({"answer": _EXAMPLES.get(str(gate.scorer.get("use")), "0")} | gate.scorer, trust="request")
    for name in ("calls", "tokens", "money"):
        cap, most = getattr(gate, name), getattr(settings.gate, name)
        if most is not None and (cap is None or cap > most):
            raise ConfigError(
                f"gate.{name}: the server allows {most:g} a month; a request cannot take more", param=f"gate.{name}"
            )


def _words(value: Any) -> list[str]:
    """Every text inside some options."""
    if isinstance(value, Mapping):
        return [word for inner in value.values() for word in _words(inner)]
    if isinstance(value, list | tuple):
        return [word for inner in value for word in _words(inner)]
    return [value] if isinstance(value, str) else []


def policy(scenario: ScenarioSettings, means: Means) -> Evaluator:
    from reef.evaluation import POLICIES

    gate = scenario.gate
    made_of = load(POLICIES.get(gate.policy, gate.policy), what="policy")
    return cast("Evaluator", made_of(means, sizes(gate), gate.options))


def past(scenario: ScenarioSettings, means: Means) -> Evaluator | None:
    """What measures earlier releases against the one that is served: whether one is better, on the gate's suite."""
    from reef.evaluation.policies import Better

    return Better(means, sizes(scenario.gate), {}) if means.suite is not None else None


def sizes(gate: GateSettings) -> Sizes:
    from reef.evaluation import Sizes

    return Sizes(gate.alpha, gate.tasks, gate.least, gate.repeats, gate.calls, gate.tokens, gate.money)


# --- what is measured on ----------------------------------------------------------------------------------------------


def sources(gate: GateSettings) -> tuple[str, ...]:
    """The entries of gate.suite, one or several."""
    if gate.suite is None:
        return ()
    return (gate.suite,) if isinstance(gate.suite, str) else gate.suite


def judging(
    settings: Settings, gate: GateSettings, engines: Mapping[str, Engine] | None = None, base_id: str = ""
) -> Judging:
    from reef.evaluation import Price
    from reef.evaluation.scorers import Reach
    from reef.evaluation.suite import Judging
    from reef.harness.clients import Clients

    prices = {name: Price(one.prompt, one.output) for name, one in settings.prices.items()}
    return Judging(gate.scorer, Reach(engines, prices, base_id), Clients(settings.harness.clients))


def suite(
    gate: GateSettings,
    name: str,
    judging: Judging,
    book: Book,
    store: SqliteStore | None = None,
    holdout: Holdout | None = None,
    trained: Callable[[Record], bool] = lambda _: False,
) -> Suite | None:
    """What a scenario is measured on. Without a store, what comes from records is left out (a check has none)."""
    from reef.evaluation.suite import Coded, Listed, Source, Sources, load_suite
    from reef.evaluation.traffic import Failures, Traffic

    found: list[Source] = []
    for source in sources(gate):
        if source == "traffic":
            if store is not None and holdout is not None:
                found.append(Traffic(name, store, holdout, judging, trained, lambda: book.since(name)))
        elif source == "failures":
            if store is not None:
                found.append(Failures(name, store, book, judging))
        elif dotted_source(source):
            found.append(Coded(source, judging))
        else:
            found.append(Listed(source.rsplit("/", 1)[-1], load_suite(source, judging)))
    return Sources(name, found, book) if sources(gate) else None


def reading(gate: GateSettings, judging: Judging) -> Callable[[str], Sequence[Task]]:
    """Reads tasks of a file or dotted path for a recipe that searches. What the gate decides on is not for it."""
    from reef.evaluation import Task as Known
    from reef.evaluation.suite import load_suite, read_line

    own = {"traffic", "failures", *sources(gate)}
    files = {Path(source).resolve() for source in own if not dotted_source(source)}

    def read(source: str) -> Sequence[Task]:
        if source in own or (not dotted_source(source) and Path(source).resolve() in files):
            raise ConfigError(f"{source} is what the gate decides on (gate.suite); a search needs tasks of its own")
        if not dotted_source(source):
            return load_suite(source, judging)
        given = load(source, what="suite")
        given = given() if callable(given) else given
        if not isinstance(given, Iterable):
            raise ConfigError(f"{source} gives no tasks: it is neither a list nor a function that returns one")
        made = []
        for number, item in enumerate(given, 1):
            if isinstance(item, Known):
                made.append(item)
                continue
            try:
                made.append(read_line(item, number, judging, trust="configuration", origin="code"))
            except (ValueError, TypeError, OverflowError, ConfigError) as error:
                raise ConfigError(f"{source}, task {number}: {error}") from None
        return tuple(made)

    return read


def holdout(gate: GateSettings, name: str, book: Book) -> Holdout | None:
    """Which prompts of a scenario never train; None: all may."""
    from reef.experience.holdout import Holdout

    named = sources(gate)
    share = gate.holdout if "traffic" in named else 0.0
    also = (lambda side: book.failed(name, side)) if "failures" in named else None
    return Holdout(share, also) if share or also else None


def recent(store: RecordStore, name: str, holdout: Holdout | None = None) -> Callable[[], Awaitable[Sequence[Record]]]:
    """Recent live records, the newest first; with a hold-out, those that never train before the others."""
    from reef.records import Query

    async def found() -> Sequence[Record]:
        page = await store.find(Query(name, status="complete", purpose="live", limit=RECENT))
        records = [entry for _, entry in page if isinstance(entry, Record)]
        return records if holdout is None else sorted(records, key=lambda record: not holdout.holds(record))

    return found


# --- what it costs ----------------------------------------------------------------------------------------------------


def price(settings: Settings, scenario: ScenarioSettings, local: str | None = None) -> Price | None:
    """Of the model a scenario is answered by. `local` is the embedded model's name."""
    from reef.evaluation import Price

    name, engine = scenario.engine, settings.engine(scenario.engine)
    models = [engine.model, *([scenario.model, local or EMBEDDED] if engine.kind in OWN else [])]
    keys = [key for model in models if model is not None for key in (f"{name}/{model}", model)]
    found = next((settings.prices[key] for key in (*keys, name) if key in settings.prices), None)
    return None if found is None else Price(found.prompt, found.output)


# --- all of it --------------------------------------------------------------------------------------------------------


def means(
    settings: Settings,
    scenario: ScenarioSettings,
    engines: Mapping[str, Engine],
    *,
    base_id: str,
    store: RecordStore,
    board: Board,
    book: Book,
    trained: Callable[[Record], bool],
    renders: Callable[[Release], Applied],
    local: str | None,
    rooms: Rooms | None = None,
) -> tuple[Means, Holdout | None]:
    """What a scenario's policy measures with, and which prompts never train. `base_id` is its release 0, `local` the
    embedded model's name, `trained` says whether a record was learnt from, `rooms` is where agents work."""
    from reef.evaluation import Means
    from reef.records.journal import Journal

    name, gate, journal = scenario.name, scenario.gate, Journal(board)
    held = holdout(gate, name, book)
    found = Means(
        name,
        engines[scenario.engine],
        base_id,
        book=book,
        suite=suite(
            gate, name, judging(settings, gate, engines, base_id), book, cast("SqliteStore", store), held, trained
        ),
        prompts=recent(store, name, held),
        renders=renders,
        model=settings.engine(scenario.engine).model,
        price=price(settings, scenario, local),
        capped=lambda month, why: told(journal, name, month, why),
        episodes=rooms.of(name, settings.engine(scenario.engine).model) if rooms is not None else None,
    )
    return found, held


def rooms(settings: Settings, address: str, folder: Path, board: Board, store: RecordStore) -> Rooms:
    """Where agents work on the jobs of all scenarios. `address` is the gateways', `folder` its own."""
    from reef.harness.clients import Clients
    from reef.harness.episode import Rooms as Made
    from reef.records.present import present
    from reef.records.tokens import TokenTable

    async def usage(receipts: Sequence[str]) -> Usage:
        found = [one.usage for one in await present(store.get, receipts) if isinstance(one, Record)]
        known = [one for one in found if one is not None]
        return Usage(sum(one.prompt_tokens for one in known), sum(one.completion_tokens for one in known))

    own, tokens = settings.harness, TokenTable(board)
    return Made(address, tokens.episode, folder, Clients(own.clients), own.parallel, usage=usage, ended=tokens.end)


def told(journal: Journal, name: str, month: str, why: str) -> None:
    """A scenario's evaluation budget of a month is used up: told once."""
    journal.tell(name, "budget", month, actor="gate", reason=why)
