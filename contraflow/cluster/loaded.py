"""Versions of what this process would really load, asked of the libraries themselves where they can say.

A package's metadata says what was installed; another copy earlier on the loader's path may be what runs. So NCCL,
libfabric and GDRCopy are loaded and asked.
"""

import ctypes
import mmap
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

INSTALLER_FILE = Path("/opt/amazon/efa_installed_packages")
PLUGIN_FILE = Path("/opt/amazon/ofi-nccl/lib/libnccl-net-ofi.so")
PACKAGES = {"torch": "torch", "nvshmem": "nvidia-nvshmem-cu13", "deepep": "deep_ep", "ray": "ray"}


def loaded_versions(installer: Path = INSTALLER_FILE, plugin: Path = PLUGIN_FILE) -> dict[str, str]:
    """By component, as `versions.MATRIX` calls them; what is not there is left out."""
    found = {name: package_version(package) for name, package in PACKAGES.items()}
    found |= {"efa_installer": installer_version(installer), "aws_ofi_nccl": plugin_version(plugin)}
    found |= {"libfabric": libfabric_version("libfabric.so.1"), "gdrcopy": gdrcopy_version("libgdrapi.so.2")}
    found |= torch_versions()
    return {name: text for name, text in found.items() if text}


def package_version(package: str) -> str:
    """Of an installed Python package, without what stands after `+`; empty when it is not installed."""
    try:
        return version(package).split("+")[0]
    except PackageNotFoundError:
        return ""


def torch_versions() -> dict[str, str]:
    """CUDA that torch was built for, and the NCCL it has loaded; empty texts without them."""
    import torch

    if torch.version.cuda is None:
        return {"cuda": "", "nccl": ""}
    return {"cuda": torch.version.cuda, "nccl": ".".join(str(part) for part in torch.cuda.nccl.version())}


def installer_version(file: Path) -> str:
    """Of the EFA installer, from the list of packages that it leaves; empty without one."""
    if not file.is_file():
        return ""
    named = re.search(r"EFA installer version: *([0-9.]+)", file.read_text(encoding="utf-8"))
    return named[1] if named else ""


def plugin_version(file: Path) -> str:
    """Of NCCL's plugin for EFA, which carries it as a text; empty when it is not there or empty."""
    if not file.is_file() or not file.stat().st_size:
        return ""
    with file.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as held:
        named = re.search(rb"aws-ofi-nccl ([0-9]+(?:\.[0-9]+)+)", held)
        return named[1].decode() if named else ""


def libfabric_version(name: str) -> str:
    """As the library says: `fi_version` gives major << 16 | minor."""

    def ask(library: ctypes.CDLL) -> str:
        library.fi_version.restype = ctypes.c_uint32
        whole = int(library.fi_version())
        return f"{whole >> 16}.{whole & 0xFFFF}"

    return _asked(name, ask)


def gdrcopy_version(name: str) -> str:
    """As the library says: `gdr_runtime_get_version` writes major and minor."""

    def ask(library: ctypes.CDLL) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        library.gdr_runtime_get_version(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    return _asked(name, ask)


def _asked(name: str, ask: Callable[[ctypes.CDLL], str]) -> str:
    """What a library answers; empty when there is none of this name, or it does not know the question."""
    try:
        return ask(ctypes.CDLL(name))
    except (OSError, AttributeError):
        return ""
