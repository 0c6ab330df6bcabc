"""A differentiable Llama forward in plain torch: packed sequences in, hidden states out, with an optional LoRA.

Knows: the architecture (RMSNorm, rotary positions, grouped-query attention, SwiGLU), HF weight names, PEFT LoRA names.
Does not know: losses, optimizers, files of a release, sampling.

- Linears run on the real tokens only (no padding); attention on right-padded rows, where causality hides the padding.
- A prefix that all sequences of a micro-batch share (a system message) is computed once. Its keys and values are
  broadcast, so values and gradients are those of computing it in every sequence.
- Master weights that learn are float32. Every use rounds them to `compute` (bfloat16 or float32) first, so a forward of
  the master is exactly that of the weights as they are served.
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
from reef.engines.local.model import frequencies


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

    @classmethod
    def fresh(cls, model: Llama, rank: int, alpha: float, seed: int) -> Lora:
        """A random as PEFT makes it (Kaiming uniform, a = sqrt 5), B zero: at the start the policy is the base."""
        generator = torch.Generator().manual_seed(seed)
        pairs = {}
        for name in model.linears():
            out, wide = model.weights[f"{name}.weight"].shape
            bound = 1 / math.sqrt(wide)
            a = (torch.rand((rank, wide), generator=generator) * 2 - 1) * bound
            pairs[name] = (a.requires_grad_(), torch.zeros((out, rank)).requires_grad_())
        return cls(pairs, rank, alpha)

    @classmethod
    def load(cls, model: Llama, tensors: Mapping[str, Tensor], rank: int, alpha: float) -> Lora:
        """From the tensors of an `adapter_model.safetensors`. TrainError names the first that does not fit the base."""
        pairs, left = {}, dict(tensors)
        for name in model.linears():
            out, wide = model.weights[f"{name}.weight"].shape
            pair = []
            for letter, shape in (("A", (rank, wide)), ("B", (out, rank))):
                key = f"base_model.model.{name}.lora_{letter}.weight"
                tensor = left.pop(key, None)
                if tensor is None or tuple(tensor.shape) != shape:
                    found = None if tensor is None else tuple(tensor.shape)
                    raise TrainError(f"the LoRA does not fit the base: {key} is {found}, expected {shape}")
                pair.append(tensor.float().clone().requires_grad_())
            pairs[name] = (pair[0], pair[1])
        if left:
            raise TrainError(f"the LoRA does not fit the base: unexpected {min(left)}")
        return cls(pairs, rank, alpha)

    def parameters(self) -> dict[str, Tensor]:
        """By PEFT name, in a fixed order."""
        found = {}
        for name, (a, b) in self.pairs.items():
            found[f"base_model.model.{name}.lora_A.weight"] = a
            found[f"base_model.model.{name}.lora_B.weight"] = b
        return found


class Llama:
    """The base model's weights and its forward. Nothing is mutated by a forward; `weights` may require gradients."""

    def __init__(self, layout: Layout, weights: dict[str, Tensor], compute: torch.dtype = torch.bfloat16) -> None:
        self.layout = layout
        self.weights = weights
        self.compute = compute

    @classmethod
    def load(cls, folder: Path, compute: torch.dtype = torch.bfloat16) -> Llama:
        """The model in an HF-shaped folder, its weights in `compute`. TrainError when it is not whole."""
        from safetensors.torch import load_file

        try:
            layout, files = read_layout(folder), weight_files(folder)
        except InputError as error:
            raise TrainError(error.message) from None
        weights: dict[str, Tensor] = {}
        for file in files:
            weights |= {name: tensor.to(compute) for name, tensor in load_file(file).items()}
        if missing := sorted(set(layout.shapes()) - set(weights)):
            raise TrainError(f"{folder} is not a whole Llama model: {missing[0]} is missing")
        return cls(layout, {name: weights[name] for name in layout.shapes()}, compute)

    def linears(self) -> list[str]:
        """Names, without `.weight`, of the linears a LoRA covers."""
        return [linear_path(layer, name) for layer in range(self.layout.layers) for name in LAYER_LINEARS]

    def hidden(self, packed: Packed, lora: Lora | None = None) -> Tensor:
        """Hidden states [N, d] in float32, after the final norm."""
        layout = self.layout
        x = F.embedding(packed.ids, self.weights["model.embed_tokens.weight"]).to(self.compute).float()
        cosine, sine = self._rotary(packed.positions)
        mask = _mask(packed, layout.heads // layout.kv_heads)
        for layer in range(layout.layers):
            at = f"model.layers.{layer}"
            h = self._norm(x, f"{at}.input_layernorm.weight").to(self.compute)
            query, key, value = (
                self._linear(h, f"{at}.self_attn.{name}", lora).view(-1, heads, layout.head_dim)
                for name, heads in (("q_proj", layout.heads), ("k_proj", layout.kv_heads), ("v_proj", layout.kv_heads))
            )
            query, key = _rotate(query.float(), cosine, sine), _rotate(key.float(), cosine, sine)
            seen = _attend(query, key, value.float(), packed, mask).reshape(-1, layout.heads * layout.head_dim)
            x = x + self._linear(seen, f"{at}.self_attn.o_proj", lora)
            h = self._norm(x, f"{at}.post_attention_layernorm.weight").to(self.compute)
            gate = self._linear(h, f"{at}.mlp.gate_proj", lora)
            up = self._linear(h, f"{at}.mlp.up_proj", lora)
            x = x + self._linear(F.silu(gate) * up, f"{at}.mlp.down_proj", lora)
        return self._norm(x, "model.norm.weight")

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, d] -> [n, V] float32. Pass only the positions that predict something: this is the widest product."""
        return F.linear(hidden.to(self.compute), self._head()).float()

    def logprobs(self, hidden: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        """Log-probs [n] of `targets` [n] after hidden states [n, d], each at its temperature [n]."""
        return _chosen(hidden.to(self.compute), self._head(), targets, temperatures)

    def _head(self) -> Tensor:
        name = "model.embed_tokens.weight" if self.layout.tied else "lm_head.weight"
        return self.weights[name].to(self.compute)

    def _linear(self, x: Tensor, name: str, lora: Lora | None) -> Tensor:
        x = x.to(self.compute)
        y = F.linear(x, self.weights[f"{name}.weight"].to(self.compute))
        if lora is None:
            return y
        a, b = lora.pairs[name]
        return torch.addmm(y, F.linear(x, a.to(self.compute)), b.to(self.compute).t(), alpha=lora.scale)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (self.layout.hidden,), self.weights[name].to(self.compute).float(), self.layout.epsilon)

    def _rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * frequencies(self.layout)
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]
        return angles.cos(), angles.sin()


class _Chosen(torch.autograd.Function):
    """Log-softmax, gather and the head's product in one, for a head that does not learn.

    Saves the logits once, in the compute type, where autograd would keep three float32 copies of [n, V].
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
        logits = F.linear(hidden, head)
        scaled = logits.float()
        if bool((temperatures != 1).any()):
            scaled = scaled / temperatures[:, None]
        whole = scaled.logsumexp(-1)
        ctx.save_for_backward(logits, head, targets, temperatures, whole)
        return scaled.gather(1, targets[:, None])[:, 0] - whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        logits, head, targets, temperatures, whole = ctx.saved_tensors
        each = gradient / temperatures
        found = logits.float() / temperatures[:, None] if bool((temperatures != 1).any()) else logits.float()
        found.sub_(whole[:, None]).exp_().mul_(-each[:, None])
        found.scatter_add_(1, targets[:, None], each[:, None])
        return found.to(head.dtype) @ head, None, None, None


