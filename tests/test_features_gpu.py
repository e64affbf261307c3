"""Features at the lengths and shapes that models have, on the GPU, both kernels in one batch.

The interpreter's cases (``test_features``, ``test_spans``, ``test_wide_heads`` and their like) run
on the GPU as well; these are too long for it.
"""

import pytest
import torch
from cases import Case, run_and_check

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
LONG = ((1, 8191), (1, 4096), (1, 1), (300, 5000), (16, 3000), (0, 0), (2000, 0))
# Pictures of 256 tokens and of 280: within a prompt, cut by its chunks on either side.
SPANS = ((), (), (), ((4990, 5245),), ((100, 355), (2990, 3269)), (), ((0, 255), (700, 979)))
GPT_OSS = {"num_q_heads": 64, "num_kv_heads": 8, "head_dim": 64, "dtype": BF16, "sinks": 1.0}
GEMMA_2 = {"num_q_heads": 16, "num_kv_heads": 8, "head_dim": 256, "dtype": BF16, "softcap": 50.0}
GEMMA_3 = {"num_q_heads": 8, "num_kv_heads": 4, "head_dim": 256, "dtype": BF16}
GEMMA_4 = {"num_q_heads": 16, "num_kv_heads": 2, "head_dim": 512, "dtype": BF16}
LLAMA = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": BF16}

CASES = {
    "gpt_oss": Case(LONG, **GPT_OSS),
    "gpt_oss_window": Case(LONG, window=128, **GPT_OSS),
    "gemma_2": Case(LONG, **GEMMA_2),
    "gemma_2_window": Case(LONG, window=4096, **GEMMA_2),
    "soft_cap_d128": Case(LONG, softcap=30.0, **LLAMA),
    "gemma_3_images": Case(LONG, spans=SPANS, **GEMMA_3),
    "gemma_3_images_window": Case(LONG, spans=SPANS, window=1024, **GEMMA_3),
    "gemma_4_images_in_window": Case(
        LONG, spans=SPANS, window=1024, spans_in_window=True, **GEMMA_3
    ),
    "gemma_4": Case(LONG, **GEMMA_4),
    "gemma_4_fp16_pages_of_16": Case(LONG, page_size=16, **(GEMMA_4 | {"dtype": FP16})),
    "gemma_4_images": Case(LONG, spans=SPANS, **GEMMA_4),
    "gemma_4_fp8": Case(LONG, kv_dtype=torch.float8_e4m3fn, kv_scales="head", **GEMMA_4),
    "alibi": Case(LONG, alibi="linear", **(LLAMA | {"num_kv_heads": 32})),
    "alibi_sqrt": Case(LONG, alibi="sqrt", **LLAMA),
    "window_of_1": Case(LONG, window=1, **LLAMA),
    "window_of_4096": Case(LONG, window=4096, **LLAMA),
    "window_pages_of_528": Case(LONG, window=1000, page_size=528, **LLAMA),
    "bidirectional": Case(LONG, causal=False, **LLAMA),
    "bidirectional_window": Case(LONG, causal=False, window=512, **LLAMA),
    "flags": Case(LONG, causal=(1, 0, 1, 0, 0, 1, 0), **LLAMA),
    **{f"ratio_{q}": Case(LONG, q, 1, 128, dtype=BF16) for q in (1, 3, 5, 6, 7, 12, 71, 128)},
    **{
        f"pages_of_{p}": Case(LONG, page_size=p, **LLAMA)
        for p in (16, 32, 48, 128, 144, 528, 544, 784)
    },
    **{
        f"d{d}": Case(LONG, 12, 4, d, dtype=BF16)
        for d in (16, 40, 72, 80, 88, 96, 112, 128, 192, 256)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_matches_reference(name):
    run_and_check(CASES[name], "cuda")


@pytest.mark.parametrize("name", ["gpt_oss_window", "gemma_2_window", "alibi", "gemma_4"])
def test_verification_matches_reference(name):
    """Drafts of many requests: several query tokens each stay on split KV."""
    given = vars(CASES[name]) | {
        "requests": tuple((1 + i % 5, 211 * i % 7000) for i in range(48)), "decode_query_len": 5,
    }  # fmt: skip
    run_and_check(Case(**given), "cuda")
