"""The HTTP client against servers that answer exact bytes over real sockets."""

import asyncio
import contextlib
import gc
import shutil
import ssl
import subprocess

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.engines import http
from reef.engines.http import Broken, Client, Unreachable

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


@pytest.fixture(
    params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"], scope="module"
)
def event_loop_policy(request):
    """Gateways run on uvloop; everything here on both."""
    return request.param()


class Server:
    """Answers request number n of a connection with `script(n, connection)` pieces; None closes, `...` hangs."""

    def __init__(self):
        self.requests = []
        self.connections = 0

    async def serve(self, reader, writer):
        self.connections += 1
        connection = self.connections
        try:
            number = 0
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or 0)
                self.requests.append((head, await reader.readexactly(length)))
                for piece in self.script(number, connection):
                    if piece is None:
                        return
                    if piece is ...:
                        await asyncio.sleep(60)
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                number += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def serving(*pieces, script=None, tls=None, **given):
    made = Server()
    made.script = script or (lambda number, connection: pieces)
    server = await asyncio.start_server(made.serve, "127.0.0.1", 0, ssl=tls)
    port = server.sockets[0].getsockname()[1]
    scheme = "https" if tls else "http"
    client = Client(f"{scheme}://127.0.0.1:{port}", **({"connect": 5.0, "idle": 5.0} | given))
    made.port = port
    try:
        yield client, made
    finally:
        client.close()
        await asyncio.sleep(0)
        server.close()


async def post(client, body=b"{}"):
    return await client.send(client.head("POST", "/v1/x", {"a": "b"}), body)


async def everything(response):
    found = []
    while data := await response.some():
        found.append(data)
    return b"".join(found)


FRAMINGS = {
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX: 1\r\nx: 2\r\n\r\nhello",
    "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX: 1\r\nX: 2\r\n\r\n"
    b"2;e=1\r\nhe\r\n3\r\nllo\r\n0\r\nt: 1\r\n\r\n",
    "informed": b"HTTP/1.1 103 Early\r\nX: 9\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n"
    b"HTTP/1.1 200 OK\r\nX: 1\r\nX: 2\r\nContent-Length: 5\r\n\r\nhello",
}
CLOSING = {
    "until the end": b"HTTP/1.1 200 OK\r\nX: 1\r\nX: 2\r\n\r\nhello",
    "old": b"HTTP/1.0 200 OK\r\nX: 1\r\nX: 2\r\n\r\nhello",
    "announced": b"HTTP/1.1 200 OK\r\nX: 1\r\nX: 2\r\nConnection: close\r\ncontent-length: 5\r\n\r\nhello",
}


@pytest.mark.parametrize("name", FRAMINGS | CLOSING)
@pytest.mark.parametrize("size", [1, 9, 1000])
async def test_every_framing_with_any_cuts(name, size):
    raw = (FRAMINGS | CLOSING)[name]
    pieces = [raw[place : place + size] for place in range(0, len(raw), size)]
    async with serving(*pieces, *([None] if name in CLOSING else [])) as (client, server):
        for _ in range(3):
            response = await post(client, b'{"x":1}')
            assert (response.status, response.headers["x"]) == (200, "1, 2")
            assert await everything(response) == b"hello"
            assert response.read
            assert await response.some() == b""
        assert server.connections == (3 if name in CLOSING else 1)
        head, body = server.requests[2]
        lines = [b"POST /v1/x HTTP/1.1", b"host: 127.0.0.1:%d" % server.port, b"a: b", b"content-length: 7"]
        assert head.split(b"\r\n") == [*lines, b"", b""]
        assert body == b'{"x":1}'


@pytest.mark.parametrize("status", [204, 304])
async def test_a_response_without_a_body(status):
    async with serving(b"HTTP/1.1 %d X\r\n\r\n" % status) as (client, server):
        for _ in range(2):
            assert await everything(await post(client)) == b""
        assert server.connections == 1


