"""Sliding window, sinks, soft cap and ALiBi: alone, together, and however the work is cut.

Kinds of field failures: B (garbage left of the window), C (splits), F (windows), G (the rest).
"""

import dataclasses
import itertools

import pytest
import torch
from cases import NOWHERE, Case, check, make_attention, make_batch, plan_batch, run_and_check

from tilewise import plan_rule, policy
from tilewise.errors import PlanMismatch, UnsupportedConfig

# numpy's remarks on poison that masked tiles read and select away, and on powers that saturate a
# soft cap; the GPU has no such voice.
pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
INF = float("inf")
# Chunks after a cached prefix, decodes, verification of drafts, and a request of no tokens.
MIXED = ((20, 130), (1, 300), (5, 64), (0, 0), (40, 0))


def with_config(case, device, **changes):
    """The case's configuration with other tiles or workers."""
    config = make_attention(case, device).config
    for kernel in ("prefill", "decode"):
        if kernel in changes:
            changes[kernel] = dataclasses.replace(getattr(config, kernel), **changes[kernel])
    return dataclasses.replace(config, **changes)


def run(case, device, **overrides):
    """``(batch, out, lse)`` of one run, restricted to rows of requests."""
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    out, lse = attn.run(batch.q, batch.kv_cache, return_lse=True, **(batch.features | overrides))
    return batch, out[: batch.num_tokens], lse[: batch.num_tokens]


# -- sliding window -------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 100, 257, 4096])
@pytest.mark.parametrize("page_size", [64, 16])
def test_f_window_matches_reference(window, page_size, device):
    """One key, around a page, unaligned to tiles, beyond the loop without masks, and all keys."""
    run_and_check(Case(((20, 600), *MIXED), page_size=page_size, window=window), device)


@pytest.mark.parametrize(
    "case",
    [
        Case(MIXED, window=70, dtype=BF16, layout="hnd", pad_requests=2),
        Case(MIXED, window=128, dtype=FP16, layout="cross_layer", page_size=128),
        Case(MIXED, window=47, page_size=48, head_dim=96, num_q_heads=9, num_kv_heads=3),
        Case(((17, 3), (1, 1300)), window=529, page_size=528, num_q_heads=5, num_kv_heads=1),
        Case(((2, 390), (18, 400)), window=290, head_dim=256, num_q_heads=2, dtype=BF16),
        Case(((16, 200), (9, 7), (1, 0)), window=30, num_q_heads=8, num_kv_heads=1),
        Case(((4, 150), (3, 20), (4, 0)), window=64, dtype=BF16, decode_query_len=4),
        Case(((24, -5), (9, -4)), window=3),
        Case(((24, -5), (9, -4), (1, 100)), window=2**30),
    ],
    ids=str,
)
def test_f_windows_of_other_geometries(case, device):
    run_and_check(case, device)


