"""Chat templates by name, for models that carry none: `--chat-template NAME`, or a file of Jinja.

Stdlib only. The texts follow the models' published formats; the engine renders them in a sandbox.
"""

from __future__ import annotations

from pathlib import Path

from aserve.errors import ConfigError

# A transcript, for base models. It ends after the colon: most vocabularies begin a word with its space.
_PLAIN = """\
{{- bos_token or '' -}}
{%- for message in messages -%}
{%- if message['role'] in ('system', 'developer') -%}
{{- message['content'] + '\\n\\n' -}}
{%- else -%}
{{- message['role'] | capitalize + ':' + (' ' + message['content'] if message['content'] else '') + '\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- 'Assistant:' -}}
{%- endif -%}
"""

_CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""

_LLAMA3 = """\
{{- bos_token or '' -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + (message['content'] or '') | trim -}}
{{- '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}
{%- endif -%}
"""

# Gemma has no system role: its text opens the first user turn.
_GEMMA = """\
{{- bos_token or '' -}}
{%- set first = namespace(text='') -%}
{%- for message in messages -%}
{%- if message['role'] in ('system', 'developer') -%}
{%- set first.text = first.text + message['content'] + '\\n\\n' -%}
{%- else -%}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
{{- '<start_of_turn>' + role + '\\n' + first.text + (message['content'] or '') | trim + '<end_of_turn>\\n' -}}
{%- set first.text = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<start_of_turn>model\\n' -}}
{%- endif -%}
"""

# Mistral's instruct format, where a system text opens the next user turn.
_MISTRAL = """\
{{- bos_token or '' -}}
{%- set first = namespace(text='') -%}
{%- for message in messages -%}
{%- if message['role'] in ('system', 'developer') -%}
{%- set first.text = first.text + message['content'] + '\\n\\n' -%}
{%- elif message['role'] == 'assistant' -%}
{{- ' ' + (message['content'] or '') + (eos_token or '') -}}
{%- else -%}
{{- '[INST] ' + first.text + message['content'] + ' [/INST]' -}}
{%- set first.text = '' -%}
{%- endif -%}
{%- endfor -%}
"""

_ALPACA = """\
{{- bos_token or '' -}}
{%- for message in messages -%}
{%- if message['role'] in ('system', 'developer') -%}
{{- message['content'] + '\\n\\n' -}}
{%- elif message['role'] == 'assistant' -%}
{{- '### Response:\\n' + (message['content'] or '') + (eos_token or '') + '\\n\\n' -}}
{%- else -%}
{{- '### Instruction:\\n' + message['content'] + '\\n\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '### Response:\\n' -}}
{%- endif -%}
"""

TEMPLATES = {
    "alpaca": _ALPACA,
    "chatml": _CHATML,
    "gemma": _GEMMA,
    "llama3": _LLAMA3,
    "mistral": _MISTRAL,
    "plain": _PLAIN,
}


def chat_template(name_or_file: str) -> str:
    """The Jinja text of a built-in name or a file. Raises ConfigError where it is neither."""
    if name_or_file in TEMPLATES:
        return TEMPLATES[name_or_file]
    try:
        return Path(name_or_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(TEMPLATES)
        raise ConfigError(
            f"--chat-template {name_or_file}: neither a readable file ({error}) nor one of {names}",
            param="chat_template",
        ) from None
