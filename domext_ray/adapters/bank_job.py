"""What `domext bank` does: add a run to a bank, list, verify, remove.

Enters: a `BankConfig`. Leaves: the bank, and lines for a person.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from domext_ray.adapters.bank import BANK, AdapterBank
from domext_ray.adapters.entry import BankEntry
from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.jobs import BankConfig
from domext_ray.downstream.finetune.exported import is_finetuned_model
from domext_ray.downstream.start.model import TRAININGS, is_export, is_run
from domext_ray.errors import ConfigError, DomextError, RunError
from domext_ray.extensions.table import DOMAIN_PARTS
from domext_ray.runs.run_directory import read_config
from domext_ray.training.start import read_run_config


def format_bank(bank: AdapterBank) -> str:
    """Return a table of a bank's adapters."""
    lines = [f"{'name':<16} {'architecture':<24} {'sizes':<36} {'layers':>7} {'parameters':>12} {'bytes':>13}"]
    for name in bank.names():
        try:
            entry = bank.describe(name)
        except RunError:
            lines.append(f"{name:<16} damaged: --verify true says where")
            continue
        values = {part.label: getattr(entry.domain, part.size) for part in DOMAIN_PARTS}
        sizes = ", ".join(f"{label} {size:,}" for label, size in values.items() if size)
        layers = f"{entry.domain.first_layer}-{entry.domain.last_layer}"
        lines.append(
            f"{name:<16} {entry.architecture:<24} {sizes:<36} {layers:>7} {entry.num_parameters:>12,} "
            f"{entry.num_bytes:>13,}"
        )
    title = f"base {bank.base_id} (sha256 {bank.base_sha256[:12]}), adapters: {len(lines) - 1}"
    return "\n".join([title, *lines]) if len(lines) > 1 else title


def run_bank(config: BankConfig) -> None:
    """Do what `domext bank` was asked for.

    Raises:
        DomextError: it cannot be done, or `--verify` found damage.
    """
    folder = Path(config.bank).expanduser()
    if config.add:
        entry = _add_run(folder, config)
        print(f"added: {config.name}, {entry.num_parameters:,} parameters, {entry.num_bytes:,} bytes, to {folder}")
        return
    bank = AdapterBank.open(folder, config.base)
    if config.remove:
        bank.remove(config.remove)
        print(f"removed: {config.remove} from {folder}")
    elif config.verify:
        problems = bank.verify()
        print("\n".join(problems) or f"sound: the base, and every adapter ({len(bank.names())})")
        if problems:
            raise RunError(f"the bank {folder} is damaged: {len(problems)} of its parts, named above.")
    else:
        print(format_bank(bank))


def _add_run(folder: Path, config: BankConfig) -> BankEntry:
    """Add a run to a bank, which is made if there is none; a run that is refused leaves none behind."""
    run_dir = Path(config.add).expanduser()
    if (folder / BANK).is_file():
        return AdapterBank.open(folder, config.base).add_run(config.name, run_dir)
    own = "" if config.base or is_finetuned_model(run_dir) else read_run_config(run_dir).base
    bank = AdapterBank.create(folder, config.base or own or find_base(config.add))
    try:
        return bank.add_run(config.name, run_dir)
    except DomextError:
        if not bank.names():
            shutil.rmtree(folder, ignore_errors=True)
        raise


def find_base(model: str) -> str:
    """Return the base at the beginning of the runs of a model: a run's directory, an export in it, or a base."""
    folder = Path(model).expanduser()
    if is_export(folder):  # one that has an extension; what trained all weights is a base
        model = str(folder.resolve().parent)
        if not is_run(Path(model)):
            reason = "does not say what its base is, and is no longer in the folder of its run"
            raise ConfigError(f"--base is empty; it must say what the new bank's base is: {folder} {reason}.")
        return find_base(model)
    if not is_run(folder):
        return model
    if (folder / TRAININGS).is_dir():
        return find_base(read_config(folder, FinetuneConfig).model)
    config = read_run_config(folder)
    return config.base if config.method.has_domain else model
