"""The Helm chart, rendered and linted by Helm's engine, held against Kubernetes' schemas and the code."""

import hashlib
import http.server
import importlib
import json
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import kubernetes_validate
import pytest
import yaml

from python_backend_models import checkpoint_report, control
from python_backend_models.contract import FRAME_RATE_HZ, MAX_SONG_FRAMES
from python_backend_models.settings import DitSettings, Music3Settings, TalkerSettings, VocoderSettings, read
from tests.deploy.helm import CHART, VERSIONS, HelmError, call

Manifest = dict[str, Any]
CLAIM = {"checkpoint": {"claim": "weights"}}
EVERYTHING = CLAIM | {
    "autoscaling": {"kind": "hpa"},
    "monitoring": {"podMonitor": True, "rules": True, "dashboard": True, "labels": {"release": "prometheus"}},
    "extraArguments": ["--stay", "--", "--log-verbose=1"],
    "checkpoint": {"claim": "weights", "subPath": "music3"},
    "imagePullSecrets": [{"name": "registry"}],
    "nodeSelector": {"gpu": "h200"},
    "podAnnotations": {"team": "music"},
    "affinity": {"nodeAffinity": {}},
}
# What no released schema collection has: kinds of operators.
CUSTOM_KINDS = {"PodMonitor", "PrometheusRule", "ScaledObject"}
KUBERNETES = ("1.27", "1.30", "1.34")


def render(values: Manifest, **options: Any) -> list[Manifest]:
    text = call(
        "helm_template",
        chart=str(CHART),
        release_name="songs",
        namespace="music",
        values=values,
        kube_version="1.30.0",
        **options,
    )
    return [document for document in yaml.safe_load_all(text) if document]


def of_kind(manifests: list[Manifest], kind: str, name: str = "songs-music3") -> Manifest:
    (found,) = (each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return render(EVERYTHING)


@pytest.fixture(scope="module")
def pod(manifests: list[Manifest]) -> Manifest:
    return of_kind(manifests, "Deployment")["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def server(pod: Manifest) -> Manifest:
    (container,) = pod["containers"]
    return container


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [{}, CLAIM, EVERYTHING], ids=["defaults", "claim", "everything"])
def test_lint_has_nothing_to_say(version: str, values: Manifest) -> None:
    report = json.loads(
        call("helm_lint", paths=[str(CHART)], values=values, strict=True, helm_version=version)
    )
    assert report["passed"]
    assert {message["message"] for message in report["messages"]} <= {"icon is recommended"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"drainSeconds": "long"}, "got string, want integer"),
        ({"autoscaling": {"kind": "magic"}}, "value must be one of"),
        ({"settings": {"MUSIC3_CHECKPOINT": "/x"}}, "invalid propertyName 'MUSIC3_CHECKPOINT'"),
        ({"replica": 2}, "additional properties 'replica' not allowed"),
        ({"shmSize": "4GB"}, "shmSize"),
    ],
)
def test_wrong_values_are_refused(values: Manifest, message: str) -> None:
    with pytest.raises(HelmError, match=re.escape(message)):
        render(CLAIM | values)


def test_a_checkpoint_must_be_named() -> None:
    with pytest.raises(HelmError, match=r"set checkpoint\.claim .* or checkpoint\.hostPath"):
        render({})
    pod = of_kind(render({"checkpoint": {"hostPath": "/weights"}}), "Deployment")["spec"]["template"]["spec"]
    (volume,) = (each for each in pod["volumes"] if each["name"] == "checkpoint")
    assert volume["hostPath"] == {"path": "/weights", "type": "Directory"}


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("kind", ["none", "hpa", "keda"])
def test_manifests_fit_kubernetes_schemas(kind: str, version: str) -> None:
    rendered = render(EVERYTHING | {"autoscaling": {"kind": kind}})
    checked = [each for each in rendered if each["kind"] not in CUSTOM_KINDS]
    for manifest in checked:
        kubernetes_validate.validate(manifest, version, strict=True)
    assert len(checked) >= 7
    names = [(each["kind"], each["metadata"]["name"]) for each in rendered]
    assert len(set(names)) == len(names)


