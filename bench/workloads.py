"""Named serving workloads, the model they run on, and the commands that run them."""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tilewise.settings import problems

VOCAB_SIZE = 128256
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>")
VLLM_CLI = (sys.executable, "-m", "vllm.entrypoints.cli.main")
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of one closed-loop benchmark.

    Parameters
    ----------
    name : str
        Stable name used in result files.
    input_len, output_len : int
        Tokens of prompt and answer; means where `range_ratio` is not zero.
    num_prompts, concurrency : int
        Requests in all, and at one time.
    range_ratio : float
        Lengths are uniform in ``len * (1 - ratio) ... len * (1 + ratio)``.
    prefix_len : int
        Tokens of a prompt that it has in common with others; servers cache prefixes then.
    num_prefixes : int
        How many such beginnings there are, each of equally many prompts.
    """

    name: str
    input_len: int
    output_len: int
    num_prompts: int
    concurrency: int
    range_ratio: float = 0.0
    prefix_len: int = 0
    num_prefixes: int = 1

    def __post_init__(self) -> None:
        """Refuse prompts that are nothing but a prefix, and prefixes of unequally many."""
        if not 0 <= self.prefix_len < self.input_len or self.num_prompts % self.num_prefixes:
            raise ValueError(
                f"{self.name}: {self.num_prefixes} prefixes of {self.prefix_len} tokens for "
                f"{self.num_prompts} prompts of {self.input_len}; accepted: shorter ones, and "
                "equally many prompts of each"
            )

    @property
    def longest(self) -> int:
        """Upper bound of prompt plus answer, in tokens."""
        return int((self.input_len + self.output_len) * (1 + self.range_ratio)) + 2

    def at_concurrency(self, concurrency: int) -> Workload:
        """Return the same lengths with another number of requests at a time, named after it.

        The requests in all keep their ratio to those at a time, but are at least eight.
        """
        waves = max(1, round(self.num_prompts / self.concurrency))
        each = -(-max(8, waves * concurrency) // self.num_prefixes)
        stem = re.sub(r"_c\d+$", "", self.name)
        return replace(
            self,
            name=f"{stem}_c{concurrency}",
            concurrency=concurrency,
            num_prompts=each * self.num_prefixes,
        )


WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("s_1k_128_c64", 1024, 128, 128, 64),
        Workload("s_16k_256_c16", 16384, 256, 16, 16),
        Workload("s_8k_1k_c8", 8192, 1024, 16, 8),
        Workload("s_8k_1k_c64", 8192, 1024, 64, 64),
        Workload("s_ragged_c32", 4096, 256, 128, 32, 0.9),
        # Many requests over one long text, and over a few shorter ones.
        Workload("s_prefix32k_c64", 32768 + 256, 256, 128, 64, prefix_len=32768),
        Workload("s_prefix4x8k_c64", 8192 + 512, 256, 128, 64, prefix_len=8192, num_prefixes=4),
        # To try the command, on a small model or without a GPU.
        Workload("s_try_c2", 24, 4, 4, 2),
        Workload("s_prefix_try_c2", 48, 4, 4, 2, prefix_len=40, num_prefixes=2),
    )
}


def llama_config(num_layers: int = 32) -> dict[str, object]:
    """Return a configuration of the shape of Llama 3.1 8B."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": VOCAB_SIZE,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def tokenizer_json(vocab_size: int = VOCAB_SIZE) -> dict[str, object]:
    """Return a word-level tokenizer whose every id is one word.

    Decoding and encoding are exact inverses, so prompts have exactly the lengths asked for.
    """
    words = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    words.update((f"w{index}", index) for index in range(len(SPECIAL_TOKENS), vocab_size))
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, "special": True, **plain}
            for index, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": SPECIAL_TOKENS[0]},
    }


