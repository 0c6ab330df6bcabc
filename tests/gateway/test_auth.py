"""Tokens at the door: found by digest, over when they are over, seen by every gateway, never in a log line."""

import asyncio
import logging

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.core.errors import AuthError, RightError
from reef.gateway import auth
from reef.gateway.auth import Token, Tokens
from reef.records.board import Board
from reef.records.tokens import RIGHTS, Grant, Quota, TokenTable, digest
from reef.scenario.serving import Watch


def grant(secret, name="app", *, rights=RIGHTS, scenarios=None, expires=None, revoked=None, release=None):
    return Grant(name, digest(secret), frozenset(rights), scenarios, Quota(3), release, 1.0, expires, revoked)


def bearer(secret):
    return {"authorization": f"Bearer {secret}"}


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer s-1"},
        {"authorization": "bearer   s-1 "},
        {"x-api-key": "s-1"},
        {"authorization": "Bearer wrong", "x-api-key": "s-1"},
        {"authorization": "Basic s-2", "x-api-key": "s-1"},
        {"authorization": "Bearer s-1", "x-api-key": "wrong"},
    ],
)
def test_a_token_comes_in_either_header(headers):
    tokens = Tokens([("s-1", Token("one")), ("s-2", Token("two"))])
    assert tokens.find(headers).name == "one"
    assert tokens.find(headers).name == "one"


@pytest.mark.parametrize(
    ("headers", "why"),
    [
        ({}, "no token"),
        ({"authorization": ""}, "no token"),
        ({"authorization": "Basic s-1"}, "no token"),
        ({"authorization": "Bearer "}, "wrong token"),
        ({"authorization": "Bearer s-1x"}, "wrong token"),
        ({"authorization": "Bearers-1"}, "no token"),
        ({"x-api-key": "S-1"}, "wrong token"),
        ({"authorization": "Bearer \udcff"}, "wrong token"),
    ],
)
def test_anything_else_is_refused_and_told_what_to_do(headers, why):
    with pytest.raises(AuthError, match=f"^{why}: send Authorization"):
        Tokens([("s-1", Token("one"))]).find(headers)


def test_a_refresh_replaces_the_table_and_keeps_the_fixed_ones():
    tokens = Tokens([("operator", Token("operator"))])
    tokens.refresh([grant("a"), grant("b", "other", rights=["infer"], scenarios=("team-*",), release="c0ffee")])
    assert tokens.find(bearer("a")) == Token("app", RIGHTS, None, Quota(3))
    found = tokens.find(bearer("b"))
    assert found == Token("other", frozenset({"infer"}), frozenset({"team-*"}), Quota(3), "c0ffee")
    tokens.refresh([grant("c")])
    assert tokens.find(bearer("c")).name == "app"
    assert tokens.find(bearer("operator")).name == "operator"
    for gone in "ab":
        with pytest.raises(AuthError, match="wrong token"):
            tokens.find(bearer(gone))


