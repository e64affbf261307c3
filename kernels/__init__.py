"""Triton kernels and their launchers: they compute and decide nothing.

This package imports torch and Triton only. Import the module that is needed, for example
``tilewise.kernels.cache_write``; nothing is loaded from here.
"""

# Run from a checkout, the bare folder name would hide another project's package.
if __name__ == "kernels":
    raise ImportError("this folder is tilewise.kernels; set PYTHONSAFEPATH=1 or leave the checkout")
