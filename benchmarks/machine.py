"""What a measurement ran on; a figure without its machine says nothing."""

import importlib.util
import os
import platform
from datetime import UTC, datetime
from pathlib import Path


def machine_facts() -> dict[str, object]:
    """Processor, cores, memory, load and versions; torch's too where it is installed."""
    facts: dict[str, object] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "load_at_start": round(os.getloadavg()[0], 2),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(UTC).date().isoformat(),
    }
    if importlib.util.find_spec("torch") is not None:
        import torch

        facts["torch"] = torch.__version__
    return facts


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
