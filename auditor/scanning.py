"""Every file scanned, in worker processes, but those that an earlier run scanned and nobody changed since."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from auditor.cache import Cache
from auditor.model import Failure
from auditor.source.index import FileIndex
from auditor.source.load import Unreadable, digest
from auditor.source.scan import ScanJob, Scanned, scan
from auditor.source.suppress import Suppression
from auditor.texts import Texts
from auditor.workers import Died, run_all

Progress = Callable[[int, int], None]
"""Called with the number of files done and the number of all."""
WORDS = ("alloc", "acquire", "lease", "borrow", "reserve", "pin", "lock", "pool", "open(")


def no_progress(done: int, total: int) -> None:
    """Tell nobody."""


@dataclass(frozen=True, slots=True)
class Scan:
    """All files as their workers saw them, by path."""

    files: tuple[Scanned, ...]

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


def content_digests(texts: Texts) -> dict[str, str]:
    """The digest of every file's bytes; of one that cannot be read, why."""
    digests = {}
    for file in texts:
        try:
            digests[file.path] = digest(texts.data(file))
        except Unreadable as error:
            digests[file.path] = str(error)
    return digests


def scan_all(
    texts: Texts, known: Mapping[str, str], cache: Cache, tool: str, jobs: int, progress: Progress
) -> Scan:
    """Scan every file; `known` are the digests of those whose earlier scan may be taken up."""
    earlier = cache.get("scan", tool, dict[str, Scanned]) if known else None
    done = {path: old for path, old in (earlier or {}).items() if known.get(path) == old.digest}
    jobs_left = [ScanJob(file, WORDS, texts.held(file)) for file in texts if file.path not in done]
    total = len(done) + len(jobs_left)
    for job, result in run_all(scan, jobs_left, jobs):
        path = job.file.path
        done[path] = _died(path, result) if isinstance(result, Died) else _decoder.decode(result)
        progress(len(done), total)
    if jobs_left:
        cache.put("scan", tool, done)
    return Scan(tuple(done[path] for path in sorted(done)))


_decoder = msgspec.json.Decoder(Scanned)


def _died(path: str, died: Died) -> Scanned:
    message = f"crashed the process that read it (exit code {died.exit_code})"
    return Scanned(path, message, failure=Failure(path, 0, message))