@pytest.mark.parametrize(
    "pieces",
    [
        [None],
        [b"HTTP/1.1 200 OK\r\ncont", None],
        [b"nonsense\r\n\r\n", ...],
        [b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", ...],
        [b"HTTP/1.1 101 Switching\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n", ...],
        [b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 70_000 + b"\r\n\r\n", ...],
        [b"HTTP/1.1 200 OK\r\n" + b"".join(b"x%d: y\r\n" % n for n in range(20_000)) + b"\r\n", ...],
    ],
)
async def test_heads_that_break(pieces):
    async with serving(*pieces) as (client, _):
        with pytest.raises(Broken):
            await post(client)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n!!\r\n",
    ],
)
async def test_what_came_before_a_break_is_read_first(raw):
    async with serving(raw, None) as (client, server):
        response = await post(client)
        assert await response.some() == b"hello"
        with pytest.raises(Broken):
            await response.some()
        response.close()
        with pytest.raises(Broken):
            await everything(await post(client))
        assert server.connections == 2


async def test_more_than_was_asked_for_ends_the_connection():
    for extra in (b"x", OK, b"\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nbad"):
        async with serving(OK + extra) as (client, server):
            for _ in range(2):
                assert await everything(await post(client)) == b"hi"
            assert server.connections == 2
    late = asyncio.Event()
    async with serving(OK) as (client, server):
        serve = server.serve

        async def and_later(reader, writer):
            await reader.readuntil(b"\r\n\r\n{}")
            writer.write(OK)
            await late.wait()
            writer.write(OK)
            await serve(reader, writer)

        other = await asyncio.start_server(and_later, "127.0.0.1", 0)
        client = Client(f"http://127.0.0.1:{other.sockets[0].getsockname()[1]}", connect=5.0, idle=5.0)
        await everything(await post(client))
        late.set()
        for _ in range(200):  # until the client has seen them
            if not client._free:
                break
            await asyncio.sleep(0.005)
        assert client._free == []
        client.close()
        other.close()


async def test_a_kept_connection_that_the_server_ends_is_not_used_again():
    async with serving(OK, None) as (client, server):
        await everything(await post(client))
        for _ in range(200):
            if not client._free:
                break
            await asyncio.sleep(0.005)
        assert await everything(await post(client)) == b"hi"
        assert server.connections == 2


async def test_a_request_on_a_connection_that_just_ended_goes_out_again(monkeypatch):
    def script(number, connection):
        return [OK] if number == 0 else [None]

    async with serving(script=script, connections=1) as (client, server):
        for _ in range(4):
            assert await everything(await post(client)) == b"hi"
        assert server.connections == 4
        monkeypatch.setattr(http, "STALE", -1.0)  # it took its time: it may have worked on the request
        with pytest.raises(Broken):
            await post(client)
    async with serving(None) as (client, server):  # a new connection that ends at once
        with pytest.raises(Broken):
            await post(client)
        assert server.connections == 1


async def test_a_kept_connection_ends_after_a_while(monkeypatch):
    monkeypatch.setattr(http, "KEPT", 0.02)
    async with serving(OK) as (client, server):
        await everything(await post(client))
        assert len(client._free) == 1
        await asyncio.sleep(0.06)
        assert client._free == []
        assert await everything(await post(client)) == b"hi"
        assert server.connections == 2


async def test_silence_is_timed_out_before_and_in_the_body():
    async with serving(..., idle=0.05) as (client, _):
        with pytest.raises(TimeoutError):
            await post(client)
    begun = b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhello"
    scripts = [[OK], [begun, ...]]
    async with serving(script=lambda number, _: scripts[number], idle=0.05) as (client, _):
        await everything(await post(client))  # its timer, which is a long one by now, must not hide the next
        response = await post(client)
        assert await response.some() == b"hello"
        with pytest.raises(TimeoutError):
            await response.some()


