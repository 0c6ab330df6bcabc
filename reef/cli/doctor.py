"""`reef doctor`: is everything here that `reef serve` needs, and is what it keeps sound; if not, what to do.

Knows: what a server needs, one line each. Does not know: what must agree in a state folder (`verify`).
"""

from __future__ import annotations

import argparse
import functools
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from reef.cli import api, options, show, state, verify
from reef.cli.process import Boot
from reef.cli.verify import Finding
from reef.config import Loaded, Settings
from reef.config.settings import EngineSettings
from reef.core.errors import ReefError


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check that everything a server needs is here, and that what it keeps is sound",
        description="Check python, packages, model, providers, port, git; then the state folder: every release with "
        "all its files, the stores, and that they agree. Only reads, also while a server runs. Exit code 1 when "
        "something is missing or wrong.",
    )
    parser.add_argument("--repair", action="store_true", help="repair what is safe to repair")
    options.configuration(parser, model=True)
    options.reading(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    findings = list(verify.repaired(examine(args)) if args.repair else examine(args))
    failed = any(item.ok is False for item in findings)
    if args.json:
        show.dump({"ok": not failed, "findings": [verify.shown(item) for item in findings]})
    else:
        show.table(["", "what", "finding"], [[_label(item), item.what, item.note] for item in findings])
    return 1 if failed else 0


def _label(item: Finding) -> str:
    if item.ok is False:
        return "MISSING" if item.missing else "problem"
    return "note" if item.ok is None else "ok"


def examine(args: argparse.Namespace) -> Iterator[Finding]:
    yield Finding("python", sys.version_info >= (3, 11), f"{platform.python_version()} (3.11 or newer is needed)")
    yield _program("git", needed=True)
    yield _program("git-lfs", needed=False)
    from reef.cli import bind

    try:
        loaded, bound = bind.load_checked(args)
        yield Finding("configuration", True, str(loaded.file) if loaded.file else "defaults (no reef.yaml here)")
        for name, one in bound.items():
            yield from (Finding(f"gate {name}", None, said) for said in one.asides)
    except ReefError as error:
        yield Finding("configuration", False, error.message)
        loaded = _readable(args)
        if loaded.file is None:
            yield Finding("defaults", None, "the checks below are of the defaults, as the configuration cannot be used")
    model: dict[str, str] | None = None
    if (wanted := bind.own_model(loaded.settings)) is not None:
        yield _torch()
        try:
            model = _model(wanted)
            yield Finding("model", True, f"{model['name']} in {model['path']}")
        except ReefError as error:
            model = {"path": "", "name": wanted, "digest": "", "missing": error.message}
            yield Finding("model", False, error.message)
    for name in bind.engine_names(loaded.settings):
        if loaded.settings.engine(name).kind == "upstream":
            yield _try(f"engine {name}", functools.partial(_provider, loaded.settings.engine(name)))
    folder = loaded.settings.reef.state_dir
    yield _try("state folder", lambda: _folder(loaded))
    if folder.is_dir() and state.held(folder):
        yield Finding("port", True, f"the server of this state folder runs now, on {api.address(loaded.settings)}")
    else:
        yield _try("port", lambda: _port(loaded))
    if folder.is_dir():
        boot = Boot(loaded.settings.model_dump(mode="json"), folder / "run", "", model)
        yield from verify.examine(loaded.settings, boot, running=state.held(folder))


def _readable(args: argparse.Namespace) -> Loaded:
    """The configuration although some of it is wrong, when its settings can be read; else the defaults."""
    args.warned = True  # told already
    try:
        return options.load(args)
    except ReefError:
        return Loaded(Settings(), {}, {}, None)


def _program(name: str, *, needed: bool) -> Finding:
    path = shutil.which(name)
    if path is None:
        why = "the release chain is a git repository" if needed else "to clone the release chain with its weights"
        return Finding(name, False if needed else None, f"not found; install it ({why})", missing=True)
    said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    return Finding(name, True, said.splitlines()[0] if said else path)


def _torch() -> Finding:
    try:
        return Finding("torch", True, importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        why = "the local engine needs it; pip install 'reef-learn[local]', or use --model openai/…"
        return Finding("torch", False, why, missing=True)


def _try(what: str, check: Callable[[], str]) -> Finding:
    try:
        return Finding(what, True, check())
    except ReefError as error:
        return Finding(what, False, error.message)


def _model(name: str) -> dict[str, str]:
    """The local model, as a server is told of it."""
    from reef.engines.local.folder import prepare

    found = prepare(name)
    return {"path": str(found.path), "name": found.name, "digest": found.digest}


def _provider(chosen: EngineSettings) -> str:
    """One question to a provider, which costs nothing there."""
    import httpx

    key, url = os.environ.get(chosen.key_env or ""), (chosen.url or "").rstrip("/")
    place = urlsplit(url).netloc.rpartition("@")[2]
    headers = {"anthropic-version": "2023-06-01", "x-api-key": key or ""} if chosen.api == "anthropic" else {}
    if key and chosen.api != "anthropic":
        headers = {"authorization": f"Bearer {key}"}
    try:
        with httpx.Client(timeout=2.0, proxy=chosen.proxy, trust_env=chosen.trust_env) as client:
            status = client.get(f"{url}/models", headers=headers).status_code
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        refused = isinstance(error, httpx.ConnectError) and "refused" in str(error).lower()
        did = "refused the connection; is it running?" if refused else f"cannot be asked ({type(error).__name__})"
        raise ReefError(f"{place} {did}") from None
    if status in (401, 403):
        named = f"the key in {chosen.key_env}" if chosen.key_env else "a request without a key; name one with key_env"
        raise ReefError(f"{place} refused {named} ({status})")
    if status >= 500:
        raise ReefError(f"{place} answers {status}")
    return f"{place} answers" + ("" if status == 200 else f" ({status} to GET {urlsplit(url).path}/models)")


def _folder(loaded: Loaded) -> str:
    folder = loaded.settings.reef.state_dir
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        raise ReefError(f"{parent} cannot be written ({error.strerror}); choose --reef.state_dir FOLDER") from None
    free = shutil.disk_usage(parent).free / 2**30
    return f"{folder.absolute()}, {free:.1f} GiB free"


def _port(loaded: Loaded) -> str:
    reef = loaded.settings.reef
    listener = state.bind(reef.host, reef.port)
    listener.close()
    return f"{reef.host}:{reef.port} is free"