def test_the_schema_check_can_fail(manifests: list[Manifest]) -> None:
    broken = json.loads(json.dumps(of_kind(manifests, "Deployment")))
    broken["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] = "drain"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, "1.34", strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_both_helms_render_the_same(version: str, manifests: list[Manifest]) -> None:
    def keyed(documents: list[Manifest]) -> dict[tuple[str, str], Manifest]:
        return {(each["kind"], each["metadata"]["name"]): each for each in documents}

    assert keyed(render(EVERYTHING, helm_version=version)) == keyed(manifests)


# ---------------------------------------------------------------- the server's pod


def test_gpu_shared_memory_and_checkpoint(pod: Manifest, server: Manifest) -> None:
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 1
    volumes = {each["name"]: each for each in pod["volumes"]}
    mounts = {each["mountPath"]: each for each in server["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "4Gi"}
    checkpoint = mounts["/checkpoint"]
    assert (checkpoint["readOnly"], checkpoint["subPath"]) == (True, "music3")
    assert volumes[checkpoint["name"]]["persistentVolumeClaim"] == {"claimName": "weights", "readOnly": True}
    environment = {each["name"]: each["value"] for each in server["env"]}
    assert environment["MUSIC3_CHECKPOINT"] == "/checkpoint"
    # What the read-only image must write.
    assert {"/tmp", "/app/.cache"} <= mounts.keys()


def test_nobody_is_root_and_the_image_is_read_only(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if manifest["kind"] != "Deployment":
            continue
        pod = manifest["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"] + pod.get("initContainers", []):
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}


def module_commands(pod: Manifest) -> Iterator[list[str]]:
    """Every `python -m MODULE ARGUMENT...` in a pod."""
    for container in pod["containers"] + pod["initContainers"]:
        for command in (
            container.get("command", []),
            container.get("readinessProbe", {}).get("exec", {}).get("command", []),
            container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", []),
        ):
            if command:
                assert command[:2] == ["/app/.venv/bin/python", "-m"]
                yield command[2:]


def test_commands_are_ones_that_the_modules_have(pod: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = {module: arguments for module, *arguments in module_commands(pod)}
    assert commands.keys() == {
        "client.probe",
        "python_backend_models.control",
        "python_backend_models.checkpoint_report",
    }
    asked: list[object] = []
    probe = importlib.import_module("client.probe")
    monkeypatch.setattr(probe, "probe", lambda url, **options: asked.append(options["timeout_s"]) or 0.0)
    assert probe.main(commands["client.probe"]) == 0
    monkeypatch.setattr(control, "servers", lambda: [77])
    monkeypatch.setattr(
        control,
        "drain",
        lambda pid, **options: asked.append((pid, options["after_s"], options["timeout_s"])) or 0,
    )
    assert control.main(commands["python_backend_models.control"]) == 0
    monkeypatch.setattr(checkpoint_report, "inspect_checkpoint", lambda root, **options: [])
    # Only the folder is missing here, which is what it says.
    assert checkpoint_report.main(commands["python_backend_models.checkpoint_report"]) == 1
    # First forgotten by the balancer, then drained: the other way round it would be sent songs to refuse.
    assert asked == [10.0, (77, 40.0, 900.0)]


def test_times_fit_each_other(pod: Manifest, server: Manifest) -> None:
    command = server["lifecycle"]["preStop"]["exec"]["command"]
    drain_s, forget_s = (int(command[command.index(option) + 1]) for option in ("--timeout", "--after"))
    assert pod["terminationGracePeriodSeconds"] > forget_s + drain_s
    # The cluster's DNS keeps a name for 30 s at most, and the balancer asks every 5.
    assert forget_s >= 35
    assert (
        drain_s > 2 * MAX_SONG_FRAMES / FRAME_RATE_HZ
    )  # the longest song, made at half the speed it is heard
    startup = server["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    ready = server["readinessProbe"]
    assert int(ready["exec"]["command"][-1]) < ready["timeoutSeconds"] <= ready["periodSeconds"]


@pytest.mark.parametrize("seconds", [60, 61, 1800])
def test_startup_takes_no_less_than_asked(seconds: int) -> None:
    rendered = of_kind(render(CLAIM | {"startupSeconds": seconds}), "Deployment")
    startup = rendered["spec"]["template"]["spec"]["containers"][0]["startupProbe"]
    assert seconds <= startup["periodSeconds"] * startup["failureThreshold"] < seconds + 10


def test_shipped_settings_are_settings(server: Manifest) -> None:
    own = {"MUSIC3_CHECKPOINT", "MUSIC3_DRAIN_S"}
    environment = {each["name"]: each["value"] for each in server["env"] if each["name"] not in own}
    assert environment
    kinds = {
        "music3": Music3Settings,
        "talker": TalkerSettings,
        "dit": DitSettings,
        "vocoder": VocoderSettings,
    }
    for name, value in environment.items():
        changed = {
            stage
            for stage, kind in kinds.items()
            if read(kind, stage, {}, {name: value}) != read(kind, stage, {}, {})
            or name.removeprefix("MUSIC3_").lower() in kind.__dataclass_fields__
        }
        assert changed, f"{name} is no setting"
    # The chart's autoscaler counts songs against the places that its own settings give.
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    places = read(Music3Settings, "music3", {}, environment).live_songs
    assert values["autoscaling"]["songsPerReplica"] < places


# ---------------------------------------------------------------- around it


def balancer_pod(**values: object) -> Manifest:
    return of_kind(render(CLAIM | values), "Deployment", "songs-music3-balancer")["spec"]["template"]


def test_only_its_own_configuration_replaces_a_balancer() -> None:
    """Songs run through it: a new image or setting of the servers is no reason."""
    before = balancer_pod()
    assert (
        balancer_pod(image={"repository": "other", "tag": "9"}, settings={"MUSIC3_LIVE_SONGS": "4"}) == before
    )
    config = of_kind(render(CLAIM), "ConfigMap", "songs-music3-balancer")["data"]["envoy.yaml"]
    digest = hashlib.sha256(config.removesuffix("\n").encode()).hexdigest()
    assert before["metadata"]["annotations"] == {"checksum/config": digest}


class Admin(http.server.BaseHTTPRequestHandler):
    """What the hook asks of Envoy's admin page; `pages` are what it finds, the last one for good."""

    asked: ClassVar[list[str]] = []
    pages: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.asked.append(f"{self.command} {self.path}")
        text = ""
        if self.path.startswith("/stats"):
            text = self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    do_POST = do_GET  # noqa: N815  the handler's names

    def log_message(self, *_: object) -> None:
        pass


def active(grpc: int, http: int) -> str:
    """Envoy's lines for the requests that run."""
    return f"http.grpc.downstream_rq_active: {grpc}\nhttp.http.downstream_rq_active: {http}\n"


def leave(pages: list[str], *, drain_s: int) -> list[str]:
    """What a balancer's end asks of the admin page where it finds this; its pauses take no time."""
    (envoy,) = balancer_pod(drainSeconds=drain_s)["spec"]["containers"]
    assert envoy["args"][-2:] == ["--drain-strategy", "immediate"]
    *shell, script = envoy["lifecycle"]["preStop"]["exec"]["command"]
    assert shell == ["/bin/bash", "-c"]
    Admin.asked.clear()
    Admin.pages[:] = pages
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Admin) as admin:
        threading.Thread(target=admin.serve_forever, daemon=True).start()
        here = script.replace("127.0.0.1/9901", f"127.0.0.1/{admin.server_address[1]}")
        assert here != script
        quick = re.sub(r"sleep \d+\n", "sleep 0.05\n", here)
        done = subprocess.run(["bash", "-c", quick], capture_output=True, text=True, timeout=60)
        admin.shutdown()
    assert (done.returncode, done.stderr) == (0, "")
    drain, *looks = Admin.asked
    assert drain == "POST /drain_listeners?graceful&skip_exit"
    assert set(looks) == {"GET /stats?filter=(grpc%7Chttp)%5C.downstream_rq_active"}
    return looks


def test_a_balancer_that_goes_sends_songs_elsewhere_and_waits_for_its_own() -> None:
    assert len(leave([active(20, 0), active(1, 0), active(0, 10), active(0, 0)], drain_s=900)) == 4


@pytest.mark.parametrize("page", [active(1, 0), "", "http.grpc.downstream_rq_active: 0\n"])
def test_a_balancer_waits_no_longer_than_it_may_and_no_less_where_nobody_can_say(page: str) -> None:
    begun_s = time.monotonic()
    assert len(leave([page], drain_s=2)) > 5
    assert 1 < time.monotonic() - begun_s < 30


def test_balancers_are_not_all_taken_away_at_once() -> None:
    def budgets(replicas: int) -> list[str]:
        manifests = render(CLAIM | {"balancer": {"replicas": replicas}})
        return [each["metadata"]["name"] for each in manifests if each["kind"] == "PodDisruptionBudget"]

    assert sorted(budgets(2)) == ["songs-music3", "songs-music3-balancer"]
    assert budgets(1) == ["songs-music3"]


def test_songs_are_balanced_over_servers_by_the_fewest_live(manifests: list[Manifest]) -> None:
    servers = of_kind(manifests, "Service", "songs-music3-servers")
    assert servers["spec"]["clusterIP"] == "None"
    labels = of_kind(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert servers["spec"]["selector"].items() <= labels.items()
    config = of_kind(manifests, "ConfigMap", "songs-music3-balancer")["data"]["envoy.yaml"]
    resources = yaml.safe_load(config)["static_resources"]
    clusters = {each["name"]: each for each in resources["clusters"]}
    for listener in resources["listeners"][:2]:
        (chain,) = listener["filter_chains"]
        manager = chain["filters"][0]["typed_config"]
        (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
        # No time-out of Envoy's own ends a song.
        assert (route["route"]["timeout"], manager["stream_idle_timeout"]) == ("0s", "0s")
        cluster = clusters[route["route"]["cluster"]]
        assert cluster["lb_policy"] == "LEAST_REQUEST"
        assert cluster["type"] == "STRICT_DNS"
        address = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"]
        port = address["socket_address"]["port_value"]
        assert address["socket_address"]["address"] == "songs-music3-servers.music.svc"
        assert port == listener["address"]["socket_address"]["port_value"]
        assert port in {each["port"] for each in servers["spec"]["ports"]}
    options = clusters["grpc"]["typed_extension_protocol_options"]
    (protocol,) = options.values()
    assert "http2_protocol_options" in protocol["explicit_http_config"]
    front = of_kind(manifests, "Service")["spec"]["selector"]
    balancer = of_kind(manifests, "Deployment", "songs-music3-balancer")["spec"]["template"]["metadata"]
    assert front.items() <= balancer["labels"].items()


def test_without_balancer_clients_reach_the_servers() -> None:
    rendered = render(CLAIM | {"balancer": {"enabled": False}})
    assert not any(each["metadata"]["name"].endswith("balancer") for each in rendered)
    front = of_kind(rendered, "Service")["spec"]["selector"]
    assert front.items() <= of_kind(rendered, "Deployment")["spec"]["template"]["metadata"]["labels"].items()


def test_autoscaling_follows_waiting_songs() -> None:
    scaler = of_kind(render(CLAIM | {"autoscaling": {"kind": "hpa"}}), "HorizontalPodAutoscaler")
    metrics = [each["pods"]["metric"]["name"] for each in scaler["spec"]["metrics"]]
    assert metrics == ["music3_waiting_songs", "music3_live_songs"]
    rendered = render(CLAIM | {"autoscaling": {"kind": "keda"}})
    (trigger,) = of_kind(rendered, "ScaledObject")["spec"]["triggers"]
    assert 'music3_waiting_songs{namespace="music"}' in trigger["metadata"]["query"]
    # An autoscaler's number of servers must not be set back by the chart.
    assert "replicas" not in of_kind(rendered, "Deployment")["spec"]
    assert of_kind(render(CLAIM), "Deployment")["spec"]["replicas"] == 1


def test_monitoring_ships_the_alerts_and_the_dashboard_of_deploy(manifests: list[Manifest]) -> None:
    deploy = CHART.parents[1]
    rules = of_kind(manifests, "PrometheusRule")
    assert rules["spec"] == yaml.safe_load((deploy / "prometheus" / "alerts.yml").read_text())
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    dashboard = of_kind(manifests, "ConfigMap", "songs-music3-dashboard")["data"]["music3.json"]
    assert json.loads(dashboard) == json.loads((deploy / "grafana" / "dashboard.json").read_text())
    monitor = of_kind(manifests, "PodMonitor")["spec"]
    labels = of_kind(manifests, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    assert monitor["podMetricsEndpoints"][0]["port"] == "metrics"
