"""Dilated attention beside its peers in one run: per-branch SDPA, dense SDPA, flex, torchscale's way.

    python benchmarks/attention_speed.py [--tokens 2048 8192] [--clock wall|cpu] [--threads N] [--output FILE]

Every comparison takes turns, round by round, and takes each form's best round, so that what else runs on the
machine hits all alike.  With `--clock cpu` and one thread it is processor time that is compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.attention_peers import flex_joint, torchscale_way
from reference_modules.attention import dilated_attention

Form = Callable[[], Tensor]


@dataclass(frozen=True)
class Machine:
    """Where and how it is measured."""

    device: str
    dtype: torch.dtype
    heads: int
    clock: str
    rounds: int

    @staticmethod
    def here(clock: str, rounds: int) -> Machine:
        if torch.cuda.is_available():
            return Machine("cuda", torch.bfloat16, 8, "wall", rounds)
        return Machine("cpu", torch.float32, 4, clock, rounds)

    def now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.process_time() if self.clock == "cpu" else time.perf_counter()

    def best_of(self, forms: dict[str, Callable[[], Any]]) -> dict[str, float]:
        """Seconds of each form's best round, after one round that does not count."""
        best = dict.fromkeys(forms, float("inf"))
        for round_ in range(self.rounds + 1):
            for name, form in forms.items():
                begun = self.now()
                form()
                if round_:
                    best[name] = min(best[name], self.now() - begun)
        return best

    def matmul_limit(self) -> float:
        """Operations a second of a large matrix product in this type."""
        x = torch.randn(2048, 2048, device=self.device, dtype=self.dtype)
        return 2 * 2048**3 / self.best_of({"matmul": lambda: x @ x})["matmul"]


@dataclass(frozen=True)
class Problem:
    """One sequence of `tokens`, head dimension 64."""

    tokens: int
    segments: tuple[int, ...]
    dilations: tuple[int, ...]
    causal: bool

    def pairs(self) -> float:
        """Query-key pairs a head, all branches together."""
        all_pairs = sum(
            self.tokens * min(w, self.tokens) / r**2
            for w, r in zip(self.segments, self.dilations, strict=True)
        )
        return all_pairs / 2 if self.causal else all_pairs

    def __str__(self) -> str:
        causal = ", causal" if self.causal else ""
        return f"n={self.tokens} {list(self.segments)}/{list(self.dilations)}{causal}"


def both_passes(form: Form, inputs: list[Tensor], dout: Tensor) -> dict[str, Callable[[], Any]]:
    def forward() -> Tensor:
        with torch.no_grad():
            return form()

    return {"forward": forward, "forward+backward": lambda: torch.autograd.grad(form(), inputs, dout)}


def ours(problem: Problem, inputs: list[Tensor]) -> Form:
    def form() -> Tensor:
        out = dilated_attention(
            *inputs,
            segment_lengths=problem.segments,
            dilation_rates=problem.dilations,
            is_causal=problem.causal,
        )
        assert isinstance(out, Tensor)
        return out

    return form


