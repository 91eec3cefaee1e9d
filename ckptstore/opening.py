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
# In what is no URL; also in the middle, since a path class or a join may have put a directory in front.
_SQUASHED = re.compile(r"(?:^|/)([A-Za-z][A-Za-z0-9+.-]+):/+")
_USER_INFO = re.compile(r":/+[^/@]*:[^/@]*@")
_SECRET_OPTION = re.compile(
    r"[?&;]([^=&;]*(?:secret|passw|token|credential|signature|account_?key|sas)[^=&;]*)=", re.IGNORECASE
)


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
        ConfigError: no such scheme or option (the message lists the known ones), a malformed address, a secret in it.
        UnsupportedError: this is not a POSIX system, or the backend lacks a package.
    """
    if os.name != "posix":
        message = f"ckptstore works on POSIX systems only; this one is {os.name!r}"
        raise UnsupportedError(message, operation="open")
    text = os.fspath(url)
    if not isinstance(text, str) or not text or "\0" in text:
        message = f"{text!r:.200} is no address: give a path, or a URL like file:///path"
        raise ConfigError(message, operation="open")
    match = _SCHEME.match(text)
    squashed = None if match else _SQUASHED.search(text)
    _refuse_secrets(text, is_url=bool(match or squashed))  # first: the other messages show the address
    if squashed:
        known, rest = squashed[1], text[squashed.end() :]
        slash = "/" if known.lower() == "file" else ""
        message = (
            f"{text!r:.300} looks like a URL that a path class squashed or a join prefixed: write "
            f"{known}://{slash}{rest} as a str, not as a Path"
        )
        raise ConfigError(message, operation="open", key=text)
    scheme = match[1].lower() if match else "file"
    if match:
        text = scheme + text[match.end(1) :]
    found = [point for point in entry_points(group=_GROUP) if point.name == scheme]
    if not found:
        message = f"no backend for {scheme}:// is installed; known schemes: {', '.join(schemes())}; or a bare path"
        raise ConfigError(message, operation="open", key=f"{scheme}://")
    try:
        opener = cast("_Opener", found[0].load())
    except ImportError as error:
        message = f"the backend for {scheme}:// can't be imported ({error}): install what it needs"
        raise UnsupportedError(message, operation="open", key=f"{scheme}://") from error
    return opener.from_url(text, **storage_options)


def _refuse_secrets(text: str, *, is_url: bool) -> None:
    """Refuse an address that holds a secret, without repeating it: addresses end up in logs and records."""
    option = _SECRET_OPTION.search(text) if is_url else None
    if _USER_INFO.search(text.split("?", maxsplit=1)[0]) or option:
        what = f"a secret in its option {option[1]}" if option else "a user name and password"
        message = f"the address holds {what}; pass secrets by the environment or storage_options, not in a URL"
        raise ConfigError(message, operation="open")