async def test_a_stream_that_goes_on_is_not_timed_out():
    async def slow(reader, writer):
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(10):
            writer.write(b"x")
            await asyncio.sleep(0.03)
        writer.close()

    server = await asyncio.start_server(slow, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connect=5.0, idle=0.2)
    assert await everything(await post(client)) == b"x" * 10
    server.close()


async def test_a_reader_that_is_slow_holds_the_server_up_and_is_not_timed_out():
    size = 30_000_000
    sent = 0

    async def pour(reader, writer):
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % size)
        while sent < size:
            writer.write(bytes(100_000))
            sent += 100_000
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(pour, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connect=5.0, idle=0.1)
    response = await post(client)
    await asyncio.sleep(0.3)
    assert sent < size
    assert len(response._parts) * 65536 < 4_000_000
    assert len(await everything(response)) == size
    server.close()


async def test_closing_early_reaches_the_server():
    gone = asyncio.Event()

    async def wait(reader, writer):
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nx")
        with contextlib.suppress(ConnectionError):
            await reader.read()
        gone.set()
        writer.close()

    server = await asyncio.start_server(wait, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", connect=5.0, idle=5.0, connections=1)
    for _ in range(2):  # also frees its place
        response = await post(client)
        response.close()
        await asyncio.wait_for(gone.wait(), 1)
        gone.clear()
    asked = asyncio.ensure_future(post(Client(client_url(server), connect=5.0, idle=5.0)))
    await asyncio.sleep(0.02)
    asked.cancel()
    server.close()


def client_url(server):
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_cancelled_wait_frees_its_place_and_drops_the_connection():
    async with serving(script=lambda number, connection: [...] if connection == 1 else [OK], connections=1) as (
        client,
        _,
    ):
        asked = asyncio.ensure_future(post(client))
        await asyncio.sleep(0.02)
        second = asyncio.ensure_future(post(client))
        await asyncio.sleep(0.02)
        assert not second.done()
        asked.cancel()
        assert await everything(await asyncio.wait_for(second, 2)) == b"hi"


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "more"),
    [
        (b"HTTP/1.1 200 ", b"O" * 5000),
        (b"HTTP/1.1 200 OK\r\nx-a: ", b"b" * 5000),
        (b"HTTP/1.1 200 OK\r\n", b"x" * 5000),
        (b"HTTP/1.1 200 OK\r\n", b"x-a: " + b"b" * 5000 + b"\r\n"),
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 200),
        (CHUNKED + b"2\r\nhi\r\n", b"0" * 5000),
        (CHUNKED + b"2\r\nhi\r\n1;a=", b"b" * 5000),
        (CHUNKED + b"2\r\nhi\r\n0\r\nx-a: ", b"b" * 5000),
    ],
    ids=["status", "header", "name", "headers", "interim", "size", "extension", "trailer"],
)
async def test_what_is_no_body_is_bounded(begin, more):
    """Also where it never ends: what a server sends without saying anything costs no more than a head may."""
    sent = []

    def script(number, connection):
        yield begin
        for _ in range(2000):
            sent.append(len(more))
            yield more

    async with serving(script=script, connections=1) as (client, _):
        with pytest.raises(Broken):
            await everything(await post(client))
        assert not client._lines
    assert sum(sent) < 2000 * len(more)


async def test_a_long_body_in_small_chunks_is_not_bounded():
    """What frames the chunks counts only where no body comes with it."""
    pieces = [CHUNKED, *[b"5;a=" + b"b" * 2000 + b"\r\nhello\r\n"] * 60, b"0\r\nx-a: 1\r\n\r\n"]
    async with serving(*pieces) as (client, _):
        assert await everything(await post(client)) == b"hello" * 60


