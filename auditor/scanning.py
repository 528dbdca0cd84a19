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
from auditor.source.parse import remembering
from auditor.source.scan import ScanJob, Scanned, Sight, look_at, scan, scanned
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
    """The flow analysis of a whole tree, which a worker can do before all of it has been scanned. The files
    that it must read and of which there is no scan yet, `new`, it scans as well: so each is parsed once."""

    texts: Texts
    paths: tuple[str, ...]
    relevant: tuple[str, ...]
    new: tuple[ScanJob, ...]
    settings: AnalysisSettings


@dataclass(frozen=True, slots=True)
class _Followed:
    """What a worker found that did such a job."""

    scanned: tuple[Scanned, ...]
    flow: FlowResult


def scan_all(
    texts: Texts, earlier: Mapping[str, Scanned], clues: tuple[Clue, ...], jobs: int, progress: Progress,
    follow: AnalysisSettings | None = None,
) -> Scan:  # fmt: skip
    """Scan every file but those of which `earlier` holds a scan that is still true. `follow` are the settings
    by which leases may be followed at the same time."""
    done = dict(earlier)
    waiting = [ScanJob(file, clues, texts.held(file)) for file in texts if file.path not in done]
    new, total = len(waiting), len(done) + len(waiting)
    following: list[ScanJob | FlowJob] = []
    if follow is not None and jobs > 1 and new >= MANY:
        waiting = _sighted(waiting, jobs)
        following = [_flow_job(texts, earlier.values(), waiting, follow)]
        waiting = [job for job in waiting if not job.relevant]
    flow: FlowResult | None = None
    foreseen: tuple[str, ...] = ()
    lost: list[ScanJob] = []
    for job, result in run_all(_work, waiting, jobs, first=following):
        if isinstance(job, ScanJob):
            done[job.file.path] = _decoded(job, result)
        elif isinstance(result, Died):
            lost += job.new
        else:
            followed = _followed_decoder.decode(result)
            flow, foreseen = followed.flow, job.relevant
            done.update((file.path, file) for file in followed.scanned)
        progress("Reading", len(done), total)
    done.update((job.file.path, _decoded(job, result)) for job, result in run_all(scan, lost, jobs))
    found = Scan(tuple(done[path] for path in sorted(done)), new, flow)
    return found if found.relevant == foreseen else replace(found, flow=None)  # a file of them has failed


def _sighted(waiting: list[ScanJob], jobs: int) -> list[ScanJob]:
    """The same, looked at: by their bytes it is known which of them the flow analysis must read."""
    seen = {job.file.path: sight for job, sight in run_all(look_at, waiting, jobs)}
    return [replace(job, sight=_unless_died(seen[job.file.path])) for job in waiting]


def _unless_died(sight: Sight | Died | None) -> Sight | None:
    return None if isinstance(sight, Died) else sight


def _flow_job(
    texts: Texts, earlier: Iterable[Scanned], waiting: list[ScanJob], settings: AnalysisSettings
) -> FlowJob:
    known = {each.path: each.relevant for each in earlier} | {
        each.file.path: each.relevant for each in waiting
    }
    paths = sorted(known)
    relevant = tuple(path for path in paths if known[path])
    return FlowJob(texts, tuple(paths), relevant, tuple(each for each in waiting if each.relevant), settings)


def _work(job: ScanJob | FlowJob) -> bytes:
    if isinstance(job, ScanJob):
        return scan(job)
    from auditor.project.analysis import analyse  # half of what starting costs, and one worker alone needs it

    parse = remembering()
    found = tuple(scanned(each, parse) for each in job.new)
    flow = analyse(job.texts.readable(job.paths), job.settings, job.relevant, parse)
    return msgspec.json.encode(_Followed(found, flow))


_decoder = msgspec.json.Decoder(Scanned)
_followed_decoder = msgspec.json.Decoder(_Followed)


def _decoded(job: ScanJob, result: bytes | Died) -> Scanned:
    if not isinstance(result, Died):
        return _decoder.decode(result)
    path = job.file.path
    message = f"crashed the process that read it (exit code {result.exit_code})"
    return Scanned(path, message, failure=Failure(path, 0, message))
