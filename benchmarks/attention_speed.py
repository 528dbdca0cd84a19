"""Dilated attention beside its peers in one run: per-branch SDPA, dense SDPA, flex, torchscale's way.

    python benchmarks/attention_speed.py [--tokens 2048 8192] [--clock wall|cpu] [--threads N] [--output FILE]

Every comparison takes turns, round by round and every other round backwards, after rounds that warm threads
and memory and do not count.  A ratio is the median of the rounds' own ratios, and its quartiles stand beside
it: what else runs on the machine hits the forms of a round alike, and one lucky round decides nothing.  With
`--clock cpu --threads 1` it is processor time that is compared.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
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
OURS, PER_BRANCH, DENSE, TORCHSCALE, FLEX = (
    "ours",
    "per-branch SDPA",
    "dense SDPA",
    "torchscale's way",
    "flex, joint mask",
)


Forms = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Machine:
    """Where and how it is measured."""

    device: str
    dtype: torch.dtype
    heads: int
    clock: str
    seconds: float  # to spend on a comparison, as long as that gives as many rounds as it needs at least
    least_rounds: int = 5
    most_rounds: int = 201

    @staticmethod
    def here(clock: str, seconds: float) -> Machine:
        if torch.cuda.is_available():
            return Machine("cuda", torch.bfloat16, 8, "wall", seconds)
        return Machine("cpu", torch.float32, 4, clock, seconds)

    def now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.process_time() if self.clock == "cpu" else time.perf_counter()

    def rounds_of(self, forms: Forms) -> Rounds:
        """Seconds of each form in every round that counts."""
        taken: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(2):  # what is compiled at the first call would count as work
            for form in forms.values():
                form()
        begun = self.now()
        for form in forms.values():
            form()
        wanted = int(self.seconds / max(self.now() - begun, 1e-6))
        for round_ in range(max(self.least_rounds, min(wanted, self.most_rounds))):
            for name in list(forms)[:: -1 if round_ % 2 else 1]:
                begun = self.now()
                forms[name]()
                taken[name].append(self.now() - begun)
        return Rounds(taken)

    def matmul_limit(self) -> float:
        """Operations a second of a large matrix product in this type."""
        size = 8192 if self.device == "cuda" else 2048
        x = torch.randn(size, size, device=self.device, dtype=self.dtype)
        return 2 * size**3 / min(self.rounds_of({"matmul": lambda: x @ x}).taken["matmul"])


@dataclass(frozen=True)
class Rounds:
    """What every form took, round by round."""

    taken: dict[str, list[float]]

    def seconds(self) -> dict[str, float]:
        """The median round of each form."""
        return {name: statistics.median(seconds) for name, seconds in self.taken.items()}

    def ratio(self, form: str, peer: str) -> tuple[float, float, float]:
        """First quartile, median and third quartile of form / peer within a round."""
        found = [a / b for a, b in zip(self.taken[form], self.taken[peer], strict=True)]
        low, middle, high = statistics.quantiles(found, n=4, method="inclusive")
        return low, middle, high


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
    runs = {OURS: both_passes(ours(problem, inputs), inputs, dout)}
    for peer in peers:
        if peer == PER_BRANCH:
            parts = per_branch(problem, machine)
            runs[peer] = {name: (lambda part=part: [run() for run in part]) for name, part in parts.items()}
        else:
            runs[peer] = both_passes(peer_form(peer, problem, inputs), inputs, dout)
    rows = []
    for name in ("forward", "forward+backward"):
        rounds = machine.rounds_of({who: run[name] for who, run in runs.items()})
        row = described(problem, name, rounds, machine, limit)
        print(line(row), flush=True)
        rows.append(row)
    return rows


def peer_form(peer: str, problem: Problem, inputs: list[Tensor]) -> Form:
    branches = list(zip(problem.segments, problem.dilations, strict=True))
    if peer == TORCHSCALE:
        return lambda: torchscale_way(*inputs, branches, problem.causal)
    if peer == FLEX:
        return flex_joint(*inputs, branches, problem.causal)
    q, k, v = (x.transpose(1, 2) for x in inputs)
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=problem.causal).transpose(1, 2)


def described(problem: Problem, name: str, rounds: Rounds, machine: Machine, limit: float) -> dict[str, Any]:
    """One line of results."""
    products = 2 if name == "forward" else 7
    operations = products * 2 * 64 * problem.pairs() * machine.heads
    element = torch.empty((), dtype=machine.dtype).element_size()
    tensors = 4 if name == "forward" else 12
    seconds = rounds.seconds()
    peers = [who for who in seconds if who != OURS]
    row = {
        "problem": str(problem),
        "pass": name,
        "rounds": len(rounds.taken[OURS]),
        "seconds": seconds,
        "ratio": {who: rounds.ratio(OURS, who)[1] for who in peers},
        "quartiles": {who: rounds.ratio(OURS, who)[::2] for who in peers},
        "operations": operations,
        "bytes": tensors * problem.tokens * machine.heads * 64 * element,
        "share_of_matmul_limit": operations / seconds[OURS] / limit,
    }
    if TORCHSCALE in peers:
        row["kernel_share_of_torchscale"] = rounds.ratio(PER_BRANCH, TORCHSCALE)[1]
    return row


def line(row: dict[str, Any]) -> str:
    ratios = "  ".join(
        f"{value:.3f} ({row['quartiles'][who][0]:.2f}-{row['quartiles'][who][1]:.2f}) of {who}"
        for who, value in row["ratio"].items()
    )
    if "kernel_share_of_torchscale" in row:
        ratios += f"  (the kernel alone {row['kernel_share_of_torchscale']:.3f} of {TORCHSCALE})"
    return (
        f"{row['problem']:52} {row['pass']:17} {row['seconds'][OURS] * 1e3:9.1f} ms  {ratios}  "
        f"{row['operations'] / 1e9:.1f} Gop, {row['bytes'] / 1e6:.0f} MB at least, "
        f"{100 * row['share_of_matmul_limit']:.0f} % of the matmul limit, {row['rounds']} rounds"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="*", default=[2048, 8192, 32768])
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=10.0, help="to spend on each comparison, about")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    machine = Machine.here(options.clock, options.seconds)
    limit = machine.matmul_limit()
    print(f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}")
    print(f"{machine.device} {machine.dtype}, {machine.clock} clock, matmul limit {limit / 1e9:.0f} Gop/s")
    rows = []
    for n in options.tokens:
        for causal in (False, True):
            for share in (16,) if n > 8192 else (4, 16):  # the longer the segments, the less the rest weighs
                scaled = tuple(n // share * 2**i for i in range(3))
                rows += compare(Problem(n, scaled, (1, 2, 4), causal), machine, [PER_BRANCH], limit)
    # per-branch SDPA beside them shows what the kernel alone takes, and so how far any form could get
    peers = [PER_BRANCH, DENSE, TORCHSCALE]
    if min(options.tokens) <= 4096:
        for causal in (False, True):
            rows += compare(Problem(4096, (1024, 2048, 4096), (1, 2, 4), causal), machine, peers, limit)
    if max(options.tokens) >= 32768:
        peers += [FLEX] if machine.device == "cuda" else []
        rows += compare(Problem(32768, (2048, 4096, 8192), (1, 2, 4), False), machine, peers, limit)
    if options.output:
        described = {
            "machine": f"{platform.system()} {platform.machine()}",
            "device": torch.cuda.get_device_name(0) if machine.device == "cuda" else "cpu",
            "threads": options.threads,
            "torch": torch.__version__,
            "clock": machine.clock,
        }
        options.output.write_text(json.dumps({**described, "matmul_limit": limit, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
