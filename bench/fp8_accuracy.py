"""How far fp8 attention is from exact: inputs with outliers, and a needle among near-misses.

``tilewise bench fp8-accuracy`` runs our kernels on the GPU, or in Triton's interpreter with
``--device cpu``.  What they are compared with is computed here in torch:

* ``per tensor``: Q, K and V rounded to e4m3 with one scale each, weights without one;
* a tensor core's accumulator, which keeps about 14 bits (``accumulate``).

Source: Shah et al., FlashAttention-3 (2024), for the distribution; DeepSeek-AI, DeepSeek-V3
Technical Report (2024), for the accumulator.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tilewise.bench import options, report
from tilewise.errors import UnsupportedConfig

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
PAGE = 64
K_STEP = 32  # keys that one instruction multiplies and adds
FRACTION_BITS = 13  # of the accumulator, below its leading bit


def rotation(dim: int) -> torch.Tensor:
    """The rotation as a matrix; like all that holds kernels, its module is imported late.

    Triton looks only once, when a kernel is defined, whether the interpreter is asked for.
    """
    from tilewise.kernels import hadamard

    return hadamard.rotation(dim)


def outliers(*shape: int, seed: int) -> torch.Tensor:
    """N(0, 1) + N(0, 100) * Bernoulli(0.001), fp64: the paper's inputs."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=gen, dtype=torch.float64)
    large = torch.randn(shape, generator=gen, dtype=torch.float64) * 10
    return x + large * (torch.rand(shape, generator=gen) < 0.001)


def rounded(x: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    """``x`` as e4m3 with a scale would hold it, in ``x``'s dtype."""
    return (x / scale).clamp(-LARGEST, LARGEST).to(FP8).to(x.dtype) * scale


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: Any = None) -> torch.Tensor:
    """Causal attention of the last queries ``[heads, queries, D]`` in the inputs' dtype.

    ``weights``, if given, is applied to unnormalised weights before they meet the values.
    """
    queries, keys = q.shape[1], k.shape[1]
    s = q @ k.transpose(1, 2) * q.shape[2] ** -0.5
    pos = torch.arange(keys - queries, keys, device=q.device)
    s.masked_fill_(torch.arange(keys, device=q.device)[None] > pos[:, None], float("-inf"))
    p = torch.exp(s - s.amax(-1, keepdim=True))
    total = p.sum(-1, keepdim=True)
    return (p if weights is None else weights(p)) @ v / total


