"""Benchmarks of kernels and of whole servers, run with ``tilewise bench``.

Needs the extra ``tilewise[bench]``. Nothing is loaded from here.
"""

# Run from a checkout, the bare folder name would hide another project's package.
if __name__ == "bench":
    raise ImportError("this folder is tilewise.bench; set PYTHONSAFEPATH=1 or leave the checkout")
