"""`lmkit bench`: measure an engine, a server, its start-up, every kernel; draw and compare the results."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer
from lmkit.api import ConfigError, UnknownName
from lmkit_cli.options import plugin_host, with_config
from lmkit_cli.settings import Sourced
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from lmkit_bench.engine import BenchEngine
    from lmkit_bench.result import Metric, Result
    from lmkit_bench.stats import Slo
    from lmkit_bench.workload import Prompt

HELP = """Measure lmkit, or any server that speaks the OpenAI API.

Every measurement prints a table and, with --output, writes a JSON file with the raw samples, the machine, versions, the
commit and the options: `lmkit bench plot` draws such files, `lmkit bench compare` says what changed between two.

A number alone says little: machines differ by a third from hour to hour. Compare what ran side by side.
"""
app = typer.Typer(help=HELP, no_args_is_help=True, add_completion=False)

Input = Annotated[int, typer.Option("--input", "-i", min=1, help="prompt length in tokens")]
Output = Annotated[int, typer.Option("--output-tokens", "-n", min=1, help="tokens to generate for each prompt")]
Rounds = Annotated[int, typer.Option("--rounds", "-r", min=1, help="repetitions, after one that warms up")]
Prefix = Annotated[int, typer.Option("--prefix", min=0, help="tokens at the start that all prompts share")]
Seed = Annotated[int, typer.Option("--bench-seed", help="of the random prompts and arrivals")]
Dataset = Annotated[
    Path | None,
    typer.Option("--dataset", help='prompts from a file: ShareGPT, or JSON lines {"prompt": TEXT}, {"token_ids": []}'),
]
File = Annotated[Path | None, typer.Option("--output", "-o", help="result file (JSON)", show_default=False)]


def measuring(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a subcommand that also takes every engine option."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        command = with_config(function)
        app.command(name, cls=command.command_class)(command)
        return function

    return register


# ------------------------------------------------------------------------------------------------- in this process


@measuring("latency")
def latency(
    settings: Sourced,
    num_input: Input = 32,
    num_output: Output = 64,
    batch: Annotated[int, typer.Option("--batch", "-b", min=1, help="prompts run together")] = 1,
    rounds: Rounds = 5,
    output: File = None,
) -> None:
    """Time one batch: first token, prefill, decode. The engine runs in this process and gets token ids.

    Example: lmkit bench latency ./my-model --input 128 --output-tokens 64 --batch 16
    """
    from lmkit_bench.engine import latency as measure

    with _engine(settings) as engine:
        with _bar("rounds", rounds + 1) as advance:
            metrics = measure(engine, num_input, num_output, batch, rounds, advance)
        title = f"latency: {engine.facts.model}, batch {batch}, {num_input} in, {num_output} out"
        flags = {"input": num_input, "output": num_output, "batch": batch, "rounds": rounds}
        _finish("latency", title, metrics, {**flags, **_engine_flags(settings)}, output, _chosen(engine))


@measuring("throughput")
def throughput(
    settings: Sourced,
    num_prompts: Annotated[int, typer.Option("--num-prompts", "-p", min=1, help="requests handed over at once")] = 64,
    num_input: Input = 128,
    num_output: Output = 64,
    prefix: Prefix = 0,
    dataset: Dataset = None,
    rounds: Rounds = 1,
    bench_seed: Seed = 0,
    output: File = None,
) -> None:
    """Hand over many prompts at once, and see how long they take together. No server takes part.

    Example: lmkit bench throughput ./my-model --num-prompts 128 --input 512 --prefix 256
    """
    from lmkit_bench.engine import throughput as measure
    from lmkit_bench.workload import random_prompts, read_dataset

    prompts = read_dataset(dataset, num_output)[:num_prompts] if dataset else None
    with _engine(settings) as engine:
        vocabulary = engine.vocabulary
        prompts = prompts or random_prompts(
            num_prompts, num_input, num_output, prefix=prefix, seed=bench_seed, vocabulary=vocabulary
        )
        with _bar("rounds", rounds) as advance:
            metrics = measure(engine, engine.tokenized(prompts), rounds, advance)
        title = f"throughput: {engine.facts.model}, {len(prompts)} prompts"
        flags = {
            "num_prompts": len(prompts), "input": num_input, "output": num_output, "prefix": prefix, "seed": bench_seed,
            "dataset": str(dataset or ""), "rounds": rounds,
        }  # fmt: skip
        _finish("throughput", title, metrics, {**flags, **_engine_flags(settings)}, output, _chosen(engine))


@measuring("kernels")
def kernels(
    settings: Sourced,
    only: Annotated[str, typer.Option("--only", help="glob over the names of cases")] = "*",
    keep: Annotated[
        bool, typer.Option("--save", help="let auto choose by what was measured, on this machine, from now on")
    ] = False,
    output: File = None,
) -> None:
    """Measure every kernel that could run the model, on its shapes, beside the limits of the machine.

    Read bandwidth and multiply-adds per second are measured in the same run; `share` is the part of the limit that a
    kernel reaches: of bandwidth where its bytes take longer, of arithmetic where its multiplications do.

    With --save the order of attention backends and kernels for linears that could do the same work is kept, for this
    device, in the file that LMKIT_MEASURED names; `lmkit plan` says where it decided. Remove the file to forget it.

    Example: lmkit bench kernels ./my-model --only 'linear* 1x*'
    """
    from lmkit.plugins.platforms import choose_platform

    from lmkit_bench.kernels import all_cases, run_cases
    from lmkit_bench.limits import Limits
    from lmkit_bench.ranking import names_of, ranking, save
    from lmkit_bench.result import Metric

    limits, console = Limits(), Console(stderr=True)
    cases = all_cases(settings.config, plugin_host(settings), only)
    with console.status("resolving") as status:
        measured = run_cases(cases, limits, status.update)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("kernel", overflow="fold")
    for name in ("time", "GB/s", "GFLOP/s", "share of the limit"):
        table.add_column(name, justify="right")
    for m in measured:
        share = limits.share(m.case, m.seconds)
        shown = f"{share:.0%}" if share is not None else ""
        rates = (f"{m.case.bytes / m.seconds / 1e9:.1f}", f"{m.case.flops / m.seconds / 1e9:.0f}")
        table.add_row(m.case.name, _quantity(m.seconds, "s"), *rates, shown)
    out = Console(highlight=False)
    out.print(table)
    peaks = ", ".join(f"{name} {value / 1e9:.0f} GFLOP/s" for name, value in limits.flops.items())
    out.print(f"limits: read {limits.read / 1e9:.1f} GB/s, {peaks}")
    if keep:
        host = plugin_host(settings)
        found = ranking(measured, names_of(host))
        file = save(choose_platform(host, settings.config.wants("platform"))[1], found)
        for kind, names in found.items():
            out.print(f"{kind}: {', '.join(names)}")
        out.print(f"kept in {file}")
    metrics = {m.case.name: Metric("s", "lower", m.samples) for m in measured}
    details = {
        "limits": {"read": limits.read, "flops": limits.flops},
        "shares": {m.case.name: limits.share(m.case, m.seconds) for m in measured},
    }
    flags = {"only": only, **_engine_flags(settings)}
    _finish("kernels", f"kernels: {settings.config.model.model}", metrics, flags, output, details, show=False)


@app.command("parsers")
def parsers(
    only: Annotated[str, typer.Option("--only", help="glob over the names of formats")] = "*",
    rounds: Rounds = 5,
    output: File = None,
) -> None:
    """Time the tool and reasoning parsers: a long answer in each format, in deltas of 1 and of 100 tokens.

    Microseconds per token, on one core. No model is needed.

    Example: lmkit bench parsers --only 'qwen*'
    """
    from lmkit_cli.settings import gather

    from lmkit_bench.parsers import DELTAS, measure_parsers
    from lmkit_bench.result import Metric

    measured = list(measure_parsers(plugin_host(gather({})), only, rounds))
    if not measured:
        raise ConfigError(f"no parser matches {only!r}", fix="lmkit plugins list")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("kind", "format", *(f"us/token, deltas of {size}" for size in DELTAS)):
        table.add_column(name, justify="right" if "us" in name else "left")
    metrics: dict[str, Metric] = {}
    for m in measured:
        table.add_row(m.kind, m.name, *(f"{median(m.seconds[size]) * 1e6:.2f}" for size in DELTAS))
        metrics |= {f"{m.kind} {m.name}, deltas of {n}": Metric("s", "lower", s) for n, s in m.seconds.items()}
    Console(highlight=False).print(table)
    _finish("parsers", "parsers, seconds per token", metrics, {"only": only}, output, show=False)


# ---------------------------------------------------------------------------------------------------- over HTTP


@measuring("serve")
def serve(
    settings: Sourced,
    url: Annotated[str | None, typer.Option(help="a running server; default: one is started from the options")] = None,
    served_model: Annotated[str, typer.Option("--request-model", help="model to ask for; default: its first")] = "",
    api_key: Annotated[str, typer.Option(help="key of the server; also LMKIT_API_KEY")] = "",
    concurrency: Annotated[str, typer.Option("--concurrency", "-c", help="closed loop: clients, like 1,16,32")] = "",
    rate: Annotated[str, typer.Option("--rate", help="open loop: arrivals per second, like 0.5,1,2")] = "",
    num_prompts: Annotated[
        int | None, typer.Option("--num-prompts", "-p", min=1, help="requests per run; default: 2 per client, or 32")
    ] = None,
    num_input: Input = 512,
    num_output: Output = 64,
    prefix: Prefix = 0,
    dataset: Dataset = None,
    slo: Annotated[str, typer.Option(help="limits in ms that goodput counts by: ttft:2000,tpot:100,e2e:30000")] = "",
    find_rate: Annotated[bool, typer.Option("--find-rate", help="search the greatest rate that keeps --slo")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="ask /v1/chat/completions, with texts")] = False,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="answers of full length: a field that not every server takes")
    ] = False,
    bench_seed: Seed = 0,
    output: File = None,
) -> None:
    """Load a server and time its answers: TTFT, TPOT, ITL, end to end, throughput, goodput.

    A closed loop (--concurrency) has so many clients, each of which waits for its answer before it asks again. An open
    loop (--rate) sends at random times, whoever waits: it shows the queueing that a closed loop hides. TTFT is from
    sending to the first token, TPOT the mean time per later token, ITL the gap between two events of the stream.

    Example: lmkit bench serve ./my-model --concurrency 1,16,32
    Example: lmkit bench serve --url http://localhost:8000 --rate 2 --slo ttft:1000,tpot:100 --find-rate
    """
    from lmkit_bench.client import Client
    from lmkit_bench.serve import Load, run_loads
    from lmkit_bench.server import lmkit_serve
    from lmkit_bench.workload import random_prompts, random_texts, read_dataset

    api_key = api_key or settings.environment.switch("LMKIT_API_KEY")
    loads = [Load("concurrency", x) for x in _numbers("--concurrency", concurrency, whole=True)]
    loads += [Load("rate", x) for x in _numbers("--rate", rate)]
    loads = loads or [Load("concurrency", 1), Load("concurrency", 16)]
    if (limits := _slo(slo)) is None and find_rate:
        raise ConfigError("--find-rate needs limits", fix="--slo ttft:1000,tpot:100")
    data = read_dataset(dataset, num_output) if dataset else None

    def prompts(load: Load, number: int) -> Sequence[Prompt]:
        """New ones for every load, so that none finds the prefix of another; a file is gone round."""
        count = num_prompts or (2 * int(load.value) if load.kind == "concurrency" else 32)
        if data is not None:
            return [data[i % len(data)] for i in range(count)]
        make = random_texts if chat else random_prompts
        return make(count, num_input, num_output, prefix=prefix, seed=bench_seed * 1000 + number)

    def measure(address: str) -> dict[str, Metric]:
        total = sum(len(prompts(load, i)) for i, load in enumerate(loads))
        whole = ignore_eos or url is None  # our own server knows the field
        client = Client(address, model=served_model, api_key=api_key, chat=chat, ignore_eos=whole)
        with _bar("requests", total) as advance:
            run = run_loads(client, loads, prompts, slo=limits, seed=bench_seed, advance=advance, find=find_rate)
            return asyncio.run(run)

    flags: dict[str, Any] = {
        "concurrency": concurrency, "rate": rate, "num_prompts": num_prompts, "input": num_input,
        "output": num_output, "prefix": prefix, "dataset": str(dataset or ""), "slo": slo, "seed": bench_seed,
        "chat": chat, "ignore_eos": ignore_eos,
    }  # fmt: skip
    details: dict[str, Any] = {}
    if url:
        title, metrics = f"serve: {url}", measure(url)
    else:
        title = f"serve: {settings.config.model.model}"
        with lmkit_serve(settings) as server:
            with Console(stderr=True).status("starting the server"):
                details["ready after"] = server.wait_ready()
            metrics = measure(server.url)
            details["resident bytes"] = server.memory()
        flags |= _engine_flags(settings)
    _finish("serve", title, metrics, flags, output, details)


@measuring("startup")
def startup(
    settings: Sourced,
    rounds: Rounds = 3,
    num_input: Input = 32,
    output: File = None,
) -> None:
    """Start `lmkit serve`, ask for one token, stop it: every phase, and what they sum to.

    The first start, which may read the weights from disk, is not counted.

    Example: lmkit bench startup ./my-model --rounds 5
    """
    from lmkit_bench.client import first_token
    from lmkit_bench.result import Metric
    from lmkit_bench.server import lmkit_serve
    from lmkit_bench.server import startup as measure
    from lmkit_bench.workload import random_prompts

    (prompt,) = random_prompts(1, num_input, 1)
    runs = []
    with _bar("starts", rounds + 1) as advance:
        for _ in range(rounds + 1):
            runs.append(measure(lmkit_serve(settings), lambda url: first_token(url, prompt)))
            advance()
    runs = runs[1:]
    names = dict.fromkeys(name for run in runs for name, _ in run.phases)
    metrics = {name: Metric("s", "lower", [dict(run.phases).get(name, 0.0) for run in runs]) for name in names}
    metrics["sum of the phases"] = Metric("s", "lower", [sum(dict(run.phases).values()) for run in runs])
    metrics["wall time"] = Metric("s", "lower", [run.seconds for run in runs])
    metrics["resident"] = Metric("B", "lower", [float(run.resident) for run in runs])
    title = f"startup: {settings.config.model.model}"
    _finish("startup", title, metrics, {"rounds": rounds, "input": num_input, **_engine_flags(settings)}, output)


# ------------------------------------------------------------------------------------------------ files and figures


@app.command("plot")
def plot(
    files: Annotated[list[Path], typer.Argument(help="result files", metavar="FILE...")],
    output: Annotated[Path, typer.Option("--output", "-o", help="picture: .png, .svg or .pdf")] = Path("bench.png"),
    as_pareto: Annotated[
        bool, typer.Option("--pareto", help="tokens per second of all users over those of one, a point for each load")
    ] = False,
) -> None:
    """Draw results: over concurrency or rate where there are several, else as bars. Needs matplotlib.

    Example: lmkit bench plot before.json after.json -o both.svg
    """
    from lmkit_bench.plot import pareto
    from lmkit_bench.plot import plot as over_load
    from lmkit_bench.result import read

    draw = pareto if as_pareto else over_load
    draw([read(file) for file in files], [file.stem for file in files], output)
    typer.echo(str(output))


@app.command("compare")
def compare(
    old: Annotated[Path, typer.Argument(help="result file", metavar="A")],
    new: Annotated[Path, typer.Argument(help="result file", metavar="B")],
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="a metric that is worse by more than this part is a regression")
    ] = 0.05,
) -> None:
    """Say what changed from A to B, with the spread; exit status 1 when something got worse beyond the threshold.

    A ratio comes with the interval it lies in nine times out of ten, from resampling. A metric counts as worse when the
    whole interval says so.

    Example: lmkit bench compare before.json after.json --threshold 0.1
    """
    from lmkit_bench.compare import compare as changes_of
    from lmkit_bench.compare import differences
    from lmkit_bench.result import read

    a, b = read(old), read(new)
    changes = changes_of(a, b)
    console = Console(highlight=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("metric", "A", "B", "B / A", ""):
        table.add_column(name, justify="left" if name in ("metric", "") else "right")
    worse = [change for change in changes if change.regressed(threshold)]
    for change in changes:
        verdict = "[red]worse[/]" if change in worse else "[green]better[/]" if change.gain.low > 1 else ""
        unit = change.old.unit
        table.add_row(
            change.name,
            _quantity(change.old.median, unit),
            _quantity(change.new.median, unit),
            str(change.ratio),
            verdict,
        )
    console.print(table)
    for line in differences(a, b):
        console.print(f"[yellow]not the same[/] {line}", soft_wrap=True)
    if worse:
        console.print(f"{len(worse)} of {len(changes)} metrics are worse by more than {threshold:.0%}")
        raise typer.Exit(1)


@app.command("make-checkpoint")
def make_checkpoint(
    shape: Annotated[
        str, typer.Argument(help="the shape of a released model, for example qwen2-0.5b", metavar="SHAPE")
    ],
    directory: Annotated[Path, typer.Argument(help="where to write it", metavar="DIR")],
) -> None:
    """Write a checkpoint with random weights and a tokenizer whose every id has a text: something to measure with.

    Example: lmkit bench make-checkpoint qwen2-0.5b /tmp/qwen2-0.5b
    """
    from lmkit_bench.shapes import SHAPES, byte_tokenizer, shaped_checkpoint

    if shape not in SHAPES:
        raise UnknownName("shape", shape, SHAPES)
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty", fix="choose a new directory")
    with Console(stderr=True).status(f"writing {shape}"):
        byte_tokenizer(shaped_checkpoint(shape, directory), vocab_size=SHAPES[shape][1]["vocab_size"])
    typer.echo(str(directory))


# -------------------------------------------------------------------------------------------------------- helpers


def _finish(
    kind: str,
    title: str,
    metrics: dict[str, Metric],
    flags: dict[str, Any],
    output: Path | None,
    details: dict[str, Any] | None = None,
    *,
    show: bool = True,
) -> None:
    """Prints the figures; writes the file that was asked for."""
    from lmkit_bench.result import make_result, write

    result = make_result(kind, title, metrics, flags, details)
    if show:
        show_result(result)
    if output is not None:
        write(result, output)
        typer.echo(str(output), err=True)


def show_result(result: Result) -> None:
    """Median and spread of each metric; percentiles where there are samples enough."""
    from lmkit_bench.serve import summary

    console = Console(highlight=False)
    console.print(f"[bold]{result.title}[/]")
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = ("mean", "p50", "p90", "p99")
    for name in ("metric", *columns):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for name, metric in result.metrics.items():
        found = summary(metric)
        shown = columns if len(metric.samples) > 1 else ("mean",)
        table.add_row(name, *(_quantity(found[c], metric.unit) for c in shown))
    console.print(table)
    machine = result.machine
    console.print(f"[dim]{machine.processor}, {machine.cores} cores, {result.created}, commit {result.commit}[/]")


def _quantity(value: float, unit: str) -> str:
    """Seconds as s or ms or us, bytes as MiB, the rest as they are."""
    if unit == "s":
        factor, name = (1, "s") if value >= 1 else (1e3, "ms") if value >= 1e-3 else (1e6, "us")
        return f"{value * factor:.2f} {name}"
    if unit == "B":
        return f"{value / 2**20:.0f} MiB"
    return f"{value:.2f} {unit}"


def _numbers(option: str, text: str, *, whole: bool = False) -> list[float]:
    """Positive numbers, comma between. Raises ConfigError naming the option."""
    try:
        values = [int(part) if whole else float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = [0.0]
    if any(not 0 < value < 1e6 for value in values):
        kind = "whole numbers" if whole else "numbers"
        raise ConfigError(f"{option}: cannot read {text!r}", fix=f"write positive {kind}, for example 1,16,32")
    return list(values)


def _slo(text: str) -> Slo | None:
    """ "ttft:1000,tpot:100" in milliseconds. Raises ConfigError."""
    from lmkit_bench.stats import Slo

    if not text:
        return None
    limits = {}
    for part in text.split(","):
        name, _, value = part.partition(":")
        if name not in ("ttft", "tpot", "e2e"):
            raise UnknownName("SLO", name, ("ttft", "tpot", "e2e"), fix="--slo ttft:1000,tpot:100")
        (limits[name],) = _numbers("--slo", value) or [0.0]
    return Slo(**{name: value / 1e3 for name, value in limits.items()})


def _engine_flags(settings: Sourced) -> dict[str, Any]:
    """The engine options that are not defaults."""
    from lmkit.config import EngineConfig, to_dict

    default = to_dict(EngineConfig())
    flags: dict[str, Any] = {}
    for key, value in to_dict(settings.config).items():
        if value != default.get(key):
            if isinstance(value, dict) and isinstance(default.get(key), dict):
                flags |= {f"{key}.{k}": v for k, v in value.items() if v != default[key].get(k)}
            else:
                flags[key] = value
    return flags


def _chosen(engine: Any) -> dict[str, Any]:
    """Which implementation of each kind ran, and what start-up took."""
    return {
        "chosen": {
            f"{c.kind} {c.component}".strip(): c.name for c in engine.resolved.choices if "fallback" not in c.why
        },
        "startup": dict(engine.facts.phases),
        "weight bytes": engine.facts.weight_bytes,
    }


@contextmanager
def _engine(settings: Sourced) -> Iterator[BenchEngine]:
    """The engine of the configuration; the bar of its start is gone before anything else is printed."""
    from lmkit_cli.progress import StartBar

    from lmkit_bench.engine import BenchEngine

    with StartBar() as bar:
        engine = BenchEngine(settings.config, plugin_host(settings), bar)
    with engine:
        yield engine


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on stderr where that is a terminal; each call of the yielded function is one step."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
