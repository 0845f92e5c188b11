"""Outputs of a frozen encoder's layers over all rows of a task, computed once on Ray Data and kept.

Enters: a start model and tasks. Leaves: CACHE/KEY with parts (float16 [tokens, K, d]) and index.json, which
feature_store.py reads; KEY is a hash of the encoder, the layers and everything that is read, so that runs with other
seeds, rates or heads find the features there. The forward pass is fp32; storing rounds to float16, which keeps 11 bits
of an output. BERT section 5.3.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import pickle
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.data
import torch

from domext_ray.config.finetune import FinetuneConfig
from domext_ray.corpus.texts.ray_tasks import configure_ray_data
from domext_ray.downstream.features.model import check_layers
from domext_ray.downstream.features.store import INDEX, Segment, read_index, split_row
from domext_ray.downstream.start.model import StartModel, build_encoder
from domext_ray.downstream.tasks.task import Task
from domext_ray.errors import BaseModelError, DomextError, RunError
from domext_ray.files import write_json
from domext_ray.model.domext.modeling_domext import DomextModel
from domext_ray.progress import StatusLine, format_seconds

FORMAT_VERSION = 1
PART_TOKENS = 32768
"""Tokens of a part at most, but for a single longer segment: 200 MB for four layers of BERT-base."""
PARTS_PER_ACTOR = 4
"""So many parts, or more, that actors end at about the same time."""
BATCH_TOKENS = 4096
"""Tokens of a forward pass, padding counted."""
FREE_BYTES = 2**30
"""What must stay free on the disk."""

_INCIDENTAL = ("transformers_version", "_name_or_path", "architectures", "dtype", "id2label", "label2id", "auto_map")
"""Values of a configuration that do not change what an encoder computes."""


def prepare_features(start: StartModel, tasks: Sequence[Task], config: FinetuneConfig, cache: Path) -> Path:
    """Compute the features of all rows of tasks, or find them computed; Ray is initialised.

    Args:
        start: the encoder; it computes in eval mode, without dropout, in fp32.
        tasks: whose training rows, and whose rows of dev and test for prediction, are read.
        config: the layers, and what an actor gets (`scale`).
        cache: folder of features, one folder a key; all nodes see it.

    Returns:
        The folder of the features, for `FeatureStore`.

    Raises:
        ConfigError: the encoder has no such layer.
        BaseModelError: an output is no number that float16 has.
        RunError: the disk has not enough room, or a node does not see the folder.
    """
    check_layers(start, config.features)
    segments = collect_segments(tasks)
    layers = config.features.layer_numbers
    key = hash_features(start, segments, layers)
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / key[:16]
    with (cache / f"{folder.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another run may be computing them: then they are there afterwards
        index = read_index(folder)
        if index is None or index.key != key:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            with _removed_on_failure(folder):
                _compute(start, segments, config, folder, key)
    return folder


def collect_segments(tasks: Sequence[Task]) -> list[Segment]:
    """Return what the encoder has to read for tasks, once each, from short to long."""
    found: dict[str, Segment] = {}
    for task in tasks:
        pad_id = task.tokenizer.pad_token_id or 0
        for split, is_training in (("train", True), ("dev", False), ("test", False)):
            for row in task.encode(getattr(task.data, split), is_training=is_training):
                found.update((segment.key, segment) for segment in split_row(row, pad_id))
    return [found[key] for key in sorted(found, key=lambda each: (len(found[each].input_ids), each))]


def hash_features(start: StartModel, segments: Sequence[Segment], layers: Sequence[int]) -> str:
    """Return the sha256 (hex) of everything that decides features: encoder, layers, and what is read."""
    values = {name: value for name, value in start.config.to_dict().items() if name not in _INCIDENTAL}
    identity = {"format": FORMAT_VERSION, "model": start.sha256, "config": values, "layers": list(layers)}
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode())
    for segment in segments:
        digest.update(segment.key.encode())
    return digest.hexdigest()


@contextlib.contextmanager
def _removed_on_failure(folder: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _compute(start: StartModel, segments: Sequence[Segment], config: FinetuneConfig, folder: Path, key: str) -> None:
    """Fill a folder; its index is written last."""
    layers = config.features.layer_numbers
    shape = len(layers), int(start.config.hidden_size)
    num_tokens = sum(len(each.input_ids) for each in segments)
    _check_room(folder, num_tokens * shape[0] * shape[1] * np.dtype(np.float16).itemsize)
    cpus, num_actors = _plan_actors(config)
    parts = cut_parts(segments, max(BATCH_TOKENS, min(PART_TOKENS, num_tokens // (PARTS_PER_ACTOR * num_actors))))
    attempt = uuid.uuid4().hex[:8]  # an actor that outlives a killed job must not write into the next one's parts
    items = [{"name": f"{attempt}-{i}.npy", "segments": pickle.dumps(part)} for i, part in enumerate(parts)]
    names = [str(each["name"]) for each in items]
    configure_ray_data()
    dataset = ray.data.from_items(items, override_num_blocks=len(items)).map_batches(
        PartWriter,
        fn_constructor_kwargs={
            "start": ray.put(start),
            "layers": layers,
            "folder": str(folder),
            "num_threads": max(1, int(cpus)),
            "use_gpu": config.scale.uses_gpu,
        },
        batch_size=1,
        compute=ray.data.ActorPoolStrategy(size=min(num_actors, len(parts))),
        num_cpus=cpus,
        num_gpus=1 if config.scale.uses_gpu else 0,
    )
    del items
    progress = _Progress(num_tokens)
    for row in dataset.iter_rows():
        error = pickle.loads(row["error"])
        if error is not None:
            raise error
        progress.show(int(row["num_tokens"]))
    progress.finish()
    places = {}
    for number, (name, part) in enumerate(zip(names, parts, strict=True)):
        _check_part(folder / name, sum(len(each.input_ids) for each in part), shape)
        first = 0
        for each in part:
            places[each.key] = number, first, len(each.input_ids)
            first += len(each.input_ids)
    write_json(folder / INDEX, {"key": key, "shape": shape, "parts": names, "places": places})


def _check_room(folder: Path, num_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < num_bytes + FREE_BYTES:
        raise RunError(
            f"the features take {num_bytes / 1e9:,.1f} GB and {folder.parent} has {free / 1e9:,.1f} GB left; make room "
            "there, or give another --run.dir or fewer --features.layers."
        )


def _check_part(path: Path, num_tokens: int, shape: tuple[int, int]) -> None:
    if not path.is_file() or np.load(path, mmap_mode="r").shape != (num_tokens, *shape):
        raise RunError(f"{path} is not what its actor wrote; give --run.dir a folder on storage that all nodes share.")


def _plan_actors(config: FinetuneConfig) -> tuple[float, int]:
    """CPUs of an actor, and how many actors: one a CPU, or one a GPU, unless the options say otherwise."""
    available = ray.cluster_resources()
    cpus = config.scale.cpus or 1.0
    limit = available.get("GPU", 0.0) if config.scale.uses_gpu else available.get("CPU", 1.0) / cpus
    return cpus, max(1, min(int(limit), config.scale.parallel or int(limit)))


def cut_parts(segments: Sequence[Segment], num_tokens: int) -> list[list[Segment]]:
    """Cut segments into parts of at most so many tokens; a longer segment is a part of its own."""
    parts: list[list[Segment]] = [[]]
    filled = 0
    for segment in segments:
        length = len(segment.input_ids)
        if parts[-1] and filled + length > num_tokens:
            parts.append([])
            filled = 0
        parts[-1].append(segment)
        filled += length
    return parts


class PartWriter:
    """An actor that holds the encoder and writes parts.

    Args:
        start: reference of the start model.
        layers: whose outputs are features; 0: the embeddings'.
        folder: where parts go.
        num_threads: of torch.
        use_gpu: compute on the GPU that the actor has.
    """

    def __init__(
        self, *, start: ray.ObjectRef, layers: Sequence[int], folder: str, num_threads: int, use_gpu: bool
    ) -> None:
        torch.set_num_threads(num_threads)
        self.device = torch.device("cuda", 0) if use_gpu else torch.device("cpu")
        model: StartModel = ray.get(start)
        self.encoder = build_encoder(model, self.device)
        self.name, self.pad_id = model.id, model.tokenizer.pad_token_id or 0
        self.layers, self.folder = tuple(layers), Path(folder)

    def __call__(self, items: dict[str, np.ndarray]) -> dict[str, list[Any]]:
        """Write one part; a user's mistake is returned, as Ray Data drops the cause of an exception."""
        segments: list[Segment] = pickle.loads(items["segments"][0])
        error: DomextError | None = None
        try:
            self._write(self.folder / str(items["name"][0]), segments)
        except OSError as caught:
            error = RunError(f"the features cannot be written to {self.folder} ({caught.strerror}); make room there.")
        except DomextError as caught:
            error = caught
        return {"num_tokens": [sum(len(each.input_ids) for each in segments)], "error": [pickle.dumps(error)]}

    def _write(self, path: Path, segments: Sequence[Segment]) -> None:
        # Written as it comes, not into a mapped file: on a full disk that would kill the process without a word.
        num_tokens = sum(len(each.input_ids) for each in segments)
        shape = num_tokens, len(self.layers), int(self.encoder.config.hidden_size)
        with path.open("wb") as file:
            np.lib.format.write_array_header_2_0(file, {"descr": "<f2", "fortran_order": False, "shape": shape})
            for features in compute_features(self.encoder, segments, self.layers, self.pad_id):
                if not np.isfinite(features).all():
                    raise BaseModelError(
                        f"an output of layers {self.layers[0]} to {self.layers[-1]} of --model {self.name!r} is no "
                        "number that float16 has; choose other --features.layers, or another model."
                    )
                file.write(features.tobytes())


