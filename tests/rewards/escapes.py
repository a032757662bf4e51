"""Programs that try to get out of the sandbox, or to be scored for what they did not do.

Each attempt is the body of a function; what it gives or raises is printed. `refused` is a pattern of what must be
printed. `bare` says who gets through when the same body runs outside of the sandbox: "anyone", "root", or "" where
nobody should try.
"""

from typing import NamedTuple


class Attempt(NamedTuple):
    name: str
    body: str
    refused: str
    bare: str = ""


class Cheat(NamedTuple):
    name: str
    source: str
    ends: bool = True  # by itself and in order, so that only its answer can be held against it


EPERM = "^PermissionError"
NOT_THERE = "^(FileNotFoundError|PermissionError|NotADirectoryError)"

# {outside}: a folder of the test's, with a file `secret` in it; {judge}: the judge's process id; {port}: a server's
FILES = [
    Attempt("reads /etc/shadow", "return open('/etc/shadow').read(10)", NOT_THERE, "root"),
    Attempt("reads /etc/passwd", "return open('/etc/passwd').read(10)", NOT_THERE, "anyone"),
    Attempt("reads a file of the judge's", "return open('{outside}/secret').read()", NOT_THERE, "anyone"),
    Attempt("reads the judge's environment", "return open('/proc/{judge}/environ', 'rb').read(9)", NOT_THERE, "anyone"),
    Attempt("reads the judge's memory", "return open('/proc/{judge}/mem', 'r+b', 0)", NOT_THERE, "root"),
    Attempt("reads its parent's command line", "return open(f'/proc/{{os.getppid()}}/cmdline').read()", NOT_THERE),
    Attempt("finds a secret in its environment", "return os.environ.get('JUDGE_SECRET')", "^None$", "anyone"),
    Attempt("lists open files", "return os.listdir('/proc/self/fd')", NOT_THERE, "anyone"),
    Attempt("lists home folders", "return os.listdir('/home'), os.listdir('/etc')", NOT_THERE, "anyone"),
    Attempt("uses inherited descriptors", "return [n for n in range(5, 64) if _open(n)]", r"^\[\]$"),
    Attempt("writes beside the judge's file", "return open('{outside}/new', 'w')", NOT_THERE, "anyone"),
    Attempt("empties the judge's file", "return os.truncate('{outside}/secret', 0)", NOT_THERE, "anyone"),
    Attempt("writes to /", "return open('/escaped', 'w')", "^(OSError|PermissionError)"),
    Attempt("writes to the standard library", "return open(os.__file__, 'a')", "^(OSError|PermissionError)", "root"),
    Attempt("removes the standard library", "return os.remove(os.__file__)", "^(OSError|PermissionError)"),
    Attempt("follows a link outside", "os.symlink('{outside}/secret', 'l'); return open('l').read()", EPERM, "anyone"),
    Attempt("links a file from outside", "return os.link('{outside}/secret', 'h')", "^(FileNotFound|Perm)", "anyone"),
    Attempt("climbs out with ..", "return open('../' * 30 + '{outside}/secret').read()", NOT_THERE, "anyone"),
    Attempt("makes a block device", "return os.mknod('d', 0o60660, os.makedev(8, 0))", EPERM),
    Attempt("reads the machine's memory", "return open('/dev/mem', 'rb')", NOT_THERE),
    Attempt("reads the kernel's log", "return open('/dev/kmsg')", NOT_THERE),
    Attempt("makes a setuid file", "open('s', 'w'); return os.chmod('s', 0o4777)", EPERM, "anyone"),
    Attempt("opens by handle", "return raw(304, -100, 0, 0)", EPERM, "anyone"),
    Attempt("watches files", "return raw(294, 0)", EPERM, "anyone"),
]

