"""An address opens the store it names, or is refused with what to write instead, and no secret is repeated."""

from __future__ import annotations

import os
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from ckptstore import opening
from ckptstore.errors import ConfigError, UnsupportedError
from ckptstore.memory import MemoryStore
from ckptstore.opening import open_store, schemes


@pytest.mark.parametrize(
    "address",
    [
        "s3:/bucket/run",
        Path("s3://bucket/run"),
        Path("memory://x"),
        Path("/data") / "s3://bucket",
        os.path.join("/data", "gs://bucket/run"),  # noqa: PTH118 - what makes it
        "./s3:/bucket",
    ],
    ids=repr,
)
def test_a_url_that_a_path_class_squashed_is_refused_with_the_url_to_write(
    address: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"write (s3|gs|memory)://(bucket|x)\S* as a str, not as a Path"):
        open_store(address)
    assert list(tmp_path.iterdir()) == []


def test_the_hint_for_a_squashed_file_url_has_three_slashes() -> None:
    with pytest.raises(ConfigError, match="write file:///tmp/run as a str"):
        open_store(Path("file:///tmp/run"))


def test_paths_and_file_urls_of_one_directory_are_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    spellings: list[str | Path] = [
        tmp_path / "run",
        str(tmp_path / "run"),
        f"{tmp_path}/run/",
        f"file://{tmp_path}/run",
        "run",
        "./run//",
    ]
    spellings += [f"FILE://{tmp_path}/run/", f"{tmp_path}/other/../run"]
    stores = [open_store(item) for item in spellings]
    assert {store.url for store in stores} == {f"file://{tmp_path}/run"}
    monkeypatch.chdir("/")
    assert stores[4].url == f"file://{tmp_path}/run"
    assert list(tmp_path.iterdir()) == []  # opening creates nothing


def test_a_name_with_a_colon_is_a_path(tmp_path: Path) -> None:
    assert open_store(tmp_path / "run:1" / "a:b@c").url.startswith("file://")


def test_memory_addresses_are_one_store_by_name() -> None:
    assert {open_store(url).url for url in ("memory://opening", "memory://opening/", "MEMORY://opening")} == {
        "memory://opening"
    }
    with pytest.raises(ConfigError, match="needs a name"):
        open_store("memory://")


@pytest.mark.parametrize("address", ["ftp://host/run", "S4://bucket", "x-y+z.1://a"])
def test_an_unknown_scheme_is_refused_with_the_known_ones(address: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"no backend for {address.lower().split(':')[0].replace('+', '.')}://"
    ) as caught:
        open_store(address)
    assert {"file", "memory"} <= set(schemes())
    for scheme in schemes():
        assert scheme in str(caught.value)


@pytest.mark.parametrize("url", ["memory://x", "file:///tmp/x", "/tmp/x"])
def test_an_unknown_option_is_refused_by_name(url: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown option .*endpont_url"):
        open_store(url, endpont_url="http://localhost")


def test_an_option_in_the_url_is_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"unknown option .*color"):
        open_store("file:///tmp/x?color=red")


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:hunter2@bucket/run",
        "s3:/user:hunter2@bucket/run",
        "nosuch://user:hunter2@host/run",
        "file://user:hunter2@/run",
        "s3://bucket/run?aws_secret_access_key=hunter2",
        "s3://bucket/run?a=b&Password=hunter2",
        "s3:/bucket/run?session_token=hunter2",
        "az://container/run?sas_token=hunter2",
        "gs://bucket/run?x-goog-signature=hunter2",
        "/data/s3://user:hunter2@bucket/run",
    ],
)
def test_a_secret_in_a_url_is_refused_and_never_repeated(url: str) -> None:
    with pytest.raises(
        ConfigError, match=r"the address holds a (user name and password|secret in its option)"
    ) as caught:
        open_store(url)
    assert "hunter2" not in f"{caught.value} {caught.value.key} {caught.value!r}"


@pytest.mark.parametrize("address", ["", b"/tmp/x", "/tmp/\0x", "file:///tmp/%00"], ids=repr)
def test_what_is_no_address_is_refused(address: Any) -> None:
    with pytest.raises(ConfigError):
        open_store(address)


def test_a_backend_whose_package_is_missing_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint(name="tape", value="ckptstore_tape:TapeStore", group="ckptstore.backends")
    monkeypatch.setattr(opening, "entry_points", lambda **_: [point])
    with pytest.raises(UnsupportedError, match=r"tape:// can't be imported \(No module named 'ckptstore_tape'\)"):
        open_store("tape://x")


def test_a_third_partys_scheme_gets_the_whole_url_and_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tape(MemoryStore):
        @classmethod
        def from_url(cls, url: str, **options: object) -> Any:
            return url, options

    class Point:
        name = "tape"

        def load(self) -> type[Tape]:
            return Tape

    monkeypatch.setattr(opening, "entry_points", lambda **_: [Point()])
    opened: Any = open_store("Tape://Drive/Run?speed=3", reel=1)
    assert opened == ("tape://Drive/Run?speed=3", {"reel": 1})


def test_only_posix_systems_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "name", "nt")
    with pytest.raises(UnsupportedError, match="POSIX systems only"):
        open_store("memory://x")
