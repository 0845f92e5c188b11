"""Python code that keeps this project, and what only it needs, from being imported: the start of a lone process."""

from __future__ import annotations

import subprocess
import sys

from domext_ray.storage import Place

WITHOUT_PROJECT = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {
            "domext_ray", "ray", "deepspeed", "pyarrow", "datasets", "sklearn", "matplotlib"
        }:
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(each) for each in sys.meta_path]
"""


def check_export(export: Place) -> None:
    """Load an export where there is torch and transformers and nothing else."""
    code = f"""{WITHOUT_PROJECT}
import sys
import transformers as tf
model = tf.AutoModelForMaskedLM.from_pretrained(sys.argv[1], trust_remote_code=True)
tokenizer = tf.AutoTokenizer.from_pretrained(sys.argv[1])
print(tuple(model(**tokenizer("the river and the town", return_tensors="pt")).logits.shape))
"""
    command = [sys.executable, "-c", code, str(export.local())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 and done.stdout.startswith("(1, "), done.stderr
