"""Nightly batch ingestion: jsonl request files in, result files out, bad lines aside."""
from __future__ import annotations

import csv
import gzip
import io
import json
import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Dict, Iterable, Iterator, List, Optional, Tuple

MAGIC = b"BATCH1\n"


@dataclass
class Job:
    source: Path
    out: Optional[IO[str]] = None
    rejects: Optional[IO[str]] = None
    counts: Dict[str, int] = field(default_factory=dict)

    def close(self) -> None:
        for fh in (self.out, self.rejects):
            if fh is not None:
                fh.close()
        self.out = self.rejects = None


def sniff(path: Path) -> bool:
    fh = open(path, "rb")  # leak: a file without the magic returns before close
    head = fh.read(len(MAGIC))
    if head != MAGIC:
        return False
    fh.close()
    return True


def sniff_gzip(path: Path) -> bool:
    with open(path, "rb") as fh:  # clean: with
        return fh.read(2) == b"\x1f\x8b"


def open_text(path: Path) -> IO[str]:
    """Plain or gzip, as text."""
    if path.suffix == ".gz":
        return gzip.open(path, "rt")  # clean: returned
    return open(path, "r")  # clean: returned


def count_lines(path: Path) -> int:
    return sum(1 for _ in open_text(path))  # leak: read through and never closed


def first_line(path: Path) -> str:
    fh = open_text(path)  # clean: near miss, finally closes on both returns
    try:
        for line in fh:
            if line.strip():
                return line
        return ""
    finally:
        fh.close()


def read_records(path: Path) -> Iterator[Dict[str, Any]]:
    with open_text(path) as fh:  # clean: with, inside a generator
        for n, line in enumerate(fh):
            if not line.strip():
                continue
            yield {"n": n, **json.loads(line)}


def merge_manifests(paths: Iterable[Path]) -> Dict[str, Any]:
    merged: Dict[str, Any] = {}
    for p in paths:
        fh = open(p)  # leak: a manifest that does not parse is skipped by continue without close
        try:
            doc = json.load(fh)
        except json.JSONDecodeError:
            continue
        merged.update(doc)
        fh.close()
    return merged


def merge_tables(paths: Iterable[Path]) -> List[List[str]]:
    rows: List[List[str]] = []
    for p in paths:
        if not p.exists():
            continue
        fh = open(p, newline="")  # clean: near miss, the continue below has closed
        head = fh.readline()
        if not head:
            fh.close()
            continue
        rows.extend(csv.reader(fh))
        fh.close()
    return rows


def prepare(source: Path, outdir: Path, strict: bool) -> Optional[Job]:
    job = Job(source)
    job.out = open(outdir / (source.stem + ".out.jsonl"), "w")  # clean: in the job, closed with it
    if not strict:
        job.rejects = open(outdir / (source.stem + ".rej"), "w")  # clean: near miss, Job.close looks at both fields
    return job


def prepare_resumable(source: Path, outdir: Path) -> Optional[Job]:
    """Continue an interrupted job; None when it has already been finished."""
    out = open(outdir / (source.stem + ".out.jsonl"), "a")  # leak: a finished job returns None and the file is lost
    if (outdir / (source.stem + ".done")).exists():
        return None
    job = Job(source, out=out)
    job.counts["resumed"] = out.tell()
    return job


def run(job: Job) -> Dict[str, int]:
    try:
        for rec in read_records(job.source):
            ok = "prompt" in rec
            dst = job.out if ok else job.rejects
            if dst is None:
                continue
            dst.write(json.dumps(rec) + "\n")
            key = "ok" if ok else "bad"
            job.counts[key] = job.counts.get(key, 0) + 1
    finally:
        job.close()
    return job.counts


def split(source: Path, outdir: Path, per_file: int) -> int:
    part = 0
    out: Optional[IO[str]] = None
    for n, line in enumerate(sniffed_lines(source)):
        if n % per_file == 0:
            out = open(outdir / f"{source.stem}.{part:04d}", "w")  # leak: rebound to the next part, former one open
            part += 1
        out.write(line)
    if out is not None:
        out.close()
    return part


def split_even(source: Path, outdir: Path, ways: int) -> None:
    outs = [open(outdir / f"{source.stem}.{i}", "w") for i in range(ways)]  # clean: near miss, every member closed
    for n, line in enumerate(sniffed_lines(source)):
        outs[n % ways].write(line)
    for fh in outs:
        fh.close()


def sniffed_lines(source: Path) -> Iterator[str]:
    raw = open(source, "rb")  # clean: near miss, closed through the wrapper around it
    text = io.TextIOWrapper(raw)
    try:
        yield from text
    finally:
        text.close()


def pair_up(prompts: Path, answers: Path) -> Optional[List[Tuple[str, str]]]:
    a = open(prompts)  # leak: a missing answers file is survived with the first one open
    try:
        b = open(answers)  # clean: closed below
    except FileNotFoundError:
        return None
    pairs = list(zip(a, b))
    b.close()
    a.close()
    return pairs


def append_result(path: Path, rec: Dict[str, Any], fh: Optional[IO[str]] = None) -> None:
    mine = fh is None
    if mine:
        fh = open(path, "a")  # clean: near miss, the same flag closes it
    fh.write(json.dumps(rec) + "\n")
    if mine:
        fh.close()


def replace_atomically(path: Path, lines: Iterable[str]) -> bool:
    fd, tmp = tempfile.mkstemp(dir=str(path.parent))  # clean: the descriptor goes into fdopen
    fh = os.fdopen(fd, "w")  # clean: closed before rename
    for ln in lines:
        fh.write(ln)
    fh.close()
    os.replace(tmp, path)
    return True


class RejectWriter:
    """Opens its file at the first reject."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fh: Optional[IO[str]] = None

    def add(self, line: str) -> None:
        if self._fh is None:
            self._fh = open(self.path, "a")  # clean: lazily, close() closes
        self._fh.write(line)

    def close(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None


class ProgressFile:
    """One line per finished stage; the operator's dashboard tails it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._fh: Optional[IO[str]] = None

    def start(self, job_name: str) -> None:
        self._fh = open(self.root / f"{job_name}.progress", "w")  # leak: the next start overwrites the open file

    def stage(self, name: str) -> None:
        if self._fh is not None:
            self._fh.write(name + "\n")

    def close(self) -> None:
        if self._fh is not None:
            self._fh.close()
            self._fh = None
