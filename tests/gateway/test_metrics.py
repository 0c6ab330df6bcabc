"""Metrics: every gateway's numbers on every page, bounded labels, nothing that a client made up."""

import asyncio
import math
import multiprocessing
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from reef.core.nouns import Usage
from reef.gateway import metrics as room
from reef.gateway.metrics import KINDS, SCENARIOS, Metrics


def read(metrics):
    """Samples of a page: (name, sorted labels) -> value."""
    page, content_type = metrics.page()
    assert content_type.startswith("text/plain")
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


def exchange(metrics, scenario="default", **more):
    told = {"dialect": "chat", "status": "complete", "http_status": 200, "overhead": 0.0004}
    metrics.exchange(scenario=scenario, **told | more)


def value(found, name, **labels):
    return found.get((name, *sorted(labels.items())))


def test_an_exchange_is_told_in_every_metric():
    metrics = Metrics()
    exchange(
        metrics, engine=0.2, first=0.07, commit=0.002, usage=Usage(12, 3), cached=5, bytes_in=200, bytes_out=400
    )  # fmt: skip
    found = read(metrics)
    assert value(found, "reef_requests_total", scenario="default", dialect="chat", http_status="200") == 1
    assert value(found, "reef_records_total", scenario="default", status="complete") == 1
    assert value(found, "reef_tokens_total", scenario="default", kind="prompt") == 12
    assert value(found, "reef_tokens_total", scenario="default", kind="completion") == 3
    assert value(found, "reef_cached_tokens_total", scenario="default") == 5
    assert value(found, "reef_bytes_total", direction="in") == 200
    assert value(found, "reef_bytes_total", direction="out") == 400
    for name, seconds in (
        ("reef_request_seconds", 0.2004),
        ("reef_gateway_overhead_seconds", 0.0004),
        ("reef_engine_seconds", 0.2),
        ("reef_first_byte_seconds", 0.07),
    ):
        assert value(found, f"{name}_count", dialect="chat") == 1
        assert value(found, f"{name}_sum", dialect="chat") == pytest.approx(seconds)
    assert value(found, "reef_commit_seconds_sum") == pytest.approx(0.002)
    assert value(found, "reef_gateway_overhead_seconds_bucket", dialect="chat", le="0.00025") == 0
    assert value(found, "reef_gateway_overhead_seconds_bucket", dialect="chat", le="0.0005") == 1


def test_what_was_not_there_is_missing_and_not_zero():
    """case 33: an exchange without a record, usage or engine."""
    metrics = Metrics()
    exchange(metrics, status="", http_status=500)
    found = read(metrics)
    assert not [key for key in found if key[0] == "reef_records_total"]
    for name in ("reef_engine_seconds_count", "reef_first_byte_seconds_count"):
        assert value(found, name, dialect="chat") == 0
    assert value(found, "reef_commit_seconds_count") == 0


def test_refusals_reports_and_gauges():
    metrics = Metrics(in_work=lambda: 7, queue=lambda: 3)
    metrics.refused("/v1/models", 401)
    metrics.refused("/v1/models", 401)
    metrics.report("default")
    metrics.report("default", 4)
    found = read(metrics)
    assert value(found, "reef_refused_total", route="/v1/models", http_status="401") == 2
    assert value(found, "reef_reports_total", scenario="default") == 5
    assert (value(found, "reef_in_work"), value(found, "reef_store_queue")) == (7, 3)


@pytest.mark.parametrize("shared", [False, True])
def test_labels_are_bounded(tmp_path, shared):
    folder = tmp_path / "metrics" if shared else None
    gateways = [Metrics(folder) for _ in range(2 if shared else 1)]
    for number in range(3 * SCENARIOS):
        for metrics in gateways:
            exchange(metrics, f"s{number}")
            metrics.report(f"s{number}")
            metrics.refused(f"/r{number}", 404)
    found = read(gateways[0])
    for name in ("reef_requests_total", "reef_reports_total"):
        scenarios = {dict(labels)["scenario"] for metric, *labels in found if metric == name}
        assert len(scenarios) == SCENARIOS + 1
        assert "other" in scenarios
        assert sum(count for key, count in found.items() if key[0] == name) == 3 * SCENARIOS * len(gateways)
    routes = {dict(labels)["route"] for metric, *labels in found if metric == "reef_refused_total"}
    assert len(routes) == SCENARIOS + 1
    for metrics in gateways:
        metrics.close()


