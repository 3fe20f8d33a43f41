"""The Kubernetes manifest against the published schema of a TrainJob; nothing here runs it.

PyYAML and jsonschema come with Jupyter (jupyter_events and nbformat need them).
"""

import copy
import json
import shlex
from pathlib import Path

import jsonschema
import pytest
import yaml

from ddp_tutorial.paths import load_script

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = ROOT / "kubernetes" / "trainjob.yaml"


def closed(schema):
    """The schema with every object closed whose fields are declared, because Kubernetes drops others silently."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        made["additionalProperties"] = False
    return made


VALIDATOR = jsonschema.Draft202012Validator(
    closed(json.loads((ROOT / "tests" / "trainjob_schema.json").read_text(encoding="utf-8"))))


def problems(job):
    return [f"{'.'.join(map(str, error.path))}: {error.message}" for error in VALIDATOR.iter_errors(job)]


@pytest.fixture
def job():
    return yaml.safe_load(MANIFEST.read_text(encoding="utf-8"))


def pod(job):
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    return node["template"]["spec"]["template"]["spec"]


def places(value, path=()):
    """The path of every dictionary and every field in the manifest."""
    if isinstance(value, dict | list):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key)
            yield from places(each, (*path, key))


def parent_of(job, path):
    for key in path[:-1]:
        job = job[key]
    return job


def test_the_manifest_is_a_train_job(job):
    VALIDATOR.check_schema(VALIDATOR.schema)
    assert problems(job) == []
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")


def test_a_misspelt_field_is_refused_wherever_it_is(job):
    free = {"nvidia.com/gpu"}  # the names of resources are not the schema's business
    fields = [path for path in places(job) if isinstance(path[-1], str) and path[-1] not in free]
    assert len(fields) > 30
    for path in fields:
        other = copy.deepcopy(job)
        place = parent_of(other, path)
        place[f"{path[-1]}x"] = place.pop(path[-1])
        assert any(f"{path[-1]}x" in problem for problem in problems(other)), path


@pytest.mark.parametrize("path, value", [
    (("spec", "trainer", "numNodes"), "2"),
    (("spec", "trainer", "numProcPerNode"), "auto"),
    (("spec", "trainer", "args", 0), 9),
    (("spec", "trainer", "command"), "torchrun"),
    (("spec", "trainer", "resourcesPerNode", "limits", "nvidia.com/gpu"), None),
    (("spec", "runtimeRef"), "torch-distributed"),
    (("spec", "runtimePatches", 0, "manager"), None),
])  # fmt: skip
def test_a_value_of_another_type_is_refused(job, path, value):
    parent_of(job, path)[path[-1]] = value
    assert problems(job) != []


@pytest.mark.parametrize("path", [("spec", "runtimeRef"), ("spec", "runtimePatches", 0, "manager")])
def test_a_field_that_must_be_there_is_missed(job, path):
    del parent_of(job, path)[path[-1]]
    assert any("required property" in problem for problem in problems(job))


def test_what_older_versions_called_it_is_refused(job):
    job["spec"]["podTemplateOverrides"] = job["spec"].pop("runtimePatches")
    assert any("podTemplateOverrides" in problem for problem in problems(job))


def test_processes_gpus_and_volumes_agree(job):
    trainer, spec = job["spec"]["trainer"], pod(job)
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 8)
    assert int(trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]) == trainer["numProcPerNode"]
    mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
    assert sorted(mounts) == sorted(volume["name"] for volume in spec["volumes"])
    (claim,) = [volume["name"] for volume in spec["volumes"] if "persistentVolumeClaim" in volume]
    (snapshots,) = [word.partition("=")[2] for word in trainer["args"] if word.startswith("--snapshot=")]
    assert snapshots.startswith(f"{mounts[claim]}/"), "snapshots outlive the pods"


def test_the_command_is_one_that_the_script_takes(job, monkeypatch, tmp_path):
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["torchrun"]
    script, *options = trainer["args"]
    assert (ROOT / script).is_file()
    options = [word.replace("/shared", str(tmp_path)) for word in options]
    (tmp_path / "data").mkdir()
    monkeypatch.setattr("sys.argv", [script, *options])
    args = load_script("09").parse_args()
    assert args.snapshot == tmp_path / "snapshots", shlex.join(options)


def test_it_says_first_that_it_was_not_run():
    first = MANIFEST.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# NOT RUN")
