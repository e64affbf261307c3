"""Write a folder from which Python imports this checkout as tilewise, with nothing installed.

Usage: ``python tests/link_tree.py FOLDER``, then put FOLDER on PYTHONPATH. It holds links into the
checkout and the metadata by which vLLM finds the entry points. Two uses: type and import checkers,
which cannot follow an editable install of mapped folders, and machines on which nothing can be
installed.
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUBPACKAGES = ("kernels", "integration", "bench")


def _links(folder: Path, wanted: dict[str, Path]) -> None:
    """Make `folder` hold these links and nothing else; what is right already is not touched."""
    folder.mkdir(parents=True, exist_ok=True)
    for entry in folder.iterdir():
        if entry.name not in wanted or not entry.is_symlink():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    for name, target in wanted.items():
        link = folder / name
        if not (link.is_symlink() and link.readlink() == target):
            link.unlink(missing_ok=True)
            link.symlink_to(target)


def _entry_points(pyproject: str) -> str:
    """Return the entry points of a pyproject.toml in the format of installed metadata."""
    sections = {"console_scripts": r"\[project\.scripts\]"}
    for group in re.findall(r'^\[project\.entry-points\."([^"]+)"\]', pyproject, re.M):
        sections[group] = rf'\[project\.entry-points\."{re.escape(group)}"\]'
    lines = []
    for group, header in sections.items():
        match = re.search(rf"^{header}\n((?:\w.*\n)+)", pyproject, re.M)
        if match:
            body = re.sub(r'^(\S+) = "(.*)"$', r"\1 = \2", match[1].strip(), flags=re.M)
            lines += [f"[{group}]", body, ""]
    return "\n".join(lines)


def _write_metadata(tree: Path, pyproject: Path) -> None:
    text = pyproject.read_text()
    name = re.search(r'^name = "(.+)"', text, re.M)[1]
    version = re.search(r'^version = "(.+)"', text, re.M)[1]
    folder = tree / f"{name.replace('-', '_')}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "entry_points.txt").write_text(_entry_points(text))


def build(tree: Path) -> None:
    """Make or refresh the tree; files that left the checkout leave it too."""
    modules = {p.name: p for p in (ROOT / "plugin").iterdir() if p.name != "__pycache__"}
    _links(tree / "tilewise", modules | {name: ROOT / name for name in SUBPACKAGES})
    platform = ROOT / "tests" / "cpu_platform"
    package = platform / "tilewise_cpu_platform"
    _links(tree / package.name, {p.name: p for p in package.glob("*.py")})
    _write_metadata(tree, ROOT / "pyproject.toml")
    _write_metadata(tree, platform / "pyproject.toml")


if __name__ == "__main__":
    build(Path(sys.argv[1]).resolve())
