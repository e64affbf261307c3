"""The report of ``tilewise doctor`` for people: tables of rich where it is installed, else text."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tilewise.integration.doctor_model import OURS, LayerKind, ModelReport, ranges
from tilewise.policy import HOPPER_ROWS

if TYPE_CHECKING:
    from tilewise.integration.doctor import Report

# A title, the column heads (none for pairs of name and value) and the rows.
Section = tuple[str, tuple[str, ...], list[tuple[str, ...]]]


def sections(report: Report) -> Iterator[Section]:
    """Yield the parts of the report, in the order in which they are shown."""
    names = {"cuda_driver": "CUDA driver", "vllm": "vLLM", "torch": "PyTorch", "python": "Python"}
    rows: list[tuple[str, ...]] = [
        (names.get(key, key), value or "not there") for key, value in report.versions.items()
    ]
    yield "Versions", (), rows
    yield "GPU", (), list(_gpu_rows(report)) or [("none", "torch sees no CUDA device")]
    registered = report.registration
    state = ", ".join(registered.names) if registered.names else f"no: {registered.why_not}"
    yield "Registered in vLLM", (), [("names" if registered.names else "", state)]
    rows = [(s.name, _setting(s.value, s.default), s.problem or "") for s in report.settings]
    yield "Settings", (), rows
    if report.model is not None:
        yield from _model_sections(report.model)


def _gpu_rows(report: Report) -> Iterator[tuple[str, ...]]:
    for gpu in report.gpus:
        capability = ".".join(map(str, gpu.capability))
        yield (
            gpu.name,
            f"compute capability {capability}, {gpu.sms} SMs, {gpu.shared_memory // 1024} KiB "
            f"of shared memory a program, {gpu.memory / 2**30:.0f} GiB",
        )


def _setting(value: str | None, default: str | None) -> str:
    if value:
        return value
    return f"{default} (default)"


def _model_sections(model: ModelReport) -> Iterator[Section]:
    rows: list[tuple[str, ...]] = [
        ("type", model.model_type or "not said"),
        ("dtype", f"{model.dtype}, KV cache {model.kv_cache_dtype}"),
        ("pages", f"{model.page_size} tokens"),
        ("ranks", str(model.tensor_parallel_size)),
        ("CUDA graphs", f"{model.cuda_graphs}: {model.cuda_graphs_why}"),
    ]
    if model.other_layers:
        rows.append(("other layers", f"{model.other_layers} without attention"))
    yield f"Model {model.source}", (), rows
    head: tuple[str, ...] = ("layers", "heads", "size", "features", "computed by", "why")
    yield "Layers", head, [_layer_row(kind) for kind in model.kinds]
    ours = [kind for kind in model.kinds if kind.prefill is not None]
    if ours:
        head = ("layers", "kernel", "tile", "warps", "stages", "copy engine", "workspace")
        yield (
            f"Tiles (rows x keys) on {model.arch}",
            head,
            [row for kind in ours for row in _tile_rows(kind)],
        )
    # Other GPUs have none, for one reason that the table of tiles says already.
    left = [kind for kind in ours if kind.why_not_hopper and model.arch == "sm_90"]
    if left:
        head = ("layers", "why the Gluon prefill leaves them to the plain one")
        rows = [(ranges(kind.layers), kind.why_not_hopper or "") for kind in left]
        yield "Plain prefill", head, rows


def _layer_row(kind: LayerKind) -> tuple[str, ...]:
    if kind.backend is None:
        who = "nobody"
    elif kind.backend == OURS:
        who = "tilewise"
    else:
        who = "the first that fits of " + ", ".join(kind.candidates)
        who = kind.backend if len(kind.candidates) == 1 else who
    return (
        ranges(kind.layers), f"{kind.num_q_heads}/{kind.num_kv_heads}", str(kind.head_size),
        "; ".join(kind.features) or "-", who, "; ".join(r.text for r in kind.reasons) or "-",
    )  # fmt: skip


def _tile_rows(kind: LayerKind) -> Iterator[tuple[str, ...]]:
    decode: Any = kind.decode
    prefill: Any = kind.prefill
    rows: list[tuple[str, int, Any]] = [("prefill", prefill["block_m"], prefill)]
    if kind.hopper_prefill is not None:
        name = next(name for name in kind.kernels if name.startswith("hopper_prefill"))
        rows = [(name, HOPPER_ROWS, kind.hopper_prefill)]
    if kind.hopper_decode is not None:
        name = f"hopper_decode (to {kind.few_requests} requests)"
        rows.append((name, decode["block_m"], kind.hopper_decode))
    if kind.prefix_decode is not None:
        shared = {**decode, **kind.prefix_decode}
        shared.pop("tail_stages")
        rows.append(("prefix_decode", shared["block_m"], shared))
    rows.append(("decode", decode["block_m"], decode))
    first = (ranges(kind.layers), f"{(kind.workspace_bytes or 0) / 2**20:.1f} MiB")
    for name, block_m, tiles in rows:
        stages = str(tiles["num_stages"])
        if "tail_stages" in tiles:
            stages += f"/{tiles['tail_stages']}"
        yield (
            first[0], name, f"{block_m} x {tiles['block_n']}", str(tiles.get("num_warps", "-")),
            stages, "yes" if tiles.get("use_tma", True) else "no", first[1],
        )  # fmt: skip
        first = ("", "")


# Characters of the longest word in a column that must not be cut.
WHOLE = {"kernel": len("hopper_prefill_fp8"), "tile": len("128 x 128"), "workspace": 9}


# Columns of a window that has room for every table; below it, and where the output is no window
# but a pipe of unknown width, rows are printed as they are.
FULL_WIDTH = 110


def show(report: Report) -> None:
    """Print the report."""
    try:
        console = importlib.import_module("rich.console").Console(soft_wrap=False)
    except ImportError:
        console = None
    for title, head, rows in sections(report):
        if console is None or not head or console.width < FULL_WIDTH:
            _print_plain(title, head, rows)
        else:
            _print_rich(console, title, head, rows)
    for problem in report.problems:
        print(f"\n{problem.severity.upper()} ({problem.about}): {problem.text}")
    print("\nNothing fatal." if report.ok else "\nThis will not work.")


def _print_plain(title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    print(f"\n{title}" if title != "Versions" else title)
    table = ([head] if head else []) + rows
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(("  " + "  ".join(cells)).rstrip())


def _print_rich(
    console: Any, title: str, head: tuple[str, ...], rows: list[tuple[str, ...]]
) -> None:
    tables: Any = importlib.import_module("rich.table")
    boxes: Any = importlib.import_module("rich.box")
    print(f"\n{title}")
    sys.stdout.flush()
    table = tables.Table(box=boxes.SIMPLE_HEAD)
    for name in head:
        # Texts may wrap between words in a narrow window; names of kernels and sizes are whole.
        width = WHOLE.get(name)
        table.add_column(name, overflow="fold", min_width=width)
    for row in rows:
        # Names of features hold brackets, which rich would take for its markup.
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    console.print(table)
