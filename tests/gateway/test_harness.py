"""The served harness over HTTP: who may read which release, what changed, the installer, and the address in it."""

import base64
import hashlib
import json
import re

import pytest

from reef.core.errors import ModelError
from reef.core.nouns import Evaluation
from reef.engines.fake import FakeEngine
from reef.gateway.auth import Token, Tokens
from reef.gateway.context import Target
from reef.harness.tree import FILE, Entry, write
from reef.releases import Draft, NewPart

ROUTE = "/reef/harness"
INSTALL = "/reef/harness/install"


def rule(id_, text):
    return Entry(id_, "rules", {"text": text})


def skill(name, text="Run them."):
    return Entry(name, "skill", {"name": name, "description": "When code changed.", "text": text})


def publish(gateway, *entries, reason="", scenario="default", evaluation=None):
    part = NewPart("tree", {FILE: write(entries)})
    head = gateway.chain.head(scenario)
    draft = Draft("publish", {"harness": part}, reason=reason, evaluation=evaluation)
    release = gateway.chain.publish(scenario, draft, head.id)
    gateway.board.flip(scenario, release.id)
    gateway.context.watch.refresh()
    return release.id


def publish_weights(gateway, number):
    """A release that leaves the harness as it is."""
    part = NewPart("base", {"weights.json": json.dumps({"number": number}).encode()})
    head = gateway.chain.head("default")
    release = gateway.chain.publish("default", Draft("publish", {"weights": part}), head.id)
    gateway.board.flip("default", release.id)
    gateway.context.watch.refresh()
    return release.id


def payload(script):
    (found,) = re.findall(r"<<'REEF_PAYLOAD'\n(.*?)\nREEF_PAYLOAD\n", script, re.DOTALL)
    return base64.b64decode(found)


async def test_entries_files_and_digests(gateway, client):
    id_ = publish(gateway, rule("one", "Be brief."), skill("tests"), reason="first")
    body = (await client.get(ROUTE, params={"adapter": "pi"})).json()
    assert (body["release_id"], body["reason"], body["scenario"]) == (id_, "first", "default")
    assert [entry["id"] for entry in body["entries"]] == ["one", "tests"]
    assert "Be brief." in body["files"]["AGENTS.md"]
    assert gateway.url + "/v1" in body["files"]["models.json"]
    assert body["digests"] == {path: hashlib.sha256(text.encode()).hexdigest() for path, text in body["files"].items()}
    bare = (await client.get(ROUTE)).json()
    assert bare["entries"] == body["entries"]
    assert "files" not in bare
    brief = (await client.get(ROUTE, params={"brief": "true", "adapter": "pi"})).json()
    assert not {"entries", "files"} & set(brief)


async def test_a_scenario_without_a_harness_has_an_empty_one(client):
    body = (await client.get(ROUTE, params={"adapter": "codex"})).json()
    assert body["entries"] == []
    assert "config.toml" in body["files"]


async def test_what_changed_since(gateway, client):
    first = publish(gateway, rule("one", "Be brief."), skill("gone"), reason="first")
    publish(gateway, rule("one", "Be briefer."), skill("gone"), reason="second")
    publish_weights(gateway, 1)
    last = publish(gateway, rule("one", "Be briefer."), skill("tests"), reason="third")
    changes = (await client.get(ROUTE, params={"since": first, "brief": "true"})).json()["changes"]
    assert changes["added"] == [{"id": "tests", "kind": "skill"}]
    assert changes["changed"] == [{"id": "one", "kind": "rules"}]
    assert changes["removed"] == [{"id": "gone", "kind": "skill"}]
    assert [release["reason"] for release in changes["releases"]] == ["third", "second"]
    none = (await client.get(ROUTE, params={"since": last})).json()["changes"]
    assert none == {"added": [], "changed": [], "removed": [], "releases": []}
    assert (await client.get(ROUTE, params={"since": "0" * 40})).json()["changes"] is None


async def whys(client, since):
    changes = (await client.get(ROUTE, params={"since": since, "brief": "true"})).json()["changes"]
    return [release["why"] for release in changes["releases"]]


async def back(client, to, reason=""):
    body = {"release_id": to, "reason": reason}
    done = await client.post("/reef/scenarios/default/rollback", json=body)
    assert done.status_code == 200, done.text


