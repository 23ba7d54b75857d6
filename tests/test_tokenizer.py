import json
import shutil

import pytest

from fgrpo_jax import UserError, tokenizer, weights

TINY = weights.EMBEDDED / "tiny_arithmetic"


@pytest.fixture(scope="module")
def tiny():
    return tokenizer.load(TINY)


def test_chatml(tiny):
    assert tiny.render("1+2") == "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n"
    assert tiny.render("1", "be brief").startswith("<|im_start|>system\nbe brief<|im_end|>\n")


@pytest.mark.parametrize("text", ["12+345", "\\boxed{-7}", "größer → ２３\t\n", "a  b", ""])
def test_round_trip(tiny, text):
    (ids,) = tiny.encode([text])
    assert tiny.decode(ids) == text and all(0 <= i < tiny.size for i in ids)


def test_one_stop_token_is_cut_at_the_end_only(tiny):
    stop = tiny.stop_ids[0]
    (ids,) = tiny.encode(["7"])
    assert tiny.decode([*ids, stop]) == "7" and tiny.decode([stop]) == ""
    assert tiny.decode([stop, *ids]) == "<|im_end|>7"


def test_encoding_nothing(tiny):
    assert tiny.encode([]) == []


def folder(tmp_path, source=TINY, **files):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (source / name).exists():
            shutil.copyfile(source / name, tmp_path / name)
    for name, content in files.items():
        path = tmp_path / f"{name}.json"
        old = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**old, **content}))
    return tmp_path


def test_stop_ids_are_united(tmp_path):
    out = folder(tmp_path, config={"eos_token_id": 3}, generation_config={"eos_token_id": [4, 5]})
    assert tokenizer.load(out).stop_ids == tuple(sorted({3, 4, 5, *tokenizer.load(TINY).stop_ids}))


def test_no_chat_template(tmp_path):
    with pytest.raises(UserError, match="has no chat template: add chat_template"):
        tokenizer.load(folder(tmp_path, tokenizer_config={"chat_template": None}))


def test_no_tokenizer(tmp_path):
    with pytest.raises(UserError, match="has no tokenizer.json"):
        tokenizer.load(tmp_path)


def test_no_stop_id(tmp_path):
    out = folder(tmp_path, config={"eos_token_id": None}, tokenizer_config={"eos_token": None})
    with pytest.raises(UserError, match="names no eos_token_id"):
        tokenizer.load(out)


def test_broken_json(tmp_path):
    (folder(tmp_path) / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json cannot be read as JSON"):
        tokenizer.load(tmp_path)


def test_qwen2_5(shared_folder, tmp_path):
    config = {"eos_token_id": 151643}  # as in Qwen2.5's base models
    qwen = folder(tmp_path, shared_folder / "qwen2_5_tokenizer", config=config)
    loaded = tokenizer.load(qwen)
    assert loaded.stop_ids == (151643, 151645) and loaded.size == 151665
    (ids,) = loaded.encode([loaded.render("12+34")])
    assert ids[0] == 151644 and ids.count(151645) == 2  # system message and user message
    assert loaded.encode(["12+34"]) == [[16, 17, 10, 18, 19]]
    assert loaded.decode(ids[-3:]) == "<|im_start|>assistant\n"


def test_the_file_s_own_splitting_rules_hold(tmp_path):
    """AutoTokenizer would split like Qwen, whatever tokenizer.json says."""
    out = folder(tmp_path)
    content = json.loads((out / "tokenizer.json").read_text())
    content["pre_tokenizer"] = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "never"}
    content["decoder"] = None
    (out / "tokenizer.json").write_text(json.dumps(content))
    assert tokenizer.load(out).encode(["a b"])[0] == tokenizer.load(TINY).encode(["a_b"])[0]
