"""The harness that a scenario serves: its entries, a client's files of it, its history, and the installer.

Knows: which release is asked for, what changed since another, the address that a client reaches this server at.
Does not know: how a tree becomes files (`harness.agents`), or what happens on the user's machine (`harness.install`).

The served harness is for whoever may ask for answers (`infer`): that is who installs it. Other releases need `read`.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from reef.core.errors import ConfigError, ConflictError, InputError, MissingError, ModelError
from reef.core.ids import AUTHORITY, is_address
from reef.core.nouns import Part, Release, Serving
from reef.gateway.call import Call
from reef.gateway.views import MOST, PAGE, only
from reef.gateway.why import view
from reef.harness import install
from reef.harness.agents import AGENTS, Agent, Door, agent, render
from reef.harness.tree import Entry

if TYPE_CHECKING:
    from reef.gateway.app import App

_FROM = re.compile(r" \(from rep_[\w-]+(?:, rep_[\w-]+)*(?: and \d+ more)?\)")
_NUMBER = re.compile(r"[0-9]{1,6}")  # a prefix of an id is longer
_YES = ("true", "1")
SEEN = 50
"""Releases whose reasons are told of, at most."""


async def served(app: App, call: Call) -> None:
    """`{scenario, release_id, seq, reason, entries}`; with `adapter` also its `files` and their `digests`; with `since`
    also `changes`, null when that release is not known any more. `brief=true` leaves entries and files out;
    `provenance=true` says where each entry comes from (right `read`; see `scenario.origin`)."""
    given = only(call.queries(), ("release_id", "adapter", "since", "brief", "provenance"))
    brief = given.get("brief") in _YES
    release, entries = await _wanted(app, call, given.get("release_id"))
    body: dict[str, Any] = {
        "scenario": release.scenario,
        "release_id": release.id,
        "seq": release.seq,
        "reason": release.reason,
    }
    if not brief:
        body["entries"] = [_entry(entry) | {"config": entry.config} for entry in entries]
        if given.get("provenance") in _YES:
            call.token.require("read")
            origins = {one.id: view(one) for one in await app.why.entries(release)}
            body["entries"] = [each | {"provenance": origins.get(each["id"])} for each in body["entries"]]
    if (name := given.get("adapter")) is not None:
        client, door = _adapter(name), _door(app, call, release.scenario)
        body |= {"adapter": name, "client": _client(client)}
        if not brief:
            files = await asyncio.to_thread(_render, client, entries, door)
            digests = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in files.items()}
            body |= {"files": files, "digests": digests}
    if (since := given.get("since")) is not None:
        body["changes"] = await _changes(app, release, entries, since)
    await call.json(200, body)


async def adapters(app: App, call: Call) -> None:
    """`{adapters}`: the clients a harness can be installed for, and the exact version of each."""
    only(call.queries(), ())
    await call.json(200, {"adapters": [_client(_adapter(name)) for name in AGENTS]})


async def releases(app: App, call: Call) -> None:
    """`{releases, next}`: those that changed the harness, newest first, with what each changed."""
    given = only(call.queries(), ("after", "limit"))
    limit = call.number("limit", PAGE, MOST) or PAGE
    scenario = app.known(call).scenario
    found = await asyncio.to_thread(_history, app, scenario, limit + 1, given.get("after"))
    shown = []
    for release, before in found[:limit]:
        now = await _entries(app, release)
        was = await _entries(app, before) if before is not None else ()
        shown.append(_release(release) | {"summary": _difference(was, now)})
    await call.json(200, {"releases": shown, "next": shown[-1]["release_id"] if len(found) > limit else None})


async def script(app: App, call: Call) -> None:
    """The installer, POSIX shell; `form=json` is the bundle inside it, from which installed wrappers update."""
    given = only(call.queries(), ("adapter", "release_id", "form"))
    if (name := given.get("adapter")) is None:
        raise InputError(f"say for which client: ?adapter=NAME, one of {', '.join(AGENTS)}", param="adapter")
    if given.get("form", "sh") not in ("sh", "json"):
        raise InputError("form is sh or json", param="form")
    client = _adapter(name)
    release, entries = await _wanted(app, call, given.get("release_id"))
    door = _door(app, call, release.scenario)
    origin = install.Origin(release.id, release.seq, release.reason, keyless=app.context.tokens.keyless)
    bundle = await asyncio.to_thread(_bundle, client, entries, door, origin)
    headers = {"cache-control": "no-store", "x-reef-release-id": release.id}
    if given.get("form") == "json":
        data = install.write(bundle)
        digest = {"x-reef-digest": hashlib.sha256(data).hexdigest()}
        await call.reply(200, data, headers | digest | {"content-type": "application/json"})
        return
    data = await asyncio.to_thread(install.script, bundle)
    await call.reply(200, data, headers | {"content-type": "text/plain; charset=utf-8"})


# --- releases ---------------------------------------------------------------------------------------------------------


async def _wanted(app: App, call: Call, release_id: str | None) -> tuple[Release, Sequence[Entry]]:
    """The release asked for, by id, prefix or number, or the one that is served; and its harness."""
    serving = app.known(call)
    wanted = (call.token.release_id or release_id or serving.release_id).strip()
    if _NUMBER.fullmatch(wanted):
        wanted = await asyncio.to_thread(_numbered, app, serving, int(wanted))
    if wanted not in (serving.release_id, call.token.release_id):
        call.token.require("read")
    shelved = await app.shelf.take(wanted, serving.scenario)
    return shelved.release, shelved.entries


def _numbered(app: App, serving: Serving, number: int) -> str:
    """The id of a release by its number, as `reef releases` lists them."""
    page = app.context.chain.history(serving.scenario, MOST)
    while page and page[-1].seq > number:
        page = app.context.chain.history(serving.scenario, MOST, page[-1].id)
    for release in page:
        if release.seq == number:
            return release.id
    raise MissingError(
        f"{serving.scenario} has no release number {number}; `reef releases` lists them", param="release_id"
    )


async def _entries(app: App, release: Release) -> Sequence[Entry]:
    return (await app.shelf.take(release.id, release.scenario)).entries


async def _changes(app: App, release: Release, entries: Sequence[Entry], since: str) -> dict[str, Any] | None:
    """What a release has that an earlier one had not, and why; None when that one is not known."""
    try:
        before = await app.shelf.take(since.strip(), release.scenario)
    except MissingError:
        return None
    told = await asyncio.to_thread(_path, app, release, before.release)
    return {**_difference(before.entries, entries), "releases": told}


def _path(app: App, release: Release, before: Release) -> list[dict[str, Any]]:
    """The releases by which an earlier one's harness became this one's, newest first, each with its `why`. From a
    rollback it goes on at the release that came back: what lies between is not in it."""
    wanted: str | None = release.id
    told: list[dict[str, Any]] = []
    for each, parent in _pairs(app, release.scenario):
        if each.seq <= before.seq or len(told) == SEEN:
            break
        if wanted not in (None, each.id):
            continue
        if _tree(each) == _tree(before):
            break
        if _tree(each) != _tree(parent):
            told.append(_release(each) | {"why": _why(app, each)})
        wanted = each.base if each.operation == "rollback" else None
    return told


def _why(app: App, release: Release) -> str:
    """A release's reason for who uses it: without the gate's sentence and the reports' ids, which `reef why` shows."""
    reason, gate = release.reason, release.evaluation
    if release.operation == "rollback" and release.base is not None:
        to = f"rolled back to release {app.context.chain.get(release.base).seq}"
        return f"{to}: {reason}" if reason else to
    if release.operation == "publish" and gate is not None:
        reason = "" if reason == gate.reason else reason.removesuffix(f" ({gate.reason})")
    return _FROM.sub("", reason)