RIGHTS = [
    Attempt("becomes root", "return os.setuid(0)", EPERM, "root"),
    Attempt("becomes root by all ids", "return os.setresuid(0, 0, 0)", EPERM, "root"),
    Attempt("joins groups", "return os.setgroups([0])", EPERM, "root"),
    Attempt("changes its root", "return os.chroot('.')", EPERM, "root"),
    Attempt("mounts", "return raw(165, b'x', b'.', b'tmpfs', 0, None)", EPERM),
    Attempt("unmounts", "return raw(166, b'/', 2)", EPERM),
    Attempt("unshares a user namespace", "return raw(272, 0x10000000)", EPERM, "anyone"),
    Attempt("enters a namespace", "return raw(308, 0, 0)", EPERM, ""),
    Attempt("takes capabilities", "return raw(126, ctypes.create_string_buffer(8), None)", EPERM),
    Attempt(
        "raises its limits", "return resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "^(ValueError|Perm)", "anyone"
    ),
    Attempt(
        "raises another's limits", "return raw(302, {judge}, 7, None, ctypes.create_string_buffer(16))", EPERM, "anyone"
    ),
    Attempt("reads a keyring", "return raw(250, 0, -3, 1)", EPERM, "anyone"),
    Attempt("adds a key", "return raw(248, b'user', b'k', b'v', 1, -3)", EPERM),
    Attempt("loads a BPF program", "return raw(321, 0, ctypes.create_string_buffer(128), 128)", EPERM, "root"),
    Attempt("opens a performance counter", "return raw(298, ctypes.create_string_buffer(128), 0, -1, -1, 0)", EPERM),
    Attempt("sets up an io_uring", "return raw(425, 4, ctypes.create_string_buffer(120))", EPERM, "root"),
    Attempt("handles page faults", "return raw(323, 1)", EPERM, "anyone"),
    Attempt("loads a kernel module", "return raw(175, b'x', 1, b'')", EPERM),
    Attempt("restarts the machine", "return raw(169, 0, 0, 0, None)", EPERM),
    Attempt("sets the clock", "return raw(227, 0, ctypes.create_string_buffer(16))", EPERM),
    Attempt("changes its scheduling", "return raw(203, 0, 8, ctypes.create_string_buffer(8))", EPERM),
    Attempt("shares memory by System V", "return raw(29, 0, 4096, 0o1600)", EPERM, "anyone"),
    Attempt("opens a message queue", "return raw(240, b'q', 0o102, 0o600, None)", EPERM),
    Attempt("makes a program of memory", "return os.memfd_create('m')", EPERM, "anyone"),
    Attempt("changes its filter", "return raw(317, 1, 0, None)", EPERM),
]

PROCESSES = [
    Attempt("forks", "return os.fork() or os._exit(0)", EPERM, "anyone"),
    Attempt("forks without libc", "return raw(57) or os._exit(0)", EPERM, "anyone"),
    Attempt("clones with flags in memory", "return raw(435, ctypes.create_string_buffer(88), 88)", "^OSError.*38"),
    Attempt("clones into a namespace", "return raw(56, 0x20000000 | 17, 0, 0, 0, 0) or os._exit(0)", EPERM, "root"),
    Attempt("starts a shell", "return subprocess.run(['/bin/sh', '-c', 'id'])", EPERM, "anyone"),
    Attempt("spawns a shell", "return os.posix_spawn('/bin/sh', ['sh', '-c', ':'], dict())", EPERM, "anyone"),
    Attempt("becomes another program", "return os.execv('/bin/true', ['true'])", EPERM),
    Attempt("signals everybody", "return os.kill(-1, 23)", EPERM),
    Attempt("signals its group", "return os.kill(0, 23)", EPERM, "anyone"),
    Attempt("signals the judge", "return os.kill({judge}, 23)", EPERM, "anyone"),
    Attempt("signals a thread of the judge", "return raw(234, {judge}, {judge}, 23)", EPERM, "anyone"),
    Attempt("queues a signal", "return raw(129, {judge}, 23, ctypes.create_string_buffer(128))", EPERM),
    Attempt("opens the judge's process", "return os.pidfd_open({judge})", EPERM, "anyone"),
    Attempt("lets the kernel signal the judge", "return fcntl.fcntl(0, fcntl.F_SETOWN, {judge})", EPERM, "anyone"),
    Attempt("is traced", "return raw(101, 0, 0, None, None)", EPERM, "anyone"),
    Attempt("traces the judge", "return raw(101, 16, {judge}, None, None)", EPERM),
    Attempt("reads another's memory", "return raw(310, os.getppid() or 1, None, 0, None, 0, 0)", EPERM, "anyone"),
    Attempt("takes a descriptor of the judge's", "return raw(438, 0, 0, 0)", EPERM),
]

