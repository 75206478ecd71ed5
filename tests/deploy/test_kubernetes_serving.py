"""The manifests that serve: their parts refer to each other, pods end after their drain, and have the least rights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from test_kubernetes import documents, named, problems, root

from dovetail.serving.http.server import ABORTED_SECONDS
from dovetail.serving.worker import CLOSING

DEPLOYMENTS = ("dovetail-serve", "dovetail-vllm", "dovetail-router")
ENGINES = DEPLOYMENTS[:2]


def pod(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The pod of a Deployment, and its container."""
    spec = named("Deployment", name)["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    return spec, container


def flags(name: str) -> dict[str, str]:
    return dict(word[2:].partition("=")[::2] for word in pod(name)[1]["command"] if word.startswith("--"))


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_labels_ports_and_volumes_refer_to_each_other(name: str) -> None:
    deployment, (spec, container) = named("Deployment", name)["spec"], pod(name)
    assert deployment["selector"]["matchLabels"].items() <= deployment["template"]["metadata"]["labels"].items()
    volumes = {volume["name"] for volume in spec.get("volumes", ())}
    assert volumes == {mount["name"] for mount in container.get("volumeMounts", ())}
    (port,) = container["ports"]
    assert flags(name)["port"] == str(port["containerPort"])
    for probe in ("readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["port"] == port["name"]
    given = {one["name"] for one in container["env"]}
    assert set(re.findall(r"\$\((\w+)\)", " ".join(container["command"]))) <= given


def test_services_find_their_pods() -> None:
    for name in ("dovetail-serve", "dovetail-router"):
        service, deployment = named("Service", name)["spec"], named("Deployment", name)["spec"]
        assert service["selector"] == deployment["selector"]["matchLabels"]
        assert service["ports"][0]["targetPort"] == pod(name)[1]["ports"][0]["name"]
    budget = named("PodDisruptionBudget", "dovetail-serve")["spec"]
    assert budget["selector"] == named("Deployment", "dovetail-serve")["spec"]["selector"]


def test_the_router_finds_the_engines_and_may_look_for_them() -> None:
    (key, _, value), (container,) = flags("dovetail-router")["selector"].partition("="), pod("dovetail-vllm")[0]["containers"]
    assert named("Deployment", "dovetail-vllm")["spec"]["template"]["metadata"]["labels"][key] == value
    assert flags("dovetail-router")["service-discovery-port"] == str(container["ports"][0]["containerPort"])
    binding, account = named("RoleBinding", "dovetail-router"), pod("dovetail-router")[0]["serviceAccountName"]
    assert named("ServiceAccount", account)
    role = named("Role", binding["roleRef"]["name"])
    assert [one["name"] for one in binding["subjects"]] == [account]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def test_a_pod_is_not_killed_before_it_has_drained() -> None:
    spec, container = pod("dovetail-serve")
    wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert (
        spec["terminationGracePeriodSeconds"]
        >= wait + float(flags("dovetail-serve")["drain-seconds"]) + ABORTED_SECONDS + 2 * CLOSING
    )
    for name in ("dovetail-vllm", "dovetail-router"):
        spec, container = pod(name)
        assert spec["terminationGracePeriodSeconds"] > container["lifecycle"]["preStop"]["sleep"]["seconds"]


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_pod_has_the_least_rights_and_a_limit_of_memory(name: str) -> None:
    spec, container = pod(name)
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert {"cpu", "memory"} <= set(container["resources"]["requests"])
    assert "memory" in container["resources"]["limits"]
    assert "serviceAccountName" in spec or spec["automountServiceAccountToken"] is False


def test_api_keys_come_from_secrets() -> None:
    spec, container = pod("dovetail-serve")
    (mount,) = (
        one for one in container["volumeMounts"] if flags("dovetail-serve")["api-key-file"].startswith(one["mountPath"])
    )
    (volume,) = (one for one in spec["volumes"] if one["name"] == mount["name"])
    assert volume["secret"]["defaultMode"] & 0o007 == 0, "no other user reads them"
    (key,) = (one for one in pod("dovetail-vllm")[1]["env"] if one["name"] == "VLLM_API_KEY")
    assert list(key["valueFrom"]) == ["secretKeyRef"]


@pytest.mark.parametrize("name", ENGINES)
def test_autoscalers_target_engines_below_their_rows(name: str) -> None:
    spec = named("HorizontalPodAutoscaler", name)["spec"]
    assert named(spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
    assert "replicas" not in named("Deployment", name)["spec"], "kubectl apply would undo the autoscaler's"
    targets = {one["pods"]["metric"]["name"]: float(one["pods"]["target"]["averageValue"]) for one in spec["metrics"]}
    rows = float(flags(name).get("rows") or flags(name)["max-num-seqs"])
    assert 0.5 * rows <= targets["vllm_num_requests_running"] < rows


def test_rules_rename_the_series_that_autoscalers_read() -> None:
    data = named("ConfigMap", "dovetail-metrics")["data"]
    (rule,) = yaml.safe_load(data["rules.yaml"])["rules"]
    pattern = re.search(r'__name__=~"(.*?)"', rule["seriesQuery"])
    assert pattern is not None
    read = {
        one["pods"]["metric"]["name"] for name in ENGINES for one in named("HorizontalPodAutoscaler", name)["spec"]["metrics"]
    }
    for name in read:
        series = name.replace("vllm_", "vllm:", 1)
        assert re.fullmatch(pattern[1], series)
        assert re.sub(rule["name"]["matches"], rule["name"]["as"].replace("${1}", r"\1"), series) == name


def test_engines_are_scraped_with_a_key() -> None:
    (job,) = yaml.safe_load(named("ConfigMap", "dovetail-metrics")["data"]["scrape.yaml"])["scrape_configs"]
    assert job["authorization"]["type"] == "Bearer"
    (label,) = (one for one in job["relabel_configs"] if one["source_labels"] == ["__meta_kubernetes_pod_label_metrics"])
    for name in ENGINES:
        assert named("Deployment", name)["spec"]["template"]["metadata"]["labels"]["metrics"] == label["regex"]


def test_mistakes_in_a_deployment_and_an_autoscaler_are_found() -> None:
    deployment = named("Deployment", "dovetail-serve")
    deployment["spec"]["template"]["spec"]["containers"][0]["livenessProbe"]["httpget"] = {}
    assert any("livenessProbe.httpget: is unknown" in one for one in problems(deployment, root(deployment)))
    scaler = named("HorizontalPodAutoscaler", "dovetail-serve")
    scaler["spec"]["metrics"][0]["pods"]["target"] = {"averageValue": "2"}
    assert any("target.type: is missing" in one for one in problems(scaler, root(scaler)))


def test_no_manifest_has_a_kind_without_a_schema() -> None:
    assert all(root(one) for one in documents())
