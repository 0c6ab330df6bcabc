"""A live tree changes whole, or is byte for byte what it was."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.cordis.live import Live
from reef.cordis.target import DOOR, known
from reef.harness.agents import AGENTS, render
from reef.harness.tree import settled, write
from tests.cordis.kit import Toy, command, config, extension, rule, skill, trees


def state(live):
    return write(live.entries), live.files, live.flaws


@settings(max_examples=150, deadline=None)
@given(st.lists(trees, min_size=1, max_size=5))
def test_a_swap_is_whole_or_nothing(history):
    live = Live({"toy": Toy()})
    empty = len(live)
    for entries in history:
        before = state(live)
        if refused := live.swap(entries):
            assert state(live) == before
            assert all(isinstance(why, str) and why for why in refused)
        else:
            assert live.entries == tuple(sorted(entries, key=lambda entry: entry.id))
            assert live.files == {"toy": render(Toy(), entries, DOOR)}
            assert settled(entries) != () or not entries
        again = Live({"toy": Toy()}, live.entries)
        assert state(again) == state(live)
        assert len(again) == len(live)
    assert live.swap(()) == ()
    assert len(live) == empty
    assert live.dispose() == ()
    assert len(live) == 0


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([rule("a", needs=["b"])], "'a' needs 'b', which is not in the tree"),
        ([rule("a", needs=["b"]), rule("b", needs=["a"])], "'a' needs itself, through 'b'"),
        ([rule("a", "BROKEN")], "'a' does not render: toy cannot show it: it is broken"),
        ([rule("a", "BROKEN"), rule("b", needs=["a"])], "'b' needs 'a', which failed"),
        ([skill("a", called="x"), skill("b", called="x")], "'a' and entry 'b' both write 'skills/x/SKILL.md'"),
        ([extension("a", file="Go.ts"), extension("b", file="go.ts")], "one file where case does not count"),
        ([config("a", {"url": "http://elsewhere"})], "fixed by what points the client at Reef"),
    ],
)
def test_a_tree_that_does_not_hold_is_refused(entries, reason):
    live = Live({"toy": Toy()}, [rule("kept")])
    before = state(live)
    assert any(reason in why for why in live.swap([rule("kept"), *entries]))
    assert state(live) == before


def test_a_tree_answers_for_what_it_changes():
    broken = [rule("a", "BROKEN"), rule("b", needs=["nowhere"])]
    live = Live({"toy": Toy()}, broken)
    assert len(live.flaws) == 2
    assert live.swap([*broken, rule("c")]) == ()
    assert "'c'" not in " ".join(live.flaws)
    assert live.swap([*broken, rule("c", "BROKEN")]) == ("'c' does not render: toy cannot show it: it is broken",)


class Moody(Toy):
    """Shows an entry called `moody` only the first time."""

    shown = 0

    def place(self, entry):
        if entry.id == "moody":
            self.shown += 1
            if self.shown > 1:
                raise OSError("not again")
        return super().place(entry)


def test_what_went_well_aside_and_fails_live_is_taken_back():
    live = Live({"toy": Moody()}, [rule("a"), rule("b", "Be kind.")])
    before, size = state(live), len(live)
    (refused,) = live.swap([rule("a", "Be exact."), rule("moody"), rule("z")])
    assert "nothing was changed" in refused
    assert (state(live), len(live)) == (before, size)


def test_untouched_entries_are_not_placed_again():
    toy = Toy()
    live = Live({"toy": toy}, [rule(f"r{n}") for n in range(20)])
    toy.calls = 0
    live.swap([*live.entries, rule("new")])
    assert toy.calls == 21 + 1  # the scratch tree, and the one that is new


def test_the_agents_reef_comes_with_render_the_same_by_both_ways():
    assert sorted(known()) == sorted(AGENTS)
    entries = [rule("r"), skill("s"), command("c")]
    live = Live(known())
    assert live.swap(entries) == ()
    assert live.files == {name: render(agent, entries, DOOR) for name, agent in known().items()}
