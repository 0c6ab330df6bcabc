"""Scenarios, releases, records, rollback, status, health, models."""

import asyncio

import httpx
import pytest

from reef.core.errors import ChainError, ConfigError, DigestError, StoreError
from reef.engines.fake import Fault
from reef.records.board import Board
from reef.records.journal import Journal
from reef.releases import Draft

ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


async def test_models_suit_both_sdk_families(run, tmp_path):
    async with run(tmp_path, models=("smol", "org/name", "third")) as gateway, gateway.client() as client:
        page = (await client.get("/v1/models")).json()
        assert page["object"] == "list"
        assert (page["has_more"], page["first_id"], page["last_id"]) == (False, "smol", "third")
        assert page["data"][0] == {
            "id": "smol",
            "object": "model",
            "type": "model",
            "display_name": "smol",
            "created": 0,
            "created_at": "1970-01-01T00:00:00Z",
            "owned_by": "reef",
        }
        short = (await client.get("/v1/models?limit=2")).json()
        assert (short["has_more"], short["last_id"]) == (True, "org/name")
        assert [m["id"] for m in (await client.get("/v1/models?after_id=org/name")).json()["data"]] == ["third"]
        assert (await client.get("/v1/models/org/name")).json()["id"] == "org/name"
        assert (await client.get("/s/default/v1/models/org%2Fname")).json()["id"] == "org/name"
        missing = await client.get("/v1/models/none")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert (await client.get("/v1/models?limit=x")).json()["error"]["param"] == "limit"


async def test_health_needs_no_token(gateway):
    async with gateway.client(None) as client:
        for path in ("/", "/api/hello", "/healthz", "/readyz"):
            response = await client.head(path)
            assert (response.status_code, response.content) == (200, b"")
        assert (await client.get("/healthz")).json() == {"status": "ok"}


async def test_ready_says_what_is_missing(run, tmp_path):
    can_write = True

    async def store_ready():
        return can_write

    async with run(tmp_path, store_ready=store_ready) as gateway, gateway.client(None) as client:
        assert (await client.get("/readyz")).status_code == 200
        gateway.engine.is_ready = False
        response = await client.get("/readyz")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert "engine" in response.json()["reason"]
        gateway.engine.is_ready = True
        can_write = False
        assert "record store" in (await client.get("/readyz")).json()["reason"]
        can_write = True
        assert (await client.get("/readyz")).status_code == 200


async def test_not_ready_without_the_default_scenario(run, tmp_path):
    async with run(tmp_path, default_scenario="main") as gateway, gateway.client() as client:
        assert "main" in (await client.get("/readyz")).json()["reason"]
        assert (await client.post("/v1/chat/completions", json=ASK)).status_code == 200
        assert (await client.get("/readyz")).status_code == 200


async def test_create_and_inspect_a_scenario(gateway, client):
    made = await client.post("/reef/scenarios", json={"name": "shop", "recipe": "record"})
    assert made.status_code == 201
    head = gateway.chain.head("shop")
    assert made.json() == {
        "name": "shop",
        "release_id": head.id,
        "seq": 0,
        "epoch": 1,
        "recipe": None,
        "fixed": False,
    }
    assert gateway.board.scenarios()["shop"] == {"recipe": "record"}
    assert (await client.get("/reef/scenarios/shop")).json() == made.json()
    listed = (await client.get("/reef/scenarios")).json()["scenarios"]
    assert [item["name"] for item in listed] == ["default", "shop"]
    again = await client.post("/reef/scenarios", json={"name": "shop"})
    assert (again.status_code, again.headers["x-should-retry"]) == (409, "false")
    for name in ("Shop", "", None, "a..b", 3):
        bad = await client.post("/reef/scenarios", json={"name": name})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "name")
    assert (await client.get("/reef/scenarios/none")).status_code == 404


