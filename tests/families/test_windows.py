"""Windows lose nothing, pieces know their characters, and rows are what the tokenizer writes."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from conftest import WORDS
from transformers import PreTrainedTokenizerBase

from domext_ray.families.readers.words import INVISIBLE
from domext_ray.families.windows import encode_texts, holds, plan_windows, read_template
from domext_ray.text.vocabulary.tokenizer import make_backend


@pytest.fixture(scope="module", params=["bert", "roberta"])
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerBase:
    return request.getfixturevalue(request.param)


def test_windows_cover_a_text_and_overlap() -> None:
    for seed in range(200):
        draw = random.Random(seed)
        num_pieces, size, overlap = draw.randint(0, 90), draw.randint(1, 30), draw.randint(0, 40)
        windows = plan_windows(num_pieces, size, overlap)
        assert windows[0][0] == 0 and windows[-1][1] == num_pieces, seed
        assert all(end - start == min(size, num_pieces) for start, end in windows), "each as long as it can be"
        assert len(set(windows)) == len(windows), seed
        for before, after in itertools.pairwise(windows):
            assert before[1] - after[0] >= min(overlap, size // 2) and after[0] > before[0], seed
        firsts = [draw.randint(0, max(0, num_pieces - 1)) for _ in range(draw.randint(0, 6))]
        stretches = [(first, draw.randint(first, num_pieces)) for first in firsts]
        more = plan_windows(num_pieces, size, overlap, stretches)
        assert set(windows) <= set(more) and more == sorted(set(more)), seed
        assert all(0 <= start <= end <= num_pieces and end - start <= size for start, end in more), seed
        for stretch in stretches:
            assert any(holds(window, stretch) for window in more) == (stretch[1] - stretch[0] <= size), seed


def test_pieces_are_their_characters(tokenizer: PreTrainedTokenizerBase) -> None:
    texts = [
        "the  dog\tand [SEP] zebra9 .",
        "",
        "  ",
        "naïve 漢字 😀 the <s>",
        "\ufeffthe \u2060dog\u200d\u00ad \u200e ",
    ]
    for text, pieces in zip(texts, encode_texts(make_backend(tokenizer), texts), strict=True):
        seen = np.zeros(len(text), dtype=bool)
        for start, end, is_visible in zip(pieces.starts, pieces.ends, pieces.is_visible, strict=True):
            assert is_visible == (start < end)
            if is_visible:
                assert not {text[start], text[end - 1]} & INVISIBLE
                seen[start:end] = True
        assert all(seen[i] or each in INVISIBLE for i, each in enumerate(text))
        assert not set(pieces.ids) & {tokenizer.cls_token_id, tokenizer.sep_token_id}
    assert encode_texts(make_backend(tokenizer), ["the dog"])[0].cut((1, 2)).starts.tolist() == [4]


def test_rows_are_what_the_tokenizer_writes(tokenizer: PreTrainedTokenizerBase) -> None:
    draw = random.Random(0)
    for _ in range(20):
        first, second = (" ".join(draw.choices(WORDS, k=draw.randint(1, 6))) for _ in range(2))
        pieces = [each.ids for each in encode_texts(make_backend(tokenizer), [first, second])]
        for texts in ([first], [first, second]):
            expected = tokenizer(*texts)
            template = read_template(tokenizer, pair=len(texts) == 2)
            ids, types = template.join(*pieces[: len(texts)])
            assert ids.tolist() == expected["input_ids"]
            assert template.num_special == tokenizer.num_special_tokens_to_add(pair=len(texts) == 2)
            place = template.find_text(*pieces[: len(texts) - 1])
            last = pieces[len(texts) - 1]
            assert ids[place : place + len(last)].tolist() == last.tolist()
            if "token_type_ids" in tokenizer.model_input_names and len(texts) == 2:
                assert types is not None and types.tolist() == expected["token_type_ids"]
            else:
                assert types is None
