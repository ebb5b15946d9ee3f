"""Architectures without a native decoder, through transformers' own code over paged memory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from aserve.errors import ConfigError
from aserve.models import Model
from aserve.models.families import FAMILIES
from aserve.models.gpt_families import GPT_FAMILIES
from aserve.models.hf import TransformersModel
from aserve.models.hf_loading import _pack_linears
from aserve.models.loader import load_model
from aserve_kernels import load
from tests.models_util import PagedMemory, make_reference, randomize, resolved

SHAPE: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "arcee": ("ArceeConfig", {}),
    "cohere": ("CohereConfig", {"logit_scale": 0.3}),
    "cohere2": ("Cohere2Config", {"sliding_window": 9, "sliding_window_pattern": 3}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {"q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "head_dim": 8}
        | {"v_head_dim": 12, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
        | {"moe_intermediate_size": 24, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    ),
    "diffllama": ("DiffLlamaConfig", {}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16}),
    "exaone4": ("Exaone4Config", {"sliding_window": 9, "sliding_window_pattern": 3, "head_dim": 16}),
    "glm": ("GlmConfig", {"head_dim": 16}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "gpt_bigcode": ("GPTBigCodeConfig", {"n_positions": 128, "n_embd": 48, "n_layer": 3, "n_head": 4}),
    "gpt_oss": (
        "GptOssConfig",
        {"head_dim": 16, "sliding_window": 9, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "granite": ("GraniteConfig", {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0}),
    "helium": ("HeliumConfig", {"head_dim": 12}),
    "nemotron": ("NemotronConfig", {"head_dim": 16}),
    "olmo": ("OlmoConfig", {"clip_qkv": 3.0}),
    "olmo2": ("Olmo2Config", {}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}),
    "smollm3": ("SmolLM3Config", {}),
    "stablelm": ("StableLmConfig", {"partial_rotary_factor": 0.5, "qk_layernorm": True}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 9}),
}


def make(case: str, **changes: Any) -> Any:
    class_name, options = CASES[case]
    config = getattr(transformers, class_name)(**(SHAPE | options | changes))
    torch.manual_seed(20)
    return randomize(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


def load_saved(directory: Path, **options: Any) -> Model:
    options = {"dtype": torch.float32, "device": "cpu", "kernels": load("torch")} | options
    return load_model(resolved(directory), **options)


@pytest.mark.parametrize("case", sorted(CASES))
def test_chunked_logits_and_greedy_tokens_equal_transformers(case: str, tmp_path: Path) -> None:
    reference = make(case)
    assert type(reference).__name__ not in {*FAMILIES, *GPT_FAMILIES}
    reference.save_pretrained(tmp_path)
    model = load_saved(tmp_path)
    assert isinstance(model, TransformersModel)
    memory = PagedMemory(model)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 97, (length,), generator=generator).tolist() for length in (21, 5)]
    sequences = [memory.add() for _ in prompts]
    first = memory.step([(sequences[0], prompts[0][:13])])[0]
    second, other = memory.step([(sequences[0], prompts[0][13:]), (sequences[1], prompts[1])])
    with torch.inference_mode():
        expected = [reference(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
    torch.testing.assert_close(torch.cat((first, second)), expected[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(other, expected[1], atol=1e-4, rtol=0)
    drawn: list[list[int]] = [[int(second[-1].argmax())], [int(other[-1].argmax())]]
    while len(drawn[0]) < 40:
        for tokens, logits in zip(
            drawn, memory.step([(sequences[row], drawn[row][-1:]) for row in range(2)]), strict=True
        ):
            tokens.append(int(logits[-1].argmax()))
    for prompt, tokens in zip(prompts, drawn, strict=True):
        with torch.inference_mode():
            whole = reference.generate(
                torch.tensor([prompt]), max_new_tokens=40, min_new_tokens=40, do_sample=False, eos_token_id=None
            )
        assert tokens == whole[0, len(prompt) :].tolist()


def test_a_native_architecture_gives_the_same_logits_through_transformers(tmp_path: Path) -> None:
    make_reference("gemma3").save_pretrained(tmp_path)
    logits = []
    for model_impl in ("native", "transformers"):
        model = load_saved(tmp_path, model_impl=model_impl)
        memory = PagedMemory(model)
        logits.append(memory.step([(memory.add(), list(range(3, 33)))])[0])
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=0)


def test_dummy_weights_follow_the_seed(tmp_path: Path) -> None:
    make("olmo2").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    files = resolved(tmp_path, load_format="dummy")
    logits = []
    for seed in (1, 1, 2):
        model = load_model(files, dtype=torch.bfloat16, device="cpu", kernels=load("torch"), seed=seed)
        memory = PagedMemory(model)
        logits.append(memory.step([(memory.add(), [5, 6, 7])])[0])
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_native_only_refuses_an_architecture_without_a_decoder(tmp_path: Path) -> None:
    make("olmo2").save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"Olmo2ForCausalLM.*native"):
        load_saved(tmp_path, model_impl="native")


@pytest.mark.parametrize(
    ("class_name", "options", "reason"),
    [
        (
            "Lfm2Config",
            {"full_attn_idxs": [1], "layer_types": ["conv", "full_attention", "conv"]},
            "layers of type conv",
        ),
        ("GPTNeoConfig", {"attention_types": [[["global"], 3]], "num_layers": 3}, "code of its own"),
    ],
)
def test_a_model_whose_attention_cannot_be_replaced_says_why(
    class_name: str, options: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = getattr(transformers, class_name)(**(SHAPE | options))
    config.architectures = [class_name.replace("Config", "ForCausalLM")]
    config.save_pretrained(tmp_path)
    files = resolved(tmp_path, load_format="dummy")
    with pytest.raises(ConfigError, match=reason):
        load_model(files, dtype=torch.float32, device="cpu", kernels=load("torch"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_layer_still_shows_its_weight(dtype: torch.dtype) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(24, 16), torch.nn.ReLU()).to(dtype)
    weight, x = module[0].weight.clone(), torch.randn(1, 5, 24, dtype=dtype)
    with torch.inference_mode():
        expected = module(x)
        _pack_linears(module)
        assert type(module[0]) is not torch.nn.Linear
        torch.testing.assert_close(module(x), expected, atol=2e-2, rtol=2e-2)
    assert torch.equal(module[0].weight, weight)


def with_own_code(directory: Path, code: str) -> None:
    """Makes a saved model one that only a Python file of its own can run."""
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "own.OwnForCausalLM"}
    config["architectures"] = ["OwnForCausalLM"]
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "own.py").write_text(code)


def test_code_of_the_checkpoint_is_run_where_it_was_asked_for(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.setattr("sys.path", [*sys.path, modules])
    reference = make("olmo2")
    reference.save_pretrained(tmp_path)
    with_own_code(tmp_path, "from transformers import Olmo2ForCausalLM\n\nclass OwnForCausalLM(Olmo2ForCausalLM): pass")
    memory = PagedMemory(load_saved(tmp_path, trust_remote_code=True))
    with torch.inference_mode():
        expected = reference(torch.tensor([[5, 6, 7]]), use_cache=False).logits[0]
    torch.testing.assert_close(memory.step([(memory.add(), [5, 6, 7])])[0], expected, atol=1e-4, rtol=0)


OWN = """
import torch
from transformers import Olmo2ForCausalLM, Olmo2Model