@pytest.mark.parametrize("window", [1, 63, 64, 65, 130, 300, 1000])
@pytest.mark.parametrize("use_tma", [False, True])
def test_f_window_counts_its_keys(window, use_tma, device):
    """Zero queries weigh all visible keys alike: lse counts them, the values tell which."""
    case = Case(((1, 700), (3, 699), (40, 500), (90, 0)), window=window)
    batch = make_batch(case, device)
    batch.q[: batch.num_tokens] = 0.0
    for r, seq_len in enumerate(batch.lens):
        for n in range(seq_len):
            page = batch.block_table[r, n // case.page_size]
            if page != NOWHERE:
                row = batch.v_cache[page, :, n % case.page_size]
                row[~torch.isnan(row)] = float(n)
    tiles = {"use_tma": use_tma}
    attn = make_attention(
        case, device, config=with_config(case, device, prefill=tiles, decode=tiles)
    )
    plan_batch(attn, batch)
    out, lse = attn.run(batch.q, batch.kv_cache, return_lse=True)
    for r, (begin, end) in enumerate(itertools.pairwise(batch.qsl)):
        pos = torch.arange(batch.lens[r] - (end - begin), batch.lens[r], device=device)
        keys = torch.clamp(pos + 1, max=window).float()
        middle = pos - (keys - 1) / 2
        torch.testing.assert_close(
            lse[begin:end].exp(), keys[:, None].expand(-1, 4), rtol=1e-5, atol=0
        )
        torch.testing.assert_close(
            out[begin:end], middle[:, None, None].expand(-1, 4, 64), rtol=1e-5, atol=1e-5
        )  # fmt: skip


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("query_len", [1, 5, 20])
def test_b3_nothing_left_of_the_window_changes_a_bit(query_len, page_size, device):
    """Whatever evicted keys and their table entries hold, finite or not."""
    case = Case(((query_len, 333), (query_len, 400)), page_size=page_size, window=100)
    outs = []
    for garbage, entry in ((float("nan"), NOWHERE), (3.0, 0), (INF, -NOWHERE), (-INF, -1)):
        batch = make_batch(case, device)
        batch.kv_cache[torch.isnan(batch.kv_cache)] = garbage
        batch.block_table[batch.block_table == NOWHERE] = entry
        attn = make_attention(case, device)
        plan_batch(attn, batch)
        outs.append(attn.run(batch.q, batch.kv_cache)[: batch.num_tokens])
    assert torch.isfinite(outs[0]).all()
    assert all(torch.equal(outs[0], out) for out in outs[1:])


@pytest.mark.parametrize("kernel", ["prefill", "decode"])
@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("window", [33, 300])
def test_b5_both_ways_to_load_mask_alike(kernel, use_tma, window, device):
    case = Case(((20, 450), (1, 500), (16, 303)), dtype=FP16, layout="cross_layer", window=window)
    run_and_check(case, device, config=with_config(case, device, **{kernel: {"use_tma": use_tma}}))


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("kernel", ["prefill", "decode"])
def test_f13_windows_start_anywhere_in_a_tile(kernel, use_tma, device):
    """All places of a wide window's left edge: tiles said to need no mask need none."""
    query_len = 64 if kernel == "prefill" else 16
    case = Case(((query_len, 0),), 1, 1, head_dim=16)
    block_n = getattr(make_attention(case, device).config, kernel).block_n
    window = 4 * block_n + 1
    requests = tuple((query_len, window + i) for i in range(block_n))
    case = dataclasses.replace(case, requests=requests, window=window)
    config = with_config(case, device, **{kernel: {"use_tma": use_tma}})
    run_and_check(case, device, config=config)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 7, 13])
@pytest.mark.parametrize("window", [1, 100, 300])
def test_c5_splits_divide_the_window(num_workers, window, device):
    """However the window is cut among workers, and with sinks counted once."""
    case = Case(((1, 0), (3, 850), (1, 429), (0, 0), (1, 63)), window=window, sinks=1.0)
    config = with_config(case, device, num_workers=num_workers, num_sms=132)
    run_and_check(case, device, config=config)


def test_a_window_is_planned_as_so_many_keys():
    """The unit line of a windowed batch is as long as the window, not as the sequences."""
    geometry = policy.Geometry(64, 8, 64, 64, 2)
    config = policy.choose(geometry, policy.Device(90, 132, 227 * 1024))
    windowed = dataclasses.replace(config, window=128)
    block_n = config.decode.block_n
    for seq_len in range(120, 1200):
        tiles = plan_rule.decode_units(1, seq_len, windowed) // 8 - config.item_overhead
        first = max(seq_len - 128, 0)
        assert tiles == policy.cdiv(seq_len, block_n) - first // block_n
        assert tiles <= 128 // block_n + 1
        assert plan_rule.decode_units(1, min(seq_len, 128), config) == plan_rule.decode_units(
            1, min(seq_len, 128), windowed
        )  # fmt: skip
    plan = plan_rule.plan_batch([1] * 64, [32768] * 64, windowed)
    assert plan.header[2] == 64 * 8 * (2 + config.item_overhead)


# -- sinks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", [-30.0, 0.0, 4.0, 30.0])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_g4_sinks_match_reference(sinks, dtype, device):
    run_and_check(Case(MIXED, sinks=sinks, dtype=dtype, num_q_heads=6), device)


