"""What the reference store adds to the contract: its names and its address."""

from __future__ import annotations

import pytest

from ckptstore.errors import CkptStoreError, ConfigError, NotFoundError
from ckptstore.memory import MemoryStore


def test_two_stores_of_one_name_share_their_data_and_their_url() -> None:
    one, two = MemoryStore("shared"), MemoryStore.from_url("memory://shared")
    one.put("a", b"x")
    assert two.get("a", max_bytes=1) == b"x"
    assert one.url == two.url == "memory://shared"


def test_stores_of_different_names_share_nothing() -> None:
    one, two = MemoryStore("this"), MemoryStore("that")
    one.put("a", b"x")
    with pytest.raises(NotFoundError):
        two.get("a", max_bytes=1)
    assert one.url != two.url


def test_the_address_needs_a_name_and_takes_no_options() -> None:
    for url in ("memory://", "memory:///"):
        with pytest.raises(ConfigError, match="name"):
            MemoryStore.from_url(url)
    with pytest.raises(ConfigError, match="colour"):
        MemoryStore.from_url("memory://a", colour="blue")


def test_the_caller_keeps_no_hold_on_what_it_stored() -> None:
    store = MemoryStore("own-copy")
    body = bytearray(b"before")
    store.put("a", body)  # type: ignore[arg-type]
    body[:] = b"after!"
    assert store.get("a", max_bytes=10) == b"before"


def test_a_write_that_was_swept_can_not_be_finished() -> None:
    store = MemoryStore("swept")
    writer = store.create("a", 1, 1)
    writer.write(0, b"x")
    for upload in store.uploads(""):
        store.abort_upload(upload)
    with pytest.raises(CkptStoreError, match="aborted"):
        writer.finish()
    with pytest.raises(NotFoundError):
        store.stat("a")


def test_a_key_that_is_being_written_is_taken() -> None:
    store = MemoryStore("busy")
    store.create("a", 1, 1)
    with pytest.raises(CkptStoreError, match="exists"):
        MemoryStore("busy").create("a", 1, 1)
