"""launcher/prepare.py from the outside: what it makes, what it refuses, and what a kill leaves behind."""

import contextlib
import hashlib
import json
import math
import os
import random
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from plumbline.data.corpus import open_corpus, read_manifest
from plumbline.data.preparation.manifest import CORPUS
from plumbline.data.preparation.verifying import verify
from plumbline.data.prepare import Request, prepare
from plumbline.data.sizes import in_units, parse_size
from plumbline.data.sources import Sources
from plumbline.data.workspace import new_folder
from plumbline.launcher.prepare import main
from plumbline.launcher.runtime.commands import cli

ROOT = Path(__file__).parents[2]


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(ROOT / "launcher" / "prepare.py"), *map(str, arguments)]


def run(
    *arguments: object, prefix: tuple[str, ...] = (), cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*prefix, *command(*arguments)], capture_output=True, text=True, check=False, cwd=cwd)


def make(source: Path, output: Path, tokenizer: str = "byte", **changes: Any) -> None:
    prepare(Request(Sources((str(source),)), tokenizer, output, **changes))


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def leftovers(folder: Path) -> list[Path]:
    return sorted((path for path in folder.iterdir() if path.name.startswith(".")), reverse=True)


def wait_for_the_end_of(group: int) -> None:
    """Wait until no process of a group is left; one that has just been forked holds the locks of its parent."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.killpg(group, 0)
            time.sleep(0.01)


def test_preparing_does_not_wait_for_torch() -> None:
    program = "import sys, prepare; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT / "launcher", check=True)


def test_the_command_from_end_to_end(text_folder: Path, tmp_path: Path) -> None:
    arguments = ("--source", text_folder, "--tokenizer", "train-bpe:400", "--output", tmp_path / "c/corpus", "--json")
    first = run(*arguments, "--workers", 2)
    assert first.returncode == 0, first.stderr
    summary = json.loads(first.stdout)
    assert summary["status"] == "prepared"
    assert summary["vocab_size"] == 400
    assert "60 documents" in first.stderr
    corpus = open_corpus(tmp_path / "c" / "corpus")
    assert verify(tmp_path / "c" / "corpus")[1] == []
    assert sum(split.num_documents for split in corpus.splits.values()) == 60
    assert sum(split.source_bytes or 0 for split in corpus.splits.values()) == sum(
        map(len, files(text_folder).values())
    )
    for split in corpus.splits.values():  # every document ends with the one end-of-text token in it
        ends = [
            place + 1
            for place, token in enumerate(split.indexed.read(0, split.num_tokens))
            if token == corpus.eos_token_id
        ]
        assert ends == [*split.indexed.document_starts(0, split.num_tokens).tolist(), split.num_tokens]

    before = files(tmp_path)
    again = run(*arguments, "--workers", 1)
    assert (again.returncode, json.loads(again.stdout)["status"]) == (0, "already prepared")
    other = run(*arguments, "--seed", 5)
    assert other.returncode == 2
    assert other.stderr.startswith("error: ")
    assert "(--seed was 0, now 5)" in other.stderr
    (tmp_path / "b.txt").write_text("another text\n")
    other = run("--source", tmp_path / "b.txt", *arguments[2:], "--on-bad-record", "skip")
    (tmp_path / "b.txt").unlink()
    told = f"(--source was ['{text_folder}'], now ['{tmp_path}/b.txt']; --on-bad-record skip was not given, now True)"
    assert told in other.stderr
    assert "--overwrite" in other.stderr
    assert files(tmp_path) == before
    replaced = run(*arguments[:-1], "--seed", 5, "--overwrite")
    assert replaced.returncode == 0
    assert replaced.stdout.startswith("prepared: ")
    assert open_corpus(tmp_path / "c" / "corpus").fingerprint != corpus.fingerprint
    assert leftovers(tmp_path / "c") == []


@pytest.mark.parametrize("tokenizer", ["byte", "train-bpe:400"])
def test_the_number_of_workers_changes_nothing(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    monkeypatch.setattr(
        "plumbline.data.preparation.filling.PIECE_BYTES", 2000
    )  # many pieces, so that workers could disagree
    for workers in (1, 2):
        make(text_folder, tmp_path / str(workers), tokenizer, workers=workers)
    assert files(tmp_path / "1") == files(tmp_path / "2")


def test_documents_keep_their_order_and_their_text(text_folder: Path, byte_corpus: Path) -> None:
    texts = [path.read_bytes() for path in sorted(text_folder.iterdir())]
    for split in open_corpus(byte_corpus).splits.values():
        stream = split.indexed.read(0, split.num_tokens)
        bounds = [0, *split.indexed.document_starts(0, split.num_tokens).tolist(), split.num_tokens]
        documents = [bytes(stream[a : b - 1].tolist()) for a, b in pairwise(bounds)]
        assert documents == [text for text in texts if text in documents]
        assert len(documents) == split.num_documents


def test_unigram_entropy_is_what_it_says(byte_corpus: Path) -> None:
    corpus = open_corpus(byte_corpus)
    tokens = {name: split.indexed.read(0, split.num_tokens).tolist() for name, split in corpus.splits.items()}
    train, validation = Counter(tokens["train"]), tokens["validation"]
    loss = [-math.log((train[token] + 1) / (sum(train.values()) + 257)) for token in validation]
    assert corpus.manifest
    assert corpus.manifest.unigram_entropy == pytest.approx(sum(loss) / len(loss), rel=1e-12)


def test_a_single_document_is_cut(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("".join(f"line {number}\n" for number in range(1000)))
    make(tmp_path / "book.txt", tmp_path / "book")
    splits = open_corpus(tmp_path / "book").splits
    assert [split.num_documents for split in splits.values()] == [1, 1]


def in_process(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    """Return the exit code of prepare.py; what it prints is captured as any output of the test."""
    monkeypatch.setattr(sys, "argv", ["prepare.py", *map(str, arguments)])
    return cli.code_of(main)


def test_a_share_that_cannot_be_kept_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "words.txt").write_text("a few words,but too few")
    options = ("--tokenizer", "byte", "--document-separator", ",", "--output", tmp_path / "c", "--json")
    for status in ("prepared", "already prepared"):
        assert in_process(monkeypatch, "--source", tmp_path / "words.txt", *options) == 0
        printed = capsys.readouterr()
        warning = r"^warning: \d\d\.\d% of the text is held out, and --validation-fraction asked for 2\.0%"
        assert len(re.findall(warning, printed.err, re.MULTILINE)) == 1
        assert json.loads(printed.out)["status"] == status


def test_two_books_give_the_share_that_was_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, count in (("a", 4000), ("b", 3000)):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {line}\n" for line in range(count)))
    options = ("--tokenizer", "byte", "--output", tmp_path / "c")
    assert in_process(monkeypatch, "--source", tmp_path / "*.txt", *options) == 0
    splits = open_corpus(tmp_path / "c").splits
    assert [split.num_documents for split in splits.values()] == [2, 2]
    sizes = [split.source_bytes or 0 for split in splits.values()]
    assert sizes[1] / sum(sizes) == pytest.approx(0.02, rel=0.05)
    assert "; of any of more than" in capsys.readouterr().err


def test_other_folders_are_never_replaced(text_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("the only copy")
    with pytest.raises(ValueError, match=r"exists and is not a corpus \(no corpus\.json\); nothing was replaced"):
        make(text_folder, tmp_path, overwrite=True)
    make(text_folder, tmp_path / "c")
    for place in ("thesis.txt", "tokenizer/thesis.txt"):
        thesis = (tmp_path / "thesis.txt").rename(tmp_path / "c" / place)
        with pytest.raises(ValueError, match=rf"holds more than a corpus \({place}\)"):
            make(text_folder, tmp_path / "c", overwrite=True)
        assert thesis.rename(tmp_path / "thesis.txt").read_text() == "the only copy"
    (tmp_path / "link").symlink_to(tmp_path / "c")
    with pytest.raises(ValueError, match="exists and is a link"):
        make(text_folder, tmp_path / "link", overwrite=True)
    make(text_folder, tmp_path / "c", overwrite=True)


def test_what_appears_while_a_folder_is_filled_is_not_replaced(tmp_path: Path) -> None:
    def fill() -> None:
        with new_folder(tmp_path / "c", CORPUS):
            (tmp_path / "c").mkdir()
            (tmp_path / "c" / "thesis.txt").write_text("the only copy")

    with pytest.raises(ValueError, match="is not a corpus"):
        fill()
    assert (tmp_path / "c" / "thesis.txt").read_text() == "the only copy"
    assert leftovers(tmp_path) == []


def test_a_damaged_corpus_is_not_called_prepared(text_folder: Path, tmp_path: Path) -> None:
    make(text_folder, tmp_path / "c")
    with (tmp_path / "c" / "train.bin").open("ab") as file:
        file.truncate(100)
    with pytest.raises(ValueError, match=r"train\.bin: has 100 bytes"):
        make(text_folder, tmp_path / "c")
    make(text_folder, tmp_path / "c", overwrite=True)
    assert verify(tmp_path / "c")[1] == []


def test_a_changed_source_is_another_corpus(text_folder: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(text_folder, tmp_path / "source"))
    make(source, tmp_path / "c")
    (source / "00.txt").write_text("new words")
    with pytest.raises(ValueError, match=r"holds a corpus of these sources as they were: .*--overwrite"):
        make(source, tmp_path / "c")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "nowhere/*.txt"], "source nowhere/*.txt: no file matches"),
        (["--tokenizer", "train-bpe:100"], "smallest vocabulary is 257"),
        (["--seed", "-1"], "--seed -1: expected a whole number from 0 to 2^64 - 1"),
        (["--seed", str(2**64)], f"--seed {2**64}: expected a whole number"),
        (["--validation-fraction", "1.5"], "--validation-fraction 1.5: expected a number above 0 and at most 1"),
        (["--workers", "0"], "--workers 0: expected at least 1"),
        (["--validation-fraction", "1", "--tokenizer", "train-bpe:400"], "trains on text that is not held out"),
        (["--document-separator", ""], "--document-separator is empty"),
    ],
)
def test_a_bad_request_is_refused_in_one_line(
    text_folder: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    result = run("--source", text_folder, "--tokenizer", "byte", "--output", tmp_path / "c", *arguments)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "count"), [("1", 1), ("500MB", 500_000_000), ("1.5 gb", 1_500_000_000), ("0", None), ("4 GiB", None)]
)
def test_sizes(text: str, count: int | None) -> None:
    if count is None:
        with pytest.raises(ValueError, match="expected"):
            parse_size(text)
    else:
        assert parse_size(text) == count


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (999, "999 bytes"),
        (1_000, "1.0 KB"),
        (493_152, "493.2 KB"),
        (3 * 10**15, "3,000.0 TB"),
    ],
)
def test_sizes_are_written_in_a_unit_of_which_there_is_one(size: int, text: str) -> None:
    assert in_units(size) == text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--source", "stdlib", "--output", "c"], "--source needs --tokenizer"),
        (["--source", "stdlib", "--append", "stdlib", "--output", "c"], "not allowed with argument --source"),
        (["--merge", "a", "b"], "--output is missing"),
        (
            ["--source", "stdlib", "--output", "c", "--shard-size", "4 GiB"],
            "--shard-size: '4 GiB': expected a size such",
        ),
        (["--append", "stdlib", "--output", "s3://bucket/c"], "--append, --merge and --tokens work on folders"),
        (["--append", "stdlib", "--output", "nowhere/c"], "nowhere/c: no corpus here"),
        (["--merge", "nowhere/c", "b", "--output", "c"], "nowhere/c: no corpus here"),
        (["--verify", "nowhere"], "nowhere: no corpus here"),
    ],
)
def test_what_does_not_go_together_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.suppress(SystemExit):  # argparse's
        assert in_process(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err


def test_an_error_halfway_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n{"te')
    with pytest.raises(ValueError, match=r"a\.jsonl:3: not JSON"):
        make(tmp_path / "a.jsonl", tmp_path / "corpora" / "c")
    assert list((tmp_path / "corpora").iterdir()) == []


def test_a_killed_run_leaves_no_corpus_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("".join(f"document {number} says nothing much\n" for number in range(400_000)))
    arguments = ("--source", tmp_path / "long.txt", "--document-separator", "\\n", "--tokenizer", "train-bpe:2000")
    output = tmp_path / "corpora" / "c"
    output.parent.mkdir()
    process = subprocess.Popen(
        command(*arguments, "--output", output), start_new_session=True, stderr=subprocess.DEVNULL
    )
    while not leftovers(output.parent):
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    wait_for_the_end_of(process.pid)
    assert not output.exists()
    assert [path.suffix for path in leftovers(output.parent)] == [".partial", ".lock"]
    make(tmp_path / "long.txt", output, "byte")
    assert leftovers(output.parent) == []
    open_corpus(output)


def test_a_corpus_that_another_process_made_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "text.txt").write_text("some text\n" * 100)
    request = Request(Sources((str(tmp_path / "text.txt"),)), "byte", tmp_path / "c", 0.1)
    module = sys.modules[prepare.__module__]
    filled = vars(module)["fill"]

    def fill_slowly(*arguments: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(module, "fill", filled)
            prepare(replace(request, seed=7))
        return filled(*arguments)

    monkeypatch.setattr(module, "fill", fill_slowly)
    with pytest.raises(ValueError, match=r"c: holds another corpus \(--seed was 7, now 0"):
        prepare(request)
    assert read_manifest(tmp_path / "c").request["seed"] == 7
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(("umask", "folder_mode", "file_mode"), [(0o022, 0o755, 0o644), (0o027, 0o750, 0o640)])
def test_a_published_folder_has_the_permissions_of_the_umask(
    tmp_path: Path, umask: int, folder_mode: int, file_mode: int
) -> None:
    before = os.umask(umask)
    try:
        with new_folder(tmp_path / "c", CORPUS) as folder:
            folder.chmod(0o2700)  # what is made in it inherits its group
            (folder / "tokenizer").mkdir(0o700)
            for name in ("train.bin", "tokenizer/tokenizer.json"):
                (folder / name).touch(0o600)
        assert os.umask(umask) == umask, "the umask is left as it was"
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "c", *(tmp_path / "c").rglob("*")]}
    assert modes == {
        "c": 0o2000 | folder_mode,
        "tokenizer": 0o2000 | folder_mode,
        "train.bin": file_mode,
        "tokenizer.json": file_mode,
    }


def on_a_small_disk(folder: Path, kilobytes: int, holding: Path | None = None) -> tuple[str, ...]:
    """Return a command prefix that mounts a small memory disk on `folder`, visible to the command alone.

    The command begins with a copy of `holding` there; what is on the disk at its end is printed, with checksums.
    """
    copy = "" if holding is None else f'cp -r "{holding}" "{folder}" && '
    script = (
        f'mount -t tmpfs -o size={kilobytes}k tmpfs "{folder}" && {copy}"$@"; status=$?; cd "{folder}"; ls -A; '
        "find . -type f | sort | xargs -r sha256sum; exit $status"
    )
    prefix = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script, "sh")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("needs user namespaces to mount a small disk")
    return prefix


def test_a_full_disk_is_one_clear_error(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    source = tmp_path / "long.txt"
    source.write_text("some text\n" * 50_000)
    arguments = ("--source", source, "--output", disk / "c")
    early = run(*arguments, "--tokenizer", "byte", prefix=on_a_small_disk(disk, 1000))
    assert early.returncode == 2
    assert "error: " in early.stderr
    assert "needs about 2.0 MB" in early.stderr  # the tokens of a shard are there twice until it is finished
    assert early.stdout == ""  # ls finds nothing on the disk

    # One token per byte is four times what is foreseen for a tokenizer of unknown compression: the disk fills halfway.
    (tmp_path / "byte.txt").write_text("".join(random.Random(0).choices("abcdefgh\n", k=2000)))
    make(tmp_path / "byte.txt", tmp_path / "tokens")
    late = run(*arguments, "--tokenizer", tmp_path / "tokens/tokenizer", prefix=on_a_small_disk(disk, 1000))
    assert late.returncode == 2
    assert "error: " in late.stderr
    assert "no space left on the device; nothing was kept" in late.stderr
    assert "Traceback" not in late.stderr
    assert late.stdout == ""


@pytest.mark.parametrize("tokenizer", ["train-bpe:300", "train-unigram:400"])
def test_a_disk_without_room_for_the_tokenizer_is_one_error_as_well(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "text.txt").write_text("some text of a few words\n" * 400)
    arguments = ("--source", tmp_path / "text.txt", "--output", tmp_path / "disk" / "c", "--tokenizer", tokenizer)
    done = run(*arguments, prefix=on_a_small_disk(tmp_path / "disk", 8))
    assert done.returncode == 2, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [done.stderr.splitlines()[-1]]
    assert "no space left on the device; nothing was kept" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_a_corpus_that_a_full_disk_keeps_from_being_replaced_is_untouched(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "old.txt").write_text("some text\n" * 5000)
    (tmp_path / "new.txt").write_text("another text\n" * 50_000)
    make(tmp_path / "old.txt", tmp_path / "c")
    arguments = ("--source", tmp_path / "new.txt", "--output", tmp_path / "disk" / "c", "--tokenizer", "byte")
    prefix = on_a_small_disk(tmp_path / "disk", 600, holding=tmp_path / "c")
    done = run(*arguments, "--overwrite", prefix=prefix)
    assert done.returncode == 2, done.stderr
    assert "error: " in done.stderr
    expected = {name: hashlib.sha256(content).hexdigest() for name, content in files(tmp_path / "c").items()}
    listing, *sums = done.stdout.splitlines()
    assert listing == "c", "nothing else is left on the disk"
    assert {line.split("  ./c/")[1]: line.split("  ./c/")[0] for line in sums} == expected
