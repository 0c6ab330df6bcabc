"""GET /openapi.json: every route with its bodies, made from the route tables and the descriptions here.

Knows: OpenAPI 3.1, and each route's parameters, bodies and answers as JSON schemas. Does not know: how a route works.
A test holds the descriptions against the route tables, so neither has what the other lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import reef
from reef.cordis.compose import MAX_MUTATIONS
from reef.core.nouns import ActKind
from reef.experience.tree import Kind
from reef.gateway.call import Call
from reef.harness.agents import AGENTS
from reef.records.queue import STATES as ASK_STATES
from reef.records.queue import Kind as AskKind
from reef.scenario.story import STATES

if TYPE_CHECKING:
    from reef.gateway.app import App

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number", "minimum": -1e6, "maximum": 1e6}
_WHOLE: Schema = {"type": "integer", "minimum": 1}
_ANY: Schema = {"type": "object"}
_NAME: Schema = {"type": "string", "pattern": "^[a-z0-9][a-z0-9._-]{0,62}$"}
_RECEIPT: Schema = {"type": "string", "pattern": "^[0-9a-f]{32}$"}
_ASK: Schema = {"type": ["string", "null"], "pattern": "^ask_[A-Za-z0-9_-]{1,64}$"}


def _object(required: tuple[str, ...] = (), /, *, closed: bool = False, **fields: Schema) -> Schema:
    made: Schema = {"type": "object", "properties": fields}
    if required:
        made["required"] = list(required)
    if closed:
        made["additionalProperties"] = False
    return made


def _list(of: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": of, **more}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_MESSAGE = _object(("role",), role=_TEXT)
_MESSAGES = _list(_MESSAGE, minItems=1)
_INPUT: Schema = {"anyOf": [{"type": "string", "minLength": 1}, _list(_ANY, minItems=1)]}
_STREAM: Schema = {"type": "boolean"}

BODIES: Mapping[str, Schema] = {
    "Chat": _object(("messages",), messages=_MESSAGES, model=_TEXT, stream=_STREAM, max_completion_tokens=_WHOLE),
    "Responses": _object(("input",), input=_INPUT, model=_TEXT, stream=_STREAM, previous_response_id=_or_null(_TEXT)),
    "Messages": _object(("messages", "max_tokens"), messages=_MESSAGES, model=_TEXT, max_tokens=_WHOLE, stream=_STREAM),
    "Counted": _object(("messages",), messages=_MESSAGES, model=_TEXT),
    "Embeddings": _object(
        ("input",), input={"anyOf": [{"type": "string", "minLength": 1}, _list({}, minItems=1)]}, model=_TEXT
    ),
    "Report": _object(
        closed=True,
        references=_list(_TEXT, minItems=1, maxItems=1000),
        session=_or_null({"type": "string", "minLength": 1}),
        score=_or_null(_NUMBER),
        metrics={"type": "object", "additionalProperties": _NUMBER},
        per_receipt={"type": "object", "additionalProperties": _NUMBER},
        feedback={"type": ["string", "object", "null"]},
        choice={"type": ["integer", "null"], "minimum": 0},
        demonstration={"type": ["string", "object", "null"]},
        metadata={"type": ["object", "null"]},
        agent_record_id={"type": ["string", "null"], "pattern": "^rep_[A-Za-z0-9_-]{1,64}$"},
    ),
    "Import": _ANY,
    "Imports": _object(("records",), records=_list(_ANY)),
    "NewScenario": _object(("name",), name=_NAME),
    "Rollback": _object(
        ("release_id",),
        closed=True,
        release_id={"type": "string", "minLength": 1},
        reason=_TEXT,
        expected=_or_null(_TEXT),
    ),
    "Changes": _object(recipe=_or_null(_TEXT), gate=_or_null(_ANY), releases=_or_null(_ANY)),
    "Reason": _object(closed=True, reason=_or_null(_TEXT)),
    "Pin": _object(closed=True, release_id=_or_null(_TEXT), reason=_or_null(_TEXT)),
    "Promotion": _object(
        closed=True, reason=_or_null(_TEXT), expected=_or_null(_TEXT), force=_or_null({"type": "boolean"})
    ),
    "Rejection": _object(closed=True, reason=_or_null(_TEXT), expected=_or_null(_TEXT)),
    "Proposed": _object(
        ("mutations", "reason"),
        closed=True,
        mutations=_list(
            _object(
                ("op", "id"),
                closed=True,
                op={"enum": ["create", "update", "remove"]},
                id={"type": "string", "pattern": "^[a-z0-9][a-z0-9._-]{0,63}$"},
                kind=_or_null(_TEXT),
                config={},
            ),
            minItems=1,
            maxItems=MAX_MUTATIONS,
        ),
        reason={"type": "string", "minLength": 1, "maxLength": 500},
        id=_ASK,
    ),
    "Instruction": _object(
        ("text",),
        closed=True,
        text={"type": "string", "minLength": 1, "maxLength": 16000},
        session=_or_null(_TEXT),
        release_id=_or_null(_TEXT),
        part=_or_null({"enum": ["weights", "harness"]}),
        id=_ASK,
    ),
}
"""What routes take. Where extra fields are allowed, they pass to the engine as they are."""

_PAGE = _or_null({"type": ["integer", "string"]})
_USAGE = _or_null(_ANY)
_CANDIDATE = _object(
    ("candidate_id", "scenario", "part", "state", "fits"),
    candidate_id=_TEXT,
    scenario=_NAME,
    part={"enum": ["weights", "harness"]},
    state={"enum": list(STATES)},
    fits={"type": "boolean"},
    verdict=_or_null(_TEXT),
    reason=_or_null(_TEXT),
    evaluation=_or_null(_ANY),
    release_id=_or_null(_TEXT),
)
_SOME = _or_null({"type": "integer"})
_SESSION = _object(
    ("session", "last_seq", "count", "first_at", "last_at", "named", "within"),
    session=_TEXT,
    last_seq={"type": "integer"},
    count={"type": "integer"},
    first_at=_or_null({"type": "number"}),
    last_at=_or_null({"type": "number"}),
    named={"type": "boolean"},
    within=_or_null(_TEXT),
    branches=_SOME,
    sides=_SOME,
    retries=_SOME,
)
_PLACE = _object(
    ("record", "session", "parent", "kind", "segment", "branch", "turn", "note"),
    record=_RECEIPT,
    session=_TEXT,
    parent=_or_null(_RECEIPT),
    kind={"enum": list(get_args(Kind))},
    segment={"type": "integer", "minimum": 0},
    branch=_TEXT,
    turn={"type": "integer", "minimum": 0},
    note=_TEXT,
)
_PROPOSAL = _object(
    ("id", "scenario", "part", "kind", "state", "said", "candidate", "release_id", "actor", "created_at"),
    id=_TEXT,
    scenario=_NAME,
    part={"enum": ["weights", "harness"]},
    kind={"enum": list(get_args(AskKind))},
    state={"enum": list(ASK_STATES)},
    said=_TEXT,
    candidate=_or_null(_TEXT),
    release_id=_or_null(_TEXT),
    actor=_TEXT,
    created_at={"type": "number"},
)
ANSWERS: Mapping[str, Schema] = {
    "Error": _object(
        ("error",),
        error=_object(("message", "type"), message=_TEXT, type=_TEXT, code=_or_null(_TEXT), param=_or_null(_TEXT)),
    ),
    "AnthropicError": _object(
        ("type", "error"),
        type={"const": "error"},
        error=_object(("type", "message"), type=_TEXT, message=_TEXT),
        request_id=_TEXT,
    ),
    "ChatAnswer": _object(("choices",), id=_TEXT, choices=_list(_ANY), usage=_USAGE),
    "ResponsesAnswer": _object(("id", "output"), id=_TEXT, output=_list(_ANY), status=_TEXT, usage=_USAGE),
    "MessagesAnswer": _object(("id", "content"), id=_TEXT, content=_list(_ANY), stop_reason=_or_null(_TEXT)),
    "Count": _object(("input_tokens",), input_tokens={"type": "integer", "minimum": 0}),
    "EmbeddingsAnswer": _object(("data",), data=_list(_ANY)),
    "Models": _object(("object", "data"), object={"const": "list"}, data=_list(_ANY), has_more={"type": "boolean"}),
    "Model": _object(("id",), id=_TEXT, object=_TEXT),
    "Reported": _object(
        ("agent_record_id", "scenario", "request_type", "duplicate"),
        agent_record_id=_TEXT,
        scenario=_NAME,
        request_type={"const": "report"},
        duplicate={"type": "boolean"},
        records=_WHOLE,
    ),
    "Imported": _ANY,
    "Scenarios": _object(("scenarios",), scenarios=_list(_ANY)),
    "Scenario": _object(("name", "release_id"), name=_NAME, release_id=_TEXT),
    "Records": _object(("records", "next"), records=_list(_ANY), next=_PAGE),
    "Record": _object(("agent_record_id", "status"), agent_record_id=_RECEIPT, status=_TEXT),
    "Reports": _object(("reports", "next"), reports=_list(_ANY), next=_PAGE),
    "Sessions": _object(
        ("sessions", "next", "joined"), sessions=_list(_SESSION), next=_PAGE, joined={"type": "boolean"}
    ),
    "Session": _object(
        ("session", "records", "next", "joined"),
        session=_TEXT,
        records=_list(_object(("agent_record_id", "seq", "place"), place=_or_null(_PLACE))),
        next=_PAGE,
        joined={"type": "boolean"},
    ),
    "Releases": _object(("releases", "next"), releases=_list(_ANY), next=_PAGE),
    "Release": _object(("release_id", "seq"), release_id=_TEXT, seq={"type": "integer"}),
    "Candidates": _object(("candidates", "known"), candidates=_list(_CANDIDATE), known={"type": "boolean"}),
    "Candidate": _CANDIDATE,
    "WholeCandidate": {
        "allOf": [_CANDIDATE, _object(("diff", "looks"), diff=_ANY, looks=_list(_ANY), acts=_list(_ANY), learnt=_ANY)]
    },
    "Proposals": _object(("proposals", "next"), proposals=_list(_PROPOSAL), next=_PAGE),
    "Proposal": _PROPOSAL,
    "Archived": _object(("name", "archived"), name=_NAME, archived={"type": "boolean"}),
    "Unpinned": _object(("name", "unpinned"), name=_NAME, unpinned={"type": "boolean"}),
    "Why": _object(
        ("kind", "id", "scenario", "unknown"),
        kind={"enum": ["record", "report", "release", "candidate", "ask"]},
        id=_TEXT,
        scenario=_NAME,
        unknown=_list(_TEXT),
    ),
    "Act": _object(
        ("seq", "scenario", "kind", "ref", "actor", "reason", "at"),
        seq={"type": "integer"},
        scenario=_NAME,
        kind={"enum": list(get_args(ActKind))},
        ref=_TEXT,
        actor=_TEXT,
        reason=_TEXT,
        at={"type": "number"},
    ),
    "Harness": _object(
        ("scenario", "release_id", "seq", "reason"),
        scenario=_NAME,
        release_id=_TEXT,
        seq={"type": "integer"},
        reason=_TEXT,
        entries=_list(_object(("id", "kind", "config"), id=_TEXT, kind=_TEXT, config=_ANY)),
        adapter=_TEXT,
        client=_ANY,
        files={"type": "object", "additionalProperties": _TEXT},
        digests={"type": "object", "additionalProperties": _TEXT},
        changes=_or_null(_ANY),
    ),
    "Adapters": _object(("adapters",), adapters=_list(_ANY)),
    "HarnessReleases": _object(
        ("releases", "next"),
        releases=_list(_object(("release_id", "seq", "reason", "summary"), summary=_ANY)),
        next=_or_null(_TEXT),
    ),
    "Hello": _object(("name", "version"), name=_TEXT, version=_TEXT),
    "Document": _object(("openapi", "paths"), openapi=_TEXT, paths=_ANY),
    "Status": _object(("status",), status=_TEXT),
}

_AFTER: Schema = {"type": "integer", "minimum": 1}
_PAGED = {"after": _AFTER, "limit": _WHOLE}
_WHEN: Schema = {"type": "string"}
_FILTERS: Mapping[str, Schema] = {
    "session": _TEXT,
    "release_id": _TEXT,
    "status": {"enum": ["open", "complete", "interrupted", "aborted", "failed", "rejected"]},
    "purpose": {"enum": ["live", "evaluation", "probe", "self"]},
    "since": _WHEN,
    "until": _WHEN,
    "min_score": _NUMBER,
    "max_score": _NUMBER,
    "tag": {"type": "string", "description": "name:value"},
}

Described = tuple[str, str | None, str, Mapping[str, Schema]]
ROUTES: Mapping[tuple[str, str], Described] = {
    ("POST", "/v1/chat/completions"): ("OpenAI Chat Completions, JSON and SSE", "Chat", "ChatAnswer", {}),
    ("POST", "/v1/responses"): ("OpenAI Responses, JSON and SSE", "Responses", "ResponsesAnswer", {}),
    ("GET", "/v1/responses/{id}"): ("A response that was recorded", None, "ResponsesAnswer", {}),
    ("POST", "/v1/messages"): ("Anthropic Messages, JSON and SSE", "Messages", "MessagesAnswer", {}),
    ("POST", "/v1/messages/count_tokens"): ("Count a request's tokens; not recorded", "Counted", "Count", {}),
    ("POST", "/v1/embeddings"): ("Embeddings, by an engine that has them", "Embeddings", "EmbeddingsAnswer", {}),
    ("GET", "/v1/models"): ("Models, for both SDK families", None, "Models", {"limit": _WHOLE}),
    ("GET", "/v1/models/{id}"): ("One model", None, "Model", {}),
    ("POST", "/reef/report"): ("Feedback that quotes receipts, or names a session", "Report", "Reported", {}),
    ("POST", "/reef/train"): ("Queue an instruction in words", "Instruction", "Proposal", {}),
    ("POST", "/reef/harness/proposals"): ("Propose an edit of the harness", "Proposed", "Proposal", {}),
    ("GET", "/reef/harness/proposals"): (
        "What was proposed and asked for, the newest first",
        None,
        "Proposals",
        {**_PAGED, "state": {"enum": list(ASK_STATES)}},
    ),
    ("GET", "/reef/harness/proposals/{id}"): ("What became of one proposal", None, "Proposal", {}),
    ("POST", "/reef/records"): ("Import one finished exchange or report", "Import", "Imported", {}),
    ("POST", "/reef/records/batch"): ("Import many, all or none", "Imports", "Imported", {}),
    ("GET", "/"): ("Who answers here", None, "Hello", {}),
    ("GET", "/api/hello"): ("Who answers here", None, "Hello", {}),
    ("GET", "/healthz"): ("The process answers", None, "Status", {}),
    ("GET", "/readyz"): ("The next request would be answered and stored", None, "Status", {}),
    ("GET", "/openapi.json"): ("This document", None, "Document", {}),
    ("GET", "/metrics"): ("Metrics in Prometheus' text format", None, "text", {}),
    ("GET", "/reef/status"): ("What is served and learnt", None, "Status", {}),
    ("GET", "/reef/events"): (
        "What is done to releases, as it happens (server-sent events)",
        None,
        "Act",
        {"after": {"type": "integer", "minimum": 0}, "scenario": _NAME},
    ),
    ("GET", "/reef/harness"): (
        "The served harness: entries, a client's files, what changed",
        None,
        "Harness",
        {"release_id": _TEXT, "adapter": {"enum": sorted(AGENTS)}, "since": _TEXT}
        | {"brief": {"type": "boolean"}, "provenance": {"type": "boolean"}},
    ),
    ("GET", "/reef/harness/adapters"): ("Clients that a harness can be installed for", None, "Adapters", {}),
    ("GET", "/reef/harness/install"): (
        "A shell script that installs a client with the harness",
        None,
        "text",
        {"adapter": {"enum": sorted(AGENTS)}, "release_id": _TEXT, "form": {"enum": ["sh", "json"]}},
    ),
    ("GET", "/reef/harness/releases"): (
        "Releases that changed the harness, newest first",
        None,
        "HarnessReleases",
        {"after": _TEXT, "limit": _WHOLE},
    ),
    ("GET", "/reef/scenarios"): ("The scenarios a token may see", None, "Scenarios", {}),
    ("POST", "/reef/scenarios"): ("Create a scenario", "NewScenario", "Scenario", {}),
    ("GET", "/reef/scenarios/{s}"): ("One scenario", None, "Scenario", {}),
    ("PATCH", "/reef/scenarios/{s}"): ("Change settings; null takes one back", "Changes", "Scenario", {}),
    ("DELETE", "/reef/scenarios/{s}"): ("Archive a scenario", None, "Archived", {"reason": _TEXT}),
    ("POST", "/reef/scenarios/{s}/restore"): ("Bring an archived scenario back", "Reason", "Scenario", {}),
    ("POST", "/reef/scenarios/{s}/pin"): ("Keep a scenario at a release; hold what is accepted", "Pin", "Release", {}),
    ("DELETE", "/reef/scenarios/{s}/pin"): ("Take the pin off", None, "Unpinned", {"reason": _TEXT}),
    ("GET", "/reef/scenarios/{s}/candidates"): (
        "Candidates, the newest look first",
        None,
        "Candidates",
        {"limit": _WHOLE, "state": _CANDIDATE["properties"]["state"]},
    ),
    ("GET", "/reef/scenarios/{s}/candidates/{id}"): (
        "One candidate: its looks and what it changes",
        None,
        "WholeCandidate",
        {},
    ),
    ("POST", "/reef/scenarios/{s}/candidates/{id}/promote"): ("Serve a candidate", "Promotion", "Release", {}),
    ("POST", "/reef/scenarios/{s}/candidates/{id}/reject"): (
        "Turn a held candidate down",
        "Rejection",
        "Candidate",
        {},
    ),
    ("GET", "/reef/why/{id}"): (
        "Why: a record, report, release, candidate or ask, forward and back",
        None,
        "Why",
        {"limit": _WHOLE, "units": _WHOLE, "releases": _WHOLE},
    ),
    ("GET", "/reef/scenarios/{s}/releases"): (
        "Releases, newest first",
        None,
        "Releases",
        {"after": _TEXT, "limit": _WHOLE, "all": {"type": "boolean"}},
    ),
    ("GET", "/reef/scenarios/{s}/releases/{id}"): ("One release or candidate", None, "Release", {}),
    ("POST", "/reef/scenarios/{s}/rollback"): ("Serve an earlier release again", "Rollback", "Release", {}),
    ("GET", "/reef/scenarios/{s}/records"): ("Records, newest first", None, "Records", {**_PAGED, **_FILTERS}),
    ("GET", "/reef/scenarios/{s}/records/{id}"): ("One record, whole", None, "Record", {}),
    ("GET", "/reef/scenarios/{s}/reports"): (
        "Reports, newest first",
        None,
        "Reports",
        {**_PAGED, **{name: _FILTERS[name] for name in ("since", "until", "min_score", "max_score")}},
    ),
    ("GET", "/reef/scenarios/{s}/sessions"): ("Sessions, newest first", None, "Sessions", {**_PAGED}),
    ("GET", "/reef/scenarios/{s}/sessions/{id}"): (
        "A session's records, oldest first, each with its place",
        None,
        "Session",
        {**_PAGED},
    ),
}
"""(method, path) → what it is for, the name of its body and of its answer, and its query parameters."""

OPEN = {"/", "/api/hello", "/healthz", "/readyz", "/openapi.json"}
CREATED = {("POST", "/reef/scenarios")}
QUEUED = {("POST", "/reef/train"), ("POST", "/reef/harness/proposals")}
OPTIONAL = {"Reason", "Pin", "Promotion", "Rejection"}  # bodies that may be left out
_STREAMED = {"Chat", "Responses", "Messages"}
_STATUSES = {
    "400": "a field is wrong; `param` names it",
    "401": "no token, or a wrong one",
    "403": "the token lacks the right, or is not for this scenario",
    "404": "no such route, scenario, record, release or model",
    "405": "the route does not take this method",
    "408": "the body did not come in time",
    "409": "same id with other content, or somebody moved first",
    "413": "the body is too large",
    "415": "the body's type or encoding is not supported",
    "429": "too many at once, or a limit of the token; `retry-after` says when",
    "500": "a fault of Reef's own",
    "502": "the provider failed",
    "503": "store or engine not ready; `retry-after` says when",
    "504": "the provider did not answer in time",
}


async def openapi(app: App, call: Call) -> None:
    """GET /openapi.json"""
    await call.json(200, document())


@functools.cache
def document() -> dict[str, Any]:
    """The whole document. The same routes also answer below `/s/{scenario}` where they begin with `/v1`."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), described in ROUTES.items():
        paths.setdefault(path, {})[method.lower()] = _operation(method, path, *described)
        if path in OPEN and path not in ("/openapi.json",):
            paths[path]["head"] = {**paths[path]["get"], "operationId": f"head {path}", "responses": _silent(path)}
    token = {"type": "http", "scheme": "bearer", "description": "or the same token in the header x-api-key"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Reef", "version": reef.__version__, "description": "An inference server that learns."},
        "paths": paths,
        "components": {
            "schemas": {**BODIES, **ANSWERS},
            "securitySchemes": {"token": token},
        },
    }


