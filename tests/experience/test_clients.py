"""Sessions of agent clients, as each of them names and resends what it says: shortened bodies of the same structure."""

import json

from reef.gateway.session import session_of, tags_of
from tests.experience.talk import TOOLS, calling, chat, result

EPHEMERAL = {"type": "ephemeral"}


async def send(world, body, said, headers=None, dialect="chat", **fields):
    given = headers or {}
    session, tags = session_of(given, body), tags_of(given)
    client = given.get("user-agent", "client/1")
    return await world.ask(body, said, dialect=dialect, session=session, tags=tags, client=client, **fields)


# --- Claude Code (messages) -------------------------------------------------------------------------------------------

CODE = {"user-agent": "claude-cli/2.1.332 (external, cli)", "x-claude-code-session-id": "0b3f-cc-session"}
BASH = [{"name": "Bash", "input_schema": {"type": "object"}}, {"name": "Task", "input_schema": {"type": "object"}}]


def text(words, marked=False):
    return {"type": "text", "text": words, **({"cache_control": EPHEMERAL} if marked else {})}


def messages(*turns, tools=BASH, system="You are an agent for software."):
    """The newest user's turn is a list of blocks with the cache's mark; in later requests it is a plain string."""
    said = []
    for number, (role, content) in enumerate(turns):
        newest = number == len(turns) - 1
        if isinstance(content, str) and newest:
            content = [text(content, marked=True)]
        elif isinstance(content, list):
            last = {**content[-1], "cache_control": EPHEMERAL} if newest else content[-1]
            content = [*content[:-1], last]
        said.append({"role": role, "content": content})
    blocks = [text("x-anthropic-billing-header: cc_version=2.1;"), text(system, marked=True)]
    more = {"tools": [*tools[:-1], {**tools[-1], "cache_control": EPHEMERAL}]} if tools else {}
    user = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "0b3f-cc-session"})
    return {
        "model": "m",
        "messages": said,
        "system": blocks,
        **more,
        "metadata": {"user_id": user},
        "max_tokens": 32000,
        "stream": True,
    }


def use(known, name, given):
    return {"type": "tool_use", "id": known, "name": name, "input": given}


def done(known, words, **more):
    return {"type": "tool_result", "tool_use_id": known, "content": words, **more}


def message(*blocks, reason="tool_use"):
    return {"type": "message", "role": "assistant", "content": list(blocks), "stop_reason": reason}


async def test_claude_code(world):
    reminder = "<system-reminder>\nContents of CLAUDE.md: be kind\n</system-reminder>"
    start = [("user", [text(reminder), text("Create hello.txt")]), ("system", "Skills: none. Today is Monday.")]
    call = use("toolu_01", "Bash", {"command": "echo hi > hello.txt", "timeout": 5})
    thought = {"type": "thinking", "thinking": "hm", "signature": "sig"}
    first = await send(world, messages(*start), message(thought, text("I will."), call), CODE, "messages")

    sub = {**CODE, "x-claude-code-agent-id": "a7"}
    task = messages(("user", "Look for files"), system="You are a searching agent.", tools=BASH[:1])
    inner = await send(world, task, message(use("toolu_s1", "Bash", {"command": "ls"})), sub, "messages")
    more = [("user", "Look for files"), ("assistant", [use("toolu_s1", "Bash", {"command": "ls"})])]
    body = messages(*more, ("user", [done("toolu_s1", "a.txt")]), system="You are a searching agent.", tools=BASH[:1])
    inner_then = await send(world, body, message(text("a.txt"), reason="end_turn"), sub, "messages")

    back = [thought, text("I will."), use("toolu_01", "Bash", {"timeout": 5, "command": "echo hi > hello.txt"})]
    went = [*start, ("assistant", back), ("user", [done("toolu_01", "", is_error=False), text(reminder)])]
    second = await send(world, messages(*went), message(text("Done."), reason="end_turn"), CODE, "messages")
    again = [*went, ("assistant", [text("Done.")]), ("user", "Thanks, but in /tmp")]
    third = await send(world, messages(*again), message(text("Oh."), reason="end_turn"), CODE, "messages")

    await world.read()
    places = {each: world.sessions.place(each) for each in (first, second, third, inner, inner_then)}
    assert {place.session for place in places.values()} == {"0b3f-cc-session"}
    assert [(place.branch, place.turn, place.kind) for place in places.values()] == [
        ("", 0, "main"),
        ("", 1, "main"),
        ("", 2, "main"),
        ("a7", 0, "main"),
        ("a7", 1, "main"),
    ]
    assert world.sessions.path([first, second, third])
    assert world.sessions.path([inner, inner_then])
    pair = await world.pair(second)
    assert (pair.answer, pair.role, pair.text) == (first, "tool", "")
    pair = await world.pair(third)
    assert (pair.answer, pair.role, pair.text) == (second, "user", "Thanks, but in /tmp")
    assert await world.pair(inner_then) is None
    assert places[inner_then].note == "a sub-agent's turn"


