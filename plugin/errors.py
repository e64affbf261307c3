"""Everything this package raises on purpose.

::

    TilewiseError
    ├── UnsupportedConfig  (ValueError)    heads, sizes, dtypes or settings outside what we compute
    │   └── UnsupportedFp8                 products or rotated keys of fp8, where they are not
    ├── PlanMismatch       (ValueError)    run() was given tensors or a plan that do not fit
    ├── UnsupportedFeature (NotImplementedError)  a feature of a model that we do not compute
    ├── IncompatibleVllm   (RuntimeError)  the installed vLLM lacks an interface we build on
    └── SelfCheckFailed    (RuntimeError)  a kernel computes something else than plain PyTorch here
"""


class TilewiseError(Exception):
    """Base class of the package's own errors."""


class UnsupportedConfig(TilewiseError, ValueError):
    """A configuration outside what the package supports; names the value and what is accepted."""


class UnsupportedFp8(UnsupportedConfig):
    """``fp8_matmul`` or ``rotated_keys`` with a layer or a device that is computed without."""


class PlanMismatch(TilewiseError, ValueError):
    """A plan or a tensor that does not belong to this ``run``."""


class UnsupportedFeature(TilewiseError, NotImplementedError):
    """A layer with a feature that is not computed here; the fallback looks for who does."""


class IncompatibleVllm(TilewiseError, RuntimeError):
    """The installed vLLM is outside the supported range; names what was found and the range."""


class SelfCheckFailed(TilewiseError, RuntimeError):
    """A kernel gave wrong results when a server started; names kernel, layer, error and way out."""
