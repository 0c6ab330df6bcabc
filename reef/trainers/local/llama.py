"""A differentiable Llama forward in plain torch: packed sequences in, hidden states out, with an optional LoRA.

Knows: the architecture (RMSNorm, rotary positions, grouped-query attention, SwiGLU), HF weight names, PEFT LoRA names.
Does not know: losses, optimizers, files of a release, sampling.

- Linears run on the real tokens only (no padding); attention on right-padded rows, where causality hides the padding.
- A prefix that all sequences of a micro-batch share (a system message) is computed once. Its keys and values are
  broadcast, so values and gradients are those of computing it in every sequence.
- Master weights that learn are float32. Every use rounds them to `compute` (bfloat16 or float32) first, so a forward of
  the master is exactly that of the weights as they are served.
- What is multiplied is in `inner`: `compute`, or float32 on a CPU that has no products in bfloat16, where those take
  five times as long (docs/trainer-speed.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reef.core.errors import InputError, TrainError
from reef.engines.local.layout import LAYER_LINEARS, Layout, linear_path, read_layout, weight_files
from reef.engines.local.model import frequencies, native
from reef.trainers.local.attention import attend
from reef.trainers.local.head import picked, sampled
from reef.trainers.local.pieces import gated, joined, norm, project

_LAYER_LINEARS = tuple(linear_path(0, name).removeprefix("model.layers.0.") for name in LAYER_LINEARS)
LAYER_WEIGHTS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    *(f"{name}.weight" for name in _LAYER_LINEARS),
)
"""A layer's tensors, by the names they have within it."""


@dataclass(frozen=True, slots=True)
class Packed:
    """B sequences without padding. `ids` [N]: the shared prefix [P] once, then each sequence's own tokens in turn."""

    ids: Tensor  # [N] int64
    positions: Tensor  # [N] int64
    slots: Tensor  # [N - P] int64: where an own token stands in the padded [B * L] rows
    prefix: int  # P
    count: int  # B
    width: int  # L, the longest own part
    starts: tuple[int, ...]  # [B]: where in `ids` each sequence's own part begins


@dataclass(frozen=True, slots=True)
class Seen:
    """What every layer of one forward looks at."""

    packed: Packed
    cosine: Tensor  # [N, 1, D], of the positions
    sine: Tensor


def pack(sequences: Sequence[Sequence[int]], share: int = 0) -> Packed:
    """Pack sequences. Up to `share` leading tokens are computed once if all sequences agree on them.

    `share` must leave each sequence at least one token of its own; hidden states of shared positions exist once.
    """
    if not sequences or not all(sequences):
        raise TrainError("a micro-batch needs sequences, each with at least one token")
    first = sequences[0]
    limit = min([share, *(len(sequence) - 1 for sequence in sequences)]) if len(sequences) > 1 else 0
    prefix = 0
    while prefix < limit and all(sequence[prefix] == first[prefix] for sequence in sequences):
        prefix += 1
    width = max(len(sequence) for sequence in sequences) - prefix
    ids, positions = list(first[:prefix]), list(range(prefix))
    slots: list[int] = []
    starts: list[int] = []
    for row, sequence in enumerate(sequences):
        own = len(sequence) - prefix
        starts.append(len(ids))
        ids.extend(sequence[prefix:])
        positions.extend(range(prefix, len(sequence)))
        slots.extend(range(row * width, row * width + own))
    as_long = torch.long
    return Packed(
        torch.tensor(ids, dtype=as_long),
        torch.tensor(positions, dtype=as_long),
        torch.tensor(slots, dtype=as_long),
        prefix,
        len(sequences),
        width,
        tuple(starts),
    )


