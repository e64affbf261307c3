"""The plan/run interface refuses what it cannot compute, and says what it accepts."""

import os
import subprocess
import sys

import pytest
import torch
from cases import Case, check, make_attention, make_batch, plan_batch

from tilewise.attention import PagedAttention
from tilewise.errors import PlanMismatch, UnsupportedConfig

CASE = Case(((1, 70), (20, 4)), dtype=torch.float16)


@pytest.fixture
def planned(device):
    batch = make_batch(CASE, device)
    attn = make_attention(CASE, device)
    plan_batch(attn, batch)
    return attn, batch


def test_run_before_plan_is_refused(device):
    batch = make_batch(CASE, device)
    with pytest.raises(PlanMismatch, match="call plan"):
        make_attention(CASE, device).run(batch.q, batch.kv_cache)


def test_stale_plan_is_refused(planned):
    attn, batch = planned
    old = attn._plan
    new = plan_batch(attn, batch)
    with pytest.raises(PlanMismatch, match="stale plan: made as number 1"):
        attn.run(batch.q, batch.kv_cache, plan=old)
    check(batch, attn.run(batch.q, batch.kv_cache, plan=new))


def test_plan_of_another_object_is_refused(planned, device):
    attn, batch = planned
    other = make_attention(CASE, device)
    with pytest.raises(PlanMismatch, match="another PagedAttention"):
        other.run(batch.q, batch.kv_cache, plan=attn._plan)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda q, kv: (q[:5], kv), "5 rows; the plan covers 24"),
        (lambda q, kv: (q[:, :3], kv), r"q has shape \(24, 3, 64\)"),
        (lambda q, kv: (q[..., :32], kv), r"\[tokens, 4, 64\]"),
        (lambda q, kv: (q.float(), kv), "q is torch.float32"),
        (lambda q, kv: (q.transpose(1, 2).contiguous().transpose(1, 2), kv), "unit last stride"),
        (lambda q, kv: (q, kv[:, :, :32]), r"k cache has shape .*accepted: \[pages, 2, 64, 64\]"),
        (lambda q, kv: (q, kv[..., :64]), r"kv_cache has shape .*accepted: \[pages, 2, 64, 128\]"),
        (lambda q, kv: (q, kv.float()), "k cache is torch.float32"),
        (lambda q, kv: (q, (kv[..., :64], kv[:, :1, :, 64:])), "v cache has shape"),
        (lambda q, kv: (q, (kv[..., :64],) * 3), "tuple of 3"),
    ],
)
def test_tensors_that_do_not_fit_are_named(planned, change, named):
    attn, batch = planned
    attn.run(batch.q, batch.kv_cache)  # what fits must not vouch for what does not
    with pytest.raises(PlanMismatch, match=named):
        attn.run(*change(batch.q, batch.kv_cache))


def test_output_that_does_not_fit_is_named(planned):
    attn, batch = planned
    with pytest.raises(PlanMismatch, match="out has 3 rows"):
        attn.run(batch.q, batch.kv_cache, out=batch.q[:3].clone())
    with pytest.raises(PlanMismatch, match=r"out is torch\.float32"):
        attn.run(batch.q, batch.kv_cache, out=batch.q.float())


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scale_must_be_positive_and_finite(planned, scale):
    attn, batch = planned
    with pytest.raises(PlanMismatch, match="scale="):
        attn.run(batch.q, batch.kv_cache, scale=scale)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"num_tokens": 10_000}, "num_tokens=10000; built for 0 to"),
        ({"num_tokens": -1}, "num_tokens=-1"),
    ],
)
def test_batches_beyond_the_bounds_are_named(planned, change, named):
    attn, batch = planned
    with pytest.raises(PlanMismatch, match=named):
        plan_batch(attn, batch, **change)


