"""The vLLM-facing side: registration, backend, metadata builder, layer implementation.

Only this package (and ``tilewise.bench``) imports vLLM. Nothing is loaded from here.
"""

# Run from a checkout, the bare folder name would hide another project's package.
if __name__ == "integration":
    raise ImportError(
        "this folder is tilewise.integration; set PYTHONSAFEPATH=1 or leave the checkout"
    )
