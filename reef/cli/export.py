"""`reef export` writes records as lines of JSON; `reef import` brings such lines in.

Knows: files, progress, going on after an interruption. Does not know: shapes (`shapes`) or what an entry may say
(`gateway.imports`).

- An export reads the state folder's file itself: it needs no server and disturbs none.
- An import goes through the server when one runs, else into the file under the state folder's lock. How far it came is
  kept beside the file; entries that are there already are passed over, so starting again is always safe.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from reef.cli import filters, options, show, state
from reef.cli.api import Found, connect, find
from reef.cli.process import Boot
from reef.core import disk
from reef.core.errors import ConflictError, InputError, MissingError, StoreError

BATCH = 200  # entries sent at once
BYTES = 4 * 1024 * 1024  # of them
_ENTRY = re.compile(r"records\[([0-9]+)\][^:]*: ")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from reef.cli.shapes import SHAPES

    parser = commands.add_parser(
        "export",
        help="write records and reports as lines of JSON, also as training data (no server needed)",
        description="Write a scenario's records as lines of JSON: raw (everything, for `reef import`), sft "
        "(conversations), preference (pairs of a better and a worse answer) or prompts (with rewards). Reads the state "
        "folder; works beside a running server. The training shapes take live records unless --purpose says otherwise.",
    )
    parser.add_argument("--shape", choices=SHAPES, default="raw", help="default: raw")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="whole or not at all (default: standard output)"
    )
    parser.add_argument("-s", "--scenario", help="the scenario (default: the configuration's default_scenario)")
    options.configuration(parser)
    filters.add(parser)
    parser.set_defaults(run=export)
    parser = commands.add_parser(
        "import",
        help="bring in records and reports: lines of `reef export`, or {agent_record_id, request_type, payload}",
        description="Bring in finished exchanges and reports from a file of JSON lines. Interrupted, the same command "
        "goes on where it stopped; what is there already is passed over.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the lines; - is standard input")
    options.server(parser)
    options.reading(parser)
    parser.set_defaults(run=bring)


# --- export -----------------------------------------------------------------------------------------------------------


def export(args: argparse.Namespace) -> int:
    from reef.cli import assemble, shapes
    from reef.records.export import Reader, Tally

    settings = options.load(args).settings
    scenario = args.scenario or settings.reef.default_scenario
    if args.shape != "raw" and args.purpose is None:
        args.purpose = "live"
    query = filters.query(args, scenario)
    tally = Tally()
    with Reader(settings.reef.state_dir / "records.db") as reader:
        assemble.known(settings.reef.state_dir, scenario)
        if not args.output:
            return _write(shapes.lines(args.shape, reader, query, tally), sys.stdout.buffer, tally)
        with _whole(args.output) as file:
            return _write(shapes.lines(args.shape, reader, query, tally), file, tally)


def _write(lines: Iterator[bytes], file: IO[bytes], tally: Any) -> int:
    said = Progress()
    for line in lines:
        file.write(line)
        tally.lines += 1
        said.now(f"{tally.lines} lines from {tally.read} records")
    file.flush()
    said.end(f"{tally.lines} lines from {tally.read} records")
    for reason, count in sorted(tally.skipped.items()):
        print(f"left out {count}: {reason}", file=sys.stderr)
    return 0


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[IO[bytes]]:
    """A file that is there when all of it is on disk, and not before."""
    temp = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        try:
            with disk.create(temp) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temp.replace(path)
            disk.sync(path.parent)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        temp.unlink(missing_ok=True)


class Progress:
    """How far it is, on standard error: a line that is written over on a terminal, else one now and then."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._every = 0.2 if self._terminal else 10.0
        self._last = time.monotonic()

    def now(self, text: str) -> None:
        if time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            print(
                f"\r{text}\x1b[K" if self._terminal else text,
                end="" if self._terminal else "\n",
                file=sys.stderr,
                flush=True,
            )

    def end(self, text: str) -> None:
        print(f"\r{text}\x1b[K" if self._terminal else text, file=sys.stderr)


# --- import -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Brought:
    """How far an import came. `lines` and `offset` are of the file."""

    entries: int = 0
    duplicates: int = 0
    erased: int = 0
    lines: int = 0
    offset: int = 0


def bring(args: argparse.Namespace) -> int:
    place = find(args)
    with contextlib.ExitStack() as stack:
        if args.file == Path("-"):
            file: IO[bytes] = sys.stdin.buffer
            mark = None
        else:
            try:
                file = stack.enter_context(args.file.open("rb"))
            except OSError as error:
                raise InputError(f"cannot read {args.file}: {error.strerror}") from None
            mark = Mark(args.file, f"{place.url if place.named else place.state_dir.absolute()} {args.scenario}")
        send = stack.enter_context(_sender(args))
        done = mark.load() if mark else Brought()
        if done.offset:
            file.seek(done.offset)
            print(f"going on after {done.entries} entries", file=sys.stderr)
        said = Progress()
        for batch in _batches(file, done):
            there, erased = send(batch)
            done.duplicates += there
            done.erased += erased
            done.entries += len(batch.texts)
            done.lines, done.offset = batch.line, batch.end
            if mark:
                mark.save(done)
            said.now(f"{done.entries} entries")
        if mark:
            mark.clear()
    if args.json:
        return show.dump({"entries": done.entries, "duplicates": done.duplicates, "erased": done.erased})
    gone = f", and {done.erased} were erased here on request and stay so" if done.erased else ""
    print(f"{done.entries} entries, of which {done.duplicates} were there already{gone}")
    return 0


