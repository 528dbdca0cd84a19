"""What a keystroke costs: `python -m benchmarks.editor_speed TREE [FILE] [--edits 5]`.

Starts `poolaudit server` in a copy of TREE, opens FILE (by default the one with most findings) and types: a
line at its top, and the next one once everything is quiet. Prints seconds of processor time, of all the
server's processes, from didChange to the first diagnostics and until nothing runs any more, and both as
parts of a cold `poolaudit audit` of the same tree. FILE needs a finding, which moves with every edit.
"""

import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks import timing
from benchmarks.machine import machine_facts
from tests.server.client import Client

ROOT = Path(__file__).resolve().parent.parent
QUIET = 3.0
"""Seconds without work after which nothing more is to come: longer than the server's pauses."""
TICK = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Keystroke:
    """Seconds from the edit: of the processor, and on the clock."""

    first_cpu: float
    first_seconds: float
    final_cpu: float
    final_seconds: float


def processor_time(pid: int) -> float:
    """Of a process and of all below it, the ended ones included."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    total = sum(map(int, stat[11:15])) / TICK
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        total += sum(processor_time(int(child)) for child in children.read_text().split())
    return total


def settle(client: Client) -> float:
    """Wait until the server has done nothing for a while; when it last did something."""
    last, used = time.monotonic(), processor_time(client.process.pid)
    while time.monotonic() - last < QUIET:
        time.sleep(0.1)
        now = processor_time(client.process.pid)
        if now > used + 0.011:  # a tick is what waiting costs
            last = time.monotonic()
        used = now
    return last


def keystroke(client: Client, name: str, text: str, version: int) -> Keystroke:
    pid = client.process.pid
    before, began = processor_time(pid), time.monotonic()
    client.change(name, text, version)
    client.diagnostics(name, version)
    first, answered = processor_time(pid), time.monotonic()
    quiet = settle(client)
    return Keystroke(first - before, answered - began, processor_time(pid) - before, quiet - began)


def measure(tree: Path, name: str, edits: int) -> list[Keystroke]:
    text = (tree / name).read_text(encoding="utf-8")
    client = Client(tree)
    try:
        client.initialize()
        client.open(name, text, 1)
        client.diagnostics(name)
        settle(client)
        strokes = [
            keystroke(client, name, "# typed\n" * number + text, number + 1) for number in range(1, edits + 1)
        ]
        client.shutdown()
    finally:
        client.kill()
    return strokes


def audit(tree: Path) -> tuple[float, Counter[str]]:
    """Processor time of a cold audit, and how many findings each file has."""
    command = [sys.executable, "-m", "auditor.cli", "audit", str(tree), "--no-cache", "--quiet"]
    done = timing.run([*command, "--format", "json"], accepted=(0, 1, 2))
    paths = (Path(each["path"]) for each in json.loads(done.output)["findings"])
    # relative to where the audit ran, which is this repository
    return done.cpu_seconds, Counter((ROOT / path).resolve().relative_to(tree).as_posix() for path in paths)


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("tree", type=Path)
    parser.add_argument("file", nargs="?", help="named from TREE")
    parser.add_argument("--edits", type=int, default=5)
    parser.add_argument("--json", type=Path, help="keep the figures here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder).resolve() / "tree"
        shutil.copytree(options.tree, tree, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        cold, with_findings = audit(tree)
        name = options.file or with_findings.most_common(1)[0][0]
        if not with_findings[name]:
            parser.error(f"{name} has no finding; {', '.join(sorted(with_findings)[:5])} have")
        strokes = measure(tree, name, options.edits)
    first = statistics.median(each.first_cpu for each in strokes)
    final = statistics.median(each.final_cpu for each in strokes)
    print(f"cold audit {cold:.2f} CPU s; medians of {len(strokes)} edits of {name}:")
    print(f"first diagnostics {first:.2f} CPU s, {first / cold:.3f} of it")
    print(f"final diagnostics {final:.2f} CPU s, {final / cold:.3f} of it")
    if options.json:
        figures = {"tree": options.tree.name, "file": name, "cold_cpu": cold}
        figures |= {"first_cpu": first, "final_cpu": final, "edits": [asdict(each) for each in strokes]}
        options.json.write_text(json.dumps({"machine": machine_facts(), **figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