async def test_scenarios_of_the_file_are_read_only(run, tmp_path):
    async with run(tmp_path, fixed=frozenset({"written"})) as gateway, gateway.client() as client:
        response = await client.post("/reef/scenarios", json={"name": "written"})
        assert response.status_code == 409
        assert gateway.chain.head("written") is None


async def test_releases_are_listed_newest_first(gateway, client):
    ids = [gateway.board.get("default").release_id]
    ids += [gateway.publish_rules(f"Rule {number}.") for number in range(3)]
    page = (await client.get("/reef/scenarios/default/releases?limit=3")).json()
    assert [item["release_id"] for item in page["releases"]] == ids[:0:-1]
    assert [item["current"] for item in page["releases"]] == [True, False, False]
    first = page["releases"][0]
    assert (first["seq"], first["operation"], first["parent"]) == (3, "publish", ids[2])
    assert first["parts"]["harness"]["kind"] == "tree"
    assert set(first["parts"]["harness"]["files"]["harness.json"]) == {"sha256", "bytes"}
    rest = (await client.get(f"/reef/scenarios/default/releases?after={page['next']}")).json()
    assert [item["release_id"] for item in rest["releases"]] == [ids[0]]
    assert rest["next"] is None
    one = await client.get(f"/reef/scenarios/default/releases/{ids[1][:10]}")
    assert one.json()["release_id"] == ids[1]
    assert (await client.get(f"/reef/scenarios/default/releases/{'0' * 40}")).status_code == 404


async def test_a_page_never_goes_on_in_another_scenario(gateway, client):
    gateway.publish_rules("Secret.", "default")
    await client.post("/reef/scenarios", json={"name": "shop"})
    other = gateway.chain.head("default").id
    page = await client.get(f"/reef/scenarios/shop/releases?after={other}")
    assert page.status_code == 404
    assert page.json()["error"]["param"] == "release_id"


async def test_a_damaged_chain_is_503_and_names_no_files(gateway, client, monkeypatch, caplog):
    import hashlib

    for error in (ChainError, DigestError, StoreError):

        def fail(*_, error=error):
            raise error(f"{gateway.state}/releases.git/objects/ab/cd is damaged")

        monkeypatch.setattr(gateway.chain, "history", fail)
        caplog.clear()
        answer = await client.get("/reef/scenarios/default/releases")
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
        assert answer.json()["error"]["code"] == error.code
        assert str(gateway.state) not in answer.text
        assert f"{gateway.state}/releases.git/objects/ab/cd is damaged" in caplog.text
    release_id = gateway.publish_rules("Be brief.")  # the real thing: a harness file that is gone
    (sha256, _) = gateway.chain.get(release_id).parts["harness"].files["harness.json"]
    data = gateway.chain.files(release_id, "harness")["harness.json"].read_bytes()
    assert hashlib.sha256(data).hexdigest() == sha256
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
    (gateway.state / "releases.git/objects" / blob[:2] / blob[2:]).unlink()
    for left in gateway.state.rglob(f"*{sha256}*"):
        left.unlink()
    answer = await client.post("/v1/chat/completions", json=ASK)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert str(gateway.state) not in answer.text


async def test_ready_names_no_files(run, tmp_path, caplog):
    async def store_ready():
        raise StoreError(f"the disk of the record store {tmp_path}/records.db is full")

    async with run(tmp_path, store_ready=store_ready) as gateway, gateway.client(None) as client:
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert str(tmp_path) not in answer.text
        assert f"{tmp_path}/records.db is full" in caplog.text


