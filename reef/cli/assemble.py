"""The only place where everything is put together: each process from the rooms' constructors.

Knows: every room. Does not know: what any of them does inside.

- `prepare`: before anything runs; the model, the chain, the scenarios. The configuration was checked by then (`bind`).
- `gateway`, `engine`, `learner`, `trainer`, `recover`: one child process each.
- Rooms are imported where they are used, so that a gateway or learner never loads torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from reef.cli import gate, parts, process, reader, route
from reef.cli.ask import asking
from reef.cli.bind import Bound, bind, engine_names, harmless, local_engine, own_model, provider
from reef.cli.process import Boot
from reef.cli.route import Scenarios, answering, models, nowhere, scenario_of
from reef.config import Settings
from reef.config.settings import EngineSettings, listening
from reef.core.errors import ConfigError, EngineError, MissingError, ReefError, StoreError
from reef.core.kinds import OWN
from reef.core.load import load
from reef.core.nouns import Serving
from reef.core.rpc import Client

if TYPE_CHECKING:
    from reef.config import ScenarioSettings
    from reef.core.nouns import PartName, Record
    from reef.engines import Engine
    from reef.experience.holdout import Holdout
    from reef.harness.episode import Rooms
    from reef.loop.binding import Binding, Tools
    from reef.loop.hook import Webhook
    from reef.recipe import Recipe
    from reef.records import RecordStore
    from reef.records.board import Board
    from reef.releases.chain import GitChain
    from reef.scenario.audit import Audit, Ruling
    from reef.scenario.story import Told
    from reef.trainers import Trainer
    from reef.trainers.folder import State

SPARE = 4 * 1024 * 1024  # bytes of disk without which a server does not call itself ready
PROBE = 2.0  # seconds for which one successful write proves that the store can be written
log = logging.getLogger(__name__)


# --- shared pieces ----------------------------------------------------------------------------------------------------


def _settings(boot: Boot) -> Settings:
    return Settings.model_validate(boot.settings)


def open_chain(state: Path, settings: Settings | None = None) -> GitChain:
    """The chain as it is, without repairs (see `prepare` and `recover`). With settings, large files that are not here
    come from `releases.remote`."""
    from reef.cli import remote
    from reef.releases.chain import GitChain

    return GitChain(state / "releases.git", remote.fetcher(settings) if settings is not None else None)


def open_board(state: Path) -> Board:
    from reef.records.board import Board

    return Board(state / "records.db")


def read_step(place: Path) -> State | None:
    """A step of a training folder, verified; None when there is none. TrainError when it is not whole."""
    from reef.trainers import folder

    if (found := folder.read(place)) is not None:
        folder.verify(place, found)
    return found


def open_audit(state: Path) -> Audit:
    """What the learner wrote down, to read; it need not be there."""
    from reef.loop.audit import Audit as Reader

    return Reader(state / "learn.db")


def hold(state: Path, scenario: str, row: Ruling) -> None:
    """A candidate that came from a remote waits for a person here, too."""
    from reef.loop.ledger import Ledger, Look

    seen = (row.reason, row.candidate, row.release, row.evaluation, row.actor)
    ledger = Ledger(state / "learn.db")
    try:
        ledger.audit(Look(scenario, row.part, row.line, row.step, row.look, "hold", *seen, at=row.at))
    finally:
        ledger.close()


async def untrained(
    state: Path, wanted: ScenarioSettings, recipes: Mapping[PartName, Recipe], store: RecordStore, stack: ExitStack,
    *, holdout: Holdout | None, sessions: Path,
) -> Callable[[Record], Awaitable[Told]]:  # fmt: skip
    """Asks why a record did not train. Only read; `sessions` is a copy, in which newer records are joined."""
    from reef.experience.sessions import Sessions
    from reef.loop.ledger import Ledger
    from reef.loop.untrained import Ground, Untrained

    ledger = Ledger(state / "learn.db", reading=True) if (state / "learn.db").exists() else None
    if ledger is not None:
        stack.callback(ledger.close)
    joined = None
    if any(getattr(one, "merge", False) or "next" in getattr(one, "signals", ()) for one in recipes.values()):
        joined = Sessions.open(sessions)
        stack.callback(joined.close)
    ground = Ground(
        wanted.name, store, open_chain(state), ledger, state / "training", recipes,
        wanted.gate.evaluate_every * wanted.gate.patience, holdout, joined, wanted.training.next_seconds,
    )  # fmt: skip
    return (await Untrained.open(ground)).why


def furthest(state: Path) -> tuple[int, int]:
    """The last event and the last act that learn.db was done with. StoreError when it is damaged."""
    from reef.loop.ledger import Ledger

    with contextlib.closing(Ledger(state / "learn.db")) as ledger:
        return ledger.furthest()


def _engines(boot: Boot, settings: Settings) -> dict[str, Engine]:
    from reef.engines import ENGINES

    made: dict[str, Engine] = {}
    for name in engine_names(settings):
        chosen = settings.engine(name)
        kind = load(ENGINES.get(chosen.kind, chosen.kind), what="engine")
        if chosen.kind in OWN:
            assert boot.model is not None
            if "missing" in boot.model:
                from reef.cli.base import Absent

                made[name] = Absent(boot.model["missing"])
            elif chosen.kind == "local":
                made[name] = kind(boot.run / "engine.sock", model=boot.model["name"])
            else:
                made[name] = kind(
                    parts.away(boot, settings, name, open_chain(settings.reef.state_dir, settings)), **chosen.options
                )
        elif chosen.kind == "upstream":
            made[name] = kind(**provider(chosen))
        else:
            made[name] = kind(**chosen.options)
    return made


def _bound(settings: Settings, name: str, created: Mapping[str, Any]) -> Bound:
    return bind(settings, scenario_of(settings, name, created), nowhere)


def _create(
    boot: Boot, settings: Settings, chain: GitChain, board: Board, name: str, created: Mapping[str, Any]
) -> Serving:
    """A scenario with its first release; `created` is what a request made it with, checked like the file.

    A creation that was cut short left a row and no release: it is finished here, with the row's settings unless this
    request brings its own.
    """
    from reef.scenario import serving

    left = board.scenarios().get(name)
    created = dict(created or left or {})
    if name not in settings.scenarios:
        harmless(settings, scenario_of(settings, name, created))
    bound = _bound(settings, name, created)
    if chain.head(name) is None and (why := trouble(boot, settings, chain, name, bound.settings.engine)) is not None:
        raise EngineError(why)
    if not board.create_scenario(name, created) and left not in (None, created) and chain.head(name) is None:
        board.change_scenario(name, created)
    return serving.ensure(name, chain, board, parts.base(boot, settings, bound.settings.engine), bound.label)


def make(boot: Boot, chain: GitChain, name: str) -> None:
    """A scenario that entries from elsewhere name, as a request to a running server would make it."""
    settings, board = _settings(boot), open_board(Path(boot.settings["reef"]["state_dir"]))
    try:
        if not settings.reef.create_scenarios:
            raise MissingError(f"there is no scenario {name!r}, and reef.create_scenarios is off", param="scenario")
        _create(boot, settings, chain, board, name, {})
    finally:
        board.close()


def known(state: Path, name: str) -> None:
    """MissingError when a state folder has no such scenario."""
    chain = open_chain(state)
    if not (state / "releases.git").is_dir() or chain.head(name) is not None:
        return
    names = sorted(path.name for path in (state / "releases.git" / "refs" / "heads").glob("*"))
    there = f"; there are {', '.join(names[:20])}" if names else ""
    raise MissingError(f"there is no scenario {name!r} in {state}{there}", param="scenario")


# --- before anything runs ---------------------------------------------------------------------------------------------


def prepare(boot: Boot) -> dict[str, str] | None:
    """Model, chain and scenarios, made or repaired. Returns the model's path, name and digest, if one is local.

    Runs in a process of its own while nothing else does: the first conversion of the model takes a while and memory.
    """
    settings = _settings(boot)
    if (wanted := own_model(settings)) is not None:
        from reef.engines.local.folder import prepare as find

        try:
            folder = find(wanted)
            model = {"path": str(folder.path), "name": folder.name, "digest": folder.digest}
        except ReefError as error:
            if not _others(settings):  # nothing could be served
                raise
            log.error("there is no model to train, the scenarios of its engine are not served: %s", error.message)
            model = {"path": "", "name": wanted, "digest": "", "missing": error.message}
        boot = dataclasses.replace(boot, model=model)
    from reef.cli import numbers, remote

    state = settings.reef.state_dir
    remote.begin(settings)
    chain = open_chain(state, settings)
    for sentence in chain.open():
        log.warning("%s", sentence)
    board = open_board(state)
    remote.adopt(state, chain, board)
    numbers.keep_up(state, chain, board)
    for name in dict.fromkeys((settings.reef.default_scenario, *settings.scenarios, *board.scenarios())):
        try:
            _ready(boot, settings, chain, board, name)
        except (ReefError, OSError) as error:
            if name == settings.reef.default_scenario:
                raise
            log.error("the scenario %s is not ready, the others go on without it: %s", name, error)
    board.close()
    return boot.model


def _ready(boot: Boot, settings: Settings, chain: GitChain, board: Board, name: str) -> None:
    """One scenario: its first release, if a crash or a full disk kept it from having one, and the board at its head."""
    from reef.scenario import serving

    created = board.scenarios().get(name, {})
    if name in (settings.reef.default_scenario, *settings.scenarios) or chain.head(name) is None:
        _create(boot, settings, chain, board, name, created)
    serving.resume(name, chain, board)
    try:
        engine = scenario_of(settings, name, created).engine
    except ConfigError as error:
        log.warning("the scenario %s cannot be used with this configuration: %s", name, error.message)
        return
    if (why := trouble(boot, settings, chain, name, engine)) is not None:
        log.error("%s", why)


def trouble(boot: Boot, settings: Settings, chain: GitChain, name: str, engine: str) -> str | None:
    """Why a scenario's releases cannot be served by its engine."""
    from reef.cli import base

    return base.trouble(boot, settings, name, engine, chain.head(name))


