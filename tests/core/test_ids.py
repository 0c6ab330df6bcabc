"""Ids: receipts are UUIDv7, references parse in every form a client may hold, scenario names are safe as branches."""

import os
import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reef.core.ids import is_scenario, new_receipt, new_report, parse_receipt


def test_receipt_is_a_uuid_of_version_7():
    seen = {new_receipt() for _ in range(1000)}
    assert len(seen) == 1000
    for receipt in seen:
        value = uuid.UUID(hex=receipt)
        assert (value.version, value.variant) == (7, uuid.RFC_4122)
        assert value.hex == receipt


@pytest.mark.parametrize("form", ["{}", "chatcmpl-{}", "resp_{}", "msg_{}"])
def test_reference_forms(form):
    receipt = new_receipt()
    assert parse_receipt(form.format(receipt)) == receipt


@pytest.mark.parametrize(
    "wrong", ["", "abc", "rep_" + "0" * 32, "0" * 31, "0" * 33, "G" * 32, "A" * 32, "x-" + "0" * 32]
)
def test_other_strings_are_no_reference(wrong):
    assert parse_receipt(wrong) is None
    assert parse_receipt(new_report()) is None


@given(st.text(max_size=70))
def test_a_scenario_name_is_a_plain_branch_name(name):
    if is_scenario(name):
        assert name[0].isalnum()
        assert ".." not in name
        assert not name.endswith((".lock", ".", "/"))
        assert set(name) <= set("abcdefghijklmnopqrstuvwxyz0123456789._-")


def test_scenario_examples():
    assert all(map(is_scenario, ["default", "a", "a-b.c_d", "0" * 63]))
    assert not any(map(is_scenario, ["", "A", "-a", ".a", "a..b", "a.lock", "a/b", "0" * 64, "a\n"]))


def test_a_forked_child_makes_receipts_of_its_own():
    new_receipt()
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        os.write(writer, "".join(new_receipt() for _ in range(50)).encode())
        os._exit(0)
    os.waitpid(child, 0)
    text = os.read(reader, 50 * 32).decode()
    theirs = {text[place + 13 : place + 32] for place in range(0, len(text), 32)}  # without the time
    ours = {new_receipt()[13:] for _ in range(50)}
    assert len(theirs) == 50
    assert not theirs & ours
