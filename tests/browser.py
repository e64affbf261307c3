"""Debian's Chromium, for tests that look at pages as a reader does."""

import re
import shutil
import struct
import subprocess
from pathlib import Path

CHROMIUM = shutil.which("chromium")
MISSING = "needs chromium (Debian's package of that name)"
# Without these a start looks for hosts that a closed network does not have.
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars",
)  # fmt: skip


def _run(page: Path, folder: Path, *options: str) -> str:
    done = subprocess.run(
        [CHROMIUM, *QUIET, f"--user-data-dir={folder / 'profile'}", *options, page.as_uri()],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def screenshot(page: Path, target: Path, width: int, height: int, dark: bool = False) -> Path:
    """Write a PNG of a page as it looks in a window of this size."""
    scheme = ("--blink-settings=preferredColorScheme=0",) if dark else ()
    size = f"--window-size={width},{height}"
    _run(page, target.parent, size, f"--screenshot={target}", *scheme)
    return target


def measure(page: Path, folder: Path, width: int, expressions: dict[str, str]) -> dict[str, str]:
    """Evaluate JavaScript expressions on a page, in a window of this width, as strings."""
    probe = folder / "probe.html"
    code = "".join(
        f"document.documentElement.setAttribute('data-{name}', String({text}));"
        for name, text in expressions.items()
    )
    html = page.read_text(encoding="utf-8")
    script = f"<script>addEventListener('load', () => {{ {code} }})</script></body>"
    probe.write_text(html.replace("</body>", script), encoding="utf-8")
    dom = _run(probe, folder, f"--window-size={width},1200", "--dump-dom")
    opening = re.search(r"<html[^>]*>", dom)[0]
    return {name: re.search(rf'data-{name}="([^"]*)"', opening)[1] for name in expressions}


def png_size(path: Path) -> tuple[int, int]:
    """Return width and height of a PNG file."""
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:24])
