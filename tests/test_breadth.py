"""Every causal model that transformers knows: served with its own tokens, or refused in one line; which, is pinned.

Each is made tiny with random weights by transformers' class, saved, and loaded from its directory. Nothing in between
is allowed: no other tokens, no crash, no refusal of what was served before.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CLASSES

from aserve.errors import ConfigError
from aserve.models.loader import load_model
from aserve_kernels import load
from tests.models_util import PagedMemory, load_saved, randomize, resolved
from tests.tiny_configs import VOCAB_SIZE, tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "models.md"
NUM_TOKENS = 40

# reason -> model types; "config": it is told before weights are read
REFUSED: dict[str, str] = {
    "layers of type": """
        axk2 bailing_hybrid bamba deepseek_v32 deepseek_v4 dots3_note_text falcon_h1 falcon_mamba glm_moe_dsa hy_v4
        inkling2_loop_text inkling2_text inkling_text jamba kimi_linear lara_mini lfm2 lfm2_moe lfm3 mamba mamba2
        minimax minimax_m3_vl_text nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next
        qwen4_exp qwen4_exp_text recurrent_gemma zamba zamba2 zaya""",
    "code of its own": """
        big_bird bloom cpmant falcon git gpt_neo gpt_neox_japanese megatron-bert mpt mvp openai-gpt prophetnet reformer
        rembert roformer rwkv trocr xglm xlm xlnet""",
    "counts positions itself": "bart bigbird_pegasus blenderbot blenderbot-small marian mbart pegasus plbart",
    "states no context": "whisper",
    "logits differ|count positions": """
        camembert data2vec-text roberta roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod""",
    "mask": "doge moshi",
    "counts itself": "llama4 llama4_text",
    "layers attend": "mllama xlstm",
    "does not run": "blt",
}
UNMADE = {  # transformers makes no small one of these here
    "dots3_note": "its parts' sizes depend on each other",
    "gemma3n": "its vision part needs a library",
    "gemma4_assistant": "a part of another model",
    "gemma4_unified_assistant": "a part of another model",
    "musicgen": "its decoder has a configuration of its own",
    "musicgen_melody": "its decoder has a configuration of its own",
}
REASONS = {kind: reason for reason, kinds in REFUSED.items() for kind in kinds.split()}
EARLY = ("layers of type", "code of its own", "counts itself")  # told by config.json and the class alone


def class_name(model_type: str) -> str:
    entry = CLASSES[model_type]
    return entry if isinstance(entry, str) else entry[0]


def served() -> list[str]:
    return [kind for kind in CLASSES if kind not in REASONS and kind not in UNMADE]


def save(model_type: str, directory: Path) -> None:
    """A tiny model in a directory."""
    torch.manual_seed(20)
    config = tiny_config(model_type)
    randomize(transformers.AutoModelForCausalLM.from_config(config)).save_pretrained(directory)


def read_back(model_type: str, directory: Path) -> Any:
    """transformers' own load of it, with its own attention."""
    config = transformers.AutoConfig.from_pretrained(directory)
    model = getattr(transformers, class_name(model_type)).from_pretrained(
        directory, config=config, attn_implementation="eager", dtype=torch.float32
    )
    return model.eval()


@pytest.mark.parametrize("model_type", sorted(served()))
def test_a_batch_in_chunks_gives_transformers_own_tokens(model_type: str, tmp_path: Path) -> None:
    save(model_type, tmp_path)
    reference, model = read_back(model_type, tmp_path), load_saved(tmp_path)
    memory = PagedMemory(model)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(4, VOCAB_SIZE, (length,), generator=generator).tolist() for length in (21, 5)]
    sequences = [memory.add() for _ in prompts]
    memory.step([(sequences[0], prompts[0][:13])])
    logits = memory.step([(sequences[0], prompts[0][13:]), (sequences[1], prompts[1])])
    with torch.inference_mode():
        expected = [reference(torch.tensor([prompt]), use_cache=False).logits[0, -1] for prompt in prompts]
    for found, wanted in zip(logits, expected, strict=True):
        assert (found[-1] - wanted).abs().max() <= 1e-3 * wanted.abs().max()
    drawn = [[int(part[-1].argmax())] for part in logits]
    while len(drawn[0]) < NUM_TOKENS:
        steps = memory.step([(sequence, tokens[-1:]) for sequence, tokens in zip(sequences, drawn, strict=True)])
        for tokens, part in zip(drawn, steps, strict=True):
            tokens.append(int(part[-1].argmax()))
    options = {"max_new_tokens": NUM_TOKENS, "min_new_tokens": NUM_TOKENS, "do_sample": False, "eos_token_id": None}
    for prompt, tokens in zip(prompts, drawn, strict=True):
        with torch.inference_mode():
            whole = reference.generate(torch.tensor([prompt]), pad_token_id=0, **options)
        assert tokens == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("model_type", sorted(REASONS))
def test_what_cannot_be_exact_is_refused_in_one_line(model_type: str, tmp_path: Path) -> None:
    if early := REASONS[model_type] in EARLY:
        config = tiny_config(model_type)
        config.architectures = [class_name(model_type)]
        config.save_pretrained(tmp_path)
    else:
        save(model_type, tmp_path)
    files = resolved(tmp_path, load_format="dummy" if early else "auto")
    with pytest.raises(ConfigError, match=REASONS[model_type]) as caught:
        load_model(files, dtype=torch.float32, device="cpu", kernels=load("torch"))
    assert "\n" not in caught.value.message
    assert class_name(model_type) in caught.value.message


def test_the_documentation_has_these_counts_and_names() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    counts = re.search(r"Of the (\d+) types .*?, (\d+) are\s+served.*? (\d+) are\s+refused", text, re.DOTALL)
    assert counts is not None
    assert [int(count) for count in counts.groups()] == [len(CLASSES), len(served()), len(REASONS)]
    for model_type in REASONS:
        assert f"`{model_type}`" in text, model_type