async def test_claude_code_falls_back_to_no_stream_and_retries(world):
    ask = messages(("user", "hi"))
    cut = await send(world, ask, message(), CODE, "messages", status="failed", choices=())
    whole = await send(world, {**ask, "stream": False}, message(text("Hi."), reason="end_turn"), CODE, "messages")
    assert [(await world.place(each)).kind for each in (cut, whole)] == ["retry", "main"]


# --- codex (responses) ------------------------------------------------------------------------------------------------


def codex(thread="t-main", turn="turn-1", root="turn-1", agent=None):
    told = {"session_id": "t-main", "thread_id": thread, "turn_id": turn, "root_turn_id": root}
    told |= {"agent_name": agent} if agent else {}
    return {
        "user-agent": "codex_exec/0.171.0",
        "session-id": "t-main",
        "thread-id": thread,
        "x-codex-turn-metadata": json.dumps(told),
    }


def items(*more):
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "You are codex."}]}
    user = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Create hello.txt"}]}
    tools = [{"type": "function", "name": "exec_command"}, {"type": "web_search"}]
    given = {"stream": True, "store": False, "prompt_cache_key": "t-main", "include": ["reasoning.encrypted_content"]}
    return {"model": "m", "input": [developer, user, *more], "tools": tools, **given}


def response(*output):
    return {"object": "response", "id": "resp_x", "status": "completed", "output": list(output)}


def spoken(words):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": words}]}


async def test_codex(world):
    thought = {"type": "reasoning", "summary": [], "encrypted_content": "gAAA"}
    call = {"type": "function_call", "call_id": "call_1", "name": "exec_command", "arguments": '{"cmd":"touch a"}'}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "exit code 0"}
    first = await send(world, items(), response(thought, spoken("Ok."), call), codex(), "responses")
    sub = await send(
        world, items(spoken("x")), response(spoken("sub")), codex("t-sub", "turn-9", "turn-1", "helper"), "responses"
    )
    resent = [thought, spoken("Ok."), {**call, "arguments": '{"cmd": "touch a"}'}]
    second = await send(world, items(*resent, output), response(spoken("Done.")), codex(), "responses")
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "No, b"}]}
    later = items(*resent, output, spoken("Done."), asked)
    third = await send(world, later, response(spoken("Oh.")), codex(turn="turn-2", root="turn-2"), "responses")
    await world.read()
    assert world.sessions.path([first, second, third])
    assert [(await world.pair(each)).role for each in (second, third)] == ["tool", "user"]
    assert (await world.pair(second)).text == "exit code 0"
    place = await world.place(sub)
    assert (place.session, place.branch, place.kind) == ("t-main", "t-sub", "main")


