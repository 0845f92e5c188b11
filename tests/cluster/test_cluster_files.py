"""The cluster files: schemas and linters accept them, their commands parse, and what belongs together agrees."""

from __future__ import annotations

import importlib
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cluster_files import (
    BUCKET,
    CLUSTER,
    EIGHT_GPUS,
    RAY_CLUSTERS,
    RAY_JOBS,
    RAY_SERVICE,
    RAY_UP,
    SHARED,
    SWEEP_JOB,
    list_pods,
    read_cluster_spec,
    read_text,
    read_yaml,
)
from command_lines import read_ray_command
from conftest import REPOSITORY, write_corpus
from packaging.requirements import Requirement
from project_file import read_project_file
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.runtime_env import RuntimeEnv
from ray.scripts.scripts import cli
from ray.serve.schema import ServeDeploySchema

from domext_ray.commands.job import Job, configure
from domext_ray.commands.measuring import SWEEP
from domext_ray.commands.pretraining import AF
from domext_ray.config.options.build import from_dict, read_flags
from domext_ray.config.serve import ServeConfig
from domext_ray.config.sweep import SweepConfig
from domext_ray.pretraining.pipeline import run_pretraining
from domext_ray.runtime.stopping import GIVEN, RAY_GIVEN
from domext_ray.serving.deployment import build_service
from domext_ray.studies.sweep.plan import choose_points
from domext_ray.studies.sweep.space import read_space

PLAIN = (
    "Dockerfile",
    "Dockerfile.dockerignore",
    "constraints.txt",
    "drain_node.py",
    "kuberay/policies.yaml",
    "kuberay/storage.yaml",
    "runtime_env.yaml",
)
FILES = (*RAY_UP, *RAY_CLUSTERS, *PLAIN, "slurm.sbatch")
JOBS: dict[str, Job[Any]] = {"pretrain_af": AF, "sweep": SWEEP}
"""What each file in jobs/ carries out."""
SHOWN = (*RAY_UP, "kuberay/raycluster.yaml", *RAY_JOBS, "runtime_env.yaml", "slurm.sbatch")
"""Files that show or run commands of Ray or of a job."""
MEBIBYTES = {"Gi": 2**10, "Ti": 2**20}
read_options = runpy.run_path(str(CLUSTER / "drain_node.py"))["read_options"]


KNOWN = {
    "cluster": "rayVersion authOptions enableInTreeAutoscaling autoscalerOptions gcsFaultToleranceOptions "
    "headServiceAnnotations managedBy suspend headGroupSpec workerGroupSpecs",
    "head": "rayStartParams template serviceType headService enableIngress resources labels",
    "workers": "rayStartParams template replicas minReplicas maxReplicas numOfHosts groupName idleTimeoutSeconds "
    "suspend scaleStrategy resources labels",
    "RayJob": "entrypoint runtimeEnvYAML jobId entrypointResources managedBy activeDeadlineSeconds backoffLimit "
    "ttlSecondsAfterFinished entrypointNumCpus entrypointNumGpus shutdownAfterJobFinishes suspend metadata "
    "clusterSelector submitterPodTemplate submitterConfig deletionStrategy submissionMode rayClusterSpec",
    "RayService": "serveConfigV2 rayClusterConfig serveService upgradeStrategy serviceUnhealthySecondThreshold "
    "deploymentUnhealthySecondThreshold rayClusterDeletionDelaySeconds excludeHeadPodFromServeSvc suspend",
}
"""The fields that KubeRay knows."""
KINDS = {**dict.fromkeys(RAY_JOBS, "RayJob"), RAY_SERVICE: "RayService"}
"""What each of KubeRay's files is, but for the plain cluster."""


def read_pins() -> dict[str, str]:
    lines = [line for line in read_text("constraints.txt").splitlines() if line and not line.startswith("#")]
    return {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in lines)}


