"""The section for engines that other programs run: where they answer, or how they are started."""

import re
from typing import Self
from urllib.parse import urlsplit

from pydantic import model_validator

from contraflow.config.base import Count, Seconds, Section

MAX_SOCKET = 107  # bytes of a socket's path on Linux (sun_path, and its end)


class Server(Section):
    """Servers of a served engine (`engine.kind` "vllm" or "sglang"): attached to by address, or started."""

    urls: tuple[str, ...] = ()  # attach to these, `http://host:port` or `unix:/path`; none: start servers
    count: Count = 1  # servers that each worker starts
    python: str = "python3"  # interpreter of the environment that holds the server's program
    arguments: tuple[str, ...] = ()  # more of its command line, one word each; no shell reads them
    key_env: str = ""  # name of the environment variable that holds the servers' key, never the key itself
    folder: str = ""  # where versions are laid for servers to read, seen alike by both; empty: this host's memory
    start_deadline_s: Seconds = 300.0  # from starting or finding a server to its first answer
    request_deadline_s: Seconds = 60.0  # a server whose answer, or next token, takes longer has failed

    @model_validator(mode="after")
    def _attached_or_started(self) -> Self:
        for url in self.urls:
            if (fault := fault_of_url(url)) is not None:
                raise ValueError(f"urls: {fault}")
        if len({url.rstrip("/") for url in self.urls}) != len(self.urls):
            raise ValueError(f"urls = {list(self.urls)} names a server twice")
        if self.urls and (self.count > 1 or self.arguments):
            raise ValueError(
                f"urls = {list(self.urls)} with count = {self.count} and arguments = {list(self.arguments)}: servers "
                "that run already are not started; leave count and arguments out, or urls"
            )
        if not self.python or "\0" in "".join((self.python, *self.arguments)):
            raise ValueError(
                f"python = {self.python!r}, arguments = {list(self.arguments)}: no program has an empty name, and no"
                " word a zero byte; name the interpreter that has the server's program"
            )
        if self.key_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.key_env):
            raise ValueError("key_env is not the name of an environment variable; the key itself belongs nowhere here")
        return self


def fault_of_url(url: str) -> str | None:
    """What is wrong with a server's address, if anything; a name or a key in it is not repeated."""
    shown, form = repr(re.sub(r"//.*@|[?#].*", "***", url)), "write http://host:port, https://host:port or unix:/path"
    if url.startswith("unix:/"):
        path = url.removeprefix("unix:")
        if re.search(r"[\s\0]", path):
            return f"address {shown} has a space in it; {form}"
        if len(path.encode()) > MAX_SOCKET:
            return f"address {shown}: a socket's path may have {MAX_SOCKET} bytes, this one has {len(path.encode())}"
        return None
    if not re.fullmatch(r"https?://([A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?/?", url):
        return f"address {shown}: {form}, without a key"
    try:
        urlsplit(url).port  # noqa: B018 - read to be checked
    except ValueError as fault:
        return f"address {shown}: {fault}; {form}"
    return None
