"""Limits of tokens: exact in any minute, over processes, given back when nothing was used, never leaked."""

import math
import multiprocessing
import random
import time

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from reef.gateway import meter as room
from reef.gateway.auth import Token
from reef.gateway.errors import Refusal
from reef.gateway.meter import MINUTE, Meter
from reef.records.tokens import Quota


class Clock:
    now = 10_000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def pair(tmp_path, clock):
    """The meters of two gateways of one server."""
    made = Meter(tmp_path / "meter", clock=clock), Meter(tmp_path / "meter", clock=clock)
    yield made
    for meter in made:
        meter.close()


def token(name="app", **quota):
    return Token(name, quota=Quota(**quota))


def admitted(meter, token, tokens=1):
    """The lease, or the seconds to wait."""
    try:
        return meter.reserve(token, tokens)
    except Refusal as refusal:
        return int(refusal.headers["retry-after"])


def test_a_token_without_limits_is_not_metered(pair):
    lease = pair[0].reserve(token(), 10**9)
    lease.settle(5)
    lease.release()
    assert pair[0].reserve(token("b"), 1) is lease
    assert not any(pair[0]._view)


def test_requests_are_counted_over_both_gateways(pair, clock):
    app = token(requests_per_minute=4)
    for number in range(4):
        admitted(pair[number % 2], app).release()
        clock.now += 1
    assert [admitted(meter, app) for meter in pair] == [56, 56]
    clock.now += 55.9
    assert admitted(pair[0], app) == 1
    clock.now += 0.1
    admitted(pair[0], app).release()
    assert admitted(pair[1], app) == 1


def test_tokens_of_one_name_share_their_limit_over_a_rotation_and_others_do_not(pair):
    admitted(pair[0], token("app~old", requests_per_minute=1)).release()
    assert isinstance(admitted(pair[1], token("app", requests_per_minute=1)), int)
    admitted(pair[1], token("other", requests_per_minute=1)).release()


def test_what_was_not_used_is_given_back(pair):
    app = token(tokens_per_minute=100)
    lease = admitted(pair[0], app, 90)
    assert isinstance(admitted(pair[1], app, 20), int)
    lease.settle(30)
    lease.settle(0)
    other = admitted(pair[1], app, 70)
    assert isinstance(admitted(pair[0], app, 1), int)
    other.settle(None)
    other.settle(70)
    admitted(pair[0], app, 70).release()


def test_what_was_used_beyond_it_counts(pair, clock):
    app = token(tokens_per_minute=100)
    lease = admitted(pair[0], app, 10)
    clock.now += 30
    lease.settle(500)
    assert admitted(pair[1], app, 1) == 60
    clock.now += 60
    admitted(pair[1], app, 100).release()


def test_more_than_the_limit_runs_alone_in_its_minute(pair, clock):
    app = token(tokens_per_minute=100)
    lease = admitted(pair[0], app, 10_000)
    assert admitted(pair[1], app, 1) == 60
    lease.settle(100)
    clock.now += 60
    admitted(pair[1], app, 10_000).settle(40)
    assert admitted(pair[0], app, 10_000) == 60
    admitted(pair[0], app, 60).release()


def test_a_request_that_ran_nothing_still_counts_as_a_request(pair):
    app = token(requests_per_minute=1)
    lease = admitted(pair[0], app)
    lease.settle(None)
    lease.release()
    assert admitted(pair[0], app) == 60


def test_requests_at_once(pair):
    app = token(concurrent=2)
    first, second = admitted(pair[0], app), admitted(pair[1], app)
    assert [admitted(meter, app) for meter in pair] == [1, 1]
    first.release()
    first.release()
    third = admitted(pair[1], app)
    assert admitted(pair[0], app) == 1
    second.release()
    third.release()
    assert not isinstance(admitted(pair[0], app), int)


def test_a_refusal_takes_nothing(pair):
    app = token(requests_per_minute=5, tokens_per_minute=10, concurrent=5)
    held = admitted(pair[0], app, 10)
    for _ in range(20):
        assert isinstance(admitted(pair[1], app, 10), int)
    held.settle(None)
    for _ in range(4):
        lease = admitted(pair[1], app, 10)
        lease.settle(None)
        lease.release()
    assert isinstance(admitted(pair[1], app, 10), int)


