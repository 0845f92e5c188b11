"""What `domext bank` does: add a run to a bank, list, verify, remove.

Enters: a `BankConfig`. Leaves: the bank, and lines for a person.
"""

from __future__ import annotations

from domext_ray.config.extensions.table import ADAPTER_PARTS
from domext_ray.config.finetune import FinetuneConfig
from domext_ray.config.jobs import BankConfig
from domext_ray.config.pretrain import SettledConfig
from domext_ray.errors import ConfigError, DomextError, RunError, StorageError
from domext_ray.models.bank import AdapterBank
from domext_ray.models.bank_entry import BankEntry
from domext_ray.models.source import BANK, Export, FinetunedRun, Run, open_model
from domext_ray.report.tables import format_text
from domext_ray.runs.run_directory import read_config
from domext_ray.storage import Place


def format_bank(bank: AdapterBank) -> str:
    """Return a table of a bank's adapters."""
    rows = [("name", "architecture", "sizes", "layers", "parameters", "bytes")]
    for name in bank.names():
        try:
            entry = bank.describe(name)
        except RunError:
            rows.append((name, "damaged: --verify true says where", "", "", "", ""))
            continue
        values = {part.label: getattr(entry.adapter, part.size) for part in ADAPTER_PARTS}
        sizes = ", ".join(f"{label} {size:,}" for label, size in values.items() if size)
        layers = f"{entry.adapter.first_layer}-{entry.adapter.last_layer}"
        rows.append((name, entry.architecture, sizes, layers, f"{entry.num_parameters:,}", f"{entry.num_bytes:,}"))
    title = f"base {bank.base_id} (sha256 {bank.base_sha256[:12]}), adapters: {len(rows) - 1}"
    return f"{title}\n{format_text(rows, num_texts=3)}" if len(rows) > 1 else title


def run_bank(config: BankConfig) -> None:
    """Do what `domext bank` was asked for."""
    folder = Place(config.bank)
    if config.add:
        entry = _add_run(folder, config)
        print(f"added: {config.name}, {entry.num_parameters:,} parameters, {entry.num_bytes:,} bytes, to {config.bank}")
        return
    bank = AdapterBank.open(folder, config.base)
    if config.remove:
        bank.remove(config.remove)
        print(f"removed: {config.remove} from {config.bank}")
    elif config.verify:
        problems = bank.verify()
        print("\n".join(problems) or f"sound: the base, and every adapter ({len(bank.names())})")
        if problems:
            raise RunError(f"the bank {config.bank} is damaged: {len(problems)} of its parts, named above.")
    else:
        print(format_bank(bank))


def _add_run(folder: Place, config: BankConfig) -> BankEntry:
    """Add a run to a bank, which is made if there is none; a run that is refused leaves none behind."""
    run = Place(config.add)
    if (folder / BANK).is_file():
        return AdapterBank.open(folder, config.base).add_run(config.name, run)
    is_tuned = run.is_local and open_model(config.add).does_task
    own = config.base or (find_base(config.add) if is_tuned else read_config(run, SettledConfig).base)
    bank = AdapterBank.create(folder, own)
    try:
        return bank.add_run(config.name, run)
    except DomextError as error:
        if not isinstance(error, StorageError) and not bank.names():
            folder.delete()
        raise


def find_base(model: str) -> str:
    """Return the base at the beginning of the runs of a model: a run's directory, an export in it, or a base."""
    source = open_model(model)
    if isinstance(source, Export):
        source = open_model(str(source.folder.resolve().parent))
        if not isinstance(source, Run | FinetunedRun):
            reason = "does not say what its base is, and is no longer in the folder of its run"
            raise ConfigError(f"--base is empty; it must say what the new bank's base is: {model} {reason}.")
    if isinstance(source, FinetunedRun):
        return find_base(read_config(Place(source.folder), FinetuneConfig).model)
    if not isinstance(source, Run):
        return model
    config = read_config(Place(source.folder), SettledConfig)
    return config.base if config.method.has_adapter else source.id
