"""What deploy/ says to Kubernetes, compose, Grafana and systemd. `nox -s deploy` installs the tools that check it."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from lmkit_http.command import command
from typer import Typer
from typer.main import get_command

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
CHART = DEPLOY / "helm" / "lmkit"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
GO = shutil.which("go")
FULL = {
    "auth": {"existingSecret": "keys"}, "tls": {"existingSecret": "tls"}, "podMonitor": {"enabled": True},
    "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {"matchLabels": {"name": "web"}}}]},
    "models": {"existingClaim": "models"}, "imagePullSecrets": [{"name": "pull"}], "replicas": 3,
    "args": ["--kv-memory", "8GiB"], "env": [{"name": "HF_TOKEN", "value": "x"}], "podAnnotations": {"a": "b"},
    "nodeSelector": {"gpu": "yes"}, "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "resources": {"limits": {"nvidia.com/gpu": 1}},
    "affinity": {"nodeAffinity": {}},
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "key": {"auth": {"existingSecret": "keys"}}, "insecure": {"auth": {"insecure": True}}, "full": FULL,
    "everyone in the namespace": {"auth": {"existingSecret": "keys"}, "networkPolicy": {"enabled": True}},
}  # fmt: skip


def merged(own: dict[str, Any]) -> dict[str, Any]:
    values = copy.deepcopy(VALUES)
    for key, value in own.items():
        assert key in values, f"values.yaml says nothing of {key}"
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    return values


def render(own: dict[str, Any]) -> list[dict[str, Any]]:
    """The documents of a release. Raises CalledProcessError."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    given = {
        "Values": merged(own), "Chart": {"AppVersion": chart["appVersion"]},
        "Release": {"Name": "one", "Namespace": "n", "Service": "Helm"},
        "Files": {file.name: file.read_text() for file in sorted((CHART / "templates").iterdir())},
    }  # fmt: skip
    assert GO is not None
    command = [GO, "run", str(Path(__file__).with_name("render.go"))]
    done = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True)
    texts = json.loads(done.stdout)
    return [document for name, text in texts.items() if name.endswith(".yaml") and (document := yaml.safe_load(text))]


@pytest.mark.skipif(GO is None, reason="needs Go, of whose template engine Helm is made")
@pytest.mark.parametrize("name", CASES)
def test_the_chart_makes_valid_manifests(name: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    documents = render(CASES[name])
    for document in documents:
        if not document["apiVersion"].startswith("monitoring."):
            kubernetes_validate.validate(document, "1.30", strict=True)
    kinds = {document["kind"]: document for document in documents}
    assert {"Deployment", "Service"} <= kinds.keys()
    pod = kinds["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    drain = float(container["args"][container["args"].index("--drain-timeout") + 1])
    assert pod["terminationGracePeriodSeconds"] > drain + 5  # what preStop takes counts, too
    check_options(container["args"][1:])
    keyed = any(entry["name"] == "LMKIT_API_KEY" for entry in container["env"] or ())
    assert keyed != ("--insecure" in container["args"])
    if name == "full":
        assert kinds["PodMonitor"]["spec"]["podMetricsEndpoints"][0]["scheme"] == "https"
        assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
        assert kinds["NetworkPolicy"]["spec"]["ingress"][0]["from"] == FULL["networkPolicy"]["from"]


@pytest.mark.skipif(GO is None, reason="needs Go, of whose template engine Helm is made")
def test_the_chart_serves_nobody_without_a_key_by_accident() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        render({})
    assert "auth.existingSecret" in caught.value.stderr


def check_options(arguments: list[str]) -> None:
    """That `lmkit serve` has them."""
    app = Typer()
    app.command()(command)
    known = {option for parameter in get_command(app).params for option in parameter.opts}
    for argument in arguments:
        if argument.startswith("--"):
            assert argument.partition("=")[0] in known, argument


def test_what_runs_the_server_names_options_that_it_has() -> None:
    unit = (DEPLOY / "systemd" / "lmkit.service").read_text()
    (start,) = [line for line in unit.splitlines() if line.startswith("ExecStart=")]
    check_options(start.split())
    for file in (DEPLOY / "docker").iterdir():
        (entry,) = [line for line in file.read_text().splitlines() if line.startswith("ENTRYPOINT ")]
        check_options(json.loads(entry.removeprefix("ENTRYPOINT ")))


def test_compose_gives_each_service_what_it_needs_and_no_more() -> None:
    compose = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        assert service["cap_drop"] == ["ALL"], name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / "compose" / source).exists(), source
            else:
                assert source in compose["volumes"], source
    checker = shutil.which("check-jsonschema", path=str(Path(sys.executable).parent))
    if checker is None:
        pytest.skip("needs check-jsonschema for the rest")
    file = str(DEPLOY / "compose" / "compose.yaml")
    subprocess.run([checker, "--builtin-schema", "vendor.compose-spec", file], check=True)


def test_yaml_is_written_as_others_write_it() -> None:
    pytest.importorskip("yamllint")
    files = [str(file) for file in DEPLOY.rglob("*.yaml") if "templates" not in file.parts]
    rules = "{extends: default, rules: {line-length: {max: 130}, document-start: disable, braces: disable, "
    rules += "brackets: disable, comments: {min-spaces-from-content: 2}, indentation: {indent-sequences: consistent}}}"
    subprocess.run([sys.executable, "-m", "yamllint", "--strict", "-d", rules, *files], check=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / "lmkit.service").read_text()
    unit = tmp_path / "lmkit.service"
    unit.write_text(text.replace("/opt/lmkit/bin/lmkit", "/bin/true"))  # the program must be there
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert "lmkit.service" not in done.stderr, done.stderr