def _others(settings: Settings) -> bool:
    """Whether a scenario of a folder that is in use is served by an engine whose weights are not ours."""
    if not (settings.reef.state_dir / "releases.git").is_dir():
        return False
    board = open_board(settings.reef.state_dir)
    try:
        created = board.scenarios()
        for name in {settings.reef.default_scenario, *settings.scenarios, *created}:
            with contextlib.suppress(ConfigError):
                wanted = scenario_of(settings, name, created.get(name, {}))
                if settings.engine(wanted.engine).kind not in OWN:
                    return True
        return False
    finally:
        board.close()


# --- the processes ----------------------------------------------------------------------------------------------------


def gateway(boot: Boot) -> None:
    """One HTTP worker on the shared listening socket, until SIGTERM and the end of what is in work."""
    import uvloop

    uvloop.run(_serve(boot))


async def _serve(boot: Boot) -> None:
    from reef.cli import remote
    from reef.gateway.auth import Token, Tokens
    from reef.gateway.context import Context, Limits
    from reef.gateway.meter import Meter
    from reef.gateway.metrics import Metrics
    from reef.gateway.serve import serve
    from reef.records.sqlite import SqliteStore
    from reef.records.tokens import TokenTable
    from reef.scenario.serving import Watch

    settings = _settings(boot)
    reef, state = settings.reef, settings.reef.state_dir
    chain, board = open_chain(state, settings), open_board(state)
    engines = _engines(boot, settings)
    async with AsyncExitStack() as stack:
        store = SqliteStore(state / "records.db", owner=process.owner("gateway"))
        await store.start()
        stack.push_async_callback(store.close)
        for made in engines.values():
            stack.push_async_callback(made.close)
        learner = Client(boot.run / "learner.sock")
        stack.push_async_callback(learner.close)
        scenarios = Scenarios(
            settings, board, engines, answering(boot, settings), lambda *of: trouble(boot, settings, chain, *of)
        )

        async def engine_ready() -> bool:
            return await engines[scenarios.engine(reef.default_scenario)].ready()

        # Connections of their own: a write that waits for the disk must not hold up the one that is watched.
        probed, watched = open_board(state), open_board(state)
        stack.callback(probed.close)
        stack.callback(watched.close)
        written = -PROBE

        async def store_ready() -> bool:
            nonlocal written
            if time.monotonic() - written >= PROBE:
                if shutil.disk_usage(state).free < SPARE:  # the probe's row may still fit where a record does not
                    raise StoreError(f"the disk of {state} is full but for {SPARE} bytes; free some space")
                await asyncio.to_thread(probed.probe)
                written = time.monotonic()
            return True

        tokens, table = Tokens([(reef.token, Token("operator"))], free=reef.auth == "none"), TokenTable(watched)
        watch = Watch(watched)
        watch.on_change(lambda: tokens.refresh(table.list()))
        watch.on_change(scenarios.renew)
        meter, metrics = Meter(boot.run / "meter"), Metrics(boot.run / "metrics")
        stack.callback(meter.close)
        stack.callback(metrics.close)
        context = Context(
            store=store,
            board=board,
            watch=watch,
            chain=chain,
            engines=engines,
            route=scenarios.route,
            lenient=scenarios.lenient,
            wish=scenarios.wish,
            learning=scenarios.learning,
            tokens=tokens,
            ensure_scenario=lambda name, created: _create(boot, settings, chain, board, name, created),
            learner=learner,
            engine_ready=engine_ready,
            store_ready=store_ready,
            recipe_of=scenarios.recipe,
            trouble_of=scenarios.trouble,
            check_scenario=lambda name, created: route.check(settings, name, created),
            audit=open_audit(state),
            sessions=state / "sessions.db",
            spent=reader.spender(state),
            models=models(boot, settings),
            default_scenario=reef.default_scenario,
            create_scenarios=reef.create_scenarios,
            fixed=frozenset(settings.scenarios),
            public_url=reef.public_url,
            limits=Limits(**settings.limits.model_dump()),
            meter=meter,
            metrics=metrics,
            remote=remote.shown(settings),
        )
        await serve(context, socket.socket(fileno=process.fd("HTTP")))


