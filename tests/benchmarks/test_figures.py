"""What benchmarks compute beside their measurements."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import fit_hardware_profiles as fit
import http_overhead
import in_process
import ipc
import peers
import pytest
import served
import step_profile
from machine_limits import floor_of

from backfill.core.config import EngineConfig
from backfill.core.counters import ClassCounters
from backfill.core.request import RequestId
from backfill.engine.messages import ClassStats, EngineStats, StepReport, StepStats, TokenOutput
from backfill.execution.create import create_torch_executor
from backfill.models.config import ModelConfig
from backfill.models.tensor_shapes import num_parameters
from tests.api.servers import TIMEOUT_S
from tests.models.tiny import save_tiny_model


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ('backfill:prefix_cache_queries_total{class="online"} 9\n', "no counter of prefix hits"),
        ('backfill:prefix_cache_hits_total{class="online"} 0\n'
         'backfill:prefix_cache_hits_total{class="offline"} 16\n', "16 prompt tokens came from"),
        ('backfill:prefix_cache_hits_total{class="online",tier="host"} 32\n', "32 prompt tokens came from"),
    ],
)  # fmt: skip
def test_figures_of_a_server_that_hit_its_cache_are_refused(
    monkeypatch: pytest.MonkeyPatch, metrics: str, message: str
) -> None:
    monkeypatch.setattr(served, "get", lambda port, path: metrics)
    with pytest.raises(SystemExit, match=message):
        served.check_no_prefix_hits(1)


def test_hits_of_an_engine_in_this_process_are_refused() -> None:
    in_process.check_no_prefix_hits([ClassCounters(num_prefix_queried_tokens=90), ClassCounters()])
    hit = ClassCounters(num_host_prefix_hit_tokens=16)
    with pytest.raises(SystemExit, match="16 prompt tokens came from the prefix cache"):
        in_process.check_no_prefix_hits([ClassCounters(), hit])


WORK = {"num_prompts": 4, "input_len": 32, "output_len": 8, "stream_len": 16}
# So much arithmetic that only bytes take time, and the reverse.
BYTES_BIND = {"matrix_gflop_s": 1e15, "read_gb_s": 1.0}
PRODUCTS_BIND = {"matrix_gflop_s": 1.0, "read_gb_s": 1e15}
FIGURES = {"batch_tok_s": 100.0, "stream_tok_s": 10.0, "first_token_s": 0.5}


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("model")
    save_tiny_model("llama", folder)
    return replace(ModelConfig.from_folder(folder), tie_word_embeddings=True)


def prints(text: str, *, then: str = "") -> peers.EngineCommand:
    return peers.EngineCommand([sys.executable, "-c", f"print({text!r}); {then}"], (), None)


def test_bytes_are_read_once_for_each_step_and_the_prefill_is_one(config: ModelConfig) -> None:
    floor = floor_of(config, BYTES_BIND, **WORK)
    weights_s = num_parameters(config) * 2 / 1e9
    kv_s = config.kv_bytes_per_token(2) / 1e9
    # Token 2 is computed with 33 tokens of context, the last, token n, with 32 + n - 1.
    assert floor["first_token_s"] == pytest.approx(weights_s)
    stream_s = 16 * weights_s + kv_s * sum(range(33, 32 + 16))
    assert floor["stream_tok_s"] == pytest.approx(16 / stream_s)
    batch_s = 8 * weights_s + 4 * kv_s * sum(range(33, 32 + 8))
    assert floor["batch_tok_s"] == pytest.approx(4 * (32 + 8) / batch_s)
    half = floor_of(config, BYTES_BIND, **WORK, bytes_per_weight=1)
    assert half["first_token_s"] == pytest.approx(weights_s / 2)


def test_products_count_each_token_once_and_logits_once_for_each_output(config: ModelConfig) -> None:
    floor = floor_of(config, PRODUCTS_BIND, **WORK, bytes_per_weight=0.7)
    embedding = config.vocab_size * config.hidden_size
    layers = num_parameters(config) - embedding
    flops = 2 * 4 * ((32 + 7) * layers + 8 * embedding)
    assert floor["batch_tok_s"] == pytest.approx(4 * (32 + 8) / (flops / 1e9))
    assert floor["first_token_s"] == pytest.approx(2 * (32 * layers + embedding) / 1e9)


def test_a_failure_costs_its_engine_its_round_and_nothing_else(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    marker = tmp_path / "ran"
    once = f"import pathlib; p = pathlib.Path({str(marker)!r}); p.exists() and exit('worn out'); p.touch()"
    engines = {
        "backfill": prints(json.dumps({**FIGURES, "first_token_samples_s": [0.5] * 5})),
        "fragile": prints(json.dumps({**FIGURES, "batch_tok_s": 50}), then=once),
        "absent": peers.EngineCommand(["/no/such/python"], (), None),
    }
    # The limits are measured by running this very file; let it answer at once.
    limits = tmp_path / "limits.py"
    limits.write_text(f"print('''{json.dumps({**BYTES_BIND, 'copy_gb_s': 1.0})}''')")
    monkeypatch.setattr(peers, "__file__", str(limits))
    result: dict[str, Any] = {
        "processor": "p",
        "cores": 2,
        "rounds": 2,
        "work": WORK,
        "bytes_per_weight": 0.7,
        "versions": {},
        "orders": [],
        "limits_of_rounds": [],
        "runs": {name: [] for name in engines},
        "failures": [],
    }
    for round_number in (1, 2):
        peers.run_round(round_number, engines, result, TIMEOUT_S)
    result |= peers.summary_of(result, config)
    assert [entry["round"] for entry in result["runs"]["fragile"]] == [1]
    assert [entry["round"] for entry in result["runs"]["backfill"]] == [1, 2]
    assert [(f["round"], f["engine"]) for f in result["failures"]] == [
        (1, "absent"),
        (2, "fragile"),
        (2, "absent"),
    ]
    assert result["orders"][1] == ["fragile", "absent", "backfill"]
    assert result["engines"].keys() == result["ranges"].keys() == {"backfill", "fragile"}
    assert result["is_complete"] is False
    capsys.readouterr()
    peers.print_report(result)
    report = capsys.readouterr().out
    assert "| fragile | 50 (50 to 50; ours 2.00 x)" in report
    assert "| absent | failed | failed | failed |" in report
    assert "first token of fragile: 1 a round, of ours 5" in report
    assert "FAILED in round 2: fragile: ended with 1: worn out" in report


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def stream(*payloads: bytes) -> bytes:
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in payloads) + b"0\r\n\r\n"


def read(response: bytes, num_tokens: int, size: int) -> float:
    """Read ``response``, sent ``size`` bytes at a time."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for start in range(0, len(response), size):
            writer.write(response[start : start + size])
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()

    async def run() -> float:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        try:
            return await http_overhead.read_stream(port, b"POST / HTTP/1.1\r\n\r\n", num_tokens)
        finally:
            server.close()

    return asyncio.run(run())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10_000])
