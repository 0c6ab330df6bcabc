"""The second stage: a recipe's fields against its dataclass."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from reef.config import Use, check
from reef.config.file import Place
from reef.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Toy:
    part: ClassVar[str | None] = "weights"
    batch_size: int = 4
    rate: float = 0.1
    critic: str = "linear"
    warm: bool = False
    max_staleness: int | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self):
        if self.batch_size < 1:
            raise ValueError("batch_size must be 1 or more")


@dataclass(frozen=True, slots=True)
class Shadow:
    port: int = 1


@dataclass(frozen=True, slots=True)
class Needs:
    teacher: str


def make(fields, cls=Toy, floor=3, where=("reef",)):
    return check.recipe(cls, Use("toy", fields, where), floor, lambda path: Place("file", "r.yaml", 7))


def test_fields_become_arguments():
    made = make({"batch_size": 1, "rate": "1e-4", "warm": True, "max_staleness": 18, "extra": {"a": 1}})
    assert made == Toy(1, 1e-4, "linear", True, 18, {"a": 1.0})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"bacth_size": 1},
            "r.yaml:7: reef.bacth_size is not a setting; did you mean reef.batch_size (of recipe toy)?",
        ),
        ({"prot": 1}, "did you mean reef.port"),
        ({"patience": 1}, "did you mean gate.patience"),
        ({"zzzz": 1}, "r.yaml:7: reef.zzzz is not a setting"),
        ({"batch_size": "many"}, "r.yaml:7: reef.batch_size (of recipe toy)"),
        ({"batch_size": True}, "reef.batch_size"),
        ({"batch_size": 1.5}, "reef.batch_size"),
        ({"batch_size": 0}, "batch_size must be 1 or more"),
        ({"max_staleness": 2}, "r.yaml:7: reef.max_staleness is 2"),
    ],
)
def test_wrong_fields(fields, message):
    with pytest.raises(ConfigError) as error:
        make(fields)
    assert message in str(error.value), str(error.value)


def test_every_wrong_field_is_named():
    with pytest.raises(ConfigError) as error:
        make({"bacth_size": 1, "batch_size": "many", "zzzz": 1})
    assert len(error.value.message.splitlines()) == 3
    assert all(line.startswith("r.yaml:7: reef.") for line in error.value.message.splitlines())


def test_staleness_follows_the_gate():
    assert make({"max_staleness": 2}, floor=2).max_staleness == 2


def test_a_field_may_not_shadow_a_key():
    with pytest.raises(ConfigError, match="'port', which is a key of reef: already"):
        make({}, Shadow)


def test_a_missing_field_is_named():
    with pytest.raises(ConfigError, match="needs teacher"):
        make({}, Needs)


def test_not_a_recipe():
    with pytest.raises(ConfigError, match="a recipe is a frozen dataclass"):
        make({}, str)


def test_choice():
    lookup = lambda path: Place("file", "r.yaml", 3)  # noqa: E731
    check.choice(("gate", "policy"), "always", ["always", "guarded"], lookup, "policy")
    check.choice(("gate", "policy"), "mine.policies:Own", ["always"], lookup, "policy")
    with pytest.raises(
        ConfigError, match=r"r.yaml:3: gate.policy: there is no policy 'gaurded'; did you mean guarded\?"
    ):
        check.choice(("gate", "policy"), "gaurded", ["always", "guarded"], lookup, "policy")
