"""What a report on a session is about: the records of that session, as its client named it.

Knows: which records those are, and what to say when there are none. Does not know: reports' other fields.

- Live records that are complete or still being answered, the newest 1,000 of them; all of one scenario.
- Only those that were asked for with the token that reports: two users may both call a session `1`.
- A session is known from its first record on: a stream counts from the moment its headers went out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from reef.core.errors import InputError, MissingError
from reef.core.nouns import Json, Report
from reef.gateway.call import Call
from reef.gateway.session import fit
from reef.records.tokens import OLD

if TYPE_CHECKING:
    from reef.gateway.app import App

MOST = 1000


def named(body: Mapping[str, Json], headers: Mapping[str, str]) -> str | None:
    """The session that a report names, in its field or, when it quotes nothing, in the header x-reef-session."""
    given = body.get("session")
    quotes = body.get("references") is not None
    if given is None:
        header = headers.get("x-reef-session")
        return fit(header) if header and not quotes and not body.get("per_receipt") else None
    if quotes:
        raise InputError("give references or session, not both: a session stands for its receipts", param="session")
    if not isinstance(given, str) or not given:
        raise InputError("session must be the id that the client sent with its requests, a string", param="session")
    return fit(given)


def place(app: App, call: Call) -> str:
    """The scenario in which the session is looked for: a session's id says nothing of it."""
    return app.known(call).scenario


async def records(app: App, call: Call, scenario: str, session: str) -> tuple[str, ...]:
    """The receipts; MissingError when nothing is recorded of it."""
    found = tuple(await _store(app).quotable(scenario, session, _mine(call), MOST))
    if not found:
        raise MissingError(
            f"nothing is recorded of the session {session[:80]!r} in scenario {scenario!r} for this token: its "
            "requests send that id in x-reef-session (or a session header of their own), with the same token; another "
            "scenario is named in x-reef-scenario; else quote receipts in references",
            param="session",
        )
    return found


async def before(app: App, call: Call, scenario: str, session: str, report_id: Json) -> tuple[str, ...] | None:
    """What a report with this id quoted when it was stored, if it was on this session."""
    store = _store(app)
    if not isinstance(report_id, str) or not await store.known([report_id]):
        return None
    (report,) = await store.get([report_id])
    if not isinstance(report, Report) or report.scenario != scenario:
        return None
    sources = await store.sources(report.references)
    whole = sources.keys() == set(report.references)
    if not whole or {one.session for one in sources.values()} != {session}:
        return None
    (first,) = await store.get(report.references[:1])
    return report.references if first.tags.get("token") in _mine(call) else None


def _mine(call: Call) -> tuple[str | None, ...]:
    """What the tag `token` says in records of this token, also before and after it was rotated."""
    name = call.token.mark.get("token")
    return (None,) if name is None else (name.removesuffix(OLD), name.removesuffix(OLD) + OLD)


def _store(app: App) -> Any:
    """A store that finds sessions; others need not."""
    if not hasattr(app.context.store, "quotable"):
        raise MissingError("this record store cannot find sessions; quote receipts in references", param="session")
    return app.context.store
