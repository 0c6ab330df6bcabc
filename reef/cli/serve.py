"""`reef serve`: check everything, take the state folder and the port, prepare the model, then supervise.

Knows: the order of a start, which processes there are, what a person wants to read then.
Does not know: how a process is kept alive (`supervise`), or what it does (`assemble`).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import urlsplit

from reef import __version__
from reef.cli import options, process, state
from reef.cli.process import Boot
from reef.cli.supervise import Role, Supervisor
from reef.config import Loaded
from reef.config.settings import Settings
from reef.core.errors import ConfigError, ReefError, StoreError
from reef.core.kinds import OWN

if TYPE_CHECKING:
    from reef.cli.bind import Bound

PATIENCE = 4.0  # seconds for which a provider that cannot be reached is waited for: it may come later


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve, record and learn until Ctrl-C",
        description="Serve on the configured address, record every exchange, learn from reports. "
        "Any setting can be given as --section.key VALUE, for example --reef.port 8901.",
    )
    options.configuration(parser, model=True)
    parser.add_argument("--workers", metavar="N", help="gateway processes: the same as --reef.workers N")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.workers is not None:
        args.overrides = [*getattr(args, "overrides", ()), ("reef.workers", args.workers)]
    began = time.monotonic()
    from reef.cli import bind

    loaded, bound = bind.load_checked(args)
    for name, one in bound.items():
        for said in one.asides:
            print(f"reef: warning: scenario {name}: {said}", file=sys.stderr)
    folder, host, port = loaded.settings.reef.state_dir, loaded.settings.reef.host, loaded.settings.reef.port
    # A start that fails leaves no new folder; of a folder that is there, who holds it is the better answer.
    early = None if folder.exists() else state.bind(host, port)
    try:
        lock = state.claim(folder)
    except ReefError:
        if early is not None:
            early.close()
        raise
    try:
        http_socket = early or state.bind(host, port)
        token, fresh = (loaded.settings.reef.token, False) if loaded.settings.reef.token else state.token(folder)
        settings = placed(loaded.settings, token)
        address = state.address_of(http_socket)
        boot = Boot(settings.model_dump(mode="json"), state.run_folder(folder), address, None)
        boot = prepare(boot, lock.fd)
        (boot.run / "address").write_text(address + "\n")
        supervisor = _supervisor(boot, settings, http_socket, lock.fd, [token, *_keys(settings)])
        banner = "\n".join(
            _banner(loaded, settings, address, token if fresh else None, bound[settings.reef.default_scenario])
        )
        _announce(address, banner, began, Path(folder) / "logs")
        supervisor.run()
        (boot.run / "address").unlink(missing_ok=True)
    finally:
        lock.release()
    print("stopped", flush=True)
    return 0


def placed(settings: Settings, token: str) -> Settings:
    """The settings as child processes get them: with the token, and a folder that does not depend on theirs."""
    folder = settings.reef.state_dir.absolute()
    return settings.model_copy(update={"reef": settings.reef.model_copy(update={"token": token, "state_dir": folder})})


def prepare(boot: Boot, lock: int) -> Boot:
    """Model, chain and scenarios, in a process of its own; what it says goes to the terminal."""
    child = subprocess.Popen(
        process.command("prepare"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **process.environment()},
        pass_fds=(lock,),
    )
    try:
        answer, _ = child.communicate(boot.encode())
    except BaseException:
        child.kill()
        child.wait()
        raise
    if child.returncode != 0 or not answer:
        raise StoreError(f"the preparation ended with exit code {child.returncode}; see above")
    found = json.loads(answer)
    if "error" in found:
        raise (ConfigError if found["config"] else ReefError)(found["error"])
    return Boot(boot.settings, boot.run, boot.address, found["model"])


def _supervisor(boot: Boot, settings: Settings, web: socket.socket, lock: int, secret: list[str]) -> Supervisor:
    """The roles of this configuration. Remote and fake engines and trainers have no process."""
    from reef.cli.bind import local_engine, trains_beside
    from reef.engines.local.server import PAGES

    run_id = secrets.token_hex(4)
    for name in ("meter", "metrics"):  # what the gateways of an earlier server counted together
        shutil.rmtree(boot.run / name, ignore_errors=True)
    document = _document(boot)
    common = {**process.environment(), "REEF_RUN": run_id}
    calm = {**common, "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE")}
    paged = {**calm, **{name: os.environ.get(name, value) for name, value in PAGES.items()}}
    grace = settings.limits.drain_seconds + 5.0
    sockets = {name: state.listen(boot.run / f"{name}.sock") for name in state.SOCKETS}
    files = {"BOOT": document.fileno()}
    dead: list[str] = []
    recovery = {**common, "REEF_DEAD": ""}
    roles = [
        Role(f"gateway-{number}", process.command("gateway"), {**files, "HTTP": web.fileno()}, common, grace=grace)
        for number in range(settings.reef.workers)
    ]
    learner = {**files, "LEARNER": sockets["learner"].fileno()}
    roles.append(Role("learner", process.command("learner"), learner, common, phase=1))
    if boot.model is not None and "missing" not in boot.model:
        fds = {**files, "ENGINE": sockets["engine"].fileno()}
        if local_engine(settings) is not None:
            roles.append(Role("engine", process.command("engine"), fds, paged, phase=2))
        if trains_beside(settings):
            fds = {**files, "TRAINER": sockets["trainer"].fileno()}
            roles.append(Role("trainer", process.command("trainer"), fds, calm, wakes=sockets["trainer"], phase=2))
    roles.append(Role("recover", process.command("recover"), files, recovery, phase=1, once=True))

    def died(role: str, incarnation: str) -> None:
        if role.startswith("gateway") or role == "learner":
            dead.append(incarnation)
            recovery["REEF_DEAD"] = ",".join(dead[-1000:])
            supervisor.kick("recover")

    supervisor = Supervisor(
        roles,
        settings.reef.state_dir / "logs",
        run_id=run_id,
        keep=(lock,),
        secrets=secret,
        size=settings.observability.log_bytes,
        died=died,
        stopping=web.close,  # the gateways closed theirs: who connects now is refused instead of left waiting
    )
    supervisor.held += [document, *sockets.values(), web]
    return supervisor


def _document(boot: Boot) -> IO[bytes]:
    """The boot document as an open file without a name: children read it, nobody else can."""
    file = tempfile.TemporaryFile(dir=boot.run)  # noqa: SIM115 (open as long as the supervisor)
    file.write(boot.encode())
    file.flush()
    return file


def _keys(settings: Settings) -> list[str]:
    return [os.environ.get(engine.key_env or "", "") for engine in settings.engines.values()]


def _announce(address: str, banner: str, began: float, logs: Path) -> threading.Thread:
    """Print the banner when the server is ready, or only its provider is missing; say so when that takes long.

    Returns the started thread that does this.
    """

    def wait() -> None:
        host, _, port = address.removeprefix("http://").rpartition(":")
        slow, missed, warning = 30.0, 0.0, ""
        while True:
            try:
                connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=2)
                connection.request("GET", "/readyz")
                answer = connection.getresponse()
                if answer.status == 200:
                    break
                reason = str(json.loads(answer.read()).get("reason", ""))
                if reason.startswith("base "):  # the default scenario's model is gone; others are served
                    warning = f"\nwarning: {reason}"
                    break
                if reason.startswith("provider "):
                    if not missed:
                        print(f"waiting: {reason}", flush=True)
                    missed = missed or time.monotonic()
                    if time.monotonic() - missed > PATIENCE:
                        warning = f"\nwarning: {reason}\nRequests fail until it answers; nothing needs a restart then."
                        break
            except (OSError, ValueError, http.client.HTTPException):
                pass
            finally:
                connection.close()
            if time.monotonic() - began > slow:
                print(f"still starting after {slow:.0f} s; see {logs}", file=sys.stderr, flush=True)
                slow *= 2
            time.sleep(0.1)
        print(banner.replace("{seconds}", f"{time.monotonic() - began:.1f}") + warning, flush=True)

    print(f"starting on {address} …", flush=True)
    thread = threading.Thread(target=wait, name="announce", daemon=True)
    thread.start()
    return thread


def _banner(loaded: Loaded, settings: Settings, address: str, fresh: str | None, bound: Bound) -> list[str]:
    reef, folder, program = settings.reef, loaded.settings.reef.state_dir, options.program()
    if reef.auth == "none":
        token, shown = "none needed (auth: none)", "none"
    elif fresh:
        token, shown = f"{fresh}   (shown once; kept in {folder / 'token'})", f"$(cat {folder / 'token'})"
    elif loaded.settings.reef.token:
        token, shown = f"as configured ({loaded.source(('reef', 'token'))})", "$REEF_TOKEN"
    else:
        token, shown = f"in {folder / 'token'}", f"$(cat {folder / 'token'})"
    engine = settings.engine(reef.engine)
    own = (reef.model or "smollm2-135m") if engine.kind in OWN else engine.model
    model = own or ("as each request names it" if engine.kind == "upstream" else engine.kind)
    where = f" at {urlsplit(engine.url).netloc.rpartition('@')[2]}" if engine.url else ""
    asked = next(iter(settings.models), own or ("MODEL" if engine.kind == "upstream" else reef.engine))
    body = json.dumps({"model": asked, "messages": [{"role": "user", "content": "Hello!"}]})
    aliases = ", ".join(f"{alias} ({target})" for alias, target in settings.models.items())
    talk = "chat" + (f" --as {asked}" if asked in settings.models or asked == "MODEL" else "")
    told = {"teach": "teach the model something and watch it learn"} if "weights" in bound.recipes else {}
    told |= {talk: "talk to it; /good and /bad report on the last answer"}
    told |= {"releases": "what it learnt"} if bound.recipes else {"records": "what was asked and answered"}
    width = max(map(len, told))
    others = len(settings.scenarios.keys() - {reef.default_scenario})
    more = f" and {others} more, with recipes of their own: {program} status" if others else ""
    return [
        "",
        f"Reef {__version__} serves on {address} (ready after {{seconds}} s)",
        f"  token     {token}",
        f"  scenario  {reef.default_scenario}{more}",
        f"  model     {model} (engine {reef.engine}{where})",
        *([f"  aliases   {aliases}"] if aliases else []),
        f"  recipe    {bound.label}" + (f", gate {settings.gate.policy}" if bound.recipes else " (nothing is learnt)"),
        f"  state     {folder} (logs in {folder / 'logs'})",
        "",
        "Try next:",
        f'  curl -i {address}/v1/chat/completions -H "Authorization: Bearer {shown}" \\',
        f"    -H \"content-type: application/json\" -d '{body}'",
        f'  curl {address}/reef/report -H "Authorization: Bearer {shown}" \\',
        '    -H "content-type: application/json" -d \'{"score": 1.0, "references": ["<x-reef-agent-record-id>"]}\'',
        "",
        "  from openai import OpenAI",
        f'  client = OpenAI(base_url="{address}/v1", api_key="<token>")',
        "",
        *(f"  {program} {word:{width}}  {text}" for word, text in told.items()),
        "Ctrl-C stops.",
    ]
