"""Dotted paths: the right object, or an error that says which part is wrong."""

import sys

import pytest

from reef.core.errors import BY_NAME, ConfigError, ReefError, StaleHead
from reef.core.load import load


def test_loads_an_object():
    assert load("reef.core.errors:StaleHead") is StaleHead


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("reef.core.errors", "package.module:Name"),
        (":x", "package.module:Name"),
        ("nowhere.at.all:X", "no module 'nowhere'"),
        ("reef.core.nothing:X", "no module 'reef.core.nothing'"),
        ("reef.core.errors:Nope", "has no 'Nope'"),
    ],
)
def test_says_what_is_missing(path, says):
    with pytest.raises(ConfigError, match=says):
        load(path)


def test_a_recipe_is_found_under_the_wheels_name(tmp_path, monkeypatch):
    (tmp_path / "reef_recipes").mkdir()
    (tmp_path / "reef_recipes" / "__init__.py").touch()
    (tmp_path / "reef_recipes" / "onlyinwheel.py").write_text("class R: pass")
    monkeypatch.syspath_prepend(tmp_path)
    assert load("recipes.onlyinwheel:R").__name__ == "R"
    sys.modules.pop("reef_recipes", None)


def test_a_module_that_needs_something_missing_says_so(tmp_path, monkeypatch):
    (tmp_path / "needy_method.py").write_text("import surely_not_installed")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="needs 'surely_not_installed'"):
        load("needy_method:X")


def test_the_tree_is_drawn_in_full():
    import reef.core.errors as module

    drawing = module.__doc__
    assert all(name in drawing for name in BY_NAME)
    assert all(issubclass(kind, ReefError) for kind in BY_NAME.values())
    assert len({kind.code for kind in BY_NAME.values()}) == len(BY_NAME)
