"""A model as an ONNX graph, which onnxruntime computes without torch; and such a graph in the place of a model.

A graph takes rows of any number and length: `input_ids`, `attention_mask` and, where the layout has segments,
`token_type_ids`, int64 [B, N] (choices: [B, C, N]); a masked LM also `masked_positions`, int64 [P] in the flattened
[B·N], and a classifier of marked pairs `entity_positions`, int64 [B, 2]. It returns `logits`, fp32 [P, V + E] or of the
head's shape; a head for answers `start_logits` and `end_logits`, [B, N]. The adapters that are active when the graph is
written are part of it. `max_length` in its metadata is the longest row.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import Dim

from domext_ray.errors import ConfigError, RunError
from domext_ray.model.domext.configuration_domext import DomextConfig
from domext_ray.model.domext.heads_domext import (
    DomextForMultipleChoice,
    DomextForQuestionAnswering,
    DomextForRelationClassification,
)
from domext_ray.model.domext.layers_domext import take_tokens
from domext_ray.model.domext.modeling_domext import DomextForMaskedLM

GRAPH = "model.onnx"
INT8 = "int8"
"""Folder, in an ONNX folder, of the same in int8."""
POSITIONS, ENTITIES = "masked_positions", "entity_positions"
MAX_PROTOBUF_BYTES = 2**31 - 2**24
"""Weights above it go into a file beside the graph: protobuf holds 2 GiB, and the graph itself needs some."""
_NEEDS = ("onnx", "onnxscript", "onnxruntime")
_MAX_LENGTH = "max_length"


def require_onnx() -> None:
    """Refuse without the packages of the extra `onnx`; ConfigError."""
    for name in _NEEDS:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f'ONNX needs {name}, which is not installed: pip install "domext_ray[onnx]".')


def write_graph(model: Any, path: Path) -> None:
    """Write a model in evaluation mode, on the CPU and in fp32, as a graph; weights above 2 GB stand beside it.

    The model is taken over: adapters that shift some words shift all of them afterwards, the others by 0. A BiLSTM is
    refused, for its loop over tokens is none of a graph's operations here.
    """
    config = cast(DomextConfig, model.config)
    if config.head_bilstm:
        raise ConfigError(
            f"--run: the model reads states by a BiLSTM of {config.head_bilstm}, which a graph cannot hold; "
            "fine-tune it with --head_bilstm 0, or take --format huggingface."
        )
    names = _list_inputs(model)
    given, shapes = _make_inputs(model, names)
    is_answer = isinstance(model, DomextForQuestionAnswering)
    outputs = ["start_logits", "end_logits"] if is_answer else ["logits"]
    model.set_attn_implementation("sdpa")
    _shift_all_words(model)
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    model.bert._build_masks = partial(_build_masks, config)
    try:
        with torch.no_grad(), _quiet_logger("torch.onnx"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                _Graph(model, names),
                given,
                dynamo=True,
                verbose=False,
                input_names=names,
                output_names=outputs,
                dynamic_shapes=(shapes,),
            )
    finally:
        del model.bert._build_masks
    assert program is not None, "of torch's exporter by tracing"
    _forget_source(program.model)
    program.model.metadata_props[_MAX_LENGTH] = str(config.max_row_length)
    program.save(str(path), external_data=num_bytes > MAX_PROTOBUF_BYTES)


def _forget_source(model: Any) -> None:
    """Take out of a graph which lines of code its operations come from: they name folders of this machine."""
    for graph in (model.graph, *model.functions.values()):
        nodes = list(graph.all_nodes())
        values = [*graph.inputs, *(output for node in nodes for output in node.outputs)]
        for part in (graph, *nodes, *values):
            part.metadata_props.clear()
    for part in model.graph.initializers.values():
        part.metadata_props.clear()


def quantize_graph(source: Path, target: Path) -> None:
    """Write a graph whose matrices are int8, and whose products of them are, too (dynamic quantisation)."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    is_large = source.with_name(f"{source.name}.data").exists()
    with _quiet_logger(None):  # it advises to prepare graphs, which gains nothing here
        quantize_dynamic(source, target, weight_type=QuantType.QInt8, use_external_data_format=is_large)


@contextlib.contextmanager
def _quiet_logger(name: str | None) -> Iterator[None]:
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


