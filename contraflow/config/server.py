"""The section for engines that other programs run: where they answer, or how they are started."""

import re
from typing import Self

from pydantic import model_validator

from contraflow.config.base import Count, Seconds, Section


class Server(Section):
    """Servers of a served engine (`engine.kind` "vllm" or "sglang"): attached to by address, or started."""

    urls: tuple[str, ...] = ()  # attach to these, `http://host:port` or `unix:/path`; none: start servers
    count: Count = 1  # servers that each worker starts
    python: str = "python3"  # interpreter of the environment that holds the server's program
    arguments: tuple[str, ...] = ()  # more of its command line, one word each; no shell reads them
    key_env: str = ""  # name of the environment variable that holds the servers' key, never the key itself
    folder: str = ""  # where versions are laid for servers to read, seen alike by both; empty: this host's memory
    start_deadline_s: Seconds = 300.0  # from starting or finding a server to its first answer
    request_deadline_s: Seconds = 60.0  # a server silent for so long in an answer has failed

    @model_validator(mode="after")
    def _attached_or_started(self) -> Self:
        for url in self.urls:
            if not re.fullmatch(r"https?://[^/?#@\s]+/?|unix:/\S+", url):
                raise ValueError(
                    f"urls has {url!r}; write http://host:port, https://host:port or unix:/path, without a key"
                )
        if len(set(self.urls)) != len(self.urls):
            raise ValueError(f"urls = {list(self.urls)} names a server twice")
        if self.urls and (self.count > 1 or self.arguments):
            raise ValueError(
                f"urls = {list(self.urls)} with count = {self.count} and arguments = {list(self.arguments)}: servers "
                "that run already are not started; leave count and arguments out, or urls"
            )
        if self.key_env and not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", self.key_env):
            raise ValueError("key_env is not the name of an environment variable; the key itself belongs nowhere here")
        return self
