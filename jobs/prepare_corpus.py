"""`domext prepare corpus` as a file, for `ray job submit … -- python jobs/prepare_corpus.py …`."""

from domext_ray.commands.main import run_file

if __name__ == "__main__":
    run_file(__file__)
