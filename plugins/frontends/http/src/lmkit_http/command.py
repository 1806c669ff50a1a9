"""`lmkit serve`: a model over HTTP."""

from __future__ import annotations

import gc
import json
import os
import time
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from lmkit.config import read_environment
from lmkit.engine.spawn import EngineProcess
from lmkit_cli.options import plugin_host, with_config
from lmkit_cli.settings import Sourced
from rich.console import Console

from lmkit_http.roles import with_role
from lmkit_http.settings import OPENABLE, ServerSettings
from lmkit_http.sharing import with_shares

if TYPE_CHECKING:
    from lmkit.api import Checkpoint, ModelInfo, ResolvedPlan
    from lmkit.engine.messages import EngineFacts

PANEL = "Server"
option = partial(typer.Option, rich_help_panel=PANEL)
ApiKeys = Annotated[list[str] | None, option(help="key that clients must send; repeatable; also LMKIT_API_KEY")]
AdminKeys = Annotated[
    list[str] | None,
    option(help="key that may also change the server (adapters, priority); repeatable; also LMKIT_ADMIN_KEY"),
]
OpenPaths = Annotated[list[str] | None, option(help=f"path that needs no key, of {', '.join(OPENABLE)}; repeatable")]
OpenPriority = Annotated[
    bool, option("--open-priority", help="every client may ask to be served before others (priority < 0)")
]
CorsOrigins = Annotated[
    list[str] | None, option(help="site whose pages may ask, such as http://localhost:3000, or '*'; repeatable")
]
UnknownFields = Annotated[
    Literal["warn", "refuse"],
    option(help="unknown fields of requests: warn drops them and names them in a header, refuse answers with 400"),
]


@with_config
def command(
    ctx: typer.Context,  # its object: an engine process that was started ahead, or None
    settings: Sourced,
    host: Annotated[str, option(help="address to listen on; localhost: 127.0.0.1 and ::1")] = "localhost",
    port: Annotated[int, option(help="port to listen on", min=0, max=65535)] = 8000,
    api_workers: Annotated[int, option(help="processes that answer HTTP before the one engine", min=1, max=64)] = 1,
    api_key: ApiKeys = None,
    admin_key: AdminKeys = None,
    open_path: OpenPaths = None,
    open_priority: OpenPriority = False,
    cors_origin: CorsOrigins = None,
    insecure: Annotated[bool, option("--insecure", help="allow a public address without a key")] = False,
    allowed_host: Annotated[
        list[str] | None, option(help="accepted Host header, .NAME with all below it; repeatable")
    ] = None,
    uds: Annotated[str, option(help="path of a Unix socket to listen on, instead of host and port")] = "",
    tls_cert: Annotated[str, option(help="PEM file: certificate with its chain; read again when it changes")] = "",
    tls_key: Annotated[str, option(help="PEM file: the key of the certificate")] = "",
    root_path: Annotated[str, option(help="where a site has this server, such as /llm behind a proxy")] = "",
    unknown_fields: UnknownFields = "warn",
    traces: Annotated[str, option(help="OpenTelemetry collector for traces: http://HOST:4318/v1/traces")] = "",
    profile_dir: Annotated[str, option(help="folder for recordings of steps: POST /start_profile, /stop_profile")] = "",
    keep_alive: Annotated[
        float, option(help="seconds that an idle connection is kept; longer than the proxy in front keeps it", min=1)
    ] = 75.0,
    drain_timeout: Annotated[float, option(help="seconds that running requests get after SIGTERM", min=0)] = 30.0,
    max_seconds: Annotated[
        float | None, option(help="seconds from a request to the end of its answer", min=0.001)
    ] = None,
    key_requests: Annotated[int | None, option(help="requests a minute of each key", min=1)] = None,
    key_tokens: Annotated[int | None, option(help="tokens a minute of each key", min=1)] = None,
    key_concurrent: Annotated[int | None, option(help="choices (prompts x n) of each key at once", min=1)] = None,
    role: Annotated[
        Literal["prefill", "decode"] | None,
        option(help="prefill: compute prompts for others; decode: get prompts from those; see `lmkit split`"),
    ] = None,
    peers: Annotated[
        str, option(help="prefill: HOST:PORT at which blocks are given; decode: where they are asked for, with commas")
    ] = "",
    explain: Annotated[
        bool, typer.Option("--explain", help="show why each part would be chosen, and do not serve")
    ] = False,
) -> None:
    """Serve a model over HTTP with the OpenAI API. Without MODEL it serves the built-in demo."""
    settings = with_role(settings, role, peers)
    environment = read_environment()
    key = environment.switch("LMKIT_API_KEY")
    keys = tuple(api_key or ([key] if key else ()))
    if explain:
        _explain(settings, keys)
        return
    python = _process_age()
    began = perf_counter() - python
    admin = environment.switch("LMKIT_ADMIN_KEY")
    server = ServerSettings(
        host=host,
        port=port,
        uds=uds,
        tls_cert=tls_cert,
        tls_key=tls_key,
        root_path=root_path,
        api_workers=api_workers,
        api_keys=keys,
        admin_keys=tuple(admin_key or ([admin] if admin else ())),
        open_paths=tuple(open_path or ()),
        open_priority=open_priority,
        cors_origins=tuple(cors_origin or ()),
        insecure=insecure,
        allowed_hosts=tuple(allowed_host or ()),
        keep_alive=keep_alive,
        drain_timeout=drain_timeout,
        unknown_fields=unknown_fields,
        max_seconds=max_seconds,
        key_requests=key_requests,
        key_tokens=key_tokens,
        key_concurrent=key_concurrent,
        traces=traces,
        profile_dir=profile_dir,
        served_names=settings.config.model.names,
    )
    with ctx.obj or EngineProcess() as process:
        _serve(settings, server, process, began, python)


