"""What a key, a prefix and a record are, and how a found record decides a publish."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckptstore.errors import CkptStoreError, ConfigError, CorruptionError
from ckptstore.store import (
    MAX_KEY_BYTES,
    CheckpointStore,
    Conflict,
    Published,
    check_key,
    check_prefix,
    settle,
    short_read,
    write_id_of,
)

SEGMENT = st.from_regex(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,30}", fullmatch=True)


@given(st.lists(SEGMENT, min_size=1, max_size=8).map("/".join))
def test_a_key_of_legal_segments_is_returned_as_it_is(key: str) -> None:
    assert check_key(key) == key


@given(st.text(max_size=40))
def test_what_is_not_made_of_legal_segments_is_refused(text: str) -> None:
    letters = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
    legal = all(segment and set(segment) <= letters and segment[0] != "." for segment in text.split("/"))
    if legal:
        assert check_key(text) == text
    else:
        with pytest.raises(ConfigError):
            check_key(text)


@pytest.mark.parametrize("key", ["a\n", "a/../b", "..", ".tmp-a", "a//b", "/a", "a/", "", "é", "٣", "a\x00"])
def test_a_key_that_could_leave_the_run_or_name_a_temporary_is_refused(key: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check_key(key)
    assert refused.value.key == key


def test_the_limits_of_a_key_are_1024_characters_and_200_a_segment() -> None:
    longest = "/".join(["k" * 200] * 5 + ["k" * 19])
    assert len(longest) == MAX_KEY_BYTES
    assert check_key(longest) == longest
    for key in (f"{longest}k", "s" * 201, f"a/{'s' * 201}/b"):
        with pytest.raises(ConfigError):
            check_key(key)


def test_a_refusal_quotes_only_the_beginning_of_a_huge_key() -> None:
    for key in ("x" * 100_000, "a/" + "x" * 1000):
        with pytest.raises(ConfigError) as refused:
            check_key(key)
        assert len(str(refused.value)) < 1000


def test_what_is_not_text_is_refused_as_a_key() -> None:
    with pytest.raises(ConfigError):
        check_key(b"a")  # type: ignore[arg-type]


@pytest.mark.parametrize("prefix", ["", "a", "a/", "a/b", "a/b/"])
def test_a_prefix_is_empty_or_a_key_with_or_without_a_slash(prefix: str) -> None:
    assert check_prefix(prefix) == prefix


@pytest.mark.parametrize("prefix", ["/", "a//", "../", ".tmp", "a/."])
def test_another_prefix_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigError):
        check_prefix(prefix)


@given(st.text())
def test_the_write_id_is_read_from_the_first_line(write_id: str) -> None:
    line = json.dumps({"step": 7, "write_id": write_id}).encode()
    assert write_id_of(line) == write_id
    assert write_id_of(line + b"\nsha256:00\n") == write_id


@pytest.mark.parametrize(
    "record",
    [
        b"",
        b"\n",
        b'{"write_id": "a',
        b'\n{"write_id": "a"}',
        b"[]",
        b'["write_id"]',
        b'"write_id"',
        b'{"write_id": 5}',
        b"{}",
        b"\xff\xfe",
        b"[" * 100_000,
    ],
    ids=repr,
)
def test_a_torn_or_foreign_file_has_no_write_id(record: bytes) -> None:
    assert write_id_of(record) is None
    assert settle(record, "a") == Conflict(record)


@given(st.binary(max_size=200))
def test_no_bytes_make_the_reading_of_a_write_id_fail(record: bytes) -> None:
    assert write_id_of(record) is None or isinstance(write_id_of(record), str)


def test_a_found_record_is_ours_only_if_it_carries_our_write_id() -> None:
    found = b'{"write_id":"a"}\n'
    assert settle(found, "a") == Published()
    assert settle(found, "b") == Conflict(found)
    assert settle(found, "") == Conflict(found)


def test_a_short_read_names_key_place_and_length() -> None:
    error = short_read("data/a", 10, 20, 5)
    assert isinstance(error, CorruptionError)
    assert (error.operation, error.key) == ("read_into", "data/a")
    for number in ("10", "20", "5"):
        assert number in str(error)


def test_a_store_that_lacks_a_verb_fails_when_it_is_made() -> None:
    class Partial(CheckpointStore):
        def close(self) -> None: ...

    with pytest.raises(TypeError, match="publish"):
        Partial()  # type: ignore[abstract]


def test_every_error_is_one_of_the_tree_and_says_whether_to_try_again() -> None:
    import ckptstore.errors as tree

    kinds = [getattr(tree, name) for name in tree.__all__]
    assert all(issubclass(kind, CkptStoreError) for kind in kinds)
    assert [kind.__name__ for kind in kinds if kind.retryable] == ["UnavailableError"]
    assert issubclass(tree.NotFoundError, LookupError)
    assert issubclass(tree.ConfigError, ValueError)
