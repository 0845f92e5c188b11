"""Keep many trained adapters over one frozen base in one folder: add, remove, verify, list.

    python jobs/bank.py --bank bank --add runs/clinic --name clinic    # makes the bank if there is none
    python jobs/bank.py --bank bank                                    # lists it
    python jobs/bank.py --bank bank --verify true                      # compares every file with its hash
    python jobs/bank.py --bank bank --remove clinic

A run's domain (--method.heads, ffn_units or bottleneck_size beside a frozen base) is what a bank holds. Adding one
writes new files only. In Python, domext_ray.adapters.bank.AdapterBank also loads adapters, attaches them to a model in
memory, and serves batches whose rows use different ones.
"""

from __future__ import annotations

from domext_ray.config.command_line import Job, run_job
from domext_ray.config.jobs import BankConfig


def keep(config: BankConfig) -> None:
    """Add, remove, verify or list."""
    from domext_ray.adapters.bank import run_bank

    run_bank(config)


JOB = Job(__doc__, BankConfig, keep, found=("add",))

if __name__ == "__main__":
    run_job(JOB)
