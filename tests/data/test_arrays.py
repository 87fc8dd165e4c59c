"""Arrays from files of others: what a header asks for is compared with what there is, before it is taken."""

import io
import zipfile

import numpy as np
import pytest

from deeploop.data import arrays
from deeploop.data.arrays import read_npy, read_npz


def npy(array, **header):
    """The bytes of a .npy file, with parts of its header exchanged."""
    buffer = io.BytesIO()
    told = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape} | header
    np.lib.format.write_array_header_1_0(buffer, told)
    return buffer.getvalue() + array.tobytes()


@pytest.mark.parametrize(
    "array", [np.arange(6).reshape(2, 3), np.array("text"), np.empty((3, 0)), np.array(5)]
)
def test_arrays_come_back(tmp_path, array):
    np.savez_compressed(tmp_path / "a.npz", a=array, f=np.asfortranarray(np.arange(6).reshape(2, 3)))
    found = read_npz(tmp_path / "a.npz")
    assert np.array_equal(found["a"], array)
    assert np.array_equal(found["f"], np.arange(6).reshape(2, 3))
    np.save(tmp_path / "a.npy", array)
    assert np.array_equal(read_npy(tmp_path / "a.npy"), array)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"shape": (10**12,)}, "its size is not that of its header"),
        ({"shape": (5,)}, "its size is not that of its header"),
        ({"shape": (-2, -3)}, "a shape of"),
        ({"descr": "|O"}, "a pickle"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(tmp_path, header, why):
    raw = npy(np.arange(6), **header)
    (tmp_path / "a.npy").write_bytes(raw)
    with pytest.raises(ValueError, match=why):
        read_npy(tmp_path / "a.npy")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", raw)
    with pytest.raises(ValueError, match=why):
        read_npz(tmp_path / "a.npz")


def test_what_is_packed_too_tightly_is_refused(tmp_path, monkeypatch):
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(10**5))
    assert len(read_npz(tmp_path / "a.npz")["a"]) == 10**5
    with pytest.raises(ValueError, match="at most 1,000 are read"):
        read_npz(tmp_path / "a.npz", largest=1000)
    monkeypatch.setattr(arrays, "SMALL", 1000)
    with pytest.raises(ValueError, match=r"800,\d+ bytes when unpacked"):
        read_npz(tmp_path / "a.npz")
