"""Records and reports as bytes and back, exactly; and what makes two of them the same.

Knows: the nouns' fields, compact token arrays, and zstd with a small frozen dictionary of what rows repeat.
Does not know: SQL, blobs, or which record a prompt continues.

- Packed bytes begin with their form: 0 plain msgpack or text, 1 zstd with DICTIONARY. A record's meta has two more:
  2 the times and then fields by position, 3 the same with the fields under zstd. A form is never redefined.
- Content is every field except the times and the owner, which a retry may not repeat.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import json
import math
import struct
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import zstandard

from reef.core.errors import InputError, StoreError
from reef.core.nouns import Choice, Purpose, Record, Report, Sampling, Span, Status, Timing, Usage
from reef.core.text import deeper

T = TypeVar("T", Record, Report)

DICTIONARY = b"".join(
    (
        b"\xa4text\xa0\xadfinish_reason\xc0\xaaoutput_ids\xc0\xa8logprobs\xc0\xa5spans\x90\xa7message\xc0\xb7tool_calls",
        b"\x83\xaarelease_id\xd9(\xa5start\x00\xa3end\x10\x8a\xa2id\xa8scenario\xaareferences\x91\xaacreated_at\xcbA\xda",
        b"\xa5score\xcb?\xf0\x00\x00\x00\x00\x00\x00\xa7metrics\x80\xabper_receipt\x80\xa8feedback\xc0\xa6choice\xc0",
        b"\xaddemonstration\xc0\xa8metadata\xc0correct wrong answer too long\xa6length\xa7aborted\xacdisconnected",
        b'{"type":"function","function":{"name":"","description":"","parameters":{"type":"object","properties":{"',
        b'":{"type":"string","description":""}},"required":["path"],"additionalProperties":false}}}',
        b'{"type":"image_url","image_url":{"url":"data:image/png;base64,"}}{"type":"tool_use","id":"toolu_","name":"',
        b'"input":{"command":"","file_path":"/"}},{"type":"tool_result","tool_use_id":"toolu_","is_error":false,',
        b'"tool_calls":[{"id":"call_","type":"function","function":{"name":"","arguments":"{\\"',
        b'{"role":"tool","tool_call_id":"call_","content":"","stream":true,"stream_options":{"include_usage":true},',
        b'"top_p":1.0,"seed":0,"n":1,"stop":[],"max_completion_tokens":',
        b'{"role": "assistant", "content": "{"role": "user", "content": "{"role": "system", "content": "',
        b'"cache_control":{"type":"ephemeral"}},{"role":"assistant","content":[{"type":"text","text":"',
        b'{"model":"smollm2-135m","temperature":1.0,"max_tokens":128,"messages":[{"role":"system","content":"',
        b'You are a helpful assistant. What is the of the "}],{"role":"assistant","content":"',
        b'{"role":"user","content":"',
        b"\xde\x00\x16\xa2id\xa0\xa8scenario\xa0\xaarelease_id\xa0\xa7purpose\xaaevaluation\xa7purpose\xa4live",
        b"\xa7dialect\xa4chat\xa6status\xabinterrupted\xa6status\xa4open\xa6status\xa8complete\xa7request\xc4\x00",
        b"\xa6timing\x84\xabreceived_at\xcbA\xda\xa6queued\xcb?\xa5first\xcb?\xa4last\xcb?\xa8rendered\xc0\xa7choices",
        b"\x91\x87\xa5index\x00\xa4text\xa0\xadfinish_reason\xa4stop\xaaoutput_ids\xc0\xa8logprobs\xc0\xa5spans\x91",
        b"\x83\xaarelease_id\xa0\xa5start\x00\xa3end\x10\xa7message\xc0\xa5usage\xc0\xa5usage\x82\xadprompt_tokens",
        b"\x10\xb1completion_tokens\x10\xaaprompt_ids\xc0\xa8sampling\x86\xabtemperature\xcb?\xf0\x00\x00\x00\x00\x00",
        b"\x00\xa5top_p\xcb?\xf0\x00\x00\x00\x00\x00\x00\xa5top_k\x00\xaamax_tokens\xc0\xa4seed\xc0\xa4stop\x90",
        b"\xabmodel_asked\xacsmollm2-135m\xaemodel_answered\xacsmollm2-135m\xa7session\xc0\xa4tags\x80\xa6client\xc0",
        b"\xabupstream_id\xc0\xa5error\xc0\xabuntrainable\xc0\xa5owner\xc0",
    )
)

_dictionary = zstandard.ZstdCompressionDict(DICTIONARY, dict_type=zstandard.DICT_TYPE_RAWCONTENT)
_parameters = zstandard.ZstdCompressionParameters.from_level(3, write_dict_id=False, write_content_size=True)
_local = threading.local()
_encoder = msgspec.msgpack.Encoder(order="deterministic")
_times = struct.Struct("<4d")
_UNKNOWN = math.nan  # a time that was not measured
_UNMEASURED = Timing(0.0)
DEEPEST = 900  # levels of a message; a thousand are too many to read
PLAIN = 512  # fewer bytes are not worth the microseconds of compressing them


def pack(data: bytes) -> bytes:
    """Compress when that makes it shorter."""
    if len(data) >= 24:
        packed = _compress(data)
        if len(packed) < len(data):
            return b"\x01" + packed
    return b"\x00" + data


def unpack(data: bytes) -> bytes:
    if data[:1] == b"\x00":
        return data[1:]
    if data[:1] != b"\x01":
        raise StoreError("a row has a form this version does not know; install the Reef version that wrote it")
    return _decompress(data[1:])


def _compress(data: bytes) -> bytes:
    if (compressor := getattr(_local, "compressor", None)) is None:
        compressor = zstandard.ZstdCompressor(dict_data=_dictionary, compression_params=_parameters)
        _local.compressor = compressor
    packed: bytes = compressor.compress(data)
    return packed


def _decompress(data: bytes) -> bytes:
    if (decompressor := getattr(_local, "decompressor", None)) is None:
        decompressor = _local.decompressor = zstandard.ZstdDecompressor(dict_data=_dictionary)
    whole: bytes = decompressor.decompress(data)
    return whole


def encode(value: Any) -> bytes:
    """Any noun or JSON value as msgpack; as JSON where msgpack has no form (lone surrogates, integers over 64 bits)."""
    try:
        return b"m" + _encoder.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return b"j" + json.dumps(msgspec.to_builtins(value), sort_keys=True).encode()
    except (RecursionError, TypeError) as error:
        raise InputError(f"a value cannot be stored: {error}") from None


def decode(data: bytes, kind: type[T]) -> T:
    if data[:1] == b"m":
        return msgspec.msgpack.decode(memoryview(data)[1:], type=kind)
    return msgspec.convert(json.loads(data[1:]), kind)


def digest(*parts: bytes) -> bytes:
    """16 bytes that tell one content from another."""
    whole = hashlib.blake2b(digest_size=16)
    for part in parts:
        whole.update(len(part).to_bytes(8))
        whole.update(part)
    return whole.digest()


def content(entry: Record | Report) -> bytes:
    """The digest by which a retry is known as the same: of everything but times and owner."""
    if isinstance(entry, Record):
        bare = dataclasses.replace(entry, timing=_UNMEASURED, owner=None, request=b"", rendered=None, reply=None)
        others = (b"" if other is None else b"r" + other for other in (entry.rendered, entry.reply))
        return digest(encode(bare), entry.request, *others)
    alike = dataclasses.replace(  # 1 and 1.0 are the same score
        entry,
        created_at=0.0,
        score=None if entry.score is None else float(entry.score),
        metrics={name: float(value) for name, value in entry.metrics.items()},
        per_receipt={name: float(value) for name, value in entry.per_receipt.items()},
    )
    return digest(encode(alike))


def opening(record: Record, meta: bytes) -> bytes:
    """The digest by which the retry of an opening is known, also when the record is closed. `meta`: its packed meta."""
    timeless = meta[:1] + meta[1 + _times.size :] if meta[0] in (2, 3) else content(record)
    names = (record.scenario, record.purpose, record.release_id, record.session, column(record.answer_id))
    named = encode(names)
    return b"\x02" + digest(
        timeless,
        named,
        record.request,
        *(b"" if each is None else b"r" + each for each in (record.rendered, record.reply)),
    )


def column(text: str | None) -> str | None:
    """The text when a column can hold it; a provider may send what UTF-8 cannot say, and then it stays in the meta."""
    if text is not None and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return None
    return text


class _Fields(msgspec.Struct, array_like=True, frozen=True):
    """A record's fields by position. One may be added at the end, with a default; none may be changed."""

    dialect: str
    answers: list[tuple[Any, ...]]  # index, text, finish_reason; and, unless it is only text: ids?, logprobs?, …
    usage: tuple[int, int] | None
    prompted: bool  # whether there are prompt ids
    sampling: tuple[float, float, int, int | None, int | None, tuple[str, ...]] | None
    model_asked: str | None
    model_answered: str | None
    tags: dict[str, str] | None
    client: str | None
    upstream_id: str | None
    answer_id: str | None  # only what its column cannot hold
    error: str | None
    untrainable: str | None
    legal: str | None = None  # of the sampling


