"""An asyncio-native streaming server framework for language models.

The public names; each is imported when first used, so that `import aserve` stays quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aserve.beams import Beam, BeamSearch
    from aserve.chat_template import ChatMessage
    from aserve.client import ChatDelta, Client, ToolCallDelta
    from aserve.config import EngineConfig
    from aserve.constraint import StructuredOutput
    from aserve.engine import Engine
    from aserve.errors import (
        AserveError,
        AuthenticationError,
        ConfigError,
        ContextLengthError,
        DeadlineError,
        EngineDeadError,
        InvalidRequestError,
        MediaTypeError,
        NotFoundError,
        OverloadedError,
        RequestFailedError,
        RequestTooLargeError,
        TooManyRequestsError,
    )
    from aserve.llm import LLM
    from aserve.metrics import EngineStats, Metrics
    from aserve.plan import TokenLogprobs, WorkerInfo
    from aserve.profiling import profiled
    from aserve.request import Completion, Delta, FinishReason, SamplingParams, Timeline, Usage
    from aserve.search import beam_search
    from aserve.stream import SlowReader, Stream
    from aserve.tokenizer import Tokenizer

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AserveError",
    "AuthenticationError",
    "Beam",
    "BeamSearch",
    "ChatDelta",
    "ChatMessage",
    "Client",
    "Completion",
    "ConfigError",
    "ContextLengthError",
    "DeadlineError",
    "Delta",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "FinishReason",
    "InvalidRequestError",
    "MediaTypeError",
    "Metrics",
    "NotFoundError",
    "OverloadedError",
    "RequestFailedError",
    "RequestTooLargeError",
    "SamplingParams",
    "SlowReader",
    "Stream",
    "StructuredOutput",
    "Timeline",
    "TokenLogprobs",
    "Tokenizer",
    "TooManyRequestsError",
    "ToolCallDelta",
    "Usage",
    "WorkerInfo",
    "beam_search",
    "profiled",
]

_MODULES = {
    "Beam": "beams",
    "BeamSearch": "beams",
    "ChatDelta": "client",
    "ChatMessage": "chat_template",
    "Client": "client",
    "Completion": "request",
    "Delta": "request",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineStats": "metrics",
    "FinishReason": "request",
    "LLM": "llm",
    "Metrics": "metrics",
    "SamplingParams": "request",
    "SlowReader": "stream",
    "Stream": "stream",
    "StructuredOutput": "constraint",
    "Timeline": "request",
    "TokenLogprobs": "plan",
    "Tokenizer": "tokenizer",
    "TooManyRequestsError": "errors",
    "ToolCallDelta": "client",
    "Usage": "request",
    "WorkerInfo": "plan",
    "beam_search": "search",
    "profiled": "profiling",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'aserve' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"aserve.{_MODULES.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
