"""Many requests at once: answered, aborted, left alone and nonsensical ones."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import aiohttp

# How a client behaves, and how many of a hundred do.
KINDS = {
    "answered": 55,  # waits for the answer
    "streamed": 15,  # reads it token by token
    "left": 14,  # hangs up after some tokens
    "left_at_once": 8,  # hangs up before the first one
    "too_long": 4,  # a prompt beyond the server's limit
    "nonsense": 4,  # no such tokens, no such fields, no JSON
}
REFUSED = ("too_long", "nonsense")
NONSENSE = (
    {"prompt": [10**9], "max_tokens": 2},
    {"prompt": [-5], "max_tokens": 2},
    {"prompt": [], "max_tokens": 2},
    {"prompt": [5, 6], "max_tokens": -1},
    {"prompt": [5, 6], "max_tokens": 2, "temperature": -3},
    {"prompt": {"a": 1}},
    "no JSON",
)


@dataclass(frozen=True)
class Limits:
    """What a server takes, and what is asked of it.

    Attributes
    ----------
    max_len : int
        Tokens of prompt and answer together.
    max_tokens : int
        Longest answer.
    concurrency : int
        Clients at once.
    timeout : float
        Seconds after which a request counts as hung.
    """

    max_len: int
    max_tokens: int
    concurrency: int
    timeout: float


@dataclass
class Answer:
    """A greedy answer that came to its end."""

    prompt: list[int]
    tokens: list[int]
    expected: int


@dataclass
class Outcome:
    """What became of the requests."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    seconds: float = 0.0


def make_prompt(rng: random.Random, longest: int, shared: list[int]) -> list[int]:
    """Random tokens, more short prompts than long ones; some start with the same ones."""
    length = max(1, int(longest ** rng.random()))
    head = shared[: rng.randrange(len(shared))] if rng.random() < 0.4 else []
    return (head + [rng.randrange(4, 260) for _ in range(length)])[:longest]


