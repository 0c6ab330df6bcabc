"""GET /reef/why/{id}: forward and back over real HTTP, git and SQLite, also when parts of it are lost."""

from dataclasses import replace

import pytest

from reef.core.ids import new_receipt
from reef.loop.audit import Audit
from reef.records import keep
from reef.records.journal import Journal
from reef.records.queue import Queue
from reef.releases import Draft
from reef.scenario.serving import promote, rollback
from tests.gateway.life import ASK, Life, answer, report, rules


@pytest.fixture
async def lived(run, tmp_path):
    """A gateway whose learner's audit can be read, and the life in it."""
    async with run(tmp_path, audit=Audit(tmp_path / "learn.db")) as gateway:
        yield gateway, Life(tmp_path, gateway.chain, gateway.board)


async def ask(client, name, **query):
    found = await client.get(f"/reef/why/{name}", params=query)
    assert found.status_code == 200, found.text
    return found.json()


async def test_an_answer_is_explained_back_to_the_base(lived):
    gateway, life = lived
    async with gateway.client() as client:
        first = await answer(client)
        told = await report(client, first)
        base = gateway.chain.head("default")
        rival = life.reject([f"{first}:0"])
        release = life.publish({f"{await answer(client)}:0": await report(client, first, score=0.5)})
        Journal(gateway.board).tell(
            "default", "measure", release.id, actor="learner", reason="+8 points", detail={"gain": 0.08}
        )
        gateway.context.watch.refresh()
        receipt = await answer(client)
        story = await ask(client, receipt)
        assert (story["kind"], story["id"], story["scenario"]) == ("record", receipt, "default")
        assert story["unknown"] == []
        why = story["release"]
        assert why["id"] == release.id
        assert why["current"] is True
        assert why["approved"] == {
            "by": "gate", "actor": "learner", "reason": "better by 20 points", "at": release.created_at,
        }  # fmt: skip
        assert (why["measured"]["incumbent_id"], why["measured"]["policy"]) == (base.id, "better")
        assert [act["detail"] for act in why["remeasured"]] == [{"gain": 0.08}]
        assert (why["rejected"]["count"], why["rejected"]["newest"][0]["candidate"]) == (1, rival.id)
        assert (why["learnt"]["own"], why["learnt"]["count"]) == (1, 1)
        assert [item["release_id"] for item in why["ancestry"]["releases"]] == [base.id]
        assert why["looks"][0]["verdict"] == "accept"
        quoted = await ask(client, first)
        assert [item["agent_record_id"] for item in quoted["reports"]][:1] == [told]
        (lesson,) = quoted["lessons"]
        assert (lesson["fate"], lesson["release"], lesson["candidate"]) == ("trained", None, rival.id)
        assert "turned down: worse by 10 points" in lesson["said"]
        assert quoted["influenced"]["count"] == 0


async def test_a_report_is_followed_to_every_release_it_influenced(lived):
    gateway, life = lived
    async with gateway.client() as client:
        receipt, other = await answer(client), await answer(client)
        name = await report(client, receipt, other)
        late = await report(client, receipt, score=0.0)
        base = gateway.chain.head("default")
        first = life.publish({f"{receipt}:0": name})
        second = life.publish()
        story = await ask(client, name)
        assert story["served"] is True
        assert [item["release_id"] for item in story["influenced"]["releases"]] == [second.id, first.id]
        fates = {lesson["unit"]: lesson for lesson in story["lessons"]}
        assert fates[f"{receipt}:0"]["release"]["release_id"] == first.id
        assert (fates[f"{other}:0"]["fate"], fates[f"{other}:0"]["report"]) == ("pending", name)
        assert story["records"][receipt]["release_id"] == base.id
        (lost,) = (await ask(client, late))["lessons"]
        assert lost["fate"] == "duplicate"
        assert name in lost["said"]
        back = rollback("default", base.id, gateway.chain, gateway.board, actor="ada", reason="worse")
        story = await ask(client, name)
        assert (story["served"], story["influenced"]["count"]) == (False, 2)
        forward = rollback("default", first.id, gateway.chain, gateway.board, actor="ada", reason="better after all")
        story = await ask(client, name)
        assert (story["served"], story["influenced"]["count"]) == (True, 3)
        again = await ask(client, forward.id)
        assert again["brought"]["release_id"] == first.id
        assert again["measured"]["reason"] == "better by 20 points"
        assert again["approved"]["by"] == "person"
        assert [item["release_id"] for item in again["ancestry"]["releases"]] == [first.id, base.id]
        assert [item["release_id"] for item in (await ask(client, back.id))["ancestry"]["releases"]] == [base.id]


