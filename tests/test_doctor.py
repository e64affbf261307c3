"""`tilewise doctor` of models: who computes each layer, with which tiles, and why."""

import pytest
import torch

from tilewise import PagedAttention, policy, support
from tilewise.arch import ARCHITECTURES, parse_arch
from tilewise.errors import UnsupportedConfig
from tilewise.integration import doctor_model
from tilewise.integration.doctor_model import Server, cuda_graphs, examine, ranges
from tilewise.model_config import Options, read_model
from tilewise.workspace import workspace_bytes

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 32,
    "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip
SERVER = Server(max_num_seqs=64, max_num_batched_tokens=2048)
HOPPER = ARCHITECTURES[90]


def layers(config, **options):
    return read_model(config, Options(**options)).layers


def report(config, server=SERVER, device=HOPPER, **options):
    return examine(config, Options(**options), server, device)


# -- models ---------------------------------------------------------------------------------------


def test_a_llama_is_ours_with_the_policys_tiles():
    found = report(LLAMA)
    (kind,) = found.kinds
    assert kind.layers == (0, 1, 2, 3)
    assert (kind.num_q_heads, kind.num_kv_heads, kind.head_size) == (32, 8, 128)
    assert (kind.backend, kind.reasons, kind.features) == ("TILEWISE", (), ())
    assert kind.kernels == ("plan", "cache_write", "hopper_prefill", "hopper_decode", "decode")
    config = policy.choose(policy.Geometry(32, 8, 128, 64, 2), HOPPER)
    assert kind.hopper_prefill == vars(config.hopper_prefill)
    assert kind.why_not_hopper is None
    assert kind.prefill == vars(config.prefill)
    assert kind.decode == vars(config.decode)
    assert kind.hopper_decode == vars(config.hopper_decode)
    assert kind.few_requests == 132 // 8
    assert kind.num_workers == config.num_workers
    assert kind.workspace_bytes == workspace_bytes(config, 64, 2048)
    assert (found.cuda_graphs, found.page_size, found.arch) == ("ALWAYS", 64, "sm_90")


@pytest.mark.parametrize(
    ("extra", "options", "reason"),
    [
        ({}, {"device": ARCHITECTURES[80]}, "compute capability 8.0 (accepted: 9.0)"),
        ({"head_dim": 32}, {}, "head_dim 32 (accepted: 40 to 256)"),
        ({}, {"block_size": 16}, "page_size 16 (accepted: 64 and multiples of 128)"),
        ({"model_type": "falcon", "alibi": True}, {}, "ALiBi (accepted: none)"),
    ],
)  # fmt: skip
def test_the_plain_prefill_serves_what_the_gluon_kernel_does_not(extra, options, reason):
    for kind in report({**LLAMA, **extra}, **options).kinds:
        assert kind.backend == "TILEWISE"
        assert set(kind.kernels) - {"hopper_decode"} == {
            "plan", "cache_write", "prefill", "decode",
        }  # fmt: skip
        assert kind.hopper_decode is None or not extra
        assert kind.hopper_prefill is None
        assert kind.why_not_hopper == reason


def test_a_narrow_window_stays_with_the_plain_kernel():
    windowed = {**LLAMA, "model_type": "gpt_oss", "sliding_window": 128, "head_dim": 64}
    narrow, full = report(windowed).kinds
    assert (narrow.window, full.window) == (128, None)
    assert narrow.hopper_prefill is None
    assert narrow.why_not_hopper == "window 128 (accepted: none, or 1024 and more)"
    assert full.hopper_prefill is not None


def test_an_fp8_cache_is_ours_with_the_tiles_of_its_bytes():
    for name in ("fp8", "fp8_e4m3", "fp8_e5m2"):
        (kind,) = report(LLAMA, kv_cache_dtype=name).kinds
        config = policy.choose(policy.Geometry(32, 8, 128, 64, 2, 1), HOPPER)
        assert (kind.backend, kind.reasons) == ("TILEWISE", ())
        assert kind.kernels == ("plan", "cache_write", "hopper_prefill_kv8", "decode")
        assert kind.hopper_prefill == vars(config.hopper_prefill)
        assert kind.prefill == vars(config.prefill)
        assert kind.decode == vars(config.decode)
        assert kind.workspace_bytes == workspace_bytes(config, 64, 2048)
    (plain,) = report(LLAMA).kinds
    assert plain.decode != kind.decode