def learner(boot: Boot) -> None:
    """A task for each scenario, until SIGTERM."""
    asyncio.run(_learn(boot))


async def _learn(boot: Boot) -> None:
    from reef.cli import prune, remote
    from reef.evaluation.book import Book
    from reef.experience.sessions import Sessions
    from reef.loop.binding import Tools
    from reef.loop.learner import Learner
    from reef.loop.ledger import Ledger, set_aside
    from reef.records.journal import Journal
    from reef.records.sqlite import SqliteStore

    settings = _settings(boot)
    state = settings.reef.state_dir
    chain, board = open_chain(state, settings), open_board(state)
    engines = _engines(boot, settings)
    trainer = _trainer(boot, settings)
    known: dict[str, tuple[Mapping[str, Any], Binding]] = {}
    async with AsyncExitStack() as stack:
        store = SqliteStore(state / "records.db", owner=process.owner("learner"))
        await store.start()
        stack.push_async_callback(store.close)
        stack.push_async_callback(trainer.close)
        for made in engines.values():
            stack.push_async_callback(made.close)
        set_aside(state / "learn.db")
        ledger, book = Ledger(state / "learn.db"), Book.open(state / "gate.db")
        stack.callback(ledger.close)
        stack.callback(book.close)
        sessions = Sessions.open(state / "sessions.db")
        stack.callback(sessions.close)
        tools = Tools(store, chain, board, ledger, trainer, state / "training", Journal(board), book, sessions)
        rooms = gate.rooms(settings, boot.address, boot.run / "rooms", board, store)

        def binding(name: str) -> Binding:
            """A scenario's binding; kept (with what its gate has cached) until its settings change."""
            created = board.scenarios().get(name, {})
            if name not in known or known[name][0] != created:
                bound = _bound(settings, name, created)
                if chain.head(name) is None:
                    raise MissingError(
                        f"the scenario {name} has no release yet: its creation was cut short; the next request to it, "
                        "or a restart, finishes it",
                        param="scenario",
                    )
                if (why := trouble(boot, settings, chain, name, bound.settings.engine)) is not None:
                    raise EngineError(why)
                known[name] = (created, _bind(boot, settings, bound, engines, tools, rooms))
            return known[name][1]

        keeping = asyncio.create_task(_keep(settings, chain), name="keep")
        stack.callback(keeping.cancel)
        pruning = asyncio.create_task(prune.tend(settings, chain, board), name="prune")
        stack.callback(pruning.cancel)
        if (url := remote.address(settings)) is not None:
            pushing = asyncio.create_task(remote.follow(url, state, board), name="push")
            stack.callback(pushing.cancel)
        learning = Learner(tools, binding, webhook=_webhook(settings, tools))
        await learning.run(socket.socket(fileno=process.fd("LEARNER")))