async def test_a_promoted_candidate_says_who_let_it_in_and_on_what_evidence(lived):
    gateway, life = lived
    async with gateway.client() as client:
        receipt = await answer(client)
        name = await report(client, receipt)
        held = life.hold({f"{receipt}:0": name})
        waiting = await ask(client, held.id[:10])
        assert (waiting["kind"], waiting["state"], waiting["became"]) == ("candidate", "held", None)
        assert waiting["learnt"]["units"][0]["agent_record_id"] == receipt
        (lesson,) = (await ask(client, receipt))["lessons"]
        assert "held until somebody promotes it" in lesson["said"]
        made = await client.post(f"/reef/scenarios/default/candidates/{held.id}/promote", json={"reason": "reads well"})
        assert made.status_code == 200, made.text
        why = await ask(client, made.json()["release_id"])
        assert (why["approved"]["by"], why["approved"]["actor"], why["approved"]["reason"]) == (
            "person", "owner", "reads well",
        )  # fmt: skip
        assert why["measured"]["reason"] == "better by 20 points (held for a person)"
        assert why["looks"][0]["verdict"] == "hold"
        assert why["learnt"]["own"] == 1
        story = await ask(client, held.id)
        assert (story["state"], story["became"]["release_id"]) == ("promoted", why["id"])
        assert (await ask(client, name))["served"] is True


async def test_lists_are_paged_and_nothing_is_shown_twice(lived):
    gateway, life = lived
    units = [f"{number:032x}:0" for number in range(9)]
    for start in (0, 3, 6):
        life.publish(units[start : start + 3])
    async with gateway.client() as client:
        head, seen, at = life.head.id, [], 0
        while at is not None:
            page = await ask(client, head, limit=2, **({"units": at} if at else {}))
            seen += [item["unit"] for item in page["learnt"]["units"]]
            assert page["learnt"]["count"] == 9
            at = page["learnt"]["next"]
        assert seen == [units[place] for place in (8, 7, 6, 5, 4, 3, 2, 1, 0)]
        first = await ask(client, head, limit=2)
        assert (first["ancestry"]["count"], first["ancestry"]["next"], first["learnt"]["own"]) == (3, 2, 3)
        rest = await ask(client, head, limit=2, releases=2)
        assert [item["seq"] for item in rest["ancestry"]["releases"]] == [0]


async def test_a_report_on_many_answers_is_paged_and_followed_as_a_whole(lived):
    gateway, life = lived
    async with gateway.client() as client:
        receipts = [await answer(client) for _ in range(5)]
        name = await report(client, *receipts)
        release = life.publish({f"{receipts[4]}:0": name})
        seen, at = [], 0
        while at is not None:
            page = await ask(client, name, limit=2, **({"units": at} if at else {}))
            assert (page["quoted"], page["served"]) == (5, True)
            assert page["influenced"]["releases"][0]["release_id"] == release.id
            assert [lesson["unit"][:32] for lesson in page["lessons"]] == list(page["records"])
            seen += page["records"]
            at = page["next"]
        assert seen == receipts


async def test_an_answer_of_an_archived_scenario_is_explained(lived):
    gateway, _ = lived
    async with gateway.client() as client:
        receipt = await answer(client, "shop")
        assert (await client.delete("/reef/scenarios/shop")).status_code == 200
        assert (await ask(client, receipt))["release"]["release"]["scenario"] == "shop"


async def test_a_step_after_the_released_one_is_not_said_to_be_released(lived):
    gateway, life = lived
    async with gateway.client() as client:
        early, late = await answer(client), await answer(client)
        release = life.publish({f"{early}:0": await report(client, early)})
        life.train(release.line, {f"{late}:0": await report(client, late)}, step=2)
        (lesson,) = (await ask(client, late))["lessons"]
        assert (lesson["fate"], lesson["step"], lesson["release"]) == ("trained", 2, None)
        assert (await ask(client, late))["influenced"]["count"] == 0


async def test_what_never_trains_is_said(lived):
    gateway, life = lived
    life.publish()
    async with gateway.client() as client:
        pinned = {"x-reef-release": gateway.chain.head("default").id}
        given = await client.post("/v1/chat/completions", json=ASK, headers=pinned)
        receipt = given.headers["x-reef-agent-record-id"]
        await report(client, receipt)
        (lesson,) = (await ask(client, receipt))["lessons"]
        assert (lesson["fate"], lesson["said"]) == (
            "never", "never trains: only live answers do, and this was one of evaluation",
        )  # fmt: skip


