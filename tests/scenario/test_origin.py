"""Where entries and lines come from, against a model that writes it down as it happens; and what is flagged."""

import json

import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st

from reef.core.errors import ChainError, ConflictError
from reef.core.nouns import Consumed, Evaluation
from reef.harness import tree
from reef.harness.tree import Entry, write
from reef.loop.audit import Audit
from reef.records.board import Board
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain
from reef.scenario import origin
from reef.scenario.serving import ensure, promote, rollback
from tests.gateway.life import Life


def test_the_file_is_the_trees():
    assert origin.FILE == tree.FILE


# --- a model ----------------------------------------------------------------------------------------------------------

edits = st.lists(
    st.tuples(
        st.sampled_from("abc"),
        st.sampled_from(["new", "insert", "delete", "replace", "remove", "describe"]),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=3,
)
moves = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), edits),
        st.tuples(st.just("publish"), edits),
        st.tuples(st.just("weights"), st.none()),
        st.tuples(st.just("candidate"), edits),
        st.tuples(st.just("promote"), st.integers(0, 5)),
        st.tuples(st.just("rollback"), st.integers(0, 9)),
    ),
    min_size=4,
    max_size=9,
)


PROMOTED = [
    ("publish", [("a", "new", 0), ("b", "new", 0)]),
    ("candidate", [("c", "new", 0), ("a", "insert", 0)]),
    ("weights", None),
    ("promote", 0),
    ("publish", [("b", "replace", 0)]),
    ("candidate", [("b", "remove", 0), ("a", "describe", 0)]),
    ("publish", [("c", "insert", 1)]),
    ("promote", 1),  # with force: the head has another tree since
    ("rollback", 4),
]
"""What chance seldom makes: candidates that are promoted onto trees with something in them."""


class Model:
    """Each release's tree as `{id: (description, lines, since)}`, where a line is its text and who brought it. Texts
    are never used twice, so that a line is the same line exactly when its text is."""

    def __init__(self, chain, board, base):
        self.chain, self.board, self.turn, self.words = chain, board, 0, 0
        ensure("a", chain, board, base, None)
        self.trees = {chain.head("a").id: {}}
        self.releases, self.candidates = [chain.head("a").id], []

    def word(self):
        self.words += 1
        return f"word {self.words}"

    def edited(self, before, edits):
        """The tree after some edits; what is new is brought by None until the release has its id."""
        now = {name: (held[0], list(held[1]), held[2]) for name, held in before.items()}
        for name, what, at in edits:
            if name not in now or what == "new":
                now[name] = ((self.word(), None), [(self.word(), None)], ())
            elif what == "remove":
                del now[name]
            else:
                _, lines, since = now[name]
                at %= len(lines)
                if what == "insert":
                    lines.insert(at, (self.word(), None))
                elif what == "delete" and len(lines) > 1:
                    del lines[at]
                elif what == "replace":
                    lines[at] = (self.word(), None)
                elif what == "describe":
                    now[name] = ((self.word(), None), lines, since)
        return now

    def draft(self, operation, before, now):
        self.turn += 1
        head = self.chain.head("a")
        made = [
            Entry(name, "skill", {"name": name, "description": held[0][0], "text": "\n".join(t for t, _ in held[1])})
            for name, held in now.items()
        ]
        cursors = {name: Consumed(held.cursor) for name, held in head.consumed.items()}
        return Draft(
            operation, {"harness": NewPart("tree", {tree.FILE: write(made)})}, base=head.id, line=f"l-{self.turn}",
            consumed={**cursors, "harness": Consumed(self.turn, (f"{self.turn:032x}:0",))}, reason=f"turn {self.turn}",
            evaluation=Evaluation("always", "accept", "made", f"{self.turn:040x}", head.id),
        )  # fmt: skip

    @staticmethod
    def signed(before, now, release):
        """The tree with the release's id where something is new."""
        signed = {}
        for name, (description, lines, since) in now.items():
            own = ((description[0], description[1] or release), [(text, who or release) for text, who in lines], since)
            old = before.get(name)
            same = old is not None and (old[0][0], [t for t, _ in old[1]]) == (own[0][0], [t for t, _ in own[1]])
            signed[name] = old if same else (*own[:2], (*(old[2] if old else ()), release))
        return signed

    def publish(self, edits):
        head = self.chain.head("a")
        before = self.trees[head.id]
        now = self.edited(before, edits)
        made = self.chain.publish("a", self.draft("publish", before, now), head.id)
        self.trees[made.id] = self.signed(before, now, made.id)
        self.releases.append(made.id)

    def weights(self, _):
        self.turn += 1
        head = self.chain.head("a")
        files = {"adapter.safetensors": b"\x02\0\0\0\0\0\0\0{}" + f"{self.turn}".encode()}
        cursors = {name: Consumed(held.cursor) for name, held in head.consumed.items()}
        draft = Draft(
            "publish", {"weights": NewPart("lora", files, {"rank": 2})}, base=head.id, step=head.step + 1,
            consumed={**cursors, "weights": Consumed(self.turn, (f"{self.turn:032x}:0",))},
        )  # fmt: skip
        made = self.chain.publish("a", draft, head.id)
        self.trees[made.id] = self.trees[head.id]
        self.releases.append(made.id)

    def candidate(self, edits):
        head = self.chain.head("a")
        before = self.trees[head.id]
        now = self.edited(before, edits)
        made = self.chain.publish("a", self.draft("candidate", before, now), None)
        self.candidates.append((made, before, now))
        self.check(made, self.signed(before, now, made.id))

    def promote(self, number):
        if not self.candidates:
            return
        made, before, now = self.candidates[number % len(self.candidates)]
        head = self.chain.head("a")
        try:
            new = promote("a", made.id, self.chain, self.board, actor="ada", reason="r", force=bool(number % 2))
        except ConflictError:
            return
        if new.id != head.id and new.id not in self.trees:
            changed = new.parts["harness"] != head.parts.get("harness")
            self.trees[new.id] = self.signed(before, now, new.id) if changed else self.trees[head.id]
            self.releases.append(new.id)

    def rollback(self, number):
        target = self.releases[number % len(self.releases)]
        head = self.chain.head("a")
        new = rollback("a", target, self.chain, self.board, actor="x", reason="r")
        if new.id != head.id:
            self.trees[new.id] = self.trees[target]
            self.releases.append(new.id)

    def check(self, release, wanted):
        found = {one.id: one for one in origin.entries(self.chain, release)}
        assert found.keys() == wanted.keys()
        for name, (description, lines, since) in wanted.items():
            one = found[name]
            assert (one.release_id, one.since) == (since[-1], since), name
            said = [(line.text, line.release_id) for line in one.lines]
            head = [(f"description: {description[0]}", description[1]), (f"name: {name}", since[0])]
            assert said == [*head, *lines], name
            brought = self.chain.get(one.release_id)
            assert one.units == brought.consumed["harness"].units
            assert (one.seq, one.operation, one.actor) == (brought.seq, brought.operation, brought.actor)


@settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(moves)
@example(PROMOTED)
def test_every_entry_and_line_comes_from_the_release_that_brought_it(tmp_path_factory, base, script):
    """Case 50: every line of a harness leads back to what it was learnt from."""
    folder = tmp_path_factory.mktemp("life")
    chain, board = GitChain(folder / "releases.git"), Board(folder / "records.db")
    chain.open()
    model = Model(chain, board, base)
    for name, value in script:
        getattr(model, name)(value)
    board.close()
    origin._kept.clear()
    for name in reversed(model.releases):  # from the newest, so that nothing before it is known yet
        model.check(chain.get(name), model.trees[name])
    origin._kept.clear()
    for name in model.releases:
        model.check(chain.get(name), model.trees[name])
    tainted = set(model.releases[1::3])
    flags = {flag.id: flag for flag in origin.flags(chain, "a", tainted)}
    since = [{name: set(held[2]) for name, held in model.trees[release].items()} for release in model.releases]
    wanted = {
        name: [place for place, each in enumerate(since) if tainted & each.get(name, set())] for name in "abc"
    }  # fmt: skip
    assert {name: list(flag.held) for name, flag in flags.items()} == {k: v for k, v in wanted.items() if v}
    for name, flag in flags.items():
        held = model.trees[model.releases[-1]].get(name)
        mine = held is not None and bool(tainted & set(held[2]))
        assert (flag.lines is not None) == mine
        if mine:
            texts = {line.text for line in flag.lines}
            assert {text for text, who in held[1] if who in tainted} <= texts
            assert not {text for text, who in held[1] if who not in tainted} & texts


# --- cases ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def life(chain, board, base, folder):
    ensure("default", chain, board, base, None)
    return Life(folder, chain, board)


