"""Everything this package raises on purpose.

::

    TilewiseError
    ├── UnsupportedConfig  (ValueError)    heads, sizes, dtypes or settings outside what we compute
    ├── PlanMismatch       (ValueError)    run() was given tensors or a plan that do not fit
    └── IncompatibleVllm   (RuntimeError)  the installed vLLM lacks an interface we build on
"""


class TilewiseError(Exception):
    """Base class of the package's own errors."""


class UnsupportedConfig(TilewiseError, ValueError):
    """A configuration outside what the package supports; names the value and what is accepted."""


class PlanMismatch(TilewiseError, ValueError):
    """A plan or a tensor that does not belong to this ``run``."""


class IncompatibleVllm(TilewiseError, RuntimeError):
    """The installed vLLM is outside the supported range; names what was found and the range."""
