"""Starts engine workers with a GPU and a port each."""
import logging
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

logger = logging.getLogger("launcher")


class GpuRegistry:
    def __init__(self, gpus: List[int]):
        self._idle = list(gpus)

    def reserve_gpu(self) -> Optional[int]:
        return self._idle.pop(0) if self._idle else None

    def unreserve_gpu(self, gpu: int) -> None:
        self._idle.append(gpu)


class PortRange:
    def __init__(self, low: int, high: int):
        self._ports = set(range(low, high))

    def reserve_port(self) -> int:
        if not self._ports:
            raise RuntimeError("no port left")
        return self._ports.pop()

    def unreserve_port(self, port: int) -> None:
        self._ports.add(port)


@dataclass
class WorkerSpec:
    name: str
    model: str
    extra: List[str] = field(default_factory=list)
    health_check: bool = True


@dataclass
class Worker:
    spec: WorkerSpec
    gpu: int
    port: int
    proc: subprocess.Popen


class Launcher:
    def __init__(self, gpus: GpuRegistry, ports: PortRange):
        self.gpus = gpus
        self.ports = ports
        self.workers: Dict[str, Worker] = {}

    def _spawn(self, spec: WorkerSpec, gpu: int, port: int) -> subprocess.Popen:
        cmd = [sys.executable, "-m", "engine.worker", "--model", spec.model, "--port", str(port), *spec.extra]
        return subprocess.Popen(cmd, env={"CUDA_VISIBLE_DEVICES": str(gpu)})

    def launch(self, spec: WorkerSpec) -> Worker:
        gpu = self.gpus.reserve_gpu()  # clean: the worker record keeps it until stop
        if gpu is None:
            raise RuntimeError("no GPU left")
        port = self.ports.reserve_port()  # clean: the worker record keeps it until stop
        w = Worker(spec, gpu, port, self._spawn(spec, gpu, port))
        self.workers[spec.name] = w
        return w

    def launch_checked(self, spec: WorkerSpec) -> Optional[Worker]:
        gpu = self.gpus.reserve_gpu()  # clean: near miss, the failure path unreserves it and the worker keeps it otherwise
        if gpu is None:
            return None
        port = self.ports.reserve_port()  # leak: when the process dies at once only the GPU is unreserved
        proc = self._spawn(spec, gpu, port)
        if spec.health_check and proc.poll() is not None:
            logger.error("%s died with %s", spec.name, proc.returncode)
            self.gpus.unreserve_gpu(gpu)
            return None
        w = Worker(spec, gpu, port, proc)
        self.workers[spec.name] = w
        return w

    def launch_group(self, spec: WorkerSpec, size: int) -> List[Worker]:
        gpus: List[int] = []
        for _ in range(size):
            g = self.gpus.reserve_gpu()  # clean: near miss, rollback for the incomplete group
            if g is None:
                for x in gpus:
                    self.gpus.unreserve_gpu(x)
                return []
            gpus.append(g)
        out = []
        for rank, g in enumerate(gpus):
            port = self.ports.reserve_port()  # clean: goes into the worker
            w = Worker(spec, g, port, self._spawn(spec, g, port))
            self.workers[f"{spec.name}.{rank}"] = w
            out.append(w)
        return out

    def restart(self, name: str) -> bool:
        w = self.workers[name]
        w.proc.terminate()
        port = self.ports.reserve_port()  # clean: near miss, the worker's former port is unreserved
        self.ports.unreserve_port(w.port)
        w.port = port
        w.proc = self._spawn(w.spec, w.gpu, port)
        return w.proc.poll() is None

    def probe(self, spec: WorkerSpec) -> Tuple[bool, str]:
        gpu = self.gpus.reserve_gpu()  # leak: a failing probe process returns without unreserving
        if gpu is None:
            return False, "no gpu"
        code = subprocess.call([sys.executable, "-c", "import torch; torch.zeros(1).cuda()"])
        if code != 0:
            return False, f"exit code {code}"
        self.gpus.unreserve_gpu(gpu)
        return True, spec.model

    def free_gpu_count(self) -> int:
        seen: List[int] = []
        while True:
            g = self.gpus.reserve_gpu()  # clean: near miss, all counted ones go back after the loop
            if g is None:
                break
            seen.append(g)
        for g in seen:
            self.gpus.unreserve_gpu(g)
        return len(seen)

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.ports.reserve_port()}/{path}"  # leak: the port is only formatted

    def stop(self, name: str) -> None:
        w = self.workers.pop(name)
        w.proc.terminate()
        w.proc.wait()
        self.gpus.unreserve_gpu(w.gpu)
        self.ports.unreserve_port(w.port)

    def stop_all(self) -> None:
        for name in list(self.workers):
            self.stop(name)