def _history(app: App, scenario: str, limit: int, after: str | None) -> list[tuple[Release, Release | None]]:
    """Releases that changed the harness, newest first, each with the one before it."""
    pairs = _pairs(app, scenario, after)
    return list(islice(((one, before) for one, before in pairs if _tree(one) != _tree(before)), limit))


def _pairs(app: App, scenario: str, after: str | None = None) -> Iterator[tuple[Release, Release | None]]:
    """Releases newest first, each with the one before it. Blocks."""
    chain = app.context.chain
    page = chain.history(scenario, MOST, after)
    while page:
        following = chain.history(scenario, MOST, page[-1].id)
        yield from zip(page, [*page[1:], *following[:1], None], strict=False)
        page = following


def _tree(release: Release | None) -> Mapping[str, tuple[str, int]] | None:
    part: Part | None = release.parts.get("harness") if release is not None else None
    return part.files if part is not None else None


def _difference(before: Sequence[Entry], after: Sequence[Entry]) -> dict[str, list[dict[str, str]]]:
    was, now = ({entry.id: entry for entry in entries} for entries in (before, after))
    return {
        "added": [_entry(entry) for id_, entry in now.items() if id_ not in was],
        "changed": [_entry(entry) for id_, entry in now.items() if id_ in was and was[id_] != entry],
        "removed": [_entry(entry) for id_, entry in was.items() if id_ not in now],
    }


