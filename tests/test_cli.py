"""The command line: what it loads, what its flags make, how it ends."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import routes.server
from aserve import cli
from aserve.config import EngineConfig
from tests.serving import LLAMA

ROOT = Path(__file__).resolve().parent.parent


def served(monkeypatch: pytest.MonkeyPatch, *argv: str) -> tuple[EngineConfig, routes.server.ServerOptions]:
    """What `aserve serve ARGV` would serve."""
    calls: list[Any] = []

    def serve(config: EngineConfig, options: routes.server.ServerOptions) -> int:
        calls.append((config, options))
        return 0

    monkeypatch.setattr(routes.server, "serve", serve)
    assert cli.main(["serve", *argv]) == 0
    [call] = calls
    return call  # type: ignore[no-any-return]


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["generate", "--help"], ["models", "--help"]])
def test_help_loads_no_torch_and_no_web_framework(argv: Sequence[str]) -> None:
    code = (
        "import sys; from aserve.cli import main\n"
        f"try: main({argv!r})\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "heavy = {'torch', 'transformers', 'starlette', 'uvicorn', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "usage: aserve" in done.stdout


def test_every_engine_option_has_a_flag_and_help() -> None:
    fields = {field.name for field in dataclasses.fields(EngineConfig)} - {"model"}
    assert set(cli._ENGINE_HELP) == fields


def test_flags_make_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [
        *("dir", "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "8"),
        *("--max-num-batched-tokens", "256", "--block-size", "32", "--num-gpu-blocks-override", "100"),
        *("--no-enable-prefix-caching", "--seed", "7", "--gpu-memory-utilization", "0.5", "--swap-space", "0"),
        *("--load-format", "dummy", "--attention-backend", "torch", "--enforce-eager", "--max-queue", "9"),
        *("--chat-template", "chatml", "--policy", "fcfs"),
    ]
    config, _ = served(monkeypatch, *flags)
    assert config == EngineConfig(
        model="dir",
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        block_size=32,
        num_gpu_blocks_override=100,
        enable_prefix_caching=False,
        seed=7,
        gpu_memory_utilization=0.5,
        swap_space=0.0,
        load_format="dummy",
        attention_backend="torch",
        enforce_eager=True,
        max_queue=9,
        chat_template="chatml",
        policy="fcfs",
    )


def test_no_flags_make_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    config, options = served(monkeypatch)
    assert config == EngineConfig()
    assert options == routes.server.ServerOptions()


def test_http_flags_make_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = [
        *("--host", "0.0.0.0", "--port", "0", "--served-model-name", "a", "--served-model-name", "b"),
        *("--api-key", "k", "--api-key", "l", "--cors-origin", "*", "--max-body-bytes", "10"),
        *("--drain-timeout", "1.5", "--ping-interval", "2", "--log-level", "warning", "--app", "m:f"),
        *("--root-path", "/llm", "--ssl-keyfile", "key", "--ssl-certfile", "cert"),
    ]
    _, options = served(monkeypatch, *flags)
    assert options == routes.server.ServerOptions(
        host="0.0.0.0",
        port=0,
        served_model_names=("a", "b"),
        api_keys=("k", "l"),
        cors_origins=("*",),
        max_body_bytes=10,
        drain_timeout=1.5,
        ping_interval=2.0,
        log_level="warning",
        root_path="/llm",
        ssl_keyfile="key",
        ssl_certfile="cert",
        app="m:f",
    )


def test_keys_come_from_files_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a\n\n  b \n")
    _, options = served(monkeypatch, "--api-key", "c", "--api-key-file", str(tmp_path / "keys"))
    assert options.api_keys == ("c", "a", "b")
    _, options = served(monkeypatch, "--api-key-file", str(tmp_path / "keys"))
    assert (options.api_keys, options.served_model_names, options.cors_origins) == (("a", "b"), (), ())
    for text in ("\n", "# of team A\na\n", "#a\n", "a b\n"):
        (tmp_path / "keys").write_text(text)
        assert cli.main(["serve", "--api-key-file", str(tmp_path / "keys")]) == 2


@pytest.mark.parametrize(
    "argv",
    [
        ["serve", "--api-key-file", "/nonexistent"],
        ["serve", "--port", "0", "--ssl-keyfile", "key.pem"],
        ["serve", "--block-size", "3"],
        ["serve", "--max-n", "129"],
        ["serve", "--ping-interval", "0"],
        ["serve", "--port", "70000"],
        ["serve", "/nonexistent", "--port", "0"],
        ["generate", "a", "b", "c"],
        ["generate", "/nonexistent", "hello"],
        ["bench", "latency", "--model", "/nonexistent"],
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    *logged, message = capsys.readouterr().err.splitlines(keepends=True)
    assert message.startswith("aserve: error: ")
    assert not any("Traceback" in line for line in logged)
    assert message.count("\n") == 1


def test_models_lists_what_can_be_served_and_what_is_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "aserve" / "abc-v1").mkdir(parents=True)
    (tmp_path / "aserve" / "abc-v1" / "config.json").write_text('{"model_type": "some_type"}')
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["models"]) == 0
    out = capsys.readouterr().out
    for expected in ("gguf", "LlamaForCausalLM", "abc-v1", "some_type"):
        assert expected in out


def test_generate_streams_the_text_of_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--load-format", "dummy", "--dtype", "float32", "--num-gpu-blocks-override", "16", "--num-threads", "1"]
    asked = ["generate", str(LLAMA), "hello", "--max-tokens", "4", "--temperature", "0", *flags]
    assert cli.main(asked) == 0
    first = capsys.readouterr().out
    assert len(first) >= 2
    assert cli.main([*asked, "--chat"]) == 0
    assert capsys.readouterr().out != first


def test_ctrl_c_ends_generate_cleanly() -> None:
    flags = ["--load-format", "dummy", "--dtype", "float32", "--num-gpu-blocks-override", "16", "--num-threads", "1"]
    endless = ["--max-tokens", "200", "--temperature", "0"]
    child = subprocess.Popen(
        [sys.executable, "-m", "aserve", "generate", str(LLAMA), "q", *endless, *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        _, err = child.communicate(timeout=30)
    finally:
        child.kill()
    assert child.returncode == 130
    assert err.strip() == b""


def test_a_request_that_is_refused_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--load-format", "dummy", "--dtype", "float32", "--num-gpu-blocks-override", "16", "--num-threads", "1"]
    assert cli.main(["generate", str(LLAMA), "x" * 500, *flags]) == 1
    assert "context" in capsys.readouterr().err


def test_a_command_is_asked_for() -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([])
    assert caught.value.code == 2
