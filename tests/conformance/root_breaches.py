"""Broken contracts, roots and segments as a whole: rules C, X and S."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conformance.breaches import FIELD, Breaches
from conformance.tamper import (
    edit_commit,
    edit_root,
    list_again,
    rewrite_text,
    segment,
)
from factories import digest, tiny_contract, tiny_record

import hsformat as hs

breaks = Breaches()


def contract_with(path: str, value: object) -> Callable[[Path], None]:
    """Return a case that sets, or with ``...`` removes, one member of the stored contract."""

    def case(store: Path) -> None:
        def edit(attribute):
            at = attribute["contract"]
            *front, name = path.split(".")
            for key in front:
                at = at[int(key)] if key.isdigit() else at[key]
            if value is ...:
                del at[name]
            else:
                at[name] = value

        edit_root(store, edit)

    return case


for rule, path, value in [
    ("C-1", "surprise", 1),
    ("C-1", "tokenizer_digest", ...),
    ("C-1", "target.head.softcap", ...),
    ("C-1", "captures.0.extra", 1),
    ("C-2", "spec_version", "9.0"),
    ("C-3", "target.num_layers", 0),
    ("C-3", "target.hidden_size", "8"),
    ("C-3", "target.final_norm.kind", "unknown"),
    ("C-3", "target.head.padded_vocab", 50),
    ("C-4", "captures", []),
    ("C-4", "captures.1.depth", 1),
    ("C-4", "captures.0.dtype", "float8"),
    ("C-5", "captures.3.depth", 5),
    ("C-5", "captures.2.norm", "final"),
    ("C-6", "layout.aux", ["d0", "d1"]),
    ("C-6", "layout.aux", ["d1", "d1"]),
    ("C-6", "layout.aux", []),
    ("C-7", "layout.last", "d3"),
    ("C-8", "positions", "mrope"),
    ("C-9", "codec", "zip"),
    ("C-10", "fields", [FIELD, FIELD]),
    ("C-10", "fields", [{**FIELD, "name": "Weight"}]),
    ("C-10", "fields", [{**FIELD, "shape": [1] * 31}]),
    ("C-12", "tokenizer_digest", "md5:00"),
    ("C-12", "target.basis_digest", digest("A")),
]:
    breaks(rule)(contract_with(path, value))


@breaks("C-11")
def unknown_field_that_must_be_understood(store):
    shutil.rmtree(store)
    hs.create(store, tiny_contract(fields=[FIELD])).close()
    with pytest.raises(hs.StoreError) as e:
        hs.open(store)
    assert len(hs.open(store, understands=["weight"])) == 0
    return e.value.problems


@breaks("X-1")
def edited_contract(store):
    edit_root(store, lambda a: a["contract"]["target"].update(vocab_size=99), digest=False)


@breaks("S-1")
def no_attribute(store):
    (store / "zarr.json").write_text('{"zarr_format": 3, "node_type": "group", "attributes": {}}')


@breaks("S-1")
def json_cut_in_the_middle(store):
    text = (store / "zarr.json").read_text()
    (store / "zarr.json").write_text(text[: len(text) // 2])


@breaks("S-1")
def no_root(store):
    (store / "zarr.json").unlink()


@breaks("S-2")
def two_versions(store):
    edit_root(store, lambda a: a.update(spec_version="1.1"))


@breaks("S-7")
def root_without_digest(store):
    edit_root(store, lambda a: a.pop("contract_digest"), digest=False)


@breaks("S-8")
def group_of_the_segments_cut(store):
    path = store / "segments" / "zarr.json"
    path.write_text(path.read_text()[:9])
    assert len(hs.open(store)) == 4  # a reader does not need it


def as_somebody_else_reads_it(text: str) -> str:
    return text.replace('"zarr_format"', '"zarr_format": 2, "zarr_format"', 1)


def beyond_its_length(text: str) -> str:
    return text + " " * (2**24 + 1 - len(text))


def with_a_number_that_is_none(text: str) -> str:
    return text.replace('"zarr_format"', '"x": NaN, "zarr_format"', 1)


def as_an_older_zarr(text: str) -> str:
    return text.replace('"zarr_format": 3', '"zarr_format": 2', 1)


def as_an_array(text: str) -> str:
    return text.replace('"node_type": "group"', '"node_type": "array"', 1)


def with_a_member_that_zarr_does_not_name(text: str) -> str:
    return text.replace('"zarr_format"', '"chunk_grid": {}, "zarr_format"', 1)


NO_JSON = (as_somebody_else_reads_it, beyond_its_length, with_a_number_that_is_none)
NO_GROUP = (as_an_older_zarr, as_an_array, with_a_member_that_zarr_does_not_name)

for edit in (*NO_GROUP, *NO_JSON):

    @breaks("S-1")
    def root_file(store, edit=edit):
        rewrite_text(store / "zarr.json", edit)

    @breaks("S-8")
    def segments_file(store, edit=edit):
        rewrite_text(store / "segments" / "zarr.json", edit)

    @breaks("G-1")
    def segment_file(store, edit=edit):
        rewrite_text(segment(store) / "zarr.json", edit)


for edit in NO_JSON:

    @breaks("G-7")
    def array_file(store, edit=edit):
        rewrite_text(segment(store) / "hidden" / "d2" / "zarr.json", edit)
        list_again(store, "hidden/d2/zarr.json")


@breaks("S-5")
def uncommitted_segment(store):
    (segment(store) / "zarr.json").unlink()
    assert len(hs.open(store)) == 0


@breaks("S-9")
def replaced_segment(store):
    first = segment(store).name
    with hs.append(store) as writer:
        writer.append(tiny_record(tiny_contract(), id="new"))
    (later,) = (p.parent.name for p in store.glob("segments/*-0/zarr.json") if p.parent.name != first)
    edit_commit(store, lambda c: c.update(replaces=[later]))
    assert hs.open(store).ids == ["r0", "r1", "r2", "r3"]
    (store / "segments" / later / "zarr.json").write_text("damaged")
    assert hs.open(store).ids == ["r0", "r1", "r2", "r3"]
    with hs.append(store) as writer:
        assert "new" not in writer.ids
