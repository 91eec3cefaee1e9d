"""Does the conformance kit reject the stores that it must reject?

Each class here breaks one promise of MemoryStore, most of them as a real server, client library or careless backend
does, and names in ``caught_by`` the test of the kit that has to fail on it. A kit that passes one of them proves
nothing.
"""

from __future__ import annotations

import posixpath
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from ckptstore.errors import CkptStoreError, ConfigError, NotFoundError
from ckptstore.memory import MemoryStore
from ckptstore.store import Conflict, ObjectInfo, Published, settle
from ckptstore.testing.raw import RawMemory

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ckptstore.store import Capabilities, DeleteResult, Outcome, PartWriter, Upload, WritableBuffer

__all__ = ["EVIL_STORES", "EvilStore"]

PAGE = 1000
BLOCK = 4096
GLANCE_S = 0.002
"""How long a store that works in two steps leaves the door open between them, s."""


class EvilStore(MemoryStore):
    """A MemoryStore that breaks a promise."""

    caught_by: ClassVar[tuple[str, ...]]

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._raw = RawMemory(name)

    def _pause(self) -> None:
        threading.Event().wait(GLANCE_S)


class OverwritingStore(EvilStore):
    """Publishes by overwriting, as a rename or an unconditional PUT does."""

    caught_by = ("test_a_second_publish_gets_the_record_that_was_there_first", "test_one_of_many_threads_wins")

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        del write_id
        self.put(key, record)
        return Published()


class IgnoresConditionStore(EvilStore):
    """Keeps the first record and tells every publisher that it is theirs."""

    caught_by = ("test_one_of_many_threads_wins", "test_many_writers_fill_one_sequence")

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        super().publish(key, record, write_id=write_id)
        return Published()


class InvertedStore(EvilStore):
    """Takes "only if absent" for "only if present"."""

    caught_by = ("test_publish_creates_the_whole_record",)

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        del write_id
        if self._raw.read(key) is None:
            return Conflict(b"")
        self.put(key, record)
        return Published()


class LookThenWriteStore(EvilStore):
    """Looks whether the key exists, then writes."""

    caught_by = ("test_one_of_many_threads_wins",)

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        held = self._raw.read(key)
        if held is not None:
            return settle(held, write_id)
        self._pause()
        self.put(key, record)
        return Published()


class ForgetfulWriteIdStore(EvilStore):
    """Takes its own record for another's: a winner that asks again is told that it lost."""

    caught_by = ("test_publishing_again_with_the_same_write_id_is_published",)

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        held = self._raw.read(key)
        return super().publish(key, record, write_id=write_id) if held is None else Conflict(held)


class ComparesContentStore(EvilStore):
    """Takes equal length for authorship, as a comparison of weak etags does."""

    caught_by = ("test_equal_content_under_another_write_id_is_a_conflict",)

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        outcome = super().publish(key, record, write_id=write_id)
        match outcome:
            case Conflict(held) if len(held) == len(record):
                return Published()
        return outcome


class HidesTheWinnerStore(EvilStore):
    """Says Conflict without the record that was there first."""

    caught_by = ("test_a_second_publish_gets_the_record_that_was_there_first",)

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        outcome = super().publish(key, record, write_id=write_id)
        return Conflict(b"") if isinstance(outcome, Conflict) else outcome


class NumbersReusedStore(EvilStore):
    """The loser of a race cleans up "its" record, so that the number is given out again."""

    caught_by = ("test_a_second_publish_gets_the_record_that_was_there_first", "test_one_of_many_threads_wins")

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        outcome = super().publish(key, record, write_id=write_id)
        if isinstance(outcome, Conflict):
            self.delete([key])
        return outcome


class TornPublishStore(EvilStore):
    """Creates the record exclusively, then fills it."""

    caught_by = ("test_a_reader_never_sees_part_of_a_record",)

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        outcome = super().publish(key, record[: len(record) // 2], write_id=write_id)
        if isinstance(outcome, Published):
            self._pause()
            self.put(key, record)
        return outcome


class CreatesOverEmptyStore(EvilStore):
    """Takes an empty file for an absent one, as an exclusive create of zero bytes elsewhere would leave it."""

    caught_by = ("test_a_file_without_a_write_id_is_a_conflict",)

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        if self._raw.read(key) == b"":
            self.delete([key])
        return super().publish(key, record, write_id=write_id)


class TruncatesRecordsStore(EvilStore):
    """Cuts a record at its limit instead of refusing it."""

    caught_by = ("test_a_record_over_64_kib_is_refused",)

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        return super().publish(key, record[: 64 * 1024], write_id=write_id)


class PublishesAnywayStore(EvilStore):
    """Declares that it can't create-if-absent, and answers as if it could."""

    caught_by = ("test_publish_creates_the_whole_record",)

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), exclusive="none")


