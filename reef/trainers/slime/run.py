"""Slime's side: starts slime, and starts it again where a batch wants it to go on.

    python -m reef.trainers.slime.run --exchange FOLDER --save FOLDER -- python3 train.py ARGUMENTS

Knows: the arguments of slime that say what is loaded, saved and asked for batches; which rollout comes next.
Does not know: the model, its parallelism, the optimizer: those are the ARGUMENTS, as anybody starts slime.
Standard library alone.

- A killed slime goes on at its last saved rollout. One that ended because a batch starts elsewhere goes on there, under
  rollout numbers that were never used: nothing that was saved is overwritten.
- Anything else that ends it ends this too, with its exit status.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from reef.trainers.slime.exchange import Exchange, read, write

FOREVER = 1_000_000  # rollouts: until somebody stops it


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m reef.trainers.slime.run", description=__doc__.splitlines()[0])
    parser.add_argument("--exchange", required=True, type=Path, help="the folder of the trainer's option `exchange`")
    parser.add_argument("--save", required=True, type=Path, help="where slime keeps its own states")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- and slime's own command")
    wanted = parser.parse_args(given)
    command = wanted.command[1:] if wanted.command[:1] == ["--"] else wanted.command
    if not command:
        parser.error("slime's own command is missing: -- python3 train.py …")
    exchange = Exchange(wanted.exchange.absolute())
    save = wanted.save.absolute()
    while True:
        where = begin(exchange)
        ended = subprocess.run([*command, *arguments(exchange, save, where)])
        wanted_again = read(exchange.start) or {}
        if ended.returncode == 0 or not wanted_again.get("again"):
            return ended.returncode
        print(f"slime starts again at {wanted_again.get('name') or 'the base model'}", file=sys.stderr)


def begin(exchange: Exchange) -> int | None:
    """The rollout to load, None for the base model; `start.json` names its batch for `rollout.origin`."""
    said = read(exchange.start)
    if said is None:  # the first start, or one after a crash: at the newest weights that are known
        claims = sorted((int(path.stem) for path in (exchange.root / "rollouts").glob("[0-9]*.json")), reverse=True)
        for rollout in claims:
            name = (read(exchange.claim(rollout)) or {})["name"]
            found = read(exchange.weights(name))
            if found is not None and found["rollout"] == rollout:
                said = {"name": name, "rollout": rollout}
                break
        else:
            said = {"name": None, "rollout": None}
    said.pop("again", None)  # an order to start again is followed once: slime that cannot start says so by its end
    write(exchange.start, said)
    rollout_id = said["rollout"]
    return None if rollout_id is None else int(rollout_id)


def arguments(exchange: Exchange, save: Path, where: int | None) -> list[str]:
    used = [int(path.stem) for path in (exchange.root / "rollouts").glob("[0-9]*.json")]
    first = max(used, default=-1) + 1
    found = [
        "--debug-train-only",  # no engines of slime's own: Reef serves
        "--disable-rollout-global-dataset",
        "--rollout-function-path", "reef.trainers.slime.rollout.generate",
        "--rollout-buffer-url", str(exchange.root),
        "--num-rollout", str(FOREVER),
        "--start-rollout-id", str(first),
        "--save", str(save),
        "--save-hf", str(save / "hf" / "{rollout_id}"),
        "--save-interval", "1",
    ]  # fmt: skip
    return found if where is None else [*found, "--load", str(save), "--ckpt-step", str(where)]


if __name__ == "__main__":
    sys.exit(main())
