"""Candidates over HTTP: listed with evidence and diff, promoted or turned down, with exactly one outcome."""

import asyncio
import hashlib
import json
import struct

import pytest

from reef.core.nouns import Consumed
from reef.loop.audit import Audit
from reef.records.journal import Journal
from reef.releases import Draft, NewPart
from tests.gateway.life import ASK, Life

ROUTE = "/reef/scenarios/default/candidates"


@pytest.fixture
async def lived(run, tmp_path):
    async with run(tmp_path, audit=Audit(tmp_path / "learn.db")) as gateway:
        yield gateway, Life(tmp_path, gateway.chain, gateway.board)


async def test_held_and_decided_candidates_are_listed_with_their_evidence(lived):
    gateway, life = lived
    async with gateway.client() as client:
        rejected, held = life.reject(), life.hold(["0" * 32 + ":0"])
        released = life.publish()
        found = (await client.get(ROUTE)).json()
        assert found["known"] is True
        states = {item["candidate_id"]: item["state"] for item in found["candidates"]}
        assert (states[rejected.id], states[held.id]) == ("rejected", "held")
        first, second, third = found["candidates"]
        assert (first["state"], first["release_id"]) == ("released", released.id)
        assert (second["candidate_id"], second["fits"], second["units"]) == (held.id, False, 1)
        assert third["evaluation"]["reason"] == third["reason"] == "worse by 10 points"
        waiting = (await client.get(ROUTE, params={"state": "held"})).json()["candidates"]
        assert [item["candidate_id"] for item in waiting] == [held.id]
        assert (await client.get(ROUTE, params={"state": "odd"})).json()["error"]["param"] == "state"
        assert (await client.get("/reef/status")).json()["scenarios"]["default"]["held"]["count"] == 0
        newer = life.hold()
        shown = (await client.get("/reef/status")).json()["scenarios"]["default"]["held"]
        assert (shown["count"], shown["candidates"]) == (1, [newer.id])


async def test_a_harness_candidate_is_shown_as_a_diff(lived):
    gateway, life = lived
    async with gateway.client() as client:
        life.publish(text="Be brief.\nBe kind.")
        held = life.hold(text="Be brief.\nBe exact.")
        whole = (await client.get(f"{ROUTE}/{held.id[:9]}")).json()
        assert whole["fits"] is True
        assert whole["diff"]["changed"] == ["rule"]
        lines = whole["diff"]["text"].splitlines()
        assert "-Be kind." in lines
        assert "+Be exact." in lines
        assert " Be brief." in lines
        assert whole["looks"][0]["evaluation"]["guards"][0]["name"] == "length"