async def test_what_a_rollback_undid_is_not_told_of(gateway, client):
    ids = [publish(gateway, rule("one", f"Text {seq}."), reason=f"reason {seq}") for seq in range(1, 7)]
    await back(client, ids[2])
    assert await whys(client, ids[3]) == ["rolled back to release 3"]
    assert await whys(client, ids[1]) == ["rolled back to release 3", "reason 3"]
    assert await whys(client, ids[2]) == []  # its files are the same
    publish(gateway, rule("one", "Text 8."), reason="reason 8")
    assert await whys(client, ids[4]) == ["reason 8", "rolled back to release 3"]
    assert await whys(client, ids[2]) == ["reason 8"]
    await back(client, ids[4], "it was good")
    assert await whys(client, ids[2]) == ["rolled back to release 5: it was good", "reason 5", "reason 4"]


async def test_why_is_told_without_the_gate_and_the_reports(gateway, client):
    base = publish(gateway, rule("one", "Be brief."))
    gate = Evaluation("guarded", "accept", "Accepted: all 13 guards hold; not measured: one (two).", "c", base)
    reports = ", ".join(f"rep_{place:032x}" for place in range(3))
    said = f"evolve: shorter (is better) (from {reports} and 4 more) ({gate.reason})"
    publish(gateway, rule("one", "Be briefer."), reason=said, evaluation=gate)
    publish(gateway, rule("one", "Be silent."), reason=gate.reason, evaluation=gate)
    assert await whys(client, base) == ["", "evolve: shorter (is better)"]
    changes = (await client.get(ROUTE, params={"since": base})).json()["changes"]
    assert [release["reason"] for release in changes["releases"]] == [gate.reason, said]


async def test_releases_that_changed_it(gateway, client):
    assert (await client.get(f"{ROUTE}/releases")).json() == {"releases": [], "next": None}
    ids = [publish(gateway, rule("one", "Be brief."), reason="first")]
    publish_weights(gateway, 1)
    ids.append(publish(gateway, rule("one", "Be brief."), skill("tests"), reason="second"))
    publish_weights(gateway, 2)
    body = (await client.get(f"{ROUTE}/releases")).json()
    assert [release["release_id"] for release in body["releases"]] == ids[::-1]
    assert body["releases"][0]["summary"] == {
        "added": [{"id": "tests", "kind": "skill"}], "changed": [], "removed": [],
    }  # fmt: skip
    assert [release["seq"] for release in body["releases"]] == [3, 1]
    page = (await client.get(f"{ROUTE}/releases", params={"limit": 1})).json()
    assert page["next"] == ids[1]
    rest = (await client.get(f"{ROUTE}/releases", params={"after": page["next"]})).json()
    assert [release["release_id"] for release in rest["releases"]] == ids[:1]
    assert rest["next"] is None


async def test_adapters(client):
    found = (await client.get(f"{ROUTE}/adapters")).json()["adapters"]
    assert {item["adapter"] for item in found} == {"pi", "opencode", "codex", "claude"}
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", item["version"]) for item in found)


async def test_rights(gateway):
    old = publish(gateway, rule("one", "Be brief."))
    now = publish(gateway, rule("one", "Be briefer."))
    async with gateway.client("t-infer") as client:
        for path in (ROUTE, f"{ROUTE}/adapters", f"{INSTALL}?adapter=pi", f"{ROUTE}?release_id={now}"):
            assert (await client.get(path)).status_code == 200, path
        old_ones = (f"{ROUTE}?release_id={old}", f"{INSTALL}?adapter=pi&release_id={old}")
        for path in (f"{ROUTE}/releases", *old_ones, f"{ROUTE}?provenance=true"):
            assert (await client.get(path)).status_code == 403, path
    async with gateway.client("t-one") as client:
        assert (await client.get(ROUTE)).status_code == 403
    for token in ("wrong", None):
        async with gateway.client(token) as client:
            for path in (ROUTE, f"{ROUTE}/adapters", f"{ROUTE}/releases", f"{INSTALL}?adapter=pi"):
                assert (await client.get(path)).status_code == 401, path


