"""A sample of texts -> what is left in them of another form, as notes: tags, escapes, characters read wrongly.

Nothing is refused: code and web pages are texts, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from domext_ray.text.data.folders import say

_WINDOWS = "€‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ"
"""How Windows-1252 reads bytes from 0x80 to 0x9f."""
_REMAINS = (
    (
        "UTF-8 that was read as Latin-1 (Ã©, â€™): ftfy FILE -o NEW mends it",
        re.compile(rf"Ã[\u0080-\u00bf{_WINDOWS}]|â€|Â[\u00a0-\u00bf]|ï»¿"),
    ),
    ("U+FFFD, where a character was lost: make the text anew from its source", re.compile("\ufffd")),
    (
        "tags or entities of HTML or XML (</p>, &amp;): take them out",
        re.compile(
            r"</[a-zA-Z][\w:.-]*>|<[a-zA-Z][\w:.-]*(?: [\w:.-]+=\"[^\"<>]*\")*\s?/>|<[a-zA-Z][\w:.-]* [\w:.-]+=[\"'\w]"
            r"|<(?:br|p|li|hr)>|&(?:amp|lt|gt|quot|apos|nbsp|#\d{2,6}|#x[0-9a-fA-F]{2,6});"
        ),
    ),
    (
        r"escapes (\n, \", \u00e9) in place of what they stand for: decode them",
        re.compile(r'\\[nrt](?![a-z])|\\"|\\u[0-9a-fA-F]{4}|\\x[0-9a-fA-F]{2}'),
    ),
    ("ligatures of a PDF (ﬁ, ﬂ): write them as letters", re.compile("[\ufb00-\ufb06]")),
    ("a word that a line's end has cut (exam-): join lines before", re.compile(r"[a-z]-\Z")),
    (
        "a value as Python or JSON spells it (b'…', ['…']) in place of its text: take the text out",
        re.compile(r"""b(['"]).*\1\Z|\[(['"]).*\2\]\Z|\{"[^"]+": .*\}\Z|"[^"]*(?:\\.[^"]*)+"\Z"""),
    ),
)
"""What is told, with its cure, and how it is found; the last one is a whole text."""
_FRAC, _FEWEST = 0.05, 3
"""Texts that have something by chance, or because they are about it, are fewer."""


def tell_remains(spec: str, texts: Iterable[tuple[str, str]]) -> None:
    """Say on standard error, once a process, what many of some texts, each behind the file that it is of, have."""
    counts, first, num_texts = [0] * len(_REMAINS), [""] * len(_REMAINS), 0
    for path, text in texts:
        num_texts += 1
        for i, (_, pattern) in enumerate(_REMAINS):
            if pattern.match(text) if i == len(_REMAINS) - 1 else pattern.search(text):
                counts[i] += 1
                first[i] = first[i] or path
    for (what, _), number, path in zip(_REMAINS, counts, first, strict=True):
        if number >= max(_FEWEST, _FRAC * num_texts):
            say(
                f"{number:,} of {num_texts:,} texts of {spec!r} that were looked at have {what}, unless they are "
                f"meant; the first is in {path}"
            )
