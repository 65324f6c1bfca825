"""The examples in deploy/ fit the server: what dashboards and alerts ask for is exported, and the server that the
manifests start does what they rely on."""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import shlex
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests import brake
from tests.server.harness import PATIENCE, Client
from tests.server.promql import parse
from tests.server.test_cli import Process
from tests.server.test_load import LONG, raw_request, read_until
from unspool.cli.serve import make_parser
from unspool.models.random import SHAPES, write_random_gguf
from unspool.server.app import build
from unspool.server.config import ServerConfig
from unspool.server.host import ModelHost
from unspool.server.hosted import HostedModel, ModelSpec
from unspool.server.run import GRACE

DEPLOY = Path(__file__).parents[2] / "deploy"
PROBES = ("startupProbe", "livenessProbe", "readinessProbe")
TARGET_LABELS = {"job", "instance"}  # which Prometheus adds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_random_gguf(path, replace(SHAPES["tiny"], context_length=4096))
    return path


# Dashboards and alerts ----------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def exported(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    """Every sample of a server's /metrics, after a request of each kind: the labels by name."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sk-a name=ann requests_per_minute=2\n")
    config = ServerConfig(api_key_file=str(keys), log_format="off")
    spec = ModelSpec(("tiny",), model, options={"device": "cpu", "threads": 1, "kv_tokens": 1024})
    host = ModelHost([HostedModel(spec, config)], config, 1 << 40)

    async def run() -> str:
        client = Client(host, build(host))  # type: ignore[arg-type]  # hands it to nobody
        headers = {"authorization": "Bearer sk-a"}
        for status in (200, 200, 429):
            answer = await client.post("/v1/completions", {"prompt": "a", "max_tokens": 3}, headers=headers)
            assert answer.status_code == status
        meter = host.services[0].meter
        assert meter is not None
        meter.ceiling = 1e9  # as `unspool plan` measures it
        page = await client.get("/metrics", headers=headers)
        await client.http.aclose()
        await host.shutdown()
        return page.text

    samples: dict[str, list[dict[str, str]]] = {}
    for family in text_string_to_metric_families(asyncio.run(run())):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(dict(sample.labels))
    return samples


def dashboard() -> dict[str, Any]:
    read: dict[str, Any] = json.loads((DEPLOY / "grafana" / "unspool.json").read_text("utf-8"))
    return read


def rules() -> list[dict[str, Any]]:
    [group] = yaml.safe_load((DEPLOY / "prometheus" / "unspool.rules.yml").read_text("utf-8"))["groups"]
    read: list[dict[str, Any]] = group["rules"]
    return read


def expressions() -> Iterator[Any]:
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            name = f"{panel['title']} {target['refId']}"
            yield pytest.param(target["expr"], target["legendFormat"], id=name)
    for rule in rules():
        reported = json.dumps(rule["annotations"])
        yield pytest.param(rule["expr"], reported, id=rule["alert"])


def check_known(expression: str, exported: dict[str, list[dict[str, str]]]) -> set[str]:
    """Every metric is exported with the labels and values that are asked for; the labels of the result."""
    parsed = parse(expression.replace("$__rate_interval", "5m"))
    assert parsed.metrics
    known: set[str] = set()
    for name, matchers in parsed.metrics.items():
        if name == "up":  # Prometheus' own
            continue
        assert name in exported, f"{name} is not exported"
        labels = {label for sample in exported[name] for label in sample} | TARGET_LABELS
        known |= labels
        for label, sign, value in matchers:
            assert label in labels, f"{name} has no label {label}"
            values = [sample[label] for sample in exported[name] if label in sample]
            if sign == "=" and label == "status":
                assert re.fullmatch(r"[1-5]\d\d", value)
            elif sign == "=" and label not in TARGET_LABELS:
                assert value in values, f"{name} has no {label} {value}: {values}"
    assert parsed.labels <= known
    return parsed.labels


@pytest.mark.parametrize(("expression", "expected"), list(expressions()))
def test_what_is_asked_for_is_exported(
    expression: str, expected: str, exported: dict[str, list[dict[str, str]]]
) -> None:
    groups = check_known(expression, exported)
    shown = set(re.findall(r"{{ *(?:\$labels\.)?(\w+) *}}", expected))
    assert shown <= groups or not groups, "a legend names labels that the expression keeps"


def test_the_dashboards_variables_are_exported(exported: dict[str, list[dict[str, str]]]) -> None:
    queries = [each["query"]["query"] for each in dashboard()["templating"]["list"] if each["type"] == "query"]
    assert len(queries) == 3
    for query in queries:
        found = re.fullmatch(r"label_values\((.*), (\w+)\)", query)
        assert found
        name, = parse(found[1]).metrics
        assert found[2] in {label for sample in exported[name] for label in sample} | TARGET_LABELS


