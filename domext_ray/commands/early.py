"""What a look at this machine tells about a job, before torch and a model are loaded."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from domext_ray.config.embedding import EmbedConfig
from domext_ray.config.inference import PredictConfig
from domext_ray.config.pretrain import PrepareConfig, PretrainConfig
from domext_ray.errors import BaseModelError, ConfigError, CorpusError
from domext_ray.storage import Place, parse_json
from domext_ray.text.data.names import check_name, describe_near, find_near

if TYPE_CHECKING:
    from domext_ray.text.data.sample import Sample

_ALL_POSITIONS = ("bert", "distilbert", "electra", "modernbert")
"""Architectures whose rows have as many tokens as there are positions; RoBERTa's have a few less."""


def check_early(config: PretrainConfig) -> None:
    """Refuse a text, a run to start from, a base or a GPU that there is not, and sizes that the base does not have.

    A run that has begun is the job's to look at: one that has ended needs none of them.
    """
    from domext_ray.runs.run_directory import RUN, resolve_paths
    from domext_ray.text.data.sample import tell_owners

    if (resolve_paths(config).run / RUN).exists():
        return
    _check_gpu(config)
    if config.init_from and not Path(config.init_from).expanduser().is_dir():
        hint = describe_near(find_near(config.init_from)) or "give the directory of a run."
        raise ConfigError(f"--init_from is {config.init_from!r}, which does not exist; {hint}")
    _check_base(config)
    for text in config.texts:
        if text.is_written:
            continue
        if sample := check_text(text.option.removeprefix("--"), text.corpus, config.prepare_for(text)):
            tell_owners(sample, config, text)


def write_early(config: PretrainConfig) -> contextlib.AbstractContextManager[None]:
    """Begin to write the package documentation that a run is going to read, if it is, while torch is loaded."""
    from domext_ray.files import split_paths
    from domext_ray.runs.run_directory import RUN, resolve_paths
    from domext_ray.text.data.files import PACKAGE_DOCS, pin_entries
    from domext_ray.text.data.package_docs import count_wanted, write_ahead

    paths = resolve_paths(config)
    if PACKAGE_DOCS not in split_paths(config.corpus) or config.dry_run or (paths.run / RUN).exists():
        return contextlib.nullcontext()
    return write_ahead(pin_entries(PACKAGE_DOCS, "", count_wanted(config)), paths.corpora)


def check_text(option: str, spec: str, prepare: PrepareConfig | None = None) -> Sample | None:
    """Refuse text that an option names, and return its sample; what is not on this machine the job itself looks for.

    `prepare` says how it is read, so that a sample of it is; None: it is only looked for, as `predict` does.
    """
    from domext_ray.text.data.files import check_addresses, find_files
    from domext_ray.text.data.sample import check_corpus

    try:
        check_addresses(spec)
        if "://" not in spec and prepare is not None:
            return check_corpus(spec, prepare)
        if "://" not in spec:
            find_files(spec, by_names=False)
    except CorpusError as error:
        raise CorpusError(str(error).replace("--corpus", f"--{option}")) from error
    return None


def check_rows(spec: str, field: str, most: int) -> None:
    """Refuse rows for which there is no file, or of which none has the field of the text; see `require_fields`."""
    from domext_ray.inference.input_plan import require_fields
    from domext_ray.inference.input_rows import FieldNames
    from domext_ray.text.data.files import find_files

    check_text("input", spec)
    if "://" not in spec:
        require_fields(find_files(spec, by_names=False)[0], FieldNames(field), spec, most)


def check_set(task: str, data: str, option: str = "data") -> None:
    """Refuse a task, or a labelled set that is neither here nor on the hub; `option` names the set."""
    from domext_ray.families.described_sets import find_set

    try:
        place = find_set(task, data).data
    except ConfigError as error:
        raise ConfigError(str(error).replace("--data", f"--{option}")) from error
    if not Path(place).exists():
        check_name(f"--{option}", place.partition(":")[0], "dataset", "a folder of labelled files, or a hub name")


def _check_gpu(config: PretrainConfig) -> None:
    from domext_ray.runtime.machine import has_gpu_devices, is_cluster

    if config.scale.use_gpu is True and not is_cluster() and not has_gpu_devices():
        raise ConfigError("--scale.use_gpu is true, and this machine has no GPU; leave --scale.use_gpu at auto.")


def _check_base(config: PretrainConfig) -> None:
    from domext_ray.text.data.names import find_local_base
    from domext_ray.text.vocabulary.tokenizer import check_tokenizer_files

    folder = find_local_base(config.base) if config.base != "none" else None
    if folder is None:
        return
    try:
        check_tokenizer_files(folder)
    except CorpusError as error:
        raise BaseModelError(f"--base {config.base!r}: {error}") from error
    shape = _read_shape(folder)
    if shape.heads:
        config.method.check_heads(shape.heads)
    if shape.longest:
        config.check_lengths(shape.longest)


def check_layers(config: EmbedConfig) -> None:
    """Refuse layers that a model whose configuration is here does not have; of a run the job itself looks."""
    if layers := _find_shape(config.model).layers:
        config.check_layers(layers)


def check_length(config: PredictConfig) -> None:
    """Refuse rows that are longer than those of a model whose configuration is here."""
    if config.max_length and (longest := _find_shape(config.model).longest):
        config.check_length(longest)


@dataclass(frozen=True)
class _Shape:
    """What a config.json says of sizes; 0: nothing that is certain, and it is told when the model is read."""

    heads: int = 0
    layers: int = 0
    longest: int = 0  # tokens of a row


def _find_shape(model: str) -> _Shape:
    from domext_ray.files import ASSETS
    from domext_ray.text.data.names import SHIPPED_BASE

    return _read_shape(ASSETS / SHIPPED_BASE if model == SHIPPED_BASE else Path(model))


def _read_shape(folder: Path) -> _Shape:
    try:
        values = parse_json(Place(folder / "config.json").read_bytes())
        heads = values.get("num_attention_heads", values.get("n_heads"))
        layers = values.get("num_hidden_layers", values.get("n_layers"))
        longest = values.get("max_position_embeddings") if values.get("model_type") in _ALL_POSITIONS else 0
    except (OSError, ValueError, AttributeError):
        return _Shape()
    return _Shape(*(size if type(size) is int and size > 0 else 0 for size in (heads, layers, longest)))
