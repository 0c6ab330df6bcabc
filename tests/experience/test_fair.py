"""The fair order: nobody is lost, the oldest come first, and no client crowds the others out of a batch."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.nouns import Record, Report, Timing, Unit
from reef.experience.fair import order


def unit(seq: int, client: str | None) -> Unit:
    record = Record(f"{seq:032x}", "s", "r", "live", "chat", "complete", b"{}", Timing(0.0), client=client)
    return Unit(f"{record.id}:0", record, 0, Report("rep", "s", (record.id,), 0.0), 1.0, None, seq=seq)


def clients(units: list[Unit]) -> str:
    return "".join(one.record.client or "-" for one in units)


def test_a_noisy_client_fills_its_share_and_no_more() -> None:
    units = [unit(seq, "a") for seq in range(8)] + [unit(8, "b"), unit(9, None), unit(10, "c")]
    assert clients(order(units, 0.5, 4)) == "aab-aaacaaa"
    assert clients(order(units, 1.0, 4)) == "aaaaaaaab-c"
    assert clients(order(units, 0.5, None)) == "aaaaaaaab-c"
    assert clients(order(units, 0.1, 4))[:4] == "ab-c"


def test_a_client_that_is_alone_fills_a_batch_and_one_unit_is_always_its_share() -> None:
    units = [unit(seq, "a") for seq in range(5)]
    assert order(units[::-1], 0.5, 2) == units
    assert clients(order([*units, unit(9, "b")], 0.5, 1))[:1] == "a"


def test_the_newest_batch_first_where_units_go_stale() -> None:
    units = [unit(seq, "a") for seq in range(5)]
    assert [one.seq for one in order(units, 0.5, 2, newest=True)] == [3, 4, 1, 2, 0]
    assert [one.seq for one in order(units, 0.5, 8, newest=True)] == [0, 1, 2, 3, 4]
    assert [one.seq for one in order(units, 0.5, None, newest=True)] == [0, 1, 2, 3, 4]
    mixed = [unit(seq, "a") for seq in range(6)] + [unit(6, "b"), unit(7, "b")]
    assert [one.seq for one in order(mixed, 0.5, 4, newest=True)] == [4, 5, 6, 7, 0, 1, 2, 3]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "b", "c", None]), max_size=40),
    st.floats(0.01, 1.0),
    st.integers(1, 8),
    st.randoms(use_true_random=False),
    st.booleans(),
)
def test_every_batch_is_fair(names: list[str | None], share: float, size: int, chance: object, newest: bool) -> None:
    units = [unit(seq, name) for seq, name in enumerate(names)]
    chance.shuffle(units)  # type: ignore[attr-defined]
    found = order(units, share, size, newest=newest)
    assert sorted(one.id for one in found) == sorted(one.id for one in units)
    batches = [found[start : start + size] for start in range(0, len(found), size)]
    assert all(batch == sorted(batch, key=lambda one: one.seq) for batch in batches)
    for name in {*names}:
        mine = [[one.seq for one in batch if one.record.client == name] for batch in batches]
        taken = [seq for each in (reversed(mine) if newest else mine) for seq in each]
        assert taken == sorted(taken)
    most = max(1, int(share * size))
    for start in range(0, len(found), size):
        batch, later = found[start : start + size], found[start + size :]
        for name, count in Counter(one.record.client for one in batch).items():
            waiting = Counter(one.record.client for one in later)
            if count > most:  # only because nobody else could have filled its places
                assert all(
                    other == name or taken >= most or not waiting[other]
                    for other in names
                    for taken in [sum(one.record.client == other for one in batch)]
                )
