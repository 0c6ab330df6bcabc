"""LoRAs in PEFT's layout, applied unmerged to some rows of a batch, and the shelf that keeps releases resident by id.

Knows: adapter_config.json, low-rank pairs, and which releases are in memory and in use.
Does not know: what a release is for, or where its files come from (a resolver is handed in).

- A release in use is never evicted; above the limit the least recently used one that is free goes.
- Releases with the same files (a candidate and its release, a rollback and what it restored) are one set in memory.
- Sets of full weights are large: room is made before one is loaded, so there are never more than the limit.
- A release that does not fit the base model is an EngineError that names the mismatch, and changes nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors.torch import load_file
from torch import Tensor

from reef.core.errors import BusyError, EngineError, ReefError
from reef.core.nouns import Part
from reef.engines import Resolver, WeightFiles
from reef.engines.local.broadcast.held import Held
from reef.engines.local.layout import LAYER_LINEARS, Layout, linear_path
from reef.engines.local.model import GROUPS, Pack, Weights, load_weights

if TYPE_CHECKING:
    from reef.engines.local.broadcast.arrivals import Arrivals

PREFIX = "base_model.model."
ROOM = 30.0
"""Seconds that a release with weights of its own waits for one that is in use to become free."""
NAMES = 64
"""Ids of one kind that are remembered at most, beside those in use: many may share one set of weights."""
Source = tuple[tuple[str, str, int, int, int], ...]
"""Which files a set was read from: name, path, bytes, modification time, inode; or name, sha256, bytes, 0, 0."""
log = logging.getLogger(__name__)


Pair = tuple[Tensor, Tensor]
"""A and B in float32, the scale inside B: [in, r] and [r, out] of one LoRA, [n, in, r] and [n, r, out] of several."""


class Lora:
    """Low-rank additions to the linears of each layer. Pairs of one group share a matrix, block by block."""

    def __init__(self, pairs: list[dict[str, Pair]]) -> None:
        self.pairs = pairs  # by layer, then group


class Added(Protocol):
    """What LoRAs add to some rows of one step."""

    def add(self, layer: int, group: str, x: Tensor, out: Tensor) -> None:
        """out += x A B for each of the rows and its own A and B, rounded once."""


@dataclass(frozen=True, slots=True)
class Alone:
    """One LoRA, for a slice of the rows or those of an index; None: for all."""

    lora: Lora
    rows: slice | Tensor | None = None

    def add(self, layer: int, group: str, x: Tensor, out: Tensor) -> None:
        pair, rows = self.lora.pairs[layer].get(group), self.rows
        if pair is None:
            return
        if isinstance(rows, Tensor):
            delta = torch.mm(torch.mm(x.index_select(0, rows).float(), pair[0]), pair[1])
            out.index_copy_(0, rows, out.index_select(0, rows).add_(delta))
        else:
            mine, whole = (x, out) if rows is None else (x[rows], out[rows])
            whole.add_(torch.mm(torch.mm(mine.float(), pair[0]), pair[1]))


@dataclass(frozen=True, slots=True)
class Abreast:
    """Several LoRAs with about as many rows each, in one product for all: their pairs lie one after the other."""

    pairs: list[dict[str, Pair]]
    gather: Tensor  # [n * width]: the rows of each LoRA, and any row where it has fewer than the one with most
    places: Tensor  # [rows]: where in `gather` each of the first rows is
    others: Tensor | None  # [rows, 1] bool: rows of which none of these is; None when there are none

    def add(self, layer: int, group: str, x: Tensor, out: Tensor) -> None:
        pair = self.pairs[layer].get(group)
        if pair is None:
            return
        a, b = pair
        mine = x.index_select(0, self.gather).float().view(a.shape[0], -1, a.shape[1])
        delta = torch.bmm(torch.bmm(mine, a), b).view(-1, b.shape[2]).index_select(0, self.places)
        if self.others is not None:
            delta.masked_fill_(self.others, 0)
        out[: delta.shape[0]].add_(delta)


class Mixer:
    """Tells what LoRAs add to a step, and keeps those that lie together from step to step: to lay them takes longer."""

    def __init__(self) -> None:
        self._loras: tuple[Lora, ...] = ()
        self._pairs: list[dict[str, Pair]] = []
        self._wide = 0  # steps in a row in which half of what lies there was enough

    def mix(self, owners: Sequence[Lora | None], *, whole: bool) -> list[Added]:
        """What is added to the first rows, each with a LoRA of its own or none; `whole` when there are no others."""
        held: dict[Lora, list[int]] = {}
        for row, lora in enumerate(owners):
            if lora is not None:
                held.setdefault(lora, []).append(row)
        few = sorted(held, key=lambda lora: len(held[lora]))
        many: list[Lora] = []
        while few and (len(few) == 1 or len(held[few[-1]]) - len(held[few[-2]]) > _MORE):
            many.append(few.pop())
        found: list[Added] = [Alone(lora, _rows(held[lora], len(owners), whole)) for lora in many]
        if few:
            self._lay(few)
            found.append(self._abreast([held[lora] if lora in few else [] for lora in self._loras], len(owners)))
        return found

    def _abreast(self, held: Sequence[list[int]], count: int) -> Abreast:
        width = max(map(len, held))
        gather, places, others = [0] * (len(held) * width), [0] * count, [True] * count
        for number, rows in enumerate(held):
            for place, row in enumerate(rows, number * width):
                gather[place], places[row], others[row] = row, place, False
        hidden = torch.tensor(others)[:, None] if any(others) else None
        return Abreast(self._pairs, torch.tensor(gather), torch.tensor(places), hidden)

    def _lay(self, few: Sequence[Lora]) -> None:
        """Make sure that these lie together; others that do may stay, unless most of all is not needed for long."""
        self._wide = self._wide + 1 if len(self._loras) > 2 * len(few) else 0
        if self._wide <= _PATIENCE and set(few) <= set(self._loras):
            return
        others = [] if self._wide > _PATIENCE else [lora for lora in self._loras if lora not in few]
        self._loras, self._wide = (*few, *others[: len(few)]), 0
        self._pairs = []
        for layer in range(len(few[0].pairs)):
            parts = {group: [lora.pairs[layer].get(group) for lora in self._loras] for group in GROUPS}
            self._pairs.append({group: _laid(held) for group, held in parts.items() if any(held)})


def _rows(rows: list[int], count: int, whole: bool) -> slice | Tensor | None:
    if rows[-1] - rows[0] + 1 != len(rows):
        return torch.tensor(rows)
    return None if whole and len(rows) == count else slice(rows[0], rows[-1] + 1)


def _laid(parts: Sequence[Pair | None]) -> Pair:
    """Pairs one after the other, filled up with zeros to the highest rank."""
    held = [part for part in parts if part is not None]
    rank = max(a.shape[1] for a, _ in held)
    a, b = torch.zeros(len(parts), held[0][0].shape[0], rank), torch.zeros(len(parts), rank, held[0][1].shape[1])
    for number, part in enumerate(parts):
        if part is not None:
            a[number, :, : part[0].shape[1]], b[number, : part[1].shape[0]] = part
    return a, b


_MORE = 3  # rows more than any other has, above which a LoRA is computed alone: the others are filled up to it
_PATIENCE = 64


def load_lora(files: Mapping[str, Path | Held], layout: Layout, dtype: torch.dtype = torch.float32) -> Lora:
    """Read `adapter_config.json` and `adapter_model.safetensors`. EngineError when they do not fit the layout."""
    config = _config(files)
    tensors = _tensors(files)
    pairs: list[dict[str, Pair]] = []
    for layer in range(layout.layers):
        found = {}
        for group, names in GROUPS.items():
            parts = [_take(tensors, layer, name, layout, config) for name in names]
            if any(part is not None for part in parts):
                found[group] = _blocks(parts, [layout.linear_shape(name) for name in names])
        pairs.append(found)
    if tensors:
        raise EngineError(
            f"this LoRA does not fit the base model: it has {sorted(tensors)[0]}; the engine applies LoRAs to "
            f"{', '.join(LAYER_LINEARS)} of {layout.layers} layers"
        )
    return Lora(pairs)


def _config(files: Mapping[str, Path | Held]) -> dict[str, Any]:
    try:
        config: dict[str, Any] = json.loads(files["adapter_config.json"].read_bytes())
    except (KeyError, OSError, ValueError) as error:
        raise EngineError(f"this LoRA has no readable adapter_config.json ({error})") from None
    for key in ("use_dora", "rank_pattern", "alpha_pattern", "fan_in_fan_out", "modules_to_save"):
        if config.get(key):
            raise EngineError(f"this LoRA uses {key}, which the engine does not apply; train without it")
    if config.get("bias", "none") != "none":
        raise EngineError("this LoRA trains biases, which the engine does not apply; train with bias: none")
    return config


def _tensors(files: Mapping[str, Path | Held]) -> dict[str, Tensor]:
    if "adapter_model.safetensors" not in files:
        raise EngineError("this LoRA has no adapter_model.safetensors")
    try:
        file = files["adapter_model.safetensors"]
        return file.tensors() if isinstance(file, Held) else load_file(file)
    except Exception as error:  # safetensors raises its own class, or OSError
        raise EngineError(f"this LoRA's adapter_model.safetensors cannot be read ({error})") from None


def _take(
    tensors: dict[str, Tensor], layer: int, name: str, layout: Layout, config: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """Take one linear's pair out of `tensors`: A [r, in] and B [out, r] with the scale in B; None when it has none."""
    path = PREFIX + linear_path(layer, name)
    a, b = tensors.pop(f"{path}.lora_A.weight", None), tensors.pop(f"{path}.lora_B.weight", None)
    if a is None and b is None:
        return None
    if a is None or b is None:
        raise EngineError(f"this LoRA has only one of the two matrices of {path}")
    wide, tall = layout.linear_shape(name)[1], layout.linear_shape(name)[0]
    if a.shape[1:] != (wide,) or b.shape[:1] != (tall,) or a.shape[0] != b.shape[1]:
        raise EngineError(
            f"this LoRA does not fit the base model: {path} is {tuple(a.shape)} and {tuple(b.shape)}; "
            f"the base needs (r, {wide}) and ({tall}, r)"
        )
    rank = a.shape[0]
    alpha = float(config.get("lora_alpha") or rank)
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    a, b = a.float(), b.float() * scale
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise EngineError(f"this LoRA has values that are not finite in {path}")
    return a, b