def test_capped_logits_and_padded_heads_have_the_gluon_kernel():
    capped = {**LLAMA, "model_type": "gemma2", "attn_logit_softcapping": 50.0}
    for config in (capped, {**LLAMA, "head_dim": 96}):
        (kind,) = report(config).kinds
        assert kind.kernels[2] == "hopper_prefill"
        assert kind.why_not_hopper is None
    server = Server(64, 2048, fp8_attention="fp8")
    (kind,) = report(capped, server, kv_cache_dtype="fp8").kinds
    assert kind.kernels[2] == "prefill"
    assert kind.why_not_hopper == "a logits soft cap of 50 (accepted: none)"
    (kind,) = report({**capped, "attn_logit_softcapping": 3000.0}).kinds
    assert kind.kernels == ("plan", "cache_write", "prefill", "decode")
    assert kind.why_not_hopper == "a logits soft cap of 3000 (accepted: to 2048)"


@pytest.mark.parametrize("options", [{}, {"block_size": 64}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_an_encoder_has_no_pages_and_no_gluon_kernel(options):
    """As the builder has it: keys are the batch's rows, whatever is said of a cache."""
    server = Server(64, 2048, shared_prefixes="on", fp8_attention="fp8")
    found = report({**LLAMA, "model_type": "bert"}, server, **options)
    (kind,) = found.kinds
    config = policy.choose(policy.Geometry(32, 8, 128, 16, 2), HOPPER)
    assert config.hopper_prefill is None
    assert kind.kernels == ("plan", "prefill", "decode")
    assert (kind.prefill, kind.decode) == (vars(config.prefill), vars(config.decode))
    assert (kind.hopper_prefill, kind.hopper_decode, kind.few_requests) == (None, None, None)
    assert kind.why_not_hopper == "attention that is not causal (accepted: causal)"
    assert kind.why_not_share == "keys that lie in no cache"
    assert kind.workspace_bytes == workspace_bytes(config, 64, 2048)
    assert found.page_size == 16


def test_products_of_fp8_have_a_kernel_of_their_own():
    server = Server(64, 2048, fp8_attention="fp8")
    (kind,) = report(LLAMA, server, kv_cache_dtype="fp8").kinds
    config = policy.choose(policy.Geometry(32, 8, 128, 64, 2, 1), HOPPER, fp8_matmul=True)
    assert kind.kernels == ("plan", "cache_write", "hopper_prefill_fp8", "decode")
    assert kind.hopper_prefill == vars(config.hopper_prefill_fp8)
    assert kind.prefill == vars(config.prefill)
    # Of e4m3 alone, of heads of 128, and on Hopper.
    (other,) = report(LLAMA, server, kv_cache_dtype="fp8_e5m2").kinds
    assert other.kernels[2] == "hopper_prefill_kv8"
    (small,) = report({**LLAMA, "head_dim": 64}, server, kv_cache_dtype="fp8").kinds
    assert small.kernels[2] == "prefill"
    assert "head_dim 64" in small.why_not_hopper
    (refused,) = report({**LLAMA, "head_dim": 16}, server, kv_cache_dtype="fp8").kinds
    assert refused.backend is None
    assert "fp8_matmul with head_dim=16" in refused.reasons[0].text


def test_shared_prefixes_take_kernels_and_memory():
    (alone,) = report(LLAMA).kinds
    (kind,) = report(LLAMA, Server(64, 2048, shared_prefixes="on")).kinds
    looked = ("prefix_keys", "prefix_groups", "prefix_decode")
    assert kind.kernels[3:] == (*looked, "hopper_decode", "decode")
    assert kind.few_requests == alone.few_requests
    assert kind.prefix_decode["block_m"] == 64
    (always,) = report(LLAMA, Server(64, 2048, shared_prefixes="always")).kinds
    assert always.few_requests == 1
    assert kind.why_not_share is None
    assert kind.workspace_bytes > alone.workspace_bytes
    (rotated,) = report(
        LLAMA, Server(64, 2048, shared_prefixes="on", fp8_attention="rotated"), kv_cache_dtype="fp8"
    ).kinds
    assert "rotated keys" in rotated.why_not_share
    window = {**LLAMA, "model_type": "mistral", "sliding_window": 4096}
    (kind,) = report(window, Server(64, 2048, shared_prefixes="on")).kinds
    assert kind.prefix_decode is None
    assert kind.why_not_share == "window 4096 (accepted: none)"


def test_tensor_parallel_ranks_share_the_heads():
    (one, *_) = layers(LLAMA, tensor_parallel_size=16)
    assert (one.num_q_heads, one.num_kv_heads, one.request.group_size) == (2, 1, 2)
    with pytest.raises(UnsupportedConfig, match=r"32 query heads cannot be shared by 5 ranks"):
        layers(LLAMA, tensor_parallel_size=5)


@pytest.mark.parametrize(
    "model_type",
    ["gemma2", "gemma3_text", "cohere2", "gpt_oss", "qwen2", "exaone4", "olmo3", "llama4_text",
     "smollm3", "ministral"],
)  # fmt: skip
def test_windows_are_where_transformers_puts_them(model_type):
    """Its classes write each layer's kind down; from the same numbers without them, so do we."""
    transformers = pytest.importorskip("transformers")
    filled = transformers.CONFIG_MAPPING[model_type]().to_dict()
    expected = [t.partition("_")[0] for t in filled["layer_types"]]
    for config in (filled, {k: v for k, v in filled.items() if k != "layer_types"}):
        if model_type == "olmo3" and config is not filled:
            continue  # its files always list the layers
        found = layers(config)
        kinds = [
            "chunked" if layer.request.layer_kind == "ChunkedLocalAttention"
            else "sliding" if layer.window else "full"
            for layer in found
        ]  # fmt: skip
        assert kinds == expected
        assert {layer.window for layer in found} <= {None, filled.get("sliding_window")}
        assert all(layer.request.has_sliding_window == bool(layer.window) for layer in found)


FEATURES = [
    ({"model_type": "bloom", "n_layer": 2, "n_head": 16, "hidden_size": 1024}, {"alibi"}),
    ({"model_type": "mpt", "n_layers": 2, "n_heads": 16, "d_model": 2048,
      "attn_config": {"alibi": True}}, {"alibi"}),
    ({"model_type": "falcon", "num_hidden_layers": 2, "num_attention_heads": 71,
      "hidden_size": 4544, "multi_query": True, "alibi": True}, {"alibi"}),
    ({**LLAMA, "model_type": "gemma2", "sliding_window": 4096, "attn_logit_softcapping": 50.0},
     {"soft_cap", "sliding_window"}),
    ({**LLAMA, "model_type": "gpt_oss", "sliding_window": 128}, {"sinks", "sliding_window"}),
    ({**LLAMA, "model_type": "llama4_text", "attention_chunk_size": 8192}, {"chunked_local"}),
    ({**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64},
     {"mla", "other_head_size"}),
    ({"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text"}},
     {"mm_prefix"}),
    ({**LLAMA, "model_type": "bert"}, {"attn_type"}),
    ({**LLAMA, "head_dim": 84}, {"other_head_size"}),
    ({**LLAMA, "num_attention_heads": 256, "num_key_value_heads": 1, "head_dim": 64},
     {"other_group_size"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "expected"), FEATURES,
    ids=[f"{config['model_type']}-{'-'.join(sorted(rows))}" for config, rows in FEATURES],
)  # fmt: skip
def test_features_are_seen_and_answered_by_the_support_table(config, expected):
    found = report(config)
    features = {
        row.key
        for layer in layers(config)
        for row in support.present(layer.request)
        if row.key not in {plain.key for plain in support.present(support.Request())}
    }
    assert features == expected
    for kind in found.kinds:
        refused = {reason.key for reason in kind.reasons}
        assert refused <= expected
        assert (kind.backend == "TILEWISE") == (not refused)
        if refused:
            assert kind.backend == (kind.candidates[0] if kind.candidates else None)
            assert kind.kernels == ()


def test_falcon_has_one_kv_head():
    assert {layer.num_kv_heads for layer in layers(FEATURES[2][0])} == {1}


@pytest.mark.parametrize(
    ("extra", "attention"),
    [
        ({"layer_types": ["linear_attention", "full_attention"] * 2}, (1, 3)),
        ({"layers_block_type": ["mamba", "mamba", "attention", "mlp"]}, (2,)),
        ({"hybrid_override_pattern": "M-*M"}, (2,)),
        ({"attn_layer_period": 2, "attn_layer_offset": 1}, (1, 3)),
    ],
)
def test_layers_without_attention_are_counted_apart(extra, attention):
    model = read_model({**LLAMA, **extra})
    assert tuple(layer.index for layer in model.layers) == attention
    assert model.other_layers == 4 - len(attention)


def test_options_of_the_server_change_the_answer():
    (kind,) = report(LLAMA, kv_cache_dtype="nvfp4").kinds
    assert kind.backend == "FLASHINFER"
    assert [reason.key for reason in kind.reasons] == ["kv_nvfp4"]
    (kind,) = report(LLAMA, block_size=24).kinds
    assert (kind.backend, kind.candidates) == (None, ())
    assert report(LLAMA, block_size=32).page_size == 32
    assert report({**LLAMA, "head_dim": 84}).page_size == 16
    assert report(LLAMA, dtype="half").dtype == "float16"
    assert report({**LLAMA, "torch_dtype": "float32"}).dtype == "bfloat16"
    (slow,), (fast,) = report(LLAMA).kinds, report(LLAMA, server=Server(64, 2048, 7)).kinds
    assert fast.decode["block_m"] > slow.decode["block_m"]


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": 0}, {"num_hidden_layers": 2}])
def test_a_configuration_without_a_language_model_is_refused(config):
    with pytest.raises(UnsupportedConfig, match=r"config\.json has no num_"):
        report(config)


@pytest.mark.parametrize(
    ("heads", "dtype", "reqs", "tokens", "drafts"),
    [((4, 2, 64, 64), torch.float16, 8, 256, 0), ((32, 1, 128, 16), torch.bfloat16, 3, 17, 3),
     ((5, 5, 80, 48), torch.float32, 1, 1, 0)],
)  # fmt: skip
def test_the_workspace_is_that_of_the_object(heads, dtype, reqs, tokens, drafts, device):
    attn = PagedAttention(
        *heads[:3], page_size=heads[3], dtype=dtype, max_num_reqs=reqs, max_num_tokens=tokens,
        device=device, decode_query_len=1 + drafts,
    )  # fmt: skip
    assert workspace_bytes(attn.config, reqs, tokens) == attn.workspace_bytes
    shared = PagedAttention(
        *heads[:3], page_size=heads[3], dtype=dtype, max_num_reqs=reqs, max_num_tokens=tokens,
        device=device, decode_query_len=1 + drafts, shared_prefixes=heads[0] < 8 * heads[1],
    )  # fmt: skip
    assert workspace_bytes(shared.config, reqs, tokens) == shared.workspace_bytes
    assert heads[1] == 1 or shared.workspace_bytes > attn.workspace_bytes


def test_the_least_able_backend_decides_the_graphs():
    levels = {"A": "UNIFORM_BATCH", "B": "ALWAYS", "C": "NEVER", "D": None}.get
    assert cuda_graphs(["TILEWISE"], levels)[0] == "ALWAYS"
    assert cuda_graphs(["TILEWISE", "B"], levels) == (
        "ALWAYS", "B allows full graphs for any batch too"
    )  # fmt: skip
    assert cuda_graphs(["TILEWISE", "A", "B"], levels) == ("UNIFORM_BATCH", "A allows no more")
    assert cuda_graphs(["A", "C"], levels) == ("NEVER", "C allows no more")
    assert cuda_graphs(["A", "D"], levels)[0] == "UNKNOWN"
    assert cuda_graphs(["TILEWISE", None], levels) == (
        "UNKNOWN", "nobody computes some of the layers"
    )  # fmt: skip


@pytest.mark.vllm
def test_vllm_is_asked_for_a_backends_graphs():
    pytest.importorskip("vllm")
    assert cuda_graphs(["TILEWISE", "TRITON_ATTN"])[0] == "ALWAYS"
    assert doctor_model._level("NO_SUCH_BACKEND") is None


def test_ranges_are_short():
    assert ranges((0, 1, 2, 5)) == "0-2, 5"
    assert ranges((0, 2, 4, 6)) == "0, 2 .. 6"
    assert ranges((3,)) == "3"
    assert ranges((0, 2)) == "0, 2"
    assert ranges((0, 1, 2, 3)) == "0-3"


def test_architectures_by_name():
    assert [parse_arch(t).arch for t in ("sm_90", "90", "9.0", "SM_90a", "10.0")] == [90] * 4 + [
        100
    ]
    for text in ("sm_75", "hopper", "", "9"):
        with pytest.raises(UnsupportedConfig, match="accepted: sm_80, sm_89, sm_90, sm_100"):
            parse_arch(text)
