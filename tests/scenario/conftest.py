from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reef.records.board import Board
from reef.releases import NewPart
from reef.releases.chain import GitChain


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def chain(folder: Path) -> GitChain:
    chain = GitChain(folder / "releases.git")
    chain.open()
    return chain


@pytest.fixture
def board(folder: Path) -> Iterator[Board]:
    board = Board(folder / "records.db")
    yield board
    board.close()


@pytest.fixture
def base() -> NewPart:
    return NewPart("base", {"weights.json": b'{"kind":"base"}'}, {"kind": "base"})
