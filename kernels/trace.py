"""Decode cut by another rule than even stretches, and when its programs worked: for benchmarks.

``tilewise bench splits`` shows what the cut alone is worth.  It fills the plan's records by other
rules and hands ``cuts`` to the kernel, since only of even stretches the kernel can compute who
shares an item.  Both pointers are None in every other launch, and then compiled out.
"""

import triton
import triton.language as tl


@triton.jit
def cut_of(cuts_ptr, worker):
    """``(first, pieces)``: the workers that share the one item in this worker's stretch."""
    return tl.load(cuts_ptr + 2 * worker), tl.load(cuts_ptr + 2 * worker + 1)


@triton.jit
def start_clock(clock_ptr, worker):
    """Note when a program starts to work, in nanoseconds, and on which SM."""
    tl.store(clock_ptr + 3 * worker, tl.extra.cuda.globaltimer())
    tl.store(clock_ptr + 3 * worker + 2, tl.extra.cuda.smid().to(tl.int64))


@triton.jit
def stop_clock(clock_ptr, worker):
    """Note when all threads of a program are done."""
    tl.debug_barrier()
    tl.store(clock_ptr + 3 * worker + 1, tl.extra.cuda.globaltimer())
