"""Descent of releases and the decision on candidates, against a model of what each release must know."""

import threading

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from reef.core.errors import ConflictError, MissingError, StoreError
from reef.core.nouns import Consumed, Evaluation
from reef.loop.audit import Audit
from reef.records.board import Board
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from reef.scenario import decide
from reef.scenario.candidates import listed, waiting
from reef.scenario.learnt import Family, consumers, learnt
from reef.scenario.serving import ensure, promote, rollback
from tests.gateway.life import Life, rules

PARTS = ("weights", "harness")
moves = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from(PARTS)),
        st.tuples(st.just("candidate"), st.sampled_from(PARTS)),
        st.tuples(st.just("promote"), st.integers(0, 5)),
        st.tuples(st.just("rollback"), st.integers(0, 9)),
    ),
    min_size=3,
    max_size=7,
)


def new(part, number):
    if part == "harness":
        return rules(f"Rule {number}.")
    return NewPart("lora", {"adapter.safetensors": b"\x02\0\0\0\0\0\0\0{}" + f"{number}".encode()}, {"rank": 2})


class Model:
    """What each part of each release has learnt from, kept beside the real chain."""

    def __init__(self, chain, board, base):
        self.chain, self.board, self.turn = chain, board, 0
        ensure("a", chain, board, base, None)
        self.knows = {chain.head("a").id: {part: frozenset() for part in PARTS}}
        self.releases, self.candidates = [chain.head("a").id], []

    def draft(self, operation, part):
        self.turn += 1
        head, unit = self.chain.head("a"), f"{self.turn:032x}:0"
        step = head.step + (part == "weights")
        consumed = {name: Consumed(held.cursor) for name, held in head.consumed.items()}
        return head, unit, Draft(
            operation, {part: new(part, self.turn)}, base=head.id, step=step, line=f"{head.id[:12]}-{self.turn}",
            consumed={**consumed, part: Consumed(self.turn, (unit,))},
            evaluation=Evaluation("always", "accept", "made", f"{self.turn:040x}", head.id),
        )  # fmt: skip

    def publish(self, part):
        head, unit, draft = self.draft("publish", part)
        made = self.chain.publish("a", draft, head.id)
        self.knows[made.id] = {**self.knows[head.id], part: self.knows[head.id][part] | {unit}}
        self.releases.append(made.id)

    def candidate(self, part):
        head, unit, draft = self.draft("candidate", part)
        made = self.chain.publish("a", draft, None)
        self.candidates.append((made, part, self.knows[head.id][part] | {unit}))

    def promote(self, number):
        if not self.candidates:
            return
        made, part, units = self.candidates[number % len(self.candidates)]
        before = self.chain.head("a")
        try:
            head = promote("a", made.id, self.chain, self.board, actor="x", reason="r")
        except ConflictError:
            return
        if head.id != before.id and head.id not in self.knows:
            self.knows[head.id] = {**self.knows[before.id], part: units}
            self.releases.append(head.id)

    def rollback(self, number):
        target = self.releases[number % len(self.releases)]
        before = self.chain.head("a")
        head = rollback("a", target, self.chain, self.board, actor="x", reason="r")
        if head.id != before.id:
            self.knows[head.id] = dict(self.knows[target])
            self.releases.append(head.id)


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(moves)
def test_every_release_knows_what_its_parts_learnt_from_and_no_more(tmp_path_factory, base, script):
    """Publish, promote, rollback and two parts in any order; the family is kept beside, and made anew at the end."""
    folder = tmp_path_factory.mktemp("life")
    chain, board = GitChain(folder / "releases.git"), Board(folder / "records.db")
    chain.open()
    model, family = Model(chain, board, base), Family(chain)
    for name, value in script:
        getattr(model, name)(value)
        family.of("a")
    board.close()
    descent = family.of("a")
    assert descent == Family(chain).of("a")
    assert [node.id for node in descent.nodes] == model.releases
    for place, node in enumerate(descent.nodes):
        taught = set()
        for at in descent.ancestry(place):
            for held in chain.get(descent.nodes[at].id).consumed.values():
                taught |= set(held.units)
        assert taught == frozenset().union(*model.knows[node.id].values()), node
    for turn in range(1, model.turn + 1):
        unit = f"{turn:032x}:0"
        direct = [descent.places[release.id] for release in consumers(chain, "a", [unit[:32]])]
        influenced = {descent.nodes[place].id for place in descent.descendants(direct)}
        assert influenced == {
            name for name, known in model.knows.items() if unit in frozenset().union(*known.values())
        }  # fmt: skip
        found = learnt(chain, "a", [unit[:32]])
        assert found.served == (model.releases[-1] in influenced)
        if found.before is not None:
            assert found.before.id not in influenced


