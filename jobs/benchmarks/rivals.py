"""What training steps are timed against, each only as much as must be there to make a step.

- `Equations`, `AfEquations`, `ExbertEquations`: the papers' equations, written down literally for BERT's layout: eager
  attention, a projection to the vocabulary at every position; for AF Adapter, frozen and trainable weights concatenated
  into one matrix;
- `make_transformers`: transformers' own model of the shape, all weights or with peft's LoRA, in a bare loop;
- `time_trainer`: the same in transformers' Trainer;
- `AdapterHub`: AdapterHub's library, in a process of an environment of its own (rival_worker.py).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from benchmarks.rival_worker import QUIET
from benchmarks.timing import Batch, Clock, Figures, Seconds
from peft import get_peft_model
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from domext_ray.config.extensions.table import build_lora_config
from domext_ray.config.method import MethodConfig
from domext_ray.errors import ConfigError
from domext_ray.export.adapter_folders import ADAPTERS_VERSION, find_reduction_factor
from domext_ray.model.build import detach, name_plain
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM
from domext_ray.model.layouts import SHARED_FIELDS, find_layout

_NEEDED = (
    f"the interpreter of an environment with version {ADAPTERS_VERSION} of AdapterHub's library, such as "
    f"rival/bin/python after `python -m venv rival && rival/bin/pip install torch adapters=={ADAPTERS_VERSION}`"
)
_RANKS = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")


# --- equations ---


class Equations(nn.Module, ABC):
    """The same model as its paper's equations stand, on its weights."""

    def __init__(self, model: DomextForMaskedLM) -> None:
        super().__init__()
        self.model = model
        self.num_heads, self.dropout = model.config.num_attention_heads, model.config.hidden_dropout_prob

    def forward(self, batch: Batch) -> Tensor:
        """Return the mean loss of the predicted positions."""
        hidden_states = self.model.bert.embeddings(batch.input_ids, None, None, None)
        for layer in self.model.bert.encoder.layer:
            hidden_states = self.run_layer(layer, hidden_states)
        return F.cross_entropy(self.model.cls.predictions(hidden_states).float().flatten(0, 1), batch.all_labels)

    @abstractmethod
    def run_layer(self, layer: Any, hidden_states: Tensor) -> Tensor:
        """One layer, [B, N, d] -> [B, N, d]."""

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Eager attention over heads, [B, heads, N, d_k] -> [B, N, heads · d_k]."""
        scores = query @ key.transpose(2, 3) * query.shape[-1] ** -0.5
        weights = F.dropout(torch.softmax(scores, dim=-1), self.dropout, self.training)
        return (weights @ value).transpose(1, 2).flatten(2)

    def finish(self, output: Any, projected: Tensor, residual: Tensor) -> Tensor:
        """`LayerNorm(dropout(projected) + residual)`."""
        return output.LayerNorm(F.dropout(projected, self.dropout, self.training) + residual)


class AfEquations(Equations):
    """AF Adapter: `x [W : W']`, all heads in one attention; extensions of one adapter with heads and FFN units."""

    def __init__(self, model: DomextForMaskedLM) -> None:
        super().__init__(model)
        (self.adapter,) = model.config.adapters
        self.head_size = model.config.hidden_size // self.num_heads

    def run_layer(self, layer: Any, hidden_states: Tensor) -> Tensor:
        base, extra = layer.attention.self, layer.attention.adapters[self.adapter]
        query, key, value = (
            _widen(getattr(base, name), getattr(extra, name), hidden_states)
            .unflatten(-1, (-1, self.head_size))
            .transpose(1, 2)
            for name in ("query", "key", "value")
        )
        attended = self._project(layer.attention.output, extra.output, self.mix(query, key, value), hidden_states)
        units = layer.adapters[self.adapter]
        inner = F.gelu(_widen(layer.intermediate.dense, units.input, attended))
        return self._project(layer.output, units.output, inner, attended)

    def _project(self, output: Any, extra: nn.Linear, inputs: Tensor, residual: Tensor) -> Tensor:
        """`LayerNorm(dropout(x [W over W'] + b + b') + residual)`."""
        weight = torch.cat([output.dense.weight, extra.weight], dim=1)
        return self.finish(output, F.linear(inputs, weight, output.dense.bias + extra.bias), residual)


class ExbertEquations(Equations):
    """exBERT: the base's layer and the extension module one after the other, then the gated sum."""

    def run_layer(self, layer: Any, hidden_states: Tensor) -> Tensor:
        base, extra = layer.attention, layer.extension
        attended = self.finish(base.output, base.output.dense(self._attend(base.self, hidden_states)), hidden_states)
        inner = F.gelu(layer.intermediate.dense(attended))
        base_output = self.finish(layer.output, layer.output.dense(inner), attended)
        context = self._attend(extra.heads, hidden_states)
        attended = self.finish(extra.attention_output, extra.attention_output.dense(context), hidden_states)
        own_output = self.finish(extra.output, extra.output.dense(F.gelu(extra.intermediate(attended))), attended)
        gate = torch.sigmoid(F.linear(hidden_states, extra.gate.weight, extra.gate.bias))
        return base_output * gate + own_output * (1 - gate)

    def _attend(self, heads: Any, hidden_states: Tensor) -> Tensor:
        """One group of heads, [B, N, d] -> [B, N, heads · d_k]."""
        projected = (getattr(heads, name)(hidden_states) for name in ("query", "key", "value"))
        return self.mix(*(states.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for states in projected))