def _entry(entry: Entry) -> dict[str, Any]:
    return {"id": entry.id, "kind": entry.kind}


def _release(release: Release) -> dict[str, Any]:
    return {
        "release_id": release.id,
        "seq": release.seq,
        "operation": release.operation,
        "reason": release.reason,
        "created_at": release.created_at,
    }


# --- clients ----------------------------------------------------------------------------------------------------------


def _adapter(name: str) -> Agent:
    """By its short name only: a dotted path in a request would load any module there is."""
    if name not in AGENTS:
        raise InputError(f"no adapter {name[:40]!r}; there are: {', '.join(AGENTS)}", param="adapter")
    return agent(name)


def _client(made: Agent) -> dict[str, str]:
    client = made.client
    return {
        "adapter": made.name,
        "package": client.package,
        "version": client.version,
        "program": client.program,
        "node": client.node,
    }


def _render(made: Agent, entries: Sequence[Entry], door: Door) -> dict[str, str]:
    try:
        return render(made, entries, door)
    except ValueError as error:
        raise _unrendered(made, error) from error


def _bundle(made: Agent, entries: Sequence[Entry], door: Door, origin: install.Origin) -> dict[str, Any]:
    try:
        return install.bundle(made, entries, door, origin)
    except ValueError as error:
        raise _unrendered(made, error) from error


def _unrendered(made: Agent, error: ValueError) -> ConflictError:
    return ConflictError(f"this harness cannot be installed for {made.name}: {error}; change or remove that entry")


# --- the address ------------------------------------------------------------------------------------------------------


def _door(app: App, call: Call, scenario: str) -> Door:
    return Door(address(app.context.public_url, call), scenario, _model(app, scenario))


def _model(app: App, scenario: str) -> str:
    """A model that the scenario answers: any name where one engine does, else the first of those it lists."""
    name = Door("", scenario).model
    try:
        app.context.route(scenario, name)
    except ModelError:
        listed = app.context.models or tuple(app.context.engines)
        return listed[0] if listed else name
    return name


def address(public: str | None, call: Call) -> str:
    """The address a client reaches this server at: as configured, as a proxy on this machine tells, or as asked for.

    It ends in files and scripts, so nothing but a scheme, a host and a port passes.
    """
    if public is not None:
        if not is_address(public):
            raise ConfigError(f"reef.public_url is {public[:80]!r}; write it as https://host or https://host:port")
        return public.rstrip("/")
    scheme, host = str(call.scope.get("scheme", "http")), call.headers.get("host")
    if _near(call.scope.get("client")):
        scheme = _first(call.headers.get("x-forwarded-proto")) or scheme
        host = _first(call.headers.get("x-forwarded-host")) or host
    if host is None and (bound := call.scope.get("server")):
        host = f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"
    if scheme not in ("http", "https") or host is None or not AUTHORITY.fullmatch(host):
        raise InputError(
            "the address of this request is no plain http(s)://host:port, as install scripts need it: ask by another "
            "address, or set reef.public_url in the server's configuration",
            param="host",
        )
    return f"{scheme}://{host}"


def _near(client: Any) -> bool:
    """Whether the peer is on this machine: only such a proxy is believed."""
    try:
        found = ipaddress.ip_address(client[0])
    except (TypeError, IndexError, ValueError):
        return False
    mapped = getattr(found, "ipv4_mapped", None)
    return (mapped or found).is_loopback


def _first(value: str | None) -> str | None:
    return value.split(",")[0].strip() if value else None
