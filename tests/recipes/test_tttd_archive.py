"""The archive: the worked scores, blocking, what is kept, and a file that is whole or the one before."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.tttd.archive import Archive, Entry, File, Found
from reef.core.errors import InputError, StoreError

ROOT = Path(__file__).parents[2]


def found(value: float, key: str | None = None) -> Found:
    return Found(f"state {value}", value, key or f"key {value}")


def worked() -> Archive:
    """Values 0 (the seed), 2, 2.4, 2.5; n 1, 1, 0, 0; T = 2; the children of 0 are 1 and 3, that of 1 is 2."""
    ancestors = [(), (0,), (0, 1), (0,)]
    visits, bests, values = [1, 1, 0, 0], [2.5, 2.4, None, None], [0.0, 2.0, 2.4, 2.5]
    entries = [
        Entry(place, f"s{place}", values[place], f"k{place}", "", ancestors[place], visits[place], bests[place])
        for place in range(4)
    ]
    return Archive(entries, 2)


def test_the_worked_scores() -> None:
    scores = worked().scores(1.0)
    assert [scores[place] for place in range(4)] == pytest.approx([2.543301, 2.486603, 2.659808, 2.846410], abs=1e-6)
    assert worked().choose(1) == [3]


def test_the_chosen_block_their_ancestors_and_descendants() -> None:
    assert worked().choose(2) == [3, 2]  # 0 is an ancestor of 3; 1 and 2 are not related to 3
    lines: list[tuple[int, ...]] = [(), (0,), ()]
    apart = Archive(
        Entry(place, "", value, f"{place}", "", lines[place]) for place, value in enumerate((1.0, 9.0, 0.5))
    )
    assert apart.choose(2) == [1, 2]
    assert apart.choose(3) == [1, 2, 0]  # nothing unrelated is left
    assert apart.choose(5) == [1, 2, 0, 1, 2]
    assert Archive().choose(3) == []


def test_an_expansion_counts_for_the_parent_and_its_ancestors() -> None:
    archive = worked()
    archive.expand(2, [found(2.45), found(2.3), found(2.2), found(2.45, "other")])
    assert archive.expansions == 3
    assert [archive.entries[place].visits for place in range(4)] == [2, 2, 1, 0]
    assert (archive.entries[2].best, archive.entries[1].best, archive.entries[0].best) == (2.45, 2.4, 2.5)
    grown = [archive.entries[place] for place in (4, 5)]
    assert [(entry.value, entry.ancestors) for entry in grown] == [(2.45, (0, 1, 2))] * 2
    assert len(archive.entries) == 6  # the top two


def test_a_failed_expansion_counts_and_adds_nothing() -> None:
    archive = worked()
    archive.expand(3, [])
    assert (archive.expansions, archive.entries[3].visits, archive.entries[3].best) == (3, 1, None)
    assert archive.scores()[3] == pytest.approx(2.5 + 0.5 * 0.4 * 2 / 2)  # Q stays its value, the bonus is halved
    with pytest.raises(StoreError):
        archive.expand(77, [])


def test_identical_constructions_are_one() -> None:
    archive = Archive()
    archive.seed(found(1.0, "same"))
    archive.seed(found(1.0, "same"))
    archive.expand(0, [found(1.0, "same"), found(0.5, "x"), found(0.5, "x"), found(0.4, "y")])
    assert [entry.key for entry in archive.entries.values()] == ["same", "x", "y"]
    assert archive.entries[0].best == 1.0


def test_seeds_stay_and_the_worst_go() -> None:
    archive = Archive(largest=4)
    for value in (0.0, 0.1):
        archive.seed(found(value))
    for value in (5.0, 4.0, 3.0, 6.0):
        archive.expand(0, [found(value)])
    assert sorted(entry.value for entry in archive.entries.values()) == [0.0, 0.1, 5.0, 6.0]
    again = Archive.of(archive.document(), largest=4)
    again.expand(1, [found(9.0)])
    assert max(again.entries) == 6  # an id is never given twice, also after what had it is gone


def test_what_is_no_number_never_enters() -> None:
    with pytest.raises(ValueError, match="finite"):
        Archive().seed(found(float("nan")))


Steps = st.lists(
    st.tuples(st.integers(0, 30), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 12)), max_size=6)), max_size=20
)


@settings(deadline=None, max_examples=80)
@given(Steps, st.integers(1, 6))
def test_any_search_keeps_its_invariants(steps: list[tuple[int, list[tuple[int, int]]]], many: int) -> None:
    archive = Archive(largest=12)
    for value in range(3):
        archive.seed(found(float(value), f"seed {value}"))
    for expanded, (which, children) in enumerate(steps, 1):
        parents = archive.choose(many)
        assert len(parents) == many
        assert set(parents) <= set(archive.entries)
        parent = parents[which % many]
        archive.expand(parent, [found(float(value), f"k{key}") for value, key in children])
        entries = archive.entries
        assert archive.expansions == expanded
        assert len(entries) <= 12
        assert {0, 1, 2} <= set(entries)
        assert len({entry.key for entry in entries.values()}) == len(entries)
        assert sum(entries[seed].visits for seed in (0, 1, 2)) == expanded  # every expansion is under one seed
        assert all(entry.ancestors[0] in (0, 1, 2) for entry in entries.values() if not entry.seed)
        archive = Archive.of(json.loads(json.dumps(archive.document())), largest=12)
        assert archive.entries == entries


# --- the file ---------------------------------------------------------------------------------------------------------


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    file = File(tmp_path / "deep" / "search.json")
    assert file.read() is None
    file.write({"a": 1})
    file.write({"a": 2})
    assert file.read() == {"a": 2}
    assert [path.name for path in file.path.parent.iterdir()] == ["search.json"]
    for broken in (b"{", b"[1]", b"\xff"):
        file.path.write_bytes(broken)
        with pytest.raises(StoreError, match="search from the start"):
            file.read()


@pytest.mark.parametrize(("point", "kept"), [("before_rename", 1), ("after_rename", 2)])
def test_a_kill_leaves_one_or_the_other(tmp_path: Path, point: str, kept: int) -> None:
    path = tmp_path / "search.json"
    code = (
        "import sys; from pathlib import Path; from recipes.tttd.archive import File\n"
        "[File(Path(sys.argv[1])).write({'n': n}) for n in (1, 2)]"
    )
    environment = {**os.environ, "REEF_FAILPOINT": f"tttd.{point}:2"}
    done = subprocess.run([sys.executable, "-c", code, str(path)], cwd=ROOT, env=environment)
    assert done.returncode == -signal.SIGKILL
    assert File(path).read() == {"n": kept}


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": NaN}', '{"a": -Infinity}', "[]", "{"])
def test_a_file_that_holds_no_search_says_what_to_do(tmp_path: Path, text: str) -> None:
    file = File(tmp_path / "s.json")
    file.path.write_text(text)
    with pytest.raises(StoreError, match="move it away"):
        file.read()


def test_a_file_has_one_driver_at_a_time(tmp_path: Path) -> None:
    one, two = File(tmp_path / "new" / "s.json"), File(tmp_path / "new" / "s.json")
    with one.alone(), pytest.raises(InputError, match="another driver works on"), two.alone():
        pass
    with two.alone():
        pass
