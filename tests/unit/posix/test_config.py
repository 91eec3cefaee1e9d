"""An address of a local directory means one absolute path, or is refused with the reason."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from ckptstore.errors import ConfigError
from ckptstore_posix import PosixConfig, PosixStore


@pytest.mark.parametrize(
    "url, root, canonical",
    [
        ("file:///data/run", "/data/run", "file:///data/run"),
        ("FILE:///data/run/", "/data/run", "file:///data/run"),
        ("file://localhost/data/run", "/data/run", "file:///data/run"),
        ("file:///with%20space/%23%3F%25", "/with space/#?%", "file:///with%20space/%23%3F%25"),
        ("file:///caf%C3%A9", "/café", "file:///caf%C3%A9"),
        ("/with space/#?%20", "/with space/#?%20", "file:///with%20space/%23%3F%2520"),
        ("//double/./and/../slashes//", "/double/slashes", "file:///double/slashes"),
        ("/", "/", "file:///"),
    ],
)
def test_an_address_names_one_absolute_path(url: str, root: str, canonical: str) -> None:
    store = PosixStore.from_url(url)
    assert PosixConfig.from_url(url).root == Path(root)
    assert store.url == canonical
    assert PosixStore.from_url(store.url).url == canonical


def test_a_relative_path_is_made_absolute_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = PosixStore.from_url("runs/../gpt")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert store.url == f"file://{tmp_path}/gpt"
    store.put("LATEST", b"x")
    assert (tmp_path / "gpt" / "LATEST").read_bytes() == b"x"


@pytest.mark.parametrize(
    "url, hint",
    [
        ("file://data/run", "file:///data/run"),
        ("file://", "file:///path"),
        ("file:relative", "file:///path"),
        ("file:///data/run#7", "%23"),
        ("file:///data/run?direct=no", "unknown option direct; known options of local paths: none"),
        ("file:///data/run?a=&b=", "unknown option a, b"),
        ("file:///data%00run", "no path"),
        ("", "no path"),
    ],
)
def test_an_address_that_is_none_is_refused_with_a_hint(url: str, hint: str) -> None:
    with pytest.raises(ConfigError) as refused:
        PosixStore.from_url(url)
    assert hint in str(refused.value)


def test_an_unknown_option_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"unknown option endpoint_url; known options of local paths: none"):
        PosixStore.from_url("/data/run", endpoint_url="x")


@pytest.mark.parametrize("root", ["relative", "", "/nul\0"])
def test_a_root_that_is_not_absolute_is_refused(root: str) -> None:
    with pytest.raises(ConfigError, match="absolute"):
        PosixConfig(root=Path(root))


def test_opening_creates_nothing_and_reading_a_missing_root_finds_nothing(tmp_path: Path) -> None:
    store = PosixStore.from_url(str(tmp_path / "missing" / "run"))
    assert store.capabilities().exclusive == "atomic"
    assert list(store.list("")) == []
    assert list(store.uploads("")) == []
    assert [result.error for result in store.delete(["data/a"])] == [None]
    with pytest.raises(LookupError):
        store.get("RUN.json", max_bytes=10)
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_pickling_keeps_the_configuration_and_nothing_else(tmp_path: Path) -> None:
    store = PosixStore(PosixConfig(root=tmp_path))
    store.put("LATEST", b"x")
    again = pickle.loads(pickle.dumps(store))
    assert again.url == store.url
    assert again.get("LATEST", max_bytes=1) == b"x"