NETWORK = [
    Attempt("opens an internet socket", "return socket.socket()", EPERM, "anyone"),
    Attempt("opens an IPv6 socket", "return socket.socket(socket.AF_INET6)", EPERM),
    Attempt("opens a datagram socket", "return socket.socket(type=socket.SOCK_DGRAM)", EPERM, "anyone"),
    Attempt("opens a Unix socket", "return socket.socket(socket.AF_UNIX)", EPERM, "anyone"),
    Attempt("opens a netlink socket", "return socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)", EPERM, "anyone"),
    Attempt("opens a packet socket", "return socket.socket(socket.AF_PACKET, socket.SOCK_RAW)", EPERM, "root"),
    Attempt("opens a socket without libc", "return raw(41, 2, 1, 0)", EPERM, "anyone"),
    Attempt("makes a pair of sockets", "return socket.socketpair()", EPERM, "anyone"),
    Attempt("connects to a server", "return socket.create_connection(('127.0.0.1', {port}), 5)", EPERM, "anyone"),
    Attempt("resolves a name", "return socket.getaddrinfo('example.com', 80)", "^gaierror"),
    Attempt("changes the host's name", "return socket.sethostname('x')", EPERM),
]

RESOURCES = [
    Attempt("forks without end", "while True: os.fork()", EPERM),
    Attempt("starts threads without end", "while True: threading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
            "^RuntimeError: can't start new thread"),
    Attempt("takes memory at once", "return len(bytearray(4 << 30))", "^MemoryError"),
    Attempt("takes memory bit by bit", "held = []\n    while True: held.append(bytearray(1 << 20))", "^MemoryError"),
    Attempt("maps memory", "import mmap; return mmap.mmap(-1, 4 << 30)", "^OSError.*12"),
    Attempt("writes one file without end", "with open('big', 'wb', 0) as file:\n        while True: file.write(bytes(1 << 16))",
            "^OSError.*27"),
    Attempt("fills the disk", "for n in range(99):\n        with open(f'b{{n}}', 'wb', 0) as file: file.write(bytes(1 << 18))",
            "^OSError.*28"),
    Attempt("makes files without end", "for n in range(9999): open(f'f{{n}}', 'w').close()", "^OSError.*28"),
    Attempt("opens files without end", "held = []\n    while True: held.append(os.open('/dev/null', 0))", "^OSError.*24"),
    Attempt("makes a huge file of nothing", "with open('h', 'wb') as file: file.truncate(1 << 40)", "^OSError.*27"),
    Attempt("grows its output", "return os.ftruncate(1, 1 << 40)", "^OSError.*27"),
    Attempt("changes its input", "return os.write(0, b'x')", "^(PermissionError|OSError)"),
]  # fmt: skip

ATTEMPTS = [*FILES, *RIGHTS, *PROCESSES, *NETWORK, *RESOURCES]

PREAMBLE = """
import ctypes, fcntl, os, resource, socket, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def raw(number, *args):
    result = libc.syscall(number, *args)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"error {ctypes.get_errno()}")
    return result
def _open(number):
    try:
        return os.fstat(number)
    except OSError:
        return None
def attempt():
    BODY
try:
    outcome = attempt()
except BaseException as error:
    outcome = f"{type(error).__name__}: {error}"
print(outcome, flush=True)
def square(x):
    return x * x
"""

