"""Requests of a server that is not ours: read-only by its caller's choice of paths, and its answers not trusted.

The time and the size of an answer are bounded, the key goes nowhere but to the address that was given, and no text of
the server is printed as it is. httpx, which SGLang needs too, is imported for the first request.
"""

import json
import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from harness.config.layers import ConfigError
from harness.runtime import redact
from harness.runtime.errors import UnsupportedEnvironment

KEY_OPTION = "--api-key-file"
LARGEST_ANSWER = 256 * 2**20
"""Bytes. The checksums of 512 ranks with 2,000 parameters each take 100 MB."""
LONGEST_QUOTE = 300
LONGEST_KEY = 10_000
_LOCAL = re.compile(r"localhost|127\.[\d.]+|::1|0\.0\.0\.0")


def read_key(file: str) -> str:
    """Return the key, or the keys, that a file holds: one in each line. Raise ConfigError for a file that holds none.

    A server with an --api-key and another --admin-api-key wants the first for its arguments and the second for its
    checksums.
    """
    wanted = "give a file that holds the server's API key alone"
    try:
        with Path(file).open("rb") as opened:
            keys = opened.read(LONGEST_KEY).decode("ascii").split()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not ASCII text"
        raise ConfigError(f"{KEY_OPTION} {shown(file)} cannot be read: {why}; {wanted}.") from None
    if not keys or not all(each.isprintable() for each in keys):
        raise ConfigError(f"{KEY_OPTION} {shown(file)} holds no key; {wanted}.")
    return "\n".join(keys)


def shown(text: object) -> str:
    """Return somebody else's text as it may be printed: short, in ASCII, without control characters and secrets."""
    line = " ".join(redact.text(str(text)[: 4 * LONGEST_QUOTE]).split())
    line = line if len(line) <= LONGEST_QUOTE else line[:LONGEST_QUOTE] + " ..."
    return "".join(each if " " <= each <= "~" else ascii(each)[1:-1] for each in line)


def address_of(url: str) -> str:
    """Return a server's address without a slash at its end. Raise ConfigError if it is none."""
    wanted = "give it as http://HOST:PORT"
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, a bracket left open
        is_address = False
    if not is_address or re.search(r"[^!-~]|[?#]", url):
        raise ConfigError(f"{shown(url)!r} is not the address of a server; {wanted}.")
    if "@" in parts.netloc:
        raise ConfigError(f"A server's address holds no login; {wanted}, and its key in a file, with {KEY_OPTION}.")
    return url.rstrip("/")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered."""

    path: str
    status: int
    content: Any
    """Parsed JSON; None if it was not JSON."""

    @property
    def table(self) -> Mapping[str, Any]:
        """The JSON object of a successful answer; empty for any other answer."""
        return self.content if self.status == 200 and isinstance(self.content, dict) else {}

    def __str__(self) -> str:
        """Say what came instead of what was wanted."""
        said = self.content.get("message") or self.content.get("error") if isinstance(self.content, dict) else None
        what = "" if self.content is not None else ", and no JSON"
        return f"HTTP {self.status} for {self.path}{f', {shown(said)}' if said else what}"


@dataclass(frozen=True, slots=True, repr=False)
class Api:
    """Makes requests of one server."""

    address: str
    keys: tuple[str, ...] = ()
    """Each is tried where the one before is not taken."""

    def ask(self, path: str, seconds: float, body: Mapping[str, Any] | None = None) -> Answer:
        """Ask by GET without a body, else by POST.

        Raise ConfigError if nobody answers there, for a key that is wanted, for a redirect, and for an answer that is
        too large; UnsupportedEnvironment if it takes longer than `seconds`.
        """
        for key in self.keys or ("",):
            status, content = self._fetch(path, seconds, body, key)
            if status not in (401, 403):
                break
        else:
            raise ConfigError(self._key_wanted(path))
        if 300 <= status < 400:
            raise ConfigError(f"{self.address} redirects {path} elsewhere; give the address that it redirects to.")
        try:
            return Answer(path, status, json.loads(content))
        except (ValueError, RecursionError):
            return Answer(path, status, None)

    def _fetch(self, path: str, seconds: float, body: Mapping[str, Any] | None, key: str) -> tuple[int, bytes]:
        import httpx

        headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        content, end = bytearray(), time.monotonic() + seconds
        trusted = ssl.create_default_context()  # this machine's, and not only the authorities that httpx brings
        try:
            with (
                httpx.Client(timeout=seconds, verify=trusted, proxy=self._proxy(), trust_env=False) as client,
                client.stream("POST" if body else "GET", self.address + path, json=body, headers=headers) as answer,
            ):
                for part in answer.iter_raw():
                    content += part
                    if len(content) > LARGEST_ANSWER:
                        break
                    if time.monotonic() > end:
                        raise httpx.ReadTimeout("")
        except httpx.TimeoutException:
            raise UnsupportedEnvironment(
                f"{self.address} did not answer {path} within {seconds:g} s. It may be paused, still loading, or unable to "
                "reach all of its ranks; ask again when it answers requests."
            ) from None
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, ImportError) as error:  # SOCKS is not installed
            raise ConfigError(
                f"No server answers at {self.address}: {shown(error)}. Give the address of a running SGLang server."
            ) from None
        if len(content) > LARGEST_ANSWER:
            raise ConfigError(
                f"{self.address} sends more than {LARGEST_ANSWER >> 20} MiB; give the address of an SGLang server."
            )
        return answer.status_code, bytes(content)

    def _proxy(self) -> str | None:
        """Return the proxy that the environment names for the address; none for an address of this machine."""
        parts = urlsplit(self.address)
        if _LOCAL.fullmatch(parts.hostname or "") or proxy_bypass(parts.netloc):
            return None
        proxy = getproxies().get(parts.scheme)
        return f"http://{proxy}" if proxy and "://" not in proxy else proxy

    def _key_wanted(self, path: str) -> str:
        if not self.keys:
            return f"{self.address} wants a key for {path}: give a file that holds it, with {KEY_OPTION} FILE."
        return (
            f"{self.address} does not take the key of {KEY_OPTION} for {path}: give the one of its --api-key. A server "
            "with an --admin-api-key wants that one for its weights: write both, each in its own line."
        )
