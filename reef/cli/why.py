"""`reef why ID`: which release gave an answer, what it learnt from, what it was measured against, who let it in.

Knows: the story as the server (or the state folder) tells it, as a tree for people. Does not know: how it is found.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from reef.cli import options, reader, show
from reef.cli.api import Found, connect, either, find
from reef.cli.rollback import by_chain, by_server
from reef.core.errors import ReefError

if TYPE_CHECKING:
    from rich.tree import Tree

SHOWN = 20  # entries, and lines of each
FEW = 3  # units, reports and people of one entry
REASON = 100  # characters of a release's reason beside an entry


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "why",
        help="why an answer is as it is: release, evidence, what it learnt from (also without a server)",
        description="The story of an answer (by its receipt or another id of it), a report, a release, a candidate "
        "or an ask: which release, what it learnt from, what it was measured against, what was turned down, who let "
        "it in; and forward, which releases it influenced.",
    )
    parser.add_argument(
        "id", help="a receipt or answer id, a report id, a release or candidate, a release number, or an ask"
    )
    parser.add_argument("-n", "--limit", type=int, default=20, metavar="N", help="of each list (default: 20)")
    parser.add_argument("--units", type=int, metavar="N", help="go on after the first N units it learnt from")
    parser.add_argument("--releases", type=int, metavar="N", help="go on after the first N releases")
    options.server(parser)
    options.reading(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    place = find(args)
    found = either(place, lambda: _ask(args), lambda: _folder(place, args))
    if args.json:
        return show.dump(found)
    if found["kind"] == "record":
        _count(args, found)
    import rich.console

    console = rich.console.Console(markup=False, highlight=False)
    if not console.is_terminal:
        console = rich.console.Console(markup=False, highlight=False, width=1000)
    console.print(tree(found), soft_wrap=not console.is_terminal)
    return 0


def _ask(args: argparse.Namespace) -> dict[str, Any]:
    with connect(args) as api:
        wanted = by_server(api, f"/reef/scenarios/{api.found.scenario}", args.id)
        path = f"/reef/why/{quote(wanted, safe='')}"
        more = {"units": args.units, "releases": args.releases}
        return dict(api.get(path, limit=args.limit, **{name: value for name, value in more.items() if value}))


def _count(args: argparse.Namespace, found: dict[str, Any]) -> None:
    """Add how full the batches are that its units wait for, where a server is there to say so."""
    waits = [item for item in found["lessons"] if item["fate"] == "pending" and item["part"]]
    if not waits:
        return
    with contextlib.suppress(ReefError), connect(args) as api:
        shown = api.get("/reef/status")["scenarios"].get(found["scenario"]) or {}
        for item in waits:
            work = ((shown.get("learner") or {}).get("parts") or {}).get(item["part"])
            if work and work.get("batch_size"):
                item["said"] += f" ({work['pending']} of {work['batch_size']} units are there)"


def _folder(place: Found, args: argparse.Namespace) -> dict[str, Any]:
    from reef.gateway.why import explain, view
    from reef.scenario.story import Page
    from reef.scenario.why import Why

    async def ask(asked: Why, scenarios: list[str]) -> dict[str, Any]:
        wanted = by_chain(asked.chain, place.scenario, args.id)
        page = Page(max(1, args.limit), args.units or 0, args.releases or 0)
        return dict(view(await explain(asked, wanted, [args.scenario] if args.scenario else scenarios, page)))

    return reader.asking(place, ask)


# --- the tree ---------------------------------------------------------------------------------------------------------


def tree(found: dict[str, Any]) -> Tree:
    from rich.tree import Tree

    root = Tree(_text(f"{found['kind']} {found['id']} of {found['scenario']}"))
    {"record": _record, "report": _report, "release": _release, "candidate": _candidate, "ask": _asked}[found["kind"]](
        root, found
    )
    if found["unknown"]:
        _branch(root, "not known", found["unknown"])
    return root


def _record(root: Tree, found: dict[str, Any]) -> None:
    record = found["record"]
    if record is None:
        root.add(_text("erased on request; what was learnt from it stays in the releases below"))
    else:
        root.add(
            _text(f"{record['status']} {record['purpose']} answer of {show.when(record['timing']['received_at'])}")
        )
    _branch(root, f"{len(found['reports'])} reports on it", [_said(item) for item in found["reports"]])
    _branch(root, "what became of them", [_lesson(item) for item in found["lessons"]])
    _briefs(root, "releases that learnt from it, or come from one that did", found["influenced"])
    if found["release"] is not None:
        story = found["release"]
        _release(root.add(_text(f"answered by release {story['release']['seq']} ({story['id'][:10]})")), story)


def _report(root: Tree, found: dict[str, Any]) -> None:
    root.add(_text(f"{show.when(found['report']['created_at'])}: {_said(found['report'])}"))
    quoted = [
        f"{name}: erased" if record is None else f"{name}, answered by release {record['release_id'][:10]}"
        for name, record in found["records"].items()
    ]
    if found["next"] is not None:
        quoted.append(f"more: --units {found['next']}")
    _branch(root, f"quotes {found['quoted']}", quoted)
    _branch(root, "what became of it", [_lesson(item) for item in found["lessons"]])
    _briefs(root, "releases it influenced", found["influenced"])
    root.add(_text("what is served now " + ("comes from it" if found["served"] else "does not come from it")))


def _release(root: Tree, found: dict[str, Any]) -> None:
    release, approved = found["release"], found["approved"]
    now = ", served now" if found["current"] else ""
    root.add(_text(f"release {release['seq']}, {release['operation']} at step {release['step']}{now}"))
    if found["brought"]["release_id"] != found["id"]:
        root.add(_text(f"its parts are those of release {_name(found['brought'])}"))
    by = {"gate": "the gate let it in", "creation": "there from the beginning", "watch": "the watch rolled back"}
    said = by.get(approved["by"], f"{approved['actor']} decided it")
    root.add(_text(f"{said}, {show.when(approved['at'])}{_because(approved['reason'])}"))
    if (measured := found["measured"]) is not None:
        _evidence(root, measured)
    _branch(root, "measured again", [act["reason"] for act in found["remeasured"]])
    others = [act for act in found["acts"] if act["kind"] not in ("measure", "release", "create")]
    lines = [f"{show.when(a['at'])} {a['kind']} by {a['actor']}{_because(a['reason'])}" for a in others]
    _branch(root, "since then", lines)
    rejected = found["rejected"]
    if rejected["count"] is not None:
        lines = [
            f"{(row['candidate'] or row['line'])[:10]}, by {row['actor']}: {row['reason']}"
            for row in rejected["newest"]
        ]
        _branch(root, f"{rejected['count']} turned down since the release before", lines, always=True)
    _entries(root, found["entries"])
    _learnt(root, found["learnt"])
    _briefs(root, "releases it comes from", found["ancestry"])


def _candidate(root: Tree, found: dict[str, Any]) -> None:
    root.add(
        _text(
            f"{found['state']}, from release {(found['release']['base'] or '')[:10]}, step {found['release']['step']}"
        )
    )
    if found["became"] is not None:
        root.add(_text(f"it is release {_name(found['became'])}"))
    for look in found["looks"]:
        said = f"look {look['look']}, {show.when(look['at'])}, by {look['actor']}: {look['verdict']}: {look['reason']}"
        branch = root.add(_text(said))
        if look["evaluation"] is not None:
            _evidence(branch, look["evaluation"])
    _entries(root, found["entries"])
    _learnt(root, found["learnt"])
    _briefs(root, "releases it would come from", found["ancestry"])


def _asked(root: Tree, found: dict[str, Any]) -> None:
    ask, candidate = found["ask"], found["candidate"]
    words = ask["body"].get("text") or ask["body"].get("reason") or ""
    root.add(_text(f"{ask['kind']} by {ask['actor']}, {show.when(ask['created_at'])}{_because(words)}"))
    root.add(_text(f"{found['state']}, {show.when(ask['changed_at'])}{_because(found['said'])}"))
    if candidate is not None:
        _candidate(root.add(_text(f"it became candidate {candidate['id']}")), candidate)
    elif ask["release"] is not None:
        root.add(_text(f"it became release {ask['release']}"))


def _evidence(root: Tree, measured: dict[str, Any]) -> None:
    on = f" on {measured['suite']}" if measured["suite"] else ""
    against = f" against release {measured['incumbent_id'][:10]}" if measured["incumbent_id"] else ""
    branch = root.add(_text(f"measured by {measured['policy']}{against}{on}: {measured['reason']}"))
    for guard in measured["guards"]:
        branch.add(_text(show.guard(guard)))
    if (cost := measured["cost"]) is not None:
        money = "" if cost["money"] is None else f", {cost['money']:.4f} in money"
        tokens = cost["prompt_tokens"] + cost["output_tokens"]
        branch.add(_text(f"cost: {cost['calls']} calls, {tokens} tokens, {cost['seconds']:.1f} s{money}"))


def _entries(root: Tree, entries: list[dict[str, Any]]) -> None:
    """The harness tree with where it comes from, line by line as git blame shows a file."""
    if not entries:
        return
    branch = root.add(_text(f"harness: {len(entries)} {'entry' if len(entries) == 1 else 'entries'}"))
    for item in entries[:SHOWN]:
        leaf = branch.add(_text(f"{item['id']} ({item['kind']}): {origin(item)}"))
        for line in item["lines"][:SHOWN]:
            leaf.add(_text(f"{line['seq']} ({line['release_id'][:10]}) | {line['text']}"))
        if len(item["lines"]) > SHOWN:
            leaf.add(_text(f"{len(item['lines']) - SHOWN} more lines (--json has all)"))
    if len(entries) > SHOWN:
        branch.add(_text(f"{len(entries) - SHOWN} more entries (--json has all)"))


def origin(item: dict[str, Any]) -> str:
    """In a sentence: who brought an entry as it is now, and from what."""
    said = f"release {item['seq']} ({item['release_id'][:10]}), {item['operation']} by {item['actor']}"
    reason = item["reason"]
    said += _because(reason if len(reason) <= REASON else reason[: REASON - 1] + "…")
    if item["units"]:
        said += f"; learnt from {_names(item['units'])}"
    if item["reports"]:
        said += f"; reported in {_names(item['reports'])}"
    if item["people"]:
        said += f"; people behind it: {_names(item['people'])}"
    if item["forgotten"]:
        said += "; WHAT IT CAME FROM WAS FORGOTTEN"
    return said + (f" ({item['unsure']})" if item["unsure"] else "")


def _names(names: list[str]) -> str:
    return ", ".join(names[:FEW]) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


def _learnt(root: Tree, learnt: dict[str, Any]) -> None:
    lines = [f"{item['unit']} ({item['part']}, release {item['seq']})" for item in learnt["units"]]
    if learnt["next"] is not None:
        lines.append(f"more: --units {learnt['next']}")
    _branch(
        root,
        f"learnt from {show.count(learnt['own'], 'unit')} itself, {learnt['count']} with what it comes from",
        lines,
        always=True,
    )


def _briefs(root: Tree, title: str, found: dict[str, Any]) -> None:
    lines = [
        f"{_name(item)} {item['operation']} by {item['actor']}{_because(item['reason'])}" for item in found["releases"]
    ]
    if found["next"] is not None:
        lines.append(f"more: --releases {found['next']}")
    _branch(root, f"{title}: {found['count']}", lines, always=True)


def _branch(root: Tree, title: str, lines: list[str], *, always: bool = False) -> None:
    if lines or always:
        branch = root.add(_text(title))
        for line in lines:
            branch.add(_text(line))


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


def _lesson(item: dict[str, Any]) -> str:
    by = f" by report {item['report']}" if item["report"] else ""
    return f"{item['unit']}{' ' + item['part'] if item['part'] else ''}{by}: {item['said']}"


def _said(report: dict[str, Any]) -> str:
    scores = report["score"] if report["score"] is not None else ", ".join(map(str, report["per_receipt"].values()))
    words = [str(report[name]) for name in ("feedback", "demonstration") if report[name] is not None]
    return f"{report['agent_record_id']} {scores} {' / '.join(words)}".strip()


def _name(item: dict[str, Any]) -> str:
    return f"{item['seq']} ({item['release_id'][:10]})"


def _text(said: str) -> Any:
    """Words of clients are among it, so no markup and nothing that a terminal would act on."""
    from rich.text import Text

    return Text(" ".join(show.harmless(said).split()))
