"""The hand-written backward passes against torch's own of the plain expressions, in values and gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reef.trainers.local import attention, head
from reef.trainers.local.llama import pack
from reef.trainers.local.pieces import gated, joined, norm, project


def draw(*shape: int, seed: int = 0, learns: bool = True) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(learns)


def same(mine: Callable[..., Tensor], plain: Callable[..., Tensor], given: Sequence[Tensor]) -> None:
    """Values, and gradients of whatever requires one."""
    found = []
    for made in (mine, plain):
        own = [one.detach().clone().requires_grad_(one.requires_grad) for one in given]
        value = made(*own)
        (value.float() * torch.linspace(-1, 2, value.numel()).view(value.shape)).sum().backward()
        found.append([value.detach(), *(one.grad for one in own)])
    for one, other in zip(*found, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("learns", [True, False])
def test_a_norm(learns: bool) -> None:
    given = [draw(5, 8), draw(8, seed=1, learns=learns)]
    same(
        lambda x, weight: norm(x, weight, 1e-5, torch.float32),
        lambda x, weight: F.rms_norm(x, (8,), weight, 1e-5),
        given,
    )


def test_a_gate() -> None:
    same(gated, lambda gate, up: F.silu(gate) * up, [draw(5, 8), draw(5, 8, seed=1)])


def test_a_sum_is_float32_and_its_gradient_of_each_one_s_type() -> None:
    x, more = draw(3, 4), draw(3, 4, seed=1).detach().bfloat16().requires_grad_()
    found = joined(x, more)
    assert torch.equal(found, x + more.float())
    found.sum().backward()
    assert (found.dtype, x.grad.dtype, more.grad.dtype) == (torch.float32, torch.float32, torch.bfloat16)  # type: ignore[union-attr]


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_projections(learns: bool, lora: bool, first: bool) -> None:
    """With and without weights that learn, a LoRA, and an x that needs a gradient (the first layer's does not)."""
    weights = [draw(7, 6, seed=1, learns=learns), draw(3, 6, seed=2, learns=learns)]
    pairs = [draw(2, 6, seed=3), draw(7, 2, seed=4), draw(2, 6, seed=5), draw(3, 2, seed=6)] if lora else []
    if not (learns or lora or first):
        return

    def mine(x: Tensor, *given: Tensor) -> Tensor:
        two = [(given[2], given[3]), (given[4], given[5])] if lora else []
        return torch.cat(project(x, given[:2], two, 1.5), 1)

    def plain(x: Tensor, *given: Tensor) -> Tensor:
        found = [x @ weight.t() for weight in given[:2]]
        if lora:
            found = [one + 1.5 * (x @ given[2 + 2 * n].t()) @ given[3 + 2 * n].t() for n, one in enumerate(found)]
        return torch.cat(found, 1)

    same(mine, plain, [draw(5, 6, learns=first), *weights, *pairs])


def plainly(q: Tensor, k: Tensor, v: Tensor, cosine: Tensor, sine: Tensor, packed: object) -> Tensor:
    """One sequence after the other, every head with keys of its own."""
    half, cut = q.shape[-1] // 2, packed.prefix  # type: ignore[attr-defined]

    def turn(x: Tensor) -> Tensor:
        return x * cosine + torch.cat((-x[..., half:], x[..., :half]), -1) * sine

    q, k = turn(q), turn(k)
    ends = [*packed.starts[1:], len(q)]  # type: ignore[attr-defined]
    found = []
    for number, (start, end) in enumerate(zip(packed.starts, ends, strict=True)):  # type: ignore[attr-defined]
        where = torch.cat((torch.arange(cut), torch.arange(start, end)))
        one, keys, values = (x[where].transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(one, keys, values, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        found.append(out if number == 0 else out[cut:])
    return torch.cat(found).flatten(1)


@pytest.mark.parametrize("short", [True, False])
@pytest.mark.parametrize("share", [0, 3])
@pytest.mark.parametrize("lengths", [(5,), (4, 9, 6), (9, 9)])
def test_attention(monkeypatch: pytest.MonkeyPatch, short: bool, share: int, lengths: Sequence[int]) -> None:
    """Both ways, in blocks of two queries, with and without padding and a shared prefix."""
    monkeypatch.setattr(attention, "BLOCK", 2)
    monkeypatch.setattr(attention, "SHORT", 1024 if short else 0)
    packed = pack([[1, 2, 3, *range(10, 7 + length)] for length in lengths], share)
    assert packed.prefix == (share if len(lengths) > 1 else 0)
    count = len(packed.ids)
    angles = packed.positions[:, None, None] * torch.tensor([1.0, 0.3, 1.0, 0.3])
    same(
        lambda q, k, v: attention.attend(q, k, v, angles.cos(), angles.sin(), packed),
        lambda q, k, v: plainly(q, k, v, angles.cos(), angles.sin(), packed),
        [draw(count, 6, 4), draw(count, 2, 4, seed=1), draw(count, 2, 4, seed=2)],
    )


def test_attention_of_bfloat16_is_near_that_of_float32() -> None:
    """Scores are float32, so large ones keep their differences: with keys that stand out, too."""
    packed = pack([list(range(1, 40))])
    count = len(packed.ids)
    angles = packed.positions[:, None, None] * torch.ones(4) * 0.01
    q, k, v = (draw(count, 4, 4, seed=seed, learns=False).bfloat16() for seed in range(3))
    k[0] += 20
    exact, near = (
        attention.attend(*(x.to(dtype) for x in (q, k, v)), angles.cos(), angles.sin(), packed).float()
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert float((exact - near).abs().max()) < 0.02


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("limited", [True, False])
def test_log_probs_of_sampled_tokens(monkeypatch: pytest.MonkeyPatch, warm: bool, limited: bool) -> None:
    monkeypatch.setattr(head, "ROWS", 3)
    weight, ids = draw(11, 6, seed=1, learns=False), torch.tensor([0, 10, 3, 3, 7])
    heat = torch.tensor([1.0, 0.5, 2.0, 1.0, 3.0]) if warm else torch.ones(5)
    legal = torch.ones(5, 11, dtype=torch.bool)
    if limited:
        legal[1, :8] = False

    def plain(hidden: Tensor) -> Tensor:
        logits = (hidden @ weight.t() / heat[:, None]).masked_fill(~legal, float("-inf"))
        return torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]

    same(lambda x: head.sampled(x, weight, ids, heat, legal if limited else None), plain, [draw(5, 6)])
    with torch.no_grad():
        assert not head.sampled(draw(5, 6), weight, ids, heat, None).requires_grad
