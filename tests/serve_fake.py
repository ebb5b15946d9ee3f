"""`aserve serve` over the fake model, in a process of its own:
python -m tests.serve_fake PORT DRAIN_TIMEOUT STEP_SECONDS MAX_MODEL_LEN.

A step takes time here, so that signals arrive while streams are open.
"""

from __future__ import annotations

import logging
import sys
import time

from aserve import Engine, EngineConfig
from aserve.executors.thread import ThreadExecutor
from routes.server import ServerOptions, bind, serve_engine
from tests.serving import TOKENIZER, VOCAB_SIZE, EchoRunner


def main(port: int, drain_timeout: float, step_seconds: float, max_model_len: int) -> int:
    logging.basicConfig(level="INFO")
    runner = EchoRunner(
        num_gpu_blocks=4096,
        block_size=16,
        max_model_len=max_model_len,
        vocab_size=VOCAB_SIZE,
        before_step=lambda plan: time.sleep(step_seconds),
    )
    engine = Engine(EngineConfig(model="fake"), executor=ThreadExecutor(runner), tokenizer=TOKENIZER)
    with bind("127.0.0.1", port) as listener:
        print(listener.getsockname()[1], flush=True)
        return serve_engine(engine, listener, ServerOptions(drain_timeout=drain_timeout, tool_call_parser="hermes"))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
