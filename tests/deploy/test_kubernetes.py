"""The manifests for Kubernetes follow the schemas of the cluster, and their parts refer to each other."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy/kubernetes"
SCHEMA = json.loads((Path(__file__).parent / "kubernetes_schema.json").read_text())
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def problems(value: Any, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Where a value does not follow a JSON schema: the keywords of the schemas of Kubernetes."""
    if "$ref" in schema:
        yield from problems(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], path)
        return
    if "oneOf" in schema and not any(not list(problems(value, one, path)) for one in schema["oneOf"]):
        yield f"{path}: fits none of {schema['oneOf']}"
    names = schema.get("type", list(TYPES))
    allowed = [names] if isinstance(names, str) else names
    if not any(isinstance(value, TYPES[name]) and (name == "boolean" or not isinstance(value, bool)) for name in allowed):
        yield f"{path}: {value!r} is not of type {allowed}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {schema['enum']}"
    if isinstance(value, list):
        for i, item in enumerate(value):
            yield from problems(item, schema.get("items", {}), f"{path}[{i}]")
    if isinstance(value, dict):
        known = schema.get("properties", {})
        yield from (f"{path}.{name}: is missing" for name in schema.get("required", ()) if name not in value)
        for name, item in value.items():
            other = schema.get("additionalProperties", True)
            if name not in known and other is False:
                yield f"{path}.{name}: is unknown"
            rest = other if isinstance(other, dict) else {}
            yield from problems(item, known.get(name, rest), f"{path}.{name}")


def documents() -> list[dict[str, Any]]:
    return [one for file in sorted(DEPLOY.glob("*.yaml")) for one in yaml.safe_load_all(file.read_text())]


def root(document: dict[str, Any]) -> dict[str, Any]:
    return SCHEMA["$defs"][SCHEMA["roots"][f"{document['kind']} {document['apiVersion']}"]]


def named(kind: str, name: str) -> dict[str, Any]:
    (found,) = (one for one in documents() if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


@pytest.mark.parametrize("document", documents(), ids=lambda one: f"{one['kind']} {one['metadata']['name']}")
def test_a_manifest_follows_its_schema(document: dict[str, Any]) -> None:
    assert list(problems(document, root(document))) == []


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        (("spec", "completion"), 4, ".spec.completion: is unknown"),
        (("spec", "completions"), "four", ".spec.completions: 'four' is not of type"),
        (("spec", "template", "spec", "containers", 0, "image_name"), "x", "containers[0].image_name: is unknown"),
        (("spec", "template", "spec", "containers", 0, "name"), None, "containers[0].name: None is not of type"),
        (("kind",), "Jobs", ".kind: 'Jobs' is none of"),
    ],
)
def test_a_mistake_is_found(path: tuple[str | int, ...], value: Any, expected: str) -> None:
    job = copy.deepcopy(next(one for one in documents() if one["kind"] == "Job"))
    schema, inner = root(job), job
    for step in path[:-1]:
        inner = inner[step]  # type: ignore[index]
    inner[path[-1]] = value  # type: ignore[index]
    assert any(expected in problem for problem in problems(job, schema))


def test_the_parts_of_the_job_refer_to_each_other() -> None:
    service, job = named("Service", "dovetail"), named("Job", "dovetail")
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    env = {one["name"]: one.get("value") for one in container["env"]}
    name, port = job["metadata"]["name"], service["spec"]["ports"][0]["port"]
    assert env["HEAD"] == f"{name}-0.{service['metadata']['name']}:{port}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    least, most = map(int, env["NODES"].split(":"))
    assert least < most == job["spec"]["completions"] == job["spec"]["parallelism"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_manifests_name_no_registry() -> None:
    images = [line.split()[-1] for file in DEPLOY.glob("*.yaml") for line in file.read_text().splitlines() if "image:" in line]
    assert images
    assert not any("/" in image for image in images)


def _pods(value: Any) -> Iterator[dict[str, Any]]:
    """The specs of pods in a manifest."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for one in value.values():
            yield from _pods(one)


def test_b7_jobs_are_as_strict_as_the_server() -> None:
    (server,) = [pod for one in yaml.safe_load_all((DEPLOY / "serve.yaml").read_text()) for pod in _pods(one)]
    jobs = [pod for document in documents() if document["kind"] in ("Job", "PyTorchJob") for pod in _pods(document)]
    assert len(jobs) == 2
    for pod in jobs:
        assert pod["securityContext"] == server["securityContext"]
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"] == server["containers"][0]["securityContext"]
            assert "/tmp" in [one["mountPath"] for one in container["volumeMounts"]]  # the root file system is read-only
