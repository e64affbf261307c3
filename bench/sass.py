"""What the machine code of a kernel says: disassembly, control flow, uniform registers never set.

ptxas has twice computed a matrix product's descriptor from a uniform register that nothing had
written on the way (lab book 14 and 43): the PTX was right, results were not, and no tool said so.
A register that is read although no write reaches it shows such a program before it runs.  Opcodes
are those of compute capabilities 8.0 to 9.0.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton

_LINE = re.compile(r"/\*([0-9a-f]{4,6})\*/\s+(.*?)\s*;")
_GUARD = re.compile(r"@!?U?P[0-9T]+\s+")
_UNIFORM = re.compile(r"(?<!\w)UR(\d+)")
# Descriptors of matrix products take two registers each, the second factor's after the first's.
_DESCRIPTORS = re.compile(r"gdesc\[UR(\d+)\]")
# Writes a uniform register, beside the opcodes that begin with U.
_TO_UNIFORM = ("R2UR", "S2UR", "CS2UR", "REDUX", "VOTEU")
_PAIR = re.compile(r"\.(64|WIDE)\b")
_JUMP = re.compile(r"(?:BRA|JMP)\b.*?(0x[0-9a-f]+)")


@dataclass(frozen=True)
class Instruction:
    """``opcode operands`` at ``address``; ``guarded`` where a predicate may skip it."""

    address: int
    opcode: str
    operands: str
    guarded: bool


def disassemble(cubin: bytes) -> list[Instruction]:
    """Instructions of the only kernel in ``cubin``, in the order of their addresses.

    Raises
    ------
    subprocess.CalledProcessError
        If Triton's ``cuobjdump`` cannot read it.
    """
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        command = [str(tool), "-sass", str(path)]
        listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return list(_parsed(listing))


def of(compiled: Any) -> list[Instruction]:
    """Instructions of what ``triton.compile`` returned."""
    return disassemble(compiled.asm["cubin"])


def _parsed(listing: str) -> Iterator[Instruction]:
    for address, text in _LINE.findall(listing):
        bare = _GUARD.sub("", text, count=1)
        opcode, _, operands = bare.partition(" ")
        yield Instruction(int(address, 16), opcode, operands, bare != text)


def uniform_registers(instruction: Instruction) -> tuple[set[int], set[int]]:
    """``(written, read)``: numbers of uniform registers."""
    opcode, operands = instruction.opcode, instruction.operands
    products = [int(n) for n in _DESCRIPTORS.findall(operands)]
    if products:
        # One descriptor where the first factor comes in registers: R72, R24, gdesc[UR8].
        first = 2 if re.match(r"\s*R\d+,\s*R\d+,\s*gdesc", operands) else 0
        return set(), {n + i for n in products for i in range(first, 4)}
    named = [int(n) for n in _UNIFORM.findall(operands)]
    base = opcode.split(".")[0]
    if base == "ELECT":
        return set(named), set()
    # UTMA… and USTG… copy; what they name is read.
    writes = base in _TO_UNIFORM or (base.startswith("U") and not base.startswith(("UT", "UB")))
    destination = re.match(r"\s*UR(\d+)", operands)
    if not writes or destination is None:
        return set(), set(named)
    written = {named[0]}
    if _PAIR.search(opcode):
        written.add(named[0] + 1)
    return written, set(named[1:])


def successors(code: list[Instruction]) -> list[list[int]]:
    """Indices of the instructions that may follow each one."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    following = []
    for i, x in enumerate(code):
        after = [i + 1] if i + 1 < len(code) else []
        base = x.opcode.split(".")[0]
        if base in ("BRA", "JMP"):
            target = _JUMP.search(f"{x.opcode} {x.operands}")
            jump = [index[int(target[1], 16)]] if target and int(target[1], 16) in index else []
            # Besides its guard a branch may have a predicate among the operands.
            conditional = x.guarded or x.opcode.endswith((".DIV", ".CONV"))
            taken_always = not conditional and not re.match(r"\s*!?U?P\d", x.operands)
            after = jump if taken_always else jump + after
        elif base in ("EXIT", "RET") and not x.guarded:
            after = []
        following.append(after)
    return following


def _written_by_calls(
    code: list[Instruction], following: list[list[int]], written: list[set[int]]
) -> None:
    """Add to each call what the routine behind it writes; what it reads is not looked at."""
    index = {instruction.address: i for i, instruction in enumerate(code)}
    for i, x in enumerate(code):
        target = re.search(r"0x[0-9a-f]+", x.operands)
        if not x.opcode.startswith("CALL") or target is None:
            continue
        work = [index[int(target[0], 16)]] if int(target[0], 16) in index else []
        seen = set(work)
        while work:
            new = set(following[work.pop()]) - seen
            seen |= new
            work += new
        written[i] = written[i].union(*(written[j] for j in seen))


def unset_uniforms(code: list[Instruction]) -> list[str]:
    """Reads of uniform registers that some way from the kernel's begin reaches without a write.

    A write under a predicate counts: what reads it then stands under the same one.

    Returns
    -------
    list[str]
        ``UR<number> at <address>: <instruction>`` for each, none where all is well.
    """
    if not code:
        return []
    written, read = map(list, zip(*map(uniform_registers, code), strict=True))
    following = successors(code)
    _written_by_calls(code, following, written)
    every = (1 << 256) - 1
    # Registers that are set on every way to an instruction; None: not reached yet.
    known: list[int | None] = [None] * len(code)
    known[0] = 0
    work = [0]
    while work:
        i = work.pop()
        state = known[i]
        assert state is not None
        for n in written[i]:
            state |= 1 << n
        for j in following[i]:
            before = known[j]
            merged = state & (every if before is None else before)
            if merged != before:
                known[j] = merged
                work.append(j)
    found = []
    for x, numbers, state in zip(code, read, known, strict=True):
        if state is not None:
            found += [
                f"UR{n} at {x.address:#x}: {x.opcode} {x.operands}"
                for n in sorted(numbers)
                if not state >> n & 1
            ]
    return found
