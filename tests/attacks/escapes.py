"""Programs that try to leave the sandbox: each ends without an error only where it got out.

Each begins with `LEAVE_ROOT`, four lines by which a process that may call chroot leaves its root
folder, and goes on with `HEAD`, which can then import. As a script (`escapes.py UID PYTHON`) this
tries all of them as an ordinary user, and prints the names of those that got out as JSON.
"""

import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from peagle.bench import sandbox

LEAVE_ROOT = """
import os

try:
    os.mkdir("x")
    os.chroot("x")
    for _ in range(60):
        os.chdir("..")
    os.chroot(".")
except OSError:
    pass
"""

HEAD = """
import ctypes, mmap, os, signal, socket, subprocess, sys, time

libc = ctypes.CDLL(None, use_errno=True)
NUMBERS = {  # x86_64, aarch64
    "mount": (165, 40), "unshare": (272, 97), "setns": (308, 268), "clone": (56, 220),
    "clone3": (435, 435), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "memfd_create": (319, 279),
    "socket": (41, 198), "execveat": (322, 281),
}

def call(name, *arguments):
    number = NUMBERS[name][MACHINE == "aarch64"]
    whole = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    found = libc.syscall(ctypes.c_long(number), *whole)
    if found == -1:
        raise OSError(ctypes.get_errno(), name)
    return found

def ends_well(child):
    if child == 0:
        os._exit(0)
    assert child > 0 and os.waitpid(child, 0)[1] == 0
"""

SHELL = '["/bin/sh", "-c", ": > " + MARK]'
ABOVE = "for pid in (PID, os.getppid(), 1):"  # whoever started the program, and the first process

ESCAPES = {
    "read a file": "assert open(SECRET).read() == 'secret'",
    "delete a file": "os.remove(VICTIM)",
    "write a file": "open(MARK, 'w').close()",
    "a shell by os.system": "assert os.system(': > ' + MARK) == 0",
    "a shell by subprocess": f"subprocess.run({SHELL}, check=True)",
    "a shell by posix_spawn": f"""
child = os.posix_spawn("/bin/sh", {SHELL}, {{}})
assert os.waitpid(child, 0)[1] == 0
""",
    "exec": f"os.execv('/bin/sh', {SHELL})",
    "exec of a file in memory": """
fd = call("memfd_create", b"x", 0)
os.sendfile(fd, os.open("/bin/sh", os.O_RDONLY), 0, 2**24)
call("execveat", fd, b"", (ctypes.c_char_p * 4)(b"sh", b"-c", b": > " + MARK.encode()), 0, 0x1000)
""",
    "connect to 127.0.0.1": "socket.create_connection(('127.0.0.1', PORT), 1)",
    "connect by a path": "socket.socket(socket.AF_UNIX).connect(UNIX)",
    "connect by an abstract name": "socket.socket(socket.AF_UNIX).connect(ABSTRACT)",
    "a socket by its number": "call('socket', 1, 1, 0)",
    "three times 700 MB": """
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        held = mmap.mmap(-1, 700 * 10**6)
        time.sleep(0.3)
        os._exit(0)
    children.append(child)
assert all(os.waitpid(child, 0)[1] == 0 for child in children)
""",
    "200 forks": """
for _ in range(200):
    if os.fork() == 0:
        time.sleep(0.3)
        os._exit(0)
""",
    "a process that stays": """
if os.fork() == 0:
    os.setsid()
    time.sleep(0.3)
    open(MARK, "w").close()
    os._exit(0)
""",
    "fork by clone": "ends_well(call('clone', 17, 0, 0, 0, 0))",
    "fork by clone3": """
arguments = (ctypes.c_uint64 * 8)()
arguments[4] = signal.SIGCHLD
ends_well(call("clone3", ctypes.byref(arguments), 64))
""",
    "fork by x32's number": """
assert MACHINE == "x86_64"
ends_well(libc.syscall(ctypes.c_long(0x40000000 + 57)))
""",
    "fork by int 0x80": r"""
assert MACHINE == "x86_64"
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(b"\xb8\x02\x00\x00\x00\xcd\x80\xc3")  # mov eax, 2; int 0x80; ret
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
ends_well(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
""",
    "a thread": "import threading; threading.Thread(target=print).start()",
    "signal the parent": f"""
reached = 0
{ABOVE}
    try:
        os.kill(pid, 0)
        reached += 1
    except OSError:
        pass
assert reached
""",
    "read the parent's memory": f"""
class Span(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("size", ctypes.c_size_t)]
spot = ctypes.create_string_buffer(8)
local = Span(ctypes.addressof(spot), 1)
reached = 0
{ABOVE}
    try:  # a page that nobody has: refused for who may not look, else a fault
        call("process_vm_readv", pid, ctypes.byref(local), 1, ctypes.byref(Span(1, 1)), 1, 0)
    except OSError as error:
        reached += error.errno == 14
assert reached
""",
    "trace the parent": "call('ptrace', 0, 0, 0, 0)",  # the parent may look from now on
    "mount": """
call("unshare", 0x10020000)
os.chdir("/")
call("mount", b"none", FOLDER.encode(), b"tmpfs", 0, 0)
""",
    "unshare": "call('unshare', 0x10000000)",
    "setns": "call('setns', os.pidfd_open(os.getppid()), 0x04000000)",
    "open by a handle": """
handle = ctypes.create_string_buffer(136)
handle[:4] = (128).to_bytes(4, sys.byteorder)
mount = ctypes.c_int()
root = os.open("/", os.O_RDONLY)
call("name_to_handle_at", root, SECRET.encode(), handle, ctypes.byref(mount), 0)
assert os.read(call("open_by_handle_at", root, handle, os.O_RDONLY), 9) == b"secret"
""",
    "through /proc": """
for where in ("1/root", "self/root", f"{os.getppid()}/root", f"{PID}/root", "1/cwd/../../../.."):
    try:
        if open(f"/proc/{where}{SECRET}").read() == "secret":
            os._exit(0)
    except OSError:
        pass
assert os.listdir("/proc/self/fd")
""",
    "through open files": """
found = []
for fd in range(3, 1024):
    try:
        found.append(os.pread(fd, 9, 0))
    except OSError:
        pass
assert b"secret" in found
""",
    "write somewhere": """
stdlib = os.path.dirname(os.__file__)
made = 0
for folder in ("/", "/tmp", "/dev/shm", "/dev", "/lib", "/home", os.getcwd(), stdlib):
    try:
        os.mkdir(f"{folder}/peagle-escape")
        made += 1
        os.rmdir(f"{folder}/peagle-escape")
    except OSError:
        pass
assert made
""",
    "2 GiB": "held = mmap.mmap(-1, 2**31)",
    "end before the tests": "os._exit(0)",
    "SystemExit before the tests": "raise SystemExit(0)",
    "a status from elsewhere": """
for fd in range(1, 16):
    try:
        os.write(fd, b"0")
    except OSError:
        pass
os._exit(0)
""",
}
INSIDE_ONLY = {"write somewhere"}  # without LEAVE_ROOT, or it would try the host's own folders
# What a host may refuse without any sandbox.
NEEDS_ROOT = {"setns", "open by a handle", "read the parent's memory"}
NEEDS_KERNEL = {"fork by x32's number", "fork by int 0x80", "unshare", "mount"}