def test_events_are_counted_wherever_reads_and_chunks_end(size: int) -> None:
    tokens = b'data: {"text": "data: "}\n\n' * 3
    response = stream(tokens[:4], tokens[4:40], tokens[40:], b"data: [DO", b"NE]\n\n")
    assert read(response, 3, size) > 0
    with pytest.raises(SystemExit, match="a stream ended after 3 events of 4"):
        read(response, 4, size)


def test_a_stream_without_its_end_and_a_refusal_are_failures() -> None:
    with pytest.raises(SystemExit, match="after 1 events"):
        read(stream(b"data: 1\n\n"), 1, 100)
    with pytest.raises(asyncio.IncompleteReadError):
        read(stream(b"data: 1\n\n")[:-4], 1, 100)
    with pytest.raises(SystemExit, match=r"not a stream: HTTP/1\.1 429"):
        read(b"HTTP/1.1 429 No\r\nContent-Length: 4\r\n\r\nbusy", 1, 100)


def test_floors_are_the_longer_of_bytes_and_products(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    lm_head = config.hidden_size * config.vocab_size
    even = {
        "read_gb_s": 1e-3,
        "matrix_gflop_s": 1e-2,
    }  # a weight is read in 2 us and takes 0.2 us of products
    floors = step_profile.floors_ms(tmp_path, 5, 10.0, even)
    assert floors["lm_head"] == pytest.approx(2e-3 * lm_head)
    assert step_profile.floors_ms(tmp_path, 40, 10.0, even)["lm_head"] == pytest.approx(40 * 0.2e-3 * lm_head)
    assert floors["attention"] == pytest.approx(5 * 10 * config.kv_bytes_per_token(2) / 1e6 * 1e3)
    decoder = sum(value for name, value in floors.items() if name.startswith("linear "))
    norms = config.hidden_size * (2 * config.num_layers + 1)
    tables = lm_head * (1 if config.tie_word_embeddings else 2)
    assert decoder == pytest.approx(2e-3 * (num_parameters(config) - tables - norms))


def test_a_report_goes_to_another_process_and_back() -> None:
    state = ClassStats(0, 0, ClassCounters())
    step = StepStats("online", 2, 0.01, 0.0)
    stats = EngineStats(state, state, 0.5, 0, 0.0, 0, step)
    report = StepReport([TokenOutput(RequestId(str(index)), 1000 + index) for index in range(64)], stats)
    figures = ipc.measure_ipc(report, repeats=20)
    assert figures["num_bytes"] > 64 * 4
    assert all(0 < figures[name] < 1 for name in ("encode_s", "decode_s", "round_trip_s"))


def test_a_step_is_timed_whole_and_by_part(tmp_path: Path) -> None:
    save_tiny_model("llama", tmp_path)
    executor = create_torch_executor(EngineConfig(model_dir=str(tmp_path), kv_gib=1 / 1024))
    whole = step_profile.profile_whole(executor, num_seqs=2, context=8, num_steps=2)
    assert 0 < whole["model_s"] < whole["step_s"]
    parts, step_s = step_profile.profile_parts(executor, num_seqs=2, context=8, num_steps=2)
    assert {"attention", "linear qkv", "lm_head", "sample", "plan", "commit"} <= parts.keys()
    assert 0 < sum(parts.values()) < step_s


def test_shares_of_the_devices_add_up_to_the_model() -> None:
    whole, part = (fit.operator_work(fit.OPT_30B, 100, num_devices) for num_devices in (1, 4))
    for name in ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj"):
        assert 4 * part[name].flops == whole[name].flops
        assert part[name].num_bytes < whole[name].num_bytes / 3
    assert part["input_layernorm"] == whole["input_layernorm"]


def test_a_layer_of_opt_has_no_gate_and_no_rotation() -> None:
    work = fit.operator_work(fit.OPT_13B, 1, 1)
    assert "attn_rope" not in work
    weights = sum(each.flops / 2 for each in work.values())
    assert weights == 12 * 5120**2
    llama = fit.operator_work(fit.LLAMA_2_7B, 1, 1)
    assert sum(each.flops / 2 for each in llama.values()) == 4 * 4096**2 + 3 * 4096 * 11008


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [(fit.OPT_13B, 12.85e9), (fit.OPT_30B, 29.97e9), (fit.LLAMA_2_7B, 6.74e9), (fit.LLAMA_3_8B, 8.03e9)],
)
def test_weights_are_as_many_as_published(shape: fit.TabledShape, parameters: float) -> None:
    assert shape.weight_bytes == pytest.approx(2 * parameters, rel=0.003)


