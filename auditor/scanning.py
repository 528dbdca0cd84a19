"""Every file scanned, in worker processes, but those that an earlier run scanned and nobody changed since."""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from auditor.model import Failure
from auditor.progress import Progress
from auditor.source.clue import Clue
from auditor.source.index import FileIndex
from auditor.source.scan import ScanJob, Scanned, scan
from auditor.source.suppress import Suppression
from auditor.texts import Texts
from auditor.workers import Died, run_all


@dataclass(frozen=True, slots=True)
class Scan:
    """All files as their workers saw them, sorted by path."""

    files: tuple[Scanned, ...]
    new: int = 0  # how many of them were scanned in this run

    @property
    def digests(self) -> dict[str, str]:
        return {file.path: file.digest for file in self.files}

    @property
    def indexes(self) -> tuple[FileIndex, ...]:
        return tuple(file.index for file in self.files if file.index)

    @property
    def suppressions(self) -> tuple[Suppression, ...]:
        return tuple(comment for file in self.files for comment in file.suppressions)

    @property
    def relevant(self) -> tuple[str, ...]:
        return tuple(file.path for file in self.files if file.relevant)

    @property
    def failures(self) -> tuple[Failure, ...]:
        return tuple(file.failure for file in self.files if file.failure)


def scan_all(
    texts: Texts, earlier: Mapping[str, Scanned], clues: tuple[Clue, ...], jobs: int, progress: Progress
) -> Scan:
    """Scan every file but those of which `earlier` holds a scan that is still true."""
    done = dict(earlier)
    waiting = [ScanJob(file, clues, texts.held(file)) for file in texts if file.path not in done]
    total = len(done) + len(waiting)
    for job, result in run_all(scan, waiting, jobs):
        path = job.file.path
        done[path] = _died(path, result) if isinstance(result, Died) else _decoder.decode(result)
        progress("Reading", len(done), total)
    return Scan(tuple(done[path] for path in sorted(done)), new=len(waiting))


_decoder = msgspec.json.Decoder(Scanned)


def _died(path: str, died: Died) -> Scanned:
    message = f"crashed the process that read it (exit code {died.exit_code})"
    return Scanned(path, message, failure=Failure(path, 0, message))
