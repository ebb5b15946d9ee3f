"""The `aserve` command: serve, generate, models, bench, simulate. Importing it loads no torch: `--help` is quick.

A subcommand is one function that adds its parser and sets `run`; `SUBCOMMANDS` lists them. Engine flags are made from
EngineConfig's fields, so that an option is written once; those of the server are named as ServerOptions' fields. The
only importer of routes.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import logging
import sys
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from aserve import bench
from aserve.config import EngineConfig, flag
from aserve.errors import AserveError, ConfigError
from aserve.simulation.command import add_simulate

Add = Callable[["argparse._SubParsersAction[argparse.ArgumentParser]"], None]

_ENGINE_HELP = {
    "tokenizer": "a directory or tokenizer.json to use in place of the model's own",
    "chat_template": "Jinja file or built-in name, in place of the model's own",
    "skip_tokenizer_init": "token ids in, token ids out",
    "device": "where the model runs",
    "dtype": "of weights, activations and KV",
    "load_format": "dummy: random weights",
    "model_impl": "whose code runs the model: a decoder of aserve's, or transformers' over aserve's attention",
    "allow_pickle": "read pickled weights (*.bin) where there are no safetensors: tensors only, never code",
    "trust_remote_code": "run Python files that come with the model: only for authors you trust",
    "max_model_len": "context in tokens (default: the model's own)",
    "max_num_seqs": "sequences that run at once",
    "max_num_batched_tokens": "tokens one step computes at most",
    "block_size": "token slots per KV block",
    "num_gpu_blocks_override": "KV blocks of the device pool, in place of what memory allows",
    "enable_prefix_caching": "share the KV of equal prompt beginnings",
    "gpu_memory_utilization": "share of the card's memory for weights, activations and KV",
    "kv_cache_memory": "bytes of KV cache (CPU default: 1 GiB)",
    "swap_space": "GiB of host memory for preempted requests' blocks",
    "preemption": "what happens to a preempted request's blocks",
    "policy": "scheduling policy: fcfs, priority, fair, or pkg.module:Class",
    "attention_backend": "the attention kernels",
    "enforce_eager": "no CUDA graphs",
    "seed": "of dummy weights; a request has its own, or fresh random bits",
    "max_queue": "waiting requests; one more is refused with 503",
    "max_queue_per_tenant": "waiting requests of one API key or user; one more is refused with 429 (default: any)",
    "max_n": "choices a request may ask for",
    "num_threads": "CPU threads of the model (default: the cores this process may use)",
    "depth": "steps in flight (default: 2 on CUDA, 1 on CPU)",
    "step_timeout": "seconds after which a step that has not ended marks the engine dead",
}

_METAVARS = {"tokenizer": "PATH", "chat_template": "FILE|NAME"}


def main(argv: Sequence[str] | None = None) -> int:
    """Parses and runs; the exit code. An error of ours is one line on stderr: 2 for a wrong option, else 1."""
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except AserveError as error:
        print(f"aserve: error: {error.message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:  # what ran has been cancelled and stopped by now
        print(file=sys.stderr)
        return 130


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line: the usage of some fifty options would push it off the screen."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"aserve: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="aserve", description="An asyncio-native server for language models."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for add in SUBCOMMANDS:
        add(commands)
    return parser


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per EngineConfig field; `model` is positional. Flags not given are absent from the namespace."""
    group = parser.add_argument_group("engine")
    hints = typing.get_type_hints(EngineConfig)
    for field in dataclasses.fields(EngineConfig):
        if field.name == "model":
            continue
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS, "help": _help(field)}
        kind = _value_type(hints[field.name])
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is Literal:
            options["choices"] = typing.get_args(kind)
        else:
            options.update(type=kind, metavar=_METAVARS.get(field.name) or {int: "N", float: "X", str: "NAME"}[kind])
        group.add_argument(flag(field.name), **options)


def _value_type(hint: Any) -> Any:
    """X of X | None; any other hint as it is."""
    if isinstance(hint, types.UnionType):
        return next(arm for arm in typing.get_args(hint) if arm is not types.NoneType)
    return hint