@pytest.mark.parametrize("query_len", [1, 20])
def test_sinks_dominate_or_vanish(query_len, device):
    """A huge sink takes all the weight, -inf none; neither makes a NaN."""
    case = Case(((query_len, 100),), num_q_heads=2)
    _, plain, plain_lse = run(case, device)
    sinks = torch.tensor([1e4, -INF], device=device)
    _, out, lse = run(case, device, sinks=sinks)
    assert (out[:, 0] == 0).all()
    assert (lse[:, 0] == 1e4).all()
    assert torch.equal(out[:, 1], plain[:, 1])
    assert torch.equal(lse[:, 1], plain_lse[:, 1])


@pytest.mark.parametrize("query_len", [9, 20])
def test_b15_rows_without_keys_give_zero_under_sinks(query_len, device):
    case = Case(((query_len, -5),), sinks=0.5)
    batch, out, lse = run(case, device)
    assert (out[:5] == 0).all()
    torch.testing.assert_close(lse[:5], batch.features["sinks"].expand(5, -1))
    check(batch, out, lse)
    _, out, lse = run(case, device, sinks=torch.full((4,), -INF, device=device))
    assert (out[:5] == 0).all()
    assert (lse[:5] == -INF).all()


def test_sinks_of_the_models_dtype(device):
    """Sinks are often stored like the weights."""
    case = Case(MIXED, sinks=1.0)
    sinks = make_batch(case, device).features["sinks"].to(BF16)
    _, half, _ = run(case, device, sinks=sinks)
    _, full, _ = run(case, device, sinks=sinks.float())
    assert torch.equal(half, full)


# -- soft cap -------------------------------------------------------------------------------------


@pytest.mark.parametrize("softcap", [0.5, 30.0, 50.0])
@pytest.mark.parametrize("dtype", [FP32, FP16])
def test_g2_soft_cap_matches_reference(softcap, dtype, device):
    run_and_check(Case(MIXED, softcap=softcap, dtype=dtype), device)


@pytest.mark.parametrize("query_len", [1, 20])
def test_g2_soft_cap_changes_the_result(query_len, device):
    """The capped result is far from the one without, so the comparison above means something."""
    case = Case(((query_len, 100),), softcap=0.5)
    _, capped, _ = run(case, device)
    _, plain, _ = run(case, device, softcap=0.0)
    assert (capped - plain).abs().max() > 0.1


@pytest.mark.parametrize("query_len", [1, 20])
@pytest.mark.parametrize("factor", [1e3, 1e15])
def test_soft_cap_saturates(query_len, factor, device):
    """Logits far beyond what exp can raise weigh like the cap."""
    case = Case(((query_len, 100),), softcap=20.0)
    batch = make_batch(case, device)
    batch.q[: batch.num_tokens] *= factor
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    out, lse = attn.run(batch.q, batch.kv_cache, return_lse=True, **batch.features)
    check(batch, out, lse)


@pytest.mark.parametrize("query_len", [1, 20])
def test_soft_cap_bounds_infinite_logits(query_len, device):
    """Products of plus and minus infinity count as plus and minus the cap."""
    case = Case(((query_len, 100),), softcap=2.0)
    batch = make_batch(case, device)
    # One axis carries the product, so that no sum of infinities is in it.
    keys = batch.k_cache
    owned = ~torch.isnan(keys)
    signs = torch.sign(keys[..., :1])
    keys[owned] = 0.0
    batch.q[: batch.num_tokens] = 0.0
    batch.q[: batch.num_tokens, :, 0] = 1e30
    keys[..., :1] = 1e30 * signs
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    out, lse = attn.run(batch.q, batch.kv_cache, return_lse=True, **batch.features)
    check(batch, out, lse)


# -- ALiBi ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("alibi", ["linear", "sqrt"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_g6_alibi_matches_reference(alibi, dtype, device):
    run_and_check(Case(MIXED, alibi=alibi, dtype=dtype, num_q_heads=6), device)


def test_g6_slopes_follow_the_heads(device):
    """Heads of one shard, with their own slopes, compute what they compute among all heads."""
    case = Case(((1, 200), (20, 30)), num_q_heads=4, num_kv_heads=2, alibi="linear")
    batch, out, _ = run(case, device)
    shard = dataclasses.replace(case, num_q_heads=2, num_kv_heads=1)
    attn = make_attention(shard, device)
    plan_batch(attn, batch)
    slopes = batch.features["alibi_slopes"][2:]
    part = attn.run(batch.q[:, 2:], batch.kv_cache[:, 1:], alibi_slopes=slopes)
    torch.testing.assert_close(part[: batch.num_tokens], out[:, 2:], rtol=1e-5, atol=1e-5)


