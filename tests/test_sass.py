"""What ``tilewise.bench.sass`` reads in machine code: listings written here, and a real one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilewise.bench import sass

OLD_TRITON = Path(sys.prefix) / "triton36"


def code(*lines: str) -> list[sass.Instruction]:
    """Instructions at addresses 0, 16, 32, …"""
    listing = "\n".join(f"/*{16 * i:04x}*/  {line} ;" for i, line in enumerate(lines))
    return list(sass._parsed(listing))


def unset(*lines: str) -> list[str]:
    return [found.split()[0] for found in sass.unset_uniforms(code(*lines))]


def test_a_register_that_nothing_wrote():
    assert unset("UIADD3 UR58, UP1, UR58, 0x40, URZ", "EXIT") == ["UR58"]
    assert unset("UMOV UR58, 0x1", "UIADD3 UR58, UP1, UR58, 0x40, URZ", "EXIT") == []
    assert sass.unset_uniforms([]) == []


def test_a_write_on_one_way_only():
    ways = ["@P0 BRA 0x20", "UMOV UR4, URZ", "IMAD.U32 R2, RZ, RZ, UR4", "EXIT"]
    assert unset(*ways) == ["UR4"]
    # On both ways, or where a predicate alone decides, as it does of what reads.
    both = ["@P0 BRA 0x30", "UMOV UR4, URZ", "BRA 0x40", "UMOV UR4, 0x1", "STS [UR4], R2", "EXIT"]
    assert unset(*both) == []
    assert unset("@P0 R2UR UR4, R3", "@P0 UTMALDG.4D [UR4], [UR4]", "EXIT") == []


def test_a_loop_may_write_what_it_reads_next_time():
    loop = ["IMAD.U32 R2, RZ, RZ, UR4", "UMOV UR4, URZ", "@P0 BRA 0x0", "EXIT"]
    assert unset(*loop) == ["UR4"]
    assert unset("ULDC UR4, c[0x0][0x1]", *loop[:2], "@P0 BRA 0x10", "EXIT") == []


@pytest.mark.parametrize(
    ("product", "read"),
    [
        ("HGMMA.64x64x16.F32 R24, gdesc[UR8], RZ, !UPT", {8, 9, 10, 11}),
        # The first factor in registers.
        ("HGMMA.64x32x16.F32 R72, R24, gdesc[UR8].tnspB, R72", {10, 11}),
    ],
)
def test_descriptors_of_products(product, read):
    (instruction,) = code(product)
    assert sass.uniform_registers(instruction) == (set(), read)


@pytest.mark.parametrize(
    ("line", "written", "read"),
    [
        ("ULDC.64 UR10, c[0x0][0x3b0]", {10, 11}, set()),
        ("UIMAD.WIDE.U32 UR8, UR9, UR10, URZ", {8, 9}, {9, 10}),
        ("@P0 R2UR UR13, R105", {13}, set()),
        ("ELECT P0, UR62, PT", {62}, set()),
        ("UTMALDG.4D [UR8], [UR4]", set(), {8, 4}),
        ("IADD3 R26, P1, R26, UR10, RZ", set(), {10}),
        ("UISETP.LT.AND UP2, UPT, UR21, UR41, UPT", set(), {21, 41}),
    ],
)
def test_what_is_written_and_read(line, written, read):
    (instruction,) = code(line)
    assert sass.uniform_registers(instruction) == (written, read)


def test_a_routine_writes_for_its_caller():
    called = [
        "CALL.REL.NOINC 0x30",
        "UMOV UR40, UR32",
        "EXIT",
        "UMOV UR32, URZ",
        "RET.REL.NODEC R2",
    ]
    assert unset(*called) == []
    assert unset(called[0], "UMOV UR40, UR33", *called[2:]) == ["UR33"]


JOB = """
import dataclasses
from tilewise import policy
from tilewise.bench import aot, aot_prefix

config = policy.choose(policy.Geometry(8, 2, 64, 64, 2, 1), aot_prefix.DEVICES[90], plain=True)
config = aot_prefix.configured(config, 90)
for rows in (64, config.prefixes.block_m):
    tiles = dataclasses.replace(config.prefixes, block_m=rows)
    chosen = dataclasses.replace(config, prefixes=tiles)
    compiled = aot_prefix.compile_prefix_decode(chosen, "fp16", 90, ["e5m2"])
    print("unset", len(aot.report(compiled, "prefix_decode", chosen, "fp16", 90, ["e5m2"]).unset))
"""


@pytest.mark.slow
def test_the_miscompilation_is_found_and_avoided():
    """Shared tiles of 64 rows over an fp8 cache: ptxas 12.8 forgets where the values begin."""
    if not OLD_TRITON.is_dir():
        pytest.skip(f"Triton 3.6 is not set up ({OLD_TRITON.name} in the environment)")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(OLD_TRITON), env.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [sys.executable, "-c", JOB], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    wide, chosen = (int(line.split()[1]) for line in done.stdout.splitlines())
    assert wide > 0
    assert chosen == 0
