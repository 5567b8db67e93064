"""What counts as a document, and every way in which a file can be none. Most inputs are reduced bug reports."""

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv3fp8.data import text as text_module
from dsv3fp8.data.text import cut, read_text
from dsv3fp8.errors import UserError

PLAIN = ["The cat sat.", "naïve café 你好 😀", "last line"]
Documents = Callable[..., list[str]]


@pytest.mark.parametrize("name", ["plain.jsonl", "bom.jsonl", "crlf.jsonl", "blank_lines.jsonl", "no_final_newline.jsonl"])
def test_d03_d04_d06_marks_line_ends_and_blank_lines_leave_the_records_the_same(
    name: str, fixtures: Path, documents: Documents
) -> None:
    assert documents(fixtures / name) == PLAIN


@pytest.mark.parametrize("name", ["plain.txt", "bom.txt", "crlf.txt"])
def test_d03_d04_a_text_file_is_one_document_without_its_mark_and_carriage_returns(
    name: str, fixtures: Path, documents: Documents
) -> None:
    assert documents(fixtures / name) == ["\n".join([*PLAIN, ""])]


def test_d04_carriage_returns_written_inside_a_json_string_stay(tmp_path: Path, documents: Documents) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(rb'{"text": "one\r\ntwo\rthree"}')
    assert documents(path) == ["one\r\ntwo\rthree"]


def test_a_line_separator_inside_a_json_string_does_not_end_the_line(tmp_path: Path, documents: Documents) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "a\u2028b\x85c"}, ensure_ascii=False) + "\n")
    assert documents(path) == ["a\u2028b\x85c"]


def test_nul_is_a_character_like_any_other(fixtures: Path, documents: Documents) -> None:
    assert documents(fixtures / "nul.txt") == ["a\0b\0c\n"]


def test_d07_documents_without_a_visible_character_are_skipped_and_counted(
    fixtures: Path, open_files: Callable[..., object], documents: Documents
) -> None:
    assert documents(fixtures / "empty_docs.jsonl") == ["middle"]
    assert open_files(fixtures / "empty_docs.jsonl").describe()["empty_documents"] == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "only_blank.jsonl", "len_0_bytes.txt"])
def test_d06_a_corpus_without_text_is_refused_by_name(name: str, fixtures: Path, documents: Documents) -> None:
    with pytest.raises(UserError, match=rf"^data\.paths: no text in .*{name}; give"):
        documents(fixtures / name)


def test_d06_an_empty_file_among_others_is_reported(fixtures: Path, open_files: Callable[..., object]) -> None:
    corpus = open_files(fixtures / "empty.jsonl", fixtures / "plain.jsonl")
    files = {Path(each["name"]).name: each["split"] for each in corpus.describe()["files"]}  # type: ignore[attr-defined]
    assert files["empty.jsonl"] == "no text"
    assert files["plain.jsonl"] == "train"


def refused(documents: Documents, path: Path, **keys: object) -> str:
    with pytest.raises(UserError) as caught:
        documents(path, **keys)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_d06_a_bad_json_line_is_named_by_number(fixtures: Path, documents: Documents) -> None:
    assert "line 3 is not valid JSON (Unterminated string starting at, column 10)" in refused(
        documents, fixtures / "bad_line3.jsonl"
    )


def test_a_missing_key_is_named_with_its_line_and_the_keys_there_are(fixtures: Path, documents: Documents) -> None:
    assert "line 2 has no key 'text' (it has 'body')" in refused(documents, fixtures / "missing_key.jsonl")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"text": null}', "line 2: 'text' is null, not text"),
        ('{"text": 7}', "line 2: 'text' is int, not text"),
        ('["text"]', "line 2 is a JSON array, not an object"),
        ("7", "line 2 is a JSON number, not an object"),
        ("{}", "line 2 has no key 'text' (it has no key)"),
        ('{"text": "\\ud83d"}', "line 2: 'text' has half of a surrogate pair, \\ud83d, at character 0"),
        ("[" * 100_000, "line 2 is not valid JSON"),
        ('{"text": ' + "9" * 5000 + "}", "line 2 is not valid JSON"),
    ],
)
def test_a_record_without_text_is_named_by_line(line: str, complaint: str, tmp_path: Path, documents: Documents) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' + line)
    assert complaint in refused(documents, path)


def test_an_array_file_is_refused_with_the_remedy(fixtures: Path, documents: Documents) -> None:
    assert "rewrite it as .jsonl" in refused(documents, fixtures / "array.json")


@pytest.mark.parametrize("name", ["a.csv", "a", "a.gz", "b.tar.gz"])
def test_a_format_that_is_not_known_is_refused_with_those_that_are(name: str, tmp_path: Path, documents: Documents) -> None:
    (tmp_path / name).write_bytes(b"x")
    assert ".txt .md .rst .py .jsonl .ndjson .parquet" in refused(documents, tmp_path / name)


def test_ids_given_as_text_point_to_the_memmap_source(tmp_path: Path, documents: Documents) -> None:
    (tmp_path / "a.bin").write_bytes(b"xx")
    assert "take data=memmap" in refused(documents, tmp_path / "a.bin")


