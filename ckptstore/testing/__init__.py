"""How does the author of a backend prove that checkpoints on it are safe?

With the conformance kit: one line in ``conftest.py`` and one class::

    pytest_plugins = ["ckptstore.testing.plugin"]


    class TestPosix(StoreConformance):
        @pytest.fixture
        def subject(self, tmp_path: Path) -> Subject:
            config = PosixConfig(root=tmp_path)
            return Subject(
                store=PosixStore(config),
                raw=RawDirectory(tmp_path),
                reopen=lambda: PosixStore(config),
                open_elsewhere=functools.partial(PosixStore, config),
            )

Import names from the modules: ``contract`` (StoreConformance), ``subject`` (Subject), ``raw`` (RawView, RawDirectory,
RawMemory), ``publish`` (races), ``faulty`` (FaultyStore, FaultPlan, Killed), ``recording`` (RecordingStore), ``evil``
(stores that must be rejected). This module imports nothing, so that pytest can rewrite the kit's asserts first, and a
process of a race starts without pytest.
"""

from __future__ import annotations
