"""YAML that a user writes: plain values only, every mistake with its file and line.

Enters: a file or a text. Leaves: its values, each with the line and the characters that it was written as. No tag makes
an object or reads another file, and a key stands once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from domext_ray.errors import ConfigError

MAX_BYTES = 2**20
"""Longest file: one that is longer was meant for another option."""
MAX_VALUES = 100_000
"""Most values of a file, each alias counted: a few lines of aliases of aliases could else fill the memory."""

_TAG = "tag:yaml.org,2002:"
_SCALARS = tuple(f"{_TAG}{each}" for each in ("str", "int", "float", "bool", "null"))


@dataclass(frozen=True)
class Entry:
    """A value of a YAML text.

    Args:
        value: as Python has it.
        line: where it stands, counted from 1.
        text: a scalar's characters without quotes; "" of lists and mappings.
        parts: a mapping's entries by their keys' characters; None of anything else.
    """

    value: Any
    line: int
    text: str = ""
    parts: Mapping[str, Entry] | None = field(default=None)


def read_yaml(path: Path, option: str) -> Entry:
    """Read a file whose content is a mapping.

    Args:
        path: the file.
        option: the option that named it, such as `--config_path`.

    Raises:
        ConfigError: it is missing, empty, no text or no YAML, or has a tag or a key twice; with the line.
    """
    try:
        with path.expanduser().open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{option} names {str(path)!r}, which does not exist.") from error
    except OSError as error:
        raise ConfigError(f"{option} names {str(path)!r}, which cannot be read ({error.strerror}).") from error
    except (UnicodeDecodeError, RuntimeError, ValueError) as error:
        raise ConfigError(f"{option} names {str(path)!r}, which is no UTF-8 text; it must be a YAML file.") from error
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{option} names {str(path)!r}, which is above 1 MB; it must be a YAML file of options.")
    entry = parse_yaml(text, str(path))
    if entry.value is None:
        raise ConfigError(f"{path} is empty; it must have options, such as 'train: {{max_steps: 100}}'.")
    if entry.parts is None:
        raise ConfigError(f"{path}, line {entry.line}: options are expected, such as 'train: {{max_steps: 100}}'.")
    return entry


def parse_yaml(text: str, name: str) -> Entry:
    """Parse a text.

    Args:
        text: the text.
        name: what messages call it: a path, or an option.

    Raises:
        ConfigError: it is no YAML, or has a tag or a key twice; with the line.
    """
    loader = None
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        return Entry(None, 1) if node is None else _Reader(loader, name).read(node)
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
    finally:
        if loader is not None:
            loader.dispose()


class _Reader:
    """Makes entries of nodes."""

    def __init__(self, loader: yaml.SafeLoader, name: str) -> None:
        self._loader, self._name = loader, name
        self._num_values = 0

    def read(self, node: yaml.Node) -> Entry:
        line = node.start_mark.line + 1
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise ConfigError(f"{self._name} has more than {MAX_VALUES:,} values; it must be a YAML file of options.")
        if isinstance(node, yaml.MappingNode) and node.tag == f"{_TAG}map":
            pairs = list(self._read_pairs(node))
            return Entry(
                {key: each.value for key, _, each in pairs}, line, parts={text: each for _, text, each in pairs}
            )
        if isinstance(node, yaml.SequenceNode) and node.tag == f"{_TAG}seq":
            return Entry([self.read(each).value for each in node.value], line)
        if not isinstance(node, yaml.ScalarNode) or not node.tag.startswith(_TAG):
            raise self._refuse(node, f"the tag {node.tag.replace(_TAG, '!!')!r} is not allowed; give a plain value")
        if node.tag not in _SCALARS:  # a date, for example, is what it is written as
            return Entry(node.value, line, node.value)
        try:
            return Entry(self._loader.construct_object(node), line, node.value)
        except ValueError:
            raise self._refuse(node, f"{node.value[:80]!r} cannot be read; put a text in quotes") from None

    def _read_pairs(self, node: yaml.MappingNode) -> Iterator[tuple[Any, str, Entry]]:
        seen: dict[Any, int] = {}
        own = {id(key_node) for key_node, _ in node.value}
        self._loader.flatten_mapping(node)  # puts those of `<<: *other` first; the mapping's own win
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise self._refuse(key_node, "a key is a word, not a list or a mapping")
            key = self.read(key_node)
            if key.value in seen:
                first = f" (line {seen[key.value]} has it)" if seen[key.value] != key.line else ""
                raise self._refuse(key_node, f"{key.text!r} stands here a second time{first}; give it once")
            if id(key_node) in own:
                seen[key.value] = key.line
            yield key.value, key.text, self.read(value_node)

    def _refuse(self, node: yaml.Node, rule: str) -> ConfigError:
        return ConfigError(f"{self._name}, line {node.start_mark.line + 1}: {rule}.")
