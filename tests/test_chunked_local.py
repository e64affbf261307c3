"""Chunked local attention (Llama 4): batches that vLLM cuts into chunks, through our builder.

vLLM derives a builder from ours that makes a request of each chunk of a request, and is never in a
full CUDA graph. The engine with such a model is among those of ``test_model_zoo``.
"""

from __future__ import annotations

import json

import pytest
import tiny_zoo
import torch
from agreement import compare, greedy_reference
from cases import NOWHERE, Case, make_batch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from reference import paged_attention

pytest.importorskip("vllm")

from test_builder import engine_config
from test_model_zoo import PROMPTS, TOKENS
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.attention.chunked_local_attention import (
    create_chunked_local_attention_backend,
)
from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import make_local_attention_virtual_batches
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec

from tilewise.integration.backend import TilewiseBackend
from tilewise.integration.groups import most_requests
from tilewise.integration.impl import TilewiseImpl
from tilewise.integration.metadata import TilewiseMetadata

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning"),
]

CHUNK = 64


def make_builder(case: Case, device, chunk: int = CHUNK, mode: str = "NONE"):
    """The builder that vLLM derives from ours, with no room beyond this case's own batch."""
    config = engine_config(mode=mode, max_capture=32)
    config.scheduler_config.max_num_seqs = len(case.requests)
    config.scheduler_config.max_num_batched_tokens = sum(q for q, _ in case.requests)
    config.model_config.get_num_attention_heads = lambda _: case.num_q_heads
    spec = ChunkedLocalAttentionSpec(
        block_size=case.page_size, num_kv_heads=case.num_kv_heads, head_size=case.head_dim,
        dtype=case.dtype, attention_chunk_size=chunk,
    )  # fmt: skip
    backend = create_chunked_local_attention_backend(TilewiseBackend, chunk)
    return backend.get_builder_cls()(spec, ["layer.0"], config, device)


def metadata_of(batch) -> CommonAttentionMetadata:
    """What vLLM passes for the batch."""
    starts = torch.tensor(batch.qsl, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=batch.query_start_loc,
        query_start_loc_cpu=starts,
        seq_lens=batch.seq_lens,
        num_reqs=len(batch.lens),
        num_actual_tokens=batch.num_tokens,
        max_query_len=int((starts[1:] - starts[:-1]).max()),
        max_seq_len=max(batch.lens),
        block_table_tensor=batch.block_table,
        slot_mapping=torch.full((batch.num_tokens,), -1, device=batch.q.device),
    )


def evict(batch, chunk: int) -> None:
    """Keys and pages before the chunk of a request's first query are nobody's."""
    page_size = batch.case.page_size
    for row, (query_len, context) in enumerate(batch.case.requests):
        if query_len:
            gone = context // chunk * chunk // page_size
            batch.kv_cache[batch.block_table[row, :gone].long()] = float("nan")
            batch.block_table[row, :gone] = NOWHERE


def run_and_check(case: Case, device, chunk: int = CHUNK) -> TilewiseMetadata:
    batch = make_batch(case, device)
    evict(batch, chunk)
    metadata = make_builder(case, device, chunk).build(0, metadata_of(batch))
    impl = TilewiseImpl(
        case.num_q_heads, case.head_dim, case.head_dim**-0.5, case.num_kv_heads,
        kv_cache_dtype="auto",
    )  # fmt: skip
    out = torch.full_like(batch.q, 7.0)
    impl.forward(None, batch.q, None, None, batch.kv_cache, metadata, out)
    args = (batch.q, batch.k_cache, batch.v_cache, batch.qsl, batch.lens, batch.block_table)
    expected, same_dtype = (
        paged_attention(*args, case.head_dim**-0.5, dtype=dtype, chunk=chunk)[0][: batch.num_tokens]
        for dtype in (torch.float32, case.dtype)
    )
    if batch.num_tokens:
        error = (out[: batch.num_tokens].float() - expected).abs().max()
        torch_error = (same_dtype.float() - expected).abs().max()
        floor = 64 * torch.finfo(case.dtype).eps * expected.abs().max()
        assert error <= max(4 * torch_error, floor)
    assert (out[batch.num_tokens :] == 7.0).all()
    return metadata


