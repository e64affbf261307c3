"""fp8 caches as bytes: their values as fp16, where each of them is exact, and back with rounding.

A format is ``e4m3`` (OCP E4M3FN: no infinities, largest value 448) or ``e5m2`` (IEEE-like, largest
finite value 57344).  With ``_bits`` behind it the conversion is made of integer arithmetic, for
GPUs without the instruction (reading: before compute capability 8.9; writing: before 9.0, where
Triton rounds twice) and for Triton's interpreter, whose own conversions break ties wrongly and read
NaN as 480.
Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022).
"""

import triton
import triton.language as tl

FORMATS = ("", "e4m3", "e5m2", "e4m3_bits", "e5m2_bits")

# Logits and weights of an fp8 cache are products in fp16.  Weights are kept 2**7 times larger than
# their fp32 twins would be: what fp16 drops, below 2**-24, is then less than 2**-31 of the largest
# weight, and a million such keys do not show.  Above remains 2**8 before fp16 ends, for maxima that
# are followed only once they have risen by that much.
WEIGHT_SHIFT = tl.constexpr(7.0)

# Weights rounded to e4m3 use its range: up to 2**8 of 448.  Where maxima may lag by FP8_SLACK
# powers of two, so far below.  What e4m3 drops is then less than 2**-18 (2**-16) of the largest.
FP8_SHIFT = tl.constexpr(8.0)
FP8_SLACK = tl.constexpr(2.0)


@triton.jit
def decode_fp8(x, FORMAT: tl.constexpr):
    """fp16 values of the bytes ``x`` (uint8, any shape); exact, NaN and infinities included."""
    if FORMAT == "e4m3":
        return x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif FORMAT == "e5m2":
        return x.to(tl.float8e5, bitcast=True).to(tl.float16)
    else:
        return _decode_bits(x.to(tl.uint16), FORMAT)


@triton.jit
def _decode_bits(bits, FORMAT: tl.constexpr):
    """fp16 values of ``bits`` (uint16 below 256) by integer arithmetic."""
    if FORMAT == "e5m2_bits" or FORMAT == "e5m2":
        # fp16 has the same exponent and more mantissa.
        return (bits << 8).to(tl.float16, bitcast=True)
    else:
        tl.static_assert(FORMAT == "e4m3_bits")
        moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        # The exponents' biases differ by 8; fp16 holds fp8's subnormals until then.
        value = moved.to(tl.float16, bitcast=True) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value).to(tl.float16)


@triton.jit
def decode_pairs(x, FORMAT: tl.constexpr):
    """fp16 values of the low and of the high bytes of ``x`` (uint16, any shape).

    Matrix operands are read transposed in units of 16 bits, so that values come in pairs of
    columns.  The instructions of the two halves are written out, for nothing of 8 bits may stand
    between the load and the product: Triton would load byte by byte.
    """
    if FORMAT == "e4m3":
        low = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x0020; mov.b32 {a, b}, t; "
            "cvt.rn.f16x2.e4m3x2 $0, a; }",
            "=r,r", [x], tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
        high = tl.inline_asm_elementwise(
            "{ .reg .b32 t; .reg .b16 a, b; prmt.b32 t, $1, 0, 0x0031; mov.b32 {a, b}, t; "
            "cvt.rn.f16x2.e4m3x2 $0, a; }",
            "=r,r", [x], tl.float16, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        low = _decode_bits(x & 0xFF, FORMAT)
        high = _decode_bits(x >> 8, FORMAT)
    return low, high


@triton.jit
def encode_fp8(x, FORMAT: tl.constexpr):
    """Bytes (uint8) nearest to ``x`` (fp32), ties to even; beyond the largest value, that value.

    NaN stays NaN.
    """
    E4M3: tl.constexpr = FORMAT == "e4m3" or FORMAT == "e4m3_bits"
    LARGEST: tl.constexpr = 448.0 if E4M3 else 57344.0
    # Not minimum and maximum: these drop NaN.
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
    if FORMAT == "e4m3":
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    elif FORMAT == "e5m2":
        return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        tl.static_assert(FORMAT == "e4m3_bits" or FORMAT == "e5m2_bits")
        MANTISSA: tl.constexpr = 3 if E4M3 else 2
        BIAS: tl.constexpr = 7 if E4M3 else 15
        DROPPED: tl.constexpr = 23 - MANTISSA
        bits = x.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        half = (1 << (DROPPED - 1)) - 1 + ((magnitude >> DROPPED) & 1)
        normal = ((magnitude + half) >> DROPPED) - ((127 - BIAS) << MANTISSA)
        # Subnormals: a sum whose last place is worth as much as theirs rounds them.
        MAGIC_BITS: tl.constexpr = (127 + 23 + 1 - BIAS - MANTISSA) << 23
        magic = tl.full(x.shape, MAGIC_BITS, tl.int32).to(tl.float32, bitcast=True)
        small = (tl.abs(x) + magic).to(tl.int32, bitcast=True) - MAGIC_BITS
        code = tl.where(magnitude < ((128 - BIAS) << 23), small, normal)
        code = tl.where(x != x, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def fp8_operand(x, FORMAT: tl.constexpr):
    """``x`` (fp32) rounded to e4m3, as operand of a matrix product.

    Without the instructions (``e4m3_bits``) it comes as fp16 of the same values.
    """
    if FORMAT == "e4m3":
        return x.to(tl.float8e4nv)
    else:
        tl.static_assert(FORMAT == "e4m3_bits")
        return decode_fp8(encode_fp8(x, FORMAT), FORMAT)


@triton.jit
def stored_operand(x, FORMAT: tl.constexpr):
    """Elements of an e4m3 cache, as operand of a matrix product with a ``fp8_operand``."""
    if FORMAT == "e4m3":
        return x
    else:
        tl.static_assert(FORMAT == "e4m3_bits")
        return decode_fp8(x, FORMAT)


@triton.jit
def fp8_rows(q, FORMAT: tl.constexpr):
    """``(rows, factor)``: ``q`` [BLOCK_M, BLOCK_D] as e4m3 rows times a power of two each.

    The largest element of a row comes to lie between 128 and 256; what e4m3 drops is then less
    than 2**-17 of it.
    """
    wide = q.to(tl.float32)
    exponent = _exponents(wide)
    inverse = ((254 + 7 - exponent) << 23).to(tl.float32, bitcast=True)
    factor = ((exponent - 7) << 23).to(tl.float32, bitcast=True)
    return fp8_operand(wide * inverse[:, None], FORMAT), factor


@triton.jit
def _exponents(wide):
    """Biased exponents of the rows' largest elements; see ``fp16_rows`` for the bounds."""
    largest = tl.max(tl.abs(wide), 1)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 0xFF
    return tl.minimum(tl.maximum(exponent, 127 - 64), 253)


@triton.jit
def fp16_rows(q):
    """``(rows, factor)``: ``q`` [BLOCK_M, BLOCK_D] as fp16 rows times a power of two each.

    bfloat16 reaches further than fp16; a row whose largest element lies between 1 and 2 loses
    nothing that would show beside that element.
    """
    wide = q.to(tl.float32)
    # Rows below 2**-64 count as if they reached it, so that no factor of a logit comes out as 0.
    exponent = _exponents(wide)
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    factor = (exponent << 23).to(tl.float32, bitcast=True)
    return (wide * inverse[:, None]).to(tl.float16), factor
