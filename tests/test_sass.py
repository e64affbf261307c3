"""What ``tilewise.bench.sass`` reads in machine code: listings written here, and a real one."""

import pytest

from tilewise.bench import sass


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


@pytest.mark.slow
def test_the_miscompilation_is_found_and_avoided(compiled):
    """Shared tiles of 64 rows over an fp8 cache: ptxas 12.8 forgets where the values begin."""
    wide, chosen = compiled("shared_rows", [[64], [None]], old_triton=True)
    assert wide["unset"]
    assert not chosen["unset"]