def _blocks(parts: list[tuple[Tensor, Tensor] | None], shapes: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    """One pair for linears that share their input: A side by side, B as blocks on the diagonal."""
    a = torch.cat([part[0] for part in parts if part is not None])
    b = torch.zeros(sum(shape[0] for shape in shapes), a.shape[0])
    row = column = 0
    for part, (tall, _) in zip(parts, shapes, strict=True):
        if part is not None:
            rank = part[0].shape[0]
            b[row : row + tall, column : column + rank] = part[1]
            column += rank
        row += tall
    return a.t().contiguous(), b.t().contiguous()


@dataclass(slots=True, eq=False)
class Resident:
    """A release in memory: a weight set and, for kind lora, what is added to it."""

    release_id: str
    kind: str
    weights: Weights
    source: Source = field(kw_only=True)  # () for the base
    lora: Lora | None = None
    users: int = 0
    used: int = 0

    @property
    def key(self) -> Source:
        """Under which name cached keys and values can be shared: base releases are all the same weights."""
        return self.source


class Shelf:
    """Releases by id. Use it from one event loop; files are read in a thread so that answers keep flowing."""

    def __init__(
        self,
        base: Weights,
        layout: Layout,
        dtype: torch.dtype,
        resolve: Resolver,
        *,
        loras: int,
        full: int,
        digest: str | None = None,
        arrivals: Arrivals | None = None,
        recorded: Callable[[str], Part] | None = None,
        pack: Pack | None = None,
    ) -> None:
        """`arrivals` with `recorded` (a release's weights as the chain records them): what a trainer sent is taken
        instead of files, when its digests are those of the release."""
        self._base, self._layout, self._dtype, self._resolve, self._pack = base, layout, dtype, resolve, pack
        self._arrivals, self._recorded = arrivals, recorded
        self._limits = {"lora": loras, "full": full, "base": 1}
        self._digest = digest
        self._residents: dict[str, Resident] = {}
        self._loading: dict[str, asyncio.Task[Resident]] = {}
        self._clock = itertools.count(1)
        self._filling = asyncio.Lock()  # one set of full weights is loaded at a time
        self._freed = asyncio.Event()

    async def take(self, release_id: str) -> Resident:
        """The release, loaded when it is not resident, held until `give`. MissingError, EngineError."""
        found = self._residents.get(release_id)
        while found is None:
            task = self._loading.get(release_id)
            if task is None:
                task = self._loading[release_id] = asyncio.create_task(self._load(release_id))
                task.add_done_callback(self._forget(release_id))
            # Shielded: the caller that goes away must not undo the load for those that wait for it too.
            await asyncio.shield(task)
            found = self._residents.get(release_id)
        found.users += 1
        found.used = next(self._clock)
        return found

    def give(self, resident: Resident) -> None:
        resident.users -= 1
        self._trim()
        self._freed.set()

    def ids(self) -> list[str]:
        """Resident releases, least recently used first."""
        return [found.release_id for found in sorted(self._residents.values(), key=lambda found: found.used)]

    def _forget(self, release_id: str) -> Callable[[asyncio.Task[Resident]], None]:
        def done(task: asyncio.Task[Resident]) -> None:
            self._loading.pop(release_id, None)
            if not task.cancelled():
                task.exception()  # seen: every waiter raises it itself

        return done

    async def _load(self, release_id: str) -> Resident:
        files, source = await asyncio.to_thread(self._find, release_id)
        if files.kind == "full":
            async with self._filling:
                found = self._twin(release_id, source)
                if found is None:
                    await self._room()
                    found = await asyncio.to_thread(self._read, release_id, files, source)
                return self._place(found)
        found = self._twin(release_id, source)
        if found is None:
            found = await asyncio.to_thread(self._read, release_id, files, source)
        return self._place(found)

    def _place(self, found: Resident) -> Resident:
        found.used = next(self._clock)
        self._residents[found.release_id] = found
        self._trim(keep=found)
        return found

    def _find(self, release_id: str) -> tuple[WeightFiles, Source]:
        """A release's verified files, and what tells them from others. MissingError, DigestError, EngineError.

        With arrivals: no files yet, they may not be needed; their digests tell them from others.
        """
        try:
            if self._recorded is not None:
                part = self._recorded(release_id)
                known = WeightFiles(part.kind, {}, part.meta)
                self._fits(known)
                names = sorted(name for name in part.files if name != "weights.json" and part.kind != "base")
                return known, tuple((name, *part.files[name], 0, 0) for name in names)
            files = self._resolve(release_id)
            self._fits(files)
            if files.kind == "base":
                return files, ()
            stats = {name: (path, path.stat()) for name, path in sorted(files.files.items()) if name != "weights.json"}
            return files, tuple((n, str(p), s.st_size, s.st_mtime_ns, s.st_ino) for n, (p, s) in stats.items())
        except ReefError:
            raise
        except Exception as error:
            raise _failed(release_id, error) from None

    def _twin(self, release_id: str, source: Source) -> Resident | None:
        """The same weights under this id, when another release has brought them into memory."""
        for held in self._residents.values():
            if held.source == source:
                return Resident(release_id, held.kind, held.weights, held.lora, source=source)
        return None

    def _read(self, release_id: str, files: WeightFiles, source: Source) -> Resident:
        if self._arrivals is None or files.kind == "base":
            return self._made(release_id, files.kind, files.files, source)
        with self._arrivals.take({name: (digest, size) for name, digest, size, _, _ in source}) as held:
            if held is not None:
                return self._made(release_id, files.kind, held, source)
        try:
            found = self._resolve(release_id)
        except ReefError:
            raise
        except Exception as error:
            raise _failed(release_id, error) from None
        return self._made(release_id, found.kind, found.files, source)

    def _made(self, release_id: str, kind: str, files: Mapping[str, Path | Held], source: Source) -> Resident:
        try:
            if kind == "base":
                return Resident(release_id, "base", self._base, source=source)
            if kind == "lora":
                lora = load_lora(files, self._layout, self._dtype)
                return Resident(release_id, "lora", self._base, lora, source=source)
            if kind == "full":
                found = [file for name, file in files.items() if name.endswith(".safetensors")]
                weights = load_weights(found, self._layout, self._dtype, finite=True, pack=self._pack)
                return Resident(release_id, "full", weights, source=source)
            raise EngineError(f"release {release_id} has weights of unknown kind {kind!r}")
        except ReefError:
            raise
        except Exception as error:
            raise _failed(release_id, error) from None

    def _fits(self, files: WeightFiles) -> None:
        """A LoRA made for other base weights would load and answer nonsense: digests must agree when both are known."""
        base = files.meta.get("base")
        wanted = base.get("digest") if isinstance(base, Mapping) else None
        if self._digest and wanted and wanted != self._digest:
            name = base.get("name") if isinstance(base, Mapping) else None
            raise EngineError(
                f"these weights were made for the base model {name or 'unknown'} ({str(wanted)[:12]}); this engine "
                f"runs {self._digest[:12]}. Serve them with the model they were trained on"
            )

    async def _room(self) -> None:
        """Make room for one more set of full weights; when all are in use, wait for one to be free. BusyError."""
        limit = self._limits["full"]
        try:
            async with asyncio.timeout(ROOM):
                while self._trim(full=limit - 1) >= limit:
                    self._freed.clear()
                    await self._freed.wait()
        except TimeoutError:
            raise BusyError(
                f"{limit} releases with full weights are in memory and all of them in use; ask again, or allow the "
                "engine more (its option `full`)"
            ) from None

    def _trim(self, keep: Resident | None = None, full: int | None = None) -> int:
        """Forget what is above the limits, least recently used first. Returns how many full sets are left."""
        left = 0
        for kind, limit in self._limits.items():
            most = full if kind == "full" and full is not None else limit
            found = sorted((each for each in self._residents.values() if each.kind == kind), key=lambda each: each.used)
            busy = {each.source for each in found if each.users or each is keep}
            sets = list(dict.fromkeys(each.source for each in reversed(found)))[::-1]  # by the last use of any id
            gone = set([source for source in sets if source not in busy][: max(0, len(sets) - most)])
            idle = [each for each in found if not each.users and each is not keep]
            old = [each for each in idle if each.source not in gone][: max(0, len(found) - NAMES)]
            for resident in [*(each for each in idle if each.source in gone), *old]:
                del self._residents[resident.release_id]
            if kind == "full":
                left = len(sets) - len(gone)
        return left


def _failed(release_id: str, error: Exception) -> EngineError:
    log.error("loading release %s failed", release_id, exc_info=error)
    return EngineError(f"release {release_id} cannot be loaded: {type(error).__name__}: {error}")