def test_the_message_names_the_limit_that_is_waited_for(pair):
    app = token(requests_per_minute=9, tokens_per_minute=100, concurrent=1)
    pair[0].reserve(app, 100)
    with pytest.raises(Refusal, match="100 tokens a minute, and has; try again in 60 s") as refusal:
        pair[0].reserve(app, 100)
    assert refusal.value.code == "rate_limit_exceeded"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_window_holds_more_than_the_limit_and_nothing_leaks(tmp_path_factory, data):
    """Any order of requests at two gateways: never more than the limit in 60 seconds, and honest waits."""
    folder = tmp_path_factory.mktemp("meter")
    clock = Clock()
    meters = [Meter(folder, clock=clock) for _ in range(2)]
    quota = Quota(
        *(data.draw(st.none() | st.integers(1, most), label=name) for name, most in (("r", 6), ("t", 40), ("c", 3)))
    )
    app = Token("app", quota=quota)
    asked: list[float] = []
    used: list[tuple[float, int]] = []  # when, and how much counts for a full minute from then
    open_leases: list[tuple[room.Lease, float, int]] = []
    for _ in range(data.draw(st.integers(1, 40), label="steps")):
        step = data.draw(st.sampled_from(["ask", "ask", "end", "fail", "wait"]))
        if step == "wait":
            clock.now += data.draw(st.sampled_from([0.01, 0.5, 0.99, 1.0, 7.3, 30.0, 59.99, 60.0, 61.0]))
        elif step == "ask":
            meter, wanted = meters[data.draw(st.integers(0, 1))], data.draw(st.integers(0, 60))
            got = admitted(meter, app, wanted)
            if isinstance(got, int):
                assert 1 <= got <= 60
                before = clock.now
                waits_for_a_minute = len(open_leases) < (quota.concurrent or 10**9)
                clock.now += got
                if waits_for_a_minute:
                    again = admitted(meter, app, wanted)
                    assert not isinstance(again, int), f"told to wait {got} s, and then again {again}"
                    got = again
                else:
                    clock.now = before
                    continue
            asked.append(clock.now)
            if quota.tokens_per_minute is not None:
                open_leases.append((got, clock.now, min(wanted, quota.tokens_per_minute)))
            else:
                open_leases.append((got, clock.now, 0))
        elif open_leases:
            place = data.draw(st.integers(0, len(open_leases) - 1))
            lease, since, reserved = open_leases.pop(place)
            spent = None if step == "fail" else data.draw(st.integers(0, max(reserved, 0)))
            lease.settle(spent)
            lease.release()
            used.append((since, spent or 0))
        assert quota.concurrent is None or len(open_leases) <= quota.concurrent
        edge = clock.now - MINUTE
        if quota.requests_per_minute is not None:
            assert sum(at > edge for at in asked) <= quota.requests_per_minute
        if quota.tokens_per_minute is not None:
            counted = used + [(since, reserved) for _, since, reserved in open_leases]
            assert sum(amount for at, amount in counted if at > edge) <= quota.tokens_per_minute
    for lease, _, _ in open_leases:
        lease.settle(None)
        lease.release()
    clock.now += 61
    for _ in range(min(quota.concurrent or 3, quota.requests_per_minute or 3)):
        assert not isinstance(admitted(meters[0], app, 0), int), "something leaked"
    for meter in meters:
        meter.close()


def hammer(folder, seed, out):
    """A gateway under errors: the times it admitted, what was left open at the end is nothing."""
    chance = random.Random(seed)
    meter = Meter(folder)
    app = Token("app", quota=Quota(50, 2000, 3))
    times = []
    for _ in range(400):
        try:
            lease = meter.reserve(app, chance.randrange(100))
        except Refusal:
            continue
        times.append(time.monotonic())
        try:
            if chance.random() < 0.3:
                raise RuntimeError
            lease.settle(chance.randrange(100))
        except RuntimeError:
            lease.settle(None)
        finally:
            lease.release()
    out.put(times)
    meter.close()


