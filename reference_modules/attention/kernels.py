"""The attention kernels a tile can run on: fused ones that return log-sum-exps, plain ones for the rest.

Shapes: B segments (times batch), H heads, L query rows, S key rows, D head dimension.

A kernel's backward takes `out` and `lse` as arguments instead of what its own forward returned.  Handed the
*joint* out and lse of all branches, the flash recurrence

    P = exp(scale·q·k − lse)      dV = Pᵀ dO      dS = P ∘ (dO·Vᵀ − rowsum(dO ∘ out))

is the exact gradient of the joint softmax, branch by branch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from reference_modules.attention.plain import Plain, finite_lse
from reference_modules.attention.workspace import Pool

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_flash_cuda = torch.ops.aten._scaled_dot_product_flash_attention
_flash_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward
_efficient_cuda = torch.ops.aten._scaled_dot_product_efficient_attention
_efficient_cuda_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward

_EFFICIENT_LSE_ALIGNMENT = 32  # its backward reads whole groups of rows

Grads = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """out_BHLD (any strides), lse_BHL; keys_BHS is True where a key may be seen, None where all may."""

    name: str

    def forward(
        self,
        q_BHLD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        scale: float,
        causal: bool,
        keys_BHS: Tensor | None,
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self,
        dout_BHLD: Tensor,
        q_BHLD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        out_BHLD: Tensor,
        lse_BHL: Tensor,
        scale: float,
        causal: bool,
        keys_BHS: Tensor | None,
    ) -> Grads: ...


class FlashCPU:
    """PyTorch's fused CPU kernel; a key mask goes in as a bias."""

    name = "flash-cpu"

    def forward(
        self,
        q_BHLD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        scale: float,
        causal: bool,
        keys_BHS: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        bias = _bias(keys_BHS, q_BHLD)
        out_BHLD, lse_BHL = _flash_cpu(q_BHLD, k_BHSD, v_BHSD, 0.0, causal, attn_mask=bias, scale=scale)
        if keys_BHS is not None:  # the kernel says lse 0 where there is no key at all
            nothing_BHL = ~_sees_a_key(keys_BHS, q_BHLD.shape[2], causal)
            lse_BHL = lse_BHL.masked_fill(nothing_BHL, float("-inf"))
            out_BHLD = out_BHLD.masked_fill(nothing_BHL.unsqueeze(-1), 0.0)
        return out_BHLD, lse_BHL

    def backward(
        self,
        dout_BHLD: Tensor,
        q_BHLD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        out_BHLD: Tensor,
        lse_BHL: Tensor,
        scale: float,
        causal: bool,
        keys_BHS: Tensor | None,
    ) -> Grads:
        bias = _bias(keys_BHS, q_BHLD)
        if keys_BHS is not None:
            lse_BHL = finite_lse(lse_BHL)
        grads: Grads = _flash_cpu_backward(
            dout_BHLD, q_BHLD, k_BHSD, v_BHSD, out_BHLD, lse_BHL, 0.0, causal, attn_mask=bias, scale=scale
        )
        return grads


class FlashCUDA:
    """FlashAttention as PyTorch ships it: half precision, no mask."""

    name = "flash-cuda"

    def forward(
        self,
        q_BHLD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        scale: float,
        causal: bool,
        keys_BHS: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out_BHLD, lse_BHL, *_ = _flash_cuda(q_BHLD, k_BHSD, v_BHSD, 0.0, causal, False, scale=scale)
        return out_BHLD, lse_BHL

    def backward(
        self,
        dout_BHLD: Tensor,
        q_BHLD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        out_BHLD: Tensor,
        lse_BHL: Tensor,
        scale: float,
        causal: bool,
        keys_BHS: Tensor | None,
    ) -> Grads:
        unused_rng = torch.zeros(2, dtype=torch.uint64, device=q_BHLD.device)
        grads: Grads = _flash_cuda_backward(
            dout_BHLD,
            q_BHLD,
            k_BHSD,
            v_BHSD,
            out_BHLD,
            lse_BHL.contiguous(),
            None,
            None,
            q_BHLD.shape[2],
            k_BHSD.shape[2],
            0.0,
            causal,
            unused_rng,
            unused_rng,
            scale=scale,
        )
        return grads


class EfficientCUDA:
    """The memory-efficient kernel: also float32 and older cards, no mask here."""

    name = "efficient-cuda"

    def forward(
        self,
        q_BHLD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        scale: float,
        causal: bool,
        keys_BHS: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        out_BHLD, lse_BHL, *_ = _efficient_cuda(q_BHLD, k_BHSD, v_BHSD, None, True, 0.0, causal, scale=scale)
        return out_BHLD, lse_BHL[..., : q_BHLD.shape[2]]

    def backward(
        self,
        dout_BHLD: Tensor,
        q_BHLD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        out_BHLD: Tensor,
        lse_BHL: Tensor,
        scale: float,
        causal: bool,
        keys_BHS: Tensor | None,
    ) -> Grads:
        padding = -lse_BHL.shape[2] % _EFFICIENT_LSE_ALIGNMENT
        lse_BHL = torch.nn.functional.pad(lse_BHL, (0, padding), value=float("inf")).contiguous()
        rng = torch.zeros((), dtype=torch.int64, device=q_BHLD.device)
        dq, dk, dv, _ = _efficient_cuda_backward(
            dout_BHLD,
            q_BHLD,
            k_BHSD,
            v_BHSD,
            None,
            out_BHLD,
            lse_BHL,
            rng,
            rng,
            0.0,
            [True, True, True, False],
            causal,
            scale=scale,
        )
        return dq, dk, dv


@dataclass(frozen=True, slots=True)
class Need:
    """What decides the kernel."""

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    masked: bool
    dropout: float
    scale: float

    @staticmethod
    def of(q_BNHD: Tensor, masked: bool, dropout: float, scale: float) -> Need:
        return Need(q_BNHD.device, q_BNHD.dtype, q_BNHD.shape[-1], masked, dropout, scale)


def choose(need: Need, wanted: str, pool: Pool | None, seed: int | None = None) -> Kernel:
    """The best kernel that can do this; dropout and masks on CUDA are left to the plain form.

    So are scales of 0 and below: the fused kernels scale after masking, and −inf times such a scale is no
    mask.
    """
    if wanted == "plain" or need.dropout > 0.0 or need.scale <= 0.0:
        return Plain(pool, need.dropout, seed)
    if need.device.type == "cpu":
        return FlashCPU()
    half = need.dtype in (torch.float16, torch.bfloat16)
    if need.device.type != "cuda" or need.masked or need.head_dim % (8 if half else 4):
        return Plain(pool, 0.0, None)
    ampere = torch.cuda.get_device_capability(need.device) >= (8, 0)
    if half and ampere and need.head_dim <= 256:
        return FlashCUDA()
    return EfficientCUDA() if need.dtype != torch.float64 else Plain(pool, 0.0, None)


def _bias(keys_BHS: Tensor | None, q_BHLD: Tensor) -> Tensor | None:
    if keys_BHS is None:
        return None
    bias_BHS = torch.zeros(keys_BHS.shape, dtype=q_BHLD.dtype, device=q_BHLD.device)
    bias_BHS.masked_fill_(~keys_BHS, float("-inf"))
    return bias_BHS.unsqueeze(2).expand(-1, -1, q_BHLD.shape[2], -1)


def _sees_a_key(keys_BHS: Tensor, rows: int, causal: bool) -> Tensor:
    """(B, H, L): whether row l sees any key."""
    if causal:
        return keys_BHS.cumsum(-1) > 0
    return keys_BHS.any(-1, keepdim=True).expand(-1, -1, rows)
