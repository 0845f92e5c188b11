"""AdapterHub's library as a rival: a process in an environment of its own, because it pins another transformers.

Enters: a model with one adapter of bottlenecks, and batches. Leaves: figures to compare and seconds of steps, made by
`rivals_adapters_worker.py` with the same weights on the same batch, one step a request.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import torch
from benchmarks.timing import Batch, Figures, Seconds
from safetensors.torch import save_file
from torch import Tensor

from domext_ray.errors import ConfigError
from domext_ray.export.adapter_folders import ADAPTERS_VERSION, find_reduction_factor
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.layouts import SHARED_FIELDS

INSTALL = f"python -m venv rival && rival/bin/pip install torch adapters=={ADAPTERS_VERSION}"


class AdaptersRival:
    """The process and what is said to it. A context manager: leaving it ends the process.

    Args:
        python: interpreter of an environment with AdapterHub's library.
        model: the model whose weights the rival gets at every `prepare`.
        device: where the rival trains.
        bf16: autocast.
        as_worker: it computes with the kernels of a job's worker.

    Raises:
        ConfigError: there is no such interpreter, or it has another version of the library or none.
    """

    def __init__(
        self, python: str, model: DomextForMaskedLM, device: torch.device, *, bf16: bool, as_worker: bool = False
    ) -> None:
        if not python:
            raise ConfigError(
                f"--rival_python is empty; --method bottleneck needs the interpreter of an environment with "
                f"AdapterHub's library, such as rival/bin/python after `{INSTALL}`."
            )
        self.model = model
        self.config = cast(DomextConfig, model.config)
        (self.adapter,) = self.config.adapters
        settings = {
            "config": {name: getattr(self.config, name) for name in SHARED_FIELDS},
            "adapter": {
                "name": self.adapter,
                "reduction_factor": find_reduction_factor(
                    self.config.hidden_size, self.config.adapters[self.adapter].bottleneck_size
                ),
            },
            "device": str(device),
            "bf16": bf16,
            "as_worker": as_worker,
            "threads": torch.get_num_threads(),
        }
        command = [python, "-m", "benchmarks.rivals_adapters_worker", json.dumps(settings)]
        search = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[1:3]))}
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=search
            )
        except OSError as error:
            raise ConfigError(
                f"--rival_python is {python!r}, which cannot be run ({error.strerror}); give the interpreter of an "
                f"environment with AdapterHub's library, such as rival/bin/python after `{INSTALL}`."
            ) from error
        self.versions = self._read()
        if self.versions is None or self.versions["adapters"] != ADAPTERS_VERSION:
            self.close()
            found = "no version" if self.versions is None else f"version {self.versions['adapters']}"
            raise ConfigError(
                f"--rival_python is {python!r}, which can load {found} of AdapterHub's library; give an environment "
                f"with version {ADAPTERS_VERSION}, as made by `{INSTALL}`."
            )
        assert self.versions["threads"] == torch.get_num_threads(), "both sides use equally many threads"

    def __enter__(self) -> AdaptersRival:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process: its requests end, so it leaves by itself."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait()

    def prepare(self, batch: Batch) -> Figures:
        """Give the rival the model's present weights and a batch; return its loss and gradient."""
        with tempfile.TemporaryDirectory(prefix="domext-rival-") as folder:
            weights, rows = Path(folder, "weights.safetensors"), Path(folder, "batch.safetensors")
            save_file(name_weights(self.model, self.adapter), weights)
            save_file({name: tensor.contiguous() for name, tensor in vars(batch).items()}, rows)
            return Figures(**self._ask({"do": "prepare", "weights": str(weights), "batch": str(rows)}))

    def time_step(self) -> Seconds:
        """Let the rival make one training step; nothing else runs here meanwhile."""
        return Seconds(**self._ask({"do": "step"}))

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        answer = self._read()
        assert answer is not None, "the rival's process ended; its error stands above"
        return answer

    def _read(self) -> dict[str, Any] | None:
        """Wait for an answer; None when the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None


def name_weights(model: DomextForMaskedLM, adapter: str) -> dict[str, Tensor]:
    """Return a model's tensors under the names of a plain BERT with that library's adapter.

    The adapter's shifts are added to the LayerNorms, which that library trains in place.
    """
    params = {name: param.detach() for name, param in model.named_parameters()}
    place, shift = f".adapters.{adapter}.", f".adapters.{adapter}.norm."
    tensors = {name: param for name, param in params.items() if place not in name}
    for name, param in params.items():
        if shift in name:
            norm = name.replace(shift, ".LayerNorm.")
            tensors[norm] = tensors[norm] + param
        elif place in name:
            theirs = name.replace(place, f".adapters.{adapter}.")
            tensors[theirs.replace(".down.", ".adapter_down.0.").replace(".up.", ".adapter_up.")] = param
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