@dataclass(frozen=True, slots=True)
class Lora:
    """A and B per linear, float32: `pairs["model.layers.0.mlp.up_proj"] = (A [r, in], B [out, r])`."""

    pairs: Mapping[str, tuple[Tensor, Tensor]]
    rank: int
    alpha: float

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def layer(self, number: int) -> Lora:
        """One layer's, by the names its linears have within it."""
        at = f"model.layers.{number}."
        return Lora({name: self.pairs[at + name] for name in _LAYER_LINEARS}, self.rank, self.alpha)

    @classmethod
    def fresh(cls, model: Llama, rank: int, alpha: float, seed: int) -> Lora:
        """A random as PEFT makes it (Kaiming uniform, a = sqrt 5), B zero: at the start the policy is the base."""
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        for name, shape in cls.shapes(model, rank).items():
            bound = 1 / math.sqrt(shape[1])
            one = torch.zeros(shape) if ".lora_B." in name else (torch.rand(shape, generator=generator) * 2 - 1) * bound
            tensors[name] = one.requires_grad_()
        return cls.of(model, tensors, rank, alpha)

    @classmethod
    def load(cls, model: Llama, tensors: Mapping[str, Tensor], rank: int, alpha: float) -> Lora:
        """From the tensors of an `adapter_model.safetensors`. TrainError names the first that does not fit the base."""
        found, left = {}, dict(tensors)
        for key, shape in cls.shapes(model, rank).items():
            tensor = left.pop(key, None)
            if tensor is None or tuple(tensor.shape) != shape:
                got = None if tensor is None else tuple(tensor.shape)
                raise TrainError(f"the LoRA does not fit the base: {key} is {got}, expected {shape}")
            found[key] = tensor.float().clone().requires_grad_()
        if left:
            raise TrainError(f"the LoRA does not fit the base: unexpected {min(left)}")
        return cls.of(model, found, rank, alpha)

    @classmethod
    def of(cls, model: Llama, parameters: Mapping[str, Tensor], rank: int, alpha: float) -> Lora:
        """Of these very tensors, named as `parameters` names them."""
        key = "base_model.model.{}.lora_{}.weight"
        pairs = {
            name: (parameters[key.format(name, "A")], parameters[key.format(name, "B")]) for name in model.linears()
        }
        return cls(pairs, rank, alpha)

    @staticmethod
    def shapes(model: Llama, rank: int) -> dict[str, tuple[int, int]]:
        """By PEFT name, in a fixed order: A [rank, in] and B [out, rank] of every linear."""
        found, whole = {}, model.layout.shapes()
        for name in model.linears():
            out, wide = whole[f"{name}.weight"]
            found[f"base_model.model.{name}.lora_A.weight"] = (rank, wide)
            found[f"base_model.model.{name}.lora_B.weight"] = (out, rank)
        return found

    def parameters(self) -> dict[str, Tensor]:
        """By PEFT name, in a fixed order."""
        found = {}
        for name, (a, b) in self.pairs.items():
            found[f"base_model.model.{name}.lora_A.weight"] = a
            found[f"base_model.model.{name}.lora_B.weight"] = b
        return found


def product_dtype(compute: torch.dtype, device: str = "cpu") -> torch.dtype:
    """What is multiplied for weights that are served in `compute`."""
    return native() if device == "cpu" and compute == torch.bfloat16 else compute


def held(weights: Mapping[str, Tensor], compute: torch.dtype) -> dict[str, Tensor]:
    """Weights that do not learn, on a CPU: rounded once as they are served, and in what is multiplied."""
    return {name: tensor.to(compute).to(product_dtype(compute)) for name, tensor in weights.items()}


