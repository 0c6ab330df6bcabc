"""The demo for an application that asks a model over HTTP, and has no place for rules and skills of its own.

Knows: the story, and that Reef puts the release's rules and the skills that fit into the application's requests.
Does not know: how that is done (`harness.apply`), or who measures.
"""

from __future__ import annotations

from typing import Any, Final

from reef.cli.demo import tasks
from reef.cli.demo.stage import Stage
from reef.cli.demo.tasks import Task

_MORE: Final = "harness: {apply: true}\n"


def play(here: Stage) -> dict[str, Any]:
    """The whole story; what came of it."""
    here.step("A server before the model; an application asks it for files, and checks what it gets")
    here.serve(tasks.questions(), reports=4, more=_MORE)
    before = {task.path: work(here, task) for task in tasks.LIVE}
    here.step(f"{sum(map(bool, before.values()))} of {len(before)} failed; each report says what the check said")
    release = here.released()
    here.step("A new release is served; the application asks again, unchanged")
    after = {task.path: work(here, task, report=False) for task in tasks.LIVE}
    here.step("What happened")
    rows = [["task", "before", "after"]]
    rows += [[path, "failed" if before[path] else "passed", "failed" if after[path] else "passed"] for path in before]
    here.table(rows)
    here.step("The release: why, what changed, evidence")
    here.page(release)
    return {
        "ok": not any(after.values()) and any(before.values()),
        "before": {path: not said for path, said in before.items()},
        "after": {path: not said for path, said in after.items()},
        "release": release,
    }


def work(here: Stage, task: Task, *, report: bool = True) -> str:
    """One request, its check and its report; what the check said, empty when it passed."""
    import httpx

    body = {"model": "any", "messages": [{"role": "user", "content": task.prompt}]}
    headers = {"authorization": f"Bearer {here.token}"}
    answer = httpx.post(f"{here.url}/v1/chat/completions", json=body, headers=headers, timeout=60)
    answer.raise_for_status()
    said = tasks.said(task, answer.json()["choices"][0]["message"]["content"])
    here.say(f"   {task.path}: {said.partition(': ')[2] or 'passed'}")
    if report:
        told = {"references": [answer.headers["x-reef-agent-record-id"]], "score": 0.0 if said else 1.0}
        here.post("/reef/report", told | ({"feedback": said} if said else {}))
    return said