# The task asks for square(7) == 49. None of these knows how to square.
CHEATS = [
    Cheat("prints what a judge might print", "print('[\"n31\"]', 'ok', 'PASSED', '1.0')\ndef square(x): return 0"),
    Cheat("leaves before it is asked", "import os; os._exit(0)"),
    Cheat("leaves politely before it is asked", "import sys; sys.exit(0)"),
    Cheat("leaves when it is asked", "def square(x): raise SystemExit(0)"),
    Cheat("leaves with a reason", "def square(x): raise SystemExit('passed')", False),
    Cheat("equals everything", "class Any:\n  __eq__ = lambda s, o: True\n  __hash__ = None\ndef square(x): return Any()", False),
    Cheat("is a number that equals everything",
          "class Any(int):\n  __eq__ = lambda s, o: True\n  __hash__ = int.__hash__\ndef square(x): return Any()", False),
    Cheat("claims to be an int", "class A:\n  __class__ = int\n  __format__ = lambda s, f: '31'\ndef square(x): return A()", False),
    Cheat("has bugs", "def square(x): return x / 0", False),
    Cheat("is no Python", "def square(x) return 49", False),
    Cheat("is not text", "\0\udc80", False),
    Cheat("changes how values are written",
          "from contraflow.rewards.sandbox import inside\ninside.tokens_of = lambda v: [True, 'passed']\ndef square(x): return 1"),
    Cheat("changes what writes", "import json\njson.dump = lambda v, f: f.write('true')\ndef square(x): return 1"),
    Cheat("writes the result itself", "import os\nos.write(3, b'true'); os._exit(0)"),
    Cheat("writes a huge result", "import os\nwhile os.write(3, b'[' * 65536): pass", False),
    Cheat("writes a deep result", "import os\nos.write(3, b'[' * 100000 + b']' * 100000); os._exit(0)"),
    Cheat("writes a result that is no text", "import os\nos.write(3, b'[\"\\xff\\xfe\"]'); os._exit(0)"),
    Cheat("gives a deep value", "def square(x):\n  v = []\n  for _ in range(99999): v = [v]\n  return v", False),
    Cheat("gives a value without end", "def square(x):\n  v = []; v.append(v); return v", False),
    Cheat("gives a huge value", "def square(x): return 'x' * (1 << 26)", False),
    Cheat("gives values with one hash", "def square(x): return {i * (2**61 - 1) for i in range(2000)}"),
    Cheat("leaves from atexit", "import atexit, os\natexit.register(os._exit, 0)\ndef square(x): return 1"),
    Cheat("never ends at its end", "import threading\nthreading.Thread(target=threading.Event().wait).start()\ndef square(x): return 1", False),
    Cheat("never ends", "while True: pass", False),
    Cheat("never ends and will not be told",
          "import signal\nfor n in range(1, 32):\n  try: signal.signal(n, signal.SIG_IGN)\n  except (OSError, ValueError): pass\nwhile True: pass", False),
    Cheat("sleeps", "import time\ntime.sleep(999)", False),
    Cheat("prints without end", "while True: print('x' * 65536)", False),
    Cheat("closes everything", "import os\nos.closerange(0, 64)\ndef square(x): return 1", False),
    Cheat("crashes", "import ctypes\nctypes.string_at(0)", False),
    Cheat("aborts", "import os\nos.abort()", False),
    Cheat("overflows the stack", "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f() + 1\nf()", False),
    Cheat("removes the way out", "import os, sys\nos._exit = sys.exit = lambda *a: None\ndef square(x): return 1", False),
    Cheat("calls by another interface of the kernel", "import ctypes\nctypes.CDLL(None).syscall(0x40000000 + 39)", False),
]  # fmt: skip
