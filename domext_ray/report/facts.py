"""What a run's page says below its figures: where it comes from, its new words and options, and what may come next.

Enters: a run's configuration, its run.json and its metrics. Leaves: rows of text, without a folder's name.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from domext_ray.config.presets import find_preset, list_presets
from domext_ray.config.pretrain import PretrainConfig
from domext_ray.files import read_json
from domext_ray.options.build import list_values, to_dict
from domext_ray.options.places import hide_places
from domext_ray.options.read import read_file
from domext_ray.storage import Place, Where
from domext_ray.training.router import describe_router
from domext_ray.vocabulary.extension import STATISTICS_FILE


def list_facts(
    config: PretrainConfig,
    about: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    router: Mapping[str, float] | None = None,
) -> list[tuple[str, str]]:
    """Return where a run comes from, given `origin.read_origin` and its domain's `RouterRecord`."""
    corpus, counts = about["corpus"], about["parameters"]
    dropped = ", ".join(f"{number:,} {reason}" for reason, number in sorted(corpus["dropped"].items()))
    kinds = "; ".join(f"{name} {number:,}" for name, number in counts["kinds"].items())
    kinds += f"; beside them a decoder of {counts['decoder']:,}, which no export has" if "decoder" in counts else ""
    base = "none: random weights"
    if config.base != "none":
        base = f"{hide_places(config.base)} (sha256 {about['base_sha256'][:12]})"
    facts = {
        "method": config.method.name,
        "base": base,
        "what trains": f"{counts['trainable']:,} of {counts['total']:,} parameters, {counts['trainable_frac']:.1%} of "
        f"base and extension: {kinds}",
        "text": str(corpus["sources"]),
        "documents": f"{corpus['documents']:,}; dropped: {dropped or 'none'}",
        "rows": f"{corpus['rows']:,} for training, {corpus['tokens']:,} tokens; {corpus['held_out_rows']:,} held out",
        "epochs read": f"{_find_epochs(corpus['phases'], records):.2f}",
        "general text": _describe_replay(config, records),
        "router": describe_router(config, router),
        "other texts": _describe_mixture(config),
        "overlap": "; ".join(corpus.get("overlaps", [])),
        "seed": f"{config.seed}",
        "started": f"{about['started'][:16].replace('T', ' ')} UTC",
        "machine": str(about["machine"]),
        "workers": f"{config.scale.num_workers}, ZeRO stage {config.engine.zero_stage}",
        "versions": ", ".join(f"{name} {version}" for name, version in about["versions"].items()),
        "commit": f"{about['commit'].removesuffix('+')}, with changes" * about["commit"].endswith("+")
        or about["commit"],
        "command": about["command"] or "called from Python",
    }
    return [(name, value) for name, value in facts.items() if value]


def _find_epochs(phases: Sequence[Sequence[int]], records: Sequence[Mapping[str, Any]]) -> float:
    """How often a run has read its text: as it says itself in a mixture, whose shares may change."""
    said = [each["train/domain_epochs"] for each in records if "train/domain_epochs" in each]
    return said[-1] if said else _count_epochs(phases, records[-1]["step"])


def _describe_replay(config: PretrainConfig, records: Sequence[Mapping[str, Any]]) -> str:
    """Say which general text a run reads, what it is for, and how often it was read; empty: there is none."""
    if not config.replay.corpus:
        return ""
    epochs = [each["train/replay_epochs"] for each in records if "train/replay_epochs" in each]
    read = f", {epochs[-1]:.2f} epochs read" if epochs else ""
    keep = {
        "kl": "keeps to the base's predictions",
        "replay": "its masked words are learned",
        "none": "like the domain's",
    }
    source = "written by the base" if config.replay.is_written else hide_places(config.replay.corpus)
    share = f"{config.replay.frac:.0%} of all rows"
    return f"{source}: {share}, {keep[config.objective.keep]}{read}"


def _describe_mixture(config: PretrainConfig) -> str:
    """Say which further texts a run reads, and with which weights; empty: there are none."""
    parts = []
    for part in config.mixture.list_parts():
        weights = [
            f"{float(weight):g}" + f" from {float(first):.0%} on" * (first > 0) for first, weight in part.weights
        ]
        kind = ", general text" if part.keep else ""
        parts.append(f"{part.name} ({hide_places(part.corpus)}{kind}): weight {', '.join(weights)}")
    return f"{'; '.join(parts)}; the text above: weight {config.mixture.weight:g}" if parts else ""


def _count_epochs(phases: Sequence[Sequence[int]], step: int) -> float:
    """How often a run has read its text, given first step, end and steps an epoch of every length phase."""
    return sum(max(0, min(step, end) - first) / size for first, end, size in phases)


def list_words(tokenizer_dir: Where) -> tuple[int, list[tuple[str, int]]]:
    """Return how many new words a run has, and the most frequent ones with their counts in its text.

    Raises:
        RunError: the statistics are damaged.
    """
    path = Place(tokenizer_dir) / STATISTICS_FILE
    if not path.is_file():  # no new words, or words whose text was not counted
        return 0, []
    remedy = "delete it: only the words' counts are lost with it"
    statistics = read_json(path, remedy, {"num_new": int, "top_words": list})
    return statistics["num_new"], [(word, count) for word, count in statistics["top_words"]]


def list_changed(config: PretrainConfig) -> tuple[str, list[tuple[str, str, str]]]:
    """Return the options that are not those of the method's preset: its name, and the rows option, here, there.

    Sizes that a budget was solved for are among them, and the schedule that the corpus decided.
    """
    preset = config.method.name if config.method.name in list_presets() else ""
    layers = [read_file(PretrainConfig, find_preset(preset), "the preset")] if preset else []
    defaults = list_values(PretrainConfig, layers)
    rows = [
        (name, _show(value), _show(defaults[name]))
        for name, value in flatten(to_dict(config)).items()
        if name in defaults and value != defaults[name]
    ]
    return (f"preset {preset}" if preset else "default"), rows


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested options by their whole names, such as train.max_steps."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= flatten(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(hide_places(value)) or "(empty)"


def suggest_next(run_dir: Where, config: PretrainConfig) -> str:
    """Return commands that take a run as their model, from the folder above that of all runs."""
    folder = Place(run_dir)
    run, name = shlex.quote(f"{folder.parent.name}/{folder.name}"), folder.name
    models = "" if config.base == "none" else f"base={hide_places(config.base)},"
    models = shlex.quote(f"{models}{name}={folder.parent.name}/{name}")
    copied = (
        "" if folder.is_local else f"# copy it from {folder.root}/… to {folder.parent.name}/{folder.name} first\n\n"
    )
    return (
        f"{copied}# fine-tune it on labelled text\n"
        f"domext finetune --model {run} --task ner --data FOLDER --run.name {shlex.quote(name + '-ner')}\n\n"
        f"# how much general language it has lost\n"
        f"domext forgetting --models {models} --corpus TEXT --output forgetting\n\n"
        f"# load it in Python\n"
        f"import domext_ray\n"
        f"tokenizer, model = domext_ray.load({f'{folder.parent.name}/{name}'!r})\n"
    )
