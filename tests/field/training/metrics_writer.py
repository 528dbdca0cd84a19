"""Metric files for long runs: one open file per stream, rotated by size."""
from __future__ import annotations

import csv
import io
import json
import logging
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, TextIO

logger = logging.getLogger(__name__)


class LineBufferPool:
    def __init__(self) -> None:
        self._spare: List[io.StringIO] = []

    def get_line_buffer(self) -> io.StringIO:
        return self._spare.pop() if self._spare else io.StringIO()

    def put_line_buffer(self, b: io.StringIO) -> None:
        b.seek(0)
        b.truncate()
        self._spare.append(b)


class MetricStream:
    def __init__(self, path: Path, limit: int = 1 << 20) -> None:
        self.path = path
        self.limit = limit
        self.part = 0
        self.fh: Optional[TextIO] = open(self._name(), "a")  # leak: rotate() overwrites the first file while it is open

    def _name(self) -> Path:
        return self.path.with_suffix(f".{self.part}.jsonl")

    def write(self, row: Mapping[str, Any]) -> None:
        self.fh.write(json.dumps(row) + "\n")
        if self.fh.tell() > self.limit:
            self.rotate()

    def rotate(self) -> None:
        self.part += 1
        self.fh = open(self._name(), "a")  # leak: the file of the earlier part is overwritten while open

    def close(self) -> None:
        if self.fh is not None:
            self.fh.close()
            self.fh = None


class TidyStream(MetricStream):
    def rotate(self) -> None:
        self.fh.close()
        self.part += 1
        self.fh = open(self._name(), "a")  # clean: near miss, the old file is closed two lines above


class MetricsWriter:
    def __init__(self, root: Path, buffers: LineBufferPool) -> None:
        self.root = root
        self.buffers = buffers
        self.streams: Dict[str, MetricStream] = {}

    def log_row(self, row: Mapping[str, Any], keys: List[str]) -> str:
        b = self.buffers.get_line_buffer()  # clean: put back after getvalue
        csv.writer(b).writerow([row.get(k, "") for k in keys])
        line = b.getvalue()
        self.buffers.put_line_buffer(b)
        return line

    def log_rows(self, rows: List[Mapping[str, Any]], keys: List[str]) -> str:
        b = self.buffers.get_line_buffer()  # leak: rows without a step raise before the put
        w = csv.writer(b)
        for row in rows:
            if "step" not in row:
                raise KeyError("step")
            w.writerow([row.get(k, "") for k in keys])
        text = b.getvalue()
        self.buffers.put_line_buffer(b)
        return text

    def log_rows_lenient(self, rows: List[Mapping[str, Any]], keys: List[str]) -> str:
        b = self.buffers.get_line_buffer()  # clean: near miss, the raise is caught here and the buffer put back
        w = csv.writer(b)
        try:
            for row in rows:
                if "step" not in row:
                    raise KeyError("step")
                w.writerow([row.get(k, "") for k in keys])
        except KeyError as exc:
            logger.warning("row without %s", exc)
        text = b.getvalue()
        self.buffers.put_line_buffer(b)
        return text

    def header(self, keys: List[str]) -> str:
        b = self.buffers.get_line_buffer()  # leak: b becomes the string, the buffer is not put back
        b.write(",".join(keys))
        b = b.getvalue()
        return b

    def close(self) -> None:
        for s in self.streams.values():
            s.close()
        self.streams.clear()


def dump_config(cfg: Dict[str, Any], path: Path) -> bool:
    tmp = tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False)
    try:
        json.dump(cfg, tmp)
    finally:
        tmp.close()
    Path(tmp.name).replace(path)
    return True


def tail(path: Path, n: int) -> List[str]:
    fh = open(path)  # leak: n of zero or less returns before the close
    if n <= 0:
        return []
    lines = fh.readlines()[-n:]
    fh.close()
    return lines


def head(path: Path, n: int) -> List[str]:
    fh = open(path)  # clean: near miss, break goes to the close behind the loop
    lines: List[str] = []
    for line in fh:
        if len(lines) == n:
            break
        lines.append(line)
    fh.close()
    return lines