class _Served(torch.autograd.Function):
    """`weight.to(compute).to(weight.dtype)`, whose gradient goes straight through."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, compute: torch.dtype) -> Tensor:
        return weight.to(compute).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Llama:
    """The base model's weights and its forward. Nothing is mutated by a forward; `weights` may require gradients."""

    def __init__(
        self,
        layout: Layout,
        weights: dict[str, Tensor],
        compute: torch.dtype = torch.bfloat16,
        folder: Path | None = None,
        *,
        rounded: bool = False,
    ) -> None:
        """`rounded`: these weights went through `held`, so that no use has to round them again."""
        self.layout = layout
        self.weights = weights
        self.compute = compute
        self.inner = product_dtype(compute, next(iter(weights.values())).device.type)
        self.folder = folder  # where its tokenizer and chat template are
        self._held = rounded

    @classmethod
    def load(cls, folder: Path, compute: torch.dtype = torch.bfloat16) -> Llama:
        """The model in an HF-shaped folder, its weights rounded to `compute`. TrainError when it is not whole."""
        from safetensors.torch import load_file

        try:
            layout, files = read_layout(folder), weight_files(folder)
        except InputError as error:
            raise TrainError(error.message) from None
        weights: dict[str, Tensor] = {}
        for file in files:
            weights |= held(load_file(file), compute)
        if missing := sorted(set(layout.shapes()) - set(weights)):
            raise TrainError(f"{folder} is not a whole Llama model: {missing[0]} is missing")
        return cls(layout, {name: weights[name] for name in layout.shapes()}, compute, folder, rounded=True)

    def linears(self) -> list[str]:
        """Names, without `.weight`, of the linears a LoRA covers."""
        return [linear_path(layer, name) for layer in range(self.layout.layers) for name in LAYER_LINEARS]

    def hidden(self, packed: Packed, lora: Lora | None = None, wanted: Tensor | None = None) -> Tensor:
        """Hidden states [N, d] in float32, after the final norm; or only those at `wanted` [n], which spares the last
        layer most of its work where prompts are long."""
        layout = self.layout
        x = F.embedding(packed.ids, self._top("model.embed_tokens.weight")).to(self.compute).float()
        seen = Seen(packed, *self._rotary(packed.positions))
        for number in range(layout.layers):
            last = number == layout.layers - 1
            x = self._layer(number, x, lora and lora.layer(number), seen, wanted if last else None)
        return norm(x, self._rounded(self._top("model.norm.weight")), layout.epsilon, torch.float32)

    def layer(
        self, weights: Mapping[str, Tensor], x: Tensor, lora: Lora | None, seen: Seen, wanted: Tensor | None
    ) -> Tensor:
        """One layer: [N, d] -> [N, d], or to [n, d] where only `wanted` rows matter. `weights` and the pairs of `lora`
        are the layer's own, by the names they have within it."""
        layout = self.layout
        h = self._norm(x, weights["input_layernorm.weight"])
        query, key, value = (
            one.view(len(h), -1, layout.head_dim)
            for one in self._project(h, weights, lora, "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        )
        found = attend(query, key, value, seen.cosine, seen.sine, seen.packed)
        if wanted is not None:  # from here on rows do not look at each other
            found, x = found[wanted], x[wanted]
        x = joined(x, self._project(found, weights, lora, "self_attn.o_proj")[0])
        h = self._norm(x, weights["post_attention_layernorm.weight"])
        active = gated(*self._project(h, weights, lora, "mlp.gate_proj", "mlp.up_proj"))
        return joined(x, self._project(active, weights, lora, "mlp.down_proj")[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, d] -> [n, V] float32. Pass only the positions that predict something: this is the widest product."""
        return F.linear(hidden.to(self.inner), self._head()).float()

    def logprobs(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        """Log-probs [n] of `targets` [n] after hidden states [n, d], each at its temperature [n]."""
        return self.picked(hidden, targets[:, None], temperatures)[0][:, 0]

    def picked(
        self, hidden: Tensor, ids: Tensor, temperatures: Tensor, *, top: int = 0, legal: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of some ids after hidden states [n, d], each state at its temperature [n], over its `legal` ids
        [n, V] only: of the given `ids` [n, k], then of the `top` likeliest. Returns them [n, k + top] in float32, and
        the likeliest ids [n, top]."""
        hidden, head = hidden.to(self.inner), self._head()
        if not (torch.is_grad_enabled() and head.requires_grad):
            if ids.shape[1] == 1 and not top:
                return sampled(hidden, head, ids[:, 0], temperatures, legal)[:, None], ids[:, :0]
            return picked(hidden, head, ids, temperatures, top, legal)
        logits = F.linear(hidden, head).float() / temperatures[:, None]
        if legal is not None:
            logits = logits.masked_fill(~legal, float("-inf"))
        best = logits.detach().topk(top).indices
        return logits.gather(1, torch.cat((ids, best), 1)) - logits.logsumexp(-1, keepdim=True), best

    def _layer(self, number: int, x: Tensor, lora: Lora | None, seen: Seen, wanted: Tensor | None) -> Tensor:
        at = f"model.layers.{number}."
        return self.layer({name: self.weights[at + name] for name in LAYER_WEIGHTS}, x, lora, seen, wanted)

    def _top(self, name: str) -> Tensor:
        """A weight outside the layers."""
        return self.weights[name]

    def _head(self) -> Tensor:
        return self._served(self._top("model.embed_tokens.weight" if self.layout.tied else "lm_head.weight"))

    def _project(self, x: Tensor, weights: Mapping[str, Tensor], lora: Lora | None, *names: str) -> tuple[Tensor, ...]:
        """One x through several linears."""
        own = [self._served(weights[f"{name}.weight"]) for name in names]
        return project(x, own) if lora is None else project(x, own, [lora.pairs[name] for name in names], lora.scale)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return norm(x, self._rounded(weight), self.layout.epsilon, self.inner)

    def _served(self, weight: Tensor) -> Tensor:
        """A weight as it is served, in what is multiplied; its gradient is what it gets, not rounded."""
        if self._held or self.inner == self.compute or weight.dtype == self.compute:
            return weight.to(self.inner)
        found: Tensor = _Served.apply(weight, self.compute)  # type: ignore[no-untyped-call]
        return found

    def _rounded(self, weight: Tensor) -> Tensor:
        return weight.to(self.compute).float()

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * frequencies(self.layout).to(positions.device)
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        return angles.cos(), angles.sin()
