"""What every release chain keeps to: compare-and-swap, one history, retries, verified files. A new one is one line."""

import json
import struct
import threading

import pytest

from reef import releases
from reef.core.errors import DigestError, InputError, MissingError, StaleHead
from reef.core.nouns import Consumed
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain


def git(folder):
    chain = GitChain(folder / "releases.git")
    chain.open()
    return chain


CHAINS = {"git": git}


@pytest.fixture(params=CHAINS)
def reopen(request, tmp_path):
    """Opens the same chain, as another process would."""
    return lambda: CHAINS[request.param](tmp_path)


@pytest.fixture
def chain(reopen):
    return reopen()


def lora(fill, size=256):
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    tensors = struct.pack("<Q", len(header)) + header + bytes([fill]) * size
    files = {
        "weights.json": b'{"fill":%d}' % fill,
        "adapter_config.json": b'{"r":8}',
        "adapter_model.safetensors": tensors,
    }
    return NewPart("lora", files, {"kind": "lora", "rank": 8, "fill": fill})


def rules(text):
    return NewPart("tree", {"harness.json": json.dumps({"entries": [], "text": text}).encode()})


BASE = Draft("create", {"weights": NewPart("base", {"weights.json": b"{}"}, {"kind": "base"})}, actor="reef")


def publish(fill, **fields):
    return Draft("publish", {"weights": lora(fill)}, **({"step": fill, "line": f"l{fill}"} | fields))


def test_every_chain_is_here():
    assert CHAINS.keys() == releases.CHAINS.keys()


def test_an_empty_chain(chain):
    assert chain.head("a") is None
    assert chain.history("a") == []
    with pytest.raises(MissingError):
        chain.get("0" * 40)


def test_a_history_is_linear_and_the_same_for_everybody(chain, reopen):
    first = chain.publish("a", BASE, None)
    made = [first]
    for fill in range(1, 4):
        consumed = {"weights": Consumed(10 * fill, (f"u{fill}:0",))}
        made.append(chain.publish("a", publish(fill, base=made[-1].id, consumed=consumed, recipe="sao"), made[-1].id))
    assert [release.seq for release in made] == [0, 1, 2, 3]
    assert [release.parent for release in made] == [None, *(release.id for release in made[:-1])]
    assert {release.scenario for release in made} == {"a"}
    assert (made[-1].step, made[-1].line, made[-1].recipe, made[-1].base) == (3, "l3", "sao", made[2].id)
    for seen in (chain, reopen()):
        assert seen.head("a") == made[-1]
        assert seen.history("a") == made[::-1]
        assert seen.history("a", limit=2) == made[:1:-1]
        assert seen.history("a", before=made[2].id) == made[1::-1]
        assert seen.history("a", before=first.id) == []
        assert [seen.get(release.id) for release in made] == made
        assert seen.get(made[1].id[:12]) == made[1]
        assert seen.get(made[3].id).consumed == {"weights": Consumed(30, ("u3:0",))}
    with pytest.raises(MissingError):
        chain.get(made[1].id[:6])  # shorter than a prefix may be


def test_a_publish_on_another_head_changes_nothing(chain):
    first = chain.publish("a", BASE, None)
    second = chain.publish("a", publish(1), first.id)
    for expected in (first.id, None, "0" * 40):
        with pytest.raises(StaleHead) as caught:
            chain.publish("a", publish(2), expected)
        assert caught.value.head == second.id
    with pytest.raises(StaleHead) as caught:
        chain.publish("b", publish(1), first.id)
    assert caught.value.head is None
    assert chain.history("a") == [second, first]
    assert chain.head("b") is None


def test_the_same_draft_on_the_same_parent_is_the_same_release(chain, reopen):
    first = chain.publish("a", BASE, None)
    assert chain.publish("a", BASE, None) == first
    second = chain.publish("a", publish(1), first.id)
    assert chain.publish("a", publish(1), first.id) == second
    third = chain.publish("a", publish(2), second.id)
    assert reopen().publish("a", publish(1), first.id) == second, "also when the head went on"
    assert chain.history("a") == [third, second, first]