def per_tensor(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Plain fp8 attention: one scale a tensor, none for the weights."""
    q, k, v = (rounded(x, x.abs().max() / LARGEST) for x in (q, k, v))
    return exact(q, k, v, lambda p: rounded(p, 1.0))


def ours(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scales: str,
    rotated: bool,
    fp8_dot: str = "promoted",
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cuda",
) -> torch.Tensor:
    """Our prefill with fp8 operands, over a cache that our kernel wrote.

    Parameters
    ----------
    q : Tensor[heads, queries, D]
        More than 16 queries, the last of their sequence.
    k, v : Tensor[heads, keys, D]
    scales : str
        ``head`` or ``page``: what of K and of V has a scale of its own.
    rotated : bool
        Rotate queries and keys.
    fp8_dot : str
        As ``policy.Config`` has it.
    dtype : torch.dtype
        Of queries and output.
    device : str
        ``cuda``, or ``cpu`` in Triton's interpreter.

    Returns
    -------
    Tensor[heads, queries, D]
        In ``q``'s dtype.
    """
    from tilewise.attention import PagedAttention
    from tilewise.device import fp8_format
    from tilewise.kernels.cache_write import write_kv_cache

    heads, keys, dim = k.shape
    pages = -(-keys // PAGE)
    rows = [x.transpose(0, 1).to(device=device, dtype=torch.float32) for x in (k, v)]
    by = [_scales(x, scales, rotated and i == 0) for i, x in enumerate((k, v))]
    k_scale, v_scale = (x.float().to(device) for x in by)
    cache = torch.zeros(2, pages, heads, PAGE, dim, dtype=torch.uint8, device=device)
    write_kv_cache(
        cache[0], cache[1], rows[0], rows[1], torch.arange(keys, device=device),
        fp8_format=fp8_format(FP8, cache.device, write=True), k_scale=k_scale, v_scale=v_scale,
        rotated=rotated,
    )  # fmt: skip
    queries = q.shape[1]
    attn = PagedAttention(
        heads, heads, dim, page_size=PAGE, dtype=dtype, max_num_reqs=1, max_num_tokens=queries,
        device=device, kv_dtype=FP8, fp8_matmul=True, rotated_keys=rotated,
    )  # fmt: skip
    attn.config = replace(attn.config, fp8_dot=fp8_dot)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    attn.plan(
        torch.tensor([0, queries], **ints), torch.tensor([keys], **ints),
        torch.arange(pages, **ints)[None], num_tokens=queries, max_query_len=queries,
    )  # fmt: skip
    tokens = q.transpose(0, 1).to(device=device, dtype=dtype).contiguous()
    out = attn.run(tokens, (cache[0], cache[1]), k_scale=k_scale, v_scale=v_scale)
    assert isinstance(out, torch.Tensor)
    return out.transpose(0, 1).to(q)


def _scales(x: torch.Tensor, by: str, rotated: bool) -> torch.Tensor:
    """Scales that let the largest element reach e4m3's, ``[heads]`` or ``[pages, heads]``."""
    heads, keys, dim = x.shape
    if rotated:
        x = rotation(dim).to(x) @ x.transpose(1, 2)
        x = x.transpose(1, 2)
    if by == "head":
        return x.abs().amax((1, 2)) / LARGEST
    pages = -(-keys // PAGE)
    padded = torch.zeros(heads, pages * PAGE, dim, dtype=x.dtype, device=x.device)
    padded[:, :keys] = x
    return (padded.view(heads, pages, PAGE * dim).abs().amax(2).T / LARGEST).contiguous()


VARIANTS = {
    "per head": {"scales": "head", "rotated": False},
    "per block": {"scales": "page", "rotated": False},
    "per head, rotated": {"scales": "head", "rotated": True},
    "per block, rotated": {"scales": "page", "rotated": True},
}


def errors(
    keys: int, queries: int, heads: int, dim: int, device: str, variants: Sequence[str] = ()
) -> dict[str, float]:
    """Root mean square error against fp64 of each way, on inputs with outliers.

    Parameters
    ----------
    keys, queries : int
        Length of the sequence, and how many of its last tokens are looked at.
    heads : int
        Draws.
    dim : int
        Head dimension.
    device : str
        Where our kernels run.
    variants : sequence of str
        Some of ``VARIANTS``; by default all.
    """
    q = outliers(heads, queries, dim, seed=1)
    k, v = outliers(heads, keys, dim, seed=2), outliers(heads, keys, dim, seed=3)
    wanted = exact(q, k, v)
    found = {"per tensor": torch.cat([per_tensor(*x) for x in _each(q, k, v)])}
    for name in variants or VARIANTS:
        options: dict[str, Any] = VARIANTS[name]
        found[name] = ours(q, k, v, device=device, dtype=torch.float32, **options)
    return {name: (x - wanted).pow(2).mean().sqrt().item() for name, x in found.items()}


def _each(*tensors: torch.Tensor) -> Any:
    return zip(*(x.split(1) for x in tensors), strict=True)


def accumulate(p: torch.Tensor, v: torch.Tensor, promote: int = 0) -> torch.Tensor:
    """``p @ v`` as a tensor core adds fp8 products: aligned to the largest, cut below 14 bits.

    Parameters
    ----------
    p : Tensor[draws, keys], fp32
    v : Tensor[draws, keys, D], fp32
        Values of e4m3.
    promote : int
        Keys after which the accumulator is added to an fp32 one and starts anew; 0: never.

    Returns
    -------
    Tensor[draws, D], fp32
    """
    draws, keys, dim = v.shape
    total = torch.zeros(draws, dim, device=v.device)
    acc = torch.zeros_like(total)
    for at in range(0, keys, K_STEP):
        terms = torch.cat([p[:, at : at + K_STEP, None] * v[:, at : at + K_STEP], acc[:, None]], 1)
        largest = terms.abs().amax(1, keepdim=True).clamp_min(2.0**-100)
        unit = torch.exp2(torch.floor(torch.log2(largest)) - FRACTION_BITS)
        acc = (torch.trunc(terms / unit).sum(1, keepdim=True) * unit).squeeze(1)
        if promote and (at + K_STEP) % promote == 0:
            total, acc = total + acc, torch.zeros_like(acc)
    return total + acc


def needles(draws: int, keys: int, dim: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Haystacks in which one key's value is to be found: ``(q, k, v, wanted)``.

    The needle's key fits its query best.  All others are near-misses: half of its weight, and
    values four times as large, one vector in the first half of the sequence and its opposite in the
    second, so that they cancel.  The needle's value is one of ``dim - 1`` codes, orthogonal to
    that vector and to each other.

    Returns
    -------
    q : Tensor[draws, 17, dim]
        The same query 17 times, since shorter requests are decoded.
    k, v : Tensor[draws, keys, dim]
    wanted : Tensor[draws], int64
        The needles' codes.
    """
    gen = torch.Generator().manual_seed(seed)
    codes = torch.sign(rotation(dim)).float()
    logit = 8.0
    q = torch.empty(draws, 17, dim)
    k, v = torch.empty(draws, keys, dim), torch.empty(draws, keys, dim)
    wanted = torch.randint(1, dim, (draws,), generator=gen)
    for n in range(draws):
        direction = torch.randn(dim, generator=gen)
        direction *= dim**0.5 / direction.norm()
        noise = 0.3 * torch.randn(keys, dim, generator=gen)
        noise -= (noise @ direction)[:, None] * direction / dim
        missing = 0.7 + 0.4 * torch.rand(keys, 1, generator=gen)
        at = int(torch.randint(keys - 64, (1,), generator=gen))
        missing[at], noise[at] = 0.0, 0.0
        k[n] = direction * (1 - missing / logit) + noise
        q[n] = direction * (logit * dim**-0.5)
        v[n] = 4 * codes[0]
        v[n, keys // 2 :] *= -1
        v[n, at] = codes[wanted[n]]
    return q, k, v, wanted


def retrieved(out: torch.Tensor, wanted: torch.Tensor) -> float:
    """Share of draws whose output ``[draws, D]`` looks most like the needle's code."""
    codes = torch.sign(rotation(out.shape[1]))[1:].to(out)
    return ((out @ codes.T).argmax(1).cpu() + 1 == wanted).float().mean().item()


def emulated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, promote: int = 0) -> torch.Tensor:
    """Outputs ``[draws, D]`` of the last queries, in bf16, with an emulated accumulator."""
    q, k = rounded(q[:, -1], 2.0**-8), rounded(k, k.abs().max() / LARGEST)
    s = (k @ q[:, :, None]).squeeze(2) * q.shape[1] ** -0.5
    p = torch.exp(s - s.amax(1, keepdim=True))
    out = accumulate(rounded(p * 256.0, 1.0), v, promote) / 256.0
    return (out / p.sum(1, keepdim=True)).bfloat16().float()


def retrieval(draws: int, keys: int, dim: int, device: str) -> dict[str, float]:
    """Share of needles found: by an emulated accumulator, and by our kernels on ``device``."""
    from rich.console import Console
    from rich.progress import track

    found: dict[str, list[float]] = {}
    per_batch = 4
    batches = range(0, draws, per_batch)
    for begin in track(batches, "needles", console=Console(stderr=True), transient=True):
        count = min(per_batch, draws - begin)
        q, k, v, wanted = needles(count, keys, dim, seed=begin)
        outs = {"plain, emulated": emulated(q.to(device), k.to(device), v.to(device))}
        for name, way in (("plain, kernel", "plain"), ("ours", "promoted")):
            if way == "plain" and device == "cpu":
                continue  # the interpreter adds in fp32
            outs[name] = ours(
                q, k, v, scales="head", rotated=False, fp8_dot=way, device=device
            )[:, -1]  # fmt: skip
        for name, out in outs.items():
            found.setdefault(name, []).append(retrieved(out, wanted) * count)
    return {name: sum(shares) / draws for name, shares in found.items()}


def build_parser() -> argparse.ArgumentParser:
    """Return the command line of ``tilewise bench fp8-accuracy``."""
    parser = argparse.ArgumentParser(
        prog="tilewise bench fp8-accuracy",
        description=str(__doc__),
        epilog="Exit codes: 0; 2 for a wrong command line or no GPU.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device", default="cuda", choices=("cuda", "cpu"),
        help="where our kernels run; cpu: in Triton's interpreter, to be asked for less than the "
        "defaults (default: %(default)s)",
    )  # fmt: skip
    for name, default, text in (
        ("keys", 16384, "tokens of the inputs with outliers"),
        ("queries", 512, "tokens of them, the last ones, that ask"),
        ("heads", 8, "of the inputs with outliers, each drawn anew"),
        ("head-dim", 128, "elements of a head"),
        ("needle-keys", 65536, "tokens that a needle is among"),
        ("draws", 100, "needles looked for; 0 leaves them out"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N",
            help=f"{text} (default: %(default)s)",
        )  # fmt: skip
    parser.add_argument(
        "--out", type=Path, metavar="FILE.json", help="result file (default: none is written)"
    )
    options.add_record(parser, "print the result as JSON, not tables")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables, and keep them with ``--out``.

    Returns
    -------
    int
        0; 2 for a wrong command line or no GPU.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    args = build_parser().parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device; accepted without: --device cpu, with small sizes", file=sys.stderr)
        return 2
    if args.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
    env = report.describe_environment(["tilewise", "bench", "fp8-accuracy", *argv], args.commit)
    if args.device == "cuda":
        env |= report.describe_gpu()
    try:
        rmse = errors(args.keys, args.queries, args.heads, args.head_dim, args.device)
        found = {}
        if args.draws:
            found = retrieval(args.draws, args.needle_keys, args.head_dim, args.device)
    except UnsupportedConfig as error:
        print(error, file=sys.stderr)
        return 2
    rows: list[report.Row] = [
        {"measure": "rmse", "name": name, "keys": args.keys, "value": rms}
        for name, rms in rmse.items()
    ]
    rows += [
        {"measure": "needles found", "name": name, "keys": args.needle_keys, "value": share}
        for name, share in found.items()
    ]
    if args.out is not None:
        report.write_result(args.out, env, rows)
    if args.json:
        print(report.result_text(env, rows))
        return 0
    print(f"RMSE against fp64, {args.keys} keys with outliers")
    for row in rows:
        if row["measure"] == "rmse":
            better = rmse["per tensor"] / row["value"]
            print(f"  {row['name']:20s} {row['value']:.3e}  {better:.2f}x lower")
    if args.draws:
        print(f"needles found among {args.needle_keys} keys, {args.draws} draws")
        for row in rows:
            if row["measure"] != "rmse":
                print(f"  {row['name']:20s} {100 * row['value']:.0f} %")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
