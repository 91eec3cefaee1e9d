"""Which directory does an address mean?

A path is made absolute once, here, so that a later change of the working directory moves nothing. No file system is
asked: opening a store touches nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, unquote_to_bytes, urlsplit

from ckptstore.errors import ConfigError

if TYPE_CHECKING:
    from typing import Self

__all__ = ["PosixConfig"]

_LOCAL = ("", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class PosixConfig:
    """Where a PosixStore keeps its data.

    Attributes:
        root: Absolute path of the directory; it need not exist yet. "." and ".." in it are resolved by name.

    Raises:
        ConfigError: the path is relative, or holds a NUL.
    """

    root: Path

    def __post_init__(self) -> None:
        text = os.fspath(self.root)
        if "\0" in text or not text.startswith("/"):
            message = f"the root {text!r:.200} has to be an absolute path"
            raise ConfigError(message, operation="open", key=text)
        # normpath keeps two leading slashes, which mean nothing here.
        object.__setattr__(self, "root", Path("/" + os.path.normpath(text).lstrip("/")))

    @classmethod
    def from_url(cls, url: str, **options: object) -> Self:
        """Return the configuration for ``file:///path`` (percent-encoded) or a bare path (taken as it is)."""
        if url.lower().startswith("file:"):
            parts = urlsplit(url)
            if parts.netloc.lower() not in _LOCAL:
                message = (
                    f"{url!r:.300} names the host {parts.netloc!r}: a path on this machine has three slashes, "
                    f"file:///{parts.netloc}{parts.path}"
                )
                raise ConfigError(message, operation="open", key=url)
            if parts.fragment:
                message = f"{url!r:.300}: write %23 for a # in a path"
                raise ConfigError(message, operation="open", key=url)
            options = {**dict(parse_qsl(parts.query, keep_blank_values=True)), **options}
            text = os.fsdecode(unquote_to_bytes(parts.path))
            if not text.startswith("/"):
                message = f"{url!r:.300} has no absolute path: write file:///path"
                raise ConfigError(message, operation="open", key=url)
        else:
            text = url
        if options:
            message = f"{url!r:.300}: unknown option {', '.join(sorted(options))}; known options of local paths: none"
            raise ConfigError(message, operation="open", key=url)
        if not text or "\0" in text:
            message = f"{url!r:.300} is no path"
            raise ConfigError(message, operation="open", key=url)
        return cls(root=Path.cwd() / text)

    @property
    def url(self) -> str:
        """The root as a ``file://`` address."""
        return "file://" + quote(os.fsencode(self.root))