# -- all together ---------------------------------------------------------------------------------

ALL = {"window": 70, "softcap": 5.0, "sinks": 1.0, "alibi": "linear"}


@pytest.mark.parametrize(
    "case",
    [
        Case(MIXED, **ALL),
        Case(MIXED, **(ALL | {"window": 300, "alibi": "sqrt"}), dtype=BF16, layout="hnd"),
        Case(MIXED, **ALL, page_size=16, dtype=FP16),
        Case(MIXED, **ALL, page_size=48, head_dim=96, num_q_heads=9, num_kv_heads=3),
        Case(((4, 150), (3, 20), (4, 0)), **ALL, dtype=BF16, decode_query_len=4),
        Case(((24, -5), (9, -4), (1, 500)), **ALL),
        # gpt-oss: 64/8 heads of 64, window 128 on every other layer.
        Case(((20, 300), (1, 500)), 64, 8, window=128, sinks=1.0, dtype=BF16),
        # Gemma 2: soft cap and window.
        Case(((20, 600), (1, 500)), 4, 2, 256, window=290, softcap=50.0, dtype=BF16),
    ],
    ids=str,
)
def test_features_combine(case, device):
    run_and_check(case, device)


@pytest.mark.parametrize("num_workers", [1, 3, 13])
@pytest.mark.parametrize("use_tma", [False, True])
def test_features_combine_whatever_the_cut(num_workers, use_tma, device):
    case = Case(((1, 0), (3, 250), (1, 429), (0, 0), (1, 63)), **ALL, num_q_heads=6)
    config = with_config(
        case, device, num_workers=num_workers, num_sms=132, decode={"use_tma": use_tma}
    )
    run_and_check(case, device, config=config)


def test_layers_of_one_plan_may_differ(device):
    """Sinks, cap and slopes belong to a run, not to the plan."""
    case = Case(MIXED)
    batch = make_batch(case, device)
    attn = make_attention(case, device)
    plan_batch(attn, batch)
    for features in ({"sinks": 1.0}, {"softcap": 3.0}, {"alibi": "linear"}, {}):
        other = make_batch(dataclasses.replace(case, **features), device)
        check(other, attn.run(other.q, other.kv_cache, **other.features))


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"softcap": -1.0}, "softcap=-1.0"),
        ({"softcap": INF}, "softcap=inf"),
        ({"softcap": float("nan")}, "softcap=nan"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \(3,\)"),
        ({"sinks": lambda device: torch.zeros(8, device=device)[::2]}, "sinks has shape"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, "sinks is torch.int64"),
        ({"alibi_slopes": torch.zeros(4, 1)}, r"alibi_slopes has shape \(4, 1\)"),
    ],
)
def test_g14_bad_features_are_named(change, named, device):
    # Moving a strided tensor makes it contiguous; that one is made where it is used.
    change = {k: v(device) if callable(v) else v for k, v in change.items()}
    change = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()}
    with pytest.raises(PlanMismatch, match=named):
        run(Case(((1, 20),)), device, **change)


def test_bad_windows_are_named(device):
    for window in (0, -1, 2**30 + 1):
        with pytest.raises(UnsupportedConfig, match=f"window={window}"):
            make_attention(Case(((1, 20),), window=window), device)
    case = Case(((1, 20),), window=8)
    config = make_attention(case, device).config
    with pytest.raises(UnsupportedConfig, match="window=8"):
        make_attention(dataclasses.replace(case, window=9), device, config=config)


# -- the layer that vLLM calls --------------------------------------------------------------------


@pytest.fixture
def in_interpreter(device):
    """For tests of the layer, whose tensors lie on the CPU."""
    pytest.importorskip("vllm")
    if device.type != "cpu":
        pytest.skip("runs on CPU tensors, in the interpreter")


