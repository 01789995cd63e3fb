"""What stands in the files of deploy/, without an engine: settings, metrics, versions and names agree."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.metrics import Metrics
from service.settings import Settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


class _ComposeLoader(yaml.SafeLoader):
    """YAML with compose's own tag for what a second file takes out of the first."""


_ComposeLoader.add_constructor("!reset", lambda loader, node: loader.construct_sequence(node))

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
REPLICAS = yaml.load((DEPLOY / "compose.replicas.yaml").read_text(), _ComposeLoader)
ALERTS = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/padfree.json").read_text())
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))


def _metric_names() -> set[str]:
    """What the service exports, with the suffixes of histograms."""
    names = set()
    for family in Metrics().registry.collect():
        names.add(family.name)
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(family.type, [])
        names.update(family.name + suffix for suffix in suffixes)
    return names


def _queries() -> list[str]:
    rules = [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]
    return rules + [one["expr"] for panel in DASHBOARD["panels"] for one in panel.get("targets", [])]


def test_queries_ask_for_metrics_that_the_service_has() -> None:
    asked = {name for query in _queries() for name in re.findall(r"\bpadfree_\w+", query)}
    assert asked
    assert asked <= _metric_names()


def test_every_alert_is_explained() -> None:
    text = (ROOT / "docs/operations.md").read_text()
    for group in ALERTS["groups"]:
        for rule in group["rules"]:
            assert f"`{rule['alert']}`" in text, f"docs/operations.md does not explain {rule['alert']}"


SERVICES = COMPOSE["services"] | {"edge": REPLICAS["services"]["edge"]}


@pytest.mark.parametrize("name", sorted(SERVICES))
def test_every_container_is_bounded_and_has_no_rights(name: str) -> None:
    service = SERVICES[name]
    assert service["init"] is True
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "restart" in service
    if name != "trainer-gpu":  # an example: its size is the user's
        assert {"cpus", "memory"} <= service["deploy"]["resources"]["limits"].keys()
    if not service.get("profiles"):
        assert "healthcheck" in service


def test_only_the_default_services_need_no_profile() -> None:
    default = {name for name, one in COMPOSE["services"].items() if not one.get("profiles")}
    assert default == {"ray-head", "ray-worker", "service"}


def test_nodes_see_data_and_store_under_the_same_paths() -> None:
    worker, service = COMPOSE["services"]["ray-worker"], COMPOSE["services"]["service"]
    assert worker["volumes"] == service["volumes"]
    assert {one["target"] for one in worker["volumes"]} == {"/store", "/cache", "/data", "/run/padfree"}
    for name in ("PADFREE_STORE", "PADFREE_CACHE_BYTES"):
        assert worker["environment"][name] == service["environment"][name]
    assert worker["env_file"] == service["env_file"]


def test_every_variable_of_compose_is_documented_with_its_default() -> None:
    text = "".join((DEPLOY / name).read_text() for name in ("compose.yaml", "compose.replicas.yaml"))
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    documented = dict(re.findall(r"^#(\w+)=(.*)$", (DEPLOY / ".env.example").read_text(), flags=re.MULTILINE))
    assert documented == used


def test_settings_are_ones_that_the_service_has() -> None:
    known = {f"PADFREE_{field.name.upper()}" for field in dataclasses.fields(Settings)}
    nodes = {
        "PADFREE_WORKER_CPUS",  # of deploy/padfree-node
        "PADFREE_CACHE_DIR",  # of packer.store, in every process
        "PADFREE_CACHE_BYTES",
    }
    given = set(COMPOSE["services"]["service"]["environment"])
    given |= set(re.findall(r"^ENV (PADFREE_\w+)", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE))
    for name in ("kubernetes", "kubernetes-s3"):
        given |= set(re.findall(r"- (PADFREE_\w+)=", (DEPLOY / name / "kustomization.yaml").read_text()))
    assert {name for name in given if name.startswith("PADFREE_")} <= known | nodes


def test_dockerfile_builds_anywhere() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert not [line for line in lines if line.startswith(("# syntax", "VOLUME", "HEALTHCHECK"))]
    assert not [line for line in lines if line.startswith("FROM") and "@sha256" in line]
    assert lines.index("ARG PYTHON_IMAGE=python:3.11-slim-bookworm") < next(
        number for number, line in enumerate(lines) if line.startswith("FROM")
    )


def _locked(path: Path) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for name, version in re.findall(r"^([\w.-]+)==([^\s;\\]+)", path.read_text(), flags=re.MULTILINE):
        found.setdefault(name, set()).add(version)
    return found


@pytest.mark.parametrize("name", ["client", "service", "demo", "build"])
def test_images_hold_the_versions_that_are_tested(name: str) -> None:
    path = DEPLOY / f"requirements/{name}.txt"
    tested, locked = _locked(ROOT / "requirements.txt"), _locked(path)
    assert locked
    assert {one: versions for one, versions in locked.items() if one in tested} == {
        one: tested[one] for one in locked if one in tested
    }
    assert "torch" not in locked
    assert "://" not in path.read_text()
    blocks = re.split(r"\n(?=\S)", path.read_text().strip())
    assert all("--hash=sha256:" in block for block in blocks)