def test_two_processes_together_admit_no_more_than_one_may(tmp_path):
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    workers = [context.Process(target=hammer, args=(tmp_path / "meter", seed, out)) for seed in (1, 2)]
    for worker in workers:
        worker.start()
    times = sorted(at for _ in workers for at in out.get(timeout=60))
    for worker in workers:
        worker.join()
    assert 20 < len(times) <= 50  # 400 attempts each; the tokens may end it sooner
    meter = Meter(tmp_path / "meter")
    place = meter._find(meter._key("app"), time.monotonic())
    assert sum(meter._view[place + room._AT_ONCE : place + room._REQUESTS]) == 0
    meter.close()


def count(folder, barrier, times):
    meter = Meter(folder)
    app = Token("app", quota=Quota(10**9, 10**9))
    barrier.wait(30)
    for _ in range(times):
        lease = meter.reserve(app, 3)
        lease.settle(2)
        lease.release()
    meter.close()


def test_nothing_is_lost_when_two_gateways_count_at_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    workers = [context.Process(target=count, args=(tmp_path / "meter", barrier, 5000)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    meter = Meter(tmp_path / "meter")
    place = meter._find(meter._key("app"), time.monotonic())
    for kind, amount in ((room._REQUESTS, 10_000), (room._TOKENS, 20_000)):
        assert sum(meter._view[place + kind + room._SLICES : place + kind + 2 * room._SLICES]) == amount
    meter.close()


def hold(folder, ready):
    meter = Meter(folder)
    kept = [meter.reserve(Token("app", quota=Quota(concurrent=2)), 1) for _ in range(2)]
    ready.set()
    time.sleep(60)
    del kept


@pytest.mark.parametrize("restarted", [True, False])
def test_what_a_killed_gateway_held_is_free_again(tmp_path, restarted):
    folder, app = tmp_path / "meter", Token("app", quota=Quota(concurrent=2))
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    other = None if restarted else Meter(folder)
    worker = context.Process(target=hold, args=(folder, ready))
    worker.start()
    assert ready.wait(30)
    if other is not None:
        assert admitted(other, app) == 1
    worker.kill()
    worker.join()
    other = other or Meter(folder)
    assert not isinstance(admitted(other, app), int)
    other.close()


def test_many_tokens_take_the_places_of_idle_ones(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(room, "TOKENS", 4)
    meter = Meter(tmp_path / "meter", clock=clock)
    busy = admitted(meter, token("busy", concurrent=1))
    for number in range(3):
        admitted(meter, token(f"t{number}", requests_per_minute=1)).release()
    assert admitted(meter, token("late", requests_per_minute=1)) == 1
    clock.now += 61
    admitted(meter, token("late", requests_per_minute=1)).release()
    assert admitted(meter, token("late", requests_per_minute=1)) == 60
    assert admitted(meter, token("busy", concurrent=1)) == 1
    busy.release()
    admitted(meter, token("busy", concurrent=1)).release()
    meter.close()


def test_a_lease_may_outlive_its_meter(tmp_path):
    meter = Meter(tmp_path / "meter")
    lease = meter.reserve(token(concurrent=1, tokens_per_minute=5), 5)
    meter.close()
    lease.settle(1)
    lease.release()


async def test_over_http(gateway):
    """case 19: a 429 in the route's dialect with an honest retry-after; other tokens are unaffected."""
    from reef.records.tokens import Grant, digest

    gateway.context.tokens.refresh(
        [
            Grant(name, digest(f"s-{name}"), frozenset({"infer"}), None, quota, None, 1.0, None, None)
            for name, quota in (("a", Quota(2)), ("b", Quota(2)))
        ]
    )
    ask = {"messages": [{"role": "user", "content": "Hi"}]}

    async def send(name, path="/v1/chat/completions"):
        async with httpx.AsyncClient(base_url=gateway.url, headers={"authorization": f"Bearer s-{name}"}) as client:
            return await client.post(path, json={"max_tokens": 5, **ask})

    assert [(await send("a")).status_code for _ in range(3)] == [200, 200, 429]
    refused = await send("a")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert (await send("a", "/v1/messages")).json()["error"]["type"] == "rate_limit_error"
    assert (await send("b")).status_code == 200


def test_waits_are_whole_seconds_rounded_up(pair, clock):
    app = token(requests_per_minute=1)
    clock.now = 10_000.25
    pair[0].reserve(app, 0).release()
    clock.now = 10_010.5
    assert admitted(pair[0], app) == math.ceil(60 - 10.25)
