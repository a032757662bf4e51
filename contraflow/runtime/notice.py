"""Asks a cloud's metadata service whether this machine is to go, as EC2 answers it (IMDSv2: a token, then two paths).

Takes the service's address, gives what it says, once it says something. Does not decide what follows.
Paths and headers: Amazon EC2 User Guide, "Spot Instance interruption notices", "EC2 instance rebalance
recommendations" and "Use IMDSv2".
"""

import asyncio
import http.client
import json
from collections.abc import Callable
from urllib.parse import urlsplit

from contraflow.errors import NoticeError

TOKEN_PATH, TOKEN_S = "/latest/api/token", 21600  # the longest that a token may live
# What each path answers with, if the machine is to go: the key that has to be there.
PATHS = {
    "/latest/meta-data/spot/instance-action": "action",
    "/latest/meta-data/events/recommendations/rebalance": "noticeTime",
}
_MOST = 4096  # bytes of an answer


class Metadata:
    """One service. Invariant: `_token` is one that the service gave, or empty.

    Never by way of a proxy: the service answers for whoever asks it.
    """

    def __init__(self, url: str, *, deadline_s: float) -> None:
        """`url`: `http://169.254.169.254` on EC2. An answer that takes longer than `deadline_s` is none."""
        self._url, self._place, self._deadline_s = url, urlsplit(url).netloc, deadline_s
        self._token = ""

    async def ask(self) -> str:
        """What it says about this machine's end; empty while there is none. Raises NoticeError."""
        try:
            async with asyncio.timeout(self._deadline_s):
                return await asyncio.to_thread(self._ask)
        except TimeoutError:
            raise self._fault(f"did not answer within {self._deadline_s:g} s") from None
        except (OSError, http.client.HTTPException) as fault:
            raise self._fault(f"cannot be asked: {fault or type(fault).__name__}") from fault

    def _ask(self) -> str:
        for path, key in PATHS.items():
            status, body = self._get(path)
            if status == 200:
                return self._read(path, key, body)
            if status != 404:
                raise self._fault(f"answered {path} with status {status}; 200 or 404 is due")
        return ""

    def _get(self, path: str) -> tuple[int, bytes]:
        """An answer, with a fresh token if the one we have is not taken any more."""
        for _ in range(2):
            if not self._token:
                status, token = self._call("PUT", TOKEN_PATH, {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)})
                if status != 200:
                    raise self._fault(f"gave no token: status {status}")
                self._token = token.decode("ascii", "replace").strip()
            status, body = self._call("GET", path, {"X-aws-ec2-metadata-token": self._token})
            if status != 401:
                break
            self._token = ""
        return status, body

    def _call(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(self._place, timeout=self._deadline_s)
        try:
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read(_MOST)
        finally:
            connection.close()

    def _read(self, path: str, key: str, body: bytes) -> str:
        """Anything may answer with status 200, a portal's page too: it ends no run."""
        text = body.decode("utf-8", "replace")
        try:
            said = json.loads(text)
        except ValueError:
            said = None
        if not isinstance(said, dict) or key not in said:
            raise self._fault(f"answered {path} with {text[:100]!r}; an object with {key!r} is due")
        return f"{path.rpartition('/')[2]}: {', '.join(f'{name} {value}' for name, value in sorted(said.items()))}"

    def _fault(self, text: str) -> NoticeError:
        return NoticeError(f"the metadata service at {self._url} {text}")


async def first_notice(metadata: Metadata, every_s: float, tell: Callable[[str], None]) -> str:
    """Ask every so many seconds until the machine is to go; gives what was said. `tell` hears of each new trouble."""
    told = ""
    while True:
        try:
            if said := await metadata.ask():
                return said
            told = ""
        except NoticeError as fault:
            if str(fault) != told:
                told = str(fault)
                tell(told)
        await asyncio.sleep(every_s)
