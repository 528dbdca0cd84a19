"""What `fix --unsafe-fixes` does to copies of packages: `tests/field/fix_copies.py --root DIR NAME ...`.

Each package DIR/NAME is copied, fixed, and fixed again. Said of each: findings before, fixed, dropped and
left; whether every file still compiles; whether the second run changed anything; and how many of the changed
modules that could be imported before can be imported after. Only that last step runs the package's code.
"""

import argparse
import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path

PROJECT = Path(__file__).parents[2]
SUMMARY = re.compile(r"Fixed ([\d,]+) findings? in ([\d,]+) files?;? ?(?:([\d,]+) left)?")


def poolaudit(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    command = [sys.executable, "-m", "auditor.cli", *arguments, "--isolated", "--no-cache", "--no-progress"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def findings(folder: Path) -> list[dict[str, object]]:
    said = json.loads(poolaudit(folder, "audit", "--format", "json", ".").stdout)
    listed: list[dict[str, object]] = said["findings"]
    return listed


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.py"))}


def broken(files: Mapping[str, bytes]) -> set[str]:
    """The files that this Python cannot parse."""
    found = set()
    for path, data in files.items():
        try:
            with warnings.catch_warnings(action="ignore"):
                ast.parse(data)
        except (SyntaxError, ValueError):
            found.add(path)
    return found


def importable(folder: Path, paths: list[str]) -> set[str]:
    """Those of the modules that can be imported here, each in a process of its own."""
    found = set()
    for path in paths:
        package = folder / path
        while (package.parent / "__init__.py").exists():
            package = package.parent
        module = (folder / path).relative_to(package.parent).with_suffix("").as_posix().replace("/", ".")
        command = [sys.executable, "-c", f"import {module.removesuffix('.__init__')}"]
        environment = {**os.environ, "PYTHONPATH": str(package.parent)}
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, timeout=120, check=False
            )
        except subprocess.TimeoutExpired:
            continue
        if done.returncode == 0:
            found.add(path)
    return found


def measure(package: Path) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / package.name
        shutil.copytree(package, folder, symlinks=True)
        before, listed = contents(folder), findings(folder)
        done = poolaudit(folder, "fix", "--unsafe-fixes", ".")
        after = contents(folder)
        changed = [path for path in after if after[path] != before[path]]
        again = poolaudit(folder, "fix", "--unsafe-fixes", ".")
        stable = contents(folder) == after
        imports_after = importable(folder, changed)
        for path in changed:
            (folder / path).write_bytes(before[path])
        imports_before = importable(folder, changed)
        left = SUMMARY.search(done.stderr.replace("\n", " "))
        return {
            "package": package.name,
            "findings": len(listed),
            "with a fix": sum(finding["fix"] is not None for finding in listed),
            "fixed": int(left[1].replace(",", "")) if left else None,
            "files changed": len(changed),
            "dropped": done.stderr.count("Failed "),
            "status": done.returncode,
            "no longer parse": len(broken(after) - broken(before)),
            "second run changed nothing": stable,
            "second run": again.stderr.strip().splitlines()[-1] if again.stderr else "",
            "imported before": len(imports_before),
            "import after": len(imports_after & imports_before),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("names", nargs="+")
    chosen = parser.parse_args()
    for name in chosen.names:
        print(json.dumps(measure(chosen.root / name)), flush=True)


if __name__ == "__main__":
    main()
