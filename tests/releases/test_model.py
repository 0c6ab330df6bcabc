"""Any sequence of publishes, stale publishes, retries, rollbacks and candidates agrees with a plain list."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.errors import StaleHead
from reef.core.nouns import Release
from reef.releases import Draft, NewPart
from reef.releases.chain import GitChain

PARTS = st.sampled_from(["weights", "harness"])
STEPS = st.one_of(
    st.tuples(st.just("publish"), PARTS, st.integers(0, 5)),
    st.tuples(st.just("stale"), PARTS, st.integers(0, 99)),
    st.tuples(st.just("retry"), PARTS, st.integers(0, 99)),
    st.tuples(st.just("rollback"), PARTS, st.integers(0, 99)),
    st.tuples(st.just("candidate"), PARTS, st.integers(0, 99)),
    st.tuples(st.just("promote"), PARTS, st.integers(0, 99)),
    st.tuples(st.just("reopen"), PARTS, st.just(0)),
)


def part(name: str, fill: int) -> NewPart:
    size = 70_000 if fill % 2 else 10  # both forms: LFS object and plain blob
    return NewPart("tree" if name == "harness" else "lora", {f"{name}.json": json.dumps(str(fill) * size).encode()})


@dataclass
class Model:
    """The list: per release what its parts must contain, and the draft and head it was made with."""

    releases: list[Release] = field(default_factory=list)
    contents: list[dict[str, bytes]] = field(default_factory=list)
    drafts: list[tuple[Draft, str | None]] = field(default_factory=list)
    candidates: list[tuple[Release, dict[str, bytes], Draft]] = field(default_factory=list)

    @property
    def head(self) -> Release:
        return self.releases[-1]

    def add(self, release: Release, content: dict[str, bytes], draft: Draft, expected: str | None) -> None:
        assert release.seq == len(self.releases)
        assert release.parent == expected
        self.releases.append(release)
        self.contents.append(content)
        self.drafts.append((draft, expected))


def bytes_of(new: NewPart) -> bytes:
    (content,) = new.files.values()
    assert isinstance(content, bytes)
    return content


def play(chain: GitChain, model: Model, step: tuple[str, str, int], number: int) -> None:
    kind, name, value = step
    new = part(name, value % 7)
    changed = {**model.contents[-1], name: bytes_of(new)}
    which = value % len(model.releases)
    if kind == "publish":
        draft = Draft("publish", {name: new}, step=number)
        model.add(chain.publish("a", draft, model.head.id), changed, draft, model.head.id)
    elif kind == "stale" and which < len(model.releases) - 1:
        with pytest.raises(StaleHead) as caught:
            chain.publish("a", Draft("publish", {name: new}, step=-number - 1), model.releases[which].id)
        assert caught.value.head == model.head.id
    elif kind == "retry":
        draft, expected = model.drafts[which]
        assert chain.publish("a", draft, expected) == model.releases[which]
    elif kind == "rollback":
        draft = Draft("rollback", {}, base=model.releases[which].id, step=number)
        model.add(chain.publish("a", draft, model.head.id), model.contents[which], draft, model.head.id)
    elif kind == "candidate":
        draft = Draft("candidate", {name: new}, base=model.releases[which].id)
        made = chain.publish("a", draft, None)
        known = [candidate for candidate, _, before in model.candidates if before == draft]
        assert known in ([], [made])
        if not known:
            model.candidates.append((made, {**model.contents[which], name: bytes_of(new)}, draft))
    elif kind == "promote" and model.candidates:
        candidate, content, _ = model.candidates[value % len(model.candidates)]
        draft = Draft("promote", {}, base=candidate.id, step=number)
        model.add(chain.publish("a", draft, model.head.id), content, draft, model.head.id)
    elif kind == "reopen":
        assert chain.open() == []


@settings(max_examples=12, deadline=None)
@given(st.lists(STEPS, min_size=1, max_size=12))
def test_the_chain_agrees_with_a_list(steps):
    with tempfile.TemporaryDirectory() as folder:
        chain = GitChain(Path(folder) / "releases.git")
        chain.open()
        model = Model()
        base = part("weights", 0)
        draft = Draft("create", {"weights": base})
        model.add(chain.publish("a", draft, None), {"weights": bytes_of(base)}, draft, None)
        for number, step in enumerate(steps):
            play(chain, model, step, number)
            assert chain.head("a") == model.head
        fresh = GitChain(Path(folder) / "releases.git")
        assert fresh.open() == []
        assert fresh.history("a", limit=100) == model.releases[::-1]
        assert {held.id for held in fresh.candidates("a")} == {held.id for held, _, _ in model.candidates}
        stored = [*zip(model.releases, model.contents, strict=True), *[(held, c) for held, c, _ in model.candidates]]
        for release, content in stored:
            assert set(release.parts) == set(content)
            for name, data in content.items():
                (file,) = fresh.files(release.id, name).values()  # type: ignore[arg-type]
                assert file.read_bytes() == data
        assert fresh.verify("a") == []
