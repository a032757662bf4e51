"""Numbers of the system calls that the sandbox makes, allows or judges by their arguments. Linux on x86-64 and arm64.

Takes nothing but the machine's name; gives name -> number. What has no entry is not allowed.
"""

import platform

_ALLOWED = """
read:0:63 write:1:64 open:2:- close:3:57 stat:4:- fstat:5:80 lstat:6:- poll:7:- lseek:8:62 mmap:9:222
mprotect:10:226 munmap:11:215 brk:12:214 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 pread64:17:67
pwrite64:18:68 readv:19:65 writev:20:66 access:21:- pipe:22:- select:23:- sched_yield:24:124 mremap:25:216
madvise:28:233 dup:32:23 dup2:33:- pause:34:- nanosleep:35:101 getitimer:36:102 alarm:37:- setitimer:38:103
getpid:39:172 sendfile:40:71 exit:60:93 uname:63:160 fsync:74:82 fdatasync:75:83 ftruncate:77:46 getcwd:79:17
chdir:80:49 fchdir:81:50 rename:82:- mkdir:83:- rmdir:84:- unlink:87:- readlink:89:- umask:95:166
gettimeofday:96:169 getrlimit:97:163 getrusage:98:165 sysinfo:99:179 times:100:153 getuid:102:174 getgid:104:176
geteuid:107:175 getegid:108:177 getppid:110:173 getpgrp:111:- getgroups:115:158 getresuid:118:148 getresgid:120:150
getpgid:121:155 getsid:124:156 rt_sigpending:127:136 rt_sigtimedwait:128:137 sigaltstack:131:132 statfs:137:43
fstatfs:138:44 arch_prctl:158:- gettid:186:178 time:201:- futex:202:98 sched_getaffinity:204:123 getdents64:217:61
set_tid_address:218:96 restart_syscall:219:128 clock_gettime:228:113 clock_getres:229:114 clock_nanosleep:230:115
exit_group:231:94 epoll_wait:232:- epoll_ctl:233:21 openat:257:56 mkdirat:258:34 newfstatat:262:79 unlinkat:263:35
renameat:264:38 readlinkat:267:78 faccessat:269:48 pselect6:270:72 ppoll:271:73 set_robust_list:273:99
get_robust_list:274:100 epoll_pwait:281:22 eventfd2:290:19 epoll_create1:291:20 dup3:292:24 pipe2:293:59
getcpu:309:168 renameat2:316:276 getrandom:318:278 membarrier:324:283 statx:332:291 rseq:334:293 faccessat2:439:439
"""

_CONDITIONAL = """
clone:56:220 clone3:435:435 ioctl:16:29 fcntl:72:25 prlimit64:302:261 tgkill:234:131
"""

_OURS = """
capset:126:91 pivot_root:155:41 mount_setattr:442:442 landlock_create_ruleset:444:444 landlock_add_rule:445:445
landlock_restrict_self:446:446
"""

MACHINES = ("x86_64", "aarch64")


def _table(text: str, machine: str) -> dict[str, int]:
    place = MACHINES.index(machine) + 1
    entries = [entry.split(":") for entry in text.split()]
    return {entry[0]: int(entry[place]) for entry in entries if entry[place] != "-"}


def allowed(machine: str) -> dict[str, int]:
    """Calls that can only touch the caller's own memory, threads, time and open files."""
    return _table(_ALLOWED, machine)


def judged(machine: str) -> dict[str, int]:
    """Calls that are allowed with some arguments only."""
    return _table(_CONDITIONAL, machine)


def number(name: str) -> int:
    """The number of a call that the sandbox itself makes, on this machine. Raises: OSError on another machine."""
    machine = platform.machine()
    if machine not in MACHINES:
        raise OSError(f"the sandbox knows the system calls of {' and '.join(MACHINES)}, not of {machine}")
    return (_table(_OURS, machine) | _table(_CONDITIONAL, machine))[name]