def test_batch_tensors_that_do_not_fit_are_named(planned, device):
    attn, batch = planned
    qsl, lens, table = batch.query_start_loc, batch.seq_lens, batch.block_table
    bounds = {"num_tokens": 24, "max_query_len": 20}
    with pytest.raises(PlanMismatch, match=r"seq_lens is torch\.int64"):
        attn.plan(qsl, lens.long(), table, **bounds)
    with pytest.raises(PlanMismatch, match=r"query_start_loc has shape \(2,\)"):
        attn.plan(qsl[:2], lens, table, **bounds)
    with pytest.raises(PlanMismatch, match="block_table has shape"):
        attn.plan(qsl, lens, table[:1], **bounds)
    with pytest.raises(PlanMismatch, match="block_table has shape"):
        attn.plan(qsl, lens, table.t().contiguous().t(), **bounds)
    many = torch.zeros(9, dtype=torch.int32, device=device)
    with pytest.raises(PlanMismatch, match="9 requests; built for at most 4"):
        attn.plan(torch.cat([many, many[:1]]), many, table.repeat(9, 1), **bounds)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dtype": torch.float64}, "float64; accepted: float16, bfloat16, float32"),
        ({"max_num_reqs": 0}, "max_num_reqs=0"),
        ({"max_num_tokens": -3}, "max_num_tokens=-3"),
        ({"decode_query_len": 17}, "decode_query_len=17; accepted: 1 to 16"),
        ({"page_size": 20}, "page_size=20; accepted: multiples of 16"),
    ],
)
def test_construction_names_what_is_wrong(device, change, named):
    kwargs = {
        "page_size": 64, "dtype": torch.float16, "max_num_reqs": 4, "max_num_tokens": 64,
        "device": device,
    } | change  # fmt: skip
    with pytest.raises(UnsupportedConfig, match=named):
        PagedAttention(4, 2, 64, **kwargs)


def test_config_for_another_layer_is_refused(device):
    config = make_attention(CASE, device).config
    with pytest.raises(UnsupportedConfig, match="config is for"):
        PagedAttention(
            4, 4, 64, page_size=64, dtype=torch.float16, max_num_reqs=4, max_num_tokens=64,
            device=device, config=config,
        )  # fmt: skip


def test_shrinking_and_growing_batches_leave_nothing_behind(device):
    """The same object, planned again and again: lists of earlier batches must not show."""
    attn = make_attention(CASE, device, max_num_reqs=8, max_num_tokens=400)
    for requests in (
        ((1, 70), (20, 4)), ((100, 0), (200, 30), (1, 1)), ((1, 5),), ((17, 0),),
        ((1, 500), (1, 3), (16, 64), (2, 0)), ((40, 10), (1, 0)),
    ):  # fmt: skip
        batch = make_batch(Case(requests, dtype=torch.float16, pad_requests=2), device)
        plan_batch(attn, batch)
        out = torch.full_like(batch.q, 7.0)
        attn.run(batch.q, batch.kv_cache, out=out)
        check(batch, out)
        assert (out[batch.num_tokens :] == 7.0).all()


def test_workspace_is_reported(planned):
    attn, _ = planned
    cfg = attn.config
    partials = 2 * cfg.num_workers * cfg.decode.block_m * (cfg.decode.block_d + 2) * 4
    assert partials < attn.workspace_bytes < partials + 64 * 1024


def test_lengths_that_changed_since_the_plan_harm_only_their_step(device):
    """Misuse: results of that run are unspecified, the next planned one is right again."""
    case = Case(((1, 300), (1, 300), (1, 77)), dtype=torch.float16)
    attn = make_attention(case, device)
    batch = make_batch(case, device)
    guard = torch.full((9, 4, 64), 7.0, dtype=torch.float16, device=device)
    for lens in ([201, 11, 1], [1, 1, 1], [301, 2, 78]):
        seq_lens = batch.seq_lens
        attn.plan(batch.query_start_loc, seq_lens, batch.block_table, num_tokens=3, max_query_len=1)
        seq_lens.copy_(torch.tensor(lens))
        attn.run(batch.q, batch.kv_cache, out=guard[3:])
        assert (guard[:3] == 7.0).all()
        assert (guard[6:] == 7.0).all()
        plan_batch(attn, batch)
        check(batch, attn.run(batch.q, batch.kv_cache))


