import pytest

from attn_tiny_lm.data import SEPARATOR, Document, is_held_out, load_corpus, to_stream, to_tokens


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text)
    return root


HELD = {"ast.py": b"import ast\n", "wsgiref/util.py": b"x = 1\n"}
TRAIN = {"heapq.py": b"y = 2\n", "json/decoder.py": b"z = 3\n"}


def test_the_split_is_a_function_of_the_name_alone(tmp_path):
    # These names decided which files the shipped weights were trained on: the rule must never change.
    assert [is_held_out(name) for name in HELD] == [True, True]
    assert [is_held_out(name) for name in TRAIN] == [False, False]
    one = load_corpus(write(tmp_path / "one", HELD | TRAIN))
    other = load_corpus(write(tmp_path / "other", dict.fromkeys([*TRAIN, *HELD, "bisect.py"], b"changed\n")))
    assert [d.name for d in one.held_out] == [d.name for d in other.held_out] == sorted(HELD)
    assert [d.name for d in one.train] == sorted(TRAIN)


def test_about_five_percent_are_held_out():
    held = sum(is_held_out(f"package/module_{i}.py") for i in range(4000))
    assert 150 < held < 250


def test_loading_twice_gives_the_same_corpus_and_any_change_another_digest(tmp_path):
    root = write(tmp_path, HELD | TRAIN)
    first = load_corpus(root)
    assert load_corpus(root) == first
    write(tmp_path, {"heapq.py": b"y = 3\n"})
    assert load_corpus(root).sha256 != first.sha256


def test_only_source_text_of_the_library_itself_is_used(tmp_path):
    unusable = {
        "site-packages/third_party.py": b"a = 1\n",
        "encodings/cp1252.py": b"table = 1\n",
        "test/latin.py": "# \u00e9\n".encode("latin-1"),
        "test/binary.py": b"a = '\0'\n",
        "empty.py": b"",
        "notes.txt": b"not python\n",
    }
    corpus = load_corpus(write(tmp_path, HELD | TRAIN | unusable))
    assert {d.name for d in corpus.train + corpus.held_out} == set(HELD | TRAIN)


@pytest.mark.parametrize("files", [{}, HELD, TRAIN])
def test_an_empty_half_is_refused(tmp_path, files):
    with pytest.raises(ValueError, match=r"\[tiny-lm.corpus\]"):
        load_corpus(write(tmp_path, files))


def test_the_installed_library_has_both_halves():
    corpus = load_corpus()
    names = {d.name for d in corpus.held_out}
    assert "wsgiref/util.py" in names
    assert len(corpus.train) > 10 * len(corpus.held_out)
    assert not names & {d.name for d in corpus.train}


def test_a_separator_goes_before_each_document():
    stream = to_stream((Document("a.py", b"ab"), Document("b.py", b"c")))
    assert stream.tolist() == [SEPARATOR, *b"ab", SEPARATOR, *b"c"]
    assert to_tokens(b"ab") == [SEPARATOR, *b"ab"]