_fields = msgspec.msgpack.Decoder(_Fields)


def pack_meta(record: Record) -> bytes:
    """What has no column of its own, in form 2 or 3; in the older form what msgpack cannot say."""
    timing, usage, drawn = record.timing, record.usage, record.sampling
    try:
        fields = _encoder.encode(
            (
                record.dialect,
                [_answer(choice) for choice in record.choices],
                None if usage is None else (usage.prompt_tokens, usage.completion_tokens),
                record.prompt_ids is not None,
                drawn and (drawn.temperature, drawn.top_p, drawn.top_k, drawn.max_tokens, drawn.seed, drawn.stop),
                record.model_asked,
                record.model_answered,
                record.tags or None,
                record.client,
                record.upstream_id,
                record.answer_id if column(record.answer_id) is None else None,
                record.error,
                record.untrainable,
                *(() if drawn is None or drawn.legal is None else (drawn.legal,)),
            )
        )
        times = _times.pack(
            timing.received_at,
            _UNKNOWN if timing.queued is None else timing.queued,
            _UNKNOWN if timing.first is None else timing.first,
            _UNKNOWN if timing.last is None else timing.last,
        )
    except (UnicodeEncodeError, OverflowError, RecursionError, TypeError, struct.error):
        _check_depth(record)
        return pack(encode(_strip(record)))
    if len(fields) > DEEPEST:  # a level is a byte at least
        _check_depth(record)
    if len(fields) >= PLAIN:
        packed = _compress(fields)
        if len(packed) < len(fields):
            return b"\x03" + times + packed
    return b"\x02" + times + fields