command.examples = """[bold]Examples[/]

lmkit serve

lmkit serve Qwen/Qwen2.5-0.5B-Instruct --port 9000 --api-key secret --kv-memory 2GiB

lmkit serve ./my-model --attention flashinfer --attention.flashinfer.workspace_mb 256

lmkit serve ./my-model --explain
"""


def _explain(settings: Sourced, keys: tuple[str, ...]) -> None:
    from lmkit_cli.explanation import render
    from lmkit_cli.story import explain

    host = plugin_host(settings)
    render(explain(with_shares(settings, keys, host).config, host), Console(highlight=False))


def _serve(settings: Sourced, server: ServerSettings, process: EngineProcess, began: float, python: float) -> None:
    """Resolve; let the engine process build the engine; import the web framework beside it."""
    gc.disable()  # until the server is ready: what is made until then stays
    from lmkit.plugins.resolve import resolve

    host = plugin_host(settings)
    host.scan()
    settings = with_shares(settings, server.api_keys, host)
    scanned_at = perf_counter()
    resolution = resolve(settings.config, host)
    resolved_at = perf_counter()
    process.order(settings.config, *resolution[:2])
    from lmkit_cli.progress import StartBar

    from lmkit_http.run import serve

    console = Console(highlight=False, stderr=True)
    bar = StartBar()

    def ready(llm: Any, url: str) -> list[tuple[str, float]]:  # an AsyncLLM
        import lmkit_cli.screen as screen
        from lmkit.prompts.probe import warnings

        gc.enable()
        gc.freeze()
        bar.__exit__()
        seconds = perf_counter() - began
        phases = [
            ("python", python),
            ("plugins", scanned_at - began - python),
            ("resolve", resolved_at - scanned_at),
            *llm.facts.phases,
        ]
        phases.append(("http server", max(0.0, seconds - sum(value for _, value in phases))))
        first_screen(console, resolution, llm.facts, server, url, phases, llm.text.renderer is not None)
        if llm.text.renderer is not None:
            screen.warnings(console, warnings(llm.text.renderer.findings))
        return phases

    start: dict[str, Any] = {"resolution": resolution, "host": host, "progress": bar, "process": process}
    with bar:
        serve(settings.config, server, on_ready=ready, **start)


def _process_age() -> float:
    """Seconds since this process was started, so that the interpreter's own start-up is counted; 0 if unknown."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


def first_screen(
    console: Console,
    resolution: tuple[ResolvedPlan, Checkpoint, ModelInfo],
    facts: EngineFacts,
    server: ServerSettings,
    url: str,
    phases: list[tuple[str, float]],
    has_template: bool = True,
) -> None:
    """What was chosen and why, the memory budget, the address, and one line to try."""
    import lmkit_cli.screen as screen

    resolved, checkpoint, info = resolution
    screen.heading(console, f"lmkit serves {facts.model}")
    console.print(screen.choices(resolved, checkpoint, info))
    console.print(screen.budget(facts))
    screen.warnings(console, (*getattr(resolved, "warnings", ()), *facts.warnings))
    console.print(screen.phases(phases), soft_wrap=True)
    console.print(f"[bold]{url}/v1[/]  in a browser: [bold]{url}/[/]  from a shell:")
    key = " -H 'Authorization: Bearer YOUR_KEY'" if server.api_keys else ""
    path, fields = example(facts, has_template)
    body = json.dumps({"model": facts.model, **fields})
    where = f" --unix-socket {server.uds}" if server.uds else ""
    console.print(
        f"curl{where} {url}{path} -H 'Content-Type: application/json'{key} -d '{body}'",
        markup=False,
        soft_wrap=True,
    )


def example(facts: EngineFacts, has_template: bool) -> tuple[str, dict[str, Any]]:
    """A request that this model answers: path, and the body without the model's name."""
    task = facts.pooler.task if facts.pooler is not None else "chat" if has_template else "complete"
    requests: dict[str, tuple[str, dict[str, Any]]] = {
        "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "What is 2 + 3?"}]}),
        "complete": ("/v1/completions", {"prompt": "Once upon a time", "max_tokens": 32}),
        "embed": ("/v1/embeddings", {"input": "What is 2 + 3?"}),
        "classify": ("/classify", {"input": "What is 2 + 3?"}),
    }
    return requests.get(task, ("/pooling", {"input": "What is 2 + 3?", "task": task}))
