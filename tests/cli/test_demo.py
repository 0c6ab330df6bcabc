"""The demos' scripted parts: the model does what its instructions say and nothing else, and the proposer reads."""

import json
import re
import subprocess
import sys

import httpx
import openai
import pytest

from reef.cli.demo import tasks
from reef.cli.demo.model import Model, turn
from reef.cli.demo.proposer import propose

RULE = 'Every Python file begins with the line "# Licence: MIT".'
SKILL = 'Every changelog entry ends with the line "Reviewed: docs team".'
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("read", "write")]
LISTED = (
    "<available_skills>\n<skill>\n<name>changelog-entry</name>\n"
    "<description>How a changelog entry is written</description>\n"
    "<location>/home/skills/changelog-entry/SKILL.md</location>\n</skill>\n</available_skills>"
)


def ask(task, system="", tools=(), done=()):
    messages = [{"role": "system", "content": system}, {"role": "user", "content": task.prompt}]
    for number, (name, arguments, result) in enumerate(done):
        function = {"name": name, "arguments": json.dumps(arguments)}
        messages.append({"role": "assistant", "tool_calls": [{"id": f"c{number}", "function": function}]})
        messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": result})
    return turn({"messages": messages, "tools": list(tools)})


def passes(task, text, folder):
    (folder / task.path).write_text(text)
    (folder / "check.py").write_text(tasks.CHECK)
    done = subprocess.run([sys.executable, *task.check.split()[1:]], cwd=folder, capture_output=True, text=True)
    assert (done.returncode == 0) == (tasks.said(task, text) == "") == bool(re.search(task.right, text))
    if done.returncode:
        assert done.stderr.strip() == tasks.said(task, text)
    return done.returncode == 0


@pytest.mark.parametrize("task", [*tasks.LIVE, *tasks.HELD], ids=lambda task: task.path)
@pytest.mark.parametrize(
    ("system", "right"),
    [
        ("", {".txt"}),
        ("Answer politely.\nEvery file has a name that begins with a letter.", {".txt"}),
        (RULE, {".py", ".txt"}),
        (SKILL, {".md", ".txt"}),
        (f"{RULE}\n{SKILL}", {".py", ".md", ".txt"}),
        ('Every Python file begins with the line "# Licence: GPL".', {".txt"}),
        (f'{RULE}\nA Python file never begins with the line "x".', {".py", ".txt"}),
        ('A Python file never begins with the line "# Licence: MIT".', {".txt"}),
    ],
)
def test_the_file_is_as_the_instructions_say(task, system, right, tmp_path):
    assert passes(task, ask(task, system).text, tmp_path) == any(task.path.endswith(end) for end in right)


def test_with_tools_it_reads_the_skill_that_fits_and_writes(tmp_path):
    task = next(task for task in tasks.LIVE if task.path.endswith(".md"))
    first = ask(task, LISTED, TOOLS)
    assert (first.tool, first.arguments) == ("read", {"path": "/home/skills/changelog-entry/SKILL.md"})
    read = ("read", first.arguments, f"---\nname: changelog-entry\n---\n{SKILL}")
    second = ask(task, LISTED, TOOLS, [read])
    assert second.tool == "write"
    assert passes(task, second.arguments["content"], tmp_path)
    third = ask(task, LISTED, TOOLS, [read, ("write", second.arguments, "ok")])
    assert (third.tool, third.text) == (None, f"I wrote {task.path}.")
    other = ask(tasks.LIVE[0], LISTED, TOOLS)
    assert other.tool == "write", "the skill does not fit this one"


def test_a_skill_that_cannot_be_read_teaches_nothing(tmp_path):
    task = next(task for task in tasks.LIVE if task.path.endswith(".md"))
    place = {"path": "/home/skills/changelog-entry/SKILL.md"}
    made = ask(task, LISTED, TOOLS, [("read", place, "no such file")])
    assert not passes(task, made.arguments["content"], tmp_path)


def test_other_questions_get_different_answers():
    assert len({turn({"messages": [{"role": "user", "content": f"What is {n}?"}]}).text for n in range(5)}) == 5
    assert turn({}).text


def test_no_task_of_the_gate_is_one_of_the_users():
    assert not {task.path for task in tasks.LIVE} & {task.path for task in tasks.HELD}
    assert {task.path.rpartition(".")[2] for task in tasks.LIVE} == {"py", "md", "txt"}


def test_the_proposer_reads_what_checks_said_and_nothing_else():
    prompt = "\n".join(
        f'feedback: "{tasks.said(task, "x")}"' for task in tasks.LIVE if tasks.said(task, "x")
    )  # fmt: skip
    made = json.loads(propose(prompt))
    assert [(one["op"], one["kind"], one["config"]["text"]) for one in made["mutations"]] == [
        ("create", "rules", RULE), ("create", "skill", SKILL),
    ]  # fmt: skip
    assert json.loads(propose("the answer was wrong"))["mutations"] == []
    odd = json.loads(propose('every shell script must begin with the line "set -e"'))
    assert odd["mutations"][0]["config"]["text"] == 'Every shell script begins with the line "set -e".'


def test_it_speaks_the_dialect_streamed_and_not():
    task = tasks.LIVE[0]
    with Model() as model:
        assert httpx.get(f"{model.url}/models").json()["data"][0]["id"] == "scripted-1"
        client = openai.OpenAI(base_url=model.url, api_key="none")
        messages = [{"role": "user", "content": task.prompt}]
        said = client.chat.completions.create(model="x", messages=messages)
        assert said.choices[0].message.content.startswith("def add(a, b):")
        assert said.usage.total_tokens == said.usage.prompt_tokens + said.usage.completion_tokens
        stream = client.chat.completions.create(
            model="x", messages=messages, tools=TOOLS, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        call = chunks[0].choices[0].delta.tool_calls[0]
        assert json.loads(call.function.arguments)["path"] == task.path
        assert chunks[1].choices[0].finish_reason == "tool_calls"
        assert chunks[-1].usage.completion_tokens > 0
