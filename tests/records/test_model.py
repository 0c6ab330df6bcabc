"""Any sequence of openings, closings, reports, retries, restarts and recoveries agrees with a dictionary."""

import asyncio
import dataclasses
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from reef.core.errors import ConflictError, MissingError
from reef.core.nouns import Choice, Record, Report, Sampling, Span, Timing, Usage
from reef.records.sqlite import SqliteStore

text = st.text(max_size=20)
token = st.integers(0, 2**33)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
bodies = st.binary(max_size=300) | st.builds(
    lambda parts: b'{"messages":[' + b",".join(parts) + b"]}",
    st.lists(
        st.sampled_from([b'{"role":"user","content":"%s"}' % (bytes([97 + i]) * 60) for i in range(4)]), max_size=5
    ),
)
choices = st.builds(
    Choice,
    index=st.integers(0, 3),
    text=text,
    finish_reason=st.none() | st.just("stop"),
    output_ids=st.none() | st.lists(token, max_size=20).map(tuple),
    logprobs=st.none() | st.lists(st.floats(allow_nan=False), max_size=20).map(tuple),
    spans=st.lists(st.builds(Span, text, st.integers(0, 9), st.integers(0, 9)), max_size=2).map(tuple),
    message=json_values,
)
prompts = st.lists(st.sampled_from([tuple(range(i, i + 20)) for i in range(3)]), max_size=4).map(lambda p: sum(p, ()))
fields = st.fixed_dictionaries(
    {
        "request": bodies,
        "rendered": st.none() | bodies,
        "reply": st.none() | bodies,
        "answer_id": st.none() | text,
        "choices": st.lists(choices, max_size=3).map(tuple),
        "usage": st.none() | st.builds(Usage, st.integers(0, 99), st.integers(0, 99)),
        "prompt_ids": st.none() | prompts,
        "sampling": st.none() | st.builds(Sampling, st.floats(0, 2), seed=st.none() | st.integers(0, 2**62)),
        "session": st.none() | st.sampled_from(["s", "t"]),
        "tags": st.dictionaries(text, text, max_size=2),
        "error": st.none() | text,
        "purpose": st.sampled_from(["live", "evaluation", "probe", "self"]),
        "timing": st.builds(Timing, st.floats(0, 1e10), st.none() | st.floats(0, 9)),
    }
)


def _content(entry):
    return dataclasses.replace(entry, timing=Timing(0.0), owner=None) if isinstance(entry, Record) else entry


