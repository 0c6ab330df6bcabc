"""A study's results as Markdown and JSON.

Knows: outcomes, demands, medians. Does not know: how they came about, or how a curve is drawn.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Sequence
from typing import Any

from reef.study import Demand, Study
from reef.study.runner import Outcome, results

_OWN = ("base", "end", "curve", "drift")  # figures that have a place of their own
DRIFT = {
    "kl": "KL",
    "kl_k3": "KL (k3)",
    "kl_back_k3": "KL back (k3)",
    "perplexity_before": "perplexity before",
    "perplexity_after": "after",
    "guard_before": "guard tasks before",
    "guard_after": "after",
}


def markdown(study: Study, found: Sequence[Outcome], demands: Sequence[Demand], command: str) -> str:
    """The whole page."""
    parts = [f"# {study.title}", _about(study, command), "", "## Result", "", *_result(study, found), ""]
    parts += [f"![curves]({stem(study)}.png)", "", "## Demands", ""]
    said = {True: "met", False: "**not met**", None: "not known (a run is missing)"}
    parts += [f"- {one.text}: {said[one.met]}; {one.said}" for one in demands] or ["none"]
    parts += ["", "## Figures", "", *_figures(found)]
    if any(one.figures.get("drift") for one in found):
        parts += ["", "## Forgetting", "", *_drift(found)]
    parts += ["", "## Time", "", *_time(found)]
    return "\n".join(parts) + "\n"


def document(study: Study, found: Sequence[Outcome], demands: Sequence[Demand], command: str) -> dict[str, Any]:
    """The same with every figure."""
    return {
        "study": study.name,
        "title": study.title,
        "command": command,
        "machine": machine(),
        "runs": [{"arm": o.arm, "seed": o.seed, "seconds": o.seconds, "figures": o.figures} for o in found],
        "summary": {arm: summary(list(runs.values())) for arm, runs in results(found).items()},
        "demands": [{"text": one.text, "met": one.met, "said": one.said} for one in demands],
    }


def summary(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Median and minimum of the end, and the median base, of one arm's runs."""
    ends = [float(run["end"]) for run in runs]
    base = statistics.median(float(run["base"]) for run in runs)
    return {"base": base, "median": statistics.median(ends), "minimum": min(ends)}


def stem(study: Study) -> str:
    """What the study's files are called: `study` in the folder of a recipe of its name, else its own name."""
    return "study" if os.path.basename(study.folder.rstrip("/")) == study.name else study.name


def machine() -> str:
    return f"{os.cpu_count()} threads, {platform.machine()}, Python {platform.python_version()}"


def dumps(value: Any) -> str:
    return json.dumps(value, indent=1) + "\n"


# --- the tables -------------------------------------------------------------------------------------------------------


def _about(study: Study, command: str) -> str:
    notes = [f"- `{arm.name}`: {arm.note}" for arm in study.arms if arm.note]
    head = f"\n`{command}` on {machine()}. The score is {study.score}; x is {study.progress}."
    return head + ("\n\nArms:\n\n" + "\n".join(notes) if notes else "")


def _result(study: Study, found: Sequence[Outcome]) -> list[str]:
    if not found:
        return ["No run has ended yet."]
    rows = []
    for arm, runs in results(found).items():
        for seed, run in runs.items():
            rows.append([arm, str(seed), number(run["base"]), number(run["end"]), minutes(run["seconds"])])
        if len(runs) > 1:
            of = summary(list(runs.values()))
            rows.append([arm, "median", number(of["base"]), f"**{number(of['median'])}**", ""])
            rows.append([arm, "minimum", "", f"**{number(of['minimum'])}**", ""])
    missing = [arm.name for arm in study.arms if arm.name not in {one.arm for one in found}]
    lines = _table(["arm", "seed", "base", "end", "minutes"], rows)
    return [*lines, "", f"Not run: {', '.join(missing)}."] if missing else lines


def _figures(found: Sequence[Outcome]) -> list[str]:
    names = dict.fromkeys(
        name for one in found for name, value in one.figures.items() if name not in _OWN and _scalar(value)
    )
    rows = [[name, *(number(one.figures.get(name)) for one in found)] for name in names]
    return _table(["figure", *(f"{one.arm} {one.seed}" for one in found)], rows) if rows else ["none besides"]


def _drift(found: Sequence[Outcome]) -> list[str]:
    measured = [one for one in found if one.figures.get("drift")]
    known = [name for name in DRIFT if any(name in one.figures["drift"] for one in measured)]
    rows = [[one.arm, str(one.seed), *(number(one.figures["drift"].get(name)) for name in known)] for one in measured]
    note = (
        "From the base to what is served at the end. KL in nats a token: of the end to the base on the end's answers "
        "to general prompts (its mean log ratio, and the estimate k3), and back. Perplexity of a general text; share "
        "of easy unrelated questions answered right."
    )
    return [note, "", *_table(["arm", "seed", *(DRIFT[name] for name in known)], rows)]


def _time(found: Sequence[Outcome]) -> list[str]:
    names = dict.fromkeys(name for one in found for name in one.seconds if name != "all")
    rows = [
        [
            one.arm,
            str(one.seed),
            *(number(one.seconds.get(name), 0) for name in names),
            number(one.seconds.get("all"), 0),
        ]
        for one in found
    ]
    note = "Seconds. `learner: …` are the learner's own, inside `learning`."
    return [note, "", *_table(["arm", "seed", *names, "all"], rows)] if rows else ["none"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def _scalar(value: Any) -> bool:
    return value is None or isinstance(value, int | float | str)


def number(value: Any, digits: int = 3) -> str:
    """For people. What was not measured is a dash, never a zero."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    return str(value) if isinstance(value, int) else f"{value:.{digits}f}"


def minutes(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds / 60:.1f}"