async def test_responses_that_name_the_answer_before(world):
    first = await send(world, {"input": "u1"}, response(spoken("a1")), None, "responses")
    other = {"input": "u2", "previous_response_id": f"resp_{first}"}
    second = await send(world, other, response(spoken("a2")), None, "responses")
    third = {"input": "u3", "previous_response_id": f"resp_{second}"}
    third = await send(world, third, response(spoken("a3")), None, "responses")
    whole = [{"role": "user", "content": "u1"}, spoken("a1"), {"role": "user", "content": "u2"}, spoken("a2")]
    forked = {"input": [*whole, {"role": "user", "content": "u3, said anew"}]}
    forked = await send(world, forked, response(spoken("x")), None, "responses")
    await world.read()
    assert world.sessions.path([first, second, third])
    assert world.sessions.path([first, second, forked])
    assert (await world.pair(third)).text == "u3"
    unknown = await send(
        world, {"input": "u", "previous_response_id": "resp_unknown"}, response(spoken("x")), None, "responses"
    )
    assert (await world.place(unknown)).parent is None


# --- opencode (chat) --------------------------------------------------------------------------------------------------


async def test_opencode(world):
    agent = {"user-agent": "opencode/1.18.33", "x-session-id": "ses_1", "x-session-affinity": "ses_1"}
    naming = {**chat("Generate a title:", {"role": "user", "content": '"Create hello.txt"'}, system="You name chats.")}
    code = {"system": "You are opencode.", "tools": TOOLS, "tool_choice": "auto"}
    title = await send(world, naming, "Making a file", agent, at=0, took=1)
    call = calling(("c1", "write", '{"filePath":"hello.txt","content":"hi"}'))
    first = await send(world, chat('"Create hello.txt"', **code), call, agent, at=0, took=3)
    resent = calling(("c1", "write", '{"content":"hi","filePath":"hello.txt"}'), text="")
    second = await send(world, chat('"Create hello.txt"', resent, result("c1", "ok"), **code), "Done.", agent)
    inner = {**agent, "x-session-id": "ses_2", "x-parent-session-id": "ses_1"}
    sub = await send(world, chat("Search", system="You search.", tools=TOOLS), "found", inner)
    deeper = {**agent, "x-session-id": "ses_3", "x-parent-session-id": "ses_2"}
    below = await send(world, chat("Search more", system="You search.", tools=TOOLS), "found", deeper)
    await world.read()
    assert (await world.place(title)).kind == "side"
    assert (await world.pair(second)).answer == first
    for receipt, branch in ((sub, "ses_2"), (below, "ses_3")):
        place = await world.place(receipt)
        assert (place.session, place.branch) == ("ses_1", branch)


# --- pi and qwen (chat) -----------------------------------------------------------------------------------------------


async def test_pi(world):
    affinity = {"user-agent": "pi/1.6.0", "session_id": "pi-uuid", "x-client-request-id": "pi-uuid"}
    parts = {"role": "user", "content": [{"type": "text", "text": "Create hello.txt"}]}
    call = calling(("c1", "write", '{"path": "hello.txt"}'))
    ask = {"system": "You are pi.", "tools": TOOLS, "stream": True, "store": False, "prompt_cache_key": "pi-uuid"}
    first = await send(world, chat(parts, **ask), call, affinity)
    resent = calling(("c1", "write", '{"path":"hello.txt"}'))
    second = await send(world, chat(parts, resent, result("c1", "written"), **ask), "Done.", affinity)
    assert (await world.place(second)).session == "pi-uuid"
    assert (await world.pair(second)).answer == first


async def test_qwen_names_no_session(world):
    """Two of them at once in one folder, which say the same words but were answered differently."""
    agent = {"user-agent": "QwenCode/0.24.4"}
    ask = {"system": "You are qwen.", "tools": TOOLS}
    chains = {"a": [], "b": []}
    said = {"a": ["Make a file"], "b": ["Make a file"]}
    for turn in range(4):
        for number, name in enumerate(chains):
            call = calling((f"call_{name}{turn}", "write", {"n": turn, "who": name}))
            receipt = await send(world, chat(*said[name], **ask), call, agent, at=60 * turn + number, took=5)
            said[name] += [call, result(f"call_{name}{turn}", "ok")]
            chains[name].append(receipt)
    await world.read()
    for chain in chains.values():
        assert world.sessions.path(chain)
        assert {world.sessions.place(each).session for each in chain} == {chain[0]}
        assert [world.sessions.place(each).turn for each in chain] == [0, 1, 2, 3]