def list_commands(name: str) -> list[list[str]]:
    """List the commands of Ray and of Python that a file shows in its comments or runs, each as its arguments."""
    text = re.sub(r"\\\n#? *", "", read_text(name))
    lines = re.findall(r"^#   ((?:\w+=\S+ )?(?:ray|sbatch) .*)$", text, re.M)
    if name in RAY_JOBS:
        lines.append(read_yaml(name)["spec"]["entrypoint"])
    if name in RAY_UP:
        config = read_yaml(name)
        lines += [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    commands: list[list[str]] = []
    for line in lines:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        command: list[str] = []
        for token in [*lexer, ";"]:
            if token in ("python", "ray") or set(token) <= set(";&|()"):
                commands.append(command)
                command = []
            command.append(token)
    return [words for words in commands if words and words[0] in ("python", "ray")]


def list_jobs(name: str) -> list[list[str]]:
    """List those of a file's commands that are jobs."""
    return [command for command in list_commands(name) if command[0] == "python" and "/drain_node.py" not in command[1]]


def run_linter(name: str, *arguments: str) -> None:
    command = [str(Path(sys.executable).parent / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_is_known_here() -> None:
    found = {str(path.relative_to(CLUSTER)) for path in CLUSTER.rglob("*") if path.is_file()}
    assert found == {*FILES, "README.md"}


def test_the_image_is_built_from_what_is_there() -> None:
    run_linter("hadolint", str(CLUSTER / "Dockerfile"))
    text = read_text("Dockerfile")
    kept = [line[1:] for line in read_text("Dockerfile.dockerignore").splitlines() if line.startswith("!")]
    copied = [name for line in re.findall(r"^COPY (.*)$", text, re.M) for name in line.split()[:-1]]
    assert sorted(copied) == sorted(kept) and all((REPOSITORY / name).exists() for name in copied)
    project = read_project_file()["project"]
    needed = {
        project["readme"],
        *project["license-files"],
        "pyproject.toml",
        project["name"],
        "cluster/constraints.txt",
        "cluster/drain_node.py",
    }
    assert needed <= set(copied)
    assert 'pip install --no-cache-dir -c cluster/constraints.txt ".[serve]"' in text
    version = re.search(r"^FROM python:(3\.\d+)-", text, re.M)
    assert version and f"for Python {version[1]}" in read_text("constraints.txt")


def test_the_batch_script_passes_its_linter() -> None:
    run_linter("shellcheck", str(CLUSTER / "slurm.sbatch"))


def test_ray_up_takes_the_file() -> None:
    for name in RAY_UP:
        config = read_yaml(name)
        prepared = prepare_config(config)
        validate_config(prepared)
        assert config["setup_commands"] == [], "the provider's default installs another Ray"
        for kind in ("initialization_commands", "head_setup_commands", "head_start_ray_commands"):
            script = "\n".join(prepared[kind])
            assert subprocess.run(["bash", "-n", "-c", script], timeout=120).returncode == 0
        options = config["docker"]["run_options"]
        assert {"--user $(id -u):0", "-v /etc/passwd:/etc/passwd:ro"} <= {*options}, (
            "who owns the token, and has a name"
        )


def test_workers_of_ray_up_are_spot_machines_that_reach_the_bucket_and_heed_notices() -> None:
    aws, google = (read_yaml(name) for name in RAY_UP)
    head, worker = (kind["node_config"] for kind in aws["available_node_types"].values())
    assert worker["InstanceMarketOptions"] == {"MarketType": "spot"} and "InstanceMarketOptions" not in head
    assert head["IamInstanceProfile"] == worker["IamInstanceProfile"] == {"Name": "INSTANCE_PROFILE"}
    head, worker = (kind["node_config"] for kind in google["available_node_types"].values())
    assert worker["scheduling"]["provisioningModel"] == "SPOT" and "scheduling" not in head
    assert [account["email"] for account in worker["serviceAccounts"]] == ["SERVICE_ACCOUNT"]
    for config, notice in ((aws, 120), (google, 30)):
        assert config["available_node_types"]["gpu"]["min_workers"] == config["max_workers"], "nobody asks for more"
        assert not any("drain_node" in line for line in config["head_start_ray_commands"]), "the driver is on the head"
        command = config["worker_start_ray_commands"][-1]
        found = re.fullmatch(
            r"setsid nohup python /opt/domext_ray/cluster/drain_node.py (.*) >/tmp/\S+ 2>&1 &", command
        )
        assert found
        options = read_options(found[1].split())
        assert options.watch == config["provider"]["type"] and options.seconds < notice


@pytest.mark.parametrize("name", RAY_CLUSTERS)
def test_kuberay_takes_the_file(name: str) -> None:
    """Its fields are known, its pods are Kubernetes', and have room for the object store and time to save."""
    document, cluster, kind = read_yaml(name), read_cluster_spec(name), KINDS.get(name, "RayCluster")
    assert document.keys() == {"apiVersion", "kind", "metadata", "spec"} and document["metadata"].keys() == {"name"}
    assert (document["apiVersion"], document["kind"]) == ("ray.io/v1", kind)
    assert {*document["spec"]} <= {*KNOWN.get(kind, KNOWN["cluster"]).split()}
    assert {*cluster} <= {*KNOWN["cluster"].split()} and {*cluster["headGroupSpec"]} <= {*KNOWN["head"].split()}
    assert "enableInTreeAutoscaling" not in cluster, "its head needs a token of Kubernetes"
    assert "<<:" not in read_text(name), "strict readers refuse the keys that a merge brings twice"
    pods = list_pods(name)
    for pod in pods.values():
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
        (container,) = pod["spec"]["containers"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
    if name in RAY_JOBS:
        assert pods["submitter"]["spec"]["restartPolicy"] == "Never"
    check_node(pods["head"], cluster["headGroupSpec"])
    for group in cluster["workerGroupSpecs"]:
        assert {*group} <= {*KNOWN["workers"].split()}
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        pod = pods[group["groupName"]]["spec"]
        check_node(pods[group["groupName"]], group)
        assert pod["tolerations"][0] == {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
        program, script, *options = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert (program, script) == ("python", "/opt/domext_ray/cluster/drain_node.py")
        assert read_options(options).seconds < pod["terminationGracePeriodSeconds"]


def check_node(pod: dict[str, Any], group: dict[str, Any]) -> None:
    """A node's parameters are options of `ray start`, and it has room for the object store."""
    options = [text for name, value in group["rayStartParams"].items() for text in (f"--{name}", value)]
    read_ray_command(["start", *options])
    (container,) = pod["spec"]["containers"]
    places = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    shm = {volume["name"]: volume for volume in pod["spec"]["volumes"]}[places["/dev/shm"]]["emptyDir"]
    memory = container["resources"]["limits"]["memory"]
    size, whole = (int(amount[:-2]) * MEBIBYTES[amount[-2:]] for amount in (shm["sizeLimit"], memory))
    assert shm["medium"] == "Memory" and 0.3 * whole <= size < whole, "Ray's object store takes 30 % of the memory"


def test_spot_machines_are_a_group_of_their_own() -> None:
    for name in {*RAY_CLUSTERS} - {EIGHT_GPUS}:
        steady, spot = (list_pods(name)[group]["spec"] for group in ("gpu", "spot"))
        (key,) = spot.pop("nodeSelector")
        assert [toleration["key"] for toleration in spot.pop("tolerations")] == ["nvidia.com/gpu", key]
        assert steady.pop("tolerations") and spot == steady


def take_out(pod: dict[str, Any], name: str) -> None:
    """Take out of a pod what the sweep's and the service's have beside the others', and check that it is there."""
    spec = pod["spec"]
    (container,) = spec["containers"]
    if name == SWEEP_JOB:
        claim = read_yaml("kuberay/storage.yaml")["metadata"]["name"]
        assert spec["volumes"].pop() == {"name": "shared", "persistentVolumeClaim": {"claimName": claim}}
        assert container["volumeMounts"].pop() == {"name": "shared", "mountPath": SHARED}
        if container["name"] != "ray-job-submitter":
            assert container["env"].pop() == {"name": "HF_HOME", "value": f"{SHARED}/huggingface"}
    elif container["name"] != "ray-job-submitter":
        assert container.pop("envFrom") == [{"secretRef": {"name": "domext-s3"}}]
    if name == RAY_SERVICE:
        token = container["env"].pop()
        assert token["name"] == "DOMEXT_SERVE_TOKEN" and "secretKeyRef" in token["valueFrom"]
        assert container["ports"].pop() == {"name": "serve", "containerPort": 8000}
        if not container["ports"]:
            del container["ports"]


def test_all_kuberay_files_describe_the_same_cluster() -> None:
    """But for the disk of a sweep, the token and the port of a service, and the size of a pod with eight GPUs."""
    found = {name: list_pods(name) for name in RAY_CLUSTERS}
    for name, pods in found.items():
        for pod in pods.values():
            take_out(pod, name)
            del pod["metadata"]["name"]
    eight = found.pop(EIGHT_GPUS)
    first = found[RAY_CLUSTERS[0]]
    (container,) = eight["gpu"]["spec"]["containers"]
    (usual,) = first["gpu"]["spec"]["containers"]
    each, one = container["resources"]["limits"], usual["resources"]["limits"]
    assert [float(each[key].rstrip("Gi")) / float(one[key].rstrip("Gi")) for key in ("cpu", "memory")] == [8, 8]
    assert (each["nvidia.com/gpu"], one["nvidia.com/gpu"]) == (8, 1)
    container["resources"], eight["gpu"]["spec"]["volumes"] = usual["resources"], first["gpu"]["spec"]["volumes"]
    submitter = eight["submitter"]
    assert (eight["head"], eight["gpu"]) == (first["head"], first["gpu"])
    for name, pods in found.items():
        assert pods.pop("submitter", submitter) == submitter and pods == first
        groups = [{**group, "template": None} for group in read_cluster_spec(name)["workerGroupSpecs"]]
        assert groups == [
            {**group, "template": None} for group in read_cluster_spec(RAY_CLUSTERS[0])["workerGroupSpecs"]
        ]


def test_ray_serve_takes_the_application() -> None:
    config = ServeDeploySchema(**yaml.safe_load(read_yaml(RAY_SERVICE)["spec"]["serveConfigV2"]))
    (application,) = config.applications
    module, _, function = application.import_path.partition(":")
    assert getattr(importlib.import_module(module), function) is build_service
    assert application.args["bank"].startswith(f"{BUCKET}/")
    options = from_dict(ServeConfig, {**application.args, "bank": "s3://bucket/bank"})
    assert options.replicas == 2 and options.scale.use_gpu is True


def test_kubernetes_takes_the_storage() -> None:
    claim = read_yaml("kuberay/storage.yaml")
    kubernetes_validate.validate(claim, kubernetes_validate.latest_version(), strict=True)
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]


def test_ray_takes_the_runtime_environment() -> None:
    options = read_yaml("runtime_env.yaml")
    environment = RuntimeEnv(**options)
    assert options.keys() <= RuntimeEnv.known_fields, "Ray takes any other name for a plugin's"
    first, second = environment["pip"]["packages"]
    root = "${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}"
    assert (first, second) == (f"-c {root}/cluster/constraints.txt", root)


def test_commands_of_ray_are_rays() -> None:
    for name in SHOWN:
        commands = [words for words in list_commands(name) if words[0] == "ray"]
        for command in commands:
            read_ray_command([*command[1:], "python"] if command[-1] == "--" else command[1:])
        assert commands or name in (*RAY_JOBS, "slurm.sbatch")


def test_the_batch_script_starts_raylets_with_rays_options() -> None:
    (script,) = re.findall(r"srun .*bash -c '(.*?)'", read_text("slurm.sbatch"), re.S)
    options = re.findall(r"(--[a-z-]+)", script)
    known = {option for param in cli.commands["start"].params for option in param.opts}
    assert set(options) <= known and {"--head", "--port", "--address", "--block"} <= set(options)


@pytest.mark.usefixtures("far_cluster")  # this machine need not have a cluster's GPUs
@pytest.mark.parametrize("name", SHOWN)
def test_commands_of_jobs_are_read_by_their_jobs(name: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.txt", 400)
    commands = list_jobs(name)
    assert commands
    for _, script, *options in commands:
        path = Path(script.removeprefix("/opt/domext_ray/"))
        assert (REPOSITORY / path).is_file(), "the image has the repository's jobs"
        job = JOBS[path.stem]
        flags = [re.sub("^(s3|gs)://BUCKET", str(tmp_path), option) for option in options]
        config = configure(job, read_flags(job.config_class, flags))
        assert Path(config.run.dir).is_absolute() or (name, config.run.dir) == ("slurm.sbatch", "$PWD/runs")
        if isinstance(config, SweepConfig):
            assert choose_points(config, read_space(config.space))[0]
        else:
            here = ["--corpus", str(tmp_path / "corpus.txt"), "--run.dir", str(tmp_path), "--dry_run", "true"]
            run_pretraining(configure(job, read_flags(job.config_class, [*flags, *here])))
        check_resources(name, config.scale.use_gpu, options)


def check_resources(name: str, use_gpu: Any, options: list[str]) -> None:
    """The GPUs of the nodes that a file describes are as many as its job asks for at most."""
    assert use_gpu
    if name in RAY_CLUSTERS:
        nodes = [
            (group["replicas"], group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
            for group in read_cluster_spec(name)["workerGroupSpecs"]
        ]
    elif name in RAY_UP:
        types = read_yaml(name)["available_node_types"].values()
        nodes = [(kind.get("min_workers", 0), kind["resources"].get("GPU", 0)) for kind in types]
    elif name == "slurm.sbatch":
        text = read_text(name)
        number, gpus = (re.findall(rf"#SBATCH --{option}=(\d+)", text)[0] for option in ("nodes", "gpus-per-node"))
        nodes = [(int(number), int(gpus))]
    else:
        return
    if "--scale.num_workers" in options:  # of a sweep each trial is one
        most = int(options[options.index("--scale.num_workers") + 1].rpartition("-")[2])
        assert 1 < most <= sum(number * gpus for number, gpus in nodes), "an example for a cluster uses it"


def test_what_lasts_is_in_the_bucket_or_on_the_shared_disk() -> None:
    """A bucket, on Google Cloud its own kind; a disk for the sweep; whatever Slurm's site has."""
    for name in {*FILES} - {"constraints.txt", "slurm.sbatch"}:
        places = re.findall(r"(?:--run\.dir |HF_HOME(?:=|: |, value: ))([^\s,}]+)", read_text(name))
        kept = {SWEEP_JOB: SHARED, "ray-gcp.yaml": "gs://BUCKET"}.get(name, BUCKET)
        assert all(place.startswith(f"{kept}/") for place in places), name
        assert places or name in (*PLAIN, RAY_SERVICE), name


def test_versions_agree() -> None:
    pins = read_pins()
    assert {read_cluster_spec(name)["rayVersion"] for name in RAY_CLUSTERS} == {pins["ray"]}
    assert f"Ray {pins['ray']} " in read_text("runtime_env.yaml")
    project = read_project_file()["project"]
    required = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    for requirement in map(Requirement, required):
        if requirement.marker is not None and not requirement.marker.evaluate():
            continue  # of an older Python
        assert pins[requirement.name.lower().replace("_", "-")] in requirement.specifier


def test_every_cluster_asks_for_a_token() -> None:
    assert all(read_cluster_spec(name)["authOptions"] == {"mode": "token"} for name in RAY_CLUSTERS)
    for name in RAY_UP:
        config = read_yaml(name)
        assert "-e RAY_AUTH_MODE=token" in config["docker"]["run_options"]
        assert config["file_mounts"] == {"~/.ray/auth_token": "~/.ray/auth_token"}
    assert "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=" in read_text("slurm.sbatch")
    assert "umask 077" in read_text("slurm.sbatch")
    for name in FILES:
        for command in re.findall(r"ray start --head.*|place=\(--head.*", read_text(name)):
            assert "--dashboard-host=127.0.0.1" in command


def test_no_cluster_sends_usage_statistics() -> None:
    for name in (*RAY_UP, *RAY_CLUSTERS, "Dockerfile", "runtime_env.yaml", "slurm.sbatch"):
        text = re.sub(r"#.*", "", read_text(name))
        assert re.search(r'RAY_USAGE_STATS_ENABLED(=|: "|, value: ")0\b', text), name


def test_every_cluster_gives_a_job_that_is_stopped_time_to_save() -> None:
    """Also the commands of README, which set it before `ray start`, and give it to a job where Ray runs already."""
    variable = re.escape(RAY_GIVEN)
    for name in ("Dockerfile", "slurm.sbatch", "runtime_env.yaml", *RAY_UP, *RAY_CLUSTERS):
        assert re.search(rf'{variable}(=|: "|, value: ")300\b', read_text(name)), name
    own, existing = (
        read_text("README.md").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        for heading in ("Machines of your own", "I have a cluster already")
    )
    assert own.index(f"export {RAY_GIVEN}=300") < own.index("\nray start") and f'"{RAY_GIVEN}": "300"' in existing


def test_the_batch_script_waits_for_a_save_as_long_as_it_says() -> None:
    """And less long than Slurm's notice before the time limit."""
    script = read_text("slurm.sbatch")
    notice, given = (int(re.findall(pattern, script)[0]) for pattern in (r"--signal=B:USR1@(\d+)", rf"{GIVEN}=(\d+)"))
    assert given < notice and f"i < {GIVEN}; i++" in script


def test_files_hold_no_secret_and_list_what_is_filled_in() -> None:
    placeholders = "IMAGE|VM_IMAGE|PROJECT|BUCKET|INSTANCE_PROFILE|SERVICE_ACCOUNT|STORAGE_CLASS|PARTITION|ACCOUNT"
    for name in FILES:
        text = read_text(name)
        assert not re.search(r"\b(?=\w*\d)[0-9a-f]{32,}\b|AKIA|BEGIN [A-Z ]*PRIVATE KEY|0\.0\.0\.0", text), name
        head = text[: next(match.start() for match in re.finditer(r"^[^#\n]", text, re.M))]
        body = re.sub(r"#(?!SBATCH).*", "", text)
        for placeholder in set(re.findall(rf"(?<![\w$-])(?:{placeholders})\b", body)):
            assert re.search(rf"\b{placeholder}\b", head), f"{name}: {placeholder} is explained at the top"