def grown(chain, *texts, scenario="default"):
    """A publish of a tree with these rules, by a person."""
    head = chain.head(scenario)
    entries = [Entry(f"r{number}", "rules", {"text": text}) for number, text in enumerate(texts)]
    part = NewPart("tree", {tree.FILE: write(entries)})
    return chain.publish(scenario, Draft("publish", {"harness": part}, base=head.id, actor="ada"), head.id)


def test_a_release_without_a_tree_has_no_entries(life, chain):
    assert origin.entries(chain, chain.head("default")) == []


def test_what_was_learnt_is_told_with_reports_and_what_was_erased_is_marked(life, chain, folder):
    unit = f"{1:032x}:0"
    made = life.publish({unit: "rep_1"}, text="Say please.")
    (one,) = origins = origin.entries(chain, made)
    behind = origin.behind(chain, Audit(folder / "learn.db"), origins)
    assert behind == {made.id: origin.Behind((unit,), ("rep_1",))}
    assert behind[made.id].names == {unit[:32], "rep_1"}
    assert origin.lost(behind, ["rep_2"]) == []
    for gone in (unit[:32], "rep_1"):
        assert origin.lost(behind, [gone]) == [made.id]
    assert [each.forgotten for each in origin.marked(origins, [made.id])] == [True]
    assert [each.forgotten for each in origin.marked(origins, [])] == [False]
    assert one.lines == (origin.Line("Say please.", made.id, made.seq),)
    assert (one.actor, one.reason) == ("learner", "better by 20 points")


def test_reports_are_left_out_where_the_audit_cannot_be_read(life, chain, folder):
    made = life.publish({f"{1:032x}:0": "rep_1"}, text="Say please.")
    (folder / "learn.db").write_bytes(b"not a database")
    behind = origin.behind(chain, Audit(folder / "learn.db"), origin.entries(chain, made))
    assert behind[made.id].reports == ()
    assert behind[made.id].units


def test_a_tree_that_cannot_be_read_is_an_error_and_one_before_it_is_told(life, chain, monkeypatch):
    first = grown(chain, "One.")
    second = grown(chain, "One.", "Two.")
    read = origin._read

    def torn(chain, release):
        if release.id == first.id:
            raise ChainError("torn")
        return read(chain, release)

    monkeypatch.setattr(origin, "_read", torn)
    origin._kept.clear()
    with pytest.raises(ChainError, match="torn"):
        origin.entries(chain, first)
    found = origin.entries(chain, second)
    assert {one.release_id for one in found} == {second.id}
    assert all("release 1 cannot be read, so this may be older" in one.unsure for one in found)


def test_a_text_of_many_equal_lines_is_soon_compared(life, chain):
    """Of lines that are all alike nobody can say which is new: beyond a limit those in the middle are."""
    many = "\n".join(["same"] * 4000)
    first = grown(chain, f"top\n{many}\nend")
    second = grown(chain, f"top\nnew\n{many}\nmore\n{many}\nnewer\nend")
    (one,) = origin.entries(chain, second)
    assert one.lines[0].release_id == one.lines[-1].release_id == first.id
    assert {line.release_id for line in one.lines} == {first.id, second.id}


def test_a_kind_that_changed_and_odd_configs_are_lines_too(life, chain):
    assert origin.written({"agent": "pi", "values": {"b": [1], "a": "é"}}) == [
        "agent: pi", "values: {", '  "a": "é",', '  "b": [', "    1", "  ]", "}", "",
    ]  # fmt: skip
    assert origin.written([1]) == ["[1]"]
    assert origin.written({"text": 5}) == ["5"]
    first = grown(chain, "One.")
    entries = [Entry("r0", "command", {"name": "r0", "description": "d", "text": "One."})]
    part = NewPart("tree", {tree.FILE: write(entries)})
    second = chain.publish("default", Draft("publish", {"harness": part}, base=first.id), first.id)
    (one,) = origin.entries(chain, second)
    assert one.since == (second.id,)


def test_learners_are_those_of_the_harness(life, chain, base):
    unit = f"{7:032x}:0"
    made = life.publish({unit: "rep_1"})
    head = chain.head("default")
    part = NewPart("base", {"weights.json": json.dumps({"kind": "base", "n": 2}).encode()})
    draft = Draft("publish", {"weights": part}, base=head.id, consumed={"weights": Consumed(9, (unit,))})
    chain.publish("default", draft, head.id)
    assert origin.learners(chain, "default", [unit[:32]]) == [made.id]
    assert origin.flags(chain, "default", []) == []
    (flag,) = origin.flags(chain, "default", [made.id])
    assert (flag.id, flag.brought, flag.held) == ("rule", ((made.id, made.seq),), (1, 2))