async def test_rollback_serves_the_earlier_release_at_once(gateway, client):
    base = gateway.board.get("default").release_id
    top = gateway.publish_rules("Be brief.")
    stale = await client.post("/reef/scenarios/default/rollback", json={"release_id": base, "expected": base})
    assert stale.status_code == 409
    assert stale.json()["error"]["head"] == top
    assert stale.headers["x-should-retry"] == "false"
    done = await client.post("/reef/scenarios/default/rollback", json={"release_id": base, "reason": "too brief"})
    assert done.status_code == 200
    release = done.json()
    assert (release["operation"], release["base"], release["parent"]) == ("rollback", base, top)
    assert (release["actor"], release["reason"], release["current"]) == ("owner", "too brief", True)
    answer = await client.post("/v1/chat/completions", json=ASK)
    assert answer.headers["x-reef-release-id"] == release["release_id"]
    assert (await gateway.record(answer.headers["x-request-id"])).rendered is None


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({}, 400),
        ({"release_id": 3}, 400),
        ({"release_id": "0" * 40}, 404),
        ({"release_id": "x", "why": 1}, 400),
        ({"release_id": "0" * 40, "reason": "r" * 1001}, 400),
        ({"release_id": "0" * 40, "reason": "a\x1b[2J"}, 400),
    ],
)
async def test_bad_rollbacks(gateway, client, body, status):
    before = gateway.chain.head("default").id
    assert (await client.post("/reef/scenarios/default/rollback", json=body)).status_code == status
    assert gateway.chain.head("default").id == before
    assert (await client.post("/reef/scenarios/none/rollback", json=body)).status_code == 404


async def test_a_flip_elsewhere_is_followed(gateway, client):
    await client.post("/v1/chat/completions", json=ASK)
    other = Board(gateway.state / "records.db")
    release = gateway.chain.publish(
        "default",
        Draft("publish", {}, step=1),
        gateway.chain.head("default").id,
    )
    other.flip("default", release.id)
    other.close()
    await asyncio.sleep(0.1)
    answer = await client.post("/v1/chat/completions", json=ASK)
    assert answer.headers["x-reef-release-id"] == release.id


async def test_records_are_paged_and_filtered(gateway, client):
    receipts = []
    for number in range(5):
        response = await client.post(
            "/v1/chat/completions", json=ASK, headers={"x-reef-session": "even" if number % 2 == 0 else "odd"}
        )
        receipts.append(response.headers["x-reef-agent-record-id"])
    gateway.engine.faults.append(Fault("refuse"))
    await client.post("/v1/chat/completions", json=ASK)
    route = "/reef/scenarios/default/records"
    page = (await client.get(route, params={"limit": 4, "status": "complete"})).json()
    assert [item["agent_record_id"] for item in page["records"]] == receipts[:0:-1]
    rest = (await client.get(route, params={"status": "complete", "after": page["next"]})).json()
    assert [item["agent_record_id"] for item in rest["records"]] == receipts[:1]
    assert rest["next"] is None
    odd = (await client.get(route, params={"session": "odd"})).json()["records"]
    assert [item["agent_record_id"] for item in odd] == [receipts[3], receipts[1]]
    failed = (await client.get(route, params={"status": "failed"})).json()["records"]
    assert [item["error"] for item in failed] == ["the engine refused; try again"]
    bad = await client.get(route, params={"status": "odd"})
    assert (bad.status_code, bad.json()["error"]["param"]) == (400, "status")


async def test_one_record_whole(gateway, client):
    receipt = (await client.post("/v1/chat/completions", json=ASK)).headers["x-reef-agent-record-id"]
    whole = (await client.get(f"/reef/scenarios/default/records/chatcmpl-{receipt}")).json()
    assert whole["request"] == ASK
    assert len(whole["choices"][0]["output_ids"]) == len(whole["choices"][0]["logprobs"]) == 3
    assert whole["sampling"]["temperature"] == 1.0
    for missing in ("0" * 32, "nonsense", "rep_" + "0" * 32):
        assert (await client.get(f"/reef/scenarios/default/records/{missing}")).status_code == 404
    await client.post("/s/other/v1/chat/completions", json=ASK)
    assert (await client.get(f"/reef/scenarios/other/records/{receipt}")).status_code == 404