def make_builder(*impls, window=None):
    """A builder whose group has one layer of each of ``impls``."""
    from types import SimpleNamespace

    from test_builder import HEAD_DIM, KV_HEADS, PAGE, engine_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from tilewise.integration.builder import TilewiseMetadataBuilder

    class Layer(AttentionLayerBase):
        def __init__(self, impl):
            self.impl = impl

        def get_attn_backend(self):
            raise NotImplementedError

        def get_kv_cache_spec(self, vllm_config):
            raise NotImplementedError

    config = engine_config()
    layers = {f"layer.{i}": Layer(impl) for i, impl in enumerate(impls)}
    config.compilation_config = SimpleNamespace(
        **(vars(config.compilation_config) | {"static_forward_context": layers})
    )
    spec = FullAttentionSpec(
        block_size=PAGE, num_kv_heads=KV_HEADS, head_size=HEAD_DIM, dtype=FP32,
        sliding_window=window,
    )  # fmt: skip
    return TilewiseMetadataBuilder(spec, list(layers), config, torch.device("cpu"))


@pytest.mark.usefixtures("in_interpreter")
@pytest.mark.vllm
@pytest.mark.parametrize("query_lens", [[1, 5], [20, 1]])
@pytest.mark.parametrize("window", [None, 1, 17])
def test_the_layer_passes_its_features_on(query_lens, window):
    from reference import paged_attention
    from test_builder import HEAD_DIM, HEADS, KV_HEADS, PAGE, make_batch, make_impl

    torch.manual_seed(0)
    sinks, slopes = torch.randn(HEADS), [0.5, 0.25, 0.125, 0.0625]
    features = {"sinks": sinks, "use_alibi_sqrt": True, "logits_soft_cap": 0.7}
    impl = make_impl(sliding_window=window, alibi_slopes=slopes, **features)
    batch = make_batch(query_lens)
    cache = torch.randn(16, KV_HEADS, PAGE, 2 * HEAD_DIM)
    query = torch.randn(sum(query_lens), HEADS, HEAD_DIM)
    metadata = make_builder(impl, impl).build(0, batch)
    output = impl.forward(None, query, None, None, cache, metadata, torch.empty_like(query))
    expected, _ = paged_attention(
        query, cache[..., :HEAD_DIM], cache[..., HEAD_DIM:], batch.query_start_loc.tolist(),
        batch.seq_lens.tolist(), batch.block_table_tensor, HEAD_DIM**-0.5, window=window,
        softcap=0.7, alibi_slopes=torch.tensor(slopes), alibi_sqrt=True, sinks=sinks,
    )  # fmt: skip
    torch.testing.assert_close(output, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("in_interpreter")
@pytest.mark.vllm
def test_a_groups_window_is_its_layers():
    """The layers' word counts, not the spec's; without layers, the spec's."""
    from test_builder import make_impl

    assert make_builder(make_impl(sliding_window=9), window=128).attn.window == 9
    assert make_builder(make_impl(), window=128).attn.window is None
    assert make_builder(window=128).attn.window == 128
    assert make_builder().attn.window is None


@pytest.mark.usefixtures("in_interpreter")
@pytest.mark.vllm
def test_windows_that_differ_are_refused():
    """In one group, and between a step's plan and the layer that runs it."""
    from test_builder import HEAD_DIM, HEADS, make_batch, make_impl

    full, windowed = make_impl(), make_impl(sliding_window=128)
    with pytest.raises(UnsupportedConfig, match=r"'layer.0': None, 'layer.1': 128"):
        make_builder(full, windowed)
    metadata = make_builder(full).build(0, make_batch([1]))
    query = torch.zeros(1, HEADS, HEAD_DIM)
    with pytest.raises(UnsupportedConfig, match=r"window of None, the layer's is 128"):
        windowed.forward(None, query, None, None, None, metadata, query)


@pytest.mark.usefixtures("in_interpreter")
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sliding_window": 0}, r"sliding window \(0\)"),
        ({"logits_soft_cap": -1.0}, "soft cap"),
        ({"logits_soft_cap": INF}, "soft cap"),
        ({"sinks": torch.zeros(3)}, "3 sinks for 4 query heads"),
        ({"alibi_slopes": [0.5] * 8}, "8 alibi_slopes for 4 query heads"),
    ],
)
def test_g14_layers_refuse_values_without_sense(change, text):
    from test_builder import make_impl

    with pytest.raises(NotImplementedError, match=text):
        make_impl(**change)