CASES = [
    Case(((1, 0), (1, 63), (1, 64), (1, 65), (1, 300))),
    # One request becomes five, and two tokens two requests.
    Case(((260, 3),), page_size=16),
    Case(((2, 63), (2, 63), (2, 127), (0, 0), (3, 62)), page_size=32, num_q_heads=6),
    Case(((64, 0), (64, 64), (65, 63), (100, 128)), dtype=torch.bfloat16, layout="hnd"),
    Case(((17, 50), (1, 500), (130, 1)), head_dim=128, num_q_heads=5, num_kv_heads=1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_match_reference(case, device):
    run_and_check(case, device)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    requests=st.lists(st.tuples(st.integers(0, 90), st.integers(0, 150)), min_size=1, max_size=4),
    pages=st.sampled_from([(16, 16), (16, 48), (48, 48), (64, 128)]),
)
@example(requests=[(2, 15)] * 4, pages=(16, 16))
def test_any_batch_fits_and_matches(requests, pages, device):
    """However lengths and chunks meet: the plan's buffers hold what vLLM makes of the batch."""
    page_size, chunk = pages
    requests = tuple((q, context if q else 0) for q, context in requests)
    if not any(q for q, _ in requests):
        requests = (*requests, (1, 0))
    run_and_check(Case(requests, head_dim=16, page_size=page_size), device, chunk)


def test_a_batch_may_have_more_requests_than_are_scheduled(device):
    metadata = run_and_check(CASES[1], device)
    assert metadata.num_reqs == 5 > len(CASES[1].requests)
    assert metadata.plan.num_reqs == 5
    assert type(metadata.max_query_len) is int


@given(
    lengths=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6),
    chunk=st.sampled_from([16, 32]),
    spare=st.integers(0, 2),
)
@example(lengths=[(2, 15)] * 6, chunk=16, spare=0)
def test_the_bound_holds_for_vllms_rule(lengths, chunk, spare):
    """Whatever is scheduled within the scheduler's bounds."""
    query_lens, contexts = zip(*lengths, strict=True)
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    # A request of no tokens is padding, and has no keys.
    lens = [q + c if q else 0 for q, c in zip(query_lens, contexts, strict=True)]
    batch = CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32), num_reqs=len(lens),
        num_actual_tokens=sum(query_lens), max_query_len=max(query_lens), max_seq_len=max(lens),
        block_table_tensor=torch.zeros(len(lens), 8, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(query_lens), dtype=torch.int64),
    )  # fmt: skip
    cut, _ = make_local_attention_virtual_batches(chunk, batch, 16)
    assert cut.num_reqs <= most_requests(len(lens) + spare, sum(query_lens) + spare, chunk)


def test_without_chunks_the_bound_is_the_schedulers():
    assert most_requests(8, 4096, None) == 8
    assert most_requests(8, 4096, 1024) == 20
    assert most_requests(8, 6, 16) == 14


@pytest.mark.parametrize("mode", ["FULL", "FULL_AND_PIECEWISE"])
def test_cut_batches_are_planned_as_they_are(mode, device):
    """They are in no full graph: nothing is planned for the worst replay of one."""
    case = CASES[0]
    builder = make_builder(case, device, mode=mode)
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.NEVER
    # A drafter's later steps are cut anew, and so built anew.
    assert not builder.supports_draft_decode_metadata_update
    assert CUDAGraphMode[mode].has_full_cudagraphs()
    batch = metadata_of(make_batch(case, device))
    assert builder.build(0, batch).plan.max_prefill_tiles == 0
    # Should one be captured all the same, it is cut as well.
    captured = builder.build_for_cudagraph_capture(batch)
    assert int(captured.seq_lens.max()) <= CHUNK


def test_drafters_build_cut_batches_anew(device):
    """Their lengths are copies, which do not move with those that a drafter counts up."""
    builder = make_builder(CASES[0], device)
    assert builder.supports_draft_decode_metadata_update is False


def test_a_specs_chunk_counts_where_vllm_merges_specs(device):
    """Without its hybrid cache manager vLLM makes one spec of local and global layers."""
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=16, dtype=torch.float32, attention_chunk_size=32
    )
    backend = create_chunked_local_attention_backend(TilewiseBackend, 32)
    builder = backend.get_builder_cls()(spec, ["layer.0"], engine_config(), device)
    assert builder.attn.max_num_reqs == most_requests(8, 256, 32)


@pytest.mark.slow
def test_chunks_decide_the_tokens_of_the_model_zoo(tmp_path):
    """So that equal tokens there say that chunks are seen."""
    model = tiny_zoo.write("llama4", tmp_path / "model")
    reference = greedy_reference(model, PROMPTS, TOKENS)
    config = json.loads((model / "config.json").read_text())
    assert config["attention_chunk_size"] == 32
    (model / "config.json").write_text(json.dumps(config | {"attention_chunk_size": 2048}))
    whole = greedy_reference(model, PROMPTS, TOKENS)
    assert not compare(reference, whole.tokens).agrees
