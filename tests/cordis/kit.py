"""A small agent of our own, and trees for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from reef.harness.agents import Door, Placed, dump
from reef.harness.tree import Entry


@dataclass
class Toy:
    """Shows every kind; a text with BROKEN in it is one that it cannot show."""

    name: str = "toy"
    calls: int = 0

    def place(self, entry: Entry) -> Sequence[Placed]:
        self.calls += 1
        config = entry.config
        if "BROKEN" in config.get("text", ""):
            raise ValueError("it is broken")
        if entry.kind == "rules":
            return [Placed("RULES.md", "section", config["text"])]
        if entry.kind == "skill":
            front = dump({"name": config["name"], "description": config["description"]})
            return [Placed(f"skills/{config['name']}/SKILL.md", "file", front + config["text"])]
        if entry.kind == "command":
            return [Placed(f"prompts/{config['name']}.md", "file", config["text"])]
        if config["agent"] != self.name:
            return []
        if entry.kind == "config":
            return [Placed("settings.json", "values", values=config["values"])]
        return [Placed(f"extensions/{config['file']}", "file", config["text"])]

    def base(self, door: Door) -> Sequence[Placed]:
        return [Placed("settings.json", "values", values={"url": door.url}), Placed("models.json", "file", "{}\n")]


def rule(name: str, text: str = "Be brief.", **more) -> Entry:
    return Entry(name, "rules", {"text": text, **more})


def skill(name: str, text: str = "Read the task twice.", **more) -> Entry:
    short = more.pop("called", name)
    return Entry(name, "skill", {"name": short, "description": "When there is a task.", "text": text, **more})


def command(name: str, text: str = "Review the change.", **more) -> Entry:
    return Entry(name, "command", {"name": name, "description": "Reviews.", "text": text, **more})


def config(name: str, values=None, agent: str = "toy", **more) -> Entry:
    return Entry(name, "config", {"agent": agent, "values": values or {"theme": "dark"}, **more})


def extension(name: str, text: str = "export default 1\n", file: str = "", agent: str = "toy", **more) -> Entry:
    return Entry(name, "extension", {"agent": agent, "file": file or f"{name}.ts", "text": text, **more})


IDS = ["a", "b", "c", "d", "e"]
_texts = st.sampled_from(["Be brief.", "Be kind.", "It is BROKEN.", "Say the unit of every number."])
_needs = st.lists(st.sampled_from(IDS), max_size=2, unique=True).map(lambda needs: {"needs": needs} if needs else {})


@st.composite
def _entry(draw, name: str) -> Entry:
    make = draw(st.sampled_from([rule, skill, command, config, extension]))
    more = draw(_needs)
    if make is config:
        return config(name, {"n": draw(st.sampled_from([1, 1.0, True, 2]))}, **more)
    return make(name, draw(_texts), **more)


trees = st.lists(st.sampled_from(IDS), unique=True).flatmap(lambda names: st.tuples(*map(_entry, names)))
"""Any tree of up to five entries: with needs that are missing or go in circles, and entries that cannot be shown."""
