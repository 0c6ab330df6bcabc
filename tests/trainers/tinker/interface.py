"""The stub has the signatures of the real client package. It is no part of `make test`: `pip install tinker`, then
`pytest tests/trainers/tinker/interface.py`."""

from __future__ import annotations

import inspect

import pytest
import tinker

from tests.trainers.tinker import stub

CALLS = (
    ("ServiceClient", "create_lora_training_client"),
    ("ServiceClient", "create_training_client_from_state_with_optimizer"),
    ("ServiceClient", "create_sampling_client"),
    ("ServiceClient", "create_rest_client"),
    ("TrainingClient", "forward"),
    ("TrainingClient", "forward_backward"),
    ("TrainingClient", "forward_backward_custom"),
    ("TrainingClient", "optim_step"),
    ("TrainingClient", "save_state"),
    ("TrainingClient", "save_weights_external"),
    ("SamplingClient", "compute_logprobs"),
    ("RestClient", "get_external_weights_urls"),
)


@pytest.mark.parametrize(("name", "method"), CALLS, ids=lambda one: one)
def test_a_call_of_the_stub_is_one_of_the_package(name: str, method: str) -> None:
    """Whatever the stub takes the package takes, in the same place and as optionally; the package may take more."""
    real = inspect.signature(getattr(getattr(tinker, name), method)).parameters
    for place, (key, mine) in enumerate(inspect.signature(getattr(getattr(stub, name), method)).parameters.items()):
        if key not in real and mine.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            theirs = list(real.values())[place]  # its first argument may have another name: it is given by place
            assert place == 1
            assert theirs.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
            continue
        assert real[key].kind is mine.kind
        assert (real[key].default is inspect.Parameter.empty) <= (mine.default is inspect.Parameter.empty)
    extra = [
        one
        for key, one in real.items()
        if key not in inspect.signature(getattr(getattr(stub, name), method)).parameters
    ]
    assert all(one.default is not inspect.Parameter.empty for one in extra)


def test_the_packages_types_take_what_is_sent() -> None:
    data = tinker.TensorData(data=[1.0, 2.0], dtype="float32", shape=[2])
    assert list(data.data) == [1.0, 2.0]
    target = tinker.TensorData(data=[4, 5], dtype="int64", shape=[2])
    for inputs in ({"weights": data}, {"logprobs": data, "advantages": data}):
        made = tinker.Datum(
            model_input=tinker.ModelInput.from_ints([3, 4]), loss_fn_inputs={"target_tokens": target} | inputs
        )
        assert set(made.loss_fn_inputs) == {"target_tokens", *inputs}
    adam = tinker.AdamParams(learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=1.0)
    assert adam.grad_clip_norm == 1.0


def test_the_packages_errors_and_losses_are_known() -> None:
    from typing import get_args

    from reef.trainers.tinker.service import OURS, PASSING
    from reef.trainers.tinker.work import CONFIGS

    for name in (*PASSING, "TinkerError", "BadRequestError", *OURS):
        assert issubclass(getattr(tinker, name), Exception), name
    assert set(CONFIGS) <= set(get_args(tinker.types.LossFnType))
