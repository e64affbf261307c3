"""Powers of two by the units for products instead of the one for transcendentals.

Where a hyperbolic tangent is taken of every logit as well, that unit, with an eighth of the others'
rate, is what the kernel waits for.  So some of the powers are computed as FlashAttention-4 does
(Dao et al., 2026): the argument rounds to an integer by the addition of 1.5 * 2**23, whose low bits
then are that integer, a polynomial gives the power of what is left, from -1/2 to 1/2, and the
integer is added to its exponent.
"""

import struct

# Minimax on [-1/2, 1/2]: right to 8e-5, where weights are rounded to 2**-9 or 2**-12.
COEFFICIENTS = (0.999928073, 0.693260986, 0.242611125, 0.055171670)
SMALLEST = -126.0  # smaller arguments give 2**-126 instead of 0


def powers_asm(elements: int, by_products: int) -> str:
    """PTX of ``elements`` powers of two, the first ``by_products`` of them by products."""
    lines = [f"ex2.approx.ftz.f32 ${i}, ${elements + i};" for i in range(by_products, elements)]
    c0, c1, c2, c3 = (f"0f{_bits(c):08X}" for c in COEFFICIENTS)
    magic, minus_magic = "0f4B400000", "0fCB400000"
    for i in range(by_products):
        lines += [
            f"max.f32 x{i}, ${elements + i}, 0f{_bits(SMALLEST):08X};",
            f"add.rn.f32 n{i}, x{i}, {magic};",
            f"add.rn.f32 f{i}, n{i}, {minus_magic};",
            f"sub.rn.f32 f{i}, x{i}, f{i};",
            f"mov.f32 p{i}, {c3};",
            *(f"fma.rn.f32 p{i}, p{i}, f{i}, {c};" for c in (c2, c1, c0)),
            f"mov.b32 i{i}, n{i};",
            f"shl.b32 i{i}, i{i}, 23;",
            f"mov.b32 j{i}, p{i};",
            f"add.s32 j{i}, j{i}, i{i};",
            f"mov.b32 ${i}, j{i};",
        ]
    names = ", ".join(f"x{i}, n{i}, f{i}, p{i}" for i in range(by_products))
    ints = ", ".join(f"i{i}, j{i}" for i in range(by_products))
    return "{ .reg .f32 " + names + "; .reg .b32 " + ints + "; " + " ".join(lines) + " }"


def powers_constraints(elements: int) -> str:
    """Constraints for ``powers_asm``."""
    return ",".join(["=f"] * elements + ["f"] * elements)


def _bits(x: float) -> int:
    """The bits of a number as fp32."""
    return int.from_bytes(struct.pack(">f", x), "big")