def _operation(
    method: str, path: str, summary: str, body: str | None, answer: str, query: Mapping[str, Schema]
) -> dict[str, Any]:
    operation: dict[str, Any] = {"operationId": f"{method.lower()} {path}", "summary": summary}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _NAME if name == "s" else _TEXT}
        for name in ("s", "id")
        if f"{{{name}}}" in path
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in query.items()]
    if path.startswith("/v1/"):
        parameters.append({"name": "x-reef-scenario", "in": "header", "schema": _NAME})
    if parameters:
        operation["parameters"] = parameters
    if body is not None:
        operation["requestBody"] = {
            "required": body not in OPTIONAL,
            "content": {"application/json": {"schema": _ref(body)}},
        }
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if answer == "text":
        content = {"text/plain": {"schema": _TEXT}}
        if path == "/reef/harness/install":
            content["application/json"] = {"schema": _ANY}
    elif body in _STREAMED:
        content["text/event-stream"] = {}
    elif path == "/reef/events":
        content = {"text/event-stream": {"schema": _ref(answer)}}
    good = "201" if (method, path) in CREATED else "202" if (method, path) in QUEUED else "200"
    responses: dict[str, Any] = {good: {"description": "done", "content": content}}
    error = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    for status, text in _STATUSES.items():
        responses[status] = {"description": text, "content": {"application/json": {"schema": _ref(error)}}}
    if path == "/readyz":
        responses["503"] = {"description": "not ready", "content": {"application/json": {"schema": _ref("Status")}}}
    operation["responses"] = responses
    if path not in OPEN:
        operation["security"] = [{"token": []}]
    return operation


def _silent(path: str) -> dict[str, Any]:
    statuses = ("200", "503") if path == "/readyz" else ("200",)
    return {status: {"description": "as GET, without a body"} for status in statuses}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}
