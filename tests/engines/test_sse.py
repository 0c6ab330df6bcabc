from hypothesis import given, settings
from hypothesis import strategies as st

from reef.engines.sse import Events

ends = st.sampled_from([b"\n", b"\r", b"\r\n"])
lines = st.one_of(
    st.text(max_size=12).map(lambda text: b"data: " + text.encode("utf-8", "replace")),
    st.text(max_size=12).map(lambda text: b"data:" + text.encode("utf-8", "replace")),
    st.sampled_from(
        [b"", b"", b": a comment", b"event: ping", b"id: 3", b"data", b"data: [DONE]", b"\xef\xbb\xbfdata: x"]
    ),
    st.binary(max_size=8),
)
streams = st.lists(st.tuples(lines, ends), max_size=20).map(lambda parts: b"".join(line + end for line, end in parts))


def parse(pieces):
    events = Events()
    found = [event for piece in pieces for event in events.feed(piece)]
    rest = events.rest
    last = events.finish()
    return found + ([last] if last else []), rest


@settings(deadline=None)
@given(streams, st.data())
def test_any_cuts_give_the_same_events(data, draw):
    """case 6: bytes cut anywhere are the same events."""
    whole, _ = parse([data])
    one_by_one, _ = parse([data[place : place + 1] for place in range(len(data))])
    cuts = sorted(draw.draw(st.lists(st.integers(0, len(data)), max_size=5)))
    pieces = [data[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    in_pieces, _ = parse(pieces)
    assert whole == one_by_one == in_pieces
    assert b"".join(event.raw for event in whole) == data


def test_the_format():
    """case 6: `data:` without a space, several lines, comments, every line end."""
    data = (
        b"\xef\xbb\xbfdata: one\r\n\r\n"
        b": comment\ndata:two\ndata:  three\n\n"
        b"event: named\rdata: four\r\r"
        b"id: 7\n\n"
        b"data\n\n"
        b"data: unfinished"
    )
    events = Events()
    found = events.feed(data)
    assert [(event.name, event.data) for event in found] == [
        (None, "one"),
        (None, "two\n three"),
        ("named", "four"),
        (None, None),
        (None, ""),
    ]
    assert events.rest == b"data: unfinished"
    last = events.finish()
    assert last is not None
    assert (last.raw, last.data) == (b"data: unfinished", "unfinished")
    assert events.finish() is None
