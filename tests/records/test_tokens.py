"""The token table: secrets that are kept nowhere, rotation with overlap, and changes that everyone notices."""

import fnmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.core.errors import ConflictError, InputError, MissingError, ReefError
from reef.records.board import Board
from reef.records.tokens import OLD, Quota, TokenTable, digest


class Clock:
    now = 1_800_000_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def board(tmp_path):
    made = Board(tmp_path / "records.db")
    yield made
    made.close()


@pytest.fixture
def table(board, clock):
    return TokenTable(board, clock=clock)


def row(table, name):
    (found,) = [item for item in table.list() if item.name == name]
    return found


def alive(table, clock):
    """Digests that would be let in now."""
    return {item.digest for item in table.list() if item.state(clock.now) == "active"}


def test_a_secret_is_handed_out_once_and_kept_nowhere(table, tmp_path, clock):
    secret = table.create("ci", ["infer"], ["team-*"], Quota(60, 1000, 4), 3600, "c0ffee")
    assert secret.startswith("reef_")
    assert len(secret) >= 48
    found = row(table, "ci")
    assert found.digest == digest(secret)
    assert (found.rights, found.scenarios, found.quota) == (frozenset({"infer"}), ("team-*",), Quota(60, 1000, 4))
    assert (found.created_at, found.expires_at, found.release_id) == (clock.now, clock.now + 3600, "c0ffee")
    for file in tmp_path.iterdir():
        assert secret.encode() not in file.read_bytes()
        assert secret.removeprefix("reef_").encode() not in file.read_bytes()


def test_secrets_differ(table):
    assert len({table.create(f"n{number}") for number in range(20)}) == 20


def test_every_change_is_seen_by_another_process(table, tmp_path):
    other = Board(tmp_path / "records.db")
    seen = [other.version()]
    for change in (
        lambda: table.create("a"),
        lambda: table.rotate("a"),
        lambda: table.revoke("a"),
        lambda: table.episode("default", "abc", 60),
    ):
        change()
        seen.append(other.version())
    other.close()
    assert len(set(seen)) == len(seen)


def test_a_change_that_fails_changes_nothing(table, board):
    table.create("a")
    before, rows = board.version(), table.list()
    for wrong in (
        lambda: table.create("a"),
        lambda: table.revoke("b"),
        lambda: table.rotate("b"),
    ):
        with pytest.raises(ReefError):
            wrong()
    assert (board.version(), table.list()) == (before, rows)


def test_a_rotation_lets_the_old_secret_live_on_for_the_overlap(table, clock):
    old = table.create("app", ["infer", "read"], ["a", "b-*"], Quota(5))
    new = table.rotate("app", 100)
    assert alive(table, clock) == {digest(old), digest(new)}
    first, second = row(table, "app" + OLD), row(table, "app")
    assert (first.rights, first.scenarios, first.quota) == (second.rights, second.scenarios, second.quota)
    clock.now += 99
    assert digest(old) in alive(table, clock)
    clock.now += 1
    assert alive(table, clock) == {digest(new)}


def test_a_second_rotation_ends_what_the_first_left(table, clock):
    first = table.create("app")
    second, third = table.rotate("app", 1000), table.rotate("app", 1000)
    assert alive(table, clock) == {digest(second), digest(third)}
    assert digest(first) not in alive(table, clock)


def test_an_overlap_never_lengthens_a_life(table, clock):
    table.create("app", expires=50)
    table.rotate("app", 1000)
    assert row(table, "app" + OLD).expires_at == row(table, "app").expires_at == clock.now + 50


def test_a_revocation_ends_both_sides_of_a_rotation(table, clock):
    table.create("app")
    table.rotate("app", 1000)
    table.revoke("app")
    assert alive(table, clock) == set()
    at = row(table, "app").revoked_at
    clock.now += 5
    table.revoke("app")
    assert row(table, "app").revoked_at == at


def test_the_left_over_of_a_rotation_can_be_ended_alone(table, clock):
    table.create("app")
    new = table.rotate("app", 1000)
    table.revoke("app" + OLD)
    assert alive(table, clock) == {digest(new)}
    with pytest.raises(InputError, match="rotate app"):
        table.rotate("app" + OLD)


def test_a_name_is_free_again_when_its_token_is_over(table, clock):
    table.create("a", expires=10)
    with pytest.raises(ConflictError, match="reef token rotate a"):
        table.create("a")
    clock.now += 10
    with pytest.raises(ConflictError, match="expired"):
        table.rotate("a")
    table.create("a")
    table.revoke("a")
    with pytest.raises(ConflictError, match="revoked"):
        table.rotate("a")
    table.create("a")
    assert row(table, "a").state(clock.now) == "active"


def test_an_episodes_token_ends_with_it_and_no_other_does(table):
    table.create("kept")
    secret, other = table.episode("default", "c0ffee", 60), table.episode("default", "c0ffee", 60)
    for _ in range(2):
        table.end(secret)
    table.end("nobody's")
    assert {grant.digest for grant in table.list() if grant.release_id} == {digest(other)}
    assert len(table.list()) == 2


def test_an_episodes_token_is_bound_and_leaves_the_table_when_it_is_over(table, clock):
    secret = table.episode("default", "c0ffee", 60)
    (found,) = table.list()
    assert found.digest == digest(secret)
    assert (found.rights, found.scenarios, found.release_id) == (frozenset({"infer"}), ("default",), "c0ffee")
    clock.now += 60
    table.episode("default", "c0ffee", 60)
    assert len(table.list()) == 1
    with pytest.raises(InputError):
        table.episode("Not a scenario", "c0ffee", 60)


@pytest.mark.parametrize("name", ["", "-a", "a b", "a\n", "x" * 64, "operator", "episode.1", "app~old", "é", "a/b"])
def test_a_wrong_name_is_refused(table, name):
    with pytest.raises(InputError, match="name"):
        table.create(name)
    assert table.list() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"rights": []},
        {"rights": ["infer", "fly"]},
        {"scenarios": []},
        {"scenarios": ["A"]},
        {"scenarios": ["a/b"]},
        {"quota": Quota(0)},
        {"quota": Quota(None, -1)},
        {"expires": 0},
        {"expires": float("nan")},
        {"expires": 1e12},
    ],
)
def test_what_cannot_be_is_refused(table, wrong):
    with pytest.raises(InputError):
        table.create("a", **wrong)
    assert table.list() == []


def test_what_is_not_there_says_where_to_look(table):
    with pytest.raises(MissingError, match="reef token list"):
        table.revoke("nobody-knows")


@given(st.text("ab*?-", min_size=1, max_size=6))
def test_any_pattern_that_is_taken_can_be_matched(pattern):
    from reef.records.tokens import _patterns

    assert _patterns([pattern]) == (pattern,)
    fnmatch.fnmatchcase("a", pattern)
