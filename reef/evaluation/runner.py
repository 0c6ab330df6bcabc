"""What runs inside the sandbox: the answer's code and the given tests, in one Python process of the standard library.

Knows: to give up every right (`lower`) before a line of the answer runs; to report each test over a pipe of its own.
Does not know: Reef; this file is handed as text to the sandboxed Python (`harness.room.program`).

A line of the report begins with a token that came on stdin, so that neither a print nor an early exit passes a test.
"""

import io
import json
import os
import sys
import types
from typing import Any

from reef.harness.lower import lower


def main() -> None:
    asked = json.loads(sys.stdin.buffer.read())
    out = os.dup(1)
    nothing = os.open("/dev/null", os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    lower(asked["limits"], asked["user"])
    token = asked["token"]

    def say(*words: str) -> None:
        os.write(out, (json.dumps([token, *words]) + "\n").encode())

    say("start")
    printed, room = io.StringIO(), int(asked.get("output", 0))
    answer = types.ModuleType("__main__" if room else "answer")  # code whose output is wanted is a program
    sys.modules["answer"] = answer
    sys.stdout = printed if room else sys.stdout
    space: dict[str, Any] = {}
    try:
        exec(compile(asked["code"], "answer.py", "exec"), answer.__dict__)  # noqa: S102 - this is what the sandbox is for
        space = {**answer.__dict__, "__name__": "tests"}
        exec(compile(asked["tests"], "tests.py", "exec"), space)  # noqa: S102
    except BaseException as error:
        say("failed", "", f"{type(error).__name__}: {error}"[:200])
    else:
        if not asked["names"]:
            say("passed", "")
        for name in asked["names"]:
            try:
                space[name]()
            except BaseException as error:
                say("failed", name, f"{type(error).__name__}: {error}"[:200])
            else:
                say("passed", name)
    if room:
        say("output", "", printed.getvalue()[-room:])
    say("end")
    os._exit(0)


if __name__ == "__main__":
    main()
