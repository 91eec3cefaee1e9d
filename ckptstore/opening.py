"""Which store does an address mean?

The scheme chooses a backend by its entry point in the group ``ckptstore.backends``; the backend's class makes the rest
of the address and the options its own. Nothing is created by opening.
"""

from __future__ import annotations

import os
import re
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Protocol, cast

from ckptstore.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from ckptstore.store import CheckpointStore

__all__ = ["open_store", "schemes"]

_GROUP = "ckptstore.backends"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_SQUASHED = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/(?!/)")
_SECRET = re.compile(r"//[^/@]*:[^/@]*@")


class _Opener(Protocol):
    def from_url(self, url: str, **options: object) -> CheckpointStore: ...


def schemes() -> list[str]:
    """Return the URL schemes that have a backend installed."""
    return sorted({point.name for point in entry_points(group=_GROUP)})


def open_store(url: str | os.PathLike[str], **storage_options: object) -> CheckpointStore:
    """Open the store at *url*. Creates nothing and, for local paths, touches nothing.

    Args:
        url: ``file:///path``, a bare path, ``memory://name``, or any other scheme with a backend installed.
        storage_options: The backend's own options; they win over the URL's query.

    Raises:
        ConfigError: no such scheme or option (the message lists the known ones), or a malformed address.
        UnsupportedError: this is not a POSIX system.
    """
    if os.name != "posix":
        message = f"ckptstore works on POSIX systems only; this one is {os.name!r}"
        raise UnsupportedError(message, operation="open")
    text = os.fspath(url)
    if not isinstance(text, str) or not text or "\0" in text:
        message = f"{text!r:.200} is no address: give a path, or a URL like file:///path"
        raise ConfigError(message)
    squashed = _SQUASHED.match(text)
    if squashed:
        scheme, rest = squashed[1], text[squashed.end() :]
        message = (
            f"{text!r} has one slash after {scheme}: (a path class squashed it?); write {scheme}://{rest} as a str, "
            "not as a Path"
        )
        raise ConfigError(message, key=text)
    if _SECRET.search(text.split("?")[0]):
        message = "the address holds a user name and password; pass secrets by the environment, not in a URL"
        raise ConfigError(message)
    match = _SCHEME.match(text)
    scheme = match[1].lower() if match else "file"
    found = [point for point in entry_points(group=_GROUP) if point.name == scheme]
    if not found:
        message = (
            f"no backend for {scheme}:// is installed (from {scheme}://…); known schemes: {', '.join(schemes())}, "
            "and bare paths"
        )
        raise ConfigError(message, key=f"{scheme}://")
    opener = cast("_Opener", found[0].load())
    return opener.from_url(text, **storage_options)
