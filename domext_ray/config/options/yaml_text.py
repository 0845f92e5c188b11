"""The one reader of YAML: plain values only, every mistake with its file and line."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from domext_ray.errors import ConfigError, name_file

_MAX_YAML_BYTES = 2**20
"""A longer file was meant for another option."""
_MAX_YAML_VALUES = 100_000
"""What a person writes has fewer."""


@dataclass(frozen=True)
class Node:
    """A value of a YAML text."""

    value: Any
    as_written: Any  # a scalar's characters without quotes, and lists of these; else as `value`
    line: int  # counted from 1
    parts: Mapping[str, Node] = dataclasses.field(default_factory=dict)  # a mapping's values by their keys' characters


def read_yaml(path: Path, option: str) -> Node:
    """Read a file whose content is a mapping; `option` is what named it, such as `--config`."""
    named = f"{option} names {str(path)!r}, which"
    try:
        with name_file(path), path.expanduser().open("rb") as file:
            data = file.read(_MAX_YAML_BYTES + 1)
        text = data.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{named} does not exist.") from error
    except OSError as error:
        raise ConfigError(f"{named} cannot be read ({error.strerror}).") from error
    except (UnicodeDecodeError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{named} is no UTF-8 text; it must be a YAML file.") from error
    if len(data) > _MAX_YAML_BYTES:
        raise ConfigError(f"{named} is above 1 MB; it must be a YAML file of options.")
    node = parse_yaml(text, str(path))
    if node.value is None:
        raise ConfigError(f"{path} is empty; it must have options, such as 'train: {{max_steps: 100}}'.")
    if not isinstance(node.value, dict):
        raise ConfigError(f"{path}, line {node.line}: options are expected, such as 'train: {{max_steps: 100}}'.")
    return node


def parse_yaml(text: str, name: str) -> Node:
    """Parse a text, which messages call `name`, a path or an option; what is no YAML is a ConfigError."""
    if len(text) > _MAX_YAML_BYTES:
        raise ConfigError(f"{name} is above 1 MB; it must be a YAML file of options.")
    try:
        loader = _PlainLoader(text)
        node = loader.get_single_node()
        return Node(None, None, 1) if node is None else _YamlReader(loader, name).read(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        if mark and error.context_mark and mark.index >= len(text.rstrip()):
            mark = error.context_mark  # what is not closed says more than the end
        place = f"{name}, line {mark.line + 1}" if mark else name
        raise ConfigError(f"{place}: this is no YAML ({' '.join(str(error.problem).split())}).") from error
    except yaml.YAMLError as error:
        line = text.count("\n", 0, getattr(error, "position", 0)) + 1
        reason = getattr(error, "reason", None) or str(error)
        raise ConfigError(f"{name}, line {line}: this is no YAML ({' '.join(str(reason).split())}).") from error
    except RecursionError as error:
        raise ConfigError(f"{name} is no YAML of options: its lists or mappings are too deep.") from error


class _PlainLoader(yaml.SafeLoader):
    """Reads YAML that anybody may have written: no more than `_MAX_YAML_VALUES`, and a bad one is a ValueError.

    An alias counts as all that it stands for: a few aliases of aliases could make any number of values.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._num_values = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Make a node, as the class that this one is of does."""
        before, is_alias = self._num_values, self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        assert node is not None
        if is_alias and node not in self._sizes:
            raise RecursionError("a value that stands within itself")
        self._num_values += self._sizes[node] if is_alias else 1
        self._sizes.setdefault(node, self._num_values - before)
        if self._num_values > _MAX_YAML_VALUES:
            raise yaml.YAMLError(f"it has more than {_MAX_YAML_VALUES:,} values")
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Make a node's value, as the class that this one is of does."""
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError) as error:  # of !!int '', !!bool x or 1:0:0 … :0.5
            raise ValueError(f"{node.tag} is none") from error


class _YamlReader:
    """Makes nodes with their lines of a YAML loader's."""

    _TAG = "tag:yaml.org,2002:"

    def __init__(self, loader: _PlainLoader, name: str) -> None:
        self.loader, self.name = loader, name

    def read(self, node: yaml.Node) -> Node:
        line, kind = node.start_mark.line + 1, node.tag.removeprefix(self._TAG)
        if isinstance(node, yaml.MappingNode) and kind == "map":
            pairs = list(self._read_pairs(node))
            value = {key: part.value for key, _, part in pairs}
            return Node(value, value, line, {text: part for _, text, part in pairs})
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            items = [self.read(item) for item in node.value]
            return Node([item.value for item in items], [item.as_written for item in items], line)
        if not isinstance(node, yaml.ScalarNode) or kind == node.tag:
            raise self._refuse(
                node, f"the tag {node.tag.replace(self._TAG, '!!')!r} is not allowed; give a plain value"
            )
        if kind not in ("str", "int", "float", "bool", "null"):  # a date, for example, is what it is written as
            return Node(node.value, node.value, line)
        try:
            value = self.loader.construct_object(node)
        except ValueError:
            raise self._refuse(node, f"{node.value[:80]!r} cannot be read; put a text in quotes") from None
        return Node(value, None if value is None else node.value, line)

    def _read_pairs(self, node: yaml.MappingNode) -> Iterator[tuple[Any, str, Node]]:
        seen: dict[Any, int] = {}
        own = {id(key_node) for key_node, _ in node.value}
        self.loader.flatten_mapping(node)  # puts those of `<<: *other` first; the mapping's own win
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._refuse(key_node, "a key is a word, not a list or a mapping")
            key = self.read(key_node)
            if key.value in seen:
                first = f" (line {seen[key.value]} has it)" if seen[key.value] != key.line else ""
                raise self._refuse(key_node, f"{key_node.value!r} stands here a second time{first}; give it once")
            if id(key_node) in own:
                seen[key.value] = key.line
            yield key.value, key_node.value, self.read(value_node)

    def _refuse(self, node: yaml.Node, rule: str) -> ConfigError:
        return ConfigError(f"{self.name}, line {node.start_mark.line + 1}: {rule}.")
