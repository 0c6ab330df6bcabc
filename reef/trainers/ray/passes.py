"""What an objective may ask for when a team makes its step: every pass is made once, by the worker that owns its rows.

Knows: when a pass is made and when its values travel.
Does not know: processes, losses, how a forward is computed.

- In `prepare` all workers run the same lines over the whole batch, so statistics of the batch are those of the batch.
  A pass that is only kept is made by its owner when `prepare` ends. At the first value that is asked for, every owner
  makes all passes of that kind at once, and the values go to all.
- Afterwards a worker asks about rows of its own only, and nothing travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from reef.core.errors import TrainError
from reef.trainers.local.llama import Llama, Lora, pack
from reef.trainers.local.objective import Outputs, Rows, Top
from reef.trainers.local.shelf import Teacher
from reef.trainers.local.step import Passes, Team, forward
from reef.trainers.local.working import Working, near

Key = tuple[object, ...]
Made = Callable[[], tuple[Llama, Lora | None]]


class Crew(Team, Protocol):
    """A team of which each worker owns some of the batch's rows."""

    @property
    def together(self) -> bool:
        """Whether all workers are running the same lines."""

    def owns(self, number: int) -> bool: ...

    def shifts(self, numbers: Iterable[int]) -> Sequence[int | None]:
        """Those of the rows that this worker owns, with None where others own more."""

    def add(self, tensor: Tensor) -> Tensor:
        """The sum over all workers, in place."""

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor, whose shard each worker may hold."""


class Kind:
    """All passes of one batch with the same weights: over its rows, or over their contexts of one number. `given` are
    tensors of the objective's own, which it must leave alone until the passes are made."""

    def __init__(self, crew: Crew, made: Made, rows: Mapping[int, Rows], given: Iterable[Tensor] = ()) -> None:
        self.crew = crew
        self._given = [(tensor, tensor._version) for tensor in given]
        self.model, self._lora = made()
        self._rows = rows
        self._hidden: dict[int, Tensor] = {}
        self._ready: set[int] = set()
        self._told: dict[str, dict[int, Tensor]] = {}
        self.wanted: set[int] = set()

    @torch.no_grad()
    def make(self, numbers: Iterable[int]) -> None:
        """The passes of these rows that are not made yet."""
        missing = sorted(set(numbers) - self._ready)
        if missing and any(tensor._version != version for tensor, version in self._given):
            raise TrainError("the parameters of a pass changed before it was made; ask it for a value first")
        for number in self.crew.shifts(missing):
            if number is None:
                self.model.hidden(pack([[0]]), self._lora)
            else:
                rows = self._rows[number]
                self._hidden[number] = self.model.hidden(rows.packed, self._lora, rows.predicts)
        self._ready.update(missing)

    def mine(self, number: int) -> Outputs:
        if number not in self._ready:
            self.make(self._rows)
        return Outputs(self.model, self._hidden[number], self._rows[number])

    @torch.no_grad()
    def ask(
        self, number: int, what: str, value: Callable[[Outputs], Tensor], size: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """A value [T, *size] of one row, computed by its owner. With a name, those of all rows are computed at once."""
        if what in self._told:
            return self._told[what][number]
        numbers = list(self._rows) if what else [number]
        self.make(self._rows)
        lengths = [len(self._rows[one].targets) for one in numbers]
        whole = torch.zeros((sum(lengths), *size), dtype=dtype, device=self._rows[number].targets.device)
        found: dict[int, Tensor] = dict(zip(numbers, torch.split(whole, lengths), strict=True))
        for one in numbers:
            if self.crew.owns(one):
                found[one].copy_(value(self.mine(one)))
        self.crew.add(whole)
        if what:
            self._told[what] = found
        return found[number]


class Shared(Outputs):
    """One pass, made by the worker that owns its rows; its values may be asked for by all while all do the same."""

    def __init__(self, kind: Kind, number: int, rows: Rows) -> None:
        for name, value in (("model", kind.model), ("rows", rows), ("_kind", kind), ("_number", number)):
            object.__setattr__(self, name, value)

    _kind: Kind
    _number: int

    @property
    def hidden(self) -> Tensor:
        if self._kind.crew.together:
            return self._ask("hidden", lambda one: one.hidden, (self.model.layout.hidden,))
        return self._kind.mine(self._number).hidden

    def logprobs(self) -> Tensor:
        if self._kind.crew.together:
            return self._ask("logprobs", lambda one: one.logprobs(), ())
        return super().logprobs()

    def chosen(self, ids: Tensor) -> Tensor:
        if self._kind.crew.together:
            return self._ask("", lambda one: one.chosen(ids), (ids.shape[1],))
        return super().chosen(ids)

    def top(self, count: int) -> Top:
        if not self._kind.crew.together:
            return super().top(count)
        return Top(
            self._ask(f"top {count} ids", lambda one: one.top(count).ids, (count,), torch.int64),
            self._ask(f"top {count}", lambda one: one.top(count).logprobs, (count,)),
            self.logprobs(),
        )

    def logits(self) -> Tensor:
        if self._kind.crew.together:
            return self._ask("", lambda one: one.logits(), (self.model.layout.vocab,))
        return super().logits()

    def _ask(
        self, what: str, value: Callable[[Outputs], Tensor], size: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> Tensor:
        return self._kind.ask(self._number, what, value, size, dtype)


class CrewPasses(Passes):
    """The `objective.Context` of one step of a crew."""

    def __init__(
        self, working: Working, teacher: Callable[[], Teacher], model: Llama, crew: Crew, batch: Sequence[Rows]
    ) -> None:
        super().__init__(working, teacher, model, crew)
        self._crew = crew
        self._kinds: dict[Key, Kind] = {}
        self._parameters: dict[str, Tensor] = {}
        self._batch = batch
        self._places = {id(rows): (number, -1) for number, rows in enumerate(batch)} | {
            id(other): (number, place) for number, rows in enumerate(batch) for place, other in enumerate(rows.contexts)
        }

    def settle(self) -> None:
        """Make what was asked for."""
        for kind in self._kinds.values():
            kind.make(kind.wanted)
        self._kinds.clear()
        self._parameters.clear()

    def base(self, rows: Rows) -> Outputs:
        return self._pass(("base",), lambda: (self._working.frozen, None), rows)

    def policy(self, rows: Rows) -> Outputs:
        return self._pass(("policy",), lambda: (self._working.model, self._working.lora), rows)

    def teacher(self, rows: Rows) -> Outputs:
        def made() -> tuple[Llama, Lora | None]:
            found = self._teacher()
            return self._crew.place(found.model), found.lora and near(found.lora, self._crew.device)

        return self._pass(("teacher",), made, rows)

    def parameters(self) -> Mapping[str, Tensor]:
        """Whole, on every worker."""
        if not self._parameters:
            found = self._working.parameters.items()
            self._parameters = {name: self._crew.whole(tensor.detach()) for name, tensor in found}
        return self._parameters

    def with_parameters(self, rows: Rows, parameters: Mapping[str, Tensor]) -> Outputs:
        given = tuple(parameters.values())
        key = ("with", *((id(one), one._version) for one in given))
        return self._pass(key, lambda: self.made_of(parameters), rows, given)

    @torch.no_grad()
    def _pass(self, key: Key, made: Made, rows: Rows, given: Iterable[Tensor] = ()) -> Outputs:
        number, place = self._places.get(id(rows), (-1, -1))
        if number < 0:  # rows of the objective's own: every worker makes the pass
            return forward(*made(), rows)
        kind = self._kinds.get((*key, place))
        if kind is None:
            found = {one: self._behind(each, place) for one, each in enumerate(self._batch)}
            kind = Kind(self._crew, made, {one: each for one, each in found.items() if each is not None}, given)
            self._kinds[(*key, place)] = kind
        kind.wanted.add(number)
        return Shared(kind, number, rows)

    @staticmethod
    def _behind(rows: Rows, place: int) -> Rows | None:
        if place < 0:
            return rows
        return rows.contexts[place] if place < len(rows.contexts) else None