def test_an_expired_token_is_refused_at_its_second(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(auth.time, "time", lambda: now)
    tokens = Tokens()
    tokens.refresh([grant("a", expires=1001.0), grant("b", "gone", revoked=5.0)])
    assert tokens.find(bearer("a")).name == "app"
    now = 1001.0
    with pytest.raises(AuthError, match=r"expired.*reef token create"):
        tokens.find(bearer("a"))
    with pytest.raises(AuthError, match="revoked"):
        tokens.find(bearer("b"))


def test_a_good_token_beside_one_that_is_over_is_let_in():
    tokens = Tokens()
    tokens.refresh([grant("old", "old", revoked=5.0), grant("new", "new")])
    assert tokens.find({"authorization": "Bearer old", "x-api-key": "new"}).name == "new"
    assert tokens.find({"authorization": "Bearer new", "x-api-key": "old"}).name == "new"


def test_every_known_digest_is_compared_to_the_end(monkeypatch):
    compared = []
    monkeypatch.setattr(auth, "_same", lambda a, b: compared.append(a) or a == b)
    tokens = Tokens([(f"s-{number}", Token(str(number))) for number in range(5)])
    with pytest.raises(AuthError):
        tokens.find(bearer("s-9"))
    assert len(compared) == 5
    compared.clear()
    assert tokens.find(bearer("s-0")).name == "0"
    assert len(compared) == 5


def test_nothing_that_was_sent_is_kept():
    tokens = Tokens([("s-secret", Token("one"))])
    tokens.find(bearer("s-secret"))
    for number in range(50):
        with pytest.raises(AuthError):
            tokens.find(bearer(f"s-{number}"))
    assert list(tokens._seen) == [digest("s-secret")]
    assert "s-" not in repr((tokens._seen, tokens._known))


def test_patterns_say_which_scenarios():
    token = Token("app", scenarios=frozenset({"team-*", "one"}))
    assert [name for name in ("team-", "team-a", "one", "one-more", "a-team-", "default") if token.sees(name)] == [
        "team-",
        "team-a",
        "one",
    ]
    token.enter("team-a")
    with pytest.raises(RightError, match="default") as caught:
        token.enter("default")
    assert "this token is for the scenarios one, team-*, not for 'default'; name one of them in" in caught.value.message
    assert "x-reef-scenario" in caught.value.message
    with pytest.raises(RightError, match="reef token create"):
        Token("app", frozenset({"infer"})).require("read")


@given(st.text("ab-", max_size=5), st.text("ab-", max_size=5))
def test_a_name_without_stars_means_itself(name, other):
    assert Token("app", scenarios=frozenset({name})).sees(other) == (name == other)


def test_a_refusal_is_logged_with_route_and_address_and_without_the_token(caplog):
    tokens = Tokens([("s-1", Token("one"))])
    with pytest.raises(AuthError):
        tokens.find(bearer("s-canary"), route="/reef/scenarios/{s}", client=("10.0.0.7", 4711))
    (line,) = caplog.records
    assert line.getMessage() == "refused /reef/scenarios/{s} from 10.0.0.7: wrong token"
    assert (line.levelno, line.route) == (logging.WARNING, "/reef/scenarios/{s}")


def test_a_flood_of_wrong_tokens_is_not_a_flood_of_lines(caplog, monkeypatch):
    now = [5.0]
    monkeypatch.setattr(auth.time, "monotonic", lambda: now[0])
    tokens = Tokens([("s-1", Token("one"))])
    for now[0] in (5.0, 5.9, 6.0):
        for _ in range(20):
            with pytest.raises(AuthError):
                tokens.find(bearer("s-canary"))
    said = [line.getMessage() for line in caplog.records]
    assert len(said) == 21
    assert said[10] == "refused 30 more requests without a right token"


def test_free_accepts_everyone():
    assert Tokens(free=True).find({}).name == "anybody"


async def test_a_running_gateway_follows_the_table(tmp_path):
    """case 33: a token works at once after it was made elsewhere, and not after it was revoked there."""
    watched, elsewhere = Board(tmp_path / "records.db"), Board(tmp_path / "records.db")
    tokens, watch = Tokens(), Watch(watched)
    watch.on_change(lambda: tokens.refresh(TokenTable(watched).list()))
    await watch.start()
    table = TokenTable(elsewhere)
    secret = table.create("app")

    async def until(known):
        for _ in range(100):
            try:
                found = tokens.find(bearer(secret)).name == "app"
            except AuthError:
                found = False
            if found == known:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the table was not followed")

    await until(True)
    table.revoke("app")
    await until(False)
    await watch.close()
    watched.close()
    elsewhere.close()


async def test_a_table_that_cannot_be_read_is_read_again(tmp_path):
    from reef.core.errors import StoreError

    board = Board(tmp_path / "records.db")
    watch, reads = Watch(board), []

    def listener():
        reads.append(1)
        if len(reads) == 2:
            raise StoreError("the disk is full")

    watch.on_change(listener)
    await watch.start()
    other = Board(tmp_path / "records.db")
    TokenTable(other).create("a")
    for _ in range(100):
        if len(reads) >= 3:
            break
        await asyncio.sleep(0.02)
    await watch.close()
    assert len(reads) == 3
    board.close()
    other.close()


async def test_over_http(gateway):
    """A limited token asks where it may, and what it lacks is named."""
    gateway.ensure("team-a", {})
    gateway.context.watch.refresh()
    gateway.context.tokens.refresh([grant("s-team", rights=["infer"], scenarios=("team-*",))])
    async with httpx.AsyncClient(base_url=gateway.url, headers=bearer("s-team")) as client:
        ask = {"messages": [{"role": "user", "content": "Hi"}]}
        paths = ("/s/team-a/v1/chat/completions", "/s/default/v1/chat/completions", "/v1/chat/completions")
        codes = [(await client.post(path, json=ask)).status_code for path in paths]
        assert codes == [200, 403, 403]
        refused = await client.get("/reef/status")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "missing_right")


async def test_an_episodes_request_is_pinned_and_an_evaluation(gateway):
    """case 18: an episode's token asks one release."""
    first = gateway.chain.head("default").id
    gateway.publish_rules("Be brief.")
    gateway.context.tokens.refresh([grant("s-episode", rights=["infer"], scenarios=("default",), release=first)])
    async with httpx.AsyncClient(base_url=gateway.url, headers=bearer("s-episode")) as client:
        answer = await client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
    assert answer.status_code == 200
    assert answer.headers["x-reef-release-id"] == first
    record = await gateway.record(answer.headers["x-reef-agent-record-id"])
    assert (record.purpose, record.release_id) == ("evaluation", first)
