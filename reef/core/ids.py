"""Ids, and what else must be plain: names and addresses.

A receipt is a bare lower-case UUIDv7 (RFC 9562) in hex; a report's id is `rep_` and such a hex.

Ids carry a time for people who read them; nothing in Reef orders or expires by it (the event log's sequence does that).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

_RECEIPT = re.compile(r"[0-9a-f]{32}")
_WRAPPED = re.compile(r"(?:chatcmpl-|resp_|msg_)([0-9a-f]{32})")
_SCENARIO = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
SCENARIO_RULE = "a scenario's name is 1 to 63 of a-z 0-9 . _ - and begins with a letter or digit"
"""What a person is told whose scenario's name is none."""
AUTHORITY = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]{0,252}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?")
"""A host, with or without a port."""
_ADDRESS = re.compile(rf"https?://{AUTHORITY.pattern}(?:/[A-Za-z0-9._~-]+)*/?")


_BLOCK = 4000
_chance: Iterator[bytes] = iter(())  # random bytes, 10 at a time: one system call for 400 receipts


def _forget() -> None:
    """A forked child must not hand out its parent's receipts."""
    global _chance
    _chance = iter(())


os.register_at_fork(after_in_child=_forget)


def _ten() -> bytes:
    global _chance
    while (found := next(_chance, None)) is None:
        block = os.urandom(_BLOCK)
        _chance = iter([block[place : place + 10] for place in range(0, _BLOCK, 10)])
    return found


def new_receipt() -> str:
    """A fresh receipt: 32 hex digits, 48 bits of milliseconds, version 7, 74 random bits."""
    value = int(time.time() * 1000) << 80 | int.from_bytes(_ten())
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    return f"{value:032x}"


def new_report() -> str:
    return "rep_" + new_receipt()


def parse_receipt(reference: str) -> str | None:
    """The receipt inside a reference (bare, or a response id derived from it), or None when it is not one."""
    if _RECEIPT.fullmatch(reference):
        return reference
    found = _WRAPPED.fullmatch(reference)
    return found.group(1) if found else None


def is_scenario(name: str) -> bool:
    """Whether a name may name a scenario. `..` and a trailing `.lock` or `.` are refused: names become git branches."""
    return bool(_SCENARIO.fullmatch(name)) and ".." not in name and not name.endswith((".lock", "."))


def is_address(url: str) -> bool:
    """Whether an address is plain enough to stand in files and scripts: http(s)://host[:port][/path]."""
    return bool(_ADDRESS.fullmatch(url))
