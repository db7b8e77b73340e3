"""Settings as a YAML file: plain mappings, lists, texts, numbers, true, false and null.

It is YAML 1.1 without what settings do not need and a hostile file can abuse: tags, merges, and
dates and numbers of base 60, which are text here. An alias is read where the value stays small.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from msgspec import to_builtins

from jax_transformer.errors import InputError, one_line, shorten
from jax_transformer.storage.reading import MAX_TOKENIZER, MAX_YAML, read_text

_ONE_MAPPING = [
    *(yaml.StreamStartEvent, yaml.DocumentStartEvent, yaml.MappingStartEvent),
    *(yaml.MappingEndEvent, yaml.DocumentEndEvent, yaml.StreamEndEvent),
]
LONGEST_NUMBER = 100  # characters
MOST_VALUES = 2**16  # of a file, those of each alias included; a file without any has fewer


def read_yaml(path: Path, fault: str = "is not a YAML file") -> Any:
    """Return the value in a YAML file of at most `MAX_YAML` bytes."""
    return parse_yaml(read_text(path, fault, MAX_YAML), str(path))


def parse_yaml(text: str, name: str) -> Any:
    """Return the value of a YAML text, which `name` calls in messages."""
    try:
        return _Loader(text).get_single_data()
    except RecursionError as error:
        raise InputError(f"{name}: is not YAML (it is nested too deep)") from error
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{name}: is not YAML ({one_line(str(error), 300)})") from error


def read_words(path: Path) -> dict[str, str]:
    """Return a large YAML mapping whose keys and values are plain; all are text, also `on`."""
    text = read_text(path, "is not a YAML file", MAX_TOKENIZER)
    loader = yaml.CBaseLoader if yaml.__with_libyaml__ else yaml.BaseLoader
    scalars, kinds = [], []
    try:
        for event in yaml.parse(text, Loader=loader):
            if isinstance(event, yaml.ScalarEvent):
                scalars.append(event.value)
            else:
                kinds.append(type(event))
                if kinds[-1] is not _ONE_MAPPING[len(kinds) - 1]:
                    break
    except (yaml.YAMLError, ValueError) as error:
        raise InputError(f"{path}: is not YAML ({one_line(str(error), 300)})") from error
    mapping = dict(zip(scalars[::2], scalars[1::2], strict=False))
    if kinds != _ONE_MAPPING or 2 * len(mapping) != len(scalars):
        raise InputError(f"{path}: must be one mapping of words, each of which occurs once")
    return mapping


def to_yaml(settings: Mapping[str, Any]) -> str:
    """Return a mapping of settings as the text of a YAML file."""
    plain = to_builtins(settings, enc_hook=str)  # tuples as lists, paths as text
    return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values: dict[yaml.Node, int] = {}  # of a node, with those of its aliases

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Refuse tags, and aliases that make a large or endless value of a small file."""
        event = self.peek_event()
        if getattr(event, "tag", None) is not None:
            raise _refusal(event, f"the tag {shorten(event.tag)}; leave it out")
        node = super().compose_node(parent, index)
        if not isinstance(event, yaml.AliasEvent):
            parts = [] if isinstance(node, yaml.ScalarNode) else node.value
            if isinstance(node, yaml.MappingNode):
                parts = [part for pair in parts for part in pair]
            self._values[node] = 1 + sum(self._values[part] for part in parts)
        elif node not in self._values:
            raise _refusal(event, f"the alias *{event.anchor:.40} of what it is a part of")
        if self._values[node] > MOST_VALUES:
            raise _refusal(event, f"more than {MOST_VALUES:,} values, those of aliases included")
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse names that occur twice; the last value would win."""
        mapping = super().construct_mapping(node, deep)
        if len(mapping) != len(node.value):
            names = Counter(str(key.value) for key, _ in node.value)
            name, count = names.most_common(1)[0]
            raise _refusal(node, f"the name {shorten(name)} {max(count, 2)} times")
        return mapping

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        value = super().construct_scalar(node)
        value.encode()  # refuses half a pair of surrogates, which cannot be written again
        return value

    def number(self, node: yaml.ScalarNode) -> Any:
        """Return a number; base 60 (1:30) is text, as in YAML 1.2."""
        if ":" in node.value:
            return self.construct_scalar(node)
        if len(node.value) > LONGEST_NUMBER:
            raise _refusal(node, f"a number of {len(node.value):,} characters")
        is_int = node.tag.endswith(":int")
        return self.construct_yaml_int(node) if is_int else self.construct_yaml_float(node)


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag.rpartition(":")[2] not in ("timestamp", "merge", "value")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.number)


def _refusal(where: Any, what: str) -> yaml.YAMLError:
    mark = where.start_mark
    return yaml.YAMLError(f"line {mark.line + 1}, column {mark.column + 1} has {what}")
