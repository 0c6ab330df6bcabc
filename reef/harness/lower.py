"""Giving up rights, for a process that runs a stranger's code: another user, hard limits, no namespaces of one's own.

Knows: limits of the kernel, users, one seccomp filter. Does not know: Reef; this file is handed as text to a sandboxed
Python of the standard library alone (see `room.program`).
"""

import ctypes
import os
import platform
import resource

_CALLS = {  # the processor's number in the kernel (AUDIT_ARCH_…); its clone, socket, unshare, setns, mount, bpf
    "x86_64": (0xC000003E, 56, 41, 272, 308, 165, 321),
    "aarch64": (0xC00000B7, 220, 198, 97, 268, 40, 280),
}
_KEPT = {  # add_key, request_key, keyctl: keys outlive a process, and it has its starter's; memfd_create: has no limit
    "x86_64": (248, 249, 250, 319),
    "aarch64": (217, 218, 219, 279),
}
_UNSEEN = (435, 425, 447)  # the same everywhere: clone3 and io_uring_setup, whose orders are in memory, where a filter
# cannot look; memfd_secret
_FAMILIES = (1, 2, 10, 16)  # unix, inet, inet6, netlink; others (vsock) know no namespaces and lead out
_NEWUSER = 0x10000000
_LIMITS = {
    "cpu": resource.RLIMIT_CPU,
    "memory": resource.RLIMIT_AS,
    "file": resource.RLIMIT_FSIZE,
    "open": resource.RLIMIT_NOFILE,
}


def lower(limits: dict[str, int], user: int | None) -> None:
    """Give up what is left of rights: another user where we are root, and hard limits that cannot be raised again.
    `limits` needs `processes`; of the others, those that are there."""
    for name, kind in _LIMITS.items():
        if name in limits:
            hard = resource.getrlimit(kind)[1]
            most = limits[name] if hard == resource.RLIM_INFINITY else min(hard, limits[name])
            resource.setrlimit(kind, (most, most))
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
    """No namespaces of one's own, which would allow mounts, and so memory without a limit; no keys, no files in memory,
    no sockets but those that namespaces hold: a seccomp filter (classic BPF, linux/seccomp.h). Processors whose calls
    are not listed do without."""
    if platform.machine() not in _CALLS:
        return
    kind, clone, socket, *others = _CALLS[platform.machine()]
    load, equal, least, bits, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill, refuse, absent, strange = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026, 0x00050061
    # EPERM, ENOSYS (libraries fall back to other calls), EAFNOSUPPORT
    lines = [(load, 0, 0, 4), (equal, 1, 0, kind), (give, 0, 0, kill), (load, 0, 0, 0)]
    lines += [(least, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # another set of numbers for the same calls
    for number in others:
        lines += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    for number in (*_KEPT[platform.machine()], *_UNSEEN):
        lines += [(equal, 0, 1, number), (give, 0, 0, absent)]
    lines += [(equal, 0, len(_FAMILIES) + 3, socket), (load, 0, 0, 16)]
    lines += [(equal, len(_FAMILIES) - place, 0, family) for place, family in enumerate(_FAMILIES)]
    lines += [(give, 0, 0, strange), (give, 0, 0, allow)]
    lines += [(equal, 0, 3, clone), (load, 0, 0, 16), (bits, 0, 1, _NEWUSER), (give, 0, 0, refuse), (give, 0, 0, allow)]

    class Line(ctypes.Structure):
        _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_uint16), ("lines", ctypes.POINTER(Line)))

    program = Program(len(lines), (Line * len(lines))(*(Line(*each) for each in lines)))
    call = ctypes.CDLL(None, use_errno=True).prctl
    if call(38, 1, 0, 0, 0) or call(22, 2, ctypes.byref(program), 0, 0):  # NO_NEW_PRIVS; SECCOMP, with a filter
        raise OSError(ctypes.get_errno(), "the kernel takes no seccomp filter")
