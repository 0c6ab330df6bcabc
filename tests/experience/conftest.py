import pytest

from reef.experience.sessions import Sessions
from reef.records.sqlite import SqliteStore
from tests.experience.talk import World


@pytest.fixture
async def world(tmp_path):
    store = SqliteStore(tmp_path / "records.db", owner="test")
    await store.start()
    made = World(store, Sessions(tmp_path / "sessions.db"))
    yield made
    made.sessions.close()
    await store.close()