def test_of_many_that_publish_at_once_one_wins(chain, reopen):
    first = chain.publish("a", BASE, None)
    won, lost = [], []
    gate = threading.Barrier(4)

    def race(fill):
        mine = reopen()
        gate.wait()
        try:
            won.append(mine.publish("a", publish(fill), first.id))
        except StaleHead as error:
            lost.append(error.head)

    threads = [threading.Thread(target=race, args=(fill,)) for fill in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert lost == [won[0].id] * 3
    assert chain.history("a") == [won[0], first]


def test_files_come_back_byte_for_byte(chain, reopen):
    first = chain.publish("a", BASE, None)
    part = lora(7, 70_000)
    second = chain.publish("a", Draft("publish", {"weights": part}), first.id)
    held = second.parts["weights"]
    assert (held.kind, dict(held.meta)) == ("lora", part.meta)
    assert held.files.keys() == part.files.keys()
    for seen in (chain, reopen()):
        found = seen.files(second.id, "weights")
        assert {name: path.read_bytes() for name, path in found.items()} == part.files
    with pytest.raises(MissingError):
        chain.files(second.id, "harness")
    with pytest.raises(MissingError):
        chain.files("0" * 40, "weights")


def test_a_damaged_file_is_never_handed_out(chain, reopen):
    first = chain.publish("a", BASE, None)
    second = chain.publish("a", publish(1), first.id)
    path = chain.files(second.id, "weights")["adapter_model.safetensors"]
    whole = path.read_bytes()
    path.chmod(0o644)
    for damaged in (whole[:-1] + b"\0", whole[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(DigestError, match="adapter_model"):
            reopen().files(second.id, "weights")


def test_parts_not_named_are_carried_over_and_a_rollback_takes_its_bases(chain):
    first = chain.publish("a", BASE, None)
    second = chain.publish("a", Draft("publish", {"harness": rules("x")}, base=first.id), first.id)
    assert second.parts["weights"] == first.parts["weights"]
    third = chain.publish("a", publish(1, base=second.id), second.id)
    assert third.parts["harness"] == second.parts["harness"]
    assert chain.files(third.id, "harness")["harness.json"].read_bytes() == rules("x").files["harness.json"]
    back = chain.publish("a", Draft("rollback", {}, base=second.id, actor="ada", reason="worse"), third.id)
    assert back.parts == second.parts
    assert (back.seq, back.base, back.actor, back.reason) == (3, second.id, "ada", "worse")
    assert chain.files(back.id, "weights").keys() == {"weights.json"}


def test_a_candidate_moves_no_head(chain, reopen):
    first = chain.publish("a", BASE, None)
    second = chain.publish("a", publish(1), first.id)
    draft = Draft("candidate", {"weights": lora(5)}, base=second.id, step=2)
    candidate = chain.publish("a", draft, None)
    assert (candidate.operation, candidate.parent) == ("candidate", second.id)
    assert chain.publish("a", draft, None) == candidate
    assert chain.history("a") == [second, first]
    seen = reopen()
    assert seen.get(candidate.id) == candidate
    assert seen.files(candidate.id, "weights").keys() == lora(5).files.keys()
    with pytest.raises(InputError):
        chain.publish("a", Draft("candidate", {"weights": lora(5), "harness": rules("y")}, base=second.id), None)
    with pytest.raises(InputError):
        chain.publish("a", Draft("candidate", {"weights": lora(5)}), None)


def test_scenarios_do_not_meet(chain):
    one, other = chain.publish("a", BASE, None), chain.publish("b", BASE, None)
    assert one.id != other.id
    chain.publish("a", publish(1), one.id)
    assert chain.history("b") == [other]
    with pytest.raises(MissingError):
        chain.publish("b", publish(2, base=one.id), other.id)


@pytest.mark.parametrize(
    "files",
    [
        {"weights.json": b"{}", "adapter_model.bin": b"\x80\x04K\x01."},
        {"weights.json": b"{}", "model.pkl": b"\x80\x04K\x01."},
        {"weights.json": b"{}", "adapter_model.safetensors": b"\x80\x04K\x01."},
        {"weights.json": b"{}", "../adapter_model.safetensors": lora(1).files["adapter_model.safetensors"]},
    ],
)
def test_nothing_but_safetensors_enters(chain, files):
    first = chain.publish("a", BASE, None)
    with pytest.raises(InputError):
        chain.publish("a", Draft("publish", {"weights": NewPart("lora", files)}), first.id)
    assert chain.head("a") == first


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "a..b", "x.lock", "-a", "a" * 64])
def test_a_scenario_is_named_like_one(chain, name):
    with pytest.raises(InputError):
        chain.publish(name, BASE, None)
    assert chain.head(name) is None
