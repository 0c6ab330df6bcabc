"""`reef backup`: a whole copy of records and releases, made while the server works; and the drill that proves it.

Knows: in which order the parts are copied so that they fit together, and how a copy is checked.
Does not know: how records or releases are written.

- Order: gate.db, learn.db, records.db, the chain. So every release that a record names is in the copy, and no cursor of
  the learner is ahead of the records. The chain's own cursors may be; the copy's event log goes on after them.
- Each database is copied as of one moment, while others write. The chain's refs are copied before its objects, of which
  none is ever removed.
- A copy is made beside TARGET and renamed when it is whole and on disk: there is never half a backup at TARGET.
- The layout is the state folder's own, so a restore is a copy. The token's text is not in it; tokens' digests are.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import sqlite3
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from reef import __version__
from reef.cli import options, show
from reef.cli.export import Progress
from reef.core import disk
from reef.core.errors import ChainError, InputError, MissingError, StoreError
from reef.core.failpoint import failpoint

FORMAT = 1
PAGES = 512  # of a database between two rests
REST = 0.005  # seconds
_REFS = ("HEAD", "config", "packed-refs", "description", "refs", "logs", "info", "reef")
_SKIPPED = (".lock", ".part", "mutex")


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "backup",
        help="copy records and releases while the server works, or check such a copy",
        description="Copy the state folder's records and releases to TARGET, a folder or a .tar file, while the server "
        "works. To restore: stop the server, put the folder (or what the .tar holds) in the place of the state folder, "
        "start. --check proves that a backup can be restored, without touching anything.",
    )
    parser.add_argument("target", type=Path, metavar="TARGET", help="a folder that is not there yet, or FILE.tar")
    parser.add_argument(
        "--check", action="store_true", help="restore TARGET into a temporary folder and look at all of it"
    )
    options.configuration(parser)
    options.reading(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.check:
        found = check(args.target, Progress().now)
    else:
        found = backup(options.load(args).settings.reef.state_dir, args.target, Progress().now)
    if args.json:
        show.dump(found)
    else:
        counts = ", ".join(show.count(found[f"{what}s"], what) for what in ("record", "report", "release"))
        size = f"{sum(item['bytes'] for item in found['files'].values())} bytes"
        if args.check and not found["wrong"]:
            print(f"{args.target} can be restored: {counts}; made {show.when(found['made_at'])}")
        elif not args.check:
            print(f"{args.target}: {counts}, {size}; prove it with `reef backup --check {args.target}`")
    for sentence in found.get("wrong", []):
        print(f"wrong: {sentence}", file=sys.stderr)
    return 1 if found.get("wrong") else 0


# --- making one -------------------------------------------------------------------------------------------------------


def backup(state: Path, target: Path, say: Any) -> dict[str, Any]:
    """Make the backup; what its manifest says."""
    if not (state / "records.db").is_file() or not (state / "releases.git").is_dir():
        raise StoreError(f"{state} holds no records and releases; name the state folder with --reef.state_dir FOLDER")
    target = target.absolute()
    if target.exists():
        raise InputError(f"{target} is there already; give another name", param="target")
    packed = target.suffix == ".tar"
    try:
        with _beside(target) as folder:
            manifest = _fill(state, folder, say)
            failpoint("backup.filled")
            if packed:
                made = folder.with_name(folder.name + ".tar")
                with disk.create(made) as file, tarfile.open(fileobj=file, mode="w") as tar:
                    tar.add(folder, arcname=target.stem)
                disk.sync(made)
                failpoint("backup.packed")
                made.rename(target)
            else:
                _sync(folder)
                failpoint("backup.synced")
                folder.rename(target)
            disk.sync(target.parent)
    except OSError as error:
        raise StoreError(f"cannot write the backup {target}: {error.strerror or error}; {disk.advice(error)}") from None
    return manifest


@contextlib.contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A private folder beside the target; what a killed backup left there is removed first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = target.with_name(f".{target.name}.partial")
    held = os.open(target.with_name(folder.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(f"another backup to {target} is under way; wait for it, or give another name") from None
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        folder.with_name(folder.name + ".tar").unlink(missing_ok=True)
        target.with_name(folder.name + ".lock").unlink(missing_ok=True)
        os.close(held)


def _fill(state: Path, folder: Path, say: Any) -> dict[str, Any]:
    for name in ("gate.db", "learn.db"):
        if (state / name).is_file():
            _copy_database(state / name, folder / name, say)
    failpoint("backup.learn_copied")
    _copy_database(state / "records.db", folder / "records.db", say)
    failpoint("backup.records_copied")
    chain = _copy_chain(state / "releases.git", folder / "releases.git", say)
    names, cursor = _scenarios(chain, folder / "releases.git")
    with contextlib.closing(sqlite3.connect(folder / "records.db")) as db:
        # A release may have learnt from events after the copy's last: numbers must not be given out a second time.
        db.execute("UPDATE sqlite_sequence SET seq = max(seq, ?) WHERE name = 'events'", (cursor,))
        db.commit()
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.execute("PRAGMA journal_mode = DELETE")  # one file; the server that opens it turns its log on again
        (records,) = db.execute("SELECT count(*) FROM records").fetchone()
        (reports,) = db.execute("SELECT count(*) FROM reports").fetchone()
    files = {
        str(path.relative_to(folder)): {"sha256": disk.sha256(path), "bytes": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {
        "format": FORMAT,
        "version": __version__,
        "made_at": time.time(),
        "records": records,
        "reports": reports,
        "releases": sum(names.values()),
        "scenarios": names,
        "files": files,
    }
    (folder / "backup.json").write_text(json.dumps(manifest, indent=1))
    return manifest


def _copy_database(source: Path, target: Path, say: Any) -> None:
    """A database as of one moment. The open read keeps that moment, so writers neither wait nor make it start again."""
    try:
        with contextlib.closing(sqlite3.connect(source, isolation_level=None)) as old:
            old.execute("BEGIN")
            old.execute("SELECT count(*) FROM sqlite_master").fetchone()
            with contextlib.closing(sqlite3.connect(target)) as new:
                old.backup(new, pages=PAGES, sleep=REST, progress=lambda _, left, total: say(
                    f"{source.name}: {total - left} of {total} pages"))  # fmt: skip
            target.chmod(0o600)
    except sqlite3.Error as error:
        raise StoreError(f"cannot copy {source}: {error}; check the disk's space, then try again") from None


def _copy_chain(source: Path, target: Path, say: Any) -> Any:
    """The repository: refs first, under the lock that every move of a ref takes; then objects, which are only added.
    Large files may be removed by policy meanwhile, so the list of those comes last."""
    from reef.releases.chain import GitChain

    target.mkdir()
    (source / "reef").mkdir(exist_ok=True)
    with (source / "reef" / "mutex").open("a+b") as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)
        for name in _REFS:
            _copy(source / name, target / name, say)
    failpoint("backup.refs_copied")
    for name in ("objects", "lfs"):
        _copy(source / name, target / name, say)
    for name in ("objects", "refs", "reef"):
        (target / name).mkdir(exist_ok=True)
    _copy(source / "reef" / "pruned", target / "reef" / "pruned", say)
    return GitChain(target)


def _copy(source: Path, target: Path, say: Any) -> None:
    if source.is_file():
        shutil.copy2(source, target)
        return
    if not source.is_dir():
        return
    target.mkdir(exist_ok=True)
    for item in sorted(source.iterdir()):
        if item.name.startswith("tmp_") or item.name.endswith(_SKIPPED) or item.is_symlink():
            continue  # what is being written just now has no ref yet
        with contextlib.suppress(FileNotFoundError):
            _copy(item, target / item.name, say)
    say(f"copied {source.name}")


def _scenarios(chain: Any, folder: Path) -> tuple[dict[str, int], int]:
    """How many releases each scenario has, and the largest event that any of their heads has consumed."""
    from reef.scenario.learnt import history

    heads = folder / "refs" / "heads"
    names: dict[str, int] = {}
    cursor = 0
    for name in sorted(str(path.relative_to(heads)) for path in heads.rglob("*") if path.is_file()):
        names[name] = 0
        for release in history(chain, name):
            names[name] += 1
            cursor = max([cursor, *(part.cursor for part in release.consumed.values())])
    return names, cursor


def _sync(folder: Path) -> None:
    for path in folder.rglob("*"):
        disk.sync(path)
    disk.sync(folder)


# --- the drill --------------------------------------------------------------------------------------------------------


def check(target: Path, say: Any) -> dict[str, Any]:
    """Restore into a temporary folder and read everything; the manifest, with what is `wrong` as sentences."""
    if not target.exists():
        raise MissingError(f"there is no backup {target}")
    if target.is_dir() and not (target / "backup.json").is_file():
        raise InputError(f"{target} is no backup: it has no backup.json, which `reef backup` writes", param="target")
    with _temporary() as temp:
        folder = temp / "state"
        try:
            _restore(target, folder)
        except OSError as error:
            why = error.args[0][0][2] if isinstance(error, shutil.Error) else error  # the first of many
            raise StoreError(f"cannot restore {target} into {temp} to check it: {why}; {disk.advice(error)}") from None
        except (ValueError, tarfile.TarError) as error:
            raise InputError(f"{target} is no backup, or a damaged one: {error}") from None
        try:
            manifest = json.loads((folder / "backup.json").read_text())
            if manifest["format"] != FORMAT:
                raise InputError(
                    f"{target} was made by a newer Reef ({manifest['version']}); check it with that version"
                )
            files: Mapping[str, Any] = manifest["files"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{target} is no backup, or a damaged one: {error}") from None
        wrong = _compare(folder, files, say)
        if not wrong:
            wrong = _databases(folder) + _chain(folder, manifest, say) + _entries(folder, manifest, say)
        return {**manifest, "wrong": wrong}


@contextlib.contextmanager
def _temporary() -> Iterator[Path]:
    """A folder for the restored state. That there is none is a disk in trouble too: Python tries every place it knows
    by writing there."""
    try:
        held = tempfile.TemporaryDirectory(prefix="reef-restore-")
    except OSError as error:
        raise StoreError(f"there is no place to restore into: {error}; free some disk space, or set TMPDIR") from None
    with held as name:
        yield Path(name)


def _restore(target: Path, folder: Path) -> None:
    if target.is_dir():
        shutil.copytree(target, folder)
        return
    with tarfile.open(target) as tar:
        tar.extractall(folder.parent / "tar", filter="data")
    (inside,) = (folder.parent / "tar").iterdir()
    inside.rename(folder)


def _compare(folder: Path, files: Mapping[str, Any], say: Any) -> list[str]:
    wrong = []
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {"backup.json"}
    wrong += [f"{name} is missing" for name in sorted(set(files) - there)]
    for name in sorted(set(files) & there):
        say(f"reading {name}")
        if disk.sha256(folder / name) != files[name]["sha256"]:
            wrong.append(f"{name} is not what was copied")
    return wrong


def _databases(folder: Path) -> list[str]:
    wrong = []
    for name in ("records.db", "learn.db", "gate.db"):
        if not (folder / name).exists():
            continue
        try:
            with contextlib.closing(sqlite3.connect(folder / name)) as db:
                said = [row[0] for row in db.execute("PRAGMA integrity_check")]
        except sqlite3.Error as error:
            said = [str(error)]
        if said != ["ok"]:
            wrong.append(f"{name}: {said[0]}")
    return wrong


def _chain(folder: Path, manifest: Mapping[str, Any], say: Any) -> list[str]:
    from reef.releases.chain import GitChain
    from reef.releases.git import Git

    say("checking the releases")
    done = Git(folder / "releases.git").run("fsck", "--strict", "--no-dangling", check=False)
    wrong = [] if done.returncode == 0 else [f"git fsck: {done.stderr.decode('utf-8', 'replace').strip()[:300]}"]
    try:
        chain = GitChain(folder / "releases.git")
        chain.open()
        for name in manifest["scenarios"]:
            wrong += chain.verify(name)
    except ChainError as error:
        wrong.append(error.message)
    return wrong


def _entries(folder: Path, manifest: Mapping[str, Any], say: Any) -> list[str]:
    """Every record and report is read whole, and the release of every record is there."""
    from reef.core.nouns import Record
    from reef.records import Query
    from reef.records.export import Reader, Tally
    from reef.releases.chain import GitChain

    wrong: list[str] = []
    chain = GitChain(folder / "releases.git")
    with contextlib.closing(sqlite3.connect(folder / "records.db")) as db:
        scenarios = [row[0] for row in db.execute("SELECT DISTINCT scenario FROM records")]
        counts = [db.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("records", "reports")]  # noqa: S608
        for scenario, release_id in db.execute("SELECT DISTINCT scenario, release_id FROM records").fetchall():
            try:
                chain.get(release_id)
            except (MissingError, ChainError):
                wrong.append(f"records of scenario {scenario} name the release {release_id}, which is not there")
    if counts != [manifest["records"], manifest["reports"]]:
        wrong.append(f"there are {counts[0]} records and {counts[1]} reports; the manifest says otherwise")
    done = 0
    try:
        with Reader(folder / "records.db") as reader:
            for scenario in scenarios:
                for entry in reader.entries(Query(scenario), Tally(), reports=True):
                    done += isinstance(entry, Record)
                    say(f"read {done} records")
    except StoreError as error:
        wrong.append(error.message)
    return wrong