def test_lengths_beyond_num_tokens_stay_inside_the_buffers(device):
    """Misuse: 2,000 tokens where 64 were promised; the plan is cut off, not written past."""
    attn = PagedAttention(
        4, 2, 16, page_size=16, dtype=torch.float32, max_num_reqs=4, max_num_tokens=64,
        device=device,
    )  # fmt: skip
    room = attn._buffers.tile_req.shape[0]
    ints = {"dtype": torch.int32, "device": device}
    table = torch.zeros((1, 130), **ints)
    attn.plan(
        torch.tensor([0, 2000], **ints), torch.tensor([2000], **ints), table,
        num_tokens=64, max_query_len=64,
    )  # fmt: skip
    assert attn._buffers.header[0].item() == room


def test_one_token_requests_of_a_long_context_model_are_planned(device):
    """The bound on units follows the batch, not the widest one imaginable."""
    attn = PagedAttention(
        128, 8, 128, page_size=64, dtype=torch.bfloat16, max_num_reqs=1024, max_num_tokens=1024,
        device=device,
    )  # fmt: skip
    ints = {"dtype": torch.int32, "device": device}
    qsl, lens = torch.arange(1025, **ints), torch.full((1024,), 500, **ints)
    table = torch.zeros((1, 16384), **ints).expand(1024, 16384)
    attn.plan(qsl, lens, table, num_tokens=1024, max_query_len=1)
    assert attn._buffers.header[2].item() == 1024 * 8 * (8 + attn.config.item_overhead)


CPU_PROGRAM = """
import torch
from tilewise import PagedAttention
attn = PagedAttention(4, 2, 64, page_size=64, dtype=torch.bfloat16, max_num_reqs=1,
                      max_num_tokens=32, device="cpu")
ints = {"dtype": torch.int32}
q = torch.ones(20, 4, 64, dtype=torch.bfloat16)
cache = torch.full((1, 2, 64, 128), 3.0, dtype=torch.bfloat16)
attn.plan(torch.tensor([0, 20], **ints), torch.tensor([20], **ints), torch.zeros((1, 1), **ints),
          num_tokens=20, max_query_len=20)
print(attn.run(q, cache).float().unique().tolist())
"""


@pytest.mark.parametrize("interpreted", [True, False])
def test_the_cpu_computes_bfloat16_right_or_says_what_is_missing(interpreted):
    """A plain program, without what the test suite sets up for itself."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    if interpreted:
        env["TRITON_INTERPRET"] = "1"
    done = subprocess.run(
        [sys.executable, "-c", CPU_PROGRAM], env=env, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    if interpreted:
        assert done.stdout.strip() == "[3.0]", done.stderr
    else:
        assert "needs TRITON_INTERPRET=1" in done.stderr


def test_devices_that_cannot_run_kernels_are_named():
    kwargs = {"page_size": 64, "dtype": torch.float16, "max_num_reqs": 1, "max_num_tokens": 16}
    with pytest.raises(UnsupportedConfig, match="device='tpu'; accepted: cuda, cuda:0"):
        PagedAttention(4, 2, 64, device="tpu", **kwargs)
    with pytest.raises(UnsupportedConfig, match="device=meta; accepted: cuda"):
        PagedAttention(4, 2, 64, device="meta", **kwargs)
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedConfig, match="torch sees no CUDA device"):
            PagedAttention(4, 2, 64, **kwargs)


def test_another_current_device_is_refused(planned, monkeypatch):
    """Its stream would get the launches, and pointers of another GPU's memory."""
    attn, batch = planned
    attn.device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(PlanMismatch, match="current device is cuda:0; built for cuda:1"):
        attn.run(batch.q, batch.kv_cache)
    with pytest.raises(PlanMismatch, match="current device is cuda:0; built for cuda:1"):
        plan_batch(attn, batch)
