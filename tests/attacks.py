"""What the attacks on the Gluon prefills share: models, batches around edges, noise."""

import random

import torch
from cases import NOWHERE, make_attention, make_batch, plan_batch

from tilewise import counters, policy

BF16, FP16 = torch.bfloat16, torch.float16
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
NAN = float("nan")
DEVICE = "cuda"
GLUON = ("hopper_prefill", "hopper_prefill_kv8", "hopper_prefill_fp8")
LLAMA = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": BF16}
# An e4m3 cache is multiplied as it is here, one of e5m2 widened.
LLAMA_FP8 = LLAMA | {"kv_dtype": E4M3, "kv_scales": "head"}
LLAMA_KV8 = LLAMA | {"kv_dtype": E5M2, "kv_scales": "head"}
QWEN = LLAMA | {"num_q_heads": 28, "num_kv_heads": 4}
GPT_OSS = {"num_q_heads": 64, "num_kv_heads": 8, "head_dim": 64, "dtype": BF16, "sinks": 1.0}
GEMMA = {"num_q_heads": 8, "num_kv_heads": 4, "head_dim": 256, "dtype": BF16}
MODELS = {
    "llama": LLAMA,
    "qwen": QWEN,
    "gpt_oss": GPT_OSS | {"page_size": 256},
    "gemma": GEMMA,
    "fp8": LLAMA_FP8,
    "kv8": LLAMA_KV8,
    "capped": LLAMA | {"softcap": 50.0},
    "capped_kv8": LLAMA_KV8 | {"softcap": 30.0},
}


def ragged(seed, group, count=24, longest=700, decodes=True):
    """Requests around the edges of tiles, blocks and pages, and none at all between them."""
    rng = random.Random(seed)
    tokens = 64 // policy.next_power_of_2(group)  # of a warpgroup
    edges = [n for k in (1, 2, 4, 5) for n in (k * tokens - 1, k * tokens, k * tokens + 1)]
    edges += [63, 64, 65, 127, 128, 129]
    queries = [n for n in edges if n > policy.DECODE_MAX_QUERY_LEN] + [17]
    contexts = [0, 1, 62, 63, 64, 65, 126, 127, 128, 129, 255, 256, 257]
    found = []
    for _ in range(count):
        query = rng.choice(queries)
        if decodes and rng.random() < 0.3:
            query = rng.choice([0, 0, 1, 1, 2, 15, 16])
        found.append((query, rng.choice([*contexts, rng.randint(0, longest)])))
    # Whoever is drawn, a tile of one row is among them.
    return (*found, (2 * tokens * -(-17 // (2 * tokens)) + 1, 0))


def gluon_launches():
    counted = counters.snapshot()
    return sum(counted.get(f"launches{{kernel={name}}}", 0) for name in GLUON)


def prepared(case, seed=0, **overrides):
    """The case's batch, and an object that has planned it."""
    batch = make_batch(case, DEVICE, seed)
    overrides.setdefault("fp8_matmul", case.kv_dtype == E4M3)
    attn = make_attention(case, DEVICE, **overrides)
    plan_batch(attn, batch)
    return batch, attn


def bits(x):
    """What is there, NaN or not."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def run(attn, batch, **options):
    return attn.run(batch.q, batch.kv_cache, return_lse=True, **(batch.features | options))


def run_gluon(attn, batch, **options):
    """One run, which must be one launch of a Gluon prefill that leaves its counters at zero."""
    before = gluon_launches()
    out, lse = run(attn, batch, **options)
    assert gluon_launches() == before + 1
    assert attn._buffers.header[3:].tolist() == [0, 0]
    return out, lse


def move_pages(batch, pages):
    """The same batch in a cache of so many pages, at its far end."""
    held = len(batch.kv_cache)
    kind = batch.kv_cache
    order = sorted(range(4), key=lambda axis: (-kind.stride(axis), axis))
    shape = [(pages, *kind.shape[1:])[axis] for axis in order]
    memory = torch.full(shape, NAN, dtype=BF16, device=DEVICE).to(kind.dtype)
    moved = memory.permute([order.index(axis) for axis in range(4)])
    moved[pages - held :] = kind
    batch.kv_cache = moved
    table = batch.block_table
    batch.block_table = torch.where(table == NOWHERE, table, table + pages - held)


class Noise:
    """Another stream that keeps SMs, L2 and the copy engines busy at its own pace."""

    def __init__(self):
        self.stream = torch.cuda.Stream()
        self.a = torch.randn(1536, 1536, dtype=BF16, device=DEVICE)
        self.memory = torch.zeros(2, 2**25, dtype=torch.uint8, device=DEVICE)
        self.stream.wait_stream(torch.cuda.current_stream())

    def __call__(self, i):
        with torch.cuda.stream(self.stream):
            if i % 3:
                self.a @ self.a
            else:
                self.memory[0].copy_(self.memory[1])

    def join(self):
        torch.cuda.current_stream().wait_stream(self.stream)
