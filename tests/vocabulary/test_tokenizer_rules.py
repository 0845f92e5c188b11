"""Rules of tokenizers that do not fit their entries: which are told, how they are mended, and which are left alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from made_tokenizers import MAKERS, save_xlm_roberta
from row_files import SPECIALS, make_wordpiece
from transformers import PreTrainedTokenizerFast

from domext_ray.config.pretrain import PrepareConfig, PretrainConfig, RunConfig
from domext_ray.models.source import open_model
from domext_ray.pretraining.inputs import run_preparation
from domext_ray.text.vocabulary import tokenizer
from domext_ray.text.vocabulary.tokenizer import find_wrong_rules, load_tokenizer

SMALL = [*"abcdefghijklmnopqrstuvwxyz", *"0123456789.,-", *(f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz")]
CAPITALS = ["A", "S", "Smith", "Berlin", "##NA", "Noted"]
ACCENTS = ["é", "für", "##ère", "größe", "ça"]
CHINESE = [*"丘脑是大的", *(f"##{character}" for character in "丘脑是大的")]


def save(folder: Path, *entries: str, **options: bool | None) -> Path:
    """A folder as old checkpoints were published: a vocabulary, and what its tokenizer_config.json said, if any."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join([*SPECIALS, *entries]) + "\n", encoding="utf-8")
    (folder / "config.json").write_text('{"model_type": "bert"}')
    if options:
        (folder / "tokenizer_config.json").write_text(json.dumps(options))
    return folder


def tell(folder: Path) -> str:
    return find_wrong_rules(load_tokenizer(folder), "old", folder)


def test_an_entry_that_stands_twice_is_told_where_the_list_itself_is_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "old", *SMALL, "kidney", "a", "note", "kidney", "", "")
    told = "the tokenizer of --base old has 2 entries a second time in its vocab.txt (the first is 'a' in lines 6 and"
    assert tell(folder).startswith(told) and "where the last one counts; give the model's own vocab.txt" in tell(folder)
    load_tokenizer(folder).save_pretrained(folder)
    assert tell(folder) == "" and tell(save(tmp_path / "once", *SMALL, "", "", "kidney")) == ""


def test_lines_of_a_vocabulary_that_may_be_lost_are_told(tmp_path: Path) -> None:
    """A few of a table that is not padded; entries that were added are there."""
    folder = save(tmp_path / "old", *SMALL, "kidney", "note", "pain")
    size = len(load_tokenizer(folder))
    for num_rows, num_lost in ((size, 0), (size + 1, 1), (size + 8, 8), (size + 9, 0), (8 * (size // 8 + 1), 0)):
        said = find_wrong_rules(load_tokenizer(folder), "old", folder, num_rows)
        assert said.startswith(f"the tokenizer of --base old has no entries for the last {num_lost} of the") == (
            num_lost > 0
        )
    (folder / "added_tokens.json").write_text(json.dumps({"newer": size}))
    assert find_wrong_rules(load_tokenizer(folder), "old", folder, size + 1) == ""


def test_a_tokenizer_that_puts_no_special_tokens_around_a_text_is_told(tmp_path: Path) -> None:
    """As `tokenizers` saves one that has no template."""
    load_tokenizer(save(tmp_path / "old", *SMALL)).save_pretrained(tmp_path / "bare")
    path = tmp_path / "bare" / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "post_processor": None}))
    names = {f"{name.strip('[]').lower()}_token": name for name in SPECIALS}
    (tmp_path / "bare" / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **names})
    )
    assert tell(tmp_path / "bare") == (
        "the tokenizer of --base old puts no [CLS] and no [SEP] around a text; add its post_processor to "
        "tokenizer.json, unless the base was trained so."
    )


