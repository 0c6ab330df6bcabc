"""In which order ready units are taken: by age, but no client crowds the others out.

Knows: who asked (`Record.caller`; those without a name are one client) and how large a batch is.
Does not know: what is done with units. One that is passed over stays ready; it may go stale like any other.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Sequence

from reef.core.nouns import Unit


def order(units: Sequence[Unit], share: float = 1.0, size: int | None = None, *, newest: bool = False) -> list[Unit]:
    """These units in the order in which they should be taken, the oldest first.

    Of each `size` units (a batch) one client has at most `share` of them, rounded down but at least one, as long as
    units of other clients are there to fill it. None: batches have no size, and the oldest come first.

    `newest`: the newest batch comes first, each still from old to new. For units that go stale: where more come than
    can be trained on, some will, and those should not be the ones that tell most.
    """
    if size is None:
        return sorted(units, key=_age)
    ranked = sorted(units, key=_age, reverse=newest)
    rank = {unit.id: place for place, unit in enumerate(ranked)}
    queues: dict[str, deque[Unit]] = {}
    for unit in ranked:
        queues.setdefault(unit.record.caller, deque()).append(unit)
    most = size if len(queues) < 2 else max(1, int(min(1.0, share) * size))
    heads = [(rank[queue[0].id], client) for client, queue in queues.items()]
    heapq.heapify(heads)
    found: list[Unit] = []
    while heads:
        taken, chosen = Counter[str](), list[Unit]()
        full: list[tuple[int, str]] = []
        while len(chosen) < size and (heads or full):
            if not heads:  # the others have no more: those who have their share fill the rest, in turn
                heads, full = full, heads
            _, client = heapq.heappop(heads)
            queue = queues[client]
            chosen.append(queue.popleft())
            taken[client] += 1
            if queue:
                heapq.heappush(full if taken[client] >= most else heads, (rank[queue[0].id], client))
        found += sorted(chosen, key=_age)
        heads += full
        heapq.heapify(heads)
    return found


def _age(unit: Unit) -> tuple[int, str]:
    return unit.seq, unit.id
