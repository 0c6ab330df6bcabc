"""A state folder with records, and commands run on it: without a server, or beside one in this process."""

import asyncio
import contextlib
import threading

from reef.cli import state
from reef.cli.main import main
from reef.engines.fake import FakeEngine
from tests.gateway.conftest import TOKEN, Gateway


class Folder:
    """`run` runs a command on the folder. `serving` runs a gateway on it in a thread, as a server would."""

    def __init__(self, path, monkeypatch, capfd):
        self.path = path
        self.capfd = capfd
        self.gateway = Gateway(path, FakeEngine())
        monkeypatch.chdir(path.parent)
        for name in ("REEF_URL", "REEF_TOKEN", "REEF_UPSTREAM_URL", "REEF_UPSTREAM_MODEL"):
            monkeypatch.delenv(name, raising=False)

    @property
    def head(self):
        return self.gateway.chain.head("default")

    def store(self, *entries):
        self.use(lambda store: store.append_all(entries))

    def use(self, ask):
        """What `ask(store)` comes to, on a store opened for it."""

        async def run():
            from reef.records.sqlite import SqliteStore

            store = SqliteStore(self.path / "records.db", owner="test-1")
            await store.start()
            try:
                return await ask(store)
            finally:
                await store.close()

        return asyncio.run(run())

    def run(self, *words):
        """Exit code, output, errors."""
        self.capfd.readouterr()
        code = main([*words, "--reef.state_dir", str(self.path)])
        said = self.capfd.readouterr()
        return code, said.out, said.err

    @contextlib.contextmanager
    def serving(self, **settings):
        lock = state.claim(self.path)
        self.gateway = Gateway(self.path, FakeEngine(), **settings)
        started, loop = threading.Event(), asyncio.new_event_loop()
        stop = asyncio.Event()

        async def serve():
            await self.gateway.start()
            (self.path / "token").write_text(TOKEN)
            (self.path / "token").chmod(0o600)
            (self.path / "run").mkdir(exist_ok=True)
            (self.path / "run" / "address").write_text(self.gateway.url)
            started.set()
            await stop.wait()
            await self.gateway.stop()

        thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
        thread.start()
        try:
            assert started.wait(20)
            yield self
        finally:
            loop.call_soon_threadsafe(stop.set)
            thread.join()
            loop.close()
            lock.release()
            self.gateway = Gateway(self.path, FakeEngine())  # a chain and a board that are open