def write_model(folder: Path, num_layers: int = 32) -> Path:
    """Write configuration and tokenizer, without weights, into `folder` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    unk, bos, eos = SPECIAL_TOKENS
    files = {
        "config.json": llama_config(num_layers),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2},
        "tokenizer.json": tokenizer_json(),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 131072,
            "unk_token": unk,
            "bos_token": bos,
            "eos_token": eos,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return folder


def split_backend(name: str) -> tuple[str, dict[str, str]]:
    """``BACKEND@VARIABLE=VALUE@…`` as the backend and what its server finds in the environment.

    Raises
    ------
    ValueError
        Naming an assignment that is none, and what is accepted.
    """
    backend, *assignments = name.split("@")
    environ = {}
    for text in assignments:
        variable, equals, value = text.partition("=")
        if not equals or not variable.startswith(("TILEWISE_", "VLLM_")):
            raise ValueError(
                f"{text!r} in --backends {name}; accepted: TILEWISE_…=value or VLLM_…=value"
            )
        environ[variable] = value
    if wrong := problems(environ):
        raise ValueError(f"{'; '.join(wrong.values())} (in --backends {name})")
    return backend, environ


def accepted_backends() -> list[str]:
    """Return the names that servers of the installed vLLM take, ours first.

    Raises
    ------
    ValueError
        Without a vLLM that can be asked.
    """
    try:
        # It may log, to standard output, which may be for JSON.
        with contextlib.redirect_stdout(sys.stderr):
            from vllm.v1.attention.backends.registry import AttentionBackendEnum
    except ImportError as error:
        raise ValueError(
            f"tilewise bench serve needs vllm ({error}): pip install 'tilewise[vllm]'"
        ) from None
    # Members of the enum only once the plug-in is loaded.
    return list(dict.fromkeys(("TILEWISE", "CUSTOM", *AttentionBackendEnum.__members__)))


def server_command(
    model: Path,
    backend: str,
    port: int,
    max_model_len: int,
    extra: Sequence[str] = (),
    prefix_caching: bool = False,
) -> list[str]:
    """Return the command line of one server; `extra` comes last and may override."""
    return [
        *VLLM_CLI, "serve", str(model),
        "--served-model-name", "bench",
        "--host", HOST,
        "--port", str(port),
        "--attention-backend", split_backend(backend)[0],
        "--load-format", "dummy",
        "--dtype", "bfloat16",
        "--seed", "0",
        "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching",
        "--max-model-len", str(max_model_len),
        *extra,
    ]  # fmt: skip


def _dataset(workload: Workload) -> list[str]:
    """How ``vllm bench serve`` is to draw the prompts."""
    if not workload.prefix_len:
        return [
            "--dataset-name", "random",
            "--random-input-len", str(workload.input_len),
            "--random-output-len", str(workload.output_len),
            "--random-range-ratio", str(workload.range_ratio),
        ]  # fmt: skip
    return [
        "--dataset-name", "prefix_repetition",
        "--prefix-repetition-prefix-len", str(workload.prefix_len),
        "--prefix-repetition-suffix-len", str(workload.input_len - workload.prefix_len),
        "--prefix-repetition-num-prefixes", str(workload.num_prefixes),
        "--prefix-repetition-output-len", str(workload.output_len),
    ]  # fmt: skip


def client_arguments(
    workload: Workload, model: Path, port: int, result: Path, seed: int = 0
) -> list[str]:
    """Return the arguments of ``vllm bench serve`` for one workload; `seed` draws the prompts."""
    return [
        "bench", "serve",
        "--backend", "openai",
        "--host", HOST,
        "--port", str(port),
        "--endpoint", "/v1/completions",
        "--model", str(model),
        "--served-model-name", "bench",
        "--tokenizer", str(model),
        *_dataset(workload),
        "--num-prompts", str(workload.num_prompts),
        "--max-concurrency", str(workload.concurrency),
        "--num-warmups", "2",
        "--request-rate", "inf",
        "--ignore-eos",
        "--temperature", "0",
        "--seed", str(seed),
        "--percentile-metrics", "ttft,tpot,itl,e2el",
        "--metric-percentiles", "50,90,99",
        "--disable-tqdm",
        "--save-result",
        "--result-dir", str(result.parent),
        "--result-filename", result.name,
    ]  # fmt: skip
