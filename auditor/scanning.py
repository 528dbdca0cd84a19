"""Every file scanned, in worker processes, but those that an earlier run scanned and nobody changed since."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from auditor.config import AnalysisSettings
from auditor.model import Failure
from auditor.progress import Progress
from auditor.project.result import FlowResult
from auditor.source.clue import Clue
from auditor.source.index import FileIndex
from auditor.source.scan import ScanJob, Scanned, Sight, look_at, scan
from auditor.source.suppress import Suppression
from auditor.texts import Texts
from auditor.workers import Died, run_all

MANY = 200
"""So many new files occupy the workers long enough for one of them to follow the leases meanwhile."""


@dataclass(frozen=True, slots=True)
class Scan:
    """All files as their workers saw them, sorted by path."""

    files: tuple[Scanned, ...]
    new: int = 0  # how many of them were scanned in this run
    flow: FlowResult | None = None  # of the relevant files, where a worker has followed them meanwhile

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


@dataclass(frozen=True, slots=True)
class FlowJob:
    """The flow analysis of a whole tree, which a worker can do before all of it has been scanned."""

    texts: Texts
    paths: tuple[str, ...]
    relevant: tuple[str, ...]
    settings: AnalysisSettings


def scan_all(
    texts: Texts, earlier: Mapping[str, Scanned], clues: tuple[Clue, ...], jobs: int, progress: Progress,
    follow: AnalysisSettings | None = None,
) -> Scan:  # fmt: skip
    """Scan every file but those of which `earlier` holds a scan that is still true. `follow` are the settings
    by which leases may be followed at the same time."""
    done = dict(earlier)
    waiting = [ScanJob(file, clues, texts.held(file)) for file in texts if file.path not in done]
    total = len(done) + len(waiting)
    following: list[ScanJob | FlowJob] = []
    if follow is not None and jobs > 1 and len(waiting) >= MANY:
        waiting = _sighted(waiting, jobs)
        following = [_flow_job(texts, [*done.values(), *waiting], follow)]
    flow = None
    for job, result in run_all(_work, waiting, jobs, first=following):
        if isinstance(job, FlowJob):
            flow = None if isinstance(result, Died) else _flow_decoder.decode(result)
            continue
        path = job.file.path
        done[path] = _died(path, result) if isinstance(result, Died) else _decoder.decode(result)
        progress("Reading", len(done), total)
    scan = Scan(tuple(done[path] for path in sorted(done)), new=len(waiting), flow=flow)
    foreseen = [job.relevant for job in following if isinstance(job, FlowJob)] == [scan.relevant]
    return scan if foreseen else replace(scan, flow=None)  # what was followed has failed to be read


def _sighted(waiting: list[ScanJob], jobs: int) -> list[ScanJob]:
    """The same, looked at: by their bytes it is known which of them the flow analysis must read."""
    seen = {job.file.path: sight for job, sight in run_all(look_at, waiting, jobs)}
    return [replace(job, sight=_unless_died(seen[job.file.path])) for job in waiting]


def _unless_died(sight: Sight | Died | None) -> Sight | None:
    return None if isinstance(sight, Died) else sight


def _flow_job(texts: Texts, files: Iterable[ScanJob | Scanned], settings: AnalysisSettings) -> FlowJob:
    known = dict(map(_relevance, files))
    paths = sorted(known)
    return FlowJob(texts, tuple(paths), tuple(path for path in paths if known[path]), settings)


def _relevance(file: ScanJob | Scanned) -> tuple[str, bool]:
    if isinstance(file, Scanned):
        return file.path, file.relevant
    return file.file.path, file.sight is not None and file.sight.relevant


def _work(job: ScanJob | FlowJob) -> bytes:
    if isinstance(job, ScanJob):
        return scan(job)
    from auditor.project.analysis import analyse  # half of what starting costs, and one worker alone needs it

    return msgspec.json.encode(analyse(job.texts.readable(job.paths), job.settings, job.relevant))


_decoder = msgspec.json.Decoder(Scanned)
_flow_decoder = msgspec.json.Decoder(FlowResult)


def _died(path: str, died: Died) -> Scanned:
    message = f"crashed the process that read it (exit code {died.exit_code})"
    return Scanned(path, message, failure=Failure(path, 0, message))
