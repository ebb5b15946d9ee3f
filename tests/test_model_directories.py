"""`aserve generate DIR` and `aserve serve DIR` from a fresh process, for a tiny model of each family; and what either
says of a directory that cannot be served: one line, exit code 2, nothing left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from aserve import cli
from tests.models_util import TINY, make_reference
from tests.serving import TOKENIZER, VOCAB_SIZE, write_tokenizer
from tests.test_hf import CASES, make

ROOT = Path(__file__).resolve().parent.parent
FLAGS = ["--dtype", "float32", "--num-threads", "1", "--device", "cpu", "--kv-cache-memory", str(1 << 20)]
FLAGS += ["--max-model-len", "32"]  # within it Phi 3's short factors hold, as transformers has them for a short text
PROMPT = "hello there"
QUICK = {"gemma3", "opt", "qwen3moe"}  # of the families; the others when slow tests are asked for
QUICK_HF = {"olmo2"}


def every(cases: Any, quick: set[str]) -> list[Any]:
    return [pytest.param(case, marks=[] if case in quick else [pytest.mark.slow]) for case in sorted(cases)]


@pytest.fixture
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """transformers' model, and the directory it is saved in beside a tokenizer."""
    case = getattr(request, "param", "llama3")
    reference = make(case, vocab_size=VOCAB_SIZE) if case in CASES else make_reference(case, vocab_size=VOCAB_SIZE)
    reference.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    return reference, tmp_path


def expected_text(reference: Any, count: int) -> str:
    prompt = TOKENIZER.encode(PROMPT, add_special_tokens=True)
    with torch.inference_mode():
        whole = reference.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, use_cache=True)
    return TOKENIZER.decode(whole[0, len(prompt) :].tolist(), skip_special_tokens=True)


def run(*argv: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error, with line ends as they were written."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "aserve", *argv]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=110)
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize("directory", every([*TINY, *CASES], QUICK | QUICK_HF), indirect=True)
def test_generate_gives_transformers_text(directory: tuple[Any, Path]) -> None:
    reference, path = directory
    code, out, err = run("generate", str(path), PROMPT, "--max-tokens", "16", "--temperature", "0", *FLAGS)
    assert code == 0, err
    assert out.removesuffix("\n") == expected_text(reference, 16)


@pytest.mark.parametrize("directory", every([*TINY, *CASES], {"llama3"}), indirect=True)
def test_serve_answers_with_transformers_text(directory: tuple[Any, Path]) -> None:
    reference, path = directory
    child = subprocess.Popen(
        [sys.executable, "-m", "aserve", "serve", str(path), "--port", "0", *FLAGS],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert child.stderr is not None
        line = next(line for line in child.stderr if "listening on" in line)
        drain = threading.Thread(target=child.stderr.read, daemon=True)
        drain.start()
        url = line.partition("listening on ")[2].partition(",")[0]
        with httpx.Client(base_url=url, timeout=60) as client:
            while (health := client.get("/health")).status_code != 200:
                assert child.poll() is None, health.text
            body = {"model": path.name, "prompt": PROMPT, "max_tokens": 16, "temperature": 0}
            answer = client.post("/v1/completions", json=body).json()
        assert answer["choices"][0]["text"] == expected_text(reference, 16)
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
        drain.join(30)
    finally:
        child.kill()
        child.wait()
        if child.stderr is not None:
            child.stderr.close()


def change_config(**options: Any) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        file = path / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | options))

    return change


def lose_a_shard(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    save_file(tensors, path / "model-1-of-2.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model-1-of-2.safetensors") | {"lm_head.weight": "model-2-of-2"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


def truncate(path: Path) -> None:
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def quantize(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.int8)}, path / "model.safetensors", metadata={"format": "pt"})


def spoil(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def lose_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def take_another_tokenizer(path: Path) -> None:
    file = path / "tokenizer.json"
    stated = json.loads(file.read_text())
    vocab = stated["model"]["vocab"]
    vocab |= {f"word{index}": len(vocab) + index for index in range(1000)}
    file.write_text(json.dumps(stated))


def write(name: str, text: str) -> Callable[[Path], None]:
    return lambda path: (path / name).write_text(text) and None


def lose_the_tokenizer(path: Path) -> None:
    (path / "tokenizer.json").unlink()


HARMS: dict[str, tuple[Callable[[Path], None], str]] = {
    "architecture": (change_config(architectures=["T5Model"]), "is a T5Model, which neither"),
    "shape": (change_config(hidden_size=52), "by its config.json"),
    "missing shard": (lose_a_shard, "is missing from"),
    "truncated shard": (truncate, "is cut short"),
    "stored dtype": (quantize, "down_proj.weight is I8"),
    "no tokenizer": (lose_the_tokenizer, "has no tokenizer"),
    "another tokenizer": (take_another_tokenizer, "it is another model's"),
    "broken tokenizer": (write("tokenizer.json", "{}"), "cannot read the tokenizer"),
    "numbers": (change_config(num_attention_heads="four"), "'four' for 'num_attention_heads'"),
    "rotary numbers": (change_config(rope_parameters={"rope_type": "llama3"}), "does not state 'factor'"),
    "end id": (write("generation_config.json", '{"eos_token_id": "x"}'), "'x' for 'eos_token_id'"),
    "NaN": (spoil, "logits are not finite"),
}
# what transformers' own loading would pass over
HARMS_HF: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing tensor": (lose_a_tensor, "lacks model.layers.1.mlp.down_proj.weight"),
    "NaN": (spoil, "logits are not finite"),
    "shape": (change_config(intermediate_size=81), "by its config.json"),
    "size": (change_config(num_hidden_layers=5000), "describes a model of"),
    "stored dtype": (quantize, "down_proj.weight is I8"),
    "type": (change_config(model_type="llama"), "numbers of another model, llama"),
    "truncated shard": (truncate, "is cut short"),
}


@pytest.mark.parametrize("command", ["serve", "generate"])
@pytest.mark.parametrize("harm", sorted(HARMS))
def test_a_directory_that_cannot_be_served_is_one_line_and_exit_code_2(
    directory: tuple[Any, Path], harm: str, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    _, path = directory
    assert_refused(path, *HARMS[harm], command, capfd)


@pytest.mark.parametrize("directory", ["olmo2"], indirect=True)
@pytest.mark.parametrize("harm", sorted(HARMS_HF))
def test_a_directory_that_transformers_runs_is_refused_as_clearly(
    directory: tuple[Any, Path], harm: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert_refused(directory[1], *HARMS_HF[harm], "generate", capfd)


def assert_refused(
    path: Path, change: Callable[[Path], None], message: str, command: str, capfd: pytest.CaptureFixture[str]
) -> None:
    change(path)
    capfd.readouterr()
    ask = [str(path), "--port", "0", "--log-level", "error"] if command == "serve" else [str(path), PROMPT]
    assert cli.main([command, *ask, *FLAGS]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("aserve: error: ")
    assert message in line
    for thread in threading.enumerate():
        if thread.name == "aserve-model":  # it has said its last
            thread.join(30)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("flags", "message"),
    [(["--dtype", "int3"], "invalid choice: 'int3'"), (["--max-model-len", "999"], "longer than the model's 128")],
)
def test_a_wrong_option_is_one_line_from_a_fresh_process(
    directory: tuple[Any, Path], flags: list[str], message: str
) -> None:
    code, out, err = run("generate", str(directory[1]), PROMPT, *FLAGS, *flags)
    assert code == 2
    assert out == ""
    [line] = err.splitlines()
    assert line.startswith("aserve: error: ")
    assert message in line