async def test_an_erased_record_still_says_what_learnt_from_it(lived):
    gateway, life = lived
    async with gateway.client() as client:
        receipt = await answer(client)
        both = await report(client, receipt, await answer(client))
        release = life.publish({f"{receipt}:0": both})
        keep.forget(gateway.state / "records.db", [receipt])
        story = await ask(client, receipt)
        assert (story["erased"], story["record"], story["reports"]) == (True, None, [])
        assert [item["release_id"] for item in story["influenced"]["releases"]] == [release.id]
        assert story["lessons"][0]["report"] == both
        (gateway.state / "learn.db").unlink()
        story = await ask(client, receipt)
        assert [item["release_id"] for item in story["influenced"]["releases"]] == [release.id]
        assert story["unknown"]


@pytest.mark.parametrize("damage", ["missing", "not a database", "cut short"])
async def test_a_lost_audit_is_said_and_the_rest_is_told(lived, damage):
    gateway, life = lived
    async with gateway.client() as client:
        receipt, other = await answer(client), await answer(client)
        name, waits = await report(client, receipt), await report(client, other)
        release = life.publish({f"{receipt}:0": name})
        held = life.hold()
        path = gateway.state / "learn.db"
        for left in gateway.state.glob("learn.db-*"):
            left.unlink()
        if damage == "missing":
            path.unlink()
        elif damage == "cut short":
            path.write_bytes(path.read_bytes()[:6000])
        else:
            path.write_bytes(b"x" * 8192)
        story = await ask(client, release.id)
        assert story["rejected"] == {"count": None, "newest": []}
        assert len(story["unknown"]) == 1
        assert "audit" in story["unknown"][0]
        assert story["measured"]["reason"] == "better by 20 points"
        (lesson,) = (await ask(client, receipt))["lessons"]
        assert (lesson["fate"], lesson["release"]["release_id"]) == ("trained", release.id)
        (lesson,) = (await ask(client, waits))["lessons"]
        assert lesson["fate"] == "unknown"
        assert (await ask(client, held.id))["state"] == "unknown"
        listed = (await client.get("/reef/scenarios/default/candidates")).json()
        assert listed["known"] is False
        assert listed["candidates"][0]["state"] == "unknown"
        assert (await client.get("/reef/status")).json()["scenarios"]["default"]["held"] is None
        assert (await client.get("/reef/scenarios/default/releases?all=true")).json()["rulings"] is None


async def test_foreign_ids_lead_to_the_same_story(lived):
    gateway, life = lived
    async with gateway.client() as client:
        given = await client.post("/v1/chat/completions", json=ASK)
        receipt = given.headers["x-reef-agent-record-id"]
        assert (await ask(client, given.json()["id"]))["id"] == receipt
        response = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}}]}
        entry = {"agent_record_id": "my-own-id", "request_type": "inference", "payload": {**ASK, "response": response}}
        made = await client.post("/reef/records", json=entry, headers={"x-reef-scenario": "default"})
        assert made.status_code == 200, made.text
        imported = await ask(client, "my-own-id")
        assert (imported["kind"], imported["record"]["choices"][0]["text"]) == ("record", "hello")
        keep.forget(gateway.state / "records.db", [imported["id"]])
        life.publish([f"{imported['id']}:0"])
        assert (await ask(client, "my-own-id"))["erased"] is True
        for name in ("nonsense", "0" * 32, "f" * 40, "rep_nothing", "1234567"):
            missing = await client.get(f"/reef/why/{name}")
            assert (missing.status_code, missing.json()["error"]["param"]) == (404, "id"), name


async def test_a_token_sees_its_own_scenarios_only(lived):
    """What another scenario holds is answered like what there is not."""
    gateway, _life = lived
    async with gateway.client() as client, gateway.client("t-one") as one, gateway.client("t-infer") as app:
        receipt = await answer(client)
        name = await report(client, receipt)
        mine = await answer(one, "one")
        head = gateway.chain.head("default")
        for foreign in (receipt, name, head.id, head.id[:9]):
            hidden = await one.get(f"/reef/why/{foreign}")
            assert hidden.status_code == 404
            assert "default" not in hidden.text
        assert (await ask(one, mine))["release"]["id"] == gateway.chain.head("one").id
        assert (await app.get(f"/reef/why/{receipt}")).status_code == 403


