"""A Llama whose weights are shared out among workers with FSDP2: gathered a layer at a time, freed again.

Knows: how the layers become modules that `fully_shard` wraps, and what stays whole while it is used.
Does not know: batches, losses, LoRA files, Ray. The arithmetic is `local.llama`'s own.

- Every forward is a collective: all workers make the same forwards in the same order, each on rows of its own.
- Embedding, head and the last norm are gathered with the first forward. In a frozen model they stay; in one that learns
  they are shared out again after each backward.
- Gradients are sums over the workers, never means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from reef.trainers.local.llama import Llama, Lora, Packed, Seen, product_dtype

LAYER = "model.layers.{}."


class _Weights(nn.Module):
    """Tensors by their dotted names, as parameters."""

    def __init__(self, weights: Mapping[str, Tensor], learns: bool) -> None:
        super().__init__()
        self.keys = {name: name.replace(".", "/") for name in weights}  # a parameter's name may hold no dot
        for name, tensor in weights.items():
            self.register_parameter(self.keys[name], nn.Parameter(tensor, requires_grad=learns))

    def tensors(self) -> dict[str, Tensor]:
        """Whole inside a forward, shards outside of it."""
        return {name: getattr(self, key) for name, key in self.keys.items()}


class _Layer(_Weights):
    def __init__(self, model: Llama, weights: Mapping[str, Tensor], learns: bool) -> None:
        super().__init__(weights, learns)
        self._model = model

    def forward(self, x: Tensor, pairs: Any, seen: Seen, wanted: Tensor | None) -> Tensor:
        return Llama.layer(self._model, self.tensors(), x, pairs, seen, wanted)


class _Root(_Weights):
    def __init__(self, model: Llama, weights: Mapping[str, Tensor], layers: list[_Layer], learns: bool) -> None:
        super().__init__(weights, learns)
        self._model = model
        self.layers = nn.ModuleList(layers)

    def forward(self, packed: Packed, lora: Lora | None, wanted: Tensor | None) -> Tensor:
        return Llama.hidden(self._model, packed, lora, wanted)


class Spread(Llama):
    """Made of a whole model, which may be dropped afterwards. `learns`: float32 masters that require gradients."""

    def __init__(self, model: Llama, mesh: DeviceMesh, *, learns: bool = False) -> None:
        self.layout, self.compute, self.folder = model.layout, model.compute, model.folder
        self.inner, self._held = product_dtype(model.compute, mesh.device_type), not learns
        dtype = torch.float32 if learns else self.inner
        # Shards of masters are gathered as they are served; of a frozen model they are that already.
        policy = MixedPrecisionPolicy(model.compute if learns else None, torch.float32, cast_forward_inputs=False)

        def wrapped(module: Any) -> Any:
            fully_shard(module, mesh=mesh, mp_policy=policy)
            assert isinstance(module, FSDPModule)
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other reduction
            module.set_reduce_scatter_unused_params(True)  # a head that one worker's loss did not use
            return module

        def taken(prefix: str, names: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {
                name.removeprefix(prefix): tensor.detach().to(mesh.device_type, dtype, copy=learns)
                for name, tensor in names.items()
                if name.startswith(prefix)
            }

        layers = []
        for number in range(self.layout.layers):
            layers.append(wrapped(_Layer(self, taken(LAYER.format(number), model.weights), learns)))
        rest = {name: one for name, one in model.weights.items() if not name.startswith("model.layers.")}
        self._layers: list[_Layer] = layers
        self._root: Any = wrapped(_Root(self, taken("", rest), layers, learns))
        if not learns:
            self._root.set_reshard_after_backward(False, recurse=False)

    @property
    def weights(self) -> dict[str, Tensor]:  # type: ignore[override]
        """Shards (DTensor) outside of a forward, by name in the order of `layout.shapes()`."""
        found = self._root.tensors()
        for number, layer in enumerate(self._layers):
            found |= {LAYER.format(number) + name: tensor for name, tensor in layer.tensors().items()}
        return {name: found[name] for name in self.layout.shapes()}

    def hidden(self, packed: Packed, lora: Lora | None = None, wanted: Tensor | None = None) -> Tensor:
        found: Tensor = self._root(packed, lora, wanted)
        return found

    def _layer(self, number: int, x: Tensor, pairs: Any, seen: Seen, wanted: Tensor | None) -> Tensor:
        found: Tensor = self._layers[number](x, pairs, seen, wanted)
        return found

    def _top(self, name: str) -> Tensor:
        """One of the tensors outside the layers."""
        tensor: Tensor = getattr(self._root, self._root.keys[name])
        if isinstance(tensor, DTensor):  # a head asked for again after a backward
            self._root.unshard()
            tensor = getattr(self._root, self._root.keys[name])
        return tensor