@torch.no_grad()
def compute_features(
    encoder: DomextModel, segments: Sequence[Segment], layers: Sequence[int], pad_id: int
) -> Iterator[np.ndarray]:
    """Yield the outputs of layers for segments, in their order, in batches of neighbours.

    Args:
        encoder: in eval mode.
        segments: those of a length side by side.
        layers: 0: the embeddings' output, L: the last layer's.
        pad_id: id of [PAD].

    Yields:
        float16 [N, K, d], one a segment.
    """
    for batch in _cut_batches(segments):
        ids, types, mask = _pad(batch, pad_id)
        states = encoder(
            ids.to(encoder.device),
            attention_mask=None if bool(mask.all()) else mask.to(encoder.device),
            token_type_ids=types.to(encoder.device),
            output_hidden_states=True,
            pool=False,
        ).hidden_states
        chosen = torch.stack([states[layer] for layer in layers], dim=2).to(torch.float16).cpu().numpy()
        yield from (features[: len(each.input_ids)] for features, each in zip(chosen, batch, strict=True))


def _cut_batches(segments: Sequence[Segment]) -> Iterator[list[Segment]]:
    batch: list[Segment] = []
    longest = 0
    for segment in segments:
        longest = max(longest, len(segment.input_ids))
        if batch and (len(batch) + 1) * longest > BATCH_TOKENS:
            yield batch
            batch, longest = [], len(segment.input_ids)
        batch.append(segment)
    if batch:
        yield batch


def _pad(segments: Sequence[Segment], pad_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, types and mask int64 [B, N] of segments."""
    width = max(len(each.input_ids) for each in segments)
    ids = np.full((len(segments), width), pad_id, dtype=np.int64)
    types, mask = np.zeros_like(ids), np.zeros_like(ids)
    for i, each in enumerate(segments):
        length = len(each.input_ids)
        ids[i, :length], types[i, :length], mask[i, :length] = each.input_ids, each.token_type_ids, 1
    return torch.from_numpy(ids), torch.from_numpy(types), torch.from_numpy(mask)


class _Progress:
    """Tokens, tokens/s, time left."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens, self.done, self.line = num_tokens, 0, StatusLine()

    def show(self, num_tokens: int) -> None:
        """Count tokens."""
        self.done += num_tokens
        rate = self.done / self.line.seconds
        left = format_seconds((self.num_tokens - self.done) / rate)
        self.line.show(f"features: {self.done:,} of {self.num_tokens:,} tokens, {rate:,.0f} tokens/s, {left} left")

    def finish(self) -> None:
        """Show the last line."""
        self.line.keep(f"features: {self.num_tokens:,} tokens in {self.line.seconds:.1f} s")
