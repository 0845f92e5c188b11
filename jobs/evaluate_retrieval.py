"""`domext evaluate retrieval` as a file, for `ray job submit … -- python jobs/evaluate_retrieval.py …`."""

from domext_ray.commands.main import run_file

if __name__ == "__main__":
    run_file(__file__)
