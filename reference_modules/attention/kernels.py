"""The attention kernels a tile can run on: fused ones that return log-sum-exps, plain ones for the rest.

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
from torch.nn.attention import SDPBackend

from reference_modules.attention.operands import Operands
from reference_modules.attention.plain import Plain, finite_lse
from reference_modules.attention.workspace import Pool

_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_flash_cuda = torch.ops.aten._scaled_dot_product_flash_attention.default
_flash_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
_cudnn_cuda = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_cudnn_cuda_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
_efficient_cuda = torch.ops.aten._scaled_dot_product_efficient_attention.default
_efficient_cuda_backward = torch.ops.aten._scaled_dot_product_efficient_attention_backward.default

_EFFICIENT_LSE_ALIGNMENT = 32  # its backward reads whole groups of rows

Grads = tuple[Tensor, Tensor, Tensor]


class Kernel(Protocol):
    """out_BHLD (any strides) and lse_BHL of some operands, and their gradients."""

    name: str

    def forward(self, x: Operands) -> tuple[Tensor, Tensor]: ...

    def backward(self, x: Operands, dout_BHLD: Tensor, out_BHLD: Tensor, lse_BHL: Tensor) -> Grads: ...


class FlashCPU:
    """PyTorch's fused CPU kernel; a key mask goes in as a bias."""

    name = "flash-cpu"

    def forward(self, x: Operands) -> tuple[Tensor, Tensor]:
        out_BHLD, lse_BHL = _flash_cpu(
            x.q_BHLD, x.k_BHSD, x.v_BHSD, 0.0, x.causal, attn_mask=x.bias_BHLS(), scale=x.scale
        )
        if x.keys_BHS is not None:  # the kernel says lse 0 where there is no key at all
            nothing_BHL = ~x.rows_with_a_key()
            lse_BHL = lse_BHL.masked_fill(nothing_BHL, float("-inf"))
            out_BHLD = out_BHLD.masked_fill(nothing_BHL.unsqueeze(-1), 0.0)
        return out_BHLD, lse_BHL

    def backward(self, x: Operands, dout_BHLD: Tensor, out_BHLD: Tensor, lse_BHL: Tensor) -> Grads:
        if x.keys_BHS is not None:
            lse_BHL = finite_lse(lse_BHL)
        saved = (dout_BHLD, x.q_BHLD, x.k_BHSD, x.v_BHSD, out_BHLD, lse_BHL)
        grads: Grads = _flash_cpu_backward(*saved, 0.0, x.causal, attn_mask=x.bias_BHLS(), scale=x.scale)
        return grads


class FlashCUDA:
    """FlashAttention as PyTorch ships it: half precision, no mask."""

    name = "flash-cuda"

    def forward(self, x: Operands) -> tuple[Tensor, Tensor]:
        out_BHLD, lse_BHL, *_ = _flash_cuda(x.q_BHLD, x.k_BHSD, x.v_BHSD, 0.0, x.causal, False, scale=x.scale)
        return out_BHLD, lse_BHL

    def backward(self, x: Operands, dout_BHLD: Tensor, out_BHLD: Tensor, lse_BHL: Tensor) -> Grads:
        saved = (dout_BHLD, x.q_BHLD, x.k_BHSD, x.v_BHSD, out_BHLD, lse_BHL.contiguous())
        varlen = (None, None, x.q_BHLD.shape[2], x.k_BHSD.shape[2])
        unused_rng = torch.empty(2, dtype=torch.uint64, device=x.q_BHLD.device)
        grads: Grads = _flash_cuda_backward(
            *saved, *varlen, 0.0, x.causal, unused_rng, unused_rng, scale=x.scale
        )
        return grads


class CudnnCUDA:
    """cuDNN's, which PyTorch prefers on newer cards: half precision, no mask."""

    name = "cudnn-cuda"

    def forward(self, x: Operands) -> tuple[Tensor, Tensor]:
        found = _cudnn_cuda(x.q_BHLD, x.k_BHSD, x.v_BHSD, None, True, 0.0, x.causal, False, scale=x.scale)
        out_BHLD, lse_BHL1 = found[:2]
        return out_BHLD, lse_BHL1.reshape(out_BHLD.shape[:3])

    def backward(self, x: Operands, dout_BHLD: Tensor, out_BHLD: Tensor, lse_BHL: Tensor) -> Grads:
        saved = (dout_BHLD, x.q_BHLD, x.k_BHSD, x.v_BHSD, out_BHLD, lse_BHL.contiguous().unsqueeze(-1))
        unused_rng = torch.empty((), dtype=torch.int64, device=x.q_BHLD.device)
        varlen = (None, None, x.q_BHLD.shape[2], x.k_BHSD.shape[2])
        grads: Grads = _cudnn_cuda_backward(
            *saved, unused_rng, unused_rng, None, *varlen, 0.0, x.causal, scale=x.scale
        )
        return grads


class EfficientCUDA:
    """The memory-efficient kernel: also float32 and older cards, no mask here."""

    name = "efficient-cuda"

    def forward(self, x: Operands) -> tuple[Tensor, Tensor]:
        out_BHLD, lse_BHL, *_ = _efficient_cuda(
            x.q_BHLD, x.k_BHSD, x.v_BHSD, None, True, 0.0, x.causal, scale=x.scale
        )
        return out_BHLD, lse_BHL[..., : x.q_BHLD.shape[2]]

    def backward(self, x: Operands, dout_BHLD: Tensor, out_BHLD: Tensor, lse_BHL: Tensor) -> Grads:
        padding = -lse_BHL.shape[2] % _EFFICIENT_LSE_ALIGNMENT
        lse_BHL = torch.nn.functional.pad(lse_BHL, (0, padding), value=float("inf")).contiguous()
        saved = (dout_BHLD, x.q_BHLD, x.k_BHSD, x.v_BHSD, None, out_BHLD, lse_BHL)
        unused_rng = torch.empty((), dtype=torch.int64, device=x.q_BHLD.device)
        wanted = [True, True, True, False]
        dq, dk, dv, _ = _efficient_cuda_backward(
            *saved, unused_rng, unused_rng, 0.0, wanted, x.causal, scale=x.scale
        )
        return dq, dk, dv


def torch_chooses(x: Operands) -> Kernel | None:
    """The fused half-precision kernel that PyTorch itself would run here; None where it would run another."""
    chosen = torch._fused_sdp_choice(x.q_BHLD, x.k_BHSD, x.v_BHSD, None, 0.0, x.causal, scale=x.scale)
    if chosen == SDPBackend.CUDNN_ATTENTION.value:
        return CudnnCUDA()
    return FlashCUDA() if chosen == SDPBackend.FLASH_ATTENTION.value else None


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
