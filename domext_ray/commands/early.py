"""What a look at this machine tells about a job, before torch and a model are loaded."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from domext_ray.config.pretrain import PrepareConfig, PretrainConfig
from domext_ray.errors import BaseModelError, ConfigError, CorpusError
from domext_ray.storage import Place, parse_json

if TYPE_CHECKING:
    from domext_ray.data.sample import Sample


def check_early(config: PretrainConfig) -> None:
    """Refuse a text, a base or a GPU that there is not, and heads that do not divide.

    A run that has begun is the job's to look at: one that has ended needs none of them.
    """
    from domext_ray.data.sample import tell_owners
    from domext_ray.runs.run_directory import RUN, resolve_paths

    if (resolve_paths(config).run / RUN).exists():
        return
    _check_gpu(config)
    _check_base(config)
    for text in config.texts:
        if text.is_written:
            continue
        if sample := check_text(text.option.removeprefix("--"), text.corpus, config.prepare_for(text)):
            tell_owners(sample, config, text)


def write_early(config: PretrainConfig) -> contextlib.AbstractContextManager[None]:
    """Begin to write the package documentation that a run is going to read, if it is, while torch is loaded."""
    from domext_ray.data.files import PACKAGE_DOCS, pin_entries
    from domext_ray.data.package_docs import count_wanted, write_ahead
    from domext_ray.files import split_paths
    from domext_ray.runs.run_directory import RUN, resolve_paths

    paths = resolve_paths(config)
    if PACKAGE_DOCS not in split_paths(config.corpus) or config.dry_run or (paths.run / RUN).exists():
        return contextlib.nullcontext()
    return write_ahead(pin_entries(PACKAGE_DOCS, "", count_wanted(config)), paths.corpora)


def check_text(option: str, spec: str, prepare: PrepareConfig | None = None) -> Sample | None:
    """Refuse text that an option names, and return its sample; what is not on this machine the job itself looks for.

    Args:
        option: its name.
        spec: its value.
        prepare: how it is read, so that a sample of it is; None: it is only looked for, as `predict` does.
    """
    from domext_ray.data.files import check_addresses, find_files
    from domext_ray.data.sample import check_corpus

    try:
        check_addresses(spec)
        if "://" not in spec and prepare is not None:
            return check_corpus(spec, prepare)
        if "://" not in spec:
            find_files(spec, by_names=False)
    except CorpusError as error:
        raise CorpusError(str(error).replace("--corpus", f"--{option}")) from error
    return None


def _check_gpu(config: PretrainConfig) -> None:
    from domext_ray.runtime.machine import has_gpu_devices, is_cluster

    if config.scale.use_gpu is True and not is_cluster() and not has_gpu_devices():
        raise ConfigError("--scale.use_gpu is true, and this machine has no GPU; leave --scale.use_gpu at auto.")


def _check_base(config: PretrainConfig) -> None:
    from domext_ray.model.base_folder import find_local_base
    from domext_ray.vocabulary.tokenizer import check_tokenizer_files

    folder = find_local_base(config.base) if config.base != "none" else None
    if folder is None:
        return
    try:
        check_tokenizer_files(folder)
    except CorpusError as error:
        raise BaseModelError(f"--base {config.base!r}: {error}") from error
    num_heads = None
    with contextlib.suppress(FileNotFoundError, ValueError, AttributeError):  # told when it is read in full
        values = parse_json(Place(folder / "config.json").read_bytes())
        num_heads = values.get("num_attention_heads", values.get("n_heads"))
    if isinstance(num_heads, int) and num_heads > 0:
        config.method.check_heads(num_heads)