def test_it_goes_on_when_there_is_no_room(monkeypatch):
    monkeypatch.setattr(room, "_WASTE", 100)
    metrics = Metrics()
    for number in range(50):
        exchange(metrics, f"s{number}", usage=Usage(1, 1))
        metrics.report("s0")
    assert read(metrics)


def test_a_page_of_any_gateway_tells_of_all(tmp_path):
    one, two = Metrics(tmp_path / "m", in_work=lambda: 2), Metrics(tmp_path / "m", in_work=lambda: 3)
    for _ in range(3):
        exchange(one, usage=Usage(1, 2))
    exchange(two, usage=Usage(10, 20), overhead=9.0)
    exchange(two, "second")
    one.gauge()
    two.gauge()
    assert read(one) == read(two)
    found = read(one)
    assert value(found, "reef_tokens_total", scenario="default", kind="prompt") == 13
    assert value(found, "reef_requests_total", scenario="second", dialect="chat", http_status="200") == 1
    assert value(found, "reef_gateway_overhead_seconds_count", dialect="chat") == 5
    assert value(found, "reef_in_work") == 5
    one.close()
    assert value(read(two), "reef_in_work") == 3
    two.close()


def die(folder):
    metrics = Metrics(folder, in_work=lambda: 9)
    exchange(metrics)
    exchange(metrics, "second")
    metrics.gauge()
    os.kill(os.getpid(), 9)


def test_a_killed_gateways_counts_stay_and_its_gauges_go(tmp_path):
    folder = tmp_path / "m"
    first = Metrics(folder, in_work=lambda: 1)
    for _ in range(2):
        worker = multiprocessing.get_context("spawn").Process(target=die, args=(folder,))
        worker.start()
        worker.join(30)
        assert worker.exitcode == -9
    found = read(first)
    assert value(found, "reef_requests_total", scenario="second", dialect="chat", http_status="200") == 2
    assert value(found, "reef_in_work") == 1
    assert len(list(folder.glob("*.values"))) == 2
    first.close()


def test_half_a_name_that_a_dead_gateway_left_is_no_name(tmp_path):
    folder = tmp_path / "m"
    first = Metrics(folder)
    exchange(first)
    first.close()
    with (folder / "0.names").open("ab") as file:
        file.write(b'["reef_reports_to')
    second = Metrics(folder)
    second.report("default")
    exchange(second)
    other = Metrics(folder)
    found = read(other)
    assert found == read(second)
    assert value(found, "reef_reports_total", scenario="default") == 1
    assert value(found, "reef_requests_total", scenario="default", dialect="chat", http_status="200") == 2
    second.close()
    other.close()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 1000), max_size=30))
def test_a_histogram_counts_each_value_in_its_bucket(seconds):
    metrics = Metrics()
    for each in seconds:
        exchange(metrics, overhead=each)
    found = read(metrics)
    for bound in (*KINDS["reef_gateway_overhead_seconds"].bounds, math.inf):
        le = "+Inf" if bound == math.inf else str(bound)
        count = value(found, "reef_gateway_overhead_seconds_bucket", dialect="chat", le=le) or 0
        assert count == sum(each <= bound for each in seconds)
    assert (value(found, "reef_gateway_overhead_seconds_sum", dialect="chat") or 0) == pytest.approx(sum(seconds))


async def test_the_gauges_are_written_down_while_it_runs(tmp_path):
    now = [1.0]
    one, two = Metrics(tmp_path / "m", in_work=lambda: now[0]), Metrics(tmp_path / "m")
    task = asyncio.create_task(one.follow())
    await asyncio.sleep(0.01)
    assert value(read(two), "reef_in_work") == 1
    task.cancel()
    one.close()
    two.close()


def test_every_metric_is_on_the_page_by_its_name():
    page = Metrics().page()[0].decode()
    for name in KINDS:
        assert f"# TYPE {name.removesuffix('_total')}" in page
