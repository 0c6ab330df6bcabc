"""`reef prune`: the configuration's policy on a folder, with pins, held candidates and a remote; the learner's."""

import asyncio
import json
import struct
import subprocess
from pathlib import Path

import pytest

from reef.cli import assemble
from reef.cli import prune as command
from reef.cli.main import main
from reef.cli.process import Boot
from reef.config import load
from reef.core.errors import PrunedError
from reef.loop.ledger import Ledger, Look
from reef.records.journal import Journal
from reef.releases import Draft, NewPart
from reef.scenario import serving

CONFIG = "reef: {port: 0, engine: fake, recipe: record}\ntraining: {backend: fake}\n"
KEEP = CONFIG + "releases: {keep: 2, keep_candidates: 2}\n"


def weights(fill):
    header = json.dumps({"a": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    model = struct.pack("<Q", len(header)) + header + bytes([fill]) * 64
    return NewPart("lora", {"weights.json": b'{"n":%d}' % fill, "adapter_model.safetensors": model}, {"n": fill})


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Releases 0 to 5 of `default` and five candidates on the head. Yields chain, board, releases, candidates."""
    monkeypatch.chdir(tmp_path)
    Path("reef.yaml").write_text(KEEP)
    Path(".reef").mkdir()
    assemble.prepare(Boot(load().settings.model_dump(mode="json"), tmp_path / "run", "http://x", None))
    chain, board = assemble.open_chain(Path(".reef")), assemble.open_board(Path(".reef"))
    made = [chain.head("default")]
    for number in range(1, 6):
        made.append(chain.publish("default", Draft("publish", {"weights": weights(number)}), made[-1].id))
    serving.align("default", chain, board)
    drafts = [Draft("candidate", {"weights": weights(100 + n)}, base=made[-1].id, step=n) for n in range(5)]
    yield chain, board, made, [chain.publish("default", draft, None) for draft in drafts]
    board.close()


def whole(chain, release):
    try:
        chain.files(release.id, "weights")
    except PrunedError:
        return False
    return True


def hold(name, candidate, verdict="hold"):
    ledger = Ledger(Path(".reef/learn.db"))
    ledger.audit(Look(name, "weights", "l-1", candidate.step, 1, verdict, "good", candidate.id))
    ledger.close()


def test_a_dry_run_says_what_the_run_then_does(site, capsys):
    chain, board, made, proposed = site
    Journal(board).pin("default", made[1].id, actor="ada", reason="r")
    hold("default", proposed[0])
    hold("default", proposed[1])
    hold("default", proposed[1], "reject")  # a person turned it down since
    assert main(["prune", "--dry-run", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert [item["seq"] for item in plan["releases"]] == [2, 3]
    assert {item["candidate_id"] for item in plan["candidates"]} == {proposed[1].id, proposed[2].id}
    assert (plan["dry_run"], plan["objects"], plan["waiting_bytes"]) == (True, 4, 0)
    assert all(whole(chain, release) for release in (*made, *proposed))
    assert main(["prune", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "default: would lose the large files of release 2, 3" in said
    assert "2 candidates beyond releases.keep_candidates would go" in said
    assert main(["prune", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done == plan | {"dry_run": False}
    assert [whole(chain, release) for release in made] == [True, True, False, False, True, True]
    assert [whole(chain, candidate) for candidate in proposed] == [True, False, False, True, True]
    acts = [act for act in Journal(board).after(0) if act.kind == "prune"]
    assert [(act.actor, act.detail["releases"]) for act in acts] == [("operator", [made[2].id, made[3].id])]
    assert main(["prune"]) == 0
    assert "0.0 KiB freed (0 large files)" in capsys.readouterr().out
    serving.unpin("default", board, actor="ada", reason="")
    assert main(["rollback", "2", "--reef.port", "1"]) == 1
    assert "was pruned: its large files were removed to bound the disk" in capsys.readouterr().err
    assert chain.head("default") == made[-1], "nothing moved"


def test_without_a_server_a_rollback_fetches_what_was_pruned_here(site, tmp_path):
    chain, _, made, _ = site
    there = tmp_path / "there.git"
    subprocess.run(["git", "init", "--quiet", "--bare", str(there)], check=True)
    Path("reef.yaml").write_text(KEEP.replace("keep: 2", f"keep: 2, remote: {there}"))
    assert main(["push"]) == 0
    assert main(["prune"]) == 0
    assert not whole(chain, made[1])
    assert main(["rollback", "1", "--reef.port", "1"]) == 0
    assert chain.head("default").base == made[1].id
    assert not whole(chain, made[2])
    assert main(["pin", "2", "--reef.port", "1"]) == 0
    assert whole(chain, made[2])


def test_without_a_number_releases_stay(site, capsys):
    chain, _, made, _ = site
    Path("reef.yaml").write_text(CONFIG)
    assert main(["prune"]) == 0
    assert "all releases keep their large files: set releases.keep" in capsys.readouterr().out
    assert all(whole(chain, release) for release in made)
    assert main(["prune", "--reef.state_dir", "elsewhere"]) == 1
    assert "elsewhere holds no releases" in capsys.readouterr().err


def test_with_a_remote_that_has_nothing_yet_releases_wait(site, capsys):
    chain, _, made, proposed = site
    Path("reef.yaml").write_text(KEEP.replace("keep: 2", "keep: 2, remote: /nonexistent/remote.git"))
    assert main(["prune", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["releases"], len(done["candidates"])) == ([], 3)
    assert done["waiting_bytes"] > 0
    assert all(whole(chain, release) for release in made)
    assert not whole(chain, proposed[0])


def test_a_backup_knows_what_was_pruned(site, capsys):
    chain, _, made, _ = site
    assert main(["prune"]) == 0
    assert main(["backup", "copy"]) == 0
    assert main(["backup", "--check", "copy"]) == 0
    copy = assemble.open_chain(Path("copy"))
    copy.open()
    assert [whole(copy, release) for release in made] == [whole(chain, release) for release in made]
    assert copy.verify("default") == []


async def test_the_learner_prunes_after_each_publish(site, monkeypatch):
    chain, board, made, _ = site
    monkeypatch.setattr(command, "PERIOD", 0.02)
    task = asyncio.create_task(command.tend(load().settings, chain, board))
    head = made[-1]
    try:
        async with asyncio.timeout(20):
            while whole(chain, made[3]):
                await asyncio.sleep(0.01)
            head = await asyncio.to_thread(
                chain.publish, "default", Draft("publish", {"weights": weights(7)}), made[-1].id
            )
            while whole(chain, made[4]):
                await asyncio.sleep(0.01)
    finally:
        task.cancel()
    assert whole(chain, made[5])
    assert whole(chain, head)
