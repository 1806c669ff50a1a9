"""`lmkit ray-serve`: engines behind Ray Serve."""

from __future__ import annotations

from typing import Annotated

import typer
from lmkit.api import ConfigError
from lmkit.config import read_environment
from lmkit_cli.options import with_config
from lmkit_cli.settings import Sourced

INSTALL = "pip install 'lmkit-ray-serve[ray]'"


@with_config
def ray_serve(
    settings: Sourced,
    address: Annotated[str, typer.Option(help="Ray cluster: local, auto, or HOST:PORT of its head")] = "local",
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on", min=1, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None, typer.Option(help="key that clients must send; repeatable; also LMKIT_API_KEY")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="allow a public address without a key")] = False,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="accepted Host header, .NAME with all below it; repeatable")
    ] = None,
    min_replicas: Annotated[int, typer.Option(help="engines that there always are", min=1)] = 1,
    max_replicas: Annotated[int, typer.Option(help="engines that there may be", min=1)] = 1,
    at_once: Annotated[int, typer.Option(help="requests that one engine has at once", min=1)] = 64,
) -> None:
    """Serve a model by replicas on a Ray cluster, which come and go with the load.

    Each replica is an engine with the routes of `lmkit serve`; prompts go to the replica that had their beginning last.

    Example: lmkit ray-serve demo --max-replicas 4
    """
    from importlib.util import find_spec

    if find_spec("ray") is None:
        raise ConfigError("Ray is not installed", fix=INSTALL)
    if max_replicas < min_replicas:
        raise ConfigError(
            f"at most {max_replicas} replicas, and at least {min_replicas}", fix="a larger --max-replicas"
        )
    try:
        from ray import serve
    except ImportError as e:
        raise ConfigError(f"Ray Serve cannot be imported: {e}", fix=INSTALL) from None
    from lmkit.plugins.resolve import resolve
    from lmkit_executor_ray.cluster import connect
    from lmkit_http.listening import check_address
    from lmkit_http.run import known_to
    from lmkit_http.settings import ServerSettings

    from lmkit_ray_serve.application import application

    config = settings.config
    key = read_environment().switch("LMKIT_API_KEY")
    server = ServerSettings(
        host=host, port=port, api_keys=tuple(api_key or ([key] if key else ())), insecure=insecure,
        allowed_hosts=tuple(allowed_host or ()), served_names=config.model.names,
    )  # fmt: skip
    check_address(server)  # Ray listens, so its rules are checked here
    resolve(config)  # what cannot run is refused here, not by replicas
    connect(address, max_replicas * (config.parallel.threads or 1))
    serve.start(http_options={"host": host, "port": port})
    app = application(config, known_to(server), min_replicas=min_replicas, max_replicas=max_replicas, at_once=at_once)
    serve.run(app, name="lmkit", route_prefix="/", blocking=True)