def test_broken_utf8_is_named_by_file_and_byte_offset(fixtures: Path, documents: Documents) -> None:
    path = fixtures / "broken_utf8.txt"
    offset = path.read_bytes().index(b"\xff")
    assert f"byte 0xff at offset {offset} of the file is not UTF-8" in refused(documents, path)
    assert "byte 0x80 at offset 128" in refused(documents, fixtures / "all_bytes.bin.txt")


def test_the_offset_of_broken_utf8_counts_the_byte_order_mark_and_earlier_lines(tmp_path: Path, documents: Documents) -> None:
    for name, data in {
        "a.txt": b"\xef\xbb\xbfab\r\n\xff",
        "a.jsonl": b'\xef\xbb\xbf{"text": "a"}\n\n{"text": "\xe4\xbd"}',
    }.items():
        (tmp_path / name).write_bytes(data)
        bad = data.index(b"\xff") if b"\xff" in data else data.index(b"\xe4")
        assert f"at offset {bad} of the file" in refused(documents, tmp_path / name)


def test_a_character_cut_off_by_the_end_of_the_file_is_broken_utf8(tmp_path: Path, documents: Documents) -> None:
    (tmp_path / "a.txt").write_bytes("ab€".encode()[:-1])
    assert "byte 0xe2 at offset 2" in refused(documents, tmp_path / "a.txt")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_utf16_and_utf32_are_named_as_what_they_are(encoding: str, tmp_path: Path, documents: Documents) -> None:
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    (tmp_path / "a.txt").write_bytes(mark + "The cat sat.".encode(encoding))
    assert f"is {encoding[:6].upper()} (its first bytes are" in refused(documents, tmp_path / "a.txt")


def test_the_utf16_fixture_is_refused(fixtures: Path, documents: Documents) -> None:
    assert "is UTF-16" in refused(documents, fixtures / "utf16.txt")


def packed(data: bytes, suffix: str) -> bytes:
    if suffix == ".zst":
        return zstandard.compress(data[:20]) + zstandard.compress(data[20:])  # two frames, as parallel packers write
    return {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}[suffix](data)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_compressed_files_are_read_by_suffix(suffix: str, fixtures: Path, tmp_path: Path, documents: Documents) -> None:
    for name in ("plain.jsonl", "bom.txt"):
        (tmp_path / (name + suffix)).write_bytes(packed((fixtures / name).read_bytes(), suffix))
    assert documents(tmp_path / f"plain.jsonl{suffix}") == PLAIN
    assert documents(tmp_path / f"bom.txt{suffix}") == ["\n".join([*PLAIN, ""])]


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_compressed_file_that_is_cut_short_or_no_such_file_is_refused(
    suffix: str, tmp_path: Path, documents: Documents
) -> None:
    noise = np.random.default_rng(0).integers(32, 127, 5000).astype(np.uint8).tobytes()
    whole = packed(noise, suffix)
    for name, data in {"short": whole[:-30], "other": b"not compressed at all"}.items():
        path = tmp_path / f"{name}.txt{suffix}"
        path.write_bytes(data)
        assert f"cannot be read as a {suffix} file" in refused(documents, path)


def parquet(columns: dict[str, list[object]]) -> bytes:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), out, row_group_size=2)
    return out.getvalue()


def test_parquet_has_a_document_in_each_row(tmp_path: Path, documents: Documents) -> None:
    data = parquet({"id": [1, 2, 3], "body": PLAIN})  # type: ignore[dict-item]
    (tmp_path / "a.parquet").write_bytes(data)
    (tmp_path / "b.parquet.gz").write_bytes(gzip.compress(data))
    assert documents(tmp_path / "a.parquet", text_key="body") == PLAIN
    assert documents(tmp_path / "b.parquet.gz", text_key="body") == PLAIN


def test_parquet_without_text_is_refused_by_column_or_row(tmp_path: Path, documents: Documents) -> None:
    path = tmp_path / "a.parquet"
    path.write_bytes(parquet({"body": ["a"]}))
    assert "has no column 'text' (it has body)" in refused(documents, path)
    path.write_bytes(parquet({"text": ["a", "b", None]}))
    assert "row 3: 'text' is null" in refused(documents, path)
    path.write_bytes(parquet({"text": [1, 2]}))  # type: ignore[list-item]
    assert "row 1: 'text' is int" in refused(documents, path)
    path.write_bytes(b"not parquet")
    assert "cannot be read as Parquet" in refused(documents, path)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(text=st.text(alphabet="ab \n\t", max_size=80), size=st.integers(1, 12))
def test_pieces_make_the_text_and_the_first_shows_whether_there_is_any(text: str, size: int) -> None:
    pieces = list(cut([text], size))
    assert "".join(pieces) == text
    assert all(pieces)
    if text.strip():
        assert pieces[0].strip()


@settings(derandomize=True, deadline=None, max_examples=100)
@given(text=st.text(alphabet="a\r\n€😀 ", max_size=60), block=st.integers(1, 7))
def test_the_block_size_of_reading_changes_nothing(text: str, block: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "blocks.txt"
    path.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "BLOCK", max(block, 4))  # 4: a byte order mark is looked for in the first
        read = "".join(read_text(path))
    assert read == text.replace("\r\n", "\n")


def test_a_large_file_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "large.txt"
    path.write_text("a line of some text\n" * (64 << 20 >> 4))
    tracemalloc.start()
    length = sum(len(piece) for piece in read_text(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert length == path.stat().st_size == 80 << 20
    assert peak < 40 << 20
