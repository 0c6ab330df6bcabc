"""What runs inside the sandbox: the answer's code and the given tests, in one Python process of the standard library.

Knows: how to give up every right before a line of the answer runs, and to report each test over a pipe of its own.
Does not know: Reef; this file alone is handed to the sandboxed Python (`python -I -S -c`).

A line of the report begins with a token that came on stdin, so that neither a print nor an early exit passes a test.
"""

import ctypes
import io
import json
import os
import platform
import resource
import sys
import types
from typing import Any

_CALLS = {  # the processor's number in the kernel (AUDIT_ARCH_…), then its calls clone, unshare, setns, mount
    "x86_64": (0xC000003E, 56, 272, 308, 165),
    "aarch64": (0xC00000B7, 220, 97, 268, 40),
}
_CLONE3 = 435  # the same everywhere; its flags are in memory, where a filter cannot look
_NEWUSER = 0x10000000


def lower(limits: dict[str, int], user: int | None) -> None:
    """Give up what is left of rights: another user where we are root, and hard limits that cannot be raised again."""
    resource.setrlimit(resource.RLIMIT_CPU, (limits["cpu"], limits["cpu"]))
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory"], limits["memory"]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits["file"], limits["file"]))
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if user is not None:
        os.setgroups([])
        for each in (user, 65534):  # where few users are mapped, nobody's
            try:
                os.setresgid(each, each, each)
                os.setresuid(each, each, each)
                break
            except OSError:
                if each == 65534:
                    raise
    resource.setrlimit(resource.RLIMIT_NPROC, (limits["processes"], limits["processes"]))
    forbid()


def forbid() -> None:
    """No namespaces of one's own, which would allow mounts, and so memory without a limit: a seccomp filter (classic
    BPF, linux/seccomp.h). Processors whose calls are not listed do without."""
    if platform.machine() not in _CALLS:
        return
    kind, clone, *others = _CALLS[platform.machine()]
    load, equal, least, bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, absent = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026  # EPERM, ENOSYS
    lines = [(load, 0, 0, 4), (equal, 1, 0, kind), (give, 0, 0, kill), (load, 0, 0, 0)]
    lines += [(least, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # another set of numbers for the same calls
    for number in others:
        lines += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    lines += [(equal, 0, 1, _CLONE3), (give, 0, 0, absent)]  # the C library falls back to clone
    lines += [(equal, 0, 3, clone), (load, 0, 0, 16), (bits, 0, 1, _NEWUSER), (give, 0, 0, refuse), (give, 0, 0, allow)]

    class Line(ctypes.Structure):
        _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_uint16), ("lines", ctypes.POINTER(Line)))

    program = Program(len(lines), (Line * len(lines))(*(Line(*each) for each in lines)))
    call = ctypes.CDLL(None, use_errno=True).prctl
    if call(38, 1, 0, 0, 0) or call(22, 2, ctypes.byref(program), 0, 0):  # NO_NEW_PRIVS; SECCOMP, with a filter
        raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")


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