async def test_reports_are_on_their_record_and_paged(gateway, client):
    receipts = [
        (await client.post("/v1/chat/completions", json=ASK)).headers["x-reef-agent-record-id"] for _ in range(2)
    ]
    said = {"score": 0.5, "feedback": "so so", "demonstration": "Hello!"}
    ids = []
    for body in (said | {"references": receipts}, {"score": 1, "references": receipts[:1]}):
        ids.append((await client.post("/reef/report", json=body)).json()["agent_record_id"])
    first, second = [(await client.get(f"/reef/scenarios/default/records/{receipt}")).json() for receipt in receipts]
    assert [item["agent_record_id"] for item in first["reports"]] == ids
    assert [item["agent_record_id"] for item in second["reports"]] == ids[:1]
    assert {name: first["reports"][0][name] for name in said} == said
    assert first["reports"][0]["references"] == receipts
    route = "/reef/scenarios/default/reports"
    page = (await client.get(route, params={"limit": 1})).json()
    assert [item["agent_record_id"] for item in page["reports"]] == ids[1:]
    rest = (await client.get(route, params={"after": page["next"]})).json()
    assert [item["agent_record_id"] for item in rest["reports"]] == ids[:1]
    assert rest["next"] is None
    assert (await client.get("/reef/scenarios/none/reports")).status_code == 404


async def test_a_store_that_cannot_find_reports_by_record_leaves_them_out(gateway, client, monkeypatch):
    receipt = (await client.post("/v1/chat/completions", json=ASK)).headers["x-reef-agent-record-id"]
    monkeypatch.delattr(type(gateway.store), "reports_on")
    whole = await client.get(f"/reef/scenarios/default/records/{receipt}")
    assert whole.status_code == 200
    assert "reports" not in whole.json()


async def test_what_is_not_there_is_said_with_what_to_do(client):
    for path in ("/reef/scenarios/nope", "/reef/scenarios/nope/records", "/reef/scenarios/nope/reports"):
        said = (await client.get(path)).json()["error"]["message"]
        assert said == "no scenario 'nope'; `reef scenarios` lists them, POST /reef/scenarios makes one"
    assert (await client.get("/v2/x")).json()["error"]["message"] == "no such route; /openapi.json lists them"


async def test_status(gateway, client):
    status = (await client.get("/reef/status")).json()
    served = gateway.board.get("default")
    assert status == {
        "status": "ok",
        "scenarios": {
            "default": {
                "release_id": served.release_id,
                "seq": 0,
                "epoch": served.epoch,
                "recipe": None,
                "pin": None,
                "held": None,
                "gain": None,
                "spent": None,
                "behind": None,
                "learner": None,
            }
        },
        "engine": {"ready": True},
        "learner": {"alive": False},
    }


async def test_sync_client_keeps_its_connection(gateway):
    def talk():
        with httpx.Client(base_url=gateway.url, headers={"x-api-key": "t-all-rights"}) as client:
            return [client.post("/v1/chat/completions", json=ASK).status_code for _ in range(20)]

    assert await asyncio.to_thread(talk) == [200] * 20


async def test_settings_are_changed_one_by_one_and_checked_like_creation(run, tmp_path):
    def check(name, settings):
        if settings.get("recipe") == "bad":
            raise ConfigError("there is no recipe 'bad'", param="recipe")

    async with run(tmp_path, check_scenario=check, fixed=frozenset({"written"})) as gateway, gateway.client() as client:
        await client.post("/reef/scenarios", json={"name": "shop", "recipe": "record"})
        route = "/reef/scenarios/shop"
        done = await client.patch(route, json={"gate": {"alpha": 0.01}})
        assert (done.status_code, done.json()["name"]) == (200, "shop")
        assert gateway.board.scenarios()["shop"] == {"recipe": "record", "gate": {"alpha": 0.01}}
        assert (await client.patch(route, json={"recipe": None})).status_code == 200
        assert gateway.board.scenarios()["shop"] == {"gate": {"alpha": 0.01}}
        for body, param in (({"recipe": "bad"}, "recipe"), ({"engine": "x"}, "engine"), ({"name": "y"}, "name")):
            refused = await client.patch(route, json=body)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert gateway.board.scenarios()["shop"] == {"gate": {"alpha": 0.01}}
        assert (await client.patch("/reef/scenarios/none", json={})).status_code == 404
        gateway.ensure("written", {})
        for method in (client.patch(f"{route[:-4]}written", json={}), client.delete(f"{route[:-4]}written")):
            refused = await method
            assert (refused.status_code, "configuration file" in refused.text) == (409, True)