@dataclass(slots=True)
class Batch:
    """Entries of one scenario, the number of the line of each, and the file's line and place after them."""

    texts: list[bytes]
    numbers: list[int]
    line: int
    end: int


def _batches(file: IO[bytes], done: Brought) -> Iterator[Batch]:
    batch = Batch([], [], done.lines, done.offset)
    size, scenario = 0, None
    for number, line in enumerate(file, done.lines + 1):
        text = line.strip()
        if text:
            named = _scenario(text, number)
            full = len(batch.texts) >= BATCH or size + len(text) > BYTES
            if batch.texts and (full or named != scenario):
                yield batch
                batch, size = Batch([], [], batch.line, batch.end), 0
            batch.texts.append(text)
            batch.numbers.append(number)
            size += len(text)
            scenario = named
        batch.line, batch.end = number, batch.end + len(line)
    if batch.texts:
        yield batch


def _scenario(text: bytes, number: int) -> str | None:
    from reef.records import raw

    try:
        entry = raw.load(text)
    except ValueError as error:
        raise InputError(f"line {number} is not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise InputError(f"line {number} is not an object")
    if "agent_record_id" not in entry and (set(entry) & {"messages", "prompt", "chosen", "completion"}):
        raise InputError(
            f"line {number} is training data (`--shape sft`, preference or prompts), which cannot be read back; import "
            "takes what `reef export` writes without --shape, or {agent_record_id, request_type, payload}"
        )
    return entry.get("scenario")


@contextlib.contextmanager
def _sender(args: argparse.Namespace) -> Iterator[Callable[[Batch], tuple[int, int]]]:
    """What takes a batch and returns how many of it were there already, and how many were erased."""
    place = find(args)
    if place.named or state.held(place.state_dir):
        headers = {"content-type": "application/json"} | ({"x-reef-scenario": args.scenario} if args.scenario else {})
        with connect(args) as api:

            def post(batch: Batch) -> tuple[int, int]:
                body = b'{"records":[' + b",".join(batch.texts) + b"]}"
                with _counted(batch):
                    said = api.send("/reef/records/batch", body, headers)
                erased = int(said.get("erased", 0))
                return int(said["duplicates"]) - erased, erased

            yield post
        return
    lock = state.claim(place.state_dir, patience=0.0)
    try:
        with asyncio.Runner() as runner:
            local = runner.run(_open(args, place, lock.fd))

            def store(batch: Batch) -> tuple[int, int]:
                with _counted(batch):
                    return runner.run(_keep(local, batch.texts, args.scenario, place.scenario))

            try:
                yield store
            finally:
                runner.run(local.store.close())
    finally:
        lock.release()


@contextlib.contextmanager
def _counted(batch: Batch) -> Iterator[None]:
    """An error about an entry of a batch says on which line of the file it is."""
    try:
        yield
    except (InputError, ConflictError) as error:
        found = _ENTRY.match(error.message)
        place = f"line {batch.numbers[int(found[1])]}" if found else f"lines {batch.numbers[0]} to {batch.numbers[-1]}"
        said = error.message[found.end() :] if found else error.message
        raise type(error)(f"{place}: {said}; correct the file and run this again") from None


@dataclass(frozen=True, slots=True)
class Local:
    store: Any
    chain: Any
    make: Callable[[str], Any]  # a scenario with its first release


async def _open(args: argparse.Namespace, place: Found, lock: int) -> Local:
    """The folder's store and chain; a new folder is prepared as a server's start would, its model included."""
    from reef.cli import assemble, serve
    from reef.records.sqlite import SqliteStore

    folder = place.state_dir
    settings = serve.placed(options.load(args).settings, "")
    boot = Boot(settings.model_dump(mode="json"), state.run_folder(folder), "", None)
    ready = False
    chain = assemble.open_chain(folder)
    if (folder / "releases.git").is_dir():
        chain.open()

    def make(scenario: str) -> Any:
        nonlocal boot, ready
        if not ready:
            boot, ready = serve.prepare(boot, lock), True
        if chain.head(scenario) is None:
            assemble.make(boot, chain, scenario)
        return chain.head(scenario)

    store = SqliteStore(folder / "records.db", owner=f"import-{os.getpid()}")
    await store.start()
    return Local(store, chain, make)


async def _keep(local: Local, lines: list[bytes], named: str | None, default: str) -> tuple[int, int]:
    from reef.gateway import imports
    from reef.records import raw

    entries = [raw.load(line) for line in lines]
    scenario = imports.scenario_of(entries, named) or default
    head = local.chain.head(scenario) or await asyncio.to_thread(local.make, scenario)

    async def has(release_id: str) -> bool:
        try:
            return bool(local.chain.get(release_id).scenario == scenario)
        except MissingError:
            return False

    _, duplicates, erased = await imports.bring(entries, imports.Ground(scenario, head.id, local.store, has))
    return duplicates, erased


class Mark:
    """How far an import came, in a file beside its own: of the same bytes, to the same place."""

    def __init__(self, file: Path, target: str) -> None:
        stat = file.stat()
        self._path = file.with_name(f".{file.name}.reef-import")
        self._of = {"size": stat.st_size, "changed": stat.st_mtime_ns, "to": target}

    def load(self) -> Brought:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads(self._path.read_text())
            if kept.pop("of") == self._of:
                return Brought(**{name: int(value) for name, value in kept.items()})
        return Brought()

    def save(self, done: Brought) -> None:
        kept = {"of": self._of, **asdict(done)}
        temp = self._path.with_name(self._path.name + ".part")
        with contextlib.suppress(OSError):  # a folder that cannot be written: then a next run begins again
            temp.write_text(json.dumps(kept))
            temp.replace(self._path)

    def clear(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