def _webhook(settings: Settings, tools: Tools) -> Webhook | None:
    from reef.loop.hook import Webhook

    if (given := settings.observability.webhook) is None:
        return None
    secret = os.environ.get(given.secret_env) if given.secret_env else None
    return Webhook(tools, given.url, given.kinds, secret=secret, wanted=given.secret_env)


def _bind(
    boot: Boot, settings: Settings, bound: Bound, engines: Mapping[str, Engine], tools: Tools,
    rooms: Rooms | None = None,
) -> Binding:  # fmt: skip
    """How a scenario learns, with the means of its gate."""
    from reef.loop.binding import Binding, Searching, Watching

    wanted, chain = bound.settings, cast("GitChain", tools.chain)
    assert tools.book is not None

    def trained(record: Record) -> bool:
        units = [f"{record.id}:{choice.index}" for choice in record.choices]
        return any(fate == "trained" for unit in units for _, _, fate, _, _ in tools.ledger.fate(wanted.name, unit))

    base_id, wish = parts.first(chain, wanted.name), parts.wish(wanted, bound.recipes.get("harness"))
    means, held = gate.means(
        settings,
        wanted,
        engines,
        base_id=base_id,
        store=tools.store,
        board=tools.board,
        book=tools.book,
        trained=trained,
        renders=lambda release: parts.applied(chain, release, wish),
        local=boot.model["name"] if boot.model else None,
        rooms=rooms,
    )
    return Binding(
        wanted.name,
        bound.recipes,
        bound.names,
        gate.policy(wanted, means),
        means.engine,
        wanted.gate.evaluate_every,
        wanted.gate.patience,
        wanted.releases.mode,
        Watching(**wanted.releases.watch.model_dump()),
        held,
        next_seconds=wanted.training.next_seconds,
        client_share=wanted.training.client_share,
        ask=asking(settings, engines, wanted.engine, base_id),
        trigger=wanted.training.trigger,
        searching=Searching(
            means,
            gate.sizes(wanted.gate),
            wish,
            gate.reading(wanted.gate, gate.judging(settings, wanted.gate, engines, base_id)),
        ),
        past=gate.past(wanted, means),
    )


