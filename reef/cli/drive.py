"""`reef run FOLDER`: a server with the folder's serve.yaml, and the folder's driver run.py beside it.

Knows: how to start both, and that the driver is an ordinary client. Does not know: what the driver does.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from reef.cli import api, bind, options, state
from reef.core.errors import ConfigError, ReefError
from reef.study import server as serving


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="start a server and a recipe's driver together",
        description="Serve with FOLDER/serve.yaml, run FOLDER/run.py with REEF_URL and REEF_TOKEN set, stop when it "
        "ends. Where FOLDER has no such files, the first of FOLDER/examples/* that has both is taken. Arguments after "
        "-- go to the driver; `reef run FOLDER -- --help` shows which it takes.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("driver", nargs="*", default=[], metavar="ARGUMENT", help="passed to run.py")
    options.configuration(parser, model=True)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    folder = find(args.folder)
    if {"-h", "--help"} & set(args.driver):  # which takes no server
        return subprocess.run([sys.executable, str(folder / "run.py"), *args.driver]).returncode
    args.config = args.config or folder / "serve.yaml"
    settings = bind.load_checked(args)[0].settings
    command = [sys.executable, "-m", "reef", "serve", "-c", str(args.config)]
    command += ["--model", args.model] if args.model else []
    command += [f"--{key}={value}" for key, value in args.overrides]
    server = subprocess.Popen(command)
    try:
        url, token = wait(server, args)
        environment = {**os.environ, "REEF_URL": url, "REEF_TOKEN": token or ""}
        return subprocess.run([sys.executable, str(folder / "run.py"), *args.driver], env=environment).returncode
    finally:
        serving.stop(server, settings.limits.drain_seconds + 30)


def find(folder: Path) -> Path:
    """The folder with serve.yaml and run.py: itself, or the one example below it that has both."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}; recipes/… are in a checkout of Reef")
    for place in (folder, *sorted(folder.glob("examples/*"))):
        if (place / "serve.yaml").is_file() and (place / "run.py").is_file():
            return place
    raise ConfigError(f"{folder} holds no serve.yaml with a run.py beside it; serve alone with `reef serve -c FILE`")


def wait(server: subprocess.Popen[bytes], args: argparse.Namespace, patience: float = 600.0) -> tuple[str, str | None]:
    """The address and token of a server that was just started, once it answers /readyz."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise ReefError("the server ended before it was ready; see above")
        found = api.find(args)
        if state.held(found.state_dir) and (found.state_dir / "run" / "address").exists():
            with api.Api(found) as client:
                try:
                    client.get("/readyz")
                    return found.url, found.token
                except ReefError:
                    pass
        time.sleep(0.2)
    raise ReefError(f"the server was not ready after {patience:.0f} s; see the logs in its state folder")