def _widen(base: nn.Linear, extra: nn.Linear, inputs: Tensor) -> Tensor:
    """`x [W : W'] + [b : b']`."""
    return F.linear(inputs, torch.cat([base.weight, extra.weight]), torch.cat([base.bias, extra.bias]))


# --- transformers and peft ---


def _build_plain(model: DomextForMaskedLM) -> Any:
    """Return transformers' own model with the base's weights of one of ours, whose extensions it leaves out."""
    config: Any = model.config
    plain = {own: name for own, name in name_plain(model).items() if ".adapters." not in own}
    rival: Any = AutoModelForMaskedLM.from_config(find_layout(config).restore(config, "ForMaskedLM"))
    rival.load_state_dict(detach(model, plain), strict=False)
    return rival


def make_transformers(model: DomextForMaskedLM, method: MethodConfig | None) -> nn.Module:
    """Return transformers' own model on the weights of ours: of the whole, or with LoRA that `method` describes.

    ModernBERT's class stores query, key and value as one matrix, of which peft adapts all.
    """
    config: Any = model.config
    if method is None:
        return cast(nn.Module, _build_plain(model)).to(model.device).train()
    lora = build_lora_config(method, gated=config.gated_ffn)
    if config.gated_ffn:
        lora.target_modules = ["Wqkv"]
    plain = AutoModelForMaskedLM.from_config(find_layout(config).restore(config, "ForMaskedLM"))
    rival = cast(nn.Module, get_peft_model(plain, lora))
    if not config.gated_ffn:
        params = dict(model.named_parameters())
        tensors = {f"base_model.model.{plain}": params[own] for own, plain in name_plain(model).items()}
        missing, unexpected = rival.load_state_dict(tensors, strict=False)
        assert all(".cls.predictions.decoder." in name for name in missing) and not unexpected, (missing, unexpected)
    return rival.to(model.device).train()


def compute_whole_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that transformers' class computes by itself: it projects every position, and leaves out -100."""
    loss: Tensor = model(input_ids=batch.input_ids, labels=batch.all_labels.view_as(batch.input_ids)).loss
    return loss


def split_rows(batch: Batch) -> list[dict[str, Tensor]]:
    """Return a batch's rows as a dataset holds them."""
    labels = batch.all_labels.view_as(batch.input_ids)
    return [
        {"input_ids": ids, "labels": targets} for ids, targets in zip(batch.input_ids.cpu(), labels.cpu(), strict=True)
    ]


