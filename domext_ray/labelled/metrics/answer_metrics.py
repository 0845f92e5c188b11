"""How right one answer to a question is: SQuAD's rule, and CMRC 2018's for Chinese.

Enters: the accepted answers and the predicted one. Leaves: exact match and F1, each the best over the accepted answers
(Rajpurkar et al., 2016 and 2018; Cui et al., 2019).
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# The characters that CMRC's script leaves out.
_CJK_PUNCTUATION = frozenset("-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")
_HAN = re.compile("[\u4e00-\u9fa5]")
# A number with its inner points and commas stays whole, as in NLTK's word_tokenize, which the script uses.
_LATIN_TOKENS = re.compile(r"\d+(?:[.,]\d+)*|\w+|[^\w\s]")


def score_answer(answers: Sequence[str], predicted: str, *, cjk: bool = False) -> tuple[float, float]:
    """Score one answer.

    Args:
        answers: the accepted ones; none: the question has no answer.
        predicted: the answer; "" for none.
        cjk: CMRC 2018's rule instead of SQuAD's.

    Returns:
        Exact match, 0 or 1, and F1, 0 to 1.

    Source:
        Rajpurkar et al. (2018), evaluate-v2.0.py; Cui et al. (2019), cmrc2018_evaluate.py.
    """
    if cjk:
        exact = max((strip_cjk(each) == strip_cjk(predicted) for each in answers), default=predicted == "")
        f1 = max((_cjk_f1(each, predicted) for each in answers), default=float(predicted == ""))
        return float(exact), f1
    # Answers that are nothing but articles and punctuation do not count; without any the question has no answer.
    kept = [each for each in answers if normalize_answer(each)] or [""]
    exact = any(normalize_answer(each) == normalize_answer(predicted) for each in kept)
    return float(exact), max(_word_f1(each, predicted) for each in kept)


def normalize_answer(text: str) -> str:
    """Lower-case a text, drop ASCII punctuation and English articles, and single its spaces (SQuAD)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _word_f1(answer: str, predicted: str) -> float:
    """F1 over normalised words; if one side has none, 1 when both have none."""
    own, found = normalize_answer(answer).split(), normalize_answer(predicted).split()
    if not own or not found:
        return float(own == found)
    shared = sum((Counter(own) & Counter(found)).values())
    return 2 * shared / (len(own) + len(found))


def strip_cjk(text: str) -> str:
    """Lower-case a text and drop the punctuation that CMRC's script drops."""
    return "".join(each for each in text.lower().strip() if each not in _CJK_PUNCTUATION)


def segment_cjk(text: str) -> list[str]:
    """Cut a text into Han characters and the words between them, without punctuation (CMRC)."""
    segments: list[str] = []
    latin = ""
    for each in text.lower().strip():
        if each in _CJK_PUNCTUATION:
            continue
        if _HAN.match(each):
            segments += [*_LATIN_TOKENS.findall(latin), each]
            latin = ""
        else:
            latin += each
    return segments + _LATIN_TOKENS.findall(latin)


def _cjk_f1(answer: str, predicted: str) -> float:
    """F1 of the longest run of segments that both have."""
    own, found = segment_cjk(answer), segment_cjk(predicted)
    longest = _measure_longest_run(own, found)
    return 2 * longest / (len(own) + len(found)) if longest else 0.0


def _measure_longest_run(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common substring of two sequences."""
    longest = 0
    before = [0] * (len(b) + 1)
    for each in a:
        row = [0] * (len(b) + 1)
        for j, other in enumerate(b):
            if each == other:
                row[j + 1] = before[j] + 1
        longest = max(longest, *row)
        before = row
    return longest
