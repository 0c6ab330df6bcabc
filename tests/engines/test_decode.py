"""Content encodings undone, whatever the cuts."""

import gzip
import zlib

import brotli
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from reef.core.errors import UpstreamError
from reef.engines.decode import STEP, Decoder


def raw(data):
    stream = zlib.compressobj(wbits=-15)
    return stream.compress(data) + stream.flush()


PACK = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "br": brotli.compress,
    "zstd": zstandard.compress,
    "identity": bytes,
}


def unpack(data, encoding, cuts=(), limit=1 << 24):
    decoder, out, at = Decoder(encoding, limit), b"", 0
    for cut in (*sorted(cuts), len(data)):
        out += decoder.feed(data[at:cut])
        at = max(at, cut)
    return out + decoder.finish()


@given(st.binary(max_size=300).map(lambda data: b"{" + data), st.sampled_from(sorted(PACK)), st.data())
def test_any_cuts_give_the_same(plain, name, data):
    """case 7: every encoding, cut anywhere."""
    packed = PACK[name](plain)
    cuts = data.draw(st.lists(st.integers(0, len(packed)), max_size=8))
    assert unpack(packed, name, cuts) == plain
    assert unpack(raw(plain), "deflate", [min(cut, 3) for cut in cuts]) == plain


@given(st.sampled_from(["gzip", "zstd"]), st.binary(max_size=100), st.integers(1, 5), st.integers(1, 40))
def test_several_members(name, plain, times, size):
    packed = PACK[name](plain) * times
    assert unpack(packed, name, range(0, len(packed), size)) == plain * times


def test_padding_after_the_last_member():
    assert unpack(gzip.compress(b"abc") + b"\0" * 9, "gzip") == b"abc"


@pytest.mark.parametrize("name", ["gzip", "deflate", "br", "zstd"])
def test_a_cut_body_is_an_error(name):
    packed = PACK[name](b"some text that takes a while, " * 9)
    with pytest.raises(UpstreamError, match="cut"):
        unpack(packed[:-3], name)


@given(st.binary(max_size=200), st.sampled_from(["gzip", "deflate", "br", "zstd", "gzip, br", None]), st.integers(1, 9))
def test_nonsense_raises_one_kind_of_error(data, name, size):
    try:
        unpack(data, name, range(0, len(data), size))
    except UpstreamError:
        pass


@pytest.mark.parametrize("name", ["gzip", "deflate", "br", "zstd"])
def test_output_is_bounded(name):
    packed = PACK[name](b" " * (1 << 25))
    decoder = Decoder(name, 10_000)
    with pytest.raises(UpstreamError, match="larger than 10000 bytes"):
        decoder.feed(packed)


@pytest.mark.parametrize("name", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
def test_much_comes_in_pieces(name):
    """What little unpacks to is made step by step, so that others get their turn in between."""
    packed = PACK[name.partition(",")[0]](b" " * (1 << 22))
    packed = gzip.compress(packed) if "," in name else packed
    decoder = Decoder(name, 1 << 23)
    pieces = [*decoder.pieces(packed[:100]), *decoder.pieces(packed[100:])]
    assert b"".join([*pieces, decoder.finish()]) == b" " * (1 << 22)
    assert max(map(len, pieces)) <= STEP


@given(
    st.binary(max_size=9),
    st.integers(STEP - 2, STEP + 2),
    st.integers(1, 3),
    st.sampled_from(["gzip", "deflate", "br"]),
)
@settings(deadline=None)
def test_pieces_at_their_bounds(seed, size, times, name):
    plain = b"{" + (seed * size + b" " * size)[: size * times - 1]
    assert unpack(PACK[name](plain), name, [20]) == plain


def test_much_that_comes_to_nothing_is_bounded_too():
    """The padding behind an inner member can be as large as it likes, and gives nothing."""
    packed = gzip.compress(gzip.compress(b"hello") + b"\0" * (1 << 22))
    decoder = Decoder("gzip, gzip", 1 << 23)
    pieces = [*decoder.pieces(packed)]
    assert (b"".join(pieces), len(pieces) > (1 << 22) // STEP // 2) == (b"hello", True)
    with pytest.raises(UpstreamError, match="larger than 100000 bytes"):
        Decoder("gzip, gzip", 100_000).feed(packed)


@pytest.mark.parametrize("text", [b"", b"a", b"{}", b"\x1f", b"\x28\xb5"])
def test_short_bodies_pass(text):
    for name in (None, "identity", "gzip", "zstd"):
        assert unpack(text, name) == text


def test_an_unknown_encoding():
    with pytest.raises(UpstreamError, match="'compress'"):
        Decoder("compress", 10)
