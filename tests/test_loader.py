"""Loading: shards, dtypes, dummy weights, and one clear line for a checkpoint that does not fit its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from aserve.config import ModelImpl
from aserve.errors import ConfigError
from aserve.models import Model
from aserve.models.loader import _MODEL_TYPES, load_model, native_architectures
from aserve_kernels import load
from tests.models_util import GEMMA, SHAPE, PagedMemory, load_saved, make_reference, randomize, resolved


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make_reference("qwen3").save_pretrained(tmp_path)
    return tmp_path


def change_config(directory: Path, **options: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | options))


def change_tensors(directory: Path, change: Any) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def some_logits(model: Model) -> torch.Tensor:
    memory = PagedMemory(model)
    return memory.step([(memory.add(), [5, 9, 60, 3, 3, 41])])[0]


def load_dummy(directory: Path, seed: int = 0, dtype: torch.dtype = torch.float32) -> Model:
    files = resolved(directory, load_format="dummy")
    return load_model(files, dtype=dtype, device="cpu", kernels=load("torch"), seed=seed)


def test_every_native_architecture_has_the_type_that_goes_with_it() -> None:
    assert sorted(_MODEL_TYPES) == sorted(native_architectures())


def test_a_sharded_checkpoint_gives_the_same_model_as_one_file(tmp_path: Path) -> None:
    reference = make_reference("llama2")
    reference.save_pretrained(tmp_path / "one")
    reference.save_pretrained(tmp_path / "many", max_shard_size="50KB")
    assert len(resolved(tmp_path / "many").weights) > 2
    torch.testing.assert_close(
        some_logits(load_saved(tmp_path / "many")), some_logits(load_saved(tmp_path / "one")), atol=0, rtol=0
    )


def test_weights_are_cast_to_the_asked_dtype(saved: Path) -> None:
    wide = load_saved(saved)
    narrow = load_model(resolved(saved), dtype=torch.bfloat16, device="cpu", kernels=load("torch"))
    assert narrow.spec.dtype is torch.bfloat16
    logits = some_logits(narrow)
    assert logits.dtype is torch.bfloat16
    torch.testing.assert_close(logits.float(), some_logits(wide), atol=0.5, rtol=0.05)


def test_dummy_weights_need_only_a_config_and_follow_the_seed(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    one, same, other = (some_logits(load_dummy(saved, seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert one.isfinite().all()


@pytest.mark.parametrize("case", ["gemma3", "gptneox", "mixtral", "opt"])
def test_dummy_weights_serve_every_kind_of_decoder(case: str, tmp_path: Path) -> None:
    make_reference(case).save_pretrained(tmp_path)
    logits = some_logits(load_dummy(tmp_path, dtype=torch.bfloat16))
    assert logits.isfinite().all()
    assert logits.std() > 0


def test_the_rotary_tables_end_at_the_contexts_that_are_served(saved: Path) -> None:
    bounded = load_saved(saved, max_positions=6)
    assert torch.equal(some_logits(bounded), some_logits(load_saved(saved)))
    assert bounded.spec.max_position_embeddings == 128


def pickle_weights(directory: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


@pytest.mark.parametrize("model_impl", ["native", "transformers"])
def test_pickled_weights_give_the_same_model_where_they_are_allowed(saved: Path, model_impl: ModelImpl) -> None:
    expected = some_logits(load_saved(saved))
    pickle_weights(saved)
    files = resolved(saved, allow_pickle=True)
    model = load_model(files, dtype=torch.float32, device="cpu", kernels=load("torch"), model_impl=model_impl)
    torch.testing.assert_close(some_logits(model), expected, atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match="--allow-pickle"):
        resolved(saved)
    with pytest.raises(ConfigError, match=r"no \*\.safetensors"):
        resolved(saved, allow_pickle=True, load_format="safetensors")


def test_the_text_part_of_a_model_with_vision_is_served(tmp_path: Path) -> None:
    text = transformers.Gemma3TextConfig(**(SHAPE | GEMMA))
    vision = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision | {"image_size": 8, "patch_size": 4}, mm_tokens_per_image=4
    )
    torch.manual_seed(20)
    reference = randomize(transformers.Gemma3ForConditionalGeneration(config))
    reference.save_pretrained(tmp_path)
    tokens = [5, 9, 60, 3, 3, 41]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(some_logits(load_saved(tmp_path)), expected, atol=1e-4, rtol=0)


def test_a_missing_tensor_is_named(saved: Path) -> None:
    change_tensors(saved, lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(ConfigError, match=r"lacks model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_saved(saved)


def test_a_tensor_without_a_place_is_named(saved: Path) -> None:
    change_tensors(saved, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    with pytest.raises(ConfigError, match=r"holds model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_saved(saved)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(saved: Path) -> None:
    change_config(saved, intermediate_size=81)
    with pytest.raises(ConfigError, match=r"gate_proj\.weight has shape \(80, 48\).*\(81, 48\)"):
        load_saved(saved)


def test_integer_weights_are_refused(saved: Path) -> None:
    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.down_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)

    change_tensors(saved, quantize)
    with pytest.raises(ConfigError, match=r"down_proj\.weight is I8"):
        load_saved(saved)


def test_a_quantized_checkpoint_is_refused_with_its_method(saved: Path) -> None:
    change_config(saved, quantization_config={"quant_method": "awq", "bits": 4})
    with pytest.raises(ConfigError, match=r"quantized \(awq\)"):
        load_saved(saved)


def test_an_unsupported_architecture_is_named_with_the_supported_ones(saved: Path) -> None:
    change_config(saved, architectures=["T5ForConditionalGeneration"])
    with pytest.raises(ConfigError, match=r"T5ForConditionalGeneration.*native: .*LlamaForCausalLM"):
        load_saved(saved)
    assert "Gemma3ForCausalLM" in native_architectures()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architectures": []}, "no architecture"),
        ({"architectures": ["MambaForCausalLM"]}, "numbers of another model, qwen3"),
        ({"hidden_size": None}, "'hidden_size'"),
        ({"hidden_act": "mish"}, "'mish'"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "'spiral'"),
    ],
)
def test_a_config_that_cannot_be_served_says_why(saved: Path, options: dict[str, Any], message: str) -> None:
    change_config(saved, **options)
    with pytest.raises(ConfigError, match=message):
        load_saved(saved)
