"""The options that narrow records, the same for every command, and what they mean as a query.

Knows: their names. Does not know: how a query is answered; a wrong value is refused by whoever reads it (`views`).
"""

from __future__ import annotations

import argparse

from reef.core.errors import InputError
from reef.records import Query

_TEXTS = {
    "session": ("SESSION", "of this session"),
    "release-id": ("ID", "answered by this release (its whole id)"),
    "status": ("STATUS", "complete, interrupted, aborted, failed or rejected"),
    "purpose": ("PURPOSE", "live, evaluation, probe or self"),
    "tag": ("NAME=VALUE", "with this tag"),
    "since": ("TIME", "that came at this time or later: unix seconds or 2025-01-31T12:00 (UTC)"),
    "until": ("TIME", "that came before this time"),
    "min-score": ("N", "with a report that gives this score or more"),
    "max-score": ("N", "with a report that gives this score or less"),
}


def add(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add the options; all of them, or those named."""
    group = parser.add_argument_group("filters", "Only records …")
    for name in names or _TEXTS:
        metavar, text = _TEXTS[name]
        group.add_argument(f"--{name}", metavar=metavar, help=text)


def given(args: argparse.Namespace) -> dict[str, str]:
    """The filters that were given, as the server's routes name them."""
    found = {name.replace("-", "_"): getattr(args, name.replace("-", "_"), None) for name in _TEXTS}
    said = {name: str(value) for name, value in found.items() if value is not None}
    if "tag" in said:
        name, separator, value = said["tag"].partition("=")
        if not separator or not name:
            raise InputError("--tag is NAME=VALUE", param="tag")
        said["tag"] = f"{name}:{value}"
    return said


def query(args: argparse.Namespace, scenario: str, *, kind: str = "record") -> Query:
    """The query that the options make. InputError names the option that is wrong, as it is written."""
    from reef.gateway import views

    try:
        return views.filters(given(args), scenario, kind=kind)
    except InputError as error:
        name = error.param or ""
        option = "--" + name.replace("_", "-")
        if error.message.startswith("no parameter "):
            raise InputError(f"{option} is not for reports; leave it out", param=name) from None
        raise InputError(option + error.message.removeprefix(name), param=name) from None