def _check_depth(record: Record) -> None:
    if any(deeper(choice.message, DEEPEST) for choice in record.choices):
        raise InputError(f"a message is nested deeper than {DEEPEST}, which could not be read again")


def unpack_meta(data: bytes, status: Status, purpose: Purpose) -> Record:
    """A record that lacks what has columns of its own."""
    form = data[0]
    if form not in (2, 3):
        return decode(unpack(data), Record)
    received, *waits = _times.unpack_from(data, 1)
    rest = data[1 + _times.size :]
    fields = _fields.decode(_decompress(rest) if form == 3 else rest)
    return Record(
        id="",
        scenario="",
        release_id="",
        purpose=purpose,
        dialect=fields.dialect,
        status=status,
        request=b"",
        timing=Timing(received, *(None if math.isnan(wait) else wait for wait in waits)),
        choices=tuple(_choice(*answer) for answer in fields.answers),
        usage=Usage(*fields.usage) if fields.usage else None,
        prompt_ids=() if fields.prompted else None,
        sampling=Sampling(*fields.sampling, fields.legal) if fields.sampling else None,
        model_asked=fields.model_asked,
        model_answered=fields.model_answered,
        tags=fields.tags or {},
        client=fields.client,
        upstream_id=fields.upstream_id,
        answer_id=fields.answer_id,
        error=fields.error,
        untrainable=fields.untrainable,
    )