async def test_a_change_of_a_block_keeps_its_other_keys(gateway, client):
    made = {"harness": {"apply": True, "skills": 2}, "training": {"trigger": "auto", "backend": "fake"}}
    await client.post("/reef/scenarios", json={"name": "shop", **made})
    for body in ({"harness": {"tokens": 10, "skills": None}}, {"training": {"trigger": "hybrid"}}):
        assert (await client.patch("/reef/scenarios/shop", json=body)).status_code == 200
    assert gateway.board.scenarios()["shop"] == {
        "harness": {"apply": True, "tokens": 10},
        "training": {"trigger": "hybrid", "backend": "fake"},
    }
    assert (await client.patch("/reef/scenarios/shop", json={"harness": None})).status_code == 200
    assert "harness" not in gateway.board.scenarios()["shop"]


async def test_settings_nested_without_end_are_a_clients_mistake(gateway, client):
    deep = {}
    for _ in range(900):
        deep = {"a": deep}
    for method, path, body in (("POST", "", {"name": "deep", "gate": deep}), ("PATCH", "/default", {"gate": deep})):
        refused = await client.request(method, f"/reef/scenarios{path}", json=body)
        assert (refused.status_code, "nested" in refused.json()["error"]["message"]) == (400, True)


async def test_changes_at_the_same_time_are_all_kept(gateway, client):
    await client.post("/reef/scenarios", json={"name": "shop"})
    keys = [f"key{number}" for number in range(6)]
    done = await asyncio.gather(*(client.patch("/reef/scenarios/shop", json={key: 1}) for key in keys))
    assert {item.status_code for item in done} == {200}
    assert gateway.board.scenarios()["shop"] == dict.fromkeys(keys, 1)


async def test_an_archived_scenario_is_gone_until_it_is_restored(gateway, client):
    await client.post("/reef/scenarios", json={"name": "shop", "recipe": "record"})
    head = gateway.chain.head("shop").id
    assert (await client.delete("/reef/scenarios/shop?reason=moved")).json() == {"name": "shop", "archived": True}
    assert (await client.get("/reef/scenarios/shop")).status_code == 404
    asked = await client.post("/s/shop/v1/chat/completions", json=ASK)
    assert asked.status_code == 404
    assert "reef scenarios restore shop" in asked.json()["error"]["message"]
    assert (await client.delete("/reef/scenarios/shop")).status_code == 404
    for _ in range(2):
        back = await client.post("/reef/scenarios/shop/restore")
        assert (back.status_code, back.json()["release_id"]) == (200, head)
    assert gateway.board.scenarios()["shop"] == {"recipe": "record"}
    assert (await client.post("/s/shop/v1/chat/completions", json=ASK)).status_code == 200
    assert (await client.post("/reef/scenarios/none/restore")).status_code == 404
    kept = await client.delete("/reef/scenarios/default")
    assert (kept.status_code, "default scenario" in kept.text) == (409, True)
    told = [act for act in Journal(gateway.board).newest(scenario="shop") if act.kind in ("archive", "restore")]
    assert [(act.kind, act.actor, act.reason) for act in told] == [
        ("restore", "owner", ""),
        ("archive", "owner", "moved"),
    ]