def test_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in dashboard()["panels"]]
    assert len(ids) == len(set(ids))
    for panel in dashboard()["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_every_alert_has_a_test() -> None:
    tests = yaml.safe_load((DEPLOY / "prometheus" / "unspool.test.yml").read_text("utf-8"))["tests"]
    expected: dict[str, set[bool]] = {}
    for test in tests:
        for each in test["alert_rule_test"]:
            expected.setdefault(each["alertname"], set()).add(bool(each["exp_alerts"]))
    assert expected == {rule["alert"]: {True, False} for rule in rules()}


def test_every_metric_of_the_documents_is_exported(exported: dict[str, list[dict[str, str]]]) -> None:
    """And every exported one is in the documents."""
    text = (DEPLOY.parent / "docs" / "server.md").read_text("utf-8")
    table = text[text.index("## Metrics") :]
    table = table[: table.index("The time between tokens")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    names = {name for row in rows for name in re.findall(r"`([a-z_0-9]+)", row)}
    found = {
        re.sub(r"_(bucket|sum|count|created)$", "", name.removeprefix("unspool:"))
        for name in exported
        if not name.endswith("_created")
    }
    assert found == names


# Kubernetes and systemd ---------------------------------------------------------------------------------------------
def manifests() -> list[dict[str, Any]]:
    return [
        document
        for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
        for document in yaml.safe_load_all(path.read_text("utf-8"))
    ]


def manifest(kind: str) -> dict[str, Any]:
    [found] = [each for each in manifests() if each["kind"] == kind]
    return found


def container() -> dict[str, Any]:
    [only] = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def test_the_manifests_fit_each_other() -> None:
    spec = manifest("Deployment")["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels
    assert manifest("Service")["spec"]["selector"] == labels
    assert manifest("PodMonitor")["spec"]["selector"]["matchLabels"] == labels
    [port] = container()["ports"]
    [endpoint] = manifest("PodMonitor")["spec"]["podMetricsEndpoints"]
    probes = [container()[name]["httpGet"]["port"] for name in PROBES]
    asked = {*probes, endpoint["port"], manifest("Service")["spec"]["ports"][0]["targetPort"]}
    assert asked == {port["name"]}
    assert f"--port={port['containerPort']}" in container()["args"]
    mounts = {each["name"] for each in container()["volumeMounts"]}
    assert mounts == {each["name"] for each in spec["template"]["spec"]["volumes"]}


def test_there_is_time_to_drain() -> None:
    sleep = float(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    seconds = make_parser().parse_args(container()["args"]).drain
    grace = manifest("Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace >= sleep + seconds + GRACE
    unit = (DEPLOY / "unspool.service").read_text("utf-8")
    values = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
    command = shlex.split(values["ExecStart"])
    assert command[1] == "serve"
    assert float(values["TimeoutStopSec"]) >= make_parser().parse_args(command[2:]).drain + GRACE
    assert values["Type"] == "notify"


def test_the_image_takes_the_manifests_command() -> None:
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    entry = json.loads(text[text.rindex("ENTRYPOINT") :].removeprefix("ENTRYPOINT"))
    assert entry[:2] == container()["command"]
    make_parser().parse_args(entry[2:])


def start(model: Path, folder: Path) -> Process:
    """The server of the manifest, by its own arguments; files are elsewhere, and the port is free."""
    (folder / "keys").write_text("sk-k name=ann\n")
    here = {"--port=8000": None, "--model=smollm2": f"--model={model}", "/etc/unspool": str(folder)}
    arguments = []
    for argument in container()["args"]:
        name = next((name for name in here if name in argument), None)
        replaced = argument if name is None else here[name] and argument.replace(name, str(here[name]))
        arguments += [replaced] if replaced else []
    return Process(*arguments, command=brake.COMMAND)


def ask(port: int, path: str, *, method: str = "GET", body: str | None = None, key: str = "") -> tuple[int, str]:
    """The status and the text of an answer, on a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    headers = {"content-type": "application/json", **({"authorization": f"Bearer {key}"} if key else {})}
    connection.request(method, path, body, headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def drain(server: Process) -> bytes:
    """Stop a server amid a stream, ask its probes meanwhile, and read the stream to its end."""
    port = server.port
    startup, live, ready = (container()[name]["httpGet"]["path"] for name in PROBES)
    assert [ask(port, path)[0] for path in (startup, live, ready, "/metrics")] == [200, 200, 200, 401]
    assert "unspool:ready 1.0" in ask(port, "/metrics", key="sk-k")[1]
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        data = raw_request({**LONG, "max_tokens": 100})
        connection.sendall(data.replace(b"host: localhost", b"host: localhost\r\nauthorization: Bearer sk-k"))
        read_until(connection, b"data: ")
        server.process.send_signal(signal.SIGTERM)
        while ask(port, ready)[0] == 200:
            time.sleep(0.005)
        status, text = ask(port, ready)
        assert (status, json.loads(text)) == (503, {"status": "draining"})
        assert ask(port, live)[0] == 200
        assert "unspool:ready 0.0" in ask(port, "/metrics", key="sk-k")[1]
        status, text = ask(port, "/v1/completions", method="POST", body='{"prompt": "a"}', key="sk-k")
        assert (status, json.loads(text)["error"]["code"]) == (503, "shutting_down")
        server.process.send_signal(signal.SIGUSR1)  # the stream goes on
        return read_until(connection, b"[DONE]\n\n", 1 << 30)


def test_the_manifests_server_answers_probes_while_it_drains(model: Path, tmp_path: Path) -> None:
    server = start(model, tmp_path)
    rest = drain(server)
    assert server.process.wait(PATIENCE) == 0
    assert b'"finish_reason":"length"' in rest, "the stream completes"
