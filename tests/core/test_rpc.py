"""Messages between processes, over real unix sockets: many at once, cancelled, failed, cut, and dialled again."""

import asyncio
import contextlib
import socket

import pytest

from reef.core import errors, rpc
from reef.core.wire import Delta, Done, Generate, Load, Loaded, Ping, Pong, Wake


class Echo:
    """Answers by kind: Ping at once, Load slowly, Generate as a stream of Deltas; Wake fails."""

    def __init__(self):
        self.cancelled = asyncio.Event()

    def __call__(self, message):
        match message:
            case Ping():
                return self.pong()
            case Load():
                return self.load(message.release_id)
            case Generate():
                return self.stream(int(message.body))
            case Wake():
                return self.fail(message.scenario)

    async def pong(self):
        return Pong(pid=1, kind="echo")

    async def load(self, name):
        await asyncio.sleep(float(name))
        return Loaded(release_id=name, seconds=float(name), resident=[])

    async def stream(self, count):
        try:
            for number in range(count):
                await asyncio.sleep(0)
                yield Delta(choice=0, text=str(number), ids=[number], logprobs=[-0.5], release_id="r")
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise

    async def fail(self, name):
        if name == "known":
            raise errors.MissingError("no such scenario", param="scenario")
        raise ValueError("surprise")


@contextlib.asynccontextmanager
async def serving(tmp_path, handler):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "echo.sock"))
    listener.listen()
    server = await rpc.serve(listener, handler)
    try:
        yield server
    finally:
        server.close()


async def test_calls_and_streams_share_one_socket(tmp_path):
    async with serving(tmp_path, Echo()):
        client = rpc.Client(tmp_path / "echo.sock")

        async def collect(count):
            return [item.text async for item in client.stream(Generate(release_id="r", body=str(count).encode()))]

        slow = asyncio.create_task(client.call(Load(release_id="0.05")))
        texts = await asyncio.gather(*(collect(count) for count in (0, 1, 30)))
        assert texts == [[], ["0"], [str(n) for n in range(30)]]
        assert (await client.call(Ping())).kind == "echo"
        assert (await slow).release_id == "0.05"
        await client.close()


async def test_errors_keep_their_class(tmp_path, caplog):
    async with serving(tmp_path, Echo()):
        client = rpc.Client(tmp_path / "echo.sock")
        with pytest.raises(errors.MissingError, match="no such scenario") as caught:
            await client.call(Wake(scenario="known"))
        assert caught.value.param == "scenario"
        with pytest.raises(errors.WireError, match="failed inside; its log says why") as caught:
            await client.call(Wake(scenario="other"))
        assert "surprise" not in caught.value.message, "what went wrong is for the log, not for clients"
        assert "ValueError: surprise" in caplog.text
        await client.close()


async def test_leaving_a_stream_cancels_it_on_the_other_side(tmp_path):
    echo = Echo()
    async with serving(tmp_path, echo):
        client = rpc.Client(tmp_path / "echo.sock")
        async with contextlib.aclosing(client.stream(Generate(release_id="r", body=b"1000000"))) as items:
            async for _ in items:
                break
        await asyncio.wait_for(echo.cancelled.wait(), 2)
        await client.close()


async def test_timeout_and_unreachable(tmp_path):
    async with serving(tmp_path, Echo()):
        client = rpc.Client(tmp_path / "echo.sock")
        with pytest.raises(errors.WireError, match="within"):
            await client.call(Load(release_id="5"), timeout=0.05)
        assert isinstance(await client.call(Ping()), Pong)
        await client.close()
    with pytest.raises(errors.WireError, match="cannot reach nobody"):
        await rpc.Client(tmp_path / "nobody.sock").call(Ping())


async def test_a_cut_connection_fails_what_is_in_flight_and_the_next_call_dials_again(tmp_path):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "cut.sock"))
    listener.listen()
    client = rpc.Client(tmp_path / "cut.sock")
    pending = asyncio.create_task(client.call(Ping()))
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    connection, _ = await loop.sock_accept(listener)
    connection.close()
    with pytest.raises(errors.WireError, match="went away"):
        await asyncio.wait_for(pending, 2)
    server = await rpc.serve(listener, Echo())
    assert isinstance(await asyncio.wait_for(client.call(Ping()), 2), Pong)
    await client.close()
    server.close()


async def test_every_message_survives_the_wire():
    from reef.core import wire

    frame = wire.Frame(7, "reply", Done())
    assert wire.decode(wire.encode(frame)) == frame
    text = Delta(
        choice=1, text="北京🌍", ids=[1, 2], logprobs=[-1.25, float("-inf")], release_id="r", top=[[(3, -0.5)], []]
    )
    assert wire.decode(wire.encode(wire.Frame(1, "item", text))).message == text
