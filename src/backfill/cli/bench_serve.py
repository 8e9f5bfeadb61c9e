"""``backfill bench serve``: put load on an OpenAI-compatible server and measure it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from backfill.bench.arrivals import ArrivalConfig
from backfill.bench.dataset import DatasetConfig
from backfill.bench.endpoint import EndpointConfig
from backfill.bench.output import OutputConfig, ReportConfig
from backfill.bench.serve import LoadConfig, ServeBenchmark
from backfill.cli.command import command
from backfill.cli.interrupts import interruptible
from backfill.cli.live import live_progress, note
from backfill.cli.plots import check_plot
from backfill.cli.startup import run_in_loop
from backfill.core.errors import ModelError

if TYPE_CHECKING:
    from backfill.generation.tokenizer import Tokenizer


def serve(
    server: EndpointConfig,
    dataset: DatasetConfig,
    arrival: ArrivalConfig,
    load: LoadConfig,
    report: ReportConfig,
    output: OutputConfig,
) -> None:
    """Send requests to an OpenAI-compatible server as they would arrive, and report its latencies.

    The API key is taken from OPENAI_API_KEY. Ctrl-C ends the run and keeps what was measured. Exit status: 0
    if a request completed, 1 if none did, 130 after Ctrl-C.
    """
    check_plot(output.plot)
    output.prepare()
    benchmark = ServeBenchmark(server, dataset, arrival, load, load_tokenizer, note)
    with interruptible():
        run, settings = run_in_loop(benchmark.run(lambda run: live_progress(run, output.disable_tqdm)))
        metrics = output.write(run, settings, report)
    if run.is_interrupted:
        raise SystemExit(130)
    if metrics.num_completed == 0:
        raise SystemExit(1)


app = command(
    serve,
    {
        "Server": "backend base_url host port endpoint model served_model_name header insecure "
        "request_timeout_sec ready_check_timeout_sec",
        "Requests": "ignore_eos temperature extra_body",
        "Dataset": "dataset_name dataset_path num_prompts input_len output_len max_total_len "
        "trace_seconds_per_unit trace_hash_block_tokens tokenizer seed",
        "Random prompts": "random_input_len random_output_len random_range_ratio random_length_law "
        "random_length_cv random_prefix_len",
        "Prompts that begin alike": "prefix_repetition_prefix_len prefix_repetition_suffix_len "
        "prefix_repetition_num_prefixes prefix_repetition_output_len",
        "Conversations": "multi_turn_num_turns multi_turn_first_input_len multi_turn_input_len "
        "multi_turn_output_len multi_turn_think_time multi_turn_think_time_law multi_turn_system_len",
        "Arrivals": "request_rate burstiness cv phases ramp_up_strategy ramp_up_start_rps ramp_up_end_rps "
        "self_timed max_concurrency probe_request_rate num_warmups",
        "Figures": "goodput ttft_slo tpot_slo percentile_metrics metric_percentiles",
        "Output": "json plot disable_tqdm save_result save_detailed append_result result_dir "
        "result_filename label metadata",
    },
    spellings={"disable_tqdm": "--no-progress"},
    many="header goodput metadata",
    prefix="BACKFILL_BENCH_",
)


def load_tokenizer(name: str) -> tuple[Tokenizer, int]:
    """The tokenizer of a folder, a known name or a hub id, and the size of its vocabulary.

    Raises: ModelError when it cannot be read.
    """
    from backfill.generation.tokenizer import Tokenizer
    from backfill.models.resolve import KNOWN_MODELS, resolve_model

    if name in KNOWN_MODELS:
        tokenizer = Tokenizer.from_folder(resolve_model(name))
    elif Path(name).is_dir():
        tokenizer = Tokenizer.from_folder(Path(name))
    else:
        tokenizer = _hub_tokenizer(name)
    return tokenizer, tokenizer.backend.get_vocab_size()


def _hub_tokenizer(name: str) -> Tokenizer:
    from transformers import AutoTokenizer

    from backfill.generation.tokenizer import Tokenizer

    try:
        return Tokenizer(AutoTokenizer.from_pretrained(name))
    except Exception as error:  # the library raises many kinds
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"The tokenizer {name!r} cannot be loaded: {reason}") from error