class _Graph(nn.Module):
    """What is traced: a model whose inputs come in the order of their names."""

    def __init__(self, model: Any, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, names

    def forward(self, *tensors: Tensor) -> Any:
        """Return the logits."""
        given, model = dict(zip(self.names, tensors, strict=True)), self.model
        if isinstance(model, DomextForMaskedLM):
            positions = given.pop(POSITIONS)
            states = take_tokens(model.bert(**given, pool=False).last_hidden_state, positions)
            return model.cls.predictions(states, model.bert.embeddings.adapters)
        outputs = model(**given)
        return (outputs.start_logits, outputs.end_logits) if "start_logits" in outputs else outputs.logits


def _list_inputs(model: Any) -> list[str]:
    names = ["input_ids", "attention_mask", *(["token_type_ids"] if model.config.type_vocab_size else [])]
    if isinstance(model, DomextForMaskedLM):
        names.append(POSITIONS)
    return [*names, ENTITIES] if isinstance(model, DomextForRelationClassification) else names


def _make_inputs(model: Any, names: Sequence[str]) -> tuple[tuple[Tensor, ...], tuple[dict[int, Any], ...]]:
    """Return an example of each input, with padding, and which of its dimensions are any number."""
    rows, choices, length = 2, 3, 8
    dims = {"B": Dim("batch"), "C": Dim("choices"), "N": Dim("length", max=model.config.max_row_length)}
    is_choice = isinstance(model, DomextForMultipleChoice)
    shape, kinds = ((rows, choices, length), "BCN") if is_choice else ((rows, length), "BN")
    mask = torch.ones(shape, dtype=torch.int64)
    mask[..., -1] = 0
    found = {
        "input_ids": (torch.full(shape, 5), kinds),
        "attention_mask": (mask, kinds),
        "token_type_ids": (torch.zeros(shape, dtype=torch.int64), kinds),
        POSITIONS: (torch.tensor([1, 4, 9]), ""),
        ENTITIES: (torch.tensor([[1, 3], [2, 4]]), "B"),
    }
    shapes: list[dict[int, Any]] = [
        {0: Dim("positions")} if name == POSITIONS else {i: dims[kind] for i, kind in enumerate(found[name][1])}
        for name in names
    ]
    return tuple(found[name][0] for name in names), tuple(shapes)


@torch.no_grad()
def _shift_all_words(model: Any) -> None:
    """Have adapters shift whole tables: a graph has no operation that looks up which words are shifted."""
    shifts = model.bert.embeddings.adapters
    for name, shift in shifts.items():
        if shift.rows is None:
            continue
        num_words = len(model.bert.embeddings.word_embeddings.weight)
        parts = [shift.weight] + ([model.cls.predictions.adapters[name].bias] if hasattr(model, "cls") else [])
        for param in parts:
            param.data = param.new_zeros(num_words, *param.shape[1:]).index_copy(0, shift.rows, param.data)
        shift.rows = None


def _build_masks(config: DomextConfig, embedded: Tensor, attention_mask: Tensor, _: None) -> tuple[Tensor, Any]:
    """Return the masks of global and local layers, [B, 1, 1 or N, N], True where a token sees another.

    Those of the model ask for lengths in Python, which tracing would fix.
    """
    places = torch.arange(embedded.shape[1])
    everywhere, apart = attention_mask.bool()[:, None, None], places[:, None] - places
    if config.causal:
        everywhere = everywhere & (apart >= 0)
    if config.sliding_window is None:
        return everywhere, None
    # A token sees itself: a softmax over nothing is nan.
    return everywhere, (everywhere & (apart.abs() <= config.local_window)) | (apart == 0)


class OnnxModel(nn.Module):
    """A graph in the place of the model that it was written from, to predict on the CPU."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        if importlib.util.find_spec("onnxruntime") is None:
            raise ConfigError(
                f"{folder} holds an ONNX graph, which needs onnxruntime, which is not installed: "
                'pip install "domext_ray[onnx]".'
            )
        import onnxruntime

        options, path = onnxruntime.SessionOptions(), folder / GRAPH
        options.intra_op_num_threads = torch.get_num_threads()
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
            longest = int(self._session.get_modelmeta().custom_metadata_map[_MAX_LENGTH])
        except Exception as error:  # its errors have no class of their own that is public
            raise RunError(f"{path} is no graph of this project, or damaged; export the model again.") from error
        self.inputs = [node.name for node in self._session.get_inputs()]
        self.outputs = [node.name for node in self._session.get_outputs()]
        self.config, self.device = SimpleNamespace(max_row_length=longest), torch.device("cpu")

    def set_attn_implementation(self, name: str) -> None:
        """Leave attention as it is: a graph has one."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **given: Any) -> SimpleNamespace:
        """Return the outputs by their names; inputs that a graph does not have are those of faster kernels."""
        values = {**given, "input_ids": input_ids, "attention_mask": attention_mask}
        defaults = {"attention_mask": torch.ones_like, "token_type_ids": torch.zeros_like}
        feed = {name: defaults[name](input_ids) if values.get(name) is None else values[name] for name in self.inputs}
        found = self._session.run(self.outputs, {name: tensor.numpy() for name, tensor in feed.items()})
        return SimpleNamespace(
            **{name: torch.from_numpy(array) for name, array in zip(self.outputs, found, strict=True)}
        )


def is_graph(folder: Path) -> bool:
    """Whether a folder holds a graph of this project; a base may have one of others beside its config.json."""
    return (folder / GRAPH).is_file() and not (folder / "config.json").is_file()
