"""Seats and shared numbers: the lowest free one, free again when its process is gone, however it went."""

import multiprocessing
import os

import pytest

from reef.core.errors import StoreError
from reef.gateway.seat import Seat, Shared, locked


def sit(folder, out):
    seat = Seat(folder, 4)
    out.put(seat.number)
    out.close()
    out.join_thread()
    os.kill(os.getpid(), 9)


def test_the_lowest_free_seat_is_taken_and_given_back(tmp_path):
    first, second = Seat(tmp_path / "s", 2), Seat(tmp_path / "s", 2)
    assert (first.number, second.number) == (0, 1)
    with pytest.raises(StoreError, match=r"reef\.workers"):
        Seat(tmp_path / "s", 2)
    assert first.taken(1)
    assert second.taken(0)
    first.close()
    assert not second.taken(0)
    assert Seat(tmp_path / "s", 2).number == 0


def test_a_killed_process_leaves_its_seat(tmp_path):
    mine = Seat(tmp_path / "s", 4)
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    worker = context.Process(target=sit, args=(tmp_path / "s", out))
    worker.start()
    assert out.get(timeout=30) == 1
    worker.join()
    assert not mine.taken(1)
    assert Seat(tmp_path / "s", 4).number == 1


def test_what_one_writes_the_other_reads(tmp_path):
    one, two = Shared(tmp_path / "x", 100), Shared(tmp_path / "x", 100)
    with one:
        one.view[99] = 1.5
    assert two.view[99] == 1.5
    one.close()
    one.close()
    assert two.view[99] == 1.5
    two.close()


def test_a_locked_file_grows(tmp_path):
    for word in (b"a\n", b"b\n"):
        with locked(tmp_path / "x") as fd:
            os.write(fd, word)
    assert (tmp_path / "x").read_bytes() == b"a\nb\n"


def test_its_pages_are_on_disk_from_the_beginning(tmp_path):
    (tmp_path / "x").write_bytes(b"")
    os.truncate(tmp_path / "x", 1 << 20)  # as an earlier version left it
    shared = Shared(tmp_path / "x", 1 << 17)
    assert os.stat(tmp_path / "x").st_blocks * 512 >= 1 << 20
    assert set(shared.view[:9]) == {0.0}
    shared.close()


def test_a_full_disk_is_an_error_at_the_start(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError, match=r"x cannot get its 800 bytes of disk \(No space left on device\); free some"):
        Shared(tmp_path / "x", 100)
