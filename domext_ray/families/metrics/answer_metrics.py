"""How right one answer to a question is, by the rule of its set: SQuAD 1.1's, SQuAD 2.0's or CMRC 2018's.

Enters: the accepted answers and the predicted one. Leaves: exact match and F1, each the best over the accepted answers
(Rajpurkar et al., 2016 and 2018; Cui et al., 2019).
"""

from __future__ import annotations

import itertools
import re
import string
from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

from domext_ray.families.readers.set_description import RULES

SQUAD_V1, SQUAD_V2, CMRC = RULES

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
# CMRC's script leaves these out; an ellipsis stays, because the script looks for two of them in one character.
_CJK_PUNCTUATION = str.maketrans("", "", "-:_*^/\\~`+=，。：？！“”；’《》·、「」（）－～『』")
_HAN = re.compile("([\u4e00-\u9fa5])")

# How NLTK's word_tokenize cuts lower-case English, in its order; characters that CMRC leaves out are missing.
_WORD_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        ("[«‘„]", r" \g<0> "),
        ('^"', " `` "),
        (r"(?<=[ (\[{<])(\"|'')", " `` "),
        (r"(?<!\w)'(?!(?:re|ve|ll|m|t|s|d|n)\b)(?=\w)", "' "),
        (r"(?<=[^.])\.([])}>\"'» ]*)\s*$", r" . \1 "),
        (r",(\D|$)", r" , \1"),
        (r"\.{2,}|[;@#$%&?!\u2012-\u2015]", r" \g<0> "),
        (r"(?<=[^'])' ", " ' "),
        (r"[][(){}<>]", r" \g<0> "),
        (r"^|$", " "),
        ("»", " » "),
        ("''|\"", " '' "),
        (r"\s+", " "),
        (r"(?<=[^' ])('[smd]?) ", r" \1 "),
        (r"(?<=[^' ])('ll|'re|'ve|n't) ", r" \1 "),
        (r"\b(can(?=not)|gim(?=me)|gon(?=na)|got(?=ta)|lem(?=me)|wan(?=na\s)|d(?='ye)|more(?='n))"
         r"(not|me|na|ta|'ye|'n)\b", r" \1 \2 "),
        (r" ('t)(is|was)\b", r" \1 \2 "),
    )
)  # fmt: skip

# Where a sentence may end: a period, or a question or exclamation mark, and what follows it.
_SENTENCE_ENDS = re.compile(r"""(\S*[.?!])(?=([)";}\]@'({\[‘«»?!]|\s+\S+))""")
_SENTENCE_WORDS = re.compile(
    r"""\.{2,}|(?:\.\s){2,}\.|[^("{\[;&#@)}\],\s](?:\S*?)(?=\s|$|[)";}\]@'({\[‘«»?!]|\.{2,}|,(?:$|[\s)";}\]@'({\[‘«»?!]))|\S"""
)
_CLOSING = re.compile(r"""\s*["')\]}‘«»]+?(?:\s+|$)""")
_INITIAL_OR_NUMBER = re.compile(r"[^\W\d]\.|[.,]?\d[\d,.]*")
# What its English model takes for abbreviations (Kiss and Strunk, 2006).
_ABBREVIATIONS = frozenset(
    """a.a a.c a.d a.g a.h a.m a.m.e a.s a.t adm ala ariz aug ave b.f b.v bros c c.i.t c.o.m.b c.v calif chg cie co col
    colo conn corp cos ct d d.c d.h d.w dec dr e e.f e.h e.l e.m f f.g f.j feb fla fri ft g g.d g.f g.k ga gen h h.c h.f
    h.m i.m.s ill inc j.b j.c j.j j.k j.p j.r jan jr k kan ky l l.a l.f l.p lt ltd m m.b.a m.d.c m.j maj messrs mg mich
    minn mr mrs ms n n.c n.d n.h n.j n.m n.v n.y nev nov oct ok okla ore p p.a.m p.m pa ph.d prof r r.a r.h r.i r.j r.k
    r.t rep reps s s.a s.a.y s.c s.g s.p.a s.s sen sep sept sr st sw t t.j tenn tues u.k u.n u.s u.s.a u.s.s.r v va vs
    vt w w.c w.r w.va w.w wash wed wis yr""".split()
)


