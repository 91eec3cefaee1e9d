"""A power cut at any moment leaves every reported checkpoint whole, lists nothing else, wedges nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ckptstore.checkpoint import Run
from ckptstore.run.alive import permit
from ckptstore.run.changes import lineage
from ckptstore.run.session import Lost, Session
from ckptstore.testing.byte_saver import save
from ckptstore.testing.crashfs import CrashFiles
from ckptstore_posix import PosixConfig, PosixStore


def open_on(files: CrashFiles) -> PosixStore:
    return PosixStore(PosixConfig(root=Path("/disk/run")), files=files)


def claim(session: Session) -> None:
    """Take the run over without watching: the writer before was on a machine that lost power."""
    while True:
        head = session.refresh()
        reason = "new" if head.seq < 0 else permit(session.journal, head, session.me, True)
        line = lineage(head.state)
        row = line[0] if line else None
        if not isinstance(session.claim(head, resume_from=row, branch=None, reason=reason), Lost):
            return


def live(files: CrashFiles, told: dict[int, int], *steps: int) -> None:
    """Claim, save *steps*, close; note after how many changes of the disk each was reported."""
    session = Session(open_on(files))
    claim(session)
    for step in steps:
        save(session, step)
        told[step] = len(files.changes)
    session.close()


@pytest.mark.timeout(600)
def test_a_power_cut_after_any_change_loses_no_reported_checkpoint(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    files = CrashFiles()
    told: dict[int, int] = {}
    live(files, told, 10, 20)
    live(files, told, 30)  # a second writer takes over
    cuts = found = 0
    for cut in files.cuts(limit=6):
        cuts += 1
        expected = [step for step, after in told.items() if cut.after >= after]
        run = Run(open_on(cut.files))
        listed = [item.step for item in run.checkpoints(all=True)]
        assert set(expected) <= set(listed), f"{cut}: told {expected}, listed {listed}"
        assert run.verify().ok, f"{cut}: {run.verify()}"
        found += len(listed)
        if cuts % 5 == 0:
            again: dict[int, int] = {}
            live(cut.files, again, 99)
            assert [item.step for item in Run(open_on(cut.files)).checkpoints()] == [*listed, 99], str(cut)
    print(f"{cuts} disks after power cuts at {len(files.changes)} moments, {found} checkpoints found whole, 0 lost")
    assert cuts > 200
    assert found > 100


def test_the_test_above_can_fail_when_folders_are_not_synced() -> None:
    class NoFolderSync(CrashFiles):
        """fsync of a folder does nothing."""

        def fsync(self, fd: int) -> None:
            import stat

            if not stat.S_ISDIR(self.fstat(fd).st_mode):
                super().fsync(fd)

    files = NoFolderSync()
    told: dict[int, int] = {}
    live(files, told, 10)
    lost = 0
    for cut in files.cuts(limit=4):
        if cut.after >= told[10]:
            try:
                lost += [item.step for item in Run(open_on(cut.files)).checkpoints()] != [10]
            except Exception:
                lost += 1
    assert lost
