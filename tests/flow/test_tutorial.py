"""docs/tutorial.md as it is read: its files are written down, served, and learnt from."""

import ast
import re
from pathlib import Path

import httpx
import pytest

from bench.kit.served import served

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"


def files() -> dict[str, str]:
    """The named code blocks of the page."""
    return dict(re.findall(r"^`([\w.]+)`:\n```\w+\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))


def test_it_is_short() -> None:
    """Two files of less than seventy lines of code together: without blank lines, imports and docstrings."""
    count = 0
    for name, text in files().items():
        if name.endswith(".py"):
            tree = ast.parse(text)
            skipped: set[int] = set()
            for node in ast.walk(tree):
                bare = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
                if bare or isinstance(node, ast.Import | ast.ImportFrom):
                    skipped |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            count += sum(bool(line.strip()) for at, line in enumerate(text.splitlines(), 1) if at not in skipped)
    assert 40 < count < 70


@pytest.mark.model
@pytest.mark.timeout(300)
async def test_it_learns_both_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = files()
    assert set(made) == {"kept.py", "kept_loss.py", "reef.yaml"}
    for name in ("kept.py", "kept_loss.py"):
        (tmp_path / name).write_text(made[name])
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)  # where a recipe of one's own is found
    config = made["reef.yaml"].replace("{", "{{").replace("}", "}}")
    config = config.replace("reef:\n", "reef:\n  port: {port}\n  state_dir: {state}\n")
    with served(tmp_path / "run" / "state", config) as (url, token):
        head = {"authorization": f"Bearer {token}"}
        async with httpx.AsyncClient(base_url=url, headers=head, timeout=120) as client:
            for kept in (0.0, 0.25, 0.5, 1.0):
                body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": "Say hello."}]}
                answer = await client.post("/v1/chat/completions", json=body)
                receipt = answer.headers["x-reef-agent-record-id"]
                report = {"references": [receipt], "metrics": {"kept": kept}}
                (await client.post("/reef/report", json=report)).raise_for_status()
            parts = await learnt(client)
            page = (await client.get("/reef/scenarios/default/releases")).json()["releases"]
    assert parts["weights"]["metrics"]["kept"] == pytest.approx(0.4375)
    assert parts["weights"]["trained"] == parts["harness"]["trained"] == 4
    head_parts = page[0]["parts"]
    assert (head_parts["weights"]["kind"], head_parts["harness"]["kind"]) == ("lora", "tree")
    assert [release["operation"] for release in page] == ["publish", "publish", "create"]


async def learnt(client: httpx.AsyncClient) -> dict[str, dict[str, object]]:
    """Both parts' words once each has been decided on."""
    import asyncio

    for _ in range(1200):
        shown = (await client.get("/reef/status")).json()["scenarios"]["default"].get("learner") or {}
        parts = shown.get("parts") or {}
        if len(parts) == 2 and all(part["last"] and part["state"] == "waiting" for part in parts.values()):
            return dict(parts)
        await asyncio.sleep(0.1)
    raise AssertionError("not learnt in two minutes")
