"""GGUF: the header, the mapping back to a checkpoint, and tokenizers equal to transformers' on varied text.

Files are written by the gguf package's own writer from tiny models of transformers, so that what comes back can be
compared with what went in.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from aserve.errors import ConfigError
from aserve.models.files import resolve
from aserve.models.gguf_convert import convert
from aserve.models.loader import load_model
from aserve_kernels import load
from tests.gguf_util import write_gguf
from tests.models_util import PagedMemory, make_reference

CASES = {"llama2": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3", "gemma2": "gemma2"}


def converted(path: Path, target: Path) -> Path:
    target.mkdir()
    convert(path, target)
    return target


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_converted_checkpoint_is_the_one_that_was_written(case: str, tmp_path: Path) -> None:
    reference = make_reference(case)
    write_gguf(tmp_path / "tiny.gguf", reference, CASES[case])
    tensors = load_file(converted(tmp_path / "tiny.gguf", tmp_path / "out") / "model.safetensors")
    expected = reference.state_dict()
    if reference.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, atol=1e-7, rtol=1e-6)  # 1 + w - 1 rounds


@pytest.mark.parametrize("case", sorted(CASES))
def test_a_converted_config_gives_transformers_the_same_model(case: str, tmp_path: Path) -> None:
    reference = make_reference(case)
    if case.startswith("gemma"):  # a GGUF does not state it: llama.cpp knows it by the size
        for layer in reference.model.layers:
            layer.self_attn.scaling = 256**-0.5
    write_gguf(tmp_path / "tiny.gguf", reference, CASES[case])
    directory = converted(tmp_path / "tiny.gguf", tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    ours = load_model(resolve(str(directory)), dtype=torch.float32, device="cpu", kernels=load("torch"))
    text = list(range(20, 50))
    memory = PagedMemory(ours)
    with torch.inference_mode():
        expected = reference(torch.tensor([text])).logits[0]
        again = theirs(torch.tensor([text])).logits[0]
    torch.testing.assert_close(again, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(memory.step([(memory.add(), text)])[0], expected, atol=1e-4, rtol=0)


def test_quantized_rows_are_put_back_and_dequantized_exactly(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4
    )
    reference = transformers.LlamaForCausalLM(config)
    write_gguf(tmp_path / "tiny.gguf", reference, "llama", quantize=True)
    tensors = load_file(converted(tmp_path / "tiny.gguf", tmp_path / "out") / "model.safetensors")
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, tensor in reference.state_dict().items():
        expected = tensor.numpy()
        if expected.ndim == 2:
            expected = gguf.quants.dequantize(gguf.quants.quantize(expected, kind), kind)
        np.testing.assert_array_equal(tensors[name].numpy(), expected)


def test_stored_rotary_divisors_become_a_scaling_that_divides_by_them(tmp_path: Path) -> None:
    reference = make_reference("llama2")
    factors = np.array([1, 1, 2, 4, 8, 8], dtype=np.float32)
    write_gguf(tmp_path / "tiny.gguf", reference, "llama", extra_tensors={"rope_freqs.weight": factors})
    directory = converted(tmp_path / "tiny.gguf", tmp_path / "out")
    reference.model.rotary_emb.inv_freq /= torch.from_numpy(factors)
    text = list(range(20, 60))
    ours = load_model(resolve(str(directory)), dtype=torch.float32, device="cpu", kernels=load("torch"))
    memory = PagedMemory(ours)
    with torch.inference_mode():
        expected = reference(torch.tensor([text])).logits[0]
    torch.testing.assert_close(memory.step([(memory.add(), text)])[0], expected, atol=1e-4, rtol=0)


def test_a_chat_template_is_kept_and_its_end_of_turn_ends_a_text(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}<unused3>{% endfor %}"
    strings = {"tokenizer.chat_template": template}
    write_gguf(tmp_path / "tiny.gguf", make_reference("qwen3"), "qwen3", extra_strings=strings)
    files = resolve(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache")
    assert files.chat_template == template
    assert files.generation_config["eos_token_id"] == [2]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda data: b"PK" + data[2:], "is not a GGUF file"),
        (lambda data: data[:4] + b"\x01\x00\x00\x00" + data[8:], "has GGUF version 1"),
        (lambda data: data[:1000], "is damaged or cut short"),
        (lambda data: data[:-100], "is cut short: tensor"),
        (lambda data: b"", "cannot be read"),
    ],
)
def test_a_harmed_file_is_refused_in_one_line(tmp_path: Path, harm: Callable[[bytes], bytes], message: str) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_reference("qwen3"), "qwen3")
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(str(path), cache_dir=tmp_path / "cache")
    assert "\n" not in caught.value.message


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", make_reference("qwen3"), "rwkv7")
    with pytest.raises(ConfigError, match=r"'rwkv7'.*gemma3, llama"):
        resolve(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache")


def test_a_tensor_that_the_architecture_has_no_place_for_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.ffn_gate_inp.weight": np.zeros((2, 2), dtype=np.float32)}
    write_gguf(tmp_path / "tiny.gguf", make_reference("qwen3"), "qwen3", extra_tensors=extra)
    with pytest.raises(ConfigError, match=r"blk\.0\.ffn_gate_inp\.weight"):
        resolve(str(tmp_path / "tiny.gguf"), cache_dir=tmp_path / "cache")


def test_a_set_of_files_is_read_whole_through_any_of_them(tmp_path: Path) -> None:
    reference = make_reference("qwen3")
    write_gguf(tmp_path / "tiny-00001-of-00003.gguf", reference, "qwen3", num_files=3)
    tensors = load_file(converted(tmp_path / "tiny-00002-of-00003.gguf", tmp_path / "out") / "model.safetensors")
    for name, tensor in reference.state_dict().items():
        torch.testing.assert_close(tensors[name], tensor, atol=0, rtol=0)
    (tmp_path / "tiny-00003-of-00003.gguf").unlink()
    with pytest.raises(ConfigError, match=r"tiny-00003-of-00003\.gguf is missing.*set of 3"):
        resolve(str(tmp_path / "tiny-00001-of-00003.gguf"), cache_dir=tmp_path / "cache")