class HugeConflictStore(EvilStore):
    """Reads whatever is in the way, however large."""

    caught_by = ("test_a_conflict_holds_at_most_the_record_limit",)

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        outcome = super().publish(key, record, write_id=write_id)
        return Conflict(self._raw.read(key) or b"") if isinstance(outcome, Conflict) else outcome


class RemembersItsRecordsStore(EvilStore):
    """Knows its own records by having written them, not by their write id: a restart makes them another's."""

    caught_by = (
        "test_a_record_found_under_the_key_decides_by_its_write_id",
        "test_publishing_again_with_the_same_write_id_is_published",
    )

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._mine: dict[str, str] = {}

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        held = self._raw.read(key)
        if held is not None:
            return Published() if self._mine.get(key) == write_id else Conflict(held)
        self._mine[key] = write_id
        return super().publish(key, record, write_id=write_id)


class ReplacesItsRecordStore(EvilStore):
    """Writes the body again when its own write id comes again."""

    caught_by = ("test_the_same_write_id_with_another_body_changes_nothing",)

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        outcome = super().publish(key, record, write_id=write_id)
        if isinstance(outcome, Published):
            self.put(key, record)
        return outcome


class LeavesTemporariesStore(EvilStore):
    """Leaves the temporary of a lost publish behind."""

    caught_by = ("test_publish_leaves_only_records",)

    def publish(self, key: str, record: bytes, *, write_id: str) -> Outcome:
        outcome = super().publish(key, record, write_id=write_id)
        if isinstance(outcome, Conflict):
            self._raw.write(f".tmp-{write_id}", record)
        return outcome


class StaleListingStore(EvilStore):
    """Lists what it listed before, as a client with a listing cache does."""

    caught_by = (
        "test_list_is_never_a_memory_of_the_last_one",
        "test_a_record_is_seen_at_once_by_another_store_object",
        "test_a_finished_object_is_seen_at_once",
    )

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._listed: dict[tuple[str, str | None], list[ObjectInfo]] = {}

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        if (prefix, after) not in self._listed:
            self._listed[prefix, after] = list(super().list(prefix, after=after))
        yield from self._listed[prefix, after]


class OnePageStore(EvilStore):
    """Lists the first page only."""

    caught_by = ("test_many_keys",)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        yield from list(super().list(prefix, after=after))[:PAGE]


class WalkingListStore(EvilStore):
    """Lists in the order of a walk through directories, which is not that of the keys."""

    caught_by = ("test_list_compares_whole_keys",)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        yield from sorted(super().list(prefix, after=after), key=lambda info: info.key.split("/"))


class FolderListStore(EvilStore):
    """Takes every prefix for a folder."""

    caught_by = ("test_list_compares_whole_keys",)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        folder = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
        yield from super().list(folder, after=after)


class InclusiveAfterStore(EvilStore):
    """Begins a listing with the key it was to begin after."""

    caught_by = ("test_list_goes_on_after_a_key",)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        yield from (info for info in super().list(prefix) if after is None or info.key >= after)


class RestlessListStore(EvilStore):
    """Looks at each object again while it lists, and fails when one has gone."""

    caught_by = ("test_a_listing_survives_deletion",)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        for info in super().list(prefix, after=after):
            yield self.stat(info.key)


