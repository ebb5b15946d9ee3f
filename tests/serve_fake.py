"""`aserve serve` over the fake model, in a process of its own: python -m tests.serve_fake PORT [JSON].

The JSON object has fields of ServerOptions and of EngineConfig, and `fault`: what goes wrong once a request's prompt
begins with "!" (see FaultyRunner). A step takes `step` seconds (5 ms), so that signals arrive while streams are open;
a client is gone after `deaf_seconds` in which it takes nothing. SIGUSR1 prints how many tasks the loop has.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import signal
import sys
import time
from collections import deque
from typing import Any

from aserve import Engine, EngineConfig
from aserve.executors.thread import ThreadExecutor
from routes import protocol
from routes.logs import logging_to_stderr
from routes.server import bind, serve_engine
from routes.server_options import ServerOptions
from tests.faults.runner import FaultyRunner
from tests.serving import TOKENIZER, VOCAB_SIZE


def main(port: int, given: dict[str, Any]) -> int:
    fault, step = given.pop("fault", None), given.pop("step", 0.005)
    protocol.DEAF_SECONDS = given.pop("deaf_seconds", protocol.DEAF_SECONDS)
    max_model_len = given.pop("max_model_len", 4096)
    names = {field.name for field in dataclasses.fields(ServerOptions)}
    options = ServerOptions(
        **{"tool_call_parser": "hermes"} | {name: value for name, value in given.items() if name in names}
    )
    config = EngineConfig(model="fake", **{name: value for name, value in given.items() if name not in names})
    runner = FaultyRunner(
        fault=fault,
        num_gpu_blocks=4096,
        block_size=16,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        before_step=lambda plan: time.sleep(step),
    )
    runner.plans = deque(maxlen=1)  # type: ignore[assignment]  # tests in one process look at all of them
    if config.max_num_seqs is not None:
        most = max(config.max_num_seqs, runner.info.max_num_batched_tokens)
        runner.info = dataclasses.replace(runner.info, max_num_seqs=config.max_num_seqs, max_num_batched_tokens=most)
    engine = Engine(config, executor=ThreadExecutor(runner), tokenizer=TOKENIZER)
    signal.signal(signal.SIGUSR1, lambda *_: print(len(asyncio.all_tasks(engine._loop)), flush=True))
    with logging_to_stderr(options.log_level, options.log_format), bind("127.0.0.1", port) as listener:
        print(listener.getsockname()[1], flush=True)
        return serve_engine(engine, listener, options)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}))