async def _keep(settings: Settings, chain: GitChain) -> None:
    """Remove records that are past their time, now and then; what any release cites stays."""
    from reef.records import keep
    from reef.scenario.learnt import cited

    path, kept = settings.reef.state_dir / "records.db", settings.records
    await keep.tend(
        path,
        keep_days=kept.keep_days,
        keep_bytes=kept.keep_bytes,
        cited=lambda: cited(chain, keep.scenarios(path)),
    )


def _trainer(boot: Boot, settings: Settings) -> Trainer:
    from reef.trainers import TRAINERS, WORKS

    backend, given = settings.training.backend, settings.training.options
    made_of = load(TRAINERS.get(backend, backend), what="trainer")
    if backend in WORKS:
        return cast("Trainer", made_of(boot.run / "trainer.sock"))
    if backend == "fake":
        return cast("Trainer", made_of(settings.reef.state_dir / "training", **given))
    return cast("Trainer", made_of(**given))


def engine(boot: Boot) -> None:
    """The embedded model, until SIGTERM. The only process that answers with torch."""
    from reef.engines.local.broadcast import PLACE, Following
    from reef.engines.local.server import Options, run

    settings = _settings(boot)
    assert boot.model is not None
    chosen = local_engine(settings) or EngineSettings(kind="local")
    chain = open_chain(settings.reef.state_dir, settings)
    listener = socket.socket(fileno=process.fd("ENGINE"))
    given = {"model": boot.model["name"], "digest": boot.model["digest"], **chosen.options}
    following = Following(boot.run / PLACE, parts.recorded(chain)) if settings.training.broadcast else None
    run(listener, Path(boot.model["path"]), parts.resolver(chain), Options(**given), following)


def trainer(boot: Boot) -> None:
    """The trainer, at a low priority, until SIGTERM."""
    from reef.engines.local.broadcast import PLACE
    from reef.trainers import Ground, options
    from reef.trainers.broadcast import Listening
    from reef.trainers.server import run

    settings = _settings(boot)
    assert boot.model is not None
    state, model, chosen = settings.reef.state_dir, boot.model, settings.training
    listener = socket.socket(fileno=process.fd("TRAINER"))
    resolver = parts.resolver(open_chain(state, settings))
    ground = Ground(Path(model["path"]), state / "training", resolver, model["name"], model["digest"])
    sending = Listening(boot.run / PLACE, *listening(chosen.broadcast)) if chosen.broadcast else None
    run(listener, ground, chosen.backend, options(chosen.backend, chosen.options), sending)


def recover(boot: Boot) -> None:
    """Close what dead gateways left open, and repair the chain. Runs at the start and after each death."""
    settings = _settings(boot)
    run_id, dead = os.environ["REEF_RUN"], os.environ["REEF_DEAD"].split(",")

    def alive(owner: str) -> bool:
        incarnation = owner.rsplit("-", 1)[-1]
        return incarnation.startswith(run_id) and incarnation not in dead

    async def close() -> int:
        from reef.records.sqlite import SqliteStore

        store = SqliteStore(settings.reef.state_dir / "records.db", owner=process.owner("recover"))
        await store.start()
        try:
            return await store.recover(alive)
        finally:
            await store.close()

    for sentence in open_chain(settings.reef.state_dir).open():
        log.warning("%s", sentence)
    if count := asyncio.run(close()):
        log.info("closed %d records that a dead gateway left open", count)
