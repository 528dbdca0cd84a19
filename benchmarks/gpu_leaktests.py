"""Runs the generated leak tests of the reference modules on a GPU and keeps what they said.

    python -m benchmarks.gpu_leaktests [--device cuda|cpu] [--write FILE]

Without a GPU it says so, writes nothing and ends with 2: figures of a CPU are not figures of a GPU.
`--device cpu` is for trying it out and writes only where --write says.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from auditor.leaktests.running import FileRun, TestOrder, run_files
from auditor.leaktests.workshop import WorkshopError, need_pytest, workshop

HERE = Path(__file__).parent
TESTS = HERE.parent / "tests" / "generated"
_DEVICE = "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.get_device_name(0), sep='|')"
_NO_DEVICE = "import torch; print(torch.__version__, None, 'cpu', sep='|')"


def main() -> int:
    """0: every test passed. 1: some did not. 2: there was nothing to run them on."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--write", type=Path, help="default: results/gpu-leaktests-DEVICE.json, on cuda only")
    parser.add_argument("--seconds", type=float, default=300.0, help="limit for the tests of one module")
    options = parser.parse_args()
    files = sorted(TESTS.glob("test_leaks_*.py"))
    try:
        need_pytest()
        with workshop() as shop:
            device = shop.device(options.device)
            runs = run_files(TestOrder(files, device, options.seconds, _progress), shop)
    except WorkshopError as error:
        print(f"gpu leak tests: not run: {error}", file=sys.stderr)
        return 2
    torch_version, cuda, name = _asked(_DEVICE if device == "cuda" else _NO_DEVICE).split("|")
    result = _result(runs, torch_version, cuda, name)
    file = options.write or (
        HERE / "results" / f"gpu-leaktests-{_slug(name)}.json" if device == "cuda" else None
    )
    if file:
        file.write_text(json.dumps(result, indent=1) + "\n")
    _print(result, runs, file)
    return 1 if result["failed"] else 0


def _asked(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.strip()


def _result(runs: list[FileRun], torch_version: str, cuda: str, name: str) -> dict[str, Any]:
    modules = {
        run.file.stem.removeprefix("test_leaks_"): {
            "passed": sum(case.outcome == "passed" for case in run.cases),
            "failed": len(run.bad),
            "skipped": sum(case.outcome == "skipped" for case in run.cases),
            "seconds": round(run.seconds, 3),
            "passes": {case.name: {"outcome": case.outcome, "seconds": case.seconds} for case in run.cases},
        }
        for run in runs
    }
    return {
        "torch": torch_version,
        "cuda": cuda,
        "device": name,
        "passed": sum(entry["passed"] for entry in modules.values()),
        "failed": sum(entry["failed"] for entry in modules.values()),
        "modules": modules,
    }


def _slug(name: str) -> str:
    return "-".join(name.lower().split())


def _progress(stage: str, done: int, total: int) -> None:
    print(f"{stage}: {done} of {total}", file=sys.stderr)


def _print(result: dict[str, Any], runs: list[FileRun], file: Path | None) -> None:
    for run in runs:
        for case in run.bad:
            print(f"{run.file.name} {case.name}: {case.outcome}\n{case.message}\n")
    for name, entry in result["modules"].items():
        print(f"{entry['seconds']:8.2f} s  {entry['passed']:3} passed  {entry['failed']:3} failed  {name}")
    print(
        f"{result['passed']} passed, {result['failed']} failed on {result['device']} (torch {result['torch']})"
    )
    if file:
        print(f"kept in {file}")


if __name__ == "__main__":
    sys.exit(main())