class Stateful(RuleBasedStateMachine):
    """Twelve ids at most, so that every rule meets what an earlier one left."""

    @initialize()
    def begin(self):
        self.folder = tempfile.TemporaryDirectory()
        self.loop = asyncio.new_event_loop()
        self.incarnation = 0
        self.model = {}  # id to the entry as it must be read
        self.opened = {}  # id to the opening it had
        self.log = []  # (kind, ref)
        self.start()

    def run(self, work):
        return self.loop.run_until_complete(work)

    def start(self):
        self.incarnation += 1
        self.owner = f"gateway-{self.incarnation}-x"
        self.store = SqliteStore(Path(self.folder.name) / "records.db", owner=self.owner)
        self.run(self.store.start())

    def append(self, entry):
        try:
            return self.run(self.store.append(entry)).duplicate
        except (ConflictError, MissingError) as error:
            return type(error)

    @rule(number=st.integers(0, 11), fields=fields)
    def open(self, number, fields):
        one = Record(f"{number:032x}", "default", "r", dialect="chat", status="open", **fields)
        known = one.id in self.model
        again = one.id in self.opened and _content(self.opened[one.id]) == _content(one)
        assert self.append(one) == (again or ConflictError if known else False)
        if not known:
            self.model[one.id] = self.opened[one.id] = dataclasses.replace(one, owner=self.owner)
            self.log.append(("opened", one.id))

    @rule(number=st.integers(0, 11), fields=fields, status=st.sampled_from(["complete", "aborted", "failed"]))
    def close(self, number, fields, status):
        one = Record(f"{number:032x}", "default", "r", dialect="chat", status=status, **fields)
        before = self.model.get(one.id)
        if before is not None and before.status == "open":
            one = dataclasses.replace(one, request=before.request)
        closable = before is None or before.status == "open"
        again = not closable and _content(before) == _content(one)
        assert self.append(one) == (False if closable else again or ConflictError)
        if closable:
            self.model[one.id] = one
            self.log.append(("closed", one.id))

    @rule(
        number=st.integers(0, 5), references=st.lists(st.integers(0, 11), min_size=1, max_size=3), feedback=json_values
    )
    def report(self, number, references, feedback):
        quoted = tuple(f"{each:032x}" for each in references)
        one = Report(f"rep_{number:032x}", "default", quoted, 1.0, 0.5, feedback=feedback)
        if one.id in self.model:
            same = self.model[one.id] == one
            got = self.append(one)
            assert got is ConflictError or (same and got is True)
        elif all(each in self.model for each in quoted):
            assert self.append(one) is False
            self.model[one.id] = one
            self.log.append(("report", one.id))
        else:
            assert self.append(one) is MissingError

    @rule(parts=st.lists(st.tuples(st.integers(0, 11), fields), min_size=1, max_size=4), quoted=st.integers(0, 11))
    def together(self, parts, quoted):
        """All of a batch or none of it; its report may quote a record of the same batch."""
        ids = [f"{number:032x}" for number, _ in parts]
        batch = [
            Record(name, "default", "r", dialect="chat", status="complete", **fields)
            for name, (_, fields) in zip(ids, parts, strict=True)
        ]
        batch.append(Report(f"rep_{100 + quoted:032x}", "default", (f"{quoted:032x}",), 1.0, 0.5))
        model, log, wrong = dict(self.model), list(self.log), None
        for place, one in enumerate(batch):
            before = model.get(one.id)
            if before is not None:
                if getattr(before, "status", None) == "open" or _content(before) != _content(one):
                    wrong = place, ConflictError
                    break
                continue
            if isinstance(one, Report) and one.references[0] not in model:
                wrong = place, MissingError
                break
            model[one.id] = one
            log.append(("report" if isinstance(one, Report) else "closed", one.id))
        if wrong is None:
            self.run(self.store.append_all(batch))
            self.model, self.log = model, log
            return
        with pytest.raises(wrong[1], match=f"entry {wrong[0]}: "):
            self.run(self.store.append_all(batch))

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def again(self, data):
        ref = data.draw(st.sampled_from(sorted(self.model)))
        assert self.append(self.model[ref]) is True
        if ref in self.opened:
            assert self.append(self.opened[ref]) is True

    @rule(recover=st.booleans())
    def restart(self, recover):
        self.run(self.store.close())
        self.start()
        if not recover:
            return
        left = [ref for ref, entry in self.model.items() if isinstance(entry, Record) and entry.status == "open"]
        assert self.run(self.store.recover(lambda owner: False)) == len(left)
        for ref in left:
            (entry,) = self.run(self.store.get([ref]))
            assert entry.status == "interrupted"
            assert entry.request == self.model[ref].request
            self.model[ref] = entry
        self.log += [("closed", ref) for ref in left]

    @invariant()
    def agrees(self):
        ids = list(self.model)
        assert self.run(self.store.get(ids)) == [self.model[ref] for ref in ids]
        events = self.run(self.store.events("default", 0, 10_000))
        assert [(event.kind, event.ref) for event in events] == self.log

    def teardown(self):
        self.run(self.store.close())
        self.loop.close()
        self.folder.cleanup()


Stateful.TestCase.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStateful = Stateful.TestCase


@given(st.lists(bodies, min_size=1, max_size=6))
@settings(max_examples=25, deadline=None)
def test_any_bodies_join_again(bodies):
    async def main(folder):
        store = SqliteStore(Path(folder) / "records.db", owner="a")
        await store.start()
        entries = [
            Record(f"{i:032x}", "default", "r", "live", "chat", "complete", body, Timing(1.0), rendered=bodies[0])
            for i, body in enumerate(bodies)
        ]
        await asyncio.gather(*(store.append(entry) for entry in entries))
        assert await store.get([entry.id for entry in entries]) == entries
        await store.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(main(folder))