@pytest.mark.parametrize(
    ("entries", "options", "fault", "lines"),
    [
        (SMALL + CAPITALS, {}, "lowercases text: 6 of its 71 entries have capitals", '{"do_lower_case": false}'),
        (SMALL + CAPITALS + ACCENTS, {}, "lowercases text: 6 of its 76 entries", '{"do_lower_case": false}'),
        (
            SMALL + CAPITALS + ACCENTS,
            {"strip_accents": True},
            "lowercases text: 6 of its 76 entries have capitals and can never be produced, and strips accents: 5",
            '"do_lower_case": false, "strip_accents": false',
        ),
        (SMALL + ACCENTS, {}, "strips accents: 5 of its 70 entries have accents", '{"strip_accents": false}'),
        (
            SMALL + CAPITALS + ACCENTS,
            {"do_lower_case": False, "strip_accents": True},
            "strips accents: 5 of its 76 entries",
            '"strip_accents": false',
        ),
        (SMALL + ["丘脑", "大脑", "##脑是"], {}, "parts Chinese characters: 3 of", '{"tokenize_chinese_chars": false}'),
        (SMALL, {"do_lower_case": False}, "keeps capitals: 0 of its 65 entries", '"do_lower_case": true'),
        (SMALL, {"strip_accents": False}, "keeps accents: 0 of its 65 entries", '"strip_accents": true'),
    ],
)
def test_rules_that_do_not_fit(
    entries: list[str], options: dict[str, bool], fault: str, lines: str, tmp_path: Path
) -> None:
    folder = save(tmp_path / "old", *entries, **options)
    found, config = tell(folder), folder / "tokenizer_config.json"
    verb = f"set {lines} in {config}" if options else f"write {lines} as {config}"
    assert found.startswith(f"the tokenizer of --base old {fault}") and verb in found
    written = json.loads(lines if lines.startswith("{") else f"{{{lines}}}")
    config.write_text(json.dumps({**options, **written}))
    assert tell(folder) == "", "what it says to write mends it"
    load_tokenizer(folder).save_pretrained(folder)
    (folder / "vocab.txt").unlink()
    assert tell(folder) == "", "also beside a tokenizer.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **{name: not written[name] for name in written}}))
    assert fault.split(":")[0] in tell(folder)


@pytest.mark.parametrize(
    ("entries", "options"),
    [
        (SMALL, {}),
        (SMALL + CAPITALS, {"do_lower_case": False}),
        (SMALL + CAPITALS + ACCENTS, {"do_lower_case": False}),
        (SMALL + ACCENTS, {"strip_accents": False}),
        (SMALL + CHINESE, {}),
        (SMALL + CHINESE, {"tokenize_chinese_chars": False}),
        (CHINESE + ["a", "##a"], {"do_lower_case": False}),
        (SMALL + [f"w{i}" for i in range(100)] + ["é", "L"], {}),  # as SciBERT, which has some
        (SMALL + [f"[unused{i}]" for i in range(99)], {}),
    ],
)
def test_rules_that_fit(entries: list[str], options: dict[str, bool], tmp_path: Path) -> None:
    assert tell(save(tmp_path / "sound", *entries, **options)) == ""


def test_a_base_tells_it_before_anything_is_made(
    tiny_base_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rules that a base is read by are those of what is exported."""
    base, text = tmp_path / "cased", tmp_path / "text.txt"
    shutil.copytree(tiny_base_folder, base)
    names = load_tokenizer(base).convert_ids_to_tokens([*range(len(load_tokenizer(base)))])
    (base / "vocab.txt").write_text("\n".join(name.title() if name.isalpha() else name for name in names) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).unlink()
    text.write_text("".join(f"A text of {i} words and some others.\n" for i in range(90)))
    config = PretrainConfig(
        base=str(base),
        corpus=str(text),
        dry_run=True,
        prepare=PrepareConfig(unknown="allow"),
        run=RunConfig(dir=str(tmp_path / "runs"), name="run"),
    )
    run_preparation(config)
    told = capsys.readouterr().out
    assert told.count(f"warning: the tokenizer of --base {base} lowercases text: ") == 1
    assert open_model(str(base)).load().wrong_rules.startswith(f"the tokenizer of --model {base} lowercases text: ")
    (base / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    run_preparation(config)
    assert "the tokenizer of" not in capsys.readouterr().out


def test_other_models_have_their_own_rules(tmp_path: Path) -> None:
    for name, make in (*MAKERS.items(), ("xlm-roberta", save_xlm_roberta)):
        assert tell(make(tmp_path / name.replace(" ", "-"))) == ""


def test_rules_that_only_tokenizer_json_has(tmp_path: Path) -> None:
    """Classes other than BERT's do not read those of tokenizer_config.json."""
    made = make_wordpiece([*SPECIALS, *SMALL, *CAPITALS])
    names = {f"{name}_token": getattr(made, f"{name}_token") for name in ("unk", "sep", "pad", "cls", "mask")}
    PreTrainedTokenizerFast(tokenizer_object=made.backend_tokenizer, **names).save_pretrained(tmp_path)
    assert f'set "lowercase": false in the normalizer of {tmp_path / "tokenizer.json"} ' in tell(tmp_path)
    record = json.loads((tmp_path / "tokenizer.json").read_text())
    record["normalizer"]["lowercase"] = False
    (tmp_path / "tokenizer.json").write_text(json.dumps(record))
    assert tell(tmp_path) == ""


def test_a_large_vocabulary_is_judged_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "JUDGED_ENTRIES", 100)
    entries = [*SPECIALS, *(f"{'W' if i % 4 else 'w'}ord{i}" for i in range(295))]
    found = find_wrong_rules(make_wordpiece(entries), "large", Path("large"))
    assert "lowercases text: about 219 of its 294 entries have capitals" in found
