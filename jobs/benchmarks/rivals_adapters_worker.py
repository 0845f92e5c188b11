"""AdapterHub's library as `jobs/benchmark.py step --method bottleneck` times it, in an environment of its own.

`rivals_adapters.py` starts it there. Enters: one JSON request a line on standard input. Leaves: one JSON answer a line
on standard output, the first of them the library's version. Between two requests it waits for the pipe, so it takes no
processor time from the other side. Of this project it imports `benchmarks.timing` and a worker's kernels alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TextIO

import torch
from benchmarks.timing import Batch, Seconds, compute_figures, make_step
from safetensors.torch import load_file
from torch import Tensor


class Worker:
    """A BERT with bottleneck adapters, made and trained as that library's users do.

    Args:
        config: the plain BERT's configuration.
        adapter: name and reduction factor of the adapter.
        device: where to train.
        bf16: autocast.
    """

    def __init__(self, config: dict[str, Any], adapter: dict[str, Any], device: torch.device, *, bf16: bool) -> None:
        adapters, transformers = import_libraries()
        self.model = transformers.BertForMaskedLM(transformers.BertConfig(**config))
        adapters.init(self.model)
        self.model.add_adapter(
            adapter["name"],
            config=adapters.DoubleSeqBnConfig(reduction_factor=adapter["reduction_factor"], non_linearity="gelu"),
            set_active=True,
        )
        self.model.train_adapter(adapter["name"])
        # The library freezes the encoder; this method trains LayerNorms of its layers too, and no head.
        self.model.cls.requires_grad_(False)
        for layer in self.model.bert.encoder.layer:
            layer.attention.output.LayerNorm.requires_grad_(True)
            layer.output.LayerNorm.requires_grad_(True)
        self.model.to(device)
        self.device, self.bf16 = device, bf16
        self.step: Callable[[], Seconds] | None = None

    def prepare(self, weights: str, batch: str) -> dict[str, Any]:
        """Load weights and a batch from safetensors files and begin with new moments; return figures to compare."""
        tensors = load_file(weights)
        missing, unexpected = self.model.load_state_dict(tensors, strict=False)
        own = {name: tensor.data_ptr() for name, tensor in self.model.state_dict().items()}
        loaded = {own[name] for name in tensors}
        left_out = [name for name in missing if own[name] not in loaded]  # the others are tied
        assert not left_out and not unexpected, f"missing {left_out}, unexpected {unexpected}"
        rows = Batch(**{name: tensor.to(self.device) for name, tensor in load_file(batch).items()})
        self.step = make_step(self.model, self.compute_loss, rows, bf16=self.bf16)
        return asdict(compute_figures(self.model, lambda: self.compute_loss(rows)))

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return BertForMaskedLM's own loss: it projects every position and leaves out labels of -100."""
        return self.model(input_ids=batch.input_ids, labels=batch.all_labels.view_as(batch.input_ids)).loss

    def time_step(self) -> dict[str, Any]:
        """Make one training step."""
        assert self.step is not None, "prepare comes first"
        return asdict(self.step())


def import_libraries() -> tuple[Any, Any]:
    """Return the modules adapters and transformers, late: what they print at import must not look like an answer."""
    try:
        return importlib.import_module("adapters"), importlib.import_module("transformers")
    except ImportError as error:
        sys.exit(f"{sys.executable}: {error}")


def use_kernels(*, uses_fp32: bool) -> None:
    """Compute with the kernels of a job's worker."""
    from domext_ray.runtime.cpu_kernels import (  # which an older torch may not be able to load
        TRAINING,
        configure_kernels,
    )

    if not hasattr(torch.library, "get_kernel"):
        sys.exit(f"{sys.executable}: --as_worker needs a newer torch than {torch.__version__}")
    configure_kernels(TRAINING, uses_fp32=uses_fp32)


@contextmanager
def take_stdout() -> Iterator[TextIO]:
    """Keep standard output for answers; what libraries print goes to standard error."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        yield answers


def answer(worker: Worker, request: dict[str, Any]) -> dict[str, Any]:
    """Do what one request asks."""
    if request["do"] == "prepare":
        return worker.prepare(request["weights"], request["batch"])
    return worker.time_step()


def main() -> None:
    """Answer requests until standard input ends."""
    parser = argparse.ArgumentParser(description="Steps of AdapterHub's library, one a request.")
    parser.add_argument("settings", help="JSON: config, adapter, device, bf16, as_worker, threads")
    settings = json.loads(parser.parse_args().settings)
    with take_stdout() as answers:
        adapters, transformers = import_libraries()
        torch.set_num_threads(settings["threads"])
        if settings["as_worker"]:
            use_kernels(uses_fp32=not settings["bf16"])
        worker = Worker(
            settings["config"], settings["adapter"], torch.device(settings["device"]), bf16=settings["bf16"]
        )
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        hello = {"adapters": adapters.__version__, **versions, "threads": torch.get_num_threads()}
        print(json.dumps(hello), file=answers, flush=True)
        for line in sys.stdin:
            print(json.dumps(answer(worker, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