async def test_of_several_who_create_or_restore_at_once_each_is_told_the_truth(gateway, client):
    made = await asyncio.gather(
        *(client.post("/reef/scenarios", json={"name": "shop", "batch_size": n}) for n in (2, 3, 4))
    )
    assert sorted(one.status_code for one in made) == [201, 409, 409]
    again = await asyncio.gather(*(client.post("/reef/scenarios", json={"name": "twin"}) for _ in range(3)))
    assert all(one.status_code in (201, 409) for one in again)
    await client.delete("/reef/scenarios/shop")
    back = await asyncio.gather(*(client.post("/reef/scenarios/shop/restore", json={}) for _ in range(8)))
    assert [one.status_code for one in back] == [200] * 8
    assert (await client.post("/reef/scenarios/nothing/restore", json={})).status_code == 404


async def test_a_pinned_scenario_stays_and_the_status_says_so(gateway, client):
    base = gateway.board.get("default").release_id
    top = gateway.publish_rules("Be brief.")
    there = await client.post("/reef/scenarios/default/pin")
    assert (there.status_code, there.json()["release_id"]) == (200, top)
    moved = await client.post("/reef/scenarios/default/pin", json={"release_id": base[:10], "reason": "release week"})
    assert (moved.json()["operation"], moved.json()["base"]) == ("rollback", base)
    shown = (await client.get("/reef/status")).json()["scenarios"]["default"]["pin"]
    assert (shown["release_id"], shown["actor"], shown["reason"]) == (base, "owner", "release week")
    held = await client.post("/reef/scenarios/default/rollback", json={"release_id": top})
    assert (held.status_code, "release week" in held.text) == (409, True)
    for expected in (True, False):
        off = await client.delete("/reef/scenarios/default/pin")
        assert off.json() == {"name": "default", "unpinned": expected}
    assert (await client.get("/reef/status")).json()["scenarios"]["default"]["pin"] is None
    assert (await client.post("/reef/scenarios/default/pin", json={"release_id": "0" * 40})).status_code == 404


async def test_releases_show_the_gain_measured_again_and_what_was_turned_down(run, tmp_path):
    from reef.loop.audit import Audit
    from tests.gateway.life import Life

    async with run(tmp_path, audit=Audit(tmp_path / "learn.db")) as gateway, gateway.client() as client:
        life = Life(tmp_path, gateway.chain, gateway.board)
        rejected, release, held = life.reject(), life.publish(), life.hold()
        detail = {"gain": 0.05, "lower": 0.01, "upper": 0.09, "tasks": 100, "fresh": 90}
        Journal(gateway.board).tell("default", "measure", release.id, actor="learner", reason="again", detail=detail)
        page = (await client.get("/reef/scenarios/default/releases")).json()
        assert "rulings" not in page
        newest, base = page["releases"]
        assert (newest["gain"]["gain"], newest["gain"]["said"], base["gain"]) == (0.05, "again", None)
        rulings = (await client.get("/reef/scenarios/default/releases?all=true")).json()["rulings"]
        assert [(row["candidate"], row["verdict"]) for row in rulings] == [(held.id, "hold"), (rejected.id, "reject")]
        gateway.context.watch.refresh()
        assert (await client.get("/reef/status")).json()["scenarios"]["default"]["gain"]["gain"] == 0.05


async def test_the_status_says_that_the_newest_release_is_not_served_yet(gateway, client):
    served = gateway.board.get("default").release_id
    head = gateway.chain.publish("default", Draft("publish", {}, step=1), served)

    async def behind():
        return (await client.get("/reef/status")).json()["scenarios"]["default"]["behind"]

    assert (await behind()).startswith(f"release 1 ({head.id[:12]}) is newer; it is served when its files are whole")
    rollback = await client.post("/reef/scenarios/default/rollback", json={"release_id": served})
    assert rollback.status_code == 200
    assert await behind() is None