def _help(field: dataclasses.Field[Any]) -> str:
    text = _ENGINE_HELP[field.name].replace("%", "%%")
    return text if field.default is None else f"{text} (default: {field.default})"


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The EngineConfig of parsed flags. Raises ConfigError."""
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    given = {name: value for name, value in vars(args).items() if name in names}
    return EngineConfig(**given)


# serve


def _add_serve(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("serve", help="serve a model over HTTP", description="Serve a model over HTTP.")
    parser.add_argument("model", nargs="?", help="a directory, a .gguf file or a hub id (default: the demo model)")
    http = parser.add_argument_group("http")
    http.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    http.add_argument("--port", type=int, default=8000, help="port to listen on; 0 picks one (default: %(default)s)")
    many: dict[str, Any] = {"action": "append", "default": []}  # argparse copies it
    http.add_argument(
        "--served-model-name",
        dest="served_model_names",
        **many,
        metavar="NAME",
        help="a name clients may use; repeatable",
    )
    http.add_argument("--api-key", dest="api_keys", **many, metavar="KEY", help="a key clients must send; repeatable")
    http.add_argument("--api-key-file", **many, metavar="FILE", help="a file with one key a line; repeatable")
    http.add_argument(
        "--max-requests-per-key", type=int, metavar="N", help="that an API key may have in flight (default: any number)"
    )
    http.add_argument("--cors-origin", dest="cors_origins", **many, metavar="ORIGIN", help="repeatable; * is any")
    http.add_argument("--root-path", default="", metavar="PATH", help="where a proxy mounts the server")
    http.add_argument("--ssl-keyfile", metavar="FILE", help="serve HTTPS with this private key")
    http.add_argument("--ssl-certfile", metavar="FILE", help="and this certificate")
    http.add_argument("--max-body-bytes", type=int, default=8 << 20, metavar="N", help="(default: %(default)s)")
    http.add_argument(
        "--ping-interval",
        type=float,
        default=15.0,
        metavar="S",
        help="between comments on a stream (default: %(default)s)",
    )
    _add_stream_flags(http)
    http.add_argument("--log-requests", action="store_true", help="log the beginning of each body, prompts included")
    http.add_argument(
        "--tool-call-parser", metavar="NAME", help="how the model writes tool calls: hermes, llama3_json or mistral"
    )
    http.add_argument(
        "--reasoning-parser", metavar="NAME", help="how the model writes its thoughts: deepseek_r1, qwen3 or think"
    )
    http.add_argument(
        "--drain-timeout",
        type=float,
        default=30.0,
        metavar="S",
        help="seconds that open requests get after SIGTERM (default: %(default)s)",
    )
    _add_log_flags(http)
    http.add_argument(
        "--app", metavar="pkg.module:create_app", help="your own create_app(engine) -> ASGI app, in place of aserve's"
    )
    http.add_argument(
        "--profile",
        metavar="DIR",
        help="write there, at the end, where the time of each step went, and a trace of a hundred steps",
    )
    add_engine_flags(parser)
    parser.set_defaults(run=_serve)


def _add_log_flags(http: argparse._ArgumentGroup) -> None:
    http.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info", help="(default: %(default)s)"
    )
    http.add_argument(
        "--log-format", choices=("text", "json"), default="text", help="of the lines on stderr (default: %(default)s)"
    )
    http.add_argument(
        "--otlp-traces-endpoint", metavar="URL", help="send OpenTelemetry spans there (OTLP over HTTP; extra [otel])"
    )


def _add_stream_flags(http: argparse._ArgumentGroup) -> None:
    http.add_argument(
        "--resume-grace",
        type=float,
        default=0.0,
        metavar="S",
        help="seconds that a stream runs on for a client that was cut off (default: %(default)s, it is cancelled)",
    )
    http.add_argument(
        "--max-resume-grace",
        type=float,
        default=60.0,
        metavar="S",
        help="the most that a request may ask for with X-Resume-Grace (default: %(default)s)",
    )
    http.add_argument(
        "--journal-bytes",
        type=int,
        default=1 << 20,
        metavar="N",
        help="events kept of a stream that may be resumed (default: %(default)s)",
    )
    http.add_argument(
        "--slow-client",
        choices=("pause", "cancel", "coalesce"),
        default="coalesce",
        help="what happens to the stream of a client that is far behind (default: %(default)s)",
    )
    http.add_argument(
        "--max-unsent-bytes",
        type=int,
        default=1 << 20,
        metavar="N",
        help="text that may wait for a client before it is far behind (default: %(default)s)",
    )
    http.add_argument(
        "--exit-on-death",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end the process when the engine dies, for a supervisor to start it again",
    )


def _serve(args: argparse.Namespace) -> int:
    from routes.server import serve  # here, so that other commands never load a web framework
    from routes.server_options import ServerOptions

    args.api_keys = [*args.api_keys, *(key for file in args.api_key_file for key in _read_keys(file))]
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(ServerOptions)}
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return serve(engine_config(args), ServerOptions(**{**given, **lists}))


def _read_keys(file: str) -> list[str]:
    """The keys in a file, one a line.

    Raises ConfigError where there is none, which would mean a server without keys, and for a line that looks like a
    comment or a list, since its words would be keys.
    """
    try:
        keys = [line.strip() for line in Path(file).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--api-key-file {file}: {error}", param="api_key_file") from None
    if not keys:
        raise ConfigError(f"--api-key-file {file} holds no key", param="api_key_file")
    if any(len(key.split()) > 1 or key.startswith("#") for key in keys):
        raise ConfigError(f"--api-key-file {file} must hold one key a line and nothing else", param="api_key_file")
    return keys


# generate


def _add_generate(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "generate", help="continue a prompt on the terminal", description="Continue a prompt on the terminal."
    )
    parser.add_argument(
        "words", nargs="+", metavar="[MODEL] PROMPT", help="the prompt, after the model if not the demo's"
    )
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--temperature", type=float, metavar="X", help="0 is greedy (default: the model's)")
    parser.add_argument("--top-p", type=float, metavar="X")
    parser.add_argument("--top-k", type=int, metavar="N")
    parser.add_argument("--stop", action="append", metavar="TEXT", help="repeatable")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn under the chat template")
    add_engine_flags(parser)
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> int:
    if len(args.words) > 2:
        raise ConfigError("generate takes a prompt, or a model and a prompt; quote a prompt of several words")
    *model, prompt = args.words
    args.model = model[0] if model else None
    config = engine_config(args)
    logging.basicConfig(level="WARNING", format="%(message)s")
    logging.getLogger("aserve").setLevel("INFO" if config.model is None else "WARNING")  # the demo model's notice
    asyncio.run(_generate_async(args, config, prompt))
    return 0


async def _generate_async(args: argparse.Namespace, config: EngineConfig, prompt: str) -> None:
    from aserve import Engine, SamplingParams

    async with Engine(config) as engine:
        names = ("max_tokens", "temperature", "top_p", "top_k", "stop")
        given = {name: value for name in names if (value := getattr(args, name)) is not None}
        params = SamplingParams(**{**engine.default_sampling(), **given})
        if args.chat:
            stream = engine.chat([{"role": "user", "content": prompt}], params)
        else:
            stream = engine.generate(prompt, params)
        async with stream:
            async for delta in stream:
                print(delta.text, end="", flush=True)
        print()


# models


def _add_models(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "models", help="what can be served, and what is cached", description="What can be served, and what is cached."
    )
    parser.set_defaults(run=_models)


def _models(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.table import Table

    from aserve.models.cache import default_cache_dir
    from aserve.models.families import FAMILIES
    from aserve.models.gpt_families import GPT_FAMILIES

    console = Console()
    forms = Table("MODEL", "what it is", title="What aserve serves", title_justify="left")
    forms.add_row("(none)", "the demo model, Gemma 3 270m (extra \\[demo]; Gemma's terms of use apply)")
    forms.add_row("DIRECTORY", "Hugging Face layout: config.json, *.safetensors, tokenizer.json")
    forms.add_row("FILE.gguf", "converted once, then cached")
    forms.add_row("owner/name", "a hub id, where the network allows")
    console.print(forms)
    console.print("Architectures:", ", ".join(sorted({*FAMILIES, *GPT_FAMILIES})), highlight=False)
    cached = Table("directory", "type", "GB", title=f"Converted models in {default_cache_dir()}", title_justify="left")
    for config in sorted(default_cache_dir().glob("*/config.json")):
        size = sum(file.stat().st_size for file in config.parent.iterdir()) / 1e9
        cached.add_row(config.parent.name, str(json.loads(config.read_text()).get("model_type")), f"{size:.2f}")
    console.print(cached)
    return 0


# bench


def _add_bench(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    bench.add(commands, add_engine_flags, engine_config)


SUBCOMMANDS: list[Add] = [_add_serve, _add_generate, _add_models, _add_bench, add_simulate]
