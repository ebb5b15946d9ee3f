"""The benchmark's workload is fixed, its sums are right, and its commands run against a real server and engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from aserve import cli
from aserve.bench import client, percentiles, workload
from tests.serving import LLAMA


def test_the_workload_is_the_same_everywhere() -> None:
    assert workload.lengths(3) == [(101, 137), (244, 124), (499, 39)]
    items = workload.chat(1000, 128256)
    assert sum(len(item.prompt) for item in items) == 192_422
    assert sum(item.output_len for item in items) == 184_694
    assert items[0].prompt[:3] == [17621, 74616, 111084]
    assert workload.chat(2, 128256, seed=1) != items[:2]


def test_percentiles_take_an_element_of_the_list() -> None:
    found = percentiles([0.1 * i for i in range(100)], 1e3, 1)
    assert found == {"p50": 5000.0, "p90": 9000.0, "p99": 9900.0, "mean": 4950.0, "max": 9900.0}
    assert percentiles([]) == {}


def test_the_summary_counts_errors_and_wrong_lengths() -> None:
    times = [
        client.Times(0.0, 3, [0.5, 0.6, 0.7], 3),
        client.Times(0.0, 5, [0.5, 1.0], 4),
        client.Times(0.0, 2, [], None, "500"),
    ]
    found = client.summary(times, rate=None, concurrency=2)
    assert (found["requests"], found["errors"], found["wrong_length"]) == (2, 1, 1)
    assert found["seconds"] == 1.0
    assert found["output_tokens_per_s"] == 8.0
    assert found["ttft_ms"]["p50"] == 500.0
    assert found["itl_ms"]["max"] == 500.0


@pytest.mark.parametrize("kind", ["latency", "throughput", "serve"])
def test_help_names_every_flag(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["bench", kind, "--help"])
    assert "--json-out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "flags", "tokens"),
    [
        ("latency", ["--batch-size", "2", "--input-len", "5", "--output-len", "4", "--n", "2", "--num-iters", "2"], 16),
        ("throughput", ["--num-prompts", "2", "--num-iters-warmup", "0"], 137 + 124),
    ],
)
def test_an_engine_is_measured_and_reported(kind: str, flags: list[str], tokens: int, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    (model / "config.json").write_text(json.dumps(config))
    out = tmp_path / "out.json"
    common = ["--model", str(model), "--load-format", "dummy", "--dtype", "float32", "--device", "cpu"]
    limits = ["--num-threads", "1", "--kv-cache-memory", str(1 << 24)]
    assert cli.main(["bench", kind, *common, *limits, *flags, "--json-out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["benchmark"] == kind
    assert result["output_tokens_per_s"] * result["median_s"] == pytest.approx(tokens, rel=0.05)


@pytest.mark.parametrize("argv", [["latency", "--num-iters", "0"], ["throughput", "--num-prompts", "-1"]])
def test_a_count_of_nothing_is_refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *argv])
    assert caught.value.code == 2
    assert "must be at least 1" in capsys.readouterr().err


def test_a_benchmark_that_the_engine_refuses_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--load-format", "dummy", "--dtype", "float32", "--num-gpu-blocks-override", "16", "--num-threads", "1"]
    assert cli.main(["bench", "latency", "--model", str(LLAMA), "--input-len", "100000", *flags]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("aserve: error: the prompt has 100000 tokens")