def score_answer(answers: Sequence[str], predicted: str, rule: str) -> tuple[float, float]:
    """Return exact match, 0 or 1, and F1, 0 to 1, of one answer, by one of `RULES`.

    Without accepted answers the question has none, and only "" is right.

    Source: Rajpurkar et al. (2016), evaluate-v1.1.py, and (2018), evaluate-v2.0.py; Cui et al. (2019),
    cmrc2018_evaluate.py.
    """
    normalize, measure = (strip_cjk, _cjk_f1) if rule == CMRC else (normalize_answer, _word_f1)
    if rule == SQUAD_V2:  # answers that are nothing but articles and punctuation do not count
        answers = [answer for answer in answers if normalize_answer(answer)]
    exact = float(any(normalize(answer) == normalize(predicted) for answer in answers or ("",)))
    return exact, max((measure(answer, predicted) for answer in answers), default=exact)


def normalize_answer(text: str) -> str:
    """Lower-case a text, drop ASCII punctuation and English articles, and single its spaces (SQuAD)."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def _word_f1(answer: str, predicted: str) -> float:
    own, found = normalize_answer(answer).split(), normalize_answer(predicted).split()
    shared = sum((Counter(own) & Counter(found)).values())
    return 2 * shared / (len(own) + len(found)) if shared else 0.0


def strip_cjk(text: str) -> str:
    """Lower-case a text and drop the punctuation that CMRC's script drops."""
    return text.lower().strip().translate(_CJK_PUNCTUATION)


def segment_cjk(text: str) -> list[str]:
    """Cut a text into Han characters and the words between them, without punctuation (CMRC)."""
    parts = _HAN.split(strip_cjk(text))
    return [segment for i, part in enumerate(parts) for segment in ([part] if i % 2 else _split_words(part))]


def _split_words(text: str) -> list[str]:
    """Cut lower-case English into words as NLTK's word_tokenize does."""
    words: list[str] = []
    for sentence in _cut_sentences(text):
        for pattern, replacement in _WORD_RULES:
            sentence = pattern.sub(replacement, sentence)
        words += sentence.split()
    return words


def _cut_sentences(text: str) -> list[str]:
    """Cut lower-case English into sentences as NLTK does; closing quotes and brackets belong to the sentence before."""
    sentences: list[str] = []
    starts = [0]
    for found in _SENTENCE_ENDS.finditer(text):
        words = _SENTENCE_WORDS.findall(found[1] + found[2])
        if any(_ends_sentence(*pair) for pair in itertools.pairwise(words)):
            starts.append(found.end())
    for start, end in itertools.pairwise([*starts, len(text)]):
        sentence = text[start:end]
        if sentences:
            closing = _CLOSING.match(sentence)
            sentences[-1] += closing[0] if closing else ""
            sentence = sentence[closing.end() if closing else 0 :].lstrip()
        sentences.append(sentence)
    return sentences


def _ends_sentence(word: str, following: str) -> bool:
    if word in (".", "?", "!"):
        return True
    if not word.endswith(".") or word.endswith("..") or word[:-1] in _ABBREVIATIONS:
        return False
    goes_on = following in ".,;:?!" or following[0].islower()
    return not (goes_on and _INITIAL_OR_NUMBER.fullmatch(word))


def _cjk_f1(answer: str, predicted: str) -> float:
    """F1 of the longest run of segments that both have."""
    own, found = segment_cjk(answer), segment_cjk(predicted)
    longest = SequenceMatcher(None, own, found, autojunk=False).find_longest_match().size
    return 2 * longest / (len(own) + len(found)) if longest else 0.0
