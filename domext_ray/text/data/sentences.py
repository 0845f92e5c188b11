"""Documents -> sentences."""

from __future__ import annotations

import re

_SENTENCE_END = re.compile(
    r"""[.!?…]["'”’)\]]?\s+"""  # a Latin sentence ends before a space
    r"|[。！？；][。！？；…]*[”’」』）]*\s*"  # a CJK sentence ends anywhere
    r"|…+[”’」』）]*(?=[\u3400-\u9fff])"
)


def split_sentences(document: str) -> list[str]:
    """Cut a clean document after sentence ends of Latin and CJK scripts."""
    sentences, first = [], 0
    for match in _SENTENCE_END.finditer(document):
        sentences.append(document[first : match.end()].rstrip())
        first = match.end()
    if first < len(document) and not document[first:].isspace():
        sentences.append(document[first:])
    return sentences
