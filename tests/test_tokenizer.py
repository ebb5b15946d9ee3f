"""Tokenizers and chat templates: like transformers' where it counts, refusing what it cannot take."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from aserve import chat_template
from aserve.errors import ConfigError, ContextLengthError, InvalidRequestError
from aserve.tokenizer import Tokenizer
from aserve.tokenizer_files import from_backend, load
from tests.engine_util import word_tokenizer

TOOL_TEMPLATE = "{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
TEMPLATES = {
    "chatml": chat_template.BUILTIN["chatml"],
    "gemma": chat_template.BUILTIN["gemma"],
    "plain": chat_template.BUILTIN["plain"],
    "tools": "{% if tools %}" + TOOL_TEMPLATE + "{% endif %}{% for m in messages %}{{ m.content }}\n{% endfor %}",
    "controls": (
        "{%- set ns = namespace(count=0) -%}\n"
        "{% for m in messages %}\n  {% if m.role == 'system' %}{% continue %}{% endif %}\n"
        "    {% set ns.count = ns.count + 1 %}[{{ ns.count }}:{{ m['role'] }}] {{ m.content | trim }}\n"
        "{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}{{ eos_token }}"
    ),
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
    "json": "{# content #}{{ messages | tojson(indent=2) }}{{ dict(a=1).a }}{{ custom | default('none') }}",
}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hello <b>&amp;</b> 🎉"}],
    [
        {"role": "system", "content": " be brief "},
        {"role": "user", "content": "2+2?\n"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "sure?"},
        {"role": "assistant", "content": [{"type": "text", "text": "yes, "}]},
    ],
    [{"role": "user", "content": "go"}, {"role": "assistant", "content": "and so  "}],
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"ä": {}}}}}]


def write(directory: Path, options: dict[str, Any] | None = None, backend: Backend | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (backend or byte_backend()).save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(options or {}))
    return directory


def byte_backend() -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    return backend


# against transformers


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("ending", ["bare", "prompt", "continue"])
def test_templates_render_as_in_transformers(
    name: str, chat: list[dict[str, Any]], tools: list[dict[str, Any]] | None, ending: str
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    options = {"add_generation_prompt": ending == "prompt", "continue_final_message": ending == "continue"}
    variables = {"bos_token": "<s>", "eos_token": "</s>", "custom": "x"}
    try:
        expected, _ = render_jinja_template([chat], tools=tools, chat_template=TEMPLATES[name], **variables, **options)
    except ValueError:  # a message that cannot be continued
        with pytest.raises(InvalidRequestError, match="continued"):
            chat_template.render(TEMPLATES[name], chat, tools=tools, variables=variables, **options)
    else:
        ours = chat_template.render(TEMPLATES[name], chat, tools=tools, variables=variables, **options)
        assert ours == expected[0]


@pytest.mark.parametrize("add_bos", [None, True, False])
@pytest.mark.parametrize("add_eos", [None, True])
def test_special_tokens_are_added_as_in_transformers(
    tmp_path: Path, add_bos: bool | None, add_eos: bool | None
) -> None:
    import transformers

    stated = {"add_bos_token": add_bos, "add_eos_token": add_eos}
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "rstrip": False, "normalized": False},
        **{name: value for name, value in stated.items() if value is not None},
    }
    backend = byte_backend()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    directory = write(tmp_path, options, backend)
    ours, theirs = load(directory), transformers.AutoTokenizer.from_pretrained(directory)
    for text in ("hello", "a </s> b", ""):
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special)
    ids = ours.encode("hello </s>")
    for skip in (True, False):
        assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.bos_token_id == theirs.bos_token_id


# loading


def test_end_ids_come_from_tokenizer_and_generation_config(tmp_path: Path) -> None:
    directory = write(tmp_path, {"eos_token": "</s>"})
    assert load(directory).eos_token_ids == (257,)
    assert load(directory, generation_config={"eos_token_id": [257, 259]}).eos_token_ids == (257, 259)
    assert load(directory, generation_config={}, config={"eos_token_id": 259}).eos_token_ids == (257, 259)
    assert load(directory / "tokenizer.json").eos_token_ids == (257,)


def test_a_template_is_found_wherever_it_is_kept(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "x"}]
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    listed = load(write(tmp_path / "list", {"chat_template": named}))
    assert (listed.render_chat(chat), listed.render_chat(chat, tools=TOOLS)) == ("D", "T")
    directory = write(tmp_path / "one", {"chat_template": "config"})
    assert load(directory).render_chat(chat) == "config"
    (directory / "chat_template.jinja").write_text("side file")
    assert load(directory, fallback_template="fallback").render_chat(chat) == "side file"
    assert load(directory, template="explicit").render_chat(chat) == "explicit"
    assert load(directory).render_chat(chat, template="call") == "call"
    bare = write(tmp_path / "bare")
    assert not load(bare).has_chat_template
    assert load(bare, fallback_template="fallback").render_chat(chat) == "fallback"


def test_an_option_names_a_template_a_file_or_is_one(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("from a file")
    assert chat_template.load(str(file)) == "from a file"
    assert chat_template.load("chatml") == chat_template.BUILTIN["chatml"]
    assert chat_template.load("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ConfigError, match="chatml"):
        chat_template.load("nonsense")


def test_a_broken_tokenizer_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="tokenizer"):
        load(tmp_path)
    with pytest.raises(ConfigError, match="tokenizer"):
        load(tmp_path / "nowhere" / "tokenizer.json")


def test_stored_truncation_and_padding_are_off(tmp_path: Path) -> None:
    backend = byte_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=32)
    assert len(load(write(tmp_path, None, backend)).encode("a" * 10)) == 10


# chat


def test_a_chat_prompt_has_one_bos() -> None:
    tokenizer = word_tokenizer(chat_templates=chat_template.BUILTIN["plain"])
    text = tokenizer.render_chat([{"role": "user", "content": "hi"}])
    assert text == "<s>User: hi\n\nAssistant:"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id or 0) == 1
    assert tokenizer.encode("hi").count(tokenizer.bos_token_id or 0) == 1


def test_a_model_without_a_template_says_how_to_give_one() -> None:
    with pytest.raises(InvalidRequestError, match=r"--chat-template FILE\|NAME"):
        word_tokenizer().render_chat([{"role": "user", "content": "hi"}])


def test_a_template_that_refuses_speaks_for_itself() -> None:
    refusing = "{{ raise_exception('System role not supported') }}"
    with pytest.raises(InvalidRequestError, match="System role not supported"):
        chat_template.render(refusing, CHATS[1])
    for broken in ("{% if %}", "{{ messages[9].content }}", "{{ 1 / 0 }}", "{{ messages + 1 }}", "{{ nothing.x.y }}"):
        with pytest.raises(InvalidRequestError, match="chat template"):
            chat_template.render(broken, CHATS[0])


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_the_sandbox(escape: str) -> None:
    with contextlib.suppress(InvalidRequestError):
        assert chat_template.render(escape, CHATS[0]) == ""  # an unsafe attribute renders as nothing


def test_null_fields_are_absent() -> None:
    template = "{% for m in messages %}{{ m.content }}|{{ 'content' in m }};{% endfor %}"
    chat = [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert chat_template.render(template, chat) == "|False;"


def test_what_cannot_be_continued_is_refused() -> None:
    user = [{"role": "user", "content": "x"}]
    for template, chat in (("fixed", user), ("{{ messages }}", [{"role": "assistant", "tool_calls": []}])):
        with pytest.raises(InvalidRequestError):
            chat_template.render(template, chat, add_generation_prompt=False, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="exclude"):
        chat_template.render("x", user, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match="at least one"):
        chat_template.render("x", [])


# limits


@settings(deadline=None)
@given(text=st.text(max_size=60), limit=st.integers(1, 20))
def test_only_text_that_cannot_fit_is_refused_by_its_length(text: str, limit: int) -> None:
    """The bound never refuses what encodes into few enough tokens."""
    for tokenizer in BOUNDED:
        ids = tokenizer.encode(text, add_special_tokens=False)
        try:
            assert tokenizer.encode(text, False, max_tokens=limit) == ids
            assert len(ids) <= limit
        except ContextLengthError as error:
            assert len(ids) > limit
            assert error.num_prompt <= len(ids)


def sentencepiece(normalizer: Any) -> Tokenizer:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "▁▁": 257, "aa": 258, "a": 259, "▁aa": 260}
    backend = Backend(models.BPE(vocab, [("a", "a"), ("▁", "▁")], byte_fallback=True))
    backend.normalizer = normalizer
    return from_backend(backend)


BOUNDED = [
    from_backend(byte_backend()),
    sentencepiece(normalizers.Replace(" ", "▁")),
    sentencepiece(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    sentencepiece(normalizers.NFC()),
]


def test_the_length_bound_is_known_where_it_exists_only() -> None:
    assert [tokenizer._longest_token for tokenizer in BOUNDED] == [12, 6, 6, 24]
    assert sentencepiece(normalizers.Strip())._longest_token is None  # drops any number of spaces
    unknown = Backend(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    assert from_backend(unknown)._longest_token is None  # one token for any word
    greedy = byte_backend()
    greedy.add_tokens([AddedToken("<sep>", lstrip=True)])
    assert from_backend(greedy)._longest_token is None  # swallows spaces before it


def test_text_far_over_the_limit_is_refused_without_encoding_it() -> None:
    tokenizer = from_backend(byte_backend())
    tokenizer._backend = None  # type: ignore[assignment] # would raise if it were asked
    with pytest.raises(ContextLengthError, match="at least") as refusal:
        tokenizer.encode("a" * 2_000_000, max_tokens=1000)
    assert refusal.value.limit == 1000
    assert refusal.value.num_prompt == 2_000_000 // 12 + 1


def test_a_lone_surrogate_is_refused() -> None:
    for text in ("\ud800", "a" * 5000 + "\udfff"):
        with pytest.raises(InvalidRequestError, match="surrogate"):
            from_backend(byte_backend()).encode(text)


def test_one_tokens_text_and_bytes() -> None:
    tokenizer = word_tokenizer()
    half = tokenizer.encode("é", False)[0]
    assert (tokenizer.token_text(half), tokenizer.token_bytes(half)) == ("\ufffd", b"\xc3")
    assert (tokenizer.token_text(2), tokenizer.token_bytes(2)) == ("</s>", b"</s>")
    assert tokenizer.token_text(999) == " w999"
