"""Kernels that explain attention, one idea a file, each built on the one before.

``softmax`` (three passes, two, one), ``naive`` (the score matrix in memory), ``flash1``,
``flash2``, ``split_kv``, ``flash3`` (the product's own kernel), and ``rmsnorm``, a neighbour that
no tiling helps. Every file has the mathematics and a formula for the bytes; ``tilewise bench
ladder`` measures them, and docs/ladder.md is the chapter that goes with it. Nothing is loaded from
here.
"""