class TornPutStore(EvilStore):
    """Replaces an object by emptying it and filling it again."""

    caught_by = ("test_a_reader_never_sees_part_of_a_put",)

    def put(self, key: str, body: bytes) -> None:
        super().put(key, body[: len(body) // 2])
        self._pause()
        super().put(key, body)


class InPlacePutStore(EvilStore):
    """Writes over the old bytes and leaves what was longer."""

    caught_by = ("test_put_replaces_the_whole_object",)

    def put(self, key: str, body: bytes) -> None:
        super().put(key, body + (self._raw.read(key) or b"")[len(body) :])


class CachingGetStore(EvilStore):
    """Returns what it read before."""

    caught_by = ("test_get_sees_what_another_program_wrote", "test_put_replaces_the_whole_object")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._read: dict[str, bytes] = {}

    def get(self, key: str, *, max_bytes: int) -> bytes:
        if key not in self._read:
            self._read[key] = super().get(key, max_bytes=max_bytes)
        return self._read[key]


class BoundlessGetStore(EvilStore):
    """Cuts an object at ``max_bytes`` instead of refusing it."""

    caught_by = ("test_get_refuses_more_than_max_bytes",)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return super().get(key, max_bytes=1 << 40)[:max_bytes]


class NamelessErrorStore(EvilStore):
    """Raises the right error without verb and key."""

    caught_by = ("test_absent_is_not_found",)

    def stat(self, key: str) -> ObjectInfo:
        try:
            return super().stat(key)
        except NotFoundError as error:
            raise NotFoundError(str(error)) from error


class EmptyForAbsentStore(EvilStore):
    """Returns nothing where there is nothing."""

    caught_by = ("test_absent_is_not_found", "test_put_stores_exactly_the_bytes")

    def get(self, key: str, *, max_bytes: int) -> bytes:
        try:
            return super().get(key, max_bytes=max_bytes)
        except NotFoundError:
            return b""


class ShortReadStore(EvilStore):
    """Fills what it can of a buffer and says nothing."""

    caught_by = ("test_a_short_object_is_corruption",)

    def read_into(self, key: str, offset: int, buffer: WritableBuffer) -> None:
        body = self.get(key, max_bytes=1 << 40)
        piece = body[offset : offset + len(buffer)]
        memoryview(buffer)[: len(piece)] = piece


class CountsBlocksStore(EvilStore):
    """Gives the room that an object takes for its size."""

    caught_by = ("test_stat_and_list_agree",)

    def stat(self, key: str) -> ObjectInfo:
        return ObjectInfo(key=key, n_bytes=-(-super().stat(key).n_bytes // BLOCK) * BLOCK)


class BlockReadStore(EvilStore):
    """Reads from the block in which the offset lies."""

    caught_by = ("test_read_into_fills_the_buffer_from_the_offset_on",)

    def read_into(self, key: str, offset: int, buffer: WritableBuffer) -> None:
        super().read_into(key, offset // BLOCK * BLOCK, buffer)


class SharedScratchStore(EvilStore):
    """Puts all bodies through one buffer of the store."""

    caught_by = ("test_threads_do_not_disturb_each_other",)

    def put(self, key: str, body: bytes) -> None:
        self._scratch = body
        self._pause()
        super().put(key, self._scratch)


class TombstoneStore(EvilStore):
    """Drops what is put under a key that was deleted."""

    caught_by = ("test_behaves_like_the_reference",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._dead: set[str] = set()

    def put(self, key: str, body: bytes) -> None:
        if key not in self._dead:
            super().put(key, body)

    def delete(self, keys: Iterable[str]) -> Sequence[DeleteResult]:
        results = super().delete(keys)
        self._dead.update(result.key for result in results)
        return results


class NormalisesDeleteStore(EvilStore):
    """Deletes what an illegal key would mean to a file system."""

    caught_by = ("test_delete_refuses_an_illegal_key",)

    def delete(self, keys: Iterable[str]) -> Sequence[DeleteResult]:
        return super().delete(posixpath.normpath(key) for key in keys)


class SecondThoughtsStore(EvilStore):
    """Promises more at the second call than at the first, as a probe that races with itself would make it."""

    caught_by = ("test_capabilities_do_not_change",)

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._asked = 0

    def capabilities(self) -> Capabilities:
        self._asked += 1
        return replace(super().capabilities(), grace_s=float(self._asked))


class DeletesBelowStore(EvilStore):
    """Deletes what begins with the key, as a recursive remove does."""

    caught_by = ("test_delete_removes_the_named_objects_only", "test_a_prefix_is_not_an_object")

    def delete(self, keys: Iterable[str]) -> Sequence[DeleteResult]:
        results: list[DeleteResult] = []
        for key in keys:
            super().delete([info.key for info in self.list(key)])
            results += super().delete([key])
        return results


class AbsentIsAnErrorStore(EvilStore):
    """Fails to delete what is not there."""

    caught_by = ("test_delete_removes_the_named_objects_only",)

    def delete(self, keys: Iterable[str]) -> Sequence[DeleteResult]:
        asked = list(keys)
        for key in asked:
            self.stat(key)
        return super().delete(asked)


class OneBatchDeleteStore(EvilStore):
    """Deletes the first batch only."""

    caught_by = ("test_many_keys",)

    def delete(self, keys: Iterable[str]) -> Sequence[DeleteResult]:
        return super().delete(list(keys)[:PAGE])


class FoldsCaseStore(EvilStore):
    """Takes upper and lower case for the same, as some file systems do."""

    caught_by = ("test_case_matters",)

    def put(self, key: str, body: bytes) -> None:
        super().put(key.lower(), body)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        return super().get(key.lower(), max_bytes=max_bytes)


class AnyKeyStore(EvilStore):
    """Cleans a key up instead of refusing it, and so writes somewhere else."""

    caught_by = ("test_an_illegal_key_is_refused",)

    def put(self, key: str, body: bytes) -> None:
        super().put("/".join(part for part in key.split("/") if part.strip("./").isidentifier()) or "x", body)


class LateRefusalStore(EvilStore):
    """Refuses an illegal key after a first write."""

    caught_by = ("test_an_illegal_key_is_refused",)

    def put(self, key: str, body: bytes) -> None:
        try:
            super().put(key, body)
        except ConfigError:
            self._raw.write("stray", body)
            raise


class ShortSegmentStore(EvilStore):
    """Can't hold the longest legal segment, because it needs room for the name of a temporary."""

    caught_by = ("test_the_longest_keys_work",)

    def put(self, key: str, body: bytes) -> None:
        if any(len(segment) > 190 for segment in key.split("/")):  # noqa: PLR2004  a little less than is promised
            message = f"{key}: name too long"
            raise CkptStoreError(message, operation="put", key=key)
        super().put(key, body)


class ManyNamesStore(EvilStore):
    """Has a url for each store object."""

    caught_by = ("test_equal_urls_share_their_data",)

    @property
    def url(self) -> str:
        return f"{super().url}#{id(self)}"


class ProbesInTheJournalStore(EvilStore):
    """Leaves its probe where the run keeps its records."""

    caught_by = ("test_a_probe_leaves_the_run_alone", "test_an_empty_root_is_an_empty_store")

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.put("journal/probe", b"x")


class ClosesForAllStore(EvilStore):
    """Takes the data with it when it is closed."""

    caught_by = ("test_close_is_idempotent",)

    def close(self) -> None:
        for stored in self._raw.keys():  # noqa: SIM118  a raw view is no dict
            self._raw.delete(stored)


class _Writes:
    """A PartWriter that passes everything on; the evil ones change one verb."""

    def __init__(self, writer: PartWriter, raw: RawMemory, key: str, n_bytes: int) -> None:
        self._writer = writer
        self._raw = raw
        self._key = key
        self._n_bytes = n_bytes

    def write(self, offset: int, buffer: bytes | bytearray | memoryview) -> None:
        self._writer.write(offset, buffer)

    def finish(self) -> None:
        self._writer.finish()

    def abort(self) -> None:
        self._writer.abort()


class _KeepsBuffers(_Writes):
    def __init__(self, writer: PartWriter, raw: RawMemory, key: str, n_bytes: int) -> None:
        super().__init__(writer, raw, key, n_bytes)
        self._kept: list[tuple[int, bytes | bytearray | memoryview]] = []

    def write(self, offset: int, buffer: bytes | bytearray | memoryview) -> None:
        self._kept.append((offset, buffer))

    def finish(self) -> None:
        for offset, buffer in self._kept:
            self._writer.write(offset, buffer)
        self._writer.finish()


class _Appends(_Writes):
    def __init__(self, writer: PartWriter, raw: RawMemory, key: str, n_bytes: int) -> None:
        super().__init__(writer, raw, key, n_bytes)
        self._lock = threading.Lock()
        self._body = b""

    def write(self, offset: int, buffer: bytes | bytearray | memoryview) -> None:
        del offset
        with self._lock:
            self._body += bytes(buffer)

    def finish(self) -> None:
        self._writer.abort()
        self._raw.write(self._key, self._body)


class _FillsGaps(_Writes):
    def finish(self) -> None:
        try:
            self._writer.finish()
        except CkptStoreError:
            self._writer.abort()
            self._raw.write(self._key, bytes(self._n_bytes))


class _NeverAborts(_Writes):
    def abort(self) -> None:
        pass


class _FinishesLater(_Writes):
    def finish(self) -> None:
        pass


class _AnyLength(_Writes):
    def write(self, offset: int, buffer: bytes | bytearray | memoryview) -> None:
        try:
            self._writer.write(offset, buffer)
        except ConfigError:
            return


class _ZeroPads(_Writes):
    def finish(self) -> None:
        self._writer.finish()
        body = self._raw.read(self._key) or b""
        self._raw.write(self._key, body + bytes(-len(body) % BLOCK))


class EvilWriterStore(EvilStore):
    """A store whose PartWriter breaks a promise."""

    writer: ClassVar[type[_Writes]]

    def create(self, key: str, n_bytes: int, part_bytes: int) -> PartWriter:
        return self.writer(super().create(key, n_bytes, part_bytes), self._raw, key, n_bytes)


class KeepsBuffersStore(EvilWriterStore):
    """Reads the caller's buffers when the object is finished, when the caller uses them for something else."""

    writer = _KeepsBuffers
    caught_by = ("test_a_buffer_may_be_used_again_after_write",)


class AppendsStore(EvilWriterStore):
    """Puts the parts in the order in which they came."""

    writer = _Appends
    caught_by = ("test_parts_may_come_from_last_to_first",)


class FillsGapsStore(EvilWriterStore):
    """Finishes an object of which a part is missing with zeros."""

    writer = _FillsGaps
    caught_by = ("test_a_missing_part_is_refused",)


class NeverAbortsStore(EvilWriterStore):
    """Leaves what an aborted write had written."""

    writer = _NeverAborts
    caught_by = ("test_abort_leaves_nothing",)


class FinishesLaterStore(EvilWriterStore):
    """Returns from finish before there is anything to see."""

    writer = _FinishesLater
    caught_by = ("test_a_finished_object_is_seen_at_once",)


class AnyLengthStore(EvilWriterStore):
    """Ignores a part that does not fit."""

    writer = _AnyLength
    caught_by = ("test_a_part_off_the_grid_is_refused",)


class ZeroPadsStore(EvilWriterStore):
    """Leaves the padding that direct writes need at the end of the object."""

    writer = _ZeroPads
    caught_by = ("test_parts_make_up_the_object_in_any_order", "test_aligned_memory_is_stored_like_any_other")


class EmptiesOnCreateStore(EvilStore):
    """Truncates a finished object that is created again."""

    caught_by = ("test_a_payload_key_is_written_once",)

    def create(self, key: str, n_bytes: int, part_bytes: int) -> PartWriter:
        self.delete([key])
        return super().create(key, n_bytes, part_bytes)


class ShowsTemporariesStore(EvilStore):
    """Lists the temporary of an unfinished write."""

    caught_by = ("test_an_unfinished_object_shows_no_temporary",)

    def list(self, prefix: str, *, after: str | None = None) -> Iterator[ObjectInfo]:
        yield from super().list(prefix, after=after)
        for upload in super().uploads(prefix):
            yield ObjectInfo(key=f"{upload.key}.part", n_bytes=1)


class HidesUploadsStore(EvilStore):
    """Doesn't show the unfinished writes of others, so that no one can remove them."""

    caught_by = ("test_an_unfinished_write_can_be_swept",)

    def uploads(self, prefix: str) -> Iterator[Upload]:
        del prefix
        return iter(())


EVIL_STORES: tuple[type[EvilStore], ...] = (
    OverwritingStore,
    IgnoresConditionStore,
    InvertedStore,
    LookThenWriteStore,
    ForgetfulWriteIdStore,
    ComparesContentStore,
    HidesTheWinnerStore,
    NumbersReusedStore,
    TornPublishStore,
    CreatesOverEmptyStore,
    TruncatesRecordsStore,
    PublishesAnywayStore,
    HugeConflictStore,
    RemembersItsRecordsStore,
    ReplacesItsRecordStore,
    LeavesTemporariesStore,
    StaleListingStore,
    OnePageStore,
    WalkingListStore,
    FolderListStore,
    InclusiveAfterStore,
    RestlessListStore,
    TornPutStore,
    InPlacePutStore,
    CachingGetStore,
    BoundlessGetStore,
    NamelessErrorStore,
    EmptyForAbsentStore,
    ShortReadStore,
    CountsBlocksStore,
    BlockReadStore,
    SharedScratchStore,
    TombstoneStore,
    NormalisesDeleteStore,
    SecondThoughtsStore,
    DeletesBelowStore,
    AbsentIsAnErrorStore,
    OneBatchDeleteStore,
    FoldsCaseStore,
    AnyKeyStore,
    LateRefusalStore,
    ShortSegmentStore,
    ManyNamesStore,
    ProbesInTheJournalStore,
    ClosesForAllStore,
    KeepsBuffersStore,
    AppendsStore,
    FillsGapsStore,
    NeverAbortsStore,
    FinishesLaterStore,
    AnyLengthStore,
    ZeroPadsStore,
    EmptiesOnCreateStore,
    ShowsTemporariesStore,
    HidesUploadsStore,
)
"""Every store that the kit has to reject."""