async def test_a_release_that_is_not_in_the_chain_is_said(lived):
    gateway, life = lived
    life.publish()
    async with gateway.client() as client:
        record = await gateway.record(await answer(client))
        foreign = replace(record, id=new_receipt(), release_id="e" * 40)
        await gateway.store.append(foreign)
        story = await ask(client, foreign.id)
        assert story["release"] is None
        assert story["unknown"] == [f"the release {'e' * 40} that answered is not in the chain"]


async def test_a_harness_says_where_each_entry_comes_from(lived):
    gateway, life = lived
    async with gateway.client() as client:
        receipt = await answer(client)
        name = await report(client, receipt)
        release = life.publish({f"{receipt}:0": name}, text="Be brief.\nBe kind.")
        later = life.publish(text="Be brief.\nBe exact.")
        gateway.context.watch.refresh()
        (entry,) = (await ask(client, later.id))["entries"]
        assert (entry["id"], entry["kind"], entry["release_id"]) == ("rule", "rules", later.id)
        assert [(line["text"], line["seq"]) for line in entry["lines"]] == [("Be brief.", 1), ("Be exact.", 2)]
        assert entry["since"] == [release.id, later.id]
        (entry,) = (await ask(client, release.id))["entries"]
        assert (entry["units"], entry["reports"], entry["forgotten"]) == ([f"{receipt}:0"], [name], False)
        assert entry["people"] == ["owner"]
        shown = (await client.get("/reef/harness", params={"provenance": "true"})).json()
        assert [each["provenance"]["release_id"] for each in shown["entries"]] == [later.id]
        assert "provenance" not in (await client.get("/reef/harness")).json()["entries"][0]
        candidate = life.hold({f"{receipt}:0": name}, text="Be brief.")
        (entry,) = (await ask(client, candidate.id))["entries"]
        assert entry["release_id"] == candidate.id
        assert (await ask(client, gateway.chain.history("default")[-1].id))["entries"] == []
        keep.forget(gateway.state / "records.db", [receipt])
        (entry,) = (await ask(client, later.id))["entries"]
        assert entry["forgotten"] is True, "a line of it still comes from what is gone"


async def test_who_proposed_what_another_promoted_is_told(lived):
    gateway, _ = lived
    head = gateway.chain.head("default")
    draft = Draft("candidate", {"harness": rules("Be quick.")}, base=head.id, actor="eve", reason="we are slow")
    made = gateway.chain.publish("default", draft, None)
    release = promote("default", made.id, gateway.chain, gateway.board, actor="ada", reason="she is right")
    async with gateway.client() as client:
        (entry,) = (await ask(client, release.id))["entries"]
        assert (entry["actor"], entry["reason"], entry["people"]) == (
            "ada", "she is right (proposed: we are slow)", ["eve"],
        )  # fmt: skip


async def test_what_was_asked_for_is_told_with_what_came_of_it(lived):
    gateway, life = lived
    queue, held = Queue(gateway.board), life.hold(text="Be brief.")
    words = {"mutations": [], "reason": "we are slow"}
    made, _ = queue.put("default", "harness", "proposal", words, actor="eve", id="ask_one")
    async with gateway.client() as client:
        story = await ask(client, "ask_one")
        assert (story["kind"], story["state"], story["candidate"]) == ("ask", "queued", None)
        assert (story["ask"]["actor"], story["ask"]["body"]["reason"]) == ("eve", "we are slow")
        queue.tell(made.id, "held", "it runs code", candidate=held.id)
        story = await ask(client, "ask_one")
        assert (story["state"], story["said"], story["candidate"]["id"]) == ("held", "it runs code", held.id)
        release = promote("default", held.id, gateway.chain, gateway.board, actor="ada", reason="")
        story = await ask(client, "ask_one")
        assert (story["state"], story["release"]["release_id"]) == ("accepted", release.id)
        queue.tell(made.id, "held", "it runs code", candidate="f" * 40)
        assert "cannot be read" in (await ask(client, "ask_one"))["unknown"][0]
        unknown = await client.get("/reef/why/ask_two")
        assert (unknown.status_code, "(ask_…)" in unknown.text) == (404, True)
        elsewhere = await client.get("/reef/why/ask_one", headers={"x-reef-scenario": "other"})
        assert elsewhere.status_code == 404
