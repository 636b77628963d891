"""The Kubernetes base and its overlays: rendered by kubectl, valid, and in step with the service."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.deploy.test_files import DEFAULTS, last_stage, load, routes, settings_in
from tests.deploy.tools import DEPLOY, checked, program

BASE = DEPLOY / "kustomize" / "base"
OVERLAYS = DEPLOY / "kustomize" / "overlays"
FOLDERS = [BASE, *sorted(OVERLAYS.iterdir())]
WITHOUT_SCHEMA = {"ScaledObject", "PodMonitor", "PrometheusRule"}
"""Kinds of KEDA and the Prometheus operator, which Kubernetes itself has no schema of."""

Documents = dict[str, dict[str, Any]]


def rendered(folder: Path) -> str:
    return checked(program("kubectl", "kubectl"), "kustomize", folder)


def by_kind(text: str) -> Documents:
    return {document["kind"]: document for document in yaml.safe_load_all(text)}


@pytest.fixture(scope="module")
def base() -> Documents:
    names = yaml.safe_load((BASE / "kustomization.yaml").read_text(encoding="utf-8"))["resources"]
    return by_kind("\n---\n".join((BASE / name).read_text(encoding="utf-8") for name in names))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of ``deploy/kustomize`` with what ``make rules`` writes."""
    copy = tmp_path_factory.mktemp("checkout")
    shutil.copytree(DEPLOY, copy / "deploy")
    checked("make", "--silent", "--directory", copy, "--file", ROOT / "Makefile", "rules")
    return copy / "deploy" / "kustomize"


def pod_of(documents: Documents) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod's specification, and its one container."""
    spec = documents["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_overlay_renders_to_valid_documents(folder: Path, made: Path, tmp_path: Path) -> None:
    text = rendered(made / folder.relative_to(BASE.parent))
    file = tmp_path / "rendered.yaml"
    file.write_text(text, encoding="utf-8")
    out = checked(program("kubernetes-validate", "pip install kubernetes-validate"), "--strict", file)
    documents = by_kind(text)
    assert out.count("passed for resource") == len(documents.keys() - WITHOUT_SCHEMA)
    spec, container = pod_of(documents)
    settings_in({row["name"]: row["value"] for row in container["env"]})
    assert spec["securityContext"]["runAsNonRoot"] is True
    for each in [container, *spec.get("initContainers", [])]:
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert set(each["resources"]) == {"requests", "limits"}


def test_probes_and_ports_are_the_services(base: Documents) -> None:
    pod = base["Deployment"]["spec"]["template"]
    _, container = pod_of(base)
    port = container["ports"][0]
    assert str(port["containerPort"]) in last_stage("EXPOSE")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == port["name"]
        assert container[probe]["httpGet"]["path"] in routes()
    assert pod["metadata"]["annotations"]["prometheus.io/path"] in routes()
    assert base["Service"]["spec"]["ports"][0]["targetPort"] == port["name"]
    labels = pod["metadata"]["labels"]
    assert base["Service"]["spec"]["selector"] == labels
    for kind, name in (("PodDisruptionBudget", "selector"), ("NetworkPolicy", "podSelector")):
        assert base[kind]["spec"][name]["matchLabels"] == labels
    assert base["NetworkPolicy"]["spec"]["ingress"] == [{"ports": [{"port": port["name"]}]}]


def test_environment_is_accepted(base: Documents) -> None:
    spec, container = pod_of(base)
    settings_in({row["name"]: row["value"] for row in container["env"]})
    assert spec["enableServiceLinks"] is False


def test_runs_locked_down_and_waits_for_the_drain(base: Documents) -> None:
    spec, container = pod_of(base)
    assert spec["securityContext"]["runAsNonRoot"] is True
    user = f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
    assert [user] == last_stage("USER")
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    pause = float(re.findall(r"sleep\((\d+)\)", container["lifecycle"]["preStop"]["exec"]["command"][2])[0])
    assert spec["terminationGracePeriodSeconds"] > pause + DEFAULTS.drain_seconds + 2


def test_gpu_overlay_replaces_an_instance_before_it_starts_another() -> None:
    documents = by_kind(rendered(OVERLAYS / "gpu"))
    _, container = pod_of(documents)
    assert documents["Deployment"]["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {row["name"] for row in container["env"]} == {"PSC_DEVICE"}


@pytest.mark.parametrize("name", ["pvc", "oci-bundle", "s3-bundle"])
def test_bundle_overlays_serve_the_bundle_they_bring(name: str) -> None:
    spec, container = pod_of(by_kind(rendered(OVERLAYS / name)))
    variables = {row["name"]: row["value"] for row in container["env"]}
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "bundle")
    assert mount["readOnly"] is True
    ((_, path),) = settings_in(variables).named_bundles
    assert str(path).startswith(mount["mountPath"] + "/")
    for init in spec.get("initContainers", []):
        assert init["command"][-1] == str(path)


def test_rules_of_the_operator_are_those_of_prometheus(made: Path) -> None:
    rules = by_kind(rendered(made / "overlays" / "prometheus-operator"))["PrometheusRule"]
    assert rules["spec"]["groups"] == load("deploy/alerts.yml")["groups"]


def test_body_limit_of_the_ingress_is_the_services() -> None:
    ingress = yaml.safe_load((OVERLAYS / "ingress" / "ingress.yaml").read_text(encoding="utf-8"))
    limit = ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-body-size"]
    assert limit == f"{DEFAULTS.max_body_bytes >> 20}m"
