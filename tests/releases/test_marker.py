"""Format numbers: a repository in the first form is brought up to date and goes on; one from the future is refused."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from reef.core import failpoint
from reef.core.errors import ChainError, StaleHead
from reef.core.nouns import Cost, Evaluation
from reef.releases import Draft, NewPart, form, marker
from reef.releases.chain import GitChain


def old(path: Path, content: bytes, model: bytes) -> tuple[str, str, str]:
    """A repository as the first Reef made them, by git commands alone: a base, a LoRA, a candidate on it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    env |= {"GIT_DIR": str(path), "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}
    env |= {f"GIT_{who}_{what}": "x" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def git(*arguments: str, data: bytes = b"") -> str:
        done = subprocess.run(["git", *arguments], input=data, env=env, capture_output=True, check=True)
        return done.stdout.decode().strip()

    def blob(data: bytes) -> str:
        return git("hash-object", "-w", "--stdin", data=data)

    def commit(page: dict, files: dict[str, bytes], parent: str | None, ref: str) -> str:
        weights = "".join(f"100644 blob {blob(data)}\t{name}\n" for name, data in sorted(files.items()))
        top = f"100644 blob {blob(b'* -text')}\t.gitattributes\n"
        top += f"100644 blob {blob(json.dumps(page).encode())}\trelease.json\n"
        top += f"040000 tree {git('mktree', data=weights.encode())}\tweights\n"
        tree = git("mktree", data=top.encode())
        made = git("commit-tree", tree, *(("-p", parent) if parent else ()), "-m", f"x\n\ndraft {'0' * 64}")
        git("update-ref", "--create-reflog", ref, made)
        return made

    def entry(name: str, data: bytes) -> dict:
        return {name: [hashlib.sha256(data).hexdigest(), len(data)]}

    git("init", "--quiet", "--bare", "--initial-branch=a", str(path))
    digest = hashlib.sha256(model).hexdigest()
    place = path / "lfs/objects" / digest[:2] / digest[2:4] / digest
    place.parent.mkdir(parents=True)
    place.write_bytes(model)
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(model)}\n".encode()
    page = {
        "format": 1, "scenario": "a", "seq": 0, "operation": "create", "base": None, "step": 0, "line": None,
        "evaluation": None, "recipe": "sao", "consumed": {}, "actor": "reef", "reason": "", "created_at": 1.5,
        "parts": {"weights": {"kind": "base", "files": entry("weights.json", content), "meta": {}}},
    }  # fmt: skip
    first = commit(page, {"weights.json": content}, None, "refs/heads/a")
    evaluation = {
        "policy": "guarded", "verdict": "accept", "reason": "fine", "candidate_id": "c" * 40, "incumbent_id": first,
        "guards": [{"name": "finite", "passed": True, "value": None, "limit": None, "note": "n"}],
        "metrics": {"mean": 0.5}, "looks": 1, "seconds": 2.0,
    }  # fmt: skip
    lora = {
        "kind": "lora",
        "files": entry("weights.json", content) | entry("m.safetensors", model),
        "meta": {"rank": 8},
    }
    page |= {"seq": 1, "operation": "publish", "base": first, "step": 3, "evaluation": evaluation}
    page |= {"parts": {"weights": lora}, "consumed": {"weights": {"cursor": 7, "units": ["r:0"]}}}
    files = {"weights.json": content, "m.safetensors": pointer}
    second = commit(page, files, first, "refs/heads/a")
    page |= {"seq": 2, "operation": "candidate", "base": second, "step": 4, "evaluation": None}
    third = commit(page, files, second, "refs/reef/a/candidates/x")
    (path / "reef").mkdir()
    (path / "reef/format").write_text("1\n")
    return first, second, third


def test_a_repository_in_the_first_form_is_read_appended_to_and_verified(path, tensors, lora):
    first, second, third = old(path, b'{"kind":"base"}', tensors(5))
    chain = GitChain(path)
    assert chain.head("a").id == second, "read as it is, before anything was brought up to date"
    assert chain.open() == [f"brought the releases in {path} from format 1 to {marker.FORMAT}"]
    assert (path / "reef/format").read_text() == f"{marker.FORMAT}\n"
    head = chain.head("a")
    assert (head.seq, head.parent, head.step, head.consumed["weights"].units) == (1, first, 3, ("r:0",))
    assert (head.evaluation.suite, head.evaluation.cost, head.evaluation.metrics) == (None, None, {"mean": 0.5})
    assert chain.candidates("a") == [chain.get(third)]
    assert chain.files(second, "weights")["m.safetensors"].read_bytes() == tensors(5)
    told = replace(head.evaluation, suite="held out 1a2b", cost=Cost(3, 40, 50, 1.5, None))
    made = chain.publish("a", Draft("publish", {"weights": lora(1)}, base=second, evaluation=told), second)
    back = chain.publish("a", Draft("rollback", {}, base=second), made.id)
    assert back.parts == head.parts
    assert chain.verify("a") == []
    fresh = GitChain(path)
    assert fresh.open() == []
    assert [release.id for release in fresh.history("a")] == [back.id, made.id, second, first]
    assert fresh.get(made.id).evaluation == told
    subprocess.run(["git", "--git-dir", str(path), "fsck", "--strict"], check=True, capture_output=True)


def test_a_migration_killed_in_the_middle_is_finished(path, tensors):
    old(path, b"{}", tensors(5))
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            failpoint.arm("releases.migrated")
            GitChain(path).open()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert (path / "reef/format").read_text() == "1\n"
    assert len(GitChain(path).open()) == 1
    assert GitChain(path).open() == []


@pytest.mark.parametrize("number", [marker.FORMAT + 1, 999])
def test_a_later_repository_is_refused_and_left_alone(chain, path, base, number):
    chain.publish("a", base, None)
    (path / "reef/format").write_text(f"{number}\n")
    with pytest.raises(ChainError, match=rf"format {number} and this Reef reads up to {marker.FORMAT}.*a newer one"):
        GitChain(path).open()
    assert (path / "reef/format").read_text() == f"{number}\n"
    (path / "reef/format").write_text("many\n")
    with pytest.raises(ChainError, match="not a number"):
        GitChain(path).open()


def page(**more) -> bytes:
    content = {
        "format": 1, "scenario": "a", "seq": 0, "operation": "create", "base": None, "step": 0, "line": None,
        "evaluation": None, "recipe": None, "consumed": {}, "actor": "x", "reason": "", "created_at": 1.0, "parts": {},
    }  # fmt: skip
    return json.dumps(content | more).encode()


def test_keys_from_the_future_are_passed_over_and_later_forms_refused():
    release = form.read("1" * 40, None, page(colour="blue"))
    assert release.scenario == "a"
    evaluation = {
        "policy": "p", "verdict": "accept", "reason": "r", "candidate_id": "c", "incumbent_id": "i", "mood": 1,
        "cost": {"calls": 2, "watts": 3},
    }  # fmt: skip
    read = form.read("1" * 40, None, page(evaluation=evaluation)).evaluation
    assert (read.suite, read.cost) == (None, Cost(2))
    for number in (form.FORMAT + 1, 0, -1):
        with pytest.raises(ChainError, match=f"has format {number}; this Reef reads up to {form.FORMAT}"):
            form.read("1" * 40, None, page(format=number))


def test_what_cannot_be_measured_is_missing_from_the_cost(chain, base):
    lost = Evaluation("p", "accept", "r", "c", "i", suite="s 1", cost=Cost(1, 2, 3, float("nan"), float("inf")))
    first = chain.publish("a", base, None)
    made = chain.publish("a", Draft("publish", {"weights": NewPart("base", {})}, evaluation=lost), first.id)
    assert made.evaluation.cost == Cost(1, 2, 3, 0.0, None)
    assert GitChain(chain.path).get(made.id) == made


def test_a_retry_across_an_upgrade_is_recognised(chain, base, lora):
    """The draft's digest in an old commit's message was made without the keys that came later."""
    first = chain.publish("a", base, None)
    draft = Draft("publish", {"weights": lora(1)}, evaluation=Evaluation("p", "accept", "r", "c", "i"))
    made = chain.publish("a", draft, first.id)
    assert GitChain(chain.path).publish("a", draft, first.id) == made
    with pytest.raises(StaleHead):
        chain.publish("a", replace(draft, evaluation=replace(draft.evaluation, suite="other")), first.id)