async def test_an_earlier_release_by_id_or_prefix(gateway, client):
    old = publish(gateway, rule("one", "Be brief."))
    publish(gateway, rule("one", "Be briefer."))
    for id_ in (old, old[:12], "1", 1):
        body = (await client.get(ROUTE, params={"release_id": id_})).json()
        assert body["release_id"] == old
        assert body["entries"][0]["config"]["text"] == "Be brief."
    script = (await client.get(INSTALL, params={"adapter": "pi", "release_id": old})).text
    assert "Be brief." in json.loads(payload(script))["files"]["AGENTS.md"]


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        (f"{ROUTE}?release_id={'0' * 40}", 404, "no release"),
        (f"{ROUTE}?release_id=7", 404, "no release number 7; `reef releases` lists them"),
        (f"{ROUTE}?adapter=vim", 400, "pi, opencode, codex, claude"),
        (f"{ROUTE}?adapter=os:path", 400, "no adapter"),
        (f"{ROUTE}?adaptor=pi", 400, "no parameter 'adaptor'"),
        (INSTALL, 400, "?adapter=NAME"),
        (f"{INSTALL}?adapter=reef.harness.agents.pi:Pi", 400, "no adapter"),
        (f"{INSTALL}?adapter=pi&form=exe", 400, "sh or json"),
        (f"{ROUTE}/releases?after={'0' * 40}", 404, "no release"),
        (f"{ROUTE}/nothing", 404, "no such route"),
    ],
)
async def test_refusals_say_what_to_do(client, path, status, says):
    answer = await client.get(path)
    assert answer.status_code == status
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", [ROUTE, f"{INSTALL}?adapter=pi", f"{ROUTE}/releases"])
async def test_reading_makes_no_scenario(gateway, client, path):
    answer = await client.get(path, headers={"x-reef-scenario": "new"})
    assert (answer.status_code, "POST /reef/scenarios makes one" in answer.text) == (404, True)
    assert gateway.chain.head("new") is None


async def test_another_scenario_s_release_is_not_shown(gateway, client):
    gateway.ensure("other", {})
    gateway.context.watch.refresh()
    theirs = publish(gateway, rule("one", "secret"), scenario="other")
    publish(gateway, rule("one", "ours"))
    assert (await client.get(ROUTE, params={"release_id": theirs})).status_code == 404
    assert (await client.get(ROUTE, params={"since": theirs})).json()["changes"] is None
    body = (await client.get(ROUTE, headers={"x-reef-scenario": "other"})).json()
    assert body["entries"][0]["config"]["text"] == "secret"


async def test_an_episode_s_token_gets_its_own_release(run, tmp_path):
    tokens = []
    async with run(tmp_path, tokens=Tokens([("t", Token("owner"))])) as gateway:
        old = publish(gateway, rule("one", "Be brief."))
        publish(gateway, rule("one", "Be briefer."))
        episode = Token("episode", frozenset({"infer"}), frozenset({"default"}), release_id=old)
        tokens.append(("t-episode", episode))
        object.__setattr__(gateway.context, "tokens", Tokens(tokens))
        async with gateway.client("t-episode") as client:
            assert (await client.get(ROUTE)).json()["release_id"] == old


# --- the installer ----------------------------------------------------------------------------------------------------


async def test_the_script_carries_the_bundle(gateway, client):
    reason = "$(rm -rf ~) `id` '; rm -rf ~ #"
    id_ = publish(gateway, rule("one", "$(rm -rf ~)"), skill("tests", "`rm -rf ~`"), reason=reason)
    answer = await client.get(INSTALL, params={"adapter": "pi"})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    script = answer.text
    assert script.startswith("#!/bin/sh\n")
    assert script.endswith('\nmain "$@"\n')
    assert "rm -rf" not in script
    bundle = json.loads(payload(script))
    assert bundle["release"] == {"id": id_, "seq": 1, "reason": reason}
    assert (bundle["url"], bundle["scenario"], bundle["keyless"]) == (gateway.url, "default", False)
    assert "$(rm -rf ~)" in bundle["files"]["AGENTS.md"]
    assert hashlib.sha256(payload(script)).hexdigest() in script
    assert "t-all-rights" not in script + json.dumps(bundle)
    plain = await client.get(INSTALL, params={"adapter": "pi", "form": "json"})
    assert plain.content == payload(script)
    assert plain.headers["x-reef-digest"] == hashlib.sha256(plain.content).hexdigest()


async def test_the_same_release_is_the_same_script(client):
    scripts = [(await client.get(INSTALL, params={"adapter": name})).content for name in ("pi", "pi", "codex")]
    assert scripts[0] == scripts[1] != scripts[2]