def test_a_model_derived_from_itself_is_as_measured() -> None:
    measured = {8: dict.fromkeys(("emb", *fit.LAYER_OPERATORS), 1e-5)}
    derived = fit.derived_operators(fit.LLAMA_2_7B, fit.LLAMA_2_7B, 1, measured)
    assert derived[8] == pytest.approx(measured[8])
    assert fit.derivation_error(fit.LLAMA_2_7B, 1, measured, measured).p95 == pytest.approx(0.0)


def test_few_tokens_cost_their_weights_bytes_and_many_their_flops() -> None:
    measured = {n: dict.fromkeys(("emb", *fit.LAYER_OPERATORS), 1e-4) for n in (1, 4096)}
    derived = fit.derived_operators(fit.LLAMA_2_7B, fit.OPT_13B, 2, measured)
    weights_ratio = 5120 * 10240 / (4096 * 2 * 11008)
    for num_tokens in measured:  # with one token the bytes of the weights, with 4,096 the FLOPs
        assert derived[num_tokens]["mlp_up_proj"] == pytest.approx(1e-4 * weights_ratio, rel=1e-3)
    assert derived[1]["mlp_act"] == pytest.approx(1e-4 * 2 * 10240 / (3 * 11008))
    assert derived[1]["add"] == pytest.approx(1e-4 * 5120 / 4096)
    one, many = (fit.operator_work(fit.OPT_13B, n, 2)["mlp_up_proj"] for n in (1, 4096))
    assert one.roofline_s(fit.MEASURED_DEVICE) == one.num_bytes / fit.MEASURED_DEVICE.bandwidth
    assert many.roofline_s(fit.MEASURED_DEVICE) == many.flops / fit.PEAK_FLOPS


def test_a_model_on_one_device_needs_no_all_reduce(tmp_path: Path) -> None:
    table = tmp_path / "all_reduce.csv"
    table.write_text(
        "num_workers,devices_per_node,size,time_stats.all_reduce.median\n"
        "2,2,2048,0.02\n2,1,2048,9.0\n2,2,4096,0.01\n4,4,2048,0.5\n"
    )
    assert fit.read_all_reduce(table, 1) == ([], [])
    sizes, seconds = fit.read_all_reduce(table, 2)
    assert sizes == [2048, 4096]
    assert seconds == pytest.approx([1e-5, 1e-5])
    assert fit.read_all_reduce(table, 4)[1] == pytest.approx([5e-4])
