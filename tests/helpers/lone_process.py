"""Python code that keeps this project, and what only it needs, from being imported: the start of a lone process."""

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
