"""The layout of one kernel: its tile shape, pipeline stages, shared memory layout and tile scheduling.

A tile of the result is at most block_m x block_n, and the mainloop walks the sum in steps of block_k. In the rows form
M, N, K are the problem's m, n, k. In a contraction the result is [k, n] for each group and the sum runs over rows, so
that M is the problem's k and K its rows. Both are meant before operands are swapped (swap-AB).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from trencadis.core.dtypes import bits

WGMMA_M = 64  # rows of one wgmma instruction
SWAP_AB_UNIT = 16  # rows by which swap-AB tiles grow: they are the N of wgmma, which takes any multiple of 8
ROW_ALIGN = 8  # TMA copies start at a multiple of this many rows: those of a swizzle atom in shared memory
SWIZZLE = 128  # bytes of a row of a swizzle atom, where nothing asks for a smaller one
CONSUMERS = 2  # consumer warpgroups of a CTA, which issue wgmma, where nothing asks for more
SCALE_BLOCK = 128  # columns of a tile whose sums are promoted: those of one block of 128 x 128 scales
SHORT_PART = 32  # entries of k: the shortest part whose sum is scaled, and one product of 8-bit operands
REWRITE_STAGES = 2  # buffers of weights that a warpgroup has upcast or transposed and consumers read
SLICE = 2 * SWAP_AB_UNIT  # rows of the results of a pullback that are computed and stored at a time
SLICE_SLOTS = 2  # slices that are in a store buffer at once, with three results each
QUEUE_SLOTS = 4  # tiles that the producer may publish before the other warpgroups have read them


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The static parameters of a kernel beside its problem."""

    block_m: int  # rows of the largest tile; a tile is only as tall as its span needs, in multiples of `m_unit`
    block_n: int  # columns of a tile
    block_k: int  # entries of the sum in one step of the mainloop
    stages: int  # steps that are in shared memory at once
    raster_group: int  # tiles of a column that run before the next column: an L2 rasterization group
    num_ctas: int  # persistent CTAs: one for each SM
    part_k: int = 0  # entries of a step that are unpacked and multiplied at once, of weights for few rows; 0: all
    consumers: int = CONSUMERS  # consumer warpgroups of a pipeline
    pipelines: int = 1  # in a CTA, each with its own producer, stages and tiles: one stores while another multiplies
    swizzle: int = SWIZZLE  # bytes of a swizzle row of the operands in shared memory
    store_buffers: int = 2  # buffers of a consumer for subtiles on their way to global memory
    products: tuple[tuple[int, int], ...] = ((0, 0),)  # the parts of lhs and rhs that are multiplied, pair by pair
    swap_ab: bool = False  # weights are operand A of wgmma and rows operand B, so that tile rows are its N
    upcast: bool = False  # weights are of lower precision than rows, and the kernel upcasts them
    upcast_in_smem: bool = False  # a rewrite warpgroup does so in shared memory; else they are a register (RS) operand
    transpose_in_smem: bool = False  # 8-bit weights are stored [k, n], and a rewrite warpgroup transposes them
    promoted: bool = False  # sums of each part of k are scaled and added up in other registers
    gated: bool = False  # two arrays of weights, gate and up, are multiplied by the same rows; columns are those of one
    pairs: bool = False  # the sum goes on over k of a second pair of lhs and rhs
    two_results: bool = False  # contraction: tiles of a second rhs and result stand beside those of the first
    epilogue_steps: int = 0  # steps behind those of a sum, which load what the epilogue reads into stages
    columns: int = 0  # columns of the result, where the kernel's has more to align copies
    interpreted: bool = False  # the GPU interpreter runs the kernel; it has no inline PTX
    k_major: bool = False  # both operands are stored K-major, as wgmma takes all but 16-bit dtypes
    dynamic: bool = False  # dynamic persistent scheduling: CTAs fetch the next tile from a counter; else static

    def replace(self, **changes: Any) -> Layout:
        """The same layout with some fields changed."""
        return dataclasses.replace(self, **changes)

    @property
    def rewrites(self) -> bool:
        """Whether a rewrite warpgroup writes the weights of each step anew, in shared memory, before consumers read."""
        return self.upcast_in_smem or self.transpose_in_smem

    @property
    def unpacked_k(self) -> int:
        """The entries of the sum whose weights, where they are upcast, are unpacked and scaled at once."""
        return self.part_k or self.block_k

    @property
    def m_unit(self) -> int:
        """The rows by which tiles grow."""
        return SWAP_AB_UNIT if self.swap_ab else WGMMA_M

    @property
    def heights(self) -> list[int]:
        """The tile heights, in rows, for which the kernel has a branch that copies, and with swap-AB multiplies, these.

        Every branch takes time to compile, and so does every shape that is copied. Groups are cut evenly, so that most
        tiles are tall: up to half of block_m, few heights have a branch, and a tile is padded to the next of them.
        """
        every = range(self.m_unit, self.block_m + 1, self.m_unit)
        half = self.block_m // 2
        few = WGMMA_M if self.swap_ab else half
        return [rows for rows in every if rows > half or rows % few == 0 or self.block_m < WGMMA_M]

    def __str__(self) -> str:
        kind = " swap-AB" * self.swap_ab + " upcast" * self.upcast + " transpose" * self.transpose_in_smem
        order = "dynamic" if self.dynamic else "static"
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        ctas = f"{self.num_ctas} CTAs" + f" of {self.pipelines} pipelines" * (self.pipelines > 1)
        return f"{tile}{kind}, {self.stages} stages, {ctas}, {order} scheduling"


def swizzle_elements(dtype: np.dtype[Any], swizzle: int = SWIZZLE) -> int:
    """The elements of a dtype in a swizzle row of this many bytes."""
    return 8 * swizzle // bits(dtype)