async def test_a_keyless_server_says_so(run, tmp_path):
    async with run(tmp_path, tokens=Tokens(free=True)) as gateway, gateway.client(None) as client:
        script = (await client.get(INSTALL, params={"adapter": "pi"})).text
        assert json.loads(payload(script))["keyless"] is True


# --- the address ------------------------------------------------------------------------------------------------------


async def address(client, **headers):
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await client.get(INSTALL, params={"adapter": "pi", "form": "json"}, headers=headers)
    return answer.json()["url"] if answer.status_code == 200 else answer.json()["error"]["message"]


async def test_the_address_is_the_one_that_was_asked(gateway, client):
    assert await address(client) == gateway.url
    assert await address(client, host="reef.internal:8900") == "http://reef.internal:8900"
    assert await address(client, host="[::1]:8900") == "http://[::1]:8900"


async def test_a_proxy_on_this_machine_is_believed(client):
    told = {"x_forwarded_proto": "https", "x_forwarded_host": "reef.example.org"}
    assert await address(client, **told) == "https://reef.example.org"
    assert await address(client, **told | {"x_forwarded_host": "a.example, b"}) == "https://a.example"


@pytest.mark.parametrize(
    "host", ["$(id)", "a b", "a'b", 'a"b', "a;b", "a/b", "a@b", "-a", "a:b", "a:123456", "", "`id`", "a\\b", "[::1"]
)
async def test_an_address_that_is_none_is_refused(client, host):
    assert "set reef.public_url" in await address(client, x_forwarded_host=host or "-")
    assert "set reef.public_url" in await address(client, x_forwarded_proto="javascript", x_forwarded_host="a")


async def test_the_configured_address_goes_before_all(run, tmp_path):
    async with run(tmp_path, public_url="https://reef.example.org/learn/") as gateway, gateway.client() as client:
        assert await address(client, x_forwarded_host="other") == "https://reef.example.org/learn"


@pytest.mark.parametrize("url", ["ftp://a", "https://a b", "https://a/$(id)", "https://u:p@a", "a", "https://a?b"])
async def test_a_configured_address_that_is_none_is_refused(run, tmp_path, url):
    async with run(tmp_path, public_url=url) as gateway, gateway.client() as client:
        assert "reef.public_url is" in await address(client)


def test_a_proxy_elsewhere_is_not_believed():
    from reef.gateway.call import Call
    from reef.gateway.harness import address as found

    headers = {"host": "reef:8900", "x-forwarded-host": "evil.example", "x-forwarded-proto": "https"}
    for client, wanted in [
        (("10.0.0.7", 5), "http://reef:8900"), (("127.0.0.2", 5), "https://evil.example"),
        (("::ffff:127.0.0.1", 5), "https://evil.example"), (None, "http://reef:8900"), (("", 0), "http://reef:8900"),
    ]:  # fmt: skip
        call = Call({"scheme": "http", "client": client}, None, None, "/", headers)
        assert found(None, call) == wanted


# --- what is in it ----------------------------------------------------------------------------------------------------


async def test_a_model_that_is_answered_is_named(run, tmp_path):
    def route(scenario, model):
        if model not in (None, "small", "large"):
            raise ModelError("no such model")
        return Target("fake", engine)

    engine = FakeEngine()
    async with run(tmp_path, engine, route=route, models=("large", "small")) as gateway, gateway.client() as client:
        files = (await client.get(ROUTE, params={"adapter": "pi"})).json()["files"]
        assert json.loads(files["settings.json"])["defaultModel"] == "large"


async def test_three_hundred_entries(gateway, client):
    entries = [skill(f"skill-{place:03}", f"Step {place}. " * 20) for place in range(300)]
    publish(gateway, *entries)
    for name in ("pi", "opencode", "codex", "claude"):
        bundle = json.loads(payload((await client.get(INSTALL, params={"adapter": name})).text))
        pages = [path for path in bundle["files"] if path.endswith("SKILL.md")]
        assert len(pages) == 300


async def test_a_tree_that_does_not_render_says_why(gateway, client):
    values = Entry("mine", "config", {"agent": "pi", "values": {"defaultProvider": "elsewhere"}})
    publish(gateway, values)
    for path in (f"{ROUTE}?adapter=pi", f"{INSTALL}?adapter=pi"):
        answer = await client.get(path)
        assert answer.status_code == 409
        assert "cannot be installed for pi: entry 'mine'" in answer.json()["error"]["message"]
    assert (await client.get(f"{INSTALL}?adapter=codex")).status_code == 200