def test_kubernetes_runs_the_ray_of_the_image() -> None:
    (ray,) = _locked(DEPLOY / "requirements/service.txt")["ray"]
    cluster = yaml.safe_load((DEPLOY / "kubernetes/raycluster.yaml").read_text())
    assert cluster["spec"]["rayVersion"] == ray


def _objects() -> list[dict[str, Any]]:
    return [one for path in MANIFESTS for one in yaml.safe_load_all(path.read_text()) if one]


def _pods() -> dict[str, dict[str, Any]]:
    objects = {one["kind"]: one for one in _objects() if "kind" in one}
    ray = objects["RayCluster"]["spec"]
    return {
        "head": ray["headGroupSpec"]["template"]["spec"],
        "worker": ray["workerGroupSpecs"][0]["template"]["spec"],
        "service": objects["Deployment"]["spec"]["template"]["spec"],
    }


@pytest.mark.parametrize("name", ["head", "worker", "service"])
def test_kubernetes_pods_are_bounded_and_have_no_rights(name: str) -> None:
    pod = _pods()[name]
    assert pod["securityContext"]["runAsNonRoot"] is True
    for container in pod["containers"]:
        assert container["securityContext"]["readOnlyRootFilesystem"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]
        assert {"readinessProbe", "livenessProbe", "startupProbe"} <= container.keys()
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_kubernetes_pods_share_store_data_and_secret() -> None:
    def shared(name: str) -> tuple[list[Any], list[Any]]:
        container = _pods()[name]["containers"][0]
        mounts = [one for one in container["volumeMounts"] if one["name"] in ("store", "data")]
        return mounts, [one for one in container["env"] if one["name"].startswith("RAY_AUTH")]

    assert shared("worker") == shared("service")
    assert shared("head")[1] == shared("service")[1]


def _works(*command: str) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run(command, capture_output=True, timeout=60).returncode == 0


# ------------------------------------------------------------------ linters


def test_yaml_is_clean() -> None:
    linter = pytest.importorskip("yamllint.linter")
    config = pytest.importorskip("yamllint.config").YamlLintConfig((ROOT / ".yamllint").read_text())
    found = [
        f"{path.relative_to(ROOT)}:{problem.line}: {problem.desc} ({problem.rule})"
        for path in sorted([*DEPLOY.rglob("*.yaml"), *DEPLOY.rglob("*.yml"), ROOT / ".yamllint"])
        for problem in linter.run(path.read_text(), config, str(path))
    ]
    assert found == []


@pytest.mark.parametrize("document", [COMPOSE, REPLICAS], ids=["compose.yaml", "compose.replicas.yaml"])
def test_compose_files_obey_the_compose_specification(document: dict[str, Any]) -> None:
    schemas = pytest.importorskip("check_jsonschema.builtin_schemas")
    jsonschema = pytest.importorskip("jsonschema")
    schema = schemas.get_builtin_schema("vendor.compose-spec")
    validator = jsonschema.validators.validator_for(schema)(schema)
    assert [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)] == []


def test_names_that_compose_files_refer_to_are_there() -> None:
    """What `docker compose config` checks besides the schema."""
    for service in SERVICES.values():
        for volume in service.get("volumes", []):
            if isinstance(volume, dict) and volume["type"] == "volume":
                assert volume["source"] in COMPOSE["volumes"]
            elif isinstance(volume, str) and not volume.startswith("."):
                assert volume.split(":")[0] in COMPOSE["volumes"]
            elif isinstance(volume, str):
                assert (DEPLOY / volume.split(":")[0]).exists()
        assert set(service.get("depends_on", [])) <= SERVICES.keys()


@pytest.mark.skipif(not _works("docker", "compose", "version"), reason="no `docker compose` command")
@pytest.mark.parametrize("files", [["compose.yaml"], ["compose.yaml", "compose.replicas.yaml"]])
def test_compose_file_is_valid_with_and_without_profiles(files: list[str]) -> None:
    command = ["docker", "compose"]
    for name in files:
        command += ["-f", str(DEPLOY / name)]
    for profiles in ([], ["--profile", "*"]):
        checked = subprocess.run([*command, *profiles, "config", "-q"], capture_output=True, text=True)
        assert checked.returncode == 0, checked.stderr


@pytest.mark.skipif(not _works("kubectl", "kustomize", "--help"), reason="no `kubectl kustomize` command")
@pytest.mark.parametrize("name", ["kubernetes", "kubernetes-s3"])
def test_kustomize_builds_and_names_every_image(name: str) -> None:
    built = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / name)], capture_output=True, text=True, check=True
    ).stdout
    images = re.findall(r"image: (\S+)", built)
    assert sorted(images) == ["padfree-service:0.1.0", "padfree-worker:0.1.0", "padfree-worker:0.1.0"]
    names = set(re.findall(r"name: (padfree-settings\S*)", built))
    assert len(names) == 1  # every pod refers to the settings by the name that they got
    in_objects = name == "kubernetes-s3"
    assert ("claimName: padfree-store" in built) is not in_objects
    assert built.count("mountPath: /store\n") == (0 if in_objects else 2)
    assert built.count("mountPath: /cache\n") == (2 if in_objects else 0)
    assert built.count("name: padfree-s3\n") == (2 if in_objects else 0)
