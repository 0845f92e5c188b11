"""Keep many trained adapters over one frozen base in one folder: add, remove, verify, list.

    python jobs/bank.py --bank bank --add runs/clinic --name clinic    # makes the bank if there is none
    python jobs/bank.py --bank bank                                    # lists it
    python jobs/bank.py --bank bank --verify true                      # compares every file with its hash
    python jobs/bank.py --bank bank --remove clinic

A run's domain (--method.heads, ffn_units or bottleneck_size beside a frozen base) is what a bank holds. Adding one
writes new files only. In Python, domext_ray.bank.AdapterBank also loads adapters, attaches them to a model in memory,
and serves batches whose rows use different ones.
"""

from __future__ import annotations

from domext_ray.bank import run_bank
from domext_ray.config import parse_config
from domext_ray.errors import exit_on_user_error
from domext_ray.job_config import BankConfig

if __name__ == "__main__":
    with exit_on_user_error():
        run_bank(parse_config(BankConfig))
