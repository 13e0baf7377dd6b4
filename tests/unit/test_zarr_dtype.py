"""The Zarr data type bfloat16: bits, fill values, registration."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from zarr.core.dtype import data_type_registry

from hsformat.zarr_dtype import BFloat16

BF16 = np.dtype(ml_dtypes.bfloat16)
ALL_BITS = np.arange(65536, dtype=np.uint16)


@pytest.mark.parametrize("endian", ["little", "big"])
def test_all_patterns_round_trip(tmp_path: Path, endian: str) -> None:  # pytorch#110285
    array = zarr.create_array(
        store=str(tmp_path / "a"), shape=(65536,), dtype=BFloat16(), chunks=(4096,), compressors=None,
        serializer=zarr.codecs.BytesCodec(endian=endian), fill_value=0, config={"write_empty_chunks": True},
    )  # fmt: skip
    array[:] = ALL_BITS.view(BF16)
    read = zarr.open_array(str(tmp_path / "a"), mode="r")
    assert read.dtype == BF16
    np.testing.assert_array_equal(np.asarray(read[:]).view(np.uint16), ALL_BITS)
    raw = (tmp_path / "a/c/0").read_bytes()
    assert raw == ALL_BITS[:4096].astype("<u2" if endian == "little" else ">u2").tobytes()


def test_metadata_names_the_type(tmp_path: Path) -> None:
    zarr.create_array(store=str(tmp_path / "a"), shape=(3,), dtype=BF16, fill_value=float("nan"))
    meta = json.loads((tmp_path / "a/zarr.json").read_text())
    assert (meta["data_type"], meta["fill_value"]) == ("bfloat16", "NaN")
    assert {"name": "bytes", "configuration": {"endian": "little"}} in meta["codecs"]
    assert np.isnan(np.asarray(zarr.open_array(str(tmp_path / "a"))[:]).astype(np.float32)).all()


@pytest.mark.parametrize(
    ("data", "bits"),
    [
        (1.5, 0x3FC0), (0, 0), (-0.0, 0x8000), ("NaN", 0x7FC0), ("Infinity", 0x7F80), ("-Infinity", 0xFF80),
        ("0x7fc0", 0x7FC0), ("0x7fc1", 0x7FC1), ("0xFFC0", 0xFFC0), ("0x3fc0", 0x3FC0),
    ],
)  # fmt: skip
def test_fill_value(data: float | str, bits: int) -> None:
    dtype = BFloat16()
    scalar = dtype.from_json_scalar(data, zarr_format=3)
    assert int(np.array(scalar, BF16).view(np.uint16)) == bits
    again = dtype.from_json_scalar(dtype.to_json_scalar(scalar, zarr_format=3), zarr_format=3)
    assert int(np.array(again, BF16).view(np.uint16)) == bits


@pytest.mark.parametrize("data", ["nan", "0x7fc", "7fc000", "0x7fc00000", "0x+1_2", True, None, [1]])
def test_fill_value_refused(data: object) -> None:
    with pytest.raises(TypeError):
        BFloat16().from_json_scalar(data, zarr_format=3)


def test_registering_twice_is_harmless() -> None:
    data_type_registry.register("bfloat16", BFloat16)
    assert data_type_registry.get("bfloat16") is BFloat16
    assert BFloat16.from_native_dtype(BF16) == BFloat16()


def test_format_2_and_other_types_refused() -> None:
    with pytest.raises(ValueError, match="format 3"):
        BFloat16().to_json(2)
    with pytest.raises(ValueError, match="Expected"):
        BFloat16.from_native_dtype(np.dtype("float16"))
    with pytest.raises(ValueError, match="float16"):
        BFloat16.from_json("float16", zarr_format=3)
    with pytest.raises(TypeError):
        BFloat16().cast_scalar("x")
