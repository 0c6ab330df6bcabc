"""A live composition against a fresh build of the same entries, whatever its history."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.cordis.composition import Composition, same
from reef.cordis.context import Context
from reef.cordis.target import DOOR, Target
from reef.harness.agents import gather
from reef.harness.tree import Entry, needs, settled
from tests.cordis.kit import Toy, config, rule, trees


class Traced:
    """A composition whose effects are lines in a log."""

    def __init__(self):
        self.log = []
        self.composition = Composition(self.apply)

    def apply(self, context, entry):
        self.log.append(f"+{entry.id}")
        context.effect(lambda: lambda: self.log.append(f"-{entry.id}"))
        if "BROKEN" in entry.config.get("text", ""):
            raise ValueError("it is broken")

    def update(self, *entries):
        self.log.clear()
        assert self.composition.update(entries) == ()
        return " ".join(self.log)

    @property
    def states(self):
        return {name: plug.state for name, plug in sorted(self.composition.plugs.items())}


def test_an_update_touches_only_what_changed():
    traced = Traced()
    assert traced.update(rule("b"), rule("a")) == "+a +b"
    assert traced.update(rule("a"), rule("b")) == ""
    assert traced.update(rule("a"), rule("b", "Be kind."), rule("c")) == "-b +b +c"
    assert traced.update(rule("a"), rule("c")) == "-b"


def test_an_entry_waits_for_what_it_needs_and_goes_before_it():
    traced = Traced()
    assert traced.update(rule("a", needs=["b"]), rule("z", needs=["a"])) == ""
    assert traced.composition.plugs["a"].why == "needs 'b', which is not in the tree"
    assert traced.composition.plugs["z"].why == "needs 'a', which waits itself"
    assert traced.update(rule("a", needs=["b"]), rule("z", needs=["a"]), rule("b")) == "+b +a +z"
    assert traced.update(rule("a", needs=["b"]), rule("z", needs=["a"]), rule("b", "Be kind.")) == "-z -a -b +b +a +z"
    assert traced.update(rule("a", needs=["b"]), rule("z", needs=["a"])) == "-z -a -b"
    assert traced.states == {"a": "pending", "z": "pending"}


def test_a_circle_waits_with_a_reason():
    traced = Traced()
    assert traced.update(rule("a", needs=["b"]), rule("b", needs=["a"]), rule("c", needs=["c"]), rule("d")) == "+d"
    plugs = traced.composition.plugs
    assert plugs["a"].why == "needs itself, through 'b'"
    assert plugs["c"].why == "needs itself, through 'c'"
    assert traced.update(rule("a", needs=["b"]), rule("b"), rule("d")) == "+b +a"
    assert traced.update(rule("a", needs=["b"]), rule("b", needs=["a"]), rule("d")) == "-a -b"


def test_a_failing_entry_is_undone_and_its_siblings_go_on():
    traced = Traced()
    assert traced.update(rule("a"), rule("b", "BROKEN"), rule("c"), rule("d", needs=["b"])) == "+a +b -b +c"
    assert traced.states == {"a": "active", "b": "failed", "c": "active", "d": "pending"}
    plugs = traced.composition.plugs
    assert (plugs["b"].why, plugs["d"].why) == ("it is broken", "needs 'b', which failed")
    assert isinstance(traced.composition.failed["b"], ValueError)
    assert traced.update(rule("a"), rule("b", "BROKEN"), rule("c"), rule("d", needs=["b"])) == ""
    assert traced.update(rule("a"), rule("b"), rule("c"), rule("d", needs=["b"])) == "+b +d"


def test_a_failed_entry_waits_when_what_it_needs_goes():
    traced = Traced()
    traced.update(rule("a"), rule("b", "BROKEN", needs=["a"]))
    traced.update(rule("b", "BROKEN", needs=["a"]))
    assert traced.states == {"b": "pending"}
    assert traced.composition.failed == {}


def test_a_kind_of_change_that_python_does_not_see_is_one():
    assert Entry("a", "config", {"v": 1}) == Entry("a", "config", {"v": True})
    traced = Traced()
    traced.update(config("a", {"v": 1}))
    assert traced.update(config("a", {"v": 1.0})) == "-a +a"
    assert traced.update(config("a", {"v": True})) == "-a +a"
    assert traced.update(config("a", {"v": True})) == ""


def test_dispose_undoes_dependents_first_and_leaves_nothing():
    traced = Traced()
    traced.update(rule("a", needs=["b"]), rule("b"), rule("c"))
    traced.update(rule("a", needs=["b"]), rule("b", "Be kind."), rule("c"))
    traced.log.clear()
    assert traced.composition.dispose() == ()
    assert traced.log.index("-a") < traced.log.index("-b")
    assert set(traced.states.values()) == {"disposed"}
    with pytest.raises(RuntimeError):
        traced.composition.update([rule("new")])


def test_inverses_that_fail_stop_nothing():
    done = []

    def apply(context, entry):
        def undo():
            done.append(entry.id)
            raise OSError(entry.id)

        context.effect(lambda: undo)

    composition = Composition(apply)
    composition.update([rule("a"), rule("b"), rule("c")])
    errors = composition.update([rule("a", "Be kind.")])
    assert [str(error) for error in errors] == done == ["c", "b", "a"]
    assert {name: plug.state for name, plug in composition.plugs.items()} == {"a": "active"}


def test_an_update_that_is_broken_off_can_be_made_again():
    traced, ends = Traced(), [KeyboardInterrupt()]

    def apply(context, entry):
        traced.apply(context, entry)
        if entry.id == "b" and ends:
            raise ends.pop()

    composition = Composition(apply)
    with pytest.raises(KeyboardInterrupt):
        composition.update([rule("a"), rule("b"), rule("c")])
    assert traced.log == ["+a", "+b", "-b"]
    composition.update([rule("a"), rule("b"), rule("c")])
    assert traced.log == ["+a", "+b", "-b", "+b", "+c"]


def test_ids_must_differ():
    with pytest.raises(ValueError, match="same id"):
        Composition(lambda context, entry: None).update([rule("a"), rule("a")])


def fresh(entries):
    """What a tree comes to when it is built from nothing, by another way: failing entries and what waits left out."""
    broken = {entry.id for entry in entries if "BROKEN" in entry.config.get("text", "")}
    broken &= {entry.id for entry in settled(entries)}
    placed = [("", one) for one in Toy().base(DOOR)]
    for entry in settled(entries, broken):
        placed += [(entry.id, one) for one in Toy().place(entry)]
    return gather(placed)


def closure(before, after):
    """The ids whose entry, or anything it needs, is not the same in both trees."""
    old, new = {entry.id: entry for entry in before}, {entry.id: entry for entry in after}
    moved = {
        name for name in old.keys() | new.keys() if not (name in old and name in new and same(old[name], new[name]))
    }
    while True:
        more = {
            name
            for tree in (old, new)
            for name, entry in tree.items()
            if name not in moved and not moved.isdisjoint(needs(entry))
        }
        if not more:
            return moved
        moved |= more


@settings(max_examples=200, deadline=None)
@given(st.lists(trees, max_size=5))
def test_any_history_equals_a_fresh_build_of_the_last_tree(history):
    root = Context()
    target = Target({"toy": Toy()}, root)
    bare = len(target)
    log = []

    def apply(context, entry):
        log.append(entry.id)
        context.effect(lambda: lambda: log.append(entry.id))
        target.plug(context, entry)

    composition, before = Composition(apply, root), ()
    for entries in history:
        log.clear()
        assert composition.update(entries) == ()
        assert set(log) <= closure(before, entries)
        assert target.files("toy") == fresh(entries)
        alone = Composition(Target({"toy": Toy()}, Context()).plug)
        alone.update(entries)
        assert {n: (p.state, p.why) for n, p in composition.plugs.items()} == {
            n: (p.state, p.why) for n, p in alone.plugs.items()
        }
        before = entries
    assert composition.update(()) == ()
    assert len(target) == bare
    assert composition.dispose() == ()
    assert len(target) == len(root) == 0
