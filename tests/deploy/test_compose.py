"""The compose file against the compose specification, and what it starts against what there is."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from compose_spec import PyCompose

from client.gateway import options
from python_backend_models.settings import DitSettings, Music3Settings, TalkerSettings, read

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose.yaml"


def interpolated(text: str) -> str:
    """The file as compose reads it: variables that are not set have their defaults, the others this value."""
    text = re.sub(r"(?<!\$)\$\{\w+:-([^}]*)\}", r"\1", text)
    return re.sub(r"(?<!\$)\$\{\w+:\?[^}]*\}", "/path/to/checkpoint", text)


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())


def test_file_follows_the_specification() -> None:
    parsed = PyCompose.from_yaml(interpolated(COMPOSE.read_text()))
    assert sorted(parsed.service_names()) == ["gateway", "grafana", "prometheus", "server"]


def test_the_check_can_fail() -> None:
    text = interpolated(COMPOSE.read_text())
    with pytest.raises(ValueError, match="shm_sizes"):
        PyCompose.from_yaml(text.replace("shm_size:", "shm_sizes:"))
    with pytest.raises(ValueError, match="interval"):
        PyCompose.from_yaml(text.replace("interval: 15s", "interval: soon"))


def test_ports_are_on_this_machine_alone(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service["ports"]]
    assert len(ports) == 6
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_files_that_are_mounted_are_there(compose: dict[str, Any]) -> None:
    mounted = [
        volume.split(":")[0]
        for service in compose["services"].values()
        for volume in service.get("volumes", [])
        if volume.startswith(".")
    ]
    assert len(mounted) == 4
    for path in mounted:
        assert (COMPOSE.parent / path).exists(), path
    prometheus = COMPOSE.parent / "prometheus"
    scrape = yaml.safe_load((prometheus / "prometheus.yml").read_text())
    assert all((prometheus / name).is_file() for name in scrape["rule_files"])
    (target,) = scrape["scrape_configs"][0]["static_configs"][0]["targets"]
    found = scrape["scrape_configs"][1]["dns_sd_configs"][0]
    assert len(scrape["scrape_configs"]) == 2
    for host, port in (target.split(":"), (*found["names"], found["port"])):
        assert host in compose["services"]
        assert any(each.endswith(f":{port}") for each in compose["services"][host]["ports"])
    provisioning = COMPOSE.parent / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"].removeprefix("http://").split(":")[0] in compose["services"]
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "music3.yml").read_text())["providers"]
    dashboards = [v.split(":")[1] for v in compose["services"]["grafana"]["volumes"] if ".json" in v]
    assert sorted(dashboards) == [f"{provider['options']['path']}/{n}.json" for n in ("dashboard", "gateway")]


def test_server_gets_a_gpu_shared_memory_and_time(compose: dict[str, Any]) -> None:
    server = compose["services"]["server"]
    (device,) = server["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["capabilities"]) == ("nvidia", ["gpu"])
    assert server["shm_size"] == "4gb"
    (checkpoint,) = server["volumes"]
    assert checkpoint.endswith(":/checkpoint:ro")
    drain_s = int(server["environment"]["MUSIC3_DRAIN_S"])
    grace_s = 60 * int(server["stop_grace_period"].removesuffix("m"))
    assert 360 < drain_s < grace_s
    assert server["read_only"]


def test_gateway_wants_a_key_and_has_a_disk_for_whole_files(compose: dict[str, Any]) -> None:
    gateway = compose["services"]["gateway"]
    # Asked for there alone: whoever wants no gateway need not have a key.
    assert gateway["environment"] == {"MUSIC3_GATEWAY_KEY": "${MUSIC3_GATEWAY_KEY:-}"}
    tini, dashes, *entry = (part.replace("$$", "$") for part in gateway["entrypoint"])
    assert (tini, dashes) == ("tini", "--")
    entry = [part.replace("/app/.venv/bin/python", "echo python") for part in entry]
    runs = [
        subprocess.run(
            [*entry, *gateway["command"]], env={"MUSIC3_GATEWAY_KEY": key}, capture_output=True, text=True
        )
        for key in ("", "secret")
    ]
    assert runs[0].returncode == 2
    assert "MUSIC3_GATEWAY_KEY: set it to a key of your own" in runs[0].stderr
    command = "-m client.gateway --host 0.0.0.0 --port 8080 --url server:8001"
    assert (runs[1].returncode, runs[1].stdout) == (0, f"python {command}\n")
    assert options.read(gateway["command"], {"MUSIC3_GATEWAY_KEY": "secret"}).keys == ("secret",)
    assert "tmpfs" not in gateway
    assert gateway["volumes"] == ["gateway:/tmp"]
    assert "gateway" in compose["volumes"]


def test_settings_are_settings(compose: dict[str, Any]) -> None:
    environment = compose["services"]["server"]["environment"]
    defaults = {
        name: value.split(":-")[1].removesuffix("}")
        for name, value in environment.items()
        if ":-" in str(value)
    }
    assert read(Music3Settings, "music3", {}, defaults).live_songs == int(defaults["MUSIC3_LIVE_SONGS"])
    assert read(DitSettings, "dit", {}, defaults).precision == defaults["MUSIC3_DIT_PRECISION"]
    # The card's own line of ./build.sh memory can be given; empty is as if it were not.
    assert (read(TalkerSettings, "talker", {}, defaults).kv_tokens, defaults.pop("MUSIC3_KV_TOKENS")) == (
        0,
        "",
    )
    assert (read(DitSettings, "dit", {}, defaults).batch_windows, defaults.pop("MUSIC3_BATCH_WINDOWS")) == (
        8,
        "",
    )
    assert len(defaults) == 2
