"""Landlock: this process and its children may read below some folders and touch nothing else, for good.

Takes folders; changes the calling process. Names and sizes of other files can still be seen (stat), their bytes cannot.
"""

import ctypes
import os
import struct
from collections.abc import Sequence

from contraflow.rewards.sandbox.kernel import system

_VERSION = 1  # asks for the version instead of making rules
_RIGHTS = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}  # all rights over files that a version knows
_READ = 0b1100  # files and folders
_BELOW = 1  # a rule about everything below a folder


def allow_reading(folders: Sequence[str]) -> None:
    """Raises: OSError when the kernel has no Landlock. `no_new_privs` must be set."""
    version = system("landlock_create_ruleset", None, 0, _VERSION)
    handled = ctypes.create_string_buffer(struct.pack("=Q", _RIGHTS[min(version, max(_RIGHTS))]), 8)
    rules = system("landlock_create_ruleset", handled, 8, 0)
    for folder in folders:
        try:
            place = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        except PermissionError as fault:
            raise OSError(f"{folder} cannot be read by user {os.geteuid()}, as whom programs run: {fault}") from fault
        rule = ctypes.create_string_buffer(struct.pack("=Qi", _READ, place), 12)
        system("landlock_add_rule", rules, _BELOW, rule, 0)
        os.close(place)
    system("landlock_restrict_self", rules, 0)
    os.close(rules)
