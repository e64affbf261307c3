"""A tiny Gemma 3 with its vision encoder: a checkpoint, a processor for it, and pictures.

Wide enough that a picture's tokens, and their seeing each other, decide what comes after them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from tiny_model import _write_tokenizer
from tiny_zoo import DECODER, WINDOW, kinds

IMAGE_SIZE, PATCH_SIZE = 56, 14
IMAGE_TOKENS = 16  # each a patch; fewer than the window, as in Gemma 3
NUM_TEXT_TOKENS = 512
# Whatever Gemma's processor looks up, behind the tokens of text.
NEWLINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
MARKS = {
    "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}  # fmt: skip
ID_OF = {text: NUM_TEXT_TOKENS + i for i, text in enumerate((*NEWLINES, *MARKS.values()))}
START, END, SOFT = (ID_OF[MARKS[name]] for name in MARKS)
VOCABULARY = 528


def write(folder: Path, seed: int = 0) -> Path:
    """Write configuration, weights, tokenizer and processor into ``folder`` and return it."""
    import transformers
    from transformers.initialization import no_init_weights

    config = transformers.Gemma3Config(
        text_config=DECODER | {
            "head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": WINDOW,
            "layer_types": kinds("s", "f"), "vocab_size": VOCABULARY,
        },
        vision_config={
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
            "num_attention_heads": 2, "image_size": IMAGE_SIZE, "patch_size": PATCH_SIZE,
            "vision_use_head": False,
        },
        mm_tokens_per_image=IMAGE_TOKENS, image_token_index=SOFT, boi_token_index=START,
        eoi_token_index=END,
    )  # fmt: skip
    with no_init_weights():
        model = transformers.Gemma3ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(_drawn(name, weight, generator))
    model.save_pretrained(folder)
    _name_as_published(folder / "model.safetensors")
    _write_processor(folder)
    return folder


def _name_as_published(file: Path) -> None:
    """Give the encoder's weights the names that vLLM knows, which Hugging Face reads as well."""
    from safetensors.torch import load_file, save_file

    weights = {
        re.sub(r"(vision_tower\.)(?!vision_model)", r"\1vision_model.", name): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(weights, file, metadata={"format": "pt"})


def _drawn(name: str, weight: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A weight's values: as in ``tiny_zoo``, and pictures as loud as text."""
    normal = torch.randn(weight.shape, generator=generator)
    if "norm" in name:
        return normal * 0.05 + ("vision_tower" in name)  # Gemma's own scales are offsets from 1
    if weight.dim() < 2:
        return normal * 0.1
    if "embed_tokens" in name:
        return normal * 0.05
    if "embedding" in name:
        fan_in = weight[0].numel() if weight.dim() == 4 else 1
        return normal / fan_in**0.5
    if "mm_input_projection" in name:  # [encoder, text], the other way round than the others
        return normal * (0.5 / weight.shape[0] ** 0.5)
    gain = 3.0 if "o_proj" in name else 1.0 + 0.5 * any(f"{x}_proj" in name for x in "qkv")
    return normal * (gain / weight.shape[1] ** 0.5)


def _write_processor(folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer

    _write_tokenizer(folder, NUM_TEXT_TOKENS, 2048)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in NEWLINES])
    tokenizer.add_special_tokens(list(MARKS.values()))
    assert {text: tokenizer.token_to_id(text) for text in ID_OF} == ID_OF
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"extra_special_tokens": MARKS, "processor_class": "Gemma3Processor"})
    )
    size = {"height": IMAGE_SIZE, "width": IMAGE_SIZE}
    pictures = {"image_processor_type": "Gemma3ImageProcessor", "size": size, "do_resize": True}
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    processor = {"processor_class": "Gemma3Processor", "image_seq_length": IMAGE_TOKENS}
    (folder / "processor_config.json").write_text(json.dumps(processor))


def draw(folder: Path, number: int) -> list[Path]:
    """Save pictures of noise, each of its own colours; of the encoder's size, so never resized."""
    import numpy as np
    from PIL import Image

    paths = []
    for index in range(number):
        rng = np.random.default_rng(index)
        noise = rng.integers(0, 256, (IMAGE_SIZE, IMAGE_SIZE, 3), dtype=np.uint8)
        paths.append(folder / f"picture{index}.png")
        Image.fromarray(noise // 2 + rng.integers(0, 128, 3, dtype=np.uint8)).save(paths[-1])
    return paths


def pixels(path: Path) -> torch.Tensor:
    """What the encoder is given of a picture: ``[3, size, size]``, from -1 to 1."""
    import numpy as np
    from PIL import Image

    values = torch.from_numpy(np.array(Image.open(path), dtype=np.float32))
    return values.permute(2, 0, 1) / 127.5 - 1