async def test_nobody_waits_for_a_place_for_ever():
    """All connections at work: an error that says so, and the place is there again afterwards."""
    async with serving(
        script=lambda number, connection: [...] if connection == 1 else [OK], connections=1, connect=0.05
    ) as (client, server):
        assert not client.full
        asked = asyncio.ensure_future(post(client))
        await asyncio.sleep(0.02)
        assert client.full
        for _ in range(2):
            with pytest.raises(Unreachable) as caught:
                await post(client)
            assert (caught.value.full, caught.value.final) == (True, True)
        assert server.connections == 1
        asked.cancel()
        await asyncio.sleep(0)
        assert await everything(await post(client)) == b"hi"


async def test_nobody_listens():
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    url = client_url(server)
    server.close()
    await server.wait_closed()
    for _ in range(2):
        with pytest.raises(Unreachable) as caught:
            await post(Client(url, connect=5.0, idle=5.0, connections=1))
        assert (caught.value.kind, caught.value.final) == ("ConnectionRefusedError", False)
    with pytest.raises(Unreachable):
        await post(Client("http://no-such-host.invalid", connect=5.0, idle=5.0))


async def test_many_requests_at_once_and_nothing_left():
    async with serving(OK) as (client, server):
        for _ in range(3):
            found = await asyncio.gather(*[post(client, b"%d" % n) for n in range(50)])
            assert [await everything(response) for response in found] == [b"hi"] * 50
        assert server.connections == 50
        assert len(client._free) == len(client._lines) == 50
    assert client._lines == set()
    gc.collect()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_bytes_of_a_server_do_more_than_break(data):
    """Valid responses with bytes changed, and bytes of no meaning at all."""
    raw = bytearray(data.draw(st.sampled_from([*FRAMINGS.values(), *CLOSING.values()])))
    for place in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=4)):
        raw[place] = data.draw(st.integers(0, 255))
    size = data.draw(st.integers(1, 40))

    async def run():
        async with serving(*[bytes(raw[at : at + size]) for at in range(0, len(raw), size)], None) as (client, _):
            with contextlib.suppress(Broken, Unreachable):
                await everything(await post(client))

    asyncio.run(run())


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("makes its certificate with openssl")
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=test"
    made = [*command.split(), "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    return context, cert


async def test_a_certificate_is_verified(certificate):
    async with serving(OK, tls=certificate[0]) as (client, _):
        with pytest.raises(Unreachable) as caught:
            await post(client)
        assert (caught.value.kind, caught.value.final) == ("SSLCertVerificationError", True)


async def test_tls_with_a_certificate_that_is_known(certificate, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    async with serving(*[bytes([byte]) for byte in FRAMINGS["chunks"]], tls=certificate[0]) as (client, server):
        for _ in range(2):
            assert await everything(await post(client)) == b"hello"
        assert server.connections == 1


@pytest.mark.parametrize("status", [b"200 Fine", b"407 No"])
async def test_through_a_tunnel(certificate, monkeypatch, status):
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    heads = []

    async def pipe(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()

    async def tunnel(reader, writer):
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 " + status + b"\r\n\r\n")
        if status.startswith(b"2"):
            name, _, port = heads[-1].split(b" ")[1].partition(b":")
            up_reader, up_writer = await asyncio.open_connection(name.decode(), int(port))
            with contextlib.suppress(ConnectionError):
                await asyncio.gather(pipe(reader, up_writer), pipe(up_reader, writer))
        writer.close()

    proxy = await asyncio.start_server(tunnel, "127.0.0.1", 0)
    address = client_url(proxy).replace("//", "//me:p%40ss@")
    async with serving(OK, tls=certificate[0], proxy=address) as (client, server):
        if status.startswith(b"2"):
            for _ in range(2):
                assert await everything(await post(client)) == b"hi"
            assert len(heads) == 1
            assert b"proxy-authorization" not in server.requests[0][0]
        else:
            with pytest.raises(Unreachable, match="the proxy answered 407"):
                await post(client)
        assert heads[0].startswith(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n" % server.port)
        assert b"proxy-authorization: Basic bWU6cEBzcw==\r\n" in heads[0]
    proxy.close()