def per_branch(problem: Problem, machine: Machine) -> dict[str, list[Callable[[], Any]]]:
    """SDPA at each branch's shapes on tensors of its own: what no dilated attention gets below."""
    found: dict[str, list[Callable[[], Any]]] = {"forward": [], "forward+backward": []}
    for w, r in zip(problem.segments, problem.dilations, strict=True):
        w = min(w, problem.tokens)
        shape = (problem.tokens // w, machine.heads, w // r, 64)
        q, k, v, dout = (torch.randn(shape, device=machine.device, dtype=machine.dtype) for _ in range(4))
        branch = [x.requires_grad_() for x in (q, k, v)]

        def form(branch: list[Tensor] = branch) -> Tensor:
            return scaled_dot_product_attention(*branch, is_causal=problem.causal)

        for name, run in both_passes(form, branch, dout).items():
            found[name].append(run)
    return found


def compare(problem: Problem, machine: Machine, peers: list[str], limit: float) -> list[dict[str, Any]]:
    """Our time as a share of each peer's."""
    shape = (1, problem.tokens, machine.heads, 64)
    q, k, v, dout = (torch.randn(shape, device=machine.device, dtype=machine.dtype) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    branches = list(zip(problem.segments, problem.dilations, strict=True))
    makers: dict[str, Callable[[], Form]] = {
        "dense SDPA": lambda: (
            lambda: scaled_dot_product_attention(
                *(x.transpose(1, 2) for x in inputs), is_causal=problem.causal
            ).transpose(1, 2)
        ),
        "torchscale's way": lambda: lambda: torchscale_way(*inputs, branches, problem.causal),
        "flex, joint mask": lambda: flex_joint(*inputs, branches, problem.causal),
    }
    runs: dict[str, dict[str, Callable[[], Any]]] = {"ours": both_passes(ours(problem, inputs), inputs, dout)}
    for peer in peers:
        if peer == "per-branch SDPA":
            parts = per_branch(problem, machine)
            runs[peer] = {name: (lambda part=part: [run() for run in part]) for name, part in parts.items()}
        else:
            runs[peer] = both_passes(makers[peer](), inputs, dout)
    rows = []
    for name, products in (("forward", 2), ("forward+backward", 7)):
        seconds = machine.best_of({who: run[name] for who, run in runs.items()})
        operations = products * 2 * 64 * problem.pairs() * machine.heads
        row = {
            "problem": str(problem),
            "pass": name,
            "seconds": seconds,
            "ratio": {who: seconds["ours"] / seconds[who] for who in peers},
            "operations": operations,
            "bytes": (4 if name == "forward" else 12) * q.numel() * q.element_size(),
            "share_of_matmul_limit": operations / seconds["ours"] / limit,
        }
        rows.append(row)
        ratios = "  ".join(f"{value:.3f} of {who}" for who, value in row["ratio"].items())
        if "torchscale's way" in seconds:
            row["kernel_share_of_torchscale"] = seconds["per-branch SDPA"] / seconds["torchscale's way"]
            ratios += f"  (the kernel alone {row['kernel_share_of_torchscale']:.3f} of torchscale's way)"
        print(
            f"{row['problem']:52} {name:17} {seconds['ours'] * 1e3:9.1f} ms  {ratios}  "
            f"{operations / 1e9:.1f} Gop, {row['bytes'] / 1e6:.0f} MB at least, "
            f"{100 * row['share_of_matmul_limit']:.0f} % of the matmul limit",
            flush=True,
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192, 32768])
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = Machine.here(options.clock, options.rounds)
    limit = machine.matmul_limit()
    print(f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}")
    print(f"{machine.device} {machine.dtype}, {machine.clock} clock, matmul limit {limit / 1e9:.0f} Gop/s")
    rows = []
    for n in options.tokens:
        for causal in (False, True):
            for share in (16,) if n > 8192 else (4, 16):  # the longer the segments, the less the rest weighs
                scaled = tuple(n // share * 2**i for i in range(3))
                rows += compare(Problem(n, scaled, (1, 2, 4), causal), machine, ["per-branch SDPA"], limit)
    # per-branch SDPA beside them shows what the kernel alone takes, and so how far any form could get
    peers = ["per-branch SDPA", "dense SDPA", "torchscale's way"]
    if min(options.tokens) <= 4096:
        for causal in (False, True):
            rows += compare(Problem(4096, (1024, 2048, 4096), (1, 2, 4), causal), machine, peers, limit)
    if max(options.tokens) >= 32768:
        peers += ["flex, joint mask"] if machine.device == "cuda" else []
        rows += compare(Problem(32768, (2048, 4096, 8192), (1, 2, 4), False), machine, peers, limit)
    if options.output:
        described = {
            "machine": f"{platform.system()} {platform.machine()}",
            "threads": options.threads,
            "torch": torch.__version__,
        }
        options.output.write_text(json.dumps({**described, "matmul_limit": limit, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