async def test_a_weights_candidate_is_shown_by_tensors_size_and_steps(lived):
    gateway, life = lived
    life.reject()
    header = json.dumps({"q.lora_A": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(24)
    part = NewPart("lora", {"adapter.safetensors": data}, {"rank": 2, "alpha": 4})
    draft = Draft("candidate", {"weights": part}, base=life.head.id, step=5, consumed={"weights": Consumed(3)})
    made = gateway.chain.publish("default", draft, None)
    async with gateway.client() as client:
        whole = (await client.get(f"{ROUTE}/{made.id}")).json()
        shown = whole["diff"]
        assert (whole["state"], shown["kind"], shown["was"], shown["rank"], shown["steps"]) == (
            "open", "lora", "base", 2, 5,
        )  # fmt: skip
        assert shown["tensors"] == {
            "count": 1,
            "listed": [{"file": "adapter.safetensors", "name": "q.lora_A", "dtype": "F32", "shape": [2, 3]}],
        }
        assert shown["bytes"] == len(data)


async def test_a_candidate_whose_files_are_gone_is_shown_without_its_diff(lived):
    gateway, life = lived
    held = life.hold()
    (sha256, _) = held.parts["harness"].files["harness.json"]
    data = gateway.chain.files(held.id, "harness")["harness.json"].read_bytes()
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    (gateway.state / "releases.git/objects" / blob[:2] / blob[2:]).unlink()
    for left in gateway.state.rglob(f"*{sha256}*"):
        left.unlink()
    async with gateway.client() as client:
        whole = (await client.get(f"{ROUTE}/{held.id}")).json()
        assert (whole["state"], whole["diff"]["part"]) == ("held", "harness")
        assert "log says why" in whole["diff"]["error"]
        assert (await client.post(f"{ROUTE}/{held.id}/promote")).status_code == 503
        assert life.head.seq == 0


async def test_a_candidate_is_promoted_once_however_often_it_is_asked(lived):
    """The learner is dead all the while."""
    gateway, life = lived
    async with gateway.client() as client:
        before, held = life.head, life.hold(["0" * 32 + ":0"])
        stale = await client.post(f"{ROUTE}/{held.id}/promote", json={"expected": "0" * 40})
        assert (stale.status_code, stale.json()["error"]["head"]) == (409, before.id)
        answers = await asyncio.gather(*(client.post(f"{ROUTE}/{held.id}/promote") for _ in range(4)))
        assert {item.status_code for item in answers} == {200}
        (made,) = {item.json()["release_id"] for item in answers}
        head = life.head
        assert (head.id, head.seq, head.operation, head.actor) == (made, before.seq + 1, "promote", "owner")
        assert head.consumed["harness"].units == ("0" * 32 + ":0",)
        assert head.evaluation.reason == "better by 20 points (held for a person)"
        given = await client.post("/v1/chat/completions", json=ASK)
        assert given.headers["x-reef-release-id"] == made
        late = await client.post(f"{ROUTE}/{held.id}/reject", json={"reason": "no"})
        assert late.status_code == 409
        assert f"release {head.seq}" in late.json()["error"]["message"]


async def test_a_candidate_is_turned_down_once_and_not_promoted_after(lived):
    gateway, life = lived
    async with gateway.client() as client:
        before, held = life.head, life.hold()
        for _ in range(2):
            done = await client.post(f"{ROUTE}/{held.id}/reject", json={"reason": "rude", "expected": before.id})
            assert done.status_code == 200, done.text
            assert (done.json()["state"], done.json()["actor"], done.json()["reason"]) == ("rejected", "owner", "rude")
        acts = [act for act in Journal(gateway.board).about(held.id) if act.kind == "reject"]
        assert [(act.actor, act.reason) for act in acts] == [("owner", "rude")]
        refused = await client.post(f"{ROUTE}/{held.id}/promote")
        assert refused.status_code == 409
        assert "turned down by owner: rude" in refused.json()["error"]["message"]
        assert life.head.id == before.id
        forced = await client.post(f"{ROUTE}/{held.id}/promote", json={"force": True})
        assert forced.status_code == 200
        assert life.head.id == forced.json()["release_id"]


async def test_what_cannot_be_decided_is_refused_with_a_next_step(lived):
    gateway, life = lived
    async with gateway.client() as client, gateway.client("t-one") as other, gateway.client("t-infer") as app:
        undecided, _ = life.candidate()
        life.look(undecided, "undecided", "not enough tasks")
        release = life.publish()
        for decision in ("promote", "reject"):
            for name, status in ((release.id, 400), ("0" * 40, 404), ("nonsense", 404)):
                assert (await client.post(f"{ROUTE}/{name}/{decision}")).status_code == status
            for body in ({"why": 1}, {"reason": 3}, {"reason": "a\x1b[2J"}):
                assert (await client.post(f"{ROUTE}/{undecided.id}/{decision}", json=body)).status_code == 400
            assert (await other.post(f"{ROUTE}/{undecided.id}/{decision}")).status_code == 403
            assert (await app.post(f"{ROUTE}/{undecided.id}/{decision}")).status_code == 403
        refused = await client.post(f"{ROUTE}/{undecided.id}/reject")
        assert refused.status_code == 409
        assert "reef candidates" in refused.json()["error"]["message"]
        outdated = await client.post(f"{ROUTE}/{undecided.id}/promote")
        assert outdated.status_code == 409
        assert life.head.id == release.id


@pytest.mark.parametrize("seed", range(4))
async def test_promote_reject_and_rollback_at_once_have_one_outcome(run, tmp_path, seed):
    """Two gateways on one state folder, three people who saw the same head: one of them gets their way."""
    async with (
        run(tmp_path, audit=Audit(tmp_path / "learn.db")) as one,
        run(tmp_path, audit=Audit(tmp_path / "learn.db")) as two,
        one.client() as first,
        two.client() as second,
    ):
        life = Life(tmp_path, one.chain, one.board)
        base = life.head
        before, held = life.publish(), life.hold()
        asked = {
            "promote": (first, f"{ROUTE}/{held.id}/promote", {"expected": before.id}),
            "reject": (second, f"{ROUTE}/{held.id}/reject", {"expected": before.id}),
            "rollback": (
                second, "/reef/scenarios/default/rollback", {"release_id": base.id, "expected": before.id},
            ),
        }  # fmt: skip
        names = list(asked)[seed % 3 :] + list(asked)[: seed % 3]
        answers = await asyncio.gather(*(asked[name][0].post(asked[name][1], json=asked[name][2]) for name in names))
        done = {name for name, given in zip(names, answers, strict=True) if given.status_code == 200}
        assert {given.status_code for given in answers} <= {200, 409}
        head = life.head
        assert not {"promote", "reject"} <= done, "a candidate was promoted and turned down"
        assert not {"promote", "rollback"} <= done, "two moved one head"
        assert head.operation in {"promote": ("promote",), "rollback": ("rollback",)}.get(
            next(iter(done - {"reject"}), ""), ("publish",)
        )
        assert one.board.get("default").release_id == head.id
        state = (await first.get(f"{ROUTE}/{held.id}")).json()["state"]
        assert state == ("promoted" if "promote" in done else "rejected" if "reject" in done else "held")
        assert one.chain.verify("default") == []
