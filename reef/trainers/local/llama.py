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
        found = {}
        for name in model.linears():
            out, wide = model.weights[f"{name}.weight"].shape
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


class Llama:
    """The base model's weights and its forward. Nothing is mutated by a forward; `weights` may require gradients."""

    def __init__(
        self,
        layout: Layout,
        weights: dict[str, Tensor],
        compute: torch.dtype = torch.bfloat16,
        folder: Path | None = None,
    ) -> None:
        self.layout = layout
        self.weights = weights
        self.compute = compute
        self.folder = folder  # where its tokenizer and chat template are

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
        return cls(layout, {name: weights[name] for name in layout.shapes()}, compute, folder)

    def linears(self) -> list[str]:
        """Names, without `.weight`, of the linears a LoRA covers."""
        return [linear_path(layer, name) for layer in range(self.layout.layers) for name in LAYER_LINEARS]

    def hidden(self, packed: Packed, lora: Lora | None = None, wanted: Tensor | None = None) -> Tensor:
        """Hidden states [N, d] in float32, after the final norm; or only those at `wanted` [n], which spares the last
        layer most of its work where prompts are long."""
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
            if wanted is not None and layer == layout.layers - 1:  # from here on rows do not look at each other
                seen, x = seen[wanted], x[wanted]
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
        return self.picked(hidden, targets[:, None], temperatures)[0][:, 0]

    def picked(
        self, hidden: Tensor, ids: Tensor, temperatures: Tensor, *, top: int = 0, legal: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of some ids after hidden states [n, d], each state at its temperature [n], over its `legal` ids
        [n, V] only: of the given `ids` [n, k], then of the `top` likeliest. Returns them [n, k + top] in float32, and
        the likeliest ids [n, top]."""
        hidden, head = hidden.to(self.compute), self._head()
        if not (torch.is_grad_enabled() and head.requires_grad):
            found: tuple[Tensor, Tensor] = _Picked.apply(hidden, head, ids, temperatures, top, legal)  # type: ignore[no-untyped-call]
            return found
        logits = F.linear(hidden, head).float() / temperatures[:, None]
        if legal is not None:
            logits = logits.masked_fill(~legal, float("-inf"))
        best = logits.detach().topk(top).indices
        return logits.gather(1, torch.cat((ids, best), 1)) - logits.logsumexp(-1, keepdim=True), best

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


class _Picked(torch.autograd.Function):
    """Log-softmax, gather and the head's product in one, for a head that does not learn.

    Saves the logits once, in the compute type, where autograd would keep three float32 copies of [n, V].
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, ids: Tensor, temperatures: Tensor, top: int, legal: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, head)
        if legal is not None:
            logits.masked_fill_(~legal, float("-inf"))
        best = logits.topk(top).indices if top else ids[:, :0]
        ids = torch.cat((ids, best), 1)
        scaled = _scaled(logits, temperatures)
        whole = scaled.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits, head, ids, temperatures, whole)
        ctx.mark_non_differentiable(best)
        return scaled.gather(1, ids) - whole, best

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        logits, head, ids, temperatures, whole = ctx.saved_tensors
        each = gradient / temperatures[:, None]
        found = _scaled(logits, temperatures)
        found.sub_(whole).exp_().mul_(-each.sum(-1, keepdim=True))
        found.scatter_add_(1, ids, each)
        return found.to(head.dtype) @ head, None, None, None, None, None


def _scaled(logits: Tensor, temperatures: Tensor) -> Tensor:
    """A float32 copy of [n, V] logits, each row at its temperature."""
    found = logits.to(torch.float32, copy=True)
    return found.div_(temperatures[:, None]) if bool((temperatures != 1).any()) else found


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