def _chosen(hidden: Tensor, head: Tensor, targets: Tensor, temperatures: Tensor) -> Tensor:
    if not head.requires_grad:
        found: Tensor = _Chosen.apply(hidden, head, targets, temperatures)  # type: ignore[no-untyped-call]
        return found
    logits = F.linear(hidden, head).float() / temperatures[:, None]
    return -F.cross_entropy(logits, targets, reduction="none")


def _rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cosine + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sine


def _mask(packed: Packed, share: int) -> Tensor:
    """[share * L, P + L]: an own token sees the whole prefix and its own past; once for each head of a group."""
    own = torch.ones(packed.width, packed.width, dtype=torch.bool).tril()
    whole = torch.cat((torch.ones(packed.width, packed.prefix, dtype=torch.bool), own), dim=1)
    return whole.repeat(share, 1)


def _attend(query: Tensor, key: Tensor, value: Tensor, packed: Packed, mask: Tensor) -> Tensor:
    """Attention over packed tokens in float32: [N, heads, D], [N, kv_heads, D] twice -> [N, heads, D].

    The query heads that share a key head are laid out along the query length, so keys are never repeated. On a CPU
    this halves the backward pass of short sequences against bfloat16 and repeated keys.
    """
    cut, heads, groups = packed.prefix, query.shape[1], key.shape[1]
    share = heads // groups

    many, width = packed.count, packed.width

    def padded(x: Tensor) -> Tensor:
        return (
            x.new_zeros(many * width, *x.shape[1:]).index_copy(0, packed.slots, x[cut:]).view(many, width, *x.shape[1:])
        )

    q = (
        padded(query)
        .view(many, width, groups, share, -1)
        .permute(0, 2, 3, 1, 4)
        .reshape(many, groups, share * width, -1)
    )
    k, v = padded(key).transpose(1, 2), padded(value).transpose(1, 2)
    if cut:
        k, v = (
            torch.cat((x[:cut].transpose(0, 1).expand(many, -1, -1, -1), own), dim=2)
            for x, own in ((key, k), (value, v))
        )
    rows = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).view(many, groups, share, width, -1)
    own = rows.permute(0, 3, 1, 2, 4).reshape(many * width, heads, -1).index_select(0, packed.slots)
    if not cut:
        return own
    pq, pk, pv = (x[:cut].transpose(0, 1)[None] for x in (query, key, value))
    shared = F.scaled_dot_product_attention(pq, pk, pv, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    return torch.cat((shared, own))
