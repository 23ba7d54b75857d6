import json
import shutil

import numpy as np
import pytest

from fgrpo_jax import UserError, tokenizer, weights
from fgrpo_jax.tokenizer import StopStrings

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


def test_a_model_without_a_chat_template_names_the_key(tmp_path):
    base = tokenizer.load(folder(tmp_path, tokenizer_config={"chat_template": None}))
    with pytest.raises(UserError, match="no chat template: .*set data.chat_template=plain"):
        base.with_chat_template("")
    plain = base.with_chat_template("plain")
    assert plain.render("1+2") == "1+2\n" and plain.render("1", "be brief") == "be brief\n1\n"
    assert plain.encode(["1\n"]) == base.encode(["1\n"])


def test_a_chat_template_from_a_file(tmp_path, tiny):
    path = tmp_path / "t.jinja"
    path.write_text("{% for m in messages %}<{{ m['content'] }}>{% endfor %}")
    assert tiny.with_chat_template(str(path)).render("ä", "S") == "<S><ä>"
    assert tiny.with_chat_template("") == tiny
    path.write_text("{% for m in")
    with pytest.raises(UserError, match="chat template cannot be rendered, see data.chat_template"):
        tiny.with_chat_template(str(path)).render("1")
    with pytest.raises(UserError, match="data.chat_template is 'planar': it must be plain, or a"):
        tiny.with_chat_template("planar")


LLAMA = (  # as Llama's, the template begins with the token that the tokenizer adds too
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def llama(path, template):
    """A tokenizer that puts <|begin|> in front of whatever it encodes, as Llama's does."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers, processors

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = "<|begin|> <|eot|> <|user|> <|system|> <|assistant|>".split()
    backend = Backend(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(special)
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", backend.token_to_id("<|begin|>"))]
    )
    backend.save(str(path / "tokenizer.json"))
    settings = {"bos_token": "<|begin|>", "eos_token": "<|eot|>", "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tokenizer.load(path)


@pytest.mark.parametrize("template, name", [(LLAMA, ""), (LLAMA, "plain"), (None, "plain")])
def test_a_prompt_begins_once(tmp_path, template, name):
    loaded = llama(tmp_path, template)
    begin = loaded.backend.bos_token_id
    assert loaded.backend("a")["input_ids"][0] == begin  # what a careless caller would get on top
    loaded = loaded.with_chat_template(name)
    for system in ("", "S"):
        text = loaded.render("1+2", system)
        (ids,) = loaded.encode([text])
        assert text.startswith("<|begin|>") and ids[0] == begin and ids.count(begin) == 1
    assert begin not in loaded.encode(["a worked solution"])[0]


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


def test_stop_strings(tiny):
    """The response keeps the token that completes a string; its text ends before the string."""
    (ids,) = tiny.encode(["12+34=46|99"])
    tokens = np.array(ids, np.int32)
    at = [tiny.decode(ids[: n + 1]) for n in range(len(ids))]
    stop = StopStrings(tiny, ("46", "|9"))
    first = next(n for n, text in enumerate(at) if "46" in text) + 1
    for new in range(len(ids) - first + 1, len(ids) + 1):
        assert stop.stopped(tokens, new) == first
    assert stop.stopped(tokens[: first - 1], 2) is None
    assert stop.text(tokens) == stop.text(tokens[:first]) == "12+34="
    assert StopStrings(tiny, ("x",)).stopped(tokens, len(tokens)) is None
    assert StopStrings(tiny, ("x",)).text(tokens) == "12+34=46|99"


def test_stop_strings_over_many_looks(tiny):
    """Whatever the looks, a string across their border is found, at the same token."""
    (ids,) = tiny.encode(["0123456789" * 3 + "ab" + "12"])
    tokens, stop = np.array(ids, np.int32), StopStrings(tiny, ("9ab1",))
    for size in (1, 2, 3, 7):
        found = None
        for end in range(size, len(ids) + size, size):
            end = min(end, len(ids))
            found = stop.stopped(tokens[:end], min(size, end) if end % size == 0 else end % size)
            if found:
                break
        assert "9ab1" in tiny.decode(ids[:found])
        assert "9ab1" not in tiny.decode(ids[: found - 1])
