"""Spans of a causal sequence whose queries see all keys of their span: images among text.

``spans`` [num_reqs, num_spans, 2] holds the first and the last position of each span. Those of a
request do not overlap; where the last is not beyond the first, there is none. A span may reach
past the keys that are there, as in a prompt that comes in chunks.

Without a window such a query sees what is causal and the rest of its span, so all keys up to the
span's last. Under a window it sees from the window's or the span's first key on, whichever is
before; or, where spans are kept inside windows (Gemma 4), from the window's.
"""

import triton
import triton.language as tl


@triton.jit
def own_span(spans_ptr, req, num_spans, pos):
    """First and last position of the span that each query at ``pos`` is in; else its own twice.

    ``pos`` is a vector or a scalar.
    """
    first = pos
    last = pos
    for i in range(num_spans):
        span_ptr = spans_ptr + (req * num_spans + i) * 2
        begin = tl.load(span_ptr)
        end = tl.load(span_ptr + 1)
        inside = (begin < end) & (begin <= pos) & (pos <= end)
        first = tl.where(inside, begin, first)
        last = tl.where(inside, end, last)
    return first, last


@triton.jit
def meets_span(spans_ptr, r, num_spans, query_len, seq_len, ok):
    """Whether a query of each request ``r`` is in a span; requests that are not ``ok`` are not."""
    meets = r < 0
    for i in range(num_spans):
        span_ptr = spans_ptr + (r.to(tl.int64) * num_spans + i) * 2
        begin = tl.load(span_ptr, mask=ok, other=0)
        end = tl.load(span_ptr + 1, mask=ok, other=0)
        meets = meets | ((begin < end) & (begin < seq_len) & (end >= seq_len - query_len))
    return meets