def stack_rows(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate rows of one length."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


class _StepTimer(TrainerCallback):
    """Times a Trainer's steps after its first ones, with the reading of their batches."""

    def __init__(self, num_untimed: int, device: torch.device) -> None:
        self.num_untimed, self.clock = num_untimed, Clock(device)
        self.seconds: Seconds | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.clock.restart()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.num_untimed:
            self.clock.restart()
        if state.global_step == state.max_steps:
            self.seconds = self.clock.read(state.max_steps - self.num_untimed)


def time_trainer(
    model: nn.Module, rows: Sequence[Any], collator: Any, num_untimed: int, device: torch.device, **arguments: Any
) -> Seconds:
    """Let transformers' Trainer train once over the rows; return a step's time, the first ones left out."""
    logging.set_verbosity_error()  # it warns that there is a process group which it does not use
    timer, is_cpu = _StepTimer(num_untimed, device), device.type == "cpu"
    with tempfile.TemporaryDirectory(prefix="domext-trainer-") as folder, _without_ranks():
        given = {"num_train_epochs": 1, "use_cpu": is_cpu, "dataloader_pin_memory": not is_cpu, **QUIET, **arguments}
        settings = TrainingArguments(output_dir=folder, **given)
        trainer = Trainer(
            cast(Any, model), settings, train_dataset=cast(Any, rows), data_collator=collator, callbacks=[timer]
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    assert trainer.model_wrapped is model, "the rival trains the bare model"
    assert timer.seconds is not None
    return timer.seconds


@contextmanager
def _without_ranks() -> Iterator[None]:
    """Hide the ranks that DeepSpeed put into the environment: accelerate would wrap the model for several workers."""
    hidden = {name: os.environ.pop(name) for name in _RANKS if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


# --- AdapterHub's library ---


class AdapterHub:
    """A process that has AdapterHub's library, and what is said to it; leaving the context ends it.

    The rival gets the weights of the model, which has one adapter of bottlenecks, and every step trains on the batch.
    """

    def __init__(self, options: argparse.Namespace, model: DomextForMaskedLM, batch: Batch) -> None:
        python, config = options.rival_python, cast(Any, model.config)
        if not python:
            raise ConfigError(f"--rival_python is empty; --methods bottleneck needs {_NEEDED}.")
        ((adapter, sizes),) = config.adapters.items()
        settings = {
            "config": {name: getattr(config, name) for name in SHARED_FIELDS},
            "adapter": adapter,
            "reduction_factor": find_reduction_factor(config.hidden_size, sizes.bottleneck_size),
            "device": options.device,
            "bf16": options.precision == "bf16",
            "as_worker": options.as_worker,
            "threads": torch.get_num_threads(),
            "steps": options.steps,
        }
        search = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, Path(__file__).parents[1:3]))}
        command = [python, "-m", "benchmarks.rival_worker", "adapters", json.dumps(settings)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=search
            )
        except OSError as error:
            raise ConfigError(
                f"--rival_python is {python!r}, which cannot be run ({error.strerror}); give {_NEEDED}."
            ) from error
        found = self._read() or {"adapters": "no version"}
        if found["adapters"] != ADAPTERS_VERSION:
            self.__exit__()
            said = f"which can load {found['adapters']} of AdapterHub's library"
            raise ConfigError(f"--rival_python is {python!r}, {said}; give {_NEEDED}.")
        assert found["threads"] == torch.get_num_threads(), "both sides use equally many threads"
        with tempfile.TemporaryDirectory(prefix="domext-rival-") as folder:
            save_file(_name_weights(model, adapter), Path(folder, "weights"))
            save_file({name: tensor.contiguous() for name, tensor in vars(batch).items()}, Path(folder, "batch"))
            self.figures = Figures(**self._ask(folder))

    def __enter__(self) -> AdapterHub:
        return self

    def __exit__(self, *error: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()  # its requests end, so it leaves by itself
        self._process.stdout.close()
        self._process.wait()

    def time_steps(self) -> Seconds:
        """Let the rival make its training steps; nothing else runs here meanwhile."""
        return Seconds(**self._ask("step"))

    def _ask(self, request: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(request, file=self._process.stdin, flush=True)
        answer = self._read()
        assert answer is not None, "the rival's process ended; its error stands above"
        return answer

    def _read(self) -> dict[str, Any] | None:
        """Wait for an answer; None when the process has ended."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        return json.loads(line) if line else None


def _name_weights(model: DomextForMaskedLM, adapter: str) -> dict[str, Tensor]:
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
            tensors[name.replace(".down.", ".adapter_down.0.").replace(".up.", ".adapter_up.")] = param
    return {name: tensor.contiguous() for name, tensor in tensors.items()}
