"""From an EngineConfig to what an engine runs on: files, tokenizer, executor.

Called by engine.py on a thread, since all of it blocks for seconds; this is the only place that imports the model's
side, and only when called. It starts nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from aserve import chat_template, tokenizer_files
from aserve.config import EngineConfig
from aserve.errors import ConfigError, InvalidRequestError
from aserve.executors import Executor, Runner
from aserve.request import SamplingParams
from aserve.tokenizer import Tokenizer

if TYPE_CHECKING:
    from aserve.models.files import ModelFiles

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # of generation_config.json
_log = logging.getLogger("aserve")


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of a model before it runs. `files` is None under an executor of the caller's."""

    name: str
    files: ModelFiles | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)  # SamplingParams the model's authors recommend
    end_token_ids: tuple[int, ...] = ()


def find(config: EngineConfig) -> Model:
    """Finds, and converts where needed, the model's files. Raises ConfigError."""
    from aserve.models.files import resolve

    files = resolve(
        config.model,
        tokenizer=config.tokenizer,
        load_format=config.load_format,
        need_tokenizer=not config.skip_tokenizer_init,
        allow_pickle=config.allow_pickle,
        trust_remote_code=config.trust_remote_code,
        progress=_log.info,
    )
    if files.notice:
        _log.info("%s", files.notice)
    ends = tokenizer_files.end_ids(files.generation_config, files.config)
    return Model(files.name, files, _recommended(files.generation_config), tuple(ends))


def _recommended(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling that a model's authors recommend, less what no request could ask for."""
    found: dict[str, Any] = {}
    for name in _SAMPLING:
        value = generation_config.get(name)
        if value is not None:
            try:
                SamplingParams(**{name: value})
            except InvalidRequestError as error:
                _log.warning("generation_config.json: %s; it is not used", error.message)
            else:
                found[name] = value
    return found


def load_tokenizer(model: Model, config: EngineConfig) -> Tokenizer | None:
    """The model's tokenizer, its chat template compiled; None where the engine works on token ids alone."""
    files = model.files
    if files is None or files.tokenizer is None or config.skip_tokenizer_init:
        return None
    own = files.chat_template
    if own is None and config.model is None:  # the demo model has none
        own = chat_template.BUILTIN["plain"]
    loaded = tokenizer_files.load(
        files.tokenizer,
        generation_config=files.generation_config,
        config=files.config,
        template=None if config.chat_template is None else chat_template.load(config.chat_template),
        fallback_template=own,
        trust_remote_code=config.trust_remote_code,
    )
    _check_vocabulary(loaded, files.config)
    loaded.warm()
    return loaded


def _check_vocabulary(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Raises ConfigError for a tokenizer of another model: a few tokens more than the model knows are common."""
    section = config.get("text_config")
    known = (section if isinstance(section, dict) else config).get("vocab_size")
    if isinstance(known, int) and tokenizer.vocab_size > known + known // 100 + 256:
        raise ConfigError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model knows {known}: it is another model's",
            param="tokenizer",
        )


def make_executor(model: Model, config: EngineConfig) -> Executor:
    """The default executor, which runs the model on a thread of its own."""
    from aserve.executors.thread import ThreadExecutor

    return ThreadExecutor(partial(_make_runner, model, config))


def _make_runner(model: Model, config: EngineConfig) -> Runner:
    """The runner of the model. Called on the model thread, which owns all that it imports and allocates."""
    from aserve.worker.runner import ModelRunner

    assert model.files is not None
    runner: Runner = ModelRunner(model.files, config)
    return runner
