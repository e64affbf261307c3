"""GPU architectures by name, for what is planned or compiled without one at hand."""

from __future__ import annotations

import re

from tilewise.errors import UnsupportedConfig
from tilewise.policy import Device

# With the SMs of an A100, an RTX 4090, an H100 or H200, and a B200.
ARCHITECTURES = {
    80: Device(arch=80, num_sms=108, shared_memory=163 * 1024),
    89: Device(arch=89, num_sms=128, shared_memory=99 * 1024),
    90: Device(arch=90, num_sms=132, shared_memory=227 * 1024),
    100: Device(arch=100, num_sms=148, shared_memory=227 * 1024),
}
ACCEPTED = ", ".join(f"sm_{arch}" for arch in ARCHITECTURES)


def parse_arch(text: str) -> Device:
    """Return the device that an architecture's name stands for.

    Parameters
    ----------
    text : str
        ``sm_90``, ``90`` or ``9.0``.

    Raises
    ------
    UnsupportedConfig
        For anything that is not a known architecture.
    """
    found = re.fullmatch(r"(?:sm_)?(\d+)(?:\.(\d))?a?", text.strip().lower())
    number = int(found[1] + (found[2] or "")) if found else 0
    if number not in ARCHITECTURES:
        raise UnsupportedConfig(f"architecture {text!r}; accepted: {ACCEPTED}")
    return ARCHITECTURES[number]
