"""Field failures of what vLLM hands to the builder and the layer: D, E, pages (tests/README.md)."""

import pytest
import torch

from tilewise.kernels import plan


@pytest.fixture
def builders(device):
    """``test_builder``, whose helpers stand in for an engine on CPU tensors."""
    pytest.importorskip("vllm")
    if device.type != "cpu":
        pytest.skip("runs on CPU tensors, in the interpreter")
    import test_builder

    return test_builder


def cache_and_query(builders, num_tokens):
    """A cache of 40 pages and queries, both random."""
    torch.manual_seed(0)
    cache = torch.randn(40, builders.KV_HEADS, builders.PAGE, 2 * builders.HEAD_DIM)
    return cache, torch.randn(num_tokens, builders.HEADS, builders.HEAD_DIM)


def attend(builders, batch, cache, query):
    metadata = builders.make_builder().build(0, batch)
    output = torch.full_like(query, 7.0)
    builders.make_impl().forward(None, query, None, None, cache, metadata, output)
    return output


@pytest.mark.vllm
@pytest.mark.parametrize("mode", ["NONE", "FULL", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("query_lens", [[1, 0], [0, 0], [1, 0, 0, 0, 0, 0, 0, 0]])
def test_d6_idle_ranks_have_more_requests_than_tokens(builders, mode, query_lens):
    """A dummy batch of one token among several padded requests, eager and captured."""
    builder = builders.make_builder(mode=mode)
    tokens = max(sum(query_lens), 1)
    for build in (builder.build_for_cudagraph_capture, lambda batch: builder.build(0, batch)):
        batch = builders.make_batch(query_lens, num_tokens=tokens)
        cache, query = cache_and_query(builders, tokens)
        output = torch.full_like(query, 7.0)
        builders.make_impl().forward(None, query, None, None, cache, build(batch), output)
        assert torch.isfinite(output).all()
        assert (output[sum(query_lens) :] == 7.0).all()


@pytest.mark.vllm
def test_d7_dummy_steps_write_no_cache(builders):
    """Slots of -1 everywhere, as vLLM pads them: pages of live requests keep their bytes."""
    from vllm.v1.attention.backends.utils import PAD_SLOT_ID

    cache, _ = cache_and_query(builders, 1)
    before = cache.clone()
    key = torch.full((9, builders.KV_HEADS, builders.HEAD_DIM), float("nan"))
    slots = torch.full((9,), PAD_SLOT_ID, dtype=torch.int64)
    builders.make_impl().do_kv_cache_update(None, key, key, cache, slots)
    assert torch.equal(cache, before)


@pytest.mark.vllm
def test_a9_padding_slots_are_negative():
    """The cache write skips negative slots only; vLLM reserves none that is not."""
    pytest.importorskip("vllm")
    from vllm.v1.attention.backends.utils import PAD_SLOT_ID

    assert PAD_SLOT_ID < 0


@pytest.mark.vllm
@pytest.mark.parametrize("query_lens", [[1, 1, 1], [4, 4, 2], [20, 1, 3]])
def test_e4_the_devices_lengths_count(builders, query_lens):
    """The host's lengths are optimistic (every draft accepted); the device knows better."""
    honest = builders.make_batch(query_lens)
    cache, query = cache_and_query(builders, sum(query_lens))
    expected = attend(builders, honest, cache, query)
    optimistic = builders.make_batch(
        query_lens,
        max_seq_len=10**6,
        seq_lens_cpu_upper_bound=honest.seq_lens + 31,
        positions=torch.full((sum(query_lens),), 10**6),
        is_prefilling=torch.ones(len(query_lens), dtype=torch.bool),
    )
    assert torch.equal(attend(builders, optimistic, cache, query), expected)


@pytest.mark.vllm
def test_e4_planning_asks_the_device_nothing(builders, monkeypatch):
    """No value of a device tensor reaches the host while a step is planned."""

    def refuse(*args, **kwargs):
        raise AssertionError("the host read a tensor of the device")

    builder = builders.make_builder(draft_tokens=3)
    batch = builders.make_batch([4, 4, 1])
    names = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__index__", "nonzero")
    interpreter = plan._plan_kernel

    class Launch:
        """The kernel's launch, in which alone the interpreter may read."""

        def __getitem__(self, grid):
            def launch(*args, **kwargs):
                with monkeypatch.context() as context:
                    for name, method in saved.items():
                        context.setattr(torch.Tensor, name, method)
                    return interpreter[grid](*args, **kwargs)

            return launch

    monkeypatch.setattr(plan, "_plan_kernel", Launch())
    saved = {name: getattr(torch.Tensor, name) for name in names}
    for name in names:
        monkeypatch.setattr(torch.Tensor, name, refuse)
    with pytest.raises(AssertionError, match="the host read"):
        batch.seq_lens[0].item()
    metadata = builder.build(0, batch)
    monkeypatch.undo()
    assert metadata.plan.num_reqs == 3


@pytest.mark.vllm
def test_e6_batches_without_bounds_of_the_host(builders):
    """Draft steps leave the optional fields empty, and the longest sequence unknown."""
    batch = builders.make_batch([2, 1], seq_lens_cpu_upper_bound=None)
    cache, query = cache_and_query(builders, 3)
    expected = attend(builders, batch, cache, query)
    batch.max_seq_len = None
    assert torch.equal(attend(builders, batch, cache, query), expected)


@pytest.mark.vllm
@pytest.mark.parametrize("rejected", [1, 3])
def test_e5_rejected_drafts_are_not_attended(builders, rejected):
    """Keys of rejected drafts stay in the cache behind the sequence's end; nobody sees them."""
    cache, query = cache_and_query(builders, 2)
    batch = builders.make_batch([1, 1], context=20)
    expected = attend(builders, batch, cache, query)
    for r, seq_len in enumerate(batch.seq_lens.tolist()):
        for n in range(seq_len, seq_len + rejected):
            page = batch.block_table_tensor[r, n // builders.PAGE]
            cache[page, :, n % builders.PAGE] = 1e4
    assert torch.equal(attend(builders, batch, cache, query), expected)


@pytest.mark.vllm
@pytest.mark.parametrize("block_size", [16, 48, 528])
def test_h14_the_group_says_how_large_a_page_is(builders, block_size):
    """Not the engine's block size, of which a hybrid model has several."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from tilewise.integration.builder import TilewiseMetadataBuilder

    config = builders.engine_config()
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=2, head_size=16, dtype=torch.float32
    )
    builder = TilewiseMetadataBuilder(spec, ["layer.0"], config, torch.device("cpu"))
    assert builder.attn.geometry.page_size == block_size


def a_parameter(x):
    return torch.nn.Parameter(torch.tensor(x), requires_grad=False)


@pytest.mark.vllm
@pytest.mark.parametrize("as_given", [float, torch.tensor, a_parameter])
def test_g9_scales_of_any_kind(builders, as_given):
    from tilewise.integration.impl import TilewiseImpl

    impl = TilewiseImpl(4, 16, as_given(0.125), 2, None, None, "auto")
    assert type(impl.scale) is float
    assert impl.scale == 0.125
