"""What the tests of an installed harness share: where it comes from, and where it is."""

import pytest

from tests.harness.kit_install import Machine, Shop


@pytest.fixture
def shop():
    made = Shop()
    yield made
    made.close()


@pytest.fixture
def machine(tmp_path, shop):
    made = Machine(tmp_path)
    made.install(shop.bundle()).good()
    return made
