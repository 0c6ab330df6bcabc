"""The command that a user verifies a backend with, on the backends that can run here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reef.trainers.verify import main

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engines.kit import make_tiny

    return make_tiny(tmp_path_factory.mktemp("model") / "tiny")


def test_the_embedded_trainer_does_what_a_step_promises(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["local", "--model", str(model), "--rate", "1e-3"]) == 0
    said = capsys.readouterr().out
    assert said.count("ok  ") == 4
    assert "FAIL" not in said


def test_a_service_is_verified_in_the_same_way(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.trainers.tinker import kit, stub

    kit.options(tmp_path, model)
    given = ["tinker", "--model", str(model), "--rate", "1e-3"]
    for name, value in {
        "base_model": "tiny/base",
        "base_url": tmp_path,
        "key_env": "REEF_TEST_TINKER_KEY",
        "package": "tests.trainers.tinker.stub",
    }.items():
        given += ["--set", f"{name}={value}"]
    assert main(given) == 0

    def forgetful(self: Any, path: str, **given: Any) -> Any:
        return self.create_lora_training_client("tiny/base", rank=8)

    monkeypatch.setattr(stub.ServiceClient, "create_training_client_from_state_with_optimizer", forgetful)
    assert main(given) == 1
    assert "FAIL  a restart goes on where the line was" in capsys.readouterr().out


def test_options_are_checked(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tinker", "--model", str(model)]) == 2
    assert "base_model is missing" in capsys.readouterr().err