async def send(
    url: str, num_requests: int, limits: Limits, seed: int, until_dead: bool = False
) -> Outcome:
    """Send requests, ``limits.concurrency`` at once.

    Parameters
    ----------
    url : str
        The server's.
    num_requests : int
        How many.
    limits : Limits
        Their bounds.
    seed : int
        The same seed sends the same requests.
    until_dead : bool
        The server will be killed meanwhile: an error that ends a request is no problem then.
    """
    rng = random.Random(seed)
    shared = [rng.randrange(4, 260) for _ in range(limits.max_len // 2)]
    outcome, gate = Outcome(), asyncio.Semaphore(limits.concurrency)
    kinds = rng.choices(list(KINDS), list(KINDS.values()), k=num_requests)

    async def one(session: aiohttp.ClientSession, kind: str, own: random.Random) -> None:
        async with gate:
            outcome.counts[kind] += 1
            started = time.monotonic()
            try:
                async with asyncio.timeout(limits.timeout):
                    await CLIENTS[kind](session, url, own, limits, shared, outcome)
                outcome.latencies.append(time.monotonic() - started)
            except TimeoutError:
                outcome.problems.append(f"{kind}: no end after {limits.timeout:g} s")
            except (aiohttp.ClientError, ConnectionError, Unanswered) as error:
                outcome.counts["errors"] += 1
                if not until_dead:
                    outcome.problems.append(f"{kind}: {type(error).__name__}: {error}"[:300])

    started = time.monotonic()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        seeds = [rng.random() for _ in kinds]
        await asyncio.gather(
            *(one(session, kind, random.Random(s)) for kind, s in zip(kinds, seeds, strict=True))
        )
    outcome.seconds = time.monotonic() - started
    return outcome


class Unanswered(RuntimeError):
    """The server answered with something else than it should have."""


def _request(rng: random.Random, limits: Limits, shared: list[int]) -> dict:
    num_tokens = rng.randint(1, limits.max_tokens)
    greedy = rng.random() < 0.8
    return {
        "model": "tiny",
        "prompt": make_prompt(rng, limits.max_len - num_tokens, shared),
        "max_tokens": num_tokens,
        "temperature": 0 if greedy else 1,
        "ignore_eos": True,
        "return_token_ids": True,
        **({"seed": rng.randrange(1000)} if rng.random() < 0.2 else {}),
        **({"logprobs": 2} if rng.random() < 0.1 else {}),
    }


def _keep(request: dict, tokens: list[int], outcome: Outcome) -> None:
    if len(tokens) != request["max_tokens"]:
        raise Unanswered(f"{len(tokens)} tokens of {request['max_tokens']}")
    if request["temperature"] == 0:
        outcome.answers.append(Answer(request["prompt"], tokens, request["max_tokens"]))


async def _answered(session, url, rng, limits, shared, outcome) -> None:
    request = _request(rng, limits, shared)
    async with session.post(f"{url}/v1/completions", json=request) as answer:
        if answer.status != 200:
            raise Unanswered(f"status {answer.status}: {await answer.text()}")
        (choice,) = (await answer.json())["choices"]
        _keep(request, choice["token_ids"], outcome)


async def _read(answer: aiohttp.ClientResponse, at_most: int) -> list[int]:
    """Tokens of a streamed answer, as many as wanted; the whole of it for more than there are."""
    tokens: list[int] = []
    async for line in answer.content:
        text = line.decode().strip()
        if not text.startswith("data: ") or text == "data: [DONE]":
            continue
        event = json.loads(text.removeprefix("data: "))
        if "error" in event:
            raise Unanswered(f"error within a stream: {event['error']}")
        for choice in event.get("choices", ()):
            tokens += choice.get("token_ids") or []
        if len(tokens) >= at_most:
            break
    return tokens


async def _streamed(session, url, rng, limits, shared, outcome) -> None:
    request = {**_request(rng, limits, shared), "stream": True}
    async with session.post(f"{url}/v1/completions", json=request) as answer:
        if answer.status != 200:
            raise Unanswered(f"status {answer.status}: {await answer.text()}")
        _keep(request, await _read(answer, 10**9), outcome)


async def _left(session, url, rng, limits, shared, outcome) -> None:
    request = {**_request(rng, limits, shared), "stream": True, "max_tokens": limits.max_tokens}
    request["prompt"] = request["prompt"][: limits.max_len - limits.max_tokens]
    answer = await session.post(f"{url}/v1/completions", json=request)
    try:
        await _read(answer, rng.randint(1, max(1, limits.max_tokens // 2)))
    finally:
        answer.close()  # the connection with it


async def _left_at_once(session, url, rng, limits, shared, outcome) -> None:
    request = _request(rng, limits, shared)
    post = asyncio.ensure_future(session.post(f"{url}/v1/completions", json=request))
    await asyncio.wait([post], timeout=rng.random() * 0.2)
    if not post.done():
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
    else:
        post.result().close()


async def _refused(session, url, body, outcome) -> None:
    headers = {"Content-Type": "application/json"}
    data = body if isinstance(body, str) else json.dumps(body)
    async with session.post(f"{url}/v1/completions", data=data, headers=headers) as answer:
        outcome.counts[f"status {answer.status}"] += 1
        if not 400 <= answer.status < 500:
            raise Unanswered(f"status {answer.status} for {data[:80]}: {await answer.text()}")


async def _too_long(session, url, rng, limits, shared, outcome) -> None:
    length = limits.max_len + rng.choice((0, 1, 100, 10 * limits.max_len))
    await _refused(session, url, {"model": "tiny", "prompt": [7] * length}, outcome)


async def _nonsense(session, url, rng, limits, shared, outcome) -> None:
    body = rng.choice(NONSENSE)
    await _refused(
        session, url, body if isinstance(body, str) else {"model": "tiny", **body}, outcome
    )


CLIENTS = {
    "answered": _answered,
    "streamed": _streamed,
    "left": _left,
    "left_at_once": _left_at_once,
    "too_long": _too_long,
    "nonsense": _nonsense,
}