class Changed(Olmo2Model):
    def forward(self, input_ids=None, position_ids=None, **options):
        CHANGE
        return super().forward(input_ids, position_ids=position_ids, **options)

class OwnForCausalLM(Olmo2ForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = Changed(config)
"""


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("input_ids = input_ids + input_ids.roll(1) % 2", "logits differ"),  # tokens meet outside of attention
        ("position_ids = None", "logits differ"),  # counted over the whole batch
        ("position_ids = None if position_ids is None else position_ids * 3", "count positions"),
        ("raise KeyError('a cache')", "KeyError: 'a cache'"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_says_something_else_in_a_batch_is_refused(
    change: str,
    reason: str,
    dtype: torch.dtype,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules = str(tmp_path_factory.mktemp("modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.setattr("sys.path", [*sys.path, modules])
    make("olmo2").save_pretrained(tmp_path)
    with_own_code(tmp_path, OWN.replace("CHANGE", change))
    with pytest.raises(ConfigError, match=reason):
        load_saved(tmp_path, trust_remote_code=True, dtype=dtype)


def test_code_of_the_checkpoint_is_not_run_unasked(tmp_path: Path) -> None:
    make("olmo2").save_pretrained(tmp_path)
    with_own_code(tmp_path, "raise SystemExit('ran')")
    with pytest.raises(ConfigError, match=r"OwnForCausalLM.*--trust-remote-code"):
        load_saved(tmp_path)