def _answer(choice: Choice) -> tuple[Any, ...]:
    ids, logprobs = choice.output_ids is not None, choice.logprobs is not None
    short = (choice.index, choice.text, choice.finish_reason)
    if not (ids or logprobs or choice.spans) and choice.message is None:
        return short
    spans = [(span.release_id, span.start, span.end) for span in choice.spans]
    return (*short, ids, logprobs, spans, choice.message)


def _choice(
    index: int,
    text: str,
    finish: str | None,
    ids: bool = False,
    logprobs: bool = False,
    spans: Sequence[tuple[str, int, int]] = (),
    message: Any = None,
) -> Choice:
    drawn = tuple(Span(*span) for span in spans)
    return Choice(index, text, finish, () if ids else None, () if logprobs else None, drawn, message)


def _strip(record: Record) -> Record:
    """The record without what has columns of its own."""
    bare = tuple(
        dataclasses.replace(
            choice,
            output_ids=None if choice.output_ids is None else (),
            logprobs=None if choice.logprobs is None else (),
        )
        for choice in record.choices
    )
    return dataclasses.replace(
        record,
        id="",
        scenario="",
        release_id="",
        session=None,
        owner=None,
        request=b"",
        rendered=None,
        reply=None,
        answer_id=record.answer_id if column(record.answer_id) is None else None,
        prompt_ids=None if record.prompt_ids is None else (),
        choices=bare,
    )


def literal(whole: bytes) -> bytes:
    """A short body as a template that is only itself, in form 0."""
    return b"\x00" + _encoder.encode((whole,))


def pack_tokens(suffix: Sequence[int], choices: Sequence[Choice]) -> bytes:
    """The prompt's own ids, then each choice's ids and log-probs."""
    columns = [pack_ids(suffix)]
    for choice in choices:
        columns.append(b"" if choice.output_ids is None else pack_ids(choice.output_ids))
        columns.append(b"" if choice.logprobs is None else pack_floats(choice.logprobs))
    return pack(msgspec.msgpack.encode(columns))


def unpack_tokens(data: bytes) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[float, ...]]]]:
    """The prompt's own ids, then ids and log-probs of each choice; what is not there is empty."""
    suffix, *columns = msgspec.msgpack.decode(unpack(data), type=list[bytes])
    pairs = zip(columns[::2], columns[1::2], strict=True)
    return _unpack_ids(suffix), [(_unpack_ids(ids), _unpack_floats(logprobs)) for ids, logprobs in pairs]


def pack_ids(values: Sequence[int]) -> bytes:
    top = max(values, default=0)
    form = "H" if top < 1 << 16 else "I" if top < 1 << 32 else "Q"
    try:
        return form.encode() + array.array(form, values).tobytes()
    except (OverflowError, TypeError):
        raise InputError("token ids are integers from 0 to 2**64 - 1") from None


def pack_floats(values: Sequence[float]) -> bytes:
    """4 bytes each when every value is a float32 (engines give those), else 8."""
    exact = array.array("d", values)
    short = array.array("f", values)
    return b"f" + short.tobytes() if array.array("d", short) == exact else b"d" + exact.tobytes()


def _unpack_ids(column: bytes) -> tuple[int, ...]:
    return tuple(array.array(chr(column[0]), column[1:]).tolist()) if column else ()


def _unpack_floats(column: bytes) -> tuple[float, ...]:
    return tuple(array.array(chr(column[0]), column[1:]).tolist()) if column else ()
