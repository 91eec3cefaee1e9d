"""Save checkpoints of plain bytes through the run layer, without torch: quick enough to be killed a hundred times.

python -m ckptstore.testing.byte_saver FOLDER STEP STEP …      prints each step once it is reported committed
"""

from __future__ import annotations

import sys

from ckptstore.errors import CkptStoreError
from ckptstore.opening import open_store
from ckptstore.run.alive import permit
from ckptstore.run.changes import lineage
from ckptstore.run.manifest import FileEntry, Manifest, encode_manifest, manifest_ref
from ckptstore.run.session import Lost, Session
from ckptstore.state.digest import file_digest, part_digest

__all__ = ["body_of", "claim", "save"]

PART_BYTES = 64 * 1024


def body_of(step: int) -> bytes:
    """Return what a step saves."""
    return step.to_bytes(8, "big") * 20_000


def claim(session: Session) -> None:
    """Own the run, going on from its newest checkpoint."""
    while True:
        head = session.refresh()
        reason = "new" if head.seq < 0 else permit(session.journal, head, session.me, "auto")
        line = lineage(head.state)
        row = line[0] if line else None
        if not isinstance(session.claim(head, resume_from=row, branch=None, reason=reason), Lost):
            return


def save(session: Session, step: int) -> None:
    """Save one step in the order that the product follows."""
    attempt = session.mint(step)
    body = body_of(step)
    writer = session.store.create(attempt.prefix + "bytes", len(body), PART_BYTES)
    try:
        for start in range(0, len(body), PART_BYTES):
            writer.write(start, memoryview(body)[start : start + PART_BYTES])
        writer.finish()
    except BaseException:
        writer.abort()
        raise
    parts = [part_digest(body[start : start + PART_BYTES]) for start in range(0, len(body), PART_BYTES)]
    entry = FileEntry(
        path="bytes",
        size=len(body),
        rank=0,
        part_bytes=PART_BYTES,
        algorithm="xxh3-128",
        parts=tuple(part.hex() for part in parts),
        digest=file_digest(parts),
    )
    manifest = Manifest(
        run_uid=session.journal.run_uid,
        attempt=attempt.name,
        step=step,
        epoch=attempt.epoch,
        world_size=1,
        ranks=(0,),
        files=(entry,),
        n_bytes=0,
        root="",
        tensors={},
        tree={"states": {}, "rng": None},
    )
    encoded, n_bytes = encode_manifest(manifest, lambda *_: entry)
    session.store.put(session.journal.layout.manifest(attempt.name), encoded)
    session.commit(attempt, manifest=manifest_ref(encoded), n_bytes=n_bytes, metrics={}, tags=(), permanent=False)


def main() -> None:
    """Save the steps; a save that fails is reported and the next one tried."""
    session = Session(open_store(sys.argv[1]))
    try:
        claim(session)
        for step in map(int, sys.argv[2:]):
            try:
                save(session, step)
            except CkptStoreError as error:
                print("failed", step, type(error).__name__, flush=True)
            else:
                print("committed", step, flush=True)
    except CkptStoreError as error:
        print("failed", 0, type(error).__name__, flush=True)
    finally:
        session.close()


if __name__ == "__main__":
    main()