@dataclass(frozen=True, slots=True)
class Host:
    """What the programs try to reach; the test made all of it."""

    folder: Path
    secret: int  # an open file that a child process would inherit
    listeners: list[socket.socket]  # by TCP, by a path, by an abstract name

    def program(self, name: str) -> str:
        """The attack's source, which begins with what it has to know of the host."""
        tcp, path, abstract = (listener.getsockname() for listener in self.listeners)
        known = {
            "FOLDER": str(self.folder),
            "SECRET": str(self.folder / "secret"),
            "VICTIM": str(self.folder / "victim"),
            "MARK": str(self.folder / "mark"),
            "PORT": tcp[1],
            "UNIX": path,
            "ABSTRACT": abstract,
            "PID": os.getpid(),
            "MACHINE": platform.machine(),
        }
        lines = [f"{key} = {value!r}" for key, value in known.items()]
        leave = "" if name in INSIDE_ONLY else LEAVE_ROOT
        return "\n".join([*lines, leave, HEAD, ESCAPES[name]])

    def reached(self) -> bool:
        """Whether anything happened to a file or a listener."""
        files = {path.name for path in self.folder.iterdir()}
        return files != {"secret", "victim", "socket"} or any(map(was_called, self.listeners))


def was_called(listener: socket.socket) -> bool:
    """Whether a connection waits."""
    try:
        listener.accept()[0].close()
    except BlockingIOError:
        return False
    return True


@contextmanager
def prepared() -> Iterator[Host]:
    """A folder that anybody may read and write, with the files and listeners of the attacks."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o777)
        for name in ("secret", "victim"):
            (folder / name).write_text("secret")
        secret = stack.enter_context((folder / "secret").open())
        os.set_inheritable(secret.fileno(), True)
        unix, path, abstract = socket.AF_UNIX, str(folder / "socket"), f"\0{folder}"
        addresses = ((socket.AF_INET, ("127.0.0.1", 0)), (unix, path), (unix, abstract))
        listeners = []
        for family, address in addresses:
            listener = stack.enter_context(socket.socket(family))
            listener.bind(address)
            listener.listen()
            listener.setblocking(False)
            listeners.append(listener)
        yield Host(folder, secret.fileno(), listeners)


def got_out(name: str, *how: str) -> bool:
    """Whether an attack out of the sandbox succeeded, by its own account or by what is seen."""
    with prepared() as host:
        passed = sandbox.passes(host.program(name), *how)
        if name == "a process that stays":
            time.sleep(0.6)
        return passed or host.reached()


def works_outside(name: str) -> bool:
    """Whether an attack succeeds without a sandbox: else it would prove nothing."""
    with prepared() as host:
        command = [sys.executable, "-I", "-S", "-c", host.program(name)]
        return (
            subprocess.run(command, cwd=host.folder, close_fds=False, check=False).returncode == 0
        )


def main() -> None:
    """Try all of them as the user and with the interpreter that the command line names."""
    user, interpreter = int(sys.argv[1]), sys.argv[2]
    sandbox.runner()  # kept, for who may not read this clone
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)
    assert sandbox.passes("", interpreter), "this user's sandbox does not work"
    print(json.dumps([name for name in ESCAPES if got_out(name, interpreter)]))


if __name__ == "__main__":
    main()
