"""What a sweep's trials take, and how many of them run at once on what the cluster has; Ray runs."""

from __future__ import annotations

import ray

from domext_ray.config.sweep import SweepConfig
from domext_ray.errors import ConfigError
from domext_ray.pretraining.plan import load_run_base
from domext_ray.runtime.ray_cluster import describe_hold, describe_nodes, find_shortage, list_nodes, share_cpus
from domext_ray.studies.sweep.space import Space, configure
from domext_ray.text.corpus.stream import READ_CPUS

PROCESS_BYTES = 2**30
"""Memory of a trial's process without any model: torch, DeepSpeed, transformers, Ray and the rows that it reads."""


def estimate_trial_bytes(config: SweepConfig, space: Space) -> int:
    """Return about how many bytes of memory a trial's process takes.

    Its libraries, the model that is pre-trained, the tensors that fine-tuning starts from, and in fine-tuning fp32
    weights, gradients and AdamW's two moments of what trains.
    """
    weights = []
    for point in space.list_preparations():
        pretrain = configure(config, space, point).pretrain
        base, shape = load_run_base(pretrain), pretrain.shape
        if base is not None:
            weights.append(sum(tensor.numel() for tensor in base.tensors.values()))
        else:
            layer = 4 * shape.hidden_size**2 + 2 * shape.hidden_size * shape.intermediate_size
            weights.append(shape.num_hidden_layers * layer + pretrain.vocab.size * shape.hidden_size)
    trains_all = any(method.trains == "all" for method in (config.method, config.finetune.method))
    return PROCESS_BYTES + (6 if trains_all else 4) * 4 * max(weights)


def _count_by_memory(trial_bytes: int) -> int:
    """Return the trials for whose memory the nodes have room, 1 at least; Ray knows what a container may use."""
    nodes = [node["Resources"].get("memory", 0.0) for node in ray.nodes() if node["Alive"]]
    return max(1, sum(int(memory // trial_bytes) for memory in nodes))


def plan_resources(config: SweepConfig, trial_bytes: int = 0) -> tuple[float, int]:
    """CPUs of a trial's process, and trials at once, checked against the cluster's resources.

    `trial_bytes` is about the memory of a trial; 0: it does not count.
    """
    scale, nodes, with_gpu = config.scale, list_nodes(), config.scale.uses_gpu
    number = config.search.parallel or max(1, int(sum(node.gpus if with_gpu else node.cpus for node in nodes)))
    share = scale.cpus_per_worker or share_cpus(nodes, number, most=1.0, with_gpu=with_gpu, read_cpus=READ_CPUS)

    def find(trials: int) -> str:
        return find_shortage(nodes, trials, share or READ_CPUS, with_gpu=with_gpu, read_cpus=READ_CPUS)

    if not config.search.parallel:
        number = next((count for count in range(number, 1, -1) if not find(count)), 1)
    shortage = find(number)
    if shortage:
        trials = f"{number} trial{'s' if number > 1 else ''} at once"
        raise ConfigError(
            f"{trials} would take {share or READ_CPUS:g} CPUs{' and a GPU' if with_gpu else ''} each, and on "
            f"{describe_nodes(nodes)} {shortage}{describe_hold()}; lower --search.parallel or --scale.cpus_per_worker, "
            "or add nodes."
        )
    room_for = _count_by_memory(trial_bytes) if trial_bytes else number
    if room_for < number:
        needs = f"a trial takes about {trial_bytes / 2**30:.1f} GB of memory, and there is room for {room_for} at once"
        if config.search.parallel:
            print(f"warning: {needs}; --search.parallel is {number}.", flush=True)
        else:
            print(f"{needs}, not {number} as by CPUs and GPUs (--search.parallel decides otherwise).", flush=True)
            number = room_for
    return share, number
