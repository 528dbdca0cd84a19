"""What does fixing cost beside auditing? 500 findings in 300 files, against the audit of the same files.

    python benchmarks/fix_speed.py [--repeat 3]

Each file is a module of attention code with one or two leaks of different kinds among functions without any.
Both commands are whole processes without a cache, so `fix` contains the audit that finds what is to be fixed
and the audits that judge the result. CPU time of both with their workers is kept beside the wall time: on a
busy machine it is the one to look at.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.machine import machine_facts  # noqa: E402

RESULT = Path(__file__).parent / "results" / "fix-speed.json"
FILES, FINDINGS, GOAL = 300, 500, 2.0
LEAKS = [
    """
def leak_{n}(pool, q):
    scores = pool.allocate(q.shape)
    scores.copy_(q)
    return scores.sum()
""",
    """
def early_{n}(pool, request):
    block = pool.acquire(request.size)
    if request.cancelled:
        return None
    request.fill(0)
    pool.release(block)
    return request
""",
    """
def raising_{n}(pool, model, x):
    buf = pool.acquire(x.numel())
    y = model(x, buf)
    pool.release(buf)
    return y
""",
    """
def partial_{n}(pool, request):
    k = pool.acquire(1)
    if k is None:
        return False
    v = pool.acquire(1)
    if v is None:
        return False
    request.attach(k, v)
    return True
""",
]
FILLER = """
def project_{n}(x, weight, bias, heads, causal=False):
    b, n, e = x.shape
    q, k, v = (x @ weight + bias).reshape(b, n, 3, heads, -1).unbind(2)
    scores = (q.transpose(1, 2) @ k.transpose(1, 2).mT) * (e // heads) ** -0.5
    if causal:
        scores = scores.masked_fill(scores.new_ones(n, n).triu(1).bool(), float("-inf"))
    return (scores.softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).reshape(b, n, e)
"""


def tree(folder: Path) -> None:
    """300 files of about 120 lines with 500 leaks."""
    for number in range(FILES):
        leaks = 1 + (number < FINDINGS - FILES)
        text = '"""One module of many."""\n'
        text += "".join(FILLER.replace("{n}", str(each)) for each in range(10))
        for each in range(leaks):
            text += LEAKS[(number + each) % len(LEAKS)].replace("{n}", str(each))
        (folder / f"module_{number}.py").write_text(text)


def timed(folder: Path, *arguments: str) -> tuple[float, float, str]:
    """Wall time, CPU time with all workers, and what was said on standard error."""
    command = [
        sys.executable,
        "-m",
        "auditor.cli",
        *arguments,
        "--isolated",
        "--no-cache",
        "--no-progress",
        ".",
    ]
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return wall, cpu, done.stderr


def measure() -> dict[str, float | str]:
    with tempfile.TemporaryDirectory(prefix="fix-speed-") as scratch:
        folder = Path(scratch)
        tree(folder)
        audit, audit_cpu, _ = timed(folder, "audit", "--format", "json", "--exit-zero")
        fix, fix_cpu, said = timed(folder, "fix", "--unsafe-fixes")
    return {
        "audit_seconds": round(audit, 2),
        "fix_seconds": round(fix, 2),
        "audit_cpu_seconds": round(audit_cpu, 2),
        "fix_cpu_seconds": round(fix_cpu, 2),
        "fix_over_audit_wall": round(fix / audit, 2),
        "fix_over_audit_cpu": round(fix_cpu / audit_cpu, 2),
        "beyond_the_audit_cpu": round((fix_cpu - audit_cpu) / audit_cpu, 2),
        "said": said.strip().splitlines()[-1],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    runs = [measure() for _ in range(parser.parse_args().repeat)]
    best = min(runs, key=lambda run: run["fix_cpu_seconds"])
    goals = {"findings": FINDINGS, "files": FILES, "beyond_the_audit": GOAL}
    result = {"machine": machine_facts(), "goals": goals, "best": best, "runs": runs}
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0 if float(best["beyond_the_audit_cpu"]) <= GOAL else 1


if __name__ == "__main__":
    raise SystemExit(main())