def test_a_chain_that_was_repaired_backwards_is_followed(chain, board, base, folder):
    ensure("a", chain, board, base, None)
    first = chain.publish("a", Draft("publish", {"harness": rules("one")}), chain.head("a").id)
    family = Family(chain)
    chain.publish("a", Draft("publish", {"harness": rules("two")}), first.id)
    assert len(family.of("a").nodes) == 3
    (folder / "releases.git/refs/heads/a").write_text(first.id + "\n")
    assert [node.id for node in family.of("a").nodes][-1] == first.id
    third = chain.publish("a", Draft("publish", {"harness": rules("three")}), first.id)
    assert [node.id for node in family.of("a").nodes][1:] == [first.id, third.id]
    assert family.of("nobody").nodes == ()


@pytest.fixture
def life(chain, board, base, folder):
    ensure("default", chain, board, base, None)
    return Life(folder, chain, board)


def test_only_what_is_held_and_fits_waits(life, chain, folder):
    audit, family = Audit(folder / "learn.db"), Family(chain)
    with pytest.raises(StoreError, match="is not there"):
        waiting(chain, audit, family, "default")
    assert not audit._path.exists(), "a reader makes no file"
    old = life.hold()
    life.publish()
    fresh, dropped = life.hold(), life.hold()
    decide.reject("default", dropped.id, chain, life.board, audit, family, actor="ada", reason="rude")
    assert [item.candidate.id for item in waiting(chain, audit, family, "default")] == [fresh.id]
    states = {item.candidate.id: (item.state, item.fits) for item in listed(chain, audit, family, "default").found}
    assert states[old.id] == ("held", False)
    assert states[fresh.id] == ("held", True)
    assert states[dropped.id][0] == "rejected"


def test_a_held_candidate_is_listed_also_without_its_ref(life, chain, folder):
    held = life.hold()
    (folder / f"releases.git/refs/reef/default/candidates/{held.id}").unlink()
    assert chain.candidates("default") == []
    found = listed(chain, Audit(folder / "learn.db"), Family(chain), "default").found
    assert held.id in {item.candidate.id for item in found if item.state == "held"}


def test_promoting_and_rejecting_from_many_threads_has_one_outcome(life, chain, board, folder):
    for _ in range(2):
        held, done = life.hold(), []
        barrier = threading.Barrier(4)

        def decided(number, held=held, done=done, barrier=barrier):
            own, mine = GitChain(folder / "releases.git"), Board(folder / "records.db")
            audit = Audit(folder / "learn.db")
            barrier.wait()
            try:
                if number % 2:
                    made = decide.promote("default", held.id, own, mine, audit, actor="p", reason="").id
                else:
                    made = decide.reject(
                        "default", held.id, own, mine, audit, Family(own), actor="r", reason=""
                    ).verdict
                done.append(made)
            except ConflictError as error:
                done.append(error)
            finally:
                mine.close()

        threads = [threading.Thread(target=decided, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == 4
        won = {item for item in done if not isinstance(item, ConflictError)}
        assert len(won) == 1
        promoted = won != {"reject"}
        assert (life.head.evaluation is not None and life.head.evaluation.candidate_id == held.id) == promoted
        assert board.get("default").release_id == life.head.id


def test_a_candidate_of_another_scenario_is_none_here(life, chain, board, base, folder):
    ensure("other", chain, board, base, None)
    held = life.hold()
    with pytest.raises(MissingError, match="reef candidates"):
        decide.own("other", held.id, chain)
    assert decide.own("default", held.id[:8], chain).id == held.id
